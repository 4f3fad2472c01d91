//! The thread that keeps the maps of some volumes: those of an lvstore, whose device is theirs as well.

use super::keeper::{Keeper, Times};
use super::shared::Shared;
use bdev::Bdev;
use reactor::{Bell, Control, Next, Work};
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// The thread. It ends with the last of its volumes and of those who hold it.
pub struct Keepers {
    control: Control<All>,
    bell: Bell,
    /// Keepers that it had.
    added: AtomicU64,
    /// How long it is waited for: the device may not answer it.
    timeout: Duration,
}

#[derive(Default)]
struct All {
    keepers: BTreeMap<u64, Keeper>,
}

/// The thread did not do it in time. It does when the device has answered.
#[derive(Debug)]
pub struct Late;

impl Keepers {
    /// Starts the thread; those that want something of it wait for `timeout`.
    ///
    /// # Errors
    /// There is none.
    pub fn start(timeout: Duration) -> io::Result<Keepers> {
        let open = |bell| Ok((All::default(), bell));
        let (control, bell) = Control::start("protection", open, |e| e)?;
        Ok(Keepers { control, bell, added: AtomicU64::new(0), timeout })
    }

    /// Has it keep a volume's maps; returns the keeper's number.
    pub(super) fn add(&self, shared: &Arc<Shared>, below: Arc<dyn Bdev>, times: Times) -> u64 {
        shared.wants.set_bell(self.bell.clone());
        let number = self.added.fetch_add(1, Ordering::Relaxed);
        let its = shared.clone();
        self.control.tell(move |all| {
            all.keepers.insert(number, Keeper::new(its, below, times));
        });
        number
    }

    /// Has the thread run `f`, after what it was told before, and waits for nothing.
    pub(super) fn tell(&self, number: u64, f: impl FnOnce(&mut Keeper) + Send + 'static) {
        self.control.tell(move |all| {
            if let Some(keeper) = all.keepers.get_mut(&number) {
                f(keeper);
            }
        });
    }

    /// Likewise, and waits for its result; `None`: there is no such volume any more.
    ///
    /// # Errors
    /// [`Late`].
    pub(super) fn call<R: Send + 'static>(
        &self,
        number: u64,
        f: impl FnOnce(&mut Keeper) -> R + Send + 'static,
    ) -> Result<Option<R>, Late> {
        let (tell, told) = channel();
        // Who does not wait any more is not told.
        self.tell(number, move |keeper| _ = tell.send(f(keeper)));
        match told.recv_timeout(self.timeout) {
            Ok(answer) => Ok(Some(answer)),
            Err(RecvTimeoutError::Disconnected) => Ok(None),
            Err(RecvTimeoutError::Timeout) => Err(Late),
        }
    }
}

impl Work for All {
    fn round(&mut self) -> Next {
        self.keepers.retain(|_, keeper| !keeper.is_over());
        let mut next = Next::WhenRung;
        for keeper in self.keepers.values_mut() {
            next = match (next, keeper.round()) {
                (Next::Now, _) | (_, Next::Now) => Next::Now,
                (Next::Within(a), Next::Within(b)) => Next::Within(a.min(b)),
                (next, Next::WhenRung) | (Next::WhenRung, next) => next,
            };
        }
        next
    }

    fn end(self) {}
}
