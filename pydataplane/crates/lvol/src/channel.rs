//! The data path: one queue pair on an lvol, on top of one queue pair on its base bdev.
//!
//! An I/O that lies in one run of the device (one cluster, or neighbours) goes down with another
//! LBA and nothing else, and is told here from top to bottom. One that does not is cut into pieces
//! (`pieces`). What needs the metadata thread (a write to an unallocated cluster, unmapping whole
//! clusters, a map that is not in memory) is parked in its slot until that has answered. What a write has
//! is copied for it where the cluster shows a parent: then nothing is left to write after the answer. No
//! path allocates, locks or waits; only a changed map (a resize) takes a lock, once.
//!
//! Order: a cluster belongs to the volume, whatever becomes of this process, before data is written to
//! it. While that is not durable, a flush and the end of a write with FUA go to the metadata thread,
//! too; else a flush of the base bdev makes everything durable that was acknowledged before.

mod outside;
mod pieces;

use crate::asked::SLOTS;
use crate::map::View;
use crate::parts::Parts;
use crate::pins::{Pin, Pins};
use crate::ranges;
use crate::volume::Volume;
use bdev::{
    Channel, ChannelStats, Completion, Features, Geometry, Io, IoError, Late, Mismatches, Op,
    Protected, Slots, Stats, Submit,
};
use blobstore::HOLE;
use outside::Outside;
use reactor::IoContext;
use std::collections::VecDeque;
use std::sync::Arc;

/// Completions taken from the base bdev at a time.
const BASE_DONE: usize = 64;
/// Clusters that are looked at for one [`Channel::sparse_run`]: some microseconds.
const RUN_CLUSTERS: u64 = 4096;
/// Marks a base I/O's tag as that of a piece; else it is a slot's.
const PART_TAG: u64 = 1 << 32;

pub(crate) struct LvolChannel {
    /// Dropped first: it waits for what is in flight, which uses `parts`.
    base: Box<dyn Channel>,
    /// On the external parent, where the volume has one; as `base`.
    outside: Option<Outside>,
    parts: Parts,
    volume: Arc<Volume>,
    pins: Pins,
    view: View,
    /// Version of `view`.
    version: u64,
    geometry: Geometry,
    features: Features,
    /// Whether clusters that are not needed go back to the store.
    gives_back: bool,
    /// An error: the volume is gone.
    usable: Result<(), IoError>,
    slots: Slots<Slot>,
    /// Slots that could not go on for want of room below, in order.
    waiting: VecDeque<u16>,
    /// Requests that were not answered.
    asked: u32,
    /// Finished I/Os that did not fit in the caller's list.
    late: Late,
    base_done: Vec<Completion>,
    /// Which blocks were wrong; `None`: the volume has no protection information.
    mismatches: Option<Mismatches>,
    /// Data of a first write goes along with what its cluster is filled with.
    merges: bool,
    /// The base ends I/Os within `submit`, as the last one shows; else it measures how long they take.
    at_once: bool,
    stats: ChannelStats,
}

/// An I/O under way. One that was passed on as a whole has its `io` and its `pin` here; the rest is
/// for one in pieces.
#[derive(Clone, Copy)]
struct Slot {
    io: Io,
    /// What it has beside its data, where it is in pieces and has that.
    with: Option<Protected>,
    pin: Pin,
    /// Blocks from the start that were dealt with: done, or sent on.
    cursor: u64,
    /// Base I/Os and requests that are not over.
    pending: u32,
    result: Result<(), IoError>,
    started: u64,
    /// In [`LvolChannel::waiting`].
    waits: bool,
    /// The metadata thread was asked to make it durable.
    flushed: bool,
}

/// Where a range lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    /// First block on the base bdev; `None`: unallocated.
    lba: Option<u64>,
    blocks: u64,
}

impl Channel for LvolChannel {
    #[inline]
    fn submit(&mut self, io: &Io) -> Submit {
        self.begin(io, None)
    }

    fn submit_protected(&mut self, io: &Io, with: &Protected) -> Submit {
        if self.mismatches.is_none() {
            return Submit::Done(Err(IoError::Unsupported));
        }
        self.begin(io, Some(with).filter(|_| matches!(io.op, Op::Read | Op::Write)))
    }

    fn mismatch(&mut self, tag: u64) -> Option<u64> {
        self.mismatches.as_mut()?.take(tag)
    }

    #[inline]
    fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        let before = done.len();
        if !self.late.is_empty() && !self.late.hand_over(done) {
            return (done.len() - before) as u32;
        }
        if self.pins.in_flight() > 0 {
            self.poll_base(done);
        }
        if self.outside.as_ref().is_some_and(|outside| outside.in_flight > 0) {
            self.poll_outside(done);
        }
        if self.asked > 0 {
            self.poll_replies(done);
        }
        if !self.waiting.is_empty() {
            self.poll_waiting(done);
        }
        if self.pins.is_outdated(self.version) {
            // What is not used any more need not stay in memory.
            self.choose_map();
        }
        self.pins.relax();
        (done.len() - before) as u32
    }

    fn sparse_run(&mut self, lba: u64, blocks: u64) -> bdev::Run {
        self.choose_map();
        let shift = self.volume.id.shift;
        let (hole, clusters) = match self.view.is_away() {
            false => ranges::run(&self.view, lba >> shift, RUN_CLUSTERS),
            // Not known yet, so data; a read finds out.
            true => {
                self.volume.thread.want_map(self.volume.blob());
                (false, 1)
            }
        };
        self.pins.relax();
        // Of a volume that was made smaller meanwhile it is not known.
        let end = ((lba >> shift) + clusters) << shift;
        bdev::Run { hole, blocks: if clusters == 0 { blocks } else { (end - lba).min(blocks) } }
    }
}

impl LvolChannel {
    /// On a queue pair of the volume's base; `stats` counts what it does.
    pub fn new(
        volume: Arc<Volume>,
        base: Box<dyn Channel>,
        stats: &Arc<Stats>,
        io: &IoContext,
    ) -> Self {
        let shared = volume.add_channel(io.waker());
        let view = volume.view();
        let slot = |_| Slot::new(Io::flush(0), None, 0);
        LvolChannel {
            base,
            outside: Outside::open(&view, io, volume.geometry().block_size),
            parts: Parts::new(),
            pins: Pins::new(shared),
            view,
            // Looked at before the first I/O.
            version: 0,
            geometry: volume.geometry(),
            features: volume.features(),
            gives_back: false,
            usable: Ok(()),
            slots: Slots::new(SLOTS as u16, slot),
            waiting: VecDeque::with_capacity(SLOTS),
            asked: 0,
            late: Late::with_capacity(SLOTS as u16),
            base_done: Vec::with_capacity(BASE_DONE),
            mismatches: volume.protection().map(|_| Mismatches::default()),
            merges: volume.base.protection().is_none(),
            at_once: true,
            stats: stats.channel(),
            volume,
        }
    }

    /// Begins an I/O.
    #[inline(always)]
    fn begin(&mut self, io: &Io, with: Option<&Protected>) -> Submit {
        self.choose_map();
        let checked = self.usable.and_then(|()| self.check(io, with));
        let submit = match checked {
            Err(e) => {
                self.stats.error(e);
                Submit::Done(Err(e))
            }
            Ok(()) if matches!(io.op, Op::Flush) => match self.volume.is_settled() {
                true => self.pass(io, 0, None),
                false => self.take(io, with),
            },
            Ok(()) if io.blocks == 0 => Submit::Done(Ok(())),
            Ok(()) => {
                let run = self.run(io.op, io.lba, io.blocks);
                match run.lba {
                    Some(lba)
                        if run.blocks == io.blocks
                            && (!io.fua || self.volume.is_settled())
                            && (matches!(io.op, Op::Read | Op::Write)
                                || !self.volume.id.unmaps) =>
                    {
                        self.pass(io, lba, with)
                    }
                    _ => self.take(io, with),
                }
            }
        };
        self.pins.relax();
        submit
    }

    #[inline]
    fn check(&self, io: &Io, with: Option<&Protected>) -> Result<(), IoError> {
        match with {
            None => io.check(&self.geometry, &self.features),
            Some(with) => with.check(io, &self.geometry, &self.features),
        }
    }

    /// Chooses the map that the next translation uses.
    #[inline]
    fn choose_map(&mut self) {
        let version = self.pins.choose_version();
        if version != self.version {
            self.refresh(version);
        }
    }

    #[cold]
    fn refresh(&mut self, version: u64) {
        self.version = version;
        self.view = self.volume.view();
        self.geometry = self.volume.geometry();
        // The size of what is used, whatever came after it.
        self.geometry.num_blocks = self.view.clusters() << self.volume.id.shift;
        self.features = self.volume.features();
        self.gives_back = self.volume.gives_back();
        self.usable = if self.volume.is_removed() { Err(IoError::Removed) } else { Ok(()) };
    }

    /// The longest run at block `lba`, at most `blocks`; both are within the volume. What is not read
    /// goes to clusters of its own only.
    #[inline(always)]
    fn run(&self, op: Op, lba: u64, blocks: u64) -> Run {
        let place = |cluster| {
            let entry = match op {
                Op::Read => self.view.entry(cluster),
                _ => self.view.own.get(cluster),
            };
            if entry == HOLE { 0 } else { entry }
        };
        let shift = self.volume.id.shift;
        let per_cluster = 1u64 << shift;
        let within = lba & (per_cluster - 1);
        let mut cluster = lba >> shift;
        let first = place(cluster);
        let mut len = (per_cluster - within).min(blocks);
        let mut expected = first;
        while len < blocks {
            cluster += 1;
            expected = if first == 0 { 0 } else { expected + 1 };
            if place(cluster) != expected {
                break;
            }
            len += per_cluster.min(blocks - len);
        }
        let lba = if first == 0 { None } else { Some((u64::from(first) << shift) + within) };
        Run { lba, blocks: len }
    }

    /// Passes an I/O on as a whole, at another LBA.
    #[inline]
    fn pass(&mut self, io: &Io, lba: u64, with: Option<&Protected>) -> Submit {
        let Some(at) = self.slots.next_free() else { return Submit::Full };
        let begun = if self.at_once { self.stats.begin() } else { None };
        let below = Io { lba, tag: u64::from(at), ..*io };
        let submit = match with {
            None => self.base.submit(&below),
            Some(with) => self.base.submit_protected(&below, &with.further(io.lba, 0)),
        };
        self.at_once = matches!(submit, Submit::Done(_));
        match submit {
            Submit::Done(result) => {
                if let Err(error) = result {
                    self.note(error, u64::from(at), io.tag, 0);
                }
                self.stats.end(io, self.geometry.block_size, begun, result);
            }
            Submit::Pending => {
                self.slots.take();
                let slot = &mut self.slots[at];
                slot.io = *io;
                slot.pin = self.pins.begin();
            }
            Submit::Full => {}
        }
        submit
    }

    /// Keeps which block was wrong of what failed below under the tag `below`, and is part of the I/O named
    /// `tag`, from its block `from` on.
    #[cold]
    fn note(&mut self, error: IoError, below: u64, tag: u64, from: u64) {
        if let Some(mismatches) = &mut self.mismatches
            && error.is_mismatch()
            && let Some(block) = self.base.mismatch(below)
        {
            mismatches.keep(tag, from + block);
        }
    }

    /// Takes all that the base bdev finished: what stayed there would not keep a thread awake whose
    /// I/Os have further pieces under way.
    fn poll_base(&mut self, done: &mut Vec<Completion>) {
        let mut base_done = std::mem::take(&mut self.base_done);
        loop {
            base_done.clear();
            self.base.poll(&mut base_done);
            for c in &base_done {
                if c.tag & PART_TAG != 0 {
                    self.part_ended(c, done);
                    continue;
                }
                // Passed on as a whole: as the base did it, so it is.
                let at = c.tag as u16;
                if let Err(error) = c.result {
                    self.note(error, c.tag, self.slots[at].io.tag, 0);
                }
                self.pins.end(self.slots[at].pin);
                self.finish(at, c.result, c.ticks, c.ended, done);
            }
            if base_done.len() < BASE_DONE {
                break;
            }
        }
        self.base_done = base_done;
    }

    /// Ends an I/O that took `ticks` and was over at `ended`, in ticks.
    #[inline]
    fn finish(
        &mut self,
        at: u16,
        result: Result<(), IoError>,
        ticks: u64,
        ended: u64,
        done: &mut Vec<Completion>,
    ) {
        self.slots.give_back(at);
        let io = &self.slots[at].io;
        self.stats.record(io.op, io.bytes(self.geometry.block_size), ticks, result);
        let completion = Completion { tag: io.tag, result, ticks, ended };
        self.late.push(completion, done);
    }
}

impl Slot {
    /// An I/O of which nothing is done yet, begun at `started` (in ticks).
    fn new(io: Io, with: Option<Protected>, started: u64) -> Self {
        let pin = Pin::default();
        Slot {
            io,
            with,
            pin,
            cursor: 0,
            pending: 0,
            result: Ok(()),
            started,
            waits: false,
            flushed: false,
        }
    }
}

impl Drop for LvolChannel {
    fn drop(&mut self) {
        // Nobody translates any more, but the base may still write to the old clusters: the pin
        // stays until it was dropped too.
        self.outside = None;
        let nothing: Box<dyn Channel> = Box::new(Closed);
        drop(std::mem::replace(&mut self.base, nothing));
        self.volume.drop_channel(self.pins.shared());
    }
}

/// What a channel has instead of its base while it is dropped.
struct Closed;

impl Channel for Closed {
    fn submit(&mut self, _io: &Io) -> Submit {
        Submit::Done(Err(IoError::Removed))
    }
    fn poll(&mut self, _done: &mut Vec<Completion>) -> u32 {
        0
    }
}

#[cfg(test)]
mod tests;
