//! The images of a pool, as volumes: made, changed, listed, and what is noted at them.
//!
//! None of it locks an image for good: an image that another client has locked is resized, or a snapshot
//! of it taken, by that client, as librbd asks it to. All of it waits for the cluster as long as that takes, and
//! is for threads that may ([`crate::within`]).

mod lease;
pub(crate) mod rollback;
mod together;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, CString};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use libc::{c_char, c_int, c_void, size_t};
use parking_lot::Mutex;
use uuid::Uuid;

use crate::Error;
use crate::calls::{check, failed, text, texts};
use crate::close::close;
use crate::cluster::{Client, Cluster, option};
use crate::ffi::{
    EBLOCKLISTED, FEATURE_EXCLUSIVE_LOCK, FEATURE_FAST_DIFF, FLAG_FAST_DIFF_INVALID, ImageHandle,
    ImageInfo, ImageOptions, ImageSpec, IoCtx, Library, LinkedImage, OPTION_CLONE_FORMAT,
    SNAPSHOT_OF_USERS, SnapInfo, SnapSpec, TrashInfo,
};
use crate::image::uuid_of;
use crate::kind::Entry;
use crate::watchers::{Watching, watchers};

pub use together::Member;

/// Images that are looked at side by side while a pool is listed.
const BESIDE: usize = 16;
/// Images of a pool, snapshots of an image, and clones of a snapshot that are asked for at first.
const SOME: usize = 64;
/// Bytes of an image that are compared in one call, so that few ranges are told soon.
const COMPARED: u64 = 256 << 30;
/// Bytes of metadata that there is room for at first.
const METADATA_ROOM: usize = 16 << 10;
/// Longest metadata of an image, in bytes.
const METADATA_MAX: usize = 16 << 20;
/// What the keys of our metadata begin with: keys that begin with `conf_` are options of Ceph's. The image's
/// identity follows, as a clone gets all metadata of its parent.
const XATTR: &str = "virtlun.xattr";
/// As that, of an identity that an image or snapshot was given.
const UUID: &str = "virtlun.uuid";
/// As that, of an image that is being deleted: what is in the trash without it is somebody else's.
const DELETED: &str = "virtlun.deleted";
/// Logarithm of the bytes of an object, unless Ceph's configuration says otherwise.
const ORDER: u32 = 22;

/// An image of a pool, or a snapshot of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volume {
    /// Name of the image.
    pub image: String,
    /// Name of the snapshot.
    pub snapshot: Option<String>,
    /// Identity, the same on every host: its own, unless it was given one ([`Notes`]).
    pub uuid: Uuid,
    /// Size in bytes.
    pub size: u64,
    /// Bytes of an object.
    pub object_size: u64,
    /// Bytes of its own objects, where the cluster knows without looking for each (`fast-diff`); else its
    /// size.
    pub allocated: u64,
    /// What it is made of: `IMAGE@SNAPSHOT`. That is the snapshot before it, of an image its last one; of the
    /// first what the image is a clone of, if that is in the same pool.
    pub parent: Option<String>,
    /// Whether the image is a clone, of whatever pool.
    pub is_clone: bool,
    /// Names of what has it as its parent.
    pub clones: Vec<String>,
}

impl Volume {
    /// `IMAGE` or `IMAGE@SNAPSHOT`.
    pub fn name(&self) -> String {
        match &self.snapshot {
            Some(snapshot) => format!("{}@{snapshot}", self.image),
            None => self.image.clone(),
        }
    }
}

/// What there is in a pool, and what there is room for, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Space {
    /// Both together.
    pub total: u64,
    /// What may still be written.
    pub free: u64,
}

/// Parts of an image, in order: offset and length, in bytes, and where the next call goes on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranges {
    /// May be none, though more follow.
    pub ranges: Vec<(u64, u64)>,
    /// `None`: these were the last.
    pub next_offset: Option<u64>,
}

/// An open pool, or a namespace of one.
pub struct Pool {
    client: Arc<Client>,
    cluster: Arc<Cluster>,
    /// `POOL` or `POOL/NAMESPACE`.
    name: String,
    io: IoCtx,
}

// SAFETY: librados and librbd are thread-safe.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: made by `rados_ioctx_create`; images of it borrow the pool.
        unsafe { (self.library().rados_ioctx_destroy)(self.io) };
    }
}

/// An image that is open for a call.
struct Open<'a> {
    pool: &'a Pool,
    name: &'a str,
    image: ImageHandle,
    /// What says that it is used by this host alone, once it is.
    entry: Mutex<Option<Entry>>,
}

impl<'a> Open<'a> {
    fn new(pool: &'a Pool, name: &'a str, image: ImageHandle) -> Open<'a> {
        Open { pool, name, image, entry: Mutex::default() }
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        let (library, io) = (self.pool.library(), self.pool.io);
        // SAFETY: open, of that pool, and used by nobody else.
        unsafe { close(library, io, self.image) };
        if let Some(entry) = self.entry.get_mut().take() {
            // SAFETY: that of the image.
            unsafe { entry.give_back(library, io) };
        }
    }
}

/// The text at `text`, empty for null.
///
/// # Safety
/// It is null or zero-terminated.
unsafe fn owned(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: as the caller says.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

impl Pool {
    /// Opens the pool `name`, `POOL` or `POOL/NAMESPACE`, of a cluster as soon as that is connected.
    ///
    /// # Errors
    /// Why not, with what to do.
    pub fn open(cluster: &Arc<Cluster>, name: &str) -> Result<Pool, Error> {
        let client = cluster.client(Duration::MAX)?;
        let (pool, namespace) = name.split_once('/').unwrap_or((name, ""));
        let (pool_, namespace) =
            (text("the pool's name", pool)?, text("the namespace", namespace)?);
        let mut io: IoCtx = ptr::null_mut();
        let library = client.library;
        // SAFETY: a connected client, a zero-terminated text, and where the result is to be.
        let made = unsafe { (library.rados_ioctx_create)(client.rados, pool_.as_ptr(), &mut io) };
        check(made, || {
            let cluster = cluster.name();
            format!(
                "pool {pool} of cluster {cluster} cannot be used: `ceph osd lspools` lists them"
            )
        })?;
        // SAFETY: made above, not used yet.
        unsafe { (library.rados_ioctx_set_namespace)(io, namespace.as_ptr()) };
        Ok(Pool { client, cluster: Arc::clone(cluster), name: name.to_owned(), io })
    }

    /// Has calls that come have a new client, where one has failed as the cluster has fenced this one.
    pub fn leave_fenced(&self, why: &Error) {
        if why.errno() == EBLOCKLISTED {
            self.cluster.renew(&self.client);
        }
    }

    fn library(&self) -> &'static Library {
        self.client.library
    }

    /// Pool and name of an image, as Ceph's commands take them.
    fn path(&self, image: &str) -> String {
        format!("{}/{image}", self.name)
    }

    /// Number and namespace.
    fn number(&self) -> (i64, &str) {
        // SAFETY: an open pool.
        let number = unsafe { (self.library().rados_ioctx_get_id)(self.io) };
        (number, self.name.split_once('/').map_or("", |(_, namespace)| namespace))
    }

    /// Identity: the same on every host.
    pub fn uuid(&self) -> Uuid {
        let (pool, namespace) = self.number();
        Uuid::new_v5(&self.client.fsid, format!("{pool}/{namespace}").as_bytes())
    }

    /// Bytes of an object of a new image.
    pub fn object_size(&self) -> u64 {
        let order = option(self.library(), self.client.rados, "rbd_default_order");
        let order = order.and_then(|text| text.parse().ok()).unwrap_or(ORDER);
        1 << order.clamp(12, 25)
    }

    /// What the monitors know of the room in it; nothing where no manager tells them.
    ///
    /// # Errors
    /// What Ceph says.
    pub fn space(&self) -> Result<Space, Error> {
        let text =
            self.ask_monitors(r#"{"prefix": "df", "detail": "detail", "format": "json"}"#)?;
        let said: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
        let number = self.number().0;
        let mut pools = said["pools"].as_array().into_iter().flatten();
        let its = pools.find(|pool| pool["id"] == number);
        let stats = its.map(|pool| &pool["stats"]).unwrap_or(&serde_json::Value::Null);
        let told = |name: &str| stats[name].as_u64().unwrap_or(0);
        let (mut free, stored) = (told("max_avail"), told("stored"));
        let quota = told("quota_bytes");
        if quota != 0 {
            free = free.min(quota.saturating_sub(stored));
        }
        Ok(Space { total: free + stored, free })
    }

    fn ask_monitors(&self, command: &str) -> Result<String, Error> {
        let command = text("a command", command)?;
        let all = [command.as_ptr()];
        let (mut out, mut said) = (ptr::null_mut::<c_char>(), ptr::null_mut::<c_char>());
        let (mut out_len, mut said_len) = (0, 0);
        let library = self.library();
        // SAFETY: a connected client, one zero-terminated text, no input, and where results are to be.
        let asked = unsafe {
            (library.rados_mon_command)(
                self.client.rados,
                all.as_ptr(),
                all.len(),
                ptr::null(),
                0,
                &mut out,
                &mut out_len,
                &mut said,
                &mut said_len,
            )
        };
        let text = match out.is_null() {
            true => String::new(),
            // SAFETY: so many bytes, ours until they are given back.
            false => String::from_utf8_lossy(unsafe {
                std::slice::from_raw_parts(out.cast::<u8>(), out_len)
            })
            .into_owned(),
        };
        for each in [out, said] {
            if !each.is_null() {
                // SAFETY: of the call above, given back once.
                unsafe { (library.rados_buffer_free)(each) };
            }
        }
        check(asked, || format!("the room in pool {} is not told", self.name))?;
        Ok(text)
    }

    fn opened<'a>(
        &'a self,
        name: &'a str,
        snapshot: Option<&str>,
        written: bool,
    ) -> Result<Open<'a>, Error> {
        let library = self.library();
        let name_ = text("the image's name", name)?;
        let snapshot = snapshot.map(|name| text("the snapshot's name", name)).transpose()?;
        let open = if written { library.rbd_open } else { library.rbd_open_read_only };
        let at = snapshot.as_ref().map_or(ptr::null(), |snapshot| snapshot.as_ptr());
        let mut image: ImageHandle = ptr::null_mut();
        // SAFETY: an open pool, zero-terminated texts or null, and where the result is to be.
        let opened = unsafe { open(self.io, name_.as_ptr(), &mut image, at) };
        check(opened, || format!("image {} cannot be opened", self.path(name)))?;
        Ok(Open::new(self, name, image))
    }

    /// All images and their snapshots, each image before its snapshots. Those that go meanwhile are left out.
    ///
    /// # Errors
    /// What Ceph says.
    pub fn list(&self) -> Result<Vec<Volume>, Error> {
        let names = self.names()?;
        let next = AtomicUsize::new(0);
        let found = Mutex::new(BTreeMap::new());
        let look = || {
            while let Some((id, name)) = names.get(next.fetch_add(1, Ordering::Relaxed)) {
                let look = || self.opened(name, None, false)?.volumes(id);
                let gone = |looked: &Result<_, Error>| matches!(looked, Err(why) if why.errno() == libc::ENOENT);
                let mut looked = look();
                if gone(&looked) {
                    // A snapshot of it, perhaps.
                    looked = look();
                }
                found.lock().insert(name, looked);
            }
        };
        thread::scope(|scope| (0..BESIDE.min(names.len())).for_each(|_| _ = scope.spawn(look)));
        let mut all = Vec::new();
        for (_, looked) in found.into_inner() {
            match looked {
                Ok(volumes) => all.extend(volumes),
                Err(why) if why.errno() == libc::ENOENT => {}
                Err(why) => return Err(why),
            }
        }
        let kin: Vec<_> = all.iter().map(|v| (v.parent.clone(), v.name())).collect();
        for volume in &mut all {
            let name = volume.name();
            let its = kin.iter().filter(|(parent, _)| parent.as_deref() == Some(&*name));
            volume.clones = its.map(|(_, clone)| clone.clone()).collect();
        }
        Ok(all)
    }

    /// Identities and names of all images.
    fn names(&self) -> Result<Vec<(String, String)>, Error> {
        let library = self.library();
        let none = ImageSpec { id: ptr::null_mut(), name: ptr::null_mut() };
        let mut specs = vec![none; SOME];
        loop {
            let mut count = specs.len();
            // SAFETY: an open pool, and room for that many.
            let told = unsafe { (library.rbd_list2)(self.io, specs.as_mut_ptr(), &mut count) };
            if told == -libc::ERANGE {
                specs.resize(count + SOME, none);
                continue;
            }
            check(told, || format!("the images of pool {} are not told", self.name))?;
            let of = &specs[..count.min(specs.len())];
            // SAFETY: zero-terminated texts, ours until they are given back.
            let names = of.iter().map(|spec| unsafe { (owned(spec.id), owned(spec.name)) });
            let names = names.collect();
            // SAFETY: those of the call above, once.
            unsafe { (library.rbd_image_spec_list_cleanup)(specs.as_mut_ptr(), count) };
            return Ok(names);
        }
    }

    /// One image with its snapshots; the image is the first. `None`: there is none of that name.
    ///
    /// # Errors
    /// What Ceph says.
    pub fn look(&self, image: &str) -> Result<Option<Vec<Volume>>, Error> {
        let opened = match self.opened(image, None, false) {
            Ok(opened) => opened,
            Err(why) if why.errno() == libc::ENOENT => return Ok(None),
            Err(why) => return Err(why),
        };
        let mut volumes = opened.volumes(&opened.id()?)?;
        drop(opened);
        let next: Vec<_> = volumes.iter().map(|v| (v.parent.clone(), v.name())).collect();
        for volume in &mut volumes {
            let Some(snapshot) = &volume.snapshot else { continue };
            let clones = self.opened(image, Some(snapshot), false).and_then(|of| of.children());
            volume.clones = match clones {
                // It, or one of these, is being deleted.
                Err(why) if why.errno() == libc::ENOENT => Vec::new(),
                clones => clones?,
            };
            let name = volume.name();
            let its = next.iter().filter(|(parent, _)| parent.as_deref() == Some(&*name));
            volume.clones.extend(its.map(|(_, each)| each.clone()));
            volume.clones.sort();
        }
        Ok(Some(volumes))
    }

    /// Makes an image.
    ///
    /// # Errors
    /// What Ceph says; then there is none, or one without all of its notes.
    pub fn create(&self, image: &str, size: u64, notes: &Notes) -> Result<(), Error> {
        let name = text("the image's name", image)?;
        let options = Options::new(self.library());
        // SAFETY: an open pool, a zero-terminated text, and options.
        let made = unsafe { (self.library().rbd_create4)(self.io, name.as_ptr(), size, options.1) };
        check(made, || format!("image {} cannot be made", self.path(image)))?;
        self.noted(image, notes)
    }

    /// Makes a clone of a snapshot, which need not be protected.
    ///
    /// # Errors
    /// What Ceph says; then there is none, or one without all of its notes.
    pub fn clone(
        &self,
        (of, snapshot): (&str, &str),
        image: &str,
        notes: &Notes,
    ) -> Result<(), Error> {
        let library = self.library();
        let (of_, snapshot_) = (text("the image's name", of)?, text("the snapshot", snapshot)?);
        let name = text("the image's name", image)?;
        let options = Options::new(library);
        // SAFETY: options, which have that one.
        let set =
            unsafe { (library.rbd_image_options_set_uint64)(options.1, OPTION_CLONE_FORMAT, 2) };
        check(set, || "a clone of format 2 cannot be asked for".to_owned())?;
        // SAFETY: an open pool, zero-terminated texts, and options.
        let made = unsafe {
            (library.rbd_clone3)(
                self.io,
                of_.as_ptr(),
                snapshot_.as_ptr(),
                self.io,
                name.as_ptr(),
                options.1,
            )
        };
        check(made, || {
            format!("image {} cannot be made of {}@{snapshot}", self.path(image), self.path(of))
        })?;
        self.noted(image, notes)
    }

    /// Notes what a new image is to have. What is cut off stays: another host may have deleted the image and made
    /// its own of that name.
    fn noted(&self, image: &str, notes: &Notes) -> Result<(), Error> {
        if notes.is_empty() { Ok(()) } else { self.opened(image, None, true)?.note(None, notes) }
    }

    /// Gives an image a new size, in bytes.
    ///
    /// # Errors
    /// What Ceph says.
    pub fn resize(&self, image: &str, size: u64) -> Result<(), Error> {
        let opened = self.opened(image, None, true)?;
        // SAFETY: an open image.
        let resized = unsafe { (self.library().rbd_resize)(opened.image, size) };
        check(resized, || format!("image {} cannot be resized", self.path(image)))
    }

    /// Gives an image another name.
    ///
    /// # Errors
    /// What Ceph says.
    pub fn rename(&self, image: &str, to: &str) -> Result<(), Error> {
        let (from, new) = (text("the image's name", image)?, text("the new name", to)?);
        // SAFETY: an open pool and zero-terminated texts.
        let renamed = unsafe { (self.library().rbd_rename)(self.io, from.as_ptr(), new.as_ptr()) };
        check(renamed, || format!("image {} cannot be called {to}", self.path(image)))
    }

    /// Deletes an image and its data, by way of the pool's trash, which takes it once. What is cut off then is
    /// found there by its mark, and completed ([`Pool::complete`]); nothing is deleted by its name alone.
    ///
    /// # Errors
    /// It has snapshots, or somebody has it open; what Ceph says. It is not deleted, or not yet.
    pub fn remove(&self, image: &str) -> Result<(), Error> {
        let (library, path) = (self.library(), self.path(image));
        let name = text("the image's name", image)?;
        // Who has it open for writing is seen by all others that delete it, and they refuse: its name stays its
        // own until it is in the trash.
        let opened = self.opened(image, None, true)?;
        let id = opened.id()?;
        let _alone = self.alone(&id, image)?;
        opened.settle_snapshots(&id)?;
        if !opened.all_snapshots()?.is_empty() {
            return Err(self.has_snapshots(image));
        }
        if opened.is_open_elsewhere()? {
            return Err(self.in_use(image));
        }
        // Somebody who has closed it meanwhile may have moved it.
        if self.opened(image, None, false)?.id()? != id {
            return Err(self.in_use(image));
        }
        let uuid = opened.uuid(&id, None, &opened.metadata()?);
        let mark = key_of(DELETED, &id, None);
        opened.set(&mark, "1")?;
        // SAFETY: an open pool and a zero-terminated text.
        let moved = unsafe { (library.rbd_trash_move)(self.io, name.as_ptr(), 0) };
        if moved < 0 {
            _ = opened.unset(&mark);
        }
        drop(opened);
        check(moved, || format!("image {path} cannot be deleted"))
            .map_err(|why| if why.errno() == libc::EBUSY { self.in_use(image) } else { why })?;
        self.emptied(&id, image)?;
        // An earlier one of the same identity.
        self.complete(|_, each| each == uuid).map(drop)
    }

    /// Whether there is anything in the trash.
    ///
    /// # Errors
    /// What Ceph says.
    pub fn has_trash(&self) -> Result<bool, Error> {
        Ok(!self.trash()?.is_empty())
    }

    /// Completes deletions that were cut off, of the images in the trash whose name and identity `is_wanted`;
    /// how many there were. What others have moved there stays.
    ///
    /// # Errors
    /// Somebody has one open, or deletes it at the moment; what Ceph says.
    pub fn complete(&self, is_wanted: impl Fn(&str, Uuid) -> bool) -> Result<usize, Error> {
        let (mut completed, mut failed) = (0, None);
        for (id, name) in self.trash()? {
            match self.completed(&id, &name, &is_wanted) {
                Ok(done) => completed += usize::from(done),
                Err(why) => _ = failed.get_or_insert(why),
            }
        }
        failed.map_or(Ok(completed), Err)
    }

    /// As [`Pool::complete`], of one image.
    fn completed(
        &self,
        id: &str,
        name: &str,
        is_wanted: &impl Fn(&str, Uuid) -> bool,
    ) -> Result<bool, Error> {
        let opened = match self.opened_by_id(id, name, false) {
            Ok(opened) => opened,
            Err(why) => match why.errno() {
                // Its header goes after its data: nothing but the entry is left of it.
                libc::ENOENT => {
                    let _alone = self.alone(id, name)?;
                    return self.purged(id, name).map(|()| false);
                }
                // Of a format or with features that none of ours has.
                libc::EINVAL | libc::ENOSYS | libc::EOPNOTSUPP => return Ok(false),
                _ => return Err(why),
            },
        };
        let metadata = opened.metadata()?;
        let is_ours = metadata.contains_key(&key_of(DELETED, id, None));
        if !is_ours || !is_wanted(name, opened.uuid(id, None, &metadata)) {
            return Ok(false);
        }
        drop(opened);
        let _alone = self.alone(id, name)?;
        self.emptied(id, name).map(|()| true)
    }

    /// Deletes an image that is in the trash, unless somebody has it open, also to delete it.
    fn emptied(&self, id: &str, name: &str) -> Result<(), Error> {
        match self.opened_by_id(id, name, true) {
            Ok(opened) if opened.is_open_elsewhere()? => return Err(self.in_use(name)),
            Err(why) if why.errno() != libc::ENOENT => return Err(why),
            _ => {}
        }
        let removed = self.purged(id, name);
        if matches!(&removed, Err(why) if why.errno() == libc::ENOTEMPTY) {
            // A snapshot was taken before it was in the trash.
            let (id_, name_) = (text("its identity", id)?, text("the image's name", name)?);
            // SAFETY: an open pool and zero-terminated texts.
            unsafe { (self.library().rbd_trash_restore)(self.io, id_.as_ptr(), name_.as_ptr()) };
            if let Ok(opened) = self.opened(name, None, true) {
                _ = opened.unset(&key_of(DELETED, id, None));
            }
            return Err(self.has_snapshots(name));
        }
        removed
    }

    /// Removes an image from the trash; it may be gone.
    fn purged(&self, id: &str, name: &str) -> Result<(), Error> {
        let id_ = text("its identity", id)?;
        // SAFETY: an open pool and a zero-terminated text.
        match -unsafe { (self.library().rbd_trash_remove)(self.io, id_.as_ptr(), true) } {
            libc::ENOENT => Ok(()),
            libc::EBUSY => Err(self.in_use(name)),
            errno => check(-errno, || {
                format!("image {} is in the trash, but not deleted yet", self.path(name))
            }),
        }
    }

    fn in_use(&self, image: &str) -> Error {
        let path = self.path(image);
        let what = format!(
            "image {path} is not deleted: a client has it open (`rbd status {path}` tells which), or deletes it \
             now"
        );
        failed(what, -libc::EBUSY)
    }

    fn has_snapshots(&self, image: &str) -> Error {
        let path = self.path(image);
        let what = format!(
            "image {path} has snapshots, or deleted ones whose clones are left (`rbd children --all {path}` \
             tells), which go first; it is not deleted"
        );
        failed(what, -libc::ENOTEMPTY)
    }

    /// Keeps other threads of this process from deleting the same image: the cluster takes them for one client.
    fn alone(&self, id: &str, image: &str) -> Result<Alone, Error> {
        let key = format!("{}/{}/{id}", self.client.fsid, self.name);
        match DELETING.lock().insert(key.clone()) {
            true => Ok(Alone(key)),
            false => Err(self.in_use(image)),
        }
    }

    /// Identities and names of what is in the trash, but of what `rbd rm` is deleting.
    fn trash(&self) -> Result<Vec<(String, String)>, Error> {
        let library = self.library();
        let mut infos = vec![TrashInfo::NONE; SOME];
        loop {
            let mut count = infos.len();
            // SAFETY: an open pool, and room for that many.
            let told = unsafe { (library.rbd_trash_list)(self.io, infos.as_mut_ptr(), &mut count) };
            if told == -libc::ERANGE {
                infos.resize(count + SOME, TrashInfo::NONE);
                continue;
            }
            check(told, || format!("the trash of pool {} is not told", self.name))?;
            let of = &infos[..count.min(infos.len())];
            // SAFETY: zero-terminated texts, ours until they are given back.
            let names = of.iter().map(|info| unsafe { (owned(info.id), owned(info.name)) });
            let names = names.collect();
            // SAFETY: those of the call above, once.
            unsafe { (library.rbd_trash_list_cleanup)(infos.as_mut_ptr(), count) };
            return Ok(names);
        }
    }

    /// Opens an image by its identity, also one that is in the trash.
    fn opened_by_id<'a>(
        &'a self,
        id: &str,
        name: &'a str,
        written: bool,
    ) -> Result<Open<'a>, Error> {
        let library = self.library();
        let id = text("its identity", id)?;
        let open = if written { library.rbd_open_by_id } else { library.rbd_open_by_id_read_only };
        let mut image: ImageHandle = ptr::null_mut();
        // SAFETY: an open pool, a zero-terminated text, and where the result is to be.
        let opened = unsafe { open(self.io, id.as_ptr(), &mut image, ptr::null()) };
        check(opened, || format!("image {} cannot be opened by its identity", self.path(name)))?;
        Ok(Open::new(self, name, image))
    }

    /// Takes a snapshot of an image.
    ///
    /// # Errors
    /// What Ceph says; then there is none.
    pub fn snapshot(&self, image: &str, snapshot: &str, notes: &Notes) -> Result<(), Error> {
        let opened = self.opened(image, None, true)?;
        let id = opened.id()?;
        opened.check_not_rolling_back(&id)?;
        opened.settle_snapshot(&id, snapshot)?;
        // It has its notes from the beginning, as those of one that is not there are not looked at.
        opened.note(Some(snapshot), notes)?;
        opened.take_snapshot(snapshot)
    }

    /// Deletes a snapshot with its metadata; clones of it keep what they show.
    ///
    /// # Errors
    /// What Ceph says.
    pub fn remove_snapshot(&self, image: &str, snapshot: &str) -> Result<(), Error> {
        let opened = self.opened(image, None, true)?;
        let id = opened.id()?;
        // It may be needed for that.
        opened.finish_rollback(&id)?;
        opened.settle_snapshot(&id, snapshot)?;
        opened.remove_snapshot(snapshot)
    }

    /// Gives an image all that it has of the snapshot whose clone it is; nothing for one that is no clone.
    ///
    /// # Errors
    /// What Ceph says.
    pub fn flatten(&self, image: &str) -> Result<(), Error> {
        let opened = self.opened(image, None, true)?;
        if opened.parent()?.is_none() {
            return Ok(());
        }
        // SAFETY: an open image.
        let done = unsafe { (self.library().rbd_flatten)(opened.image) };
        check(done, || format!("image {} does not get what its parent has", self.path(image)))
    }

    /// Parts of an image, or of a snapshot of it, of whole objects, from `offset` on and `most` at most: those
    /// that may differ from the snapshot `since`, or may hold anything but zeros.
    ///
    /// # Errors
    /// What Ceph says.
    pub fn ranges(
        &self,
        (image, snapshot): (&str, Option<&str>),
        since: Option<&str>,
        offset: u64,
        most: usize,
    ) -> Result<Ranges, Error> {
        let opened = self.opened(image, snapshot, false)?;
        let (size, object_size) = opened.stat()?;
        let mut found = Ranges::default();
        // Both ends of a call's part are the ends of objects.
        let mut at = offset - offset % object_size;
        while at < size {
            let end = size.min(at.saturating_add(COMPARED));
            for (from, to) in merged(opened.differing(since, at, end - at, true)?) {
                let from = from.max(offset);
                if from >= to {
                    continue;
                }
                let told = found.ranges.len();
                match found.ranges.last_mut() {
                    Some((last, length)) if *last + *length == from => *length += to - from,
                    _ if told == most => {
                        found.next_offset = Some(from);
                        return Ok(found);
                    }
                    _ => found.ranges.push((from, to - from)),
                }
            }
            at = end;
        }
        Ok(found)
    }

    /// Bytes of the objects that are an image's or snapshot's own, each looked for.
    ///
    /// # Errors
    /// What Ceph says.
    pub fn allocated(&self, image: &str, snapshot: Option<&str>) -> Result<u64, Error> {
        let opened = self.opened(image, snapshot, false)?;
        let (size, _) = opened.stat()?;
        Ok(opened.differing(None, 0, size, false)?.iter().map(|(from, to)| to - from).sum())
    }

    /// What is noted at an image, or at a snapshot of it.
    ///
    /// # Errors
    /// What Ceph says.
    pub fn xattrs(
        &self,
        image: &str,
        snapshot: Option<&str>,
    ) -> Result<BTreeMap<String, String>, Error> {
        let opened = self.opened(image, snapshot, false)?;
        let prefix = format!("{}/", key_of(XATTR, &opened.id()?, snapshot));
        let all = opened.metadata()?.into_iter();
        Ok(all.filter_map(|(key, v)| Some((key.strip_prefix(&prefix)?.to_owned(), v))).collect())
    }

    /// Notes something at an image, or at a snapshot of it.
    ///
    /// # Errors
    /// What Ceph says.
    pub fn set_xattr(
        &self,
        image: &str,
        snapshot: Option<&str>,
        name: &str,
        value: &str,
    ) -> Result<(), Error> {
        if snapshot.is_some() {
            // It has to be there.
            self.opened(image, snapshot, false)?;
        }
        let xattrs = BTreeMap::from([(name.to_owned(), value.to_owned())]);
        self.opened(image, None, true)?.note(snapshot, &Notes { uuid: None, xattrs })
    }

    /// Removes a note; whether it was there.
    ///
    /// # Errors
    /// What Ceph says.
    pub fn remove_xattr(
        &self,
        image: &str,
        snapshot: Option<&str>,
        name: &str,
    ) -> Result<bool, Error> {
        let opened = self.opened(image, None, true)?;
        let key = key_of(XATTR, &opened.id()?, snapshot);
        opened.unset(&format!("{key}/{name}"))
    }
}

/// The key of metadata of ours, of an image or of a snapshot of it.
fn key_of(kind: &str, id: &str, snapshot: Option<&str>) -> String {
    match snapshot {
        Some(snapshot) => format!("{kind}.{id}@{snapshot}"),
        None => format!("{kind}.{id}"),
    }
}

/// Images that threads of this process delete: cluster, pool and identity.
static DELETING: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// One of [`DELETING`].
struct Alone(String);

impl Drop for Alone {
    fn drop(&mut self) {
        DELETING.lock().remove(&self.0);
    }
}

/// What an image or snapshot has from the beginning.
#[derive(Clone, Debug, Default)]
pub struct Notes {
    /// Identity, if it is not to be its own.
    pub uuid: Option<Uuid>,
    /// Anything, by name.
    pub xattrs: BTreeMap<String, String>,
}

impl Notes {
    fn is_empty(&self) -> bool {
        self.uuid.is_none() && self.xattrs.is_empty()
    }
}

/// Options of a new image.
struct Options(&'static Library, ImageOptions);

impl Options {
    fn new(library: &'static Library) -> Options {
        let mut options: ImageOptions = ptr::null_mut();
        // SAFETY: where the result is to be.
        unsafe { (library.rbd_image_options_create)(&mut options) };
        Options(library, options)
    }
}

impl Drop for Options {
    fn drop(&mut self) {
        // SAFETY: made above, and used by nobody.
        unsafe { (self.0.rbd_image_options_destroy)(self.1) };
    }
}

/// Ranges (begin and end) in order, those that touch as one.
fn merged(mut ranges: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    ranges.sort_unstable();
    let mut all: Vec<(u64, u64)> = Vec::with_capacity(ranges.len());
    for (from, to) in ranges {
        match all.last_mut() {
            Some((_, end)) if from <= *end => *end = to.max(*end),
            _ => all.push((from, to)),
        }
    }
    all
}

/// Called by librbd for each part that differs.
extern "C" fn differs(offset: u64, length: size_t, _there: c_int, found: *mut c_void) -> c_int {
    // SAFETY: the list that was given to `rbd_diff_iterate2`, which calls this one after the other.
    let found = unsafe { &*found.cast::<Mutex<Vec<(u64, u64)>>>() };
    found.lock().push((offset, offset + length as u64));
    0
}

impl Open<'_> {
    fn library(&self) -> &'static Library {
        self.pool.library()
    }

    fn path(&self) -> String {
        self.pool.path(self.name)
    }

    fn id(&self) -> Result<String, Error> {
        let mut id = [0 as c_char; 64];
        // SAFETY: an open image, and a buffer of that length.
        let told = unsafe { (self.library().rbd_get_id)(self.image, id.as_mut_ptr(), id.len()) };
        check(told, || format!("the identity of image {} is not told", self.path()))?;
        // SAFETY: zero-terminated by the call.
        Ok(unsafe { owned(id.as_ptr()) })
    }

    /// Identity of the image or of a snapshot of it: the one that it was given, or its own.
    fn uuid(&self, id: &str, snapshot: Option<&str>, metadata: &BTreeMap<String, String>) -> Uuid {
        let given = metadata.get(&key_of(UUID, id, snapshot));
        given.and_then(|given| Uuid::parse_str(given).ok()).unwrap_or_else(|| {
            let pool = self.pool.number();
            uuid_of(&self.pool.client.fsid, pool, id, snapshot.unwrap_or_default())
        })
    }

    /// Whether another client has it open to write; this one has.
    fn is_open_elsewhere(&self) -> Result<bool, Error> {
        Ok(self.watchers()?.len() > 1)
    }

    /// The clients that have it open to write, with this one.
    fn watchers(&self) -> Result<Vec<Watching>, Error> {
        // SAFETY: an open image.
        unsafe { watchers(self.library(), self.image, &self.path()) }
    }

    /// All metadata.
    fn metadata(&self) -> Result<BTreeMap<String, String>, Error> {
        let mut room = METADATA_ROOM;
        loop {
            let (mut keys, mut values) = (vec![0u8; room], vec![0u8; room]);
            let (mut keys_len, mut values_len) = (room, room);
            // SAFETY: an open image, an empty text, and buffers of those lengths.
            let told = unsafe {
                (self.library().rbd_metadata_list)(
                    self.image,
                    c"".as_ptr(),
                    0,
                    keys.as_mut_ptr().cast(),
                    &mut keys_len,
                    values.as_mut_ptr().cast(),
                    &mut values_len,
                )
            };
            if told == -libc::ERANGE && room < METADATA_MAX {
                room = (room * 2).max(keys_len).max(values_len).min(METADATA_MAX);
                continue;
            }
            check(told, || format!("the metadata of image {} is not told", self.path()))?;
            let all =
                texts(&keys[..keys_len.min(room)]).zip(texts(&values[..values_len.min(room)]));
            return Ok(all.collect());
        }
    }

    fn set(&self, key: &str, value: &str) -> Result<(), Error> {
        let (key_, value) = (text("the key", key)?, text("the value", value)?);
        // SAFETY: an open image and zero-terminated texts.
        let set =
            unsafe { (self.library().rbd_metadata_set)(self.image, key_.as_ptr(), value.as_ptr()) };
        check(set, || format!("metadata {key} of image {} cannot be set", self.path()))
    }

    /// Removes metadata; whether it was there.
    fn unset(&self, key: &str) -> Result<bool, Error> {
        let key_ = text("the key", key)?;
        // SAFETY: an open image and a zero-terminated text.
        let gone = unsafe { (self.library().rbd_metadata_remove)(self.image, key_.as_ptr()) };
        if gone == -libc::ENOENT {
            return Ok(false);
        }
        check(gone, || format!("metadata {key} of image {} cannot be removed", self.path()))?;
        Ok(true)
    }

    /// Notes something at the image, or at a snapshot of it.
    fn note(&self, snapshot: Option<&str>, notes: &Notes) -> Result<(), Error> {
        let id = self.id()?;
        if let Some(uuid) = notes.uuid {
            self.set(&key_of(UUID, &id, snapshot), &uuid.to_string())?;
        }
        let key = key_of(XATTR, &id, snapshot);
        notes.xattrs.iter().try_for_each(|(name, value)| self.set(&format!("{key}/{name}"), value))
    }

    /// Forgets what is noted at a snapshot.
    fn forget(&self, snapshot: &str) -> Result<(), Error> {
        let id = self.id()?;
        let uuid = key_of(UUID, &id, Some(snapshot));
        let mark = Open::mark_key(&id, snapshot);
        let xattrs = format!("{}/", key_of(XATTR, &id, Some(snapshot)));
        let mut all = self.metadata()?.into_keys();
        all.try_for_each(|key| match key == uuid || key == mark || key.starts_with(&xattrs) {
            true => self.unset(&key).map(drop),
            false => Ok(()),
        })
    }

    /// Size and object size, in bytes.
    fn stat(&self) -> Result<(u64, u64), Error> {
        let mut info = ImageInfo::NONE;
        // SAFETY: an open image, and room for what is told, of that size.
        let told =
            unsafe { (self.library().rbd_stat)(self.image, &mut info, size_of::<ImageInfo>()) };
        check(told, || format!("the size of image {} is not told", self.path()))?;
        Ok((info.size, info.object_size))
    }

    /// The image with its snapshots, by the oldest; clones are not looked for.
    fn volumes(&self, id: &str) -> Result<Vec<Volume>, Error> {
        let (size, object_size) = self.stat()?;
        let parent = self.parent()?;
        let is_clone = parent.is_some();
        let mut before = parent.flatten();
        let fast = self.knows_objects()?;
        let metadata = self.metadata()?;
        let volume = |snapshot: Option<String>, size, parent, allocated| Volume {
            image: self.name.to_owned(),
            uuid: self.uuid(id, snapshot.as_deref(), &metadata),
            snapshot,
            size,
            object_size,
            allocated,
            parent,
            is_clone,
            clones: Vec::new(),
        };
        let mut snapshots = Vec::new();
        for (name, size) in self.snapshots()? {
            if self.is_half(&metadata, id, &name)? {
                continue;
            }
            let allocated = match fast {
                true => match self.pool.allocated(self.name, Some(&name)) {
                    // It has just been deleted.
                    Err(why) if why.errno() == libc::ENOENT => continue,
                    allocated => allocated?,
                },
                false => size,
            };
            let next = format!("{}@{name}", self.name);
            snapshots.push(volume(Some(name), size, before.replace(next), allocated));
        }
        let own = match fast {
            true => self.differing(None, 0, size, false)?.iter().map(|(from, to)| to - from).sum(),
            false => size,
        };
        let mut all = vec![volume(None, size, before, own)];
        all.append(&mut snapshots);
        Ok(all)
    }

    fn features(&self) -> Result<u64, Error> {
        let mut features = 0;
        // SAFETY: an open image, and where the result is to be.
        let told = unsafe { (self.library().rbd_get_features)(self.image, &mut features) };
        check(told, || format!("the features of image {} are not told", self.path()))?;
        Ok(features)
    }

    /// Whether one client at a time can have it.
    fn is_lockable(&self) -> Result<bool, Error> {
        Ok(self.features()? & FEATURE_EXCLUSIVE_LOCK != 0)
    }

    /// Whether the cluster knows which objects there are without looking for each.
    fn knows_objects(&self) -> Result<bool, Error> {
        let (features, mut flags) = (self.features()?, 0);
        // SAFETY: as above.
        let told = unsafe { (self.library().rbd_get_flags)(self.image, &mut flags) };
        check(told, || format!("the flags of image {} are not told", self.path()))?;
        Ok(features & FEATURE_FAST_DIFF != 0 && flags & FLAG_FAST_DIFF_INVALID == 0)
    }

    /// Names and sizes of the snapshots that people took, the oldest first.
    fn snapshots(&self) -> Result<Vec<(String, u64)>, Error> {
        let mut found = self.all_snapshots()?;
        found.retain(|(id, ..)| self.is_of_users(*id));
        Ok(found.into_iter().map(|(_, name, size)| (name, size)).collect())
    }

    /// Numbers, names and sizes of all snapshots, the oldest first.
    fn all_snapshots(&self) -> Result<Vec<(u64, String, u64)>, Error> {
        let library = self.library();
        let none = SnapInfo { id: 0, size: 0, name: ptr::null() };
        let mut room = SOME;
        loop {
            let mut infos = vec![none; room];
            let mut count = c_int::try_from(room).unwrap_or(c_int::MAX);
            // SAFETY: an open image, and room for that many.
            let told =
                unsafe { (library.rbd_snap_list)(self.image, infos.as_mut_ptr(), &mut count) };
            if told == -libc::ERANGE {
                room = usize::try_from(count).unwrap_or(room) + SOME;
                continue;
            }
            check(told, || format!("the snapshots of image {} are not told", self.path()))?;
            let of = &infos[..usize::try_from(told).unwrap_or(0).min(room)];
            // SAFETY: zero-terminated texts, ours until they are given back.
            let found = of.iter().map(|info| (info.id, unsafe { owned(info.name) }, info.size));
            let mut found: Vec<_> = found.collect();
            if !found.is_empty() {
                // SAFETY: those of the call above, once; they end with one without a name.
                unsafe { (library.rbd_snap_list_end)(infos.as_mut_ptr()) };
            }
            found.sort_unstable();
            return Ok(found);
        }
    }

    /// Whether a snapshot is one by its name; others are deleted, but have clones, or are a group's or mirror's.
    fn is_of_users(&self, id: u64) -> bool {
        let mut kind = -1;
        // SAFETY: an open image, and where the result is to be.
        let told =
            unsafe { (self.library().rbd_snap_get_namespace_type)(self.image, id, &mut kind) };
        told >= 0 && kind == SNAPSHOT_OF_USERS
    }

    /// The snapshot whose clone it is; within, `IMAGE@SNAPSHOT` if that is in the same pool, and not deleted.
    fn parent(&self) -> Result<Option<Option<String>>, Error> {
        let library = self.library();
        let (mut image, mut snapshot) = (none(), SnapSpec::NONE);
        // SAFETY: an open image, and where the results are to be.
        let told = unsafe { (library.rbd_get_parent)(self.image, &mut image, &mut snapshot) };
        if told == -libc::ENOENT {
            return Ok(None);
        }
        check(told, || format!("the parent of image {} is not told", self.path()))?;
        // SAFETY: zero-terminated texts, ours until they are given back.
        let (name, of) = unsafe { (owned(image.image_name), owned(snapshot.name)) };
        let here = self.is_here(&image) && snapshot.kind == SNAPSHOT_OF_USERS;
        // SAFETY: those of the call above, once.
        unsafe {
            (library.rbd_linked_image_spec_cleanup)(&mut image);
            (library.rbd_snap_spec_cleanup)(&mut snapshot);
        }
        Ok(Some(here.then(|| format!("{name}@{of}"))))
    }

    /// Whether a linked image is in the same pool, and no waste.
    fn is_here(&self, image: &LinkedImage) -> bool {
        let (pool, namespace) = self.pool.number();
        // SAFETY: zero-terminated, or null.
        let its = unsafe { owned(image.pool_namespace) };
        image.pool_id == pool && its == namespace && !image.trash
    }

    /// Names of the clones of the snapshot that is open, those of other pools with their pool.
    fn children(&self) -> Result<Vec<String>, Error> {
        let library = self.library();
        let mut images = vec![none(); SOME];
        loop {
            let mut count = images.len();
            // SAFETY: an image that is open at a snapshot, and room for that many.
            let told = unsafe {
                (library.rbd_list_children3)(self.image, images.as_mut_ptr(), &mut count)
            };
            if told == -libc::ERANGE {
                images.resize(count + SOME, none());
                continue;
            }
            check(told, || format!("the clones of image {} are not told", self.path()))?;
            let of = &images[..count.min(images.len())];
            let name = |image: &LinkedImage| {
                // SAFETY: zero-terminated texts, ours until they are given back.
                let (pool, name) = unsafe { (owned(image.pool_name), owned(image.image_name)) };
                if self.is_here(image) { name } else { format!("{pool}/{name}") }
            };
            let names = of.iter().map(name).collect();
            // SAFETY: those of the call above, once.
            unsafe { (library.rbd_linked_image_spec_list_cleanup)(images.as_mut_ptr(), count) };
            return Ok(names);
        }
    }

    /// Whole objects (begin and end) that differ from a snapshot, or that there are, with those of what it is a
    /// clone of if `inherited`.
    fn differing(
        &self,
        since: Option<&str>,
        offset: u64,
        length: u64,
        inherited: bool,
    ) -> Result<Vec<(u64, u64)>, Error> {
        let since_: Option<CString> =
            since.map(|name| text("the snapshot's name", name)).transpose()?;
        let found: Mutex<Vec<(u64, u64)>> = Mutex::default();
        // SAFETY: an open image, a zero-terminated text or null, and a list that outlives the call.
        let told = unsafe {
            (self.library().rbd_diff_iterate2)(
                self.image,
                since_.as_ref().map_or(ptr::null(), |since| since.as_ptr()),
                offset,
                length,
                u8::from(inherited),
                1,
                differs,
                (&raw const found).cast_mut().cast(),
            )
        };
        match since {
            Some(since) if told == -libc::ENOENT => Err(failed(
                format!("image {} has no snapshot {since} before it", self.path()),
                told,
            )),
            _ => check(told, || format!("what image {} has is not told", self.path()))
                .map(|()| found.into_inner()),
        }
    }
}

const fn none() -> LinkedImage {
    LinkedImage {
        pool_id: -1,
        pool_name: ptr::null_mut(),
        pool_namespace: ptr::null_mut(),
        image_id: ptr::null_mut(),
        image_name: ptr::null_mut(),
        trash: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_that_touch_are_one() {
        let all = vec![(8, 12), (0, 4), (4, 8), (16, 20), (18, 19)];
        assert_eq!(merged(all), [(0, 12), (16, 20)]);
        assert!(merged(Vec::new()).is_empty());
    }

    #[test]
    fn texts_of_a_buffer_each_end_with_a_zero() {
        let all = |buffer: &[u8]| texts(buffer).collect::<Vec<_>>();
        assert_eq!(all(b"a\0\0bc\0"), ["a", "", "bc"]);
        assert!(all(b"").is_empty());
    }
}
