//! Descriptors whose owner cannot be told of another file.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::net::UnixStream;

use rustix::fs::fstat;

/// Gives `first` to `begin`, which builds what reads and writes it, and then puts `then` in its
/// place: what was built goes on with `then` under the same descriptor number. For a library that
/// keeps a connection's state private and can only be brought into that state by messages, which
/// come from a socket pair of our own first.
///
/// # Errors
/// Those of `begin`; the kernel has no descriptor left; what was built closed `first`.
pub fn begin_with<T>(
    first: UnixStream,
    then: BorrowedFd<'_>,
    begin: impl FnOnce(UnixStream) -> io::Result<T>,
) -> io::Result<T> {
    let number = first.as_raw_fd();
    let same = first.try_clone()?;
    let built = begin(first)?;
    replace(number, same.as_fd(), then)?;
    Ok(built)
}

/// Makes the descriptor `number`, which must still be the socket `was`, one of `now`'s file.
fn replace(number: RawFd, was: BorrowedFd<'_>, now: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: only looked at, and whether it is what it should be is the question.
    let there = fstat(unsafe { BorrowedFd::borrow_raw(number) })?;
    let wanted = fstat(was)?;
    if (there.st_dev, there.st_ino) != (wanted.st_dev, wanted.st_ino) {
        return Err(io::Error::other("the socket was closed meanwhile"));
    }
    // SAFETY: `number` is open and names our own socket (checked above), which its owner keeps; it
    // stays that owner's, open as before, and closed by it alone.
    match unsafe { libc::dup3(now.as_raw_fd(), number, libc::O_CLOEXEC) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[test]
    fn what_was_built_goes_on_with_the_other_socket() {
        let (first, mut feed) = UnixStream::pair().unwrap();
        let (real, mut peer) = UnixStream::pair().unwrap();
        feed.write_all(b"1").unwrap();
        peer.write_all(b"2").unwrap();
        let mut byte = [0];
        let mut built = begin_with(first, real.as_fd(), |mut stream| {
            stream.read_exact(&mut byte)?;
            Ok(stream)
        })
        .unwrap();
        assert_eq!(&byte, b"1");
        drop(real);
        built.read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"2");
        built.write_all(b"3").unwrap();
        peer.read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"3");
        drop(built);
        assert_eq!(peer.read(&mut byte).unwrap(), 0);
    }

    #[test]
    fn a_number_that_is_another_file_now_is_left_alone() {
        let (first, _feed) = UnixStream::pair().unwrap();
        let (real, _peer) = UnixStream::pair().unwrap();
        let built = begin_with(first, real.as_fd(), |first| {
            drop(first);
            Ok(())
        });
        assert!(built.is_err());
    }
}
