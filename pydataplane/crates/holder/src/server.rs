//! The holder: one thread that answers packets and otherwise sleeps.

use peer::Credentials;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Uid, chownat};
use rustix::io::Errno;
use rustix::net::sockopt::set_socket_send_buffer_size;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen,
    socket_with,
};
use rustix::process::umask;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use ublk::Control;
use uuid::Uuid;

use crate::disks::{Disk, Disks, Found};
use crate::links::{self, Links};
use crate::mounts::Mounts;
use crate::store;
use crate::vms::Vms;
use crate::wire::{self, PACKET_BYTES, Request};
use crate::{SESSIONS_MAX, Session};

/// Connections at a time: a target, its successor, and tools.
const PEERS_MAX: usize = 16;

/// How long one without sessions and peers waits for some before it ends, if it is to.
const IDLE: Duration = Duration::from_secs(5);

/// How often one looks after [`Options::wait`] for what nobody serves: a device that its server left so
/// late.
const AGAIN: Duration = Duration::from_secs(1);

/// How the holder runs.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where it listens.
    pub socket: PathBuf,
    /// Where it mounts.
    pub dir: PathBuf,
    /// Who may connect beside its own user and root.
    pub uid: Option<u32>,
    /// How long sessions are kept while nobody is connected.
    pub wait: Duration,
    /// End when there is nothing to hold and nobody connected.
    pub exit_when_idle: bool,
}

/// A session, and what puts its mount back.
struct Held {
    session: Session,
    tree: Option<OwnedFd>,
}

struct Holder {
    mounts: Mounts,
    sessions: BTreeMap<Uuid, Held>,
    disks: Option<Disks>,
    links: Links,
    vms: Vms,
}

/// A packet's answer.
enum Reply<'a> {
    /// Without descriptors.
    Text(String),
    /// With those of a mount.
    Session(&'a Session),
    /// With the queue of a device.
    Disk(String, OwnedFd),
    /// With those of a VM's connection.
    Vm(&'a [OwnedFd]),
    /// It comes when a command has ended.
    Later,
}

type Answer<'a> = Result<Reply<'a>, String>;

/// Listens and serves until it is idle (if it is to end then) or killed; has devices made by `ublk`, if
/// that recovers them. `ready` is called once it listens.
///
/// # Errors
/// Another holder listens there, or the system refuses the socket.
pub fn serve(options: &Options, ublk: Option<Control>, ready: impl FnOnce()) -> io::Result<()> {
    let mounts = Mounts::kept(&options.dir).map_err(io::Error::other)?;
    let disks = ublk.and_then(|control| Disks::new(control, &options.dir));
    let stored = store::taken();
    let sessions = stored.into_iter().map(|(uuid, session)| (uuid, Held { session, tree: None }));
    let mut holder = Holder {
        links: Links::new(mounts.folder()),
        mounts,
        sessions: sessions.collect(),
        disks,
        vms: Vms::default(),
    };
    holder.check_links();
    for (uuid, held) in &mut holder.sessions {
        held.tree = holder.mounts.tree(*uuid);
    }
    let listener = listen_at(&options.socket, options.uid)?;
    ready();
    let mut peers: Vec<OwnedFd> = Vec::new();
    let mut alone_since = Instant::now();
    let mut told_full = false;
    loop {
        let alone = peers.is_empty().then(|| alone_since.elapsed());
        if let Some(alone) = alone {
            if options.exit_when_idle && holder.is_empty() && alone >= IDLE {
                let _ = std::fs::remove_file(&options.socket);
                return Ok(());
            }
            if alone >= options.wait {
                holder.give_up(alone);
            }
        }
        let limit = alone.map(|alone| match holder.is_empty() {
            true => IDLE.saturating_sub(alone),
            false => options.wait.saturating_sub(alone),
        });
        // What could not be given up yet is looked at again.
        let least = if alone >= Some(options.wait) { AGAIN } else { Duration::from_millis(1) };
        let limit = limit.map(|limit| limit.max(least));
        let limit = limit.filter(|_| options.exit_when_idle || !holder.is_empty());
        let limit = limit.map(|d| Timespec { tv_sec: d.as_secs() as i64, tv_nsec: 1_000_000 });
        let mut watched: Vec<_> = std::iter::once(&listener)
            .chain(&peers)
            .map(|fd| PollFd::new(fd, PollFlags::IN))
            .collect();
        if let Some(disks) = &holder.disks {
            watched.push(PollFd::from_borrowed_fd(disks.fd(), PollFlags::IN));
        }
        let before_vms = watched.len();
        watched.extend(holder.vms.watched());
        match poll(&mut watched, limit.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        let moved: Vec<_> = watched.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(watched);
        if moved[before_vms..].contains(&true) {
            holder.vms.forget_closed();
        }
        let mut moved_peers = moved[1..].iter();
        peers.retain(|peer| match moved_peers.next() {
            Some(true) => holder.serve(peer),
            _ => true,
        });
        // After the requests: what ended meanwhile moves no descriptor.
        for (peer, answer) in std::iter::from_fn(|| holder.disks.as_mut()?.ended()) {
            // Who is gone needs none.
            _ = answered(&peer, answer.map(|()| Reply::Text("ok".into())));
        }
        if moved[0] {
            let peer = accepted(&listener, options.uid);
            let full = peers.len() >= PEERS_MAX;
            if full && !std::mem::replace(&mut told_full, true) {
                tracing::warn!("refused: {PEERS_MAX} programs are connected, as many as can be");
            }
            peers.extend(peer.filter(|_| !full));
        }
        told_full &= peers.len() >= PEERS_MAX;
        if !peers.is_empty() {
            alone_since = Instant::now();
        }
    }
}

/// A listening socket in place of one that nobody listens at any more.
fn listen_at(path: &Path, uid: Option<u32>) -> io::Result<OwnedFd> {
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir)?;
    }
    let address = SocketAddrUnix::new(path)?;
    let (flags, kind) = (SocketFlags::CLOEXEC, SocketType::SEQPACKET);
    let socket = socket_with(AddressFamily::UNIX, kind, flags, None)?;
    if connect(&socket, &address).is_ok() {
        return Err(io::Error::new(
            io::ErrorKind::AddrInUse,
            format!("another holder listens at {}", path.display()),
        ));
    }
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let socket = socket_with(AddressFamily::UNIX, kind, flags, None)?;
    let mask = umask(Mode::RWXG | Mode::RWXO | Mode::XUSR);
    let bound = bind(&socket, &address);
    umask(mask);
    bound?;
    if let Some(uid) = uid {
        give(path, uid)?;
    }
    listen(&socket, PEERS_MAX as i32)?;
    Ok(socket)
}

/// Gives the socket that was made at `path` to `uid`; the folder may be that user's, who may have put
/// something else there.
fn give(path: &Path, uid: u32) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let made = rustix::fs::open(path, flags, Mode::empty())?;
    let found = rustix::fs::fstat(&made)?;
    let is_socket = FileType::from_raw_mode(found.st_mode) == FileType::Socket;
    if !is_socket || found.st_nlink != 1 || found.st_uid != rustix::process::geteuid().as_raw() {
        let why = format!("{} is not the socket that was made there", path.display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    }
    chownat(&made, "", Some(Uid::from_raw(uid)), None, AtFlags::EMPTY_PATH)?;
    Ok(())
}

/// The next connection, if it is of somebody who may.
fn accepted(listener: &OwnedFd, uid: Option<u32>) -> Option<OwnedFd> {
    accept_with(listener, SocketFlags::CLOEXEC).ok().filter(|peer| {
        let Ok(who) = Credentials::of_peer(peer) else { return false };
        let them = who.uid;
        let may = them == 0 || them == rustix::process::geteuid().as_raw() || Some(them) == uid;
        if !may {
            let pid = who.pid.map_or(0, |pid| pid.as_raw_pid());
            tracing::warn!(pid, uid = them, "refused: not a user that may");
        }
        // A list of all names is one packet.
        may && set_socket_send_buffer_size(peer, 2 * PACKET_BYTES).is_ok()
    })
}

/// Sends an answer, unless it comes later.
fn answered(peer: &OwnedFd, answer: Answer<'_>) -> io::Result<()> {
    match answer {
        Ok(Reply::Later) => Ok(()),
        Ok(Reply::Text(text)) => wire::send(peer, &text, &[]),
        Ok(Reply::Session(s)) => wire::send(peer, "ok", &[s.fuse.as_fd(), s.record.as_fd()]),
        // No copy stays here: a device whose queue is open somewhere is not recovered.
        Ok(Reply::Disk(text, queue)) => wire::send(peer, &text, &[queue.as_fd()]),
        Ok(Reply::Vm(fds)) => {
            let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            wire::send(peer, "ok", &fds)
        }
        Err(why) => {
            tracing::warn!("{why}");
            wire::send(peer, &format!("failed {why}"), &[])
        }
    }
}

impl Holder {
    /// Answers one packet; whether the connection goes on.
    fn serve(&mut self, peer: &OwnedFd) -> bool {
        let Ok((text, fds)) = wire::receive(peer) else { return false };
        if text.is_empty() {
            return false;
        }
        let answer = match Request::parse(&text) {
            Some(request) => self.answer(request, fds, peer),
            None => Err(format!("{text:?} is not known to this holder")),
        };
        answered(peer, answer).is_ok()
    }

    fn answer(&mut self, request: Request, fds: Vec<OwnedFd>, peer: &OwnedFd) -> Answer<'_> {
        let text = |text: &str| Ok(Reply::Text(text.to_owned()));
        let copy = || peer.try_clone().map_err(|e| format!("no descriptor is free: {e}"));
        match request {
            Request::Mount(uuid) => {
                self.mount(uuid)?;
                let held = self.sessions.get(&uuid).ok_or("it was not kept")?;
                Ok(Reply::Session(&held.session))
            }
            Request::Take(uuid) => match self.sessions.get(&uuid) {
                Some(held) => Ok(Reply::Session(&held.session)),
                None => text("none"),
            },
            Request::Keep(uuid) => {
                let session = wire::session(fds).ok_or("a session is two descriptors")?;
                self.check_room(uuid)?;
                store::put(uuid, &session);
                let tree = self.mounts.tree(uuid);
                self.sessions.insert(uuid, Held { session, tree });
                text("ok")
            }
            Request::End(uuid) => {
                self.end(uuid)?;
                text("ok")
            }
            Request::List => {
                let names = self.sessions.keys().map(|uuid| format!(" {uuid}"));
                text(&names.fold("ok".to_owned(), |text, name| text + &name))
            }
            Request::Rights => text(&format!("ok {}", crate::rights::text()?)),
            Request::Disks => text(if self.disks.is_some() { "ok" } else { "none" }),
            Request::Disk(uuid, new, which) => {
                match self.disks()?.get(uuid, &new.of_driver(), which)? {
                    Found::Disk(Disk { id, left, depth, max_io_bytes, queue }) => {
                        let noted = self.links.set(uuid, id);
                        noted.map_err(|e| format!("cannot note whose device {id} is: {e}"))?;
                        let left = if left { "left" } else { "new" };
                        let told = format!("ok {left} {id} {depth} {max_io_bytes}");
                        Ok(Reply::Disk(told, queue))
                    }
                    Found::Busy => text("busy"),
                    Found::Taken => text("taken"),
                    Found::Other(id) => text(&format!("other {id}")),
                    Found::None => text("none"),
                }
            }
            Request::Serve(uuid) => {
                self.disks()?.serve(uuid, copy()?)?;
                Ok(Reply::Later)
            }
            Request::Stop(uuid) => match self.stop(uuid, copy()?)? {
                true => Ok(Reply::Later),
                false => text("ok"),
            },
            Request::Resizes => {
                text(if self.disks.as_ref().is_some_and(Disks::resizes) { "ok" } else { "none" })
            }
            Request::Resize(uuid, bytes) => {
                self.disks()?.resize(uuid, bytes)?;
                text("ok")
            }
            Request::VmKeep(name) => {
                self.vms.keep(name, fds)?;
                text("ok")
            }
            Request::VmTake(name) => match self.vms.get(&name) {
                Some(fds) => Ok(Reply::Vm(fds)),
                None => text("none"),
            },
            Request::VmEnd(name) => {
                self.vms.end(&name);
                text("ok")
            }
            Request::VmList => {
                text(&self.vms.names().fold("ok".to_owned(), |text, name| text + " " + name))
            }
            Request::Opened(uuid) => {
                text(if self.disks()?.is_open(uuid)? { "ok 1" } else { "ok 0" })
            }
        }
    }

    fn disks(&mut self) -> Result<&mut Disks, String> {
        let none = "this kernel has no ublk that recovers devices, or the holder may not use it";
        self.disks.as_mut().ok_or_else(|| none.to_owned())
    }

    /// Takes a device away; whether there is one, and so whether the answer comes later.
    fn stop(&mut self, uuid: Uuid, peer: OwnedFd) -> Result<bool, String> {
        let stops = self.disks()?.stop(uuid, Some(peer))?;
        self.forget_link(uuid);
        Ok(stops)
    }

    fn forget_link(&self, uuid: Uuid) {
        if let Err(e) = self.links.remove(uuid) {
            tracing::warn!(%uuid, "its device is still noted: {e}");
        }
    }

    /// Forgets whose devices are gone, or were another holder's.
    fn check_links(&self) {
        let noted = self.links.all().unwrap_or_else(|e| {
            tracing::warn!("whose devices there are is not known: {e}");
            Vec::new()
        });
        for (uuid, named) in noted {
            let number = links::number(&named);
            let there = number.zip(self.disks.as_ref());
            if !there.is_some_and(|(id, disks)| disks.is_number(uuid, id)) {
                self.forget_link(uuid);
            }
        }
    }

    /// Whether there is nothing that would be lost with this process, or given up.
    fn is_empty(&self) -> bool {
        let disks = self.disks.as_ref().is_none_or(Disks::is_empty);
        self.sessions.is_empty() && disks && self.vms.is_empty()
    }

    fn check_room(&self, uuid: Uuid) -> Result<(), String> {
        match self.sessions.len() < SESSIONS_MAX || self.sessions.contains_key(&uuid) {
            true => Ok(()),
            false => Err(format!("{SESSIONS_MAX} sessions are held already: end some")),
        }
    }

    fn mount(&mut self, uuid: Uuid) -> Result<(), String> {
        self.check_room(uuid)?;
        if let Some(held) = self.sessions.get_mut(&uuid) {
            if !self.mounts.is_there(uuid).map_err(|e| e.to_string())? {
                let none = || format!("{} cannot be put back", self.mounts.path(uuid).display());
                let tree = held.tree.take().ok_or_else(none)?;
                self.mounts.put_back(uuid, tree).map_err(|e| e.to_string())?;
                held.tree = self.mounts.tree(uuid);
            }
            return Ok(());
        }
        let session = self.mounts.mount(uuid).map_err(|e| e.to_string())?;
        store::put(uuid, &session);
        let tree = self.mounts.tree(uuid);
        self.sessions.insert(uuid, Held { session, tree });
        Ok(())
    }

    fn end(&mut self, uuid: Uuid) -> Result<(), String> {
        let unmounted = self.mounts.unmount(uuid);
        if self.sessions.remove(&uuid).is_some() {
            store::remove(uuid);
        }
        unmounted.map_err(|e| e.to_string())
    }

    /// Ends what nobody has served for too long: its users get errors.
    fn give_up(&mut self, waited: Duration) {
        self.vms.give_up(waited.as_secs());
        if let Some(disks) = &mut self.disks {
            disks.give_up();
            self.check_links();
        }
        for uuid in self.sessions.keys().copied().collect::<Vec<_>>() {
            tracing::error!(%uuid, "nobody serves it for {} s: given up", waited.as_secs());
            if let Err(why) = self.end(uuid) {
                tracing::error!("{why}");
            }
        }
    }
}
