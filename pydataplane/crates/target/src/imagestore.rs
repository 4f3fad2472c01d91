//! Images of a pool of Ceph as volumes: what SPDK's methods on lvols do with them.

use crate::app::App;
use crate::errors;
use crate::pools::{CALL_TIMEOUT, DATA_TIMEOUT, LIST_TIMEOUT, Pool};
use crate::stores::{Store, StoreOf};
use crate::volume::Volume;
use lvol::{LvolInfo, LvolOptions, NewLvol, Range, Ranges};
use rbd::{Disk, Notes};
use rpc::{Errno, Error};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// How long I/O of several images may wait, at most, for snapshots of all of them to be taken.
const TOGETHER_TIMEOUT: Duration = Duration::from_secs(20);

/// A pool of Ceph, and the bdevs that its open volumes are.
pub struct ImageStore<'a> {
    pub app: &'a App,
    pub pool: Arc<Pool>,
}

impl ImageStore<'_> {
    /// What a pool does not do; `instead` says what does.
    fn refused<T>(&self, name: &str, what: &str, instead: &str) -> Result<T, Error> {
        let why = format!("{name} is of the pool {} of Ceph, {what}: {instead}", self.pool.name);
        Err(Error::os(Errno::NotSup, why))
    }

    /// The image of a volume, not of a snapshot, to do something to it.
    fn image(&self, name: &str) -> Result<Volume, Error> {
        let volume = self.pool.volume(name)?;
        match volume.snapshot {
            None => Ok(volume),
            Some(_) => {
                let alias = self.pool.alias(&volume);
                let why = format!("{alias} is a snapshot, which stays as it is");
                Err(Error::os(Errno::Perm, why))
            }
        }
    }

    /// As [`ImageStore::image`], of one of several that something is done to together.
    fn of_this_pool(&self, name: &str) -> Result<Volume, Error> {
        let is_of_it = match self.app.store_of(name) {
            StoreOf::Images(of) => Arc::ptr_eq(&of.pool, &self.pool),
            _ => false,
        };
        if !is_of_it {
            let pool = &self.pool.name;
            let why =
                format!("{name} is not of the pool {pool}: take what is of one pool at a time");
            return Err(Error::os(Errno::Inval, why));
        }
        self.image(name)
    }

    /// The image and the name of a snapshot.
    fn snapshot_of(&self, name: &str) -> Result<(Volume, String), Error> {
        let volume = self.pool.volume(name)?;
        match volume.snapshot.clone() {
            Some(snapshot) => Ok((volume, snapshot)),
            None => {
                let alias = self.pool.alias(&volume);
                Err(Error::os(Errno::Inval, format!("{alias} is not a snapshot")))
            }
        }
    }

    /// Refuses what is not done to a volume in use here; closes one that is open still.
    fn unused(&self, volume: &Volume) -> Result<(), Error> {
        self.app.close_unused_volumes();
        let owners = self.app.registry.owners(&volume.uuid.to_string());
        match owners.first() {
            None => Ok(()),
            Some((owner, _)) => {
                let alias = self.pool.alias(volume);
                let why = format!("{alias} is in use by {owner}: release it there first");
                Err(Error::os(Errno::Busy, why))
            }
        }
    }

    /// Bytes of whole objects.
    fn rounded(&self, size: u64) -> u64 {
        size.div_ceil(self.pool.cluster_size()).saturating_mul(self.pool.cluster_size())
    }

    fn named(&self, name: &str) -> Result<LvolInfo, Error> {
        let name = format!("{}/{name}", self.pool.name);
        Ok(self.pool.lvol(&self.pool.volume(&name)?))
    }
}

/// A name that an image or snapshot can have.
fn check_name(name: &str) -> Result<(), Error> {
    if name.contains('@') {
        let why = format!("the name {name} has an @, which only those of snapshots have");
        return Err(Error::os(Errno::Inval, why));
    }
    crate::methods::check_name_of("volume", name)
}

/// What a snapshot is called in its image: ours are called as what they are of.
fn snapshot_name(image: &str, given: &str) -> Result<String, Error> {
    let own = given.strip_prefix(image).and_then(|rest| rest.strip_prefix('@'));
    let snapshot = own.unwrap_or(given).to_owned();
    check_name(&snapshot)?;
    Ok(snapshot)
}

fn notes(uuid: Option<Uuid>, xattrs: &BTreeMap<String, Vec<u8>>) -> Notes {
    let text = |value: &Vec<u8>| String::from_utf8_lossy(value).into_owned();
    let xattrs = xattrs.iter().map(|(name, value)| (name.clone(), text(value))).collect();
    Notes { uuid, xattrs }
}

impl Store for ImageStore<'_> {
    fn volumes(&self, _: Option<&str>) -> Result<Vec<LvolInfo>, Error> {
        let all = self.pool.volumes(LIST_TIMEOUT)?;
        Ok(all.iter().map(|volume| self.pool.lvol(volume)).collect())
    }

    fn volume(&self, name: &str) -> Result<LvolInfo, Error> {
        Ok(self.pool.lvol(&self.pool.volume(name)?))
    }

    fn create(&self, _: &str, options: &LvolOptions) -> Result<LvolInfo, Error> {
        let LvolOptions { name, size, thin, uuid, xattrs, key, dif_type } = options;
        let alias = format!("{}/{name}", self.pool.name);
        check_name(name)?;
        if !thin {
            return self.refused(&alias, "whose volumes are thin", "ask for a thin one");
        }
        if key.is_some() {
            let instead = "leave the key out";
            return self.refused(&alias, "whose volumes are not encrypted by the target", instead);
        }
        if dif_type.is_some() {
            let instead = "leave dif_type out";
            return self.refused(&alias, "whose volumes keep no protection information", instead);
        }
        let (image, size, notes) = (name.clone(), self.rounded(*size), notes(*uuid, xattrs));
        if size == 0 {
            return Err(Error::os(Errno::Inval, format!("volume {alias} would have no bytes")));
        }
        self.pool.call(CALL_TIMEOUT, move |pool| pool.create(&image, size, &notes))?;
        self.named(name)
    }

    fn cancel(&self, name: &str) -> Result<(), Error> {
        let why = format!("{name} is of a pool of Ceph, where nothing is zeroed");
        Err(Error::os(Errno::NoDev, why))
    }

    fn delete(&self, name: &str) -> Result<(), Error> {
        let volume = self.pool.volume(name)?;
        self.unused(&volume)?;
        let Volume { image, snapshot, .. } = volume;
        let of = image.clone();
        self.pool.call(DATA_TIMEOUT, move |pool| match &snapshot {
            None => pool.remove(&of),
            Some(snapshot) => pool.remove_snapshot(&of, snapshot),
        })?;
        self.pool.forget(&image);
        Ok(())
    }

    fn resize(&self, name: &str, size: u64) -> Result<(), Error> {
        let Volume { image, uuid, .. } = self.image(name)?;
        let (of, size) = (image.clone(), self.rounded(size));
        let disk = self.app.registry.get_as::<Disk>(&uuid.to_string());
        self.pool.call(DATA_TIMEOUT, move |pool| {
            pool.resize(&of, size)?;
            // The caller looks at the bdev next.
            if let Some(disk) = disk {
                disk.look_again();
            }
            Ok(())
        })?;
        self.pool.look(&image, CALL_TIMEOUT).map(drop)
    }

    fn rename(&self, name: &str, new: &str) -> Result<(), Error> {
        let volume = self.image(name)?;
        check_name(new)?;
        self.unused(&volume)?;
        let (from, to) = (volume.image.clone(), new.to_owned());
        self.pool.call(CALL_TIMEOUT, move |pool| pool.rename(&from, &to))?;
        self.pool.forget(&volume.image);
        self.pool.look(new, CALL_TIMEOUT).map(drop)
    }

    fn set_read_only(&self, name: &str) -> Result<(), Error> {
        let what = "where no volume is read-only for good";
        self.refused(name, what, "take a snapshot, which is")
    }

    fn snapshot(&self, of: &str, new: &NewLvol) -> Result<LvolInfo, Error> {
        let Volume { image, .. } = self.image(of)?;
        let snapshot = snapshot_name(&image, &new.name)?;
        let (of, name) = (image.clone(), snapshot.clone());
        let notes = notes(new.uuid, &new.xattrs);
        self.pool.call(CALL_TIMEOUT, move |pool| pool.snapshot(&of, &name, &notes))?;
        self.named(&format!("{image}@{snapshot}"))
    }

    fn snapshot_together(&self, all: &[(&str, &NewLvol)]) -> Result<Vec<LvolInfo>, Error> {
        if let [(of, new)] = all {
            return Ok(vec![self.snapshot(of, new)?]);
        }
        let mut members = Vec::new();
        for (of, new) in all {
            let volume = self.of_this_pool(of)?;
            let snapshot = snapshot_name(&volume.image, &new.name)?;
            let disk = self.app.registry.get_as::<Disk>(&volume.uuid.to_string());
            if disk.as_ref().is_some_and(|disk| disk.source().shared) {
                let what = "and shared with other hosts, whose writes cannot be held back";
                return self.refused(of, what, "leave it out, or take its snapshot by itself");
            }
            let disk = disk.filter(|disk| disk.is_locked() == Some(true));
            let notes = notes(new.uuid, &new.xattrs);
            members.push(rbd::Member { image: volume.image, snapshot, notes, disk });
        }
        let names: Vec<_> =
            members.iter().map(|each| format!("{}@{}", each.image, each.snapshot)).collect();
        let until = Instant::now() + TOGETHER_TIMEOUT;
        self.pool.call(CALL_TIMEOUT, move |pool| pool.snapshot_together(&members, until))?;
        names.iter().map(|name| self.named(name)).collect()
    }

    fn clone_of(&self, snapshot: &str, new: &NewLvol) -> Result<LvolInfo, Error> {
        let (of, snapshot) = self.snapshot_of(snapshot)?;
        check_name(&new.name)?;
        let (name, notes) = (new.name.clone(), notes(new.uuid, &new.xattrs));
        let image = of.image;
        let clone = move |pool: &rbd::Pool| pool.clone((&image, &snapshot), &name, &notes);
        self.pool.call(CALL_TIMEOUT, clone)?;
        self.named(&new.name)
    }

    fn inflate(&self, name: &str) -> Result<(), Error> {
        let Volume { image, .. } = self.image(name)?;
        let of = image.clone();
        self.pool.call(DATA_TIMEOUT, move |pool| pool.flatten(&of))?;
        self.pool.look(&image, CALL_TIMEOUT).map(drop)
    }

    fn decouple_parent(&self, name: &str) -> Result<(), Error> {
        self.inflate(name)
    }

    fn set_parent(&self, name: &str, _: &str) -> Result<(), Error> {
        self.refused(name, "where no volume gets another parent", "make a clone of that")
    }

    fn set_parent_bdev(&self, name: &str, _: &str) -> Result<(), Error> {
        self.refused(name, "where no volume is a clone of a bdev", "copy the bdev")
    }

    fn roll_back(&self, name: &str, snapshot: &str) -> Result<(), Error> {
        self.roll_back_together(&[(name, snapshot)])
    }

    fn roll_back_together(&self, all: &[(&str, &str)]) -> Result<(), Error> {
        let mut images = Vec::new();
        for (name, snapshot) in all {
            let volume = self.of_this_pool(name)?;
            let (of, snapshot) = self.snapshot_of(snapshot)?;
            if of.image != volume.image {
                let (volume, of) = (self.pool.alias(&volume), self.pool.alias(&of));
                let why = format!("{of} is not a snapshot of {volume}");
                return Err(Error::os(Errno::Inval, why));
            }
            self.unused(&volume)?;
            images.push((volume.image, snapshot));
        }
        let of = images.clone();
        self.pool.call(DATA_TIMEOUT, move |pool| pool.roll_back(&of))?;
        images.iter().try_for_each(|(image, _)| self.pool.look(image, CALL_TIMEOUT).map(drop))
    }

    fn ranges(
        &self,
        name: &str,
        since: Option<&str>,
        offset: u64,
        most: usize,
    ) -> Result<Ranges, Error> {
        let volume = self.pool.volume(name)?;
        let since = match since {
            None => None,
            Some(since) => {
                let (of, since) = self.snapshot_of(since)?;
                if of.image != volume.image {
                    let (volume, of) = (self.pool.alias(&volume), self.pool.alias(&of));
                    let why = format!("{volume} cannot be compared with {of}, no snapshot of it");
                    return Err(Error::os(Errno::Inval, why));
                }
                Some(since).filter(|since| volume.snapshot.as_ref() != Some(since))
            }
        };
        let Volume { image, snapshot, .. } = volume;
        let found = self.pool.call(DATA_TIMEOUT, move |pool| {
            let of = (&*image, snapshot.as_deref());
            pool.ranges(of, since.as_deref(), offset, most)
        })?;
        let ranges = found.ranges.into_iter();
        let ranges = ranges.map(|(offset, length)| Range { offset, length }).collect();
        Ok(Ranges { ranges, next_offset: found.next_offset })
    }

    fn shallow_copy(&self, name: &str, _: &str) -> Result<u32, Error> {
        self.refused(name, "whose volumes are not copied so", "clone a snapshot, or export it")
    }

    fn xattrs(&self, name: &str) -> Result<BTreeMap<String, String>, Error> {
        let Volume { image, snapshot, .. } = self.pool.volume(name)?;
        self.pool.call(CALL_TIMEOUT, move |pool| pool.xattrs(&image, snapshot.as_deref()))
    }

    fn set_xattr(&self, name: &str, xattr: &str, value: &str) -> Result<(), Error> {
        let Volume { image, snapshot, .. } = self.pool.volume(name)?;
        let (xattr, value) = (xattr.to_owned(), value.to_owned());
        let set =
            move |pool: &rbd::Pool| pool.set_xattr(&image, snapshot.as_deref(), &xattr, &value);
        self.pool.call(CALL_TIMEOUT, set)
    }

    fn remove_xattr(&self, name: &str, xattr: &str) -> Result<(), Error> {
        let volume = self.pool.volume(name)?;
        let alias = self.pool.alias(&volume);
        let Volume { image, snapshot, .. } = volume;
        let of = xattr.to_owned();
        let remove = move |pool: &rbd::Pool| pool.remove_xattr(&image, snapshot.as_deref(), &of);
        match self.pool.call(CALL_TIMEOUT, remove)? {
            true => Ok(()),
            false => Err(errors::no_xattr(&alias, xattr)),
        }
    }
}
