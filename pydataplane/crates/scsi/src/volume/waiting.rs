//! What was kept and cannot be read is tried again and again, though nobody asks: who has found no capacity sends a
//! disk nothing more. One thread does it for all volumes.

use super::Volume;
use crate::aside;
use parking_lot::Mutex;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

/// The pauses between.
const PAUSE: Duration = Duration::from_secs(1);

/// Volumes that wait. No other lock is held when it is taken, but their reservations' may be taken with it held.
static WAITING: Mutex<Waiting> = Mutex::new(Waiting { volumes: Vec::new(), is_served: false });

struct Waiting {
    volumes: Vec<Weak<Volume>>,
    /// There is a thread.
    is_served: bool,
}

/// Has what was kept of a volume read until it is known, if it is not. For control threads.
pub(super) fn reads_until_known(volume: &Arc<Volume>) {
    if !volume.is_unknown() {
        return;
    }
    let mut waiting = WAITING.lock();
    if !waiting.volumes.iter().any(|there| there.as_ptr() == Arc::as_ptr(volume)) {
        waiting.volumes.push(Arc::downgrade(volume));
    }
    // Without a thread it is read when a command is refused.
    waiting.is_served = waiting.is_served || aside::run("reservations", serve);
}

fn serve() {
    loop {
        thread::sleep(PAUSE);
        let mut waiting = WAITING.lock();
        let is_unknown = |volume: &Weak<Volume>| volume.upgrade().is_some_and(|v| v.is_unknown());
        waiting.volumes.retain(is_unknown);
        if waiting.volumes.is_empty() {
            waiting.is_served = false;
            return;
        }
        let volumes = waiting.volumes.clone();
        drop(waiting);
        volumes.iter().filter_map(Weak::upgrade).for_each(|volume| volume.read_unknown());
    }
}
