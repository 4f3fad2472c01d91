//! What a deleted volume had is given back to the bdev, piece by piece.

use bdev::testing::{Wrap, Wrapped};
use bdev::{Io, IoError, Malloc, MallocOptions, Op, Registry, Submit};
use lvol::{ClearMethod, LvolOptions, LvstoreOptions, Lvstores};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

const GIB: u64 = 1 << 30;
const BLOCK: u64 = 512;

/// What a disk notes, and how much room it has.
struct Noted {
    /// First block and blocks of each.
    unmaps: Mutex<Vec<(u64, u64)>>,
    /// Blocks that can be written with zeros before the rest is refused.
    room: AtomicU64,
}

/// Has a disk note its unmaps, and be full.
struct Noting(Arc<Noted>);

impl Wrap for Noting {
    fn instead(&self, io: &Io) -> Option<Submit> {
        if io.op == Op::Unmap {
            self.0.unmaps.lock().unwrap().push((io.lba, io.blocks));
        }
        if io.op == Op::WriteZeroes {
            let room = self.0.room.load(Ordering::Relaxed);
            if io.blocks > room {
                return Some(Submit::Done(Err(IoError::NoSpace)));
            }
            self.0.room.store(room - io.blocks, Ordering::Relaxed);
        }
        None
    }
}

/// An lvstore on a disk in memory of 4 GiB with clusters of 1 MiB.
fn rig() -> (Lvstores, Arc<Noted>) {
    let options = MallocOptions {
        name: "disk0".into(),
        block_size: BLOCK as u32,
        physical_block_size: 0,
        num_blocks: 4 * GIB / BLOCK,
        uuid: None,
    };
    let noted = Arc::new(Noted { unmaps: Mutex::default(), room: AtomicU64::new(u64::MAX) });
    let registry = Registry::new();
    let disk = Malloc::create(options).unwrap();
    registry.register(Wrapped::new(disk, Noting(noted.clone()))).unwrap();
    let lvstores = Lvstores::new(registry);
    let cluster_size = Some(1 << 20);
    let options =
        LvstoreOptions { cluster_size, clear: ClearMethod::None, ..LvstoreOptions::default() };
    lvstores.create_lvstore("disk0", "lvs0", &options).unwrap();
    (lvstores, noted)
}

fn thick(name: &str, size: u64) -> LvolOptions {
    LvolOptions {
        dif_type: None,
        name: name.into(),
        size,
        thin: false,
        uuid: None,
        xattrs: Default::default(),
        key: None,
    }
}

#[test]
fn a_large_volume_is_given_back_in_pieces_between_which_others_are_served() {
    let (lvstores, noted) = rig();
    let size = 3 * GIB + GIB / 2;
    lvstores.create_lvol("lvs0", &thick("large", size)).unwrap();
    let free = || lvstores.lvstore("lvs0").unwrap().free_clusters;
    let before = free();
    lvstores.delete_lvol("lvs0/large").unwrap();
    assert_eq!(free(), before + size / (1 << 20));
    // It needs all that was freed, and waits until the bdev was told of it.
    lvstores.create_lvol("lvs0", &thick("next", size)).unwrap();
    let unmaps = noted.unmaps.lock().unwrap();
    assert!(unmaps.iter().all(|(_, blocks)| blocks * BLOCK <= GIB), "{unmaps:?}");
    assert_eq!(unmaps.iter().map(|(_, blocks)| blocks * BLOCK).sum::<u64>(), size);
}

#[test]
fn what_a_smaller_size_leaves_is_given_back() {
    let (lvstores, noted) = rig();
    lvstores.create_lvol("lvs0", &thick("v", GIB)).unwrap();
    let free = || lvstores.lvstore("lvs0").unwrap().free_clusters;
    let before = free();
    lvstores.resize_lvol("lvs0/v", GIB / 4).unwrap();
    assert_eq!(free(), before + 768);
    // It needs all that there is, and waits until the bdev was told of it.
    lvstores.create_lvol("lvs0", &thick("next", free() << 20)).unwrap();
    let unmaps = noted.unmaps.lock().unwrap();
    assert_eq!(unmaps.iter().map(|(_, blocks)| blocks * BLOCK).sum::<u64>(), 3 * GIB / 4);
}

#[test]
fn what_was_zeroed_for_a_volume_that_is_refused_is_given_back() {
    const STEP: u64 = 64 << 20;
    let (lvstores, noted) = rig();
    lvstores.create_lvol("lvs0", &thick("small", STEP)).unwrap();
    let free = || lvstores.lvstore("lvs0").unwrap().free_clusters;
    let before = free();
    let check = |e: lvol::Error| {
        assert_eq!(e.errno(), -28, "{e}");
        assert!(e.to_string().contains("what lies under the lvstore is full"), "{e}");
        // Three steps went well, and the fourth may have written a part before it was refused.
        let unmaps = std::mem::take(&mut *noted.unmaps.lock().unwrap());
        assert_eq!(unmaps.iter().map(|(_, blocks)| blocks * BLOCK).sum::<u64>(), 4 * STEP);
        assert_eq!(free(), before);
    };
    noted.room.store(3 * STEP / BLOCK, Ordering::Relaxed);
    check(lvstores.create_lvol("lvs0", &thick("large", GIB)).unwrap_err());
    noted.room.store(3 * STEP / BLOCK, Ordering::Relaxed);
    check(lvstores.resize_lvol("lvs0/small", GIB).unwrap_err());
    assert_eq!(lvstores.lvols(None).unwrap()[0].size, STEP);
    noted.room.store(u64::MAX, Ordering::Relaxed);
    lvstores.resize_lvol("lvs0/small", GIB).unwrap();
}
