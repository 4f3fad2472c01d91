//! `/dev/fuse`: one read takes a request, one write answers it.

use rustix::io::{Errno, IoSlice, IoSliceMut, readv, writev};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use zerocopy::IntoBytes;

use crate::abi::{NOTIFY_RESEND, OutHeader};
use crate::call::HEAD_BYTES;

/// What a read gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// A request of this many bytes.
    Packet(usize),
    /// Nothing is asked now.
    Nothing,
    /// The connection is over: unmounted and closed, or aborted.
    Over,
}

/// The kernel's end of a mount.
#[derive(Clone, Debug)]
pub(crate) struct Device {
    fuse: Arc<OwnedFd>,
}

impl Device {
    /// Of a descriptor that does not block.
    pub fn new(fuse: Arc<OwnedFd>) -> Device {
        Device { fuse }
    }

    /// For whoever waits for requests.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fuse.as_fd()
    }

    /// Takes a request: [`HEAD_BYTES`] into `head` and what follows into `data`, so that the data of
    /// a write is where direct I/O can take it from. `data` has room for the longest write that was
    /// negotiated and, before that, 8 KiB.
    pub fn take(&self, head: &mut [u8; HEAD_BYTES], data: &mut [u8]) -> Taken {
        loop {
            let mut parts = [IoSliceMut::new(head), IoSliceMut::new(data)];
            match readv(&*self.fuse, &mut parts) {
                // The kernel has no empty packets; another file at its end does.
                Ok(0) => return Taken::Over,
                Ok(len) => return Taken::Packet(len),
                Err(Errno::AGAIN) => return Taken::Nothing,
                // NOENT: whoever asked was killed meanwhile.
                Err(Errno::INTR | Errno::NOENT) => {}
                Err(Errno::NODEV | Errno::CONNABORTED | Errno::NOTCONN) => return Taken::Over,
                Err(e) => {
                    tracing::error!("requests of an export cannot be read any more: {e}");
                    return Taken::Over;
                }
            }
        }
    }

    /// Answers with the bytes of both parts. That nobody waits any more is no failure.
    pub fn answer(&self, unique: u64, first: &[u8], second: &[u8]) {
        let len = (size_of::<OutHeader>() + first.len() + second.len()) as u32;
        self.send(&OutHeader { len, error: 0, unique }, first, second);
    }

    /// Answers with a failure.
    pub fn refuse(&self, unique: u64, why: Errno) {
        let len = size_of::<OutHeader>() as u32;
        self.send(&OutHeader { len, error: -why.raw_os_error(), unique }, &[], &[]);
    }

    fn send(&self, header: &OutHeader, first: &[u8], second: &[u8]) {
        let parts = [header.as_bytes(), first, second].map(IoSlice::new);
        match writev(&*self.fuse, &parts) {
            Ok(_) | Err(Errno::NOENT | Errno::NODEV | Errno::CONNABORTED | Errno::NOTCONN) => {}
            Err(e) => tracing::error!("the kernel does not take the answer of an export: {e}"),
        }
    }

    /// Asks the kernel to send again what was taken and not answered.
    ///
    /// # Errors
    /// INVAL: it is older than Linux 6.9.
    pub fn resend(&self) -> Result<(), Errno> {
        let len = size_of::<OutHeader>() as u32;
        let header = OutHeader { len, error: NOTIFY_RESEND, unique: 0 };
        rustix::io::write(&*self.fuse, header.as_bytes()).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    #[test]
    fn packets_are_taken_one_by_one_and_a_file_at_its_end_is_over() {
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::NONBLOCK);
        let (kernel, ours) = socketpair(AddressFamily::UNIX, kind, flags, None).unwrap();
        let device = Device::new(Arc::new(ours));
        let (mut head, mut data) = ([0; HEAD_BYTES], [0; 64]);
        assert_eq!(device.take(&mut head, &mut data), Taken::Nothing);
        rustix::io::write(&kernel, &[7; HEAD_BYTES + 3]).unwrap();
        rustix::io::write(&kernel, &[8; 5]).unwrap();
        assert_eq!(device.take(&mut head, &mut data), Taken::Packet(HEAD_BYTES + 3));
        assert_eq!((head[0], data[2], data[3]), (7, 7, 0));
        assert_eq!(device.take(&mut head, &mut data), Taken::Packet(5));
        drop(kernel);
        assert_eq!(device.take(&mut head, &mut data), Taken::Over);
    }
}
