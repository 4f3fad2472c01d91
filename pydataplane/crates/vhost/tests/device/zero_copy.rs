//! From the guest's buffers to the bdev without a copy: what a bdev is given are the guest's own
//! pages, mapped. From there to the kernel the file bdev has tests of its own.

use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};

use bdev::{
    Bdev, Channel, Completion, Features, Geometry, Io, Malloc, MallocOptions, Op, OpenError, Submit,
};
use reactor::IoContext;
use rustix::fs::fstat;
use uuid::Uuid;

use crate::guest::*;
use crate::host::*;

/// Runs of memory as a bdev was given them: address and bytes.
type Seen = Arc<Mutex<Vec<(Op, Vec<(usize, usize)>)>>>;

/// A disk in memory that notes where the data of each I/O lies.
struct Witness {
    disk: Arc<Malloc>,
    seen: Seen,
}

impl Bdev for Witness {
    fn name(&self) -> &str {
        self.disk.name()
    }
    fn aliases(&self) -> Vec<String> {
        self.disk.aliases()
    }
    fn uuid(&self) -> Uuid {
        self.disk.uuid()
    }
    fn product_name(&self) -> &'static str {
        "Witness"
    }
    fn geometry(&self) -> Geometry {
        self.disk.geometry()
    }
    fn features(&self) -> Features {
        self.disk.features()
    }
    fn open(&self, io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        Ok(Box::new(WitnessChannel(self.disk.open(io)?, Arc::clone(&self.seen))))
    }
    fn driver_specific(&self) -> serde_json::Value {
        self.disk.driver_specific()
    }
}

struct WitnessChannel(Box<dyn Channel>, Seen);

impl Channel for WitnessChannel {
    fn submit(&mut self, io: &Io) -> Submit {
        let runs = io.sg.as_slice().iter().map(|run| (run.base() as usize, run.len()));
        self.1.lock().unwrap().push((io.op, runs.collect()));
        self.0.submit(io)
    }
    fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        self.0.poll(done)
    }
}

/// Which byte of the file `fd` is mapped at `addr` (proc_pid_maps(5)), if any is.
fn byte_of(fd: impl AsFd, addr: usize) -> Option<u64> {
    let inode = fstat(fd).unwrap().st_ino.to_string();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let hex = |text: &str| u64::from_str_radix(text, 16).unwrap();
        let (start, end) = fields[0].split_once('-')?;
        let (start, end) = (hex(start), hex(end));
        let addr = addr as u64;
        ((start..end).contains(&addr) && fields[4] == inode).then(|| hex(fields[2]) + addr - start)
    })
}

#[test]
fn a_bdev_is_given_the_pages_of_the_guest() {
    let host = Host::new(1);
    let options = MallocOptions {
        name: "disk".into(),
        block_size: 512,
        physical_block_size: 0,
        num_blocks: 8192,
        uuid: None,
    };
    let seen = Seen::default();
    let disk = Malloc::create(options).unwrap();
    host.registry.register(Arc::new(Witness { disk, seen: Arc::clone(&seen) })).unwrap();
    host.add(0, "disk");
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    seen.lock().unwrap().clear();

    let data: Vec<u8> = (0..8192u32).map(|i| (i * 7 % 251) as u8).collect();
    assert_eq!(guest.write_blocks(0, 5, &data).status, 0);
    let request = guest.submit(2, flat(0), 1, &rw10(0x28, 5, 16), &[], 8192);
    assert_eq!(guest.finish(&request).data, data);

    let seen = std::mem::take(&mut *seen.lock().unwrap());
    let memory = &guest.regions[0].1;
    let of_guest = |addr: usize| byte_of(memory, addr).expect("the guest's memory");
    let [(Op::Write, written), (Op::Read, read)] = &seen[..] else { panic!("{seen:?}") };
    // Guest address 0 is byte 0 of the file.
    let [(addr, 8192)] = written[..] else { panic!("{written:?}") };
    assert_eq!(guest.read(of_guest(addr), 8192), data);
    let [(addr, 8192)] = read[..] else { panic!("{read:?}") };
    assert_eq!(of_guest(addr), request.data);
}
