//! A device for crash and error tests, behind the cargo feature `testing`.
//!
//! The fault model, in prose: a write goes to a volatile half and is seen by every later read. A
//! flush, and a write with FUA for its own sectors, makes what completed before durable. At a
//! power cut each 512-byte sector that was written since keeps, independently, any one of the
//! contents that it had since it was last durable; a sector is never torn. Unmap and write zeroes
//! are writes of zeros. A flush that fails strikes once and is latched, as the kernel's report of a
//! writeback error is: what it was to make durable stays as it is to reads, and is lost at a power cut
//! unless it is written anew. While it is latched no write with FUA succeeds. A killed process (unlike
//! a cut) loses nothing that was written. One seed reproduces one outcome.

mod holes;
mod medium;
#[cfg(test)]
pub(crate) mod model;
mod wrapped;

use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use reactor::{IoContext, Waker};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::{
    Bdev, Channel, ChannelStats, Completion, Features, FlushCause, FlushLatch, Geometry, Io,
    IoError, Op, OpenError, Run, Stats, Submit,
};

pub use holes::Holes;
use medium::{State, sector_of};
pub use wrapped::{Wrap, Wrapped};

/// Most I/Os that a deferred channel holds.
const DEPTH: usize = 256;

/// An error to inject.
#[derive(Clone, Debug)]
pub struct Fault {
    /// Which operation; `None`: any.
    pub op: Option<Op>,
    /// I/Os that touch one of these blocks; a flush touches all.
    pub lba: Range<u64>,
    /// How many matching I/Os pass before it strikes.
    pub skip: u64,
    /// How many times it strikes.
    pub count: u64,
    /// What the I/O ends with. A write that fails has changed nothing.
    pub error: IoError,
}

impl Fault {
    /// Fails every I/O of `op` from now on with `error`.
    pub fn always(op: Op, error: IoError) -> Self {
        Fault { op: Some(op), lba: 0..u64::MAX, skip: 0, count: u64::MAX, error }
    }
}

/// A disk in memory that can lose its power and fail on purpose.
pub struct FaultBdev {
    name: String,
    uuid: Uuid,
    block_size: u32,
    features: Features,
    stats: Arc<Stats>,
    latch: Arc<FlushLatch>,
    state: Arc<Mutex<State>>,
    tells_zeros: AtomicBool,
}

impl FaultBdev {
    /// A device of zeros (its memory is really allocated, three times over: keep it small).
    ///
    /// # Panics
    /// On a geometry that [`Geometry::checked`] refuses.
    pub fn new(name: &str, block_size: u32, num_blocks: u64) -> Arc<Self> {
        let g = Geometry::checked(block_size, 0, num_blocks).expect("a valid geometry");
        let bytes = g.bytes() as usize;
        Self::with_image(name, block_size, vec![0; bytes])
    }

    /// A device that holds `image`, durably.
    ///
    /// # Panics
    /// When `image` is not a whole number of blocks.
    pub fn with_image(name: &str, block_size: u32, image: Vec<u8>) -> Arc<Self> {
        assert!(!image.is_empty() && image.len().is_multiple_of(block_size as usize));
        let features = Features {
            read_only: false,
            volatile_cache: true,
            fua: true,
            unmap: true,
            unmap_zeroes: true,
            unmap_skips: false,
            write_zeroes: true,
            thin: true,
            unmap_granularity: 1,
            optimal_blocks: 0,
            max_blocks: 0,
            boot: None,
            remote: false,
        };
        let state = State {
            sector: sector_of(block_size),
            durable: image.clone(),
            volatile: image,
            unflushed: BTreeMap::new(),
            faults: Vec::new(),
            alive: None,
            dead: false,
            changes: 0,
            flushes: 0,
            deferred: None,
            holding: false,
            held: 0,
            wakers: Vec::new(),
            boot: 1,
        };
        Arc::new(FaultBdev {
            name: name.to_owned(),
            uuid: Uuid::new_v4(),
            block_size,
            features,
            stats: Stats::new(),
            latch: Arc::default(),
            state: Arc::new(Mutex::new(state)),
            tells_zeros: AtomicBool::new(false),
        })
    }

    /// Has it say from now on which of its blocks read as zeros ([`Bdev::known_zeros`]).
    pub fn tell_zeros(&self) {
        self.tells_zeros.store(true, Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Adds an error to inject.
    pub fn inject(&self, fault: Fault) {
        self.lock().faults.push(fault);
    }

    /// Forgets all errors to inject.
    pub fn clear_faults(&self) {
        self.lock().faults.clear();
    }

    /// After `changes` more I/Os that change something (writes, unmaps, zeroes, flushes), every
    /// I/O fails with [`IoError::Removed`] until [`FaultBdev::power_cut`] or
    /// [`FaultBdev::revive`]. The first that fails may have reached the volatile half: after a
    /// power cut any of its sectors may be there.
    pub fn die_after(&self, changes: u64) {
        self.lock().alive = Some(changes);
    }

    /// Whether it died ([`FaultBdev::die_after`]).
    pub fn is_dead(&self) -> bool {
        self.lock().dead
    }

    /// I/Os that changed something since the device was made: the points at which a test can cut.
    pub fn changes(&self) -> u64 {
        self.lock().changes
    }

    /// Flushes since the device was made.
    pub fn flushes(&self) -> u64 {
        self.lock().flushes
    }

    /// Sectors that a power cut could lose now.
    pub fn unflushed_sectors(&self) -> usize {
        self.lock().unflushed.len()
    }

    /// The power fails and comes back: every unflushed sector keeps one of its contents, chosen by
    /// `seed` (0 loses all that was not flushed, `u64::MAX` keeps all). The device works again.
    pub fn power_cut(&self, seed: u64) {
        let mut s = self.lock();
        let mut random = Random(seed);
        for (at, versions) in std::mem::take(&mut s.unflushed) {
            // 0: the durable content; n: what the n-th write since left.
            let choice = match seed {
                0 => 0,
                u64::MAX => versions.len(),
                _ => random.below(versions.len() as u64 + 1) as usize,
            };
            if let Some(v) = choice.checked_sub(1).and_then(|i| versions.get(i)) {
                let sector = s.sector;
                s.durable[at * sector..][..sector].copy_from_slice(&v[..sector]);
            }
        }
        s.volatile = s.durable.clone();
        s.revive();
        s.boot += 1;
        self.latch.clear();
    }

    /// The process was killed and starts again: nothing that was written is lost, and nothing is known
    /// of a failed flush.
    pub fn revive(&self) {
        self.lock().revive();
        self.latch.clear();
    }

    /// What reads would see.
    pub fn image(&self) -> Vec<u8> {
        self.lock().volatile.clone()
    }

    /// What certainly survives a power cut.
    pub fn durable_image(&self) -> Vec<u8> {
        self.lock().durable.clone()
    }

    /// Flips bits of one byte, on the medium and in what reads see: silent corruption.
    pub fn corrupt(&self, offset: usize, mask: u8) {
        let mut s = self.lock();
        s.volatile[offset] ^= mask;
        s.durable[offset] ^= mask;
        let sector = s.sector;
        if let Some(v) = s.unflushed.get_mut(&(offset / sector)).and_then(|v| v.last_mut()) {
            v[offset % sector] ^= mask;
        }
    }

    /// Grows or shrinks the device, durably; the caller tells the registry.
    ///
    /// # Panics
    /// On 0 blocks.
    pub fn resize(&self, num_blocks: u64) {
        assert!(num_blocks > 0);
        let bytes = num_blocks as usize * self.block_size as usize;
        let mut s = self.lock();
        s.volatile.resize(bytes, 0);
        s.durable.resize(bytes, 0);
        let sector = s.sector;
        s.unflushed.retain(|at, _| at * sector < bytes);
    }

    /// From now on I/Os of channels opened afterwards are `Pending`, do their work in `poll`, one
    /// a call, and in an order chosen by `seed`; `None`: within `submit`, as at first.
    pub fn defer(&self, seed: Option<u64>) {
        self.lock().deferred = seed;
    }

    /// From now on deferred I/Os ([`FaultBdev::defer`]) do not end until [`FaultBdev::release`].
    pub fn hold(&self) {
        self.lock().holding = true;
    }

    /// Lets deferred I/Os end.
    pub fn release(&self) {
        let mut s = self.lock();
        s.holding = false;
        s.wakers.iter().for_each(Waker::wake);
    }

    /// Deferred I/Os that have not ended.
    pub fn held(&self) -> usize {
        self.lock().held
    }
}

impl Bdev for FaultBdev {
    fn name(&self) -> &str {
        &self.name
    }
    fn aliases(&self) -> Vec<String> {
        Vec::new()
    }
    fn uuid(&self) -> Uuid {
        self.uuid
    }
    fn product_name(&self) -> &'static str {
        "Fault disk"
    }
    fn geometry(&self) -> Geometry {
        let num_blocks = self.lock().volatile.len() as u64 / u64::from(self.block_size);
        Geometry { block_size: self.block_size, physical_block_size: self.block_size, num_blocks }
    }
    fn features(&self) -> Features {
        Features { boot: Some(self.lock().boot), ..self.features }
    }
    fn open(&self, io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        self.lock().wakers.push(io.waker());
        Ok(Box::new(FaultChannel {
            block_size: self.block_size,
            features: self.features,
            state: self.state.clone(),
            random: self.lock().deferred.map(Random),
            waiting: VecDeque::with_capacity(DEPTH),
            stats: self.stats.channel(),
            latch: self.latch.clone(),
            waker: io.waker(),
        }))
    }
    fn driver_specific(&self) -> Value {
        json!({})
    }
    fn stats(&self) -> Option<&Arc<Stats>> {
        Some(&self.stats)
    }
    fn flush_latch(&self) -> Option<&FlushLatch> {
        Some(&self.latch)
    }
    fn known_zeros(&self, lba: u64) -> Option<Run> {
        if !self.tells_zeros.load(Relaxed) || self.latch.failures() > 0 {
            return None;
        }
        let (state, block) = (self.lock(), self.block_size as usize);
        let mut left = state.volatile.chunks_exact(block).skip(lba as usize);
        let zeros = |block: &[u8]| block.iter().all(|byte| *byte == 0);
        let hole = zeros(left.next()?);
        let more = left.take_while(|block| zeros(block) == hole).count();
        Some(Run { hole, blocks: more as u64 + 1 })
    }
}

struct FaultChannel {
    block_size: u32,
    features: Features,
    state: Arc<Mutex<State>>,
    random: Option<Random>,
    waiting: VecDeque<Io>,
    stats: ChannelStats,
    latch: Arc<FlushLatch>,
    /// Keeps the thread awake while there is something to do.
    waker: Waker,
}

impl FaultChannel {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn run(&mut self, io: &Io) -> Result<(), IoError> {
        let begun = self.stats.begin();
        let mut state = self.state.lock();
        if io.fua && self.latch.is_set() {
            return Err(IoError::Flush);
        }
        let mut result = state.run(io, self.block_size, &self.features);
        if io.op == Op::Flush && result == Err(IoError::Flush) {
            self.latch.set(FlushCause::Flush, None);
        } else if io.op == Op::Flush && self.latch.is_set() {
            result = result.and(Err(IoError::Flush));
        }
        self.stats.end(io, self.block_size, begun, result);
        result
    }
}

impl Channel for FaultChannel {
    fn submit(&mut self, io: &Io) -> Submit {
        if self.random.is_none() {
            return Submit::Done(self.run(io));
        }
        if self.waiting.len() == DEPTH {
            return Submit::Full;
        }
        self.waiting.push_back(*io);
        self.lock().held += 1;
        Submit::Pending
    }
    fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        let Some(random) = &mut self.random else { return 0 };
        if self.waiting.is_empty() || done.len() == done.capacity() {
            return 0;
        }
        let mut state = self.state.lock();
        if state.holding {
            return 0;
        }
        state.held -= 1;
        drop(state);
        let at = random.below(self.waiting.len() as u64) as usize;
        let Some(io) = self.waiting.swap_remove_back(at) else { return 0 };
        done.push(Completion { tag: io.tag, result: self.run(&io), ticks: 0, ended: 0 });
        if !self.waiting.is_empty() {
            self.waker.wake();
        }
        1
    }
}

/// SplitMix64: small, and good enough to choose test cases.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AlignedBuf, SyncChannel};

    fn filled(byte: u8) -> AlignedBuf {
        let mut b = AlignedBuf::zeroed(512);
        b.fill(byte);
        b
    }

    #[test]
    fn a_power_cut_loses_what_was_not_flushed_and_keeps_what_was() {
        let d = FaultBdev::new("f", 512, 8);
        let mut c = SyncChannel::open(&*d).unwrap();
        c.write(0, &filled(1)).unwrap();
        c.flush().unwrap();
        c.write(1, &filled(2)).unwrap();
        c.write_fua(2, &filled(3)).unwrap();
        assert_eq!(d.unflushed_sectors(), 1);
        assert_eq!(d.image()[512], 2);
        d.power_cut(0);
        let i = d.image();
        assert_eq!((i[0], i[512], i[1024]), (1, 0, 3));
    }

    #[test]
    fn a_power_cut_keeps_any_version_of_each_sector_and_a_seed_repeats_it() {
        let after = |seed| {
            let d = FaultBdev::new("f", 512, 2);
            let mut c = SyncChannel::open(&*d).unwrap();
            for v in 1..=2 {
                c.write(0, &filled(v)).unwrap();
                c.write(1, &filled(v + 10)).unwrap();
            }
            d.power_cut(seed);
            (d.image()[0], d.image()[512])
        };
        let seen: std::collections::BTreeSet<_> = (1..200).map(after).collect();
        assert_eq!(seen.len(), 9, "every combination of versions: {seen:?}");
        assert_eq!(after(7), after(7));
        assert_eq!(after(0), (0, 0));
        assert_eq!(after(u64::MAX), (2, 12));
    }

    #[test]
    fn it_dies_at_the_chosen_change_and_a_killed_process_loses_nothing() {
        let d = FaultBdev::new("f", 512, 8);
        let mut c = SyncChannel::open(&*d).unwrap();
        d.die_after(1);
        c.write(0, &filled(1)).unwrap();
        assert_eq!(c.write(1, &filled(2)).unwrap_err().cause, IoError::Removed);
        assert!(d.is_dead());
        assert!(c.read(0, &mut filled(0)).is_err());
        d.revive();
        let mut b = filled(9);
        c.read(0, &mut b).unwrap();
        assert_eq!(b[0], 1);
        c.read(1, &mut b).unwrap();
        assert_eq!(b[0], 0, "what failed is not seen");
    }

    #[test]
    fn a_fault_strikes_its_operation_and_blocks_as_often_as_asked() {
        let d = FaultBdev::new("f", 4096, 8);
        let mut c = SyncChannel::open(&*d).unwrap();
        let mut b = AlignedBuf::zeroed(8192);
        d.inject(Fault {
            op: Some(Op::Read),
            lba: 2..3,
            skip: 1,
            count: 1,
            error: IoError::ReadMedium,
        });
        c.read(3, &mut b).unwrap();
        c.read(1, &mut b).unwrap();
        c.write(2, &b).unwrap();
        assert_eq!(c.read(1, &mut b).unwrap_err().cause, IoError::ReadMedium);
        c.read(1, &mut b).unwrap();
        d.inject(Fault::always(Op::Flush, IoError::Flush));
        assert_eq!(c.flush().unwrap_err().cause, IoError::Flush);
        d.clear_faults();
        let mut other = SyncChannel::open(&*d).unwrap();
        assert_eq!(other.flush().unwrap_err().cause, IoError::Flush, "it is latched for all");
        assert!(d.flush_latch().unwrap().clear().is_some());
        c.flush().unwrap();
    }

    #[test]
    fn deferred_completions_come_out_of_order() {
        let d = FaultBdev::new("f", 512, 8);
        d.defer(Some(3));
        let io = IoContext::new().unwrap();
        let mut c = d.open(&io).unwrap();
        for tag in 0..8 {
            let unmap =
                Io { op: Op::Unmap, fua: false, lba: tag, blocks: 1, sg: guestmem::Sg::EMPTY, tag };
            assert_eq!(c.submit(&unmap), Submit::Pending);
        }
        let mut done = Vec::with_capacity(8);
        while c.poll(&mut done) > 0 {}
        let mut tags: Vec<_> = done.iter().map(|c| c.tag).collect();
        assert!(!tags.is_sorted());
        tags.sort_unstable();
        assert_eq!(tags, [0, 1, 2, 3, 4, 5, 6, 7]);
        SyncChannel::open(&*d).unwrap().flush().unwrap();
    }

    #[test]
    fn behaves_as_a_byte_array() {
        for block in [512, 4096] {
            model::check(|blocks| FaultBdev::new("f", block, blocks));
        }
    }
}
