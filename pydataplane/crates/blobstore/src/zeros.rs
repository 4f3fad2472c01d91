//! Which free clusters are known to read as zeros, in memory only: a bit for each cluster at most.

use crate::bitmap::Bitmap;

/// Words of a chunk, of 64 clusters each.
const WORDS: usize = 64;
/// Clusters of a chunk.
const CLUSTERS: u64 = WORDS as u64 * 64;

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
    pub failures: u64,
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

    /// Whether none is known.
    pub fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// Forgets what was known when another number of flushes had failed.
    pub fn check(&mut self, failures: u64) {
        if self.failures != failures {
            *self = Zeros { chunks: Vec::new(), failures };
        }
    }

    /// Knows the clusters from `first` to before `end`, but for those that `used` has.
    pub fn add(&mut self, first: u64, end: u64, used: Option<&Bitmap>) {
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
