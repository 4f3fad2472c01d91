use super::*;
use crate::abi::O_DSYNC;
use bdev::testing::{FaultBdev, Holes};
use bdev::{Bdev, Malloc, MallocOptions, Null, Op};
use rustix::fs::{FallocateFlags, OFlags, SeekFrom, fallocate, seek};
use rustix::io::Errno;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};

const BLOCK: usize = 512;

fn malloc(registry: &Registry, name: &str, num_blocks: u64) -> Arc<Malloc> {
    let bdev = Malloc::create(MallocOptions {
        name: name.into(),
        block_size: BLOCK as u32,
        physical_block_size: 0,
        num_blocks,
        uuid: None,
    })
    .unwrap();
    registry.register(bdev.clone()).unwrap();
    bdev
}

/// A disk whose I/O does not end until it is released.
fn holding(registry: &Registry) -> Arc<FaultBdev> {
    let bdev = FaultBdev::new("f0", BLOCK as u32, 64);
    registry.register(bdev.clone()).unwrap();
    bdev.defer(Some(1));
    bdev.hold();
    bdev
}

/// A file, to be read and written.
fn open(path: &Path) -> File {
    File::options().read(true).write(true).open(path).unwrap()
}

/// Waits for something that is about to happen.
fn until(happens: impl Fn() -> bool) {
    let since = Instant::now();
    while !happens() {
        assert!(since.elapsed() < Duration::from_secs(60), "it does not happen");
        thread::yield_now();
    }
}

fn exports() -> (tempfile::TempDir, Registry, Exports) {
    let dir = tempfile::tempdir().unwrap();
    let registry = Registry::new();
    let exports = Exports::new(registry.clone(), &dir.path().join("e"));
    (dir, registry, exports)
}

#[test]
fn a_file_reads_what_was_written_from_many_threads() {
    let (_dir, registry, exports) = exports();
    let bdev = malloc(&registry, "m0", 8192);
    let path = exports.create("m0", false).unwrap();
    assert_eq!(path.file_name().unwrap().to_str().unwrap(), bdev.uuid().to_string());
    assert_eq!(fs::metadata(&path).unwrap().len(), 4 << 20);
    let file = open(&path);
    thread::scope(|s| {
        for t in 0..4u64 {
            let file = &file;
            s.spawn(move || {
                for i in 0..64u64 {
                    let at = (t * 64 + i) * 16384;
                    file.write_all_at(&[(t * 64 + i) as u8; 16384], at).unwrap();
                }
            });
        }
    });
    file.sync_all().unwrap();
    let mut data = vec![0; 4 << 20];
    // In odd lengths, and as one read that is longer than a request may be.
    file.read_exact_at(&mut data[..100_001], 0).unwrap();
    file.read_exact_at(&mut data[100_001..], 100_001).unwrap();
    for (i, chunk) in data.chunks(16384).enumerate() {
        assert!(chunk.iter().all(|b| *b == i as u8), "{i}");
    }
    assert_eq!(file.read_at(&mut data, 4 << 20).unwrap(), 0);
    assert_eq!(file.write_at(&[0; 512], 4 << 20).unwrap_err().kind(), ErrorKind::StorageFull);
    assert_eq!(file.write_at(&[0; 100], 0).unwrap_err().kind(), ErrorKind::InvalidInput);
    drop(file);
    exports.delete("m0", false).unwrap();
    assert_eq!(fs::metadata(&path).unwrap_err().kind(), ErrorKind::NotFound);
    assert!(registry.owners("m0").is_empty());
}

#[test]
fn a_long_write_may_begin_anywhere_in_memory() {
    let (_dir, registry, exports) = exports();
    malloc(&registry, "m0", 8192);
    let path = exports.create("m0", false).unwrap();
    let file = open(&path);
    let memory: Vec<u8> = (0..(3 << 20) + 4096).map(|i| (i % 251) as u8).collect();
    let page = memory.as_ptr().align_offset(4096);
    for (skip, len) in [(0, 1 << 20), (1, 1 << 20), (512, 1 << 20), (4095, 1 << 20), (7, 3 << 20)] {
        let data = &memory[(page + skip) % 4096..][..len];
        assert_eq!(file.write_at(data, 512).unwrap(), len, "from byte {skip} of a page on");
        let mut found = vec![0; len];
        file.read_exact_at(&mut found, 512).unwrap();
        assert!(found == data);
    }
    drop(file);
    exports.delete("m0", false).unwrap();
}

/// A file's parts that are data, as lseek(2) tells them.
fn data_of(file: &File) -> Vec<(u64, u64)> {
    let (mut found, mut at) = (Vec::new(), 0);
    while let Ok(begin) = seek(file, SeekFrom::Data(at)) {
        at = seek(file, SeekFrom::Hole(begin)).unwrap();
        found.push((begin, at));
    }
    assert_eq!(seek(file, SeekFrom::Data(at)).unwrap_err(), Errno::NXIO);
    found
}

#[test]
fn holes_of_a_disk_are_holes_of_its_file() {
    let (_dir, registry, exports) = exports();
    let disk = Malloc::create(MallocOptions {
        name: "m0".into(),
        block_size: 4096,
        physical_block_size: 0,
        num_blocks: 100,
        uuid: None,
    });
    let holes = Holes::new(disk.unwrap(), &[2..5, 7..8, 90..100]);
    registry.register(holes).unwrap();
    let path = exports.create("m0", true).unwrap();
    let file = File::open(&path).unwrap();
    assert_eq!(
        data_of(&file).iter().map(|(begin, end)| (begin / 4096, end / 4096)).collect::<Vec<_>>(),
        [(0, 2), (5, 7), (8, 90)]
    );
    let page = 4096;
    for (wanted, found) in [
        (SeekFrom::Data(page + 7), Ok(page + 7)),
        (SeekFrom::Hole(page + 7), Ok(2 * page)),
        (SeekFrom::Data(2 * page + 7), Ok(5 * page)),
        (SeekFrom::Hole(2 * page + 7), Ok(2 * page + 7)),
        (SeekFrom::Data(95 * page), Err(Errno::NXIO)),
        (SeekFrom::Hole(100 * page - 1), Ok(100 * page - 1)),
        (SeekFrom::Hole(100 * page), Err(Errno::NXIO)),
        (SeekFrom::End(0), Ok(100 * page)),
    ] {
        assert_eq!(seek(&file, wanted), found, "{wanted:?}");
    }
    assert_eq!(fs::metadata(&path).unwrap().blocks(), 86 * 8);
}

#[test]
fn a_disk_that_knows_no_holes_is_data() {
    let (_dir, registry, exports) = exports();
    malloc(&registry, "m0", 64);
    let path = exports.create("m0", true).unwrap();
    let file = File::open(&path).unwrap();
    assert_eq!(data_of(&file), [(0, 64 * 512)]);
    assert_eq!(fs::metadata(&path).unwrap().blocks(), 64);
}

#[test]
fn creating_again_is_the_same_and_the_other_way_is_refused() {
    let (dir, registry, exports) = exports();
    malloc(&registry, "m0", 8);
    let path = exports.create("m0", true).unwrap();
    assert_eq!(exports.create("m0", true).unwrap(), path);
    let e = exports.create("m0", false).unwrap_err();
    assert_eq!(e.to_string(), "bdev m0 is exported read-only already; delete that export first");
    let open = File::options().write(true).open(&path).unwrap_err();
    assert_eq!(open.kind(), ErrorKind::ReadOnlyFilesystem);
    let names: Vec<_> = fs::read_dir(dir.path().join("e")).unwrap().collect();
    assert_eq!(names.len(), 1);
    assert_eq!(exports.list().len(), 1);
    let e = registry.claim("m0", "target 0 of controller vm-1").unwrap_err();
    assert!(e.to_string().contains(&format!("in use by the export {}", path.display())), "{e}");
}

#[test]
fn a_claimed_or_missing_bdev_is_refused_with_the_holder_named() {
    let (_dir, registry, exports) = exports();
    malloc(&registry, "m0", 8);
    let _held = registry.claim("m0", "target 3 of controller vm-1").unwrap();
    let e = exports.create("m0", false).unwrap_err().to_string();
    assert_eq!(e, "bdev m0 is in use by target 3 of controller vm-1: release it there first");
    assert!(exports.create("m1", false).is_err());
    assert!(matches!(exports.delete("m0", false), Err(ExportError::NotExported(_))));
}

#[test]
fn a_parked_export_serves_reads_and_lets_another_have_the_bdev() {
    let (_dir, registry, exports) = exports();
    malloc(&registry, "m0", 64);
    let e = exports.park("m0").unwrap_err();
    assert!(matches!(e, ExportError::NotExported(_)), "{e}");
    let path = exports.create("m0", false).unwrap();
    let file = open(&path);
    file.write_all_at(&[7; BLOCK], 0).unwrap();
    for _ in 0..2 {
        exports.park("m0").unwrap();
        assert!(exports.list()[0].parked);
    }
    let mut data = [0; BLOCK];
    file.read_exact_at(&mut data, 0).unwrap();
    assert_eq!(data, [7; BLOCK]);
    let e = file.write_at(&[8; BLOCK], 0).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::ReadOnlyFilesystem);
    let flags = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
    assert!(fallocate(&file, flags, 0, BLOCK as u64).is_err());
    file.sync_all().unwrap();
    // It is opened on, and creating it again changes nothing.
    open(&path);
    assert_eq!(exports.create("m0", false).unwrap(), path);
    assert!(exports.list()[0].parked);

    let lun = registry.claim("m0", "target 0 of controller vm-1").unwrap();
    let e = exports.unpark("m0").unwrap_err().to_string();
    assert_eq!(e, "bdev m0 is in use by target 0 of controller vm-1: release it there first");
    assert!(file.write_at(&[8; BLOCK], 0).is_err() && exports.list()[0].parked);
    drop(lun);
    for _ in 0..2 {
        exports.unpark("m0").unwrap();
        assert!(!exports.list()[0].parked);
    }
    assert!(registry.claim("m0", "another").is_err());
    file.write_all_at(&[9; BLOCK], 0).unwrap();
    file.read_exact_at(&mut data, 0).unwrap();
    assert_eq!(data, [9; BLOCK]);
}

#[test]
fn parking_waits_for_writes_in_flight_and_gives_up_as_it_was() {
    let (_dir, registry, exports) = exports();
    let bdev = holding(&registry);
    let path = exports.create(bdev.name(), false).unwrap();
    let file = open(&path);
    thread::scope(|s| {
        let write = s.spawn(|| file.write_all_at(&[7; BLOCK], 0));
        until(|| bdev.held() == 1);
        let volume = exports.require(bdev.name()).unwrap();
        let e = volume.park(&registry, Duration::from_millis(1)).unwrap_err();
        assert!(matches!(e, ExportError::Changing { .. }), "{e}");
        assert!(!exports.list()[0].parked);
        let park = s.spawn(|| exports.park(bdev.name()));
        until(|| exports.list()[0].parked);
        // It refuses writes, and still has the bdev.
        assert!(file.write_at(&[8; BLOCK], 0).is_err());
        assert!(registry.claim(bdev.name(), "another").is_err());
        assert!(!park.is_finished() && !write.is_finished());
        bdev.release();
        write.join().unwrap().unwrap();
        park.join().unwrap().unwrap();
    });
    let _lun = registry.claim(bdev.name(), "another").unwrap();
}

#[test]
fn a_parked_export_is_made_of_a_bdev_in_use_and_goes_with_it() {
    let (_dir, registry, exports) = exports();
    malloc(&registry, "m0", 8);
    let lun = registry.claim("m0", "target 0 of controller vm-1").unwrap();
    let path = exports.create_parked("m0", false).unwrap();
    assert_eq!(fs::read(&path).unwrap(), [0; 8 * BLOCK]);
    // The bdev stays until the export's channel is closed.
    assert_eq!(registry.owners("m0").len(), 2);
    drop(lun);
    registry.unregister("m0").unwrap();
    assert!(exports.list().is_empty());
    malloc(&registry, "m1", 8);
    exports.create("m1", false).unwrap();
    exports.create_parked("m1", false).unwrap();
    assert!(exports.list()[0].parked);
    exports.delete("m1", false).unwrap();
    assert!(registry.owners("m1").is_empty());
}

#[test]
fn an_open_file_holds_its_export_unless_forced() {
    let (_dir, registry, exports) = exports();
    malloc(&registry, "m0", 8);
    let path = exports.create("m0", false).unwrap();
    let file = File::open(&path).unwrap();
    let e = exports.delete("m0", false).unwrap_err().to_string();
    assert!(e.contains("is open 1 times"), "{e}");
    exports.delete("m0", true).unwrap();
    assert!(file.read_at(&mut [0; 512], 0).is_err());
    assert!(registry.owners("m0").is_empty());
}

#[test]
fn the_size_follows_and_a_removed_bdev_takes_its_file_along() {
    let (_dir, registry, exports) = exports();
    let bdev = Null::create("n0", 4096, 8, None).unwrap();
    registry.register(bdev.clone()).unwrap();
    let path = exports.create("n0", false).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), 8 * 4096);
    registry.unregister("n0").unwrap();
    assert!(fs::metadata(&path).is_err());
    assert!(exports.list().is_empty());
}

#[test]
fn discards_of_a_whole_disk_are_cut_and_wait_their_turn() {
    let (_dir, registry, exports) = exports();
    // 3.5 GiB, and more of them at a time than the channel takes.
    let bdev = Null::create("n0", 4096, 7 << 17, None).unwrap();
    registry.register(bdev.clone()).unwrap();
    let path = exports.create("n0", false).unwrap();
    let file = File::options().write(true).open(&path).unwrap();
    let flags = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
    thread::scope(|s| {
        for _ in 0..2 * crate::DEPTH {
            s.spawn(|| fallocate(&file, flags, 0, 7 << 29).unwrap());
        }
    });
    let io = bdev.stats().unwrap().snapshot();
    let done = io.op(Op::WriteZeroes);
    assert_eq!((done.ops, done.bytes), (256 * 2, 128 * (7 << 29)));
}

#[test]
fn a_write_that_is_to_be_durable_is_flushed_before_it_is_answered() {
    let (_dir, registry, exports) = exports();
    let bdev = Null::create("n0", 4096, 8, None).unwrap();
    registry.register(bdev.clone()).unwrap();
    let path = exports.create("n0", false).unwrap();
    let flushes = |flags: u32| {
        let before = bdev.stats().unwrap().snapshot().op(Op::Flush).ops;
        let file = File::options().write(true).custom_flags(flags as i32).open(&path);
        file.unwrap().write_all_at(&[1; 4096], 0).unwrap();
        bdev.stats().unwrap().snapshot().op(Op::Flush).ops - before
    };
    assert_eq!(flushes(0), 0);
    assert_eq!(flushes(O_DSYNC), 1);
    assert_eq!(flushes(OFlags::SYNC.bits()), 1);
}

#[test]
fn io_that_does_not_end_keeps_the_bdev_and_nobody_waiting() {
    let (_dir, registry, exports) = exports();
    let bdev = holding(&registry);
    let path = exports.create(bdev.name(), false).unwrap();
    let file = open(&path);
    thread::scope(|s| {
        let write = s.spawn(|| file.write_all_at(&[7; BLOCK], 0));
        until(|| bdev.held() == 1);
        let e = exports.delete_within(bdev.name(), true, Duration::from_millis(5)).unwrap_err();
        assert!(matches!(e, ExportError::StillEnding { .. }), "{e}");
        assert!(exports.list().is_empty());
        assert_eq!(fs::metadata(&path).unwrap_err().kind(), ErrorKind::NotFound);
        // Others are served, and it can be made anew when it is free.
        malloc(&registry, "m0", 8);
        fs::read(exports.create("m0", false).unwrap()).unwrap();
        let e = exports.create(bdev.name(), false).unwrap_err().to_string();
        assert!(e.contains("is in use by the export"), "{e}");
        bdev.release();
        write.join().unwrap().unwrap();
    });
    until(|| exports.create(bdev.name(), false).is_ok());
    // The one that was deleted stays so for whoever has it open.
    assert!(file.read_at(&mut [0; BLOCK], 0).is_err());
    assert_eq!(fs::read(&path).unwrap()[..BLOCK], [7; BLOCK]);
}

#[test]
fn what_was_unmounted_behind_our_back_is_mounted_again() {
    let (dir, registry, exports) = exports();
    malloc(&registry, "m0", 8);
    malloc(&registry, "m1", 8);
    let path = exports.create("m0", false).unwrap();
    let file = open(&path);
    for (key, held) in [("m0", true), ("m1", false), ("m0", false)] {
        for place in fs::read_dir(dir.path().join("e")).unwrap() {
            let place = place.unwrap().path();
            let _ = rustix::mount::unmount(&place, rustix::mount::UnmountFlags::DETACH);
        }
        assert!(!path.exists());
        let made = exports.create(key, false).unwrap();
        File::options().write(true).open(&made).unwrap().write_all_at(&[5; BLOCK], 0).unwrap();
        assert_eq!(fs::read(&made).unwrap()[..BLOCK], [5; BLOCK]);
        if held {
            file.write_all_at(&[4; BLOCK], 0).unwrap();
            assert_eq!(fs::read(&path).unwrap()[..BLOCK], [4; BLOCK]);
        }
    }
    // None of the closes that the kernel did not tell of is left.
    until(|| exports.list()[0].opens == 1 && exports.list()[1].opens == 0);
    drop(file);
    exports.delete("m0", false).unwrap();
}

#[test]
fn the_end_leaves_no_mount_and_two_share_a_folder_but_no_place() {
    let (dir, registry, exports) = exports();
    let bdev = malloc(&registry, "m0", 8);
    let path = exports.create("m0", false).unwrap();
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(table.contains(path.parent().unwrap().to_str().unwrap()));
    let second = Registry::new();
    let others = Exports::new(second.clone(), &dir.path().join("e"));
    second.register(bdev).unwrap();
    let e = others.create("m0", false).unwrap_err().to_string();
    assert!(e.contains("mounted by another living process"), "{e}");
    assert!(second.owners("m0").is_empty());
    malloc(&second, "m1", 8);
    let theirs = others.create("m1", false).unwrap();
    drop(exports);
    assert!(!path.exists() && theirs.exists());
    drop(others);
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!table.contains(dir.path().to_str().unwrap()));
    assert!(registry.owners("m0").is_empty());
    assert_eq!(fs::read_dir(dir.path().join("e")).unwrap().count(), 0);
}
