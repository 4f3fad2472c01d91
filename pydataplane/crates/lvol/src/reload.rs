//! A store that stopped, from the medium again, while its volumes are in use.
//!
//! What failed half-way happened or did not: the medium says which. The maps of the volumes follow it,
//! and clusters that somebody may still have I/O in flight to stay taken until he has not. After a failed
//! flush, clusters that were not durably a volume's are lost with what was written to them: whoever
//! wrote it and did not flush since is told by his next flush.

use crate::disk::BdevDisk;
use crate::error::Error;
use crate::map::{Map, View};
use crate::meta::Meta;
use crate::translate::not_loaded;
use crate::volume::{Volume, own_map};
use blobstore::{BlobId, Freed, HOLE, Store};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// What the medium says otherwise than memory did.
#[derive(Default)]
pub(crate) struct Reloaded {
    /// Volumes whose deletion had happened.
    pub gone: Vec<Arc<Volume>>,
    /// Volumes whose creation had happened.
    pub new: Vec<Arc<Volume>>,
    /// Volumes of another size.
    pub resized: Vec<Arc<Volume>>,
    /// The lvstore's name.
    pub name: String,
}

impl Meta {
    /// Loads the store anew if it has stopped; `None` if it has not.
    pub fn reload(&mut self, op: &str) -> Result<Option<Reloaded>, Error> {
        self.store(op)?; // refuses while a failed flush is latched
        let Some(stopped) = self.store.as_ref().and_then(Store::stopped) else { return Ok(None) };
        let failed = |e: bdev::OpenError| Error::Io { op: op.into(), cause: e.to_string() };
        let mut disk = BdevDisk::open(&self.base).map_err(failed)?;
        disk.set_externals(self.externals.clone());
        let load = if stopped.no_space { Store::load } else { Store::load_durable };
        let loaded = load(disk).map_err(|e| not_loaded(e, self.base.name()));
        let Ok(mut store) = loaded else {
            self.publish();
            return loaded.map(|_| None);
        };
        // They are free on the medium, as their loss was durable or nobody has them yet. In use all the
        // same.
        let held: Vec<u32> = self.held().collect();
        let _still_held = store.hold(held);
        let mut found = Reloaded { name: store.info().name, ..Reloaded::default() };
        let volumes: Vec<_> = self.volumes.values().cloned().collect();
        let mut retired = Vec::new();
        // Before anything is changed: reading them may fail. What is not in memory is not in use either,
        // and all of it was durable.
        let mut maps = HashMap::new();
        for volume in volumes.iter().filter(|volume| volume.has_map()) {
            let blob = store.by_uuid(volume.id.uuid).and_then(|blob| store.blob(blob).ok());
            if let Some(blob) = blob {
                let map = own_map(&mut store, &blob);
                maps.insert(blob.id, map.map_err(|e| not_loaded(e, self.base.name()))?);
            }
        }
        for volume in &volumes {
            let view = volume.view();
            let old = view.own.clone();
            let known = if old.is_away() { 0 } else { old.clusters() };
            let shares = store.shares_clusters();
            // What it shared is not in its own map, and may be another's alone now.
            let had = |cluster| if view.shares { view.entry(cluster) } else { old.get(cluster) };
            let held = |store: &mut Store<BdevDisk>, map: &Map, chain: Option<BlobId>| -> Freed {
                let before = (0..known).map(|cluster| (cluster, had(cluster)));
                let lost = before.filter(|(cluster, to)| {
                    !matches!(*to, 0 | HOLE)
                        && (*cluster >= map.clusters() || map.get(*cluster) != *to)
                });
                // What a snapshot below it has nobody writes to; when that loses it, this volume is waited for.
                let mut is_lost = |(cluster, to): &(u64, u32)| match shares {
                    true => !chain.is_some_and(|of| store.has_in_chain(of, *cluster, *to)),
                    false => store.is_free(*to),
                };
                let lost: Vec<_> = lost.filter(&mut is_lost).map(|(_, to)| to).collect();
                store.hold(lost)
            };
            // Its number is another one where a snapshot was taken, or was not.
            let blob = store.by_uuid(volume.id.uuid).and_then(|blob| store.blob(blob).ok());
            let Some(blob) = blob else {
                let parent = volume.kin(|kin| kin.parent.as_ref().map(|parent| parent.id.uuid));
                let chain = parent.and_then(|uuid| store.by_uuid(uuid));
                let freed = held(&mut store, &Map::new(0), chain);
                retired.push((volume.clone(), None, freed));
                found.gone.push(volume.clone());
                continue;
            };
            volume.set_blob(blob.id);
            volume.read_xattrs(&store);
            let map = maps.remove(&blob.id).unwrap_or_else(|| Map::away(blob.size));
            let common = known.min(map.clusters());
            let lost = |cluster: u64| match had(cluster) {
                0 | HOLE => false,
                to => {
                    let now = map.get(cluster);
                    (now == 0 || shares && now != to) && store.is_free(to)
                }
            };
            if !stopped.no_space && (0..common).any(lost) {
                volume.set_lost_writes();
            }
            let freed = held(&mut store, &map, Some(blob.id));
            if map.clusters() != old.clusters() {
                found.resized.push(volume.clone());
            }
            volume.rename(|names| names.lvol.clone_from(&blob.name));
            if blob.read_only {
                volume.set_read_only();
            }
            retired.push((volume.clone(), Some(map), freed));
        }
        let info = store.info();
        let known: HashSet<_> = volumes.iter().map(|volume| volume.id.uuid).collect();
        for blob in store.blobs().filter(|blob| !known.contains(&blob.uuid)) {
            found.new.push(Volume::of_blob(&store, &info, &blob, &self.base, &self.thread));
        }
        self.store = Some(store);
        for (volume, map, freed) in retired {
            match map {
                Some(map) => {
                    let version = volume.replace_view(self.part_shared(View::of(map)));
                    self.retire(vec![(volume, version)], freed);
                }
                None => self.forget(&volume, freed, Vec::new()),
            }
        }
        // A snapshot has the number that its volume had before.
        let there = std::mem::take(&mut self.volumes).into_values();
        self.volumes = there.map(|volume| (volume.blob(), volume)).collect();
        found.new.iter().for_each(|volume| self.add_volume(volume.clone()));
        self.relate_all();
        for snapshot in found.new.iter().filter(|volume| volume.kin(|kin| kin.snapshot)) {
            let clones = snapshot.clones().into_iter();
            self.found.extend(clones.map(|of| (snapshot.clone(), of.clone(), of.bump())));
        }
        self.keep_externals();
        self.publish();
        Ok(Some(found))
    }
}
