//! Where things lie on a device of some size.

use crate::error::Error;
use crate::format::{
    BITMAP_BITS, CLUSTER_MAX, CLUSTER_MIN, COPY_B, JOURNAL_PAGES_MIN, PAGE_SIZE, Superblock,
    VERSION,
};
use uuid::Uuid;

/// First page of the journal.
const JOURNAL_START: u64 = 32;
const _: () = assert!(JOURNAL_START > COPY_B);
/// One page of journal for this many pages of device.
const JOURNAL_SHARE: u64 = 256;
/// Fewest and most pages of the journal.
const JOURNAL_PAGES: (u64, u64) = (JOURNAL_PAGES_MIN, 4096);
/// One page of metadata for this many clusters, and so many more.
const MD_SHARE: u64 = 16;
const MD_EXTRA: u64 = 256;
/// Most bitmap pages: one transaction may change them all.
const BITMAP_PAGES_MAX: u64 = 480;

/// The superblock of a new store on a device of `size` bytes.
pub(crate) fn plan(
    name: &str,
    uuid: Uuid,
    size: u64,
    block_size: u32,
    cluster_size: u32,
) -> Result<Superblock, Error> {
    let bad = |why: String| Error::BadOption { name: name.to_owned(), why };
    if !cluster_size.is_power_of_two() || !(CLUSTER_MIN..=CLUSTER_MAX).contains(&cluster_size) {
        return Err(bad(format!(
            "a cluster size of {cluster_size} bytes is not possible; \
             use a power of two from {CLUSTER_MIN} to {CLUSTER_MAX}"
        )));
    }
    let device_pages = size / PAGE_SIZE as u64;
    let cluster_pages = u64::from(cluster_size) / PAGE_SIZE as u64;
    let clusters = device_pages / cluster_pages;
    if clusters > u64::from(u32::MAX) {
        return Err(bad(format!(
            "{clusters} clusters are too many, at most {} are possible; use larger clusters",
            u32::MAX
        )));
    }
    let journal_pages = (device_pages / JOURNAL_SHARE).clamp(JOURNAL_PAGES.0, JOURNAL_PAGES.1);
    let md_start = JOURNAL_START + journal_pages;
    let md_pages = (clusters / MD_SHARE + MD_EXTRA).min(BITMAP_PAGES_MAX * BITMAP_BITS);
    let first_data_cluster = (md_start + md_pages).div_ceil(cluster_pages);
    let data_clusters = clusters.saturating_sub(first_data_cluster);
    if data_clusters == 0 {
        let need = (first_data_cluster + 1) * u64::from(cluster_size);
        return Err(bad(format!(
            "the device has {size} bytes, but at least {need} are needed with clusters of \
             {cluster_size} bytes; use a larger device"
        )));
    }
    Ok(Superblock {
        version: VERSION,
        generation: 1,
        uuid,
        name: name.to_owned(),
        cluster_size,
        block_size,
        device_pages,
        journal_start: JOURNAL_START,
        journal_pages,
        md_start,
        md_pages,
        bitmap_pages: md_pages.div_ceil(BITMAP_BITS),
        first_data_cluster,
        data_clusters,
        tail_page: 0,
        tail_seq: 1,
        mount: 1,
        shares: false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_possible_device_gets_a_layout_that_reads_back() {
        for cluster_shift in [14, 16, 20, 22, 30] {
            for size_shift in 20..=54u32 {
                for odd in [0, 512, 70_000] {
                    let size = (1u64 << size_shift) + odd;
                    match plan("x", Uuid::nil(), size, 512, 1 << cluster_shift) {
                        Ok(s) => {
                            assert_eq!(Superblock::decode(&s.encode()), Ok(s.clone()));
                            assert!(2 * s.bitmap_pages < s.journal_pages, "{s:?}");
                            let share = (s.first_data_cluster << cluster_shift) as f64;
                            let big = size > 64 << 30 && (16..=22).contains(&cluster_shift);
                            assert!(!big || share / (size as f64) < 0.005, "{s:?}");
                        }
                        Err(e) => assert!(matches!(e, Error::BadOption { .. }), "{e}"),
                    }
                }
            }
        }
    }

    #[test]
    fn a_device_or_cluster_size_out_of_range_says_what_is_possible() {
        let why =
            |size, cluster| plan("x", Uuid::nil(), size, 512, cluster).unwrap_err().to_string();
        assert!(
            why(1 << 20, 1 << 20).contains("at least 3145728 are needed"),
            "{}",
            why(1 << 20, 1 << 20)
        );
        assert!(why(1 << 30, 5 << 20).contains("from 16384 to 1073741824"));
        assert!(why(1 << 60, 1 << 16).contains("use larger clusters"));
    }
}
