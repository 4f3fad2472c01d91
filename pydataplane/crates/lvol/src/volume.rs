//! An lvol as everybody shares it: its names, its map, and the channels that use it.

use crate::asked::{ChannelShared, MetaThread, Request, SLOTS};
use crate::encryption::{ENCRYPTION_XATTR, Encryption};
use crate::external::External;
use crate::map::{Map, View};
use crate::ranges;
use bdev::{
    Bdev, Features, Geometry, Protection, ProtectionType, Run, Sparse, Stats, aliases_changed,
};
use blobstore::{BlobId, BlobInfo, DifType, Disk, Error as StoreError, Store, StoreInfo};
use crossbeam_queue::ArrayQueue;
use parking_lot::{Condvar, Mutex};
use protection::Layout;
use reactor::Waker;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Weak};
use std::time::Duration;
use uuid::Uuid;

/// How long somebody waits for a map who can do without.
const MAP_WAIT: Duration = Duration::from_secs(2);

/// Names as people see them.
#[derive(Clone, Debug)]
pub(crate) struct Names {
    pub lvstore: String,
    pub lvol: String,
}

/// What never changes about a volume.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub uuid: Uuid,
    pub lvstore: Uuid,
    /// Whether it gives clusters back. One that was thick when it was opened does not: what a guest may
    /// ask of a disk does not change while it has it.
    pub unmaps: bool,
    /// Log2 of the blocks of a cluster.
    pub shift: u32,
    /// The key that its data is encrypted with, if it has one of its own.
    pub encryption: Option<Encryption>,
    /// The type of the protection information that it keeps itself, and where among its clusters.
    pub dif: Option<(ProtectionType, Layout)>,
}

/// Where a volume comes from, and who from it.
#[derive(Default)]
pub(crate) struct Kin {
    /// Whether clusters are allocated on first write only.
    pub thin: bool,
    pub snapshot: bool,
    /// The snapshot whose clone it is.
    pub parent: Option<Arc<Volume>>,
    /// The bdev whose clone it is instead.
    pub external: Option<Arc<External>>,
    /// By UUID.
    pub clones: BTreeMap<Uuid, Weak<Volume>>,
}

/// One lvol. Shared by the registry, its channels and the metadata thread.
pub(crate) struct Volume {
    pub id: Identity,
    /// The UUID as text: the bdev's name.
    pub name: String,
    names: Mutex<Names>,
    pub base: Arc<dyn Bdev>,
    base_geometry: Geometry,
    base_features: Features,
    read_only: AtomicBool,
    /// Its blob: another one after a snapshot was taken, which keeps the one before.
    blob: Mutex<BlobId>,
    /// Names of the xattrs that it may have: of all that it has.
    xattrs: Mutex<BTreeSet<String>>,
    kin: Mutex<Kin>,
    /// What it reads now; `version` says when to look again.
    view: Mutex<View>,
    /// Its map stays in memory.
    keeps_map: AtomicBool,
    /// Somebody waits for the map of `view`.
    told: Condvar,
    /// All that a snapshot shows, for its clones.
    flat: Mutex<Option<Arc<Map>>>,
    /// Changes whenever a translation made before may not be used any more. Never 0.
    version: Arc<AtomicU64>,
    /// Deleted: I/O ends with [`bdev::IoError::Removed`].
    removed: AtomicBool,
    num_blocks: AtomicU64,
    /// Clusters that it owns.
    pub allocated: AtomicU64,
    /// The last round in which it got clusters that were not durably its own at once.
    tentative: AtomicU64,
    /// Acknowledged writes were lost with clusters that were not durably its own: its next flush fails.
    lost_writes: AtomicBool,
    channels: Mutex<Vec<Arc<ChannelShared>>>,
    pub stats: Arc<Stats>,
    pub thread: MetaThread<Volume>,
}

impl Volume {
    /// The volume of a blob, without its map; its parent is to be set.
    pub fn of_blob(
        store: &Store<impl Disk>,
        info: &StoreInfo,
        blob: &BlobInfo,
        base: &Arc<dyn Bdev>,
        thread: &MetaThread<Volume>,
    ) -> Arc<Self> {
        let per_cluster = info.cluster_size / base.geometry().block_size;
        let id = Identity {
            uuid: blob.uuid,
            lvstore: info.uuid,
            unmaps: blob.thin,
            shift: per_cluster.trailing_zeros(),
            encryption: store.xattr(blob.id, ENCRYPTION_XATTR).ok().map(Encryption::of_xattr),
            dif: blob.dif.map(|dif| {
                let kind = match dif.kind {
                    DifType::Type1 => ProtectionType::Type1,
                    DifType::Type3 => ProtectionType::Type3,
                };
                let block_size = if dif.large_blocks { 4096 } else { 512 };
                (kind, Layout::new(block_size, info.cluster_size))
            }),
        };
        let names = Names { lvstore: info.name.clone(), lvol: blob.name.clone() };
        let map = Map::away(blob.size);
        let volume =
            Volume::new(id, names, blob.id, blob.read_only, base.clone(), map, thread.clone());
        volume.read_xattrs(store);
        volume
    }

    pub fn new(
        id: Identity,
        names: Names,
        blob: BlobId,
        read_only: bool,
        base: Arc<dyn Bdev>,
        map: Map,
        thread: MetaThread<Volume>,
    ) -> Arc<Self> {
        Arc::new(Volume {
            name: id.uuid.to_string(),
            names: Mutex::new(names),
            base_geometry: base.geometry(),
            base_features: base.features(),
            base,
            read_only: AtomicBool::new(read_only),
            num_blocks: AtomicU64::new(map.clusters() << id.shift),
            blob: Mutex::new(blob),
            xattrs: Mutex::default(),
            kin: Mutex::default(),
            view: Mutex::new(View::of(map)),
            keeps_map: AtomicBool::new(false),
            told: Condvar::new(),
            flat: Mutex::default(),
            version: Arc::new(AtomicU64::new(1)),
            removed: AtomicBool::new(false),
            allocated: AtomicU64::new(0),
            tentative: AtomicU64::new(0),
            lost_writes: AtomicBool::new(false),
            channels: Mutex::default(),
            stats: Stats::new(),
            thread,
            id,
        })
    }

    pub fn names(&self) -> Names {
        self.names.lock().clone()
    }

    pub fn is_named(&self, lvol: &str) -> bool {
        self.names.lock().lvol == lvol
    }

    pub fn rename(&self, change: impl FnOnce(&mut Names)) {
        change(&mut self.names.lock());
        aliases_changed(&self.name);
    }

    /// As [`Volume::rename`] of one that is not registered: nobody has to look for it anew.
    pub fn name_lvstore(&self, lvstore: String) {
        self.names.lock().lvstore = lvstore;
    }

    /// `LVSTORE/LVOL`.
    pub fn alias(&self) -> String {
        let names = self.names.lock();
        format!("{}/{}", names.lvstore, names.lvol)
    }

    pub fn is_read_only(&self) -> bool {
        self.read_only.load(Ordering::Relaxed)
    }

    /// Only while the volume is not registered: a bdev's features do not change.
    pub fn set_read_only(&self) {
        self.read_only.store(true, Ordering::Relaxed);
    }

    pub fn blob(&self) -> BlobId {
        *self.blob.lock()
    }

    /// Only for the metadata thread.
    pub fn set_blob(&self, blob: BlobId) {
        *self.blob.lock() = blob;
    }

    /// Whether it has an xattr, perhaps; what is not so it has not. Asks nobody.
    pub fn may_have_xattr(&self, name: &str) -> bool {
        self.xattrs.lock().contains(name)
    }

    /// Knows what xattrs its blob has. Only for the metadata thread.
    pub fn read_xattrs(&self, store: &Store<impl Disk>) {
        *self.xattrs.lock() = store.xattrs(self.blob()).into_iter().flatten().collect();
    }

    /// Its blob is about to have an xattr, or has it no more. Only for the metadata thread.
    pub fn note_xattr(&self, name: &str, is_there: bool) {
        let mut names = self.xattrs.lock();
        _ = match is_there {
            true => names.insert(name.to_owned()),
            false => names.remove(name),
        };
    }

    /// Its clones, in no order that matters.
    pub fn clones(&self) -> Vec<Arc<Volume>> {
        self.kin(|kin| kin.clones.values().filter_map(Weak::upgrade).collect())
    }

    pub fn kin<R>(&self, look: impl FnOnce(&mut Kin) -> R) -> R {
        look(&mut self.kin.lock())
    }

    pub fn view(&self) -> View {
        self.view.lock().clone()
    }

    /// Whether its map is in memory.
    pub fn has_map(&self) -> bool {
        !self.view.lock().is_away()
    }

    /// Whether its map stays in memory though nobody uses it.
    pub fn keeps_map(&self) -> bool {
        self.keeps_map.load(Ordering::Relaxed)
    }

    /// Has its map stay in memory, and waits for it. It is to be a parent of volumes of another lvstore,
    /// whose metadata thread reads it: two of these must not wait for each other.
    pub fn keep_map(&self) {
        self.keeps_map.store(true, Ordering::Relaxed);
        self.waited_for();
    }

    /// The view with its map, for whoever may wait for it and has no channel; without where that takes too
    /// long or fails.
    fn waited_for(&self) -> View {
        let mut view = self.view.lock();
        if view.is_away() {
            self.thread.want_map(self.blob());
            self.told.wait_for(&mut view, MAP_WAIT);
        }
        view.clone()
    }

    /// Its map was read, or cannot be.
    pub fn tell(&self) {
        // Whoever waits is told after he began to.
        drop(self.view.lock());
        self.told.notify_all();
    }

    /// Has its channels look at the view again, also those without I/O.
    pub fn wake(&self) {
        self.channels.lock().iter().for_each(|channel| channel.waker.wake());
    }

    /// Whether it, or a snapshot that it shows, is the clone of a bdev that is missing.
    pub fn is_degraded(&self) -> bool {
        self.view.lock().external.as_ref().is_some_and(|(external, _)| external.is_missing())
    }

    /// All that it shows, as one map.
    pub fn flat(&self) -> Arc<Map> {
        self.flat.lock().get_or_insert_with(|| self.view().flat()).clone()
    }

    /// What a snapshot shows, as its volume had it when it was taken.
    pub fn keep_flat(&self, flat: Arc<Map>) {
        *self.flat.lock() = Some(flat);
    }

    #[inline]
    pub fn is_removed(&self) -> bool {
        self.removed.load(Ordering::Relaxed)
    }

    /// The size of the blocks whose protection information it keeps itself, where that of its base is another.
    pub fn other_block_size(&self) -> Option<u32> {
        let its = self.id.dif.map(|(_, layout)| layout.block_size());
        its.filter(|its| *its != self.base_geometry.block_size)
    }

    /// Bytes that it shows.
    pub fn size(&self) -> u64 {
        self.shown(self.num_blocks.load(Ordering::Relaxed) >> self.id.shift) * self.cluster_bytes()
    }

    fn cluster_bytes(&self) -> u64 {
        u64::from(self.base_geometry.block_size) << self.id.shift
    }

    /// How many of its first `clusters` it shows: all but those of protection information.
    fn shown(&self, clusters: u64) -> u64 {
        self.id.dif.map_or(clusters, |(_, layout)| layout.data_clusters(clusters))
    }

    /// Where byte `at` of its clusters is in what it shows; of a cluster of protection information that is where
    /// what that is of begins.
    pub fn shown_at(&self, at: u64) -> u64 {
        let cluster = at / self.cluster_bytes();
        let is_data = self.id.dif.is_none_or(|(_, layout)| layout.cluster_of(cluster).is_some());
        let within = if is_data { at % self.cluster_bytes() } else { 0 };
        self.shown(cluster) * self.cluster_bytes() + within
    }

    pub fn geometry(&self) -> Geometry {
        Geometry { num_blocks: self.num_blocks.load(Ordering::Acquire), ..self.base_geometry }
    }

    pub fn features(&self) -> Features {
        let base = self.base_features;
        Features {
            read_only: base.read_only || self.is_read_only(),
            volatile_cache: base.volatile_cache,
            fua: base.fua,
            // Whole clusters of a thin volume are given back even where the base cannot unmap. A thick
            // volume keeps its room, whatever lies below: what a hole gave back to a file system
            // could be missing at the next write.
            unmap: self.id.unmaps,
            unmap_zeroes: self.id.unmaps && base.unmap && base.unmap_zeroes,
            // Parts of clusters that a snapshot shows, and all of a volume that was inflated meanwhile.
            unmap_skips: self.id.unmaps,
            write_zeroes: base.write_zeroes,
            thin: self.id.unmaps,
            unmap_granularity: if self.id.unmaps { 1 << self.id.shift } else { 0 },
            // Its clusters lie anywhere.
            optimal_blocks: 0,
            max_blocks: base.max_blocks,
            boot: base.boot,
            remote: base.remote,
        }
    }

    /// What its blocks have, as its base has it; one that keeps its own has that above this. An encrypted
    /// one's is of what lies there, which is not what is written to it, so it shows none.
    pub fn protection(&self) -> Option<Protection> {
        let as_it_lies = self.id.encryption.is_none() && self.id.dif.is_none();
        let its = self.base.protection().filter(|_| as_it_lies);
        its.map(|protection| Protection { interleaved: false, ..protection })
    }

    /// Whether clusters that are not needed go back to the store: not of one that has become thick.
    pub fn gives_back(&self) -> bool {
        self.id.unmaps && self.kin(|kin| kin.thin)
    }

    /// It gets clusters that are durably its own with the next flush only: said before anybody can
    /// write to them.
    pub fn set_tentative(&self, round: u64) {
        self.tentative.store(round, Ordering::Release);
    }

    /// Whether a flush of the base bdev makes all that was written durable: not while there are clusters
    /// that are not durably its own.
    #[inline]
    pub fn is_settled(&self) -> bool {
        self.thread.is_durable(self.tentative.load(Ordering::Acquire))
            && !self.lost_writes.load(Ordering::Relaxed)
    }

    /// Acknowledged writes were lost, which its next flush tells.
    pub fn set_lost_writes(&self) {
        self.lost_writes.store(true, Ordering::Relaxed);
    }

    /// Whether a flush has to tell that writes were lost. Said once.
    pub fn take_lost_writes(&self) -> bool {
        self.lost_writes.swap(false, Ordering::Relaxed)
    }

    /// Whether the base bdev can unmap.
    pub fn base_unmaps(&self) -> bool {
        self.base_features.unmap
    }

    /// Makes every channel look at the map again before its next I/O. Returns the version which
    /// [`Volume::quiet`] must be asked for before clusters that left the map are reused.
    pub fn bump(&self) -> u64 {
        let version = self.version.fetch_add(1, Ordering::SeqCst) + 1;
        fence(Ordering::SeqCst);
        version
    }

    /// Gives the volume another view, and with it another size. Entries cut off were cleared before.
    pub fn replace_view(&self, view: View) -> u64 {
        let clusters = view.clusters();
        *self.view.lock() = view;
        *self.flat.lock() = None;
        self.num_blocks.store(clusters << self.id.shift, Ordering::Release);
        self.bump()
    }

    /// Ends all further I/O.
    pub fn remove(&self) -> u64 {
        self.removed.store(true, Ordering::Release);
        *self.view.lock() = View::of(Map::new(0));
        *self.flat.lock() = None;
        *self.kin.lock() = Kin::default();
        self.num_blocks.store(0, Ordering::Release);
        self.bump()
    }

    /// Whether no channel has I/O in flight that was translated before `version`.
    pub fn quiet(&self, version: u64) -> bool {
        fence(Ordering::SeqCst);
        self.channels.lock().iter().all(|c| {
            let active = c.active.load(Ordering::Acquire);
            active == 0 || active >= version
        })
    }

    /// Calls `f` for each request of each channel.
    pub fn requests(&self, mut f: impl FnMut(&Arc<ChannelShared>, Request)) {
        for channel in self.channels.lock().iter() {
            while let Some(request) = channel.requests.pop() {
                f(channel, request);
            }
        }
    }

    pub fn add_channel(self: &Arc<Self>, waker: Waker) -> Arc<ChannelShared> {
        let shared = Arc::new(ChannelShared {
            version: self.version.clone(),
            active: AtomicU64::new(0),
            requests: ArrayQueue::new(SLOTS),
            replies: ArrayQueue::new(SLOTS),
            writes: Arc::default(),
            waker,
        });
        let mut channels = self.channels.lock();
        channels.push(shared.clone());
        if channels.len() == 1 {
            self.thread.opened(self);
        }
        shared.clone()
    }

    pub fn drop_channel(&self, shared: &Arc<ChannelShared>) {
        shared.writes.close();
        let mut channels = self.channels.lock();
        channels.retain(|c| !Arc::ptr_eq(c, shared));
        if channels.is_empty() {
            self.thread.closed(self);
        }
    }
}

impl Sparse for Volume {
    fn run(&self, lba: u64) -> Run {
        let cluster = lba >> self.id.shift;
        let view = self.waited_for();
        let (hole, clusters) = match view.is_away() {
            false => ranges::run(&view, cluster, ranges::LOOKED_AT),
            // Not known: it can only be said to be data.
            true => (false, view.clusters().saturating_sub(cluster).min(ranges::LOOKED_AT)),
        };
        let end = cluster.saturating_add(clusters) << self.id.shift;
        Run { hole, blocks: end.saturating_sub(lba) }
    }

    /// What it has itself and what all that it was made of have, whether it still shows that or not.
    fn allocated_bytes(&self) -> u64 {
        let blocks = self.geometry().num_blocks;
        let own = self.allocated.load(Ordering::Relaxed);
        let (mut parent, external) = self.kin(|kin| (kin.parent.clone(), kin.external.is_some()));
        let (mut clusters, mut all) = (own, external);
        while let Some(volume) = parent {
            clusters += volume.allocated.load(Ordering::Relaxed);
            let above = volume.kin(|kin| (kin.parent.clone(), kin.external.is_some()));
            (parent, all) = (above.0, all || above.1);
        }
        let held = if all { blocks } else { blocks.min(clusters << self.id.shift) };
        held * u64::from(self.base_geometry.block_size)
    }

    fn free_bytes(&self) -> Option<u64> {
        let clusters = self.thread.gauges.free_clusters.load(Ordering::Relaxed);
        Some((clusters << self.id.shift) * u64::from(self.base_geometry.block_size))
    }
}

/// What a blob has itself.
///
/// # Errors
/// Where the store cannot read that again.
pub(crate) fn own_map(store: &mut Store<impl Disk>, blob: &BlobInfo) -> Result<Map, StoreError> {
    let map = Map::new(blob.size);
    store.each_cluster(blob.id, 0, |cluster, to| map.set(cluster, to))?;
    Ok(map)
}
