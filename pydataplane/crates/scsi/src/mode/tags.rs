//! The Application Tag mode page (SBC-4 6.5.3): ranges of blocks, each with the application tag that its blocks are to
//! have. They follow one another from block 0 on, as the standard has it; what lies behind the last one has none.

use bdev::{AppTags, TAG_RUNS};
use serde::{Deserialize, Serialize};

/// Descriptors of the page, and bytes of one.
const DESCRIPTORS: usize = TAG_RUNS;
const DESCRIPTOR: usize = 24;
/// Bytes before them, and in all.
pub(super) const HEADER: usize = 16;
pub(super) const PAGE: usize = HEADER + DESCRIPTORS * DESCRIPTOR;
/// By a block with that tag nothing is checked: it is none that blocks are to have.
const ESCAPE: u64 = 0xFFFF;
/// The descriptor is the last valid one.
const LAST: u8 = 0x80;
/// LOGICAL BLOCK APPLICATION TAG, LOGICAL BLOCK ADDRESS and LOGICAL BLOCK COUNT.
const TAG_AT: usize = 6;
const LBA_AT: usize = 8;
const COUNT_AT: usize = 16;

/// So many blocks, which are to have this tag.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TagRange {
    tag: u16,
    blocks: u64,
}

/// One after the other from block 0 on; those that are not there have no blocks, and come last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct TagRanges([TagRange; DESCRIPTORS]);

impl TagRanges {
    /// The tags of `blocks` blocks from block `lba` on.
    pub(crate) fn of(&self, lba: u64, blocks: u64) -> AppTags {
        let end = lba.saturating_add(blocks);
        AppTags::new(self.each().map(|(from, to, tag)| {
            let among = to.min(end).saturating_sub(from.max(lba));
            (tag, among)
        }))
    }

    /// What there is of them on a medium of `capacity` blocks.
    pub(crate) fn cut(&self, capacity: u64) -> TagRanges {
        let mut ranges = TagRanges::default();
        for (range, (from, to, tag)) in ranges.0.iter_mut().zip(self.each()) {
            let blocks = to.min(capacity).saturating_sub(from);
            *range = if blocks > 0 { TagRange { tag, blocks } } else { TagRange::default() };
        }
        ranges
    }

    /// First block, the one behind the last, and tag of each.
    fn each(&self) -> impl Iterator<Item = (u64, u64, u16)> {
        self.0.into_iter().scan(0u64, |at, TagRange { tag, blocks }| {
            let from = *at;
            *at = from.saturating_add(blocks);
            Some((from, *at, tag))
        })
    }

    /// As the descriptors of the page.
    pub(super) fn encode(&self, out: &mut [u8]) {
        let present = self.0.iter().filter(|range| range.blocks > 0).count();
        for (out, (from, to, tag)) in
            out.chunks_exact_mut(DESCRIPTOR).zip(self.each().take(present))
        {
            out[TAG_AT..LBA_AT].copy_from_slice(&tag.to_be_bytes());
            out[LBA_AT..COUNT_AT].copy_from_slice(&from.to_be_bytes());
            out[COUNT_AT..].copy_from_slice(&(to - from).to_be_bytes());
        }
        out[present.saturating_sub(1) * DESCRIPTOR] = LAST;
    }

    /// The other way, for a medium of `capacity` blocks. A descriptor without blocks is ignored, and so is what comes
    /// after the last one.
    ///
    /// # Errors
    /// The byte of what is wrong: an address that is not that of the block behind the descriptor before, a range
    /// that reaches beyond the medium, a tag by which its blocks would not be checked, or that none is the last one.
    pub(super) fn parse(descriptors: &[u8], capacity: u64) -> Result<TagRanges, usize> {
        let mut ranges = TagRanges::default();
        let (mut next, mut count) = (0, 0);
        for (nth, one) in descriptors.chunks_exact(DESCRIPTOR).take(DESCRIPTORS).enumerate() {
            let number = |at: usize, end: usize| {
                one[at..end].iter().fold(0u64, |all, byte| all << 8 | u64::from(*byte))
            };
            let (tag, lba, blocks) =
                (number(TAG_AT, LBA_AT), number(LBA_AT, COUNT_AT), number(COUNT_AT, DESCRIPTOR));
            if blocks > 0 {
                if lba != next {
                    return Err(nth * DESCRIPTOR + LBA_AT);
                }
                // `next` is not beyond it.
                if blocks > capacity - next {
                    return Err(nth * DESCRIPTOR + COUNT_AT);
                }
                if tag == ESCAPE {
                    return Err(nth * DESCRIPTOR + TAG_AT);
                }
                ranges.0[count] = TagRange { tag: tag as u16, blocks };
                (next, count) = (next + blocks, count + 1);
            }
            if one[0] & LAST != 0 {
                return Ok(ranges);
            }
        }
        Err((DESCRIPTORS - 1) * DESCRIPTOR)
    }
}

/// What of the descriptors can be set.
pub(super) fn changeable(out: &mut [u8]) {
    for out in out.chunks_exact_mut(DESCRIPTOR) {
        out[0] = LAST;
        out[TAG_AT..].fill(0xFF);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ranges(of: &[(u16, u64)]) -> TagRanges {
        let mut ranges = TagRanges::default();
        for (to, (tag, blocks)) in ranges.0.iter_mut().zip(of) {
            *to = TagRange { tag: *tag, blocks: *blocks };
        }
        ranges
    }

    fn bytes(of: &TagRanges) -> [u8; PAGE - HEADER] {
        let mut out = [0; PAGE - HEADER];
        of.encode(&mut out);
        out
    }

    /// A descriptor.
    fn one(last: bool, tag: u16, lba: u64, blocks: u64) -> Vec<u8> {
        let mut one = vec![if last { LAST } else { 0 }, 0, 0, 0, 0, 0];
        one.extend(tag.to_be_bytes());
        one.extend(lba.to_be_bytes());
        one.extend(blocks.to_be_bytes());
        one
    }

    fn parsed(of: &[Vec<u8>]) -> Result<TagRanges, usize> {
        let mut page = of.concat();
        page.resize(DESCRIPTORS * DESCRIPTOR, 0);
        TagRanges::parse(&page, 100)
    }

    #[test]
    fn blocks_have_the_tag_of_the_range_that_they_are_in() {
        let of = ranges(&[(7, 10), (8, 1), (9, 20)]);
        let tags = |lba, blocks| {
            let tags = of.of(lba, blocks);
            (0..blocks).map(|nth| tags.of(nth)).collect::<Vec<_>>()
        };
        assert_eq!(tags(9, 3), [Some(7), Some(8), Some(9)]);
        assert_eq!(tags(11, 2), [Some(9); 2]);
        assert_eq!(tags(30, 2), [Some(9), None]);
        assert_eq!(tags(31, 1), [None]);
        assert!(of.of(31, u64::MAX).is_none() && TagRanges::default().of(0, 9).is_none());
    }

    #[test]
    fn sbc4_6_5_3_descriptors_are_as_the_standard_has_them() {
        let of = ranges(&[(0x1234, 5), (0x0102, 0x0A0B)]);
        let page = bytes(&of);
        assert_eq!(page[..24], one(false, 0x1234, 0, 5));
        assert_eq!(page[24..48], one(true, 0x0102, 5, 0x0A0B));
        assert_eq!(page[48..], [0; 48]);
        assert_eq!(bytes(&TagRanges::default())[..2], [LAST, 0]);
        assert_eq!(bytes(&ranges(&[(1, 1), (2, 1), (3, 1), (4, 1)]))[72], LAST);
    }

    #[test]
    fn what_does_not_fit_together_is_refused_at_its_byte() {
        assert_eq!(
            parsed(&[one(false, 1, 0, 9), one(true, 2, 9, 91)]),
            Ok(ranges(&[(1, 9), (2, 91)]))
        );
        // Those without blocks are ignored, wherever they say that they are, and so is what comes after the last one.
        let odd = [
            one(false, 5, 77, 0),
            one(false, 1, 0, 9),
            one(true, 0xFFFF, 3, 0),
            one(false, 9, 9, 9),
        ];
        assert_eq!(parsed(&odd), Ok(ranges(&[(1, 9)])));
        assert_eq!(parsed(&[one(true, 1, 0, 0)]), Ok(TagRanges::default()));
        for (wrong, at) in [
            (vec![one(true, 1, 1, 9)], 8), // not from block 0 on
            (vec![one(false, 1, 0, 9), one(true, 2, 10, 1)], 24 + 8), // a gap
            (vec![one(false, 1, 0, 9), one(true, 2, 8, 1)], 24 + 8), // they overlap
            (vec![one(true, 1, 0, 101)], 16), // beyond the end
            (vec![one(false, 1, 0, 9), one(true, 2, 9, 92)], 24 + 16), // as well
            (vec![one(true, 1, 0, u64::MAX)], 16),
            (vec![one(false, 1, 0, 9)], 72), // none is the last one
            (vec![one(false, 1, 0, 9), one(true, 0xFFFF, 9, 1)], 24 + 6), // nothing is checked
        ] {
            assert_eq!(parsed(&wrong), Err(at), "{wrong:?}");
        }
    }

    proptest! {
        #[test]
        fn ranges_are_read_as_they_were_written(
            of in prop::collection::vec((0u16..0xFFFF, 1u64..1000), 0..=DESCRIPTORS),
            capacity in 0u64..4000,
        ) {
            let cut = ranges(&of).cut(capacity);
            prop_assert_eq!(TagRanges::parse(&bytes(&cut), capacity), Ok(cut));
            let (shown, all) = (cut.of(0, u64::MAX), ranges(&of).of(0, u64::MAX));
            for lba in 0..4001 {
                prop_assert_eq!(shown.of(lba), all.of(lba).filter(|_| lba < capacity));
            }
        }

        #[test]
        fn any_bytes_make_ranges_on_the_medium_or_none(
            page in prop::collection::vec(prop_oneof![3 => Just(0u8), 1 => any::<u8>()], PAGE - HEADER),
            capacity in any::<u64>(),
        ) {
            match TagRanges::parse(&page, capacity) {
                Ok(ranges) => prop_assert_eq!(ranges.cut(capacity), ranges),
                Err(at) => prop_assert!(at < page.len()),
            }
        }
    }
}
