//! Holding the device still, and moving it to another process or back.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use guestmem::{DirtyLog, RegionSpec};
use virtqueue::InflightRegion;

use super::rings::{Addresses, Kick};
use super::{Device, DeviceError};
use crate::handover::{
    Fds, InflightState, KickState, LogState, MissingFd, NexusState, RegionState, RingAddresses,
    RingState, SessionState,
};
use crate::poller::{DevicePoller, Selector};

/// How often is looked whether a replay is done.
const REPLAY_PAUSE: Duration = Duration::from_millis(1);

/// Why a device does not go on where it stood.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TakeOverError {
    /// The description does not fit its descriptors.
    #[error(transparent)]
    Fd(#[from] MissingFd),
    /// The device does not take it.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The guest's memory or log cannot be mapped here.
    #[error("{0}")]
    Memory(String),
    /// A ring does not start where it ran before.
    #[error("virtqueue {0} does not start where it stopped")]
    Ring(u32),
}

impl Device {
    /// Takes no more requests, of any queue, and waits until those in flight have ended and are
    /// published, `patience` at most. Until [`Device::release`] nothing is served.
    ///
    /// # Errors
    /// [`DeviceError::Stuck`]: some have not ended; then it is released.
    pub(crate) fn hold(&mut self, patience: Duration) -> Result<(), DeviceError> {
        let what = "an upgrade";
        let since = Instant::now();
        // What was in flight before this session is submitted first: whoever goes on knows of none.
        while self.workers.iter().any(|w| w.call(|p| p.replays())) {
            if since.elapsed() > patience {
                return Err(DeviceError::Stuck { what, waited: patience });
            }
            std::thread::sleep(REPLAY_PAUSE);
        }
        self.held = true;
        self.workers.iter().for_each(|w| w.call(DevicePoller::pause));
        let countdown = self.start_drain(Selector::All, None);
        let drained = match countdown.wait(&format!("an upgrade of {}", self.name), patience) {
            true => self.finish_tmfs(),
            false => Err(DeviceError::Stuck { what, waited: patience }),
        };
        if drained.is_err() {
            self.release();
        }
        drained
    }

    /// Goes on. Every ring is looked at and every guest called once, whatever was kicked or called
    /// while nobody listened.
    pub(crate) fn release(&mut self) {
        self.held = false;
        self.workers.iter().for_each(|w| w.call(DevicePoller::unpause));
        for ring in self.rings.iter_mut().filter(|r| r.running) {
            if let Some(fd) = &ring.call
                && reactor::eventfd::signal(fd.as_fd()).is_err()
            {
                ring.call = None;
            }
        }
        self.serve_control();
        self.send_events();
    }

    /// Stops every ring of a device that is held, and describes what the peer said about it.
    ///
    /// # Errors
    /// [`DeviceError::Stuck`], if it was not held; a descriptor cannot be duplicated.
    pub(crate) fn hand_over(
        &mut self,
        socket: OwnedFd,
        fds: &mut Fds,
    ) -> Result<SessionState, DeviceError> {
        let dup = |fd: std::os::fd::BorrowedFd<'_>, fds: &mut Fds| {
            fd.try_clone_to_owned().map(|fd| fds.put(fd)).map_err(DeviceError::Descriptor)
        };
        let mut memory = Vec::new();
        for (spec, file) in self.table.files() {
            let file = dup(file, fds)?;
            let RegionSpec { guest_addr, size, user_addr, mmap_offset } = spec;
            memory.push(RegionState { guest_addr, size, user_addr, mmap_offset, file });
        }
        let log = match &self.log {
            Some(log) => {
                let (file, offset, size) = log.file();
                Some(LogState { file: dup(file, fds)?, offset, size })
            }
            None => None,
        };
        let inflight = match self.inflight.as_ref().and_then(InflightRegion::file) {
            Some((file, offset, queues, queue_size)) => {
                Some(InflightState { file: dup(file, fds)?, offset, queues, queue_size })
            }
            None => None,
        };
        let mut rings = Vec::new();
        for at in 0..self.rings.len() {
            let running = self.rings[at].running;
            self.stop(at)?;
            let ring = &mut self.rings[at];
            if ring.is_untold() {
                continue;
            }
            let kick = ring.kick.take().map(|kick| match kick {
                Kick::Fd(fd) => KickState::Fd(fds.put(fd)),
                Kick::Polled => KickState::Polled,
            });
            rings.push(RingState {
                index: at as u32,
                size: ring.size,
                addresses: ring.addresses.map(|a| RingAddresses {
                    desc: a.desc,
                    avail: a.avail,
                    used: a.used,
                    log: a.log,
                }),
                base: ring.base,
                kick,
                call: ring.call.take().map(|fd| fds.put(fd)),
                err: ring.err.take().map(|fd| fds.put(fd)),
                enabled: ring.enabled,
                ran: ring.ran,
                running,
            });
        }
        Ok(SessionState {
            socket: fds.put(socket),
            spoke: false,
            refused: 0,
            features: self.features,
            protocol_features: 0,
            memory,
            log,
            inflight,
            rings,
        })
    }

    /// What the session knows of the logical unit of `target`.
    pub(crate) fn nexus(&self, target: u8) -> Option<NexusState> {
        let attached = self.attached[usize::from(target)].as_ref()?;
        let scsi::NexusState { attentions, prevents, seen_us } = attached.nexus.state();
        Some(NexusState { attentions, prevents, seen_us })
    }

    /// Goes on with what [`Device::hand_over`] described, of a new device with the peer's features;
    /// held until [`Device::release`].
    ///
    /// # Errors
    /// See [`TakeOverError`]; then the device is of no use.
    pub(crate) fn take_over(
        &mut self,
        state: &SessionState,
        fds: &mut Fds,
    ) -> Result<(), TakeOverError> {
        let mut table = Vec::with_capacity(state.memory.len());
        for region in &state.memory {
            let spec = RegionSpec {
                guest_addr: region.guest_addr,
                size: region.size,
                user_addr: region.user_addr,
                mmap_offset: region.mmap_offset,
            };
            table.push((spec, fds.take(region.file)?));
        }
        if !table.is_empty() {
            let mapped = self.table.replaced(table);
            let mapped = mapped.map_err(|e| TakeOverError::Memory(e.to_string()))?;
            self.change_memory(|_| Ok(mapped))?;
        }
        if let Some(log) = &state.log {
            let file = fds.take(log.file)?;
            let log = DirtyLog::new(file.as_fd(), log.offset, log.size);
            self.set_log(log.map_err(|e| TakeOverError::Memory(e.to_string()))?)?;
        }
        if let Some(InflightState { file, offset, queues, queue_size }) = state.inflight {
            let bytes = InflightRegion::bytes(queues, queue_size);
            let region = InflightRegion::map(fds.take(file)?, offset, bytes, queues, queue_size);
            self.set_inflight(region.map_err(|e| TakeOverError::Memory(e.to_string()))?)?;
        }
        // From here on nothing is served, although the rings are set up.
        self.held = true;
        self.workers.iter().for_each(|w| w.call(DevicePoller::pause));
        for ring in &state.rings {
            self.take_over_ring(ring, fds)?;
        }
        Ok(())
    }

    fn take_over_ring(&mut self, state: &RingState, fds: &mut Fds) -> Result<(), TakeOverError> {
        let index = state.index;
        if state.size != 0 {
            self.set_size(index, u32::from(state.size))?;
        }
        self.set_base(index, u32::from(state.base))?;
        if let Some(a) = state.addresses {
            let to = Addresses { desc: a.desc, avail: a.avail, used: a.used, log: a.log };
            self.set_addresses(index, to)?;
        }
        let call = state.call.map(|fd| fds.take(fd)).transpose()?;
        self.set_call(index, call)?;
        let err = state.err.map(|fd| fds.take(fd)).transpose()?;
        self.set_err(index, err)?;
        self.set_enabled(index, state.enabled)?;
        match state.kick {
            Some(KickState::Fd(fd)) => self.set_kick(index, Some(fds.take(fd)?))?,
            Some(KickState::Polled) => self.set_kick(index, None)?,
            None => {}
        }
        let ring = self.rings.get_mut(index as usize).ok_or(DeviceError::NoQueue(index))?;
        ring.ran |= state.ran;
        match state.running && !ring.running {
            true => Err(TakeOverError::Ring(index)),
            false => Ok(()),
        }
    }
}
