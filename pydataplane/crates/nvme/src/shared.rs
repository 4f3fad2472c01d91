//! What a controller, its thread and its channels share.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::Sender;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bdev::{Closed, FlushLatch, ThreadQueue, Waiter};
use crossbeam_queue::SegQueue;
use parking_lot::Mutex;
use reactor::Waker;
use uuid::Uuid;

use crate::address::Address;
use crate::connect::{Association, Identity};
use crate::identify::{self, NAMESPACES_MAX, Names, Namespace};
use crate::options::{Only, Options, PathInfo};
use crate::requests::Request;
use crate::units::{Unit, Units};

/// I/Os of all channels that the thread has not taken.
const QUEUE: usize = 4096;
/// How long I/O waits for an answer when the process ends.
const END_WITHIN: Duration = Duration::from_secs(2);

/// What the thread is asked for.
pub(crate) enum Order {
    /// Use another path, which is connected to, or will be.
    Add(Address, Option<Box<Association>>),
    /// Use one no more.
    Remove(Address),
}

/// What the controller, its thread and its channels share.
pub(crate) struct Shared {
    pub options: Options,
    pub identity: Identity,
    pub units: Arc<Units>,
    pub names: Names,
    /// There is a volatile cache, to be flushed.
    pub cache: bool,
    pub write_through: bool,
    queue: ThreadQueue<Request>,
    waker: OnceLock<Waker>,
    orders: SegQueue<Order>,
    /// The paths that it is to have. Orders are given with it held.
    pub paths: Mutex<Vec<Address>>,
    stop: AtomicBool,
    /// The process ends: nobody waits for long any more.
    ending: AtomicBool,
    /// Nobody answered for too long: I/O fails until there is a connection.
    given_up: AtomicBool,
    pub latch: FlushLatch,
    shown: Mutex<Vec<PathInfo>>,
    closing: Closed,
    /// Is told its name when a namespace has come.
    found: Sender<String>,
}

impl Shared {
    /// What is served by one of `paths`, which an association leads by. `found` is told its name when a namespace
    /// has come.
    pub(crate) fn new(
        options: Options,
        identity: Identity,
        paths: &[Address],
        association: &Association,
        found: Sender<String>,
    ) -> Shared {
        let Association { controller, namespaces, names, .. } = association;
        let cache = controller.cache;
        let is_local = paths.iter().all(Address::is_local);
        let write_through = cache && options.write_through.unwrap_or(!is_local);
        let used = namespaces.iter().filter(|each| is_expected(&options.expected, each).is_ok());
        let units = used.map(|namespace| Unit::new(*namespace, controller, write_through));
        Shared {
            identity,
            units: Arc::new(Units::new(units)),
            names: names.clone(),
            cache,
            write_through,
            queue: ThreadQueue::new(QUEUE),
            waker: OnceLock::new(),
            orders: SegQueue::new(),
            paths: Mutex::new(paths.to_vec()),
            stop: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            given_up: AtomicBool::new(false),
            latch: FlushLatch::default(),
            shown: Mutex::default(),
            closing: Closed::default(),
            found,
            options,
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.options.name
    }

    /// Name of the bdev of a namespace.
    pub(crate) fn bdev(&self, unit: usize) -> String {
        match self.options.only {
            Some(_) => self.options.name.clone(),
            None => format!("{}n{}", self.options.name, self.units[unit].namespace.nsid),
        }
    }

    /// What it is called as well: where it is a pool's.
    pub(crate) fn alias(&self, unit: usize) -> Option<String> {
        let Only { pool, .. } = self.options.only.as_ref()?;
        Some(format!("{pool}/{}", self.units[unit].namespace.called()))
    }

    #[inline]
    pub(crate) fn has_given_up(&self) -> bool {
        self.given_up.load(Relaxed)
    }

    pub(crate) fn set_given_up(&self, given_up: bool) {
        self.given_up.store(given_up, Relaxed);
    }

    pub(crate) fn give_up(&self) -> Option<Duration> {
        let give_up = self.options.give_up;
        match self.ending.load(Relaxed) {
            true => Some(give_up.map_or(END_WITHIN, |most| most.min(END_WITHIN))),
            false => give_up,
        }
    }

    /// Ends the thread.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Relaxed);
        self.wake();
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.load(Relaxed)
    }

    /// The process ends.
    pub(crate) fn end(&self) {
        self.ending.store(true, Relaxed);
        self.wake();
    }

    pub(crate) fn set_waker(&self, waker: Waker) {
        _ = self.waker.set(waker);
    }

    pub(crate) fn wake(&self) {
        if let Some(waker) = self.waker.get() {
            waker.wake();
        }
    }

    pub(crate) fn closed(&self) {
        self.closing.tell();
    }

    /// Tells when its connections are closed.
    pub(crate) fn closing(&self) -> Closed {
        self.closing.clone()
    }

    pub(crate) fn show(&self, paths: Vec<PathInfo>) {
        *self.shown.lock() = paths;
    }

    pub(crate) fn shown(&self) -> Vec<PathInfo> {
        self.shown.lock().clone()
    }

    /// Has the thread carry an I/O out; gives it back where too many wait ([`ThreadQueue::push`]).
    pub(crate) fn hand_over(
        &self,
        request: Request,
        waiter: Option<&Arc<Waiter>>,
    ) -> Result<(), Request> {
        let pushed = self.queue.push(request, waiter);
        self.wake();
        pushed
    }

    pub(crate) fn next_request(&self) -> Option<Request> {
        self.queue.pop()
    }

    pub(crate) fn has_requests(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Gives the thread an order, of which it hears at its next wake-up.
    pub(crate) fn give(&self, order: Order) {
        self.orders.push(order);
    }

    pub(crate) fn next_order(&self) -> Option<Order> {
        self.orders.pop()
    }

    /// Whether the volatile cache of a target goes with a path: that of another host may have gone down.
    pub(crate) fn loses_cache(&self, address: &Address) -> bool {
        self.cache && !self.write_through && !address.is_local()
    }

    /// Numbers of the namespaces that are bdevs or are to be.
    pub(crate) fn known(&self) -> Vec<u32> {
        let units = self.units.iter().map(|unit| unit.namespace.nsid);
        units.chain(self.options.expected.iter().map(|(nsid, ..)| *nsid)).collect()
    }

    /// With how many of the namespaces that are bdevs guests can go on by another association.
    ///
    /// # Errors
    /// A clause: with none, as what is there is not what it was; or not with its controller.
    pub(crate) fn usable(&self, with: &Association) -> Result<usize, String> {
        if with.controller.cache && !self.cache {
            return Err("its controller has a volatile cache now".to_owned());
        }
        let (mut usable, mut refused) = (0, None);
        for is in &with.namespaces {
            let Some(at) = self.units.position(is.nsid) else {
                if self.options.only.is_some() {
                    refused = Some(format!("its number is {} now: open it anew", is.nsid));
                }
                continue;
            };
            match self.units[at].can_go_on(is, &with.controller, self.write_through) {
                Ok(()) => usable += 1,
                Err(why) => _ = refused.get_or_insert(why),
            }
        }
        match refused {
            Some(why) if usable == 0 => Err(why),
            _ => Ok(usable),
        }
    }

    /// A path has a namespace: its number among the units. One that is not among them yet becomes a bdev.
    ///
    /// # Errors
    /// A clause: it is not to be used there.
    pub(crate) fn accept(
        &self,
        found: &Namespace,
        with: &identify::Controller,
    ) -> Result<usize, String> {
        match self.units.position(found.nsid) {
            Some(at) => self.units[at].can_go_on(found, with, self.write_through).map(|()| at),
            None => self.add(found, with),
        }
    }

    fn add(&self, found: &Namespace, with: &identify::Controller) -> Result<usize, String> {
        is_expected(&self.options.expected, found)?;
        let unit = Unit::new(*found, with, self.write_through);
        let at = self.units.add(unit).ok_or_else(|| {
            format!("namespace {} is one of more than {NAMESPACES_MAX}", found.nsid)
        })?;
        tracing::info!(controller = self.name(), "namespace {} is there", found.nsid);
        _ = self.found.send(self.name().to_owned());
        Ok(at)
    }
}

/// Whether a namespace is what one of its number has to be, if there is any such.
///
/// # Errors
/// A clause: it is another one.
fn is_expected(expected: &[(u32, Uuid, u32)], found: &Namespace) -> Result<(), String> {
    match expected.iter().find(|(nsid, ..)| *nsid == found.nsid) {
        Some((nsid, uuid, size))
            if found.identity != *uuid || found.geometry.block_size != *size =>
        {
            Err(format!(
                "namespace {nsid} is another one than before: detach the controller to use what is there"
            ))
        }
        _ => Ok(()),
    }
}
