//! A device without I/O is asked for what it has to say when it wakes its reactor: a volume lets go of what
//! it has in memory then.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use bdev::{Bdev, Channel, Completion, Features, Geometry, Io, Null, OpenError, Submit};
use reactor::{IoContext, Waker};
use uuid::Uuid;

use crate::guest::*;
use crate::host::*;

/// A disk that counts how often its queue pairs are polled.
struct Watched {
    disk: Arc<Null>,
    polls: Arc<AtomicU64>,
    wakers: Mutex<Vec<Waker>>,
}

struct WatchedChannel(Box<dyn Channel>, Arc<AtomicU64>);

impl Bdev for Watched {
    fn name(&self) -> &str {
        "watched"
    }
    fn aliases(&self) -> Vec<String> {
        Vec::new()
    }
    fn uuid(&self) -> Uuid {
        Uuid::from_u128(7)
    }
    fn product_name(&self) -> &'static str {
        "Watched"
    }
    fn geometry(&self) -> Geometry {
        self.disk.geometry()
    }
    fn features(&self) -> Features {
        self.disk.features()
    }
    fn open(&self, io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        self.wakers.lock().unwrap().push(io.waker());
        Ok(Box::new(WatchedChannel(self.disk.open(io)?, self.polls.clone())))
    }
    fn driver_specific(&self) -> serde_json::Value {
        serde_json::Value::Null
    }
}

impl Channel for WatchedChannel {
    fn submit(&mut self, io: &Io) -> Submit {
        self.0.submit(io)
    }
    fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.poll(done)
    }
}

#[test]
fn a_device_that_wakes_its_reactor_is_asked_though_the_guest_does_nothing() {
    let host = Host::new(1);
    let disk = Null::create("null", 512, 8192, None).unwrap();
    let watched = Arc::new(Watched { disk, polls: Arc::default(), wakers: Mutex::default() });
    host.registry.register(watched.clone()).unwrap();
    host.add(0, "watched");
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    for _ in 0..3 {
        let before = watched.polls.load(Ordering::Relaxed);
        wait_until("the device is asked", || {
            watched.wakers.lock().unwrap().iter().for_each(Waker::wake);
            std::thread::sleep(std::time::Duration::from_millis(5));
            watched.polls.load(Ordering::Relaxed) > before
        });
    }
}
