//! What may come from the other program of an upgrade: any bytes, and messages of the right length with
//! any text, each with any number of descriptors. The old program checks who is at the other end by
//! its user alone; the new one runs as root until it has taken the old one's place.

use crate::input::Input;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::fs::File;
use std::io::{IoSlice, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use target::upgrade::{Channel, ChannelError, Message};

/// Most descriptors that are sent at once.
const FDS_SENT: usize = 5;

/// Longer than any run: all that comes is there before it is read.
const LONG: Duration = Duration::from_secs(60);

/// Messages up to the first that is none. No input may make the reader panic, wait for what cannot
/// come, or keep descriptors that no message has; what it takes for a message is one when it is
/// written again.
pub fn upgrades(data: &[u8]) {
    let mut input = Input(data);
    let (mut ours, theirs) = UnixStream::pair().expect("a pair");
    let channel = Channel::new(theirs).expect("a channel");
    let null = File::open("/dev/null").expect("/dev/null");
    while !input.is_empty() {
        let how = input.u8();
        let count = usize::from(how >> 1) % (FDS_SENT + 1);
        let len = input.below(2048);
        let text = input.bytes(usize::from(len));
        let head = match how & 1 {
            // As it comes.
            0 => Vec::new(),
            _ => [(text.len() as u32).to_ne_bytes(), (count as u32).to_ne_bytes()].concat(),
        };
        ours.write_all(&[&head, text].concat()).expect("there is room");
        if count > 0 {
            pass(&ours, &[null.as_fd(); FDS_SENT][..count]);
        }
    }
    ours.shutdown(Shutdown::Write).expect("the end");
    let end = Instant::now() + LONG;
    loop {
        match channel.receive(end) {
            Ok((message, _)) => again(&message),
            Err(ChannelError::Timeout) => panic!("it waits after the end"),
            Err(_) => return,
        }
    }
}

fn pass(stream: &UnixStream, fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_SENT))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    sendmsg(stream, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL).expect("room");
}

fn again(message: &Message) {
    let text = serde_json::to_string(message).expect("a message is JSON");
    let read: Message = serde_json::from_str(&text).expect("and is read again");
    assert_eq!(serde_json::to_string(&read).expect("as before"), text);
}
