//! Snapshots and clones on the metadata thread: who shows what where a volume has nothing of its own.
//!
//! A snapshot is taken while I/O goes on. First its volume gets an empty map, below which lies all that it
//! had: reads go on, writes wait for a cluster of their own, that is for this thread. When what was
//! translated before has ended, the record makes all of it the snapshot's, and the writes go on.

use crate::disk::BdevDisk;
use crate::error::Error;
use crate::external::External;
use crate::map::{Map, View};
use crate::meta::{Meta, QUIET_WAIT};
use crate::served::Served;
use crate::translate::refused;
use crate::volume::{Identity, Names, Volume};
use blobstore::{BlobId, Deleted, Error as StoreError, Freed, HistoryOptions, Store};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// How often channels are looked at while a snapshot waits for what was translated before it.
const LOOK: Duration = Duration::from_micros(100);
/// Clusters that a volume gets in one go while its parent is taken from it.
const STEP_BYTES: u64 = 8 << 20;

impl Meta {
    /// Takes snapshots of volumes, at one instant. Returns their volumes, which are not registered yet.
    pub fn snapshot(
        &mut self,
        op: &str,
        all: &[(Arc<Volume>, HistoryOptions)],
    ) -> Result<Vec<Arc<Volume>>, Error> {
        let cluster_size = self.store(op)?.info().cluster_size;
        let say = |e| refused(e, op, cluster_size);
        let blobs: Vec<_> = all.iter().map(|(v, options)| (v.blob(), options.clone())).collect();
        self.store(op)?.check_snapshot(&blobs).map_err(say)?;
        let views: Vec<View> = all.iter().map(|(volume, _)| volume.view()).collect();
        let mut versions = Vec::new();
        for ((volume, _), view) in all.iter().zip(&views) {
            self.frozen.push(volume.clone());
            if view.is_away() {
                // Nobody reads or writes through it until it has one.
                versions.push((volume, volume.replace_view(view.clone())));
                continue;
            }
            let own = Arc::new(Map::new(view.clusters()));
            // As the snapshot will show it.
            let shown = Some((view.flat(), view.clusters()));
            let external = view.external.clone();
            let live = View { own, shown, external, shares: false };
            versions.push((volume, volume.replace_view(live)));
        }
        let taken = match self.wait_quiet(&versions) {
            true => self.store(op).and_then(|store| store.snapshot(&blobs).map_err(say)),
            false => Err(Error::SlowIo { op: op.to_owned(), seconds: QUIET_WAIT.as_secs() }),
        };
        let snapshots = match taken {
            Ok(numbers) => {
                let all = all.iter().zip(views).zip(numbers);
                Ok(all.map(|((one, view), number)| self.taken(one, view, number)).collect())
            }
            Err(e) => {
                // Its own clusters are its own again: nobody wrote to others meanwhile.
                for ((volume, _), view) in all.iter().zip(views) {
                    volume.replace_view(view);
                }
                Err(e)
            }
        };
        self.frozen.clear();
        snapshots
    }

    /// The snapshot of a volume whose blob is `number` now; it shows `view`.
    fn taken(
        &mut self,
        (volume, options): &(Arc<Volume>, HistoryOptions),
        view: View,
        number: BlobId,
    ) -> Arc<Volume> {
        let unmaps = volume.kin(|kin| kin.thin);
        let id = Identity { uuid: options.uuid, unmaps, ..volume.id.clone() };
        let names = Names { lvol: options.name.clone(), ..volume.names() };
        let (base, thread) = (volume.base.clone(), self.thread.clone());
        let snapshot = Volume::new(id, names, volume.blob(), true, base, Map::new(0), thread);
        options.xattrs.keys().for_each(|name| snapshot.note_xattr(name, true));
        snapshot.replace_view(view);
        if let Some((shown, _)) = volume.view().shown {
            snapshot.keep_flat(shown);
        }
        volume.set_blob(number);
        self.volumes.insert(number, volume.clone());
        self.add_volume(snapshot.clone());
        self.publish_volume(volume);
        self.moved(volume);
        self.moved(&snapshot);
        snapshot
    }

    /// Waits until nobody has I/O in flight that was translated before these versions, serving the others
    /// meanwhile; `false`: somebody has after [`QUIET_WAIT`].
    pub fn wait_quiet(&mut self, versions: &[(&Arc<Volume>, u64)]) -> bool {
        let deadline = Instant::now() + QUIET_WAIT;
        while !versions.iter().all(|(volume, version)| volume.quiet(*version)) {
            if Instant::now() >= deadline {
                return false;
            }
            // Whoever waits here may not write meanwhile, so what was freed is unmapped later where nobody lacks it.
            if !(self.serve() | (self.lacks_room && self.reap())) {
                thread::sleep(LOOK);
            }
        }
        true
    }

    /// The volume of a blob.
    fn volume_of(&self, blob: BlobId) -> Option<Arc<Volume>> {
        self.volumes.get(&blob).cloned()
    }

    /// Tells a volume who its parent and its clones are. It looks at each of these.
    pub fn relate(&self, volume: &Volume) {
        let Some(info) = self.store.as_ref().and_then(|store| store.blob(volume.blob()).ok())
        else {
            return;
        };
        let parent = info.parent.and_then(|blob| self.volume_of(blob));
        let external = info.external.map(|uuid| self.externals.get(uuid));
        let clones = info.clones.iter().filter_map(|blob| self.volume_of(*blob));
        let clones = clones.map(|clone| (clone.id.uuid, Arc::downgrade(&clone))).collect();
        volume.kin(|kin| {
            kin.thin = info.thin;
            kin.snapshot = info.snapshot;
            (kin.parent, kin.external, kin.clones) = (parent, external, clones);
        });
    }

    /// Puts below a volume what its parent shows, after its parent has what lies below that. Returns the
    /// version of the view.
    pub fn look_through(&mut self, volume: &Arc<Volume>) -> u64 {
        let own = volume.view().own;
        let own = if self.shares_clusters() { self.own_anew(volume, own) } else { own };
        self.show(volume, own)
    }

    /// As [`Meta::relate`] and [`Meta::look_through`] for all volumes, parents before their clones.
    pub fn relate_all(&mut self) {
        let volumes: Vec<_> = self.volumes.values().cloned().collect();
        self.volumes = volumes.iter().map(|v| (v.blob(), v.clone())).collect();
        let Some(store) = &self.store else { return };
        if store.blobs().all(|blob| !blob.snapshot && blob.external.is_none()) {
            let thin = |volume: &Volume| store.blob(volume.blob()).is_ok_and(|blob| blob.thin);
            volumes.iter().for_each(|volume| volume.kin(|kin| kin.thin = thin(volume)));
            return;
        }
        volumes.iter().for_each(|volume| self.relate(volume));
        let depth = |volume: &Arc<Volume>| {
            let up = |volume: &Arc<Volume>| volume.kin(|kin| kin.parent.clone());
            std::iter::successors(up(volume), up).count()
        };
        let mut by_depth: Vec<_> = volumes.into_iter().map(|v| (depth(&v), v)).collect();
        by_depth.sort_by_key(|(depth, _)| *depth);
        for (depth, volume) in by_depth {
            if depth > 0 || volume.kin(|kin| kin.external.is_some()) {
                self.look_through(&volume);
            }
        }
    }

    /// Creates a clone of a snapshot. Returns its volume, which is not registered yet.
    pub fn clone_of(
        &mut self,
        op: &str,
        snapshot: &Arc<Volume>,
        options: &HistoryOptions,
    ) -> Result<Arc<Volume>, Error> {
        let of = snapshot.blob();
        self.make_clone(op, |store| store.clone_of(of, options))
    }

    /// Creates a clone of a bdev of so many clusters. Returns its volume, which is not registered yet.
    pub fn clone_external(
        &mut self,
        op: &str,
        external: &External,
        clusters: u64,
        options: &HistoryOptions,
    ) -> Result<Arc<Volume>, Error> {
        self.make_clone(op, |store| store.clone_external(external.uuid, clusters, options))
    }

    fn make_clone(
        &mut self,
        op: &str,
        make: impl FnOnce(&mut Store<BdevDisk>) -> Result<BlobId, StoreError>,
    ) -> Result<Arc<Volume>, Error> {
        let (base, thread) = (self.base.clone(), self.thread.clone());
        let store = self.store(op)?;
        let info = store.info();
        let say = |e| refused(e, op, info.cluster_size);
        let id = make(store).map_err(say)?;
        let blob = store.blob(id).map_err(say)?;
        let clone = Volume::of_blob(store, &info, &blob, &base, &thread);
        self.add_volume(clone.clone());
        self.moved(&clone);
        self.look_through(&clone);
        Ok(clone)
    }

    /// Gives a volume a bdev of so many clusters as its parent.
    pub fn set_external_parent(
        &mut self,
        op: &str,
        volume: &Arc<Volume>,
        external: &External,
        clusters: u64,
    ) -> Result<(), Error> {
        let store = self.store(op)?;
        let cluster_size = store.info().cluster_size;
        let set = store.set_external_parent(volume.blob(), external.uuid, clusters);
        set.map_err(|e| refused(e, op, cluster_size))?;
        self.moved(volume);
        self.look_through(volume);
        Ok(())
    }

    /// Lets go of the bdevs that are no volume's parents.
    pub fn keep_externals(&mut self) {
        let Some(store) = self.store.as_ref().filter(|_| !self.externals.is_empty()) else {
            return;
        };
        self.externals.keep(&store.blobs().filter_map(|blob| blob.external).collect());
    }

    /// Whether there is room for all that a volume needs of its own before its parent can be taken from it,
    /// waiting for what channels still use: where there is not, nobody else's is taken for a part of it.
    pub fn check_detach(&mut self, op: &str, volume: &Arc<Volume>, all: bool) -> Result<(), Error> {
        let store = self.store(op)?;
        let cluster_size = store.info().cluster_size;
        let needed = store.count_lacking(volume.blob(), all);
        let needed = needed.map_err(|e| refused(e, op, cluster_size))?;
        let reserved = self.reserve(op, needed)?;
        self.unreserve(reserved);
        Ok(())
    }

    /// Gives a volume some of what it needs of its own before its parent can be taken from it, from
    /// cluster `from` on, and at last takes it. Returns where to go on; `None`: it is done.
    pub fn detach_step(
        &mut self,
        op: &str,
        volume: &Arc<Volume>,
        all: bool,
        from: u64,
    ) -> Result<Option<u64>, Error> {
        let store = self.store(op)?;
        let info = store.info();
        let say = |e| refused(e, op, info.cluster_size);
        let blob = volume.blob();
        let most = (STEP_BYTES / u64::from(info.cluster_size)).max(1) as usize;
        let mut lacking = store.lacking(blob, all, from, most).map_err(say)?;
        if lacking.is_empty() && from > 0 {
            // What was unmapped meanwhile.
            lacking = store.lacking(blob, all, 0, most).map_err(say)?;
        }
        if let Some(next) = lacking.last().map(|last| last + 1) {
            let has = store.supply(blob, &lacking);
            let own = volume.view().own;
            let lacking = if own.is_away() { &[] } else { &lacking[..] };
            // Where there was too little room it has some of them.
            for cluster in lacking {
                own.set(*cluster, store.entry(blob, *cluster).map_err(say)?);
            }
            has.map_err(say)?;
            self.publish_volume(volume);
            return Ok(Some(next));
        }
        store.detach(blob, all).map_err(say)?;
        self.moved(volume);
        self.look_through(volume);
        // Its clones read what it had of its parent from its own clusters now.
        descendants(volume).iter().for_each(|below| _ = self.look_through(below));
        self.keep_externals();
        Ok(None)
    }

    /// A volume has another parent, or none: tells it and both parents.
    fn moved(&self, volume: &Arc<Volume>) {
        let parent = || volume.kin(|kin| kin.parent.clone());
        let (uuid, clone) = (volume.id.uuid, Arc::downgrade(volume));
        // A parent may have thousands of clones: the others are not looked at.
        parent().iter().for_each(|before| before.kin(|kin| _ = kin.clones.remove(&uuid)));
        self.relate(volume);
        parent().iter().for_each(|now| now.kin(|kin| _ = kin.clones.insert(uuid, clone.clone())));
    }

    /// Gives a volume another parent.
    pub fn set_parent(
        &mut self,
        op: &str,
        volume: &Arc<Volume>,
        parent: &Arc<Volume>,
    ) -> Result<(), Error> {
        let store = self.store(op)?;
        let cluster_size = store.info().cluster_size;
        let set = store.set_parent(volume.blob(), parent.blob());
        set.map_err(|e| refused(e, op, cluster_size))?;
        self.moved(volume);
        self.look_through(volume);
        self.keep_externals();
        Ok(())
    }

    /// Has each first volume, which nobody uses, read as the snapshot beside it, all at one instant.
    pub fn roll_back(&mut self, op: &str, all: &[(Arc<Volume>, Arc<Volume>)]) -> Result<(), Error> {
        let store = self.store(op)?;
        let cluster_size = store.info().cluster_size;
        let blobs: Vec<_> = all.iter().map(|(volume, to)| (volume.blob(), to.blob())).collect();
        let freed = store.roll_back(&blobs).map_err(|e| refused(e, op, cluster_size))?;
        let mut users = Vec::new();
        for (volume, snapshot) in all {
            // Nobody uses it: who does next reads its map.
            let version = volume.replace_view(snapshot.view().without_map());
            self.moved(volume);
            users.push((volume.clone(), version));
        }
        self.keep_externals();
        self.retire(users, freed);
        Ok(())
    }

    /// Deletes a volume. Its bdev was unregistered before.
    pub fn delete(&mut self, op: &str, volume: &Arc<Volume>) -> Result<(), Error> {
        let store = self.store(op)?;
        let cluster_size = store.info().cluster_size;
        let deleted = store.delete(volume.blob());
        let Deleted { freed, heir } = deleted.map_err(|e| refused(e, op, cluster_size))?;
        let parent = volume.kin(|kin| kin.parent.clone());
        if let Some(heir) = heir.and_then(|blob| self.volume_of(blob)) {
            let mut own = heir.view().own;
            if self.shares_clusters() {
                own = self.own_anew(&heir, own);
            } else if !own.is_away() {
                let store = self.look(op)?;
                let has = store.each_cluster(heir.blob(), 0, |cluster, to| own.set(cluster, to));
                if has.is_err() {
                    own = Arc::new(Map::away(own.clusters()));
                }
            }
            self.publish_volume(&heir);
            self.moved(&heir);
            self.show(&heir, own);
        }
        // Who read a snapshot may be anybody: its clones, and those that were before they had another
        // parent. What they have in flight was translated before this; who opens one now sees the new
        // views.
        let users = match volume.kin(|kin| kin.snapshot) {
            true => self.thread.open().into_iter().map(|v| (v.clone(), v.bump())).collect(),
            false => Vec::new(),
        };
        parent.iter().for_each(|parent| parent.kin(|kin| _ = kin.clones.remove(&volume.id.uuid)));
        self.forget(volume, freed, users);
        self.keep_externals();
        Ok(())
    }

    /// A volume is gone from the store; `freed` is what it had, and `users` showed some of that, too.
    pub fn forget(
        &mut self,
        volume: &Arc<Volume>,
        freed: Freed,
        mut users: Vec<(Arc<Volume>, u64)>,
    ) {
        users.push((volume.clone(), volume.remove()));
        if self.volumes.get(&volume.blob()).is_some_and(|other| Arc::ptr_eq(other, volume)) {
            self.volumes.remove(&volume.blob());
        }
        // It is served as long as it has channels: what they still ask for is answered, too.
        self.take_up_opened();
        let its = self.served.iter_mut().filter(|s| Arc::ptr_eq(&s.volume, volume));
        its.for_each(Served::answer_removed);
        self.retire(users, freed);
    }
}

/// Clones of a volume, and theirs, each after its parent.
fn descendants(volume: &Arc<Volume>) -> Vec<Arc<Volume>> {
    let mut all = volume.clones();
    let mut at = 0;
    while at < all.len() {
        let more = all[at].clones();
        all.extend(more);
        at += 1;
    }
    all
}
