//! Where the server listens: permissions, stale sockets, and what can be wrong with a path.

use rustix::fs::{Gid, Mode};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::fmt::Display;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

/// Longest path of a socket, in bytes: `sun_path` of 108 bytes with its terminator, and one more
/// for the dot of the name under which it is prepared.
pub const MAX_PATH_BYTES: usize = 106;

/// Connections that wait to be accepted: while those who are served have their time to ask, too.
const BACKLOG: i32 = 1024;

/// Who may connect.
#[derive(Clone, Copy, Debug)]
pub struct SocketOptions {
    /// Permission bits of the socket.
    pub mode: u32,
    /// Its group; `None` leaves the process's own.
    pub group: Option<u32>,
}

impl Default for SocketOptions {
    fn default() -> Self {
        SocketOptions { mode: 0o660, group: None }
    }
}

/// Why nothing can listen at a path.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Longer than the kernel takes.
    #[error(
        "the socket path {path} is too long: {len} bytes, at most {MAX_PATH_BYTES}; choose a \
         shorter one"
    )]
    TooLong {
        /// The path.
        path: String,
        /// Its length in bytes.
        len: usize,
    },
    /// Somebody answers there.
    #[error("the socket {path} is in use by another process; stop that one or choose another path")]
    InUse {
        /// The path.
        path: String,
    },
    /// Something else is there.
    #[error("{path} exists and is no socket; remove it or choose another path")]
    NotASocket {
        /// The path.
        path: String,
    },
    /// The operating system says no.
    #[error("cannot {operation} the socket {path}: {source}")]
    Os {
        /// The path.
        path: String,
        /// What was tried.
        operation: &'static str,
        /// Its answer.
        source: io::Error,
    },
}

/// A listening socket that is removed when dropped, if it is still the one that was made.
#[derive(Debug)]
pub struct Listener {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode of the socket file; none: another process has it.
    identity: Option<(u64, u64)>,
}

impl Listener {
    /// Listens at `path`. A socket that nobody answers at is replaced. The path appears when
    /// everything about it is right: it is prepared under another name and renamed.
    pub fn bind(path: &Path, options: SocketOptions) -> Result<Listener, SocketError> {
        let shown = || path.display().to_string();
        let len = path.as_os_str().len();
        if len > MAX_PATH_BYTES {
            return Err(SocketError::TooLong { path: shown(), len });
        }
        let failed = |operation| {
            move |e: &dyn ErrorSource| SocketError::Os {
                path: path.display().to_string(),
                operation,
                source: e.to_io(),
            }
        };
        match fs::symlink_metadata(path) {
            Ok(m) if !m.file_type().is_socket() => {
                return Err(SocketError::NotASocket { path: shown() });
            }
            Ok(_) => match try_connect(path) {
                // Nobody listens there any more.
                Err(Errno::CONNREFUSED | Errno::NOENT) => {}
                // AGAIN: somebody is too busy to answer; PROTOTYPE: a socket of another type.
                Ok(()) | Err(Errno::AGAIN | Errno::PROTOTYPE) => {
                    return Err(SocketError::InUse { path: shown() });
                }
                Err(e) => return Err(failed("examine")(&e)),
            },
            Err(_) => {}
        }
        let prepared = prepared_name(path);
        if let Err(e) = fs::remove_file(&prepared)
            && e.kind() != io::ErrorKind::NotFound
        {
            return Err(failed("prepare")(&e));
        }
        let fd = listen(&prepared, options).map_err(|(operation, e)| failed(operation)(&e))?;
        fs::rename(&prepared, path).map_err(|e| failed("name")(&e))?;
        let meta = fs::symlink_metadata(path).map_err(|e| failed("examine")(&e))?;
        Ok(Listener {
            listener: UnixListener::from(fd),
            path: path.to_owned(),
            identity: Some((meta.dev(), meta.ino())),
        })
    }

    /// One that another process listened with, at `path`.
    ///
    /// # Errors
    /// There is no socket at `path` any more.
    pub fn adopt(fd: OwnedFd, path: &Path) -> Result<Listener, SocketError> {
        let shown = || path.display().to_string();
        let os = |source| SocketError::Os { path: shown(), operation: "go on with", source };
        let meta = fs::symlink_metadata(path).map_err(os)?;
        if !meta.file_type().is_socket() {
            return Err(SocketError::NotASocket { path: shown() });
        }
        let listener = UnixListener::from(fd);
        listener.set_nonblocking(true).map_err(os)?;
        Ok(Listener { listener, path: path.into(), identity: Some((meta.dev(), meta.ino())) })
    }

    /// Leaves the socket's file to another process, which has a descriptor of the socket.
    pub fn leave(mut self) {
        self.identity = None;
    }

    /// The listening socket.
    pub fn socket(&self) -> &UnixListener {
        &self.listener
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let Some(identity) = self.identity else { return };
        let ours = fs::symlink_metadata(&self.path).is_ok_and(|m| (m.dev(), m.ino()) == identity);
        if ours {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// `.name` beside `name`.
fn prepared_name(path: &Path) -> PathBuf {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    path.with_file_name(name)
}

/// Whether somebody listens at `path`, without waiting for an answer.
fn try_connect(path: &Path) -> Result<(), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&fd, &SocketAddrUnix::new(path)?)
}

fn listen(
    path: &Path,
    options: SocketOptions,
) -> Result<OwnedFd, (&'static str, rustix::io::Errno)> {
    let fd = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
    .map_err(|e| ("create", e))?;
    let address = SocketAddrUnix::new(path).map_err(|e| ("create", e))?;
    rustix::net::bind(&fd, &address).map_err(|e| ("create", e))?;
    rustix::fs::chmod(path, Mode::from_raw_mode(options.mode))
        .map_err(|e| ("set the mode of", e))?;
    if let Some(group) = options.group {
        rustix::fs::chown(path, None, Some(Gid::from_raw(group)))
            .map_err(|e| ("set the group of", e))?;
    }
    rustix::net::listen(&fd, BACKLOG).map_err(|e| ("listen on", e))?;
    Ok(fd)
}

/// Both kinds of operating system errors.
trait ErrorSource: Display {
    fn to_io(&self) -> io::Error;
}

impl ErrorSource for io::Error {
    fn to_io(&self) -> io::Error {
        match self.raw_os_error() {
            Some(errno) => io::Error::from_raw_os_error(errno),
            None => io::Error::new(self.kind(), self.to_string()),
        }
    }
}

impl ErrorSource for rustix::io::Errno {
    fn to_io(&self) -> io::Error {
        (*self).into()
    }
}
