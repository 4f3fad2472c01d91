//! The medium of the device for tests: a volatile and a durable half, and the faults that strike it.

use std::collections::BTreeMap;
use std::ops::Range;

use reactor::Waker;

use super::Fault;
use crate::{Features, Geometry, Io, IoError, Op, TUPLE_LEN};

/// The unit that a power cut keeps or loses, in bytes; a block of another length is one by itself.
const SECTOR: usize = 512;
/// Bytes of the longest one: a sector with a tuple.
const LONGEST: usize = SECTOR + TUPLE_LEN;

/// The content of one; what is beyond its end is not used.
pub(super) type Sector = [u8; LONGEST];

/// Bytes of a sector of a disk with such blocks.
pub(super) fn sector_of(block_size: u32) -> usize {
    let block = block_size as usize;
    if block.is_multiple_of(SECTOR) { SECTOR } else { block }
}

/// What a disk holds, and what is to happen to it.
pub(super) struct State {
    /// Bytes of a sector.
    pub(super) sector: usize,
    /// What reads see.
    pub(super) volatile: Vec<u8>,
    /// What certainly survives a power cut.
    pub(super) durable: Vec<u8>,
    /// Contents that each sector had since it was last durable, oldest first.
    pub(super) unflushed: BTreeMap<usize, Vec<Sector>>,
    pub(super) faults: Vec<Fault>,
    /// Changing I/Os (writes, unmaps, zeroes, flushes) that still work before the device dies.
    pub(super) alive: Option<u64>,
    pub(super) dead: bool,
    pub(super) changes: u64,
    pub(super) flushes: u64,
    /// Seed of the order of completions, when they are deferred.
    pub(super) deferred: Option<u64>,
    /// Deferred I/Os do not end, and how many wait.
    pub(super) holding: bool,
    pub(super) held: usize,
    pub(super) wakers: Vec<Waker>,
    /// Which of the times between two power cuts this is.
    pub(super) boot: u128,
}

impl State {
    pub(super) fn revive(&mut self) {
        self.alive = None;
        self.dead = false;
    }

    pub(super) fn put(&mut self, at: usize, data: &Sector, visible: bool) {
        if visible {
            self.volatile[at * self.sector..][..self.sector].copy_from_slice(&data[..self.sector]);
        }
        self.unflushed.entry(at).or_default().push(*data);
    }

    pub(super) fn make_durable(&mut self, sectors: Range<usize>) {
        for at in sectors {
            if self.unflushed.remove(&at).is_some() {
                let r = at * self.sector..(at + 1) * self.sector;
                let (durable, volatile) = (&mut self.durable, &self.volatile);
                durable[r.clone()].copy_from_slice(&volatile[r]);
            }
        }
    }

    fn injected(&mut self, io: &Io) -> Option<IoError> {
        for f in &mut self.faults {
            let hit = f.op.is_none_or(|op| op == io.op)
                && (io.op == Op::Flush || (io.lba < f.lba.end && f.lba.start < io.lba + io.blocks));
            if !hit || f.count == 0 {
                continue;
            }
            if f.skip > 0 {
                f.skip -= 1;
                continue;
            }
            f.count -= 1;
            return Some(f.error);
        }
        None
    }

    /// Carries out an I/O, or fails as it is to.
    pub(super) fn run(
        &mut self,
        io: &Io,
        block_size: u32,
        features: &Features,
    ) -> Result<(), IoError> {
        if self.dead {
            return Err(IoError::Removed);
        }
        let num_blocks = self.volatile.len() as u64 / u64::from(block_size);
        let g = Geometry { block_size, physical_block_size: block_size, num_blocks };
        io.check(&g, features)?;
        if let Some(e) = self.injected(io) {
            if io.op == Op::Flush && e == IoError::Flush {
                self.unflushed.clear();
            }
            return Err(e);
        }
        let per_block = block_size as usize / self.sector;
        let first = io.lba as usize * per_block;
        let sectors = first..first + io.blocks as usize * per_block;
        let changes = io.op.is_write() || io.op == Op::Flush;
        let mut last_breath = false;
        if changes {
            if let Some(left) = &mut self.alive {
                last_breath = *left == 0;
                *left = left.saturating_sub(1);
            }
            self.changes += 1;
        }
        match io.op {
            Op::Read => {
                io.sg.copy_from_slice(0, &self.volatile[first * self.sector..][..io.sg.len()]);
            }
            Op::Write | Op::Unmap | Op::WriteZeroes => {
                for (i, at) in sectors.clone().enumerate() {
                    let mut data = [0; LONGEST];
                    if io.op == Op::Write {
                        io.sg.copy_to_slice(i * self.sector, &mut data[..self.sector]);
                    }
                    self.put(at, &data, !last_breath);
                }
                if io.fua && !last_breath {
                    self.make_durable(sectors);
                }
            }
            Op::Flush if last_breath => {}
            Op::Flush => {
                self.flushes += 1;
                self.make_durable(0..self.volatile.len() / self.sector);
            }
        }
        if last_breath {
            self.dead = true;
            return Err(IoError::Removed);
        }
        Ok(())
    }
}
