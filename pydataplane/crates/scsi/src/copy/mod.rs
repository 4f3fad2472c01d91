//! EXTENDED COPY and RECEIVE COPY RESULTS (SPC-4 6.4, 6.17 to 6.22): the target copies between units of one
//! controller, so that the data does not pass through the guest.
//!
//! | file | what |
//! | --- | --- |
//! | `order` | the parameter list |
//! | `work` | the blocking I/O of it |
//!
//! A unit is named by its designators of page 83h, and is found only on the controller of who asks: no guest
//! names another's. Data is read and written, whatever the units share below. What a command copies is the
//! unit's at each moment: a reservation, a reset, or that the volume is sanitized ends it.

mod order;
mod work;

use crate::inquiry::local_naa;
use crate::opcode::Cdb;
use crate::reply::{Reply, send};
use crate::response::{Fail, Status};
use crate::sense::{Code, Sense};
use crate::shared::LunShared;
use guestmem::Sg;
use order::{BLOCK_TO_BLOCK, IDENTIFICATION, MAX_CSCDS, MAX_DESCRIPTORS, MAX_SEGMENTS};
use parking_lot::{Mutex, RwLock};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread;
use work::{Done, Ended};

/// 3PC (SPC-4 6.6.2).
pub(crate) const THIRD_PARTY_COPY: u8 = 0x08;
/// Results that are held for a unit: the last ones.
const MAX_RESULTS: usize = 16;
/// log2 of bytes in which segments are counted.
const GRANULARITY: u8 = 9;

/// What a copy has come to, for RECEIVE COPY STATUS.
#[derive(Clone, Copy)]
struct CopyResult {
    list_id: u8,
    /// COPY MANAGER STATUS: 1, completed; 2, with errors.
    status: u8,
    done: Done,
}

/// What a unit has to do with copies.
#[derive(Default)]
pub(crate) struct Copies {
    /// Results that an initiator may ask for.
    results: Mutex<VecDeque<CopyResult>>,
    /// Another unit has taken its place: nothing is copied from or to this one any more.
    replaced: RwLock<bool>,
}

impl Copies {
    /// Whether nothing is to be copied from or to the unit; waits for the present I/O.
    pub(crate) fn set_replaced(&self, replaced: bool) {
        *self.replaced.write() = replaced;
    }

    /// Whether nothing is, as far as that is known at once: for I/O threads.
    fn may_be_replaced(&self) -> bool {
        self.replaced.try_read().is_none_or(|replaced| *replaced)
    }

    fn hold(&self, result: CopyResult) {
        let mut results = self.results.lock();
        results.retain(|held| held.list_id != result.list_id);
        results.truncate(MAX_RESULTS - 1);
        results.push_front(result);
    }
}

/// Units of all controllers.
fn units() -> &'static Mutex<Vec<Weak<LunShared>>> {
    static UNITS: OnceLock<Mutex<Vec<Weak<LunShared>>>> = OnceLock::new();
    UNITS.get_or_init(Mutex::default)
}

/// The unit can be named by others of its controller.
pub(crate) fn register(unit: &Arc<LunShared>) {
    let mut units = units().lock();
    units.retain(|unit| unit.strong_count() > 0);
    units.push(Arc::downgrade(unit));
}

/// The controller of a nexus.
fn controller(nexus: &str) -> &str {
    nexus.rsplit_once(':').map_or(nexus, |(controller, _)| controller)
}

/// The unit of that designator, on the controller of `by`.
fn find(by: &LunShared, kind: u8, designator: &[u8]) -> Option<Arc<LunShared>> {
    const NAA: u8 = 3;
    const UUID: u8 = 0xA;
    let is_named = |unit: &LunShared| match kind {
        NAA => {
            let local = || local_naa(unit.identity());
            let naa = unit.characteristics().wwn.map_or_else(local, u64::to_be_bytes);
            *designator == naa
        }
        UUID => designator.len() == 18 && designator[2..] == *unit.identity().as_bytes(),
        _ => false,
    };
    let (units, of) = (units().lock(), controller(by.nexus_name()));
    let mine = units.iter().filter_map(Weak::upgrade).filter(|u| controller(u.nexus_name()) == of);
    // Of several that show the volume the one that was asked, else the first one.
    let mut named: Vec<_> =
        mine.filter(|unit| is_named(unit) && !unit.copies.may_be_replaced()).collect();
    named.sort_by_key(|unit| !std::ptr::eq(&**unit, by));
    named.into_iter().next()
}

/// A copy that a task waits for.
pub(crate) struct Copying(Arc<State>);

#[derive(Default)]
struct State {
    cancelled: AtomicBool,
    ended: OnceLock<Result<(), Ended>>,
}

impl Copying {
    /// Whether it has ended.
    ///
    /// # Errors
    /// It failed, or was cancelled.
    pub(crate) fn is_over(&self) -> Result<bool, Fail> {
        match self.0.ended.get() {
            None => Ok(false),
            Some(Ok(())) => Ok(true),
            Some(Err(Ended::Failed(sense))) => Err((*sense).into()),
            Some(Err(Ended::Cancelled)) => Err(Fail::Bare(Status::TaskAborted)),
        }
    }

    /// It ends after its present I/O.
    pub(crate) fn cancel(&self) {
        self.0.cancelled.store(true, Ordering::Release);
    }
}

impl Drop for Copying {
    fn drop(&mut self) {
        self.cancel();
    }
}

/// EXTENDED COPY(LID1): begins; `None`: there is nothing to copy.
pub(crate) fn begin(
    unit: &Arc<LunShared>,
    cdb: &Cdb,
    data_out: &Sg,
) -> Result<Option<Copying>, Fail> {
    let length = cdb.be32(10) as usize;
    if length == 0 {
        return Ok(None);
    }
    if length > order::MAX_LIST {
        return Err(longer(data_out));
    }
    if data_out.len() < length {
        return Err(Fail::Overrun);
    }
    let mut list = vec![0; length];
    data_out.copy_to_slice(0, &mut list);
    let order = order::read(&list, &|kind, designator| find(unit, kind, designator))?;
    for segment in &order.segments {
        work::may_use(&segment.from, false)?;
        work::may_use(&segment.to, true)?;
    }
    let state = Arc::new(State::default());
    let (works, asks) = (Arc::clone(&state), Arc::clone(unit));
    let work = move || {
        let mut done = Done::default();
        let ended = work::carry_out(&order.segments, &works.cancelled, &mut done);
        if let Some(list_id) = order.list_id {
            let status = if ended.is_ok() { 1 } else { 2 };
            asks.copies.hold(CopyResult { list_id, status, done });
        }
        _ = works.ended.set(ended);
    };
    match thread::Builder::new().name("copy".to_owned()).spawn(work) {
        Ok(_) => Ok(Some(Copying(state))),
        Err(_) => Err(Fail::Bare(Status::Busy)),
    }
}

/// What is wrong with a list that is longer than any that is taken: its header says of what there is too much.
fn longer(data_out: &Sg) -> Fail {
    let mut header = [0u8; 16];
    data_out.copy_to_slice(0, &mut header);
    let cscds = usize::from(u16::from_be_bytes([header[2], header[3]]));
    let segments = u32::from_be_bytes([header[8], header[9], header[10], header[11]]) as usize;
    let code = match () {
        () if cscds.saturating_add(segments) > MAX_DESCRIPTORS => Code::PARAMETER_LIST_LENGTH_ERROR,
        () if cscds > MAX_CSCDS * 32 => Code::TOO_MANY_CSCD_DESCRIPTORS,
        () => Code::PARAMETER_LIST_LENGTH_ERROR,
    };
    Sense::illegal(code).into()
}

/// RECEIVE COPY STATUS(LID1) (SPC-4 6.18).
///
/// # Errors
/// INVALID FIELD IN CDB for a list identifier that nothing is held of.
pub(crate) fn status(unit: &LunShared, cdb: &Cdb, data_in: &Sg) -> Result<u32, Fail> {
    let results = unit.copies.results.lock();
    let held = results.iter().find(|held| held.list_id == cdb.byte(2));
    let Some(held) = held else { return Err(Sense::invalid_cdb(2, None).into()) };
    let (units, count) = transfer_count(held.done.bytes);
    let mut data = [0, 0, 0, 8, held.status, 0, 0, units, 0, 0, 0, 0];
    data[5..7].copy_from_slice(&held.done.segments.to_be_bytes());
    data[8..].copy_from_slice(&count.to_be_bytes());
    send(data_in, cdb.be32(10) as usize, &data)
}

/// TRANSFER COUNT UNITS, of which 0 is bytes and each next one 1024 times as much, and TRANSFER COUNT.
fn transfer_count(bytes: u64) -> (u8, u32) {
    let count = |units: u8| u32::try_from(bytes >> (10 * units)).map(|count| (units, count));
    (0..=4).find_map(|units| count(units).ok()).expect("2^64 bytes are 2^24 times 2^40")
}

/// RECEIVE COPY OPERATING PARAMETERS (SPC-4 6.19).
pub(crate) fn parameters(unit: &LunShared, cdb: &Cdb, data_in: &Sg) -> Result<u32, Fail> {
    const SNLID: u8 = 0x01;
    let mut data = [0u8; 46];
    data[3] = data.len() as u8 - 4;
    data[4] = SNLID;
    data[8..10].copy_from_slice(&(MAX_CSCDS as u16).to_be_bytes());
    data[10..12].copy_from_slice(&(MAX_SEGMENTS as u16).to_be_bytes());
    data[12..16].copy_from_slice(&(MAX_DESCRIPTORS as u32).to_be_bytes());
    data[16..20].copy_from_slice(&max_segment(unit).to_be_bytes());
    data[35] = 1;
    data[36] = 1;
    data[37] = GRANULARITY;
    data[43] = 2;
    data[44..].copy_from_slice(&[BLOCK_TO_BLOCK, IDENTIFICATION]);
    send(data_in, cdb.be32(10) as usize, &data)
}

/// Bytes of a segment at most.
fn max_segment(unit: &LunShared) -> u32 {
    (order::MAX_SEGMENT_BLOCKS * u64::from(unit.block_size)) as u32
}

/// Third-party copy (SPC-4 7.8.17, page 8Fh): what is copied how.
pub(crate) fn page(unit: &LunShared, code: u8, reply: &mut Reply) {
    let mut data = [0u8; 104];
    // Supported commands: EXTENDED COPY(LID1); COPY STATUS(LID1), OPERATING PARAMETERS.
    data[..12].copy_from_slice(&[0, 0x01, 0, 8, 7, 0x83, 1, 0x00, 0x84, 2, 0x00, 0x03]);
    // Parameter data.
    data[12..16].copy_from_slice(&[0, 0x04, 0, 28]);
    data[20..22].copy_from_slice(&(MAX_CSCDS as u16).to_be_bytes());
    data[22..24].copy_from_slice(&(MAX_SEGMENTS as u16).to_be_bytes());
    data[24..28].copy_from_slice(&(MAX_DESCRIPTORS as u32).to_be_bytes());
    // Supported descriptors.
    data[44..52].copy_from_slice(&[0, 0x08, 0, 4, 2, BLOCK_TO_BLOCK, IDENTIFICATION, 0]);
    // Supported CSCD descriptor IDs: none that names a unit by itself.
    data[52..60].copy_from_slice(&[0, 0x0C, 0, 4, 0, 0, 0, 0]);
    // General copy operations: one at a time for each thread of a unit.
    data[60..64].copy_from_slice(&[0x80, 0x01, 0, 32]);
    data[67] = 1;
    data[71] = 1;
    data[72..76].copy_from_slice(&max_segment(unit).to_be_bytes());
    data[76] = GRANULARITY;
    let data = &data[..96];
    reply.put(&[0, code, 0, data.len() as u8]);
    reply.put(data);
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
