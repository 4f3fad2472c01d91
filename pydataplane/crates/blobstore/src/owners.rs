//! How many owners each cluster of the device has, where that is more than one.

use crate::bitmap::Bitmap;
use std::collections::HashMap;

/// Clusters with more owners than one.
#[derive(Default)]
pub(crate) struct Owners {
    /// How many there are beside the first one; never 0.
    more: HashMap<u32, u32>,
    /// The sum of these.
    kept: u64,
    /// Those that were gained or lost since a count of them began, while there is one.
    pub changed: Option<Bitmap>,
}

impl Owners {
    /// Whether a cluster has more than one.
    #[inline]
    pub fn are_several(&self, cluster: u32) -> bool {
        !self.more.is_empty() && self.more.contains_key(&cluster)
    }

    /// How many a cluster has beside the first one.
    pub fn more(&self, cluster: u32) -> u32 {
        self.more.get(&cluster).copied().unwrap_or(0)
    }

    /// Whether no cluster has more than one.
    pub fn are_single(&self) -> bool {
        self.more.is_empty()
    }

    /// Free clusters that are kept for them.
    pub fn kept(&self) -> u64 {
        self.kept
    }

    /// One more owns a cluster which has an owner; `false`: it cannot be counted.
    #[must_use]
    pub fn add(&mut self, cluster: u32) -> bool {
        self.note(cluster);
        let more = self.more.entry(cluster).or_default();
        let Some(sum) = more.checked_add(1) else { return false };
        *more = sum;
        self.kept += 1;
        true
    }

    /// Clusters with more than one.
    pub fn several(&self) -> impl Iterator<Item = u32> + '_ {
        self.more.keys().copied()
    }

    fn note(&mut self, cluster: u32) {
        if let Some(changed) = self.changed.as_mut().filter(|c| u64::from(cluster) < c.len()) {
            changed.set(cluster.into());
        }
    }

    /// One owner less; `false`: that was the only one.
    #[must_use]
    pub fn remove(&mut self, cluster: u32) -> bool {
        self.note(cluster);
        if self.more.is_empty() {
            return false;
        }
        let Some(more) = self.more.get_mut(&cluster) else { return false };
        *more -= 1;
        self.kept -= 1;
        if *more == 0 {
            self.more.remove(&cluster);
        }
        true
    }
}

/// A count of them that is under way, while the store is used.
pub(crate) struct Recount {
    /// The step that comes next, as `Store::check` numbers them.
    pub next: u64,
    pub begun: u32,
    /// Those that there were when it began.
    pub blobs: Vec<u64>,
    /// The extents page that is looked at next: (blob, number in it).
    pub at: (u64, u32),
    pub seen: Bitmap,
    /// Of those that were seen more than once.
    pub counts: HashMap<u32, u64>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        /// As a count for each cluster, whatever is added and removed.
        #[test]
        fn owners_are_counted(steps in prop::collection::vec((any::<bool>(), 0..5u32), 0..60)) {
            let (mut owners, mut model) = (Owners::default(), BTreeMap::<u32, u64>::new());
            for (adds, cluster) in steps {
                let more = model.entry(cluster).or_default();
                if adds {
                    prop_assert!(owners.add(cluster));
                    *more += 1;
                } else {
                    prop_assert_eq!(owners.remove(cluster), *more > 0);
                    *more = more.saturating_sub(1);
                }
                prop_assert_eq!(owners.are_several(cluster), *more > 0);
            }
            prop_assert_eq!(owners.kept(), model.values().sum::<u64>());
            prop_assert_eq!(owners.are_single(), owners.kept() == 0);
        }
    }

    #[test]
    fn what_cannot_be_counted_is_not() {
        let mut owners = Owners::default();
        owners.more.insert(7, u32::MAX);
        assert!(!owners.add(7));
        assert_eq!(owners.more[&7], u32::MAX);
    }
}
