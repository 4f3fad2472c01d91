//! What becomes of a command that a target has answered.

use bdev::{IoError, Op};

/// `enum scsi_status`.
mod status {
    pub(super) const GOOD: i32 = 0;
    pub(super) const CHECK_CONDITION: i32 = 2;
    pub(super) const CONDITION_MET: i32 = 4;
    pub(super) const BUSY: i32 = 8;
    pub(super) const RESERVATION_CONFLICT: i32 = 0x18;
    pub(super) const TASK_SET_FULL: i32 = 0x28;
    pub(super) const ACA_ACTIVE: i32 = 0x30;
    pub(super) const TASK_ABORTED: i32 = 0x40;
}

/// Of when sense data tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum About {
    /// There is none that can be read.
    #[default]
    Nothing,
    /// Of the command that was answered.
    Current,
    /// Of one that was answered before: this one was not carried out.
    Deferred,
}

/// How a command was answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Answer {
    /// `enum scsi_status`.
    pub status: i32,
    pub about: About,
    pub key: u8,
    /// Additional sense code and its qualifier.
    pub code: u16,
    /// Bytes that were asked for and did not come.
    pub missing: usize,
    /// More bytes would have come, or gone.
    pub excess: bool,
}

/// What is to be done then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Done,
    /// Send it again at once: the target only had to say something else. It is looked whether the LUN changed.
    Again,
    /// Send it again in a moment.
    Later,
    Failed(IoError),
}

impl Answer {
    /// Whether sense data is to come with it.
    pub(crate) fn has_sense(&self) -> bool {
        self.status == status::CHECK_CONDITION
    }

    /// Takes over sense data (SPC-5 4.4), as far as it came.
    pub(crate) fn parse_sense(&mut self, sense: &[u8]) {
        let code = |at| Some(u16::from_be_bytes([*sense.get(at)?, *sense.get(at + 1)?]));
        let Some(kind) = sense.first().map(|kind| kind & 0x7F) else { return };
        let (key, code) = match kind {
            // Its additional code may be left out.
            0x70 | 0x71 => (sense.get(2), code(12).or(Some(0))),
            0x72 | 0x73 => (sense.get(1), code(2)),
            _ => return,
        };
        if let (Some(key), Some(code)) = (key, code) {
            (self.key, self.code) = (key & 0xF, code);
            self.about = if kind & 1 == 0 { About::Current } else { About::Deferred };
        }
    }

    /// Whether what was answered before is lost.
    pub(crate) fn is_late_failure(&self) -> bool {
        self.status == status::CHECK_CONDITION
            && self.about == About::Deferred
            // NO SENSE, RECOVERED ERROR.
            && !matches!(self.key, 0 | 1)
    }

    fn is_of_this(&self) -> bool {
        self.status == status::CHECK_CONDITION && self.about == About::Current
    }

    pub(crate) fn is_good(&self) -> bool {
        matches!(self.status, status::GOOD | status::CONDITION_MET)
    }

    /// Whether a LUN lacks the command.
    pub(crate) fn is_unsupported(&self) -> bool {
        self.is_of_this() && self.key == 5 && self.code == 0x2000
    }

    /// Whether the LUN told of something else: a unit attention.
    pub(crate) fn is_attention(&self) -> bool {
        self.is_of_this() && self.key == 6
    }

    /// Whether the same is to be asked later: it is busy, or another host has it for itself.
    pub(crate) fn is_later(&self) -> bool {
        self.verdict(Op::Flush) == Verdict::Later || self.status == status::RESERVATION_CONFLICT
    }

    /// Whether it was ended before it was over.
    pub(crate) fn is_aborted(&self) -> bool {
        self.status == status::TASK_ABORTED || self.is_of_this() && self.key == 0xB
    }

    /// Whether it is done with other bytes than were asked for.
    pub(crate) fn is_partial(&self) -> bool {
        self.is_good() && (self.missing > 0 || self.excess)
    }

    /// Whether it may be another LUN than before, or one with other properties. An attention that says nothing of
    /// that is of reservations (2Ah/03h to 05h), of paths (2Ah/06h, 07h), of the capacity, which is looked at
    /// anyway, of commands that another host ended (2Fh), or of room (38h).
    pub(crate) fn is_doubtful(&self) -> bool {
        self.is_attention()
            && !matches!(self.code, 0x2A03..=0x2A07 | 0x2A09 | 0x2F00..=0x2F02 | 0x3807)
    }

    /// Of a command of `op`.
    pub(crate) fn verdict(&self, op: Op) -> Verdict {
        use Verdict::{Done, Failed, Later};
        match self.status {
            status::GOOD | status::CONDITION_MET if op != Op::Flush && self.is_partial() => {
                Failed(op.failed())
            }
            status::GOOD | status::CONDITION_MET => Done,
            status::BUSY | status::TASK_SET_FULL | status::ACA_ACTIVE | status::TASK_ABORTED => {
                Later
            }
            status::RESERVATION_CONFLICT => Failed(IoError::Reserved),
            status::CHECK_CONDITION => self.check(op),
            _ => Failed(op.failed()),
        }
    }

    fn check(&self, op: Op) -> Verdict {
        use Verdict::{Again, Done, Failed, Later};
        let asc = self.code >> 8;
        match self.about {
            About::Nothing => return Failed(op.failed()),
            About::Deferred => return Later,
            About::Current => {}
        }
        match (self.key, asc) {
            // NO SENSE, RECOVERED ERROR.
            (0 | 1, _) => Done,
            // NOT READY: becoming ready, and the like; else there is no medium.
            (2, 0x04) => Later,
            (2, _) => Failed(IoError::Removed),
            // ILLEGAL REQUEST: it has no such command or field, block, or LUN.
            (5, 0x20 | 0x24 | 0x26) => Failed(match op {
                Op::Read => IoError::ReadMedium,
                Op::Flush => IoError::Flush,
                Op::Write | Op::Unmap | Op::WriteZeroes => IoError::Unsupported,
            }),
            (5, 0x21) => Failed(IoError::OutOfRange),
            (5, 0x25) => Failed(IoError::Removed),
            // UNIT ATTENTION.
            (6, _) => Again,
            // DATA PROTECT; of a thin LUN without room (SBC-4 4.7.3.6).
            (7, _) if self.code == 0x2707 => Failed(IoError::NoSpace),
            (7, _) if op.is_write() => Failed(IoError::ReadOnly),
            // ABORTED COMMAND.
            (0xB, _) => Later,
            (0xE, _) => Failed(IoError::Miscompare),
            // MEDIUM ERROR, HARDWARE ERROR and the rest.
            _ => Failed(op.failed()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_answer_by_operation() {
        use IoError::*;
        use Verdict::{Again, Done, Failed, Later};
        let check =
            |key, code| Answer { status: 2, about: About::Current, key, code, ..Answer::default() };
        let status = |status| Answer { status, ..Answer::default() };
        for (op, answer, want) in [
            (Op::Read, status(0), Done),
            (Op::Write, status(4), Done),
            (Op::Read, Answer { missing: 1, ..status(0) }, Failed(ReadMedium)),
            (Op::Write, Answer { missing: 1, ..status(0) }, Failed(WriteMedium)),
            (Op::WriteZeroes, Answer { excess: true, ..status(0) }, Failed(WriteMedium)),
            (Op::Flush, Answer { missing: 1, ..status(0) }, Done),
            (Op::Write, status(8), Later),
            (Op::Write, status(0x28), Later),
            (Op::Write, status(0x40), Later),
            (Op::Read, status(0x18), Failed(Reserved)),
            (Op::Read, status(0x77), Failed(ReadMedium)),
            (Op::Read, check(1, 0x1701), Done),
            (Op::Read, check(2, 0x0401), Later),
            (Op::Read, check(2, 0x3A00), Failed(Removed)),
            (Op::Read, check(3, 0x1100), Failed(ReadMedium)),
            (Op::Write, check(3, 0x0C00), Failed(WriteMedium)),
            (Op::Flush, check(3, 0x0C00), Failed(Flush)),
            (Op::Unmap, check(4, 0x4400), Failed(WriteMedium)),
            (Op::Unmap, check(5, 0x2000), Failed(Unsupported)),
            (Op::Read, check(5, 0x2400), Failed(ReadMedium)),
            (Op::Read, check(5, 0x2100), Failed(OutOfRange)),
            (Op::Write, check(5, 0x2500), Failed(Removed)),
            (Op::Read, check(6, 0x2900), Again),
            (Op::Write, check(6, 0x2A09), Again),
            (Op::Write, check(7, 0x2700), Failed(ReadOnly)),
            (Op::WriteZeroes, check(7, 0x2707), Failed(NoSpace)),
            (Op::Read, check(7, 0x2700), Failed(ReadMedium)),
            (Op::Write, check(0xB, 0), Later),
            (Op::Write, check(0xE, 0x1D00), Failed(Miscompare)),
            (Op::Flush, check(0xF, 0), Failed(Flush)),
            (Op::Write, status(2), Failed(WriteMedium)),
            (Op::Flush, status(2), Failed(Flush)),
            (Op::Write, Answer { about: About::Deferred, ..check(3, 0x0C00) }, Later),
        ] {
            assert_eq!(answer.verdict(op), want, "{op:?} {answer:?}");
        }
        for code in [0x2A03, 0x2A09, 0x2F00, 0x3807] {
            assert!(check(6, code).is_attention() && !check(6, code).is_doubtful(), "{code:x}");
        }
        for code in [0x2900, 0x2A01, 0x3F03, 0x3F0E, 0] {
            assert!(check(6, code).is_doubtful(), "{code:x}");
        }
        assert!(!check(3, 0x3F03).is_doubtful());
        assert!(check(5, 0x2000).is_unsupported() && !check(5, 0x2400).is_unsupported());
    }

    #[test]
    fn sense_data_is_of_this_command_or_of_one_before_or_none() {
        use About::*;
        let told = |sense: &[u8]| {
            let mut answer = Answer { status: 2, ..Answer::default() };
            answer.parse_sense(sense);
            (answer.about, answer.key, answer.code)
        };
        let fixed = |kind| [kind, 0, 0x23, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x0C, 2, 0, 0, 0, 0];
        for (sense, want) in [
            (&fixed(0x70)[..], (Current, 3, 0x0C02)),
            (&fixed(0xF0), (Current, 3, 0x0C02)),
            (&fixed(0x71), (Deferred, 3, 0x0C02)),
            (&fixed(0x70)[..8], (Current, 3, 0)),
            (&[0x72, 6, 0x29, 1, 0, 0, 0, 0], (Current, 6, 0x2901)),
            (&[0x73, 4, 0x44, 0, 0, 0, 0, 0], (Deferred, 4, 0x4400)),
            (&[0x72, 6, 0x29], (Nothing, 0, 0)),
            (&fixed(0x70)[..2], (Nothing, 0, 0)),
            (&fixed(0), (Nothing, 0, 0)),
            (&fixed(0x7F), (Nothing, 0, 0)),
            (&[], (Nothing, 0, 0)),
        ] {
            assert_eq!(told(sense), want, "{sense:02x?}");
        }
        let late = |key| Answer { status: 2, about: Deferred, key, ..Answer::default() };
        assert!(late(3).is_late_failure() && !late(1).is_late_failure());
        assert!(!Answer { about: Current, ..late(3) }.is_late_failure());
    }
}
