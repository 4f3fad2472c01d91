//! Growth of a store in use to the present size of its device.

use crate::disk::Disk;
use crate::error::Error;
use crate::format::{PAGE_SIZE, POINTERS};
use crate::store::Store;

/// Most clusters of a grown store for each page of its metadata region, whose size stays: its
/// extents pages can be three quarters empty and still map every cluster.
const CLUSTERS_PER_PAGE: u64 = POINTERS as u64 / 4;

impl<D: Disk> Store<D> {
    /// Takes over what the device has gained since the store was created or grown last; `false`,
    /// and nothing written, where that is not a whole cluster. Free clusters are not on the medium,
    /// so it is one change of the superblock.
    ///
    /// # Errors
    /// [`Error::Shrunk`], [`Error::CannotGrow`] (then nothing changed), [`Error::Stopped`],
    /// [`Error::Metadata`].
    pub fn grow(&mut self) -> Result<bool, Error> {
        self.alive()?;
        let (have, pages) = (self.disk.size(), self.disk.size() / PAGE_SIZE as u64);
        let name = || self.sb.name.clone();
        if pages < self.sb.device_pages {
            let need = self.sb.device_pages * PAGE_SIZE as u64;
            return Err(Error::Shrunk { name: name(), need, have });
        }
        let clusters = pages / self.cluster_pages();
        let data_clusters = clusters - self.sb.first_data_cluster;
        if data_clusters == self.sb.data_clusters {
            return Ok(false);
        }
        if clusters > self.max_clusters() {
            return Err(Error::CannotGrow { name: name(), have, max: self.max_device_size() });
        }
        // The device's own record of its size must be as durable as the superblock that needs it.
        let flushed = self.disk.flush();
        self.must(flushed)?;
        self.sb.device_pages = pages;
        self.sb.data_clusters = data_clusters;
        self.write_superblock()?;
        let before = self.clusters.len();
        self.clusters.grow(data_clusters);
        self.learn_zeros_from(before);
        Ok(true)
    }

    /// Bytes of the largest device that the store can take over: it ends one cluster later.
    pub(crate) fn max_device_size(&self) -> u64 {
        let bytes = (self.max_clusters() + 1).saturating_mul(u64::from(self.sb.cluster_size));
        bytes - PAGE_SIZE as u64
    }

    /// Most clusters of the device, those of metadata included.
    fn max_clusters(&self) -> u64 {
        let first = self.sb.first_data_cluster;
        let most = (first + self.sb.md_pages * CLUSTERS_PER_PAGE).min(u64::from(u32::MAX));
        most.max(first + self.sb.data_clusters)
    }

    fn cluster_pages(&self) -> u64 {
        u64::from(self.sb.cluster_size) / PAGE_SIZE as u64
    }
}
