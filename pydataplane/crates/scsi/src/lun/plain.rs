//! What a request of a transport without CDBs takes ([`Plain`]).

use super::plan::check_gates;
use super::{Lun, Plan};
use crate::block::{self, Extent, PlanContext};
use crate::job::Job;
use crate::opcode::Command;
use crate::response::{Fail, Outcome, Status};
use crate::sense::{Code, Sense};
use crate::task::{Plain, Rest, Task};
use bdev::Op;

impl Lun {
    /// Checks the request and says what it takes, or what is left of it.
    #[inline]
    pub(super) fn plan_plain(&mut self, task: &mut Task, plain: Plain) -> Result<Plan, Fail> {
        let unit = &*self.shared;
        let Plain { op, durable, lba, blocks } = plain;
        if unit.has_gates() {
            // As the command that does the same. It has no nexus that could be registered.
            check_gates(unit, command_of(op), &task.cdb)?;
        }
        let unsupported = Err(Fail::Check(Sense::illegal(Code::INVALID_COMMAND_OPERATION_CODE)));
        let at = Extent { lba, blocks, length_at: 0 };
        let mut cx = PlanContext {
            unit,
            exclusive: &mut self.exclusive,
            bounce: &self.bounce,
            bounce_free: &mut self.bounce_free,
            max_transfer: self.max_transfer,
        };
        let mut job = match op {
            Op::Read => block::read(&mut cx, at, false, &task.data_in)?,
            Op::Write => block::write(&mut cx, at, durable, &task.data_out)?,
            Op::Flush => block::flush(),
            Op::Unmap if !unit.features.unmap => return unsupported,
            Op::WriteZeroes if !unit.features.write_zeroes => return unsupported,
            Op::Unmap | Op::WriteZeroes => block::range(unit, at, op, durable)?,
        };
        if let Some(Rest { lba, left, moved, flush }) = task.rest.take() {
            (job.lba, job.left, job.moved) = (lba, left, moved);
            job.flush_after |= flush;
        }
        Ok(Plan::Work(job))
    }

    /// There is no room for the next step of `task`. One without a CDB, which its transport starts again, then goes
    /// on with that one: what it has done is not done a second time.
    #[cold]
    pub(super) fn put_off(&mut self, task: &mut Task, status: Status) -> Outcome {
        if let Some(Plain { blocks, .. }) = task.plain {
            let Job { lba, left, moved, flush_after, .. } = task.job;
            // Of what it has begun a reset is the end.
            task.suspended = left < blocks;
            // A bdev that takes its place may have FUA, which does nothing for what was written without.
            let flush = flush_after && task.suspended;
            task.rest = Some(Rest { lba, left, moved, flush });
        }
        self.fail(task, Fail::Bare(status))
    }
}

fn command_of(op: Op) -> Command {
    match op {
        Op::Read => Command::Read16,
        Op::Write => Command::Write16,
        Op::Flush => Command::SynchronizeCache16,
        Op::Unmap => Command::Unmap,
        Op::WriteZeroes => Command::WriteSame16,
    }
}
