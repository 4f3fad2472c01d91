//! The work of an EXTENDED COPY, on a thread of its own with blocking I/O.

use super::order::{Segment, aborted};
use crate::opcode::{Cdb, Command};
use crate::reservations::is_allowed;
use crate::sense::{Code, Sense};
use crate::shared::{Gate, LunShared};
use crate::volume::InFlight;
use bdev::{AlignedBuf, SyncChannel, SyncError};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes of one read and write: whole blocks of any unit.
const STEP: u64 = 1 << 20;

/// Why the work ended before its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// The initiator is told.
    Failed(Sense),
    /// Its task was, or a reset of one of the units ended it.
    Cancelled,
}

/// A unit that is copied from or to: commands of it count there, for whoever waits until it has none.
struct Party {
    unit: Arc<LunShared>,
    channel: SyncChannel,
    in_flight: InFlight,
    epoch: u32,
    writes: bool,
}

impl Party {
    fn new(unit: &Arc<LunShared>, writes: bool) -> Result<Self, Ended> {
        let failed = Ended::Failed(aborted(Code::COPY_TARGET_NOT_REACHABLE));
        let channel = SyncChannel::open(&**unit.bdev()).map_err(|_| failed)?;
        let in_flight = InFlight::default();
        unit.counts(in_flight.shared());
        Ok(Party { unit: Arc::clone(unit), channel, in_flight, epoch: unit.epoch(), writes })
    }

    /// One I/O of it, if that is still for now.
    fn io(
        &mut self,
        run: impl FnOnce(&mut SyncChannel) -> Result<(), SyncError>,
    ) -> Result<(), Ended> {
        let unit = Arc::clone(&self.unit);
        // Held as long as the I/O takes.
        let replaced = unit.copies.replaced.read();
        if *replaced {
            return Err(Ended::Failed(aborted(Code::COPY_TARGET_NOT_REACHABLE)));
        }
        self.in_flight.begin();
        let done = match may_use(&unit, self.writes) {
            Err(sense) => Err(Ended::Failed(sense)),
            Ok(()) if unit.epoch() != self.epoch => Err(Ended::Cancelled),
            Ok(()) => run(&mut self.channel)
                .map_err(|_| Ended::Failed(aborted(Code::NO_ADDITIONAL_SENSE))),
        };
        self.in_flight.end();
        done
    }

    fn lba(&self, at: u64) -> u64 {
        at / u64::from(self.channel.block_size())
    }
}

/// Whether a unit can be copied from, or to, by its own nexus.
pub(crate) fn may_use(unit: &LunShared, writes: bool) -> Result<(), Sense> {
    let (command, cdb) = (if writes { Command::Write16 } else { Command::Read16 }, Cdb([0; 32]));
    let reserved = unit.has_gates() && !is_allowed(unit.access(), command, &cdb);
    if reserved || unit.is_at(Gate::Sanitize) {
        return Err(aborted(Code::COPY_TARGET_NOT_REACHABLE));
    }
    if writes { crate::block::check_writable(unit) } else { Ok(()) }
}

/// What has been copied.
#[derive(Clone, Copy, Default)]
pub(crate) struct Done {
    /// Whole segments.
    pub segments: u16,
    /// Bytes that were written, of those and of the one that was not whole.
    pub bytes: u64,
}

/// Copies one segment after the other, as `done` says. What is copied within a volume to where it overlaps is
/// as if all of it had been read first.
pub(crate) fn carry_out(
    segments: &[Segment],
    cancelled: &AtomicBool,
    done: &mut Done,
) -> Result<(), Ended> {
    let mut buffer = AlignedBuf::zeroed(STEP as usize);
    for segment in segments {
        let mut from = Party::new(&segment.from, false)?;
        let mut to = Party::new(&segment.to, true)?;
        let same = segment.from.bdev().uuid() == segment.to.bdev().uuid();
        let backwards = same && segment.to_at > segment.from_at;
        let mut left = segment.bytes;
        while left > 0 {
            if cancelled.load(Ordering::Acquire) {
                return Err(Ended::Cancelled);
            }
            let bytes = left.min(STEP);
            let at = if backwards { left - bytes } else { segment.bytes - left };
            let data = &mut buffer[..bytes as usize];
            step(&mut from, segment.from_at + at, &mut to, segment.to_at + at, data)?;
            left -= bytes;
            done.bytes += bytes;
        }
        if segment.to.writes_through() && segment.bytes > 0 {
            to.io(SyncChannel::flush)?;
        }
        done.segments += 1;
    }
    Ok(())
}

fn step(
    from: &mut Party,
    from_at: u64,
    to: &mut Party,
    to_at: u64,
    data: &mut [u8],
) -> Result<(), Ended> {
    let (from_lba, to_lba) = (from.lba(from_at), to.lba(to_at));
    from.io(|channel| channel.read(from_lba, data))?;
    to.io(|channel| channel.write(to_lba, data))
}
