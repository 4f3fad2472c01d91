//! What a peer can send to a controller's socket: any messages, with any descriptors.

use std::io::{self, ErrorKind, IoSlice, Read};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::host::host;

/// Bytes of a message before its body.
const HEADER: usize = 12;
/// Messages of one peer at most.
const MAX_MESSAGES: usize = 64;
/// Bytes of a file with content.
const CONTENT: usize = 1 << 16;
/// How long the controller may take to be done with a peer.
const DEADLINE: Duration = Duration::from_secs(8);

/// A descriptor that comes with a message; `content` is that of a file.
fn descriptor(kind: u8, content: &[u8]) -> Option<OwnedFd> {
    let memory = |size| {
        let fd = memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("a memfd");
        ftruncate(&fd, size).expect("its size");
        fd
    };
    match kind % 8 {
        0 | 1 => None,
        // An in-flight region of any content, for instance.
        2 => {
            let fd = memory(CONTENT as u64);
            rustix::io::pwrite(&fd, content, 0).expect("a memfd takes it");
            Some(fd)
        }
        3 | 4 => Some(eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd")),
        5 => Some(memory(1 << 20)),
        6 => Some(memory(u64::from(kind) << 8)),
        _ => Some(std::fs::File::open("/dev/null").expect("a device").into()),
    }
}

/// One peer: each message has a request, flags, a kind of descriptor, a number of them, the length of
/// its body, and its body. No input may end the process or keep the controller from the next peer.
pub fn messages(data: &[u8]) {
    let socket = &host().socket;
    // libFuzzer's alarm interrupts it.
    let mut peer = again(|| UnixStream::connect(socket)).expect("it listens");
    peer.set_nonblocking(true).expect("a socket");
    let mut rest = data;
    for _ in 0..MAX_MESSAGES {
        let Some((&[request, flags, kind, count, len], more)) = rest.split_first_chunk() else {
            break;
        };
        let (body, more) = more.split_at(usize::from(len).min(more.len()));
        rest = more;
        let mut bytes = Vec::with_capacity(HEADER + body.len());
        bytes.extend(u32::from(request % 48).to_ne_bytes());
        // Version 1, mostly.
        bytes.extend((u32::from(flags) ^ 1).to_ne_bytes());
        bytes.extend((body.len() as u32).to_ne_bytes());
        bytes.extend(body);
        let content = &more[..more.len().min(CONTENT)];
        let fds: Vec<_> = (0..count % 4).filter_map(|_| descriptor(kind, content)).collect();
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        }
        let bytes = [IoSlice::new(&bytes)];
        let mut send = || sendmsg(&peer, &bytes, &mut control, SendFlags::NOSIGNAL);
        if again(|| send().map_err(Into::into)).is_err() {
            break;
        }
        // Answers are not waited for, but make no peer that takes none.
        let _ = peer.read(&mut [0; 4096]);
    }
    // It reads up to the end, leaves what was mapped, and hangs up.
    peer.set_nonblocking(false).expect("a socket");
    peer.set_read_timeout(Some(DEADLINE)).expect("a timeout");
    _ = peer.shutdown(Shutdown::Write);
    let mut answers = [0; 4096];
    loop {
        match again(|| peer.read(&mut answers)) {
            Ok(0) => break,
            Ok(_) => {}
            Err(why) if why.kind() == ErrorKind::ConnectionReset => break,
            Err(why) => panic!("the controller does not leave a peer that is gone: {why}"),
        }
    }
}

/// Does it until no signal interrupts it.
fn again<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(why) if why.kind() == ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}
