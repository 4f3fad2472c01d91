//! What the thread of an export and those that control it tell each other.
//!
//! Flags and no calls ([`reactor::call()`]): nothing goes back but that a state was reached, several may
//! wait for it, and the thread looks at them for each request that it takes.

use parking_lot::{Condvar, Mutex};
use rustix::io::Errno;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Takes changes.
const OPEN: u8 = 0;
/// Takes none any more, and has some in flight.
const PARKING: u8 = 1;
/// Takes none and has none.
const PARKED: u8 = 2;

/// What an export's thread is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Serve.
    Serve,
    /// Refuse everything (ENODEV) and end when what is in flight has.
    Refuse,
    /// Take nothing more, and end when all that was taken is answered: another process goes on.
    Leave,
}

/// Marks a file that is not opened any more, beside the number of its handles.
const CLOSED: u32 = 1 << 31;

/// Of one export. The I/O path reads two bytes of it, and nothing more.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    gate: AtomicU8,
    order: AtomicU8,
    opens: AtomicU32,
    over: AtomicBool,
    agreed: AtomicBool,
    resends: AtomicBool,
    mutex: Mutex<()>,
    /// It is parked, over, or the kernel has agreed.
    changed: Condvar,
}

impl Shared {
    /// Of a file with `opens` handles.
    pub fn new(parked: bool, opens: u32) -> Shared {
        let gate = AtomicU8::new(if parked { PARKED } else { OPEN });
        Shared { gate, opens: AtomicU32::new(opens), ..Shared::default() }
    }

    /// What the thread is to do.
    pub fn order(&self) -> Order {
        match self.order.load(Ordering::Acquire) {
            0 => Order::Serve,
            1 => Order::Refuse,
            _ => Order::Leave,
        }
    }

    /// Tells the thread to end; it has to be woken. The first order counts.
    pub fn end(&self, order: Order) {
        let order = match order {
            Order::Serve => return,
            Order::Refuse => 1,
            Order::Leave => 2,
        };
        let _ = self.order.compare_exchange(0, order, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Whether changes are refused.
    pub fn is_parked(&self) -> bool {
        self.gate.load(Ordering::Acquire) != OPEN
    }

    /// Called by the thread whenever it has no changes in flight.
    pub fn note_no_changes(&self) {
        let from = self.gate.compare_exchange(PARKING, PARKED, Ordering::AcqRel, Ordering::Relaxed);
        if from.is_ok() {
            self.tell();
        }
    }

    fn tell(&self) {
        drop(self.mutex.lock());
        self.changed.notify_all();
    }

    /// Has changes refused from now on, `wake`s the thread and waits until none is in flight;
    /// `false`: not within `timeout`, and then they are taken again.
    pub fn park(&self, timeout: Duration, wake: impl FnOnce()) -> bool {
        let end = Instant::now() + timeout;
        let mut guard = self.mutex.lock();
        let _ = self.gate.compare_exchange(OPEN, PARKING, Ordering::AcqRel, Ordering::Relaxed);
        wake();
        while self.gate.load(Ordering::Acquire) == PARKING {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let back = (PARKING, OPEN);
                let order = (Ordering::AcqRel, Ordering::Acquire);
                return self.gate.compare_exchange(back.0, back.1, order.0, order.1).is_err();
            }
            self.changed.wait_for(&mut guard, left);
        }
        true
    }

    /// Has changes taken again.
    pub fn unpark(&self) {
        self.gate.store(OPEN, Ordering::Release);
    }

    /// Counts a handle.
    ///
    /// # Errors
    /// STALE: the file is closed for good.
    pub fn open(&self) -> Result<(), Errno> {
        let more = |opens| (opens & CLOSED == 0).then_some(opens + 1);
        let counted = self.opens.fetch_update(Ordering::AcqRel, Ordering::Acquire, more);
        counted.map(drop).map_err(|_| Errno::STALE)
    }

    /// Counts one less.
    pub fn release(&self) {
        let less = |opens| (opens & !CLOSED > 0).then(|| opens - 1);
        let _ = self.opens.fetch_update(Ordering::AcqRel, Ordering::Acquire, less);
    }

    /// Handles.
    pub fn opens(&self) -> u32 {
        self.opens.load(Ordering::Acquire) & !CLOSED
    }

    /// Lets nobody open it any more; `force`: although somebody has it open. Whether that is so.
    pub fn close(&self, force: bool) -> bool {
        let close = |opens| (force || opens & !CLOSED == 0).then_some(opens | CLOSED);
        self.opens.fetch_update(Ordering::AcqRel, Ordering::Acquire, close).is_ok()
    }

    /// The connection to the kernel is over: it does not tell of each close then.
    pub fn set_over(&self) {
        self.opens.fetch_and(CLOSED, Ordering::AcqRel);
        self.over.store(true, Ordering::Release);
        self.tell();
    }

    /// Tells that the kernel has agreed how it is served (FUSE_INIT), and whether it sends again what a
    /// killed process had taken.
    pub fn set_agreed(&self, resends: bool) {
        self.resends.store(resends, Ordering::Release);
        self.agreed.store(true, Ordering::Release);
        self.tell();
    }

    /// Waits until the kernel has agreed, or it is over; `false`: neither within `timeout`.
    pub fn wait_agreed(&self, timeout: Duration) -> bool {
        let end = Instant::now() + timeout;
        let mut guard = self.mutex.lock();
        while !self.agreed.load(Ordering::Acquire) && !self.is_over() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            self.changed.wait_for(&mut guard, left);
        }
        true
    }

    /// Whether the kernel sends again what a killed process had taken.
    pub fn resends(&self) -> bool {
        self.resends.load(Ordering::Acquire)
    }

    /// Whether the connection to the kernel is over.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_open_is_closed_only_by_force() {
        let shared = Shared::new(false, 1);
        assert!(!shared.close(false));
        shared.open().unwrap();
        assert!(shared.close(true));
        assert_eq!((shared.opens(), shared.open()), (2, Err(Errno::STALE)));
        shared.release();
        assert_eq!(shared.opens(), 1);
    }

    #[test]
    fn parking_waits_for_the_thread_or_gives_up() {
        let shared = Shared::new(false, 0);
        assert!(!shared.park(Duration::from_millis(1), || {}));
        assert!(!shared.is_parked());
        assert!(shared.park(Duration::from_secs(60), || note_no_changes(&shared)));
        assert!(shared.is_parked());
        assert!(shared.park(Duration::ZERO, || {}), "it is parked already");
        shared.unpark();
        shared.note_no_changes();
        assert!(!shared.is_parked());
    }

    fn note_no_changes(shared: &Shared) {
        let gate = &shared.gate;
        gate.compare_exchange(PARKING, PARKED, Ordering::AcqRel, Ordering::Relaxed).unwrap();
    }

    #[test]
    fn the_kernel_is_waited_for_until_it_agrees_or_is_gone() {
        let shared = Shared::new(false, 0);
        assert!(!shared.wait_agreed(Duration::from_millis(1)));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| shared.wait_agreed(Duration::from_secs(60)));
            shared.set_agreed(true);
            assert!(waiting.join().unwrap());
        });
        assert!(shared.resends());
        let gone = Shared::new(false, 0);
        gone.set_over();
        assert!(gone.wait_agreed(Duration::from_secs(60)));
        assert!(!gone.resends());
    }

    #[test]
    fn the_first_order_counts() {
        let shared = Shared::new(true, 0);
        assert_eq!(shared.order(), Order::Serve);
        shared.end(Order::Leave);
        shared.end(Order::Refuse);
        assert_eq!(shared.order(), Order::Leave);
    }
}
