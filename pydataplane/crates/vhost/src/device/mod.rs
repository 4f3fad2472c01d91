//! The device of one session: what the peer negotiated, its memory, its rings.
//!
//! Belongs to the controller's thread. Request queues run on reactors, spread over them in turn;
//! the control queue and the event queue, which are rare and wait for other threads, run here.
//! Knows nothing of vhost-user messages: [`crate::session`] translates them into the methods
//! below, and whatever must wait for I/O in flight waits in them.

mod blk;
mod control;
mod ending;
mod events;
mod handover;
mod moving;
mod replace;
mod rings;
mod running;
mod side;

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use bdev::OpenError;
use guestmem::{DirtyLog, GuestMemory, LogError, MapError};
use reactor::{Handle, Owner, PollerId};
use scsi::{LunShared, Nexus};
use virtqueue::{ConfigError, InflightRegion};

use crate::budget::Budget;
use crate::coalescing::SharedCoalescing;
use crate::defs::{
    F_EVENT_IDX, F_INDIRECT_DESC, F_LOG_ALL, F_PROTOCOL_FEATURES, F_T10_PI, MAX_TARGETS,
};
use crate::events::{PendingEvents, Unheard};
use crate::failure::Failure;
use crate::front::Front;
use crate::lun::{Target, Times};
use crate::mailbox::{Countdown, Mailbox, Notice};
use crate::past::{Mark, Past};
use crate::placement::Placement;
use crate::poller::{DevicePoller, Member, Place, RequestQueue, Selector, TaskSet, Unit};
use crate::stats::ControllerCounters;

use blk::ConfigChannel;
use control::PendingTmf;
pub(crate) use control::TMF_ID;
pub(crate) use rings::Addresses;
use rings::Ring;
use side::SideQueue;

/// Why the device did not do what the peer asked. Nothing changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DeviceError {
    #[error("there is no virtqueue {0}")]
    NoQueue(u32),
    #[error("virtqueue base {0} is not a 16-bit index")]
    Base(u32),
    #[error("features {0:#x} were not offered")]
    Features(u64),
    #[error("virtqueue {index}: {why}")]
    Queue { index: usize, why: ConfigError },
    #[error(transparent)]
    Memory(#[from] MapError),
    #[error(transparent)]
    Log(#[from] LogError),
    #[error("a descriptor of the peer's cannot be duplicated: {0}")]
    Descriptor(std::io::Error),
    /// The session must end: nothing more can be done in its order.
    #[error("{what} still waits for I/O in flight after {} s", waited.as_secs())]
    Stuck { what: &'static str, waited: Duration },
}

/// The session's part on one reactor.
struct Worker {
    reactor: Handle,
    poller: PollerId,
}

/// A target with this session's nexus to it.
struct AttachedTarget {
    shared: Arc<LunShared>,
    nexus: Arc<Nexus>,
    times: Arc<Times>,
    leaving: bool,
}

/// What a session's device needs of its controller.
pub(crate) struct SessionContext<'a> {
    /// Name of the controller.
    pub(crate) name: &'a str,
    /// What the guest sees.
    pub(crate) front: Front,
    /// Number of the session, for late notices.
    pub(crate) session: u64,
    /// Where its queues run.
    pub(crate) reactors: &'a [Handle],
    /// Counters of the controller: one for each reactor, then one for the controller's thread.
    pub(crate) counters: &'a [Arc<ControllerCounters>],
    /// When the guest is called.
    pub(crate) coalescing: &'a Arc<SharedCoalescing>,
    /// Where its queues run.
    pub(crate) placement: &'a Arc<Placement>,
    pub(crate) mailbox: &'a Mailbox,
    /// How long a message of the peer may wait for I/O in flight.
    pub(crate) message_timeout: Duration,
    /// As [`crate::Timeouts::answer`].
    pub(crate) answer_timeout: Duration,
    /// Whether sessions are kept for the next process, which has to know what is in flight.
    pub(crate) keeps: bool,
    /// What the sessions before left of what task management may take.
    pub(crate) control_budget: Budget,
}

/// The device of one session.
pub(crate) struct Device {
    name: String,
    front: Front,
    /// Of the I/O of all its units.
    owner: Owner,
    workers: Vec<Worker>,
    /// The pollers of `workers` as they reach each other.
    members: Box<[Arc<Member>]>,
    /// How many of them serve request queues, as they were told.
    serving: usize,
    /// Which of them serves each request queue.
    places: Vec<usize>,
    /// The same, of those that run, for others to read.
    placement: Arc<Placement>,
    counters: Arc<ControllerCounters>,
    mailbox: Mailbox,
    message_timeout: Duration,
    attached: Box<[Option<AttachedTarget>]>,

    features: u64,
    /// The memory table as the peer gave it.
    table: GuestMemory,
    log: Option<Arc<DirtyLog>>,
    /// The table, with the log if LOG_ALL is on: what the queues use.
    memory: Arc<GuestMemory>,

    /// Where what is in flight is marked: the peer's, or our own, which nobody has after this session.
    inflight: Option<InflightRegion>,
    /// It is our own.
    owns_inflight: bool,
    /// One is made where the peer has none.
    tracks: bool,
    rings: Box<[Ring]>,
    /// Requests that were in flight before are perhaps not all submitted again yet.
    catching_up: bool,
    /// What is known of rings without a region.
    past: Past,
    /// That there are such, whose requests may be in flight.
    mark: Mark,
    /// What ended since the peer left was not told.
    ended_muted: bool,
    /// How the front end is told that the configuration space changed.
    config_channel: ConfigChannel,
    control: Option<SideQueue>,
    events: Option<SideQueue>,
    /// Events that wait for buffers, while the event queue runs.
    pending_events: PendingEvents,
    /// While it does not, and its driver may go on with it.
    unheard: Option<Unheard>,
    tmfs: Vec<PendingTmf>,
    next_tmf: u64,
    /// Queues that were closed because the guest broke the rules.
    failures: u32,
    /// What task management may take: the controller's, while this session is there.
    pub(crate) control_budget: Budget,
    /// A queue has more than was taken in one turn.
    control_backlog: bool,
    event_backlog: bool,
    /// The session is about to end: nothing is taken from any queue.
    retired: bool,
    /// It is left to the next process.
    kept: bool,
    /// Nothing is served: the session is about to go on in another process, or has just come.
    held: bool,
}

impl Device {
    /// A device for a peer that just connected, with `targets`. A volume that cannot be opened is
    /// left out, and logged. `unheard`: by the driver of the session before, which this may be.
    pub(crate) fn new<'t>(
        context: &SessionContext<'_>,
        targets: impl Iterator<Item = &'t Target>,
        unheard: Option<Unheard>,
        past: Past,
        mark: Mark,
    ) -> Self {
        let members = context.reactors.iter().map(|r| Member::new(Some(r.waker())));
        let members: Box<[_]> = members.collect();
        let parts = context.reactors.iter().zip(context.counters).zip(&members);
        let workers = parts.map(|((reactor, counters), member)| {
            let name = format!("vhost {}", context.name);
            let notice = Notice { mailbox: context.mailbox.clone(), session: context.session };
            let front = context.front;
            let shared = (Arc::clone(counters), Arc::clone(context.coalescing));
            let (answer, member) = (context.answer_timeout, Arc::clone(member));
            let poller = reactor.call(move |cx| {
                let poller = DevicePoller::new(name, front, shared, notice, answer, member);
                cx.add_poller(Box::new(poller))
            });
            Worker { reactor: reactor.clone(), poller }
        });
        context.placement.clear();
        let mut device = Device {
            name: context.name.to_owned(),
            front: context.front,
            owner: Owner::new(),
            workers: workers.collect(),
            members,
            serving: 0,
            places: (0..context.front.queues())
                .map(|n| n % context.reactors.len().max(1))
                .collect(),
            placement: Arc::clone(context.placement),
            counters: Arc::clone(&context.counters[context.reactors.len()]),
            mailbox: context.mailbox.clone(),
            message_timeout: context.message_timeout,
            attached: (0..MAX_TARGETS).map(|_| None).collect(),
            features: 0,
            table: GuestMemory::empty(),
            log: None,
            memory: Arc::new(GuestMemory::empty()),
            inflight: None,
            owns_inflight: false,
            tracks: context.keeps && context.front == Front::Scsi,
            rings: (0..context.front.queues()).map(|_| Ring::default()).collect(),
            catching_up: false,
            past,
            mark,
            ended_muted: false,
            config_channel: ConfigChannel::default(),
            control: None,
            events: None,
            pending_events: PendingEvents::default(),
            unheard,
            tmfs: Vec::new(),
            next_tmf: context.session << 32,
            failures: 0,
            control_budget: context.control_budget,
            control_backlog: false,
            event_backlog: false,
            retired: false,
            kept: false,
            held: false,
        };
        for target in targets {
            if let Err(why) = device.open(target) {
                tracing::error!(
                    controller = device.name,
                    target = target.number,
                    "the guest will not see {}: {why}",
                    target.bdev_name()
                );
            }
        }
        device
    }

    /// Opens the unit of `target` on every reactor; new requests find it from then on.
    pub(crate) fn open(&mut self, target: &Target) -> Result<(), OpenError> {
        let nexus: Arc<Nexus> = match target.inherited() {
            Some(state) => target.shared.connect_as(state),
            None => target.shared.connect(),
        };
        let (number, limits) = (target.number, target.claim.limits());
        // Requests of virtio-blk have no task attributes.
        let is_shared = self.front == Front::Scsi && self.members.len() > 1;
        let set = is_shared.then(|| TaskSet::new(number, &self.members));
        for (n, (worker, counters)) in self.workers.iter().zip(&target.counters).enumerate() {
            let (shared, nexus) = (Arc::clone(&target.shared), Arc::clone(&nexus));
            let kept = (Arc::clone(counters), Arc::clone(&limits));
            let (poller, owner) = (worker.poller, self.owner);
            let place = set.as_ref().map(|set| Place::new(Arc::clone(set), n));
            let opened = worker.reactor.call(move |cx| {
                let unit = Unit::open(cx, owner, &shared, nexus, kept, place)?;
                if let Some(poller) = cx.poller_mut::<DevicePoller>(poller) {
                    poller.add_unit(number, unit);
                }
                Ok(())
            });
            if let Err(why) = opened {
                // No request has found it yet on any of them.
                self.workers.iter().for_each(|w| w.call(move |p| p.remove_unit(number)));
                return Err(why);
            }
        }
        self.workers.iter().for_each(|w| w.call(move |p| p.show_unit(number)));
        let (shared, times) = (Arc::clone(&target.shared), Arc::clone(&target.times));
        if target.inherited().is_none() {
            times.begin();
        }
        self.attached[usize::from(number)] =
            Some(AttachedTarget { shared, nexus, times, leaving: false });
        Ok(())
    }

    /// New requests no longer find `target`; [`crate::mailbox::Order::Drained`] with `id` follows
    /// when the last one in flight has ended. `false`: the session does not have it.
    pub(crate) fn leave(&mut self, target: u8, id: u64) -> bool {
        let Some(attached) = &mut self.attached[usize::from(target)] else { return false };
        attached.leaving = true;
        self.workers.iter().for_each(|w| w.call(move |p| p.leave_unit(target)));
        self.start_drain(Selector::Target(target), Some(id));
        true
    }

    /// Closes the unit of a target that was left and has drained.
    pub(crate) fn close(&mut self, target: u8) {
        self.workers.iter().for_each(|w| w.call(move |p| p.remove_unit(target)));
        if let Some(attached) = self.attached[usize::from(target)].take() {
            // What another unit was told to copy from it or to it is none of its requests.
            attached.shared.end_copies();
        }
    }

    /// The driver started afresh, as after a reboot of the guest: what it prevented is over, what it ejected is
    /// in again, and it scans by itself.
    fn driver_restarted(&mut self) {
        for target in self.attached.iter().flatten() {
            target.nexus.forget_prevention();
            target.shared.load_medium(Some(&target.nexus));
        }
        self.unheard = None;
    }

    /// Whether the peer speaks protocol features: then rings start disabled.
    fn has_protocol_features(&self) -> bool {
        self.features & F_PROTOCOL_FEATURES != 0
    }

    /// SET_FEATURES. What running rings must know is applied to them at once.
    pub(crate) fn set_features(&mut self, features: u64) -> Result<(), DeviceError> {
        /// Features that a ring is set up with.
        const OF_RINGS: u64 = F_EVENT_IDX | F_INDIRECT_DESC | F_PROTOCOL_FEATURES | F_T10_PI;
        let known = self.front.known_features();
        if features & !known != 0 {
            return Err(DeviceError::Features(features & !known));
        }
        let changed = self.features ^ features;
        if changed & F_T10_PI != 0 {
            // What is in flight was made with the other headers.
            for index in 0..self.rings.len() {
                self.stop(index)?;
            }
        }
        self.features = features;
        if changed & F_T10_PI != 0 {
            self.apply_protection();
        }
        if self.front == Front::Blk {
            self.apply_write_through();
        }
        if changed & F_LOG_ALL != 0 {
            self.apply_memory()?;
        }
        if changed & OF_RINGS != 0 {
            for index in 0..self.rings.len() {
                self.stop(index)?;
                self.try_start_or_stop(index)?;
            }
        }
        Ok(())
    }

    /// SET_MEM_TABLE, ADD_MEM_REG, REM_MEM_REG: `change` makes the new table of the old one.
    pub(crate) fn change_memory(
        &mut self,
        change: impl FnOnce(&GuestMemory) -> Result<GuestMemory, MapError>,
    ) -> Result<(), DeviceError> {
        self.table = change(&self.table)?;
        self.apply_memory()
    }

    /// The memory table as the peer gave it.
    pub(crate) fn table(&self) -> &GuestMemory {
        &self.table
    }

    /// SET_LOG_BASE.
    pub(crate) fn set_log(&mut self, log: DirtyLog) -> Result<(), DeviceError> {
        self.log = Some(Arc::new(log));
        match self.features & F_LOG_ALL {
            0 => Ok(()),
            _ => self.apply_memory(),
        }
    }

    /// Whether requests of `target` wait because an I/O failed.
    pub(crate) fn is_suspended(&self, target: u8) -> bool {
        self.workers.iter().any(|w| w.call(move |p| p.is_suspended(target)))
    }

    /// Whether a ring that stopped has requests that nothing but the in-flight region tells of (`poller/suspended`).
    pub(crate) fn is_overtaken(&self) -> bool {
        let Some(region) = self.inflight.as_ref().filter(|_| !self.front.knows_busy()) else {
            return false;
        };
        let stopped = self.rings.iter().enumerate().filter(|(_, ring)| ring.ran && !ring.running);
        let mut queues = stopped.filter_map(|(at, ring)| Some((ring, region.queue(at as u16)?)));
        queues.any(|(ring, queue)| ring.base != queue.used_index() && queue.has_marks())
    }

    /// Begins what waits because an I/O of `target` failed.
    pub(crate) fn resume(&self, target: u8) {
        self.workers.iter().for_each(|w| w.call(move |p| p.resume_unit(target)));
    }

    /// What the guest sees.
    pub(crate) fn front(&self) -> Front {
        self.front
    }

    /// The rings of request queues.
    fn request_rings(&self) -> impl Iterator<Item = &Ring> {
        self.rings.iter().skip(self.front.first_request_queue())
    }

    /// Whether any request queue runs.
    pub(crate) fn runs(&self) -> bool {
        self.request_rings().any(|r| r.running)
    }

    /// Whether the peer truncated its memory under us: the session must end.
    pub(crate) fn is_broken(&self) -> bool {
        self.memory.is_broken() || self.inflight.as_ref().is_some_and(InflightRegion::is_broken)
    }

    /// Lets every queue go on in the table and log as they are now: none takes requests, all
    /// drain, all swap. A queue whose rings are not in the new table stops; it goes on where it
    /// was once they are back.
    fn apply_memory(&mut self) -> Result<(), DeviceError> {
        let log = self.log.clone().filter(|_| self.features & F_LOG_ALL != 0);
        let memory = Arc::new(self.table.with_log(log));
        self.workers.iter().for_each(|w| {
            w.call(|p| {
                p.pause();
                p.let_go(true);
            });
        });
        self.drain(Selector::All, "a change of the memory table")?;
        // Their requests have ended too; the answers belong into the memory that they came from.
        self.finish_tmfs()?;
        let mut lost = Vec::new();
        for worker in &self.workers {
            let memory = Arc::clone(&memory);
            let queues = worker.call(move |p| p.remap(&memory));
            queues.iter().for_each(|(q, _)| worker.unwatch(q.kick_fd()));
            lost.extend(queues);
        }
        self.memory = memory;
        for (queue, why) in lost {
            self.lost(queue, why);
        }
        self.remap_side_queues();
        for index in 0..self.rings.len() {
            self.try_start_or_stop(index)?;
        }
        // What waited for the functions that were answered above.
        self.serve_control();
        Ok(())
    }

    fn lost(&mut self, queue: RequestQueue, why: Failure) {
        let index = usize::from(queue.index());
        tracing::debug!(controller = self.name, queue = index, "stopped: {why}");
        self.rings[index].base = queue.next_avail();
        self.rings[index].running = false;
        self.placement.set(index, None);
        self.share_room(None);
    }

    /// Waits until the selected requests have ended.
    fn drain(&self, selector: Selector, what: &'static str) -> Result<(), DeviceError> {
        let countdown = self.start_drain(selector, None);
        self.wait(&countdown, what)
    }

    fn wait(&self, countdown: &Countdown, what: &'static str) -> Result<(), DeviceError> {
        match countdown.wait(&format!("{what} of {}", self.name), self.message_timeout) {
            true => Ok(()),
            false => Err(DeviceError::Stuck { what, waited: self.message_timeout }),
        }
    }

    fn start_drain(&self, selector: Selector, tell: Option<u64>) -> Arc<Countdown> {
        let tell = tell.map(|id| (self.mailbox.clone(), id));
        let countdown = Countdown::new(self.workers.len(), tell);
        for worker in &self.workers {
            let countdown = Arc::clone(&countdown);
            worker.call(move |p| p.drain(selector, move || countdown.count()));
        }
        countdown
    }
}

impl Worker {
    /// Runs `f` with the poller, on its reactor.
    fn call<R: Send + 'static>(
        &self,
        f: impl FnOnce(&mut DevicePoller) -> R + Send + 'static,
    ) -> R {
        let id = self.poller;
        self.reactor.call(move |cx| {
            let poller = cx.poller_mut::<DevicePoller>(id);
            f(poller.expect("a session's pollers live until it disconnects"))
        })
    }

    /// The reactor no longer wakes for `kick`, which is still open.
    fn unwatch(&self, kick: Option<RawFd>) {
        if let Some(fd) = kick {
            self.reactor.call(move |cx| cx.unwatch(fd));
        }
    }
}
