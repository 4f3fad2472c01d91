//! How often an operation took how long: counts in buckets, as SPDK's histograms have them.
//!
//! Range 0 has a bucket for each value below `2^granularity`; each further range is of the values of one
//! power of two more, and has as many buckets of equal width. What lies below the first range that is kept
//! counts in its first bucket, what lies above the last in the last one.
//!
//! One channel writes to a histogram, with relaxed loads and stores; readers add up those of all.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::Op;

/// Most buckets that a range may have, as a power of two.
pub const GRANULARITY_MAX: u8 = 10;

/// Which buckets there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    granularity: u8,
    min_range: u8,
    max_range: u8,
}

impl Layout {
    /// Buckets for latencies from `min` to `max` ticks, the latter not included, in ranges of
    /// `2^granularity` buckets each.
    ///
    /// # Errors
    /// A clause: there are no such latencies, or too many buckets.
    pub fn new(granularity: u8, min: u64, max: u64) -> Result<Layout, String> {
        if granularity > GRANULARITY_MAX {
            return Err(format!("a granularity of {granularity} is above {GRANULARITY_MAX}"));
        }
        if min >= max {
            return Err("the shortest latency is not below the longest".to_owned());
        }
        let all = Layout { granularity, min_range: 0, max_range: 64 - granularity };
        Ok(Layout { min_range: all.range(min), max_range: all.range(max - 1), ..all })
    }

    /// Buckets of a range, as a power of two.
    pub fn granularity(&self) -> u8 {
        self.granularity
    }

    /// The first range that is kept.
    pub fn min_range(&self) -> u8 {
        self.min_range
    }

    /// The last range that is kept.
    pub fn max_range(&self) -> u8 {
        self.max_range
    }

    /// How many buckets there are.
    pub fn buckets(&self) -> usize {
        (usize::from(self.max_range - self.min_range) + 1) << self.granularity
    }

    #[inline]
    fn range(&self, ticks: u64) -> u8 {
        let bits = (u64::BITS - ticks.leading_zeros()) as u8;
        bits.saturating_sub(self.granularity)
    }

    /// The bucket that counts `ticks`: always one that there is.
    #[inline]
    fn bucket(&self, ticks: u64) -> usize {
        let range = self.range(ticks);
        if range < self.min_range {
            return 0;
        }
        if range > self.max_range {
            return self.buckets() - 1;
        }
        let mask = (1 << self.granularity) - 1;
        let within = (ticks >> range.saturating_sub(1)) & mask;
        (usize::from(range - self.min_range) << self.granularity) + within as usize
    }

    /// The first number of ticks above what a bucket counts; `u64::MAX` for the last one there can be.
    fn end(&self, bucket: usize) -> u64 {
        let range = (bucket >> self.granularity) as u32 + u32::from(self.min_range);
        let within = (bucket & ((1 << self.granularity) - 1)) as u128 + 1;
        let end = match range {
            0 => within,
            _ => ((1_u128 << self.granularity) + within) << (range - 1),
        };
        u64::try_from(end).unwrap_or(u64::MAX)
    }
}

/// What is counted of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HistogramOptions {
    /// In which buckets.
    pub layout: Layout,
    /// The one operation that is; `None`: each.
    pub op: Option<Op>,
}

/// The counts of one channel.
#[derive(Debug)]
pub(crate) struct Histogram {
    options: HistogramOptions,
    /// Of each operation that is counted, one after the other.
    counts: Box<[AtomicU64]>,
}

impl Histogram {
    pub(crate) fn new(options: HistogramOptions) -> Histogram {
        let operations = if options.op.is_some() { 1 } else { Op::COUNT };
        let counts =
            (0..operations * options.layout.buckets()).map(|_| AtomicU64::new(0)).collect();
        Histogram { options, counts }
    }

    /// Counts an I/O, if it is of those that are counted. Only the thread of its channel may.
    #[inline]
    pub(crate) fn tally(&self, op: Op, ticks: u64) {
        let first = match self.options.op {
            None => op as usize * self.options.layout.buckets(),
            Some(counted) if counted == op => 0,
            Some(_) => return,
        };
        let count = &self.counts[first + self.options.layout.bucket(ticks)];
        count.store(count.load(Relaxed).wrapping_add(1), Relaxed);
    }
}

/// What was counted of a device since its histogram was enabled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Latencies {
    /// What is counted.
    pub options: HistogramOptions,
    counts: Vec<u64>,
}

impl Latencies {
    pub(crate) fn new(options: HistogramOptions) -> Latencies {
        let operations = if options.op.is_some() { 1 } else { Op::COUNT };
        Latencies { options, counts: vec![0; operations * options.layout.buckets()] }
    }

    /// Adds the counts of a channel with the same options.
    pub(crate) fn add(&mut self, of: &Histogram) {
        for (sum, count) in self.counts.iter_mut().zip(&of.counts) {
            *sum += count.load(Relaxed);
        }
    }

    /// The counts of each bucket, of all operations together.
    pub fn all(&self) -> Vec<u64> {
        let buckets = self.options.layout.buckets();
        let mut all = vec![0; buckets];
        for of_one in self.counts.chunks(buckets) {
            all.iter_mut().zip(of_one).for_each(|(sum, count)| *sum += count);
        }
        all
    }

    /// The counts of each bucket of one operation; `None`: it is not counted.
    pub fn of(&self, op: Op) -> Option<&[u64]> {
        let buckets = self.options.layout.buckets();
        match self.options.op {
            None => self.counts.chunks(buckets).nth(op as usize),
            Some(counted) => (counted == op).then_some(&self.counts[..]),
        }
    }

    /// How many of `counts`, which are of each bucket, took less than each of `borders` (ticks, ascending),
    /// and how many there are. A bucket on both sides of a border counts as above it.
    pub fn below(&self, counts: &[u64], borders: &[u64]) -> Vec<u64> {
        let mut below = Vec::with_capacity(borders.len() + 1);
        let (mut sum, mut bucket) = (0, 0);
        for border in borders {
            while bucket < counts.len() && self.options.layout.end(bucket) <= *border {
                sum += counts[bucket];
                bucket += 1;
            }
            below.push(sum);
        }
        below.push(sum + counts[bucket..].iter().sum::<u64>());
        below
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all(granularity: u8) -> Layout {
        Layout::new(granularity, 0, u64::MAX).unwrap()
    }

    #[test]
    fn buckets_are_where_spdk_has_them() {
        let layout = all(7);
        assert_eq!((layout.min_range, layout.max_range, layout.buckets()), (0, 57, 58 * 128));
        // Range 0 and 1: a value each; range 2: two; range 4: eight.
        for (ticks, bucket) in [
            (0, 0),
            (127, 127),
            (128, 128),
            (255, 255),
            (256, 256),
            (257, 256),
            (511, 383),
            (1024, 512),
            (1031, 512),
            (1032, 513),
            (u64::MAX, 58 * 128 - 1),
        ] {
            assert_eq!(layout.bucket(ticks), bucket, "{ticks}");
        }
        assert_eq!([127, 255, 256, 512].map(|bucket| layout.end(bucket)), [128, 256, 258, 1032]);
        assert_eq!(layout.end(58 * 128 - 1), u64::MAX);
    }

    #[test]
    fn what_is_beyond_the_ranges_counts_in_the_outermost_buckets() {
        let layout = Layout::new(3, 100, 5000).unwrap();
        // 64 to 127, and 4096 to 8191.
        assert_eq!((layout.min_range, layout.max_range, layout.buckets()), (4, 10, 56));
        assert_eq!([0, 63, 64, 71].map(|ticks| layout.bucket(ticks)), [0; 4]);
        assert_eq!([8191, 8192, u64::MAX].map(|ticks| layout.bucket(ticks)), [55; 3]);
        let refused = |granularity, min, max| Layout::new(granularity, min, max).unwrap_err();
        assert_eq!(refused(11, 0, 1), "a granularity of 11 is above 10");
        assert_eq!(refused(7, 9, 9), "the shortest latency is not below the longest");
    }

    #[test]
    fn one_operation_or_each_is_counted_and_told_by_borders() {
        let of_reads = HistogramOptions { layout: all(7), op: Some(Op::Read) };
        for (options, writes) in
            [(of_reads, None), (HistogramOptions { op: None, ..of_reads }, Some(1))]
        {
            let channels = [Histogram::new(options), Histogram::new(options)];
            [5, 6, 100].iter().for_each(|ticks| channels[0].tally(Op::Read, *ticks));
            channels[1].tally(Op::Read, 6);
            channels[1].tally(Op::Write, 1 << 40);
            let mut sum = Latencies::new(options);
            channels.iter().for_each(|channel| sum.add(channel));
            let reads = sum.of(Op::Read).unwrap();
            assert_eq!((reads[5], reads[6], reads[100]), (1, 2, 1));
            assert_eq!(sum.below(reads, &[5, 6, 7, 1000]), [0, 1, 3, 4, 4]);
            assert_eq!(sum.of(Op::Write).map(|counts| counts.iter().sum::<u64>()), writes);
            assert_eq!(sum.all().iter().sum::<u64>(), 4 + writes.unwrap_or(0));
        }
    }

    proptest! {
        #[test]
        fn each_value_is_in_a_bucket_that_ends_above_it_and_begins_at_or_below_it(
            granularity in 0..=GRANULARITY_MAX, ticks in prop_oneof![0_u64..5000, any::<u64>()]
        ) {
            let layout = all(granularity);
            let bucket = layout.bucket(ticks);
            prop_assert!(bucket < layout.buckets());
            prop_assert!(layout.end(bucket) > ticks || layout.end(bucket) == u64::MAX);
            prop_assert!(bucket == 0 || layout.end(bucket - 1) <= ticks);
        }
    }
}
