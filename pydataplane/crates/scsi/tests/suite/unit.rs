//! A unit on a real disk, for what opens channels of its own on other threads.

use crate::rig::*;
use bdev::{Bdev, Malloc, MallocOptions, SyncChannel};
use reactor::IoContext;
use scsi::{Lun, LunOptions, LunShared, Outcome, Task};
use std::sync::Arc;
use std::time::{Duration, Instant};
use uuid::Uuid;

pub const DEADLINE: Duration = Duration::from_secs(60);
/// Of a [`disk`].
pub const BLOCKS: u64 = 8192;

/// A disk of which each block is another.
pub fn disk(first: u8) -> Arc<dyn Bdev> {
    let options = MallocOptions {
        name: Uuid::new_v4().to_string(),
        block_size: 512,
        physical_block_size: 0,
        num_blocks: BLOCKS,
        uuid: None,
    };
    let disk: Arc<dyn Bdev> = Malloc::create(options).unwrap();
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
    let controller = Uuid::new_v4();
    [0, 1].map(|number| {
        let disk = disk(number);
        let unit = Unit::new(&disk, on(&format!("{controller}:{number}")));
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
    pub fn until_over(&mut self, task: &mut Task, mut outcome: Outcome) -> Outcome {
        let begun = Instant::now();
        let mut done = Vec::with_capacity(4);
        while outcome == Outcome::Pending {
            assert!(begun.elapsed() < DEADLINE, "it does not end");
            done.clear();
            if self.lun.poll(&mut done) > 0 {
                outcome = self.lun.resume(task, done[0].result);
            }
        }
        outcome
    }
}
