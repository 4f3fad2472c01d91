//! Paths by which a subsystem did not answer when it was asked last: they come after the others, as one that is dead
//! keeps whoever asks waiting for seconds. What this process has seen counts for all who ask.

use std::collections::BTreeSet;

use parking_lot::Mutex;

use crate::address::Address;

/// Paths that are known of; then all are forgotten.
const MOST: usize = 1024;

static SILENT: Mutex<BTreeSet<(String, Address)>> = Mutex::new(BTreeSet::new());

/// A path to the subsystem of that name has been tried.
pub(crate) fn note(subnqn: &str, address: &Address, answers: bool) {
    let path = (subnqn.to_owned(), *address);
    let mut silent = SILENT.lock();
    if answers {
        silent.remove(&path);
        return;
    }
    if silent.len() >= MOST {
        silent.clear();
    }
    silent.insert(path);
}

/// The paths in the order in which they are to be tried, and whether each is silent: first those that are not.
pub(crate) fn last(subnqn: &str, paths: &[Address]) -> Vec<(Address, bool)> {
    let silent = SILENT.lock();
    let is_silent = |path: &Address| silent.contains(&(subnqn.to_owned(), *path));
    let mut all: Vec<_> = paths.iter().map(|path| (*path, is_silent(path))).collect();
    all.sort_by_key(|(_, is_silent)| *is_silent);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    const NQN: &str = "nqn.2026-11.org.virtlun:silent";

    fn path(port: u16) -> Address {
        Address::parse("192.0.2.1", Some(&port.to_string()), None).unwrap()
    }

    #[test]
    fn what_did_not_answer_comes_last_until_it_does() {
        let paths = [path(1), path(2), path(3)];
        let order = || last(NQN, &paths).into_iter().map(|(path, _)| path).collect::<Vec<_>>();
        assert_eq!(order(), paths);
        note(NQN, &path(1), false);
        note(NQN, &path(2), false);
        note("nqn.2026-11.org.virtlun:other", &path(3), false);
        assert_eq!(order(), [path(3), path(1), path(2)]);
        assert!(last(NQN, &paths).into_iter().map(|(_, silent)| silent).eq([false, true, true]));
        note(NQN, &path(2), true);
        assert_eq!(order(), [path(2), path(3), path(1)]);
        note(NQN, &path(1), true);
        assert_eq!(order(), paths);
    }
}
