//! Messages with descriptors, over a UNIX stream.
//!
//! A message is its length in bytes and its number of descriptors (two 32-bit integers of the
//! host), its JSON, and the descriptors, each [`PACK`] of them with one byte (SCM_RIGHTS, of which
//! unix(7) has 253 a time).

use super::message::Message;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};
use vhost_scsi::handover::Fds;

/// Descriptors that go together.
const PACK: usize = 128;
/// Bytes of one message, at most.
const MAX_BYTES: usize = 64 << 20;
/// Descriptors of one message, at most.
const MAX_FDS: usize = 16 * 1024;
/// Pause while more descriptors are on their way than the kernel allows (`ETOOMANYREFS`).
const RIGHTS_PAUSE: Duration = Duration::from_millis(1);

/// Why a message did not go or come.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// The other program is gone.
    #[error("the other program has ended")]
    Gone,
    /// It says nothing, or takes nothing.
    #[error("the other program does not answer")]
    Timeout,
    /// It does not speak this language.
    #[error("the other program's message is not understood: {0}")]
    Message(String),
    /// The operating system says no.
    #[error("messages to the other program: {0}")]
    Os(#[from] io::Error),
}

/// One end of a connection of two programs.
#[derive(Debug)]
pub struct Channel {
    stream: UnixStream,
}

impl Channel {
    /// Over `stream`.
    pub fn new(stream: UnixStream) -> io::Result<Channel> {
        stream.set_nonblocking(false)?;
        Ok(Channel { stream })
    }

    /// Sends a message without descriptors.
    pub fn say(&self, message: &Message, deadline: Instant) -> Result<(), ChannelError> {
        self.send(message, &Fds::default(), deadline)
    }

    /// Sends a message.
    pub fn send(
        &self,
        message: &Message,
        fds: &Fds,
        deadline: Instant,
    ) -> Result<(), ChannelError> {
        let text = serde_json::to_vec(message).map_err(|e| ChannelError::Message(e.to_string()))?;
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let mut bytes = Vec::with_capacity(text.len() + 8);
        bytes.extend((text.len() as u32).to_ne_bytes());
        bytes.extend((fds.len() as u32).to_ne_bytes());
        bytes.extend(text);
        self.stream.set_write_timeout(Some(left(deadline)?))?;
        (&self.stream).write_all(&bytes).map_err(meaning)?;
        for pack in fds.chunks(PACK) {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(PACK))];
            loop {
                let mut control = SendAncillaryBuffer::new(&mut space);
                control.push(SendAncillaryMessage::ScmRights(pack));
                let byte = [IoSlice::new(&[0])];
                match sendmsg(&self.stream, &byte, &mut control, SendFlags::NOSIGNAL) {
                    Ok(_) => break,
                    Err(Errno::INTR) => {}
                    Err(Errno::TOOMANYREFS) => {
                        left(deadline)?;
                        thread::sleep(RIGHTS_PAUSE);
                    }
                    Err(e) => return Err(meaning(e.into())),
                }
            }
        }
        Ok(())
    }

    /// The next message.
    pub fn receive(&self, deadline: Instant) -> Result<(Message, Fds), ChannelError> {
        let mut head = [0; 8];
        self.read(&mut head, deadline)?;
        let [a, b, c, d, e, f, g, h] = head;
        let len = u32::from_ne_bytes([a, b, c, d]) as usize;
        let count = u32::from_ne_bytes([e, f, g, h]) as usize;
        if len > MAX_BYTES || count > MAX_FDS {
            let why = format!("{len} bytes and {count} descriptors are too many");
            return Err(ChannelError::Message(why));
        }
        let mut text = vec![0; len];
        self.read(&mut text, deadline)?;
        let mut fds: Vec<OwnedFd> = Vec::with_capacity(count);
        while fds.len() < count {
            let wanted = (count - fds.len()).min(PACK);
            let before = fds.len();
            self.receive_pack(&mut fds, deadline)?;
            if fds.len() - before != wanted {
                let why = "descriptors got lost: raise LimitNOFILE";
                return Err(ChannelError::Message(why.into()));
            }
        }
        let message =
            serde_json::from_slice(&text).map_err(|e| ChannelError::Message(e.to_string()))?;
        Ok((message, Fds::new(fds)))
    }

    fn receive_pack(&self, fds: &mut Vec<OwnedFd>, deadline: Instant) -> Result<(), ChannelError> {
        self.stream.set_read_timeout(Some(left(deadline)?))?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(PACK))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let mut bytes = [IoSliceMut::new(&mut byte)];
        let got = recvmsg(&self.stream, &mut bytes, &mut control, RecvFlags::CMSG_CLOEXEC);
        if got.map_err(|e| meaning(e.into()))?.bytes == 0 {
            return Err(ChannelError::Gone);
        }
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                fds.extend(received);
            }
        }
        Ok(())
    }

    fn read(&self, bytes: &mut [u8], deadline: Instant) -> Result<(), ChannelError> {
        let mut at = 0;
        while at < bytes.len() {
            self.stream.set_read_timeout(Some(left(deadline)?))?;
            match (&self.stream).read(&mut bytes[at..]) {
                Ok(0) => return Err(ChannelError::Gone),
                Ok(n) => at += n,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(meaning(e)),
            }
        }
        Ok(())
    }
}

/// The time until then, which is not over.
fn left(deadline: Instant) -> Result<Duration, ChannelError> {
    let left = deadline.checked_duration_since(Instant::now());
    left.filter(|left| !left.is_zero()).ok_or(ChannelError::Timeout)
}

fn meaning(e: io::Error) -> ChannelError {
    match e.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => ChannelError::Timeout,
        ErrorKind::BrokenPipe | ErrorKind::ConnectionReset | ErrorKind::UnexpectedEof => {
            ChannelError::Gone
        }
        _ => ChannelError::Os(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Seek;

    fn pair() -> (Channel, Channel) {
        let (a, b) = UnixStream::pair().unwrap();
        (Channel::new(a).unwrap(), Channel::new(b).unwrap())
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[test]
    fn messages_and_many_descriptors_come_in_order() {
        let (a, b) = pair();
        let files = (0..300u32).map(|n| {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(&n.to_ne_bytes()).unwrap();
            OwnedFd::from(file)
        });
        let fds = Fds::new(files.collect());
        let sender = thread::spawn(move || {
            a.send(&Message::End { controllers: 7 }, &fds, soon()).unwrap();
            a.say(&Message::Go, soon()).unwrap();
            drop(a);
        });
        let (message, fds) = b.receive(soon()).unwrap();
        assert!(matches!(message, Message::End { controllers: 7 }));
        assert_eq!(fds.iter().count(), 300);
        for (n, fd) in fds.iter().enumerate() {
            let mut file = File::from(fd.try_clone().unwrap());
            file.rewind().unwrap();
            let mut bytes = [0; 4];
            file.read_exact(&mut bytes).unwrap();
            assert_eq!(u32::from_ne_bytes(bytes), n as u32);
        }
        assert!(matches!(b.receive(soon()).unwrap().0, Message::Go));
        sender.join().unwrap();
        assert!(matches!(b.receive(soon()), Err(ChannelError::Gone)));
    }

    #[test]
    fn silence_nonsense_and_too_much_are_told_apart() {
        let (a, b) = pair();
        let brief = Instant::now() + Duration::from_millis(20);
        assert!(matches!(b.receive(brief), Err(ChannelError::Timeout)));
        let mut bytes = vec![2, 0, 0, 0, 0, 0, 0, 0];
        bytes.extend(b"{}");
        (&a.stream).write_all(&bytes).unwrap();
        assert!(matches!(b.receive(soon()), Err(ChannelError::Message(_))));
        (&a.stream).write_all(&[0xff; 8]).unwrap();
        let why = b.receive(soon()).unwrap_err().to_string();
        assert!(why.contains("too many"), "{why}");
        drop(b);
        assert!(matches!(a.say(&Message::Go, soon()), Err(ChannelError::Gone)));
    }
}
