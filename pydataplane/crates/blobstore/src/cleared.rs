//! How free clusters come to be known as zeros: who gets one has none written to it.
//!
//! In memory only, and bounded by a bit for each cluster. What is known comes from the disk
//! ([`Disk::zeros_at`]: after creation, at load and growth, of clusters that nobody writes to) and from what the store itself unmapped
//! ([`Store::discard`]) or zeroed ([`Store::wipe`]). It ends when the cluster is taken, whatever for: a
//! cluster that comes back is known only after it was discarded.
//!
//! It stands on what zeros that were just written stand on: the cluster reads as zeros now, and does so
//! after a power cut when the disk was flushed, which is done before a record becomes final. After a
//! failed flush nothing is known of what was not durable, so nothing of all this counts any more.

use crate::bitmap::Run;
use crate::disk::{Disk, DiskError};
use crate::store::Store;
use std::time::{Duration, Instant};

/// How long a disk is asked: when a store is created, and when somebody waits for it to be loaded or to grow.
const ASK_CREATED: Duration = Duration::from_secs(2);
const ASK_IN_USE: Duration = Duration::from_millis(100);

impl<D: Disk> Store<D> {
    /// Whether a free cluster is known to read as zeros.
    pub fn is_known_zero(&self, cluster: u32) -> bool {
        let bit = u64::from(cluster).checked_sub(self.sb.first_data_cluster);
        self.disk.failed_flushes() == self.zeros.failures
            && bit.is_some_and(|bit| self.zeros.get(bit))
    }

    /// Asks the disk of a store that was just created which clusters read as zeros.
    pub fn learn_zeros(&mut self) {
        self.learn_within(0, ASK_CREATED);
    }

    /// Asks the disk about the free clusters from the data area's cluster `from` on.
    pub(crate) fn learn_zeros_from(&mut self, from: u64) {
        self.learn_within(from, ASK_IN_USE);
    }

    fn learn_within(&mut self, from: u64, time: Duration) {
        let failures = self.disk.failed_flushes();
        if failures != 0 {
            return;
        }
        let (size, first) = (u64::from(self.sb.cluster_size), self.sb.first_data_cluster);
        let until = Instant::now() + time;
        let (mut at, mut any) = (from, false);
        while let Some(free) = self.clusters.next_free(at) {
            let offset = (first + free) * size;
            let Some((zeros, len)) = self.disk.zeros_at(offset).filter(|(_, len)| *len > 0) else {
                break;
            };
            // Whole clusters that are zeros; of one that is so in part nothing is known.
            let whole = if zeros { len / size } else { 0 };
            let end = (free + whole).min(self.clusters.len());
            self.zeros.add(free, end, Some(&self.clusters));
            any |= end > free;
            at = (free + len / size).max(end).max(free + 1);
            if Instant::now() >= until {
                break;
            }
        }
        self.unflushed |= any;
        self.zeros.check(self.disk.failed_flushes());
    }

    /// Tells the disk that clusters are not needed which no blob has, and which are free or are released
    /// next; those that others have as well are left as they are. If what the disk unmaps reads as zeros, they are known to.
    ///
    /// # Errors
    /// The disk's; then nothing is known of them.
    pub fn discard(&mut self, run: Run) -> Result<(), DiskError> {
        for run in self.alone(run) {
            self.discard_all(run)?;
        }
        Ok(())
    }

    fn discard_all(&mut self, run: Run) -> Result<(), DiskError> {
        let (size, failures) = (u64::from(self.sb.cluster_size), self.disk.failed_flushes());
        self.forget_zeros(run);
        self.disk.unmap(run.first * size, run.count * size)?;
        if self.disk.unmap_zeroes() {
            self.unflushed = true;
            self.know_zeros(run, failures);
        }
        Ok(())
    }

    /// Zeroes clusters which no blob has; they are known to be then.
    ///
    /// # Errors
    /// The disk's; then nothing is known of them.
    pub fn wipe(&mut self, run: Run) -> Result<(), DiskError> {
        let (size, failures) = (u64::from(self.sb.cluster_size), self.disk.failed_flushes());
        self.forget_zeros(run);
        self.unflushed = true;
        self.disk.write_zeroes(run.first * size, run.count * size)?;
        self.know_zeros(run, failures);
        Ok(())
    }

    /// `failures`: how many flushes had failed before they were made zeros.
    fn know_zeros(&mut self, run: Run, failures: u64) {
        if self.disk.failed_flushes() == failures {
            self.zeros.check(failures);
            let first = run.first - self.sb.first_data_cluster;
            self.zeros.add(first, first + run.count, None);
        }
    }

    /// Clusters that somebody is about to write to, or may be.
    pub(crate) fn forget_zeros(&mut self, run: Run) {
        if !self.zeros.is_empty() {
            let first = run.first - self.sb.first_data_cluster;
            (first..first + run.count).for_each(|bit| _ = self.zeros.take(bit));
        }
    }
}
