//! What a disk is told of its guest, for one that one host at a time has.

use std::sync::{Arc, Mutex};

use bdev::{Bdev, Channel, Features, Geometry, GuestEvent, Malloc, MallocOptions, OpenError};
use reactor::IoContext;
use uuid::Uuid;

use crate::guest::*;
use crate::host::*;
use crate::peer::*;

/// A disk in memory that notes what it is told.
struct Follower {
    disk: Arc<Malloc>,
    told: Mutex<Vec<GuestEvent>>,
}

impl Follower {
    /// What it was told since this was asked last.
    fn told(&self) -> Vec<GuestEvent> {
        std::mem::take(&mut *self.told.lock().unwrap())
    }
}

impl Bdev for Follower {
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
        "Follower"
    }
    fn geometry(&self) -> Geometry {
        self.disk.geometry()
    }
    fn features(&self) -> Features {
        self.disk.features()
    }
    fn open(&self, io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        self.disk.open(io)
    }
    fn driver_specific(&self) -> serde_json::Value {
        self.disk.driver_specific()
    }
    fn on_guest(&self, event: GuestEvent) {
        self.told.lock().unwrap().push(event);
    }
}

fn take_base(guest: &mut Guest, queue: u32) -> u16 {
    guest.peer.send(GET_VRING_BASE, &words(&[queue, 0]), &[]);
    let reply = guest.peer.reply(GET_VRING_BASE).unwrap();
    u16::from_le_bytes([reply[4], reply[5]])
}

#[test]
fn a_disk_is_told_when_its_guest_runs_leaves_for_another_host_and_is_gone() {
    let host = Host::new(1);
    let options = MallocOptions {
        name: "disk0".into(),
        block_size: 512,
        physical_block_size: 0,
        num_blocks: 8192,
        uuid: None,
    };
    let disk = Malloc::create(options).unwrap();
    let disk = Arc::new(Follower { disk, told: Mutex::default() });
    host.registry.register(Arc::clone(&disk) as Arc<dyn Bdev>).unwrap();
    host.add(0, "disk0");
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    let told = disk.told();
    assert!(!told.is_empty() && told.iter().all(|event| *event == GuestEvent::Runs), "{told:?}");

    // A guest that is paused, or reset, stays.
    let base = take_base(&mut guest, 2);
    assert_eq!(disk.told(), []);
    guest.describe_queue(2, base, false);
    guest.ready(0);
    assert!(disk.told().contains(&GuestEvent::Runs));

    // One whose memory is logged goes elsewhere.
    guest.peer.ask(SET_FEATURES, &(LINUX | F_LOG_ALL).to_le_bytes(), &[]);
    disk.told();
    let base = take_base(&mut guest, 2);
    assert_eq!(disk.told(), [GuestEvent::Leaves]);
    // Or goes on here, as that failed.
    guest.describe_queue(2, base, false);
    guest.ready(0);
    assert_eq!(disk.told().last(), Some(&GuestEvent::Runs));

    drop(guest);
    host.wait_until_free();
    assert_eq!(disk.told(), [GuestEvent::Gone]);
}
