//! Tuples beside the blocks of a device that has none: an area of its own for them.
//!
//! [`Area`] shows a device of clusters, an lvol mostly, less the clusters that hold tuples. All of it lies on
//! that device, so what is done with its clusters, a snapshot of them for one, is done with the tuples, too.
//!
//! **In step over a crash**: a write changes a block and its tuple, which cannot be done in one step. So a part
//! of the device is marked in a map, durably, before the first write to it; the mark goes when nothing was written
//! there for some seconds. A write is over when both are given to the device, so a flush has both. After a
//! crash the blocks of marked parts are compared with their tuples: one whose tuple is not its own was being
//! written, and has none until it is written again. Everywhere else such a block is damaged, and an error.
//!
//! Checksums (crate `integrity`) are kept with the same means, [`bdev::Gate`], [`bdev::Holds`] and [`bdev::Wants`].
//! What is kept is another thing: a checksum is of what lies there and can be made anew of that after a crash,
//! so that it stays in memory until its part is quiet; a tuple is the guest's, and is on the device with its block.
//!
//! | file | noun |
//! | --- | --- |
//! | `layout` | [`Layout`]: where things are |
//! | `map` | what is being written, on the medium |
//! | `shared` | what channels and keeper share |
//! | `channel` | the data path |
//! | `keeper` | what keeps the maps of a volume |
//! | `keepers` | [`Keepers`]: the thread of those |

mod channel;
mod keeper;
mod keepers;
mod layout;
mod map;
mod shared;

use bdev::{Bdev, Channel, Features, Geometry, IoError, OpenError, ProtectionType, Run, Stats};
use channel::{AreaChannel, within_zone};
use keeper::{Keeper, Times};
pub use keepers::{Keepers, Late};
pub use layout::Layout;
use reactor::IoContext;
use shared::Shared;
use std::sync::Arc;

/// A device whose blocks have tuples in an area of its own.
pub struct Area {
    shared: Arc<Shared>,
    below: Arc<dyn Bdev>,
    keepers: Arc<Keepers>,
    /// Which keeper is its own.
    number: u64,
}

impl Area {
    /// On `below`, which reads as zeros where nobody wrote and has blocks as `layout` has. Nothing is read
    /// before it is used.
    pub fn new(
        keepers: &Arc<Keepers>,
        below: Arc<dyn Bdev>,
        layout: Layout,
        kind: ProtectionType,
    ) -> Area {
        Area::with(keepers, below, layout, kind, Times::default())
    }

    fn with(
        keepers: &Arc<Keepers>,
        below: Arc<dyn Bdev>,
        layout: Layout,
        kind: ProtectionType,
        times: Times,
    ) -> Area {
        let shared = Arc::new(Shared::new(layout, kind));
        let number = keepers.add(&shared, below.clone(), times);
        Area { shared, below, keepers: keepers.clone(), number }
    }

    /// What the tags of the tuples mean.
    pub fn kind(&self) -> ProtectionType {
        self.shared.kind
    }

    /// A queue pair for the calling thread; `stats` counts what it does.
    ///
    /// # Errors
    /// Those of the device below.
    pub fn open(&self, stats: &Arc<Stats>, io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        let below = (self.below.open(io)?, self.below.clone());
        let (shared, features) = (self.shared.clone(), self.features());
        Ok(Box::new(AreaChannel::new(below, shared, features, stats, io.waker())))
    }

    /// What it shows of the size of the device below.
    pub fn geometry(&self) -> Geometry {
        let below = self.below.geometry();
        Geometry { num_blocks: self.shared.layout.data_blocks(below.num_blocks), ..below }
    }

    /// What it can do. Longer I/Os than the device below takes are cut. An unmap makes whole clusters zeros, which
    /// gives them back where the device can, and leaves parts of clusters as they were.
    pub fn features(&self) -> Features {
        let below = self.below.features();
        let unmap = below.unmap && below.write_zeroes;
        Features { max_blocks: 0, unmap, unmap_zeroes: unmap, unmap_skips: unmap, ..below }
    }

    /// As [`bdev::Sparse::run`], of the data.
    pub fn run(&self, lba: u64) -> Run {
        let blocks = self.geometry().num_blocks.saturating_sub(lba);
        let most = within_zone(&self.shared.layout, lba, blocks);
        match self.below.sparse() {
            Some(sparse) if most > 0 => {
                let run = sparse.run(self.shared.layout.locate(lba).lba);
                Run { blocks: run.blocks.min(most), ..run }
            }
            _ => Run { hole: false, blocks },
        }
    }

    /// Has the maps say that nothing is being written, and nobody begin to write before this is dropped: what is
    /// taken of the device meanwhile is whole. Who is in the midst of it is waited for, not longer than a second.
    ///
    /// # Errors
    /// [`Late`]; nothing is paused then, or it ends by itself.
    pub fn pause(&self) -> Result<Paused<'_>, Late> {
        let paused = Paused(self);
        self.keepers.call(self.number, Keeper::pause)?;
        Ok(paused)
    }

    /// The device below was made smaller: what is known of what it had does not count any more.
    pub fn shrunk(&self) {
        self.keepers.tell(self.number, Keeper::forget_zones);
    }

    /// Has blocks beyond its end have no tuples: it is about to grow, and may have had some there before it was
    /// made smaller.
    ///
    /// # Errors
    /// Those of the device below, and [`IoError::Aborted`] where that or somebody does not end.
    pub fn forget_beyond(&self) -> Result<(), IoError> {
        let done = self.keepers.call(self.number, Keeper::forget_beyond);
        done.map_err(|Late| IoError::Aborted)?.unwrap_or(Err(IoError::Removed))
    }

    /// The device below is about to be looked at anew: nobody begins to write, and what does not match its tuple is
    /// not taken for damaged, before this is dropped and [`Area::reloaded`] was told.
    ///
    /// # Errors
    /// As [`Area::pause`].
    pub fn reload(&self) -> Result<Paused<'_>, Late> {
        let paused = Paused(self);
        self.keepers.call(self.number, Keeper::begin_reload)?;
        Ok(paused)
    }

    /// The device below was looked at anew: it may have lost some of what was written and not flushed, have what
    /// it had at another time, maps among it, and have another size.
    pub fn reloaded(&self) {
        self.keepers.tell(self.number, Keeper::reloaded);
    }

    /// Ends its use, when the device below has all that is left to be written, if it takes that. Who uses it gets
    /// errors.
    pub fn close(&self) {
        if self.keepers.call(self.number, Keeper::close).is_err() {
            tracing::warn!("bdev {} does not answer: its protection maps stay", self.below.name());
            self.shared.wants.close();
        }
    }

    #[cfg(test)]
    fn clean(&self) {
        self.keepers.call(self.number, |keeper| keeper.clean_all(None)).unwrap();
    }

    /// Whether somebody waits for the end of a pause.
    #[cfg(test)]
    fn is_waited_for(&self) -> bool {
        self.keepers.call(self.number, |keeper| keeper.is_waited_for()).unwrap() == Some(true)
    }
}

/// Whoever ends it in order closes it before: the device below may be gone.
impl Drop for Area {
    fn drop(&mut self) {
        self.shared.wants.close();
        self.shared.wants.ring();
    }
}

/// While it is there nobody begins to write.
#[must_use]
pub struct Paused<'a>(&'a Area);

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        self.0.keepers.tell(self.0.number, Keeper::resume);
    }
}

#[cfg(test)]
mod tests;
