//! Starting a ring where it was left, and stopping it: its base is then where to go on.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bdev::GuestEvent;
use guestmem::GuestMemory;
use virtqueue::{
    AddressSpace, ConfigError, InflightError, InflightRegion, QueueConfig, SplitQueue,
};

use super::rings::{Kick, Ring, dup};
use super::side::SideQueue;
use super::{Device, DeviceError, Worker};
use crate::defs::{CONTROL_QUEUE, EVENT_QUEUE, F_EVENT_IDX, F_INDIRECT_DESC, F_LOG_ALL, F_T10_PI};
use crate::failure::Failure;
use crate::front::{DISK, Front, Role};
use crate::handover::RingState;
use crate::poller::{Chains, DevicePoller, QueueSetup, RequestQueue, Selector, make_slots};

/// Queues of one session whose end is a line in the log: a guest can reset its device, and break the
/// rules again, as often as it likes.
const MAX_FAILURES_LOGGED: u32 = 16;

impl Device {
    pub(super) fn start(&mut self, at: usize) -> Result<(), ConfigError> {
        let Some(mut config) = self.config(at) else { return Ok(()) };
        self.track_all();
        let mut queue = SplitQueue::new(Arc::clone(&self.memory), &config)?;
        let resumed = match self.track(at, &config, &mut queue) {
            Ok(resumed) => resumed,
            Err(why) => {
                self.refuse(at, why.to_string());
                return Ok(());
            }
        };
        let role = self.front.role(at);
        if matches!(role, Role::Requests(_)) && !resumed && !self.rings[at].ran {
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
            // The next session of this peer does not have our own region.
            if (!queue.is_tracking() || self.owns_inflight)
                && let Err(why) = self.mark.add(at as u16)
            {
                self.refuse(at, format!("that it has requests in flight cannot be noted: {why}"));
                return Ok(());
            }
        }
        if matches!(role, Role::Requests(_)) {
            self.tell_disks(GuestEvent::Runs);
        }
        let replays = queue.to_replay();
        let base = queue.next_avail().wrapping_add(replays);
        let ring = &self.rings[at];
        let kick = match &ring.kick {
            Some(Kick::Fd(fd)) => dup(Some(fd)),
            _ => None,
        };
        let call = dup(ring.call.as_ref());
        match role {
            Role::Control => {
                let mut queue = SideQueue::new(queue, config, kick, call);
                if resumed {
                    queue.call_guest();
                }
                self.control = Some(queue);
            }
            Role::Events => {
                let mut queue = SideQueue::new(queue, config, kick, call);
                if resumed {
                    queue.call_guest();
                }
                self.begin_events(queue, resumed);
            }
            Role::Requests(_) => {
                let index = at as u16;
                let setup = QueueSetup { index, config, ring: queue, kick, call };
                self.share_room(Some(at));
                self.placement.set(at, self.worker_of(at));
                let queue = RequestQueue::new(setup, Arc::clone(&self.placement));
                self.worker(at).go_on_with(queue, resumed, self.chains());
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
        match role {
            Role::Control => self.serve_control(),
            Role::Events => self.send_events(),
            Role::Requests(_) => {}
        }
        Ok(())
    }

    /// Tells the disks what becomes of the guest.
    pub(super) fn tell_disks(&self, event: GuestEvent) {
        self.attached.iter().flatten().for_each(|target| target.shared.bdev().on_guest(event));
    }

    /// Has what is in flight marked in a region of our own, if that is wanted and the peer has none.
    fn track_all(&mut self) {
        if !self.tracks || self.inflight.is_some() {
            return;
        }
        let (queues, size) = (self.front.queues() as u16, virtqueue::MAX_QUEUE_SIZE);
        let region = InflightRegion::make(queues, size).and_then(|fd| {
            let bytes = InflightRegion::bytes(queues, size);
            InflightRegion::map(&self.table, fd, 0, bytes, queues, size)
        });
        match region {
            Ok(region) => (self.inflight, self.owns_inflight) = (Some(region), true),
            Err(why) => {
                self.tracks = false;
                tracing::warn!(controller = self.name, "the session ends with this process: {why}");
            }
        }
    }

    /// Whether the in-flight region tells of every ring that runs.
    pub(crate) fn is_tracked(&self) -> bool {
        let running = self.rings.iter().enumerate().filter(|(_, ring)| ring.running);
        let tracked = |at| self.inflight.as_ref().is_some_and(|i| i.queue(at as u16).is_some());
        running.map(|(at, _)| at).all(tracked)
    }

    /// Whether the next session has the region.
    pub(super) fn is_submitted_again(&self) -> bool {
        self.inflight.is_some() && (self.kept || !self.owns_inflight)
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
            // A driver that started afresh, whose peer kept the region of the one before, as QEMU's vhost-user-scsi
            // does (8.2 and later). It may have asked for something already, as QEMU does not wait until the queue runs:
            // then it is told by a used ring at 0 where the region knew an index that this cannot have come from.
            Err(InflightError::OtherRing { used_idx, used, avail, .. })
                if used == config.next_avail
                    && (used == avail
                        || used == 0 && used.wrapping_sub(used_idx) > config.size) =>
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
        // Where it stopped there were some that only an in-flight region tells of (`poller/suspended`).
        if !unknown && base != used && !self.front.knows_busy() {
            return Err(format!(
                "requests waited for an I/O error when the guest was saved or migrated, and its front end \
                 has not kept the in-flight region: base {base}, used {used}, available {avail}"
            ));
        }
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
        self.request_rings().any(|ring| ring.owed)
            || self.workers.iter().any(|w| w.call(|p| p.replays()))
    }

    /// Waits until a queue that goes on has submitted again what was in flight before: where it
    /// stopped must be where it goes on with a new request, whoever does that.
    fn finish_replay(&self, at: usize) -> Result<(), DeviceError> {
        let index = at as u16;
        let replays = || self.worker(at).call(move |p| p.to_replay(index)) != 0;
        if !replays() {
            return Ok(());
        }
        self.worker(at).call(|p| p.set_unlimited(true));
        let ended = self.wait_for_replay(at, replays);
        self.worker(at).call(|p| p.set_unlimited(false));
        ended
    }

    fn wait_for_replay(&self, at: usize, replays: impl Fn() -> bool) -> Result<(), DeviceError> {
        const PAUSE: Duration = Duration::from_millis(1);
        let since = Instant::now();
        // Suspended requests may have all slots.
        let knows_busy = self.front.knows_busy();
        self.worker(at).call(move |p| match knows_busy {
            true => p.let_go(true),
            false => p.ask_for_stop(),
        });
        while replays() {
            // There the rest stays for whoever goes on.
            if !knows_busy && self.worker(at).call(|p| p.stands_still(DISK)) {
                break;
            }
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
        match self.front.role(at) {
            Role::Control => {
                self.finish_tmfs()?;
                if let Some(queue) = self.control.take() {
                    self.rings[at].base = queue.next_avail();
                }
            }
            Role::Events => {
                if let Some(queue) = self.end_events() {
                    self.rings[at].base = queue.next_avail();
                }
            }
            Role::Requests(_) => {
                let index = at as u16;
                self.finish_replay(at)?;
                let worker = self.worker(at);
                worker.call(move |p| p.close_queue(index));
                self.drain(Selector::Queue(index), "the stop of a queue")?;
                let worker = self.worker(at);
                // The region does not go with a guest that migrates.
                let marks_last = self.features & F_LOG_ALL == 0;
                if let Some(queue) = worker.call(move |p| p.remove_queue(index, marks_last)) {
                    worker.unwatch(queue.kick_fd());
                    self.rings[at].base = queue.next_avail();
                }
                self.placement.set(at, None);
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

    /// The longest chains that the driver may make.
    pub(super) fn chains(&self) -> Chains {
        match self.front {
            Front::Scsi if self.features & F_T10_PI != 0 => Chains::Protected,
            Front::Scsi | Front::Blk => Chains::Plain,
        }
    }

    /// Has requests carry protection information, or not, as the features say. No request queue runs.
    pub(super) fn apply_protection(&self) {
        let chains = self.chains();
        for worker in &self.workers {
            let slots = make_slots(0..worker.call(|p| p.slots()), chains);
            // What was there is freed here, as it may be megabytes.
            drop(worker.call(move |p| p.set_protected(chains == Chains::Protected, slots)));
        }
    }

    /// Makes the slots that the request queues among `rings` will need, before they start.
    pub(super) fn make_room(&self, rings: &[RingState]) {
        for (n, worker) in self.workers.iter().enumerate() {
            let here = |ring: &&RingState| self.worker_of(ring.index as usize) == Some(n);
            let descriptors = rings.iter().filter(here).map(|r| usize::from(r.size)).sum();
            let missing = worker.call(move |p| p.missing_slots(descriptors));
            let slots = make_slots(missing, self.chains());
            worker.call(move |p| p.add_slots(slots));
        }
    }

    /// Tells the reactors how many of them serve request queues, if that changed: those that run, and
    /// `starting`.
    pub(super) fn share_room(&mut self, starting: Option<usize>) {
        let runs = |at: &usize| self.rings[*at].running || starting == Some(*at);
        let queues = (0..self.rings.len()).filter(runs);
        let mut serves = vec![false; self.workers.len()];
        queues.filter_map(|at| self.worker_of(at)).for_each(|n| serves[n] = true);
        let serving = serves.iter().filter(|serves| **serves).count();
        if serving != self.serving {
            self.serving = serving;
            self.workers.iter().for_each(|w| w.call(move |p| p.share_room(serving)));
        }
    }

    /// The part of the session that runs a request queue.
    pub(super) fn worker(&self, at: usize) -> &Worker {
        &self.workers[self.worker_of(at).expect("only request queues run on reactors")]
    }

    /// Its place; `None`: the ring is no request queue.
    fn worker_of(&self, at: usize) -> Option<usize> {
        match self.front.role(at) {
            Role::Requests(n) => Some(self.places[n]),
            Role::Control | Role::Events => None,
        }
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
        if self.control.is_some() && !self.rings[CONTROL_QUEUE].running {
            self.control = None;
        }
        if self.events.is_some() && !self.rings[EVENT_QUEUE].running {
            self.end_events();
        }
    }
}

impl Worker {
    /// Serves a queue and has the reactor wake for its kick. `resumed`: its guest is called.
    pub(super) fn go_on_with(&self, queue: RequestQueue, resumed: bool, chains: Chains) {
        let (index, size) = (queue.index(), queue.size());
        // Only this thread adds queues.
        let missing = self.call(move |p| p.missing_slots(usize::from(size)));
        // Here, as it may be megabytes.
        let slots = make_slots(missing, chains);
        let poller = self.poller;
        let watched = self.reactor.call(move |cx| {
            let kick =
                cx.poller_mut::<DevicePoller>(poller).and_then(|p| p.add_queue(queue, slots));
            let watched = kick.map_or(Ok(()), |fd| cx.watch(fd, poller));
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
