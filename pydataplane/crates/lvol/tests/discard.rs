//! What a deleted volume had is given back to the bdev, piece by piece.

use bdev::{
    Bdev, Channel, Completion, Features, Geometry, Io, Malloc, MallocOptions, Op, OpenError,
    Registry, Submit,
};
use lvol::{ClearMethod, LvolOptions, LvstoreOptions, Lvstores};
use reactor::IoContext;
use serde_json::Value;
use std::sync::{Arc, Mutex};
use uuid::Uuid;

const GIB: u64 = 1 << 30;
const BLOCK: u64 = 512;

/// A disk in memory that notes its unmaps: first block and blocks.
struct Noting {
    disk: Arc<Malloc>,
    unmaps: Arc<Mutex<Vec<(u64, u64)>>>,
}

impl Bdev for Noting {
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
        "Noting disk"
    }
    fn geometry(&self) -> Geometry {
        self.disk.geometry()
    }
    fn features(&self) -> Features {
        self.disk.features()
    }
    fn open(&self, io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        Ok(Box::new(NotingChannel(self.disk.open(io)?, self.unmaps.clone())))
    }
    fn driver_specific(&self) -> Value {
        self.disk.driver_specific()
    }
}

struct NotingChannel(Box<dyn Channel>, Arc<Mutex<Vec<(u64, u64)>>>);

impl Channel for NotingChannel {
    fn submit(&mut self, io: &Io) -> Submit {
        if io.op == Op::Unmap {
            self.1.lock().unwrap().push((io.lba, io.blocks));
        }
        self.0.submit(io)
    }
    fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        self.0.poll(done)
    }
}

#[test]
fn a_large_volume_is_given_back_in_pieces_between_which_others_are_served() {
    let options = MallocOptions {
        name: "disk0".into(),
        block_size: BLOCK as u32,
        physical_block_size: 0,
        num_blocks: 4 * GIB / BLOCK,
        uuid: None,
    };
    let (registry, unmaps) = (Registry::new(), Arc::new(Mutex::new(Vec::new())));
    let disk = Malloc::create(options).unwrap();
    registry.register(Arc::new(Noting { disk, unmaps: unmaps.clone() })).unwrap();
    let lvstores = Lvstores::new(registry);
    let options = LvstoreOptions { clear: ClearMethod::None, ..Default::default() };
    lvstores.create_lvstore("disk0", "lvs0", &options).unwrap();
    let create = |name: &str, size| {
        let options = LvolOptions { name: name.into(), size, thin: false, uuid: None };
        lvstores.create_lvol("lvs0", &options)
    };
    let size = 3 * GIB + GIB / 2;
    create("large", size).unwrap();
    let free = || lvstores.lvstore("lvs0").unwrap().free_clusters;
    let before = free();
    lvstores.delete_lvol("lvs0/large").unwrap();
    assert_eq!(free(), before + size / (1 << 20));
    // It needs all that was freed, and waits until the bdev was told of it.
    create("next", size).unwrap();
    let unmaps = unmaps.lock().unwrap();
    assert!(unmaps.iter().all(|(_, blocks)| blocks * BLOCK <= GIB), "{unmaps:?}");
    assert_eq!(unmaps.iter().map(|(_, blocks)| blocks * BLOCK).sum::<u64>(), size);
}
