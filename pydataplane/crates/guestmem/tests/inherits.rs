//! What a guest had in one process it has in the next one. Alone in its process, whose mappings all
//! tests would share.

// Miri has no memfd.
#![cfg(not(miri))]

use std::os::fd::OwnedFd;

use guestmem::{GuestMemory, MapError, RegionSpec};

const MIB: u64 = 1 << 20;

fn file(bytes: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, bytes).unwrap();
    fd
}

#[test]
fn a_guest_goes_on_in_another_process_with_what_it_had_in_whatever_order() {
    let spec = |at| RegionSpec { guest_addr: at, size: MIB, user_addr: at, mmap_offset: 0 };
    let shared = file(MIB);
    let table = |n: u64| -> Vec<_> {
        (0..n).map(|at| (spec(at * MIB), shared.try_clone().unwrap())).collect()
    };
    // Until the pool gives a guest no more than a small part of what it gave the first.
    let mut others = Vec::new();
    let most = guestmem::MAX_REGIONS as u64;
    for _ in 0..64 {
        match GuestMemory::map(table(most)) {
            Ok(memory) => others.push(memory),
            Err(_) => break,
        }
    }
    let guest = GuestMemory::empty();
    assert!(matches!(guest.replaced(table(most)), Err(MapError::TooLarge(_))));
    guest.set_inherits(true);
    let guest = guest.replaced(table(most)).expect("it had them");
    guest.set_inherits(false);
    let (fd, at) = (shared.try_clone().unwrap(), 1 << 40);
    assert!(guest.without_region(spec(0)).unwrap().with_region(spec(at), &fd).is_err());
}
