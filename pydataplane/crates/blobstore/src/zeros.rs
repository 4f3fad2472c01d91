//! Which free clusters are known to read as zeros: who gets one has none written to it.
//!
//! In memory only, and bounded by a bit for each cluster. What is known comes from the disk
//! ([`Disk::zeros_at`]: after creation, at load and growth, of clusters that nobody writes to) and from what the store itself unmapped
//! ([`Store::discard`]) or zeroed ([`Store::wipe`]). It ends when the cluster is taken, whatever for: a
//! cluster that comes back is known only after it was discarded.
//!
//! It stands on what zeros that were just written stand on: the cluster reads as zeros now, and does so
//! after a power cut when the disk was flushed, which is done before a record becomes final. After a
//! failed flush nothing is known of what was not durable, so nothing of all this counts any more.

use crate::bitmap::{Bitmap, Run};
use crate::disk::{Disk, DiskError};
use crate::store::Store;
use std::time::{Duration, Instant};

/// Words of a chunk, of 64 clusters each.
const WORDS: usize = 64;
/// Clusters of a chunk.
const CLUSTERS: u64 = WORDS as u64 * 64;
/// How long a disk is asked: when a store is created, and when somebody waits for it to be loaded or to grow.
const ASK_CREATED: Duration = Duration::from_secs(2);
const ASK_IN_USE: Duration = Duration::from_millis(100);

/// Bits of some clusters. Where all are alike, as in an empty and in a full store, they take no room.
enum Chunk {
    None,
    All,
    Some(Box<[u64; WORDS]>),
}

/// Clusters that are known to read as zeros; bit 0 is the first data cluster.
#[derive(Default)]
pub(crate) struct Zeros {
    chunks: Vec<Chunk>,
    /// How many flushes of the disk had failed when this was known.
    failures: u64,
}

impl Zeros {
    pub fn get(&self, bit: u64) -> bool {
        match self.chunks.get((bit / CLUSTERS) as usize) {
            None | Some(Chunk::None) => false,
            Some(Chunk::All) => true,
            Some(Chunk::Some(words)) => {
                words[(bit % CLUSTERS / 64) as usize] >> (bit % 64) & 1 == 1
            }
        }
    }

    /// Whether a cluster is known, and is not any more.
    pub fn take(&mut self, bit: u64) -> bool {
        if !self.get(bit) {
            return false;
        }
        let chunk = &mut self.chunks[(bit / CLUSTERS) as usize];
        if let Chunk::All = chunk {
            *chunk = Chunk::Some(Box::new([u64::MAX; WORDS]));
        }
        if let Chunk::Some(words) = chunk {
            words[(bit % CLUSTERS / 64) as usize] &= !(1 << (bit % 64));
            if words.iter().all(|word| *word == 0) {
                *chunk = Chunk::None;
            }
        }
        true
    }

    /// Forgets what was known when another number of flushes had failed.
    pub fn check(&mut self, failures: u64) {
        if self.failures != failures {
            *self = Zeros { chunks: Vec::new(), failures };
        }
    }

    /// Knows the clusters from `first` to before `end`, but for those that `used` has.
    fn add(&mut self, first: u64, end: u64, used: Option<&Bitmap>) {
        let mut at = first;
        while at < end {
            let word = at / 64;
            let next = ((word + 1) * 64).min(end);
            let mask = (u64::MAX >> (64 - (next - at))) << (at % 64);
            let used = used.map_or(0, |used| used.word(word as usize));
            self.add_word(word, mask & !used);
            at = next;
        }
    }

    fn add_word(&mut self, word: u64, mask: u64) {
        let (chunk, word) = ((word / WORDS as u64) as usize, (word % WORDS as u64) as usize);
        if mask == 0 {
            return;
        }
        if self.chunks.len() <= chunk {
            self.chunks.resize_with(chunk + 1, || Chunk::None);
        }
        let chunk = &mut self.chunks[chunk];
        if let Chunk::None = chunk {
            *chunk = Chunk::Some(Box::new([0; WORDS]));
        }
        if let Chunk::Some(words) = chunk {
            words[word] |= mask;
            if words[word] == u64::MAX && words.iter().all(|word| *word == u64::MAX) {
                *chunk = Chunk::All;
            }
        }
    }
}

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
        if !self.zeros.chunks.is_empty() {
            let first = run.first - self.sb.first_data_cluster;
            (first..first + run.count).for_each(|bit| _ = self.zeros.take(bit));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const BITS: u64 = 3 * CLUSTERS - 100;

    proptest! {
        /// As a set of numbers, also where chunks are full or empty.
        #[test]
        fn what_is_known_is_what_was_added_and_not_taken(
            steps in prop::collection::vec((any::<bool>(), 0..BITS, 1..2 * CLUSTERS), 1..12),
            taken in prop::collection::btree_set(0..BITS, 0..40),
        ) {
            let mut used = Bitmap::new(BITS);
            taken.iter().for_each(|bit| _ = used.set(*bit));
            let (mut zeros, mut model) = (Zeros::default(), BTreeSet::new());
            for (adds, first, count) in steps {
                let end = (first + count).min(BITS);
                if adds {
                    zeros.add(first, end, Some(&used));
                    model.extend((first..end).filter(|bit| !used.get(*bit)));
                } else {
                    (first..end).for_each(|bit| assert_eq!(zeros.take(bit), model.remove(&bit)));
                }
            }
            prop_assert!((0..BITS + 99).all(|bit| zeros.get(bit) == model.contains(&bit)));
            zeros.check(1);
            prop_assert!(!(0..BITS).any(|bit| zeros.get(bit)));
        }
    }

    #[test]
    fn where_all_clusters_are_alike_they_take_no_room() {
        let mut zeros = Zeros::default();
        zeros.add(0, 2 * CLUSTERS, None);
        assert!(zeros.chunks.iter().all(|chunk| matches!(chunk, Chunk::All)));
        (0..CLUSTERS).for_each(|bit| assert!(zeros.take(bit)));
        assert!(matches!(zeros.chunks[..], [Chunk::None, Chunk::All]));
    }
}
