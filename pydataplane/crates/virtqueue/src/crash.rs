//! A device that dies after any store, and what the next one makes of the memory that is left.
//!
//! A driver and a device go on at random, one seed each. After every single store of the device to
//! the rings or the region both are copied, and a device that finds the copy must take what the
//! driver has outstanding there: each request once, in the order in which they were made available.
//! Now and then the device dies indeed and the next one goes on, whose recovery is looked at alike.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use guestmem::{GuestMemory, RegionSpec};

use crate::{AddressSpace, Desc, Head, InflightRegion, QueueConfig, SplitQueue, steps};

const SIZE: u16 = 8;
const MEMORY: u64 = 0x1000;
const AVAIL: u64 = 0x400;
const USED: u64 = 0x800;

/// Rings and region: what outlives a device.
struct Store {
    memory: Arc<GuestMemory>,
    file: OwnedFd,
    region: GuestMemory,
}

impl Store {
    fn new() -> Store {
        let memory = Arc::new(GuestMemory::memfd(&[(0, MEMORY)]).expect("memory"));
        let file = InflightRegion::make(1, SIZE).expect("a region");
        let spec = RegionSpec {
            guest_addr: 0,
            size: InflightRegion::bytes(1, SIZE),
            user_addr: 0,
            mmap_offset: 0,
        };
        let copy = file.try_clone().expect("a descriptor");
        let region = GuestMemory::map(vec![(spec, copy)]).expect("the region");
        Store { memory, file, region }
    }

    fn bytes(&self) -> [Vec<u8>; 2] {
        let copy = |memory: &GuestMemory, len: u64| {
            let mut bytes = vec![0; len as usize];
            memory.range(0, len).expect("all").read_slice(0, &mut bytes).expect("in range");
            bytes
        };
        [copy(&self.memory, MEMORY), copy(&self.region, InflightRegion::bytes(1, SIZE))]
    }

    fn put_bytes(&self, [memory, region]: &[Vec<u8>; 2]) {
        let put = |to: &GuestMemory, bytes: &[u8]| {
            let range = to.range(0, bytes.len() as u64).expect("all");
            range.write_slice(0, bytes).expect("in range");
        };
        put(&self.memory, memory);
        put(&self.region, region);
    }

    fn u16(&self, at: u64) -> u16 {
        self.memory.range(at, 2).expect("in range").get(0).expect("in range")
    }

    /// A device that finds this, told what QEMU tells: the used index.
    fn device(&self) -> SplitQueue {
        let config = QueueConfig {
            size: SIZE,
            space: AddressSpace::Guest,
            desc: 0,
            avail: AVAIL,
            used: USED,
            used_log: None,
            event_idx: false,
            indirect: false,
            next_avail: self.u16(USED + 2),
        };
        let mut queue = SplitQueue::new(self.memory.clone(), &config).expect("a queue");
        let bytes = InflightRegion::bytes(1, SIZE);
        let file = self.file.try_clone().expect("a descriptor");
        let region = InflightRegion::map(&GuestMemory::empty(), file, 0, bytes, 1, SIZE)
            .expect("the region");
        queue.track(region.queue(0).expect("a queue")).expect("a region that fits");
        queue
    }
}

/// What the driver knows.
#[derive(Clone, Default)]
struct Driver {
    /// Heads outstanding, in the order in which they were made available.
    outstanding: VecDeque<u16>,
    /// Those among them that the device has marked as unrepeatable.
    unrepeatable: Vec<u16>,
    /// Entries of the used ring seen.
    seen: u16,
}

impl Driver {
    /// What is outstanding once all that the used ring shows was seen.
    fn see(&mut self, store: &Store) -> Vec<u16> {
        let mut ended = Vec::new();
        while self.seen != store.u16(USED + 2) {
            let head = store.u16(USED + 4 + u64::from(self.seen % SIZE) * 8);
            let at = self.outstanding.iter().position(|h| *h == head);
            self.outstanding.remove(at.expect("a head that is outstanding ends once"));
            self.unrepeatable.retain(|marked| *marked != head);
            ended.push(head);
            self.seen = self.seen.wrapping_add(1);
        }
        ended
    }
}

/// A small generator of numbers (xorshift64).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u16) -> u16 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 32) as u16 % limit
    }
}

fn take_all(device: &mut SplitQueue) -> Vec<u16> {
    let mut heads = [Head::default(); 3];
    let mut all = Vec::new();
    loop {
        match device.pop(&mut heads).expect("a sound ring") {
            0 => return all,
            count => all.extend(heads[..count].iter().map(Head::index)),
        }
    }
}

/// Goes on for `turns` turns; returns after how many stores the device might have died.
fn live_and_die(seed: u64, turns: u32) -> u32 {
    let mut numbers = Numbers(seed | 1);
    let store = Rc::new(Store::new());
    // Both indexes wrap on the way.
    let start = numbers.below(64).wrapping_sub(32);
    for at in [AVAIL, USED] {
        store.memory.range(at, 4).expect("a ring").put(2, start).expect("in range");
    }
    for head in 0..SIZE {
        let at = store.memory.range(u64::from(head) * 16, 16).expect("a descriptor");
        at.put(0, Desc::new(0xc00, 16, 0, 0)).expect("in range");
    }
    let driver = Rc::new(RefCell::new(Driver { seen: start, ..Driver::default() }));
    let checked = Rc::new(RefCell::new(0));
    let (seen, known, count) = (Rc::clone(&store), Rc::clone(&driver), Rc::clone(&checked));
    let look = move || {
        let left = Store::new();
        left.put_bytes(&seen.bytes());
        let known = known.borrow();
        let mut driver = known.clone();
        driver.see(&left);
        let fresh = left.region.range(8, 2).expect("version").get::<u16>(0) == Ok(0);
        if !fresh {
            *count.borrow_mut() += 1;
            let mut device = left.device();
            let taken = take_all(&mut device);
            assert_eq!(driver.outstanding, taken, "seed {seed}");
            for head in taken {
                let is_marked = driver.unrepeatable.contains(&head);
                assert_eq!(device.take_unrepeatable(head), is_marked, "seed {seed}, head {head}");
            }
        }
    };
    steps::watch(look);

    let mut device = store.device();
    let mut taken: Vec<u16> = Vec::new();
    let mut free: Vec<u16> = (0..SIZE).collect();
    let mut avail = start;
    for _ in 0..turns {
        match numbers.below(16) {
            0..=4 => {
                for _ in 0..=numbers.below(3) {
                    if free.is_empty() {
                        break;
                    }
                    let head = free.swap_remove(usize::from(numbers.below(free.len() as u16)));
                    driver.borrow_mut().outstanding.push_back(head);
                    let ring = store.memory.range(AVAIL, 0x100).expect("the ring");
                    ring.put(4 + usize::from(avail % SIZE) * 2, head).expect("in range");
                    avail = avail.wrapping_add(1);
                    ring.put(2, avail).expect("in range");
                }
            }
            5..=8 => {
                let mut heads = [Head::default(); 4];
                let count = device.pop(&mut heads).expect("a sound ring");
                let kept = count - usize::from(numbers.below(count as u16 + 1)) / 2;
                device.undo_pop(&heads[kept..count]);
                taken.extend(heads[..kept].iter().map(Head::index));
            }
            9..=12 => {
                for _ in 0..=numbers.below(4) {
                    if taken.is_empty() {
                        break;
                    }
                    let nth = usize::from(numbers.below(taken.len() as u16));
                    device.push_used(taken.swap_remove(nth), 0);
                }
                if numbers.below(2) == 0 {
                    device.show();
                }
            }
            13 | 14 => {
                let _ = device.publish();
                free.extend(driver.borrow_mut().see(&store));
                if !taken.is_empty() {
                    let head = taken[usize::from(numbers.below(taken.len() as u16))];
                    driver.borrow_mut().unrepeatable.push(head);
                    device.mark_unrepeatable(head);
                }
            }
            _ => {
                // It dies: what it pushed and did not show is taken again, as all else.
                drop(device);
                device = store.device();
                taken.clear();
            }
        }
    }
    steps::forget();
    checked.take()
}

#[test]
fn a_mark_is_of_one_request_whoever_takes_the_next_one_of_its_head() {
    const DESC_STATE: u64 = 16 + 16 * 3;
    const AVAIL_ENTRIES: usize = 4;
    let store = Store::new();
    let ring = store.memory.range(AVAIL, 0x100).expect("the ring");
    let offer = |count: u16| {
        ring.put(AVAIL_ENTRIES + usize::from(count - 1) * 2, 3u16).expect("in range");
        ring.put(2, count).expect("in range");
    };
    let state = store.region.range(DESC_STATE, 16).expect("in range");
    let mut device = store.device();
    offer(1);
    assert_eq!(take_all(&mut device), [3]);
    device.mark_unrepeatable(3);
    // Told by one that goes on, and by the next, and once by each.
    for _ in 0..2 {
        device = store.device();
        assert_eq!(take_all(&mut device), [3]);
        assert!(device.take_unrepeatable(3) && !device.take_unrepeatable(3));
    }
    // An older program ends it, which clears one byte; then it takes that head again.
    let (used, region) = (store.memory.range(USED, 0x100), store.region.range(0, 16));
    used.expect("the ring").put(2, 1u16).expect("in range");
    region.expect("in range").put(14, 1u16).expect("in range");
    offer(2);
    state.put(8, 77u64).expect("in range");
    assert_eq!(state.get::<u16>(0), Ok(0x0101));
    device = store.device();
    assert_eq!(take_all(&mut device), [3]);
    assert!(!device.take_unrepeatable(3));
    // What this program ends leaves it nothing.
    device.mark_unrepeatable(3);
    device.push_used(3, 0);
    device.show();
    assert_eq!(state.get::<u16>(0), Ok(0));
}

#[test]
fn whatever_the_store_after_which_it_dies_the_next_one_takes_what_is_outstanding_in_order() {
    // The same examples each time; VIRTLUN_SEED begins elsewhere.
    let first = std::env::var("VIRTLUN_SEED").map_or(1, |s| s.parse().expect("a number"));
    let checked: u32 = (first..first + 12).map(|seed| live_and_die(seed * 0x9e37_79b9, 250)).sum();
    assert!(checked > 5000, "{checked} stores");
}
