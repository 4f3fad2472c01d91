//! Counts the owners of clusters anew, from the extents pages, while the store is used: where memory knows of too few
//! an owner could write to what others have, and where it knows of too many the cluster does not become free.
//!
//! A step reads some of the pages. What was gained or lost meanwhile is not judged; where blobs came or went, which
//! takes entries from one to another, it begins anew.

use crate::bitmap::{Bitmap, Run};
use crate::check::{Checked, Problem};
use crate::disk::Disk;
use crate::format::{HOLE, POINTERS};
use crate::owners::Recount;
use crate::store::Store;
use std::collections::{BTreeSet, HashMap};

/// Extents pages that one step reads at most; one in the tests here.
const STEP_PAGES: usize = if cfg!(test) { 1 } else { 256 };
/// How often it begins anew.
const BEGINNINGS: u32 = 8;

impl<D: Disk> Store<D> {
    /// One step. `step` is the number of metadata pages for the first one.
    pub(crate) fn recount_step(&mut self, step: u64, lost: &[Run]) -> Checked {
        let mut found = Checked::default();
        let problem = |cause: String| Problem {
            place: "owners of clusters".to_owned(),
            cause,
            repaired: false,
        };
        let going = self.recount.take();
        let count = match going {
            _ if step == self.sb.md_pages => Some(self.begin_recount(step, 1)),
            Some(count) if count.next == step => Some(count),
            other => {
                self.recount = other;
                let cause = "not counted, because another check began meanwhile: check again";
                found.problems.push(problem(cause.to_owned()));
                None
            }
        };
        let Some(mut count) = count else { return found };
        if !count.blobs.iter().eq(self.blobs.keys()) {
            if count.begun == BEGINNINGS {
                let cause = "not counted, because volumes came and went meanwhile: check again";
                found.problems.push(problem(cause.to_owned()));
                self.owners.changed = None;
                return found;
            }
            count = self.begin_recount(step, count.begun + 1);
        }
        match self.count_some(&mut count) {
            Ok(true) => {
                count.next = step + 1;
                found.next = Some(count.next);
                self.recount = Some(count);
                return found;
            }
            Ok(false) => found.problems.extend(self.judge(&count, lost)),
            Err(e) => found.problems.push(problem(format!("not counted: {e}"))),
        }
        self.owners.changed = None;
        found
    }

    fn begin_recount(&mut self, next: u64, begun: u32) -> Recount {
        let bits = self.sb.first_data_cluster + self.clusters.len();
        self.owners.changed = Some(Bitmap::new(bits));
        let (blobs, seen) = (self.blobs.keys().copied().collect(), Bitmap::new(bits));
        Recount { next, begun, blobs, at: (0, 0), seen, counts: HashMap::new() }
    }

    /// Whether there are more pages.
    fn count_some(&mut self, count: &mut Recount) -> Result<bool, crate::Error> {
        for _ in 0..STEP_PAGES {
            let (id, n) = count.at;
            let Some((id, blob)) = self.blobs.range(id..).next().map(|(id, blob)| (*id, blob))
            else {
                return Ok(false);
            };
            let from = if id == count.at.0 { n } else { 0 };
            let Some(n) = blob.chunks.range(from..).next().map(|(n, _)| *n) else {
                count.at = (id + 1, 0);
                continue;
            };
            let brought = self.bring(id, n..n + 1)?;
            let first = u64::from(n) * POINTERS as u64;
            for (_, cluster) in self.blobs[&id].entries(first..first + POINTERS as u64) {
                let is_one = cluster != HOLE && u64::from(cluster) < count.seen.len();
                if is_one && !count.seen.set(cluster.into()) {
                    *count.counts.entry(cluster).or_insert(1) += 1;
                }
            }
            brought.into_iter().for_each(|n| self.leave(id, n));
            count.at = (id, n + 1);
        }
        Ok(true)
    }

    fn judge(&self, count: &Recount, lost: &[Run]) -> Vec<Problem> {
        let is_lost = |cluster: u32| {
            lost.iter().any(|run| (run.first..run.first + run.count).contains(&cluster.into()))
        };
        let changed = |cluster: u32| {
            let at = u64::from(cluster);
            at >= count.seen.len() || self.owners.changed.as_ref().is_none_or(|c| c.get(at))
        };
        let clusters: BTreeSet<u32> =
            self.owners.several().chain(count.counts.keys().copied()).collect();
        let mut problems = Vec::new();
        for cluster in clusters {
            let once = || {
                u64::from(u64::from(cluster) < count.seen.len() && count.seen.get(cluster.into()))
            };
            let owners = count.counts.get(&cluster).copied().unwrap_or_else(once);
            let known = 1 + u64::from(self.owners.more(cluster));
            if owners == known || changed(cluster) || is_lost(cluster) {
                continue;
            }
            let size = u64::from(self.sb.cluster_size);
            let place = format!("cluster {cluster} at byte {}", u64::from(cluster) * size);
            let cause =
                format!("it has {owners} owners, and {known} are known: load the store anew");
            problems.push(Problem { place, cause, repaired: false });
        }
        problems
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Wrap, Wrapped, failed};
    use crate::{BlobId, BlobOptions, DiskError, MemDisk, StoreOptions};
    use std::collections::BTreeMap;

    /// Nothing is read from a byte on.
    struct Bad(u64);

    impl Wrap for Bad {
        fn before(&mut self, op: &'static str, offset: u64, len: u64) -> Result<(), DiskError> {
            match op == "read" && offset + len > self.0 {
                true => Err(failed(op, offset, len)),
                false => Ok(()),
            }
        }
    }

    fn blob(store: &mut Store<Wrapped<Bad>>, n: u128) -> BlobId {
        let (name, uuid) = (format!("b{n}"), uuid::Uuid::from_u128(n));
        let xattrs = BTreeMap::new();
        store.create(&BlobOptions { dif: None, name, uuid, size: 4, thin: true, xattrs }).unwrap()
    }

    /// A store with two blobs, and the two clusters that both have.
    fn store() -> (Store<Wrapped<Bad>>, [BlobId; 2], [u32; 2]) {
        let (name, uuid) = ("lvs".into(), uuid::Uuid::from_u128(1));
        let options = StoreOptions { name, uuid, cluster_size: 64 << 10 };
        let disk = Wrapped { disk: MemDisk::new(8 << 20), with: Bad(u64::MAX) };
        let mut store = Store::create_store(disk, &options).unwrap();
        store.share_clusters().unwrap();
        let [a, b] = [2, 3].map(|n| blob(&mut store, n));
        store.write(a, 0, &[1; 2 << 16]).unwrap();
        let shared = store.share(a, 0, b, 0, 2).unwrap();
        store.release(shared.freed);
        let both = [0, 1].map(|at| store.entry(a, at).unwrap());
        (store, [a, b], both)
    }

    /// Goes on with a check; `amid` is called before each step.
    fn go_on(
        store: &mut Store<Wrapped<Bad>>,
        mut next: Option<u64>,
        mut amid: impl FnMut(&mut Store<Wrapped<Bad>>),
    ) -> Vec<Problem> {
        let mut all = Vec::new();
        while let Some(from) = next {
            amid(store);
            let found = store.check(from, false, &[]).unwrap();
            all.extend(found.problems);
            next = found.next;
        }
        all
    }

    fn problems(store: &mut Store<Wrapped<Bad>>) -> Vec<Problem> {
        go_on(store, Some(0), |_| ())
    }

    #[test]
    fn a_check_tells_of_too_few_owners_and_of_too_many() {
        let (mut store, _, both) = store();
        assert_eq!(problems(&mut store), []);
        assert!(store.owners.remove(both[1]) && store.owners.add(both[0]));
        let at =
            both.map(|cluster| format!("cluster {cluster} at byte {}", u64::from(cluster) << 16));
        let cause = ["has 2 owners, and 3 are", "has 2 owners, and 1 are"]
            .map(|what| format!("it {what} known: load the store anew"));
        let expected = [0, 1].map(|n| Problem {
            place: at[n].clone(),
            cause: cause[n].clone(),
            repaired: false,
        });
        assert_eq!(problems(&mut store), expected);
        // One that was lost and not released has no entry.
        let lost = [Run { first: both[0].into(), count: 2 }];
        let (mut next, mut all) = (Some(0), Vec::new());
        while let Some(from) = next {
            let found = store.check(from, false, &lost).unwrap();
            all.extend(found.problems);
            next = found.next;
        }
        assert_eq!(all, []);
    }

    #[test]
    fn what_changes_between_the_steps_is_no_problem() {
        let (mut store, [a, b], both) = store();
        let mut steps = 0;
        let amid = |store: &mut Store<Wrapped<Bad>>| {
            steps += 1;
            // Wherever the count is, one of both places was looked at already, or neither.
            match steps % 2 {
                0 => store.write(b, 0, &[2; 9]).unwrap(),
                _ => {
                    let shared = store.share(a, 0, b, 0, 3).unwrap();
                    store.release(shared.freed);
                }
            }
        };
        assert_eq!(go_on(&mut store, Some(0), amid), []);
        assert!(steps > 3, "{steps}");
        // Blobs that come have it begin anew.
        let mut n = 10;
        let amid = |store: &mut Store<Wrapped<Bad>>| {
            n += 1;
            if n < 15 {
                blob(store, n);
            }
        };
        assert_eq!(go_on(&mut store, Some(0), amid), []);
        let amid = |store: &mut Store<Wrapped<Bad>>| {
            n += 1;
            blob(store, n);
        };
        let found = go_on(&mut store, Some(0), amid);
        assert!(found[0].cause.contains("volumes came and went"), "{found:?}");
        assert!(store.owners.changed.is_none() && store.is_shared(both[1]));
    }

    #[test]
    fn what_cannot_be_read_is_told_and_so_is_another_check() {
        let (mut store, _, _) = store();
        let pages = store.sb.md_pages;
        let first = store.check(pages, false, &[]).unwrap();
        assert_eq!((first.problems, first.next), (vec![], Some(pages + 1)));
        // Another one begins, and the first one is told so.
        assert_eq!(store.check(pages, false, &[]).unwrap().problems, []);
        assert_eq!(store.check(pages + 1, false, &[]).unwrap().problems, []);
        let found = store.check(pages + 1, false, &[]).unwrap();
        assert!(found.problems[0].cause.contains("another check began"), "{found:?}");
        assert_eq!(found.next, None);
        store.checkpoint().unwrap();
        store.let_go_all();
        store.disk_mut().with.0 = 0;
        let found = go_on(&mut store, Some(pages), |_| ());
        let [problem] = &found[..] else { panic!("{found:?}") };
        assert!(problem.cause.starts_with("not counted: ") && problem.cause.contains("injected"));
    }
}
