//! The bdev: what it is of, how it is made, found and deleted, and what becomes of it with its base.

mod sparse;

use crate::channel::{IntegrityChannel, Shape};
use crate::error::Error;
use crate::format::{self, COPIES, Superblock};
use crate::keeper::{Keeper, Times, write_superblock};
use crate::layout::{self, HEAD, PAGE, REGIONS, ZONE_PAGES, ZONES_MAX};
use crate::medium::Medium;
use crate::table::Table;
use bdev::{
    AlignedBuf, Bdev, Channel, Claim, Event, Features, FlushLatch, Geometry, OpenError, Registry,
    Sparse, Stats, Subscription, SyncChannel,
};
use reactor::{Control, IoContext};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use uuid::Uuid;

/// What [`Bdev::product_name`] says.
pub const PRODUCT: &str = "integrity";

/// Regions that have their checksums in memory at most: some 16 MiB for 16 GiB of data.
const CACHE_PAGES: u16 = 4096;
/// It can grow to so many times its zones while it is loaded, and to so many in any case.
const GROWTH: (u64, u64) = (16, 64);
/// Damaged blocks that are shown.
const SHOWN: usize = 16;

/// What was found and done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// Reads that met a block which was not what its checksum says.
    pub mismatches: u64,
    /// Pages of checksums that did not count.
    pub damaged_checksum_pages: u64,
    /// Maps that did not count.
    pub damaged_maps: u64,
    /// Regions that may be written to now.
    pub dirty_regions: u64,
    /// Regions whose checksums are still to be made of what is on the medium.
    pub stale_regions: u64,
    /// Regions whose checksums are in memory.
    pub cached_regions: u64,
}

/// A bdev whose blocks have checksums on its base, which it has for itself.
pub struct Integrity {
    uuid: Uuid,
    name: String,
    table: Arc<Table>,
    stats: Arc<Stats>,
    /// Dropped before the claim: it cleans the base.
    control: Control<Keeper>,
    base: Claim,
}

/// How one is loaded, for tests.
#[derive(Clone, Copy)]
pub(crate) struct How {
    pub pages: u16,
    pub times: Times,
}

impl Default for How {
    fn default() -> Self {
        How { pages: CACHE_PAGES, times: Times::default() }
    }
}

impl Integrity {
    /// Makes room for checksums on the bdev `base`, by name, alias or UUID, and the bdev `name` of it; not
    /// registered yet. What is on the base is lost. No block has a checksum before it is written.
    ///
    /// # Errors
    /// [`Error`]; what was on the base may be lost.
    pub fn create(registry: &Registry, name: &str, base: &str) -> Result<Arc<Integrity>, Error> {
        Integrity::create_as(registry, name, base, How::default())
    }

    pub(crate) fn create_as(
        registry: &Registry,
        name: &str,
        base: &str,
        how: How,
    ) -> Result<Arc<Integrity>, Error> {
        if !format::is_name(name) {
            return Err(Error::Name(name.to_owned()));
        }
        let claim = registry.claim(base, &format!("integrity bdev {name}"))?;
        let bdev = claim.bdev().clone();
        if bdev.features().read_only {
            return Err(Error::ReadOnly(bdev.name().to_owned()));
        }
        if let Some(found) = probe(&*bdev)? {
            let bdev = bdev.name().to_owned();
            return Err(Error::Exists { bdev, name: found.name });
        }
        let pages = bdev.geometry().bytes() / PAGE as u64;
        let wrong = |why| Error::Size { bdev: bdev.name().to_owned(), pages, why };
        if pages <= HEAD {
            return Err(wrong("too small"));
        }
        if pages > ZONES_MAX * ZONE_PAGES {
            return Err(wrong("too large"));
        }
        let superblock = Superblock {
            generation: 1,
            uuid: Uuid::new_v4(),
            name: name.to_owned(),
            device_pages: pages,
        };
        let mut medium = Medium::open(&*bdev)?;
        let unused = [format::Mark::Unused; REGIONS as usize];
        let zones = layout::zones(pages) as usize;
        let places: Vec<u64> = (0..zones).map(layout::map_page).collect();
        let mut failed = None;
        medium.write_all(
            &places,
            |zone| format::encode_map(superblock.store(), zone as u32, &unused),
            |zone, written| failed = failed.or(written.err().map(|e| (places[zone], e))),
        );
        if let Some((lba, cause)) = failed {
            let (name, op) = (bdev.name().to_owned(), bdev::Op::Write);
            return Err(bdev::SyncError { name, op, lba, blocks: 1, cause }.into());
        }
        medium.flush()?;
        write_superblock(&mut medium, &superblock)?;
        drop(medium);
        Integrity::start(claim, superblock, how)
    }

    /// The bdev with checksums that lies on `base`; not registered yet. `None`: there is none.
    ///
    /// # Errors
    /// [`Error`]; nothing changed.
    pub fn load(registry: &Registry, base: &str) -> Result<Option<Arc<Integrity>>, Error> {
        Integrity::load_as(registry, base, How::default())
    }

    pub(crate) fn load_as(
        registry: &Registry,
        base: &str,
        how: How,
    ) -> Result<Option<Arc<Integrity>>, Error> {
        let claim = registry.claim(base, &format!("integrity bdev on {base}"))?;
        let Some(found) = probe(&**claim.bdev())? else { return Ok(None) };
        drop(claim);
        let claim = registry.claim(base, &format!("integrity bdev {}", found.name))?;
        let pages = claim.bdev().geometry().bytes() / PAGE as u64;
        if pages < found.device_pages {
            let (bdev, expected) = (claim.bdev().name().to_owned(), found.device_pages);
            return Err(Error::Truncated { bdev, pages, expected });
        }
        let integrity = Integrity::start(claim, found, how)?;
        if !integrity.base().features().read_only {
            integrity.grow()?;
        }
        Ok(Some(integrity))
    }

    fn start(claim: Claim, superblock: Superblock, how: How) -> Result<Arc<Integrity>, Error> {
        let base = claim.bdev().clone();
        let zones = layout::zones(superblock.device_pages);
        let room = (zones * GROWTH.0).max(GROWTH.1).min(ZONES_MAX);
        let blocks = layout::data_blocks(superblock.device_pages);
        let table = Arc::new(Table::new(blocks, room, how.pages));
        let (uuid, name) = (superblock.uuid, superblock.name.clone());
        let its = (base.clone(), table.clone());
        let open = move |bell| {
            its.1.wants.set_bell(bell);
            Keeper::open(its.0, superblock, its.1, how.pages, how.times).map(|keeper| (keeper, ()))
        };
        let (control, ()) = Control::start("integrity", open, |e| Error::Thread {
            bdev: base.name().to_owned(),
            cause: e.to_string(),
        })?;
        Ok(Arc::new(Integrity { uuid, name, table, stats: Stats::new(), control, base: claim }))
    }

    /// The bdev that it lies on.
    pub fn base(&self) -> &Arc<dyn Bdev> {
        self.base.bdev()
    }

    /// What was found and done.
    pub fn counted(&self) -> Counted {
        let counts = &self.table.counts;
        let get = |count: &std::sync::atomic::AtomicU64| count.load(Ordering::Relaxed);
        Counted {
            mismatches: get(&counts.mismatches),
            damaged_checksum_pages: get(&counts.damaged_sums),
            damaged_maps: get(&counts.damaged_maps),
            dirty_regions: get(&counts.dirty),
            stale_regions: get(&counts.stale),
            cached_regions: get(&counts.cached),
        }
    }

    /// Blocks that were damaged when they were read: the first of them, a few.
    pub fn damaged(&self) -> Vec<u64> {
        self.table.damaged.lock().iter().take(SHOWN).copied().collect()
    }

    /// Takes what the base has gained, while it is used; returns whether there was anything.
    ///
    /// # Errors
    /// [`Error`]; then it keeps its size.
    pub fn grow(&self) -> Result<bool, Error> {
        let grown = self.control.call(Duration::MAX, Keeper::grow);
        grown.unwrap_or(Ok(false))
    }

    /// Writes all checksums that are not on the medium yet, so that as little as can be is left to be done
    /// when it is closed. Returns regions.
    pub fn clean_all(&self) -> usize {
        self.control.call(Duration::MAX, |keeper| keeper.clean_all()).unwrap_or(0)
    }

    /// Ends its use: writes what is to be written. Nobody uses it any more; who does gets errors.
    pub fn close(&self) {
        // Where the thread is gone, it has ended so.
        _ = self.control.call(Duration::MAX, Keeper::close);
    }

    /// Deletes it from its base, which nobody uses any more; the data is lost.
    ///
    /// # Errors
    /// Of the base; then it may be there still.
    pub fn destroy(&self) -> Result<(), Error> {
        self.close();
        let mut medium = Medium::open(&**self.base())?;
        for page in COPIES {
            medium.write(page, &[0; PAGE])?;
            medium.flush()?;
        }
        Ok(())
    }

    /// All that are registered, in the order of registration.
    pub fn all(registry: &Registry) -> Vec<Arc<Integrity>> {
        let ours = registry.list().into_iter().filter(|bdev| bdev.product_name() == PRODUCT);
        ours.filter_map(|bdev| registry.get_as(bdev.name())).collect()
    }

    /// The one on that bdev, by the bdev's name.
    pub fn on(registry: &Registry, base: &str) -> Option<Arc<Integrity>> {
        registry.get_as(registry.above(base)?.name())
    }

    /// Has bdevs with checksums follow their bases until the subscription is dropped: the size, and the end of
    /// one whose base is taken away by somebody who knows nothing of it.
    pub fn follow(registry: &Registry) -> Subscription {
        let known = registry.clone();
        registry.subscribe(move |event| match event {
            Event::Resized(base) => {
                let Some(each) = Integrity::on(&known, base.name()) else { return };
                match each.grow() {
                    Ok(true) => known.notify_resized(each.name()),
                    Ok(false) => {}
                    Err(e) => tracing::error!("bdev {} does not grow: {e}", each.name()),
                }
            }
            Event::Removed(base) => {
                if let Some(each) = Integrity::on(&known, base.name()) {
                    known.unregister_beside(each.name());
                }
            }
            Event::Registered(_) | Event::Space { .. } => {}
        })
    }
}

/// What lies on a base, if it is one with checksums.
///
/// # Errors
/// [`Error::Damaged`]: it is one, but not whole; or the base cannot be read.
pub fn probe(base: &dyn Bdev) -> Result<Option<Superblock>, Error> {
    if base.geometry().bytes() / PAGE as u64 <= HEAD {
        return Ok(None);
    }
    let mut channel = SyncChannel::open(base)?;
    let mut pages = Vec::new();
    for page in COPIES {
        let mut bytes = AlignedBuf::zeroed(PAGE);
        channel.read(page * (PAGE as u64 / u64::from(channel.block_size())), &mut bytes)?;
        pages.push(bytes);
    }
    format::choose(&pages[0], &pages[1]).map_err(|fault| Error::Damaged {
        bdev: base.name().to_owned(),
        what: "the superblock",
        fault,
    })
}

impl Bdev for Integrity {
    fn name(&self) -> &str {
        &self.name
    }

    fn aliases(&self) -> Vec<String> {
        Vec::new()
    }

    fn uuid(&self) -> Uuid {
        self.uuid
    }

    fn product_name(&self) -> &'static str {
        PRODUCT
    }

    fn geometry(&self) -> Geometry {
        let base = self.base().geometry();
        Geometry {
            block_size: base.block_size,
            physical_block_size: base.physical_block_size.max(PAGE as u32),
            num_blocks: self.table.blocks() * (PAGE as u64 / u64::from(base.block_size)),
        }
    }

    fn features(&self) -> Features {
        let base = self.base().features();
        let per = PAGE as u32 / self.base().geometry().block_size;
        let unmap_granularity = match base.unmap {
            true => base.unmap_granularity.max(per),
            false => base.unmap_granularity,
        };
        // Longer ones are cut.
        Features { max_blocks: 0, unmap_granularity, ..base }
    }

    fn open(&self, io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        let base = self.base().open(io)?;
        let block_size = self.base().geometry().block_size;
        let longest = match u64::from(self.base().features().max_blocks) {
            0 => u64::MAX,
            blocks => (blocks * u64::from(block_size) / PAGE as u64).max(1),
        };
        let shape = Shape { block_size, features: self.features(), longest };
        let table = self.table.clone();
        Ok(Box::new(IntegrityChannel::new(base, table, shape, &self.stats, io.waker())))
    }

    fn driver_specific(&self) -> Value {
        let counted = self.counted();
        json!({"integrity": {
            "base_bdev_name": self.base().name(),
            "name": self.name,
            "mismatches": counted.mismatches,
            "damaged_blocks": self.damaged(),
            "damaged_checksum_pages": counted.damaged_checksum_pages,
            "damaged_maps": counted.damaged_maps,
            "dirty_regions": counted.dirty_regions,
            "stale_regions": counted.stale_regions,
            "cached_regions": counted.cached_regions,
        }})
    }

    fn stats(&self) -> Option<&Arc<Stats>> {
        Some(&self.stats)
    }

    fn flush_latch(&self) -> Option<&FlushLatch> {
        self.base().flush_latch()
    }

    fn sparse(&self) -> Option<&dyn Sparse> {
        self.base().sparse().map(|_| self as &dyn Sparse)
    }

    fn below(&self) -> Option<&str> {
        Some(self.base().name())
    }
}
