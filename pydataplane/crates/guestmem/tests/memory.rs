//! Memory tables, ranges, the dirty log and the SIGBUS guard, through the public face alone.

// Miri has no memfd.
#![cfg(not(miri))]

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use guestmem::{
    BadAccess, DirtyLog, GuestMemory, IoVec, LogError, MAX_REGIONS, MapError, RegionSpec, faults,
};
use proptest::prelude::*;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

const PAGE: u64 = 4096;

fn file(size: u64) -> OwnedFd {
    let fd = memfd_create("test", MemfdFlags::CLOEXEC).expect("memfd");
    ftruncate(&fd, size).expect("ftruncate");
    fd
}

fn spec(guest_addr: u64, size: u64) -> RegionSpec {
    RegionSpec { guest_addr, size, user_addr: 0x7f00_0000_0000 + guest_addr, mmap_offset: 0 }
}

fn map(areas: &[(u64, u64)]) -> Result<GuestMemory, MapError> {
    GuestMemory::map(areas.iter().map(|(at, n)| (spec(*at, *n), file(*n))).collect())
}

#[test]
fn a_table_that_makes_no_sense_is_refused() {
    assert!(matches!(map(&[(0, PAGE), (0x2000, 0)]), Err(MapError::Empty(0x2000))));
    assert!(matches!(
        map(&[(0x1800, PAGE), (0x1000, PAGE)]),
        Err(MapError::Overlap(0x1000, 0x1800))
    ));
    assert!(matches!(map(&[(PAGE, PAGE), (PAGE, PAGE)]), Err(MapError::Overlap(..))));
    let high = RegionSpec { guest_addr: u64::MAX - 10, ..spec(0, PAGE) };
    assert!(matches!(GuestMemory::map(vec![(high, file(PAGE))]), Err(MapError::Overflow(_))));
    let wrap = RegionSpec { mmap_offset: u64::MAX - 10, ..spec(0, PAGE) };
    assert!(matches!(GuestMemory::map(vec![(wrap, file(PAGE))]), Err(MapError::Overflow(_))));
    let short = RegionSpec { mmap_offset: 1, ..spec(0, PAGE) };
    assert!(matches!(
        GuestMemory::map(vec![(short, file(PAGE))]),
        Err(MapError::BeyondFile { at: 0, file: PAGE })
    ));
    let (reader, _writer) = std::io::pipe().expect("pipe");
    assert!(matches!(
        GuestMemory::map(vec![(spec(0, PAGE), reader.into())]),
        Err(MapError::FileSystem { at: 0, .. })
    ));
}

#[test]
fn as_many_regions_as_kvm_has_slots_and_not_one_more() {
    let areas: Vec<_> = (0..MAX_REGIONS as u64).map(|i| (i * 2 * PAGE, PAGE)).collect();
    let memory = map(&areas).expect("509 regions");
    assert_eq!(memory.regions().len(), MAX_REGIONS);
    for (at, _) in &areas {
        assert!(memory.range(*at, PAGE).is_some());
        assert!(memory.range(at + PAGE, 1).is_none());
    }
    let next = spec(MAX_REGIONS as u64 * 2 * PAGE, PAGE);
    assert!(matches!(memory.with_region(next, &file(PAGE)), Err(MapError::TooMany(510))));
    let mut more = areas;
    more.push((next.guest_addr, PAGE));
    assert!(matches!(map(&more), Err(MapError::TooMany(510))));
}

#[test]
fn ranges_end_with_their_region() {
    let memory = map(&[(0x10000, 2 * PAGE), (0x100000, PAGE)]).expect("map");
    assert_eq!(memory.range(0x10000, 2 * PAGE).expect("all").len(), 8192);
    assert!(memory.range(0x10000, 2 * PAGE + 1).is_none());
    assert!(memory.range(0xffff, 1).is_none());
    assert!(memory.range(0x12000, 0).is_none());
    assert!(memory.range(0x11fff, 1).is_some());
    assert!(memory.range(0x11fff, u64::MAX).is_none());
    assert!(memory.range(u64::MAX, 1).is_none());
    assert!(GuestMemory::empty().range(0, 0).is_none());
    assert!(memory.range_uva(0x7f00_0010_0000, PAGE).is_some());
    assert!(memory.range_uva(0x7f00_0010_0000, PAGE + 1).is_none());
    assert!(memory.range_uva(0x100000, 1).is_none());
    assert_eq!(memory.uva_to_gpa(0x7f00_0010_0fff), Some(0x100fff));
}

#[test]
fn data_splits_where_regions_meet_and_fails_at_a_hole() {
    let memory = map(&[(0, PAGE), (PAGE, PAGE), (2 * PAGE, PAGE), (4 * PAGE, PAGE)]).expect("map");
    let lens = |mut gpa, mut len| {
        let mut lens = Vec::new();
        while len > 0 {
            let run = memory.run(gpa, len)?.len();
            lens.push(run);
            (gpa, len) = (gpa + run as u64, len - run as u64);
        }
        Some(lens)
    };
    assert_eq!(lens(100, 50), Some(vec![50]));
    assert_eq!(lens(4000, 4500), Some(vec![96, 4096, 308]));
    assert_eq!(lens(2 * PAGE, PAGE + 1), None);
    assert_eq!(lens(3 * PAGE, 1), None);
    assert_eq!(lens(0, u64::MAX), None);
    assert_eq!(memory.run(2 * PAGE, u64::MAX).map(|run| run.len()), Some(4096));
    assert_eq!(memory.run(5 * PAGE - 1, 0).map(|run| run.len()), Some(0));
    assert!(memory.run(5 * PAGE, 0).is_none());
}

#[test]
fn a_region_added_or_removed_makes_a_new_memory_on_the_same_bytes() {
    let first = map(&[(0, PAGE)]).expect("map");
    first.range(0, 8).expect("range").put(0, 0x1122_3344_5566_7788u64).expect("put");
    let both = first.with_region(spec(PAGE, PAGE), &file(PAGE)).expect("add");
    assert!(first.range(PAGE, 1).is_none());
    assert_eq!(both.range(0, 8).expect("kept").get::<u64>(0), Ok(0x1122_3344_5566_7788));
    assert!(matches!(both.with_region(spec(0x800, PAGE), &file(PAGE)), Err(MapError::Overlap(..))));
    let moved = RegionSpec { mmap_offset: 99, ..spec(0, PAGE) };
    let second = both.without_region(moved).expect("the file offset does not count");
    drop((first, both));
    assert!(second.range(0, 1).is_none());
    assert!(second.range(PAGE, PAGE).is_some());
    assert!(matches!(second.without_region(moved), Err(MapError::NoSuchRegion(0))));
}

#[test]
fn a_region_may_start_anywhere_in_its_file() {
    let fd = file(3 * PAGE);
    rustix::io::pwrite(&fd, b"here", PAGE + 16).expect("pwrite");
    let at = RegionSpec { mmap_offset: PAGE + 16, ..spec(0, PAGE) };
    let memory = GuestMemory::map(vec![(at, fd)]).expect("map");
    let mut bytes = [0; 4];
    memory.range(0, 4).expect("range").read_slice(0, &mut bytes).expect("read");
    assert_eq!(&bytes, b"here");
}

#[test]
fn every_access_to_a_range_is_checked() {
    let memory = map(&[(0, PAGE)]).expect("map");
    let range = memory.range(100, 10).expect("range");
    assert_eq!(range.put(2, 0xa1b2_c3d4_e5f6_0718u64), Ok(()));
    assert_eq!(range.get::<u64>(2), Ok(0xa1b2_c3d4_e5f6_0718));
    assert_eq!(range.get::<u64>(3), Err(BadAccess));
    assert_eq!(range.put(3, 0u64), Err(BadAccess));
    assert_eq!(range.get::<u8>(usize::MAX), Err(BadAccess));
    assert_eq!(range.get::<[u8; 11]>(0), Err(BadAccess));
    // Address 101 is odd: the integers are copied by bytes, the atomics refuse.
    assert_eq!(range.put(1, 0x1234u16), Ok(()));
    assert_eq!(range.get::<u16>(1), Ok(0x1234));
    assert_eq!(range.load_acquire_u16(1), Err(BadAccess));
    assert_eq!(range.store_release_u16(8, 7), Ok(()));
    assert_eq!(range.load_acquire_u16(8), Ok(7));
    assert_eq!(range.load_acquire_u16(10), Err(BadAccess));
    assert_eq!(range.write_slice(9, &[1, 2]), Err(BadAccess));
    assert_eq!(range.read_slice(0, &mut [0; 11]), Err(BadAccess));
    assert!(range.slice(4, 6).is_some_and(|r| r.len() == 6));
    assert!(range.slice(4, 7).is_none());
    range.fill(9);
    assert_eq!(
        memory.range(99, 12).expect("range").get::<[u8; 12]>(0).map(|b| (b[0], b[11])),
        Ok((0, 0))
    );
}

#[test]
fn the_log_has_a_bit_for_each_page_that_was_written() {
    let fd = file(PAGE);
    let log = Arc::new(DirtyLog::new(fd.as_fd(), 8, 2).expect("log"));
    assert_eq!(log.covers(), 16 * PAGE);
    let memory =
        map(&[(0, 2 * PAGE), (0x8000, 2 * PAGE)]).expect("map").with_log(Some(log.clone()));
    let dirty = || (0..20).filter(|p| log.is_marked(p * PAGE)).collect::<Vec<_>>();
    memory.mark_dirty(0, 0);
    assert_eq!(dirty(), Vec::<u64>::new());
    memory.mark_dirty(PAGE - 1, 1);
    assert_eq!(dirty(), [0]);
    let range = memory.range(0x8f00, 0x200).expect("range");
    // SAFETY: used while `memory` lives.
    let run: IoVec = unsafe { range.to_iovec() };
    memory.mark_dirty_host(&run, 0xff, 1);
    assert_eq!(dirty(), [0, 8]);
    memory.mark_dirty_host(&run, 0xff, 2);
    assert_eq!(dirty(), [0, 8, 9]);
    memory.mark_dirty(15 * PAGE, 10 * PAGE);
    memory.mark_dirty(u64::MAX, u64::MAX);
    assert_eq!(dirty(), [0, 8, 9, 15]);
    let mut bytes = [0xff; 12];
    rustix::io::pread(&fd, &mut bytes, 0).expect("pread");
    assert_eq!(bytes, [0, 0, 0, 0, 0, 0, 0, 0, 1, 0b1000_0011, 0, 0]);
    memory.with_log(None).mark_dirty(0x5000, 1);
    assert!(!log.is_marked(0x5000));
}

#[test]
fn a_log_beyond_its_file_is_refused() {
    let fd = file(PAGE);
    assert!(matches!(DirtyLog::new(fd.as_fd(), 0, 0), Err(LogError::Size(0))));
    assert!(matches!(DirtyLog::new(fd.as_fd(), 0, 1 << 40), Err(LogError::Size(_))));
    assert!(matches!(DirtyLog::new(fd.as_fd(), 1, PAGE), Err(LogError::BeyondFile { .. })));
    assert!(matches!(DirtyLog::new(fd.as_fd(), u64::MAX, 8), Err(LogError::Size(8))));
}

#[test]
fn a_peer_that_truncates_its_memory_harms_only_itself() {
    let (fd, other) = (file(4 * PAGE), map(&[(0, PAGE)]).expect("map"));
    let again = fd.try_clone().expect("dup");
    let memory = GuestMemory::map(vec![(spec(0, 4 * PAGE), fd)]).expect("map");
    let range = memory.range(0, 4 * PAGE).expect("range");
    range.fill(0xaa);
    ftruncate(&again, PAGE).expect("ftruncate");
    let before = faults();
    assert_eq!(range.get::<u32>(0), Ok(0xaaaa_aaaa));
    assert!(!memory.is_broken());
    assert_eq!(range.get::<u32>(2 * PAGE as usize), Ok(0));
    assert_eq!(range.put(3 * PAGE as usize, 7u32), Ok(()));
    assert!(memory.is_broken());
    assert!(memory.with_log(None).is_broken());
    assert_eq!(faults() - before, 1, "the whole of it is replaced at once");
    assert!(!other.is_broken());
}

#[test]
fn a_peer_that_takes_away_every_page_leaves_the_process_its_mappings() {
    // More pages than a process may have mappings (vm.max_map_count, 65530 by default).
    const PAGES: u64 = 160_000;
    let fd = file(PAGES * PAGE);
    let again = fd.try_clone().expect("dup");
    let memory = GuestMemory::map(vec![(spec(0, PAGES * PAGE), fd)]).expect("map");
    ftruncate(&again, 0).expect("ftruncate");
    for page in (0..PAGES).step_by(2) {
        assert_eq!(memory.range(page * PAGE, 4).expect("range").get::<u32>(0), Ok(0));
    }
    assert!(memory.is_broken());
    map(&[(0, PAGE)]).expect("another guest's memory");
}

#[test]
fn a_guest_gets_no_more_addresses_than_a_process_has() {
    const TIB: u64 = 1 << 40;
    let huge = |at: u64, size: u64| map(&[(at, size)]);
    assert!(matches!(huge(0, 17 * TIB), Err(MapError::TooLarge(0))));
    assert!(matches!(
        map(&[(0, 9 * TIB), (10 * TIB, 9 * TIB)]),
        Err(MapError::TooLarge(at)) if at == 10 * TIB
    ));
    let memory = huge(0, 9 * TIB).expect("9 TiB");
    let more = spec(10 * TIB, 9 * TIB);
    assert!(matches!(memory.with_region(more, &file(9 * TIB)), Err(MapError::TooLarge(_))));
    drop(memory);
    // Guests that take as much as they get, one after the other: one that is not as large as the host
    // finds room all the time.
    let mut all = Vec::new();
    for guest in 0..30 {
        let (mut memory, mut at, mut size) = (GuestMemory::empty(), 0, 16 * TIB);
        while size >= 1 << 30 {
            match memory.with_region(spec(at, size), &file(size)) {
                Ok(more) => (memory, at) = (more, at + size),
                Err(MapError::TooLarge(_)) => size /= 2,
                Err(why) => panic!("guest {guest}: {why}"),
            }
        }
        assert!(at >= 64 << 30, "guest {guest} has {at} bytes");
        all.push(memory);
        huge(0, 64 << 30).unwrap_or_else(|why| panic!("after guest {guest}: {why}"));
    }
    assert!(huge(0, 15 * TIB).is_err());
    // What they give back is there for others.
    drop(all);
    huge(0, 15 * TIB).expect("given back");
}

#[test]
fn files_whose_owner_decides_when_a_page_arrives_are_refused() {
    // procfs stands for them: FUSE would need a mount.
    let fd = OwnedFd::from(std::fs::File::open("/proc/self/maps").expect("procfs"));
    let refused = GuestMemory::map(vec![(spec(0, PAGE), fd)]);
    assert!(matches!(refused, Err(MapError::FileSystem { at: 0, kind: 0x9fa0 })));
}

#[test]
fn only_regular_files_that_are_in_memory_are_taken() {
    // A disk's, if the build is on one; and it has room for the page, unlike procfs's.
    let disk = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).expect("a file");
    disk.set_len(PAGE).expect("a page");
    let kind = rustix::fs::fstatfs(&disk).expect("fstatfs").f_type;
    let refused = GuestMemory::map(vec![(spec(0, PAGE), disk.into())]);
    match kind {
        0x01021994 => assert!(refused.is_ok()),
        _ => {
            let why = refused.expect_err("a file of a disk").to_string();
            assert!(why.contains(&format!("{kind:#x}")) && why.contains("memfd"), "{why}");
        }
    }
    // tmpfs by its type, and a device.
    let device = std::fs::File::options().read(true).write(true).open("/dev/zero").expect("open");
    if rustix::fs::fstatfs(&device).expect("fstatfs").f_type == 0x01021994 {
        let refused = GuestMemory::map(vec![(spec(0, PAGE), device.into())]);
        assert!(matches!(refused, Err(MapError::NotAFile(0))), "{refused:?}");
    }
    let shared = tempfile::tempfile_in("/dev/shm").expect("a file");
    shared.set_len(PAGE).expect("a page");
    GuestMemory::map(vec![(spec(0, PAGE), shared.into())]).expect("in memory");
}

#[test]
fn a_bus_error_elsewhere_still_ends_the_process() {
    let _guarded = map(&[(0, PAGE)]).expect("map");
    let fd = file(PAGE);
    // SAFETY: a mapping of our own that stays.
    let page = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            PAGE as usize,
            rustix::mm::ProtFlags::READ,
            rustix::mm::MapFlags::SHARED,
            &fd,
            0,
        )
    }
    .expect("mmap");
    ftruncate(&fd, 0).expect("ftruncate");
    // SAFETY: the child does one load and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: no core file; the load raises SIGBUS, which is what is tested.
        unsafe {
            libc::setrlimit(libc::RLIMIT_CORE, &libc::rlimit { rlim_cur: 0, rlim_max: 0 });
            page.cast::<u8>().read_volatile();
            libc::_exit(0);
        }
    }
    let mut status = 0;
    // SAFETY: a child of this process.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGBUS, "{status:#x}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Lookup agrees with a plain search over the areas, for few and for many regions.
    #[test]
    fn lookup_is_what_the_table_says(
        gaps in prop::collection::vec((0u64..3, 1u64..4), 1..30),
        asks in prop::collection::vec((0u64..100 * 4096, 0u64..3 * 4096), 50),
    ) {
        let mut at = 0;
        let mut areas = Vec::new();
        for (gap, pages) in gaps {
            at += gap * PAGE;
            areas.push((at, pages * PAGE));
            at += pages * PAGE;
        }
        let memory = map(&areas).expect("map");
        for (gpa, len) in asks {
            let inside = areas.iter().any(|(s, n)| *s <= gpa && gpa < s + n && gpa + len <= s + n);
            prop_assert_eq!(memory.range(gpa, len).is_some(), inside);
        }
    }
}
