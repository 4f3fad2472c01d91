//! A driver's side of a queue in 64 KiB of guest memory, one field at a time.
#![allow(dead_code)]

use std::sync::Arc;

use guestmem::{GuestMemory, Sg};
use virtqueue::{AddressSpace, Desc, Head, QueueConfig, Segments, SplitQueue};

/// Guest physical address of the first byte, and bytes: the lower of two regions that touch.
pub const LOW: (u64, u64) = (0x1_0000, 0x8000);
/// The upper one.
pub const HIGH: (u64, u64) = (0x1_8000, 0x8000);
pub const DESC: u64 = LOW.0;
pub const AVAIL: u64 = LOW.0 + 0x1000;
pub const USED: u64 = LOW.0 + 0x2000;
pub const TABLE: u64 = LOW.0 + 0x3000;
/// Where buffers may be.
pub const DATA: u64 = LOW.0 + 0x4000;

pub struct Driver {
    pub memory: Arc<GuestMemory>,
    pub config: QueueConfig,
    idx: u16,
}

impl Driver {
    pub fn new(size: u16) -> Driver {
        let memory = Arc::new(GuestMemory::memfd(&[LOW, HIGH]).expect("memory"));
        let config = QueueConfig {
            size,
            space: AddressSpace::Guest,
            desc: DESC,
            avail: AVAIL,
            used: USED,
            used_log: None,
            event_idx: false,
            indirect: true,
            next_avail: 0,
        };
        Driver { memory, config, idx: 0 }
    }

    pub fn with_event_idx(size: u16) -> Driver {
        let mut driver = Driver::new(size);
        driver.config.event_idx = true;
        driver
    }

    /// Another one in the same memory, before it has begun.
    pub fn anew(&self) -> Driver {
        Driver { memory: Arc::clone(&self.memory), config: self.config, idx: 0 }
    }

    /// Starts both rings at `idx`.
    pub fn starting_at(mut self, idx: u16) -> Driver {
        self.idx = idx;
        self.config.next_avail = idx;
        self.put_u16(AVAIL + 2, idx);
        self.put_u16(USED + 2, idx);
        self
    }

    pub fn queue(&self) -> SplitQueue {
        SplitQueue::new(self.memory.clone(), &self.config).expect("queue")
    }

    pub fn put_u16(&self, gpa: u64, value: u16) {
        self.memory.range(gpa, 2).expect("range").store_release_u16(0, value).expect("put");
    }

    pub fn get_u16(&self, gpa: u64) -> u16 {
        self.memory.range(gpa, 2).expect("range").load_acquire_u16(0).expect("get")
    }

    pub fn get_u32(&self, gpa: u64) -> u32 {
        self.memory.range(gpa, 4).expect("range").get::<u32>(0).expect("get")
    }

    pub fn desc(&self, index: u16, addr: u64, len: u32, flags: u16, next: u16) {
        self.put_desc(DESC, index, addr, len, flags, next);
    }

    pub fn put_desc(&self, table: u64, i: u16, addr: u64, len: u32, flags: u16, next: u16) {
        let range = self.memory.range(table + u64::from(i) * 16, 16).expect("range");
        range.put(0, Desc::new(addr, len, flags, next)).expect("put");
    }

    /// Makes `head` available.
    pub fn offer(&mut self, head: u16) {
        let slot = self.idx % self.config.size;
        self.put_u16(AVAIL + 4 + u64::from(slot) * 2, head);
        self.idx = self.idx.wrapping_add(1);
        self.put_u16(AVAIL + 2, self.idx);
    }

    pub fn used_idx(&self) -> u16 {
        self.get_u16(USED + 2)
    }

    /// Entry `slot` of the used ring: (head, bytes).
    pub fn used(&self, slot: u16) -> (u32, u32) {
        let at = USED + 4 + u64::from(slot) * 8;
        (self.get_u32(at), self.get_u32(at + 4))
    }

    pub fn set_used_event(&self, value: u16) {
        self.put_u16(AVAIL + 4 + u64::from(self.config.size) * 2, value);
    }

    pub fn avail_event(&self) -> u16 {
        self.get_u16(USED + 4 + u64::from(self.config.size) * 8)
    }

    /// The guest address behind each run of `sg`, and its length.
    pub fn runs(&self, sg: Sg) -> Vec<(u64, usize)> {
        let host =
            |area: (u64, u64)| self.memory.range(area.0, area.1).expect("region").as_ptr() as u64;
        let gpa = |at: u64| {
            let (low, high) = (host(LOW), host(HIGH));
            if (low..low + LOW.1).contains(&at) { at - low + LOW.0 } else { at - high + HIGH.0 }
        };
        sg.as_slice().iter().map(|r| (gpa(r.base() as u64), r.len())).collect()
    }
}

/// Takes the one chain that is there.
pub fn pop_one(queue: &mut SplitQueue) -> Head {
    let mut heads = [Head::default(); 2];
    assert_eq!(queue.pop(&mut heads), Ok(1));
    heads[0]
}

/// Takes the one chain that is there, and walks it.
pub fn walk_one(
    queue: &mut SplitQueue,
    segments: &mut Segments,
) -> Result<(), virtqueue::ChainError> {
    let head = pop_one(queue);
    queue.walk(&head, segments)
}
