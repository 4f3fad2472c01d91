//! Who may connect, and whose the controller becomes.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use peer::Process;

use super::server::{POLLED_CONTROL, Server};
use crate::lun::Target;
use crate::owner::Refusal;
use crate::session::End;
use crate::socket::Listener;

/// Connections taken one after the other: strangers that come in great numbers keep the thread
/// neither from its peer nor, for long, the owner from its turn.
const MAX_ACCEPTS: u32 = 32;
/// How long nobody is let in after that many.
const ACCEPT_PAUSE: Duration = Duration::from_millis(2);

impl Server {
    /// Takes the connections that wait, until one is served.
    pub(super) fn accept(&mut self) {
        for _ in 0..MAX_ACCEPTS {
            let stream = match self.listener.as_ref().map(Listener::accept) {
                Some(Ok(Some(stream))) => stream,
                None | Some(Ok(None)) => return,
                Some(Err(why)) => {
                    let name = &self.controller.name;
                    tracing::error!(controller = name, "cannot accept a connection: {why}");
                    // Out of descriptors, most likely: do not spin.
                    std::thread::sleep(POLLED_CONTROL);
                    return;
                }
            };
            let comer = match Process::of_peer(&stream) {
                Ok(comer) => Arc::new(comer),
                Err(why) => {
                    let name = &self.controller.name;
                    tracing::debug!(controller = name, "a peer that cannot be told is gone: {why}");
                    continue;
                }
            };
            let admitted = self.controller.owner.lock().admit(&comer);
            match admitted {
                Ok(()) => return self.welcome(stream, comer),
                Err(why) => self.refusals.refused(&self.controller.name, &comer, &why),
            }
        }
        self.banned = self.banned.max(Some(Instant::now() + ACCEPT_PAUSE));
    }

    /// Serves a peer that may connect, if there is no other.
    fn welcome(&mut self, stream: UnixStream, comer: Arc<Process>) {
        let name = &self.controller.name;
        let there = self.client.as_ref().filter(|_| self.peer.is_some());
        match (&self.peer, there) {
            // Whoever has the connection of a process that ended is another.
            (Some(_), Some(client)) if client.is_gone() => {
                self.end(&End::Broken(format!("{client} has ended, and {comer} came")));
                self.successor = Some((stream, comer));
            }
            (Some(peer), Some(client)) if peer.spoke() => {
                let why =
                    format!("a second peer: {client} is connected, and a controller serves one VM");
                self.refusals.refused(name, &comer, &why);
                self.banned = Some(Instant::now() + POLLED_CONTROL);
            }
            (Some(_), _) => {
                self.end(&End::Broken("it never said anything, and another came".into()));
                self.successor = Some((stream, comer));
            }
            (None, _) if self.ending.is_some() => {
                let why = "I/O of the peer before has not ended; see what its volumes are on";
                self.refusals.refused(name, &comer, &why);
                self.banned = Some(Instant::now() + POLLED_CONTROL);
            }
            (None, _) => self.begin(stream, comer),
        }
    }

    /// Makes the controller the peer's own, recorded.
    pub(super) fn claim(&mut self) -> Result<(), End> {
        let Some(client) = &self.client else { return Ok(()) };
        let controller = &self.controller;
        let refused = |why: Refusal| End::Broken(format!("{client} may not use it: {why}"));
        let (is_new, own) = {
            let mut owner = controller.owner.lock();
            owner.admit(client).map_err(refused)?;
            (owner.is_new_to(client), owner.is_bound_to(client))
        };
        if !own {
            // Not under the lock, which others take to look: this waits for a disk.
            if let Some(journal) = &controller.journal {
                journal.record(&controller.name, client.identity()).map_err(|why| {
                    End::Broken(format!("that {client} owns it cannot be recorded: {why}"))
                })?;
            }
            let mut owner = controller.owner.lock();
            owner.admit(client).map_err(refused)?;
            owner.bind(Arc::clone(client));
            tracing::info!(controller = controller.name, "it belongs to {client}");
        }
        controller.owner.lock().serves(Arc::clone(client));
        if is_new {
            controller.targets().iter().flatten().for_each(Target::count_anew);
        }
        self.claimed = true;
        Ok(())
    }

    /// Somebody named an owner: a peer of another process has to go.
    pub(super) fn owner_changed(&mut self) {
        self.claimed = false;
        let (Some(peer), Some(client)) = (&self.peer, &self.client) else { return };
        let stays = {
            let mut owner = self.controller.owner.lock();
            owner.is(client) || (!peer.spoke() && owner.admit(client).is_ok())
        };
        if !stays {
            let why = format!("it belongs to {client} no more");
            self.end(&End::Broken(why));
        }
    }
}
