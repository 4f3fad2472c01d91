//! A unit on a real disk, for what opens channels of its own on other threads.

use crate::rig::*;
use bdev::{
    Bdev, Channel, Completion, Features, Geometry, Io, Malloc, MallocOptions, Op, OpenError, Run,
    Sharing, Submit, SyncChannel,
};
use reactor::IoContext;
use scsi::{Lun, LunOptions, LunShared, Outcome, Task};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};
use uuid::Uuid;

pub const DEADLINE: Duration = Duration::from_secs(60);
/// Of a [`disk`].
pub const BLOCKS: u64 = 8192;

/// A disk of which each block is another.
pub fn disk(first: u8) -> Arc<dyn Bdev> {
    malloc(first)
}

/// The same, as what it is.
pub fn malloc(first: u8) -> Arc<Malloc> {
    let options = MallocOptions {
        name: Uuid::new_v4().to_string(),
        block_size: 512,
        physical_block_size: 0,
        num_blocks: BLOCKS,
        uuid: None,
    };
    let disk = Malloc::create(options).unwrap();
    let data: Vec<u8> = (0..BLOCKS)
        .flat_map(|block| [first, block as u8, (block >> 8) as u8, 7].repeat(128))
        .collect();
    SyncChannel::open(&*disk).unwrap().write(0, &data).unwrap();
    disk
}

/// All that a [`disk`] has.
pub fn medium(disk: &Arc<dyn Bdev>) -> Vec<u8> {
    let mut data = vec![0; BLOCKS as usize * 512];
    SyncChannel::open(&**disk).unwrap().read(0, &mut data).unwrap();
    data
}

/// A unit of that nexus.
pub fn on(nexus: &str) -> LunOptions {
    LunOptions { nexus: Some(nexus.to_owned()), ..LunOptions::default() }
}

/// Units of two disks on one controller.
pub fn two() -> [(Arc<dyn Bdev>, Unit); 2] {
    two_of([disk(0), disk(1)])
}

/// Units of those disks on one controller.
pub fn two_of(disks: [Arc<dyn Bdev>; 2]) -> [(Arc<dyn Bdev>, Unit); 2] {
    let controller = Uuid::new_v4();
    let mut number = 0..;
    disks.map(|disk| {
        let unit = Unit::new(&disk, on(&format!("{controller}:{}", number.next().unwrap())));
        (disk, unit)
    })
}

pub struct Unit {
    pub shared: Arc<LunShared>,
    pub lun: Lun,
    _io: IoContext,
}

impl Unit {
    /// Past its first unit attention.
    pub fn new(disk: &Arc<dyn Bdev>, options: LunOptions) -> Self {
        let shared = LunShared::new(Arc::clone(disk), options).unwrap();
        let io = IoContext::new().unwrap();
        let lun = Lun::new(shared.clone(), shared.connect(), disk.open(&io).unwrap());
        let mut unit = Unit { shared, lun, _io: io };
        assert_eq!(unit.run(&[0; 6]).sense(), (0x6, 0x2900));
        unit
    }

    /// A command without data.
    pub fn run(&mut self, cdb: &[u8]) -> Answer {
        self.io(cdb, &[], 0)
    }

    /// A command with both buffers, until it is over.
    pub fn io(&mut self, cdb: &[u8], data: &[u8], len: usize) -> Answer {
        let (out, into) = (Buffer::new(data, 700), Buffer::new(&vec![0xEE; len], 900));
        let mut task = Task::new(7);
        task.prepare(&pad(cdb), out.sg(), into.sg());
        let outcome = self.lun.start(&mut task);
        let outcome = self.until_over(&mut task, outcome);
        Answer { outcome, data: into.bytes() }
    }

    /// Goes on with a task until it is over.
    pub fn until_over(&mut self, task: &mut Task, outcome: Outcome) -> Outcome {
        self.until_over_beside(task, outcome, &mut [])
    }

    /// The same, and gives others, which do not end meanwhile, their turns.
    pub fn until_over_beside(
        &mut self,
        task: &mut Task,
        mut outcome: Outcome,
        others: &mut [&mut Task],
    ) -> Outcome {
        let begun = Instant::now();
        let mut done = Vec::with_capacity(4);
        while outcome == Outcome::Pending {
            assert!(begun.elapsed() < DEADLINE, "it does not end");
            done.clear();
            self.lun.poll(&mut done);
            for of in &done {
                match others.iter_mut().find(|other| other.tag() == of.tag) {
                    Some(other) => {
                        assert_eq!(self.lun.resume(other, of.result), Outcome::Pending);
                    }
                    None => outcome = self.lun.resume(task, of.result),
                }
            }
        }
        outcome
    }

    /// A command that goes on, of that tag, with its data.
    #[track_caller]
    pub fn begin(&mut self, tag: u64, cdb: &[u8], data: &[u8]) -> (Box<Task>, Buffer) {
        let out = Buffer::new(data, data.len().max(1));
        let mut task = Box::new(Task::new(tag));
        task.prepare(&pad(cdb), out.sg(), Buffer::new(&[], 1).sg());
        assert_eq!(self.lun.start(&mut task), Outcome::Pending);
        (task, out)
    }
}

/// A disk on which the threads that copy do as many I/Os as they are let, and wait for the next one.
pub struct Held {
    disk: Arc<dyn Bdev>,
    gate: Arc<Gate>,
}

#[derive(Default)]
struct Gate {
    /// I/Os that may begin, and those that wait to.
    counts: Mutex<(u64, u64)>,
    changed: Condvar,
    /// Operation, first block and blocks of those that have begun.
    asked: Mutex<Vec<(Op, u64, u64)>>,
}

struct HeldChannel {
    channel: Box<dyn Channel>,
    gate: Arc<Gate>,
}

impl Held {
    /// With room for no I/O yet.
    pub fn new(disk: Arc<dyn Bdev>) -> Arc<Held> {
        Arc::new(Held { disk, gate: Arc::default() })
    }

    /// So many more I/Os may begin.
    pub fn let_go(&self, ios: u64) {
        let mut counts = self.gate.counts.lock().unwrap();
        counts.0 = counts.0.saturating_add(ios);
        self.gate.changed.notify_all();
    }

    /// What threads that copy have asked for so far.
    pub fn asked(&self) -> Vec<(Op, u64, u64)> {
        self.gate.asked.lock().unwrap().clone()
    }

    /// All that were let go have begun, and `threads` wait for another one.
    pub fn until_held(&self, threads: u64) {
        let counts = self.gate.counts.lock().unwrap();
        let is_over = |counts: &mut (u64, u64)| *counts != (0, threads);
        let (_counts, late) =
            self.gate.changed.wait_timeout_while(counts, DEADLINE, is_over).unwrap();
        assert!(!late.timed_out(), "nobody waits");
    }
}

impl Bdev for Held {
    fn name(&self) -> &str {
        self.disk.name()
    }
    fn aliases(&self) -> Vec<String> {
        Vec::new()
    }
    fn uuid(&self) -> Uuid {
        self.disk.uuid()
    }
    fn product_name(&self) -> &'static str {
        self.disk.product_name()
    }
    fn geometry(&self) -> Geometry {
        self.disk.geometry()
    }
    fn features(&self) -> Features {
        self.disk.features()
    }
    fn open(&self, io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        let channel = self.disk.open(io)?;
        Ok(Box::new(HeldChannel { channel, gate: Arc::clone(&self.gate) }))
    }
    fn driver_specific(&self) -> serde_json::Value {
        serde_json::Value::Null
    }
    fn sharing(&self) -> Option<&dyn Sharing> {
        self.disk.sharing()
    }
}

impl Channel for HeldChannel {
    fn submit(&mut self, io: &Io) -> Submit {
        if std::thread::current().name() == Some("copy") {
            let mut counts = self.gate.counts.lock().unwrap();
            counts.1 += 1;
            self.gate.changed.notify_all();
            counts = self.gate.changed.wait_while(counts, |counts| counts.0 == 0).unwrap();
            *counts = (counts.0 - 1, counts.1 - 1);
            self.gate.asked.lock().unwrap().push((io.op, io.lba, io.blocks));
            self.gate.changed.notify_all();
        }
        self.channel.submit(io)
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        self.channel.poll(done)
    }

    fn sparse_run(&mut self, lba: u64, blocks: u64) -> Run {
        self.channel.sparse_run(lba, blocks)
    }
}
