//! A device with a volatile and a durable half, and what may go wrong with it.

use super::model::{EXTERNAL, external_word};
use blobstore::{Disk, DiskError};
use std::cell::{RefCell, RefMut};
use std::rc::Rc;
use uuid::Uuid;

/// Bytes of a sector: what a power cut leaves whole.
pub const SECTOR: usize = 512;
/// Bytes of a page.
pub const PAGE: usize = 4096;

/// A reproducible source of chance (xorshift64*).
#[derive(Clone)]
pub struct Rng(u64);

impl Rng {
    /// The source that `seed` names.
    pub fn new(seed: u64) -> Self {
        Rng(seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }
    /// The next number.
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
    /// A number below `n`, which may be 0 for 0.
    pub fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 11) % n.max(1)
    }
    /// True once in `n`.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
    /// One of `all`.
    pub fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize]
    }
}

/// Contents of a device; a copy shares what neither changes.
#[derive(Clone)]
pub struct Image(Vec<Rc<[u8; PAGE]>>);

impl Image {
    /// `size` bytes of what somebody else left.
    pub fn foreign(size: u64) -> Self {
        Image(std::iter::repeat_n(Rc::new([0xa5; PAGE]), size as usize / PAGE).collect())
    }

    /// Has room for `size` bytes; what is new is somebody else's.
    fn extend(&mut self, size: u64) {
        let pages = (size as usize / PAGE).max(self.0.len());
        self.0.resize(pages, Rc::new([0xa5; PAGE]));
    }

    /// One page.
    pub fn page(&self, page: usize) -> &[u8; PAGE] {
        &self.0[page]
    }

    /// One page, to change it.
    pub fn page_mut(&mut self, page: usize) -> &mut [u8; PAGE] {
        Rc::make_mut(&mut self.0[page])
    }

    fn read(&self, offset: u64, buf: &mut [u8]) {
        let mut done = 0;
        while done < buf.len() {
            let at = offset as usize + done;
            let n = (PAGE - at % PAGE).min(buf.len() - done);
            buf[done..done + n].copy_from_slice(&self.0[at / PAGE][at % PAGE..at % PAGE + n]);
            done += n;
        }
    }

    /// Writes those sectors of `write` that `which` says, by their number in it.
    pub fn apply(&mut self, write: &Write, mut which: impl FnMut(usize) -> bool) {
        let mut done = 0;
        while done < write.len {
            let at = write.offset as usize + done;
            let n = (SECTOR - at % SECTOR).min(write.len - done);
            if which(done.div_ceil(SECTOR)) {
                let to = &mut Rc::make_mut(&mut self.0[at / PAGE])[at % PAGE..at % PAGE + n];
                match &write.data {
                    Some(data) => to.copy_from_slice(&data[done..done + n]),
                    None => to.fill(0),
                }
            }
            done += n;
        }
    }
}

/// A write that was not flushed.
#[derive(Clone)]
pub struct Write {
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub len: usize,
    /// What was written; `None`: zeros.
    data: Option<Rc<Vec<u8>>>,
}

impl Write {
    /// Sectors that it touches.
    pub fn sectors(&self) -> usize {
        self.len.div_ceil(SECTOR)
    }
}

/// What a device is at one instant.
#[derive(Clone)]
pub struct Instant {
    size: u64,
    durable_size: u64,
    /// What is read.
    now: Image,
    /// What is surely on the medium.
    pub durable: Image,
    /// What came since, oldest first.
    pub pending: Vec<Write>,
    /// The last write into the journal, and the last one that was flushed: first byte and bytes.
    records: [(u64, usize); 2],
    /// Counts the power cuts, from 1 on.
    boot: u128,
    /// A flush failed since the last of them.
    flush_failed: bool,
    /// What it says of zeros.
    pub zeros: Zeros,
}

/// What a device says of zeros.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Zeros {
    /// What is unmapped reads as zeros; else as anything.
    pub unmapped: bool,
    /// It knows where it has nothing but zeros, as far as that is read now.
    pub told: bool,
}

/// How much of what was not flushed a power cut leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// Nothing.
    Nothing,
    /// All of it.
    All,
    /// Each sector with so many chances in 8.
    Sectors(u64),
    /// Each write wholly or not, in any order.
    Writes,
    /// The first ones, the last of them torn.
    Torn,
    /// All but one sector.
    ButOne,
}

/// All ways.
pub const WAYS: [Left; 8] = [
    Left::Nothing,
    Left::All,
    Left::Sectors(4),
    Left::Sectors(1),
    Left::Sectors(7),
    Left::Writes,
    Left::Torn,
    Left::ButOne,
];

impl Instant {
    /// A device that holds `image`, durably.
    pub fn of(image: Image, size: u64) -> Self {
        let (now, durable) = (image.clone(), image);
        let (pending, records, boot) = (vec![], [(0, 0); 2], 1);
        let (durable_size, flush_failed, zeros) = (size, false, Zeros::default());
        Instant { size, durable_size, now, durable, pending, records, boot, flush_failed, zeros }
    }

    /// What the device is after the power was cut and is there again.
    pub fn after_power_cut(&self, left: Left, rng: &mut Rng) -> Instant {
        let mut image = self.durable.clone();
        let mut writes: Vec<&Write> = self.pending.iter().collect();
        let total: usize = writes.iter().map(|w| w.sectors()).sum();
        match left {
            Left::Nothing => {}
            Left::All => writes.iter().for_each(|w| image.apply(w, |_| true)),
            Left::Sectors(chance) => {
                writes.iter().for_each(|w| image.apply(w, |_| rng.below(8) < chance));
            }
            Left::Writes => {
                for i in (1..writes.len()).rev() {
                    writes.swap(i, rng.below(i as u64 + 1) as usize);
                }
                for write in writes {
                    let kept = rng.below(2) == 0;
                    image.apply(write, |_| kept);
                }
            }
            Left::Torn => {
                let mut left = rng.below(total as u64 + 1) as usize;
                for write in writes {
                    image.apply(write, |sector| sector < left);
                    left = left.saturating_sub(write.sectors());
                }
            }
            Left::ButOne => {
                let mut lost = rng.below(total as u64) as usize;
                for write in writes {
                    image.apply(write, |sector| sector != lost);
                    lost = lost.wrapping_sub(write.sectors());
                }
            }
        }
        let size = if left == Left::All { self.size } else { self.durable_size };
        let (records, boot, zeros) = (self.records, self.boot + 1, self.zeros);
        Instant { records, boot, zeros, ..Instant::of(image, size) }
    }

    /// The page's bytes at present, and the damaged ones: `change` of it.
    pub fn rot(&mut self, page: usize, change: impl Fn(&mut [u8; PAGE])) {
        change(self.now.page_mut(page));
        let now = *self.now.page(page);
        *self.durable.page_mut(page) = now;
    }

    /// What is read from a page.
    pub fn page(&self, page: usize) -> &[u8; PAGE] {
        self.now.page(page)
    }

    /// Whether a page is of the last record that the medium has, or may have.
    pub fn is_last_record(&self, page: usize) -> bool {
        let at = (page * PAGE) as u64;
        self.records.iter().any(|(offset, len)| (*offset..offset + *len as u64).contains(&at))
    }

    /// The caches drop what is not on the medium and is not to be written there any more.
    pub fn evict(&mut self) {
        self.now = self.durable.clone();
        for write in &self.pending {
            self.now.apply(write, |_| true);
        }
    }

    /// Bytes of the device.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Has nothing but zeros from byte `offset` on, as a new file.
    pub fn empty(&mut self, offset: u64) {
        for page in offset as usize / PAGE..self.now.0.len() {
            self.rot(page, |bytes| bytes.fill(0));
        }
    }

    /// Whether these bytes are zeros as they are read, and on the medium after a flush.
    pub fn is_zero(&self, offset: u64, len: u64) -> [bool; 2] {
        let mut flushed = self.durable.clone();
        self.pending.iter().for_each(|write| flushed.apply(write, |_| true));
        [&self.now, &flushed].map(|image| {
            let mut pages = offset as usize / PAGE..(offset + len) as usize / PAGE;
            pages.all(|page| *image.0[page] == [0; PAGE])
        })
    }
}

/// What a failed flush does with what was dirty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failed {
    /// It stays dirty.
    Kept,
    /// It can be read, but is not dirty any more: it is lost at a power cut.
    LostReadable,
    /// It is lost, and what is on the medium is read.
    Lost,
    /// A part of it is on the medium, the rest can be read but is lost at a power cut.
    Half,
}

/// An access that fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A read fails.
    Read,
    /// A write fails, of which a part may be done.
    Write,
    /// As [`Fault::Write`], for want of room.
    NoSpace,
    /// A flush fails.
    Flush(Failed),
    /// A write of metadata goes to another page.
    Misdirected,
    /// A write of metadata is acknowledged, and goes nowhere.
    Lost,
}

impl Fault {
    /// Whether the device says that all is well.
    pub fn is_silent(self) -> bool {
        matches!(self, Fault::Misdirected | Fault::Lost)
    }
}

/// Which accesses fail.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// How.
    pub fault: Fault,
    /// Such accesses that are done first.
    pub after: u64,
    /// Such accesses that fail then.
    pub times: u64,
}

struct Inner {
    at: Instant,
    plan: Option<Plan>,
    /// Instants after each write and flush, while they are wanted.
    seen: Option<Vec<Instant>>,
    rng: Rng,
    /// Bytes before the data clusters, and those of the journal.
    metadata: u64,
    journal: std::ops::Range<u64>,
    /// Accesses that failed, went astray or were lost.
    faults: u64,
    /// Flushes that failed.
    failed_flushes: u64,
}

/// A device; a copy is the same device.
#[derive(Clone)]
pub struct Device(Rc<RefCell<Inner>>);

impl Device {
    /// A device that is `at`; its metadata ends at byte `metadata`, and has the journal there.
    pub fn new(at: Instant, metadata: u64, journal: std::ops::Range<u64>, rng: Rng) -> Self {
        let (plan, seen, faults, failed_flushes) = (None, None, 0, 0);
        let inner = Inner { at, plan, seen, rng, metadata, journal, faults, failed_flushes };
        Device(Rc::new(RefCell::new(inner)))
    }

    fn inner(&self) -> RefMut<'_, Inner> {
        self.0.borrow_mut()
    }

    /// What the device is now.
    pub fn instant(&self) -> Instant {
        self.inner().at.clone()
    }

    /// Makes the device another.
    pub fn set(&self, at: Instant) {
        self.inner().at = at;
    }

    /// Changes what the device is.
    pub fn change(&self, f: impl FnOnce(&mut Instant)) {
        f(&mut self.inner().at);
    }

    /// Makes accesses fail; `None`: the device is mended.
    pub fn plan(&self, plan: Option<Plan>) {
        self.inner().plan = plan;
    }

    /// Accesses that failed, went astray or were lost so far.
    pub fn faults(&self) -> u64 {
        self.inner().faults
    }

    /// Somebody has looked into the flushes that failed.
    pub fn forget_failed_flushes(&self) {
        self.inner().failed_flushes = 0;
    }

    /// Begins to write down what the device is after each write and flush.
    pub fn watch(&self) {
        self.inner().seen = Some(Vec::new());
    }

    /// What was seen since [`Device::watch`].
    pub fn seen(&self) -> Vec<Instant> {
        self.inner().seen.take().unwrap_or_default()
    }

    /// The device gains room; durably with the next flush.
    pub fn gain(&self, bytes: u64) {
        let at = &mut self.inner().at;
        at.size += bytes;
        let size = at.size;
        let before = at.now.0.len();
        at.now.extend(size);
        at.durable.extend(size);
        if at.zeros.told {
            at.empty((before * PAGE) as u64);
        }
    }
}

impl Inner {
    fn fails(&mut self, kind: impl Fn(Fault) -> bool) -> Option<Fault> {
        let plan = self.plan.as_mut().filter(|plan| kind(plan.fault) && plan.times > 0)?;
        if plan.after > 0 {
            plan.after -= 1;
            return None;
        }
        plan.times = plan.times.saturating_sub(1);
        self.faults += 1;
        Some(plan.fault)
    }

    fn put(&mut self, mut write: Write) -> Result<(), DiskError> {
        let (offset, len) = (write.offset, write.len as u64);
        assert!(offset + len <= self.at.size, "write of {len} bytes at byte {offset}");
        let metadata = offset + len <= self.metadata;
        let fault = self.fails(|fault| match fault {
            Fault::Write | Fault::NoSpace => true,
            silent => silent.is_silent() && metadata,
        });
        if let Some(Fault::Write | Fault::NoSpace) = fault {
            let kept = self.rng.below(write.sectors() as u64 + 1) as usize;
            write.len = write.len.min(kept * SECTOR);
        }
        if self.journal.contains(&offset) {
            self.at.records[0] = (offset, write.len);
        }
        if fault == Some(Fault::Misdirected) {
            let pages = (self.metadata - len) / PAGE as u64 + 1;
            let elsewhere = self.rng.below(pages) * PAGE as u64;
            write.offset = if elsewhere == offset { offset ^ PAGE as u64 } else { elsewhere };
        }
        if fault == Some(Fault::Lost) {
            write.len = 0;
        }
        self.at.now.apply(&write, |_| true);
        if write.len > 0 {
            self.at.pending.push(write);
        }
        self.note();
        match fault {
            Some(Fault::Write) => Err(error("write", offset, len, false)),
            Some(Fault::NoSpace) => Err(error("write", offset, len, true)),
            _ => Ok(()),
        }
    }

    fn flush(&mut self) -> Result<(), DiskError> {
        let fault = self.fails(|fault| matches!(fault, Fault::Flush(_)));
        self.failed_flushes += u64::from(fault.is_some());
        self.at.flush_failed |= fault.is_some();
        match fault {
            Some(Fault::Flush(Failed::Kept)) => {}
            Some(Fault::Flush(Failed::LostReadable)) => self.at.pending.clear(),
            Some(Fault::Flush(Failed::Lost)) => {
                self.at.pending.clear();
                self.at.now = self.at.durable.clone();
            }
            Some(Fault::Flush(Failed::Half)) => {
                for write in std::mem::take(&mut self.at.pending) {
                    self.at.durable.apply(&write, |_| self.rng.below(2) == 0);
                }
            }
            _ => {
                for write in std::mem::take(&mut self.at.pending) {
                    self.at.durable.apply(&write, |_| true);
                }
                self.at.durable_size = self.at.size;
                self.at.records[1] = self.at.records[0];
            }
        }
        self.note();
        fault.map_or(Ok(()), |_| Err(error("flush", 0, 0, false)))
    }

    fn note(&mut self) {
        if let Some(seen) = &mut self.seen {
            seen.push(self.at.clone());
        }
    }
}

fn error(op: &'static str, offset: u64, len: u64, no_space: bool) -> DiskError {
    let cause = if no_space { "No space left on device" } else { "Input/output error" }.to_owned();
    DiskError { op, offset, len, cause, no_space }
}

impl Disk for Device {
    fn size(&self) -> u64 {
        self.inner().at.size
    }

    fn read(&mut self, offset: u64, buf: &mut [u8]) -> Result<(), DiskError> {
        let mut inner = self.inner();
        let len = buf.len() as u64;
        assert!(offset + len <= inner.at.size, "read of {len} bytes at byte {offset}");
        if inner.fails(|fault| fault == Fault::Read).is_some() {
            return Err(error("read", offset, len, false));
        }
        inner.at.now.read(offset, buf);
        Ok(())
    }

    /// What is outside of the store fails to be read as the device does.
    fn read_external(
        &mut self,
        parent: Uuid,
        offset: u64,
        buf: &mut [u8],
    ) -> Result<(), DiskError> {
        assert_eq!(parent, EXTERNAL);
        if self.inner().fails(|fault| fault == Fault::Read).is_some() {
            return Err(error("read", offset, buf.len() as u64, false));
        }
        let first = offset / SECTOR as u64;
        for (sector, bytes) in (first..).zip(buf.chunks_exact_mut(SECTOR)) {
            bytes.copy_from_slice(&external_word(sector).to_le_bytes().repeat(SECTOR / 8));
        }
        Ok(())
    }

    fn write(&mut self, offset: u64, buf: &[u8]) -> Result<(), DiskError> {
        let data = Some(Rc::new(buf.to_vec()));
        self.inner().put(Write { offset, len: buf.len(), data })
    }

    fn write_zeroes(&mut self, offset: u64, len: u64) -> Result<(), DiskError> {
        self.inner().put(Write { offset, len: len as usize, data: None })
    }

    fn unmap(&mut self, offset: u64, len: u64) -> Result<(), DiskError> {
        let mut inner = self.inner();
        let left = match inner.at.zeros.unmapped {
            true => None,
            false => Some(Rc::new(vec![0x5a; len as usize])),
        };
        inner.put(Write { offset, len: len as usize, data: left })
    }

    fn unmap_zeroes(&self) -> bool {
        self.inner().at.zeros.unmapped
    }

    fn zeros_at(&mut self, offset: u64) -> Option<(bool, u64)> {
        let inner = self.inner();
        if !inner.at.zeros.told || inner.at.flush_failed {
            return None;
        }
        let all = &inner.at.now.0[offset as usize / PAGE..inner.at.size as usize / PAGE];
        let zeros = |page: &Rc<[u8; PAGE]>| **page == [0; PAGE];
        let is = all.first().is_some_and(zeros);
        let run = all.iter().take_while(|page| zeros(page) == is).count();
        Some((is, (run * PAGE) as u64))
    }

    fn flush(&mut self) -> Result<(), DiskError> {
        self.inner().flush()
    }

    fn boot(&self) -> Option<u128> {
        Some(self.inner().at.boot)
    }

    fn failed_flushes(&self) -> u64 {
        self.inner().failed_flushes
    }
}
