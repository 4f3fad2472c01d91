//! What a device may hold where checksums should be: any superblock, maps and checksums, sealed.

use bdev::{AlignedBuf, Bdev, IoError, Malloc, MallocOptions, Registry, SyncChannel};
use integrity::{Integrity, format, probe};
use std::sync::{Arc, OnceLock};

use crate::input::Input;

const PAGE: usize = 4096;
/// Pages of the device: a head, and some data.
const PAGES: u64 = 256 + 40;
/// Pages with metadata: superblock, map, the other superblock, checksums of the first region.
const METADATA: [u64; 4] = [0, 1, 8, 16];

fn device() -> Arc<Malloc> {
    let (name, uuid) = ("base".to_owned(), None);
    let options =
        MallocOptions { name, block_size: 4096, physical_block_size: 0, num_blocks: PAGES, uuid };
    Malloc::create(options).expect("a bdev")
}

/// One with some blocks that have checksums, as it lies on its base.
fn sample() -> &'static [u8] {
    static SAMPLE: OnceLock<Vec<u8>> = OnceLock::new();
    SAMPLE.get_or_init(|| {
        let (registry, base) = (Registry::new(), device());
        registry.register(base.clone()).expect("it is new");
        let disk = Integrity::create(&registry, "sums", "base").expect("checksums");
        let mut channel = SyncChannel::open(&*disk).expect("a channel");
        let mut data = AlignedBuf::zeroed(8 * PAGE);
        data.fill(7);
        channel.write(3, &data).expect("it is written");
        drop(channel);
        disk.close();
        drop(disk);
        let mut image = AlignedBuf::zeroed(PAGES as usize * PAGE);
        SyncChannel::open(&*base).map(|mut c| c.read(0, &mut image)).expect("open").expect("read");
        image.to_vec()
    })
}

/// Makes the checksum of a page match.
fn seal(page: &mut [u8]) {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    [&page[..8], &[0; 4], &page[12..]].iter().for_each(|part| digest.update(part));
    let sum = (digest.finalize() as u32).to_le_bytes();
    page[8..12].copy_from_slice(&sum);
}

/// Changes to the metadata, of which most are sealed, and what is then read and written. No input may make it
/// panic, hang, or return data that the base does not have; what is written is read back.
pub fn checksums(data: &[u8]) {
    let mut input = Input(data);
    let mut image = sample().to_vec();
    for _ in 0..input.u8() % 12 {
        let page = METADATA[usize::from(input.u8()) % METADATA.len()] as usize;
        let at = match input.once_in(3) {
            true => usize::from(input.below(4088)),
            // Where fields, marks and the first entries are.
            false => usize::from(input.u8()),
        };
        let width = [1, 2, 4, 8][usize::from(input.u8() % 4)];
        let value = if input.once_in(2) { input.u64() } else { u64::from(input.u8()) };
        let bytes = &mut image[page * PAGE..][..PAGE];
        bytes[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
        if !input.once_in(4) {
            seal(bytes);
        }
    }
    for page in METADATA {
        let bytes = &image[page as usize * PAGE..][..PAGE];
        _ = format::Superblock::decode(bytes).map(|found| {
            assert_eq!(format::Superblock::decode(&found.encode()), Ok(found));
        });
        _ = format::decode_map(bytes, input.u64(), 0);
        _ = format::decode_sums(bytes, 0, 0);
    }
    let (registry, base) = (Registry::new(), device());
    registry.register(base.clone()).expect("it is new");
    let mut below = SyncChannel::open(&*base).expect("a channel");
    let mut all = AlignedBuf::zeroed(image.len());
    all.copy_from_slice(&image);
    below.write(0, &all).expect("it is written");
    _ = probe(&*base);
    let Ok(Some(disk)) = Integrity::load(&registry, "base") else { return };
    let blocks = disk.geometry().num_blocks;
    assert!(blocks <= PAGES - 256);
    let mut channel = SyncChannel::open(&*disk).expect("a channel");
    while !input.is_empty() {
        let (what, lba) = (input.u8(), u64::from(input.u8()));
        let count = u64::from(input.u8() % 8) + 1;
        let mut buf = AlignedBuf::zeroed(count as usize * PAGE);
        let fits = lba + count <= blocks;
        if what & 1 == 0 {
            let read = channel.read(lba, &mut buf);
            let mut raw = AlignedBuf::zeroed(buf.len());
            match read {
                Ok(()) => {
                    below.read(256 + lba, &mut raw).expect("it is there");
                    assert!(buf[..] == raw[..], "other data than the base has");
                }
                Err(e) if fits => assert_eq!(e.cause, IoError::ReadMedium),
                Err(e) => assert_eq!(e.cause, IoError::OutOfRange),
            }
        } else {
            buf.fill(what);
            assert_eq!(channel.write(lba, &buf).is_ok(), fits);
            if fits {
                let mut back = AlignedBuf::zeroed(buf.len());
                channel.read(lba, &mut back).expect("it was written just now");
                assert!(back[..] == buf[..]);
            }
        }
    }
    drop(channel);
    disk.close();
}
