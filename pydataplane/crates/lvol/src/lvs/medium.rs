//! What an lvstore has on its medium, looked at while its volumes are served.

use super::Lvs;
use crate::error::Error;
use crate::translate::refused;
use blobstore::{Checked, Dumped, Scrubbed, Store};
use std::time::{Duration, Instant};

/// How long one call reads data, for whoever waits for it to hear of it.
const SCRUB_TIME: Duration = Duration::from_millis(200);

impl Lvs {
    /// Compares the metadata on the medium with that in memory, step by step, while volumes are served;
    /// with `repair` what differs is written anew.
    pub fn check(&self, repair: bool) -> Result<Checked, Error> {
        let op = format!("check lvstore {}", self.name());
        let cluster_size = self.info.cluster_size;
        let mut all = Checked { next: Some(0), ..Checked::default() };
        while let Some(from) = all.next {
            let _turn = self.turn(&op)?;
            let job = op.clone();
            let step = self.meta(&op, move |meta| {
                let lost = meta.held_runs();
                let step = meta.store(&job)?.check(from, repair, &lost);
                step.map_err(|e| refused(e, &job, cluster_size))
            })?;
            all.pages += step.pages;
            all.problems.extend(step.problems);
            all.next = step.next;
        }
        Ok(all)
    }

    /// Tells what is on the medium, from metadata page `from` on, while volumes are served.
    pub fn dump(&self, from: u64) -> Result<Dumped, Error> {
        let op = format!("dump lvstore {}", self.name());
        let cluster_size = self.info.cluster_size;
        self.meta(&op.clone(), move |meta| {
            let disk = meta.store(&op)?.disk_mut();
            Store::dump(disk, from).map_err(|e| refused(e, &op, cluster_size))
        })
    }

    /// Reads some of the data of volumes, from byte `from` of the device on, while they are served.
    pub fn scrub(&self, from: u64) -> Result<Scrubbed, Error> {
        let op = format!("scrub lvstore {}", self.name());
        let end = Instant::now() + SCRUB_TIME;
        let mut all = Scrubbed { next: Some(from), ..Scrubbed::default() };
        while let Some(from) = all.next
            && Instant::now() < end
        {
            let job = op.clone();
            // Others have their turn between two steps.
            let step = self.meta(&op, move |meta| Ok(meta.store(&job)?.scrub(from)))?;
            all.bytes += step.bytes;
            all.unreadable.extend(step.unreadable);
            all.next = step.next;
        }
        Ok(all)
    }
}
