//! Operations on lvols, each handed to its lvstore.

use super::Lvstores;
use crate::copying::{CopyInfo, Plan};
use crate::disk::BdevDisk;
use crate::error::Error;
use crate::info::{LvolInfo, LvolOptions, LvolSizes, LvolSpace, NewLvol};
use crate::lvs::{Lvs, not_reserved};
use crate::ranges::{self, Ranges};
use crate::space::{self, Space};
use crate::translate::refused;
use crate::volume::Volume;
use blobstore::{Error as StoreError, Store};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;
use uuid::Uuid;

impl Lvstores {
    /// Creates an lvol, registers its bdev, and returns what was made. All of it reads as zeros.
    ///
    /// # Errors
    /// [`Error::NoLvstore`], [`Error::AlreadyExists`] (name or UUID), [`Error::NoSpace`],
    /// [`Error::BadParameter`], [`Error::BadName`], [`Error::NameTooLong`], [`Error::Stopped`],
    /// [`Error::Io`].
    pub fn create_lvol(&self, lvstore: &str, options: &LvolOptions) -> Result<LvolInfo, Error> {
        self.shared.find(lvstore)?.create_lvol(options)
    }

    /// Deletes an lvol. Of a snapshot with one clone that takes over what it shows.
    ///
    /// # Errors
    /// [`Error::NoLvol`], [`Error::InUse`] while somebody claims it, [`Error::HasClones`] of a snapshot
    /// with more than one, [`Error::Stopped`], [`Error::Io`].
    pub fn delete_lvol(&self, lvol: &str) -> Result<(), Error> {
        let (lvs, volume) = self.shared.find_lvol(lvol)?;
        lvs.delete_lvol(&volume)
    }

    /// Takes a snapshot of an lvol, in use or not: what was written before is durable then, and the
    /// snapshot's.
    ///
    /// # Errors
    /// [`Error::NoLvol`], [`Error::AlreadyExists`], [`Error::ReadOnly`], [`Error::SlowIo`],
    /// [`Error::NoSpace`] (metadata), [`Error::Stopped`], [`Error::Io`] and others.
    pub fn snapshot(&self, lvol: &str, new: &NewLvol) -> Result<LvolInfo, Error> {
        let mut taken = self.snapshot_together(&[(lvol, new)])?;
        Ok(taken.pop().expect("one for each"))
    }

    /// As [`Lvstores::snapshot`] of several lvols of one lvstore, all at one instant.
    ///
    /// # Errors
    /// As [`Lvstores::snapshot`], and [`Error::BadParameter`] where they are not of one lvstore. Then no
    /// snapshot was taken.
    pub fn snapshot_together(&self, all: &[(&str, &NewLvol)]) -> Result<Vec<LvolInfo>, Error> {
        let mut of: Option<Arc<Lvs>> = None;
        let mut volumes = Vec::new();
        for (lvol, new) in all {
            let (lvs, volume) = self.shared.find_lvol(lvol)?;
            let op = || format!("take a snapshot of lvol {lvol} together with others");
            of.get_or_insert_with(|| lvs.clone()).same(&lvs, op)?;
            volumes.push((volume, *new));
        }
        of.map_or(Ok(Vec::new()), |lvs| lvs.snapshot(&volumes))
    }

    /// Creates a clone of a snapshot: an lvol that reads as it does, and has nothing of its own yet.
    ///
    /// # Errors
    /// [`Error::NoLvol`], [`Error::AlreadyExists`], [`Error::NotASnapshot`], [`Error::NoSpace`]
    /// (metadata), [`Error::Stopped`], [`Error::Io`] and others.
    pub fn clone_lvol(&self, snapshot: &str, new: &NewLvol) -> Result<LvolInfo, Error> {
        let (lvs, snapshot) = self.shared.find_lvol(snapshot)?;
        lvs.clone_lvol(&snapshot, new)
    }

    /// Gives an lvol, in use or not, all clusters that it lacks, and takes its snapshots from it: it is
    /// thick then. What has none becomes thick, too.
    ///
    /// # Errors
    /// [`Error::NoLvol`], [`Error::NoSpace`], [`Error::Stopped`], [`Error::Io`]; then it reads as
    /// before, and the call can be repeated.
    pub fn inflate(&self, lvol: &str) -> Result<(), Error> {
        let (lvs, volume) = self.shared.find_lvol(lvol)?;
        lvs.detach(&volume, true)
    }

    /// Gives an lvol, in use or not, what its snapshot itself has and it has not: its parent is the
    /// snapshot's parent then, or none.
    ///
    /// # Errors
    /// As [`Lvstores::inflate`], and [`Error::NoParent`].
    pub fn decouple_parent(&self, lvol: &str) -> Result<(), Error> {
        let (lvs, volume) = self.shared.find_lvol(lvol)?;
        lvs.detach(&volume, false)
    }

    /// Has an lvol that nobody uses read as a snapshot which it is made of, with its size: what was written
    /// since is lost, unless a snapshot that was taken later has it.
    ///
    /// # Errors
    /// As [`Lvstores::roll_back_together`], and [`Error::BadParameter`] where it is not made of it.
    pub fn roll_back(&self, lvol: &str, snapshot: &str) -> Result<LvolInfo, Error> {
        let (lvs, volume) = self.shared.find_lvol(lvol)?;
        let (other, to) = self.shared.find_lvol(snapshot)?;
        lvs.same(&other, || format!("roll back lvol {} to {}", volume.alias(), to.alias()))?;
        lvs.roll_back(&[(volume.clone(), to)], true)?;
        Ok(lvs.volume_info(&volume))
    }

    /// Has each first lvol, which nobody uses, read as the snapshot beside it, with that one's size, all at
    /// one instant; a thick one is thin then. Any snapshot of the lvstore will do: whose it is, is the
    /// caller's to know.
    ///
    /// # Errors
    /// [`Error::NoLvol`], [`Error::NotASnapshot`], [`Error::InUse`], [`Error::BadParameter`] (not of one
    /// lvstore, of one key, or one of them twice) and others; then all read as before.
    pub fn roll_back_together(&self, all: &[(&str, &str)]) -> Result<(), Error> {
        let mut of: Option<Arc<Lvs>> = None;
        let mut volumes = Vec::new();
        for (lvol, snapshot) in all {
            let (lvs, volume) = self.shared.find_lvol(lvol)?;
            let (other, to) = self.shared.find_lvol(snapshot)?;
            let op = || format!("roll back lvol {lvol} to {snapshot} together with others");
            let first = of.get_or_insert_with(|| lvs.clone());
            first.same(&lvs, op)?;
            first.same(&other, op)?;
            volumes.push((volume, to));
        }
        of.map_or(Ok(()), |lvs| lvs.roll_back(&volumes, false))
    }

    /// Gives a thin lvol that nobody uses a snapshot of its size as its parent: where it has nothing of
    /// its own it reads as that.
    ///
    /// # Errors
    /// [`Error::NoLvol`], [`Error::NotASnapshot`], [`Error::InUse`], [`Error::BadParameter`] and others.
    pub fn set_parent(&self, lvol: &str, parent: &str) -> Result<(), Error> {
        let (lvs, volume) = self.shared.find_lvol(lvol)?;
        let (other, parent) = self.shared.find_lvol(parent)?;
        lvs.same(&other, || format!("make {} the parent of lvol {lvol}", parent.alias()))?;
        lvs.set_parent(&volume, &parent)
    }

    /// Grows or shrinks an lvol, in use or not, to `size` bytes rounded up to whole clusters. What is
    /// added reads as zeros; what is cut off is lost. Emits [`Event::Resized`].
    ///
    /// # Errors
    /// [`Error::NoLvol`], [`Error::NoSpace`], [`Error::BadParameter`], [`Error::ReadOnly`],
    /// [`Error::Stopped`], [`Error::Io`].
    pub fn resize_lvol(&self, lvol: &str, size: u64) -> Result<LvolInfo, Error> {
        let (lvs, volume) = self.shared.find_lvol(lvol)?;
        if lvs.resize_lvol(&volume, size)? {
            self.shared.registry.notify_resized(&volume.id.uuid.to_string());
        }
        Ok(lvs.volume_info(&volume))
    }

    /// Cancels the creation or growth of a thick lvol that is under way.
    ///
    /// # Errors
    /// [`Error::NoLvol`]: none of that alias or UUID is.
    pub fn cancel(&self, lvol: &str) -> Result<(), Error> {
        let stores = self.shared.stores.lock().clone();
        match stores.iter().any(|lvs| lvs.cancel(lvol)) {
            true => Ok(()),
            false => Err(Error::NoLvol { id: format!("{lvol} that is being zeroed") }),
        }
    }

    /// Gives an lvol another name (`new_name` without the lvstore), in use or not.
    ///
    /// # Errors
    /// [`Error::NoLvol`], [`Error::AlreadyExists`], [`Error::BadName`], [`Error::NameTooLong`],
    /// [`Error::Stopped`], [`Error::Io`].
    pub fn rename_lvol(&self, lvol: &str, new_name: &str) -> Result<LvolInfo, Error> {
        let (lvs, volume) = self.shared.find_lvol(lvol)?;
        lvs.rename_lvol(&volume, new_name)?;
        Ok(lvs.volume_info(&volume))
    }

    /// Makes an lvol read-only for good.
    ///
    /// # Errors
    /// [`Error::NoLvol`], [`Error::InUse`] while somebody claims it, [`Error::Stopped`],
    /// [`Error::Io`].
    pub fn set_read_only(&self, lvol: &str) -> Result<LvolInfo, Error> {
        let (lvs, volume) = self.shared.find_lvol(lvol)?;
        lvs.set_read_only(&volume)?;
        Ok(lvs.volume_info(&volume))
    }

    /// Sets an xattr: a name of 1 to 255 printable characters, a value of at most 3072 bytes.
    ///
    /// # Errors
    /// [`Error::NoLvol`], [`Error::BadParameter`], [`Error::NoSpace`], [`Error::Stopped`],
    /// [`Error::Io`].
    pub fn set_xattr(&self, lvol: &str, name: &str, value: &[u8]) -> Result<(), Error> {
        let (name_owned, value) = (name.to_owned(), value.to_vec());
        not_reserved(&format!("set xattr {name} of lvol {lvol}"), [&name_owned])?;
        self.on_blob(lvol, format!("set xattr {name}"), true, move |store, volume| {
            about_to_set(store, volume, &name_owned);
            store.set_xattr(volume.blob(), &name_owned, &value)
        })
    }

    /// As [`Lvstores::set_xattr`], for a caller who has others wait: nothing is done where it could not begin
    /// within `most`.
    ///
    /// # Errors
    /// As that, and [`Error::Waiting`].
    pub fn set_xattr_soon(
        &self,
        lvol: &str,
        name: &str,
        value: &[u8],
        most: Duration,
    ) -> Result<(), Error> {
        let (name_owned, value) = (name.to_owned(), value.to_vec());
        not_reserved(&format!("set xattr {name} of lvol {lvol}"), [&name_owned])?;
        let what = format!("set xattr {name}");
        self.on_blob_within(Some(most), lvol, what, true, move |store, volume| {
            about_to_set(store, volume, &name_owned);
            store.set_xattr(volume.blob(), &name_owned, &value)
        })
    }

    /// The value of an xattr.
    ///
    /// # Errors
    /// [`Error::NoLvol`], [`Error::NoXattr`].
    pub fn xattr(&self, lvol: &str, name: &str) -> Result<Vec<u8>, Error> {
        let name_owned = name.to_owned();
        self.on_blob(lvol, format!("get xattr {name}"), false, move |store, volume| {
            store.xattr(volume.blob(), &name_owned).map(<[u8]>::to_vec)
        })
    }

    /// Removes an xattr.
    ///
    /// # Errors
    /// [`Error::NoLvol`], [`Error::NoXattr`], [`Error::Stopped`], [`Error::Io`].
    pub fn remove_xattr(&self, lvol: &str, name: &str) -> Result<(), Error> {
        let name_owned = name.to_owned();
        not_reserved(&format!("remove xattr {name} of lvol {lvol}"), [&name_owned])?;
        self.on_blob(lvol, format!("remove xattr {name}"), true, move |store, volume| {
            store.remove_xattr(volume.blob(), &name_owned)?;
            volume.note_xattr(&name_owned, false);
            Ok(())
        })
    }

    /// Removes an xattr where its value is such, which nobody changes in between. Where it is not there, or
    /// another one, that lasts and is done: also of an lvstore that takes no changes, if it never had one.
    ///
    /// # Errors
    /// [`Error::NoLvol`], [`Error::Stopped`], [`Error::Io`].
    pub fn remove_xattr_if(
        &self,
        lvol: &str,
        name: &str,
        is: impl FnOnce(&[u8]) -> bool + Send + 'static,
    ) -> Result<(), Error> {
        let name_owned = name.to_owned();
        not_reserved(&format!("remove xattr {name} of lvol {lvol}"), [&name_owned])?;
        if !self.may_have_xattr(lvol, name)? {
            return Ok(());
        }
        self.on_blob(lvol, format!("remove xattr {name}"), true, move |store, volume| {
            // What is known of one that has stopped may not be what lasts: then it is refused.
            let others =
                store.stopped().is_none() && !store.xattr(volume.blob(), &name_owned).is_ok_and(is);
            if others {
                return Ok(());
            }
            store.remove_xattr(volume.blob(), &name_owned)?;
            volume.note_xattr(&name_owned, false);
            Ok(())
        })
    }

    /// The names of an lvol's xattrs, in order.
    ///
    /// # Errors
    /// [`Error::NoLvol`].
    pub fn xattrs(&self, lvol: &str) -> Result<Vec<String>, Error> {
        self.on_blob(lvol, "list xattrs".into(), false, |store, volume| store.xattrs(volume.blob()))
    }

    /// Whether an lvol has an xattr, perhaps; what is not so it has not. Waits for nobody, as all else about
    /// xattrs does.
    ///
    /// # Errors
    /// [`Error::NoLvol`].
    pub fn may_have_xattr(&self, lvol: &str, name: &str) -> Result<bool, Error> {
        Ok(self.shared.find_lvol(lvol)?.1.may_have_xattr(name))
    }

    /// One lvol.
    ///
    /// # Errors
    /// [`Error::NoLvol`].
    pub fn lvol(&self, lvol: &str) -> Result<LvolInfo, Error> {
        let (lvs, volume) = self.shared.find_lvol(lvol)?;
        Ok(lvs.volume_info(&volume))
    }

    /// The lvols of one lvstore, or of all, by alias.
    ///
    /// # Errors
    /// [`Error::NoLvstore`].
    pub fn lvols(&self, lvstore: Option<&str>) -> Result<Vec<LvolInfo>, Error> {
        let stores = match lvstore {
            Some(id) => vec![self.shared.find(id)?],
            None => self.shared.stores.lock().clone(),
        };
        let of = |lvs: &Arc<Lvs>| {
            let volumes = lvs.volumes();
            volumes.iter().map(|v| lvs.volume_info(v)).collect::<Vec<_>>()
        };
        let mut all: Vec<_> = stores.iter().flat_map(of).collect();
        all.sort_by(|a, b| a.alias.cmp(&b.alias));
        Ok(all)
    }

    /// Sizes of those of these lvols (UUID or `LVSTORE/LVOL`) that are there, by what was given.
    ///
    /// One look at each volume, however many are asked for.
    pub fn sizes<'a>(&self, lvols: &'a [String]) -> Vec<(&'a str, LvolSizes)> {
        let given = lvols.iter().map(String::as_str);
        let (aliases, uuids): (Vec<_>, Vec<_>) = given.partition(|name| name.contains('/'));
        let uuids = uuids.into_iter().filter_map(|name| Some((Uuid::try_parse(name).ok()?, name)));
        let by_uuid: HashMap<Uuid, &str> = uuids.collect();
        let by_alias: HashSet<&str> = aliases.into_iter().collect();
        let stores = self.shared.stores.lock().clone();
        let mut found = Vec::with_capacity(by_uuid.len() + by_alias.len());
        for lvs in stores {
            for volume in lvs.volumes() {
                let sizes = lvs.sizes(&volume);
                found.extend(by_uuid.get(&volume.id.uuid).map(|name| (*name, sizes)));
                if !by_alias.is_empty() {
                    found.extend(by_alias.get(&*volume.alias()).map(|name| (*name, sizes)));
                }
            }
        }
        found
    }

    /// Parts of an lvol, from `offset` bytes on, at most `most`, that lie in clusters of its own or of its
    /// snapshots: all else reads as zeros. With `since`, another lvol of that lvstore, those that lie in
    /// other clusters than there: all else reads as that does, if both are snapshots. No data is read.
    ///
    /// # Errors
    /// [`Error::NoLvol`]; [`Error::BadParameter`] where the two are not in one lvstore.
    pub fn ranges(
        &self,
        lvol: &str,
        since: Option<&str>,
        offset: u64,
        most: usize,
    ) -> Result<Ranges, Error> {
        let (lvs, volume) = self.shared.find_lvol(lvol)?;
        let op = || format!("compare lvol {lvol} with {}", since.unwrap_or_default());
        let older = match since.map(|since| self.shared.find_lvol(since)).transpose()? {
            Some((other, older)) => {
                lvs.same(&other, op)?;
                lvs.same_dif(&op(), &volume, &older)?;
                Some(lvs.view_of(&op(), &older)?)
            }
            None => None,
        };
        let cluster_size = u64::from(lvs.info().cluster_size);
        let view = lvs.view_of(&op(), &volume)?;
        let Some((_, layout)) = &volume.id.dif else {
            return Ok(ranges::of(&view, older.as_ref(), cluster_size, offset, most));
        };
        let first = (offset / cluster_size).min(view.clusters());
        let from = layout.cluster_at(first) * cluster_size;
        let found = ranges::of(&view, older.as_ref(), cluster_size, from, most);
        Ok(ranges::of_data(found, layout, cluster_size))
    }

    /// Begins to copy what a read-only lvol itself has to the same places of a bdev, which nobody else may
    /// use meanwhile, and returns the copy's number.
    ///
    /// # Errors
    /// [`Error::NoLvol`], [`Error::NoBdev`], [`Error::ReadOnly`] (the lvol is not, or the bdev is),
    /// [`Error::InUse`], [`Error::BadParameter`] (the bdev is too small, or has longer blocks),
    /// [`Error::Io`].
    pub fn start_shallow_copy(&self, lvol: &str, bdev: &str) -> Result<u32, Error> {
        let (lvs, volume) = self.shared.find_lvol(lvol)?;
        let op = format!("copy lvol {} to bdev {bdev}", volume.alias());
        let view = lvs.view_of(&op, &volume)?;
        // What others have as well is not in its map.
        let shared = if view.shares { lvs.clusters_of(&op, &volume)? } else { Vec::new() };
        let has = |cluster: &u64| {
            view.own(*cluster) != 0 || !shared.is_empty() && shared.binary_search(cluster).is_ok()
        };
        let plan = Plan {
            registry: self.shared.registry.clone(),
            lvol: volume.name.clone(),
            to: bdev.to_owned(),
            clusters: (0..view.clusters())
                .filter(has)
                .filter_map(|at| match &volume.id.dif {
                    None => Some(at),
                    Some((_, layout)) => layout.cluster_of(at),
                })
                .collect(),
            cluster_size: u64::from(lvs.info().cluster_size),
        };
        self.shared.copies.begin(&op, plan)
    }

    /// How far a copy has come; `None`: there is none of this number. One that has ended is told once.
    pub fn shallow_copy(&self, number: u32) -> Option<CopyInfo> {
        self.shared.copies.info(number)
    }

    /// What an lvol shares with its snapshots and clones. It looks at each cluster.
    ///
    /// # Errors
    /// [`Error::NoLvol`], [`Error::Io`].
    pub fn space(&self, lvol: &str) -> Result<LvolSpace, Error> {
        let (lvs, volume) = self.shared.find_lvol(lvol)?;
        let op = format!("tell the space of lvol {}", volume.alias());
        let clones: Result<Vec<_>, _> =
            volume.clones().iter().map(|clone| lvs.view_of(&op, clone)).collect();
        let Space { shared, exclusive } = space::of(&lvs.view_of(&op, &volume)?, &clones?);
        let cluster_size = u64::from(lvs.info().cluster_size);
        Ok(LvolSpace { shared: shared * cluster_size, exclusive: exclusive * cluster_size })
    }

    /// Lets go of all that an lvstore has in memory and can read from its metadata again: the maps of
    /// volumes, in use or not. It does that by itself where volumes have no I/O.
    ///
    /// # Errors
    /// [`Error::NoLvstore`], [`Error::Stopped`].
    pub fn let_go_maps(&self, lvstore: &str) -> Result<(), Error> {
        let lvs = self.shared.find(lvstore)?;
        lvs.meta("let go of maps", |meta| {
            meta.let_go_all();
            Ok(())
        })
    }

    /// Runs `f` on an lvol's blob, on the metadata thread.
    fn on_blob<R: Send + 'static>(
        &self,
        lvol: &str,
        what: String,
        changes: bool,
        f: impl FnOnce(&mut Store<BdevDisk>, &Volume) -> Result<R, StoreError> + Send + 'static,
    ) -> Result<R, Error> {
        self.on_blob_within(None, lvol, what, changes, f)
    }

    fn on_blob_within<R: Send + 'static>(
        &self,
        most: Option<Duration>,
        lvol: &str,
        what: String,
        changes: bool,
        f: impl FnOnce(&mut Store<BdevDisk>, &Volume) -> Result<R, StoreError> + Send + 'static,
    ) -> Result<R, Error> {
        let (lvs, volume) = self.shared.find_lvol(lvol)?;
        let op = format!("{what} of lvol {}", volume.alias());
        let cluster_size = lvs.info().cluster_size;
        lvs.meta_within(most.unwrap_or(lvs.timeout()), &op.clone(), move |meta| {
            let store = if changes { meta.store(&op) } else { meta.look(&op) };
            f(store?, &volume).map_err(|e| refused(e, &op, cluster_size))
        })
    }
}

/// A volume is about to have an xattr: one that fails may be there. Of a store that has stopped it is refused,
/// and never will be.
fn about_to_set(store: &Store<BdevDisk>, volume: &Volume, name: &str) {
    if store.stopped().is_none() {
        volume.note_xattr(name, true);
    }
}
