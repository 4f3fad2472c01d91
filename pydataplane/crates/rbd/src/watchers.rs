//! Which clients have an image open.

use std::ffi::CStr;

use crate::Error;
use crate::calls::check;
use crate::ffi::{ImageHandle, Library, Watcher};

/// As many as there is room for at first.
const SOME: usize = 16;

/// A client that has an image open.
pub(crate) struct Watching {
    /// Its number.
    pub(crate) client: u64,
    pub(crate) address: String,
}

/// The clients that have an image open, other than to read it only; of this one, too. `path` is what the
/// image is called in errors.
///
/// # Errors
/// What Ceph says.
///
/// # Safety
/// `image` is open.
pub(crate) unsafe fn watchers(
    library: &Library,
    image: ImageHandle,
    path: &str,
) -> Result<Vec<Watching>, Error> {
    let mut watchers = vec![Watcher::NONE; SOME];
    loop {
        let mut count = watchers.len();
        // SAFETY: an open image, as the caller says, and room for that many.
        let told = unsafe { (library.rbd_watchers_list)(image, watchers.as_mut_ptr(), &mut count) };
        if told == -libc::ERANGE {
            watchers.resize(count + SOME, Watcher::NONE);
            continue;
        }
        check(told, || format!("who has image {path} open is not told"))?;
        let of = &watchers[..count.min(watchers.len())];
        let watching = |watcher: &Watcher| Watching {
            client: watcher.client.cast_unsigned(),
            // SAFETY: a zero-terminated text, ours until it is given back.
            address: unsafe { CStr::from_ptr(watcher.address) }.to_string_lossy().into_owned(),
        };
        let clients = of.iter().map(watching).collect();
        // SAFETY: those of the call above, once.
        unsafe { (library.rbd_watchers_list_cleanup)(watchers.as_mut_ptr(), count) };
        return Ok(clients);
    }
}
