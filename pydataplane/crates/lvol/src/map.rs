//! From clusters of a volume to clusters of the device.

use crate::external::External;
use blobstore::HOLE;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use uuid::Uuid;

/// Clusters that one chunk maps: 256 MiB of volume with clusters of 64 KiB, in one allocation of 16 KiB
/// that is made when its first cluster is allocated.
const CHUNK: usize = 4096;

/// Chunks in the process.
static CHUNKS: AtomicU64 = AtomicU64::new(0);

/// Bytes that the maps of all lvstores have in memory.
pub(crate) fn in_memory() -> u64 {
    CHUNKS.load(Ordering::Relaxed) * size_of::<Chunk>() as u64
}

struct Chunk([AtomicU32; CHUNK]);

impl Chunk {
    fn new(entry: impl FnMut(usize) -> AtomicU32) -> Arc<Self> {
        CHUNKS.fetch_add(1, Ordering::Relaxed);
        Arc::new(Chunk(std::array::from_fn(entry)))
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        CHUNKS.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The device's cluster of each cluster of a volume, 0 where none is allocated, or [`HOLE`]. Only the
/// metadata thread changes entries; any thread reads them, without a lock. The size is fixed: a
/// resize makes a new map that shares the chunks. One that is away says nothing: who meets it has the
/// metadata thread read it.
pub(crate) struct Map {
    clusters: u64,
    away: bool,
    chunks: Box<[OnceLock<Arc<Chunk>>]>,
}

impl Map {
    /// A map of `clusters` unallocated clusters.
    pub fn new(clusters: u64) -> Self {
        let chunks = clusters.div_ceil(CHUNK as u64);
        Map { clusters, away: false, chunks: (0..chunks).map(|_| OnceLock::new()).collect() }
    }

    /// A map of that size that is not in memory. What is set in it is forgotten.
    pub fn away(clusters: u64) -> Self {
        Map { clusters, away: true, chunks: Box::default() }
    }

    /// Whether it says nothing.
    #[inline]
    pub fn is_away(&self) -> bool {
        self.away
    }

    /// A map of another size. The common chunks are the same ones; entries past the smaller size
    /// must be 0 already.
    pub fn resized(&self, clusters: u64) -> Self {
        if self.away {
            return Map::away(clusters);
        }
        let new = Map::new(clusters);
        for (to, from) in new.chunks.iter().zip(&self.chunks) {
            if let Some(chunk) = from.get() {
                let _ = to.set(chunk.clone());
            }
        }
        new
    }

    /// A map of another size that has the entries before `end`, and shares no chunk.
    fn copied(&self, clusters: u64, end: u64) -> Self {
        let new = Map::new(clusters);
        let end = end.min(clusters).min(self.clusters);
        for (n, (to, from)) in new.chunks.iter().zip(&self.chunks).enumerate() {
            let first = (n * CHUNK) as u64;
            if let Some(from) = from.get()
                && first < end
            {
                let entry = |i: usize| match first + (i as u64) < end {
                    true => from.0[i].load(Ordering::Acquire),
                    false => 0,
                };
                let _ = to.set(Chunk::new(|i| AtomicU32::new(entry(i))));
            }
        }
        new
    }

    /// A map of the same size that shares all chunks but those of the clusters named: these can be changed while the
    /// map is used.
    fn apart(&self, clusters: impl Iterator<Item = u64>) -> Self {
        let new = Map::new(self.clusters);
        for cluster in clusters {
            let n = cluster as usize / CHUNK;
            new.chunks[n].get_or_init(|| match self.chunks[n].get() {
                Some(from) => Chunk::new(|i| AtomicU32::new(from.0[i].load(Ordering::Acquire))),
                None => Chunk::new(|_| AtomicU32::new(0)),
            });
        }
        for (to, from) in new.chunks.iter().zip(&self.chunks) {
            if let (None, Some(chunk)) = (to.get(), from.get()) {
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

    /// The device's cluster, 0 or [`HOLE`]. `cluster` is less than the size.
    #[inline]
    pub fn get(&self, cluster: u64) -> u32 {
        let at = cluster as usize;
        match self.chunks.get(at / CHUNK).and_then(OnceLock::get) {
            Some(chunk) => chunk.0[at % CHUNK].load(Ordering::Acquire),
            None => 0,
        }
    }

    /// Sets an entry. Only for the metadata thread.
    pub fn set(&self, cluster: u64, to: u32) {
        assert!(cluster < self.clusters, "cluster {cluster} of {}", self.clusters);
        if self.away {
            return;
        }
        let at = cluster as usize;
        let chunk = self.chunks[at / CHUNK].get_or_init(|| Chunk::new(|_| AtomicU32::new(0)));
        chunk.0[at % CHUNK].store(to, Ordering::Release);
    }
}

/// What a volume reads: its own clusters, and where it has nothing those of the snapshot below it,
/// whatever the depth of the chain.
#[derive(Clone)]
pub(crate) struct View {
    pub own: Arc<Map>,
    /// What the parent shows, and in which clusters: those before this one.
    pub shown: Option<(Arc<Map>, u64)>,
    /// The bdev that lies below all of that, and shows in clusters before this one that nobody has.
    pub external: Option<(Arc<External>, u64)>,
    /// The volume has, or had, clusters that have other owners, too. They are not in `own`, so that who writes to
    /// one gets another first, but in `shown`, which is no other volume's then.
    pub shares: bool,
}

/// What stands for a cluster of a view: in its own map, and below that.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub cluster: u64,
    pub own: u32,
    pub shown: u32,
}

impl Entry {
    /// Of a cluster of the device that has other owners, too, or of 0 or [`HOLE`].
    pub fn shared(cluster: u64, to: u32) -> Self {
        match to {
            0 | HOLE => Entry { cluster, own: to, shown: 0 },
            shown => Entry { cluster, own: 0, shown },
        }
    }
}

impl View {
    /// Without a parent.
    pub fn of(own: Map) -> Self {
        View { own: Arc::new(own), shown: None, external: None, shares: false }
    }

    /// Size in clusters.
    #[inline]
    pub fn clusters(&self) -> u64 {
        self.own.clusters()
    }

    /// The same, but for some clusters. Who still uses this one sees no change.
    pub fn changed(&self, entries: &[Entry]) -> Self {
        let changes = || entries.iter().map(|entry| entry.cluster);
        let own = self.own.apart(changes());
        let clusters = self.clusters();
        let shown = match &self.shown {
            Some((shown, before)) if self.shares && *before >= clusters => {
                shown.resized(clusters).apart(changes())
            }
            Some((shown, before)) => shown.copied(clusters, *before),
            None => Map::new(clusters),
        };
        for entry in entries {
            shown.set(entry.cluster, entry.shown);
            own.set(entry.cluster, entry.own);
        }
        let (own, shown) = (Arc::new(own), Some((Arc::new(shown), clusters)));
        View { own, shown, external: self.external.clone(), shares: true }
    }

    /// A cluster is not the volume's any more: 0, or [`HOLE`] where the parent would show, stands there `now`.
    pub fn lose(&self, cluster: u64, now: u32) {
        // First, or what is no more the volume's would show for a moment. A hole hides it.
        if let Some((shown, _)) = self.shown.as_ref().filter(|_| self.shares && now == 0)
            && cluster < shown.clusters()
        {
            shown.set(cluster, 0);
        }
        self.own.set(cluster, now);
    }

    /// Whether it tells nothing of its clusters: all of them look like unallocated ones.
    #[inline]
    pub fn is_away(&self) -> bool {
        self.own.is_away()
    }

    /// The same without its map.
    pub fn without_map(&self) -> Self {
        let own = Arc::new(Map::away(self.clusters()));
        View { own, shown: None, external: self.external.clone(), shares: false }
    }

    /// The device's cluster that may be written for `cluster`, or 0.
    #[inline]
    pub fn own(&self, cluster: u64) -> u32 {
        match self.own.get(cluster) {
            HOLE => 0,
            to => to,
        }
    }

    /// What stands for `cluster`, in its own map or that of a snapshot: the device's cluster, 0 or
    /// [`HOLE`].
    #[inline]
    pub fn entry(&self, cluster: u64) -> u32 {
        match (self.own.get(cluster), &self.shown) {
            (0, Some((shown, before))) if cluster < *before => shown.get(cluster),
            (own, _) => own,
        }
    }

    /// The device's cluster that `cluster` is read from; 0: it is zeros, or [`View::is_external`].
    #[inline]
    pub fn source(&self, cluster: u64) -> u32 {
        let source = self.entry(cluster);
        if source == HOLE { 0 } else { source }
    }

    /// Whether `cluster` is read from the external parent.
    pub fn is_external(&self, cluster: u64) -> bool {
        let before = self.external.as_ref().map_or(0, |(_, before)| *before);
        cluster < before.min(self.clusters()) && self.entry(cluster) == 0
    }

    /// Where what begins with `cluster`, and nobody has, is next to be looked at; `cluster` itself where
    /// that is there.
    pub fn unmapped_until(&self, cluster: u64) -> u64 {
        let chunk = cluster as usize / CHUNK;
        let is_there = |map: &Map| map.chunks.get(chunk).is_some_and(|c| c.get().is_some());
        let parent = self.shown.as_ref().is_some_and(|(shown, _)| is_there(shown));
        if self.external.is_some() || parent || is_there(&self.own) {
            return cluster;
        }
        ((chunk as u64 + 1) * CHUNK as u64).min(self.clusters())
    }

    /// The external parent that `cluster` is read from, as its UUID.
    pub fn outside(&self, cluster: u64) -> Option<Uuid> {
        let (external, _) = self.external.as_ref()?;
        self.is_external(cluster).then_some(external.uuid)
    }

    /// The external parent, in clusters before this one at most.
    pub fn external_before(&self, end: u64) -> Option<(Arc<External>, u64)> {
        self.external.as_ref().map(|(external, before)| (external.clone(), end.min(*before)))
    }

    /// Whether `cluster` reads as the parent does.
    pub fn shows_parent(&self, cluster: u64) -> bool {
        let before = self.shown.as_ref().map_or(0, |(_, before)| *before);
        cluster < before.min(self.clusters()) && self.own.get(cluster) == 0
    }

    /// All that it shows, as one map. It shares what is the same.
    pub fn flat(&self) -> Arc<Map> {
        let Some((shown, before)) = &self.shown else { return self.own.clone() };
        let flat = Map::new(self.clusters());
        for (n, to) in flat.chunks.iter().enumerate() {
            let first = (n * CHUNK) as u64;
            let whole = *before >= (first + CHUNK as u64).min(self.clusters());
            let chunk =
                match (self.own.chunks[n].get(), shown.chunks.get(n).and_then(OnceLock::get)) {
                    (None, Some(shown)) if whole => shown.clone(),
                    (Some(own), None) => own.clone(),
                    (None, None) => continue,
                    _ => Chunk::new(|i| {
                        let cluster = first + i as u64;
                        let inside = cluster < self.clusters();
                        AtomicU32::new(if inside { self.entry(cluster) } else { 0 })
                    }),
                };
            let _ = to.set(chunk);
        }
        Arc::new(flat)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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

    proptest! {
        /// A flattened view shows what the view shows, whatever lies above what.
        #[test]
        fn a_flattened_view_shows_the_same(
            sizes in [1..3 * CHUNK as u64, 1..3 * CHUNK as u64],
            entries in prop::collection::vec((any::<bool>(), any::<prop::sample::Index>(), 0..4u32), 0..60),
            before in any::<prop::sample::Index>(),
        ) {
            let maps = sizes.map(Map::new);
            for (which, at, to) in entries {
                let map = &maps[usize::from(which)];
                map.set(at.index(map.clusters() as usize) as u64, if to == 3 { HOLE } else { to });
            }
            let [own, shown] = maps;
            let before = before.index(own.clusters() as usize + 1) as u64;
            let view = View { shown: Some((Arc::new(shown), before)), ..View::of(own) };
            let flat = View { own: view.flat(), ..View::of(Map::new(0)) };
            prop_assert_eq!(flat.clusters(), view.clusters());
            for cluster in 0..view.clusters() {
                prop_assert_eq!(flat.source(cluster), view.source(cluster), "cluster {}", cluster);
            }
        }
    }

    /// Who still reads through it reads what he did.
    #[test]
    fn a_view_stays_as_it_is_when_it_is_changed() {
        let first = View::of(Map::new(CHUNK as u64 + 2));
        first.own.set(1, 7);
        let second = first.changed(&[Entry::shared(1, 7), Entry::shared(CHUNK as u64, 8)]);
        let third = second.changed(&[Entry::shared(1, HOLE)]);
        assert_eq!((first.own(1), second.own(1), third.own(1)), (7, 0, 0));
        assert_eq!((first.entry(1), second.entry(1), third.entry(1)), (7, 7, HOLE));
        assert_eq!([second, third].map(|view| view.entry(CHUNK as u64)), [8, 8]);
    }
}
