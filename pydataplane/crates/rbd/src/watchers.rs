//! Which clients have an image open.

use crate::Error;
use crate::calls::check;
use crate::ffi::{ImageHandle, Library, Watcher};

/// As many as there is room for at first.
const SOME: usize = 16;

/// Numbers of the clients that have an image open, other than to read it only; of this one, too. `path` is what the
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
) -> Result<Vec<u64>, Error> {
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
        let clients = of.iter().map(|watcher| watcher.client.cast_unsigned()).collect();
        // SAFETY: those of the call above, once.
        unsafe { (library.rbd_watchers_list_cleanup)(watchers.as_mut_ptr(), count) };
        return Ok(clients);
    }
}
