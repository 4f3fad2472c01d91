//! Sessions that outlive this process: what the next one needs to go on with them is kept elsewhere.
//!
//! Owns: the record of a session, a file in memory, and who keeps it with the session's descriptors. A
//! record is *whole* when it says all that the peer said. It is not while a message is handled: if the
//! process is killed then, nobody knows what became of that message, and the session ends.
//!
//! What is in flight is no part of it, and changes with each request: the in-flight region tells of that,
//! which is one of the descriptors.

use std::fs::File;
use std::io::{self, Error};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, memfd_create};

use crate::handover::SessionState;

/// Longest description, in bytes.
const MAX_BYTES: u64 = 4 << 20;
/// Where the description begins; before it stands its length in bytes, 0: it is not whole.
const TEXT_AT: u64 = size_of::<u64>() as u64;

/// Who keeps the descriptors of sessions while the process that serves them is away. Its methods may
/// wait for another process.
pub trait SessionKeeper: Send + Sync {
    /// Keeps `fds` instead of what there was of `controller`: the record, the connection, others.
    ///
    /// # Errors
    /// It does not, and perhaps not what it had before either.
    fn keep(&self, controller: &str, fds: &[BorrowedFd<'_>]) -> io::Result<()>;

    /// Lets go of what it has of `controller`, if anything.
    fn end(&self, controller: &str);

    /// What it has of `controller`, which it keeps.
    ///
    /// # Errors
    /// It does not say: it may have something.
    fn take(&self, controller: &str) -> io::Result<Option<Vec<OwnedFd>>>;
}

/// The record of the present session.
#[derive(Debug)]
pub(crate) struct Record(File);

impl Record {
    /// Nothing is in it.
    pub(crate) fn new() -> io::Result<Self> {
        let record = Record(File::from(memfd_create("virtlun-session", MemfdFlags::CLOEXEC)?));
        record.begin_change()?;
        Ok(record)
    }

    /// The peer is about to change what it says.
    pub(crate) fn begin_change(&self) -> io::Result<()> {
        self.0.write_all_at(&0u64.to_ne_bytes(), 0)
    }

    /// All that the peer said is in `state`.
    pub(crate) fn write(&self, state: &SessionState) -> io::Result<()> {
        let text = serde_json::to_vec(state)?;
        self.0.write_all_at(&text, TEXT_AT)?;
        self.0.write_all_at(&(text.len() as u64).to_ne_bytes(), 0)
    }

    /// That of the process before, for this one to go on with.
    pub(crate) fn adopt(file: OwnedFd) -> Self {
        Record(File::from(file))
    }

    /// What the process before wrote down.
    ///
    /// # Errors
    /// In one sentence: it is not whole, or cannot be understood.
    pub(crate) fn read(&self) -> Result<SessionState, String> {
        let Record(file) = self;
        let mut length = [0; TEXT_AT as usize];
        let read = file.read_exact_at(&mut length, 0);
        let length = u64::from_ne_bytes(length);
        if read.is_err() || length == 0 {
            return Err("the process before was killed while it handled a message".into());
        }
        let text = (length <= MAX_BYTES).then(|| vec![0; length as usize]);
        let mut text = text.ok_or("its description is too long")?;
        let parsed = file
            .read_exact_at(&mut text, TEXT_AT)
            .and_then(|()| serde_json::from_slice(&text).map_err(Error::from));
        parsed.map_err(|why| format!("its description cannot be read: {why}"))
    }
}

impl AsFd for Record {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(features: u64) -> SessionState {
        let text = format!(
            r#"{{"socket": 0, "spoke": true, "refused": 0, "features": {features},
                "protocol_features": 0, "memory": [], "log": null, "rings": []}}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn a_record_is_read_when_it_is_whole() {
        let record = Record::new().unwrap();
        let read = || Record::adopt(record.0.try_clone().unwrap().into()).read();
        let incomplete = "the process before was killed while it handled a message";
        assert_eq!(read().unwrap_err(), incomplete);
        record.write(&state(1 << 40)).unwrap();
        assert_eq!(read(), Ok(state(1 << 40)));
        record.write(&state(7)).unwrap();
        assert_eq!(read(), Ok(state(7)));
        record.begin_change().unwrap();
        assert_eq!(read().unwrap_err(), incomplete);
    }

    #[test]
    fn one_that_is_none_is_refused_in_a_sentence() {
        let read = |bytes: &[u8]| {
            let record = Record::new().unwrap();
            record.0.write_all_at(bytes, 0).unwrap();
            record.read().unwrap_err()
        };
        assert_eq!(read(&u64::MAX.to_ne_bytes()), "its description is too long");
        for bytes in [&9u64.to_ne_bytes()[..], b"\x02\0\0\0\0\0\0\0[]"] {
            let why = read(bytes);
            assert!(why.starts_with("its description cannot be read: "), "{why}");
        }
    }
}
