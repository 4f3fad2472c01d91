//! Pages as a load keeps them until it knows whose they are.

use crate::disk::Disk;
use crate::error::Error;
use crate::extents::{Extents, RUNS_MAX};
use crate::format::{HOLE, Page, PageId};
use crate::store::Store;

/// A page in use that was read. Not all of each at once: those of a large store have gigabytes.
pub(super) enum Found {
    Page(Page),
    Extents(Clusters),
}

/// An extents page, whose clusters are marked as taken.
pub(super) struct Clusters {
    pub id: PageId,
    /// What the page says how many entries it has, and how many it has.
    pub said: u32,
    pub used: u32,
    pub holes: u32,
    /// Entries from the first to the last one that is not 0.
    pub end: usize,
    pub extents: Extents,
}

impl Found {
    pub fn id(&self) -> PageId {
        match self {
            Found::Page(page) => page.id(),
            Found::Extents(clusters) => clusters.id,
        }
    }
}

impl<D: Disk> Store<D> {
    /// Marks the clusters of an extents page as taken.
    pub(super) fn take_clusters(&mut self, at: u32, page: &Page) -> Result<Clusters, Error> {
        let (mut used, mut holes, mut end) = (0, 0, 0);
        let entries = page.pointers().iter().map(|entry| entry.get()).enumerate();
        for (i, to) in entries.filter(|(_, to)| *to != 0) {
            used += 1;
            end = i + 1;
            if to == HOLE {
                holes += 1;
                continue;
            }
            let bit = u64::from(to).checked_sub(self.sb.first_data_cluster);
            match bit.filter(|b| *b < self.clusters.len()) {
                None => {
                    let cause = format!("its cluster {to} is outside the data area");
                    return Err(self.damaged(at, &cause));
                }
                Some(bit) if self.clusters.set(bit) => {}
                Some(_) if self.sb.shares && self.owners.add(to) => {}
                Some(_) => {
                    let cause = format!("its cluster {to} has another owner too");
                    return Err(self.damaged(at, &cause));
                }
            }
        }
        let extents = Extents::of(page.pointers(), RUNS_MAX);
        Ok(Clusters { id: page.id(), said: page.used(), used, holes, end, extents })
    }
}
