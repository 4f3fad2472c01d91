//! How a command ended.

use bdev::IoError;

use crate::sense::{Code, SENSE_LEN, SENSE_ROOM, Sense, in_descriptors};

/// SCSI status (SAM-5 5.3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// The command succeeded.
    Good = 0x00,
    /// Sense data says what happened.
    CheckCondition = 0x02,
    /// Try again later.
    Busy = 0x08,
    /// Another initiator has reserved the unit (SPC-4 5.13).
    ReservationConflict = 0x18,
    /// Too many commands: try again when some finished.
    TaskSetFull = 0x28,
    /// Ended by a task management function.
    TaskAborted = 0x40,
}

/// The end of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Response {
    /// SCSI status.
    pub status: Status,
    /// Bytes moved to or from the data buffers (the transport derives the residual). 0 unless the
    /// status is GOOD.
    pub transferred: u32,
    /// Valid bytes of `sense`: 0; [`SENSE_LEN`] in the fixed format; 8, 16 or 20 in the descriptor format.
    pub sense_len: u8,
    /// Sense data, in the descriptor format where an initiator has asked for that (D_SENSE).
    pub sense: [u8; SENSE_ROOM],
}

impl Response {
    /// GOOD, with nothing moved.
    pub(crate) const GOOD: Response = Response::bare(Status::Good);

    /// `status` without data or sense.
    pub const fn bare(status: Status) -> Self {
        Response { status, transferred: 0, sense_len: 0, sense: [0; SENSE_ROOM] }
    }

    /// What ends a command with the task attribute ACA (SAM-5 8.6): NormACA is 0, so it comes without an
    /// auto contingent allegiance. INVALID MESSAGE ERROR, as the attribute is not part of the CDB.
    #[cold]
    pub fn no_aca() -> Self {
        Response::check(Sense::illegal(Code::INVALID_MESSAGE_ERROR))
    }

    /// Its sense data, if it has any, in the descriptor format.
    #[cold]
    pub(crate) fn in_descriptors(&mut self) {
        if self.sense_len == SENSE_LEN as u8 {
            (self.sense, self.sense_len) = in_descriptors(&self.sense);
        }
    }

    /// CHECK CONDITION with `sense`.
    pub(crate) fn check(sense: Sense) -> Self {
        let mut response = Response::bare(Status::CheckCondition);
        response.sense_len = SENSE_LEN as u8;
        response.sense[..SENSE_LEN].copy_from_slice(&sense.fixed());
        response
    }
}

/// What [`crate::Lun::start`] or [`crate::Lun::resume`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Outcome {
    /// The command is over.
    Done(Response),
    /// The command is over: it needs more data than its buffers hold, and nothing was done
    /// (virtio 1.2 5.6.6.1: VIRTIO_SCSI_S_OVERRUN).
    Overrun,
    /// A completion with the task's tag follows from [`crate::Lun::poll`]; give it to [`crate::Lun::resume`].
    Pending,
    /// The I/O failed so, and the unit's [`crate::ErrorPolicy`] is to wait: nothing was answered, and the
    /// task is at rest. Give it to [`crate::Lun::start`] when the cause may be gone; all that it did
    /// may be done twice. Where nobody can wait, [`crate::told`] ends it.
    Suspended(IoError),
}

/// Bytes that an answer from memory moved, or why there is none.
impl From<Result<u32, Fail>> for Outcome {
    fn from(sent: Result<u32, Fail>) -> Self {
        match sent {
            Ok(transferred) => Outcome::Done(Response { transferred, ..Response::GOOD }),
            Err(fail) => fail.into(),
        }
    }
}

impl From<Fail> for Outcome {
    #[cold]
    fn from(fail: Fail) -> Self {
        match fail {
            Fail::Check(sense) => Outcome::Done(Response::check(sense)),
            Fail::Bare(status) => Outcome::Done(Response::bare(status)),
            Fail::Overrun => Outcome::Overrun,
        }
    }
}

/// Why a command ends without GOOD.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fail {
    /// CHECK CONDITION.
    Check(Sense),
    /// A status that needs no sense.
    Bare(Status),
    /// The buffers are too short for what the command asks.
    Overrun,
}

impl From<Sense> for Fail {
    fn from(sense: Sense) -> Self {
        Fail::Check(sense)
    }
}
