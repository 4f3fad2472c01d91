//! What is known of a VM's rings from sessions before, where nobody tracks what is in flight.
//!
//! A front end without an in-flight region goes on at the used index, which says nothing about
//! requests that had not ended, as they end in any order. So a mark, a file in the state directory
//! that names the process at the other end, says that requests of it may be in flight: from the
//! start of its first such queue until all of them have ended and the guest was told. If the target
//! dies meanwhile, the mark stays, and queues of that process start only where nothing is in flight.
//! The mark of a process that is gone means nothing: its VM is gone, too.

use std::fs;
use std::io;
use std::path::PathBuf;

use peer::{Identity, Process};

/// What a session is told of the ones before.
#[derive(Clone, Debug, Default)]
pub(crate) struct Past {
    /// Requests may be in flight that nobody knows of.
    pub(crate) unknown: bool,
    /// Queues that had ended all requests, and the index of both rings then.
    pub(crate) drained: Vec<(u16, u16)>,
}

/// The file, and what it says of the present peer.
#[derive(Clone, Debug, Default)]
pub(crate) struct Mark {
    path: Option<PathBuf>,
    peer: String,
    made: bool,
}

impl Mark {
    /// For the process at the other end; `path`: of the file, if marks are kept. With it whether that
    /// process was marked before.
    pub(crate) fn of_peer(path: Option<PathBuf>, process: &Process) -> (Mark, bool) {
        let peer = identity(process);
        let said = path.as_ref().and_then(|path| fs::read_to_string(path).ok());
        // Who cannot be told from another may be the same.
        let known = said.is_some_and(|said| said == peer || peer.is_empty() || said.is_empty());
        let mut mark = Mark { path, peer, made: true };
        if !known {
            mark.clear();
        }
        (mark, known)
    }

    /// Who is at the other end; empty where that cannot be known.
    pub(crate) fn peer(&self) -> &str {
        &self.peer
    }

    /// Requests may be in flight from now on.
    pub(crate) fn make(&mut self) -> io::Result<()> {
        if let (Some(path), false) = (&self.path, self.made) {
            fs::create_dir_all(path.parent().unwrap_or(path))?;
            fs::write(path, &self.peer)?;
            self.made = true;
        }
        Ok(())
    }

    /// None are.
    pub(crate) fn clear(&mut self) {
        if let (Some(path), true) = (&self.path, self.made)
            && let Err(why) = fs::remove_file(path)
            && why.kind() != io::ErrorKind::NotFound
        {
            tracing::error!("cannot remove {}: {why}", path.display());
        }
        self.made = false;
    }
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
