//! The new program's part: it takes everything over from the one that serves.

use super::channel::{Channel, ChannelError};
use super::keys;
use super::message::{
    Hello, MemoryState, Message, OutlookState, RpcClientState, TargetState, Welcome,
};
use super::{
    ANSWER_TIMEOUT, OLDEST, PREPARE_TIMEOUT, READY_TIMEOUT, RPC_TIMEOUT, SAYS_ALL, VERSION, now_ns,
    unsaid,
};
use crate::app::App;
use crate::flusherror::FlushError;
use crate::restore::{self, Made};
use crate::rpcsocket;
use crate::state::Config;
use rpc::socket::SocketError;
use rpc::{Listener, Parked, ParkedClient};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vhost_scsi::handover::{ControllerHandover, DroppedLater, Fds};

/// The connection to the program that serves.
pub struct Arrival {
    channel: Channel,
    /// Process of the program that serves.
    pid: u32,
    /// Whether it says all that it knows; see [`unsaid`].
    says_all: bool,
}

/// What the old program gave, set up but not served yet.
pub struct Arrived {
    channel: Channel,
    rpc: Rpc,
    pid: u32,
    held_at_ns: u64,
    says_all: bool,
}

/// The RPC socket and its clients. Not a [`Parked`] yet: who drops one removes the socket.
struct Rpc {
    listener: OwnedFd,
    clients: Vec<ParkedClient>,
}

/// A takeover that is done.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    /// Process of the program before.
    pub from_pid: u32,
    /// How long guests were not served.
    pub pause: Duration,
}

impl Arrival {
    /// Connects to the target whose upgrade socket is `path`, and agrees with it on a version.
    ///
    /// # Errors
    /// In one sentence: none serves there, or it does not agree.
    pub fn new(path: &Path) -> Result<Arrival, String> {
        let shown = path.display();
        let stream = UnixStream::connect(path).map_err(|e| {
            format!(
                "no target waits for a new program on {shown} ({e}): start one without --take-over"
            )
        })?;
        let channel = Channel::new(stream).map_err(|e| e.to_string())?;
        let program = env!("CARGO_PKG_VERSION").to_owned();
        let hello = Hello { oldest: OLDEST, newest: VERSION, program };
        let failed = |e: ChannelError| format!("the target on {shown}: {e}");
        let soon = || Instant::now() + ANSWER_TIMEOUT;
        channel.say(&Message::Hello(hello), soon()).map_err(failed)?;
        match channel.receive(soon()).map_err(failed)?.0 {
            Message::Welcome(Welcome { version, pid, .. })
                if (OLDEST..=VERSION).contains(&version) =>
            {
                Ok(Arrival { channel, pid, says_all: version >= SAYS_ALL })
            }
            Message::Welcome(Welcome { version, program, .. }) => Err(format!(
                "virtlun-target {program} speaks version {version}, and this one {OLDEST} to \
                 {VERSION}: stop that one and start this one instead"
            )),
            Message::Failed { why } => Err(why),
            _ => Err(format!("the target on {shown} did not say welcome")),
        }
    }

    /// Takes everything over into `app`, which has nothing yet; nothing is served. On an
    /// error the process must end without taking anything apart: it is the old one's again, which is
    /// to be told ([`Arrival::fail`]).
    ///
    /// # Errors
    /// In one sentence: what did not come, or does not go on.
    pub fn take_over(self, app: &Arc<App>) -> Result<Arrived, (Arrival, String)> {
        match self.prepare(app) {
            Ok((rpc, held_at_ns)) => {
                let Arrival { channel, pid, says_all } = self;
                Ok(Arrived { channel, rpc, pid, held_at_ns, says_all })
            }
            Err(why) => Err((self, why)),
        }
    }

    /// Tells the old program why it has to go on. It ends this one.
    pub fn fail(&self, why: &str) {
        let failed = Message::Failed { why: why.to_owned() };
        _ = self.channel.say(&failed, Instant::now() + ANSWER_TIMEOUT);
    }

    fn prepare(&self, app: &Arc<App>) -> Result<(Rpc, u64), String> {
        let say = |message: &Message| {
            let said = self.channel.say(message, Instant::now() + ANSWER_TIMEOUT);
            said.map_err(|e| e.to_string())
        };
        let unsaid = match self.says_all {
            true => None,
            false => {
                Some(unsaid::flush_errors(&rpcsocket::of(&app.paths.rpc_socket), ANSWER_TIMEOUT)?)
            }
        };
        say(&Message::Ready)?;
        // The old program waits for RPC requests first.
        let (first, fds, controllers) = self.receive_all(READY_TIMEOUT + RPC_TIMEOUT)?;
        let Message::Outlook(outlook) = first else {
            return Err("the old program did not say what is about to come".into());
        };
        let made = expect(app, *outlook, fds, controllers)?;
        say(&Message::Expecting)?;
        // For I/O that is in flight.
        let (first, fds, controllers) = self.receive_all(app.drain_timeout + PREPARE_TIMEOUT)?;
        let Message::Target(state) = first else {
            return Err("the old program did not say what it has".into());
        };
        let held_at_ns = state.held_at_ns;
        let rpc = resume(app, *state, fds, controllers, made, unsaid.as_ref())?;
        say(&Message::Prepared)?;
        match self.channel.receive(Instant::now() + PREPARE_TIMEOUT) {
            Ok((Message::Go, _)) => Ok((rpc, held_at_ns)),
            Ok((Message::Failed { why }, _)) => Err(why),
            Ok(_) => Err("the old program did not say go".into()),
            Err(e) => Err(e.to_string()),
        }
    }

    /// A message about the target, which may take `timeout` to come, and its controllers.
    fn receive_all(
        &self,
        timeout: Duration,
    ) -> Result<(Message, Fds, Vec<ControllerHandover>), String> {
        let first = Instant::now() + timeout;
        let (first, fds) = match self.channel.receive(first).map_err(|e| e.to_string())? {
            (Message::Failed { why }, _) => return Err(why),
            first => first,
        };
        let mut controllers = Vec::new();
        let deadline = Instant::now() + PREPARE_TIMEOUT;
        loop {
            match self.channel.receive(deadline).map_err(|e| e.to_string())? {
                (Message::Controller(state), fds) => {
                    let dropped_later = DroppedLater::default();
                    controllers.push(ControllerHandover { state: *state, fds, dropped_later });
                }
                (Message::End { controllers: count }, _) if count == controllers.len() => {
                    return Ok((first, fds, controllers));
                }
                (Message::Failed { why }, _) => return Err(why),
                _ => return Err("not all controllers came from the old program".into()),
            }
        }
    }
}

/// Makes what can be made while the old program serves: controllers without targets, the memory of their
/// guests, and files of disks, which have to answer: open, but not locked, as one process at a time may use
/// them. Returned as far as it is made.
fn expect(
    app: &Arc<App>,
    outlook: OutlookState,
    mut fds: Fds,
    controllers: Vec<ControllerHandover>,
) -> Result<Made, String> {
    let lock = File::from(fds.take(outlook.state_lock).map_err(|e| e.to_string())?);
    let none = BTreeMap::new();
    let config =
        Config::inherit(&app.paths.state_dir, lock, outlook.config, &none, &BTreeMap::new());
    *app.config() = config.map_err(|e| e.to_string())?;
    app.log.set(outlook.log_level)?;
    app.controllers.expect(controllers).map_err(|e| e.to_string())?;
    let calls = app.with_methods(|methods| restore::controllers(app, methods))?;
    app.controllers.prepare();
    Ok(Made { calls, opened: restore::open_disks(app)? })
}

/// Makes what the old program had, as after a restart, but for what is `made`, and lets sessions go
/// on, held. `unsaid`: failed flushes that it does not tell of here.
fn resume(
    app: &Arc<App>,
    state: TargetState,
    mut fds: Fds,
    controllers: Vec<ControllerHandover>,
    made: Made,
    unsaid: Option<&BTreeMap<String, FlushError>>,
) -> Result<Rpc, String> {
    let lock = File::from(fds.take(state.state_lock).map_err(|e| e.to_string())?);
    let config = Config::inherit(
        &app.paths.state_dir,
        lock,
        state.config,
        &state.unrestored,
        &state.flush_errors,
    );
    let mut config = config.map_err(|e| e.to_string())?;
    if let Some(unsaid) = unsaid {
        config.add_flush_errors(unsaid).map_err(|e| e.to_string())?;
    }
    if let Some(key) = made.calls.keys().find(|key| config.get(key).is_none()) {
        return Err(format!("{key} was deleted meanwhile: try again"));
    }
    *app.config() = config;
    app.log.set(state.log_level)?;
    let memory = state.memory.into_iter().map(|MemoryState { bdev, file }| {
        fds.take(file).map(|file| (bdev, file)).map_err(|e| e.to_string())
    });
    app.inherit_memory(memory.collect::<Result<_, _>>()?);
    keys::take(&app.keys, state.keys, &mut fds)?;
    app.controllers.inherit(controllers).map_err(|e| e.to_string())?;
    app.initialise_with(|methods| {
        restore::recorded(app, methods, made);
        Ok(())
    })?;
    complete(app, &state.unrestored, &state.unloaded)?;
    app.controllers.take_over().map_err(|e| e.to_string())?;
    let listener = fds.take(state.rpc.listener).map_err(|e| e.to_string())?;
    let clients = state.rpc.clients.into_iter().map(|RpcClientState { stream, received }| {
        let stream = UnixStream::from(fds.take(stream).map_err(|e| e.to_string())?);
        Ok(ParkedClient { stream, received })
    });
    Ok(Rpc { listener, clients: clients.collect::<Result<_, String>>()? })
}

/// Whether everything is there that was there in the old program.
fn complete(
    app: &App,
    unrestored: &BTreeMap<String, String>,
    unloaded: &BTreeMap<String, String>,
) -> Result<(), String> {
    if let Some((key, why)) =
        app.config().problems().into_iter().find(|(key, _)| !unrestored.contains_key(key))
    {
        return Err(format!("{key} does not go on: {why}"));
    }
    match app.lvstore_problems().iter().find(|(bdev, _)| !unloaded.contains_key(*bdev)) {
        Some((_, why)) => Err(why.clone()),
        None => Ok(()),
    }
}

impl Arrived {
    /// Serves the guests: from here on everything is ours. How it went.
    pub fn serve(&self, app: &App) -> Taken {
        app.controllers.release();
        let pause = Duration::from_nanos(now_ns().saturating_sub(self.held_at_ns));
        if !self.says_all {
            app.config().rewrite();
        }
        Taken { from_pid: self.pid, pause }
    }

    /// Tells the old program that it may end; the RPC server to go on with, at `path`.
    ///
    /// # Errors
    /// There is no socket at `path` any more.
    pub fn finish(self, taken: Taken, path: &Path) -> Result<Parked, SocketError> {
        let pause_us = taken.pause.as_micros() as u64;
        let said =
            self.channel.say(&Message::Serving { pause_us }, Instant::now() + ANSWER_TIMEOUT);
        if let Err(e) = said {
            tracing::warn!("the program before: {e}");
        }
        let Rpc { listener, clients } = self.rpc;
        Ok(Parked { listener: Listener::adopt(listener, path)?, clients })
    }
}
