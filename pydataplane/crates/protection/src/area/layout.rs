//! Where the blocks of a volume and their tuples lie, as `schemas/protection.md` describes it.

/// Bytes of a page: what the area is read and written in, whatever the block size.
pub(crate) const PAGE: usize = 4096;
/// Tuples of a page, which are those of a region.
pub(crate) const REGION_BLOCKS: u64 = 512;
/// Bytes of data that a mark of the map is for, at least.
const UNIT_BYTES: u64 = 4 << 20;
/// Marks that a map has room for.
pub(crate) const MARKS: u64 = 3840;

/// How a device of clusters is divided into zones: a cluster of metadata, and the clusters whose tuples
/// lie in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Bytes of a block.
    block: u64,
    /// Blocks of a cluster.
    cluster: u64,
    /// Clusters of data of a zone.
    data: u64,
    /// Blocks that have one mark.
    unit: u64,
}

/// Where a block of data is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockLocation {
    pub zone: u64,
    /// Which block of its zone.
    pub within: u64,
    /// Its block on the device.
    pub lba: u64,
}

impl Layout {
    /// Of blocks of 512 or 4096 bytes in clusters of a power of two of 16 KiB or more.
    pub fn new(block_size: u32, cluster_size: u32) -> Layout {
        let (block, bytes) = (u64::from(block_size), u64::from(cluster_size));
        let (cluster, pages) = (bytes / block, bytes / PAGE as u64);
        let data = (pages - 1) * REGION_BLOCKS / cluster;
        let mut unit = (UNIT_BYTES / block).max(cluster);
        while (data * cluster).div_ceil(unit) > MARKS {
            unit *= 2;
        }
        Layout { block, cluster, data, unit }
    }

    /// Bytes of a block.
    pub fn block_size(&self) -> u32 {
        self.block as u32
    }

    /// Clusters of a device that has so many of data.
    pub fn clusters(&self, data: u64) -> u64 {
        data.saturating_add(data.div_ceil(self.data))
    }

    /// Clusters of data of a device of so many in all.
    pub fn data_clusters(&self, all: u64) -> u64 {
        let (zones, rest) = (all / (self.data + 1), all % (self.data + 1));
        zones * self.data + rest.saturating_sub(1)
    }

    /// Where cluster `data` of the data lies.
    pub fn cluster_at(&self, data: u64) -> u64 {
        data + data / self.data + 1
    }

    /// Which cluster of the data lies in cluster `at`; `None`: it is one of metadata.
    pub fn cluster_of(&self, at: u64) -> Option<u64> {
        let (zone, nth) = (at / (self.data + 1), at % (self.data + 1));
        Some(zone * self.data + nth.checked_sub(1)?)
    }

    /// Blocks of data of a device of so many in all.
    pub(crate) fn data_blocks(&self, all: u64) -> u64 {
        self.data_clusters(all / self.cluster) * self.cluster
    }

    /// Blocks of a cluster.
    pub(crate) fn cluster_blocks(&self) -> u64 {
        self.cluster
    }

    /// Blocks of data of a zone.
    pub(crate) fn zone_blocks(&self) -> u64 {
        self.data * self.cluster
    }

    /// Zones of a device with so many blocks of data.
    pub(crate) fn zones(&self, blocks: u64) -> u64 {
        blocks.div_ceil(self.zone_blocks())
    }

    /// Marks of a zone.
    pub(crate) fn units(&self) -> u64 {
        self.zone_blocks().div_ceil(self.unit)
    }

    /// Regions of a unit.
    pub(crate) fn unit_regions(&self) -> u64 {
        self.unit / REGION_BLOCKS
    }

    /// Blocks that have one mark: whole clusters, and whole regions.
    pub(crate) fn unit_blocks(&self) -> u64 {
        self.unit
    }

    /// Regions of a zone.
    pub(crate) fn regions(&self) -> u64 {
        self.zone_blocks().div_ceil(REGION_BLOCKS)
    }

    /// Blocks of a page.
    pub(crate) fn page_blocks(&self) -> u64 {
        PAGE as u64 / self.block
    }

    /// Where block `lba` of the data is.
    #[inline]
    pub(crate) fn locate(&self, lba: u64) -> BlockLocation {
        let (zone, within) = (lba / self.zone_blocks(), lba % self.zone_blocks());
        BlockLocation { zone, within, lba: (zone * (self.data + 1) + 1) * self.cluster + within }
    }

    /// The block on the device where the map of a zone begins.
    pub(crate) fn map(&self, zone: u64) -> u64 {
        zone * (self.data + 1) * self.cluster
    }

    /// The block on the device where the page of a region of a zone begins.
    #[inline]
    pub(crate) fn page(&self, zone: u64, region: u64) -> u64 {
        self.map(zone) + (1 + region) * self.page_blocks()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All cluster sizes that an lvstore can have.
    fn layouts() -> impl Iterator<Item = (Layout, u64)> {
        [512, 4096]
            .into_iter()
            .flat_map(|block| (14..=30).map(move |log| (Layout::new(block, 1 << log), 1 << log)))
    }

    #[test]
    fn the_pages_of_a_zone_are_in_its_first_cluster_and_none_is_lacking() {
        for (layout, size) in layouts() {
            assert!((1 + layout.regions()) * PAGE as u64 <= size, "{layout:?}");
            // One more cluster would not fit.
            let more = ((layout.data + 1) * layout.cluster).div_ceil(REGION_BLOCKS);
            assert!((1 + more) * PAGE as u64 > size, "{layout:?}");
            assert!(layout.units() <= MARKS);
            assert_eq!(layout.unit % layout.cluster, 0);
            assert_eq!(layout.unit % REGION_BLOCKS, 0);
            assert_eq!(layout.map(1), layout.clusters(layout.data) * layout.cluster);
        }
    }

    #[test]
    fn clusters_are_of_data_or_of_metadata() {
        for (layout, _) in layouts() {
            let mut data = 0;
            for at in 0..3 * layout.data + 10 {
                assert_eq!(layout.data_clusters(at), data, "{layout:?} {at}");
                match layout.cluster_of(at) {
                    Some(cluster) => {
                        assert_eq!((cluster, layout.cluster_at(cluster)), (data, at));
                        data += 1;
                        assert_eq!(layout.clusters(data), at + 1);
                        let location = layout.locate(cluster * layout.cluster);
                        assert_eq!(location.lba, at * layout.cluster);
                    }
                    None => assert_eq!(
                        layout.map(layout.zones(data * layout.cluster)),
                        at * layout.cluster
                    ),
                }
            }
        }
    }

    #[test]
    fn the_sizes_of_the_description() {
        let of = |block, cluster| {
            let layout = Layout::new(block, cluster);
            (layout.data, layout.units(), (layout.unit_blocks() * u64::from(block)) >> 20)
        };
        assert_eq!(of(512, 16 << 10), (48, 1, 4));
        assert_eq!(of(512, 64 << 10), (60, 1, 4));
        assert_eq!(of(512, 1 << 20), (63, 16, 4));
        assert_eq!(of(4096, 64 << 10), (480, 8, 4));
        assert_eq!(of(4096, 1 << 20), (510, 128, 4));
        assert_eq!(of(512, 1 << 30), (63, 63, 1024));
    }
}
