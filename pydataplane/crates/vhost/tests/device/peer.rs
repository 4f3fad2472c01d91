//! A vhost-user front end made of bytes, so that tests can also say what no library would.

use std::io::{IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

pub const GET_FEATURES: u32 = 1;
pub const SET_FEATURES: u32 = 2;
pub const SET_OWNER: u32 = 3;
pub const RESET_OWNER: u32 = 4;
pub const SET_MEM_TABLE: u32 = 5;
pub const SET_LOG_BASE: u32 = 6;
pub const SET_VRING_NUM: u32 = 8;
pub const SET_VRING_ADDR: u32 = 9;
pub const SET_VRING_BASE: u32 = 10;
pub const GET_VRING_BASE: u32 = 11;
pub const SET_VRING_KICK: u32 = 12;
pub const SET_VRING_CALL: u32 = 13;
pub const SET_VRING_ERR: u32 = 14;
pub const GET_PROTOCOL_FEATURES: u32 = 15;
pub const SET_PROTOCOL_FEATURES: u32 = 16;
pub const GET_QUEUE_NUM: u32 = 17;
pub const SET_VRING_ENABLE: u32 = 18;
pub const GET_CONFIG: u32 = 24;
pub const SET_CONFIG: u32 = 25;
pub const GET_INFLIGHT_FD: u32 = 31;
pub const SET_INFLIGHT_FD: u32 = 32;
pub const GET_MAX_MEM_SLOTS: u32 = 36;
pub const ADD_MEM_REG: u32 = 37;
pub const REM_MEM_REG: u32 = 38;

const VERSION: u32 = 1;
const REPLY: u32 = 4;
const NEED_REPLY: u32 = 8;

/// What came of a message that asked for an acknowledgement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ack {
    Done,
    Refused,
}

/// A connection to a controller.
pub struct Peer {
    stream: UnixStream,
}

impl Peer {
    pub fn connect(path: &Path) -> Peer {
        let stream = UnixStream::connect(path).expect("the controller listens");
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        Peer { stream }
    }

    /// Sends a message with `flags` beside the version.
    pub fn send_flags(&mut self, code: u32, flags: u32, body: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut message = Vec::new();
        for word in [code, VERSION | flags, body.len() as u32] {
            message.extend_from_slice(&word.to_le_bytes());
        }
        message.extend_from_slice(body);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let sent =
            sendmsg(&self.stream, &[IoSlice::new(&message)], &mut control, SendFlags::NOSIGNAL);
        // A peer that was thrown out finds out when it reads.
        if let Ok(sent) = sent {
            assert_eq!(sent, message.len());
        }
    }

    pub fn send(&mut self, code: u32, body: &[u8], fds: &[BorrowedFd<'_>]) {
        self.send_flags(code, 0, body, fds);
    }

    /// Raw bytes.
    pub fn send_bytes(&mut self, bytes: &[u8]) {
        std::io::Write::write_all(&mut self.stream, bytes).unwrap();
    }

    /// Takes what replies there are, unread; `false`: the other side is gone.
    pub fn skim(&mut self) -> bool {
        let mut bytes = [0u8; 4096];
        self.stream.set_nonblocking(true).unwrap();
        let open = loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => break false,
                Ok(_) => {}
                Err(why) => break why.kind() == std::io::ErrorKind::WouldBlock,
            }
        };
        self.stream.set_nonblocking(false).unwrap();
        open
    }

    /// Raw bytes; `false`: the other side does not take them.
    pub fn try_send_bytes(&mut self, bytes: &[u8]) -> bool {
        self.stream.set_write_timeout(Some(Duration::from_millis(100))).unwrap();
        std::io::Write::write_all(&mut self.stream, bytes).is_ok()
    }

    /// The body of the reply to `code`; `None`: the connection ended instead.
    pub fn reply(&mut self, code: u32) -> Option<Vec<u8>> {
        self.reply_with_fd(code).map(|(body, _)| body)
    }

    /// As `reply`, with the descriptor that came along.
    pub fn reply_with_fd(&mut self, code: u32) -> Option<(Vec<u8>, Option<OwnedFd>)> {
        let mut header = [0u8; 12];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let got = recvmsg(
            &self.stream,
            &mut [IoSliceMut::new(&mut header)],
            &mut control,
            RecvFlags::WAITALL,
        );
        match got.map(|m| m.bytes) {
            Ok(12) => {}
            Ok(0) | Err(rustix::io::Errno::CONNRESET) => return None,
            other => panic!("no reply to message {code}: {other:?}"),
        }
        let fd = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
        assert_eq!((word(0), word(4) & 7), (code, VERSION | REPLY));
        let mut body = vec![0; word(8) as usize];
        self.stream.read_exact(&mut body).unwrap();
        Some((body, fd))
    }

    /// Sends a message and waits for its acknowledgement; `None`: the connection ended.
    pub fn try_ask(&mut self, code: u32, body: &[u8], fds: &[BorrowedFd<'_>]) -> Option<Ack> {
        self.send_flags(code, NEED_REPLY, body, fds);
        let reply = self.reply(code)?;
        Some(match u64::from_le_bytes(reply.try_into().unwrap()) {
            0 => Ack::Done,
            _ => Ack::Refused,
        })
    }

    /// As `try_ask`, and it must be done.
    pub fn ask(&mut self, code: u32, body: &[u8], fds: &[BorrowedFd<'_>]) {
        assert_eq!(self.try_ask(code, body, fds), Some(Ack::Done), "message {code}");
    }

    /// A message that is answered with 64 bits.
    pub fn get_u64(&mut self, code: u32) -> u64 {
        self.send(code, &[], &[]);
        u64::from_le_bytes(self.reply(code).expect("a reply").try_into().unwrap())
    }

    /// GET_CONFIG.
    pub fn config(&mut self, offset: u32, size: u32) -> Vec<u8> {
        let mut body = words(&[offset, size, 0]);
        body.resize(12 + size as usize, 0);
        self.send(GET_CONFIG, &body, &[]);
        self.reply(GET_CONFIG).expect("a reply")[12..].to_vec()
    }

    /// GET_VRING_BASE.
    pub fn base(&mut self, queue: u32) -> u32 {
        self.send(GET_VRING_BASE, &words(&[queue, 0]), &[]);
        let reply = self.reply(GET_VRING_BASE).expect("a reply");
        u32::from_le_bytes(reply[4..8].try_into().unwrap())
    }

    /// A message about a queue's descriptor.
    pub fn vring_fd(&mut self, code: u32, queue: u32, fd: Option<&OwnedFd>) {
        match fd {
            Some(fd) => self.ask(code, &u64::from(queue).to_le_bytes(), &[fd.as_fd()]),
            None => self.ask(code, &(u64::from(queue) | 0x100).to_le_bytes(), &[]),
        }
    }

    /// Whether the other side has closed the connection.
    pub fn is_closed(&mut self) -> bool {
        matches!(self.stream.read(&mut [0u8; 1]), Ok(0) | Err(_))
    }

    pub fn shutdown(&self) {
        self.stream.shutdown(std::net::Shutdown::Both).unwrap();
    }
}

/// Little-endian bytes of 32-bit words.
pub fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

/// Little-endian bytes of 64-bit words.
pub fn longs(longs: &[u64]) -> Vec<u8> {
    longs.iter().flat_map(|w| w.to_le_bytes()).collect()
}
