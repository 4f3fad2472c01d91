//! What happens without being asked for: bdevs go away, and the holder.

use super::Inner;
use crate::shared::Order;
use crate::volume::Face;
use bdev::Event;
use holder::Client;
use std::os::fd::AsFd;
use std::sync::Weak;
use std::thread;
use std::time::Duration;

/// How often a holder that is gone is looked for.
const HOLDER_POLL: Duration = Duration::from_millis(200);

/// A bdev that goes away takes its file with it; nobody waits here for I/O in flight. The size of a file
/// is asked for, that of a device is told.
pub(super) fn on_event(inner: &Weak<Inner>, event: &Event) {
    let (Event::Removed(bdev) | Event::Resized(bdev)) = event else { return };
    let Some(inner) = inner.upgrade() else { return };
    let Some(volume) = inner.named(bdev.name()) else { return };
    if matches!(event, Event::Resized(_)) {
        return volume.fit_disk(&inner.keeper);
    }
    match inner.end(&volume, Order::Refuse) {
        Ok(ending) => drop(ending),
        Err(e) => {
            tracing::warn!("{e}");
            if let Face::Disk { .. } = volume.face {
                inner.unstopped.lock().insert(volume.uuid);
            }
        }
    }
}

/// Gives a holder that was restarted what the one before had, and has it take away what could not be.
pub(super) fn watch_holder(client: &Client, inner: &Weak<Inner>) {
    let mut missed = false;
    loop {
        client.wait_lost();
        let Some(inner) = inner.upgrade() else { return };
        if client.answers().is_err() {
            if !missed && !inner.table.read().is_empty() {
                tracing::error!("no holder answers: exports end with this process until one does");
            }
            missed |= !inner.table.read().is_empty();
            drop(inner);
            thread::sleep(HOLDER_POLL);
            continue;
        }
        missed = false;
        let _control = inner.control.lock();
        inner.stop_unstopped();
        let volumes: Vec<_> = inner.table.read().values().cloned().collect();
        for volume in volumes {
            // The kernel keeps the others.
            let Face::File { fuse, record } = &volume.face else { continue };
            let kept = client.keep(volume.uuid, fuse.as_fd(), record.as_fd());
            if let Err(e) = kept {
                tracing::warn!("{e}");
            }
        }
    }
}

impl Inner {
    /// Has a holder that is there again take away the devices that none could: their threads, which
    /// refuse what is asked, end with that.
    fn stop_unstopped(&self) {
        let unstopped = std::mem::take(&mut *self.unstopped.lock());
        for uuid in unstopped {
            // A new bdev has its UUID: the device is that one's by now.
            if self.table.read().contains_key(&uuid) {
                continue;
            }
            if let Err(e) = self.keeper.end_disk(uuid) {
                tracing::warn!("{e}");
                self.unstopped.lock().insert(uuid);
            }
        }
    }
}
