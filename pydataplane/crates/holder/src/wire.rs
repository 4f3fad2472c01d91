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
//! | `disks` | | `ok`: devices of ublk can be had; `none` | |
//! | `disk UUID N ...` | | `ok left\|new ID DEPTH BYTES`; `busy`: ask again, another server ends | queue |
//! | `disk UUID N ... number ID` | | also `taken`: by another volume; `other ID`: it has that one | queue |
//! | `disk UUID N ... left ID` | | also `none`: no device was left | queue |
//! | `serve UUID` | | `ok`, once who has its queue serves the device | |
//! | `stop UUID` | | `ok`: it is taken away, and all that was asked of it is answered | |
//! | `resizes` | | `ok`: devices can change their size while they are used; `none` | |
//! | `resize UUID BYTES` | | `ok`: the device of the volume has this size | |
//! | `opened UUID` | | `ok 1`: something has the device alone; `ok 0` | |
//! | `vm-keep NAME` | record, connection, others | `ok` | |
//! | `vm-take NAME` | | `ok`; `none` where it is not held | the same |
//! | `vm-end NAME` | | `ok`: let go of; also where it was not held | |
//! | `vm-list` | | `ok NAME NAME ...` | |
//!
//! The NAME of a VM's connection is its controller's, and has what tells targets apart before it. The
//! numbers of a device are those of [`ublk::New`] but its mark, in the order of [`NewDisk`].
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

pub use crate::vms::NAME_MAX;
use crate::vms::VMS_MAX;
use crate::{SESSIONS_MAX, Session};

/// Longest packet, in bytes: `ok` and [`SESSIONS_MAX`] UUIDs, or [`VMS_MAX`] names, with a blank before
/// each.
pub const PACKET_BYTES: usize = 16 + SESSIONS_MAX * 37;

/// Descriptors in a packet at most: as many as the kernel passes on (SCM_MAX_FD).
pub const FDS_MAX: usize = 253;

/// What a target asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
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
    /// Whether it can make devices.
    Disks,
    /// A device, and its queue.
    Disk(Uuid, NewDisk, Which),
    /// The device is served.
    Serve(Uuid),
    /// Its end.
    Stop(Uuid),
    /// Whether something has it alone.
    Opened(Uuid),
    /// Whether devices can change their size.
    Resizes,
    /// The device is to have so many bytes.
    Resize(Uuid, u64),
    /// The descriptors beside it are those of a VM's connection.
    VmKeep(String),
    /// The descriptors of a VM's connection.
    VmTake(String),
    /// Its end.
    VmEnd(String),
    /// The names of all connections of VMs.
    VmList,
}

/// Which device a volume is to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// The one that was left, or a new one of any number.
    Any,
    /// The one that was left, or a new one, if it has this number.
    Number(u32),
    /// The one that was left, if it has this number.
    Left(u32),
}

impl Which {
    fn text(self) -> String {
        match self {
            Which::Any => String::new(),
            Which::Number(id) => format!(" number {id}"),
            Which::Left(id) => format!(" left {id}"),
        }
    }

    /// The number that it has to have, if any.
    pub fn number(self) -> Option<u32> {
        match self {
            Which::Any => None,
            Which::Number(id) | Which::Left(id) => Some(id),
        }
    }
}

/// What a device is to be, in numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewDisk {
    /// Requests at a time.
    pub depth: u16,
    /// Bytes of one at most.
    pub max_io_bytes: u32,
    /// Bytes of a block.
    pub block_size: u32,
    /// Bytes of a block of the medium.
    pub physical_block_size: u32,
    /// Its size in bytes.
    pub bytes: u64,
    /// Whether it is not to be written.
    pub read_only: bool,
    /// Bytes of a discard at most.
    pub max_discard_bytes: u64,
    /// Bytes of a write of zeros at most.
    pub max_zeroes_bytes: u64,
    /// Bytes that are discarded together.
    pub discard_granularity: u32,
}

impl NewDisk {
    fn text(self) -> String {
        let NewDisk { depth, max_io_bytes, block_size, physical_block_size, bytes, .. } = self;
        let NewDisk { read_only, max_discard_bytes, max_zeroes_bytes, discard_granularity, .. } =
            self;
        format!(
            "{depth} {max_io_bytes} {block_size} {physical_block_size} {bytes} {} \
             {max_discard_bytes} {max_zeroes_bytes} {discard_granularity}",
            u8::from(read_only)
        )
    }

    fn parse(text: &str) -> Option<(NewDisk, Which)> {
        let mut words = text.split(' ');
        let numbers = words.by_ref().take(9).map(|word| word.parse().ok());
        let numbers: Option<Vec<u64>> = numbers.collect();
        let [depth, io, block, physical, bytes, read_only @ 0..=1, discard, zeroes, granularity] =
            numbers?[..]
        else {
            return None;
        };
        let which = match (words.next(), words.next(), words.next()) {
            (None, ..) => Which::Any,
            (Some("number"), Some(id), None) => Which::Number(id.parse().ok()?),
            (Some("left"), Some(id), None) => Which::Left(id.parse().ok()?),
            _ => return None,
        };
        let new = NewDisk {
            depth: depth.try_into().ok()?,
            max_io_bytes: io.try_into().ok()?,
            block_size: block.try_into().ok()?,
            physical_block_size: physical.try_into().ok()?,
            bytes,
            read_only: read_only == 1,
            max_discard_bytes: discard,
            max_zeroes_bytes: zeroes,
            discard_granularity: granularity.try_into().ok()?,
        };
        Some((new, which))
    }

    /// For the driver, with a mark that is the holder's to make.
    pub fn of_driver(self) -> ublk::New {
        let NewDisk { depth, max_io_bytes, block_size, .. } = self;
        ublk::New {
            limits: ublk::Limits { depth, max_io_bytes, block_size },
            physical_block_size: self.physical_block_size,
            bytes: self.bytes,
            read_only: self.read_only,
            max_discard_bytes: self.max_discard_bytes,
            max_zeroes_bytes: self.max_zeroes_bytes,
            discard_granularity: self.discard_granularity,
            mark: 0,
            number: None,
        }
    }
}

impl Request {
    /// As it is sent.
    pub fn text(&self) -> String {
        match self {
            Request::Mount(uuid) => format!("mount {uuid}"),
            Request::Take(uuid) => format!("take {uuid}"),
            Request::Keep(uuid) => format!("keep {uuid}"),
            Request::End(uuid) => format!("end {uuid}"),
            Request::List => "list".into(),
            Request::Rights => "rights".into(),
            Request::Disks => "disks".into(),
            Request::Disk(uuid, new, which) => {
                format!("disk {uuid} {}{}", new.text(), which.text())
            }
            Request::Serve(uuid) => format!("serve {uuid}"),
            Request::Stop(uuid) => format!("stop {uuid}"),
            Request::Opened(uuid) => format!("opened {uuid}"),
            Request::Resizes => "resizes".into(),
            Request::Resize(uuid, bytes) => format!("resize {uuid} {bytes}"),
            Request::VmKeep(name) => format!("vm-keep {name}"),
            Request::VmTake(name) => format!("vm-take {name}"),
            Request::VmEnd(name) => format!("vm-end {name}"),
            Request::VmList => "vm-list".into(),
        }
    }

    /// The request in a packet; `None` if it is none. There is one text for each: a name is a UUID in
    /// its one usual form, since it becomes a folder's, and so is a number.
    pub fn parse(text: &str) -> Option<Request> {
        Request::read(text).filter(|request| request.text() == text)
    }

    fn read(text: &str) -> Option<Request> {
        let Some((verb, name)) = text.split_once(' ') else {
            return match text {
                "list" => Some(Request::List),
                "rights" => Some(Request::Rights),
                "disks" => Some(Request::Disks),
                "resizes" => Some(Request::Resizes),
                "vm-list" => Some(Request::VmList),
                _ => None,
            };
        };
        if let Some(of_vm) = verb.strip_prefix("vm-") {
            let name = Some(name.to_owned()).filter(|name| is_name(name))?;
            return match of_vm {
                "keep" => Some(Request::VmKeep(name)),
                "take" => Some(Request::VmTake(name)),
                "end" => Some(Request::VmEnd(name)),
                _ => None,
            };
        }
        let (name, more) = name.split_once(' ').map_or((name, None), |(n, more)| (n, Some(more)));
        let uuid = Uuid::try_parse(name).ok()?;
        match (verb, more) {
            ("mount", None) => Some(Request::Mount(uuid)),
            ("take", None) => Some(Request::Take(uuid)),
            ("keep", None) => Some(Request::Keep(uuid)),
            ("end", None) => Some(Request::End(uuid)),
            ("disk", Some(numbers)) => {
                let (new, which) = NewDisk::parse(numbers)?;
                Some(Request::Disk(uuid, new, which))
            }
            ("serve", None) => Some(Request::Serve(uuid)),
            ("stop", None) => Some(Request::Stop(uuid)),
            ("opened", None) => Some(Request::Opened(uuid)),
            ("resize", Some(text)) => {
                let bytes: u64 = text.parse().ok()?;
                (bytes.to_string() == text).then_some(Request::Resize(uuid, bytes))
            }
            _ => None,
        }
    }
}

/// Whether a connection may have that name.
fn is_name(name: &str) -> bool {
    (1..=NAME_MAX).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_graphic())
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

// As many as there may be.
const _: () = assert!("ok".len() + VMS_MAX * (1 + NAME_MAX) <= PACKET_BYTES);

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    #[test]
    fn requests_are_read_as_they_are_written_and_nothing_else_is() {
        let uuid = Uuid::from_u128(7);
        let new = NewDisk {
            depth: 64,
            max_io_bytes: 524_288,
            block_size: 512,
            physical_block_size: 4096,
            bytes: 1 << 50,
            read_only: true,
            max_discard_bytes: 1 << 30,
            max_zeroes_bytes: 0,
            discard_granularity: 65536,
        };
        for request in [
            Request::Mount(uuid),
            Request::Take(uuid),
            Request::Keep(uuid),
            Request::End(uuid),
            Request::List,
            Request::Rights,
            Request::Disks,
            Request::Disk(uuid, new, Which::Any),
            Request::Disk(uuid, new, Which::Number(0)),
            Request::Disk(uuid, new, Which::Left(u32::MAX)),
            Request::Serve(uuid),
            Request::Stop(uuid),
            Request::Opened(uuid),
            Request::Resizes,
            Request::Resize(uuid, 1 << 50),
            Request::VmKeep("vm-1".into()),
            Request::VmTake("a.b:c@d_e".into()),
            Request::VmEnd("n".repeat(NAME_MAX)),
            Request::VmList,
        ] {
            assert_eq!(Request::parse(&request.text()), Some(request));
        }
        for name in ["", "a b", "\u{e9}", "a\n", &"n".repeat(NAME_MAX + 1)] {
            assert_eq!(Request::parse(&format!("vm-keep {name}")), None, "{name}");
        }
        for more in [
            "",
            "1 2 3",
            "1 2 3 4 5 6 7 8 9",
            "65536 2 3 4 5 0 7 8 9",
            "1 2 3 4 5 0 7 8 -9",
            "+1 2 3 4 5 0 7 8 9",
            "1 2 3 4 5 0 7 8 09",
            "1 2 3 4 5 0 7 8 9 10",
            "1 2 3 4 5 0 7 8 9 number",
            "1 2 3 4 5 0 7 8 9 number 4294967296",
            "1 2 3 4 5 0 7 8 9 left 1 2",
            "1 2 3 4 5 0 7 8 9 ",
        ] {
            assert_eq!(Request::parse(&format!("disk {uuid} {more}")), None, "{more}");
        }
        assert_eq!(Request::parse(&format!("stop {uuid} 1")), None);
        assert_eq!(Request::parse(&format!("serve {uuid} 77")), None);
        assert_eq!(Request::parse(&format!("resize {uuid}")), None);
        for wrong in ["-1", "+1", "01", "1 2"] {
            assert_eq!(Request::parse(&format!("resize {uuid} {wrong}")), None, "{wrong}");
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
        send(&a, "ok", &vec![a.as_fd(); FDS_MAX]).unwrap();
        assert_eq!(receive(&b).unwrap().1.len(), FDS_MAX);
        assert!(send(&a, "ok", &vec![a.as_fd(); FDS_MAX + 1]).is_err());
        let names = format!("ok{}", format!(" {}", Uuid::nil()).repeat(SESSIONS_MAX));
        send(&a, &names, &[]).unwrap();
        assert_eq!(receive(&b).unwrap().0, names);
        drop(a);
        assert_eq!(receive(&b).unwrap().0, "");
    }
}
