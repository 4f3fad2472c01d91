//! What of the clusters that a volume shows is its alone, and what it shares with its snapshots and clones.

use crate::map::View;

/// Clusters that a volume has or shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Space {
    /// Those of its snapshots that it shows, and its own that a clone shows.
    pub shared: u64,
    /// Its own that nobody else shows: what its deletion frees.
    pub exclusive: u64,
}

/// The space of a volume with these clones.
pub(crate) fn of(volume: &View, clones: &[View]) -> Space {
    let mut space = Space::default();
    for cluster in 0..volume.clusters() {
        if volume.own(cluster) != 0 {
            match clones.iter().any(|clone| clone.shows_parent(cluster)) {
                true => space.shared += 1,
                false => space.exclusive += 1,
            }
        } else if volume.source(cluster) != 0 {
            space.shared += 1;
        }
    }
    space
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::Map;
    use blobstore::HOLE;
    use std::sync::Arc;

    #[test]
    fn clusters_are_of_one_or_shared() {
        let map = |entries: &[(u64, u32)]| {
            let map = Map::new(8);
            entries.iter().for_each(|(cluster, to)| map.set(*cluster, *to));
            map
        };
        let snapshot = View::of(map(&[(0, 10), (1, 11), (2, 12), (5, 15), (7, 17)]));
        let clone = |entries: &[(u64, u32)]| View {
            own: Arc::new(map(entries)),
            shown: Some((snapshot.flat(), 6)),
            external: None,
            shares: false,
        };
        assert_eq!(of(&snapshot, &[]), Space { shared: 0, exclusive: 5 });
        // It hides two, and was shorter once: the last is hidden, too.
        let one = clone(&[(1, 21), (2, HOLE), (4, 24)]);
        assert_eq!(of(&snapshot, std::slice::from_ref(&one)), Space { shared: 2, exclusive: 3 });
        assert_eq!(of(&one, &[]), Space { shared: 2, exclusive: 2 });
        let other = clone(&[]);
        assert_eq!(of(&snapshot, &[one, other]), Space { shared: 4, exclusive: 1 });
    }
}
