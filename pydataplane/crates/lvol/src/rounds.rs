//! The requests of channels, served in rounds.
//!
//! In a round every volume has its turn, with a quota, and all that was taken is done with one record of
//! the journal: a volume that asks for much waits for its next turn, one that asks for little waits for
//! one round. Who is first changes with each round, because a record may be full before all had their
//! turn. A round of allocations is not flushed, as the writes that they are for are not either; it is
//! when somebody flushes his volume, and that is done once for all who asked for it in the same round.

use crate::asked::{Request, Want};
use crate::map::Map;
use crate::meta::{Meta, QUIET_WAIT};
use crate::served::{Served, Waiting};
use crate::translate::io_error;
use crate::volume::Volume;
use bdev::IoError;
use blobstore::{Batch, BlobId, Error as StoreError, Store};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

/// Bytes that are zeroed or copied for one volume in a round; one cluster at least.
const FILL_QUOTA: u64 = 8 << 20;
/// Clusters that one volume gains in a round at most.
const ALLOCATE_QUOTA: u64 = 4096;
/// Clusters that one volume loses in a round at most, counting those that it does not have.
const UNMAP_QUOTA: u64 = 4096;
/// Requests of one volume that are looked at in a round.
const REQUEST_QUOTA: usize = 256;

/// Why a volume's turn ends before its queue does.
enum Stop {
    /// The quota is used up, or the record is full.
    Later,
    /// Clusters that were freed are waited for.
    NoRoom,
}

/// A request that is over with the round.
struct Taken {
    waiting: Waiting,
    result: Result<(), StoreError>,
}

/// What is left of a volume's turn.
struct Quota {
    fill: u64,
    allocate: u64,
    unmap: u64,
    requests: usize,
}

/// Adds as much of a request to `batch` as the quota and the record allow. `Ok(None)`: all of it.
fn add<D: blobstore::Disk>(
    store: &mut Store<D>,
    batch: &mut Batch,
    blob: BlobId,
    waiting: &mut Waiting,
    quota: &mut Quota,
    room_comes: bool,
) -> Result<Option<Stop>, StoreError> {
    let Request { want, first, count, .. } = waiting.request;
    if want == Want::AllocateDurably {
        batch.set_durable();
    }
    if want == Want::Unmap {
        if !store.blob(blob)?.thin {
            // It has become thick, which its channel sees before it goes on.
            return Ok(None);
        }
        let piece = (count - waiting.done).min(quota.unmap);
        let added = store.add_unmap(batch, blob, first + waiting.done, piece)?;
        quota.unmap -= added;
        waiting.done += added;
        return Ok((waiting.done < count).then_some(Stop::Later));
    }
    while waiting.done < count {
        if quota.fill == 0 || quota.allocate == 0 {
            return Ok(Some(Stop::Later));
        }
        let filled = batch.filled();
        match store.add_allocation(batch, blob, first + waiting.done) {
            Ok(true) => {
                quota.fill -= batch.filled() - filled;
                quota.allocate -= 1;
                waiting.done += 1;
            }
            Ok(false) => return Ok(Some(Stop::Later)),
            // However long the I/O takes that keeps it from coming.
            Err(StoreError::NoSpace { .. })
                if room_comes && store.is_room_kept(blob, first + waiting.done) =>
            {
                return Ok(Some(Stop::NoRoom));
            }
            Err(e @ StoreError::NoSpace { .. }) if room_comes => {
                let since = *waiting.lacks_room.get_or_insert_with(Instant::now);
                return if since.elapsed() < QUIET_WAIT { Ok(Some(Stop::NoRoom)) } else { Err(e) };
            }
            Err(e) => return Err(e),
        }
    }
    waiting.write(|over| store.add_data(batch, blob, first, over));
    Ok(None)
}

impl Meta {
    /// Whether requests were taken from the channels and not answered yet.
    pub fn has_requests(&self) -> bool {
        self.served.iter().any(|served| !served.queue.is_empty())
    }

    /// Serves those that have channels now, and what others asked for before.
    pub fn take_up_opened(&mut self) {
        let changes = self.thread.changes();
        if changes == self.served_as_of {
            return;
        }
        self.served_as_of = changes;
        let before = std::mem::take(&mut self.served);
        let mut before: HashMap<_, _> =
            before.into_iter().map(|served| (Arc::as_ptr(&served.volume), served)).collect();
        for volume in self.thread.open() {
            let served = before.remove(&Arc::as_ptr(&volume));
            self.served.push(served.unwrap_or_else(|| Served::new(volume)));
        }
        self.served.extend(before.into_values().filter(|served| !served.queue.is_empty()));
    }

    /// One round. Whether there is more to do at once.
    pub fn serve(&mut self) -> bool {
        self.lacks_room = false;
        self.take_up_opened();
        for served in &mut self.served {
            match served.volume.is_removed() {
                true => served.answer_removed(),
                false => served.collect(),
            }
        }
        self.bring_maps();
        if !self.has_requests() {
            return false;
        }
        if let Err(e) = self.store("serve a volume") {
            tracing::debug!("{e}");
            self.refuse_all();
            return false;
        }
        let room_comes = self.waits_for_quiet();
        let Some(store) = &mut self.store else { return false };
        let fill = (FILL_QUOTA / u64::from(store.info().cluster_size)).max(1);
        let mut batch = store.batch();
        let (mut taken, mut more) = (Vec::new(), false);
        let volumes = self.served.len();
        for at in (0..volumes).map(|i| (self.turn + i) % volumes) {
            let served = &mut self.served[at];
            if self.frozen.iter().any(|volume| Arc::ptr_eq(volume, &served.volume)) {
                continue;
            }
            let blob = served.volume.blob();
            let mut quota = Quota {
                fill,
                allocate: ALLOCATE_QUOTA,
                unmap: UNMAP_QUOTA,
                requests: REQUEST_QUOTA,
            };
            while let Some(mut waiting) = served.queue.pop_front() {
                let before = waiting.done;
                match add(store, &mut batch, blob, &mut waiting, &mut quota, room_comes) {
                    Ok(None) => taken.push(Taken { waiting, result: Ok(()) }),
                    Err(e) => taken.push(Taken { waiting, result: Err(e) }),
                    Ok(Some(stop)) => {
                        self.lacks_room |= matches!(stop, Stop::NoRoom);
                        more |= matches!(stop, Stop::Later) || waiting.done > before;
                        served.queue.push_front(waiting);
                        break;
                    }
                }
                quota.requests -= 1;
                if quota.requests == 0 || quota.unmap == 0 {
                    more |= !served.queue.is_empty();
                    break;
                }
            }
        }
        self.turn = (self.turn + 1) % volumes;
        self.finish(batch, taken);
        more
    }

    /// Makes a round durable, changes the maps, and tells the channels.
    fn finish(&mut self, batch: Batch, taken: Vec<Taken>) {
        let Some(store) = &mut self.store else { return };
        let done = store.commit_batch(batch);
        let flushes = taken.iter().any(|t| t.waiting.request.want == Want::Flush);
        let failed: HashMap<_, _> =
            done.failed.iter().map(|(blob, cluster, e)| ((*blob, *cluster), io_error(e))).collect();
        let flushed = if flushes { store.sync().map_err(|_| IoError::Flush) } else { Ok(()) };
        if store.has_tentative() {
            self.round += 1;
        }
        let round = self.round;
        let error = |e: &StoreError| Err(io_error(e));
        let allocated = done.allocated.as_ref().map_or_else(error, |_| Ok(()));
        let unmapped = done.unmapped.as_ref().map_or_else(error, |_| Ok(()));
        for lost in done.unmapped.into_iter().flatten() {
            let Some(volume) = self.volumes.get(&lost.blob).cloned() else { continue };
            let view = volume.view();
            lost.clusters.iter().for_each(|(cluster, now)| view.lose(*cluster, *now));
            let version = volume.bump();
            self.retire(vec![(volume.clone(), version)], lost.freed);
        }
        // The volume whose clusters come, blob by blob.
        let mut gained: Option<(BlobId, Arc<Volume>, Arc<Map>)> = None;
        for (blob, cluster, to) in done.allocated.into_iter().flatten() {
            if gained.as_ref().is_none_or(|(of, _, _)| *of != blob) {
                gained.iter().for_each(|(_, volume, _)| self.publish_volume(volume));
                gained = self.volumes.get(&blob).map(|v| (blob, v.clone(), v.view().own));
                gained.iter().for_each(|(_, volume, _)| volume.set_tentative(round));
            }
            gained.iter().for_each(|(_, _, own)| own.set(cluster, to));
        }
        gained.iter().for_each(|(_, volume, _)| self.publish_volume(volume));
        for (blob, freed) in done.replaced {
            let Some(volume) = self.volumes.get(&blob).cloned() else { continue };
            // Whoever reads what it had does so from before this, and is waited for.
            let version = volume.bump();
            self.retire(vec![(volume, version)], freed);
        }
        // What the store has in memory of a record that failed is nobody's to write to.
        if self.shares_clusters() && allocated.is_ok() {
            let wrote =
                taken.iter().filter(|t| t.result.is_ok() && t.waiting.request.want.writes());
            let wrote: Vec<_> =
                wrote.map(|t| (t.waiting.blob(), t.waiting.request.range())).collect();
            wrote.into_iter().for_each(|(blob, clusters)| self.own_alone(blob, clusters));
        }
        self.publish();
        for Taken { waiting, result } in taken {
            let committed = match waiting.request.want {
                Want::Allocate | Want::AllocateDurably if failed.is_empty() => allocated,
                Want::Allocate | Want::AllocateDurably => {
                    let Request { first, count, .. } = waiting.request;
                    let of = |cluster| failed.get(&(waiting.blob(), cluster));
                    allocated.and((first..first + count).find_map(of).map_or(Ok(()), |e| Err(*e)))
                }
                Want::Unmap => unmapped,
                Want::Flush if waiting.lost_writes() => Err(IoError::Flush),
                Want::Flush => flushed,
                Want::Map => Ok(()),
            };
            waiting.answer(result.map_err(|e| io_error(&e)).and(committed));
        }
    }

    /// Answers everything: the lvstore takes no changes.
    #[cold]
    fn refuse_all(&mut self) {
        let gone = self.store.is_none();
        for waiting in self.served.iter_mut().flat_map(|served| served.queue.drain(..)) {
            waiting.answer(Err(match waiting.request.want {
                _ if gone => IoError::Removed,
                Want::Flush => IoError::Flush,
                _ => IoError::WriteMedium,
            }));
        }
    }
}
