//! librados and librbd as they are called here: types, functions, and how they are found at run time.
//!
//! Declared after `rados/librados.h` and `rbd/librbd.h` of Ceph 16.2; all of these functions are in
//! every later release. The program is not linked with the libraries, so that it starts without them.
//! All `unsafe` calls of them are in `cluster`, `image`, `kind`, `lock`, `watchers`, `channel`, `close` and `pool`.

use libc::{c_char, c_int, c_void, size_t, ssize_t};
use std::ffi::{CStr, CString};
use std::sync::OnceLock;

/// `rados_t`: a client of a cluster.
pub(crate) type Rados = *mut c_void;
/// `rados_ioctx_t`: a pool, as a client uses it.
pub(crate) type IoCtx = *mut c_void;
/// `rbd_image_t`: an open image.
pub(crate) type ImageHandle = *mut c_void;
/// `rbd_completion_t`: one asynchronous call.
pub(crate) type Aio = *mut c_void;
/// `rados_completion_t`: one asynchronous call of librados'.
pub(crate) type RadosAio = *mut c_void;
/// `rados_callback_t`: called on a thread of librados' when such a call has ended.
pub(crate) type RadosAioCallback = extern "C" fn(RadosAio, *mut c_void);
/// `rbd_callback_t`: called on a thread of librbd's when the call has ended.
pub(crate) type AioCallback = extern "C" fn(Aio, *mut c_void);
/// `rbd_update_callback_t`: called on a thread of librbd's when an image's header has changed.
pub(crate) type UpdateCallback = extern "C" fn(*mut c_void);

/// `RBD_LOCK_MODE_EXCLUSIVE`.
pub(crate) const LOCK_EXCLUSIVE: c_int = 0;
/// `RBD_FEATURE_EXCLUSIVE_LOCK`.
pub(crate) const FEATURE_EXCLUSIVE_LOCK: u64 = 1 << 2;
/// What an operation of a client that is on the cluster's blocklist ends with (`EBLOCKLISTED`).
pub(crate) const EBLOCKLISTED: c_int = libc::ESHUTDOWN;

/// `rbd_image_info_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ImageInfo {
    /// Bytes.
    pub size: u64,
    /// Bytes of an object.
    pub object_size: u64,
    objects: u64,
    order: c_int,
    block_name_prefix: [c_char; 24],
    parent_pool: i64,
    parent_name: [c_char; 96],
}

impl ImageInfo {
    pub(crate) const NONE: ImageInfo = ImageInfo {
        size: 0,
        object_size: 0,
        objects: 0,
        order: 0,
        block_name_prefix: [0; 24],
        parent_pool: 0,
        parent_name: [0; 96],
    };
}

/// `rbd_image_options_t`.
pub(crate) type ImageOptions = *mut c_void;
/// `rbd_diff_iterate2`'s callback: offset, length, whether there is data, and what was given.
pub(crate) type DiffCallback = extern "C" fn(u64, size_t, c_int, *mut c_void) -> c_int;

/// `librbd_progress_fn_t`: how many are done, of how many, and what was given; what is not 0 ends the call.
pub(crate) type ProgressCallback = extern "C" fn(u64, u64, *mut c_void) -> c_int;

/// `RBD_FEATURE_OBJECT_MAP`.
pub(crate) const FEATURE_OBJECT_MAP: u64 = 1 << 3;
/// `RBD_FEATURE_FAST_DIFF`.
pub(crate) const FEATURE_FAST_DIFF: u64 = 1 << 4;
/// `RBD_FLAG_FAST_DIFF_INVALID`.
pub(crate) const FLAG_FAST_DIFF_INVALID: u64 = 1 << 1;
/// `RBD_SNAP_NAMESPACE_TYPE_USER`: a snapshot that was asked for by its name, and not deleted.
pub(crate) const SNAPSHOT_OF_USERS: c_int = 0;
/// `RBD_IMAGE_OPTION_CLONE_FORMAT`.
pub(crate) const OPTION_CLONE_FORMAT: c_int = 12;

/// `rbd_image_spec_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ImageSpec {
    pub id: *mut c_char,
    pub name: *mut c_char,
}

/// `rbd_trash_image_info_t`: an image in a pool's trash.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct TrashInfo {
    pub id: *mut c_char,
    pub name: *mut c_char,
    source: c_int,
    deleted: libc::time_t,
    deferred_until: libc::time_t,
}

impl TrashInfo {
    pub(crate) const NONE: TrashInfo = TrashInfo {
        id: std::ptr::null_mut(),
        name: std::ptr::null_mut(),
        source: 0,
        deleted: 0,
        deferred_until: 0,
    };
}

/// `rbd_image_watcher_t`: a client that has an image open, other than to read it only.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Watcher {
    /// Its address.
    pub address: *mut c_char,
    /// Number of the client.
    pub client: i64,
    cookie: u64,
}

impl Watcher {
    pub(crate) const NONE: Watcher =
        Watcher { address: std::ptr::null_mut(), client: 0, cookie: 0 };
}

/// `rbd_linked_image_spec_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct LinkedImage {
    pub pool_id: i64,
    pub pool_name: *mut c_char,
    pub pool_namespace: *mut c_char,
    pub image_id: *mut c_char,
    pub image_name: *mut c_char,
    pub trash: bool,
}

/// `rbd_snap_spec_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct SnapSpec {
    id: u64,
    pub kind: c_int,
    pub name: *mut c_char,
}

impl SnapSpec {
    pub(crate) const NONE: SnapSpec = SnapSpec { id: 0, kind: 0, name: std::ptr::null_mut() };
}

/// `rbd_snap_info_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct SnapInfo {
    pub id: u64,
    pub size: u64,
    pub name: *const c_char,
}

/// Why the libraries cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LibraryError {
    /// There is no such library, or it cannot be loaded.
    #[error(
        "images of Ceph need {library}, which cannot be loaded ({why}): install Debian's package {package}"
    )]
    Missing {
        /// File name of the library.
        library: &'static str,
        /// Debian's package that has it.
        package: &'static str,
        /// What the dynamic linker says.
        why: String,
    },
    /// It is older than what is called of it.
    #[error("{library} has no {symbol}: install Debian's package {package} of Ceph 16.2 or newer")]
    Older {
        /// File name of the library.
        library: &'static str,
        /// Debian's package that has it.
        package: &'static str,
        /// The function that it lacks.
        symbol: &'static str,
    },
    /// Nobody asked for it when the process began.
    #[error("this target serves no images of Ceph: start it with --rbd")]
    NotLoaded,
}

/// A library: its file name, and Debian's package.
#[derive(Clone, Copy)]
struct Source(&'static str, &'static str);

const RADOS: Source = Source("librados.so.2", "librados2");
const RBD: Source = Source("librbd.so.1", "librbd1");

/// An open library, which stays open: its threads may outlive whoever used it.
struct Open(*mut c_void, Source);

impl Open {
    fn new(Source(library, package): Source) -> Result<Open, LibraryError> {
        let name = CString::new(library).expect("a name has no zero byte");
        // SAFETY: a zero-terminated name; the library's constructors run, as they do in every program that
        // is linked with it.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(LibraryError::Missing { library, package, why: linker_says() });
        }
        Ok(Open(handle, Source(library, package)))
    }

    fn symbol(&self, symbol: &'static str) -> Result<*mut c_void, LibraryError> {
        let name = CString::new(symbol).expect("a name has no zero byte");
        // SAFETY: a handle of dlopen that is never closed, and a zero-terminated name.
        let found = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        match found.is_null() {
            false => Ok(found),
            true => {
                let Source(library, package) = self.1;
                Err(LibraryError::Older { library, package, symbol })
            }
        }
    }
}

fn linker_says() -> String {
    // SAFETY: no arguments; the text is this thread's until its next call.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "no reason given".to_owned();
    }
    // SAFETY: a zero-terminated text, copied at once.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Declares the functions, and how each is found in its library.
macro_rules! functions {
    ($($source:ident as $open:ident { $($name:ident($($arg:ty),*) $(-> $result:ty)?;)* })*) => {
        /// The functions of both libraries.
        #[allow(missing_docs, reason = "they are Ceph's")]
        pub struct Library {
            $($(pub(crate) $name: unsafe extern "C" fn($($arg),*) $(-> $result)?,)*)*
        }

        impl Library {
            fn find() -> Result<Library, LibraryError> {
                $(let $open = Open::new($source)?;)*
                Ok(Library {
                    $($($name: {
                        let found = $open.symbol(stringify!($name))?;
                        // SAFETY: the function of that name, whose type is declared after Ceph's header.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($arg),*) $(-> $result)?,
                            >(found)
                        }
                    },)*)*
                })
            }
        }
    };
}

functions! {
    RADOS as rados {
        rados_create(*mut Rados, *const c_char) -> c_int;
        rados_conf_read_file(Rados, *const c_char) -> c_int;
        rados_conf_set(Rados, *const c_char, *const c_char) -> c_int;
        rados_conf_get(Rados, *const c_char, *mut c_char, size_t) -> c_int;
        rados_connect(Rados) -> c_int;
        rados_shutdown(Rados);
        rados_cluster_fsid(Rados, *mut c_char, size_t) -> c_int;
        rados_getaddrs(Rados, *mut *mut c_char) -> c_int;
        rados_buffer_free(*mut c_char);
        rados_ioctx_create(Rados, *const c_char, *mut IoCtx) -> c_int;
        rados_ioctx_destroy(IoCtx);
        rados_ioctx_set_namespace(IoCtx, *const c_char);
        rados_ioctx_get_id(IoCtx) -> i64;
        rados_set_pool_full_try(IoCtx);
        rados_get_instance_id(Rados) -> u64;
        rados_wait_for_latest_osdmap(Rados) -> c_int;
        rados_aio_create_completion2(
            *mut c_void,
            Option<RadosAioCallback>,
            *mut RadosAio
        ) -> c_int;
        rados_aio_flush_async(IoCtx, RadosAio) -> c_int;
        rados_aio_wait_for_complete(RadosAio) -> c_int;
        rados_aio_release(RadosAio);
        rados_lock_shared(
            IoCtx,
            *const c_char,
            *const c_char,
            *const c_char,
            *const c_char,
            *const c_char,
            *const libc::timeval,
            u8
        ) -> c_int;
        rados_unlock(IoCtx, *const c_char, *const c_char, *const c_char) -> c_int;
        rados_list_lockers(
            IoCtx,
            *const c_char,
            *const c_char,
            *mut c_int,
            *mut c_char,
            *mut size_t,
            *mut c_char,
            *mut size_t,
            *mut c_char,
            *mut size_t,
            *mut c_char,
            *mut size_t
        ) -> ssize_t;
        rados_break_lock(
            IoCtx,
            *const c_char,
            *const c_char,
            *const c_char,
            *const c_char
        ) -> c_int;
        rados_blocklist_add(Rados, *const c_char, u32) -> c_int;
        rados_mon_command(
            Rados,
            *const *const c_char,
            size_t,
            *const c_char,
            size_t,
            *mut *mut c_char,
            *mut size_t,
            *mut *mut c_char,
            *mut size_t
        ) -> c_int;
    }
    RBD as rbd {
        rbd_open(IoCtx, *const c_char, *mut ImageHandle, *const c_char) -> c_int;
        rbd_open_read_only(IoCtx, *const c_char, *mut ImageHandle, *const c_char) -> c_int;
        rbd_open_by_id(IoCtx, *const c_char, *mut ImageHandle, *const c_char) -> c_int;
        rbd_open_by_id_read_only(IoCtx, *const c_char, *mut ImageHandle, *const c_char) -> c_int;
        rbd_close(ImageHandle) -> c_int;
        rbd_watchers_list(ImageHandle, *mut Watcher, *mut size_t) -> c_int;
        rbd_watchers_list_cleanup(*mut Watcher, size_t);
        rbd_list2(IoCtx, *mut ImageSpec, *mut size_t) -> c_int;
        rbd_image_spec_list_cleanup(*mut ImageSpec, size_t);
        rbd_image_options_create(*mut ImageOptions);
        rbd_image_options_destroy(ImageOptions);
        rbd_image_options_set_uint64(ImageOptions, c_int, u64) -> c_int;
        rbd_create4(IoCtx, *const c_char, u64, ImageOptions) -> c_int;
        rbd_clone3(IoCtx, *const c_char, *const c_char, IoCtx, *const c_char, ImageOptions) -> c_int;
        rbd_trash_move(IoCtx, *const c_char, u64) -> c_int;
        rbd_trash_remove(IoCtx, *const c_char, bool) -> c_int;
        rbd_trash_list(IoCtx, *mut TrashInfo, *mut size_t) -> c_int;
        rbd_trash_list_cleanup(*mut TrashInfo, size_t);
        rbd_trash_restore(IoCtx, *const c_char, *const c_char) -> c_int;
        rbd_rename(IoCtx, *const c_char, *const c_char) -> c_int;
        rbd_snap_create(ImageHandle, *const c_char) -> c_int;
        rbd_snap_remove(ImageHandle, *const c_char) -> c_int;
        rbd_snap_list(ImageHandle, *mut SnapInfo, *mut c_int) -> c_int;
        rbd_snap_list_end(*mut SnapInfo);
        rbd_snap_get_namespace_type(ImageHandle, u64, *mut c_int) -> c_int;
        rbd_snap_rollback(ImageHandle, *const c_char) -> c_int;
        rbd_rebuild_object_map(ImageHandle, ProgressCallback, *mut c_void) -> c_int;
        rbd_flatten(ImageHandle) -> c_int;
        rbd_diff_iterate2(
            ImageHandle,
            *const c_char,
            u64,
            u64,
            u8,
            u8,
            DiffCallback,
            *mut c_void
        ) -> c_int;
        rbd_metadata_get(ImageHandle, *const c_char, *mut c_char, *mut size_t) -> c_int;
        rbd_metadata_set(ImageHandle, *const c_char, *const c_char) -> c_int;
        rbd_metadata_remove(ImageHandle, *const c_char) -> c_int;
        rbd_metadata_list(
            ImageHandle,
            *const c_char,
            u64,
            *mut c_char,
            *mut size_t,
            *mut c_char,
            *mut size_t
        ) -> c_int;
        rbd_get_parent(ImageHandle, *mut LinkedImage, *mut SnapSpec) -> c_int;
        rbd_linked_image_spec_cleanup(*mut LinkedImage);
        rbd_linked_image_spec_list_cleanup(*mut LinkedImage, size_t);
        rbd_snap_spec_cleanup(*mut SnapSpec);
        rbd_list_children3(ImageHandle, *mut LinkedImage, *mut size_t) -> c_int;
        rbd_get_flags(ImageHandle, *mut u64) -> c_int;
        rbd_stat(ImageHandle, *mut ImageInfo, size_t) -> c_int;
        rbd_get_size(ImageHandle, *mut u64) -> c_int;
        rbd_get_features(ImageHandle, *mut u64) -> c_int;
        rbd_get_id(ImageHandle, *mut c_char, size_t) -> c_int;
        rbd_resize(ImageHandle, u64) -> c_int;
        rbd_update_watch(ImageHandle, *mut u64, UpdateCallback, *mut c_void) -> c_int;
        rbd_update_unwatch(ImageHandle, u64) -> c_int;
        rbd_lock_acquire(ImageHandle, c_int) -> c_int;
        rbd_lock_release(ImageHandle) -> c_int;
        rbd_lock_get_owners(ImageHandle, *mut c_int, *mut *mut c_char, *mut size_t) -> c_int;
        rbd_lock_get_owners_cleanup(*mut *mut c_char, size_t);
        rbd_lock_break(ImageHandle, c_int, *const c_char) -> c_int;
        rbd_aio_create_completion(*mut c_void, AioCallback, *mut Aio) -> c_int;
        rbd_aio_get_return_value(Aio) -> ssize_t;
        rbd_aio_release(Aio);
        rbd_aio_readv(ImageHandle, *const libc::iovec, c_int, u64, Aio) -> c_int;
        rbd_aio_writev(ImageHandle, *const libc::iovec, c_int, u64, Aio) -> c_int;
        rbd_aio_flush(ImageHandle, Aio) -> c_int;
        rbd_aio_compare_and_write(
            ImageHandle, u64, size_t, *const c_char, *const c_char, Aio, *mut u64, c_int
        ) -> ssize_t;
        rbd_aio_writesame(
            ImageHandle, u64, size_t, *const c_char, size_t, Aio, c_int
        ) -> c_int;
        rbd_aio_discard(ImageHandle, u64, u64, Aio) -> c_int;
        rbd_aio_write_zeroes(ImageHandle, u64, size_t, Aio, c_int, c_int) -> c_int;
    }
}

static LIBRARY: OnceLock<Result<Library, LibraryError>> = OnceLock::new();

impl Library {
    /// Loads both libraries, once. To be called before the process confines itself, as the dynamic linker
    /// makes memory executable.
    ///
    /// # Errors
    /// One of them is missing, or too old.
    pub fn load() -> Result<&'static Library, LibraryError> {
        LIBRARY.get_or_init(Library::find).as_ref().map_err(Clone::clone)
    }

    /// The libraries, if [`Library::load`] was called.
    ///
    /// # Errors
    /// As there; or it was not.
    pub fn loaded() -> Result<&'static Library, LibraryError> {
        match LIBRARY.get() {
            Some(loaded) => loaded.as_ref().map_err(Clone::clone),
            None => Err(LibraryError::NotLoaded),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_missing_is_named_with_its_package() {
        let missing = Open::new(Source("librbd.so.999", "librbd1")).err().unwrap().to_string();
        assert!(missing.starts_with("images of Ceph need librbd.so.999, which cannot be loaded ("));
        assert!(missing.ends_with("): install Debian's package librbd1"), "{missing}");
    }

    #[test]
    fn a_library_that_lacks_a_function_is_too_old() {
        let libc = Open::new(Source("libc.so.6", "libc6")).unwrap();
        assert!(libc.symbol("getpid").is_ok());
        let older = libc.symbol("rbd_aio_write_zeroes").unwrap_err().to_string();
        assert!(older.starts_with("libc.so.6 has no rbd_aio_write_zeroes: install"), "{older}");
    }

    #[test]
    fn what_nobody_loaded_is_said_to_need_an_option() {
        // Another test of this process may have loaded it.
        if LIBRARY.get().is_none() {
            let why = Library::loaded().err().unwrap().to_string();
            assert_eq!(why, "this target serves no images of Ceph: start it with --rbd");
        }
    }
}
