//! From clusters of a volume to clusters of the device.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

/// Clusters that one chunk maps: 4 GiB of volume with the default cluster size, in one 16 KiB
/// allocation that is made when its first cluster is allocated.
const CHUNK: usize = 4096;

type Chunk = [AtomicU32; CHUNK];

/// The device's cluster of each cluster of a volume, 0 where none is allocated. Only the
/// metadata thread changes entries; any thread reads them, without a lock. The size is fixed: a
/// resize makes a new map that shares the chunks.
pub(crate) struct Map {
    clusters: u64,
    chunks: Box<[OnceLock<Arc<Chunk>>]>,
}

impl Map {
    /// A map of `clusters` unallocated clusters.
    pub fn new(clusters: u64) -> Self {
        let chunks = clusters.div_ceil(CHUNK as u64);
        Map { clusters, chunks: (0..chunks).map(|_| OnceLock::new()).collect() }
    }

    /// A map of another size. The common chunks are the same ones; entries past the smaller size
    /// must be 0 already.
    pub fn resized(&self, clusters: u64) -> Self {
        let new = Map::new(clusters);
        for (to, from) in new.chunks.iter().zip(&self.chunks) {
            if let Some(chunk) = from.get() {
                let _ = to.set(chunk.clone());
            }
        }
        new
    }

    /// Size in clusters.
    #[inline]
    pub fn clusters(&self) -> u64 {
        self.clusters
    }

    /// The device's cluster, or 0. `cluster` is less than the size.
    #[inline]
    pub fn get(&self, cluster: u64) -> u32 {
        let at = cluster as usize;
        match self.chunks.get(at / CHUNK).and_then(OnceLock::get) {
            Some(chunk) => chunk[at % CHUNK].load(Ordering::Acquire),
            None => 0,
        }
    }

    /// Sets an entry. Only for the metadata thread.
    pub fn set(&self, cluster: u64, to: u32) {
        assert!(cluster < self.clusters, "cluster {cluster} of {}", self.clusters);
        let at = cluster as usize;
        let chunk = self.chunks[at / CHUNK]
            .get_or_init(|| Arc::new(std::array::from_fn(|_| AtomicU32::new(0))));
        chunk[at % CHUNK].store(to, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resized_map_shares_what_is_common() {
        let a = Map::new(CHUNK as u64 + 5);
        a.set(3, 33);
        a.set(CHUNK as u64 + 4, 44);
        let b = a.resized(3 * CHUNK as u64);
        assert_eq!((b.get(3), b.get(CHUNK as u64 + 4), b.get(2 * CHUNK as u64)), (33, 44, 0));
        b.set(4, 55);
        assert_eq!(a.get(4), 55, "the chunk is shared");
        let c = b.resized(4);
        assert_eq!((c.clusters(), c.get(3)), (4, 33));
        assert_eq!(Map::new(0).clusters(), 0);
    }
}
