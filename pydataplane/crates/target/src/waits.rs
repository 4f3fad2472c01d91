//! Operations that may have to wait for a disk, so that a disk that does not answer can be named.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// From when on an operation is worth a word.
const LONG: Duration = Duration::from_secs(1);

/// One operation.
#[derive(Clone, Debug)]
pub struct Wait {
    /// What it is about, such as `bdev d0`.
    pub name: String,
    /// What it waits for, as a clause such as `/dev/sdx to be opened`.
    pub waits_for: String,
    /// Since when.
    pub since: Instant,
}

#[derive(Default)]
struct State {
    next: u64,
    all: BTreeMap<u64, Wait>,
}

/// All that are under way. Cheap to clone; every clone is the same.
#[derive(Clone, Default)]
pub struct Waits(Arc<Mutex<State>>);

/// One that is under way; it is over when this is dropped.
#[must_use]
pub struct Waiting {
    waits: Waits,
    id: u64,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.waits.0.lock().all.remove(&self.id);
    }
}

impl Waits {
    /// Notes that an operation begins.
    pub fn begin(&self, name: String, waits_for: String) -> Waiting {
        let mut state = self.0.lock();
        state.next += 1;
        let id = state.next;
        state.all.insert(id, Wait { name, waits_for, since: Instant::now() });
        Waiting { waits: self.clone(), id }
    }

    /// Whether one is under way, for however short a time, that is about what `which` picks by its name.
    pub fn any(&self, which: impl Fn(&str) -> bool) -> bool {
        self.0.lock().all.values().any(|wait| which(&wait.name))
    }

    /// Those that have been under way for a second or more, the oldest first.
    pub fn long(&self) -> Vec<Wait> {
        let state = self.0.lock();
        state.all.values().filter(|wait| wait.since.elapsed() >= LONG).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_long_is_listed_until_it_is_over() {
        let waits = Waits::default();
        let wait = waits.begin("bdev d0".into(), "/x to be opened".into());
        assert!(waits.long().is_empty() && waits.any(|name| name == "bdev d0"));
        waits.0.lock().all.values_mut().for_each(|wait| wait.since -= LONG);
        let listed: Vec<_> = waits.long().into_iter().map(|w| (w.name, w.waits_for)).collect();
        assert_eq!(listed, [("bdev d0".to_owned(), "/x to be opened".to_owned())]);
        drop(wait);
        assert!(waits.long().is_empty() && !waits.any(|_| true));
    }
}
