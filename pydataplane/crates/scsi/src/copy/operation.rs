//! What was ordered to be copied, and has come of it, for RECEIVE COPY STATUS, RECEIVE COPY FAILURE DETAILS and RECEIVE
//! ROD TOKEN INFORMATION.

mod failure;

use super::order::aborted;
use super::token::{MAX_TOKENS, TOKEN_LEN, Token};
use super::work::Ended;
use crate::opcode::Cdb;
use crate::reply::{Reply, send};
use crate::response::{Fail, Status};
use crate::sense::{Code, SENSE_LEN, Sense};
use crate::shared::LunShared;
pub(crate) use failure::failure1;
use guestmem::Sg;
use parking_lot::{Mutex, RwLock};
use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Operations of a unit that an initiator may ask for: those that go on, and the last ones.
const MAX_HELD: usize = 16;
/// Operations of a unit that go on at a time.
pub(crate) const MAX_OPERATIONS: usize = 8;

/// One of them. What is not immediate has a task that waits for it.
pub(crate) struct Operation {
    /// By which the initiator asks for it, if it does.
    list_id: Option<u32>,
    /// Service action of the command.
    action: u8,
    pub(crate) immediate: bool,
    /// It has less data than it was to write.
    short: AtomicBool,
    /// It cannot be done a second time, and waits until it may begin.
    unrepeatable: bool,
    may_begin: AtomicBool,
    cancelled: AtomicBool,
    segments: AtomicU32,
    bytes: AtomicU64,
    token: OnceLock<[u8; TOKEN_LEN]>,
    ended: OnceLock<Result<(), Ended>>,
    /// Why it failed was told, and is told no more by RECEIVE COPY FAILURE DETAILS.
    is_told: AtomicBool,
}

impl Operation {
    pub(crate) fn new(cdb: &Cdb, list_id: Option<u32>, immediate: bool) -> Self {
        Operation {
            list_id,
            action: cdb.byte(1) & 0x1F,
            immediate,
            short: AtomicBool::new(false),
            unrepeatable: false,
            may_begin: AtomicBool::new(false),
            cancelled: AtomicBool::new(false),
            segments: AtomicU32::new(0),
            bytes: AtomicU64::new(0),
            token: OnceLock::new(),
            ended: OnceLock::new(),
            is_told: AtomicBool::new(false),
        }
    }

    /// It changes what it copies: done a second time, it would do something else.
    pub(crate) fn set_unrepeatable(&mut self, unrepeatable: bool) {
        self.unrepeatable = unrepeatable;
    }

    /// Whether it may change something.
    pub(crate) fn may_begin(&self) -> bool {
        !self.unrepeatable || self.may_begin.load(Ordering::Acquire)
    }

    /// It will write less than was asked for.
    pub(crate) fn set_short(&self, short: bool) {
        self.short.store(short, Ordering::Relaxed);
    }

    /// So many bytes more are done.
    pub(crate) fn count(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// One more segment is done.
    pub(crate) fn count_segment(&self) {
        self.segments.fetch_add(1, Ordering::Relaxed);
    }

    /// What it was to make is there.
    pub(crate) fn hand_out(&self, token: [u8; TOKEN_LEN]) {
        _ = self.token.set(token);
    }

    pub(crate) fn end(&self, ended: Result<(), Ended>) {
        _ = self.ended.set(ended);
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    /// It ends after its present I/O.
    fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
    }

    fn goes_on(&self) -> bool {
        self.ended.get().is_none()
    }

    fn done(&self) -> (u64, u16) {
        let segments = self.segments.load(Ordering::Relaxed).min(u16::MAX.into());
        (self.bytes.load(Ordering::Relaxed), segments as u16)
    }
}

/// One that a task waits for, and that ends when nobody does.
pub(crate) struct Copying {
    operation: Arc<Operation>,
    /// It was cancelled as its task was to stop, whatever becomes of the task.
    stopped: Cell<bool>,
}

impl Copying {
    pub(crate) fn new(operation: Arc<Operation>) -> Self {
        Copying { operation, stopped: Cell::new(false) }
    }

    /// [`Operation::set_unrepeatable`].
    pub(crate) fn is_unrepeatable(&self) -> bool {
        self.operation.unrepeatable
    }

    /// It was waited for that nobody does it a second time.
    pub(crate) fn let_begin(&self) {
        self.operation.may_begin.store(true, Ordering::Release);
    }

    /// Whether it has ended; `stopped`: its task is to stop, and is done again where that is possible. A copy that was
    /// [stopped](Copying::stop) is over for good: where its task goes on meanwhile, the initiator is to send it again.
    ///
    /// # Errors
    /// It failed, or was cancelled.
    pub(crate) fn is_over(&self, stopped: bool) -> Result<bool, Fail> {
        match self.operation.ended.get() {
            None => Ok(false),
            Some(Ok(())) => Ok(true),
            Some(Err(Ended::Failed(sense))) => Err((*sense).into()),
            Some(Err(Ended::Cancelled))
                if (stopped || self.stopped.get()) && self.operation.unrepeatable =>
            {
                Err(match self.operation.done() {
                    (0, _) => Fail::Bare(Status::Busy),
                    _ => aborted(Code::IO_PROCESS_TERMINATED).into(),
                })
            }
            Some(Err(Ended::Cancelled)) if self.stopped.get() && !stopped => {
                Err(Fail::Bare(Status::Busy))
            }
            Some(Err(Ended::Cancelled)) => Err(Fail::Bare(Status::TaskAborted)),
        }
    }

    /// Whether it is still to be waited for.
    pub(crate) fn goes_on(&self) -> bool {
        self.operation.goes_on()
    }

    /// It ends after its present I/O.
    pub(crate) fn cancel(&self) {
        self.operation.cancel();
    }

    /// The same, as its task is to stop.
    pub(crate) fn stop(&self) {
        // What somebody else has cancelled before stays so.
        self.stopped.set(self.stopped.get() || !self.operation.is_cancelled());
        self.cancel();
    }
}

impl Drop for Copying {
    fn drop(&mut self) {
        self.cancel();
    }
}

/// What a unit has to do with copies.
#[derive(Default)]
pub(crate) struct Copies {
    /// The newest first.
    operations: Mutex<VecDeque<Arc<Operation>>>,
    /// The oldest first.
    tokens: Mutex<VecDeque<Arc<Token>>>,
    /// Another unit has taken its place: nothing is copied from or to this one any more.
    pub(crate) replaced: RwLock<bool>,
}

impl Copies {
    /// Whether nothing is to be copied from or to the unit; waits for the present I/O.
    pub(crate) fn set_replaced(&self, replaced: bool) {
        *self.replaced.write() = replaced;
    }

    /// As `set_replaced(true)`, if the present I/O ends within `most`.
    pub(crate) fn end(&self, most: Duration) {
        if let Some(mut replaced) = self.replaced.try_write_for(most) {
            *replaced = true;
        }
    }

    /// Whether nothing is, as far as that is known at once: for I/O threads.
    pub(crate) fn may_be_replaced(&self) -> bool {
        self.replaced.try_read().is_none_or(|replaced| *replaced)
    }

    /// The operation can be asked for; what had its list identifier before cannot any more.
    ///
    /// # Errors
    /// OPERATION IN PROGRESS, of that list identifier; BUSY: too many go on.
    pub(crate) fn begin(&self, operation: &Arc<Operation>) -> Result<(), Fail> {
        let mut operations = self.operations.lock();
        let is_same =
            |other: &Operation| other.list_id.is_some() && other.list_id == operation.list_id;
        if operations.iter().any(|other| is_same(other) && other.goes_on()) {
            return Err(Sense::illegal(Code::OPERATION_IN_PROGRESS).into());
        }
        if operations.iter().filter(|other| other.goes_on()).count() >= MAX_OPERATIONS {
            return Err(Fail::Bare(Status::Busy));
        }
        operations.retain(|other| !is_same(other) && (other.list_id.is_some() || other.goes_on()));
        if operations.len() >= MAX_HELD {
            let oldest = operations.iter().rposition(|other| !other.goes_on());
            oldest.and_then(|index| operations.remove(index));
        }
        operations.push_front(Arc::clone(operation));
        Ok(())
    }

    /// The operation did not begin.
    pub(crate) fn forget(&self, operation: &Arc<Operation>) {
        self.operations.lock().retain(|other| !Arc::ptr_eq(other, operation));
    }

    /// All that go on end after their present I/O.
    pub(crate) fn cancel(&self) {
        self.operations.lock().iter().for_each(|operation| operation.cancel());
    }

    /// # Errors
    /// INVALID FIELD IN CDB, at byte 2: there is no such one.
    fn operation(&self, list_id: u32) -> Result<Arc<Operation>, Fail> {
        let operations = self.operations.lock();
        let found = operations.iter().find(|operation| operation.list_id == Some(list_id));
        found.cloned().ok_or(Sense::invalid_cdb(2, None).into())
    }

    /// The token that is these bytes.
    pub(crate) fn token(&self, given: &[u8; TOKEN_LEN]) -> Option<Arc<Token>> {
        self.tokens.lock().iter().find(|token| token.is(given)).cloned()
    }

    /// One more token is known. For a thread of its own.
    pub(crate) fn keep_token(&self, token: Token) {
        self.tokens.lock().push_back(Arc::new(token));
        self.make_room_for_tokens(0);
    }

    /// There is room for one more: of what is not good any more, else of the oldest, which is revoked.
    pub(crate) fn make_room_for_token(&self) {
        self.make_room_for_tokens(1);
    }

    fn make_room_for_tokens(&self, more: usize) {
        let mut tokens = self.tokens.lock();
        while tokens.len() + more > MAX_TOKENS {
            let bad = tokens.iter().position(|token| !token.is_good());
            if let Some(token) = tokens.remove(bad.unwrap_or(0)) {
                token.watch().revoke();
            }
        }
    }

    /// Those that are not good any more are unknown from now on.
    pub(crate) fn forget_bad_tokens(&self) {
        self.tokens.lock().retain(|token| token.is_good());
    }
}

/// COPY OPERATION ABORT (SPC-4 6.3): it ends after its present I/O, as TASK ABORTED where a task waits.
///
/// # Errors
/// INVALID FIELD IN CDB for a list identifier of which nothing goes on.
pub(crate) fn abort(unit: &LunShared, cdb: &Cdb) -> Result<u32, Fail> {
    let operation = unit.copies.operation(cdb.be32(2))?;
    if !operation.goes_on() {
        return Err(Sense::invalid_cdb(2, None).into());
    }
    operation.cancel();
    Ok(0)
}

/// RECEIVE COPY STATUS(LID1) (SPC-4 6.18).
///
/// # Errors
/// INVALID FIELD IN CDB for a list identifier that nothing is held of.
pub(crate) fn status1(unit: &LunShared, cdb: &Cdb, data_in: &Sg) -> Result<u32, Fail> {
    let operation = unit.copies.operation(cdb.byte(2).into())?;
    // COPY MANAGER STATUS: 0, in progress; 1, completed; 2, with errors.
    let status = operation.ended.get().map_or(0, |ended| if ended.is_ok() { 1 } else { 2 });
    let (bytes, segments) = operation.done();
    let (units, count) = transfer_count(bytes);
    let mut data = [0, 0, 0, 8, status, 0, 0, units, 0, 0, 0, 0];
    data[5..7].copy_from_slice(&segments.to_be_bytes());
    data[8..].copy_from_slice(&count.to_be_bytes());
    send(data_in, cdb.be32(10) as usize, &data)
}

/// TRANSFER COUNT UNITS, of which 0 is bytes and each next one 1024 times as much, and TRANSFER COUNT.
fn transfer_count(bytes: u64) -> (u8, u32) {
    let count = |units: u8| u32::try_from(bytes >> (10 * units)).map(|count| (units, count));
    (0..=4).find_map(|units| count(units).ok()).expect("2^64 bytes are 2^24 times 2^40")
}

/// COPY OPERATION STATUS (SPC-4 6.24, table 246).
const COMPLETED: u8 = 0x01;
const FAILED: u8 = 0x02;
const COMPLETED_SHORT: u8 = 0x04;
const IN_FOREGROUND: u8 = 0x11;
const IN_BACKGROUND: u8 = 0x12;
const TERMINATED: u8 = 0x60;
/// ESTIMATED STATUS UPDATE DELAY, in milliseconds.
const DELAY_MS: u32 = 10;
/// TRANSFER COUNT UNITS: logical blocks.
const BLOCKS: u8 = 0xF1;
/// Service actions of which the initiator counts blocks.
const BY_TOKEN: [u8; 2] = [0x10, 0x11];
/// Bytes with room for sense data.
const SENSE_FIELD: usize = 20;

/// RECEIVE COPY STATUS(LID4) (SPC-4 6.24); with `tokens`, RECEIVE ROD TOKEN INFORMATION (6.27): the same, and the
/// token.
///
/// # Errors
/// INVALID FIELD IN CDB for a list identifier that nothing is held of.
pub(crate) fn status4(
    unit: &LunShared,
    cdb: &Cdb,
    tokens: bool,
    data_in: &Sg,
) -> Result<u32, Fail> {
    let operation = unit.copies.operation(cdb.be32(2))?;
    let (bytes, segments) = operation.done();
    let mut data = [0; 32 + SENSE_FIELD];
    let ended = operation.ended.get();
    data[4] = operation.action;
    data[5] = match ended {
        None if operation.immediate => IN_BACKGROUND,
        None => IN_FOREGROUND,
        Some(Ok(())) if operation.short.load(Ordering::Relaxed) => COMPLETED_SHORT,
        Some(Ok(())) => COMPLETED,
        Some(Err(Ended::Failed(_))) => FAILED,
        Some(Err(Ended::Cancelled)) => TERMINATED,
    };
    let delay = if ended.is_none() { DELAY_MS } else { 0 };
    data[8..12].copy_from_slice(&delay.to_be_bytes());
    data[12] = match ended {
        None | Some(Ok(())) => Status::Good as u8,
        Some(Err(Ended::Failed(_))) => Status::CheckCondition as u8,
        Some(Err(Ended::Cancelled)) => Status::TaskAborted as u8,
    };
    let mut length = 32;
    if let Some(Err(Ended::Failed(sense))) = ended {
        (data[13], data[14]) = (SENSE_FIELD as u8, SENSE_LEN as u8);
        data[32..32 + SENSE_LEN].copy_from_slice(&sense.fixed());
        length += SENSE_FIELD;
    }
    let by_token = BY_TOKEN.contains(&operation.action);
    let count = if by_token { unit.blocks(bytes) } else { bytes };
    data[15] = if by_token { BLOCKS } else { 0 };
    data[16..24].copy_from_slice(&count.to_be_bytes());
    data[24..26].copy_from_slice(&segments.to_be_bytes());
    let token = operation.token.get().filter(|_| tokens && ended == Some(&Ok(())));
    let more = if tokens { 4 + token.map_or(0, |_| 2 + TOKEN_LEN) } else { 0 };
    data[..4].copy_from_slice(&((length + more - 4) as u32).to_be_bytes());
    let mut reply = Reply::new(data_in, cdb.be32(10) as usize);
    reply.put(&data[..length]);
    if tokens {
        reply.put(&((more - 4) as u32).to_be_bytes());
    }
    if let Some(token) = token {
        // ID FOR CREATING ROD CSCD DESCRIPTOR: of EXTENDED COPY.
        reply.put(&[0, 0]);
        reply.put(token);
    }
    reply.end()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spc4_6_18_a_count_that_is_too_large_is_told_in_larger_units() {
        for (bytes, told) in [
            (0, (0, 0)),
            (u64::from(u32::MAX), (0, u32::MAX)),
            (1 << 32, (1, 1 << 22)),
            ((1 << 42) - 1, (1, u32::MAX)),
            (1 << 42, (2, 1 << 22)),
            (u64::MAX, (4, (1 << 24) - 1)),
        ] {
            assert_eq!(transfer_count(bytes), told);
        }
    }
}
