//! Where things are on the base: zones, each with its head of metadata and its data.

use bdev::Run;

/// Bytes of a page, and of the block that has a checksum.
pub const PAGE: usize = 4096;
/// Pages of metadata at the beginning of a zone.
pub(crate) const HEAD: u64 = 256;
/// Page of a zone that says which regions may be written to.
pub(crate) const MAP_AT: u64 = 1;
/// Page of a zone's first checksums; those of region `r` are `r` pages further.
pub(crate) const SUMS_AT: u64 = 16;
/// Regions of a zone.
pub(crate) const REGIONS: u32 = 240;
/// Blocks of a region: as many as have their checksums in one page.
pub(crate) const REGION_BLOCKS: u16 = 1008;
/// Blocks of data of a zone.
pub(crate) const ZONE_BLOCKS: u64 = REGIONS as u64 * REGION_BLOCKS as u64;
/// Pages of a zone.
pub(crate) const ZONE_PAGES: u64 = HEAD + ZONE_BLOCKS;
/// Most zones: some 60 TiB.
pub(crate) const ZONES_MAX: u64 = 1 << 16;

const _: () = assert!(SUMS_AT + REGIONS as u64 == HEAD);

/// Where a block of data is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockLocation {
    /// Its region, counted over all zones.
    pub region: u32,
    /// Which block of that.
    pub index: u16,
    /// Its page on the base.
    pub page: u64,
}

/// Where block `block` of the data is; it is below [`ZONES_MAX`] * [`ZONE_BLOCKS`].
#[inline]
pub(crate) fn locate(block: u64) -> BlockLocation {
    let (zone, within) = (block / ZONE_BLOCKS, block % ZONE_BLOCKS);
    let blocks = u64::from(REGION_BLOCKS);
    BlockLocation {
        region: zone as u32 * REGIONS + (within / blocks) as u32,
        index: (within % blocks) as u16,
        page: zone * ZONE_PAGES + HEAD + within,
    }
}

/// What begins at block `lba`, at most `left` of them: where that is on the base, and how many of them lie there
/// in one piece. `per` blocks are a page.
pub(crate) fn on_base(lba: u64, left: u64, per: u64) -> (u64, u64) {
    let (block, skip) = (lba / per, lba % per);
    let until_end_of_zone = (ZONE_BLOCKS - block % ZONE_BLOCKS) * per - skip;
    (locate(block).page * per + skip, left.min(until_end_of_zone))
}

/// What `found` on the base is of the `most` blocks that lie there in one piece.
pub(crate) fn clipped(found: Run, most: u64) -> Run {
    Run { blocks: found.blocks.min(most), ..found }
}

/// The block of data that is at page `page` of the base.
pub(crate) fn block_at(page: u64) -> u64 {
    (page / ZONE_PAGES) * ZONE_BLOCKS + (page % ZONE_PAGES).saturating_sub(HEAD)
}

/// Page of the base with the checksums of region `region`, counted over all zones.
pub(crate) fn sums_page(region: u32) -> u64 {
    u64::from(region / REGIONS) * ZONE_PAGES + SUMS_AT + u64::from(region % REGIONS)
}

/// Page of the base with the map of a zone.
pub(crate) fn map_page(zone: usize) -> u64 {
    zone as u64 * ZONE_PAGES + MAP_AT
}

/// Blocks of data on a base of so many pages.
pub(crate) fn data_blocks(pages: u64) -> u64 {
    let (zones, rest) = (pages / ZONE_PAGES, pages % ZONE_PAGES);
    zones * ZONE_BLOCKS + rest.saturating_sub(HEAD)
}

/// Zones with data on a base of so many pages.
pub(crate) fn zones(pages: u64) -> u64 {
    data_blocks(pages).div_ceil(ZONE_BLOCKS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_page_of_data_belongs_to_one_block_and_none_of_metadata_does() {
        let mut next = HEAD;
        for block in [0, 1, 1007, 1008, ZONE_BLOCKS - 1, ZONE_BLOCKS, 3 * ZONE_BLOCKS + 5] {
            let p = locate(block);
            assert_eq!(block_at(p.page), block);
            assert!(p.page % ZONE_PAGES >= HEAD && p.index < REGION_BLOCKS);
            assert!(p.page >= next);
            next = p.page + 1;
        }
        let last = locate(ZONE_BLOCKS - 1);
        assert_eq!((last.region, last.index, last.page), (239, 1007, ZONE_PAGES - 1));
        assert_eq!(locate(ZONE_BLOCKS).page, ZONE_PAGES + HEAD);
        assert_eq!(sums_page(240), ZONE_PAGES + SUMS_AT);
        assert_eq!(map_page(1), ZONE_PAGES + MAP_AT);
    }

    #[test]
    fn a_base_shows_what_its_heads_leave() {
        for (pages, blocks, count) in [
            (HEAD, 0, 0),
            (HEAD + 1, 1, 1),
            (ZONE_PAGES, ZONE_BLOCKS, 1),
            (ZONE_PAGES + HEAD, ZONE_BLOCKS, 1),
            (ZONE_PAGES + HEAD + 7, ZONE_BLOCKS + 7, 2),
        ] {
            assert_eq!((data_blocks(pages), zones(pages)), (blocks, count), "{pages}");
        }
    }
}
