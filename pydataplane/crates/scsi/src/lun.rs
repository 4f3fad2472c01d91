//! A logical unit as one thread sees it.

use crate::response::Response;
use crate::shared::{LunShared, Nexus};
use crate::task::{CDB_LEN, Task};
use bdev::{Channel, Completion, IoError};
use guestmem::Sg;
use std::sync::Arc;

/// What [`Lun::start`] or [`Lun::resume`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Outcome {
    /// The command is over.
    Done(Response),
    /// The command is over: it needs more data than its buffers hold, and nothing was done
    /// (virtio 1.2 5.6.6.1: VIRTIO_SCSI_S_OVERRUN).
    Overrun,
    /// A completion with the task's tag follows from [`Lun::poll`]; give it to [`Lun::resume`].
    Pending,
}

/// A logical unit as one thread sees it: shared identity and attentions, and a channel of its own.
pub struct Lun {}

impl Lun {
    /// The unit `shared` for the session `nexus` through `channel`, which was opened on the
    /// calling thread.
    pub fn new(_shared: Arc<LunShared>, _nexus: Arc<Nexus>, _channel: Box<dyn Channel>) -> Self {
        todo!()
    }

    /// The unit as all threads see it.
    pub fn shared(&self) -> &Arc<LunShared> {
        todo!()
    }

    /// Starts `task`. Never blocks or allocates.
    pub fn start(&mut self, _task: &mut Task) -> Outcome {
        todo!()
    }

    /// Collects finished I/Os, never beyond the capacity of `done`; each names a task by its tag.
    /// Returns how many.
    pub fn poll(&mut self, _done: &mut Vec<Completion>) -> u32 {
        todo!()
    }

    /// Goes on with `task` after its I/O ended: answers, or starts the next step.
    pub fn resume(&mut self, _task: &mut Task, _result: Result<(), IoError>) -> Outcome {
        todo!()
    }
}

/// The answer of a target to a command for a logical unit that it does not have, when it has
/// another one (SPC-4 5.? and SAM-5 4.7.4): INQUIRY says so (qualifier 011b, type 1Fh), REPORT LUNS
/// lists LUN 0, REQUEST SENSE and everything else say LOGICAL UNIT NOT SUPPORTED (25h/00h).
pub fn missing_lun(_cdb: &[u8; CDB_LEN], _data_in: &Sg) -> Outcome {
    todo!()
}
