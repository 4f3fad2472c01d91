//! What a guest maps beside its memory table counts with it. Alone in its process, whose addresses all
//! tests would share.

// Miri has no memfd.
#![cfg(not(miri))]

use std::os::fd::{AsFd, OwnedFd};

use guestmem::{GuestMemory, LogError, MapError, RegionSpec};

/// What the first guest may have of 97 TiB.
const MOST: u64 = (97 << 40) / 6 / PAGE * PAGE;
const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;
const LOG: u64 = 1 << 30;

fn file(bytes: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, bytes).unwrap();
    fd
}

fn region(guest_addr: u64, size: u64) -> (RegionSpec, OwnedFd) {
    let spec = RegionSpec { guest_addr, size, user_addr: guest_addr, mmap_offset: 0 };
    (spec, file(size))
}

#[test]
fn what_is_beside_the_table_counts_with_it_as_long_as_it_is_there() {
    // As much as a table may be; what the pool has beyond is for this.
    let (spec, fd) = region(0, guestmem::MAX_BYTES);
    let table = GuestMemory::map(vec![(spec, fd)]).expect("the first may have it");
    let log = file(LOG);
    let make_log = |memory: &GuestMemory| memory.make_log(log.as_fd(), 0, LOG);
    let mut left = MOST - guestmem::MAX_BYTES;
    let mut all = Vec::new();
    let (spec, fd) = region(0, left - LOG - MIB);
    all.push(table.beside(spec, fd).expect("there is room"));
    left = LOG + MIB;
    let one = make_log(&table).expect("and for a log");
    left -= LOG;
    assert!(matches!(make_log(&table), Err(LogError::Map(_))), "{left} bytes are left");
    let (spec, fd) = region(0, 2 * MIB);
    assert!(matches!(table.beside(spec, fd), Err(MapError::TooLarge(0))));
    drop(one);
    make_log(&table).expect("what is gone does not count");

    // Whatever came first: a table counts what is beside it.
    drop((table, all));
    let guest = GuestMemory::empty();
    let (spec, fd) = region(0, MOST - guestmem::MAX_BYTES + PAGE);
    let beside = guest.beside(spec, fd).expect("there is room");
    let whole = || vec![region(0, guestmem::MAX_BYTES)];
    assert!(matches!(guest.replaced(whole()), Err(MapError::TooLarge(0))));
    drop(beside);
    guest.replaced(whole()).expect("what is gone does not count");
}
