//! What a target that a guest has broken into can send to the holder, which is root's: packets of any
//! bytes, with or without descriptors.

use crate::input::Input;
use holder::wire::{NAME_MAX, PACKET_BYTES, Request, receive, send, session};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
    sendmsg, socketpair,
};
use std::fs::File;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::AsFd;

/// Most descriptors that are sent with a packet: more than it has room for.
const FDS_SENT: usize = 4;

/// Packets, each received and read. What is taken for a request is exactly what that request is
/// written as, its name can be a folder's, and only a request for a device has anything beside that; two
/// descriptors are a session, and no other number is.
pub fn holders(data: &[u8]) {
    let mut input = Input(data);
    let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    let (ours, theirs) = socketpair(AddressFamily::UNIX, kind, flags, None).expect("a pair");
    let null = File::open("/dev/null").expect("/dev/null");
    while !input.is_empty() {
        let beside = usize::from(input.u8()) % (FDS_SENT + 1);
        let len = usize::from(input.u8());
        let packet = match len {
            // Longer than any answer.
            255 => vec![input.u8(); PACKET_BYTES + 1],
            _ => input.bytes(len).to_vec(),
        };
        let fds = [null.as_fd(); FDS_SENT];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_SENT))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if beside > 0 {
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds[..beside])));
        }
        // An empty packet looks like the end of the connection, and is one to the holder.
        sendmsg(&ours, &[IoSlice::new(&packet)], &mut control, SendFlags::NOSIGNAL)
            .expect("there is room for one packet");
        let Ok((text, fds)) = receive(&theirs) else {
            assert!(std::str::from_utf8(&packet).is_err());
            continue;
        };
        assert!(packet.starts_with(text.as_bytes()) && text.len() <= PACKET_BYTES);
        assert!(text.len() == packet.len() || text.len() == PACKET_BYTES);
        assert!(fds.len() <= beside);
        if let Some(request) = Request::parse(&text) {
            assert_eq!(request.text(), text);
            let rest = text.split_once(' ').map_or("", |(_, rest)| rest);
            let (name, more) = rest.split_once(' ').unwrap_or((rest, ""));
            assert_eq!(
                matches!(request, Request::Disk(..) | Request::Resize(..)),
                !more.is_empty()
            );
            if let Request::Disk(_, new, which) = request {
                // The driver is given these numbers as they were asked for.
                let of_driver = new.of_driver();
                assert_eq!((of_driver.limits.depth, of_driver.bytes), (new.depth, new.bytes));
                let number = which.number().map(|number| number.to_string());
                assert!(number.is_none_or(|number| more.ends_with(&format!(" {number}"))));
            }
            let hex = |c: u8| c.is_ascii_digit() || (b'a'..=b'f').contains(&c) || c == b'-';
            let named = match &request {
                // A connection's name is no folder's.
                Request::VmKeep(name) | Request::VmTake(name) | Request::VmEnd(name) => {
                    name.len() <= NAME_MAX && name.bytes().all(|c| c.is_ascii_graphic())
                }
                _ => name.is_empty() || name.len() == 36 && name.bytes().all(hex),
            };
            assert!(named, "{text}");
            send(&theirs, &request.text(), &[]).expect("an answer");
            let (answer, none) = receive(&ours).expect("the answer");
            assert!(answer == text && none.is_empty());
        }
        let count = fds.len();
        assert_eq!(session(fds).is_some(), count == 2);
    }
}
