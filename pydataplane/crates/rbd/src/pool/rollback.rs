//! Images that read as snapshots of them again: all or none, whatever ends meanwhile.
//!
//! librbd copies an image's objects one after the other, and a host may end in between: an image is neither the one
//! nor the other then. So each image is locked, and has a mark in its metadata before anything is copied, with which
//! nobody opens it. The mark of the first image is completed last, when nobody else has any of the images open: from
//! then on all of them are rolled back, by this call, by the next, or at a target's start. Its mark goes last, too.
//!
//! librbd gives an image the snapshot's object map before it copies an object, and passes over objects that neither
//! map has: what it had not copied when it was cut off would keep newer data. So the image's map is made anew of the
//! objects that are there before a rollback is done again.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::ptr;

use libc::{c_int, c_void};
use serde_json::{Value, json};
use uuid::Uuid;

use super::{Open, Pool, key_of};
use crate::Error;
use crate::calls::{check, failed, text};
use crate::ffi::FEATURE_OBJECT_MAP;
use crate::lock::fence;

/// What the key of a mark begins with, of an image that is being rolled back.
pub(crate) const ROLLBACK: &str = "virtlun.rollback";

/// The mark of an image.
struct Mark {
    /// The same of all that are rolled back together, another for each call.
    token: String,
    /// Identity of the first image.
    first: String,
    /// What the image is to read as.
    snapshot: String,
    /// Of the first one: identities of all other images, once it is settled that all are rolled back.
    others: Option<Vec<String>>,
}

impl Mark {
    fn text(&self) -> String {
        let Mark { token, first, snapshot, others } = self;
        json!({"token": token, "first": first, "snapshot": snapshot, "others": others}).to_string()
    }

    fn of(metadata: &BTreeMap<String, String>, id: &str) -> Option<Mark> {
        let read: Value = serde_json::from_str(metadata.get(&key_of(ROLLBACK, id, None))?).ok()?;
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let others = match &read["others"] {
            Value::Null => None,
            others => Some(others.as_array()?.iter().map(text).collect::<Option<_>>()?),
        };
        Some(Mark {
            token: text(&read["token"])?,
            first: text(&read["first"])?,
            snapshot: text(&read["snapshot"])?,
            others,
        })
    }
}

/// Called by librbd when some objects have been looked at; it goes on.
extern "C" fn goes_on(_done: u64, _of: u64, _given: *mut c_void) -> c_int {
    0
}

impl Pool {
    /// Has images read as snapshots of them, with their sizes, all or none; what an earlier call has begun is done
    /// first.
    ///
    /// # Errors
    /// Somebody has one of them open, or locked; what Ceph says. If it is not known whether it was settled, the next
    /// call with one of the images does the rest.
    pub fn roll_back(&self, all: &[(String, String)]) -> Result<(), Error> {
        let mut opened = Vec::new();
        for (image, snapshot) in all {
            let open = self.opened(image, None, true)?;
            let id = open.id()?;
            if opened.iter().any(|(_, other, _)| *other == id) {
                let path = self.path(image);
                return Err(Error::Invalid(format!("image {path} is named twice")));
            }
            opened.push((open, id, snapshot.clone()));
        }
        for (image, id, _) in &opened {
            image.finish_rollback(id)?;
        }
        for (image, id, snapshot) in &opened {
            let there = image.has_snapshot(snapshot)?;
            if !there || image.is_half(&image.metadata()?, id, snapshot)? {
                let what = format!("image {} has no snapshot {snapshot}", image.path());
                return Err(failed(what, -libc::ENOENT));
            }
        }
        opened.iter().try_for_each(|(image, ..)| image.lock_alone())?;
        let Some((first, first_id, to)) = opened.first() else { return Ok(()) };
        let token = Uuid::new_v4().to_string();
        let mark = |snapshot: &str, others| Mark {
            token: token.clone(),
            first: first_id.clone(),
            snapshot: snapshot.to_owned(),
            others,
        };
        let mut marks = opened.iter();
        let marked = marks.try_for_each(|(image, id, snapshot)| {
            image.set(&key_of(ROLLBACK, id, None), &mark(snapshot, None).text())
        });
        // Who opens one looks for the mark when it has it open.
        let alone =
            marked.and_then(|()| opened.iter().try_for_each(|(image, ..)| image.check_alone()));
        if let Err(why) = alone {
            for (image, id, _) in &opened {
                _ = image.unset(&key_of(ROLLBACK, id, None));
            }
            return Err(why);
        }
        let others = opened[1..].iter().map(|(_, id, _)| id.clone()).collect();
        first.set(&key_of(ROLLBACK, first_id, None), &mark(to, Some(others)).text())?;
        for (image, id, snapshot) in opened[1..].iter().chain([&opened[0]]) {
            image.roll_back(id, snapshot)?;
        }
        Ok(())
    }

    /// Does the rest of what calls have begun that were cut off: rollbacks, and snapshots taken together.
    ///
    /// # Errors
    /// What one of them says; the others are done.
    pub fn settle(&self) -> Result<(), Error> {
        let mut failed = None;
        for (id, name) in self.names()? {
            let settled = self.opened(&name, None, false).and_then(|image| {
                let metadata = image.metadata()?;
                let together = Open::mark_key(&id, "");
                let rollback = key_of(ROLLBACK, &id, None);
                if !metadata.keys().any(|key| key.starts_with(&together) || *key == rollback) {
                    return Ok(());
                }
                let image = self.opened(&name, None, true)?;
                image.finish_rollback(&id)?;
                image.settle_snapshots(&id)
            });
            match settled {
                // It was deleted.
                Err(why) if why.errno() != libc::ENOENT => _ = failed.get_or_insert(why),
                _ => {}
            }
        }
        failed.map_or(Ok(()), Err)
    }
}

impl Open<'_> {
    /// Refuses an image that is neither as it was nor as its snapshot.
    ///
    /// # Errors
    /// It is such a one; what Ceph says.
    pub(super) fn check_not_rolling_back(&self, id: &str) -> Result<(), Error> {
        match Mark::of(&self.metadata()?, id) {
            None => Ok(()),
            Some(_) => Err(Error::RollingBack { image: self.path() }),
        }
    }

    /// Locks it, which nobody else has open; until it is closed.
    fn lock_alone(&self) -> Result<(), Error> {
        self.check_alone()?;
        self.lock_if_it_can()
    }

    /// Locks it; what cannot be locked is opened by nobody else.
    fn lock_if_it_can(&self) -> Result<(), Error> {
        match self.acquire() {
            Err(Error::NoLock { .. }) => self.check_alone(),
            acquired => acquired,
        }
    }

    /// Sees that no other client has it open that lives; those of processes before are fenced.
    fn check_alone(&self) -> Result<(), Error> {
        let Pool { cluster, client, .. } = self.pool;
        let (past, others): (Vec<_>, Vec<_>) =
            self.watchers()?.into_iter().partition(|each| cluster.is_of_the_past(&each.address));
        if others.len() <= 1 {
            return past.iter().try_for_each(|each| fence(client, &each.address));
        }
        let path = self.path();
        let what = format!(
            "image {path} is not rolled back: a client has it open (`rbd status {path}` tells which)"
        );
        Err(failed(what, -libc::EBUSY))
    }

    /// Rolls it back, and takes its mark away.
    fn roll_back(&self, id: &str, snapshot: &str) -> Result<(), Error> {
        let name: CString = text("the snapshot's name", snapshot)?;
        // SAFETY: an open image and a zero-terminated text.
        let done = unsafe { (self.library().rbd_snap_rollback)(self.image, name.as_ptr()) };
        check(done, || format!("image {} cannot be rolled back to {snapshot}", self.path()))?;
        self.unset(&key_of(ROLLBACK, id, None)).map(drop)
    }

    /// As [`Open::roll_back`], of a locked image that may have been rolled back in part.
    fn roll_back_again(&self, id: &str, snapshot: &str) -> Result<(), Error> {
        self.rebuild_object_map()?;
        self.roll_back(id, snapshot)
    }

    /// Looks which objects there are, if the image has a map of them.
    fn rebuild_object_map(&self) -> Result<(), Error> {
        if self.features()? & FEATURE_OBJECT_MAP == 0 {
            return Ok(());
        }
        // SAFETY: an open image, and a function that takes nothing from what it is given.
        let done = unsafe {
            (self.library().rbd_rebuild_object_map)(self.image, goes_on, ptr::null_mut())
        };
        check(done, || {
            let path = self.path();
            format!(
                "the object map of image {path}, a part of which is rolled back, cannot be rebuilt"
            )
        })
    }

    /// Does the rest of a rollback that was cut off, of all images that were rolled back together; or takes the mark
    /// away where it was not settled.
    ///
    /// # Errors
    /// It is going on; what Ceph says.
    pub(super) fn finish_rollback(&self, id: &str) -> Result<(), Error> {
        let Some(mark) = Mark::of(&self.metadata()?, id) else { return Ok(()) };
        if mark.first != id {
            let first = match self.pool.opened_by_id(&mark.first, &mark.first, true) {
                Err(why) if why.errno() == libc::ENOENT => None,
                first => Some(first?),
            };
            if let Some(first) = &first {
                first.lock_if_it_can()?;
                let its = Mark::of(&first.metadata()?, &mark.first);
                if its.is_some_and(|its| its.token == mark.token && its.others.is_some()) {
                    return first.finish_locked(&mark.first);
                }
            }
            self.lock_if_it_can()?;
            return self.unset(&key_of(ROLLBACK, id, None)).map(drop);
        }
        self.lock_if_it_can()?;
        self.finish_locked(id)
    }

    /// As [`Open::finish_rollback`], of the first image, which is locked.
    fn finish_locked(&self, id: &str) -> Result<(), Error> {
        let Some(mark) = Mark::of(&self.metadata()?, id) else { return Ok(()) };
        let Some(others) = mark.others else {
            return self.unset(&key_of(ROLLBACK, id, None)).map(drop);
        };
        for other in &others {
            let image = match self.pool.opened_by_id(other, other, true) {
                Err(why) if why.errno() == libc::ENOENT => continue,
                image => image?,
            };
            let its = Mark::of(&image.metadata()?, other);
            if let Some(its) = its.filter(|its| its.token == mark.token) {
                image.lock_if_it_can()?;
                image.roll_back_again(other, &its.snapshot)?;
            }
        }
        self.roll_back_again(id, &mark.snapshot)?;
        tracing::info!("image {} is rolled back, as an earlier call was to do", self.path());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_read_as_it_was_written() {
        for others in [None, Some(Vec::new()), Some(vec!["id2".to_owned()])] {
            let mark = Mark {
                token: "t".to_owned(),
                first: "id1".to_owned(),
                snapshot: "s".to_owned(),
                others: others.clone(),
            };
            let metadata = BTreeMap::from([("virtlun.rollback.id1".to_owned(), mark.text())]);
            let read = Mark::of(&metadata, "id1").unwrap();
            assert_eq!(
                (read.first, read.snapshot, read.others),
                (mark.first, mark.snapshot, others)
            );
            assert!(Mark::of(&metadata, "id2").is_none());
        }
    }
}
