//! Maps come and go: a volume has one in memory while it is used, and what it says is read from the
//! store's metadata again when it is wanted.
//!
//! 10,000 volumes of 1 GiB have maps of 640 MiB where they are full, of which a host uses a few. An I/O
//! that meets a volume without its map waits for this thread, as one for an allocation does. A map is let
//! go of when nobody has the volume open, or it has had no I/O for a while and all maps take much, and
//! if nothing of it is in flight, and all that it got is durable; a snapshot's, when no volume needs it
//! that shows it.

use super::Meta;
use crate::asked::{Request, Want};
use crate::error::Error;
use crate::map::{Entry, Map, View, in_memory};
use crate::translate::refused;
use crate::volume::{Volume, own_map};
use bdev::{IoError, Op};
use blobstore::{BlobId, Store};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often it is looked at which volumes have no I/O; a map stays at least that long.
const LOOK: Duration = Duration::from_secs(10);
/// Bytes of maps in the process from which on those that nobody has open are let go of at once.
const MANY: u64 = 32 << 20;
/// And from which on those of open volumes without I/O are. With less they stay, so that the next I/O of
/// a guest that had none for a while is as fast as any.
const MUCH: u64 = 16 << 20;
/// Maps that are read between two looks for those, at least.
const FEW: u32 = 64;
/// Extents pages, of 4 KiB, that a store in use has in memory beside the maps: those of first writes to 1
/// TiB in clusters of 64 KiB. And how many runs of one are not worth to be let go of.
const PAGES: usize = 16384;
const RUNS: usize = 16;

/// What the metadata thread knows of the use of maps.
#[derive(Default)]
pub(crate) struct Use {
    /// When it looks next; `None`: there is nothing that could be let go of.
    next: Option<Instant>,
    /// I/Os that each volume had done at the last look.
    done: HashMap<BlobId, u64>,
    /// The store has extents pages in memory that it does not need.
    pages: bool,
    /// Maps that were read since the last look for those that nobody has open.
    read: u32,
}

/// Whether the map of a volume may go which somebody has open, or not, and had I/O lately, or not, while
/// all maps take so many bytes.
fn may_go(is_open: bool, had_io: bool, all: u64) -> bool {
    !is_open || !had_io && all >= MUCH
}

impl Meta {
    /// Sees to it that a volume has its map in memory.
    pub fn present(&mut self, op: &str, volume: &Arc<Volume>) -> Result<(), Error> {
        if volume.has_map() {
            return Ok(());
        }
        self.make_way();
        let up = |volume: &Arc<Volume>| {
            volume.kin(|kin| kin.parent.clone()).filter(|parent| !parent.has_map())
        };
        let chain: Vec<_> = std::iter::successors(Some(volume.clone()), up).collect();
        for volume in chain.into_iter().rev() {
            let blob = volume.blob();
            let store = self.look(op)?;
            let cluster_size = store.info().cluster_size;
            let info = store.blob(blob).map_err(|e| refused(e, op, cluster_size))?;
            let map = own_map(store, &info).map_err(|e| refused(e, op, cluster_size))?;
            self.show(&volume, Arc::new(map));
            self.maps.read += 1;
        }
        self.maps.next.get_or_insert_with(|| Instant::now() + LOOK);
        if volume.has_map() {
            return Ok(());
        }
        let cause = format!("the map of a snapshot of lvol {} cannot be read", volume.alias());
        Err(Error::Io { op: op.into(), cause })
    }

    /// The view of a volume with its map.
    pub fn view_of(&mut self, op: &str, volume: &Arc<Volume>) -> Result<View, Error> {
        self.present(op, volume)?;
        Ok(volume.view())
    }

    /// Reads the maps that channels wait for, and those that others asked for.
    pub fn bring_maps(&mut self) {
        for blob in self.thread.take_wanted() {
            let Some(volume) = self.volumes.get(&blob).cloned() else { continue };
            if let Err(e) = self.present("look at an lvol", &volume) {
                tracing::error!("{e}");
            }
            volume.tell();
        }
        for at in 0..self.served.len() {
            let served = &self.served[at];
            let wants = |want: Want| want != Want::Flush;
            if self.store.is_none()
                || !served.queue.iter().any(|waiting| wants(waiting.request.want))
                || self.frozen.iter().any(|volume| Arc::ptr_eq(volume, &served.volume))
            {
                continue;
            }
            let volume = served.volume.clone();
            let brought = self.present("serve a volume", &volume);
            let answer = match &brought {
                Ok(()) => Ok(()),
                Err(e) => {
                    tracing::error!("the map of lvol {} cannot be read: {e}", volume.alias());
                    Err(IoError::ReadMedium)
                }
            };
            // What a volume has can be written to in a store that takes no changes, too.
            let halted = self.store("serve a volume").is_err()
                || self.store.as_ref().is_some_and(|store| store.stopped().is_some());
            let view = volume.view();
            let has_all = |request: &Request| {
                let end = request.first.saturating_add(request.count).min(view.clusters());
                (request.first..end).all(|cluster| view.own(cluster) != 0)
            };
            self.served[at].queue.retain(|waiting| {
                let over = match waiting.request.want {
                    Want::Map => true,
                    Want::Flush => false,
                    Want::Allocate | Want::AllocateDurably if brought.is_ok() => {
                        halted && has_all(&waiting.request)
                    }
                    _ => brought.is_err(),
                };
                if over {
                    waiting.answer(answer);
                }
                !over
            });
        }
    }

    /// How long it may be until [`Meta::let_go_idle`].
    pub fn until_look(&self) -> Option<Duration> {
        self.maps.next.map(|next| next.saturating_duration_since(Instant::now()))
    }

    /// Lets go of the maps that nobody uses, if it is time to look for them. Whether there is more of that
    /// to do at once.
    pub fn let_go_idle(&mut self) -> bool {
        if self.maps.next.is_some_and(|next| Instant::now() >= next) {
            self.let_go_unused();
        }
        if self.maps.pages {
            self.maps.pages = self.store.as_mut().is_some_and(|store| store.let_go(0, RUNS));
        }
        self.maps.pages
    }

    fn let_go_unused(&mut self) {
        let open = self.open();
        let all = in_memory();
        let mut done = HashMap::new();
        let before = std::mem::take(&mut self.maps.done);
        self.let_go_if(|volume| {
            if !open.contains(&Arc::as_ptr(volume)) {
                return may_go(false, false, all);
            }
            let stat = volume.stats.snapshot();
            let ops = [Op::Read, Op::Write, Op::Unmap, Op::WriteZeroes, Op::Flush];
            let now = ops.iter().map(|op| stat.op(*op).ops).sum();
            done.insert(volume.blob(), now);
            may_go(true, before.get(&volume.blob()) != Some(&now), all)
        });
        self.maps.done = done;
        self.maps.pages = true;
        let any = self.volumes.values().any(|volume| volume.has_map());
        self.maps.next = any.then(|| Instant::now() + LOOK);
    }

    /// Lets go of all maps that can be, whether or not their volumes are idle.
    pub fn let_go_all(&mut self) {
        self.let_go_if(|_| true);
        if let Some(store) = &mut self.store {
            store.let_go_all();
        }
    }

    /// Bounds what the store has in memory of its extents pages, between two operations.
    pub fn let_go_pages(&mut self) {
        let Some(store) = &mut self.store else { return };
        store.let_go(PAGES, RUNS);
        if store.in_memory() > 0 {
            self.maps.next.get_or_insert_with(|| Instant::now() + LOOK);
        }
    }

    /// Lets go of the maps that nobody has open where there are many.
    fn make_way(&mut self) {
        if self.maps.read < FEW || in_memory() < MANY {
            return;
        }
        self.maps.read = 0;
        let open = self.open();
        self.let_go_if(|volume| !open.contains(&Arc::as_ptr(volume)));
    }

    fn open(&self) -> HashSet<*const Volume> {
        self.thread.open().iter().map(Arc::as_ptr).collect()
    }

    /// Lets go of the maps of those volumes of which `idle` says so, and that nobody needs.
    fn let_go_if(&mut self, mut idle: impl FnMut(&Arc<Volume>) -> bool) {
        let asks = self.served.iter().filter(|served| !served.queue.is_empty());
        let asks: HashSet<_> = asks.map(|served| Arc::as_ptr(&served.volume)).collect();
        let frozen: HashSet<_> = self.frozen.iter().map(Arc::as_ptr).collect();
        let mut needed = HashSet::new();
        let mut leave = Vec::new();
        for volume in self.volumes.values().filter(|volume| volume.has_map()) {
            let at = Arc::as_ptr(volume);
            // What a flush that fails takes away again is told by comparing maps.
            let waits = asks.contains(&at) || frozen.contains(&at);
            if idle(volume) && volume.is_settled() && !volume.keeps_map() && !waits {
                leave.push(volume.clone());
                continue;
            }
            let up = |volume: &Arc<Volume>| volume.kin(|kin| kin.parent.clone());
            for parent in std::iter::successors(up(volume), up) {
                if !needed.insert(Arc::as_ptr(&parent)) {
                    break;
                }
            }
        }
        leave.retain(|volume| !needed.contains(&Arc::as_ptr(volume)));
        for volume in &leave {
            let view = volume.view();
            let version = volume.replace_view(view.without_map());
            if !volume.quiet(version) {
                // Its clusters could be taken from it meanwhile, and be somebody else's.
                volume.replace_view(view);
            }
        }
        // All at once: who polls many channels looks at them together.
        leave.iter().for_each(|volume| volume.wake());
    }

    /// Gives a volume its own map, and puts below it what its parent shows, after its parent has what lies
    /// below that. Without the parent's map it has none either. Returns the version of the view.
    pub fn show(&mut self, volume: &Arc<Volume>, own: Arc<Map>) -> u64 {
        let before = match self.store.as_ref().map(|store| store.blob(volume.blob())) {
            Some(Ok(info)) => info.parent_clusters,
            _ => 0,
        };
        let (parent, external) = volume.kin(|kin| (kin.parent.clone(), kin.external.clone()));
        let external = match &parent {
            Some(parent) => parent.view().external_before(before),
            None => external.map(|external| (external, before)),
        };
        let mut view = View { own, shown: None, external, shares: false };
        if let Some(parent) = parent.filter(|_| !view.is_away()) {
            match self.present("look at a snapshot", &parent) {
                Ok(()) => view.shown = Some((parent.flat(), before)),
                Err(e) => {
                    tracing::error!("{e}");
                    view = view.without_map();
                }
            }
        }
        volume.replace_view(self.part_shared(view))
    }

    /// Whether clusters can have several owners.
    pub fn shares_clusters(&self) -> bool {
        self.store.as_ref().is_some_and(Store::shares_clusters)
    }

    /// All that a volume has itself, as the store has it, if it had its map; without where that cannot be read.
    pub fn own_anew(&mut self, volume: &Arc<Volume>, own: Arc<Map>) -> Arc<Map> {
        if own.is_away() {
            return own;
        }
        let Some(store) = &mut self.store else { return own };
        let has = store.blob(volume.blob()).and_then(|blob| own_map(store, &blob));
        Arc::new(has.unwrap_or_else(|e| {
            tracing::error!("the map of lvol {} cannot be read: {e}", volume.alias());
            Map::away(own.clusters())
        }))
    }

    /// A view of all that a volume has itself, without those of its clusters among what it may write to that have
    /// other owners, too.
    pub fn part_shared(&self, view: View) -> View {
        let Some(store) = self.store.as_ref().filter(|store| store.shares_clusters()) else {
            return view;
        };
        if view.is_away() {
            return view;
        }
        let own = (0..view.clusters()).map(|cluster| (cluster, view.own(cluster)));
        let shared = own.filter(|(_, to)| *to != 0 && store.is_shared(*to));
        let shared: Vec<_> = shared.map(|(cluster, to)| Entry::shared(cluster, to)).collect();
        if shared.is_empty() { view } else { view.changed(&shared) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_map_of_an_open_volume_stays_while_all_take_little() {
        assert!(may_go(false, false, 0));
        assert!(!may_go(true, false, MUCH - 1));
        assert!(may_go(true, false, MUCH));
        assert!(!may_go(true, true, u64::MAX));
    }
}
