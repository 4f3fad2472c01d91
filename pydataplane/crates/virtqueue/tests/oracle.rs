//! The same bytes of guest memory given to this crate and to `virtio-queue`: they agree on every
//! chain that both accept, and what only we refuse breaks a rule that the oracle does not check.

mod common;

use common::{AVAIL, DATA, DESC, Driver, HIGH, LOW, TABLE, USED};
use proptest::prelude::*;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use virtqueue::{ChainError, Desc, Head, MAX_SEGMENTS, Segments};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

const SIZE: u16 = 8;

/// (kind of address, offset, length, flags, next)
type Raw = (u8, u64, u32, u16, u16);

fn address(kind: u8, offset: u64) -> u64 {
    match kind {
        0..=6 => DATA + offset,
        7 => HIGH.0 - 100 + offset % 200,
        8 => TABLE,
        9 => HIGH.0 + HIGH.1 - 50 + offset % 100,
        _ => offset << 40,
    }
}

fn raw(indirect: bool) -> impl Strategy<Value = Raw> {
    let lens = prop_oneof![8 => 1u32..600, 1 => Just(0u32), 1 => 1u32..9, 1 => any::<u32>()];
    let chain = prop_oneof![Just(0u16), Just(1), Just(1), Just(3), Just(2), Just(3)];
    let flags = (chain, 0u8..20).prop_map(move |(flags, odd)| match odd {
        0 => flags ^ 4,
        1 if indirect => 4,
        2 => flags | 0xfff0,
        _ => flags,
    });
    let next = prop_oneof![9 => 0..SIZE, 1 => any::<u16>()];
    let kind = prop_oneof![20 => 0u8..9, 1 => Just(9u8), 1 => Just(10u8)];
    (kind, 0u64..0x3000, lens, flags, next)
}

/// A chain of the kind that real drivers make, so that long ones are common too.
fn tidy(mut descs: Vec<Raw>, readable: usize) -> Vec<Raw> {
    let last = descs.len() - 1;
    for (i, d) in descs.iter_mut().enumerate() {
        d.0 %= 8;
        d.2 = d.2 % 600 + 1;
        d.3 = if i < readable { 0 } else { Desc::WRITE } | if i < last { Desc::NEXT } else { 0 };
        d.4 = i as u16 + 1;
    }
    descs
}

fn table() -> impl Strategy<Value = Vec<Raw>> {
    let wild = prop::collection::vec(raw(true), SIZE as usize);
    let tame = (prop::collection::vec(raw(true), SIZE as usize), 0usize..8)
        .prop_map(|(descs, readable)| tidy(descs, readable));
    prop_oneof![wild, tame]
}

struct Case {
    driver: Driver,
    oracle: GuestMemoryMmap<()>,
}

/// Both memories with these tables; `heads` are available.
fn case(direct: &[Raw], indirect: &[Raw], table_len: u32, heads: &[u16]) -> Case {
    let mut driver = Driver::new(SIZE);
    for (i, d) in direct.iter().enumerate() {
        let (addr, len) = match d.3 & Desc::INDIRECT {
            0 => (address(d.0, d.1), d.2),
            _ => (TABLE, table_len),
        };
        driver.desc(i as u16, addr, len, d.3, d.4);
    }
    for (i, d) in indirect.iter().enumerate() {
        driver.put_desc(TABLE, i as u16, address(d.0, d.1), d.2, d.3, d.4);
    }
    heads.iter().for_each(|h| driver.offer(*h));
    let areas = [LOW, HIGH].map(|(at, len)| (GuestAddress(at), len as usize));
    let oracle = GuestMemoryMmap::from_ranges(&areas).expect("oracle memory");
    for (at, len) in [LOW, HIGH] {
        let mut bytes = vec![0; len as usize];
        driver.memory.range(at, len).expect("region").read_slice(0, &mut bytes).expect("read");
        oracle.write_slice(&bytes, GuestAddress(at)).expect("write");
    }
    Case { driver, oracle }
}

fn oracle_queue() -> Queue {
    let mut queue = Queue::new(SIZE).expect("queue");
    queue.set_size(SIZE);
    queue.set_ready(true);
    queue.set_desc_table_address(Some(DESC as u32), Some(0));
    queue.set_avail_ring_address(Some(AVAIL as u32), Some(0));
    queue.set_used_ring_address(Some(USED as u32), Some(0));
    queue
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 20 } else { 2000 }))]

    #[test]
    fn chains_are_what_the_oracle_sees(
        direct in table(),
        indirect in table(),
        table_len in prop_oneof![6 => (1u32..=8).prop_map(|n| n * 16), 1 => 0u32..200],
        heads in prop::collection::vec(prop_oneof![9 => 0..SIZE, 1 => any::<u16>()], 1..=8),
    ) {
        let case = case(&direct, &indirect, table_len, &heads);
        let mut queue = case.driver.queue();
        let mut taken = [Head::default(); SIZE as usize];
        prop_assert_eq!(queue.pop(&mut taken), Ok(heads.len()));
        let mut segments = Segments::new();
        let mut theirs = oracle_queue();
        let chains: Vec<_> = theirs.iter(&case.oracle).expect("iter").collect();
        prop_assert_eq!(chains.len(), heads.len());
        for (head, chain) in taken.iter().zip(chains) {
            prop_assert_eq!(head.index(), chain.head_index());
            let ours = queue.walk(head, &mut segments);
            let descs: Vec<_> = chain.collect();
            let inside = |d: &virtio_queue::desc::split::Descriptor| {
                case.oracle.check_range(d.addr(), d.len() as usize)
            };
            let ended = descs.last().is_some_and(|d| !d.has_next());
            let ordered = descs.windows(2).all(|w| !w[0].is_write_only() || w[1].is_write_only());
            let good = ended && ordered && descs.iter().all(|d| d.len() != 0 && inside(d));
            match ours {
                Ok(()) => {
                    prop_assert!(good, "accepted {:?}", descs);
                    let (mut read, mut write) = (Vec::new(), Vec::new());
                    for d in &descs {
                        let part = if d.is_write_only() { &mut write } else { &mut read };
                        // The oracle does not split where regions meet: do it here.
                        let (at, len) = (d.addr().0, d.len() as usize);
                        let low = HIGH.0.saturating_sub(at).min(len as u64) as usize;
                        part.extend([(at, low), (HIGH.0.max(at), len - low)]
                            .into_iter().filter(|(_, n)| *n != 0));
                    }
                    prop_assert_eq!(case.driver.runs(segments.readable()), read);
                    prop_assert_eq!(case.driver.runs(segments.writable()), write);
                }
                // Rules that the oracle lets pass.
                Err(ChainError::IndirectWithNext) => (),
                Err(e) => prop_assert!(!good, "refused {:?}: {}", descs, e),
            }
        }
    }

    #[test]
    fn used_ring_and_calls_are_what_the_oracle_makes(
        batches in prop::collection::vec(
            (prop::collection::vec((0..SIZE, any::<u32>()), 1..6), -8i32..8), 1..40),
        start in any::<u16>(),
        event_idx in any::<bool>(),
    ) {
        let mut driver = Driver::new(SIZE).starting_at(start);
        driver.config.event_idx = event_idx;
        let mut queue = driver.queue();
        let areas = [LOW, HIGH].map(|(at, len)| (GuestAddress(at), len as usize));
        let oracle: GuestMemoryMmap<()> = GuestMemoryMmap::from_ranges(&areas).expect("memory");
        let mut theirs = oracle_queue();
        theirs.set_event_idx(event_idx);
        theirs.set_next_used(start);
        for (i, (batch, ahead)) in batches.iter().enumerate() {
            let event = queue.next_used().wrapping_add(*ahead as u16);
            driver.set_used_event(event);
            let at = GuestAddress(AVAIL + 4 + u64::from(SIZE) * 2);
            oracle.write_obj(event.to_le(), at).expect("event");
            for (head, len) in batch {
                queue.push_used(*head, *len);
                theirs.add_used(&oracle, *head, *len).expect("add_used");
            }
            let calls = (queue.publish(), theirs.needs_notification(&oracle).expect("needs"));
            // Our first call is unconditional.
            prop_assert!(calls.0 == calls.1 || i == 0 && calls.0, "batch {}: {:?}", i, calls);
            let len = 4 + usize::from(SIZE) * 8;
            let (mut ours, mut other) = (vec![0; len], vec![0; len]);
            driver.memory.range(USED, len as u64).expect("used").read_slice(0, &mut ours).expect("read");
            oracle.read_slice(&mut other, GuestAddress(USED)).expect("read");
            prop_assert_eq!(ours, other);
        }
    }
}

#[test]
fn the_limit_of_runs_is_beyond_what_the_oracle_can_make_here() {
    assert!(usize::from(SIZE) * 2 + 2 < MAX_SEGMENTS);
}
