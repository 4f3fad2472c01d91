//! Reads of what an external parent shows: pieces that go to a queue pair on that bdev.
//!
//! The queue pair is opened with the channel, or when the bdev has come again. A parent that is missing,
//! or fails, is a medium that cannot be read, for the parts that it shows. Those have no protection information,
//! even where the parent has some.

use super::pieces::Step;
use super::{BASE_DONE, LvolChannel};
use crate::external::External;
use crate::map::View;
use bdev::{Channel, Completion, Io, IoError, Op, Submit};
use reactor::IoContext;
use std::sync::Arc;

/// The queue pair on an external parent.
pub(super) struct Outside {
    /// `None`: it is missing, or could not be opened.
    channel: Option<Box<dyn Channel>>,
    external: Arc<External>,
    /// [`External::presence`] as of `channel`.
    presence: u64,
    io: IoContext,
    /// Its blocks in one of the volume's.
    ratio: u64,
    /// The volume's blocks that one submit can take.
    max_blocks: u64,
    pub in_flight: u32,
}

impl Outside {
    /// On the external parent of a view, if that has one. `block_size`: the volume's.
    pub fn open(view: &View, io: &IoContext, block_size: u32) -> Option<Self> {
        let (external, _) = view.external.as_ref()?;
        let mut outside = Outside {
            channel: None,
            external: external.clone(),
            presence: 0,
            io: io.clone(),
            ratio: 1,
            max_blocks: 0,
            in_flight: 0,
        };
        outside.look(block_size);
        Some(outside)
    }

    /// Opens the bdev as it is there now; nothing is in flight.
    #[cold]
    fn look(&mut self, block_size: u32) {
        self.channel = None;
        self.presence = self.external.presence();
        let Some(bdev) = self.external.bdev() else { return };
        self.ratio = u64::from((block_size / bdev.geometry().block_size).max(1));
        self.max_blocks = match bdev.features().max_blocks {
            0 => u64::MAX,
            most => (u64::from(most) / self.ratio).max(1),
        };
        match bdev.open(&self.io) {
            Ok(channel) => self.channel = Some(channel),
            Err(e) => tracing::error!("a parent of an lvol cannot be read: {e}"),
        }
    }

    /// The queue pair for reads of what `view` shows of its external parent, unless that is missing.
    fn ready(&mut self, view: &View, block_size: u32) -> Option<&mut Box<dyn Channel>> {
        let shown = view.external.as_ref().is_some_and(|(e, _)| Arc::ptr_eq(e, &self.external));
        let now = self.external.presence();
        if now != self.presence && self.in_flight == 0 {
            self.look(block_size);
        }
        if !shown || now == 0 || now != self.presence {
            return None;
        }
        self.channel.as_mut()
    }
}

/// What the guest is told: a device is not gone, nor ends early, because its parent is or does.
fn told(result: Result<(), IoError>) -> Result<(), IoError> {
    result.map_err(|e| match e {
        IoError::Aborted | IoError::Resources => e,
        _ => IoError::ReadMedium,
    })
}

impl LvolChannel {
    /// How many of `blocks` unallocated blocks from `lba` on are alike, and whether an external parent
    /// shows there.
    pub(super) fn unallocated(&self, lba: u64, blocks: u64) -> (bool, u64) {
        if self.view.external.is_none() {
            return (false, blocks);
        }
        let shift = self.volume.id.shift;
        let (first, last) = (lba >> shift, (lba + blocks - 1) >> shift);
        let outside = self.view.is_external(first);
        let alike = |cluster: &u64| self.view.is_external(*cluster) == outside;
        let end = first + (first..=last).take_while(alike).count() as u64;
        (outside, blocks.min((end << shift) - lba))
    }

    /// One step of a read: a piece of what the external parent shows.
    pub(super) fn read_outside(&mut self, at: u16, io: &Io, blocks: u64) -> Step {
        let cursor = self.slots[at].cursor;
        let block = self.geometry.block_size;
        let Some(outside) = &mut self.outside else { return self.unreadable(at) };
        let (ratio, max_blocks) = (outside.ratio, outside.max_blocks);
        let Some(channel) = outside.ready(&self.view, block) else { return self.unreadable(at) };
        let block = block as usize;
        let with = self.slots[at].with;
        let in_list = with.map_or(block, |with| with.in_list(block));
        // With tuples between the blocks, it is one at a time.
        let most = if in_list == block { max_blocks } else { 1 };
        let (offset, blocks) = (cursor as usize * in_list, blocks.min(most));
        let Some(cut) = self.parts.cut(at, &io.sg, offset, blocks, block) else {
            return Step::Wait;
        };
        if cut.blocks == 0 {
            self.slots[at].result = Err(IoError::Resources);
            return Step::On;
        }
        if let Some(with) = with {
            with.give_unwritten(&io.sg, cursor, cut.blocks, block);
        }
        let (lba, blocks) = ((io.lba + cursor) * ratio, cut.blocks * ratio);
        let tag = u64::from(cut.part);
        match channel.submit(&Io { op: Op::Read, fua: false, lba, blocks, sg: cut.sg, tag }) {
            Submit::Done(result) => {
                self.parts.give_back(cut.part);
                self.slots[at].cursor += cut.blocks;
                self.merge(at, told(result));
            }
            Submit::Pending => {
                outside.in_flight += 1;
                self.slots[at].cursor += cut.blocks;
                self.slots[at].pending += 1;
            }
            Submit::Full => {
                self.parts.give_back(cut.part);
                return Step::Wait;
            }
        }
        Step::On
    }

    /// Ends an I/O: a part of it cannot be read.
    #[cold]
    fn unreadable(&mut self, at: u16) -> Step {
        self.merge(at, Err(IoError::ReadMedium));
        Step::On
    }

    /// Takes what the external parent finished. The store's clusters have no part in it: it holds no
    /// version of the map.
    pub(super) fn poll_outside(&mut self, done: &mut Vec<Completion>) {
        let mut over = std::mem::take(&mut self.base_done);
        loop {
            over.clear();
            let Some(outside) = &mut self.outside else { break };
            let Some(channel) = &mut outside.channel else { break };
            channel.poll(&mut over);
            outside.in_flight -= over.len() as u32;
            for c in &over {
                let (at, _) = self.parts.give_back(c.tag as u16);
                self.slots[at].pending -= 1;
                self.merge(at, told(c.result));
                self.finish_if_over(at, done);
            }
            if over.len() < BASE_DONE {
                break;
            }
        }
        self.base_done = over;
    }
}
