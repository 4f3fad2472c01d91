//! The benchmark: keeps a fixed number of I/Os in flight from one thread and tells what they
//! took, what they cost the target, and how far the two cores were apart meanwhile.
//!
//! Where a hypervisor places virtual CPUs changes every few seconds, and moves results by up to
//! three times; so each report has the round trip of a cache line between the two cores before
//! and after ([`c2c`]). Compare only reports with about the same.

pub mod c2c;
mod clock;
pub mod flood;
mod load;
mod place;
mod process;
mod report;
mod slots;
mod verify;

pub use load::run;
pub use place::{leave_autogroup, pin};
pub use report::Report;

use serde::Serialize;

/// What to do to the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
#[clap(rename_all = "lowercase")]
pub enum Pattern {
    /// Sequential reads.
    Read,
    /// Sequential writes.
    Write,
    /// Random reads.
    RandRead,
    /// Random writes.
    RandWrite,
    /// Random, half of each.
    RandRw,
    /// Random: half of what is in flight reads and half writes, however long either takes.
    RandApart,
}

impl Pattern {
    fn is_random(self) -> bool {
        !matches!(self, Pattern::Read | Pattern::Write)
    }
}

/// One measurement.
#[derive(Clone, Debug)]
pub struct Config {
    /// What to do.
    pub rw: Pattern,
    /// Bytes of an I/O.
    pub bs: u32,
    /// I/Os in flight on each queue.
    pub iodepth: u16,
    /// Seconds to measure.
    pub seconds: f64,
    /// Seconds to run before that.
    pub warmup: f64,
    /// Write every block once before measuring.
    pub fill: bool,
    /// Check every byte read against what was written; implies `fill`.
    pub verify: bool,
    /// Target number (virtio-scsi).
    pub target: u8,
    /// LUN (virtio-scsi).
    pub lun: u16,
    /// Targets that share the I/Os, from `target` on, all as large as that (virtio-scsi); more than one
    /// only without `fill` and `verify`.
    pub targets: u16,
    /// Bytes of the disk to use; all if `None`.
    pub size: Option<u64>,
    /// Bytes from one I/O to the next in sequential patterns, each of which is done once, and then it is
    /// over; `None`: they follow each other, round and round.
    pub stride: Option<u64>,
    /// Seed of the addresses.
    pub seed: u64,
    /// Process of the target, for its CPU time and memory.
    pub target_pid: Option<u32>,
    /// Give the CPU to other threads where nothing has ended.
    pub yields: bool,
    /// Sleep until the target calls where nothing has ended.
    pub sleeps: bool,
    /// CPU of this thread, and of the target's polling thread.
    pub cpus: Option<(usize, usize)>,
}
