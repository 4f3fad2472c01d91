//! Starting a ring where it was left, and stopping it: its base is then where to go on.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use guestmem::GuestMemory;
use virtqueue::{
    AddressSpace, ConfigError, InflightError, InflightRegion, QueueConfig, SplitQueue,
};

use super::rings::{Kick, Ring, dup};
use super::side::SideQueue;
use super::{Device, DeviceError, Worker};
use crate::defs::{CONTROL_QUEUE, EVENT_QUEUE, F_EVENT_IDX, F_INDIRECT_DESC, FIRST_REQUEST_QUEUE};
use crate::failure::Failure;
use crate::handover::RingState;
use crate::poller::{DevicePoller, QueueSetup, RequestQueue, Selector, make_slots};

/// Queues of one session whose end is a line in the log: a guest can reset its device, and break the
/// rules again, as often as it likes.
const MAX_FAILURES_LOGGED: u32 = 16;

impl Device {
    pub(super) fn start(&mut self, at: usize) -> Result<(), ConfigError> {
        let Some(mut config) = self.config(at) else { return Ok(()) };
        let mut queue = SplitQueue::new(Arc::clone(&self.memory), &config)?;
        let resumed = match self.track(at, &config, &mut queue) {
            Ok(resumed) => resumed,
            Err(why) => {
                self.refuse(at, why.to_string());
                return Ok(());
            }
        };
        if at >= FIRST_REQUEST_QUEUE && !resumed && !self.rings[at].ran {
            match self.quiet_base(at, &config, &queue) {
                Ok(base) if base != config.next_avail => {
                    config.next_avail = base;
                    queue = SplitQueue::new(Arc::clone(&self.memory), &config)?;
                    _ = self.track(at, &config, &mut queue);
                }
                Ok(_) => {}
                Err(why) => {
                    self.refuse(at, why);
                    return Ok(());
                }
            }
            if !queue.is_tracking()
                && let Err(why) = self.mark.add(at as u16)
            {
                self.refuse(at, format!("that it has requests in flight cannot be noted: {why}"));
                return Ok(());
            }
        }
        let replays = queue.to_replay();
        let base = queue.next_avail().wrapping_add(replays);
        let ring = &self.rings[at];
        let kick = match &ring.kick {
            Some(Kick::Fd(fd)) => dup(Some(fd)),
            _ => None,
        };
        let call = dup(ring.call.as_ref());
        match at {
            CONTROL_QUEUE => {
                let mut queue = SideQueue::new(queue, config, kick, call);
                if resumed {
                    queue.call_guest();
                }
                self.control = Some(queue);
            }
            EVENT_QUEUE => {
                let mut queue = SideQueue::new(queue, config, kick, call);
                if resumed {
                    queue.call_guest();
                }
                self.begin_events(queue, resumed);
            }
            _ => {
                let index = at as u16;
                let setup = QueueSetup { index, config, ring: queue, kick, call };
                self.share_room(Some(at));
                self.worker(at).start(setup, resumed);
            }
        }
        let ring = &mut self.rings[at];
        (ring.running, ring.ran, ring.owed, ring.refused) = (true, true, false, None);
        self.past.unknown.remove(at as u16);
        self.catching_up |= replays != 0;
        match replays {
            0 => tracing::debug!(controller = self.name, queue = at, base, "started"),
            _ => tracing::info!(
                controller = self.name,
                queue = at,
                base,
                "goes on; requests in flight before are submitted again: {replays}"
            ),
        }
        match at {
            CONTROL_QUEUE => self.serve_control(),
            EVENT_QUEUE => self.send_events(),
            _ => {}
        }
        Ok(())
    }

    /// Has `queue` mark what is in flight, if the peer keeps a region for that. Whether it goes on
    /// from what the region says.
    fn track(
        &mut self,
        at: usize,
        config: &QueueConfig,
        queue: &mut SplitQueue,
    ) -> Result<bool, InflightError> {
        let of = |region: &Option<InflightRegion>| region.as_ref()?.queue(at as u16);
        let Some(inflight) = of(&self.inflight) else { return Ok(false) };
        match queue.track(inflight) {
            // A driver that started afresh, whose peer kept the region of the one before.
            Err(InflightError::OtherRing { used, avail, .. })
                if used == avail && used == config.next_avail =>
            {
                self.forget_in_flight(at);
                of(&self.inflight).map_or(Ok(false), |inflight| queue.track(inflight))
            }
            tracked => tracked,
        }
    }

    /// Where a queue goes on of which no region tells what is in flight: where the peer says, unless
    /// requests of its may be in flight that nobody knows of. The used index alone says nothing about
    /// them, as requests end in any order. `Err`: that cannot be known.
    fn quiet_base(
        &self,
        at: usize,
        config: &QueueConfig,
        queue: &SplitQueue,
    ) -> Result<u16, String> {
        let (base, used, avail) = (config.next_avail, queue.next_used(), queue.avail_index());
        if self.past.drained.contains(&(at as u16, used)) {
            return Ok(used);
        }
        let unknown = self.past.unknown.contains(at as u16);
        match unknown && !(base == used && used == avail) {
            false => Ok(base),
            true => Err(format!(
                "requests were in flight when the target lost it, and its front end keeps no \
                 in-flight region: base {base}, used {used}, available {avail}"
            )),
        }
    }

    /// Queues that the peer wants to run and that are not started, and why.
    pub(crate) fn refused(&self) -> Vec<(u16, String)> {
        let of = |(at, ring): (usize, &Ring)| Some((at as u16, ring.refused.clone()?));
        self.rings.iter().enumerate().filter_map(of).collect()
    }

    /// A ring is not started: it cannot be known which of its requests were done.
    fn refuse(&mut self, at: usize, why: String) {
        self.rings[at].owed = false;
        if self.rings[at].refused.as_ref() != Some(&why) {
            tracing::error!(
                controller = self.name,
                queue = at,
                "the queue is not started until its driver resets it: {why}"
            );
            self.rings[at].refused = Some(why);
        }
    }

    /// Whether requests that were in flight before are not all submitted again yet.
    pub(super) fn replays(&self) -> bool {
        self.rings.iter().skip(FIRST_REQUEST_QUEUE).any(|ring| ring.owed)
            || self.workers.iter().any(|w| w.call(|p| p.replays()))
    }

    /// Waits until a queue that goes on has submitted again what was in flight before: where it
    /// stopped must be where it goes on with a new request, whoever does that.
    fn finish_replay(&self, at: usize) -> Result<(), DeviceError> {
        const PAUSE: Duration = Duration::from_millis(1);
        let (index, since) = (at as u16, Instant::now());
        let replays = || self.worker(at).call(move |p| p.to_replay(index)) != 0;
        if !replays() {
            return Ok(());
        }
        // Suspended requests may have all slots.
        self.worker(at).call(|p| p.let_go(true));
        while replays() {
            if since.elapsed() > self.message_timeout {
                return Err(DeviceError::Stuck { what: "a replay", waited: self.message_timeout });
            }
            std::thread::sleep(PAUSE);
        }
        self.worker(at).call(|p| p.let_go(false));
        Ok(())
    }

    /// Stops a ring and waits until its I/O has ended; its base is then where to go on.
    pub(super) fn stop(&mut self, at: usize) -> Result<(), DeviceError> {
        if !self.rings[at].running {
            return Ok(());
        }
        match at {
            CONTROL_QUEUE => {
                self.finish_tmfs()?;
                if let Some(queue) = self.control.take() {
                    self.rings[at].base = queue.next_avail();
                }
            }
            EVENT_QUEUE => {
                if let Some(queue) = self.end_events() {
                    self.rings[at].base = queue.next_avail();
                }
            }
            _ => {
                let index = at as u16;
                self.finish_replay(at)?;
                let worker = self.worker(at);
                worker.call(move |p| p.close_queue(index));
                self.drain(Selector::Queue(index), "the stop of a queue")?;
                let worker = self.worker(at);
                if let Some(queue) = worker.call(move |p| p.remove_queue(index)) {
                    worker.unwatch(queue.kick_fd());
                    self.rings[at].base = queue.next_avail();
                }
            }
        }
        self.rings[at].running = false;
        self.share_room(None);
        tracing::debug!(controller = self.name, queue = at, base = self.rings[at].base, "stopped");
        Ok(())
    }

    /// How to set up a ring where it was left.
    pub(super) fn config(&self, at: usize) -> Option<QueueConfig> {
        let ring = &self.rings[at];
        let addresses = ring.addresses?;
        Some(QueueConfig {
            size: ring.size,
            space: AddressSpace::User,
            desc: addresses.desc,
            avail: addresses.avail,
            used: addresses.used,
            used_log: addresses.log,
            event_idx: self.features & F_EVENT_IDX != 0,
            indirect: self.features & F_INDIRECT_DESC != 0,
            next_avail: ring.base,
        })
    }

    /// Makes the slots that the request queues among `rings` will need, before they start.
    pub(super) fn make_room(&self, rings: &[RingState]) {
        for (n, worker) in self.workers.iter().enumerate() {
            let here = |ring: &&RingState| {
                let at = ring.index as usize;
                at >= FIRST_REQUEST_QUEUE && (at - FIRST_REQUEST_QUEUE) % self.workers.len() == n
            };
            let descriptors = rings.iter().filter(here).map(|r| usize::from(r.size)).sum();
            let missing = worker.call(move |p| p.missing_slots(descriptors));
            let slots = make_slots(missing);
            worker.call(move |p| p.add_slots(slots));
        }
    }

    /// Tells the reactors how many of them serve request queues, if that changed: those that run, and
    /// `starting`.
    pub(super) fn share_room(&mut self, starting: Option<usize>) {
        let workers = self.workers.len();
        let runs = |at: &usize| self.rings[*at].running || starting == Some(*at);
        let queues = (FIRST_REQUEST_QUEUE..self.rings.len()).filter(runs);
        let mut serves = vec![false; workers];
        queues.for_each(|at| serves[(at - FIRST_REQUEST_QUEUE) % workers] = true);
        let serving = serves.iter().filter(|serves| **serves).count();
        if serving != self.serving {
            self.serving = serving;
            self.workers.iter().for_each(|w| w.call(move |p| p.share_room(serving)));
        }
    }

    /// The part of the session that runs a request queue.
    pub(super) fn worker(&self, at: usize) -> &Worker {
        &self.workers[(at - FIRST_REQUEST_QUEUE) % self.workers.len()]
    }

    /// A queue was closed because the guest broke the rules: tells the peer.
    pub(crate) fn queue_failed(&mut self, queue: u16, why: Failure) {
        self.failures = self.failures.saturating_add(1);
        if self.failures <= MAX_FAILURES_LOGGED {
            let last =
                if self.failures == MAX_FAILURES_LOGGED { "; more are only counted" } else { "" };
            tracing::warn!(
                controller = self.name,
                queue,
                "the guest broke virtio's rules, its queue is stopped until the driver resets: \
                 {why}{last}"
            );
        }
        if let Some(ring) = self.rings.get_mut(usize::from(queue))
            && let Some(fd) = &ring.err
            && reactor::eventfd::signal(fd.as_fd()).is_err()
        {
            ring.err = None;
        }
    }

    /// Sets the control and event queues up again in the memory as it is now.
    pub(super) fn remap_side_queues(&mut self) {
        let memory: &Arc<GuestMemory> = &self.memory;
        for (at, queue) in [(CONTROL_QUEUE, &mut self.control), (EVENT_QUEUE, &mut self.events)] {
            if let Some(side) = queue
                && let Err(why) = side.remap(memory)
            {
                tracing::debug!(controller = self.name, queue = at, "stopped: {why}");
                self.rings[at].base = side.next_avail();
                self.rings[at].running = false;
            }
        }
        if !self.rings[CONTROL_QUEUE].running {
            self.control = None;
        }
        if !self.rings[EVENT_QUEUE].running {
            self.end_events();
        }
    }
}

impl Worker {
    /// Starts a queue and has the reactor wake for its kick. `resumed`: its guest is called.
    fn start(&self, setup: QueueSetup, resumed: bool) {
        let (index, size) = (setup.index, setup.config.size);
        let queue = RequestQueue::new(setup);
        // Only this thread adds queues.
        let missing = self.call(move |p| p.missing_slots(usize::from(size)));
        // Here, as it may be megabytes.
        let slots = make_slots(missing);
        let poller = self.poller;
        let watched = self.reactor.call(move |cx| {
            let kick =
                cx.poller_mut::<DevicePoller>(poller).and_then(|p| p.add_queue(queue, slots));
            let watched = kick.map_or(Ok(()), |fd| cx.watch(fd));
            if let Some(poller) = cx.poller_mut::<DevicePoller>(poller) {
                if watched.is_err() {
                    poller.forget_kick(index);
                }
                if resumed {
                    poller.call_again(index);
                }
            }
            watched
        });
        if let Err(why) = watched {
            tracing::warn!(queue = index, "its reactor cannot sleep: {why}");
        }
    }
}
