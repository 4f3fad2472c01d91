use super::*;
use crate::Layout;
use guestmem::Sg;

#[test]
fn sums_over_open_and_closed_channels() {
    let s = Stats::new();
    let (mut a, mut b) = (s.channel(), s.channel());
    a.record(Op::Read, 4096, 10, Ok(()));
    b.record(Op::Read, 512, 30, Ok(()));
    b.record(Op::Write, 512, 5, Err(IoError::NoSpace));
    drop(b);
    let sum = s.snapshot();
    let read = OpStat { ops: 2, bytes: 4608, ticks: 40, max_ticks: 30, min_ticks: 10 };
    assert_eq!(*sum.op(Op::Read), read);
    assert_eq!(*sum.op(Op::Write), OpStat::default());
    assert_eq!(sum.errors_of(IoError::NoSpace), 1);
    assert_eq!(sum.errors.iter().sum::<u64>(), 1);
    assert_eq!(s.per_channel().len(), 1);
}

#[test]
fn a_reset_forgets_all_or_only_the_extremes() {
    let s = Stats::new();
    let mut a = s.channel();
    a.record(Op::Write, 512, 7, Ok(()));
    s.reset(StatsReset::MaxMin);
    let w = *s.snapshot().op(Op::Write);
    assert_eq!((w.ops, w.ticks, w.max_ticks, w.min_ticks), (1, 7, 0, 0));
    a.record(Op::Write, 512, 3, Ok(()));
    let w = *s.snapshot().op(Op::Write);
    assert_eq!((w.ops, w.ticks, w.max_ticks, w.min_ticks), (2, 10, 3, 3));
    s.reset(StatsReset::All);
    assert_eq!(s.snapshot(), IoStat::default());
    a.record(Op::Write, 512, 4, Ok(()));
    drop(a);
    let w = *s.snapshot().op(Op::Write);
    assert_eq!((w.ops, w.bytes, w.ticks, w.max_ticks), (1, 512, 4, 4));
}

#[test]
fn the_order_of_the_tables_is_that_of_the_discriminants() {
    assert!(Op::ALL.iter().enumerate().all(|(i, op)| *op as usize == i));
    assert!(IoError::ALL.iter().enumerate().all(|(i, e)| *e as usize == i));
}

fn histogram(op: Option<Op>) -> HistogramOptions {
    HistogramOptions { layout: Layout::new(7, 0, u64::MAX).unwrap(), op }
}

/// How often each number of ticks was counted for reads; each below 256, so that it has a bucket of its own.
fn reads(stats: &Stats) -> Vec<(usize, u64)> {
    let latencies = stats.latencies().unwrap();
    let counts = latencies.of(Op::Read).unwrap().iter().copied().enumerate();
    counts.filter(|(_, count)| *count > 0).collect()
}

#[test]
fn a_histogram_counts_from_when_it_is_enabled_also_of_channels_that_were_open() {
    let s = Stats::new();
    let mut a = s.channel();
    a.record(Op::Read, 512, 9, Ok(()));
    assert_eq!(s.latencies(), None);
    s.set_histogram(Some(histogram(None)));
    let mut b = s.channel();
    a.record(Op::Read, 512, 10, Ok(()));
    b.record(Op::Read, 512, 10, Ok(()));
    b.record(Op::Read, 512, 11, Err(IoError::ReadMedium));
    assert_eq!(reads(&s), [(10, 2)]);
    // Statistics have their own reset.
    s.reset(StatsReset::All);
    a.record(Op::Read, 512, 12, Ok(()));
    assert_eq!((reads(&s), s.snapshot().op(Op::Read).ops), (vec![(10, 2), (12, 1)], 1));
    // A new one begins with nothing.
    s.set_histogram(Some(histogram(Some(Op::Read))));
    a.record(Op::Write, 512, 13, Ok(()));
    b.record(Op::Read, 512, 14, Ok(()));
    assert_eq!(reads(&s), [(14, 1)]);
    s.set_histogram(None);
    a.record(Op::Read, 512, 15, Ok(()));
    assert_eq!(s.latencies(), None);
}

#[test]
fn what_closed_channels_counted_stays_and_takes_no_more_memory_than_those_that_were_open() {
    let s = Stats::new();
    s.set_histogram(Some(histogram(None)));
    for n in 0..50 {
        let (mut a, mut b) = (s.channel(), s.channel());
        a.record(Op::Read, 512, n, Ok(()));
        b.record(Op::Read, 512, n, Ok(()));
    }
    assert_eq!(reads(&s), (0..50).map(|n| (n, 2)).collect::<Vec<_>>());
    assert_eq!(s.lock().spare.len(), 2);
}

#[test]
fn where_there_is_a_histogram_each_io_is_timed() {
    let s = Stats::new();
    let mut a = s.channel();
    let io = Io { op: Op::Read, fua: false, lba: 0, blocks: 1, sg: Sg::EMPTY, tag: 0 };
    let go = |a: &mut ChannelStats| {
        let begun = a.begin();
        a.end(&io, 512, begun, Ok(()));
        begun.is_some()
    };
    assert_eq!((0..SYNC_SAMPLE * 2).filter(|_| go(&mut a)).count(), 2);
    assert!(go(&mut a) && !go(&mut a));
    s.set_histogram(Some(histogram(None)));
    while !go(&mut a) {}
    assert!((1..40).all(|_| go(&mut a)));
    let latencies = s.latencies().unwrap();
    assert_eq!(latencies.all().iter().sum::<u64>(), 40);
    s.set_histogram(None);
    assert_eq!((0..SYNC_SAMPLE * 2).filter(|_| go(&mut a)).count(), 2);
}

#[test]
fn whoever_reads_delays_no_io() {
    let s = Stats::new();
    let mut a = s.channel();
    s.set_histogram(Some(histogram(None)));
    let reading = s.lock();
    a.record(Op::Read, 512, 1, Ok(()));
    drop(reading);
    a.record(Op::Read, 512, 2, Ok(()));
    assert_eq!(reads(&s), [(2, 1)]);
}
