//! The thread that keeps the maps of some volumes: those of an lvstore, whose device is theirs as well.

use super::keeper::{Keeper, Times};
use super::shared::Shared;
use bdev::Bdev;
use reactor::{Bell, Control, Next, Work};
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// The thread. It ends with the last of its volumes and of those who hold it.
pub struct Keepers {
    control: Control<All>,
    bell: Bell,
}

#[derive(Default)]
struct All {
    keepers: BTreeMap<u64, Keeper>,
    /// The number of the next one.
    next: u64,
}

impl Keepers {
    /// Starts the thread.
    ///
    /// # Errors
    /// There is none.
    pub fn start() -> io::Result<Keepers> {
        let open = |bell| Ok((All::default(), bell));
        let (control, bell) = Control::start("protection", open, |e| e)?;
        Ok(Keepers { control, bell })
    }

    /// Has it keep a volume's maps; returns the keeper's number.
    pub(super) fn add(&self, shared: &Arc<Shared>, below: Arc<dyn Bdev>, times: Times) -> u64 {
        shared.wants.set_bell(self.bell.clone());
        let its = shared.clone();
        let added = self.control.call(Duration::MAX, move |all| {
            all.next += 1;
            all.keepers.insert(all.next, Keeper::new(its, below, times));
            all.next
        });
        // Where the thread has ended nobody answers.
        added.unwrap_or_else(|_| {
            shared.wants.close();
            0
        })
    }

    /// Runs `f` on the thread; `None`: there is no such volume any more.
    pub(super) fn call<R: Send + 'static>(
        &self,
        number: u64,
        f: impl FnOnce(&mut Keeper) -> R + Send + 'static,
    ) -> Option<R> {
        let run = move |all: &mut All| all.keepers.get_mut(&number).map(f);
        self.control.call(Duration::MAX, run).ok().flatten()
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
