//! EXTENDED COPY, and copies by ROD token (ODX): POPULATE TOKEN, WRITE USING TOKEN; and what RECEIVE COPY RESULTS
//! tells of them (SPC-4 6.4, 6.5, 6.17 to 6.23; SBC-3 5.8, 5.48). The target copies between units of one
//! controller, so that the data does not pass through the guest.
//!
//! | file | what |
//! | --- | --- |
//! | `order` | the parameter lists of EXTENDED COPY |
//! | `ranges` | those of POPULATE TOKEN and WRITE USING TOKEN |
//! | `token` | ROD tokens |
//! | `operation` | what was ordered, and has come of it |
//! | `work` | the blocking I/O of it |
//! | `page` | what is copied how |
//!
//! A unit is named by its designators of page 83h, and is found only on the controller of who asks: no guest
//! names another's; nor does a token. Data is read and written, whatever the units share below. What an EXTENDED
//! COPY copies is the unit's at each moment: a reservation, a reset, or that the volume is sanitized ends it. What
//! a token stands for is as it was when it was made, or the token is revoked.
//!
//! Seen are the changes that any unit makes which shows the volume as the same disk, on any controller and also by
//! virtio-blk. What is written to the volume by other ways (an export, a unit with another UUID, the layers below)
//! is not: a token then stands for what is read when it is used.
//!
//! Each copy has a thread of its own, and what writes has a task that waits for it, with IMMED too: so whatever ends
//! tasks (an abort, a reset, a guest's new start, the end of the session) ends the copy, and waits for its present
//! I/O; so does the detach of a unit that is copied from or to. POPULATE TOKEN with IMMED, which writes nothing, goes on by itself.
//!
//! An EXTENDED COPY that writes where it has read would do something else if it was done a second time. It begins
//! when its transport knows that ([`crate::Task::is_unrepeatable`]), and where its task is to stop, to be done again, it
//! ends as COPY ABORTED if it has written.

mod operation;
mod order;
mod page;
mod ranges;
mod token;
mod work;

use crate::aside;
use crate::block::check_writable;
use crate::inquiry::naa;
use crate::opcode::{Cdb, Command};
use crate::response::{Fail, Status};
use crate::sense::{Code, Key, Sense};
use crate::shared::LunShared;
use guestmem::Sg;
use operation::Operation;
pub(crate) use operation::{Copies, Copying, MAX_OPERATIONS, abort, failure1, status1, status4};
pub(crate) use order::aborted;
use order::{Format, Header, MAX_CSCDS, MAX_DESCRIPTORS, Order};
pub(crate) use page::{page, parameters};
use parking_lot::Mutex;
use ranges::{Populate, WriteUsing, total};
use std::sync::{Arc, OnceLock, Weak};
use token::Token;
use work::{Ended, Run, Segment};

/// 3PC (SPC-4 6.6.2).
pub(crate) const THIRD_PARTY_COPY: u8 = 0x08;

/// Units of all controllers.
fn units() -> &'static Mutex<Vec<Weak<LunShared>>> {
    static UNITS: OnceLock<Mutex<Vec<Weak<LunShared>>>> = OnceLock::new();
    UNITS.get_or_init(Mutex::default)
}

/// The unit can be named by others of its controller.
pub(crate) fn register(unit: &Arc<LunShared>) {
    aside::here();
    let mut units = units().lock();
    units.retain(|unit| unit.strong_count() > 0);
    units.push(Arc::downgrade(unit));
}

/// The controller of a nexus.
fn controller(nexus: &str) -> &str {
    nexus.rsplit_once(':').map_or(nexus, |(controller, _)| controller)
}

/// The units of the controller of `by`, but for those that are not to be copied from or to.
fn units_beside(by: &LunShared) -> Vec<Arc<LunShared>> {
    let (units, of) = (units().lock(), controller(by.nexus_name()));
    let mine = units.iter().filter_map(Weak::upgrade).filter(|u| controller(u.nexus_name()) == of);
    mine.filter(|unit| !unit.copies.may_be_replaced()).collect()
}

/// The unit of that designator, on the controller of `by`.
fn find(by: &LunShared, kind: u8, designator: &[u8]) -> Option<Arc<LunShared>> {
    const NAA: u8 = 3;
    const UUID: u8 = 0xA;
    let is_named = |unit: &LunShared| match kind {
        NAA => *designator == naa(unit),
        UUID => designator.len() == 18 && designator[2..] == *unit.identity().as_bytes(),
        _ => false,
    };
    // Of several that show the volume the one that was asked, else the first one.
    let mut named: Vec<_> = units_beside(by).into_iter().filter(|unit| is_named(unit)).collect();
    named.sort_by_key(|unit| !std::ptr::eq(&**unit, by));
    named.into_iter().next()
}

/// The token that is these bytes, on the controller of `by`.
fn token_of(by: &LunShared, given: &[u8; token::TOKEN_LEN]) -> Option<Arc<Token>> {
    units_beside(by).iter().find_map(|unit| unit.copies.token(given))
}

/// Begins what the command orders; `None`: it has been done, or is not to be waited for.
pub(crate) fn begin(
    unit: &Arc<LunShared>,
    command: Command,
    cdb: &Cdb,
    data_out: &Sg,
) -> Result<Option<Copying>, Fail> {
    let length = cdb.be32(10) as usize;
    if length == 0 {
        return Ok(None);
    }
    let format = match command {
        Command::ExtendedCopy1 => Some(Format::Lid1),
        Command::ExtendedCopy4 => Some(Format::Lid4),
        _ => None,
    };
    if length > format.map_or(ranges::MAX_LIST, Format::max_list) {
        let too_long = Sense::illegal(Code::PARAMETER_LIST_LENGTH_ERROR).into();
        return Err(format.map_or(too_long, |format| longer(data_out, format)));
    }
    if data_out.len() < length {
        return Err(Fail::Overrun);
    }
    let mut list = vec![0; length];
    data_out.copy_to_slice(0, &mut list);
    match (command, format) {
        (_, Some(format)) => extended_copy(unit, cdb, format, &list),
        (Command::PopulateToken, _) => populate(unit, cdb, &list),
        _ => write_using(unit, cdb, &list),
    }
}

fn extended_copy(
    unit: &Arc<LunShared>,
    cdb: &Cdb,
    format: Format,
    list: &[u8],
) -> Result<Option<Copying>, Fail> {
    let unit_of = |kind, designator: &_| find(unit, kind, designator);
    let read = || {
        let order = order::read(list, format, &unit_of)?;
        for segment in &order.segments {
            work::may_use(&segment.from, false)?;
            work::may_use(&segment.to, true)?;
        }
        Ok(order)
    };
    let Order { segments, list_id } =
        read().map_err(|sense| segments_failed(unit, cdb, list, format, sense))?;
    let mut operation = Operation::new(cdb, list_id, false);
    operation.set_unrepeatable(order::is_unrepeatable(&segments));
    start(unit, operation, move |run| {
        run.wait_to_begin()?;
        work::carry_out(&segments, None, run)
    })
}

/// What is wrong with a list. If it is with what its segments are about, the initiator can ask for it by the list's
/// identifier, too (SPC-4 5.17.7.4).
fn segments_failed(unit: &LunShared, cdb: &Cdb, list: &[u8], format: Format, sense: Sense) -> Fail {
    let list_id = Header::read(list, format).ok().and_then(|header| header.list_id);
    if sense.key != Key::IllegalRequest && list_id.is_some() {
        let operation = Arc::new(Operation::new(cdb, list_id, false));
        if let Err(fail) = unit.copies.begin(&operation) {
            return fail;
        }
        operation.end(Err(Ended::Failed(sense)));
    }
    sense.into()
}

/// POPULATE TOKEN (SBC-3 5.8): the token is handed out when nothing that began before can change its blocks.
fn populate(unit: &Arc<LunShared>, cdb: &Cdb, list: &[u8]) -> Result<Option<Copying>, Fail> {
    let Populate { immediate, timeout, ranges } = Populate::read(list, unit)?;
    let operation = Operation::new(cdb, Some(cdb.be32(6)), immediate);
    let of = Arc::clone(unit);
    start(unit, operation, move |run| {
        let room = || Ended::Failed(Sense::illegal(Code::INSUFFICIENT_RESOURCES_FOR_TOKEN));
        of.copies.make_room_for_token();
        let watch = || of.volume.watch(&ranges, timeout);
        let watch = watch().or_else(|| {
            of.volume.units().iter().for_each(|unit| unit.copies.forget_bad_tokens());
            watch()
        });
        let watch = watch.ok_or_else(room)?;
        if !of.volume.settle(|| run.check().is_ok()) {
            return Err(Ended::Cancelled);
        }
        // What began to sanitize the volume before it was watched.
        run.check()?;
        work::may_use(&of, false).map_err(Ended::Failed)?;
        run.operation.count(total(&ranges));
        let token = Token::new(&of, ranges, watch);
        run.operation.hand_out(*token.bytes());
        of.copies.keep_token(token);
        Ok(())
    })
}

/// WRITE USING TOKEN (SBC-3 5.48): as much as the token has data for.
fn write_using(unit: &Arc<LunShared>, cdb: &Cdb, list: &[u8]) -> Result<Option<Copying>, Fail> {
    check_writable(unit)?;
    let WriteUsing { delete, offset, token, ranges } = WriteUsing::read(list, unit)?;
    let operation = Operation::new(cdb, Some(cdb.be32(6)), false);
    if token::is_of_zeros(token)? {
        let to = Arc::clone(unit);
        return start(unit, operation, move |run| work::write_zeroes(&to, &ranges, run));
    }
    let token = token_of(unit, token).ok_or(Sense::illegal(Code::TOKEN_UNKNOWN))?;
    token.check()?;
    let from = token.unit.upgrade().ok_or(Sense::illegal(Code::TOKEN_UNKNOWN))?;
    work::may_use(&from, false)?;
    let has = total(&token.ranges);
    if offset >= has {
        return Err(Sense::invalid_parameter(8).into());
    }
    // Segments are whole blocks of both.
    let (block, of_target) = (u64::from(from.block_size), u64::from(unit.block_size));
    if !offset.is_multiple_of(block) || !ranges.iter().all(|r| r.bytes.is_multiple_of(block)) {
        return Err(Sense::invalid_parameter(ranges::WRITE_LENGTH_AT).into());
    }
    let segments = segments(&from, &token.ranges, offset, unit, &ranges);
    if !segments.iter().all(|segment| segment.bytes.is_multiple_of(of_target)) {
        return Err(Sense::invalid_parameter(ranges::TOKEN_AT).into());
    }
    operation.set_short(total(&ranges) > has - offset);
    start(unit, operation, move |run| {
        let in_use = token.watch().in_use();
        let done = work::carry_out(&segments, Some(&token), run);
        drop(in_use);
        if delete && done.is_ok() {
            token.watch().delete();
        }
        done
    })
}

/// What is copied to `ranges` of `to` out of those of a token, from that byte of its data on; whole blocks of `to`.
fn segments(
    from: &Arc<LunShared>,
    token: &[crate::watch::Range],
    offset: u64,
    to: &Arc<LunShared>,
    ranges: &[crate::watch::Range],
) -> Vec<Segment> {
    let block = u64::from(to.block_size);
    let mut left = (total(token) - offset) / block * block;
    let mut skip = offset;
    let mut sources = token.iter().filter_map(|range| {
        let skipped = skip.min(range.bytes);
        skip -= skipped;
        (skipped < range.bytes).then_some((range.at + skipped, range.bytes - skipped))
    });
    let mut source = (0, 0);
    let mut segments = Vec::new();
    for range in ranges {
        let (mut to_at, end) = (range.at, range.at + range.bytes.min(left));
        left -= end - to_at;
        while to_at < end {
            if source.1 == 0 {
                source = sources.next().expect("no more is taken than there is");
            }
            let bytes = source.1.min(end - to_at);
            let (from, to) = (Arc::clone(from), Arc::clone(to));
            segments.push(Segment { from, to, from_at: source.0, to_at, bytes });
            source = (source.0 + bytes, source.1 - bytes);
            to_at += bytes;
        }
    }
    segments
}

/// Has it done by a thread of its own.
fn start(
    unit: &Arc<LunShared>,
    operation: Operation,
    work: impl FnOnce(&Run) -> Result<(), Ended> + Send + 'static,
) -> Result<Option<Copying>, Fail> {
    let operation = Arc::new(operation);
    unit.copies.begin(&operation)?;
    let run = Run::new(unit, &operation);
    let body = move || {
        let ended = work(&run);
        run.operation.end(ended);
    };
    if !aside::run("copy", body) {
        unit.copies.forget(&operation);
        return Err(Fail::Bare(Status::Busy));
    }
    Ok((!operation.immediate).then(|| Copying::new(operation)))
}

/// What is wrong with a list that is longer than any that is taken: its header says of what there is too much.
fn longer(data_out: &Sg, format: Format) -> Fail {
    let mut header = [0u8; 48];
    data_out.copy_to_slice(0, &mut header);
    let Header { cscds, segments, .. } = match Header::read(&header, format) {
        Ok(header) => header,
        Err(sense) => return sense.into(),
    };
    let code = match () {
        () if cscds.saturating_add(segments) > MAX_DESCRIPTORS => Code::PARAMETER_LIST_LENGTH_ERROR,
        () if cscds > MAX_CSCDS * 32 => Code::TOO_MANY_CSCD_DESCRIPTORS,
        () => Code::PARAMETER_LIST_LENGTH_ERROR,
    };
    Sense::illegal(code).into()
}
