//! The addresses of this target's clients, recorded so that the next process knows them.
//!
//! A process that is killed leaves its images locked. Ceph would notice after half a minute, and guests
//! wait. The next process of the same target, which has the state directory for itself, knows that the
//! one before is gone, and takes what that one's clients have locked; their addresses tell which it is.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process;

use parking_lot::Mutex;
use rustix::fs::{FlockOperation, flock};

/// Name of the record in the state directory of a target. While a process makes it anew it is `CLIENTS.PID.new`.
pub const CLIENTS: &str = "rbd-clients";

/// Addresses that are recorded at most; the oldest go.
const MOST: usize = 256;

/// The record, a line each.
pub(crate) struct ClientsFile {
    /// `None`: nothing is recorded.
    path: Option<PathBuf>,
    /// Those of earlier processes.
    past: Vec<String>,
    writing: Mutex<()>,
}

impl ClientsFile {
    /// The record at `path`, with what earlier processes have left there.
    pub(crate) fn open(path: Option<PathBuf>) -> ClientsFile {
        let past = path.as_ref().map(read).unwrap_or_default();
        ClientsFile { path, past, writing: Mutex::default() }
    }

    /// Whether it is that of a client of an earlier process.
    pub(crate) fn is_of_the_past(&self, address: &str) -> bool {
        self.past.iter().any(|past| past == address)
    }

    /// A client has this address from now on. When it returns, that survives the end of this process.
    pub(crate) fn add(&self, address: &str) {
        self.change(|lines| lines.push(address.to_owned()));
    }

    /// A client is gone in order, and has nothing locked.
    pub(crate) fn remove(&self, address: &str) {
        self.change(|lines| lines.retain(|line| line != address));
    }

    /// In an upgrade the process before writes it, too, until it ends: none changes what the other is about to.
    fn change(&self, change: impl FnOnce(&mut Vec<String>)) {
        let Some(path) = &self.path else { return };
        let _one = self.writing.lock();
        let _alone = folder_locked(path);
        let mut lines = read(path);
        change(&mut lines);
        lines.drain(..lines.len().saturating_sub(MOST));
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        // An older program does not lock, and has another name.
        let new = path.with_extension(format!("{}.new", process::id()));
        let written = fs::write(&new, text).and_then(|()| fs::rename(&new, path));
        if let Err(why) = written {
            _ = fs::remove_file(&new);
            let path = path.display();
            tracing::warn!(
                "{path} is not written, so images stay locked if the target is killed: {why}"
            );
        }
    }
}

/// Keeps other processes from their changes as long as it is there; nobody, where the file system has no such lock.
fn folder_locked(path: &Path) -> Option<File> {
    let folder = File::open(path.parent()?).ok()?;
    flock(&folder, FlockOperation::LockExclusive).ok()?;
    Some(folder)
}

fn read(path: &PathBuf) -> Vec<String> {
    match fs::read_to_string(path) {
        Ok(text) => text.lines().map(str::to_owned).collect(),
        Err(why) if why.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(why) => {
            tracing::warn!("{} is ignored: {why}", path.display());
            Vec::new()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_process_knows_the_clients_that_did_not_go_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(CLIENTS);
        let first = ClientsFile::open(Some(path.clone()));
        first.add("10.0.0.1:0/1");
        first.add("10.0.0.1:0/2");
        first.remove("10.0.0.1:0/1");
        assert!(!first.is_of_the_past("10.0.0.1:0/2"), "it is its own");
        let second = ClientsFile::open(Some(path.clone()));
        second.add("10.0.0.1:0/3");
        assert!(second.is_of_the_past("10.0.0.1:0/2"));
        assert!(!second.is_of_the_past("10.0.0.1:0/1") && !second.is_of_the_past("10.0.0.1:0/3"));
        // One that was killed before it had locked anything anew.
        let third = ClientsFile::open(Some(path));
        assert!(third.is_of_the_past("10.0.0.1:0/2") && third.is_of_the_past("10.0.0.1:0/3"));
    }

    #[test]
    fn two_that_write_at_once_leave_what_both_have_written() {
        const EACH: usize = MOST / 2;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(CLIENTS);
        std::thread::scope(|scope| {
            for who in ["old", "new"] {
                // Each has a lock of its own, as another process has.
                let clients = ClientsFile::open(Some(path.clone()));
                scope.spawn(move || {
                    (0..EACH).for_each(|n| clients.add(&format!("{who} {n}")));
                    (0..EACH).step_by(2).for_each(|n| clients.remove(&format!("{who} {n}")));
                });
            }
        });
        let mut lines = read(&path);
        lines.sort_unstable();
        let kept = |who| (1..EACH).step_by(2).map(move |n| format!("{who} {n}"));
        let mut expected: Vec<_> = kept("old").chain(kept("new")).collect();
        expected.sort_unstable();
        assert_eq!(lines, expected);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn what_another_process_writes_is_left_to_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(CLIENTS);
        let (older, other) = (path.with_extension("new"), path.with_extension("1.new"));
        for unfinished in [&older, &other] {
            fs::write(unfinished, "10.0").unwrap();
        }
        ClientsFile::open(Some(path.clone())).add("10.0.0.1:0/1");
        assert_eq!(read(&path), ["10.0.0.1:0/1"]);
        for unfinished in [&older, &other] {
            assert_eq!(fs::read_to_string(unfinished).unwrap(), "10.0");
        }
        // Nor does what cannot be written leave anything.
        let taken = dir.path().join("taken");
        fs::create_dir_all(taken.join("inside")).unwrap();
        ClientsFile::open(Some(taken)).add("10.0.0.1:0/1");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 4);
    }

    #[test]
    fn the_record_does_not_grow_without_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(CLIENTS);
        let clients = ClientsFile::open(Some(path.clone()));
        (0..=MOST).for_each(|n| clients.add(&n.to_string()));
        let lines = read(&path);
        assert_eq!((lines.len(), lines[0].as_str()), (MOST, "1"));
    }
}
