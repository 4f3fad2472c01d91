//! SANITIZE (SBC-3 4.11, 5.22): all data of a volume is made unreadable, whatever happens meanwhile. FORMAT UNIT
//! (SBC-3 4.9, 5.3) goes the same way: all blocks read as zeros then, and what fails leaves a medium that is not
//! used before another one, or a SANITIZE, has gone well.
//!
//! | file | what |
//! | --- | --- |
//! | `order` | CDB and parameter list; what is kept of it |
//! | `format` | those of FORMAT UNIT |
//! | `work` | the blocking I/O of it |
//!
//! The order is kept before the first block is touched, and forgotten after the last: a target that dies in
//! between begins a SANITIZE again, from the start, when the volume is shown again, and its initiators get nothing but
//! SANITIZE IN PROGRESS until it has ended (SBC-3 4.11.2). A format has failed then, and so has a SANITIZE of a
//! medium that another host may have used since. Neither a reset nor the end of a session ends it.
//! Two processes never carry out the same one ([`RecordKeeper::lock`]): one that takes over from
//! another goes on when that has gone, unless it has finished.
//!
//! What snapshots of the volume have stays theirs.

mod format;
mod order;
mod work;

use crate::opcode::Command;
use crate::records::{Record, RecordKeeper};
use crate::response::{Fail, Status};
use crate::sense::{Code, Key, Sense};
use crate::shared::Gate;
use crate::volume::Volume;
use bdev::AppTags;
pub(crate) use format::{Format, parse as parse_format};
use order::Order;
pub(crate) use order::parse;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;
use work::Ended;

/// How long a thread may take to see that its unit is sanitized, at most: what began a moment before is
/// counted by then.
const SEEN: Duration = Duration::from_millis(1);

/// What a volume is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
enum Phase {
    Idle,
    Running,
    /// EXIT FAILURE MODE lets it be used.
    Failed,
    /// Only another SANITIZE does.
    FailedRestricted,
    /// As `Running`, by FORMAT UNIT.
    Formatting,
    /// Only another FORMAT UNIT, or a SANITIZE, does.
    FormatFailed,
}

impl Phase {
    fn is_running(self) -> bool {
        matches!(self, Phase::Running | Phase::Formatting)
    }
}

/// That of one volume.
pub(crate) struct Sanitize {
    phase: AtomicU32,
    /// PROGRESS INDICATION: of 65,536.
    progress: AtomicU32,
    /// SANITIZE commands that wait for its end, in all threads.
    waiting: Arc<AtomicU32>,
    work: Mutex<Work>,
}

#[derive(Default)]
struct Work {
    order: Option<Order>,
    /// A thread carries it out.
    has_thread: bool,
}

/// What became of one SANITIZE.
#[derive(Default)]
pub(crate) struct Operation(AtomicU32);

impl Operation {
    const ACCEPTED: u32 = 1;
    const DONE: u32 = 2;
    const FAILED: u32 = 3;
    const REFUSED: u32 = 4;

    fn set(&self, state: u32) {
        self.0.store(state, Ordering::Release);
    }
}

/// A command that waits for a SANITIZE.
pub(crate) struct Awaited {
    operation: Arc<Operation>,
    /// It ends when the operation has begun.
    immediate: bool,
    /// What it ends with where the operation fails.
    failure: Sense,
    waiting: Arc<AtomicU32>,
}

impl Awaited {
    /// Whether it can be answered.
    ///
    /// # Errors
    /// The order could not be kept, and nothing has begun; or the operation failed.
    pub(crate) fn is_over(&self) -> Result<bool, Fail> {
        match self.operation.0.load(Ordering::Acquire) {
            Operation::ACCEPTED => Ok(self.immediate),
            Operation::DONE => Ok(true),
            Operation::FAILED => Err(self.failure.into()),
            Operation::REFUSED => {
                Err(Sense::new(Key::HardwareError, Code::INTERNAL_TARGET_FAILURE).into())
            }
            _ => Ok(false),
        }
    }
}

impl Drop for Awaited {
    fn drop(&mut self) {
        self.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

fn failed() -> Sense {
    Sense::new(Key::MediumError, Code::SANITIZE_COMMAND_FAILED)
}

fn format_failed() -> Sense {
    Sense::new(Key::MediumError, Code::FORMAT_COMMAND_FAILED)
}

impl Sanitize {
    pub(crate) fn new() -> Self {
        Sanitize {
            phase: AtomicU32::new(Phase::Idle as u32),
            progress: AtomicU32::default(),
            waiting: Arc::default(),
            work: Mutex::default(),
        }
    }

    fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Acquire) {
            0 => Phase::Idle,
            1 => Phase::Running,
            2 => Phase::Failed,
            4 => Phase::Formatting,
            5 => Phase::FormatFailed,
            _ => Phase::FailedRestricted,
        }
    }

    /// Whether it goes on.
    pub(crate) fn is_running(&self) -> bool {
        self.phase().is_running()
    }

    /// What REQUEST SENSE tells, and commands end with that are not for now.
    pub(crate) fn sense(&self) -> Option<Sense> {
        let progress = self.progress.load(Ordering::Relaxed).min(u16::MAX.into()) as u16;
        match self.phase() {
            Phase::Idle => None,
            Phase::Running => Some(Sense::not_ready(Code::SANITIZE_IN_PROGRESS, progress)),
            Phase::Formatting => Some(Sense::not_ready(Code::FORMAT_IN_PROGRESS, progress)),
            Phase::Failed | Phase::FailedRestricted => Some(failed()),
            Phase::FormatFailed => {
                Some(Sense::new(Key::MediumError, Code::MEDIUM_FORMAT_CORRUPTED))
            }
        }
    }

    /// Whether the command is for now (SBC-3 4.9, 4.11.2 to 4.11.4).
    ///
    /// # Errors
    /// NOT READY while it runs; MEDIUM ERROR after it has failed, but for commands that tell what there is.
    pub(crate) fn check(&self, command: Command) -> Result<(), Sense> {
        use Command as C;
        let always = matches!(command, C::Inquiry | C::ReportLuns | C::RequestSense);
        let phase = self.phase();
        let helps = match command {
            C::SanitizeOverwrite | C::SanitizeBlockErase => true,
            C::SanitizeExit => phase != Phase::FormatFailed,
            C::FormatUnit => phase == Phase::FormatFailed,
            _ => false,
        };
        let tells = matches!(
            command,
            C::ReadCapacity10
                | C::ReadCapacity16
                | C::ModeSense6
                | C::ModeSense10
                | C::LogSense
                | C::ReportOpcodes
                | C::ReportPortGroups
                | C::ReportTaskManagement
                | C::ReportTimestamp
                | C::PersistentReserveIn
        );
        let may = always || (!phase.is_running() && (helps || tells));
        if may { Ok(()) } else { self.sense().map_or(Ok(()), Err) }
    }

    /// What that order makes of a volume.
    fn phase_of(order: Option<&Order>) -> Phase {
        match order {
            None => Phase::Idle,
            Some(order) if order.is_format() => match order.failed {
                false => Phase::Formatting,
                true => Phase::FormatFailed,
            },
            Some(Order { failed: false, .. }) => Phase::Running,
            Some(Order { unrestricted: true, .. }) => Phase::Failed,
            Some(_) => Phase::FailedRestricted,
        }
    }
}

/// What is kept for a volume; `Err`: it cannot be read.
fn kept(records: &dyn RecordKeeper, volume: uuid::Uuid) -> Result<Option<Order>, ()> {
    let text = records.kept(Record::Sanitize, volume).map_err(drop)?;
    text.map(|text| serde_json::from_str(&text).map_err(drop)).transpose()
}

/// A failure whose order is not known: what cannot be read may have been one.
fn unknown() -> Order {
    let method = order::Method::BlockErase;
    Order { method, block_size: 512, unrestricted: false, failed: true }
}

impl Volume {
    /// Takes what is kept, unless there is something, and has an order carried out that nobody carries out.
    /// For control threads.
    pub(crate) fn go_on_sanitizing(self: &Arc<Self>) {
        let mut work = self.sanitize.work.lock();
        if let (Some(records), false) = (self.records(), work.has_thread) {
            let order = kept(&**records, self.uuid()).unwrap_or_else(|()| Some(unknown()));
            work.order = order.map(|order| self.found(order));
        }
        self.enter(Sanitize::phase_of(work.order.as_ref()));
        if self.sanitize.is_running() && !work.has_thread {
            // Where there is no thread for it the next session tries again.
            work.has_thread = self.begin(None, None);
        }
    }

    /// An order that was kept and that nobody carries out now. A SANITIZE goes on; a format that was interrupted has
    /// failed, as with a disk that has lost power: whoever has restored the volume since would lose that. So has
    /// either on a medium that another host may have used meanwhile.
    fn found(&self, order: Order) -> Order {
        let remote = self.units().iter().any(|unit| unit.features.remote);
        let failed = order.failed || order.is_format() || remote;
        Order { failed, ..order }
    }

    /// All its units know what it is in. With the lock of the work held.
    fn enter(&self, phase: Phase) {
        self.sanitize.phase.store(phase as u32, Ordering::SeqCst);
        self.units().iter().for_each(|unit| unit.set_gate(Gate::Sanitize, phase != Phase::Idle));
        if phase.is_running() {
            self.all_changes();
        }
    }

    /// SANITIZE, or FORMAT UNIT: nothing but it is done from now on.
    ///
    /// # Errors
    /// Another one is under way; after a SANITIZE that has failed in restricted completion mode an unrestricted one
    /// is refused (SBC-3 5.22), and after any that has failed FORMAT UNIT; BUSY where there is no thread for it.
    pub(crate) fn sanitize(
        self: &Arc<Self>,
        order: Order,
        immediate: bool,
    ) -> Result<Awaited, Fail> {
        const AUSE: u8 = 5;
        let mut work = self.sanitize.work.lock();
        match self.sanitize.phase() {
            Phase::Running | Phase::Formatting => {
                return Err(self.sanitize.sense().map_or(Fail::Bare(Status::Busy), Fail::from));
            }
            Phase::Failed | Phase::FailedRestricted if order.is_format() => {
                return Err(failed().into());
            }
            Phase::FailedRestricted if order.unrestricted => {
                return Err(Sense::invalid_cdb(1, Some(AUSE)).into());
            }
            _ => {}
        }
        let (phase, failure) = match order.is_format() {
            true => (Phase::Formatting, format_failed()),
            false => (Phase::Running, failed()),
        };
        let before = work.order.replace(order);
        let operation = Arc::new(Operation::default());
        self.sanitize.progress.store(0, Ordering::Relaxed);
        self.sanitize.waiting.fetch_add(1, Ordering::AcqRel);
        let waiting = Arc::clone(&self.sanitize.waiting);
        let awaited = Awaited { operation: Arc::clone(&operation), immediate, failure, waiting };
        self.enter(phase);
        if !self.begin(Some(operation), before.clone()) {
            self.enter(Sanitize::phase_of(before.as_ref()));
            work.order = before;
            return Err(Fail::Bare(Status::Busy));
        }
        work.has_thread = true;
        self.abort_all_tasks();
        Ok(awaited)
    }

    /// SANITIZE with EXIT FAILURE MODE.
    ///
    /// # Errors
    /// INVALID FIELD IN CDB where what has failed was not to be left so.
    pub(crate) fn exit_sanitize_failure(
        self: &Arc<Self>,
        immediate: bool,
    ) -> Result<Option<Awaited>, Fail> {
        match self.sanitize.phase() {
            Phase::Idle => Ok(None),
            Phase::FailedRestricted => Err(Sense::invalid_cdb(1, Some(4)).into()),
            Phase::Running | Phase::Formatting | Phase::FormatFailed => {
                Err(self.sanitize.sense().map_or(Fail::Bare(Status::Busy), Fail::from))
            }
            Phase::Failed => {
                let mut work = self.sanitize.work.lock();
                let before = work.order.take();
                let operation = Arc::new(Operation::default());
                self.sanitize.waiting.fetch_add(1, Ordering::AcqRel);
                let waiting = Arc::clone(&self.sanitize.waiting);
                let failure = failed();
                let awaited =
                    Awaited { operation: Arc::clone(&operation), immediate, failure, waiting };
                if !self.begin(Some(operation), before.clone()) {
                    work.order = before;
                    return Err(Fail::Bare(Status::Busy));
                }
                work.has_thread = true;
                Ok(Some(awaited))
            }
        }
    }

    /// Has the order carried out by a thread of its own; `false`: there is none. `operation`: whose it is, if
    /// it is a new one; then `before` is what there was.
    fn begin(self: &Arc<Self>, operation: Option<Arc<Operation>>, before: Option<Order>) -> bool {
        let volume = Arc::clone(self);
        let work = move || volume.work(operation.as_deref(), before);
        crate::aside::run("sanitize", work)
    }

    fn work(self: &Arc<Self>, operation: Option<&Operation>, before: Option<Order>) {
        let told = |state| operation.iter().for_each(|operation| operation.set(state));
        let records = self.records();
        let lock = records.map(|records| records.lock(Record::Sanitize, self.uuid())).transpose();
        let is_kept = lock.is_ok() && self.keep_or_read(operation.is_some());
        if !is_kept {
            // A new one did not begin; one from before stays for the next session.
            if operation.is_some() {
                self.end_work(before);
            }
            self.sanitize.work.lock().has_thread = false;
            return told(Operation::REFUSED);
        }
        told(Operation::ACCEPTED);
        let Some(mut order) = self.sanitize.work.lock().order.clone().filter(|o| !o.failed) else {
            // Another process has ended it, or EXIT FAILURE MODE.
            let order = self.sanitize.work.lock().order.clone();
            self.end_work(order);
            return told(Operation::DONE);
        };
        self.wait_until_quiet();
        let ended = loop {
            let ended = self.carry_out(&order);
            let mut work = self.sanitize.work.lock();
            // Who came back meanwhile has found the thread there.
            if ended == Err(Ended::Away) && self.has_units() {
                continue;
            }
            work.has_thread = !matches!(ended, Err(Ended::Away | Ended::Removed));
            break ended;
        };
        match ended {
            Ok(()) if self.keep(None) => {
                self.end_work(None);
                told(Operation::DONE);
            }
            Err(Ended::Away | Ended::Removed) => told(Operation::FAILED),
            // What stays kept would erase what is written from now on, after a restart.
            Ok(()) | Err(Ended::Failed) => {
                order.failed = true;
                self.keep(Some(&order));
                self.end_work(Some(order));
                told(Operation::FAILED);
            }
        }
    }

    /// Keeps a new order, or looks what has become of one from before.
    fn keep_or_read(&self, is_new: bool) -> bool {
        let order = self.sanitize.work.lock().order.clone();
        match self.records() {
            Some(_) if is_new => self.keep(order.as_ref()),
            Some(records) => match kept(&**records, self.uuid()) {
                Ok(order) => {
                    self.sanitize.work.lock().order = order.map(|order| self.found(order));
                    true
                }
                Err(()) => false,
            },
            None => true,
        }
    }

    fn keep(&self, order: Option<&Order>) -> bool {
        let Some(records) = self.records() else { return true };
        let text = order.and_then(|order| serde_json::to_string(order).ok());
        records.keep(Record::Sanitize, self.uuid(), text.as_deref()).is_ok()
    }

    fn end_work(&self, order: Option<Order>) {
        let mut work = self.sanitize.work.lock();
        work.has_thread = false;
        self.enter(Sanitize::phase_of(order.as_ref()));
        work.order = order;
    }

    /// Waits until no command has an I/O under way that began before.
    fn wait_until_quiet(&self) {
        let busy = || {
            let count: u32 = self.units().iter().map(|unit| unit.commands_in_flight()).sum();
            count > self.sanitize.waiting.load(Ordering::Acquire)
        };
        thread::sleep(SEEN);
        while busy() {
            thread::sleep(SEEN);
        }
    }

    fn carry_out(&self, order: &Order) -> Result<(), Ended> {
        let unit = self.units().into_iter().next().ok_or(Ended::Away)?;
        let (bdev, zeroing) = (Arc::clone(unit.bdev()), unit.features.zeroing());
        drop(unit);
        let mut goes_on = |done: u64, all: u64| {
            let progress = (u128::from(done) << 16) / u128::from(all.max(1));
            self.sanitize.progress.store(progress as u32, Ordering::Relaxed);
            self.has_units()
        };
        // A reset may change them meanwhile.
        let tags = |lba, blocks| match bdev.protection() {
            Some(_) => self.tags().of(lba, blocks),
            None => AppTags::NONE,
        };
        work::carry_out(&*bdev, order, zeroing, &tags, &mut goes_on)
    }
}
