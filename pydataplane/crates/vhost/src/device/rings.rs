//! What the peer said about each ring.
//!
//! A ring runs when it has a size, addresses and a kick (vhost-user "Ring states": started) and
//! is enabled, which it is from the start where protocol features were not negotiated. Every
//! change to a running ring stops it, waits for its I/O, and starts it where it was: so the order
//! of messages does not matter, and a driver that starts afresh (Linux after SeaBIOS) meets a
//! ring without memories.

use std::os::fd::{AsFd, OwnedFd};

use bdev::GuestEvent;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use virtqueue::{ConfigError, InflightRegion};

use super::{Device, DeviceError};
use crate::defs::F_LOG_ALL;
use crate::front::Role;

/// Where a ring lies, in the peer's own addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Addresses {
    pub(crate) desc: u64,
    pub(crate) avail: u64,
    pub(crate) used: u64,
    /// Guest address under which the used ring is logged, if it is.
    pub(crate) log: Option<u64>,
}

/// How the peer tells that it added requests.
#[derive(Debug)]
pub(super) enum Kick {
    Fd(OwnedFd),
    /// Not at all: look.
    Polled,
}

/// One ring as the peer described it.
#[derive(Debug, Default)]
pub(super) struct Ring {
    pub(super) size: u16,
    pub(super) addresses: Option<Addresses>,
    /// Where to go on in the available ring, while it does not run.
    pub(super) base: u16,
    pub(super) kick: Option<Kick>,
    pub(super) call: Option<OwnedFd>,
    pub(super) err: Option<OwnedFd>,
    pub(super) enabled: bool,
    pub(super) running: bool,
    /// Has run in this session, up to `base`.
    pub(super) ran: bool,
    /// Requests of a session before are to be submitted again when it starts.
    pub(super) owed: bool,
    /// Why it does not run though the peer wants it to.
    pub(super) refused: Option<String>,
}

impl Ring {
    /// Whether the peer said nothing about it.
    pub(super) fn is_undescribed(&self) -> bool {
        let fds = self.kick.is_some() || self.call.is_some() || self.err.is_some();
        !fds && self.size == 0 && self.addresses.is_none() && self.base == 0 && !self.enabled
    }
}

impl Device {
    fn ring(&mut self, index: u32) -> Result<(usize, &mut Ring), DeviceError> {
        let at = index as usize;
        let ring = self.rings.get_mut(at).ok_or(DeviceError::NoQueue(index))?;
        Ok((at, ring))
    }

    /// SET_VRING_NUM, in descriptors.
    pub(crate) fn set_size(&mut self, index: u32, size: u32) -> Result<(), DeviceError> {
        let (at, _) = self.ring(index)?;
        let bad = |size| DeviceError::Queue { index: at, why: ConfigError::Size(size) };
        let size = u16::try_from(size).map_err(|_| bad(u16::MAX))?;
        if !size.is_power_of_two() || size > virtqueue::MAX_QUEUE_SIZE {
            return Err(bad(size));
        }
        self.stop(at)?;
        self.rings[at].size = size;
        self.try_start_or_stop(at)
    }

    /// SET_VRING_ADDR.
    pub(crate) fn set_addresses(&mut self, index: u32, to: Addresses) -> Result<(), DeviceError> {
        let (at, ring) = self.ring(index)?;
        if ring.addresses == Some(to) {
            return Ok(());
        }
        self.stop(at)?;
        self.rings[at].addresses = Some(to);
        self.start_or_stop(at)
    }

    /// SET_VRING_BASE.
    pub(crate) fn set_base(&mut self, index: u32, base: u32) -> Result<(), DeviceError> {
        let (at, _) = self.ring(index)?;
        let base = u16::try_from(base).map_err(|_| DeviceError::Base(base))?;
        self.stop(at)?;
        // A paused guest goes on where its rings stopped; a driver that starts afresh does not.
        if self.rings[at].ran && self.rings[at].base != base {
            self.driver_restarted();
            self.forget_in_flight(at);
        }
        self.rings[at].base = base;
        self.try_start_or_stop(at)
    }

    /// GET_VRING_BASE: stops the ring and returns when its I/O has ended. It starts again with
    /// the next SET_VRING_KICK.
    pub(crate) fn take_base(&mut self, index: u32) -> Result<u16, DeviceError> {
        let (at, _) = self.ring(index)?;
        self.stop(at)?;
        self.rings[at].kick = None;
        // What the guest dirties is logged while it migrates, and then only its memory is left to be sent.
        if !self.runs() && self.features & F_LOG_ALL != 0 {
            self.tell_disks(GuestEvent::Leaves);
        }
        Ok(self.rings[at].base)
    }

    /// SET_VRING_KICK; `None`: the peer will not kick.
    pub(crate) fn set_kick(&mut self, index: u32, fd: Option<OwnedFd>) -> Result<(), DeviceError> {
        let (at, _) = self.ring(index)?;
        self.stop(at)?;
        if let Some(fd) = &fd {
            set_nonblocking(fd);
        }
        self.rings[at].kick = Some(fd.map_or(Kick::Polled, Kick::Fd));
        self.start_or_stop(at)
    }

    /// SET_VRING_CALL; `None`: the peer looks by itself.
    pub(crate) fn set_call(&mut self, index: u32, fd: Option<OwnedFd>) -> Result<(), DeviceError> {
        let (at, ring) = self.ring(index)?;
        if let Some(fd) = &fd {
            // A call must never block a reactor.
            set_nonblocking(fd);
        }
        let copy = fd.as_ref().and_then(|fd| fd.try_clone().ok());
        ring.call = fd;
        let running = ring.running;
        match self.front.role(at) {
            Role::Control => self.control.iter_mut().for_each(|q| q.set_call(dup(copy.as_ref()))),
            Role::Events => self.events.iter_mut().for_each(|q| q.set_call(dup(copy.as_ref()))),
            Role::Requests(_) if running => {
                self.worker(at).call(move |p| p.set_call(at as u16, copy));
            }
            Role::Requests(_) => {}
        }
        Ok(())
    }

    /// SET_VRING_ERR.
    pub(crate) fn set_err(&mut self, index: u32, fd: Option<OwnedFd>) -> Result<(), DeviceError> {
        let (_, ring) = self.ring(index)?;
        if let Some(fd) = &fd {
            set_nonblocking(fd);
        }
        ring.err = fd;
        Ok(())
    }

    /// SET_VRING_ENABLE.
    pub(crate) fn set_enabled(&mut self, index: u32, enabled: bool) -> Result<(), DeviceError> {
        let (at, ring) = self.ring(index)?;
        ring.enabled = enabled;
        self.start_or_stop(at)
    }

    /// RESET_OWNER, RESET_DEVICE: stops and disables every ring.
    pub(crate) fn reset(&mut self) -> Result<(), DeviceError> {
        for at in 0..self.rings.len() {
            self.stop(at)?;
            let ring = &mut self.rings[at];
            ring.enabled = false;
            ring.kick = None;
            self.forget_in_flight(at);
        }
        self.driver_restarted();
        Ok(())
    }

    /// SET_INFLIGHT_FD: from now on what is in flight is marked in `region`, and a ring that starts
    /// submits again what is marked there.
    pub(crate) fn set_inflight(&mut self, region: InflightRegion) -> Result<(), DeviceError> {
        for at in 0..self.rings.len() {
            self.stop(at)?;
        }
        for (at, ring) in self.rings.iter_mut().enumerate() {
            ring.owed = region.queue(at as u16).is_some_and(|queue| queue.has_marks());
        }
        (self.inflight, self.owns_inflight) = (Some(region), false);
        for at in 0..self.rings.len() {
            self.try_start_or_stop(at)?;
        }
        Ok(())
    }

    /// The driver starts afresh with a ring: what was in flight is nothing to it any more.
    pub(super) fn forget_in_flight(&mut self, at: usize) {
        self.rings[at].owed = false;
        self.rings[at].refused = None;
        self.past.unknown.remove(at as u16);
        if let Some(mut queue) = self.inflight.as_ref().and_then(|i| i.queue(at as u16)) {
            queue.reset();
        }
    }

    /// Starts or stops a ring as its description says.
    pub(super) fn start_or_stop(&mut self, at: usize) -> Result<(), DeviceError> {
        let ring = &self.rings[at];
        let enabled = ring.enabled || !self.has_protocol_features();
        let wanted = enabled && ring.size != 0 && ring.addresses.is_some() && ring.kick.is_some();
        match (wanted, ring.running) {
            (true, false) if self.memory.regions().len() != 0 => {
                self.start(at).map_err(|why| DeviceError::Queue { index: at, why })
            }
            (false, true) => self.stop(at),
            _ => Ok(()),
        }
    }

    /// As `start_or_stop`, where another message than the present one is to blame if the ring cannot run.
    pub(super) fn try_start_or_stop(&mut self, at: usize) -> Result<(), DeviceError> {
        match self.start_or_stop(at) {
            Err(why @ DeviceError::Stuck { .. }) => return Err(why),
            Err(why) => tracing::debug!(controller = self.name, "not started: {why}"),
            Ok(()) => {}
        }
        Ok(())
    }
}

/// Another descriptor of the same file; `None` also where the process has none left, and then
/// the queue polls (kick) or the guest misses calls until the peer sets it again (call).
pub(super) fn dup(fd: Option<&OwnedFd>) -> Option<OwnedFd> {
    let fd = fd?;
    fd.try_clone().inspect_err(|why| tracing::error!("cannot duplicate an eventfd: {why}")).ok()
}

fn set_nonblocking(fd: &OwnedFd) {
    if let Ok(flags) = fcntl_getfl(fd.as_fd()) {
        _ = fcntl_setfl(fd.as_fd(), flags | OFlags::NONBLOCK);
    }
}
