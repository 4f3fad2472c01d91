//! What comes from the kernel's ublk driver to a device: any requests in its table, of a device of any
//! limits, over a bdev of any size and abilities.

use bdev::{Bdev, Features, Geometry, Malloc, MallocOptions, Op};
use export::of_disk;
use rustix::io::Errno;
use std::sync::{Arc, OnceLock};
use ublk::Limits;
use ublk::abi::IoDesc;

use crate::input::Input;

/// Where a tag's buffer is.
const ADDR: u64 = 0x7000_0000_0000;

/// Abilities of a real bdev, which the input takes some of away.
fn features() -> Features {
    static DISK: OnceLock<Arc<Malloc>> = OnceLock::new();
    let disk = DISK.get_or_init(|| {
        let (name, uuid) = ("disk".to_owned(), None);
        let options =
            MallocOptions { name, block_size: 512, physical_block_size: 0, num_blocks: 8, uuid };
        Malloc::create(options).expect("a bdev")
    });
    disk.features()
}

/// Requests of one device. Each is refused, or is whole blocks of the bdev, of one that it can do; its data
/// has room in the tag's buffer; what refuses changes is not changed.
pub fn disks(data: &[u8]) {
    let mut input = Input(data);
    let block_size: u32 = 512 << (input.u8() % 4);
    let max_io_bytes = (1 + u32::from(input.u8())) * block_size.max(4096);
    let limits = Limits { depth: 64, max_io_bytes, block_size };
    let num_blocks = input.u64() >> (input.u8() % 64);
    let abilities = input.u8();
    let features =
        Features { unmap: abilities & 1 != 0, write_zeroes: abilities & 2 != 0, ..features() };
    let refuses_changes = abilities & 4 != 0;
    // A bdev has its bytes counted in 64 bits.
    let num_blocks = num_blocks.min(u64::MAX / u64::from(block_size));
    let g = Geometry { block_size, physical_block_size: block_size, num_blocks };
    while !input.is_empty() {
        let addr = if input.once_in(8) { input.u64() } else { ADDR };
        let desc = IoDesc {
            op_flags: input.u32(),
            nr_sectors: input.u32(),
            start_sector: input.u64() >> (input.u8() % 64),
            addr,
        };
        let Ok((asked, offset, bytes)) = limits.check(&desc, ADDR) else {
            continue;
        };
        let durable = asked == ublk::Op::Write { durably: true };
        assert_eq!(durable, desc.op_flags & 0xff == 1 && desc.op_flags & 1 << 13 != 0);
        let taken = of_disk(asked, offset, bytes, &g, &features, refuses_changes);
        match taken {
            Ok((Op::Flush, lba, blocks)) => assert_eq!((lba, blocks), (0, 0)),
            Ok((op, lba, blocks)) => {
                assert!(blocks > 0 && lba < num_blocks && blocks <= num_blocks - lba);
                assert_eq!(blocks * u64::from(block_size), u64::from(desc.nr_sectors) * 512);
                assert_eq!(lba * u64::from(block_size), desc.start_sector * 512);
                match op {
                    Op::Read | Op::Write => {
                        assert!(bytes <= u64::from(max_io_bytes) && desc.addr == ADDR);
                    }
                    Op::Unmap => assert!(features.unmap),
                    Op::WriteZeroes => assert!(features.write_zeroes),
                    op => panic!("the driver has no {op:?}"),
                }
                assert!(!refuses_changes || op == Op::Read);
            }
            Err(Errno::ROFS) => assert!(refuses_changes && asked != ublk::Op::Read),
            Err(Errno::NOSPC) => {
                let end = u128::from(offset) + u128::from(bytes);
                assert!(end > u128::from(num_blocks) * u128::from(block_size));
            }
            Err(Errno::OPNOTSUPP) => {
                assert!(matches!(asked, ublk::Op::Discard | ublk::Op::WriteZeroes));
            }
            // What is not whole blocks was refused before.
            Err(e) => panic!("{asked:?} at {offset}: {e}"),
        }
    }
}
