//! The clauses of virtio 1.2 that a device's side of a split queue must keep.

mod common;

use std::os::fd::AsFd;
use std::sync::Arc;

use common::{AVAIL, DATA, DESC, Driver, HIGH, LOW, TABLE, USED, pop_one, walk_one};
use guestmem::{DirtyLog, GuestMemory};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use virtqueue::{
    AddressSpace, ChainError, ConfigError, Desc, Head, MAX_SEGMENTS, QueueConfig, QueueError,
    Segments, SplitQueue,
};

const NEXT: u16 = Desc::NEXT;
const WRITE: u16 = Desc::WRITE;
const INDIRECT: u16 = Desc::INDIRECT;

fn walk(setup: impl FnOnce(&mut Driver)) -> Result<(), ChainError> {
    let mut driver = Driver::new(16);
    setup(&mut driver);
    let mut queue = driver.queue();
    walk_one(&mut queue, &mut Segments::new())
}

#[test]
fn clause_2_7_size_is_a_power_of_two() {
    let driver = Driver::new(16);
    let with = |size| {
        let config = QueueConfig { size, ..driver.config };
        SplitQueue::new(driver.memory.clone(), &config).map(|q| q.size())
    };
    for bad in [0, 3, 100, 1025, 2048, 0x8000, 0xffff] {
        assert_eq!(with(bad), Err(ConfigError::Size(bad)));
    }
    assert_eq!(with(1), Ok(1));
    // 128 descriptors fit below the available ring of this layout.
    assert_eq!(with(128), Ok(128));
}

#[test]
fn clause_2_7_parts_are_aligned_and_in_memory() {
    let driver = Driver::new(16);
    let with = |change: &dyn Fn(&mut QueueConfig)| {
        let mut config = driver.config;
        change(&mut config);
        SplitQueue::new(driver.memory.clone(), &config).map(drop)
    };
    assert_eq!(with(&|_| ()), Ok(()));
    let ring = "descriptor table";
    let bad = DESC + 8;
    assert_eq!(with(&|c| c.desc = bad), Err(ConfigError::Alignment { ring, addr: bad, align: 16 }));
    assert!(matches!(with(&|c| c.avail += 1), Err(ConfigError::Alignment { align: 2, .. })));
    assert!(matches!(with(&|c| c.used += 2), Err(ConfigError::Alignment { align: 4, .. })));
    for at in [0, HIGH.0 + HIGH.1, HIGH.0 - 16, !15] {
        assert_eq!(with(&|c| c.desc = at), Err(ConfigError::Address { ring, addr: at }));
    }
    // The used ring may end with its region, but for the event index one has to be there.
    let last = HIGH.0 + HIGH.1 - (4 + 16 * 8);
    assert_eq!(with(&|c| c.used = last), Ok(()));
    let event = |c: &mut QueueConfig| {
        c.used = last;
        c.event_idx = true;
    };
    assert!(matches!(with(&event), Err(ConfigError::Address { ring: "used ring", .. })));
}

#[test]
#[cfg_attr(miri, ignore = "Miri maps no files")]
fn vring_addresses_may_be_the_peers_own() {
    let spec = guestmem::RegionSpec {
        guest_addr: 0,
        size: 0x8000,
        user_addr: 0x7fff_0000_0000,
        mmap_offset: 0,
    };
    let fd = memfd_create("test", MemfdFlags::CLOEXEC).expect("memfd");
    ftruncate(&fd, 0x8000).expect("ftruncate");
    let memory = Arc::new(GuestMemory::map(vec![(spec, fd)]).expect("map"));
    let config = QueueConfig {
        space: AddressSpace::User,
        desc: spec.user_addr,
        avail: spec.user_addr + 0x1000,
        used: spec.user_addr + 0x2000,
        ..Driver::new(16).config
    };
    let mut queue = SplitQueue::new(memory.clone(), &config).expect("queue");
    memory.range(0x1000 + 2, 2).expect("idx").store_release_u16(0, 1).expect("put");
    assert!(queue.has_work());
    assert_eq!(queue.pop(&mut [Head::default()]), Ok(1));
}

#[test]
fn clause_2_7_4_2_readable_buffers_come_before_writable_ones() {
    let mut driver = Driver::new(16);
    driver.desc(3, DATA, 16, NEXT, 5);
    driver.desc(5, DATA + 0x100, 32, NEXT, 1);
    driver.desc(1, DATA + 0x200, 8, NEXT | WRITE, 0);
    driver.desc(0, DATA + 0x300, 512, WRITE, 99);
    driver.offer(3);
    let mut queue = driver.queue();
    let mut segments = Segments::new();
    assert_eq!(walk_one(&mut queue, &mut segments), Ok(()));
    assert_eq!((segments.readable_len(), segments.writable_len()), (48, 520));
    assert_eq!(driver.runs(segments.readable()), [(DATA, 16), (DATA + 0x100, 32)]);
    assert_eq!(driver.runs(segments.writable()), [(DATA + 0x200, 8), (DATA + 0x300, 512)]);

    assert_eq!(
        walk(|d| {
            d.desc(0, DATA, 16, NEXT | WRITE, 1);
            d.desc(1, DATA, 16, 0, 0);
            d.offer(0);
        }),
        Err(ChainError::ReadableAfterWritable)
    );
}

#[test]
fn clause_2_7_5_next_is_within_the_table() {
    let chain = |next| {
        walk(move |d| {
            d.desc(0, DATA, 16, NEXT, next);
            d.desc(15, DATA, 1, 0, 0);
            d.offer(0);
        })
    };
    assert_eq!(chain(15), Ok(()));
    assert_eq!(chain(16), Err(ChainError::BadNext { next: 16, size: 16 }));
    assert_eq!(chain(0xffff), Err(ChainError::BadNext { next: 0xffff, size: 16 }));
}

#[test]
fn clause_2_7_5_2_a_chain_does_not_loop() {
    for (first, second) in [(0, 0), (1, 0)] {
        let looped = walk(|d| {
            d.desc(0, DATA, 16, NEXT, first);
            d.desc(1, DATA, 16, NEXT, second);
            d.offer(0);
        });
        assert_eq!(looped, Err(ChainError::Loop));
    }
    let within_a_table = walk(|d| {
        d.desc(0, TABLE, 32, INDIRECT, 0);
        d.put_desc(TABLE, 0, DATA, 1, NEXT, 1);
        d.put_desc(TABLE, 1, DATA, 1, NEXT, 0);
        d.offer(0);
    });
    assert_eq!(within_a_table, Err(ChainError::Loop));
}

#[test]
fn clause_2_7_5_buffers_are_in_guest_memory() {
    let chain = |addr, len| {
        walk(move |d| {
            d.desc(0, addr, len, 0, 0);
            d.offer(0);
        })
    };
    assert_eq!(chain(DATA, 16), Ok(()));
    for (addr, len) in [
        (0, 1),
        (LOW.0 - 1, 2),
        (HIGH.0 + HIGH.1 - 1, 2),
        (HIGH.0 + HIGH.1, 1),
        (u64::MAX, 1),
        (u64::MAX - 10, 100),
        (DATA, u32::MAX),
    ] {
        assert_eq!(chain(addr, len), Err(ChainError::BadAddress { addr, len }));
    }
    assert_eq!(chain(DATA, 0), Err(ChainError::ZeroLength));
}

#[test]
fn a_buffer_over_two_regions_becomes_two_runs() {
    let mut driver = Driver::new(16);
    driver.desc(0, HIGH.0 - 10, 30, WRITE, 0);
    driver.offer(0);
    let mut queue = driver.queue();
    let mut segments = Segments::new();
    assert_eq!(walk_one(&mut queue, &mut segments), Ok(()));
    assert_eq!(segments.writable_len(), 30);
    assert_eq!(driver.runs(segments.writable()), [(HIGH.0 - 10, 10), (HIGH.0, 20)]);
}

#[test]
fn clause_2_7_5_3_indirect_tables() {
    let mut driver = Driver::new(16);
    // "zero or more normal chained descriptors followed by a single descriptor with INDIRECT";
    // the write flag of that one is ignored.
    driver.desc(2, DATA, 8, NEXT, 4);
    driver.desc(4, TABLE, 3 * 16, INDIRECT | WRITE, 0);
    driver.put_desc(TABLE, 0, DATA + 8, 8, NEXT, 2);
    driver.put_desc(TABLE, 2, DATA + 16, 8, NEXT | WRITE, 1);
    driver.put_desc(TABLE, 1, DATA + 24, 8, WRITE, 77);
    driver.offer(2);
    let mut queue = driver.queue();
    let mut segments = Segments::new();
    assert_eq!(walk_one(&mut queue, &mut segments), Ok(()));
    assert_eq!(driver.runs(segments.readable()), [(DATA, 8), (DATA + 8, 8)]);
    assert_eq!(driver.runs(segments.writable()), [(DATA + 16, 8), (DATA + 24, 8)]);
}

#[test]
fn clause_2_7_5_3_1_what_a_driver_must_not_do_with_indirect_tables() {
    let chain = |len, flags, inner: fn(&Driver)| {
        walk(move |d| {
            d.desc(0, TABLE, len, flags, 1);
            d.desc(1, DATA, 1, 0, 0);
            d.put_desc(TABLE, 0, DATA, 8, 0, 0);
            inner(d);
            d.offer(0);
        })
    };
    assert_eq!(chain(16, INDIRECT, |_| ()), Ok(()));
    assert_eq!(chain(16, INDIRECT | NEXT, |_| ()), Err(ChainError::IndirectWithNext));
    for bad in [0, 1, 15, 17, 31] {
        assert_eq!(chain(bad, INDIRECT, |_| ()), Err(ChainError::IndirectLength(bad)));
    }
    assert_eq!(
        chain(16, INDIRECT, |d| d.put_desc(TABLE, 0, TABLE, 16, INDIRECT, 0)),
        Err(ChainError::NestedIndirect)
    );
    assert_eq!(
        chain(32, INDIRECT, |d| d.put_desc(TABLE, 0, DATA, 8, NEXT, 2)),
        Err(ChainError::BadNext { next: 2, size: 2 })
    );
    let huge = 0xffff_fff0;
    assert_eq!(
        chain(huge, INDIRECT, |_| ()),
        Err(ChainError::BadAddress { addr: TABLE, len: huge })
    );
    assert_eq!(
        walk(|d| {
            d.config.indirect = false;
            d.desc(0, TABLE, 16, INDIRECT, 0);
            d.offer(0);
        }),
        Err(ChainError::IndirectNotNegotiated)
    );
}

#[test]
fn a_chain_of_as_many_runs_as_offered_and_not_one_more() {
    let chain = |runs: u16, limit| {
        let mut driver = Driver::new(16);
        driver.desc(0, TABLE, u32::from(runs) * 16, INDIRECT, 0);
        for i in 0..runs {
            driver.put_desc(TABLE, i, DATA, 1, if i + 1 < runs { NEXT } else { 0 }, i + 1);
        }
        driver.offer(0);
        let mut segments = Segments::with_limit(limit);
        walk_one(&mut driver.queue(), &mut segments).map(|()| segments.readable().len())
    };
    assert_eq!(chain(MAX_SEGMENTS as u16, MAX_SEGMENTS), Ok(MAX_SEGMENTS));
    assert_eq!(
        chain(MAX_SEGMENTS as u16 + 1, MAX_SEGMENTS),
        Err(ChainError::TooManySegments { limit: 136 })
    );
    assert_eq!(chain(3, 2), Err(ChainError::TooManySegments { limit: 2 }));
}

#[test]
fn clause_2_7_5_2_a_chain_has_less_than_4_gib() {
    // One region of 2 GiB, sparse, three times in one chain.
    let size = 1u64 << 31;
    let memory = Arc::new(GuestMemory::memfd(&[(0, size)]).expect("memory"));
    let config = QueueConfig { desc: 0, avail: 0x1000, used: 0x2000, ..Driver::new(16).config };
    let table = memory.range(0, 48).expect("table");
    for i in 0..3u16 {
        let flags = if i < 2 { NEXT } else { 0 };
        let desc = Desc::new(0, size as u32, flags, i + 1);
        table.put(usize::from(i) * 16, desc).expect("put");
    }
    memory.range(0x1002, 2).expect("idx").store_release_u16(0, 1).expect("put");
    let mut queue = SplitQueue::new(memory, &config).expect("queue");
    assert_eq!(walk_one(&mut queue, &mut Segments::new()), Err(ChainError::TooLong));
}

#[test]
fn clause_2_7_6_heads_are_descriptors_of_the_queue() {
    assert_eq!(walk(|d| d.offer(16)), Err(ChainError::BadHead { head: 16, size: 16 }));
    assert_eq!(walk(|d| d.offer(0xffff)), Err(ChainError::BadHead { head: 0xffff, size: 16 }));
}

#[test]
fn clause_2_7_6_no_more_chains_than_descriptors() {
    let driver = Driver::new(16).starting_at(0xfff8);
    let mut queue = driver.queue();
    driver.put_u16(AVAIL + 2, 9);
    let error = QueueError::AvailIndex { idx: 9, next: 0xfff8, size: 16 };
    let mut heads = [Head::default(); 32];
    assert_eq!(queue.pop(&mut heads), Err(error));
    assert_eq!(queue.pop(&mut heads), Err(error));
    driver.put_u16(AVAIL + 2, 8);
    assert_eq!(queue.pop(&mut heads), Ok(16));
    driver.put_u16(AVAIL + 2, 7);
    assert!(matches!(queue.pop(&mut heads), Err(QueueError::AvailIndex { idx: 7, .. })));
}

#[test]
fn chains_come_in_order_in_batches_over_the_wrap() {
    let mut driver = Driver::new(4).starting_at(0xfffe);
    let mut queue = driver.queue();
    let mut heads = [Head::default(); 3];
    assert!(!queue.has_work());
    assert_eq!(queue.pop(&mut heads), Ok(0));
    for head in [2, 0, 3, 1] {
        driver.offer(head);
    }
    assert!(queue.has_work());
    assert_eq!(queue.pop(&mut heads), Ok(3));
    assert_eq!(heads.map(|h| h.index()), [2, 0, 3]);
    queue.undo_pop(&heads[1..]);
    assert_eq!(queue.next_avail(), 0xffff);
    assert_eq!(queue.pop(&mut heads), Ok(3));
    assert_eq!(heads.map(|h| h.index()), [0, 3, 1]);
    assert_eq!(queue.next_avail(), 2);
    assert!(!queue.has_work());
}

#[test]
fn a_descriptor_is_read_once() {
    let mut driver = Driver::new(16);
    driver.desc(0, DATA, 16, 0, 0);
    driver.offer(0);
    let mut queue = driver.queue();
    let head = pop_one(&mut queue);
    // The driver changes it after the device took it: the device must not see half of each.
    driver.desc(0, 0, u32::MAX, INDIRECT, 9);
    let mut segments = Segments::new();
    assert_eq!(queue.walk(&head, &mut segments), Ok(()));
    assert_eq!(driver.runs(segments.readable()), [(DATA, 16)]);
}

#[test]
fn after_an_error_a_chain_has_no_bytes() {
    let mut driver = Driver::new(16);
    driver.desc(0, DATA, 16, NEXT, 1);
    driver.desc(1, 0, 16, WRITE, 1);
    driver.offer(0);
    let mut queue = driver.queue();
    let mut segments = Segments::new();
    assert!(walk_one(&mut queue, &mut segments).is_err());
    assert!(segments.readable().is_empty() && segments.writable().is_empty());
    assert_eq!((segments.readable_len(), segments.writable_len()), (0, 0));
}

#[test]
fn clause_2_7_8_used_entries_carry_head_and_length() {
    let driver = Driver::new(4).starting_at(0xffff);
    let mut queue = driver.queue();
    assert!(!queue.publish());
    queue.push_used(3, 100);
    queue.push_used(1, 0);
    assert_eq!(driver.used_idx(), 0xffff);
    assert!(queue.publish());
    assert_eq!(driver.used_idx(), 1);
    assert_eq!((driver.used(3), driver.used(0)), ((3, 100), (1, 0)));
    assert!(!queue.publish());
}

#[test]
fn what_is_shown_early_is_called_for_once_at_the_end() {
    let driver = Driver::with_event_idx(8);
    let mut queue = driver.queue();
    queue.push_used(0, 0);
    assert!(queue.publish(), "the first one always");
    // It wants to hear of the second.
    driver.set_used_event(1);
    queue.push_used(1, 10);
    queue.show();
    assert_eq!((driver.used_idx(), driver.used(1)), (2, (1, 10)));
    queue.show();
    queue.push_used(2, 20);
    assert_eq!(driver.used_idx(), 2);
    assert!(queue.publish(), "for what was shown before too");
    assert_eq!((driver.used_idx(), driver.used(2)), (3, (2, 20)));
    // Shown, seen, and not to be called for any more.
    queue.push_used(3, 0);
    queue.show();
    driver.set_used_event(5);
    assert!(!queue.publish());
    assert!(!queue.publish());
    // In new memory it goes on where it stood, with the call still to be decided on.
    queue.push_used(4, 0);
    queue.push_used(5, 0);
    queue.show();
    queue.remap(driver.memory.clone(), &driver.config).expect("a queue");
    assert!(queue.publish());
    assert_eq!(driver.used_idx(), 6);
}

#[test]
fn clause_2_7_7_2_no_interrupt_is_honoured_without_event_idx() {
    let driver = Driver::new(4);
    let mut queue = driver.queue();
    driver.put_u16(AVAIL, 1);
    queue.push_used(0, 0);
    assert!(!queue.publish());
    driver.put_u16(AVAIL, 0);
    queue.push_used(0, 0);
    assert!(queue.publish());
}

#[test]
fn clause_2_7_7_2_used_event_is_honoured_and_flags_are_not_with_event_idx() {
    let driver = Driver::with_event_idx(8).starting_at(0xfffe);
    let mut queue = driver.queue();
    driver.put_u16(AVAIL, 1);
    let mut publish = |count: u16, event: u16| {
        driver.set_used_event(event);
        (0..count).for_each(|_| queue.push_used(0, 0));
        queue.publish()
    };
    // The first time a call is always made: the driver may have waited since before we came.
    assert!(publish(1, 0x8000));
    // ffff -> 0: the driver waits for entry ffff, then not.
    assert!(publish(1, 0xffff));
    assert!(!publish(1, 0xffff));
    assert!(!publish(1, 5));
    // 2 -> 6 passes 5.
    assert!(publish(4, 5));
    assert!(!publish(1, 7));
    assert!(publish(1, 7));
}

#[test]
fn clause_2_7_10_kicks_by_flag() {
    let mut driver = Driver::new(4);
    let mut queue = driver.queue();
    queue.disable_kick();
    assert_eq!(driver.get_u16(USED), 1);
    assert!(!queue.enable_kick());
    assert_eq!(driver.get_u16(USED), 0);
    queue.disable_kick();
    driver.offer(0);
    assert!(queue.enable_kick());
}

#[test]
fn clause_2_7_10_kicks_by_event_index() {
    let mut driver = Driver::with_event_idx(4).starting_at(100);
    let mut queue = driver.queue();
    assert!(!queue.enable_kick());
    assert_eq!((driver.avail_event(), driver.get_u16(USED)), (100, 0));
    driver.offer(0);
    assert!(queue.enable_kick());
    let _ = pop_one(&mut queue);
    assert!(!queue.enable_kick());
    assert_eq!(driver.avail_event(), 101);
    queue.disable_kick();
    // Whatever the driver is adding now, the event is not among it.
    for old in 97..=101u16 {
        for new in old..=old + 4 {
            let passed = new.wrapping_sub(driver.avail_event()).wrapping_sub(1) < new - old;
            assert!(!passed, "{old}..{new}");
        }
    }
    assert_eq!(driver.get_u16(USED), 0);
}

#[test]
#[cfg_attr(miri, ignore = "Miri maps no files")]
fn used_ring_writes_are_logged_under_their_log_address() {
    let mut driver = Driver::with_event_idx(16);
    let fd = memfd_create("log", MemfdFlags::CLOEXEC).expect("memfd");
    ftruncate(&fd, 128).expect("ftruncate");
    let log = Arc::new(DirtyLog::new(fd.as_fd(), 0, 128).expect("log"));
    driver.memory = Arc::new(driver.memory.with_log(Some(log.clone())));
    driver.desc(0, DATA + 0xfff, 2, WRITE, 0);
    let mut quiet = driver.queue();
    let _ = quiet.enable_kick();
    quiet.push_used(0, 0);
    let _ = quiet.publish();
    let dirty = || (0..1024).filter(|p| log.is_marked(p * 4096)).collect::<Vec<_>>();
    assert_eq!(dirty(), Vec::<u64>::new());

    driver.config.used_log = Some(0x20_0000 - 4);
    driver.config.next_avail = 0;
    let mut queue = SplitQueue::new(driver.memory.clone(), &driver.config).expect("queue");
    queue.push_used(0, 0);
    let marked = |gpa| log.is_marked(gpa);
    assert!(!marked(0x1f_f000));
    let _ = queue.publish();
    assert!(marked(0x1f_f000) && marked(0x20_0000 - 4 + 12));

    let mut segments = Segments::new();
    driver.offer(0);
    assert_eq!(walk_one(&mut queue, &mut segments), Ok(()));
    segments.mark_written(0, 1);
    assert!(marked(DATA) && !marked(DATA + 0x1000));
    segments.mark_written(1, 1);
    assert!(marked(DATA + 0x1000));
}

#[test]
fn clause_2_7_4_any_framing_splits_by_offset() {
    let mut driver = Driver::new(16);
    // A 51 byte header and 4 bytes of data out; a 108 byte response and 5 bytes of data in;
    // cut at odd places.
    driver.desc(0, DATA, 50, NEXT, 1);
    driver.desc(1, DATA + 50, 5, NEXT, 2);
    driver.desc(2, DATA + 0x100, 100, NEXT | WRITE, 3);
    driver.desc(3, DATA + 0x200, 13, WRITE, 0);
    let bytes: Vec<u8> = (0..55).collect();
    driver.memory.range(DATA, 55).expect("data").write_slice(0, &bytes).expect("write");
    driver.offer(0);
    let mut segments = Segments::with_limit(4);
    assert_eq!(walk_one(&mut driver.queue(), &mut segments), Ok(()));
    assert!(segments.split(56, 0).is_none() && segments.split(0, 114).is_none());
    let halves = segments.split(51, 108).expect("both parts are long enough");
    let mut header = [0; 51];
    assert_eq!(halves.readable.0.copy_to_slice(0, &mut header), 51);
    assert_eq!(header[..], bytes[..51]);
    assert_eq!(driver.runs(halves.readable.0), [(DATA, 50), (DATA + 50, 1)]);
    assert_eq!(driver.runs(halves.readable.1), [(DATA + 51, 4)]);
    assert_eq!(driver.runs(halves.writable.0), [(DATA + 0x100, 100), (DATA + 0x200, 8)]);
    assert_eq!(driver.runs(halves.writable.1), [(DATA + 0x208, 5)]);
    let lens = [halves.readable.0, halves.readable.1, halves.writable.0, halves.writable.1];
    assert_eq!(lens.map(|sg| sg.len()), [51, 4, 108, 5]);
    assert_eq!(segments.readable().len() + segments.writable().len(), 55 + 113);
}

#[test]
fn a_split_at_a_boundary_or_at_the_ends_cuts_nothing() {
    let mut driver = Driver::new(16);
    driver.desc(0, DATA, 51, NEXT, 1);
    driver.desc(1, DATA + 0x100, 108, NEXT | WRITE, 2);
    driver.desc(2, DATA + 0x200, 512, WRITE, 0);
    driver.offer(0);
    let mut segments = Segments::new();
    assert_eq!(walk_one(&mut driver.queue(), &mut segments), Ok(()));
    let halves = segments.split(51, 108).expect("both parts are long enough");
    assert!(halves.readable.1.is_empty() && halves.readable.1.as_slice().is_empty());
    assert_eq!(driver.runs(halves.readable.0), [(DATA, 51)]);
    assert_eq!(driver.runs(halves.writable.1), [(DATA + 0x200, 512)]);
    segments.clear();
    assert!(segments.split(0, 1).is_none());
    let nothing = segments.split(0, 0).expect("nothing has nothing");
    assert!(nothing.readable.0.is_empty() && nothing.writable.1.is_empty());
}

#[test]
fn a_queue_goes_on_in_new_memory_where_it_stood() {
    let mut driver = Driver::with_event_idx(4);
    let mut queue = driver.queue();
    driver.offer(0);
    driver.offer(1);
    let _ = queue.pop(&mut [Head::default()]).expect("pop");
    queue.push_used(0, 0);
    assert!(queue.publish());
    let memory = Arc::new(driver.memory.with_log(None));
    queue.remap(memory, &driver.config).expect("remap");
    assert_eq!((queue.next_avail(), queue.next_used()), (1, 1));
    assert!(queue.has_work());
    queue.push_used(1, 0);
    driver.set_used_event(9);
    assert!(!queue.publish());
    assert_eq!(driver.used_idx(), 2);
}

/// Takes `count` chains; their heads.
fn take(queue: &mut SplitQueue, count: usize) -> Vec<u16> {
    let mut heads = vec![Head::default(); count];
    assert_eq!(queue.pop(&mut heads), Ok(count));
    heads.iter().map(Head::index).collect()
}

#[test]
fn what_was_taken_and_not_used_is_taken_again_before_all_else() {
    let mut driver = Driver::new(8).starting_at(0xfffe);
    let mut queue = driver.queue();
    (0..6).for_each(|head| driver.offer(head));
    assert_eq!(take(&mut queue, 5), [0, 1, 2, 3, 4]);
    // Out of order.
    for head in [1, 3] {
        queue.push_used(head, 0);
    }
    _ = queue.publish();
    queue.take_again(&[0, 2, 4]);
    assert_eq!(queue.to_replay(), 3);
    assert_eq!(take(&mut queue, 2), [0, 2]);
    // The rest of them, behind those that were taken once more.
    queue.take_again(&[0, 2]);
    assert_eq!((queue.to_replay(), take(&mut queue, 3)), (3, vec![0, 2, 4]));
    assert_eq!(take(&mut queue, 1), [5]);
    queue.take_again(&[0, 2, 4, 5]);
    assert_eq!(take(&mut queue, 1), [0]);
    assert_eq!(*queue.unreplayed(), [2, 4, 5]);
    assert_eq!((queue.to_replay(), queue.next_avail()), (0, driver.queue().avail_index()));
    assert!(!queue.has_work());
}

#[test]
fn what_the_ring_still_offers_from_the_used_index_on_is_given_back() {
    let mut driver = Driver::new(8).starting_at(0xfffe);
    let mut queue = driver.queue();
    (0..6).for_each(|head| driver.offer(head));
    assert_eq!(take(&mut queue, 5), [0, 1, 2, 3, 4]);
    assert!(!queue.give_back(&[0, 1, 2, 3]), "it has one more");
    for head in [1, 0] {
        queue.push_used(head, 0);
    }
    _ = queue.publish();
    // In any order: whoever goes on finds them in that of the ring.
    assert!(queue.give_back(&[4, 2, 3]));
    assert_eq!((queue.next_avail(), queue.next_used()), (0, 0));
    assert_eq!(take(&mut queue, 4), [2, 3, 4, 5]);
    // One that was taken later is used: the ring from there on has it, and not all of these.
    queue.push_used(4, 0);
    assert!(!queue.give_back(&[2, 3, 5]));
    assert_eq!(queue.next_avail(), 4);
    assert!(!queue.give_back(&[]));
    for head in [2, 3, 5] {
        queue.push_used(head, 0);
    }
    assert!(queue.give_back(&[]), "nothing is out");
    // A head that there is not, as the driver can write it at any time.
    assert_eq!(queue.head(0xffff).index(), 0xffff);
}

#[test]
fn a_chain_is_cut_a_second_time_behind_the_first_cut() {
    for (out, into, readable, writable) in [
        (
            9,
            10,
            [vec![(DATA + 51, 9)], vec![(DATA + 0x80, 20)]],
            [(DATA + 0x100 + 108, 10), (DATA + 0x200, 40)],
        ),
        (
            3,
            4,
            [vec![(DATA + 51, 3)], vec![(DATA + 54, 6), (DATA + 0x80, 20)]],
            [(DATA + 0x100 + 108, 4), (DATA + 0x100 + 112, 6)],
        ),
        (
            12,
            10,
            [vec![(DATA + 51, 9), (DATA + 0x80, 3)], vec![(DATA + 0x83, 17)]],
            [(DATA + 0x100 + 108, 10), (DATA + 0x200, 40)],
        ),
    ] {
        let mut driver = Driver::new(16);
        // Header and more in one run; a run to each boundary of neither part.
        driver.desc(0, DATA, 60, NEXT, 1);
        driver.desc(1, DATA + 0x80, 20, NEXT, 2);
        driver.desc(2, DATA + 0x100, 118, NEXT | WRITE, 3);
        driver.desc(3, DATA + 0x200, 40, WRITE, 0);
        driver.offer(0);
        // No more room than the chain has: the cuts have their own.
        let mut segments = Segments::with_limit(4);
        assert_eq!(walk_one(&mut driver.queue(), &mut segments), Ok(()));
        assert!(segments.split(51, 108).is_some());
        assert!(segments.split(30, 0).is_none() && segments.split(0, 51).is_none());
        let halves = segments.split(out, into).expect("what is left is long enough");
        assert!(segments.split(0, 0).is_none(), "no third time");
        assert_eq!(driver.runs(halves.readable.0), readable[0]);
        assert_eq!(driver.runs(halves.readable.1), readable[1]);
        assert_eq!(driver.runs(halves.writable.0), [writable[0]]);
        assert_eq!(driver.runs(halves.writable.1)[0], writable[1]);
        let lens = [halves.readable.0, halves.readable.1, halves.writable.0, halves.writable.1];
        assert_eq!(lens.map(|sg| sg.len()), [out, 29 - out, into, 50 - into]);
        assert_eq!((segments.readable().len(), segments.writable().len()), (80, 158));
        let bytes = |sg: guestmem::Sg| sg.as_slice().iter().map(|run| run.len()).sum::<usize>();
        assert_eq!((bytes(segments.readable()), bytes(segments.writable())), (80, 158));
    }
}
