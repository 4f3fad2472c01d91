//! What an export is to be for the kernel: a file, or a device.

use holder::wire::Which;

use crate::request::DEPTH;

/// A device that is asked for by its number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Numbered {
    /// It is `/dev/ublkbN`.
    pub number: u32,
    /// Requests at a time, at most [`DEPTH`]. One that was left has as many as it had.
    pub depth: u16,
    /// Whether it has to be one that another process has left.
    pub left: bool,
    /// The CPUs that its thread runs on; none: any.
    pub cpus: Vec<usize>,
}

/// What an export is to be for the kernel.
#[derive(Clone)]
pub(crate) enum Shape {
    /// A file.
    File,
    /// A device where one can be had, else a file.
    DiskOrFile {
        /// Least bytes of the device's block.
        block_size: u32,
    },
    /// A device of this number.
    Disk(Numbered),
}

impl Shape {
    /// Which device it may be.
    pub fn which(&self) -> Which {
        match self {
            Shape::File | Shape::DiskOrFile { .. } => Which::Any,
            Shape::Disk(wish) if wish.left => Which::Left(wish.number),
            Shape::Disk(wish) => Which::Number(wish.number),
        }
    }

    /// Requests at a time.
    pub fn depth(&self) -> u16 {
        match self {
            Shape::File | Shape::DiskOrFile { .. } => DEPTH,
            Shape::Disk(wish) => wish.depth.min(DEPTH),
        }
    }

    /// Least bytes of a device's block.
    pub fn block_size(&self) -> u32 {
        match self {
            Shape::DiskOrFile { block_size } => *block_size,
            Shape::File | Shape::Disk(_) => 0,
        }
    }

    /// The CPUs that its thread runs on; none: any.
    pub fn cpus(self) -> Vec<usize> {
        match self {
            Shape::File | Shape::DiskOrFile { .. } => Vec::new(),
            Shape::Disk(wish) => wish.cpus,
        }
    }
}
