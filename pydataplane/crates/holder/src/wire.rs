//! Packets between target and holder: one line of text each, with descriptors beside it.
//!
//! | request | descriptors | answer | descriptors |
//! | --- | --- | --- | --- |
//! | `mount UUID` | | `ok`: mounted anew, or again where it was unmounted | fuse, record |
//! | `take UUID` | | `ok`; `none` where it is not held | fuse, record |
//! | `keep UUID` | fuse, record | `ok` | |
//! | `end UUID` | | `ok`: unmounted and let go of; also where it was not held | |
//! | `list` | | `ok UUID UUID ...` | |
//! | `rights` | | `ok KEY=VALUE ...`: see [`crate::rights`] | |
//!
//! What fails is answered with `failed SENTENCE`. A request that is not known is, too: a holder may
//! be older than the target.

use rustix::io::{Errno, IoSlice, IoSliceMut};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use uuid::Uuid;

use crate::{SESSIONS_MAX, Session};

/// Longest packet, in bytes: `ok` and [`SESSIONS_MAX`] UUIDs with a blank before each.
pub const PACKET_BYTES: usize = 16 + SESSIONS_MAX * 37;

/// Descriptors in a packet at most.
const FDS_MAX: usize = 2;

/// What a target asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// A new mount, or the one that it has.
    Mount(Uuid),
    /// The descriptors of a mount.
    Take(Uuid),
    /// The descriptors beside it are those of a mount.
    Keep(Uuid),
    /// Its end.
    End(Uuid),
    /// The names of all.
    List,
    /// What the holder may do to its host.
    Rights,
}

impl Request {
    /// As it is sent.
    pub fn text(self) -> String {
        match self {
            Request::Mount(uuid) => format!("mount {uuid}"),
            Request::Take(uuid) => format!("take {uuid}"),
            Request::Keep(uuid) => format!("keep {uuid}"),
            Request::End(uuid) => format!("end {uuid}"),
            Request::List => "list".into(),
            Request::Rights => "rights".into(),
        }
    }

    /// The request in a packet; `None` if it is none. A name is a UUID in its one usual form, since
    /// it becomes a folder's.
    pub fn parse(text: &str) -> Option<Request> {
        let Some((verb, name)) = text.split_once(' ') else {
            return match text {
                "list" => Some(Request::List),
                "rights" => Some(Request::Rights),
                _ => None,
            };
        };
        let uuid = Uuid::try_parse(name).ok().filter(|uuid| uuid.to_string() == name)?;
        match verb {
            "mount" => Some(Request::Mount(uuid)),
            "take" => Some(Request::Take(uuid)),
            "keep" => Some(Request::Keep(uuid)),
            "end" => Some(Request::End(uuid)),
            _ => None,
        }
    }
}

/// Sends one packet.
///
/// # Errors
/// The system's; EINVAL for more descriptors than a packet has.
pub fn send(socket: impl AsFd, text: &str, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !beside.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL.into());
    }
    sendmsg(socket, &[IoSlice::new(text.as_bytes())], &mut beside, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives one packet; an empty text is the end of the connection.
///
/// # Errors
/// The system's; EPROTO for what is no text.
pub fn receive(socket: impl AsFd) -> io::Result<(String, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let mut packet = vec![0; PACKET_BYTES];
    let flags = RecvFlags::CMSG_CLOEXEC;
    let found = recvmsg(socket, &mut [IoSliceMut::new(&mut packet)], &mut beside, flags)?;
    let mut fds = Vec::new();
    for message in beside.drain() {
        if let RecvAncillaryMessage::ScmRights(some) = message {
            fds.extend(some);
        }
    }
    packet.truncate(found.bytes);
    let text = String::from_utf8(packet).map_err(|_| io::Error::from(Errno::PROTO))?;
    Ok((text, fds))
}

/// The session whose descriptors came with a packet; `None`: they are not two.
pub fn session(fds: Vec<OwnedFd>) -> Option<Session> {
    let [fuse, record] = fds.try_into().ok()?;
    Some(Session { fuse, record })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    #[test]
    fn requests_are_read_as_they_are_written_and_nothing_else_is() {
        let uuid = Uuid::from_u128(7);
        for request in [
            Request::Mount(uuid),
            Request::Take(uuid),
            Request::Keep(uuid),
            Request::End(uuid),
            Request::List,
            Request::Rights,
        ] {
            assert_eq!(Request::parse(&request.text()), Some(request));
        }
        let upper = format!("end {}", uuid.to_string().replace('0', "A"));
        for text in ["", "end", "end ..", "list all", "rights 0", "give 0", "end ../../etc", &upper]
        {
            assert_eq!(Request::parse(text), None, "{text}");
        }
    }

    #[test]
    fn descriptors_travel_with_their_packet_and_a_list_fits() {
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let (a, b) = socketpair(AddressFamily::UNIX, kind, flags, None).unwrap();
        send(&a, "ok", &[a.as_fd(), b.as_fd()]).unwrap();
        let (text, fds) = receive(&b).unwrap();
        assert_eq!((text.as_str(), fds.len()), ("ok", 2));
        assert!(session(fds).is_some());
        let names = format!("ok{}", format!(" {}", Uuid::nil()).repeat(SESSIONS_MAX));
        send(&a, &names, &[]).unwrap();
        assert_eq!(receive(&b).unwrap().0, names);
        drop(a);
        assert_eq!(receive(&b).unwrap().0, "");
    }
}
