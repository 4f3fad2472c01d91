//! What is known of a VM's rings from sessions before, where nobody tracks what is in flight.
//!
//! A front end without an in-flight region goes on at the used index, which says nothing about
//! requests that had not ended, as they end in any order. So a mark, a file in the state directory
//! that names the process at the other end and its queues, says which of them may have requests in
//! flight: from the start of a queue until all of them have ended and the guest was told. If the
//! target dies meanwhile, the mark stays, and these queues of that process start only where nothing is
//! in flight. One that is not started stays marked, however often the peer connects and the target
//! ends in order, until it can be started. The mark of a process that is gone means nothing: its VM is
//! gone, too.

use std::fs;
use std::io;
use std::path::PathBuf;

use peer::{Identity, Process};

use crate::defs::MAX_QUEUES;

/// Virtqueues, each a bit of its index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct QueueSet(u128);

impl QueueSet {
    const ALL: QueueSet = QueueSet(u128::MAX);

    pub(crate) fn insert(&mut self, queue: u16) {
        self.0 |= Self::bit(queue);
    }

    pub(crate) fn remove(&mut self, queue: u16) {
        self.0 &= !Self::bit(queue);
    }

    pub(crate) fn contains(self, queue: u16) -> bool {
        self.0 & Self::bit(queue) != 0
    }

    pub(crate) fn union(self, other: QueueSet) -> QueueSet {
        QueueSet(self.0 | other.0)
    }

    pub(crate) fn iter(self) -> impl Iterator<Item = u16> {
        (0..MAX_QUEUES as u16).filter(move |queue| self.contains(*queue))
    }

    fn bit(queue: u16) -> u128 {
        const { assert!(MAX_QUEUES <= u128::BITS as usize) };
        1u128.checked_shl(queue.into()).unwrap_or(0)
    }
}

impl FromIterator<u16> for QueueSet {
    fn from_iter<I: IntoIterator<Item = u16>>(queues: I) -> Self {
        let mut set = QueueSet::default();
        queues.into_iter().for_each(|queue| set.insert(queue));
        set
    }
}

/// What a session is told of the ones before.
#[derive(Clone, Debug, Default)]
pub(crate) struct Past {
    /// Queues that may have requests in flight that nobody knows of.
    pub(crate) unknown: QueueSet,
    /// Queues that had ended all requests, and the index of both rings then.
    pub(crate) drained: Vec<(u16, u16)>,
}

/// The file, and what it says of the present peer.
#[derive(Clone, Debug, Default)]
pub(crate) struct Mark {
    path: Option<PathBuf>,
    peer: String,
    queues: QueueSet,
}

impl Mark {
    /// For the process at the other end; `path`: of the file, if marks are kept. With it the queues of
    /// that process that were marked before.
    pub(crate) fn of_peer(path: Option<PathBuf>, process: &Process) -> (Mark, QueueSet) {
        let peer = identity(process);
        let said = path.as_ref().and_then(|path| fs::read_to_string(path).ok());
        let queues = said.as_deref().map_or(QueueSet::default(), |said| marked(said, &peer));
        let mark = Mark { path, peer, queues };
        if said.is_some() && queues == QueueSet::default() {
            mark.write();
        }
        (mark, queues)
    }

    /// Who is at the other end; empty where that cannot be known.
    pub(crate) fn peer(&self) -> &str {
        &self.peer
    }

    /// Queues that may have requests in flight.
    pub(crate) fn queues(&self) -> QueueSet {
        self.queues
    }

    /// `queue` may have requests in flight from now on.
    pub(crate) fn add(&mut self, queue: u16) -> io::Result<()> {
        let before = self.queues;
        self.queues.insert(queue);
        if self.queues == before {
            return Ok(());
        }
        self.try_write().inspect_err(|_| self.queues = before)
    }

    /// No others may have requests in flight than `queues`.
    pub(crate) fn keep(&mut self, queues: QueueSet) {
        if self.queues != queues {
            self.queues = queues;
            self.write();
        }
    }

    fn write(&self) {
        if let (Err(why), Some(path)) = (self.try_write(), &self.path) {
            tracing::error!("cannot change {}: {why}", path.display());
        }
    }

    fn try_write(&self) -> io::Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        if self.queues == QueueSet::default() {
            return match fs::remove_file(path) {
                Err(why) if why.kind() != io::ErrorKind::NotFound => Err(why),
                _ => Ok(()),
            };
        }
        fs::create_dir_all(path.parent().unwrap_or(path))?;
        fs::write(path, format!("{}\n{:x}\n", self.peer, self.queues.0))
    }
}

/// The queues that a mark is about, where it may be one of `peer`.
fn marked(said: &str, peer: &str) -> QueueSet {
    let mut lines = said.lines();
    let whose = lines.next().unwrap_or_default();
    // Who cannot be told from another may be the same.
    if whose != peer && !whose.is_empty() && !peer.is_empty() {
        return QueueSet::default();
    }
    // One that was not written to its end, or by an older program, is about any.
    let queues = lines.next().filter(|_| said.ends_with('\n'));
    queues.and_then(|queues| u128::from_str_radix(queues, 16).ok()).map_or(QueueSet::ALL, QueueSet)
}

/// Process, when it was started, and since when the host runs: no other process has the same. Empty
/// where that is not visible here.
fn identity(process: &Process) -> String {
    let Identity { pid, start_time, boot_id, .. } = process.identity();
    match (*pid, *start_time) {
        (0, _) | (_, 0) => String::new(),
        (pid, start_time) => format!("{pid} {start_time} {boot_id}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_about_its_queues_and_one_that_is_not_whole_about_all() {
        let some: QueueSet = [2, 5].into_iter().collect();
        assert_eq!(some.iter().collect::<Vec<_>>(), [2, 5]);
        assert_eq!(marked("1 2 3\n24\n", "1 2 3"), some);
        assert_eq!(marked("1 2 3\n24\n", "1 2 4"), QueueSet::default());
        for unsure in ["1 2 3\n24\n", "\n24\n"] {
            assert_eq!(marked(unsure, ""), some);
        }
        for cut in ["", "1 2 3", "1 2 3\n", "1 2 3\n2", "1 2 3\n?\n"] {
            assert_eq!(marked(cut, "1 2 3"), QueueSet::ALL, "{cut:?}");
        }
    }

    #[test]
    fn queues_stay_marked_until_they_are_not_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("marks/vm");
        let own = Process::of_pid(std::process::id()).unwrap();
        let of = || Mark::of_peer(Some(path.clone()), &own);
        let (mut mark, before) = of();
        assert_eq!(before, QueueSet::default());
        mark.add(2).unwrap();
        mark.add(3).unwrap();
        assert_eq!(of().1, [2, 3].into_iter().collect());
        mark.keep([3].into_iter().collect());
        let (mut mark, before) = of();
        assert_eq!(before, [3].into_iter().collect());
        mark.keep(QueueSet::default());
        assert!(!path.exists());
    }
}
