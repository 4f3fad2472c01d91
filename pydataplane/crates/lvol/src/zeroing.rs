//! Zeroing of the clusters that a thick volume is about to own.
//!
//! Reserving them is the metadata thread's, and so is handing them over; the zeros, which can take
//! tens of minutes, are written between the two by the control thread that wants the volume, beside
//! everything else that the lvstore does. Until the hand-over the clusters are nobody's on the medium:
//! a crash, a failure or a cancellation leaves no trace of the volume. A flush of the bdev that fails
//! meanwhile, whosever it is, may have lost zeros that were written before: that is a failure, also where
//! it was cleared since. After a failure or a
//! cancellation the bdev is told that it does not need what was written: the room under it is free
//! for others, also where the bdev is full.

use crate::disk::BdevDisk;
use crate::error::Error;
use crate::translate::not_written;
use bdev::{Bdev, FlushLatch};
use blobstore::{Disk, DiskError, Run};
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use uuid::Uuid;

/// Bytes zeroed between two looks at whether it was cancelled.
const STEP: u64 = 64 << 20;
/// Bytes zeroed between two flushes, so that nobody else's flush has much more than that to wait for.
const FLUSH_STEP: u64 = 1 << 30;

/// A volume of an lvstore that is being zeroed, to be created or to grow.
pub(crate) struct Zeroing {
    /// `LVSTORE/LVOL`.
    pub alias: String,
    /// Name in its lvstore.
    pub name: String,
    pub uuid: Uuid,
    /// Bytes.
    pub total: AtomicU64,
    pub done: AtomicU64,
    cancelled: AtomicBool,
    /// Whether zeros may still be written.
    writing: AtomicBool,
}

/// All of an lvstore.
#[derive(Default)]
pub(crate) struct Zeroings {
    all: Mutex<Vec<Arc<Zeroing>>>,
    /// One of them writes no more.
    written: Condvar,
}

/// One of them; it ends with this.
pub(crate) struct Guard<'a> {
    zeroings: &'a Zeroings,
    pub zeroing: Arc<Zeroing>,
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        let mut all = self.zeroings.all.lock();
        all.retain(|other| !Arc::ptr_eq(other, &self.zeroing));
        self.zeroings.written.notify_all();
    }
}

impl Zeroings {
    pub fn list(&self) -> Vec<Arc<Zeroing>> {
        self.all.lock().clone()
    }

    /// The one of that name, UUID or alias.
    pub fn find(&self, id: &str) -> Option<Arc<Zeroing>> {
        let uuid = Uuid::try_parse(id).ok();
        let all = self.all.lock();
        all.iter().find(|z| z.alias == id || z.name == id || Some(z.uuid) == uuid).cloned()
    }

    /// Begins one; the caller has looked that there is no other of that name or UUID.
    pub fn begin(&self, alias: String, name: String, uuid: Uuid) -> Guard<'_> {
        let zeroing = Arc::new(Zeroing {
            alias,
            name,
            uuid,
            total: AtomicU64::new(0),
            done: AtomicU64::new(0),
            cancelled: AtomicBool::new(false),
            writing: AtomicBool::new(true),
        });
        self.all.lock().push(zeroing.clone());
        Guard { zeroings: self, zeroing }
    }

    /// Cancels all and waits until none of them writes; `false`: one still does after that time.
    pub fn end(&self, timeout: Duration) -> bool {
        let mut all = self.all.lock();
        all.iter().for_each(|zeroing| zeroing.cancel());
        let writing = |all: &mut Vec<Arc<Zeroing>>| {
            all.iter().any(|zeroing| zeroing.writing.load(Ordering::Acquire))
        };
        !self.written.wait_while_for(&mut all, writing, timeout).timed_out()
    }
}

impl Zeroing {
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
    }

    /// Why another operation on the volume has to wait.
    pub fn underway(&self, op: &str) -> Error {
        Error::Underway {
            op: op.to_owned(),
            lvol: self.alias.clone(),
            done: self.done.load(Ordering::Relaxed),
            total: self.total.load(Ordering::Relaxed),
        }
    }
}

impl Guard<'_> {
    /// Zeroes `runs`, durably. The calling thread does it.
    pub fn write(
        &self,
        op: &str,
        base: &Arc<dyn Bdev>,
        cluster_size: u32,
        runs: &[Run],
    ) -> Result<(), Error> {
        let zeroed = self.zero(op, base, u64::from(cluster_size), runs);
        let _all = self.zeroings.all.lock();
        self.zeroing.writing.store(false, Ordering::Release);
        self.zeroings.written.notify_all();
        zeroed
    }

    fn zero(
        &self,
        op: &str,
        base: &Arc<dyn Bdev>,
        cluster: u64,
        runs: &[Run],
    ) -> Result<(), Error> {
        let total: u64 = runs.iter().map(|run| run.count * cluster).sum();
        self.zeroing.total.store(total, Ordering::Relaxed);
        if total == 0 {
            return Ok(());
        }
        let mut disk = BdevDisk::open(base)
            .map_err(|e| Error::Io { op: op.to_owned(), cause: e.to_string() })?;
        let failures = || base.flush_latch().map(FlushLatch::failures);
        let before = failures();
        let zeroed = self.fill(op, &mut disk, cluster, runs).and_then(|()| {
            if failures() == before {
                return Ok(());
            }
            let cause = format!("a flush of bdev {} failed while zeros were written", base.name());
            Err(Error::Io { op: op.to_owned(), cause })
        });
        if zeroed.is_err() {
            let begun = self.zeroing.done.load(Ordering::Relaxed) + STEP;
            give_back(op, &mut disk, cluster, runs, begun);
        }
        zeroed
    }

    fn fill(&self, op: &str, disk: &mut BdevDisk, cluster: u64, runs: &[Run]) -> Result<(), Error> {
        let failed = |e: DiskError| not_written(&e, op.to_owned());
        let mut unflushed = 0;
        for run in runs {
            let (mut at, end) = (run.first * cluster, (run.first + run.count) * cluster);
            while at < end {
                self.go_on(op)?;
                let piece = STEP.min(end - at);
                disk.write_zeroes(at, piece).map_err(failed)?;
                (at, unflushed) = (at + piece, unflushed + piece);
                self.zeroing.done.fetch_add(piece, Ordering::Relaxed);
                if unflushed >= FLUSH_STEP {
                    disk.flush().map_err(failed)?;
                    unflushed = 0;
                }
            }
        }
        self.go_on(op)?;
        disk.flush().map_err(failed)
    }

    fn go_on(&self, op: &str) -> Result<(), Error> {
        match self.zeroing.cancelled.load(Ordering::Acquire) {
            true => Err(Error::Cancelled { op: op.to_owned() }),
            false => Ok(()),
        }
    }
}

/// Tells the bdev that it does not need the first `begun` bytes of reserved clusters, some of which
/// were written.
fn give_back(op: &str, disk: &mut BdevDisk, cluster: u64, runs: &[Run], mut begun: u64) {
    for run in runs {
        let at = run.first * cluster;
        let (mut at, end) = (at, at + begun.min(run.count * cluster));
        begun -= end - at;
        while at < end {
            let piece = FLUSH_STEP.min(end - at);
            if let Err(e) = disk.unmap(at, piece) {
                // Only room: whoever gets the clusters zeroes them first.
                tracing::warn!("what was written to {op} could not be unmapped: {e}");
                return;
            }
            at += piece;
        }
    }
}
