//! How an image is closed.
//!
//! librbd looks at an image once more after it has told whoever opened it: it takes a mutex of the image
//! (`ImageState::complete_action_unlock`). If the image is closed meanwhile, that mutex is gone, and taking it
//! ends the process ("std::system_error: Invalid argument"). A thread that has to wait for a processor there is late
//! enough. It does so in a callback of librados', and those of a client come one after the other: so a callback
//! of ours is waited for, which needs no answer of the cluster's.

use std::ptr;

use crate::ffi::{ImageHandle, IoCtx, Library, RadosAio};

/// Closes an image of the pool `io`. The lock goes with it.
///
/// # Safety
/// The image is open and of that pool, and used by nobody any more.
pub(crate) unsafe fn close(library: &Library, io: IoCtx, image: ImageHandle) {
    // SAFETY: as the caller says, of its image the pool.
    unsafe { wait_for_callbacks(library, io) };
    // SAFETY: as the caller says.
    unsafe { (library.rbd_close)(image) };
}

/// Waits until callbacks of librados' that have begun, of the client of `io`, have ended.
///
/// # Safety
/// It is an open pool.
unsafe fn wait_for_callbacks(library: &Library, io: IoCtx) {
    let mut ours: RadosAio = ptr::null_mut();
    // SAFETY: no callback of ours to call, nothing to give it, and where the result is to be.
    let made = unsafe { (library.rados_aio_create_completion2)(ptr::null_mut(), None, &mut ours) };
    if made < 0 {
        return;
    }
    // SAFETY: an open pool and a new completion. The pool has no writes of its own, as images have copies of it, so
    // that there is nothing to wait for but the turn of the callback.
    if unsafe { (library.rados_aio_flush_async)(io, ours) } >= 0 {
        // SAFETY: a completion that has begun.
        unsafe { (library.rados_aio_wait_for_complete)(ours) };
    }
    // SAFETY: made above, given back once.
    unsafe { (library.rados_aio_release)(ours) };
}
