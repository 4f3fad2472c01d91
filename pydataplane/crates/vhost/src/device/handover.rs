//! Holding the device still, and moving it to another process or back.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use bdev::OpenError;
use guestmem::{LogError, MapError, RegionSpec};
use rustix::fs::fstat;
use virtqueue::{InflightError, InflightRegion};

use super::rings::{Addresses, Kick, Ring};
use super::{Device, DeviceError, Worker};
use crate::events::Unheard;
use crate::handover::{
    DroppedLater, FdIndex, Fds, InflightState, KickState, LogState, MissingFd, NexusState,
    RegionState, RingAddresses, RingState, SessionState,
};
use crate::lun::Target;
use crate::past::Mark;
use crate::poller::{DevicePoller, RequestQueue, Selector};

/// How long is waited for all that a guest has in flight. Then what did not begin yet, and what is many
/// I/Os, is to be sent again: with a slow disk it may take minutes.
const GRACE: Duration = Duration::from_millis(20);

/// Why a device does not go on where it stood.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TakeOverError {
    /// The description does not fit its descriptors.
    #[error(transparent)]
    Fd(#[from] MissingFd),
    /// The device does not take it.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The guest's memory cannot be mapped here.
    #[error(transparent)]
    Memory(#[from] MapError),
    /// Nor its dirty log.
    #[error(transparent)]
    Log(#[from] LogError),
    /// Nor what it keeps of its requests in flight.
    #[error(transparent)]
    Inflight(#[from] InflightError),
    /// The device behind a target cannot be opened here.
    #[error("target {target}: {bdev} cannot be opened: {why}")]
    Open { target: u8, bdev: String, why: OpenError },
    /// A ring does not start where it ran before.
    #[error("virtqueue {0} does not start where it stopped")]
    Ring(u32),
}

impl TakeOverError {
    /// Whether the peer did it, which can change its files at any time: its session is to end, and
    /// nobody else's.
    pub(crate) fn is_the_peers(&self) -> bool {
        match self {
            Self::Memory(why) | Self::Inflight(InflightError::Map(why)) => is_the_peers(why),
            Self::Log(LogError::BeyondFile { .. }) => true,
            Self::Log(LogError::Map(why)) => is_refused(why),
            _ => false,
        }
    }
}

/// Whether a file that was mapped once cannot be any more because of what the peer did to it.
fn is_the_peers(why: &MapError) -> bool {
    match why {
        MapError::BeyondFile { .. } => true,
        MapError::Map { why, .. } => is_refused(why),
        _ => false,
    }
}

/// F_SEAL_FUTURE_WRITE leaves the mappings that there are.
fn is_refused(why: &std::io::Error) -> bool {
    why.kind() == std::io::ErrorKind::PermissionDenied
}

impl Device {
    /// Takes no more requests, of any queue, and waits until those in flight have ended and are
    /// published, `timeout` at most. Until [`Device::release`] nothing is served. What was in flight
    /// before this session and was not submitted again yet stays marked in the peer's region, from
    /// which whoever goes on submits it.
    ///
    /// # Errors
    /// [`DeviceError::Stuck`]: some have not ended; then it is released.
    pub(crate) fn hold(&mut self, timeout: Duration) -> Result<(), DeviceError> {
        let what = "an upgrade";
        self.held = true;
        self.workers.iter().for_each(|w| {
            w.call(|p| {
                p.pause();
                // What waits for somebody to make room keeps nobody waiting.
                p.let_go(true);
            });
        });
        let countdown = self.start_drain(Selector::All, None);
        let name = format!("an upgrade of {}", self.name);
        if !countdown.wait(&name, GRACE.min(timeout)) {
            self.hold_back();
            self.workers.iter().for_each(|w| w.call(DevicePoller::end_soon));
        }
        let drained = match countdown.wait(&name, timeout) {
            true => self.finish_tmfs(),
            false => Err(DeviceError::Stuck { what, waited: timeout }),
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

    /// What the peer negotiated and shared, and the sizes of its rings, but not where they stand.
    ///
    /// # Errors
    /// A descriptor cannot be duplicated.
    pub(crate) fn describe(
        &self,
        socket: OwnedFd,
        fds: &mut Fds,
    ) -> Result<SessionState, DeviceError> {
        let socket = fds.put(socket);
        let mut memory = Vec::new();
        for (spec, file) in self.table.files() {
            let file = dup(file, fds)?;
            let RegionSpec { guest_addr, size, user_addr, mmap_offset } = spec;
            memory.push(RegionState { guest_addr, size, user_addr, mmap_offset, file });
        }
        Ok(SessionState {
            socket,
            spoke: false,
            refused: 0,
            features: self.features,
            protocol_features: 0,
            memory,
            log: None,
            inflight: None,
            backend: None,
            unknown_queues: self.past.unknown.iter().collect(),
            rings: self.describe_rings(),
        })
    }

    /// As [`Device::describe`], with all files but those of its rings.
    fn describe_files(&self, socket: OwnedFd, fds: &mut Fds) -> Result<SessionState, DeviceError> {
        let mut state = self.describe(socket, fds)?;
        state.backend = self.config_channel().map(|fd| dup(fd, fds)).transpose()?;
        if let Some(log) = &self.log {
            let (file, offset, size) = log.file();
            state.log = Some(LogState { file: dup(file, fds)?, offset, size });
        }
        if let Some((file, offset, queues, queue_size)) =
            self.inflight.as_ref().and_then(InflightRegion::file)
        {
            let (file, ours) = (dup(file, fds)?, self.owns_inflight);
            state.inflight = Some(InflightState { file, offset, queues, queue_size, ours });
        }
        Ok(state)
    }

    /// All that the peer said. The rings go on: where they stand is for the in-flight region to say.
    ///
    /// # Errors
    /// A descriptor cannot be duplicated.
    pub(crate) fn describe_all(
        &self,
        socket: OwnedFd,
        fds: &mut Fds,
    ) -> Result<SessionState, DeviceError> {
        let mut state = self.describe_files(socket, fds)?;
        for described in &mut state.rings {
            let ring = &self.rings[described.index as usize];
            let mut copy = |fd: &Option<OwnedFd>| match fd {
                Some(fd) => dup(fd.as_fd(), fds).map(Some),
                None => Ok(None),
            };
            described.call = copy(&ring.call)?;
            described.err = copy(&ring.err)?;
            described.kick = match &ring.kick {
                Some(Kick::Fd(fd)) => Some(KickState::Fd(dup(fd.as_fd(), fds)?)),
                Some(Kick::Polled) => Some(KickState::Polled),
                None => None,
            };
        }
        Ok(state)
    }

    /// The rings that the peer said something about, without descriptors.
    fn describe_rings(&self) -> Vec<RingState> {
        let described = self.rings.iter().enumerate().filter(|(_, ring)| !ring.is_undescribed());
        let describe = |(at, ring): (usize, &Ring)| RingState {
            index: at as u32,
            size: ring.size,
            addresses: ring.addresses.map(|a| RingAddresses {
                desc: a.desc,
                avail: a.avail,
                used: a.used,
                log: a.log,
            }),
            base: ring.base,
            kick: None,
            call: None,
            err: None,
            enabled: ring.enabled,
            ran: ring.ran,
            running: ring.running,
        };
        described.map(describe).collect()
    }

    /// Stops every ring of a device that is held, and describes all that the peer said. With it what
    /// need not be taken apart now.
    ///
    /// # Errors
    /// [`DeviceError::Stuck`], if it was not held; a descriptor cannot be duplicated.
    pub(crate) fn hand_over(
        &mut self,
        socket: OwnedFd,
        fds: &mut Fds,
    ) -> Result<(SessionState, DroppedLater), DeviceError> {
        let mut state = self.describe_files(socket, fds)?;
        // As they are now: what runs is to run again.
        let queues = self.take_queues();
        for described in &mut state.rings {
            let at = described.index as usize;
            // Those that belong to this thread.
            self.stop(at)?;
            let ring = &mut self.rings[at];
            described.base = ring.base;
            described.kick = ring.kick.take().map(|kick| match kick {
                Kick::Fd(fd) => KickState::Fd(fds.put(fd)),
                Kick::Polled => KickState::Polled,
            });
            described.call = ring.call.take().map(|fd| fds.put(fd));
            described.err = ring.err.take().map(|fd| fds.put(fd));
        }
        Ok((state, DroppedLater::new(queues, Arc::clone(&self.memory))))
    }

    /// Stops all request queues of a device that is held: one call of each reactor.
    fn take_queues(&mut self) -> Vec<RequestQueue> {
        let mut all = Vec::new();
        for Worker { reactor, poller } in self.workers.iter().filter(|_| self.held) {
            let poller = *poller;
            all.extend(reactor.call(move |cx| {
                let poller = cx.poller_mut::<DevicePoller>(poller);
                let queues = poller.map(DevicePoller::take_queues).unwrap_or_default();
                queues.iter().filter_map(RequestQueue::kick_fd).for_each(|fd| cx.unwatch(fd));
                queues
            }));
        }
        for queue in &all {
            let ring = &mut self.rings[usize::from(queue.index())];
            (ring.running, ring.base) = (false, queue.next_avail());
            self.placement.set(queue.index().into(), None);
        }
        all
    }

    /// Closes the units and forgets the rings: another process goes on with them, or has them still.
    /// Nothing of the peer's, and no file, is changed.
    pub(crate) fn leave_all(&mut self) {
        self.mark = Mark::default();
        self.close_all();
    }

    /// What the session knows of the logical unit of `target`.
    pub(crate) fn nexus(&self, target: u8) -> Option<NexusState> {
        let attached = self.attached[usize::from(target)].as_ref()?;
        let scsi::NexusState { attentions, prevents, seen_us, could_not_ask } =
            attached.nexus.state();
        Some(NexusState { attentions, prevents, seen_us, could_not_ask })
    }

    /// Maps the memory that [`Device::describe`] described, of a new device with the peer's features,
    /// and makes room for the requests of its rings.
    ///
    /// # Errors
    /// See [`TakeOverError`]; then the device is of no use.
    pub(crate) fn prepare(
        &mut self,
        state: &SessionState,
        fds: &mut Fds,
    ) -> Result<(), TakeOverError> {
        let mut table = Vec::with_capacity(state.memory.len());
        for region in &state.memory {
            table.push((spec_of(region), fds.take(region.file)?));
        }
        self.table.set_inherits(true);
        if !table.is_empty() {
            let mapped = self.table.replaced(table)?;
            self.change_memory(|_| Ok(mapped))?;
        }
        self.make_room(&state.rings);
        Ok(())
    }

    /// Whether [`Device::prepare`] would make the same of `state`.
    pub(crate) fn is_prepared_for(&self, state: &SessionState, fds: &Fds) -> bool {
        let same_file = |file: BorrowedFd<'_>, region: &RegionState| {
            let identity = |fd| fstat(fd).map(|stat| (stat.st_dev, stat.st_ino));
            let theirs = fds.get(region.file).map(|fd| identity(fd.as_fd()));
            matches!((identity(file), theirs), (Ok(own), Some(Ok(theirs))) if own == theirs)
        };
        let mut own = self.table.files();
        let same = state.memory.iter().all(|region| {
            own.next()
                .is_some_and(|(spec, file)| spec == spec_of(region) && same_file(file, region))
        });
        same && own.next().is_none() && self.features == state.features
    }

    /// Goes on with what [`Device::hand_over`] described, of a device that is prepared; held until
    /// [`Device::release`].
    ///
    /// # Errors
    /// See [`TakeOverError`]; then the device is of no use.
    pub(crate) fn take_over(
        &mut self,
        state: &SessionState,
        fds: &mut Fds,
        targets: &[&Target],
        unheard: Option<Unheard>,
        mark: Mark,
    ) -> Result<(), TakeOverError> {
        (self.unheard, self.mark) = (unheard, mark);
        self.past.unknown = state.unknown_queues.iter().copied().collect();
        // From here on nothing is served, although the rings are set up.
        self.held = true;
        self.workers.iter().for_each(|w| w.call(DevicePoller::pause));
        for target in targets {
            self.open(target).map_err(|why| TakeOverError::Open {
                target: target.number,
                bdev: target.bdev_name().to_owned(),
                why,
            })?;
        }
        if let Some(log) = &state.log {
            let file = fds.take(log.file)?;
            let log = self.table.make_log(file.as_fd(), log.offset, log.size)?;
            self.set_log(log)?;
            self.workers.iter().for_each(|w| w.call(DevicePoller::pause));
        }
        if let Some(InflightState { file, offset, queues, queue_size, ours }) = state.inflight {
            let bytes = InflightRegion::bytes(queues, queue_size);
            let region = InflightRegion::map(
                &self.table,
                fds.take(file)?,
                offset,
                bytes,
                queues,
                queue_size,
            );
            self.set_inflight(region?)?;
            self.owns_inflight = ours;
        }
        self.table.set_inherits(false);
        if let Some(fd) = state.backend {
            self.set_config_channel(Some(fds.take(fd)?));
        }
        for ring in &state.rings {
            self.take_over_ring(ring, fds)?;
        }
        // What changed meanwhile, and perhaps was not told there.
        self.heard();
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
        let kicked = match state.kick {
            Some(KickState::Fd(fd)) => self.set_kick(index, Some(fds.take(fd)?)),
            Some(KickState::Polled) => self.set_kick(index, None),
            None => Ok(()),
        };
        match kicked {
            // It did not run there either: the peer described a ring that cannot be.
            Err(DeviceError::Queue { .. }) if !state.running => {}
            kicked => kicked?,
        }
        // What says that it is not this ring's is the peer's own to write: as in a new session, the
        // ring alone does not start.
        let tracked = self.inflight.as_ref().is_some_and(|i| i.queue(index as u16).is_some());
        let ring = self.rings.get_mut(index as usize).ok_or(DeviceError::NoQueue(index))?;
        ring.ran |= state.ran;
        match state.running && !ring.running && !(tracked && ring.refused.is_some()) {
            true => Err(TakeOverError::Ring(index)),
            false => Ok(()),
        }
    }
}

/// Puts another descriptor of the same file among `fds`.
fn dup(fd: BorrowedFd<'_>, fds: &mut Fds) -> Result<FdIndex, DeviceError> {
    fd.try_clone_to_owned().map(|fd| fds.put(fd)).map_err(DeviceError::Descriptor)
}

fn spec_of(region: &RegionState) -> RegionSpec {
    let RegionState { guest_addr, size, user_addr, mmap_offset, .. } = *region;
    RegionSpec { guest_addr, size, user_addr, mmap_offset }
}
