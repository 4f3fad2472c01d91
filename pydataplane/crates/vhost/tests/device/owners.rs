//! Whose a session's I/O is: that of one owner, whatever LUN and reactor, so that a guest with many disks
//! in a file has no more of it than one with a single disk.

use std::sync::{Arc, Mutex};

use bdev::{Bdev, Channel, Features, Geometry, Malloc, MallocOptions, OpenError};
use reactor::{IoContext, Owner};
use uuid::Uuid;
use vhost_scsi::{ControllerOptions, TargetOptions};

use crate::guest::*;
use crate::host::*;

/// Owners of the channels that were opened, in order.
type Opened = Arc<Mutex<Vec<Option<Owner>>>>;

/// A disk in memory that notes for whom it is opened.
struct Witness(Arc<Malloc>, Opened);

impl Bdev for Witness {
    fn name(&self) -> &str {
        self.0.name()
    }
    fn aliases(&self) -> Vec<String> {
        self.0.aliases()
    }
    fn uuid(&self) -> Uuid {
        self.0.uuid()
    }
    fn product_name(&self) -> &'static str {
        "Witness"
    }
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }
    fn features(&self) -> Features {
        self.0.features()
    }
    fn open(&self, io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        self.1.lock().unwrap().push(io.owner());
        self.0.open(io)
    }
    fn driver_specific(&self) -> serde_json::Value {
        self.0.driver_specific()
    }
}

fn witness(host: &Host, name: &str, opened: &Opened) {
    let options = MallocOptions {
        name: name.into(),
        block_size: 512,
        physical_block_size: 0,
        num_blocks: 64,
        uuid: None,
    };
    let disk = Malloc::create(options).unwrap();
    host.registry.register(Arc::new(Witness(disk, opened.clone()))).unwrap();
}

/// The one owner of the `count` channels that were opened for guests since the last call. The target's own,
/// such as one that looks whether a disk can be opened, have none.
fn owner(opened: &Opened, count: usize) -> Owner {
    let owners: Vec<_> = opened.lock().unwrap().drain(..).flatten().collect();
    assert_eq!(owners.len(), count, "a guest's I/O has an owner: {owners:?}");
    assert!(owners.iter().all(|owner| *owner == owners[0]), "{owners:?}");
    owners[0]
}

#[test]
fn all_luns_of_a_session_have_one_owner_and_each_session_has_its_own() {
    const REACTORS: usize = 2;
    let host = Host::new(REACTORS);
    let opened = Opened::default();
    for (target, name) in [(0, "a"), (1, "b")] {
        witness(&host, name, &opened);
        host.add(target, name);
    }
    let mut guest = Guest::start(&host.socket(), LINUX, 2);
    guest.ready(0);
    guest.ready(1);
    let first = owner(&opened, 2 * REACTORS);
    // One that is attached later.
    witness(&host, "c", &opened);
    host.add(2, "c");
    assert_eq!(owner(&opened, REACTORS), first);
    // Another guest's.
    host.controllers.create("vm1", ControllerOptions::default()).unwrap();
    witness(&host, "d", &opened);
    host.controllers.add_target("vm1", 0, "d", TargetOptions::default()).unwrap();
    let mut other = Guest::start(&host.socket().with_file_name("vm1"), LINUX, 1);
    other.ready(0);
    let second = owner(&opened, REACTORS);
    assert_ne!(second, first);
    // That guest again: what its last session had is counted there as long as it is in flight.
    drop(other);
    let mut other = Guest::start(&host.socket().with_file_name("vm1"), LINUX, 1);
    other.ready(0);
    let third = owner(&opened, REACTORS);
    assert!(![first, second].contains(&third));
}
