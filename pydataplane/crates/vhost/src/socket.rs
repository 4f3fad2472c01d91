//! The UNIX socket that a controller listens on.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};

/// Bytes of a socket's path, at most (`sun_path` of unix(7) less its NUL).
pub const MAX_PATH: usize = 107;

/// Peers that may wait until they are taken.
const BACKLOG: i32 = 128;

/// Where to listen and who may connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketOptions {
    /// Path of the socket.
    pub path: PathBuf,
    /// Permission bits; connecting needs the write bit.
    pub mode: u32,
    /// Owner, or the process's own user.
    pub uid: Option<u32>,
    /// Group, or the process's own group.
    pub gid: Option<u32>,
}

impl SocketOptions {
    /// Mode 0660, owned by the process's user and group.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        SocketOptions { path: path.into(), mode: 0o660, uid: None, gid: None }
    }
}

/// Why a socket could not be made. Nothing that was there before was touched.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Longer than the kernel takes.
    #[error(
        "socket path {path} has {len} bytes, {MAX_PATH} are possible; choose a shorter name or directory"
    )]
    TooLong {
        /// The path.
        path: PathBuf,
        /// Its length in bytes.
        len: usize,
    },
    /// Some process accepts connections on it.
    #[error(
        "socket {0} is in use: a process listens on it; stop that process or choose another name"
    )]
    InUse(PathBuf),
    /// A file of another kind has the name.
    #[error("{0} exists and is not a socket; remove it or choose another name")]
    NotASocket(PathBuf),
    /// A system call failed.
    #[error("cannot {operation} socket {path}: {why}")]
    Os {
        /// What was tried.
        operation: &'static str,
        /// The path.
        path: PathBuf,
        /// The cause.
        why: io::Error,
    },
}

/// A listening socket, whose file is removed when it is dropped.
#[derive(Debug)]
pub(crate) struct Listener {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode of our file: never remove somebody else's. None: another process has it.
    file: Option<(u64, u64)>,
}

impl Listener {
    /// Listens on `options.path`. A socket file that nobody listens on is replaced.
    pub(crate) fn bind(options: &SocketOptions) -> Result<Self, SocketError> {
        let socket = Self::bind_closed(options)?;
        socket.open()?;
        Ok(socket)
    }

    /// As [`Listener::bind`], but whoever connects is refused at once, until [`Listener::open`].
    pub(crate) fn bind_closed(options: &SocketOptions) -> Result<Self, SocketError> {
        let path = &options.path;
        let len = path.as_os_str().len();
        if len > MAX_PATH {
            return Err(SocketError::TooLong { path: path.clone(), len });
        }
        let os = |operation| move |why| SocketError::Os { operation, path: path.clone(), why };
        remove_stale(path)?;
        let bound = || {
            let fd = socket_with(
                AddressFamily::UNIX,
                SocketType::STREAM,
                SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
                None,
            )?;
            bind(&fd, &SocketAddrUnix::new(path)?)?;
            Ok(UnixListener::from(fd))
        };
        let listener = bound().map_err(|why| match why {
            Errno::ADDRINUSE => SocketError::InUse(path.clone()),
            why => os("bind")(why.into()),
        })?;
        let made = fs::symlink_metadata(path).map_err(os("examine"))?;
        let socket =
            Listener { listener, path: path.clone(), file: Some((made.dev(), made.ino())) };
        if options.uid.is_some() || options.gid.is_some() {
            chown(path, options.uid, options.gid).map_err(os("change the owner of"))?;
        }
        fs::set_permissions(path, fs::Permissions::from_mode(options.mode))
            .map_err(os("change the mode of"))?;
        Ok(socket)
    }

    /// Lets peers connect; does nothing to one that listens.
    pub(crate) fn open(&self) -> Result<(), SocketError> {
        listen(&self.listener, BACKLOG).map_err(|why| SocketError::Os {
            operation: "listen on",
            path: self.path.clone(),
            why: why.into(),
        })
    }

    /// One that another process listened on, at `path`, which must still be a socket.
    pub(crate) fn adopt(fd: OwnedFd, path: &Path) -> Result<Self, SocketError> {
        let os = |operation| move |why| SocketError::Os { operation, path: path.into(), why };
        let there = fs::symlink_metadata(path).map_err(os("examine"))?;
        let listener = UnixListener::from(fd);
        listener.set_nonblocking(true).map_err(os("set up"))?;
        let file = there.file_type().is_socket().then_some((there.dev(), there.ino()));
        let file = file.ok_or_else(|| SocketError::NotASocket(path.into()))?;
        Ok(Listener { listener, path: path.into(), file: Some(file) })
    }

    /// The listening descriptor, for another process; the socket's file stays.
    pub(crate) fn hand_over(mut self) -> io::Result<OwnedFd> {
        let fd = self.listener.as_fd().try_clone_to_owned()?;
        self.file = None;
        Ok(fd)
    }

    /// The next connection that waits, if one does.
    pub(crate) fn accept(&self) -> io::Result<Option<UnixStream>> {
        match self.listener.accept() {
            Ok((stream, _)) => Ok(Some(stream)),
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::WouldBlock
                        | io::ErrorKind::Interrupted
                        | io::ErrorKind::ConnectionAborted
                ) =>
            {
                Ok(None)
            }
            Err(e) => Err(e),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let Some(file) = self.file else { return };
        let ours = fs::symlink_metadata(&self.path).is_ok_and(|m| (m.dev(), m.ino()) == file);
        if ours {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Connects without waiting for whoever listens to take connections.
fn connect_now(path: &Path) -> Result<(), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)
}

/// Removes the socket file at `path` if nobody listens on it.
fn remove_stale(path: &Path) -> Result<(), SocketError> {
    let os = |operation| move |why| SocketError::Os { operation, path: path.into(), why };
    let there = match fs::symlink_metadata(path) {
        Ok(there) => there,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(os("examine")(e)),
    };
    if !there.file_type().is_socket() {
        return Err(SocketError::NotASocket(path.into()));
    }
    match connect_now(path) {
        Err(Errno::CONNREFUSED) => fs::remove_file(path).map_err(os("remove the stale")),
        Err(Errno::NOENT) => Ok(()),
        // A full backlog (EAGAIN), a datagram socket (EPROTOTYPE): somebody has it.
        _ => Err(SocketError::InUse(path.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mode_is_set_and_the_file_goes_with_the_listener() {
        let dir = tempfile::tempdir().unwrap();
        let options = SocketOptions::new(dir.path().join("s"));
        let listener = Listener::bind(&options).unwrap();
        assert_eq!(fs::metadata(&options.path).unwrap().mode() & 0o7777, 0o660);
        drop(listener);
        assert!(!options.path.exists());
    }

    #[test]
    fn stale_file_is_replaced_and_one_in_use_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let options = SocketOptions::new(dir.path().join("s"));
        drop(UnixListener::bind(&options.path).unwrap());
        assert!(options.path.exists());
        let first = Listener::bind(&options).unwrap();
        let error = Listener::bind(&options).unwrap_err().to_string();
        assert!(error.contains("is in use"), "{error}");
        assert!(options.path.exists());
        drop(first);
    }

    #[test]
    fn a_closed_one_refuses_at_once_until_it_is_opened() {
        let dir = tempfile::tempdir().unwrap();
        let options = SocketOptions::new(dir.path().join("s"));
        let listener = Listener::bind_closed(&options).unwrap();
        assert_eq!(connect_now(&options.path), Err(Errno::CONNREFUSED));
        for _ in 0..2 {
            listener.open().unwrap();
        }
        assert_eq!(connect_now(&options.path), Ok(()));
        assert!(listener.accept().unwrap().is_some());
        assert!(listener.accept().unwrap().is_none(), "it does not wait");
    }

    #[test]
    fn a_listener_that_takes_no_connections_is_in_use_and_keeps_nobody_waiting() {
        let dir = tempfile::tempdir().unwrap();
        let options = SocketOptions::new(dir.path().join("s"));
        let flags = SocketFlags::CLOEXEC;
        let busy = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        rustix::net::bind(&busy, &SocketAddrUnix::new(&options.path).unwrap()).unwrap();
        rustix::net::listen(&busy, 0).unwrap();
        while connect_now(&options.path).is_ok() {}
        assert!(matches!(Listener::bind(&options), Err(SocketError::InUse(_))));
    }

    #[test]
    fn path_too_long_and_other_files_are_refused_untouched() {
        let dir = tempfile::tempdir().unwrap();
        let long = SocketOptions::new(dir.path().join("n".repeat(120)));
        let error = Listener::bind(&long).unwrap_err().to_string();
        assert!(error.contains("107 are possible"), "{error}");
        let file = SocketOptions::new(dir.path().join("f"));
        fs::write(&file.path, "data").unwrap();
        let error = Listener::bind(&file).unwrap_err().to_string();
        assert!(error.contains("not a socket"), "{error}");
        assert_eq!(fs::read(&file.path).unwrap(), b"data");
        let nowhere = SocketOptions::new(dir.path().join("no/such/dir"));
        let error = Listener::bind(&nowhere).unwrap_err().to_string();
        assert!(error.contains("cannot bind"), "{error}");
    }

    #[test]
    fn somebody_elses_file_is_left_alone_at_drop() {
        let dir = tempfile::tempdir().unwrap();
        let options = SocketOptions::new(dir.path().join("s"));
        let listener = Listener::bind(&options).unwrap();
        fs::remove_file(&options.path).unwrap();
        fs::write(&options.path, "other").unwrap();
        drop(listener);
        assert_eq!(fs::read(&options.path).unwrap(), b"other");
    }
}
