//! What happens to devices, and who is told.

use std::fmt;
use std::sync::Arc;

use super::Registry;
use crate::Bdev;

/// What happened to a device. Delivered on the thread that caused it, with no lock held.
#[derive(Clone)]
pub enum Event {
    /// It can be found and opened from now on.
    Registered(Arc<dyn Bdev>),
    /// Its [`crate::Geometry::num_blocks`] changed.
    Resized(Arc<dyn Bdev>),
    /// It can no longer be found: close its channels and drop its claims.
    Removed(Arc<dyn Bdev>),
    /// Of what is cut from it little is free now, or enough again.
    Space {
        /// The device.
        bdev: Arc<dyn Bdev>,
        /// Name of what is cut into parts, such as an lvstore.
        store: String,
        /// Whether little is free.
        low: bool,
    },
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, bdev) = match self {
            Event::Registered(b) => ("Registered", b),
            Event::Resized(b) => ("Resized", b),
            Event::Removed(b) => ("Removed", b),
            Event::Space { bdev, .. } => ("Space", bdev),
        };
        f.debug_tuple(what).field(&bdev.name()).finish()
    }
}

pub(super) type Subscriber = Arc<dyn Fn(&Event) + Send + Sync>;

impl Registry {
    pub(super) fn emit(&self, event: &Event) {
        let subscribers: Vec<Subscriber> =
            self.lock().subscribers.iter().map(|(_, s)| s.clone()).collect();
        for s in subscribers {
            s(event);
        }
    }

    /// Emits [`Event::Space`].
    pub fn notify_space(&self, bdev: &Arc<dyn Bdev>, store: &str, low: bool) {
        self.emit(&Event::Space { bdev: bdev.clone(), store: store.to_owned(), low });
    }

    /// Calls `f` for each event until the [`Subscription`] is dropped. `f` runs on the thread
    /// that caused the event; it may use the registry, but not wait for a device's removal.
    pub fn subscribe(&self, f: impl Fn(&Event) + Send + Sync + 'static) -> Subscription {
        let mut state = self.lock();
        let id = state.id();
        state.subscribers.push((id, Arc::new(f)));
        Subscription { registry: self.clone(), id }
    }
}

/// Ends a subscription when dropped. An event that is being delivered meanwhile may still arrive.
#[must_use]
pub struct Subscription {
    registry: Registry,
    id: u64,
}

impl Drop for Subscription {
    fn drop(&mut self) {
        // The closure is dropped outside the lock: it may own claims.
        let mut state = self.registry.lock();
        let at = state.subscribers.iter().position(|(id, _)| *id == self.id);
        let removed = at.map(|at| state.subscribers.remove(at));
        drop(state);
        drop(removed);
    }
}
