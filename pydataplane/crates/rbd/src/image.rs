//! An open image: its lock, its size, its end.
//!
//! All of it is for threads that may wait: each call asks the cluster. What a reactor does is in
//! `channel`.

use std::ffi::CStr;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Weak};
use std::time::Duration;

use bdev::{Closed, GuestEvent, Registry};
use libc::{c_char, c_int, c_void};
use parking_lot::Mutex;
use uuid::Uuid;

use crate::Error;
use crate::calls::{check, failed, spawn, text};
use crate::close;
use crate::cluster::{Client, Cluster, News};
use crate::ffi::{EBLOCKLISTED, FEATURE_EXCLUSIVE_LOCK, ImageHandle, ImageInfo, IoCtx, Library};
use crate::generation::{self, Origin};
use crate::hold::{Hold, Wish};
use crate::kind::{Entry, Kind, OpenImage};
use crate::lock::Lock;
use crate::pool::rollback::ROLLBACK;
use crate::watchers::watchers;

/// Longest identity of an image, in bytes.
const ID_MAX: usize = 64;
/// The key of the image's metadata that says who had it locked last: another value for each bdev that has it.
const GENERATION: &CStr = c"virtlun.generation";
/// What Ceph answers where there is no room for a value.
const RANGE: c_int = -libc::ERANGE;
/// Longest value of it, in bytes.
pub(crate) const GENERATION_MAX: usize = 64;

/// Which image, and for whom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Pool, or `POOL/NAMESPACE`.
    pub pool: String,
    /// Name of the image, or `IMAGE@SNAPSHOT`, which is read-only.
    pub image: String,
    /// Only to be read.
    pub read_only: bool,
    /// Other clients may write to it, too; else it is locked for this one.
    pub shared: bool,
    /// It is for a guest that comes from another host, which has the image locked until the guest runs here.
    pub incoming: bool,
    /// Only guests use it, who wait where another host has it still when a later process goes on.
    pub for_guests: bool,
    /// What says in the image that it is had here, of an earlier process that had it; `None`: something new.
    pub generation: Option<String>,
    /// Id of this host's boot, a UUID.
    pub boot: String,
}

impl Source {
    /// Pool and name, as Ceph's commands take them.
    pub fn path(&self) -> String {
        format!("{}/{}", self.pool, self.image)
    }

    fn pool_and_namespace(&self) -> (&str, &str) {
        self.pool.split_once('/').unwrap_or((&self.pool, ""))
    }

    fn name_and_snapshot(&self) -> (&str, Option<&str>) {
        match self.image.split_once('@') {
            Some((name, snapshot)) => (name, Some(snapshot)),
            None => (&self.image, None),
        }
    }

    /// Whether one client at a time has it.
    fn is_locked(&self) -> bool {
        self.is_written() && !self.shared
    }

    fn is_written(&self) -> bool {
        !self.read_only && self.name_and_snapshot().1.is_none()
    }
}

/// An image that is open, but not locked. Closed on a thread of its own when it is dropped.
pub struct OpenedImage {
    cluster: Arc<Cluster>,
    client: Arc<Client>,
    library: &'static Library,
    source: Source,
    io: IoCtx,
    image: ImageHandle,
    /// What the image's metadata says of who has it, when that is this one.
    own: String,
    /// What it says as long as nobody else has had it.
    seen: Mutex<Option<String>>,
    /// What to take back before it is closed.
    watch: Mutex<Option<Watch>>,
    /// What to give back when it is: that it is written to, and how.
    entry: Mutex<Option<Entry>>,
    closing: Closed,
    fsid: Uuid,
    discard_granularity: u64,
}

/// What the image's metadata said before it was locked.
pub(crate) struct Before(Option<String>);

/// What becomes of an image that one client at a time has.
enum Begun {
    /// It is locked.
    Locked,
    /// It is for a guest that waits for another host to let go of it.
    Waits,
    /// A host has had it since an earlier process had it here: it is not to be used.
    Overtaken(Error),
}

/// What librbd tells changes of the header to.
struct Watch {
    handle: u64,
    told: *mut Told,
}

/// What the callback gets.
struct Told {
    image: Weak<Image>,
    news: Sender<News>,
}

// SAFETY: librbd is thread-safe; the pointers are used through it alone, and `told` after the last callback.
unsafe impl Send for OpenedImage {}
// SAFETY: as above.
unsafe impl Sync for OpenedImage {}

impl OpenedImage {
    /// Opens an image, which others may have open and locked.
    ///
    /// # Errors
    /// Why not, with what to do.
    pub fn open(cluster: &Arc<Cluster>, source: Source) -> Result<OpenedImage, Error> {
        let client = cluster.client(Duration::MAX)?;
        let Client { library, rados, fsid, discard_granularity, .. } = *client;
        let (pool, namespace) = source.pool_and_namespace();
        let (name, snapshot) = source.name_and_snapshot();
        let (pool_, name) = (text("the pool's name", pool)?, text("the image's name", name)?);
        let namespace = text("the namespace", namespace)?;
        let snapshot =
            snapshot.map(|snapshot| text("the snapshot's name", snapshot)).transpose()?;
        let mut io: IoCtx = ptr::null_mut();
        // SAFETY: a connected client, a zero-terminated text, and where the result is to be.
        let made = unsafe { (library.rados_ioctx_create)(rados, pool_.as_ptr(), &mut io) };
        check(made, || {
            format!(
                "pool {pool} of cluster {} cannot be used: `ceph osd lspools` lists them",
                cluster.name()
            )
        })?;
        // SAFETY: made above, not used yet.
        unsafe { (library.rados_ioctx_set_namespace)(io, namespace.as_ptr()) };
        // A write that there is no room for ends with an error, which is told; else it would just wait.
        // SAFETY: as above; images of it take that over.
        unsafe { (library.rados_set_pool_full_try)(io) };
        let mut image: ImageHandle = ptr::null_mut();
        let at = snapshot.as_ref().map_or(ptr::null(), |snapshot| snapshot.as_ptr());
        let open = if source.is_written() { library.rbd_open } else { library.rbd_open_read_only };
        // SAFETY: a pool of a connected client, zero-terminated texts or null, and where the result is to be.
        let opened = unsafe { open(io, name.as_ptr(), &mut image, at) };
        if opened < 0 {
            // SAFETY: made above, and used by nobody.
            unsafe { (library.rados_ioctx_destroy)(io) };
            if opened == -EBLOCKLISTED {
                cluster.renew(&client);
            }
            return Err(failed(format!("image {} cannot be opened", source.path()), opened));
        }
        let own = source.generation.clone().unwrap_or_else(|| generation::locked(&source.boot));
        Ok(OpenedImage {
            cluster: Arc::clone(cluster),
            client,
            library,
            source,
            io,
            image,
            own,
            seen: Mutex::default(),
            watch: Mutex::default(),
            entry: Mutex::default(),
            closing: Closed::default(),
            fsid,
            discard_granularity,
        })
    }

    /// Which image.
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// Sees that one client at a time can have it.
    fn check_lockable(&self) -> Result<(), Error> {
        let image = self.source.path();
        let mut features = 0;
        // SAFETY: an open image, and where the result is to be.
        let told = unsafe { (self.library.rbd_get_features)(self.image, &mut features) };
        check(told, || format!("the features of image {image} are not told"))?;
        if features & FEATURE_EXCLUSIVE_LOCK == 0 { Err(Error::NoLock { image }) } else { Ok(()) }
    }

    /// Notes at the image how it is written to from now on, if that is not noted already.
    fn enter(&self, kind: Kind) -> Result<(), Error> {
        let mut entry = self.entry.lock();
        if entry.is_none() {
            *entry = Some(self.open_image()?.enter(kind)?);
        }
        Ok(())
    }

    /// It is not written to any more, though it stays open.
    fn leave(&self) {
        if let Some(entry) = self.entry.lock().take() {
            // SAFETY: the pool of the open image.
            unsafe { entry.give_back(self.library, self.io) };
        }
    }

    fn open_image(&self) -> Result<OpenImage<'_>, Error> {
        let OpenedImage { cluster, client, io, image, source, .. } = self;
        let (id, path) = (self.id()?, source.path());
        Ok(OpenImage { cluster, client, io: *io, image: *image, id, path })
    }

    /// Shares it with other hosts. Who had it alone before is not to go on with what he knew of it.
    fn share(&self) -> Result<(), Error> {
        self.check_not_rolling_back()?;
        self.enter(Kind::Shared)?;
        let is_noted = self.generation()?.as_deref() == Some(generation::SHARED);
        // An older target may have it alone.
        if is_noted || self.open_image()?.is_locked_by_others()? {
            return Ok(());
        }
        // The note takes the lock, for which a process that was killed would not answer.
        self.exclusive().take_from_past()?;
        self.set_generation(generation::SHARED)
    }

    /// Locks it for whoever begins to use it, or goes on after this target's process before, if it may be.
    fn begin(&mut self) -> Result<Begun, Error> {
        self.check_lockable()?;
        match self.source.generation.as_deref().map(|own| Origin::of(own, &self.source.boot)) {
            None if self.source.incoming => {
                self.enter(Kind::Alone)?;
                let seen = self.generation()?;
                self.own = generation::waiting(seen.as_deref(), &self.source.boot);
                *self.seen.lock() = seen;
                Ok(Begun::Waits)
            }
            None => self.lock_anew(),
            Some(Origin::Unknown) => self.go_on_unknown(),
            Some(Origin::Gone) => {
                self.own = generation::locked(&self.source.boot);
                self.lock_anew()
            }
            Some(Origin::Locked) => self.go_on(),
            Some(Origin::Waited) => {
                let seen = self.generation()?;
                if !generation::waited_for(&self.own, seen.as_deref()) {
                    return self.go_on();
                }
                *self.seen.lock() = seen;
                match self.enter(Kind::Alone) {
                    Ok(()) => Ok(Begun::Waits),
                    Err(why @ Error::Shared { .. }) => Ok(self.shared_meanwhile(&why)),
                    Err(why) => Err(why),
                }
            }
        }
    }

    /// Locks it, whoever has had it before.
    fn lock_anew(&self) -> Result<Begun, Error> {
        self.check_not_rolling_back()?;
        self.lock()?;
        self.begin_generation().map(|()| Begun::Locked)
    }

    /// Locks it after an older target that had it, as that would: also beside one that shares it, if that has not noted
    /// it. A guest that runs is not to lose its disk for one that never could write to it.
    fn go_on_unknown(&self) -> Result<Begun, Error> {
        match self.lock_anew() {
            Err(why @ Error::Shared { .. }) => {
                if self.generation()?.as_deref() == Some(generation::SHARED) {
                    return Err(why);
                }
                tracing::error!("{why}: it cannot write to it, so take the image from it");
                self.exclusive().acquire()?;
                self.begin_generation().map(|()| Begun::Locked)
            }
            begun => begun,
        }
    }

    /// What becomes of it where another host shares it that has come since a process before had it: that may write to it,
    /// also if it has not noted so.
    fn shared_meanwhile(&self, why: &Error) -> Begun {
        tracing::error!("{why}");
        Begun::Overtaken(Error::Overtaken { image: self.source.path() })
    }

    /// Locks it again after a process before that had it locked, unless somebody else has had it since.
    fn go_on(&self) -> Result<Begun, Error> {
        *self.seen.lock() = Some(self.own.clone());
        match self.lock_again() {
            Ok(_) => Ok(Begun::Locked),
            Err(why @ Error::Overtaken { .. }) => Ok(Begun::Overtaken(why)),
            Err(why @ Error::Shared { .. }) => Ok(self.shared_meanwhile(&why)),
            Err(Error::Locked { .. }) if self.source.for_guests => {
                // The same says it still where its guest is about to go on there, or here again.
                Ok(match self.generation()?.as_deref() == Some(&self.own) {
                    true => Begun::Waits,
                    false => Begun::Overtaken(Error::Overtaken { image: self.source.path() }),
                })
            }
            Err(why) => Err(why),
        }
    }

    /// Locks it for a guest that had it here, or that comes from whoever had it when it was opened.
    ///
    /// # Errors
    /// [`Error::Overtaken`]: somebody else had it meanwhile. Whatever it is, it is not locked.
    pub(crate) fn lock_again(&self) -> Result<Before, Error> {
        self.lock()?;
        let before = Before(self.seen.lock().clone());
        let begun = self.generation().and_then(|now| match now == before.0 {
            true => self.begin_generation(),
            false => Err(Error::Overtaken { image: self.source.path() }),
        });
        begun.inspect_err(|_| _ = self.unlock()).map(|()| before)
    }

    /// It was locked, but not used: to be unlocked as if it had not been.
    pub(crate) fn take_back(&self, Before(before): Before) -> Result<(), Error> {
        match &before {
            Some(generation) => self.set_generation(generation)?,
            None => {
                // SAFETY: an open image and a zero-terminated text.
                let gone =
                    unsafe { (self.library.rbd_metadata_remove)(self.image, GENERATION.as_ptr()) };
                check(gone, || format!("a note of image {} stays", self.source.path()))?;
            }
        }
        *self.seen.lock() = before;
        Ok(())
    }

    /// Who had it locked last.
    fn generation(&self) -> Result<Option<String>, Error> {
        let mut value = [0 as c_char; GENERATION_MAX];
        let mut len = value.len();
        // SAFETY: an open image, a zero-terminated text, and a buffer of that length.
        let told = unsafe {
            (self.library.rbd_metadata_get)(
                self.image,
                GENERATION.as_ptr(),
                value.as_mut_ptr(),
                &mut len,
            )
        };
        if told == -libc::ENOENT {
            return Ok(None);
        }
        check(told, || format!("who had image {} last is not told", self.source.path()))?;
        // SAFETY: zero-terminated by the call.
        let value = unsafe { CStr::from_ptr(value.as_ptr()) };
        Ok(Some(value.to_string_lossy().into_owned()))
    }

    /// Says in the image that this client has it now; it is locked.
    fn begin_generation(&self) -> Result<(), Error> {
        if self.generation()?.as_deref() != Some(&self.own) {
            self.set_generation(&self.own)?;
        }
        *self.seen.lock() = Some(self.own.clone());
        Ok(())
    }

    fn set_generation(&self, generation: &str) -> Result<(), Error> {
        let value = text("the generation", generation)?;
        // SAFETY: an open image and zero-terminated texts.
        let set = unsafe {
            (self.library.rbd_metadata_set)(self.image, GENERATION.as_ptr(), value.as_ptr())
        };
        check(set, || format!("who has image {} cannot be noted in it", self.source.path()))
    }

    /// Waits until nobody else writes to it, and nobody can from then on.
    fn lock(&self) -> Result<(), Error> {
        self.enter(Kind::Alone)?;
        self.exclusive().acquire()
    }

    fn exclusive(&self) -> Lock<'_> {
        let OpenedImage { cluster, client, image, source, .. } = self;
        Lock { cluster, client, image: *image, path: source.path() }
    }

    /// Addresses of the clients that have it locked, as far as that is told.
    pub(crate) fn lock_owners(&self) -> Vec<String> {
        self.owners().unwrap_or_default()
    }

    /// Addresses of the clients that have it locked.
    pub(crate) fn owners(&self) -> Result<Vec<String>, Error> {
        self.exclusive().owners()
    }

    /// Lets others have the lock.
    pub(crate) fn unlock(&self) -> Result<(), Error> {
        self.exclusive().release()
    }

    /// Whether another client has it open to write to it.
    pub(crate) fn is_open_elsewhere(&self) -> Result<bool, Error> {
        // SAFETY: a connected client.
        let own = unsafe { (self.library.rados_get_instance_id)(self.client.rados) };
        // SAFETY: an open image.
        let clients = unsafe { watchers(self.library, self.image, &self.source.path()) }?;
        Ok(clients.into_iter().any(|each| each.client != own))
    }

    /// Size and object size, in bytes.
    fn stat(&self) -> Result<(u64, u64), Error> {
        let mut info = ImageInfo::NONE;
        // SAFETY: an open image, and room for what is told, of that size.
        let told =
            unsafe { (self.library.rbd_stat)(self.image, &mut info, size_of::<ImageInfo>()) };
        check(told, || format!("the size of image {} is not told", self.source.path()))?;
        Ok((info.size, info.object_size))
    }

    /// What Ceph knows the image by.
    fn id(&self) -> Result<String, Error> {
        let mut id = [0 as c_char; ID_MAX];
        // SAFETY: an open image, and a buffer of that length.
        let told = unsafe { (self.library.rbd_get_id)(self.image, id.as_mut_ptr(), id.len()) };
        check(told, || format!("the identity of image {} is not told", self.source.path()))?;
        // SAFETY: zero-terminated by the call.
        Ok(unsafe { CStr::from_ptr(id.as_ptr()) }.to_string_lossy().into_owned())
    }

    /// Refuses an image that is neither as it was nor as its snapshot; it is locked, or shared.
    fn check_not_rolling_back(&self) -> Result<(), Error> {
        if self.source.name_and_snapshot().1.is_some() {
            return Ok(());
        }
        let key = text("a key", &format!("{ROLLBACK}.{}", self.id()?))?;
        let mut len = 0;
        // SAFETY: an open image, a zero-terminated text, and no room for a value.
        let told = unsafe {
            (self.library.rbd_metadata_get)(self.image, key.as_ptr(), ptr::null_mut(), &mut len)
        };
        match told {
            0.. | RANGE => Err(Error::RollingBack { image: self.source.path() }),
            _ if told == -libc::ENOENT => Ok(()),
            _ => {
                check(told, || format!("whether image {} is whole is not told", self.source.path()))
            }
        }
    }

    /// Identity of the image: the same on every host.
    fn uuid(&self) -> Result<Uuid, Error> {
        // SAFETY: the pool of the open image.
        let pool = unsafe { (self.library.rados_ioctx_get_id)(self.io) };
        let id = self.id()?;
        let namespace = self.source.pool_and_namespace().1;
        let snapshot = self.source.name_and_snapshot().1.unwrap_or_default();
        Ok(uuid_of(&self.fsid, (pool, namespace), &id, snapshot))
    }

    fn close(
        library: &Library,
        (image, io): (ImageHandle, IoCtx),
        (watch, entry): (Option<Watch>, Option<Entry>),
    ) {
        if let Some(Watch { handle, told }) = watch {
            // SAFETY: an open image and its watch; it waits for a callback that runs.
            unsafe { (library.rbd_update_unwatch)(image, handle) };
            // SAFETY: made by `Box::into_raw`, and no callback has it any more.
            drop(unsafe { Box::from_raw(told) });
        }
        // SAFETY: the image is of that pool, and used by nobody any more.
        unsafe { close::close(library, io, image) };
        if let Some(entry) = entry {
            // SAFETY: that of the image.
            unsafe { entry.give_back(library, io) };
        }
        // SAFETY: nor is its pool.
        unsafe { (library.rados_ioctx_destroy)(io) };
    }
}

/// Identity of an image, or of a snapshot of it, by that of the cluster, its pool (number and namespace) and
/// its own: the same on every host.
pub(crate) fn uuid_of(fsid: &Uuid, pool: (i64, &str), id: &str, snapshot: &str) -> Uuid {
    let (pool, namespace) = pool;
    Uuid::new_v5(fsid, format!("{pool}/{namespace}/{id}@{snapshot}").as_bytes())
}

impl Drop for OpenedImage {
    fn drop(&mut self) {
        struct Parts(&'static Library, (ImageHandle, IoCtx), (Option<Watch>, Option<Entry>));
        // SAFETY: librbd is thread-safe, and nobody else has them any more.
        unsafe impl Send for Parts {}
        let held = (self.watch.lock().take(), self.entry.lock().take());
        let parts = Parts(self.library, (self.image, self.io), held);
        // The client stays until the image is closed, which a cluster that does not answer delays.
        let (client, closing) = (Arc::clone(&self.client), self.closing.clone());
        let cluster = Arc::clone(&self.cluster);
        let closed = spawn("rbd close", move || {
            let parts = parts;
            let Parts(library, handles, held) = parts;
            OpenedImage::close(library, handles, held);
            drop((client, cluster));
            closing.tell();
        });
        if let Err(why) = closed {
            tracing::error!("image {} stays open: {why}", self.source.path());
        }
    }
}

/// An image in use by a bdev.
pub(crate) struct Image {
    opened: OpenedImage,
    /// Name of the bdev.
    bdev: String,
    registry: Registry,
    block_size: u32,
    num_blocks: AtomicU64,
    object_size: u64,
    uuid: Uuid,
    /// The cluster does not serve this client any more, or somebody else had the image meanwhile.
    fenced: AtomicBool,
    pub(crate) hold: Hold,
    news: Sender<News>,
    /// To who has its lock seen to.
    locks: Sender<Weak<Image>>,
    this: Weak<Image>,
}

impl Image {
    /// Takes an open image into use: locks it, unless it is shared, only read, or for a guest that is still to
    /// come, and looks at its size from then on. One that somebody else had since an earlier process had it here is
    /// not served.
    ///
    /// # Errors
    /// Why not, with what to do; also where it is to be shared, and another host has it alone, or the other way round.
    pub(crate) fn new(
        mut opened: OpenedImage,
        registry: &Registry,
        bdev: &str,
        block_size: u32,
    ) -> Result<Arc<Image>, Error> {
        let begun = match opened.source.is_locked() {
            true => Some(opened.begin()?),
            false if opened.source.is_written() => opened.share().map(|()| None)?,
            false => None,
        };
        let is_usable = matches!(begun, None | Some(Begun::Locked));
        // A guest that comes from another host has it open there.
        if is_usable {
            opened.check_not_rolling_back()?;
        }
        let ((bytes, object_size), uuid) = (opened.stat()?, opened.uuid()?);
        let (news, locks) = (opened.cluster.news()?, opened.cluster.locks()?);
        let image = Arc::new_cyclic(|this| Image {
            opened,
            bdev: bdev.to_owned(),
            registry: registry.clone(),
            block_size,
            num_blocks: AtomicU64::new(bytes / u64::from(block_size)),
            object_size,
            uuid,
            fenced: AtomicBool::new(false),
            hold: Hold::new(is_usable),
            news,
            locks,
            this: this.clone(),
        });
        image.watch()?;
        image.cluster().look_after(image.this.clone())?;
        // It may have changed before it was watched.
        image.look_again();
        match begun {
            Some(Begun::Waits) => image.wish(Wish::Inherit),
            Some(Begun::Overtaken(why)) => image.overtaken(&why),
            None | Some(Begun::Locked) => {}
        }
        Ok(image)
    }

    fn watch(&self) -> Result<(), Error> {
        let told = Told { image: self.this.clone(), news: self.news.clone() };
        let told = Box::into_raw(Box::new(told));
        let mut handle = 0;
        let OpenedImage { library, image, .. } = self.opened;
        // SAFETY: an open image; `told` stays until the watch is taken back.
        let watched =
            unsafe { (library.rbd_update_watch)(image, &mut handle, changed, told.cast()) };
        if watched < 0 {
            // SAFETY: of `Box::into_raw`, and nobody has it.
            drop(unsafe { Box::from_raw(told) });
            let path = self.opened.source.path();
            return Err(failed(format!("image {path} cannot be watched"), watched));
        }
        *self.opened.watch.lock() = Some(Watch { handle, told });
        Ok(())
    }

    pub(crate) fn library(&self) -> &'static Library {
        self.opened.library
    }

    pub(crate) fn handle(&self) -> ImageHandle {
        self.opened.image
    }

    pub(crate) fn source(&self) -> &Source {
        &self.opened.source
    }

    pub(crate) fn opened(&self) -> &OpenedImage {
        &self.opened
    }

    /// Whether it is locked for this host; `None`: nobody locks it.
    pub(crate) fn is_locked(&self) -> Option<bool> {
        self.source().is_locked().then(|| self.hold.is_held())
    }

    /// The lock follows the guest.
    pub(crate) fn on_guest(&self, event: GuestEvent) {
        match event {
            _ if !self.source().is_locked() => {}
            GuestEvent::Runs => self.wish(Wish::Take),
            GuestEvent::Leaves => self.wish(Wish::LetGo),
            GuestEvent::Gone => self.hold.give_up(),
        }
    }

    /// Has the lock taken or let go.
    pub(crate) fn wish(&self, wish: Wish) {
        if !self.is_fenced() && self.hold.wish(wish) {
            _ = self.locks.send(self.this.clone());
        }
    }

    pub(crate) fn generation(&self) -> &str {
        &self.opened.own
    }

    pub(crate) fn cluster(&self) -> &Arc<Cluster> {
        &self.opened.cluster
    }

    pub(crate) fn block_size(&self) -> u32 {
        self.block_size
    }

    pub(crate) fn num_blocks(&self) -> u64 {
        self.num_blocks.load(Ordering::Relaxed)
    }

    pub(crate) fn object_size(&self) -> u64 {
        self.object_size
    }

    pub(crate) fn discard_granularity(&self) -> u64 {
        self.opened.discard_granularity
    }

    pub(crate) fn uuid(&self) -> Uuid {
        self.uuid
    }

    pub(crate) fn is_written(&self) -> bool {
        self.opened.source.is_written()
    }

    pub(crate) fn closing(&self) -> Closed {
        self.opened.closing.clone()
    }

    #[inline]
    pub(crate) fn is_fenced(&self) -> bool {
        self.fenced.load(Ordering::Relaxed)
    }

    /// The cluster answered that it does not serve this client any more.
    #[cold]
    pub(crate) fn fence(&self) {
        if !self.fenced.swap(true, Ordering::Relaxed) {
            _ = self.news.send(News::Fenced(self.this.clone()));
        }
    }

    /// Somebody else had the image while a guest was to have it here: it is not served any more.
    pub(crate) fn overtaken(&self, why: &Error) {
        if !self.fenced.swap(true, Ordering::Relaxed) {
            tracing::error!("bdev {}: {why}", self.bdev);
        }
        self.hold.give_up();
        self.opened.leave();
    }

    /// Tells that it is fenced, and has others opened by a new client.
    pub(crate) fn leave_client(&self) {
        self.opened.cluster.renew(&self.opened.client);
        tracing::error!(
            "bdev {}: the cluster {} has fenced this host, so image {} is not served any more: when \
             nothing else writes to it, delete the bdev and create it again",
            self.bdev,
            self.cluster().name(),
            self.source().path()
        );
    }

    /// Takes over the size that the image has now, and tells of it.
    pub(crate) fn look_again(&self) {
        let mut bytes = 0;
        // SAFETY: an open image, and where the result is to be.
        let told = unsafe { (self.library().rbd_get_size)(self.handle(), &mut bytes) };
        if told < 0 {
            let why =
                failed(format!("the size of image {} is not told", self.source().path()), told);
            tracing::warn!("{why}");
            return;
        }
        let blocks = bytes / u64::from(self.block_size);
        if self.num_blocks.swap(blocks, Ordering::Relaxed) != blocks {
            tracing::debug!(bdev = self.bdev, blocks, "resized");
            self.registry.notify_resized(&self.bdev);
        }
    }

    /// Changes the size of the image.
    pub(crate) fn resize(&self, bytes: u64) -> Result<(), Error> {
        // SAFETY: an open image.
        let resized = unsafe { (self.library().rbd_resize)(self.handle(), bytes) };
        check(resized, || format!("image {} cannot be resized", self.source().path()))?;
        self.look_again();
        Ok(())
    }
}

/// Called by librbd when an image's header has changed. It must not call librbd.
extern "C" fn changed(told: *mut c_void) {
    // SAFETY: what was given to `rbd_update_watch`, which stays until no callback runs any more.
    let Told { image, news } = unsafe { &*told.cast::<Told>() };
    _ = news.send(News::Changed(image.clone()));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(pool: &str, image: &str) -> Source {
        Source {
            pool: pool.to_owned(),
            image: image.to_owned(),
            read_only: false,
            shared: false,
            incoming: false,
            for_guests: false,
            generation: None,
            boot: String::new(),
        }
    }

    #[test]
    fn a_pool_may_have_a_namespace_and_an_image_a_snapshot_which_is_read_only() {
        let plain = source("vms", "data");
        assert_eq!(
            (plain.pool_and_namespace(), plain.name_and_snapshot()),
            (("vms", ""), ("data", None))
        );
        assert!(plain.is_written() && !Source { read_only: true, ..plain }.is_written());
        let snapshot = source("vms/team", "data@monday");
        assert_eq!(snapshot.pool_and_namespace(), ("vms", "team"));
        assert_eq!(snapshot.name_and_snapshot(), ("data", Some("monday")));
        assert!(!snapshot.is_written());
        assert_eq!(snapshot.path(), "vms/team/data@monday");
    }
}
