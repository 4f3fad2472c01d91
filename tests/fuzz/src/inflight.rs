//! In-flight regions of any content, with rings of any state: what a queue makes of them.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use guestmem::{GuestMemory, RegionSpec};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use virtqueue::{AddressSpace, Desc, Head, InflightRegion, QueueConfig, SplitQueue};

use crate::input::Input;

const MEMORY: u64 = 0x4000;
const AVAIL: u64 = 0x1000;
const USED: u64 = 0x2000;
/// Bytes of the region's file.
const FILE: u64 = 0x2000;
/// Byte of a queue's part where its descriptors begin, and bytes of each.
const DESC: u64 = 16;
const STATE: u64 = 16;

struct Guest {
    memory: Arc<GuestMemory>,
    file: OwnedFd,
    /// The region's file, as its keeper sees it.
    region: GuestMemory,
    size: u16,
}

thread_local! {
    /// Memory and file are the same for all inputs.
    static GUEST: RefCell<Guest> = RefCell::new(Guest::new());
}

impl Guest {
    fn new() -> Guest {
        let memory = Arc::new(GuestMemory::memfd(&[(0, MEMORY)]).expect("memory"));
        let file = memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("a memfd");
        ftruncate(&file, FILE).expect("its size");
        let spec = RegionSpec { guest_addr: 0, size: FILE, user_addr: 0, mmap_offset: 0 };
        let copy = file.try_clone().expect("a descriptor");
        let region = GuestMemory::map(vec![(spec, copy)]).expect("the region");
        Guest { memory, file, region, size: 0 }
    }

    /// A queue of `size` descriptors, and nothing in the region.
    fn clear(&mut self, size: u16) {
        self.size = size;
        self.memory.range(0, MEMORY).expect("all").fill(0);
        self.region.range(0, FILE).expect("all").fill(0);
        for head in 0..size {
            let at = self.memory.range(u64::from(head) * 16, 16).expect("a descriptor");
            at.put(0, Desc::new(0x3000, 16, 0, 0)).expect("in range");
        }
    }

    fn put(&self, at: u64, value: u16) {
        self.memory.range(at, 2).expect("in range").put(0, value).expect("in range");
    }

    fn get(&self, at: u64) -> u16 {
        self.memory.range(at, 2).expect("in range").get(0).expect("in range")
    }

    fn is_marked(&self, part: u64, head: u16) -> bool {
        let at = part + DESC + u64::from(head) * STATE;
        self.region.range(at, 1).expect("in range").get::<u8>(0) == Ok(1)
    }

    /// Bytes of the input into the region: fields of a queue's part, or anything.
    fn tamper(&self, input: &mut Input<'_>, part: u64) {
        let (at, width) = match input.u8() % 4 {
            0 => (part + [8, 10, 12, 14][usize::from(input.u8() % 4)], 2),
            1 => (part + DESC + u64::from(input.below(self.size)) * STATE, 1),
            2 => {
                let state = part + DESC + u64::from(input.below(self.size)) * STATE;
                if input.once_in(2) { (state + 6, 2) } else { (state + 8, 8) }
            }
            _ => (u64::from(input.below(FILE as u16 - 8)), 8),
        };
        let value = if width == 1 { u64::from(input.u8() % 3) } else { input.u64() };
        let value = if input.once_in(2) { value % 64 } else { value };
        if let Some(range) = self.region.range(at, width) {
            range.write_slice(0, &value.to_le_bytes()[..width as usize]).expect("in range");
        }
    }

    fn queue(&self, next_avail: u16) -> SplitQueue {
        let config = QueueConfig {
            size: self.size,
            space: AddressSpace::Guest,
            desc: 0,
            avail: AVAIL,
            used: USED,
            used_log: None,
            event_idx: false,
            indirect: false,
            next_avail,
        };
        SplitQueue::new(self.memory.clone(), &config).expect("a good queue")
    }
}

/// A queue that is set up with a foreign region, and goes on from its own one after each crash. No
/// input may make it panic, take a head twice that was marked once, take what was not marked, or, as
/// long as nobody else writes the region, forget what it had taken.
pub fn inflight(data: &[u8]) {
    GUEST.with_borrow_mut(|guest| {
        let mut input = Input(data);
        guest.clear(1 << (input.u8() % 7));
        play(guest, input);
    });
}

fn play(guest: &Guest, mut input: Input<'_>) {
    let (index, queues) = (u16::from(input.u8() % 4), u16::from(input.u8() % 4));
    let claimed = match input.u8() % 4 {
        0 => input.u16(),
        1 => 1 << (input.u8() % 11),
        _ => guest.size,
    };
    let offset = match input.u8() % 4 {
        0 => input.u64(),
        1 => u64::from(input.u8()) * 8,
        _ => 0,
    };
    let bytes = if input.once_in(8) { input.u64() } else { FILE };
    let start = input.u16();
    guest.put(USED + 2, start);
    let ahead = if input.once_in(8) { input.u16() } else { input.below(guest.size + 1) };
    guest.put(AVAIL + 2, start.wrapping_add(ahead));
    let map = || {
        let file = guest.file.try_clone().expect("a descriptor");
        InflightRegion::map(&guest.memory, file, offset, bytes, queues, claimed)
    };
    let Ok(region) = map() else { return };
    let part = (DESC + u64::from(claimed) * STATE).next_multiple_of(64) * u64::from(index);
    let part = part + offset;
    let Some(mut part_of_it) = region.queue(index) else { return };
    if !input.once_in(4) {
        // In use, and of this ring.
        for (at, value) in [(8, 1), (10, claimed), (14, start)] {
            guest.region.range(part + at, 2).expect("in range").put(0, value).expect("in range");
        }
    }
    for _ in 0..input.u8() % 32 {
        guest.tamper(&mut input, part);
    }
    for slot in 0..u64::from(input.u8()).min(guest.size.into()) {
        guest.put(AVAIL + 4 + slot * 2, input.below(guest.size));
    }
    let _ = part_of_it.has_marks();
    let mut queue = guest.queue(start);
    // Whether the region is as this device left it, and each head available only once.
    let mut sound = false;
    let mut taken: VecDeque<u16> = VecDeque::new();
    if input.once_in(16) {
        part_of_it.reset();
    }
    if queue.track(part_of_it).is_err() {
        return;
    }
    loop {
        let owed = replay(guest, &mut queue, part);
        if sound {
            assert_eq!(owed, taken, "what was in flight, in its order");
        }
        taken = owed;
        sound = true;
        // What follows begins from a ring without strays.
        let mut avail = queue.next_avail();
        guest.put(AVAIL + 2, avail);
        for _ in 0..64 {
            match input.u8() % 8 {
                0..=2 => {
                    let head = input.below(guest.size);
                    // A guest that offers a head twice is found out by the device.
                    if !taken.contains(&head) && taken.len() < usize::from(guest.size) {
                        let slot = u64::from(avail % guest.size);
                        guest.put(AVAIL + 4 + slot * 2, head);
                        avail = avail.wrapping_add(1);
                        guest.put(AVAIL + 2, avail);
                        let mut heads = [Head::default(); 4];
                        assert_eq!(queue.pop(&mut heads), Ok(1));
                        assert_eq!(heads[0].index(), head);
                        assert!(guest.is_marked(part, head), "before anything is done about it");
                        taken.push_back(head);
                    }
                }
                3..=5 if !taken.is_empty() => {
                    let nth = usize::from(input.u8()) % taken.len();
                    let head = taken.remove(nth).expect("it is there");
                    queue.push_used(head, 0);
                    let _ = queue.publish();
                    assert!(!guest.is_marked(part, head), "it was shown");
                }
                6 => {
                    guest.tamper(&mut input, part);
                    sound = false;
                }
                _ => break,
            }
        }
        if input.is_empty() {
            return;
        }
        // The process is killed.
        let used = guest.get(USED + 2);
        queue = guest.queue(used);
        let again = map().expect("as before").queue(index).expect("as before");
        match queue.track(again) {
            Ok(resumed) => assert!(resumed || !sound, "it was in use"),
            Err(why) if sound => panic!("its own region is refused: {why}"),
            Err(_) => return,
        }
    }
}

/// Takes what is to be submitted again.
fn replay(guest: &Guest, queue: &mut SplitQueue, part: u64) -> VecDeque<u16> {
    let mut owed = VecDeque::new();
    let mut heads = [Head::default(); 5];
    let count = usize::from(queue.to_replay());
    while owed.len() < count {
        let left = count - owed.len();
        let got = queue.pop(&mut heads).expect("what is owed was checked");
        assert!((1..=left).contains(&got), "{got} of {left}");
        for head in &heads[..got] {
            let head = head.index();
            assert!(head < guest.size && guest.is_marked(part, head), "{head} was not in flight");
            assert!(!owed.contains(&head), "{head} is submitted twice");
            owed.push_back(head);
        }
    }
    owed
}
