//! Snapshots and clones of the volumes of an lvstore: taken, made, taken apart.

use super::Lvs;
use super::encryption::not_reserved;
use crate::error::Error;
use crate::info::{LvolInfo, NewLvol};
use crate::volume::Volume;
use blobstore::HistoryOptions;
use std::sync::Arc;
use std::time::Duration;
use uuid::Uuid;

impl Lvs {
    /// Takes snapshots of volumes at one instant.
    pub fn snapshot(&self, all: &[(Arc<Volume>, &NewLvol)]) -> Result<Vec<LvolInfo>, Error> {
        let aliases: Vec<_> = all.iter().map(|(volume, _)| volume.alias()).collect();
        let op = format!("take a snapshot of lvol {}", aliases.join(" and "));
        let _turn = self.turn(&op)?;
        let mut wanted: Vec<(Arc<Volume>, HistoryOptions)> = Vec::new();
        for (volume, new) in all {
            if wanted.iter().any(|(other, _)| Arc::ptr_eq(other, volume)) {
                let why = format!("{} is there twice; name each lvol once", volume.alias());
                return Err(Error::BadParameter { op, why });
            }
            self.not_zeroing(&op, &[&volume.id.uuid.to_string()])?;
            let mut options = self.options(&op, new)?;
            self.inherit_key(volume, &mut options);
            wanted.push((volume.clone(), options));
        }
        // So that in a snapshot no block is in the midst of being written, and what is damaged there is told.
        let lvols: Vec<_> = all.iter().filter_map(|(volume, _)| self.lvol_of(volume)).collect();
        let areas = lvols.iter().filter_map(|lvol| lvol.area());
        let _paused: Vec<_> =
            areas.map(|area| area.pause().map_err(|_| self.slow(&op))).collect::<Result<_, _>>()?;
        // A snapshot that was taken is there, however long that took.
        let job = op.clone();
        let taken =
            self.meta_within(Duration::MAX, &op, move |meta| meta.snapshot(&job, &wanted))?;
        taken.iter().map(|snapshot| self.shown(snapshot)).collect()
    }

    /// Creates a clone of a snapshot.
    pub fn clone_lvol(&self, snapshot: &Arc<Volume>, new: &NewLvol) -> Result<LvolInfo, Error> {
        let op = format!("clone lvol {}", snapshot.alias());
        let _turn = self.turn(&op)?;
        let mut options = self.options(&op, new)?;
        self.inherit_key(snapshot, &mut options);
        let (job, of) = (op.clone(), snapshot.clone());
        let clone =
            self.meta_within(Duration::MAX, &op, move |meta| meta.clone_of(&job, &of, &options))?;
        self.shown(&clone)
    }

    /// Takes the parent from a volume: it is given what only that has, or with `all` all that it lacks.
    /// I/O goes on meanwhile, and so do other operations of the lvstore between the steps.
    pub fn detach(&self, volume: &Arc<Volume>, all: bool) -> Result<(), Error> {
        let from = if all { "all its snapshots" } else { "its snapshot" };
        let op = format!("part lvol {} from {from}", volume.alias());
        let mut next = Some(0);
        while let Some(from) = next {
            let _turn = self.turn(&op)?;
            let was = volume.is_degraded();
            let (job, volume) = (op.clone(), volume.clone());
            next = self.meta_within(Duration::MAX, &op, move |meta| {
                if from == 0 {
                    meta.check_detach(&job, &volume, all)?;
                }
                meta.detach_step(&job, &volume, all, from)
            })?;
            if next.is_none() {
                self.register_whole(was)?;
            }
        }
        Ok(())
    }

    /// Gives a volume another snapshot as its parent.
    pub fn set_parent(&self, volume: &Arc<Volume>, parent: &Arc<Volume>) -> Result<(), Error> {
        let op = format!("make {} the parent of lvol {}", parent.alias(), volume.alias());
        let _turn = self.turn(&op)?;
        // What a guest reads must not change under it.
        self.unused(&op, std::slice::from_ref(volume))?;
        thin(&op, volume)?;
        no_tuples_of_its_own(&op, volume)?;
        self.same_key(&op, volume, parent)?;
        if volume.kin(|kin| kin.parent.as_ref().is_some_and(|its| Arc::ptr_eq(its, parent))) {
            return Err(Error::AlreadyParent { op });
        }
        let was = volume.is_degraded();
        let (volume, parent) = (volume.clone(), parent.clone());
        self.meta(&op.clone(), move |meta| meta.set_parent(&op, &volume, &parent))?;
        self.register_whole(was)
    }

    /// Has each first volume, which nobody uses, read as the snapshot beside it, all at one instant; `made_of`:
    /// only one that it is made of.
    pub fn roll_back(
        &self,
        all: &[(Arc<Volume>, Arc<Volume>)],
        made_of: bool,
    ) -> Result<(), Error> {
        let each = all.iter().map(|(volume, to)| format!("{} to {}", volume.alias(), to.alias()));
        let op = format!("roll back lvol {}", each.collect::<Vec<_>>().join(" and "));
        let _turn = self.turn(&op)?;
        for (n, (volume, snapshot)) in all.iter().enumerate() {
            if all[..n].iter().any(|(other, _)| Arc::ptr_eq(other, volume)) {
                let why = format!("{} is there twice; name each lvol once", volume.alias());
                return Err(Error::BadParameter { op, why });
            }
            self.not_zeroing(&op, &[&volume.id.uuid.to_string()])?;
            self.same_key(&op, volume, snapshot)?;
            let why = match () {
                () if made_of && !is_made_of(volume, snapshot) => {
                    "is not a snapshot of it; clone it to have what it has"
                }
                () if snapshot.is_degraded() && !volume.is_degraded() => {
                    "is degraded: its external parent is missing"
                }
                () => continue,
            };
            return Err(Error::BadParameter { op, why: format!("{} {why}", snapshot.alias()) });
        }
        let mut hidden = Vec::new();
        let hide = |(volume, _): &(Arc<Volume>, _)| {
            self.hide(&op, volume)?;
            hidden.push(volume.clone());
            Ok(())
        };
        let done = all.iter().try_for_each(hide).and_then(|()| {
            let (job, all) = (op.clone(), all.to_vec());
            self.meta_within(Duration::MAX, &op, move |meta| meta.roll_back(&job, &all))
        });
        // All of them, whatever one of them says.
        let shown: Vec<_> = hidden.iter().map(|volume| self.register(volume)).collect();
        done.and(shown.into_iter().collect())
    }

    /// Refuses `op` where it is with an lvol of another lvstore.
    pub fn same(&self, other: &Lvs, op: impl FnOnce() -> String) -> Result<(), Error> {
        if self.uuid == other.uuid {
            return Ok(());
        }
        let why = "they are not in one lvstore; choose lvols of one".into();
        Err(Error::BadParameter { op: op(), why })
    }

    /// Refuses where more than one clone needs a volume.
    pub(super) fn not_shared(&self, op: &str, volume: &Volume) -> Result<(), Error> {
        let clones = volume.clones();
        if clones.len() < 2 {
            return Ok(());
        }
        let mut clones: Vec<_> = clones.iter().map(|clone| clone.alias()).collect();
        clones.sort();
        Err(Error::HasClones { op: op.to_owned(), clones: clones.join(", ") })
    }

    /// What the store is to make, unless there is or soon will be an lvol of that name or UUID.
    pub(super) fn options(&self, op: &str, new: &NewLvol) -> Result<HistoryOptions, Error> {
        let NewLvol { name, uuid, xattrs } = new.clone();
        not_reserved(op, xattrs.keys())?;
        let uuid = uuid.unwrap_or_else(Uuid::new_v4);
        self.not_zeroing(op, &[&name, &uuid.to_string()])?;
        for key in [format!("{}/{name}", self.name()), uuid.to_string()] {
            if self.registry.get(&key).is_some() {
                return Err(Error::AlreadyExists { what: format!("lvol {key}") });
            }
        }
        Ok(HistoryOptions { name, uuid, xattrs })
    }

    /// Makes a new volume a bdev.
    pub(super) fn shown(&self, volume: &Arc<Volume>) -> Result<LvolInfo, Error> {
        volume.name_lvstore(self.name());
        self.volumes.lock().insert(volume.id.uuid, volume.clone());
        self.register(volume)?;
        Ok(self.volume_info(volume))
    }
}

/// Whether a volume reads as a snapshot where it, and those in between, have nothing of their own.
fn is_made_of(volume: &Arc<Volume>, snapshot: &Arc<Volume>) -> bool {
    let up = |volume: &Arc<Volume>| volume.kin(|kin| kin.parent.clone());
    std::iter::successors(up(volume), up).any(|parent| Arc::ptr_eq(&parent, snapshot))
}

/// Refuses a volume that keeps protection information itself: some of that would be of the parent's blocks, and
/// some not.
pub(super) fn no_tuples_of_its_own(op: &str, volume: &Volume) -> Result<(), Error> {
    match volume.id.dif {
        None => Ok(()),
        Some(_) => {
            let why =
                "it keeps its protection information itself; clone the snapshot instead".to_owned();
            Err(Error::BadParameter { op: op.to_owned(), why })
        }
    }
}

/// Refuses a volume that has all of its own: no parent would ever be read.
pub(super) fn thin(op: &str, volume: &Volume) -> Result<(), Error> {
    match volume.kin(|kin| kin.thin) {
        true => Ok(()),
        false => {
            let why = "it is thick, and has all of its own; choose a thin one".to_owned();
            Err(Error::BadParameter { op: op.to_owned(), why })
        }
    }
}
