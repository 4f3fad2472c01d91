//! Connections of VMs: the descriptors of each, for the target that comes next.
//!
//! A front end sees its connection end when the last descriptor of it is closed. As long as the holder
//! has one, the VM of a target that was killed just waits for its I/O. What the descriptors are is known
//! to targets, but for the second: it is the connection itself, and one that its peer has closed is let
//! go of, so that nothing keeps the memory of a VM that is gone.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::SocketType;
use rustix::net::sockopt::socket_type;

/// Connections of one holder at most.
pub const VMS_MAX: usize = 1500;

/// Longest name, in bytes: that of a controller, and what tells targets apart.
pub const NAME_MAX: usize = 100;

/// Which descriptor is the connection.
const CONNECTION: usize = 1;

/// The connections, by the names of their controllers.
#[derive(Debug, Default)]
pub struct Vms(BTreeMap<String, Vec<OwnedFd>>);

impl Vms {
    /// Keeps `fds` instead of what there was of that name.
    ///
    /// # Errors
    /// In one sentence: none of them is a connection, or too many are kept.
    pub fn keep(&mut self, name: String, fds: Vec<OwnedFd>) -> Result<(), String> {
        // What else can be waited for may have this process wait, a file on FUSE for instance.
        let kind = fds.get(CONNECTION).map(socket_type);
        if kind != Some(Ok(SocketType::STREAM)) {
            return Err("the second descriptor of a VM's connection is not its socket".into());
        }
        if self.0.len() >= VMS_MAX && !self.0.contains_key(&name) {
            return Err(format!("{VMS_MAX} connections of VMs are kept already"));
        }
        self.0.insert(name, fds);
        Ok(())
    }

    /// The descriptors of that name; they stay kept.
    pub fn get(&self, name: &str) -> Option<&[OwnedFd]> {
        self.0.get(name).map(Vec::as_slice)
    }

    /// Lets go of them; fine where there are none.
    pub fn end(&mut self, name: &str) {
        self.0.remove(name);
    }

    /// All names.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// What is to be watched for its end, which is all that is asked for.
    pub fn watched(&self) -> impl Iterator<Item = PollFd<'_>> {
        self.connections().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::empty()))
    }

    fn connections(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.values().map(|fds| fds[CONNECTION].as_fd())
    }

    /// Lets go of those whose front end is gone.
    pub fn forget_closed(&mut self) {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        self.0.retain(|name, fds| {
            let mut fd = [PollFd::new(&fds[CONNECTION], PollFlags::empty())];
            let there = !matches!(poll(&mut fd, Some(&now)), Ok(1..));
            if !there {
                tracing::info!(controller = name, "its VM has closed the connection");
            }
            there
        });
    }

    /// Lets go of all: nobody has served them for too long.
    pub fn give_up(&mut self, seconds: u64) {
        for name in std::mem::take(&mut self.0).into_keys() {
            tracing::error!(controller = name, "nobody serves its VM for {seconds} s: given up");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_connection_is_kept_until_its_front_end_closes_it_or_it_is_let_go_of() {
        let mut vms = Vms::default();
        let file = || OwnedFd::from(tempfile::tempfile().unwrap());
        for few in [vec![], vec![file()], vec![file(), file()]] {
            let why = vms.keep("vm".into(), few).unwrap_err();
            assert_eq!(why, "the second descriptor of a VM's connection is not its socket");
        }
        let (near, far) = UnixStream::pair().unwrap();
        vms.keep("vm".into(), vec![file(), near.into(), file()]).unwrap();
        let (other, stays) = UnixStream::pair().unwrap();
        vms.keep("other".into(), vec![file(), other.into()]).unwrap();
        vms.forget_closed();
        assert_eq!(vms.names().collect::<Vec<_>>(), ["other", "vm"]);
        assert_eq!(vms.get("vm").map(<[_]>::len), Some(3));
        drop(far);
        vms.forget_closed();
        assert_eq!(vms.names().collect::<Vec<_>>(), ["other"]);
        vms.end("vm");
        vms.end("other");
        assert!(vms.is_empty() && vms.get("other").is_none());
        drop(stays);
    }
}
