//! A bdev some of whose I/Os fail, when somebody asks for that.

use crate::flight::Flight;
use crate::injection::{Fault, Injection, Injections, failure};
use crate::layer::{Layer, shows_its_base};
use bdev::{
    Bdev, Channel, Completion, Io, IoError, Op, OpenError, Registry, RegistryError, Run, Submit,
};
use guestmem::Bounce;
use parking_lot::Mutex;
use reactor::{IoContext, Waker};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use uuid::Uuid;

/// A bdev that shows its base, and the errors that are asked for.
pub struct Failing {
    layer: Layer,
    shared: Arc<Shared>,
}

/// What its queue pairs look at.
#[derive(Default)]
struct Shared {
    injections: Injections,
    /// How often I/Os that are pending were to go on.
    resumed: AtomicU64,
    /// Of the threads that have queue pairs, each as long as such a pair is there.
    wakers: Mutex<Vec<Weak<Waker>>>,
}

impl Failing {
    /// What [`Bdev::product_name`] says, as SPDK's.
    pub const PRODUCT: &'static str = "Error Injection Disk";
    /// What its name begins with, before that of the base, as in SPDK's.
    pub const PREFIX: &'static str = "EE_";

    /// The bdev on `base`, not registered yet.
    ///
    /// # Errors
    /// There is no such base, or somebody has it.
    pub fn create(
        registry: &Registry,
        base: &str,
        uuid: Option<Uuid>,
    ) -> Result<Arc<Failing>, RegistryError> {
        let name = format!("{}{base}", Failing::PREFIX);
        let layer = Layer::new(registry, "error injection", name, base, uuid)?;
        Ok(Arc::new(Failing { layer, shared: Arc::default() }))
    }

    /// Its own part.
    pub fn layer(&self) -> &Layer {
        &self.layer
    }

    /// Has I/Os of these kinds go wrong from now on, in place of what was asked for before; `None`: no
    /// more.
    pub fn inject(&self, ops: &[Op], injection: Option<Injection>) {
        self.shared.injections.set(ops, injection);
    }

    /// Has I/Os that are pending go on to the base.
    pub fn resume_pending(&self) {
        self.shared.resumed.fetch_add(1, Ordering::Release);
        self.shared.wakers.lock().iter().filter_map(Weak::upgrade).for_each(|waker| waker.wake());
    }
}

impl Bdev for Failing {
    shows_its_base!(Failing::PRODUCT);

    fn open(&self, io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        let base = self.layer.base().open(io)?;
        let waker = Arc::new(io.waker());
        let mut wakers = self.shared.wakers.lock();
        wakers.retain(|waker| waker.strong_count() > 0);
        wakers.push(Arc::downgrade(&waker));
        drop(wakers);
        Ok(Box::new(FailingChannel {
            flight: Flight::new(base, self.layer.stats.channel(), self.geometry().block_size),
            shared: self.shared.clone(),
            seen: self.shared.resumed.load(Ordering::Acquire),
            pending: VecDeque::new(),
            to_send: VecDeque::new(),
            to_spoil: VecDeque::new(),
            spoils: None,
            block: Bounce::new(),
            copy: vec![0; self.geometry().block_size as usize].into(),
            block_size: u64::from(self.geometry().block_size),
            waker,
        }))
    }

    fn driver_specific(&self) -> Value {
        json!({"error_disk": {
            "name": self.layer.name,
            "base_bdev_name": self.layer.base().name(),
            "injected": self.shared.injections.shown(),
        }})
    }
}

/// What is still to be done about an I/O when the base has answered: the byte to change.
type Spoil = Option<(u64, u8)>;

struct FailingChannel {
    flight: Flight<Spoil>,
    shared: Arc<Shared>,
    /// Of [`Shared::resumed`].
    seen: u64,
    /// Not answered until somebody says so.
    pending: VecDeque<u16>,
    /// Go on as soon as the base has room.
    to_send: VecDeque<u16>,
    /// Writes that are done, and of which a block is to be written once more, changed.
    to_spoil: VecDeque<u16>,
    /// The one of which it is.
    spoils: Option<u16>,
    /// That block, and the memory to make it in.
    block: Bounce,
    copy: Box<[u8]>,
    block_size: u64,
    waker: Arc<Waker>,
}

impl Channel for FailingChannel {
    fn submit(&mut self, io: &Io) -> Submit {
        let fault = self.shared.injections.next(io.op, self.flight.slots.taken());
        let spoil = match fault {
            Some(Fault::Corrupt { offset, value }) => {
                Some((offset, value)).filter(|_| offset < io.sg.len() as u64)
            }
            _ => None,
        };
        if fault == Some(Fault::NoMemory) {
            self.waker.wake();
            return Submit::Full;
        }
        let Some(at) = self.flight.begin(io, spoil) else { return Submit::Full };
        match fault {
            Some(Fault::Failure) => self.flight.end_now(at, Err(failure(io.op))),
            Some(Fault::Pending) => {
                self.pending.push_back(at);
                Submit::Pending
            }
            Some(Fault::Corrupt { .. } | Fault::NoMemory) | None => match self.flight.send(at) {
                Submit::Full => {
                    self.flight.forget(at);
                    Submit::Full
                }
                Submit::Pending => Submit::Pending,
                Submit::Done(Ok(())) if spoil.is_some() && io.op == Op::Write => {
                    self.to_spoil.push_back(at);
                    self.waker.wake();
                    Submit::Pending
                }
                Submit::Done(result) => {
                    self.spoil_read(at, result);
                    self.flight.end_now(at, result)
                }
            },
        }
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        let before = done.len();
        if self.flight.is_handed_over(done) {
            let resumed = self.shared.resumed.load(Ordering::Acquire);
            if resumed != self.seen {
                self.seen = resumed;
                self.to_send.append(&mut self.pending);
            }
            let mut ended = self.flight.ended();
            for Completion { tag, result, .. } in ended.drain(..) {
                self.answered(tag as u16, result, done);
            }
            self.flight.keep(ended);
            while let Some(at) = self.to_send.front().copied() {
                match self.flight.send(at) {
                    Submit::Full => break,
                    Submit::Pending => {}
                    Submit::Done(result) => self.answered(at, result, done),
                }
                self.to_send.pop_front();
            }
            self.spoil_next(done);
        }
        if !self.to_send.is_empty() || !self.to_spoil.is_empty() {
            self.waker.wake();
        }
        (done.len() - before) as u32
    }

    fn sparse_run(&mut self, lba: u64, blocks: u64) -> Run {
        self.flight.base().sparse_run(lba, blocks)
    }
}

impl FailingChannel {
    /// The base has answered.
    fn answered(&mut self, at: u16, result: Result<(), IoError>, done: &mut Vec<Completion>) {
        let slot = self.flight.slots[at];
        if self.spoils == Some(at) {
            self.spoils = None;
        } else if slot.more.is_some() && slot.io.op == Op::Write && result.is_ok() {
            self.to_spoil.push_back(at);
            return;
        }
        self.spoil_read(at, result);
        self.flight.end(at, result, done);
    }

    /// Changes the byte of a read that has its data.
    fn spoil_read(&mut self, at: u16, result: Result<(), IoError>) {
        let slot = self.flight.slots[at];
        let Some((offset, value)) = slot.more.filter(|_| slot.io.op == Op::Read && result.is_ok())
        else {
            return;
        };
        let mut byte = [0];
        slot.io.sg.copy_to_slice(offset as usize, &mut byte);
        slot.io.sg.copy_from_slice(offset as usize, &[byte[0] ^ value]);
    }

    /// Writes the changed block of the next write that is done, if none is under way.
    fn spoil_next(&mut self, done: &mut Vec<Completion>) {
        let Some(at) = self.to_spoil.front().copied().filter(|_| self.spoils.is_none()) else {
            return;
        };
        let slot = self.flight.slots[at];
        let (offset, value) = slot.more.unwrap_or_default();
        let (block, within) = (offset / self.block_size, (offset % self.block_size) as usize);
        let Some(sg) = self.block.sg(self.copy.len()) else { return };
        slot.io.sg.copy_to_slice((block * self.block_size) as usize, &mut self.copy);
        self.copy[within] ^= value;
        sg.copy_from_slice(0, &self.copy);
        let tag = u64::from(at);
        let io = Io { lba: slot.io.lba + block, blocks: 1, sg, tag, ..slot.io };
        match self.flight.base().submit(&io) {
            Submit::Full => return,
            Submit::Pending => self.spoils = Some(at),
            Submit::Done(result) => self.flight.end(at, result, done),
        }
        self.to_spoil.pop_front();
    }
}
