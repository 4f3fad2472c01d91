//! A poller of one request queue, without a session and a reactor: for who counts what a request takes it.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bdev::Limits;
use reactor::Poller;
use scsi::Lun;
use virtqueue::{QueueConfig, SplitQueue};

use super::{Chains, DevicePoller, Member, QueueSetup, RequestQueue, Unit, make_slots};
use crate::coalescing::SharedCoalescing;
use crate::defs::FIRST_REQUEST_QUEUE;
use crate::front::Front;
use crate::mailbox::{Inbox, Notice, mailbox};
use crate::placement::Placement;
use crate::stats::{ControllerCounters, LunCounters};

/// Target of the one logical unit.
const TARGET: u8 = 0;
/// After which data of a request without an answer takes no room any more.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// The I/O path of a virtio-scsi device on the thread that calls it, which is its driver, too.
pub struct PollerAlone {
    poller: DevicePoller,
    /// Nobody reads what the poller tells its session.
    _inbox: Inbox,
}

impl PollerAlone {
    /// A poller of `queue`, made of `config`, whose requests are for LUN 0 of target 0: that is `lun`. Nobody
    /// kicks it, and it calls nobody.
    ///
    /// # Errors
    /// No eventfd left.
    pub fn new(queue: SplitQueue, config: QueueConfig, lun: Lun) -> io::Result<Self> {
        let (mailbox, inbox) = mailbox()?;
        let mut poller = DevicePoller::new(
            "alone".into(),
            Front::Scsi,
            (Arc::new(ControllerCounters::default()), Arc::new(SharedCoalescing::default())),
            Notice { mailbox, session: 0 },
            ANSWER_TIMEOUT,
            Member::new(None),
        );
        // What a turn does is not to depend on how long it takes.
        poller.turn_ticks = u64::MAX;
        let limits = Arc::new(Limits::default());
        let counters = Arc::new(LunCounters::default());
        poller.add_unit(TARGET, Unit::new(lun, counters, limits, None));
        poller.show_unit(TARGET);
        let slots = make_slots(poller.missing_slots(config.size.into()), Chains::Plain);
        let index = FIRST_REQUEST_QUEUE as u16;
        let setup = QueueSetup { index, config, ring: queue, kick: None, call: None };
        poller.add_queue(RequestQueue::new(setup, Placement::new()), slots);
        Ok(PollerAlone { poller, _inbox: inbox })
    }

    /// Its turn: takes what is in the ring, a batch at most, and ends what its device has done. Returns how
    /// much that was.
    pub fn turn(&mut self) -> u32 {
        self.poller.poll()
    }
}
