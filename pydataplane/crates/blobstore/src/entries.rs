//! What stands for a blob's clusters: set and removed, with the pages that it stands in.

use crate::blob::{Chunk, Index, Part, index_of, place};
use crate::disk::Disk;
use crate::extents::Extents;
use crate::format::HOLE;
use crate::shows::Shows;
use crate::store::{Store, Txn};

impl<D: Disk> Store<D> {
    /// Points `cluster` of a blob, which was unallocated or a hole, to the device's cluster `to`, or
    /// makes it a hole where that is [`HOLE`].
    pub(crate) fn map(&mut self, txn: &mut Txn, blob: u64, cluster: u64, to: u32) {
        let (n, entry) = place(cluster);
        if !self.blobs[&blob].chunks.contains_key(&n) {
            let page = self.take_page(txn);
            self.add_chunk(txn, blob, n, page);
        }
        let blob = self.blob_mut(blob);
        let chunk = blob.chunks.get_mut(&n).expect("made above");
        let was = chunk.extents.replace(entry, to);
        assert!(matches!(was, 0 | HOLE), "the cluster is allocated already");
        chunk.used += u32::from(was == 0);
        blob.allocated += u64::from(to != HOLE);
        txn.touch(blob.id, Part::Extents(n));
    }

    /// Gives a blob an extents page, which stands for nothing yet.
    pub(crate) fn add_chunk(&mut self, txn: &mut Txn, blob: u64, n: u32, page: u32) {
        match index_of(n) {
            None => txn.touch(blob, Part::Root),
            Some(x) => {
                if !self.blobs[&blob].indexes.contains_key(&x) {
                    let page = self.take_page(txn);
                    self.blob_mut(blob).indexes.insert(x, Index { page, used: 0 });
                    txn.touch(blob, Part::Root);
                }
                self.blob_mut(blob).indexes.get_mut(&x).expect("made above").used += 1;
                txn.touch(blob, Part::Index(x));
            }
        }
        let chunk = Chunk { page, used: 0, extents: Extents::new() };
        self.blob_mut(blob).chunks.insert(n, chunk);
    }

    /// Has `cluster` of a blob read as zeros: nothing stands there any more, or a hole where the parent
    /// would show. Returns the device's cluster that it had, which is not free yet.
    pub(crate) fn unmap_one(&mut self, txn: &mut Txn, blob: u64, cluster: u64) -> Option<u32> {
        let (n, entry) = place(cluster);
        if self.shown(blob, cluster) == Shows::Zeros {
            return self.forget_one(txn, blob, cluster);
        }
        let of = self.blob_mut(blob);
        let was = of.cluster(cluster);
        if was == 0 {
            if of.entry(cluster) == 0 {
                self.map(txn, blob, cluster, HOLE);
            }
            return None;
        }
        of.chunks.get_mut(&n).expect("it has the cluster").extents.replace(entry, HOLE);
        of.allocated -= 1;
        txn.touch(blob, Part::Extents(n));
        Some(was)
    }

    /// Removes what stands for `cluster` of a blob; returns the device's cluster, which is not free yet.
    pub(crate) fn forget_one(&mut self, txn: &mut Txn, blob: u64, cluster: u64) -> Option<u32> {
        let (n, entry) = place(cluster);
        let blob = self.blob_mut(blob);
        let chunk = blob.chunks.get_mut(&n)?;
        let from = chunk.extents.replace(entry, 0);
        if from == 0 {
            return None;
        }
        chunk.used -= 1;
        blob.allocated -= u64::from(from != HOLE);
        txn.touch(blob.id, Part::Extents(n));
        if chunk.used == 0 {
            txn.free(chunk.page);
            blob.chunks.remove(&n);
            match index_of(n) {
                None => txn.touch(blob.id, Part::Root),
                Some(x) => {
                    txn.touch(blob.id, Part::Index(x));
                    let index = blob.indexes.get_mut(&x).expect("a chunk has its index");
                    index.used -= 1;
                    if index.used == 0 {
                        txn.free(index.page);
                        blob.indexes.remove(&x);
                        txn.touch(blob.id, Part::Root);
                    }
                }
            }
        }
        (from != HOLE).then_some(from)
    }
}
