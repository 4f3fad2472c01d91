//! The lock of an open image: who has it may write, and nobody else.

use std::collections::BTreeSet;
use std::ffi::CStr;
use std::ptr;
use std::sync::Arc;

use libc::{c_char, c_int};
use parking_lot::Mutex;

use crate::Error;
use crate::calls::{check, failed, text};
use crate::cluster::{Client, Cluster};
use crate::ffi::{EBLOCKLISTED, ImageHandle, LOCK_EXCLUSIVE};

/// For how long a client that is gone is kept out, in seconds: as long as the cluster is set to.
const BLOCKLISTED_AS_SET: u32 = 0;

/// Clients that this process has fenced: cluster and address.
static FENCED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Holders of a lock that are told at most.
const OWNERS_MAX: usize = 8;

/// That of one image, which is open as long as this is there.
pub(crate) struct Lock<'a> {
    pub(crate) cluster: &'a Arc<Cluster>,
    pub(crate) client: &'a Arc<Client>,
    pub(crate) image: ImageHandle,
    /// What the image is called in errors.
    pub(crate) path: String,
}

impl Lock<'_> {
    /// Waits until nobody else writes to it, and nobody can from then on.
    ///
    /// # Errors
    /// [`Error::Locked`]: a client that lives has it; what Ceph says.
    pub(crate) fn acquire(&self) -> Result<(), Error> {
        let image = self.path.clone();
        self.take_from_past()?;
        // SAFETY: an open image.
        let locked = unsafe { (self.client.library.rbd_lock_acquire)(self.image, LOCK_EXCLUSIVE) };
        match -locked {
            ..=0 => Ok(()),
            libc::EROFS | libc::EBUSY | libc::EAGAIN => {
                let owners = self.owners().unwrap_or_default();
                let owner = if owners.is_empty() { "?".into() } else { owners.join(" and ") };
                Err(Error::Locked { image, owner })
            }
            errno => {
                if errno == EBLOCKLISTED {
                    self.cluster.renew(self.client);
                }
                Err(failed(format!("image {image} cannot be locked"), locked))
            }
        }
    }

    /// Takes the lock from this target's processes before, if one has it.
    ///
    /// # Errors
    /// What Ceph says.
    pub(crate) fn take_from_past(&self) -> Result<(), Error> {
        let owners = self.owners().unwrap_or_default();
        let mut past = owners.iter().filter(|owner| self.cluster.is_of_the_past(owner));
        past.try_for_each(|owner| self.take_from(owner))
    }

    /// Takes the lock from a client that is gone, which the cluster keeps out from then on.
    fn take_from(&self, owner: &str) -> Result<(), Error> {
        let image = &self.path;
        let owner_ = text("an address", owner)?;
        let library = self.client.library;
        // SAFETY: an open image and a zero-terminated text.
        let broken =
            unsafe { (library.rbd_lock_break)(self.image, LOCK_EXCLUSIVE, owner_.as_ptr()) };
        // Somebody else may have been quicker.
        if broken < 0 && broken != -libc::ENOENT && broken != -libc::EBUSY {
            return Err(failed(format!("image {image} stays locked by {owner}"), broken));
        }
        tracing::info!(
            "image {image} was locked by {owner}, this target's process before, and is free"
        );
        Ok(())
    }

    /// Addresses of the clients that have it.
    ///
    /// # Errors
    /// What Ceph says.
    pub(crate) fn owners(&self) -> Result<Vec<String>, Error> {
        let library = self.client.library;
        let mut mode: c_int = 0;
        let mut owners: [*mut c_char; OWNERS_MAX] = [ptr::null_mut(); OWNERS_MAX];
        let mut count = owners.len();
        // SAFETY: an open image, and room for that many.
        let told = unsafe {
            (library.rbd_lock_get_owners)(self.image, &mut mode, owners.as_mut_ptr(), &mut count)
        };
        if told == -libc::ENOENT {
            return Ok(Vec::new());
        }
        check(told, || format!("who has image {} locked is not told", self.path))?;
        let of = &owners[..count.min(OWNERS_MAX)];
        // SAFETY: zero-terminated texts, ours until they are given back.
        let texts = of.iter().map(|owner| unsafe { CStr::from_ptr(*owner) });
        let texts = texts.map(|text| text.to_string_lossy().into_owned()).collect();
        // SAFETY: those of the call above, once.
        unsafe { (library.rbd_lock_get_owners_cleanup)(owners.as_mut_ptr(), count) };
        Ok(texts)
    }

    /// Lets others have it.
    ///
    /// # Errors
    /// What Ceph says.
    pub(crate) fn release(&self) -> Result<(), Error> {
        // SAFETY: an open image.
        let unlocked = unsafe { (self.client.library.rbd_lock_release)(self.image) };
        check(unlocked, || format!("the lock of image {} is not let go", self.path))
    }
}

/// Has a cluster refuse what a client that is gone may have asked for. It may be on the list of those that have an
/// image open after that: for half a minute, and for good where it was killed while it opened it, as an OSD does not
/// time a client whose connection had ended before the OSD noted it.
///
/// # Errors
/// What Ceph says.
pub(crate) fn fence(by: &Client, address: &str) -> Result<(), Error> {
    let key = format!("{}/{address}", by.fsid);
    if FENCED.lock().contains(&key) {
        return Ok(());
    }
    blocklist(by, address)?;
    FENCED.lock().insert(key);
    Ok(())
}

/// Puts a client that is gone on its cluster's blocklist, for as long as the cluster is set to keep clients there. What
/// `by` does next tells the OSDs of it.
///
/// # Errors
/// What Ceph says.
pub(crate) fn blocklist(by: &Client, address: &str) -> Result<(), Error> {
    let address_ = text("an address", address)?;
    // SAFETY: a connected client and a zero-terminated text.
    let kept_out = unsafe {
        (by.library.rados_blocklist_add)(by.rados, address_.as_ptr(), BLOCKLISTED_AS_SET)
    };
    check(kept_out, || {
        format!(
            "client {address}, which is gone, cannot be put on the cluster's blocklist (the profile rbd of \
             its monitors allows that)"
        )
    })?;
    // SAFETY: a connected client.
    let told = unsafe { (by.library.rados_wait_for_latest_osdmap)(by.rados) };
    check(told, || format!("client {address} is on the blocklist, but not known to be"))
}
