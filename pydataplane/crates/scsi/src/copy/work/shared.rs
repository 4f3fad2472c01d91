//! The part of a segment that is copied without its data, by bdevs that can share it.

use super::{Ended, PAUSE, Party, Run, may_use};
use crate::copy::order::{Segment, aborted};
use crate::copy::token::Token;
use crate::sense::Code;
use crate::watch::Range;
use bdev::Shared;
use std::sync::Arc;
use std::thread;

/// A part of a segment.
pub(super) struct Part {
    pub segment: Segment,
    /// It can perhaps be shared.
    pub can_share: bool,
}

/// The parts of a segment, one after the other: of one that overwrites what it reads there is one.
pub(super) fn parts(segment: &Segment, from: &Party, to: &Party) -> Vec<Part> {
    let of = |at: u64, bytes: u64| Segment {
        from_at: segment.from_at + at,
        to_at: segment.to_at + at,
        bytes,
        ..segment.clone()
    };
    let all = segment.bytes;
    let part = |at, bytes, can_share| Part { segment: of(at, bytes), can_share };
    let (block, its) = (from.block(), to.block());
    let found = segment.to.bdev().sharing().filter(|_| block == its).and_then(|sharing| {
        let (from_lba, lba) = (from.lba(segment.from_at), to.lba(segment.to_at));
        sharing.part(segment.from.bdev(), from_lba, lba, all / block)
    });
    let Some((before, shared)) = found.map(|(before, shared)| (before * block, shared * block))
    else {
        return vec![part(0, all, false)];
    };
    let end = before + shared;
    let parts = [part(0, before, false), part(before, shared, true), part(end, all - end, false)];
    parts.into_iter().filter(|part| part.segment.bytes > 0).collect()
}

/// Shares as much of a part as is possible, from its beginning on, and returns how many bytes are left to be copied.
/// Of a token, nothing is shared that is not what it stands for.
pub(super) fn share(
    segment: &Segment,
    token: Option<&Arc<Token>>,
    run: &Run,
    (from, to): (&mut Party, &mut Party),
) -> Result<u64, Ended> {
    let block = to.block();
    let Some(sharing) = segment.to.bdev().sharing() else { return Ok(segment.bytes) };
    let goes = Range { at: segment.to_at, bytes: segment.bytes };
    if token.is_some_and(|token| token.covers(&segment.to, goes)) {
        // Its own work revokes it: a copy knows what it has read by then.
        return Ok(segment.bytes);
    }
    let mut left = segment.bytes;
    while left > 0 {
        let at = segment.bytes - left;
        let (from_lba, to_lba) = (from.lba(segment.from_at + at), to.lba(segment.to_at + at));
        let changes = Some(Range { at: segment.to_at + at, bytes: left });
        let still = {
            let (token, operation) = (token.cloned(), run.operation.clone());
            move || {
                !operation.is_cancelled()
                    && token.as_ref().is_none_or(|token| token.check().is_ok())
            }
        };
        let bdev = segment.from.bdev();
        let share = || sharing.share(bdev, from_lba, to_lba, left / block, Box::new(still));
        let failed = |_| Ended::Failed(aborted(Code::NO_ADDITIONAL_SENSE));
        // Whoever takes away the source does not wait until the destination's blocks are no longer kept.
        let shared = to.work(run, changes, |_| from.held(run, || share().map_err(failed)))?;
        let Some(shared) = shared else {
            thread::sleep(PAUSE);
            continue;
        };
        match shared {
            Shared::Done(blocks) if blocks > 0 => {
                left -= blocks * block;
                run.operation.count(blocks * block);
            }
            Shared::Done(_) | Shared::Not => break,
            Shared::Cancelled => {
                token.map_or(Ok(()), |token| token.check_amid())?;
                run.check()?;
                break;
            }
        }
    }
    Ok(left)
}

impl Party {
    /// Does something that reads its volume by itself, if that is still for now, as long as the unit is there. `None`:
    /// somebody waits to take it away, who goes first. The caller lets go of the other unit that it holds and tries
    /// again: that one may be waited for as well, by who holds this one.
    pub(super) fn held<T>(
        &mut self,
        run: &Run,
        work: impl FnOnce() -> Result<T, Ended>,
    ) -> Result<Option<T>, Ended> {
        run.check()?;
        let unit = Arc::clone(&self.unit);
        let Some(replaced) = unit.copies.replaced.try_read() else { return Ok(None) };
        if *replaced {
            return Err(Ended::Failed(aborted(Code::COPY_TARGET_NOT_REACHABLE)));
        }
        may_use(&unit, false).map_err(Ended::Failed)?;
        if unit.epoch() != self.epoch {
            return Err(Ended::Cancelled);
        }
        work().map(Some)
    }
}
