//! systemd's file descriptor store (sd_notify(3), `FDSTORE=1`): a second copy of all sessions,
//! from which a holder that is started again takes them. Without systemd all of this does nothing.

use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, sendmsg_addr, socket_with,
};
use std::collections::BTreeMap;
use std::env;
use std::ffi::OsStr;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use uuid::Uuid;

use crate::Session;

/// First descriptor that systemd passes (`SD_LISTEN_FDS_START`).
const FIRST: i32 = 3;

/// Names of a session's descriptors begin with these and end with its UUID.
const FUSE: &str = "fuse-";
const RECORD: &str = "record-";

/// Tells systemd something, if it asked for that; failure is logged and no more.
pub(crate) fn notify(state: &str, fds: &[BorrowedFd<'_>]) {
    let Some(address) = env::var_os("NOTIFY_SOCKET") else { return };
    if let Err(e) = send(&address, state, fds) {
        tracing::warn!("the service manager could not be told {state:?}: {e}");
    }
}

fn send(address: &OsStr, state: &str, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let address = match address.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddrUnix::new_abstract_name(name)?,
        None => SocketAddrUnix::new(address)?,
    };
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        beside.push(SendAncillaryMessage::ScmRights(fds));
    }
    let text = [IoSlice::new(state.as_bytes())];
    sendmsg_addr(&socket, &address, &text, &mut beside, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Gives copies of a session's descriptors.
pub(crate) fn put(uuid: Uuid, session: &Session) {
    for (kind, fd) in [(FUSE, &session.fuse), (RECORD, &session.record)] {
        notify(&format!("FDSTORE=1\nFDNAME={kind}{uuid}"), &[fd.as_fd()]);
    }
}

/// Takes the copies back.
pub(crate) fn remove(uuid: Uuid) {
    for kind in [FUSE, RECORD] {
        notify(&format!("FDSTOREREMOVE=1\nFDNAME={kind}{uuid}"), &[]);
    }
}

/// What was stored before this process was started. Once.
pub(crate) fn taken() -> BTreeMap<Uuid, Session> {
    let number = |name: &str| env::var(name).ok()?.parse::<u32>().ok();
    if number("LISTEN_PID") != Some(std::process::id()) {
        return BTreeMap::new();
    }
    let names = env::var("LISTEN_FDNAMES").unwrap_or_default();
    let count = i32::try_from(number("LISTEN_FDS").unwrap_or(0)).unwrap_or(0);
    let fds = (FIRST..FIRST.saturating_add(count)).map(passed);
    pair(names.split(':').zip(fds).filter_map(|(name, fd)| Some((name, fd?))))
}

/// The descriptor that systemd has passed under a number.
#[allow(unsafe_code, reason = "a descriptor that was inherited is known by its number alone")]
fn passed(number: i32) -> Option<OwnedFd> {
    use rustix::io::{FdFlags, fcntl_setfd};
    use std::os::fd::FromRawFd;
    // SAFETY: systemd passed it to this process (LISTEN_PID is ours), nothing else in the process
    // knows the number, and each is taken once, at the start. One that is not open fails below.
    let fd = unsafe { BorrowedFd::borrow_raw(number) };
    fcntl_setfd(fd, FdFlags::CLOEXEC).ok()?;
    // SAFETY: as above, and it is open.
    Some(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Sessions of which both descriptors are there.
fn pair<'a>(found: impl Iterator<Item = (&'a str, OwnedFd)>) -> BTreeMap<Uuid, Session> {
    let mut records = BTreeMap::new();
    let mut fuses = BTreeMap::new();
    for (name, fd) in found {
        let uuid = |prefix| Uuid::try_parse(name.strip_prefix(prefix)?).ok();
        if let Some(uuid) = uuid(FUSE) {
            fuses.insert(uuid, fd);
        } else if let Some(uuid) = uuid(RECORD) {
            records.insert(uuid, fd);
        }
    }
    let both = |(uuid, fuse)| Some((uuid, Session { fuse, record: records.remove(&uuid)? }));
    fuses.into_iter().filter_map(both).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_is_whole_or_left() {
        let fd = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let (one, two) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let names =
            [format!("fuse-{one}"), format!("record-{two}"), format!("record-{one}"), "x".into()];
        let found = pair(names.iter().map(|name| (name.as_str(), fd())));
        assert_eq!(found.into_keys().collect::<Vec<_>>(), [one]);
    }
}
