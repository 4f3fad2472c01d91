//! What else of a volume outlives the process than its reservations.

use std::io;
use uuid::Uuid;

/// Which record of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Record {
    /// A SANITIZE that is under way, or has failed.
    Sanitize,
    /// Mode parameters that an initiator has set.
    Mode,
}

impl Record {
    /// What it is called.
    pub const fn name(self) -> &'static str {
        match self {
            Record::Sanitize => "sanitize",
            Record::Mode => "mode",
        }
    }
}

/// Where the records of volumes are kept. Called on threads that may wait, never on an I/O thread.
pub trait RecordKeeper: Send + Sync {
    /// Keeps a record durably, instead of what there was of its kind; with `None` there is none any more.
    ///
    /// # Errors
    /// What was kept before may still be.
    fn keep(&self, record: Record, volume: Uuid, text: Option<&str>) -> io::Result<()>;
    /// What is kept.
    ///
    /// # Errors
    /// It is not known what was kept; the keeper has told that.
    fn kept(&self, record: Record, volume: Uuid) -> io::Result<Option<String>>;
    /// Waits until no process has it, and has it until what is returned is dropped, or the process ends.
    ///
    /// # Errors
    /// Nobody is kept out.
    fn lock(&self, record: Record, volume: Uuid) -> io::Result<Box<dyn Send>>;
}

impl std::fmt::Debug for dyn RecordKeeper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RecordKeeper")
    }
}
