//! A part of an I/O: blocks of one region that are read or changed together, or some regions that are cleared.

use super::super::layout::REGION_BLOCKS;
use bdev::IoError;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Kind {
    /// Data and tuples are read and compared.
    #[default]
    Read,
    /// Data and its tuples are written.
    Write,
    /// Data is made zeros, and has no tuples then.
    Clear,
    /// Likewise, all of some regions.
    ClearRegions,
}

/// Blocks of one region, or some regions of one unit.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Part {
    pub kind: Kind,
    pub used: bool,
    pub slot: u16,
    pub zone: u64,
    /// Which block of its zone is its first.
    pub within: u64,
    /// That on the device below.
    pub lba: u64,
    pub blocks: u64,
    /// Which block of its I/O.
    pub cursor: u64,
    /// The piece with its data.
    pub data: u16,
    /// It was let in by its unit's gate.
    pub admitted: bool,
    /// Nobody else changes its regions.
    pub held: bool,
    /// The device below is given changes.
    pub changes: bool,
    /// I/Os below that are not over.
    pub pending: u8,
    pub result: Option<IoError>,
}

impl Part {
    /// How many regions it is in.
    pub fn regions(&self) -> u32 {
        match self.kind {
            Kind::ClearRegions => self.blocks.div_ceil(REGION_BLOCKS) as u32,
            Kind::Read | Kind::Write | Kind::Clear => 1,
        }
    }
}
