//! A logical unit as one thread sees it: from the CDB to bdev I/Os to the response.

mod awaited;
mod data;
mod plain;
mod plan;

use crate::block;
use crate::job::{Compare, Job, Kind};
use crate::mode::{Modes, TagRanges};
use crate::nexus::Nexus;
use crate::policy::Failed;
use crate::protect::Protect;
use crate::response::{Fail, Outcome, Response, Status};
use crate::sense::{Code, Field, Key, Sense, of_io_error};
use crate::shared::{Gate, LunShared};
use crate::task::Task;
use crate::volume::Exclusive;
use crate::watch::InFlight;
use awaited::Awaited;
use bdev::{
    AppTags, COPY_AT_ONCE, Channel, Checks, Completion, Io, IoError, Op, Protected, Submit, Tuples,
};
use data::{compare, copy, or};
use guestmem::{Bounce, Sg};
use std::collections::VecDeque;
use std::sync::Arc;

/// Longest single Unmap or WriteZeroes given to a bdev, in bytes: bounds how long one call can
/// keep the thread where the bdev does it at once. Steps end at multiples of it, so that they do
/// not cut clusters.
const RANGE_STEP_BYTES: u64 = 32 << 20;
/// Steps that end at once in one call before other tasks get their turn.
const STEPS_PER_CALL: u32 = 8;
/// Tasks that can wait for their next turn; the next one is answered BUSY.
const MAX_YIELDED: usize = 128;
/// Tasks that can wait for work of other threads: all copies that a unit may have, and as many others. The next
/// one is answered BUSY before it has begun.
const MAX_AWAITED: usize = 2 * crate::copy::MAX_OPERATIONS;
/// Places among those that wait for their turn which are for tasks that must not end BUSY: those of
/// [`MAX_AWAITED`], and the one that may keep blocks.
const MAX_KEPT_PLACES: usize = MAX_AWAITED + 1;

/// A logical unit as one thread sees it: shared identity and attentions, and a channel of its own.
///
/// Where the channel is full, a command ends as TASK SET FULL (28h), which every initiator answers
/// by trying again when some of its commands finished; there is no waiting list. The channel is this
/// unit's alone, so a guest that fills it, be it with commands or, sooner, with buffers that are not
/// aligned for the disk, is the only one that is told.
pub struct Lun {
    // Before `bounce`: a channel that is dropped has no I/O left on the buffer.
    channel: Box<dyn Channel>,
    shared: Arc<LunShared>,
    nexus: Arc<Nexus>,
    max_transfer: u64,
    /// For transfers that the initiator's buffers do not fit, WRITE SAME and VERIFY; one at a
    /// time, others are answered BUSY.
    bounce: Bounce,
    bounce_free: bool,
    /// As the bounce buffer, given back when no I/O is left.
    exclusive: Exclusive,
    in_flight: InFlight,
    /// What tasks wait for that is no I/O of this thread, by their tags.
    awaited: Vec<(u64, Awaited)>,
    /// The application tags of the volume's mode page, and of which [version](LunShared::modes_version) they are.
    app_tags: (u32, TagRanges),
    /// Tags of tasks that gave others their turn.
    yielded: VecDeque<u64>,
}

/// What a command is after its CDB was looked at.
enum Plan {
    /// Over, GOOD, this many bytes moved.
    Done(u32),
    /// I/Os.
    Work(Job),
}

/// What a task does next.
enum Next {
    Submit(Io),
    /// It is looked at again in the thread's next turn.
    Wait,
    End,
}

impl Lun {
    /// The unit `shared` for the session `nexus` through `channel`, which was opened on the
    /// calling thread. Allocates: not for the I/O path.
    pub fn new(shared: Arc<LunShared>, nexus: Arc<Nexus>, channel: Box<dyn Channel>) -> Self {
        let in_flight = InFlight::default();
        shared.counts(in_flight.shared());
        Lun {
            channel,
            in_flight,
            awaited: Vec::with_capacity(MAX_AWAITED),
            max_transfer: shared.max_transfer_blocks(),
            exclusive: Exclusive::new(Arc::clone(&shared.volume)),
            shared,
            nexus,
            bounce: Bounce::new(),
            bounce_free: true,
            // None that a unit has.
            app_tags: (u32::MAX, TagRanges::default()),
            yielded: VecDeque::with_capacity(MAX_YIELDED + MAX_KEPT_PLACES),
        }
    }

    /// The unit as all threads see it.
    pub fn shared(&self) -> &Arc<LunShared> {
        &self.shared
    }

    /// Starts `task`, after [`Task::wait`] perhaps, or starts it again after [`Outcome::Suspended`]. Never blocks; allocates for what is rare: a
    /// change of reservations, a copy, COMPARE AND WRITE. A status other than GOOD of one without a CDB
    /// ([`Task::prepare_plain`]) says no more than that it failed; BUSY and TASK SET FULL: for now, and started again
    /// it goes on with what it has not done.
    #[inline]
    pub fn start(&mut self, task: &mut Task) -> Outcome {
        task.side = self.in_flight.begin(&self.shared);
        task.waits = false;
        task.job = Job::IDLE;
        let epoch = self.shared.epoch();
        // A reset ends what was received before, whoever asked for it: others may have written there since.
        let was_reset = task.suspended && task.epoch != epoch;
        task.suspended = false;
        task.epoch = epoch;
        let plan = match task.plain {
            _ if was_reset => Err(self.end_by_others(task)),
            None => self.plan(task),
            Some(plain) => self.plan_plain(task, plain),
        };
        match plan {
            Ok(Plan::Work(job)) => {
                task.job = job;
                if job.kind == Kind::Settle || job.exclusive {
                    task.waits = true;
                    self.in_flight.wait(task.side);
                    if job.kind == Kind::Settle {
                        // A SANITIZE ends all tasks but itself.
                        task.epoch = self.shared.epoch();
                    }
                    if self.may_become_unrepeatable(task) {
                        return self.give_way(task);
                    }
                }
                self.advance(task)
            }
            Ok(Plan::Done(transferred)) => self.end(task, transferred),
            Err(fail) => self.fail(task, fail),
        }
    }

    /// Collects finished I/Os, never beyond the capacity of `done`; each names a task by its tag.
    /// Returns how many.
    #[inline]
    pub fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        let mut count = 0;
        // One at a time: each may keep the thread for as long as a step takes.
        if done.len() < done.capacity()
            && let Some(tag) = self.yielded.pop_front()
        {
            done.push(Completion { tag, result: Ok(()), ticks: 0, ended: 0 });
            count += 1;
        }
        count + self.channel.poll(done)
    }

    /// Goes on with `task` after its I/O ended: answers, or starts the next step.
    #[inline]
    pub fn resume(&mut self, task: &mut Task, result: Result<(), IoError>) -> Outcome {
        if task.aborted || task.epoch != self.shared.epoch() {
            if self.must_wait(task) {
                return self.give_way(task);
            }
            let end = self.end_by_others(task);
            return self.fail(task, end);
        }
        if let Err(error) = result {
            return self.io_failed(task, error);
        }
        match self.stepped(task) {
            // Most have one I/O.
            Ok(()) if task.job.is_over() => self.end(task, task.job.moved),
            Ok(()) => self.advance(task),
            Err(fail) => self.fail(task, fail),
        }
    }

    /// Submits steps until one is pending, all are done, or it is another task's turn.
    #[inline]
    fn advance(&mut self, task: &mut Task) -> Outcome {
        let mut at_once = 0u64;
        for _ in 0..STEPS_PER_CALL {
            let next = match self.next(task) {
                Ok(next) => next,
                Err(fail) => return self.fail(task, fail),
            };
            let io = match next {
                Next::Submit(io) => io,
                Next::Wait
                    if task.stopped && self.awaited_of(task).is_some_and(Awaited::is_long) =>
                {
                    return self.fail(task, Fail::Bare(Status::TaskAborted));
                }
                // It has done nothing yet, and others' I/O is not to be waited for.
                Next::Wait if task.stopped && task.job.exclusive => {
                    return self.fail(task, Fail::Bare(Status::TaskAborted));
                }
                Next::Wait => {
                    if task.stopped {
                        self.stop_awaited(task);
                    }
                    break;
                }
                Next::End => return self.end(task, task.job.moved),
            };
            if task.stopped && !task.job.unrepeatable {
                return self.fail(task, Fail::Bare(Status::TaskAborted));
            }
            if matches!(io.op, Op::Write | Op::Unmap | Op::WriteZeroes) {
                let (lba, blocks) = (task.job.lba, task.job.step);
                let waits = match task.job.exclusive {
                    true => becomes_unrepeatable(task),
                    false => self.shared.is_kept_from(task.side, lba, blocks),
                };
                if waits {
                    task.job.step = 0;
                    break;
                }
                self.shared.changes(lba, blocks);
            }
            // Application tags are compared and made by the device.
            let submitted = match task.job.kind {
                Kind::Direct(_) if !self.shared.has_mode(Modes::APPLICATION_TAGS) => {
                    self.channel.submit(&io)
                }
                _ => self.submit(task, &io),
            };
            let stepped = match submitted {
                Submit::Pending => return Outcome::Pending,
                Submit::Full => {
                    // Without a step it was the flush, which is still to be done.
                    task.job.flush_after |= task.job.step == 0;
                    task.job.step = 0;
                    if task.job.unrepeatable {
                        break; // it cannot begin anew, so it waits
                    }
                    return self.put_off(task, Status::TaskSetFull);
                }
                Submit::Done(Err(error)) => return self.io_failed(task, error),
                Submit::Done(Ok(())) => {
                    at_once += task.job.step * u64::from(self.shared.block_size);
                    self.stepped(task)
                }
            };
            if let Err(fail) = stepped {
                return self.fail(task, fail);
            }
            // Data that is read to be compared or copied takes time; ranges are only named.
            let most = match task.job.kind {
                Kind::Range(_) | Kind::UnmapList => RANGE_STEP_BYTES,
                _ => COPY_AT_ONCE as u64,
            };
            if at_once >= most {
                break;
            }
        }
        self.give_way(task)
    }

    /// Submits an I/O of the task that is more than blocks between the initiator's buffers and the medium.
    #[cold]
    fn submit(&mut self, task: &Task, io: &Io) -> Submit {
        let moves = matches!(io.op, Op::Read | Op::Write);
        let tags = if moves { self.app_tags(io) } else { AppTags::NONE };
        let with = match task.job.kind {
            Kind::Protected(op, protect) if io.op == op => protect.of(op, task, tags),
            Kind::Checked(checks) if io.op == Op::Read => Protect::of_checks(checks, tags),
            // It was checked, as far as it was to be.
            Kind::FillLike(tuple, checked) if io.op == Op::Write => {
                let tags = Protect::checked(checked, tags);
                Protected::new(Tuples::Like(tuple), Checks::NONE).tagged(tags)
            }
            _ if !tags.is_none() => Protected::PLAIN.tagged(tags),
            // Of a COMPARE AND WRITE, which has compared.
            Kind::WriteBounced if task.job.exclusive && io.op == Op::Write => {
                return self.channel.submit_if(io, &task.data_out);
            }
            Kind::Fill if io.op == Op::Write && self.channel.same_at_once() > 0 => {
                return self.channel.submit_same(io);
            }
            _ => return self.channel.submit(io),
        };
        self.channel.submit_protected(io, &with)
    }

    /// The application tags that the blocks of an I/O are to have.
    fn app_tags(&mut self, io: &Io) -> AppTags {
        if !self.shared.has_mode(Modes::APPLICATION_TAGS) {
            return AppTags::NONE;
        }
        let version = self.shared.modes_version();
        if self.app_tags.0 != version {
            self.app_tags = (version, self.shared.volume.tags());
        }
        // Where there are any, the unit's blocks are the bdev's.
        self.app_tags.1.of(io.lba, io.blocks)
    }

    /// Whether the task [may not be done a second time](Task::is_unrepeatable) some time: then it is not only
    /// [`Lun::start`] after which it is pending.
    #[cold]
    fn may_become_unrepeatable(&self, task: &Task) -> bool {
        let copies = matches!(self.awaited_of(task), Some(Awaited::Copy(_)));
        copies || task.job.kind == Kind::CompareThenWrite
    }

    /// The task waits for I/O that is not the channel's, which ends soon now.
    #[cold]
    fn must_wait(&self, task: &Task) -> bool {
        let Some(Awaited::Copy(copying)) = self.awaited_of(task) else { return false };
        copying.cancel();
        copying.goes_on()
    }

    /// The task is to stop: the I/O that it waits for and that is not the channel's ends soon.
    #[cold]
    fn stop_awaited(&self, task: &Task) {
        if let Some(Awaited::Copy(copying)) = self.awaited_of(task) {
            copying.stop();
        }
    }

    /// How a task ends that was aborted, or that a reset or a SANITIZE has ended.
    #[cold]
    fn end_by_others(&self, task: &Task) -> Fail {
        let sanitized = !task.aborted && self.shared.is_at(Gate::Sanitize);
        let sense = sanitized.then(|| self.shared.volume.sanitize.sense()).flatten();
        sense.map_or(Fail::Bare(Status::TaskAborted), Fail::Check)
    }

    /// What the task waits for that is no I/O of this thread.
    fn awaited_of(&self, task: &Task) -> Option<&Awaited> {
        let mut mine = self.awaited.iter().filter(|_| task.job.kind == Kind::Settle);
        mine.find(|(tag, _)| *tag == task.tag).map(|(_, awaited)| awaited)
    }

    /// Lets other tasks of the thread run before this one's next step.
    #[cold]
    fn give_way(&mut self, task: &mut Task) -> Outcome {
        let has_place = task.job.kind == Kind::Settle || task.job.exclusive;
        if !has_place && self.yielded.len() >= MAX_YIELDED {
            return self.put_off(task, Status::Busy);
        }
        self.yielded.push_back(task.tag);
        Outcome::Pending
    }

    /// The next I/O of the task's job.
    #[inline]
    fn next(&mut self, task: &mut Task) -> Result<Next, Fail> {
        let job = &mut task.job;
        let mut io = Io::flush(task.tag);
        if job.flush_before {
            job.flush_before = false;
            return Ok(Next::Submit(io));
        }
        if job.kind == Kind::Settle {
            return self.next_awaited(task);
        }
        if job.exclusive && !self.exclusive.is_quiet() {
            return Ok(Next::Wait);
        }
        if matches!(job.kind, Kind::UnmapList) {
            while job.left == 0 && job.index < job.count {
                (job.lba, job.left) =
                    block::unmap_descriptor(&self.shared, &task.data_out, job.index)?;
                job.index += 1;
            }
        }
        if job.left == 0 {
            if job.flush_after {
                job.flush_after = false;
                return Ok(Next::Submit(io));
            }
            let Some((blocks, compare)) = job.verify.take() else { return Ok(Next::End) };
            job.kind = match job.kind {
                Kind::Protected(_, protect) => Kind::Checked(protect.checks),
                _ => Kind::Verify(compare),
            };
            (job.lba, job.left) = (job.lba - blocks, blocks);
            if compare == Compare::Data {
                job.moved = 0;
            }
        }
        match job.kind {
            Kind::Direct(op) | Kind::Protected(op, _) => {
                job.step = job.left;
                io.op = op;
                io.fua = job.fua;
                io.sg = if op == Op::Read { task.data_in } else { task.data_out };
            }
            Kind::Range(op) => {
                job.step = self.range_step(job);
                io.op = op;
            }
            Kind::UnmapList => {
                job.step = self.range_step(job);
                io.op = Op::Unmap;
            }
            Kind::ReadBounced
            | Kind::Verify(_)
            | Kind::Checked(_)
            | Kind::CompareThenWrite
            | Kind::OrRead => {
                (job.step, io.sg) = self.bounce_step(job)?;
                io.op = Op::Read;
            }
            Kind::Fill | Kind::FillLike(..) => {
                (job.step, io.sg) = match self.channel.same_at_once() >> self.shared.bdev_shift {
                    most @ 1.. if job.kind == Kind::Fill => {
                        let block = self.shared.block_size as usize;
                        (job.left.min(most), self.bounce_of(block)?)
                    }
                    _ => self.bounce_step(job)?,
                };
                io.op = Op::Write;
            }
            Kind::OrWrite => {
                (job.step, io.sg) = self.bounce_step(job)?;
                io.op = Op::Write;
                io.fua = job.fua;
            }
            Kind::Settle => unreachable!("it has no I/O but a flush"),
            Kind::WriteBounced => {
                (job.step, io.sg) = self.bounce_step(job)?;
                io.op = Op::Write;
                io.fua = job.fua;
                let mut offset = 0;
                while offset < io.sg.len() {
                    offset += copy(&task.data_out, job.moved as usize + offset, &io.sg, offset);
                }
            }
        }
        // Everything else counts the unit's blocks; a bdev counts its own.
        io.lba = job.lba << self.shared.bdev_shift;
        io.blocks = job.step << self.shared.bdev_shift;
        Ok(Next::Submit(io))
    }

    /// What comes of what the task waits for.
    #[cold]
    fn next_awaited(&self, task: &mut Task) -> Result<Next, Fail> {
        let Some(awaited) = self.awaited_of(task) else { return Ok(Next::End) };
        if let Awaited::Copy(copying) = awaited
            && copying.is_unrepeatable()
        {
            match task.job.unrepeatable {
                true => copying.let_begin(),
                false => task.job.unrepeatable = true,
            }
        }
        Ok(if awaited.is_over(task.stopped)? { Next::End } else { Next::Wait })
    }

    /// Blocks of the next Unmap or WriteZeroes.
    fn range_step(&self, job: &Job) -> u64 {
        let mut most = self.shared.blocks(RANGE_STEP_BYTES);
        if self.shared.features.max_blocks != 0 {
            most = most.min(u64::from(self.shared.features.max_blocks));
        }
        job.left.min(most - job.lba % most)
    }

    /// Blocks of the next step through the bounce buffer, and its list.
    fn bounce_step(&self, job: &Job) -> Result<(u64, Sg), Fail> {
        let mut most = self.shared.blocks(Bounce::LEN as u64);
        if self.shared.features.max_blocks != 0 {
            most = most.min(u64::from(self.shared.features.max_blocks));
        }
        let step = job.left.min(most);
        let internal = Sense::new(Key::HardwareError, Code::INTERNAL_TARGET_FAILURE);
        let bytes = (step * u64::from(self.shared.block_size)) as usize;
        Ok((step, self.bounce.sg(bytes).ok_or(Fail::Check(internal))?))
    }

    /// The outstanding step ended well: uses what it read, and counts it.
    #[inline]
    fn stepped(&mut self, task: &mut Task) -> Result<(), Fail> {
        let job = &mut task.job;
        if job.step == 0 {
            return Ok(()); // a flush, or the task's next turn
        }
        let bytes = (job.step * u64::from(self.shared.block_size)) as usize;
        match job.kind {
            Kind::Direct(_) | Kind::WriteBounced => job.moved += bytes as u32,
            Kind::Settle => {}
            Kind::CompareThenWrite => {
                let medium = self.bounce_of(bytes)?;
                compare(&medium, 0, &task.data_out, 0, bytes)?;
                (job.kind, job.moved, job.step) = (Kind::WriteBounced, bytes as u32, 0);
            }
            Kind::OrRead => {
                or(&task.data_out, job.moved as usize, &self.bounce_of(bytes)?, bytes);
                (job.kind, job.step) = (Kind::OrWrite, 0);
            }
            Kind::OrWrite => {
                job.moved += bytes as u32;
                job.kind = Kind::OrRead;
            }
            Kind::Protected(_, protect) => {
                job.moved += job.step as u32 * protect.block(self.shared.block_size);
            }
            Kind::Range(_) | Kind::UnmapList | Kind::Fill | Kind::FillLike(..) => {}
            Kind::Verify(Compare::Nothing) | Kind::Checked(_) => {}
            Kind::ReadBounced => {
                let from = self.bounce_of(bytes)?;
                let mut offset = 0;
                while offset < bytes {
                    offset += copy(&from, offset, &task.data_in, job.moved as usize + offset);
                }
                job.moved += bytes as u32;
            }
            Kind::Verify(Compare::Data) => {
                let medium = self.bounce_of(bytes)?;
                compare(&medium, 0, &task.data_out, job.moved as usize, bytes)?;
                job.moved += bytes as u32;
            }
            Kind::Verify(Compare::OneBlock) => {
                let medium = self.bounce_of(bytes)?;
                let block = self.shared.block_size as usize;
                for at in (0..bytes).step_by(block) {
                    compare(&medium, at, &task.data_out, 0, block)?;
                }
            }
        }
        job.lba += job.step;
        job.left -= job.step;
        job.step = 0;
        Ok(())
    }

    fn bounce_of(&self, bytes: usize) -> Result<Sg, Fail> {
        let internal = Sense::new(Key::HardwareError, Code::INTERNAL_TARGET_FAILURE);
        self.bounce.sg(bytes).ok_or(Fail::Check(internal))
    }

    /// The task's I/O failed: it waits, or its end is told.
    #[cold]
    fn io_failed(&mut self, task: &mut Task, error: IoError) -> Outcome {
        let job = &task.job;
        // Without a step it was a flush.
        let reads = match job.kind {
            Kind::Direct(op) | Kind::Protected(op, _) => op == Op::Read,
            Kind::ReadBounced | Kind::Verify(_) | Kind::CompareThenWrite | Kind::OrRead => true,
            Kind::Checked(_) => true,
            Kind::WriteBounced | Kind::Fill | Kind::FillLike(..) | Kind::OrWrite => false,
            Kind::Range(_) | Kind::UnmapList | Kind::Settle => false,
        };
        let failed = match (job.step, reads) {
            (0, _) => Failed::Flush,
            (_, true) => Failed::Read,
            (_, false) => Failed::Write,
        };
        // It would begin again, and what it has written, be it in part, would not compare any more.
        if error == IoError::Reserved {
            // At the device below, for another host.
            return self.fail(task, Fail::Bare(Status::ReservationConflict));
        }
        if job.unrepeatable || !self.shared.error_policy.waits(failed, error) {
            let mut sense = of_io_error(error);
            if error.is_mismatch() {
                let at = self.channel.mismatch(task.tag);
                let block = |nth: u64| job.lba + (nth >> self.shared.bdev_shift);
                sense.field = at.map(|nth| Field::Block(block(nth)));
            }
            return self.fail(task, Fail::Check(sense));
        }
        self.release(task);
        match task.stopped {
            // The transport does it again later anyhow.
            true => Fail::Bare(Status::TaskAborted).into(),
            false => {
                task.suspended = true;
                Outcome::Suspended(error)
            }
        }
    }

    /// Ends the task without GOOD.
    #[cold]
    fn fail(&mut self, task: &mut Task, fail: Fail) -> Outcome {
        self.release(task);
        let mut outcome = Outcome::from(fail);
        if let Outcome::Done(response) = &mut outcome
            && response.sense_len > 0
            && self.shared.has_mode(Modes::DESCRIPTOR_SENSE)
        {
            response.in_descriptors();
        }
        outcome
    }

    /// Ends the task as GOOD, with so many bytes moved.
    #[inline]
    fn end(&mut self, task: &mut Task, transferred: u32) -> Outcome {
        self.release(task);
        Outcome::Done(Response { transferred, ..Response::GOOD })
    }

    /// The task is over: nobody waits for it any more, and what it had is for others.
    #[inline]
    fn release(&mut self, task: &mut Task) {
        // Before it is in flight no more: who waits for the others leaves as many out as are awaited.
        if task.job.kind == Kind::Settle {
            self.awaited.retain(|(tag, _)| *tag != task.tag);
        }
        self.in_flight.end(task.side, task.waits);
        if task.job.bounce {
            task.job.bounce = false;
            self.bounce_free = true;
        }
        if task.job.exclusive {
            task.job.exclusive = false;
            self.exclusive.give_back();
        }
    }
}

/// A task that keeps blocks is about to write: whether that makes it [unrepeatable](Task::is_unrepeatable), which is
/// to be noted first.
#[cold]
fn becomes_unrepeatable(task: &mut Task) -> bool {
    let is_first = task.job.kind == Kind::WriteBounced && !task.job.unrepeatable;
    task.job.unrepeatable |= is_first;
    is_first
}
