//! Which parts of a volume are allocated, and which changed between two snapshots: told by their maps,
//! without a look at the data.

use crate::map::View;
use protection::Layout;

/// Clusters that one call looks at, at most: some milliseconds.
pub(crate) const LOOKED_AT: u64 = 1 << 20;

/// A part of a volume, of whole clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Where it begins, in bytes.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

/// Some of the ranges that were asked for, in order; neighbours of one call are one range.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranges {
    /// May be none, though more follow.
    pub ranges: Vec<Range>,
    /// Where the next call goes on, in bytes; `None`: these were the last.
    pub next_offset: Option<u64>,
}

/// The ranges of a volume in which it shows another cluster of the device, or external parent, than `since` does, and where
/// `since` is `None`, any; from `offset` on, at most `most`.
pub(crate) fn of(
    volume: &View,
    since: Option<&View>,
    cluster_size: u64,
    offset: u64,
    most: usize,
) -> Ranges {
    let shows = |view: &View, cluster: u64| (view.source(cluster), view.outside(cluster));
    let before = |cluster: u64| match since {
        Some(since) if cluster < since.clusters() => shows(since, cluster),
        _ => (0, None),
    };
    let mut found = Ranges::default();
    let first = offset / cluster_size;
    let end = volume.clusters().min(first.saturating_add(LOOKED_AT));
    for cluster in first..end {
        if shows(volume, cluster) == before(cluster) {
            continue;
        }
        let at = cluster * cluster_size;
        let full = found.ranges.len() == most;
        match found.ranges.last_mut() {
            Some(last) if last.offset + last.length == at => last.length += cluster_size,
            _ if full => {
                found.next_offset = Some(at);
                return found;
            }
            _ => found.ranges.push(Range { offset: at, length: cluster_size }),
        }
    }
    found.next_offset = (end < volume.clusters()).then_some(end * cluster_size);
    found
}

/// Those ranges, of a volume that keeps protection information among its clusters, of what it shows.
pub(crate) fn of_data(found: Ranges, layout: &Layout, cluster_size: u64) -> Ranges {
    let shown = |at: u64| layout.data_clusters(at / cluster_size) * cluster_size;
    let mut ranges: Vec<Range> = Vec::with_capacity(found.ranges.len());
    for range in found.ranges {
        let (offset, end) = (shown(range.offset), shown(range.offset + range.length));
        match ranges.last_mut() {
            _ if end == offset => {}
            Some(last) if last.offset + last.length == offset => last.length = end - last.offset,
            _ => ranges.push(Range { offset, length: end - offset }),
        }
    }
    Ranges { ranges, next_offset: found.next_offset.map(shown) }
}

/// What a volume shows from a cluster on: whether it is nothing, and in how many clusters it stays so, as
/// far as one call looks: at `most` clusters. No clusters at or beyond the end.
pub(crate) fn run(volume: &View, cluster: u64, most: u64) -> (bool, u64) {
    let is_hole = |at: u64| volume.source(at) == 0 && !volume.is_external(at);
    let end = volume.clusters();
    if cluster >= end {
        return (false, 0);
    }
    let hole = is_hole(cluster);
    let (mut at, mut looked_at) = (cluster + 1, 0);
    while at < end && looked_at < most {
        let mapped = if hole { volume.unmapped_until(at) } else { at };
        if mapped > at {
            at = mapped;
        } else if is_hole(at) == hole {
            (at, looked_at) = (at + 1, looked_at + 1);
        } else {
            break;
        }
    }
    (hole, at - cluster)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::Map;
    use blobstore::HOLE;
    use proptest::prelude::*;

    const CLUSTER: u64 = 1 << 20;

    /// All clusters of all pages.
    fn all(volume: &View, since: Option<&View>, most: usize) -> Vec<u64> {
        let (mut clusters, mut next) = (Vec::new(), Some(0));
        while let Some(offset) = next {
            let page = of(volume, since, CLUSTER, offset, most);
            assert!(page.ranges.len() <= most);
            for range in &page.ranges {
                let first = range.offset / CLUSTER;
                clusters.extend(first..first + range.length / CLUSTER);
            }
            next = page.next_offset;
        }
        clusters
    }

    proptest! {
        #[test]
        fn each_cluster_that_shows_something_else_is_told_once(
            sizes in [1..40u64, 1..40u64],
            entries in prop::collection::vec((any::<bool>(), any::<prop::sample::Index>(), 0..4u32), 0..60),
            most in 1..5usize,
        ) {
            let maps = sizes.map(Map::new);
            for (which, at, to) in entries {
                let map = &maps[usize::from(which)];
                map.set(at.index(map.clusters() as usize) as u64, if to == 3 { HOLE } else { to });
            }
            let [older, newer] = maps.map(View::of);
            let shows = |view: &View, c: u64| if c < view.clusters() { view.source(c) } else { 0 };
            let clusters = 0..newer.clusters();
            let changed = clusters.clone().filter(|c| shows(&newer, *c) != shows(&older, *c));
            prop_assert_eq!(all(&newer, Some(&older), most), changed.collect::<Vec<_>>());
            let allocated = clusters.filter(|c| shows(&newer, *c) != 0).collect::<Vec<_>>();
            prop_assert_eq!(all(&newer, None, most), allocated);
        }
    }

    #[test]
    fn runs_of_data_and_of_holes_take_turns_up_to_the_end() {
        let map = Map::new(LOOKED_AT + 9);
        for (cluster, to) in [(0, 7), (1, 8), (2, HOLE), (5, 9)] {
            map.set(cluster, to);
        }
        let view = View::of(map);
        assert_eq!(run(&view, 0, LOOKED_AT), (false, 2));
        assert_eq!(run(&view, 1, LOOKED_AT), (false, 1));
        assert_eq!(run(&view, 2, LOOKED_AT), (true, 3));
        assert_eq!(run(&view, 5, LOOKED_AT), (false, 1));
        // What no map was made of is not looked at cluster by cluster.
        assert_eq!(run(&view, 6, LOOKED_AT), (true, LOOKED_AT + 3));
        assert_eq!(run(&view, LOOKED_AT + 9, LOOKED_AT), (false, 0));
        assert_eq!(run(&view, u64::MAX, LOOKED_AT), (false, 0));
        let full = Map::new(LOOKED_AT + 9);
        (0..LOOKED_AT + 9).for_each(|cluster| full.set(cluster, 7));
        assert_eq!(run(&View::of(full), 3, LOOKED_AT), (false, LOOKED_AT + 1));
    }

    proptest! {
        /// Of a clone whose parent is shorter than itself, too.
        #[test]
        fn runs_are_what_the_clusters_are(
            sizes in [1..40u64, 1..40u64],
            shown in 0..50u64,
            entries in prop::collection::vec((any::<bool>(), any::<prop::sample::Index>(), 0..4u32), 0..60),
        ) {
            let maps = sizes.map(Map::new);
            for (which, at, to) in entries {
                let map = &maps[usize::from(which)];
                map.set(at.index(map.clusters() as usize) as u64, if to == 3 { HOLE } else { to });
            }
            let [parent, own] = maps;
            let before = shown.min(parent.clusters());
            let view = View { shown: Some((parent.into(), before)), ..View::of(own) };
            let mut told = Vec::new();
            while (told.len() as u64) < view.clusters() {
                let (hole, clusters) = run(&view, told.len() as u64, 7);
                prop_assert!(clusters > 0);
                told.extend(std::iter::repeat_n(hole, clusters as usize));
            }
            let is: Vec<_> = (0..view.clusters()).map(|cluster| view.source(cluster) == 0).collect();
            prop_assert_eq!(told, is);
        }
    }

    #[test]
    fn a_large_volume_takes_several_calls() {
        let map = Map::new(2 * LOOKED_AT + 5);
        map.set(LOOKED_AT - 1, 7);
        map.set(LOOKED_AT, 8);
        let view = View::of(map);
        let first = of(&view, None, CLUSTER, 0, 10);
        assert_eq!(first.next_offset, Some(LOOKED_AT * CLUSTER));
        assert_eq!(all(&view, None, 10), [LOOKED_AT - 1, LOOKED_AT]);
        assert_eq!(of(&view, None, CLUSTER, u64::MAX, 10), Ranges::default());
    }
}
