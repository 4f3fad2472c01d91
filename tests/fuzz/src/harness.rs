//! What a guest can do to the ring and to guest memory: write any byte, at any time. Each
//! function takes arbitrary bytes and panics where an invariant does not hold.

use std::sync::Arc;

use guestmem::{GuestMemory, IoVec, Sg};
use virtqueue::{AddressSpace, Desc, Halves, Head, QueueConfig, Segments, SplitQueue};

use crate::input::Input;

/// Two regions that touch and one apart, so that buffers cross, and miss.
const AREAS: [(u64, u64); 3] = [(0, 0x4000), (0x4000, 0x2000), (0x8000, 0x1000)];

/// Host bounds of the regions, to check runs against.
fn bounds(memory: &GuestMemory) -> Vec<(usize, usize)> {
    let host = |(at, len): &(u64, u64)| {
        let range = memory.range(*at, *len).expect("a region");
        (range.as_ptr() as usize, range.len())
    };
    AREAS.iter().map(host).collect()
}

fn check_runs(sg: Sg, bytes: u32, bounds: &[(usize, usize)]) {
    let inside = |run: &IoVec| {
        let at = run.base() as usize;
        bounds.iter().any(|(start, len)| at >= *start && at + run.len() <= start + len)
    };
    assert!(sg.as_slice().iter().all(inside), "a run outside guest memory");
    assert_eq!(sg.len(), bytes as usize, "lengths disagree");
}

/// A device that takes, walks, splits and gives back chains while the guest changes its memory
/// under it. No input may make it read or write outside guest memory, loop, or panic.
pub fn ring(data: &[u8]) {
    let mut input = Input(data);
    let memory = Arc::new(GuestMemory::memfd(&AREAS).expect("memory"));
    let bounds = bounds(&memory);
    let config = QueueConfig {
        size: 1 << (input.u8() % 6),
        space: AddressSpace::Guest,
        desc: 0x1000,
        avail: 0x2000,
        used: 0x3000,
        used_log: None,
        event_idx: input.u8() & 1 != 0,
        indirect: input.u8() & 7 != 0,
        next_avail: input.u16(),
    };
    let mut queue = SplitQueue::new(memory.clone(), &config).expect("a good queue");
    let put = |gpa: u64, bytes: &[u8]| {
        if let Some(range) = memory.range(gpa, bytes.len() as u64) {
            range.write_slice(0, bytes).expect("in range");
        }
    };
    let mut segments = Segments::with_limit(1 + usize::from(input.u8() % 32));
    let mut taken = 0u64;
    while !input.is_empty() {
        match input.u8() % 8 {
            0..=2 => {
                let index = u64::from(input.u8()) % 64;
                let table = if input.u8() & 1 == 0 { config.desc } else { 0x4000 - 64 };
                let addr = match input.u8() % 4 {
                    0 => u64::from(input.u32()) << (input.u8() % 33),
                    1 => 0x4000 - 64,
                    _ => u64::from(input.u16()) % 0xa000,
                };
                let len = match input.u8() % 4 {
                    0 => input.u32(),
                    1 => u32::from(input.u8() % 8) * 16,
                    _ => u32::from(input.u16() % 300),
                };
                let flags = input.u16() & if input.u8() % 16 == 0 { 0xffff } else { 7 };
                let next = if input.u8() % 8 == 0 { input.u16() } else { input.u16() % 32 };
                let desc = Desc::new(addr, len, flags, next);
                if let Some(range) = memory.range(table + index * 16, 16) {
                    range.put(0, desc).expect("in range");
                }
            }
            3 => {
                // Offer a few chains, sometimes far too many.
                let count = if input.u8() % 32 == 0 { input.u16() } else { input.u16() % 5 };
                for i in 0..count.min(64) {
                    let slot = queue.next_avail().wrapping_add(i) % config.size;
                    let head = if input.u8() % 16 == 0 { input.u16() } else { input.u16() % 32 };
                    put(config.avail + 4 + u64::from(slot) * 2, &head.to_le_bytes());
                }
                let idx = queue.next_avail().wrapping_add(count);
                put(config.avail + 2, &idx.to_le_bytes());
            }
            4 if input.u8() % 4 == 0 => {
                put(u64::from(input.u16()) % 0x6000, &[input.u8(), input.u8()]);
            }
            4 => {
                // A chain as a driver makes it, where the queue is long enough.
                let (count, writable) = (1 + u16::from(input.u8() % 4), u16::from(input.u8() % 5));
                let table = memory.range(config.desc, 0x400).expect("the table");
                for i in 0..count {
                    let write = if i >= writable { Desc::WRITE } else { 0 };
                    let flags = write | if i + 1 < count { Desc::NEXT } else { 0 };
                    let len = 1 + u32::from(input.u16() % 400);
                    let desc = Desc::new(u64::from(input.u16() % 0x5000), len, flags, i + 1);
                    table.put(usize::from(i) * 16, desc).expect("in range");
                }
                let slot = queue.next_avail() % config.size;
                put(config.avail + 4 + u64::from(slot) * 2, &[0, 0]);
                put(config.avail + 2, &queue.next_avail().wrapping_add(1).to_le_bytes());
            }
            5 => {
                let _ = (queue.enable_kick(), queue.disable_kick());
            }
            _ => {
                let mut heads = [Head::default(); 8];
                let Ok(count) = queue.pop(&mut heads) else { return };
                assert!(count <= heads.len() && count <= usize::from(config.size));
                for head in &heads[..count] {
                    let walked = queue.walk(head, &mut segments);
                    let lens = (segments.readable_len(), segments.writable_len());
                    check_runs(segments.readable(), lens.0, &bounds);
                    check_runs(segments.writable(), lens.1, &bounds);
                    let Ok(()) = walked else {
                        assert_eq!(lens, (0, 0), "bytes of a refused chain");
                        continue;
                    };
                    assert!(head.index() < config.size && lens != (0, 0));
                    let (read, write) = (usize::from(input.u8()), usize::from(input.u8()));
                    let fits = read <= lens.0 as usize && write <= lens.1 as usize;
                    let halves = segments.split(read, write);
                    assert_eq!(halves.is_some(), fits);
                    check_runs(segments.readable(), lens.0, &bounds);
                    check_runs(segments.writable(), lens.1, &bounds);
                    // The device writes: into what the guest gave it, its own rings maybe.
                    let mut wrote = 0;
                    if let Some(Halves { readable, writable }) = halves {
                        check_runs(readable.0, read as u32, &bounds);
                        check_runs(readable.1, lens.0 - read as u32, &bounds);
                        check_runs(writable.0, write as u32, &bounds);
                        check_runs(writable.1, lens.1 - write as u32, &bounds);
                        wrote = writable.1.zero(0, 64);
                    }
                    queue.push_used(head.index(), wrote as u32);
                    taken += 1;
                }
                let _ = queue.publish();
            }
        }
    }
    assert!(taken <= data.len() as u64 * 8);
}

/// Lookups of any address and length, and writes through what they give: never outside the
/// regions, and always what a plain search over the table says.
pub fn memory(data: &[u8]) {
    let mut input = Input(data);
    let mut memory = GuestMemory::memfd(&AREAS).expect("memory");
    let mut present = [true; AREAS.len()];
    while !input.is_empty() {
        let kind = input.u8();
        if kind % 16 == 0 {
            let victim = usize::from(input.u8()) % AREAS.len();
            let spec = memory.regions().find(|r| r.guest_addr == AREAS[victim].0);
            assert_eq!(spec.is_some(), present[victim]);
            if let Some(spec) = spec {
                memory = memory.without_region(spec).expect("it is there");
                present[victim] = false;
            }
            continue;
        }
        let near = u64::from(input.u16()) % 0xa000;
        let gpa = if kind & 1 == 0 { near } else { near << (kind % 64) };
        let len = if kind & 2 == 0 { u64::from(input.u16()) } else { u64::from(input.u32()) << 20 };
        let left_in = |at: u64| {
            let areas = AREAS.iter().zip(present).filter(|(_, there)| *there);
            areas.map(|(a, _)| a).find(|a| at >= a.0 && at < a.0 + a.1).map(|a| a.0 + a.1 - at)
        };
        let range = memory.range(gpa, len);
        assert_eq!(range.is_some(), left_in(gpa).is_some_and(|left| len <= left));
        if let Some(range) = range {
            range.fill(kind);
            assert_eq!(range.get::<u8>(range.len().wrapping_sub(1)).is_ok(), len > 0);
            assert!(range.get::<u8>(range.len()).is_err());
        }
        let run = memory.run(gpa, len).map(|run| run.len() as u64);
        assert_eq!(run, left_in(gpa).map(|left| left.min(len)), "{gpa:#x} {len:#x}");
    }
}
