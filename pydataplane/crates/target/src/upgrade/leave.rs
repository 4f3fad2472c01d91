//! The old program's part: it greets a new one, gives everything away, and takes it back when the
//! new one does not come up.

use super::channel::{Channel, ChannelError};
use super::keys;
use super::message::{
    Hello, MemoryState, Message, OutlookState, RpcClientState, RpcState, TargetState, Welcome,
};
use super::{
    ANSWER_TIMEOUT, DEATH_TIMEOUT, EXPECT_TIMEOUT, OLDEST, PREPARE_TIMEOUT, READY_TIMEOUT,
    RPC_TIMEOUT, VERSION, now_ns,
};
use crate::app::App;
use crate::restore;
use export::Survives;
use peer::Credentials;
use rpc::{Listener, Methods, Parked, Phase, Server, SocketOptions};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use vhost_scsi::handover::{ControllerHandover, Fds};

/// How long the end of the thread that waits for new programs is waited for.
const END_TIMEOUT: Duration = Duration::from_secs(1);

/// The socket at which a new program is waited for: only root's and our own user's are heard.
pub struct UpgradeListener {
    wake: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

/// A new program that is ready.
#[derive(Debug)]
pub struct Successor {
    channel: Channel,
    /// Its process, which no other can take the place of.
    process: OwnedFd,
    pid: i32,
}

impl UpgradeListener {
    /// Waits at `path`; calls `on_ready` with the first new program that is ready, and is closed
    /// then.
    ///
    /// # Errors
    /// In one sentence: why nothing can listen there.
    pub fn open(
        path: &Path,
        on_ready: impl FnOnce(Successor) + Send + 'static,
    ) -> Result<UpgradeListener, String> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let wake = Arc::new(wake.map_err(|e| format!("no event for the upgrade socket: {e}"))?);
        let options = SocketOptions { mode: 0o600, group: None };
        let listener = Listener::bind(path, options).map_err(|e| e.to_string())?;
        let woken = wake.clone();
        let wait = move || {
            if let Some(successor) = wait_for_one(&listener, &woken) {
                drop(listener);
                on_ready(successor);
            }
        };
        let thread = thread::Builder::new().name("upgrade".into()).spawn(wait);
        let thread = thread.map_err(|e| format!("no thread for the upgrade socket: {e}"))?;
        Ok(UpgradeListener { wake, thread: Some(thread) })
    }
}

impl Drop for UpgradeListener {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
        let end = Instant::now() + END_TIMEOUT;
        while !thread.is_finished() && Instant::now() < end {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The first new program that becomes ready; `None`: woken.
fn wait_for_one(listener: &Listener, wake: &OwnedFd) -> Option<Successor> {
    loop {
        let mut fds =
            [PollFd::new(listener.socket(), PollFlags::IN), PollFd::new(wake, PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => {
                tracing::error!("the upgrade socket can no longer be watched: {e}");
                return None;
            }
        }
        if !fds[1].revents().is_empty() {
            return None;
        }
        let Ok((stream, _)) = listener.socket().accept() else { continue };
        match greet(stream) {
            Ok(successor) => return Some(successor),
            Err(why) => tracing::warn!("a new program does not take over: {why}"),
        }
    }
}

/// Hears a new program until it is ready.
fn greet(stream: UnixStream) -> Result<Successor, String> {
    let who = Credentials::of_peer(&stream);
    let who = who.map_err(|e| format!("who it is cannot be told: {e}"))?;
    let (own, theirs) = (rustix::process::geteuid().as_raw(), who.uid);
    if theirs != own && theirs != 0 {
        return Err(format!("it runs as user {theirs}; only user {own} and root may"));
    }
    // Opened while it is connected, so it is that process and no later one of its number.
    let pid = who.pid.ok_or("its process is of another container, and cannot be watched")?;
    let process = pidfd_open(pid, PidfdFlags::empty());
    let process = process.map_err(|e| format!("its process cannot be watched: {e}"))?;
    let channel = Channel::new(stream).map_err(|e| e.to_string())?;
    let soon = || Instant::now() + ANSWER_TIMEOUT;
    let (message, _) = channel.receive(soon()).map_err(|e| e.to_string())?;
    let Message::Hello(Hello { oldest, newest, program }) = message else {
        return Err("it did not say hello".into());
    };
    if oldest > VERSION || newest < OLDEST {
        let why = format!(
            "virtlun-target {} gives its state away in versions {OLDEST} to {VERSION}, and the new \
             program understands {oldest} to {newest}: stop this one and start the new one instead",
            env!("CARGO_PKG_VERSION")
        );
        _ = channel.say(&Message::Failed { why: why.clone() }, soon());
        return Err(why);
    }
    let welcome = Welcome {
        version: VERSION.min(newest),
        program: env!("CARGO_PKG_VERSION").into(),
        pid: process::id(),
    };
    channel.say(&Message::Welcome(welcome), soon()).map_err(|e| e.to_string())?;
    let pid = pid.as_raw_pid();
    tracing::info!(pid, program, "a new program is about to take over");
    match channel.receive(Instant::now() + READY_TIMEOUT) {
        Ok((Message::Ready, _)) => Ok(Successor { channel, process, pid }),
        Ok((Message::Failed { why }, _)) => Err(why),
        Ok(_) => Err("it did not say that it is ready".into()),
        Err(e) => Err(e.to_string()),
    }
}

impl Successor {
    /// Ends the new program, and waits until it is gone.
    fn end(&self) -> Result<(), String> {
        let killed = pidfd_send_signal(&self.process, Signal::KILL);
        if let Err(e) = killed
            && e != rustix::io::Errno::SRCH
        {
            return Err(format!("the new program (pid {}) cannot be ended: {e}", self.pid));
        }
        let timeout = Timespec { tv_sec: DEATH_TIMEOUT.as_secs() as i64, tv_nsec: 0 };
        let mut fds = [PollFd::new(&self.process, PollFlags::IN)];
        match poll(&mut fds, Some(&timeout)) {
            Ok(0) | Err(_) => Err(format!("the new program (pid {}) does not end", self.pid)),
            Ok(_) => Ok(()),
        }
    }

    fn refuse(&self, why: &str) {
        let failed = Message::Failed { why: why.to_owned() };
        _ = self.channel.say(&failed, Instant::now() + ANSWER_TIMEOUT);
    }

    /// Sends `first`, then the controllers, then the end.
    fn send_all(
        &self,
        first: &Message,
        fds: &Fds,
        controllers: &[ControllerHandover],
        deadline: Instant,
    ) -> Result<(), String> {
        let failed = |e: ChannelError| e.to_string();
        self.channel.send(first, fds, deadline).map_err(failed)?;
        for ControllerHandover { state, fds, .. } in controllers {
            let message = Message::Controller(Box::new(state.clone()));
            self.channel.send(&message, fds, deadline).map_err(failed)?;
        }
        self.channel.say(&Message::End { controllers: controllers.len() }, deadline).map_err(failed)
    }

    /// Waits for the message that says that it serves, or for its end. Whether it serves.
    fn farewell(&self) -> bool {
        match self.channel.receive(Instant::now() + ANSWER_TIMEOUT) {
            Ok((Message::Serving { pause_us }, _)) => {
                let pause_ms = pause_us as f64 / 1e3;
                tracing::info!(pid = self.pid, pause_ms, "a new program has taken over");
                true
            }
            _ => {
                tracing::error!(pid = self.pid, "the new program does not say that it serves");
                false
            }
        }
    }
}

/// Gives everything to `successor`. When it returns well, this process has nothing any more and is to
/// end without touching anything. Returns whether `successor` said that it serves: where it did not, it
/// may have died, and this process is to end as one that failed, so that a service manager starts
/// another.
///
/// # Errors
/// Why not, in one sentence; then everything is served as before.
pub fn leave(
    app: &Arc<App>,
    methods: &Arc<Methods>,
    server: Server,
    successor: &Successor,
) -> Result<bool, (Server, String)> {
    if methods.phase() != Phase::Runtime {
        let why = "the target waits for framework_start_init".to_owned();
        successor.refuse(&why);
        return Err((server, why));
    }
    if let Some(key) = app.restoring().first() {
        let why = format!("{key} still waits for its disk");
        successor.refuse(&why);
        return Err((server, why));
    }
    let exports = app.exports.list();
    if let Some(export) = exports.iter().find(|e| e.survives == Survives::Nothing) {
        let name = &export.bdev_name;
        let why = format!("the export of bdev {name} ends with this process: delete it first");
        successor.refuse(&why);
        return Err((server, why));
    }
    let parked = match server.park(RPC_TIMEOUT) {
        Ok(parked) => parked,
        Err((server, why)) => {
            successor.refuse(&why);
            return Err((server, why));
        }
    };
    let held = announce(app, successor).and_then(|()| {
        app.copies.end_all("the target is being upgraded")?;
        faults::end_all(&app.registry);
        let since = app.controllers.hold(app.drain_timeout).map_err(|e| e.to_string())?;
        Ok(now_ns().saturating_sub(since.elapsed().as_nanos() as u64))
    });
    let outcome = held.and_then(|held_at_ns| {
        let mut given = Given::default();
        let passed = give(app, &parked, successor, held_at_ns, &mut given);
        passed.or_else(|why| take_back(app, methods, successor, given).and(Err(why)))
    });
    match outcome {
        Ok(()) => {
            let serves = successor.farewell();
            parked.listener.leave();
            Ok(serves)
        }
        Err(why) => {
            successor.refuse(&why);
            match Server::resume(parked, methods.clone()) {
                Ok(server) => Err((server, why)),
                Err(e) => {
                    tracing::error!("the RPC socket cannot be served any more: {e}");
                    rbd::exit(1);
                }
            }
        }
    }
}

/// Tells the new program what is about to come, and waits until it is ready for that; guests are
/// served meanwhile. When it does not get ready, it is ended.
fn announce(app: &App, successor: &Successor) -> Result<(), String> {
    let announced = (|| {
        let mut fds = Fds::default();
        let state = {
            let config = app.config();
            let lock = config.lock().ok_or("the configuration is kept nowhere")?;
            let lock = lock.try_clone_to_owned();
            let lock = lock.map_err(|e| format!("a descriptor cannot be duplicated: {e}"))?;
            OutlookState {
                state_lock: fds.put(lock),
                config: config.items().map(|item| item.call.clone()).collect(),
                log_level: app.log.level(),
            }
        };
        let deadline = Instant::now() + EXPECT_TIMEOUT;
        let outlook = Message::Outlook(Box::new(state));
        successor.send_all(&outlook, &fds, &app.controllers.describe(), deadline)?;
        match successor.channel.receive(deadline).map_err(|e| e.to_string())? {
            (Message::Expecting, _) => Ok(()),
            (Message::Failed { why }, _) => Err(why),
            _ => Err("the new program did not say that it is ready for what comes".into()),
        }
    })();
    announced.inspect_err(|_| {
        // It has nothing that we do not have, so that it may end when it likes.
        if let Err(why) = successor.end() {
            tracing::error!("{why}");
        }
    })
}

/// What was taken apart, to be put together again.
#[derive(Default)]
struct Given {
    controllers: Vec<ControllerHandover>,
    memory: Vec<(String, OwnedFd)>,
}

/// Takes everything apart and sends it; the new program has it when this returns well.
fn give(
    app: &App,
    parked: &Parked,
    successor: &Successor,
    held_at_ns: u64,
    given: &mut Given,
) -> Result<(), String> {
    let (controllers, outcome) = app.controllers.hand_over();
    given.controllers = controllers;
    outcome.map_err(|e| e.to_string())?;
    // Their mounts are held by another process meanwhile, and whoever uses them waits.
    if !app.exports.stop() {
        return Err("I/O of an export has not ended".into());
    }
    given.memory = app.save_memory()?;
    app.close_storage()?;
    // After that: its flushes may have been the first that failed.
    let (state, fds) = describe(app, parked, &given.memory, held_at_ns)?;
    let deadline = Instant::now() + PREPARE_TIMEOUT;
    let failed = |e: ChannelError| e.to_string();
    let target = Message::Target(Box::new(state));
    successor.send_all(&target, &fds, &given.controllers, deadline)?;
    match successor.channel.receive(deadline).map_err(failed)? {
        (Message::Prepared, _) => {}
        (Message::Failed { why }, _) => return Err(why),
        _ => return Err("the new program did not say that it is prepared".into()),
    }
    successor.channel.say(&Message::Go, deadline).map_err(failed)
}

/// The target but for its controllers.
fn describe(
    app: &App,
    parked: &Parked,
    memory: &[(String, OwnedFd)],
    held_at_ns: u64,
) -> Result<(TargetState, Fds), String> {
    let mut fds = Fds::default();
    let mut dup = |fd: std::os::fd::BorrowedFd<'_>| {
        let fd = fd.try_clone_to_owned();
        fd.map(|fd| fds.put(fd)).map_err(|e| format!("a descriptor cannot be duplicated: {e}"))
    };
    let config = app.config();
    let state_lock = config.lock().ok_or("the configuration is kept nowhere")?;
    let state = TargetState {
        state_lock: dup(state_lock)?,
        config: config.items().map(|item| item.call.clone()).collect(),
        unrestored: config.problems(),
        unloaded: app.lvstore_problems().clone(),
        flush_errors: config.flush_errors(),
        log_level: app.log.level(),
        rpc: RpcState {
            listener: dup(parked.listener.socket().as_fd())?,
            clients: parked
                .clients
                .iter()
                .map(|c| {
                    let stream = dup(c.stream.as_fd())?;
                    Ok(RpcClientState { stream, received: c.received.clone() })
                })
                .collect::<Result<_, String>>()?,
        },
        memory: memory
            .iter()
            .map(|(bdev, file)| Ok(MemoryState { bdev: bdev.clone(), file: dup(file.as_fd())? }))
            .collect::<Result<_, String>>()?,
        keys: keys::put(&app.keys, &mut fds)?,
        held_at_ns,
    };
    drop(config);
    Ok((state, fds))
}

/// Goes on with what was taken apart, once the new program is gone for sure: until then it may hold
/// bdevs, and read what it was given.
fn take_back(
    app: &Arc<App>,
    methods: &Arc<Methods>,
    successor: &Successor,
    given: Given,
) -> Result<(), String> {
    if let Err(why) = successor.end() {
        tracing::error!("{why}: this one cannot go on beside it, and ends");
        rbd::exit(1);
    }
    let Given { controllers, memory } = given;
    app.inherit_memory(memory);
    let back = app.controllers.inherit(controllers);
    restore::again(app, methods);
    let back = back.and_then(|()| app.controllers.take_over());
    app.controllers.release();
    if let Err(why) = back {
        tracing::error!("not all goes on after an upgrade that failed: {why}");
    }
    Ok(())
}
