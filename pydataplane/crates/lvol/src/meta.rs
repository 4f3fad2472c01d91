//! What the metadata thread of an lvstore owns: the blobstore, and its changes.
//!
//! Control threads have it run closures ([`reactor::Control`]); channels put requests into their
//! queues and ring the bell (`rounds`). Clusters that a volume lost are handed back to the store only
//! when every channel is quiet, that is, has nothing in flight that was translated while the volume
//! still had them.

mod maps;

use crate::asked::MetaThread;
use crate::disk::BdevDisk;
use crate::error::Error;
use crate::external::Externals;
use crate::map::{Map, View};
use crate::served::Served;
use crate::translate::refused;
use crate::volume::Volume;
use bdev::{Bdev, FlushCause, Registry};
use blobstore::{BlobId, Error as StoreError, Freed, Reservation, Run, Store, StoreInfo};
use maps::Use;
use reactor::{Next, Work};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

/// Bytes that the bdev is told to unmap by one call.
const UNMAP_STEP: u64 = 1 << 30;
/// How long freed clusters are unmapped between two rounds; one call at least.
const UNMAP_TIME: Duration = Duration::from_millis(1);
/// An lvstore has little room left below this, and enough from this on.
const LOW_PERCENT: u64 = 10;
const ENOUGH_PERCENT: u64 = 12;
/// How long a change that lacks room waits for channels to let go of clusters that were freed.
pub(crate) const QUIET_WAIT: Duration = Duration::from_secs(1);
/// How often channels are looked at while freed clusters wait for them.
const QUIET_POLL: Duration = Duration::from_millis(1);

/// Clusters that wait until the channels of those who showed them are quiet.
struct Retiring {
    /// Each with the version from which on it shows them no more.
    users: Vec<(Arc<Volume>, u64)>,
    freed: Freed,
}

/// The thread's own state.
pub(crate) struct Meta {
    pub base: Arc<dyn Bdev>,
    /// `None` after it was closed or destroyed.
    pub store: Option<Store<BdevDisk>>,
    /// All volumes, by blob.
    pub volumes: HashMap<BlobId, Arc<Volume>>,
    pub thread: MetaThread<Volume>,
    pub externals: Arc<Externals>,
    /// Those that are served: those that have channels or had.
    pub served: Vec<Served>,
    /// [`MetaThread::changes`] when the former was made.
    pub served_as_of: u64,
    /// Whose requests wait until a snapshot was taken.
    pub frozen: Vec<Arc<Volume>>,
    maps: Use,
    /// Whose turn is first in the next round.
    pub turn: usize,
    /// Counts the rounds after which something was not durable.
    pub round: u64,
    /// In the last round a request lacked room, which comes with what was freed.
    pub lacks_room: bool,
    /// Snapshots that a load has found, and that their volumes were not known to have: of each such volume, and the
    /// version of its view before which it wrote to what is the snapshot's.
    pub found: Vec<(Arc<Volume>, Arc<Volume>, u64)>,
    retiring: Vec<Retiring>,
    registry: Registry,
    /// Little room was left when somebody was last told.
    low: bool,
    /// Clusters that are zeroed elsewhere, for whoever reserved them.
    reserved: Vec<Run>,
}

impl Work for Meta {
    fn round(&mut self) -> Next {
        let more = self.serve() | self.let_go_idle();
        if self.reap() || more {
            return Next::Now;
        }
        match (self.retiring.is_empty(), self.has_requests()) {
            (false, _) => Next::Within(QUIET_POLL),
            // They waited for the room that has just come.
            (true, true) => Next::Now,
            (true, false) => self.until_look().map_or(Next::WhenRung, Next::Within),
        }
    }

    fn end(mut self) {
        if let Some(store) = self.store.take()
            && let Err(e) = store.close()
        {
            tracing::warn!("an lvstore was not closed in order; its journal is replayed: {e}");
        }
    }
}

impl Meta {
    pub fn new(
        base: Arc<dyn Bdev>,
        store: Store<BdevDisk>,
        thread: MetaThread<Volume>,
        externals: Arc<Externals>,
        registry: Registry,
    ) -> Self {
        let mut meta = Meta {
            base,
            store: Some(store),
            volumes: HashMap::new(),
            thread,
            externals,
            served: Vec::new(),
            served_as_of: 0,
            frozen: Vec::new(),
            maps: Use::default(),
            turn: 0,
            round: 0,
            lacks_room: false,
            found: Vec::new(),
            retiring: Vec::new(),
            registry,
            low: false,
            reserved: Vec::new(),
        };
        // Stopped from the beginning: that is for a failure which is latched, or was.
        let stopped = meta.store.as_ref().and_then(|store| store.info().stopped);
        *meta.thread.gauges.stopped.lock() = stopped;
        meta.publish();
        meta
    }

    /// The store, to look at, as long as the lvstore is loaded.
    pub fn look(&mut self, op: &str) -> Result<&mut Store<BdevDisk>, Error> {
        let gone = || Error::Stopped { op: op.into(), cause: "it was unloaded".into() };
        self.store.as_mut().ok_or_else(gone)
    }

    /// The store, to change it: not while a failed flush of its bdev is latched.
    pub fn store(&mut self, op: &str) -> Result<&mut Store<BdevDisk>, Error> {
        if let Some(failure) = self.base.flush_latch().and_then(|latch| latch.failure()) {
            let cause = format!("on bdev {} {failure}", self.base.name());
            return Err(Error::Stopped { op: op.into(), cause });
        }
        self.look(op)
    }

    /// Tells everybody what changed.
    pub fn publish(&mut self) {
        self.let_go_pages();
        let Some(store) = &self.store else { return };
        if !store.has_tentative() {
            self.thread.set_durable(self.round);
        }
        let info = store.info();
        let waiting = self.retiring.iter().flat_map(|r| r.freed.runs()).map(|r| r.count);
        let free = store.free_after(waiting.sum());
        self.thread.gauges.data_clusters.store(info.data_clusters, Ordering::Relaxed);
        self.thread.gauges.free_clusters.store(free, Ordering::Relaxed);
        self.thread.gauges.format_version.store(info.version, Ordering::Relaxed);
        self.thread.gauges.shares_clusters.store(info.shares_clusters, Ordering::Relaxed);
        let mut stopped = self.thread.gauges.stopped.lock();
        if let (Some(cause), None) = (store.stopped(), &*stopped) {
            tracing::error!("lvstore {} takes no more changes: {cause}", info.name);
            // All that share the device are told; a full one fails its writes by itself.
            if let Some(latch) = self.base.flush_latch().filter(|_| !cause.no_space) {
                latch.set(FlushCause::Metadata, None);
            }
        }
        stopped.clone_from(&info.stopped);
        drop(stopped);
        self.tell_of_room(&info, free);
    }

    /// Says so when little room is left, and when there is enough again.
    fn tell_of_room(&mut self, info: &StoreInfo, free: u64) {
        let percent = free * 100 / info.data_clusters.max(1);
        let low = percent < if self.low { ENOUGH_PERCENT } else { LOW_PERCENT };
        if low == self.low {
            return;
        }
        self.low = low;
        let mib = (free * u64::from(info.cluster_size)) >> 20;
        match low {
            true => tracing::warn!(
                "lvstore {} has {mib} MiB left, {percent} % of it: grow it or delete volumes before \
                 writes to thin ones fail",
                info.name
            ),
            false => tracing::info!("lvstore {} has {mib} MiB left again", info.name),
        }
        self.registry.notify_space(&self.base, &info.name, low);
    }

    pub fn publish_volume(&self, volume: &Volume) {
        if let Some(store) = &self.store
            && let Ok(blob) = store.blob(volume.blob())
        {
            volume.allocated.store(blob.allocated, Ordering::Relaxed);
        }
    }

    pub fn add_volume(&mut self, volume: Arc<Volume>) {
        self.publish_volume(&volume);
        self.volumes.insert(volume.blob(), volume);
    }

    /// Takes clusters, waiting for those that channels still use if there are too few others. They stay
    /// taken, also where the store is loaded anew, until [`Meta::own`] or [`Meta::unreserve`].
    pub fn reserve(&mut self, op: &str, count: u64) -> Result<Reservation, Error> {
        let deadline = Instant::now() + QUIET_WAIT;
        let mut more = false;
        loop {
            let cluster_size = self.store(op)?.info().cluster_size;
            match self.store(op)?.reserve(count) {
                Err(StoreError::NoSpace { .. })
                    if self.waits_for_quiet() && (more || Instant::now() < deadline) =>
                {
                    more = self.reap();
                    if more {
                        self.serve();
                    } else {
                        thread::sleep(QUIET_POLL / 10);
                    }
                }
                Err(e) => return Err(refused(e, op, cluster_size)),
                Ok(reservation) => {
                    self.reserved.extend(reservation.runs());
                    return Ok(reservation);
                }
            }
        }
    }

    /// The store, to give what was reserved, and zeroed, to a blob; if it takes no changes that is
    /// given back.
    pub fn own(
        &mut self,
        op: &str,
        reservation: Reservation,
    ) -> Result<(&mut Store<BdevDisk>, Reservation), Error> {
        if let Some(e) = self.store(op).err() {
            self.unreserve(reservation);
            return Err(e);
        }
        self.reserved.retain(|run| !reservation.runs().contains(run));
        let store = self.look(op)?;
        store.zeroed_elsewhere();
        Ok((store, reservation))
    }

    /// Gives back what was reserved; a store that is gone has forgotten it.
    pub fn unreserve(&mut self, reservation: Reservation) {
        self.reserved.retain(|run| !reservation.runs().contains(run));
        if let Some(store) = &mut self.store {
            store.unreserve(reservation);
        }
    }

    /// Whether there are clusters that become free when channels let go of them.
    pub fn waits_for_quiet(&self) -> bool {
        !self.retiring.is_empty()
    }

    /// Clusters that were durably lost and that left the views of `users`: they are free when no channel
    /// uses a view as it was before the version given with it.
    pub fn retire(&mut self, users: Vec<(Arc<Volume>, u64)>, freed: Freed) {
        users.iter().for_each(|(volume, _)| self.publish_volume(volume));
        if !freed.is_empty() {
            self.retiring.push(Retiring { users, freed });
        }
    }

    /// The clusters that are still waiting or reserved.
    pub fn held_runs(&self) -> Vec<Run> {
        self.retiring.iter().flat_map(|r| r.freed.runs()).chain(&self.reserved).copied().collect()
    }

    /// The same, for a store that was loaded anew.
    pub fn held(&self) -> impl Iterator<Item = u32> + use<> {
        let all = self.held_runs().into_iter();
        all.flat_map(|run| run.first as u32..(run.first + run.count) as u32)
    }

    /// Hands clusters back that nobody uses any more, after telling the bdev that they are not needed.
    /// Whether there is more of that to do at once: not all is done in one go.
    pub fn reap(&mut self) -> bool {
        let Some(store) = &mut self.store else { return false };
        if self.retiring.is_empty() {
            return false;
        }
        let step = (UNMAP_STEP / u64::from(store.info().cluster_size)).max(1);
        let end = Instant::now() + UNMAP_TIME;
        let mut more = false;
        for r in self
            .retiring
            .iter_mut()
            .filter(|r| r.users.iter().all(|(volume, version)| volume.quiet(*version)))
        {
            while !more && let Some(piece) = r.freed.take(step) {
                for run in piece.runs() {
                    if let Err(e) = store.discard(*run) {
                        // Only room on the bdev: whoever gets the cluster zeroes it first.
                        tracing::warn!("freed clusters could not be unmapped: {e}");
                    }
                }
                // At once: who lost one of them last is to see that nobody else has it.
                store.release(piece);
                more = Instant::now() >= end;
            }
            if more {
                break;
            }
        }
        self.retiring.retain(|r| !r.freed.is_empty());
        more && !self.retiring.is_empty()
    }

    /// Gives a volume another size in clusters; `reservation` are those that it gains, zeroed.
    pub fn resize(
        &mut self,
        op: &str,
        volume: &Arc<Volume>,
        size: u64,
        reservation: Reservation,
    ) -> Result<(), Error> {
        let (store, reservation) = self.own(op, reservation)?;
        let cluster_size = store.info().cluster_size;
        let say = |e| refused(e, op, cluster_size);
        let blob = volume.blob();
        let freed = store.resize_reserved(blob, size, reservation).map_err(say)?;
        let view = volume.view();
        let external = view.external_before(size);
        let View { own: old, shown, shares, .. } = &view;
        for cluster in size..if old.is_away() { size } else { old.clusters() } {
            if old.get(cluster) != 0 || *shares {
                view.lose(cluster, 0);
            }
        }
        let mut map = old.resized(size);
        let mut shown = shown.clone().map(|(shown, before)| (shown, before.min(size)));
        if size > old.clusters() && !map.is_away() {
            let gained = |cluster, to| map.set(cluster, to);
            if self.look(op)?.each_cluster(blob, old.clusters(), gained).is_err() {
                // It has them: who needs its map reads that again.
                (map, shown) = (Map::away(size), None);
            }
        }
        let shares = *shares && shown.is_some();
        let version = volume.replace_view(View { own: Arc::new(map), shown, external, shares });
        self.retire(vec![(volume.clone(), version)], freed);
        Ok(())
    }

    /// Ends the use of the store; `destroy` deletes it too.
    pub fn close(&mut self, op: &str, destroy: bool) -> Result<(), Error> {
        self.volumes.drain().for_each(|(_, volume)| _ = volume.remove());
        self.externals.keep(&BTreeSet::new());
        self.take_up_opened();
        self.served.drain(..).for_each(|mut served| served.answer_removed());
        while self.reap() {}
        self.retiring.clear();
        let Some(store) = self.store.take() else { return Ok(()) };
        let cluster_size = store.info().cluster_size;
        let closed = if destroy { store.destroy() } else { store.close() };
        closed.map(drop).map_err(|e| refused(e, op, cluster_size))
    }
}
