//! The target's end of the connection.

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf, absolute};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use uuid::Uuid;

use crate::wire::{self, NewDisk, Request, Which};
use crate::{Disk, Found, Session};

/// How long an answer is waited for, if nothing else is said: mounting takes a millisecond.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a holder that was just started is waited for.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// Why the holder did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody answers.
    #[error("no holder answers on {path}: {source}; start virtlun-holder")]
    Absent {
        /// Its socket.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// It has not answered yet: what it was asked for takes long.
    #[error("the holder on {path} has not answered for {seconds} s")]
    Late {
        /// Its socket.
        path: PathBuf,
        /// How long was waited, in seconds.
        seconds: u64,
    },
    /// It refused, in its own words.
    #[error("the holder on {path} says: {why}")]
    Refused {
        /// Its socket.
        path: PathBuf,
        /// The sentence.
        why: String,
    },
}

/// A connection to a holder, made anew when it is lost. Thread-safe; its methods wait for the
/// holder's answer, so they are for control threads.
#[derive(Debug)]
pub struct Client {
    path: PathBuf,
    timeout: Duration,
    connection: Mutex<Option<OwnedFd>>,
}

impl Client {
    /// To the holder at `path`; nothing is sent yet.
    pub fn new(path: &Path) -> Client {
        Client::with_timeout(path, ANSWER_TIMEOUT)
    }

    /// The same, which waits so long for an answer.
    pub fn with_timeout(path: &Path, timeout: Duration) -> Client {
        Client { path: path.to_owned(), timeout, connection: Mutex::new(None) }
    }

    /// Starts the program `program` as a holder of mounts in `dir` at this client's path, unless one
    /// answers there, and connects. It is in a process group of its own, outlives this process, and
    /// ends when it has nothing to hold. `uid` may connect to it beside root and this user.
    ///
    /// # Errors
    /// [`ClientError::Absent`]: it cannot be started, or does not listen within 10 s.
    pub fn start(&self, program: &Path, dir: &Path, uid: Option<u32>) -> Result<(), ClientError> {
        if self.connected().is_ok() {
            return Ok(());
        }
        let absent = |source| ClientError::Absent { path: self.path.clone(), source };
        let mut command = Command::new(program);
        // It works in another folder than this process.
        let socket = absolute(&self.path).map_err(absent)?;
        let dir = absolute(dir).map_err(absent)?;
        command.arg("--exit-when-idle").arg("--socket").arg(socket).arg("--dir").arg(dir);
        if let Some(uid) = uid {
            command.arg("--user").arg(uid.to_string());
        }
        // A signal to the target's group, or the end of its terminal, is not for the holder.
        // Nor is what the service manager passed.
        for name in ["NOTIFY_SOCKET", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"] {
            command.env_remove(name);
        }
        command.current_dir("/").process_group(0).stdin(Stdio::null()).stdout(Stdio::null());
        // It is not collected: it outlives this process, or ends when nobody is connected.
        let mut child = command.spawn().map_err(absent)?;
        let end = Instant::now() + START_TIMEOUT;
        while let Err(e) = self.connected() {
            let ended = child.try_wait().ok().flatten();
            if let Some(status) = ended.filter(|status| !status.success()) {
                return Err(absent(io::Error::other(format!("it ended with {status}"))));
            }
            if Instant::now() > end {
                return Err(e);
            }
            thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Connects unless it is connected.
    ///
    /// # Errors
    /// [`ClientError::Absent`].
    pub fn connected(&self) -> Result<(), ClientError> {
        self.connect(&mut self.connection.lock())
    }

    /// Connects unless it is connected, and asks for something: a holder that has no room for one more
    /// takes a connection, and ends it.
    ///
    /// # Errors
    /// [`ClientError::Absent`] and [`ClientError::Late`].
    pub fn answers(&self) -> Result<(), ClientError> {
        match self.vms() {
            // One that is older does not know what was asked.
            Ok(_) | Err(ClientError::Refused { .. }) => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// Whether the connection was not lost, as far as [`Client::wait_lost`] and requests have seen.
    pub fn is_connected(&self) -> bool {
        self.connection.lock().is_some()
    }

    fn connect(&self, connection: &mut Option<OwnedFd>) -> Result<(), ClientError> {
        if connection.is_none() {
            let open = || -> io::Result<OwnedFd> {
                let (flags, kind) = (SocketFlags::CLOEXEC, SocketType::SEQPACKET);
                let socket = socket_with(AddressFamily::UNIX, kind, flags, None)?;
                set_socket_timeout(&socket, Timeout::Recv, Some(self.timeout))?;
                set_socket_timeout(&socket, Timeout::Send, Some(self.timeout))?;
                connect(&socket, &SocketAddrUnix::new(&self.path)?)?;
                Ok(socket)
            };
            let absent = |source| ClientError::Absent { path: self.path.clone(), source };
            *connection = Some(open().map_err(absent)?);
        }
        Ok(())
    }

    /// Waits until the connection that there is now is lost; at once where there is none.
    pub fn wait_lost(&self) {
        let copy = self.connection.lock().as_ref().and_then(|fd| fd.try_clone().ok());
        let Some(copy) = copy else { return };
        loop {
            // Nothing but the end of the connection is asked for.
            let mut watched = [PollFd::new(&copy, PollFlags::RDHUP)];
            match poll(&mut watched, None) {
                Err(Errno::INTR) => {}
                _ => break,
            }
        }
        let mut connection = self.connection.lock();
        let same = |fd: &OwnedFd| {
            let id = |fd: BorrowedFd<'_>| rustix::fs::fstat(fd).map(|s| s.st_ino).ok();
            id(fd.as_fd()) == id(copy.as_fd())
        };
        connection.take_if(|fd| same(fd));
    }

    /// Ends the connection: [`Client::wait_lost`] returns.
    pub fn disconnect(&self) {
        if let Some(connection) = self.connection.lock().take() {
            let _ = rustix::net::shutdown(&connection, rustix::net::Shutdown::Both);
        }
    }

    /// Asks once more where the connection was lost: each request may be repeated.
    fn ask(
        &self,
        request: Request,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(String, Vec<OwnedFd>), ClientError> {
        let mut connection = self.connection.lock();
        let mut last = io::Error::from(Errno::NOTCONN);
        for _ in 0..2 {
            self.connect(&mut connection)?;
            let Some(socket) = connection.as_ref() else { continue };
            let asked = wire::send(socket, &request.text(), fds);
            match asked.and_then(|()| wire::receive(socket)) {
                Ok((text, fds)) if !text.is_empty() => {
                    return match text.strip_prefix("failed ") {
                        None => Ok((text, fds)),
                        Some(why) => Err(ClientError::Refused {
                            path: self.path.clone(),
                            why: why.to_owned(),
                        }),
                    };
                }
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    // The answer is not to be taken for another one's.
                    *connection = None;
                    let seconds = self.timeout.as_secs();
                    return Err(ClientError::Late { path: self.path.clone(), seconds });
                }
                Err(e) => last = e,
            }
            *connection = None;
        }
        Err(ClientError::Absent { path: self.path.clone(), source: last })
    }

    fn session(&self, fds: Vec<OwnedFd>) -> Result<Session, ClientError> {
        let why = "no descriptors came with the answer".to_owned();
        wire::session(fds).ok_or(ClientError::Refused { path: self.path.clone(), why })
    }

    /// Mounts a session, or puts the mount of one that is held back where it was unmounted.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn mount(&self, uuid: Uuid) -> Result<Session, ClientError> {
        let (_, fds) = self.ask(Request::Mount(uuid), &[])?;
        self.session(fds)
    }

    /// The session of that name, if it is held. The holder keeps it, too.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn take(&self, uuid: Uuid) -> Result<Option<Session>, ClientError> {
        match self.ask(Request::Take(uuid), &[])? {
            (text, _) if text == "none" => Ok(None),
            (_, fds) => self.session(fds).map(Some),
        }
    }

    /// Gives a session to a holder that does not have it: the one before was lost.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn keep(
        &self,
        uuid: Uuid,
        fuse: BorrowedFd<'_>,
        record: BorrowedFd<'_>,
    ) -> Result<(), ClientError> {
        self.ask(Request::Keep(uuid), &[fuse, record]).map(drop)
    }

    /// Unmounts a session and lets go of it; fine where there is none.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn end(&self, uuid: Uuid) -> Result<(), ClientError> {
        self.ask(Request::End(uuid), &[]).map(drop)
    }

    /// Whether the holder can have devices of ublk made; one that is older cannot.
    ///
    /// # Errors
    /// [`ClientError::Absent`].
    pub fn disks(&self) -> Result<bool, ClientError> {
        match self.ask(Request::Disks, &[]) {
            Ok((text, _)) => Ok(text == "ok"),
            Err(ClientError::Refused { .. }) => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// The device of a volume, the one that another process has left or a new one, as `which` says.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn disk(&self, uuid: Uuid, new: &NewDisk, which: Which) -> Result<Found, ClientError> {
        let (text, fds) = self.ask(Request::Disk(uuid, *new, which), &[])?;
        match text.as_str() {
            "busy" => return Ok(Found::Busy),
            "taken" => return Ok(Found::Taken),
            "none" => return Ok(Found::None),
            _ => {}
        }
        if let Some(id) = text.strip_prefix("other ").and_then(|id| id.parse().ok()) {
            return Ok(Found::Other(id));
        }
        let why = || format!("{text:?} is no device");
        let refused = || ClientError::Refused { path: self.path.clone(), why: why() };
        let words: Vec<_> = text.split(' ').collect();
        let ["ok", left, id, depth, bytes] = words[..] else { return Err(refused()) };
        let numbers = id.parse().ok().zip(depth.parse().ok()).zip(bytes.parse().ok());
        let queue = <[OwnedFd; 1]>::try_from(fds).ok();
        let found = numbers.zip(queue).map(|(((id, depth), max_io_bytes), [queue])| Disk {
            id,
            left: left == "left",
            depth,
            max_io_bytes,
            queue,
        });
        found.map(Found::Disk).ok_or_else(refused)
    }

    /// Has the device of a volume be seen, or go on. Returns as soon as it is served, which another
    /// thread does.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn serve(&self, uuid: Uuid) -> Result<(), ClientError> {
        self.ask(Request::Serve(uuid), &[]).map(drop)
    }

    /// Takes the device of a volume away; returns as soon as the one who serves it has answered all
    /// that it has. Fine where there is none.
    ///
    /// # Errors
    /// [`ClientError`]; [`ClientError::Late`]: it is taken away when that has ended.
    pub fn stop(&self, uuid: Uuid) -> Result<(), ClientError> {
        self.ask(Request::Stop(uuid), &[]).map(drop)
    }

    /// Whether a mount, a loop device or the like has the device of a volume.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn opened(&self, uuid: Uuid) -> Result<bool, ClientError> {
        self.ask(Request::Opened(uuid), &[]).map(|(text, _)| text == "ok 1")
    }

    /// Whether devices can change their size while they are used. A holder that is older cannot do it.
    ///
    /// # Errors
    /// [`ClientError::Absent`].
    pub fn resizes(&self) -> Result<bool, ClientError> {
        match self.ask(Request::Resizes, &[]) {
            Ok((text, _)) => Ok(text == "ok"),
            Err(ClientError::Refused { .. }) => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Has the device of a volume be of so many bytes, whole sectors; its users are told by the kernel.
    ///
    /// # Errors
    /// [`ClientError`]; the kernel is older than Linux 6.16.
    pub fn resize(&self, uuid: Uuid, bytes: u64) -> Result<(), ClientError> {
        self.ask(Request::Resize(uuid, bytes), &[]).map(drop)
    }

    /// Keeps the descriptors of a VM's connection instead of what there was of the controller `name`:
    /// the record of who serves it, the connection, others.
    ///
    /// # Errors
    /// [`ClientError`]; a holder that is older does not know it.
    pub fn keep_vm(&self, name: &str, fds: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
        self.ask(Request::VmKeep(name.to_owned()), fds).map(drop)
    }

    /// The descriptors that are kept of the controller `name`, which stay kept.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn take_vm(&self, name: &str) -> Result<Option<Vec<OwnedFd>>, ClientError> {
        match self.ask(Request::VmTake(name.to_owned()), &[])? {
            (text, _) if text == "none" => Ok(None),
            (_, fds) => Ok(Some(fds)),
        }
    }

    /// Lets go of the connection of a VM; fine where there is none.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn end_vm(&self, name: &str) -> Result<(), ClientError> {
        self.ask(Request::VmEnd(name.to_owned()), &[]).map(drop)
    }

    /// The controllers whose VMs' connections are kept.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn vms(&self) -> Result<Vec<String>, ClientError> {
        let (text, _) = self.ask(Request::VmList, &[])?;
        Ok(text.split(' ').skip(1).map(str::to_owned).collect())
    }

    /// The sessions that are held.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn list(&self) -> Result<Vec<Uuid>, ClientError> {
        let (text, _) = self.ask(Request::List, &[])?;
        Ok(text.split(' ').skip(1).filter_map(|name| Uuid::try_parse(name).ok()).collect())
    }
}
