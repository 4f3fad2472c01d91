//! A unit on a real disk, for what opens channels of its own on other threads.

use crate::rig::*;
use bdev::Bdev;
use reactor::IoContext;
use scsi::{Lun, LunOptions, LunShared, Outcome, Task};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub const DEADLINE: Duration = Duration::from_secs(60);

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
