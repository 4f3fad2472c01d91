//! Snapshots of several images at one instant: all are taken, or none.
//!
//! Each image is locked for this host, so that nobody else writes, and what writes here is held back while the
//! snapshots are taken. Ceph takes them one after the other, and a host may end in between. So each has a mark in its
//! image's metadata before it is there, which names the one that is taken last: when that is there, all are. Until
//! then none of them is listed, and what a host has left that ended is deleted by the next call that wants the name,
//! by the image's deletion, or at a target's start. The marks go when all are there, that of the last one last.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use serde_json::{Value, json};
use uuid::Uuid;

use super::lease::Lease;
use super::{Notes, Open, Pool, key_of};
use crate::calls::{check, failed, text};
use crate::cluster::address;
use crate::kind::{Kind, OpenImage};
use crate::lock::Lock;
use crate::{Disk, Error};

/// What the key of a mark begins with, of a snapshot that is taken together with others.
const TOGETHER: &str = "virtlun.together";

/// Tokens of what this process takes at the moment.
static TAKING: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// A snapshot that is to be taken together with others.
pub struct Member {
    /// Name of the image.
    pub image: String,
    /// Name of the snapshot.
    pub snapshot: String,
    /// What it has from the beginning.
    pub notes: Notes,
    /// The bdev that has the image locked for this host, if one does.
    pub disk: Option<Arc<Disk>>,
}

/// The mark of a snapshot.
struct Mark {
    /// The same of all that are taken together, another for each call.
    token: String,
    /// Identity of the image whose snapshot is taken last, and the name of that.
    last: (String, String),
    /// Address of the client that takes them.
    client: String,
    /// Of the last one: identities of the other images, and names of their snapshots.
    others: Vec<(String, String)>,
}

impl Mark {
    fn text(&self) -> String {
        let (image, snapshot) = &self.last;
        json!({
            "token": self.token,
            "image": image,
            "snapshot": snapshot,
            "client": self.client,
            "others": self.others,
        })
        .to_string()
    }

    /// `None`: it is none of ours.
    fn read(text: &str) -> Option<Mark> {
        let read: Value = serde_json::from_str(text).ok()?;
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let others = read["others"].as_array()?.iter();
        let others = others.map(|each| Some((text(&each[0])?, text(&each[1])?)));
        Some(Mark {
            token: text(&read["token"])?,
            last: (text(&read["image"])?, text(&read["snapshot"])?),
            client: text(&read["client"])?,
            others: others.collect::<Option<_>>()?,
        })
    }

    /// That of the snapshot of the image of identity `id`.
    fn of(metadata: &BTreeMap<String, String>, id: &str, snapshot: &str) -> Option<Mark> {
        Mark::read(metadata.get(&key_of(TOGETHER, id, Some(snapshot)))?)
    }
}

/// One of [`TAKING`].
struct Taking(String);

impl Taking {
    fn begin() -> Taking {
        let token = Uuid::new_v4().to_string();
        TAKING.lock().insert(token.clone());
        Taking(token)
    }
}

impl Drop for Taking {
    fn drop(&mut self) {
        TAKING.lock().remove(&self.0);
    }
}

impl Pool {
    /// Takes snapshots of several images at one instant, all or none, until `until` at the latest. I/O of those that
    /// are open here waits meanwhile.
    ///
    /// # Errors
    /// [`Error::Locked`], [`Error::Shared`]: another host may write to one of them; a snapshot of that name is there
    /// already; what Ceph says. Then there is none of them.
    pub fn snapshot_together(&self, members: &[Member], until: Instant) -> Result<(), Error> {
        let mut opened = Vec::new();
        for member in members {
            let image = self.opened(&member.image, None, true)?;
            let id = image.id()?;
            if opened.iter().any(|(_, other)| *other == id) {
                let path = self.path(&member.image);
                return Err(Error::Invalid(format!("image {path} is named twice")));
            }
            image.check_not_rolling_back(&id)?;
            image.settle_snapshot(&id, &member.snapshot)?;
            if image.has_snapshot(&member.snapshot)? {
                return Err(image.not_taken(&member.snapshot, -libc::EEXIST));
            }
            opened.push((image, id));
        }
        for (member, (image, _)) in members.iter().zip(&opened) {
            if member.disk.is_none() {
                // It goes when the image is closed.
                image.acquire()?;
            }
        }
        let taking = Taking::begin();
        let names = opened.iter().zip(members);
        let mut others: Vec<_> =
            names.map(|((_, id), member)| (id.clone(), member.snapshot.clone())).collect();
        let Some(last) = others.pop() else { return Ok(()) };
        let client = address(self.library(), self.client.rados).unwrap_or_default();
        let mark = |others| Mark {
            token: taking.0.clone(),
            last: last.clone(),
            client: client.clone(),
            others,
        };
        let all: Vec<_> = members.iter().zip(&opened).collect();
        let noted = all.iter().try_for_each(|(member, (image, id))| {
            let others = if *id == last.0 { others.clone() } else { Vec::new() };
            let key = key_of(TOGETHER, id, Some(&member.snapshot));
            image.set(&key, &mark(others).text())?;
            image.note(Some(&member.snapshot), &member.notes)
        });
        let mut taken = 0;
        let done = noted.and_then(|()| self.take(&all, &mut taken, until));
        if done.is_err() {
            for (at, (member, (image, _))) in all.iter().enumerate() {
                let left = match at < taken {
                    true => image.remove_snapshot(&member.snapshot),
                    false => image.forget(&member.snapshot),
                };
                if let Err(why) = left {
                    tracing::warn!("{why}");
                }
            }
            return done;
        }
        if let Err(why) = self.unmark(&mark(others)) {
            // They are whole nevertheless, and looked up as such.
            tracing::warn!("{why}");
        }
        Ok(())
    }

    /// Takes them, that of the last image last; `taken` is how many there are.
    fn take(
        &self,
        all: &[(&Member, &(Open<'_>, String))],
        taken: &mut usize,
        until: Instant,
    ) -> Result<(), Error> {
        let mut held_back = Vec::new();
        for disk in all.iter().filter_map(|(member, _)| member.disk.as_ref()) {
            let Some(held) = disk.hold_back() else {
                let what =
                    format!("image {} is not locked for this host any more", disk.source().path());
                return Err(failed(what, -libc::EBUSY));
            };
            held_back.push(held);
        }
        let held_back = Lease::new(held_back, until)?;
        for (member, (image, _)) in all {
            if !held_back.is_kept() {
                break;
            }
            image.take_snapshot(&member.snapshot)?;
            *taken += 1;
        }
        // What goes on before all are taken makes them of several instants.
        if held_back.end() {
            return Ok(());
        }
        let what = format!("pool {} has not taken {} snapshots in time", self.name, all.len());
        Err(failed(what, -libc::ETIMEDOUT))
    }

    /// Whether all that were taken together with a marked snapshot are there.
    fn is_whole(&self, mark: &Mark) -> Result<bool, Error> {
        let (id, snapshot) = &mark.last;
        let last = match self.opened_by_id(id, id, false) {
            Err(why) if why.errno() == libc::ENOENT => return Ok(false),
            last => last?,
        };
        let its = Mark::of(&last.metadata()?, id, snapshot);
        let is_it = its.is_some_and(|its| its.token == mark.token);
        Ok(is_it && last.has_snapshot(snapshot)?)
    }

    /// Takes away the marks of snapshots that are all there.
    fn unmark(&self, mark: &Mark) -> Result<(), Error> {
        let (id, snapshot) = &mark.last;
        let last = self.opened_by_id(id, id, true)?;
        let Some(its) = Mark::of(&last.metadata()?, id, snapshot) else { return Ok(()) };
        for (id, snapshot) in &its.others {
            let image = match self.opened_by_id(id, id, true) {
                Err(why) if why.errno() == libc::ENOENT => continue,
                image => image?,
            };
            let own = Mark::of(&image.metadata()?, id, snapshot);
            if own.is_some_and(|own| own.token == mark.token) {
                image.unset(&key_of(TOGETHER, id, Some(snapshot)))?;
            }
        }
        last.unset(&key_of(TOGETHER, id, Some(snapshot))).map(drop)
    }
}

impl Open<'_> {
    /// The image's lock.
    pub(super) fn lock(&self) -> Lock<'_> {
        let Pool { cluster, client, .. } = self.pool;
        Lock { cluster, client, image: self.image, path: self.path() }
    }

    /// Locks it for this client, until it is closed.
    ///
    /// # Errors
    /// [`Error::NoLock`]: nobody can; [`Error::Locked`], [`Error::Shared`]: another client that lives has, or shares
    /// it; what Ceph says.
    pub(super) fn acquire(&self) -> Result<(), Error> {
        if !self.is_lockable()? {
            return Err(Error::NoLock { image: self.path() });
        }
        self.enter()?;
        self.lock().acquire()
    }

    /// Notes at it that it is written to by this host alone, until it is closed.
    fn enter(&self) -> Result<(), Error> {
        let mut entry = self.entry.lock();
        if entry.is_none() {
            *entry = Some(self.open_image()?.enter(Kind::Alone)?);
        }
        Ok(())
    }

    fn open_image(&self) -> Result<OpenImage<'_>, Error> {
        let Pool { cluster, client, io, .. } = self.pool;
        let (id, path) = (self.id()?, self.path());
        Ok(OpenImage { cluster, client, io: *io, image: self.image, id, path })
    }

    /// Whether there is a snapshot of that name, marked or not.
    pub(super) fn has_snapshot(&self, snapshot: &str) -> Result<bool, Error> {
        let all = self.all_snapshots()?;
        Ok(all.iter().any(|(id, name, _)| name == snapshot && self.is_of_users(*id)))
    }

    /// Whether a snapshot is to be left out, as not all are there that it was to be taken together with.
    pub(super) fn is_half(
        &self,
        metadata: &BTreeMap<String, String>,
        id: &str,
        snapshot: &str,
    ) -> Result<bool, Error> {
        let mark = Mark::of(metadata, id, snapshot);
        mark.map_or(Ok(false), |mark| self.pool.is_whole(&mark).map(|is| !is))
    }

    /// What a call that was cut off has left of all snapshots of this image: see [`Open::settle_snapshot`].
    pub(super) fn settle_snapshots(&self, id: &str) -> Result<(), Error> {
        let prefix = format!("{TOGETHER}.{id}@");
        let keys = self.metadata()?.into_keys();
        let mut names = keys.filter_map(|key| Some(key.strip_prefix(&prefix)?.to_owned()));
        names.try_for_each(|snapshot| self.settle_snapshot(id, &snapshot))
    }

    /// If a snapshot has a mark that a call has left which was cut off: takes the marks away where all are there that
    /// were taken together, else deletes it.
    ///
    /// # Errors
    /// They are being taken; what Ceph says.
    pub(super) fn settle_snapshot(&self, id: &str, snapshot: &str) -> Result<(), Error> {
        let Some(mark) = Mark::of(&self.metadata()?, id, snapshot) else { return Ok(()) };
        let busy = || {
            let path = self.path();
            let what = format!("snapshot {path}@{snapshot} is being taken together with others");
            failed(what, -libc::EBUSY)
        };
        if TAKING.lock().contains(&mark.token) {
            return Err(busy());
        }
        let last = match self.pool.opened_by_id(&mark.last.0, &mark.last.0, true) {
            Err(why) if why.errno() == libc::ENOENT => None,
            last => Some(last?),
        };
        if let Some(last) = &last {
            // Who takes them has all of the images locked.
            match last.acquire() {
                Err(Error::Locked { .. } | Error::Shared { .. }) => {
                    let own = address(self.library(), self.pool.client.rados);
                    let is_its = last.lock().owners()?.contains(&mark.client);
                    if is_its && own.as_ref() != Some(&mark.client) {
                        return Err(busy());
                    }
                }
                acquired => acquired?,
            }
            if self.pool.is_whole(&mark)? {
                return self.pool.unmark(&mark);
            }
        }
        match self.remove_snapshot(snapshot) {
            Err(why) if why.errno() == libc::ENOENT => self.forget(snapshot),
            removed => removed,
        }
    }

    /// Takes a snapshot, nothing else.
    pub(super) fn take_snapshot(&self, snapshot: &str) -> Result<(), Error> {
        let name = text("the snapshot's name", snapshot)?;
        // SAFETY: an open image and a zero-terminated text.
        let taken = unsafe { (self.library().rbd_snap_create)(self.image, name.as_ptr()) };
        if taken < 0 { Err(self.not_taken(snapshot, taken)) } else { Ok(()) }
    }

    fn not_taken(&self, snapshot: &str, returned: i32) -> Error {
        failed(format!("snapshot {}@{snapshot} cannot be taken", self.path()), returned)
    }

    /// Deletes a snapshot and what is noted at it.
    pub(super) fn remove_snapshot(&self, snapshot: &str) -> Result<(), Error> {
        let name = text("the snapshot's name", snapshot)?;
        // SAFETY: an open image and a zero-terminated text.
        let removed = unsafe { (self.library().rbd_snap_remove)(self.image, name.as_ptr()) };
        check(removed, || format!("snapshot {}@{snapshot} cannot be deleted", self.path()))?;
        self.forget(snapshot)
    }

    /// The key of the mark of a snapshot.
    pub(super) fn mark_key(id: &str, snapshot: &str) -> String {
        key_of(TOGETHER, id, Some(snapshot))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_read_as_it_was_written_and_nothing_else_is_one() {
        let mark = Mark {
            token: "t".to_owned(),
            last: ("id2".to_owned(), "s".to_owned()),
            client: "10.0.0.1:0/1".to_owned(),
            others: vec![("id1".to_owned(), "größer".to_owned())],
        };
        let metadata = BTreeMap::from([("virtlun.together.id2@s".to_owned(), mark.text())]);
        let read = Mark::of(&metadata, "id2", "s").unwrap();
        assert_eq!((read.token, read.last, read.client), (mark.token, mark.last, mark.client));
        assert_eq!(read.others, mark.others);
        assert!(Mark::of(&metadata, "id1", "s").is_none());
        for text in ["", "1", "{}", r#"{"token": "t", "image": 1}"#] {
            assert!(Mark::read(text).is_none(), "{text}");
        }
    }
}
