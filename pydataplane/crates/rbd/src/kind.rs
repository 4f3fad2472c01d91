//! How an image is written to: by one host alone, or by several that share it.
//!
//! The lock of an image does not tell: librbd passes that of a shared image on from client to client with their
//! writes, and gives it to whoever wants it for himself. So who uses an image to write to it has, as long as it is
//! open, a shared lock of RADOS' on its header with the kind as its tag: Ceph refuses one with another tag, in one
//! step. A client that ends without giving it back is not among those any more that have the image open, as with
//! its other lock: who finds it in the way has the cluster keep that client out, as it may only have been silent, and
//! takes it away.

use std::ffi::{CStr, CString};
use std::ptr;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use libc::{c_char, c_int};
use uuid::Uuid;

use crate::Error;
use crate::calls::{failed, text, texts};
use crate::cluster::{Client, Cluster};
use crate::ffi::{EBLOCKLISTED, ImageHandle, IoCtx, Library};
use crate::lock::blocklist;
use crate::watchers::watchers;

/// Name of the lock.
const NAME: &CStr = c"virtlun.kind";
/// Name of librbd's own.
const LOCK_OF_LIBRBD: &CStr = c"rbd_lock";
/// What clients are called before their numbers.
const CLIENT: &str = "client.";
/// What an address may begin with.
const PROTOCOLS: [&str; 3] = ["v1:", "v2:", "any:"];
/// Bytes of names, addresses and the like that there is room for at first.
const ROOM: usize = 4 << 10;
/// Most of it.
const ROOM_MAX: usize = 16 << 20;
/// How often it is tried where what was in the way has gone meanwhile.
const TRIES: u32 = 5;
/// How long it is waited before a client counts as gone that does not have the image open: one that was cut off
/// from the cluster opens it again.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// An address without its protocol, as those of librbd's lock and of this target's clients are.
fn plain(address: &str) -> &str {
    PROTOCOLS.iter().find_map(|protocol| address.strip_prefix(protocol)).unwrap_or(address)
}

/// How an image is written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// By one host at a time, also where its guest goes to another.
    Alone,
    /// By several hosts.
    Shared,
}

impl Kind {
    fn tag(self) -> &'static CStr {
        match self {
            Kind::Alone => c"alone",
            Kind::Shared => c"shared",
        }
    }

    /// Why not as this kind, as `owner` has it as the other.
    fn refused(self, image: String, owner: String) -> Error {
        match self {
            Kind::Alone => Error::Shared { image, owner },
            Kind::Shared => Error::Unshared { image, owner },
        }
    }
}

/// That an image is used as a kind; to be given back.
pub(crate) struct Entry {
    header: CString,
    cookie: CString,
}

impl Entry {
    /// Gives it back. The image is not to be written to any more. What stays costs the client, as who does not have the
    /// image open any more counts as gone, so it is tried several times.
    ///
    /// # Safety
    /// `io` is the open pool of the image.
    pub(crate) unsafe fn give_back(self, library: &Library, io: IoCtx) {
        let Entry { header, cookie } = self;
        for _ in 0..TRIES {
            // SAFETY: as the caller says, and zero-terminated texts.
            let gone = unsafe {
                (library.rados_unlock)(io, header.as_ptr(), NAME.as_ptr(), cookie.as_ptr())
            };
            tracing::debug!(header = ?header, gone, "not used any more");
            if gone != -libc::ETIMEDOUT {
                return;
            }
        }
        tracing::warn!(
            "{header:?} keeps a lock {NAME:?} of this host, as its cluster does not answer"
        );
    }
}

/// A client that has a lock.
#[derive(PartialEq, Eq)]
struct Holder {
    /// Such as `client.4123`.
    client: String,
    cookie: String,
    address: String,
}

impl Holder {
    fn number(&self) -> Option<u64> {
        self.client.strip_prefix(CLIENT)?.parse().ok()
    }
}

/// An open image that is to be used, by a client that may write to it.
pub(crate) struct OpenImage<'a> {
    pub(crate) cluster: &'a Arc<Cluster>,
    pub(crate) client: &'a Arc<Client>,
    pub(crate) io: IoCtx,
    pub(crate) image: ImageHandle,
    /// What Ceph knows the image by.
    pub(crate) id: String,
    /// What it is called in errors.
    pub(crate) path: String,
}

impl OpenImage<'_> {
    /// Notes at the image that it is used as that kind, until the entry is given back.
    ///
    /// # Errors
    /// [`Error::Shared`], [`Error::Unshared`]: a client that lives uses it as the other; what Ceph says.
    pub(crate) fn enter(&self, kind: Kind) -> Result<Entry, Error> {
        let cookie = text("the cookie", &Uuid::new_v4().to_string())?;
        let entry = Entry { header: self.header()?, cookie };
        for _ in 0..TRIES {
            let entered = self.lock(&entry, kind);
            match -entered {
                // There is one already if it was asked for twice.
                ..=0 | libc::EEXIST => {
                    self.forget_past();
                    return Ok(entry);
                }
                libc::EBUSY => self.make_room(kind)?,
                errno => {
                    // It may be there nevertheless.
                    // SAFETY: the pool of the open image.
                    unsafe { entry.give_back(self.client.library, self.io) };
                    if errno == EBLOCKLISTED {
                        self.cluster.renew(self.client);
                    }
                    return Err(failed(format!("image {} cannot be used", self.path), entered));
                }
            }
        }
        Err(kind.refused(self.path.clone(), "?".to_owned()))
    }

    /// Whether a client that lives has librbd's lock that does not share the image: one that is no target, or an older
    /// one. Those of this target's processes before are gone.
    ///
    /// # Errors
    /// What Ceph says.
    pub(crate) fn is_locked_by_others(&self) -> Result<bool, Error> {
        let (_, others) = self.past_and_others(LOCK_OF_LIBRBD)?;
        let (owners, _) = self.parted(others)?;
        if owners.is_empty() {
            return Ok(false);
        }
        let sharers = self.holders(NAME)?;
        let shares = |owner: &Holder| sharers.iter().any(|each| each.client == owner.client);
        Ok(!owners.iter().all(shares))
    }

    fn header(&self) -> Result<CString, Error> {
        text("the image's header", &format!("rbd_header.{}", self.id))
    }

    fn lock(&self, Entry { header, cookie }: &Entry, kind: Kind) -> c_int {
        // SAFETY: an open pool, zero-terminated texts, and null for no end.
        unsafe {
            (self.client.library.rados_lock_shared)(
                self.io,
                header.as_ptr(),
                NAME.as_ptr(),
                cookie.as_ptr(),
                kind.tag().as_ptr(),
                c"".as_ptr(),
                ptr::null(),
                0,
            )
        }
    }

    /// Takes away what is in the way of `kind`, of clients that are gone.
    fn make_room(&self, kind: Kind) -> Result<(), Error> {
        let (past, others) = self.past_and_others(NAME)?;
        let (mut live, mut gone) = self.parted(others)?;
        if live.is_empty() && !gone.is_empty() {
            thread::sleep(LOOK_AGAIN);
            // One that has just closed it gives back what it has.
            let now = self.holders(NAME)?;
            gone.retain(|holder| now.contains(holder));
            (live, gone) = self.parted(gone)?;
        }
        let mut owners: Vec<_> = live.into_iter().map(|holder| holder.address).collect();
        owners.dedup();
        if !owners.is_empty() {
            return Err(kind.refused(self.path.clone(), owners.join(" and ")));
        }
        gone.iter().try_for_each(|holder| self.keep_out(holder))?;
        past.iter().chain(&gone).try_for_each(|holder| self.take_away(holder))
    }

    /// Has the cluster keep a client out that seems to be gone: if it was only silent, it would write again.
    fn keep_out(&self, holder: &Holder) -> Result<(), Error> {
        let (image, address) = (&self.path, &holder.address);
        blocklist(self.client, address)?;
        tracing::info!("image {image} was in use by {address}, which is gone and kept out now");
        Ok(())
    }

    /// Takes away what processes of this target have left, whatever kind it is.
    fn forget_past(&self) {
        let Ok((past, _)) = self.past_and_others(NAME) else { return };
        past.iter().for_each(|holder| _ = self.take_away(holder));
    }

    /// Who has a lock on the header: processes of this target before, and others.
    fn past_and_others(&self, lock: &CStr) -> Result<(Vec<Holder>, Vec<Holder>), Error> {
        let is_past = |holder: &Holder| self.cluster.is_of_the_past(&holder.address);
        Ok(self.holders(lock)?.into_iter().partition(is_past))
    }

    /// Those that have the image open, as this client has, and those that have not.
    fn parted(&self, holders: Vec<Holder>) -> Result<(Vec<Holder>, Vec<Holder>), Error> {
        if holders.is_empty() {
            return Ok((Vec::new(), Vec::new()));
        }
        // SAFETY: an open image.
        let open = unsafe { watchers(self.client.library, self.image, &self.path) }?;
        // SAFETY: a connected client.
        let own = unsafe { (self.client.library.rados_get_instance_id)(self.client.rados) };
        let is_open = |number| number == own || open.iter().any(|each| each.client == number);
        let is_live = |holder: &Holder| holder.number().is_none_or(is_open);
        Ok(holders.into_iter().partition(is_live))
    }

    /// Who has a lock on the header.
    fn holders(&self, lock: &CStr) -> Result<Vec<Holder>, Error> {
        let header = self.header()?;
        let mut room = ROOM;
        loop {
            let (mut exclusive, mut tag) = (0, vec![0u8; room]);
            let mut of: [Vec<u8>; 3] = std::array::from_fn(|_| vec![0u8; room]);
            let (mut tag_len, mut lens) = (room, [room; 3]);
            let ([clients, cookies, addresses], [clients_len, cookies_len, addresses_len]) =
                (&mut of, &mut lens);
            // SAFETY: an open pool, zero-terminated texts, and buffers of those lengths.
            let told = unsafe {
                (self.client.library.rados_list_lockers)(
                    self.io,
                    header.as_ptr(),
                    lock.as_ptr(),
                    &mut exclusive,
                    tag.as_mut_ptr().cast::<c_char>(),
                    &mut tag_len,
                    clients.as_mut_ptr().cast::<c_char>(),
                    clients_len,
                    cookies.as_mut_ptr().cast::<c_char>(),
                    cookies_len,
                    addresses.as_mut_ptr().cast::<c_char>(),
                    addresses_len,
                )
            };
            let told = c_int::try_from(told).unwrap_or(c_int::MAX);
            if told == -libc::ERANGE && room < ROOM_MAX {
                room = (room * 2).max(tag_len).max(lens.into_iter().max().unwrap_or(0));
                room = room.min(ROOM_MAX);
                continue;
            }
            if told == -libc::ENOENT || told == 0 {
                return Ok(Vec::new());
            }
            if told < 0 {
                return Err(failed(format!("who uses image {} is not told", self.path), told));
            }
            let [clients, cookies, addresses] =
                [0, 1, 2].map(|at: usize| texts(&of[at][..lens[at].min(room)]));
            let all = clients.zip(cookies).zip(addresses);
            let holder = |((client, cookie), address): ((_, _), String)| Holder {
                client,
                cookie,
                address: plain(&address).to_owned(),
            };
            return Ok(all.map(holder).collect());
        }
    }

    /// Takes away what a client has left that is gone.
    fn take_away(&self, holder: &Holder) -> Result<(), Error> {
        let (header, client) = (self.header()?, text("a client", &holder.client)?);
        let cookie = text("a cookie", &holder.cookie)?;
        // SAFETY: an open pool and zero-terminated texts.
        let gone = unsafe {
            (self.client.library.rados_break_lock)(
                self.io,
                header.as_ptr(),
                NAME.as_ptr(),
                client.as_ptr(),
                cookie.as_ptr(),
            )
        };
        // Somebody else may have been quicker.
        if gone < 0 && gone != -libc::ENOENT {
            let (image, address) = (&self.path, &holder.address);
            return Err(failed(format!("image {image} stays in use by {address}"), gone));
        }
        tracing::debug!(image = self.path, of = holder.address, "taken away, as it is gone");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_has_a_number_if_it_is_one() {
        let holder = |client: &str| Holder {
            client: client.to_owned(),
            cookie: String::new(),
            address: String::new(),
        };
        assert_eq!(holder("client.4123").number(), Some(4123));
        for other in ["osd.3", "client.", "client.x", "4123"] {
            assert_eq!(holder(other).number(), None, "{other}");
        }
    }

    #[test]
    fn an_address_is_as_that_of_a_client_whatever_it_speaks() {
        for address in ["v1:10.0.0.1:0/7", "v2:10.0.0.1:0/7", "any:10.0.0.1:0/7", "10.0.0.1:0/7"] {
            assert_eq!(plain(address), "10.0.0.1:0/7");
        }
        assert_eq!(plain("v1:[fe80::1]:0/7"), "[fe80::1]:0/7");
    }

    #[test]
    fn who_comes_second_is_told_what_the_first_one_does() {
        let said = |kind: Kind| kind.refused("rbd/a".into(), "10.0.0.1:0/1".into()).to_string();
        assert!(
            said(Kind::Alone).contains("rbd/a is shared with other hosts by the client at 10.")
        );
        assert!(said(Kind::Shared).contains("by the client at 10.0.0.1:0/1 alone"));
    }
}
