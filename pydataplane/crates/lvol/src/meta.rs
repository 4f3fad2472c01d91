//! The metadata thread: one per lvstore, the only one that changes its blobstore.
//!
//! Control threads hand it jobs and wait; channels put requests into their queues and ring the bell.
//! Clusters that a volume lost are handed back to the store only when every channel is quiet,
//! that is, has nothing in flight that was translated while the volume still had them.

use crate::disk::BdevDisk;
use crate::error::Error;
use crate::translate::{io_error, refused};
use crate::volume::{ChannelShared, Reply, Request, Volume, Want};
use blobstore::{Disk, Error as StoreError, Freed, Reservation, Run, Store};
use parking_lot::{Mutex, MutexGuard};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

/// Bytes zeroed for a new thick volume between two looks at the channels' requests.
const ZERO_STEP: u64 = 64 << 20;
/// Bytes of freed clusters that the bdev is told of between two such looks: giving back a whole disk
/// takes a while.
const UNMAP_STEP: u64 = 1 << 30;
/// How long a change that lacks room waits for channels to let go of clusters that were freed.
const QUIET_WAIT: Duration = Duration::from_secs(1);
/// How often channels are looked at while freed clusters wait for them.
const QUIET_POLL: Duration = Duration::from_millis(1);

/// Wakes the metadata thread. Costs one atomic swap when it was rung already.
#[derive(Clone, Default)]
pub(crate) struct Bell(Arc<BellState>);

#[derive(Default)]
struct BellState {
    rung: AtomicBool,
    thread: OnceLock<Thread>,
}

impl Bell {
    /// Publish the work first, then ring.
    pub fn ring(&self) {
        if !self.0.rung.swap(true, Ordering::AcqRel)
            && let Some(thread) = self.0.thread.get()
        {
            thread.unpark();
        }
    }

    fn take(&self) -> bool {
        self.0.rung.swap(false, Ordering::AcqRel)
    }
}

/// What everybody may know of an lvstore without asking its thread.
#[derive(Default)]
pub(crate) struct Gauges {
    pub data_clusters: AtomicU64,
    pub free_clusters: AtomicU64,
    pub stopped: OnceLock<String>,
}

type Job = Box<dyn FnOnce(&mut Meta) + Send>;

/// Jobs in order; `None` once the thread ended, however it ended.
#[derive(Clone)]
struct Jobs(Arc<Mutex<Option<VecDeque<Job>>>>);

impl Jobs {
    fn lock(&self) -> MutexGuard<'_, Option<VecDeque<Job>>> {
        self.0.lock()
    }

    /// Appends a job; drops it when the thread is gone.
    fn push(&self, job: Job) {
        if let Some(jobs) = self.lock().as_mut() {
            jobs.push_back(job);
        }
    }

    fn pop(&self) -> Option<Job> {
        self.lock().as_mut().and_then(VecDeque::pop_front)
    }
}

/// Ends the queue when the thread ends, so that nobody waits for ever.
struct EndOfJobs(Jobs);

impl Drop for EndOfJobs {
    fn drop(&mut self) {
        let left = self.0.lock().take();
        drop(left);
    }
}

/// Why a job was not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotRun {
    /// The thread was busy with another one all the time.
    Busy,
    /// The thread has ended.
    Gone,
}

/// The thread as others see it.
pub(crate) struct MetaThread {
    jobs: Jobs,
    bell: Bell,
    join: Mutex<Option<JoinHandle<()>>>,
}

impl MetaThread {
    /// Starts the thread, which makes its store with `open` first and hands out what `open` found.
    pub fn start<R: Send + 'static>(
        open: impl FnOnce(Bell) -> Result<(Meta, R), Error> + Send + 'static,
    ) -> Result<(MetaThread, R), Error> {
        let jobs = Jobs(Arc::new(Mutex::new(Some(VecDeque::new()))));
        let bell = Bell::default();
        let (tell, told) = mpsc::channel();
        let thread = {
            let (jobs, bell) = (jobs.clone(), bell.clone());
            thread::Builder::new().name("lvstore".into()).spawn(move || {
                let _ = bell.0.thread.set(thread::current());
                let _end = EndOfJobs(jobs.clone());
                match open(bell.clone()) {
                    Ok((mut meta, found)) => {
                        let _ = tell.send(Ok(found));
                        meta.run(&jobs, &bell);
                    }
                    Err(e) => drop(tell.send(Err(e))),
                }
            })
        };
        let start = "start the lvstore's thread";
        let failed = |cause: String| Error::Io { op: start.into(), cause };
        let join = thread.map_err(|e| failed(e.to_string()))?;
        match told.recv() {
            Ok(Ok(found)) => Ok((MetaThread { jobs, bell, join: Mutex::new(Some(join)) }, found)),
            Ok(Err(e)) => Err(e),
            Err(_) => Err(failed("it panicked".into())),
        }
    }

    /// Runs `f` on the thread and returns its result. Waits as long as it takes once it has begun: the
    /// caller must know what became of it.
    pub fn call<R: Send + 'static>(
        &self,
        timeout: Duration,
        f: impl FnOnce(&mut Meta) -> R + Send + 'static,
    ) -> Result<R, NotRun> {
        let (tell, told) = mpsc::channel();
        let parcel = Arc::new(Mutex::new(Some(f)));
        let take = |parcel: &Mutex<Option<_>>| parcel.lock().take();
        let job: Job = {
            let parcel = parcel.clone();
            Box::new(move |meta| {
                let Some(f) = take(&parcel) else { return };
                let result = f(meta);
                // The caller may look at the gauges at once.
                meta.publish();
                let _ = tell.send(result);
            })
        };
        self.jobs.push(job);
        self.bell.ring();
        match told.recv_timeout(timeout) {
            Ok(result) => Ok(result),
            Err(RecvTimeoutError::Timeout) if take(&parcel).is_some() => Err(NotRun::Busy),
            Err(RecvTimeoutError::Timeout) => told.recv().map_err(|_| NotRun::Gone),
            Err(RecvTimeoutError::Disconnected) => Err(NotRun::Gone),
        }
    }

    /// Wakes the thread; for channels.
    pub fn bell(&self) -> Bell {
        self.bell.clone()
    }

    /// Ends the thread after what it was given before.
    pub fn stop(&self) {
        let join = self.join.lock().take();
        if let Some(join) = join {
            self.jobs.push(Box::new(|meta| meta.stop = true));
            self.bell.ring();
            _ = join.join();
        }
    }
}

impl Drop for MetaThread {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Clusters that wait until a volume's channels are quiet.
struct Retiring {
    volume: Arc<Volume>,
    version: u64,
    freed: Freed,
    /// Those that the bdev was not yet told to unmap.
    not_yet_unmapped: Vec<Run>,
}

impl Retiring {
    /// Takes at most `most` clusters of those.
    fn next(&mut self, most: u64) -> Option<Run> {
        let run = self.not_yet_unmapped.last_mut()?;
        let piece = Run { first: run.first, count: run.count.min(most) };
        run.first += piece.count;
        run.count -= piece.count;
        if run.count == 0 {
            self.not_yet_unmapped.pop();
        }
        Some(piece)
    }
}

/// The thread's own state.
pub(crate) struct Meta {
    /// `None` after it was closed or destroyed.
    store: Option<Store<BdevDisk>>,
    volumes: Vec<Arc<Volume>>,
    retiring: Vec<Retiring>,
    gauges: Arc<Gauges>,
    stop: bool,
}

impl Meta {
    pub fn new(store: Store<BdevDisk>, volumes: Vec<Arc<Volume>>, gauges: Arc<Gauges>) -> Self {
        let mut meta =
            Meta { store: Some(store), volumes, retiring: Vec::new(), gauges, stop: false };
        meta.publish();
        meta
    }

    fn run(&mut self, jobs: &Jobs, bell: &Bell) {
        while !self.stop {
            bell.take();
            if let Some(job) = jobs.pop() {
                job(self);
                bell.ring();
            }
            self.serve();
            let more = self.reap();
            if more || bell.0.rung.load(Ordering::Acquire) {
                continue;
            }
            if self.retiring.is_empty() {
                thread::park();
            } else {
                thread::park_timeout(QUIET_POLL);
            }
        }
        if let Some(store) = self.store.take()
            && let Err(e) = store.close()
        {
            tracing::warn!("an lvstore was not closed in order; its journal is replayed: {e}");
        }
    }

    /// The store, as long as the lvstore is loaded.
    pub fn store(&mut self, op: &str) -> Result<&mut Store<BdevDisk>, Error> {
        let gone = || Error::Stopped { op: op.into(), cause: "it was unloaded".into() };
        self.store.as_mut().ok_or_else(gone)
    }

    /// Tells everybody what changed.
    fn publish(&mut self) {
        let Some(store) = &self.store else { return };
        let info = store.info();
        let waiting = self.retiring.iter().flat_map(|r| r.freed.runs()).map(|r| r.count);
        let free = info.free_clusters + waiting.sum::<u64>();
        self.gauges.data_clusters.store(info.data_clusters, Ordering::Relaxed);
        self.gauges.free_clusters.store(free, Ordering::Relaxed);
        if let Some(cause) = info.stopped
            && self.gauges.stopped.set(cause.clone()).is_ok()
        {
            tracing::error!("lvstore {} takes no more changes: {cause}", info.name);
        }
    }

    fn publish_volume(&self, volume: &Volume) {
        if let Some(store) = &self.store
            && let Ok(blob) = store.blob(volume.id.blob)
        {
            volume.allocated.store(blob.allocated, Ordering::Relaxed);
        }
    }

    pub fn add_volume(&mut self, volume: Arc<Volume>) {
        self.publish_volume(&volume);
        self.volumes.push(volume);
    }

    /// Takes clusters, waiting for those that channels still use if there are too few others.
    pub fn reserve(&mut self, op: &str, count: u64) -> Result<Reservation, Error> {
        let deadline = Instant::now() + QUIET_WAIT;
        let mut more = false;
        loop {
            let cluster_size = self.store(op)?.info().cluster_size;
            match self.store(op)?.reserve(count) {
                Err(StoreError::NoSpace { .. })
                    if !self.retiring.is_empty() && (more || Instant::now() < deadline) =>
                {
                    more = self.reap();
                    if more {
                        self.serve();
                    } else {
                        thread::sleep(QUIET_POLL / 10);
                    }
                }
                reserved => return reserved.map_err(|e| refused(e, op, cluster_size)),
            }
        }
    }

    /// Takes clusters and zeroes them, serving the channels meanwhile.
    pub fn reserve_zeroed(&mut self, op: &str, count: u64) -> Result<Reservation, Error> {
        let reservation = self.reserve(op, count)?;
        let cluster_size = self.store(op)?.info().cluster_size;
        let step = (ZERO_STEP / u64::from(cluster_size)).max(1);
        for run in reservation.runs().to_vec() {
            let mut at = run.first;
            while at < run.first + run.count {
                let piece = Run { first: at, count: step.min(run.first + run.count - at) };
                if let Err(e) = self.store(op)?.zero(piece) {
                    self.store(op)?.unreserve(reservation);
                    return Err(refused(e, op, cluster_size));
                }
                at += piece.count;
                self.serve();
            }
        }
        Ok(reservation)
    }

    /// Clusters that `volume` durably lost and that left its map: they are free when no channel uses
    /// the map as it was before `version`.
    pub fn retire(&mut self, volume: &Arc<Volume>, version: u64, freed: Freed) {
        self.publish_volume(volume);
        if !freed.is_empty() {
            let not_yet_unmapped = freed.runs().to_vec();
            self.retiring.push(Retiring {
                volume: volume.clone(),
                version,
                freed,
                not_yet_unmapped,
            });
        }
        self.reap();
        self.publish();
    }

    /// Hands clusters back that nobody uses any more, after telling the bdev that they are not needed.
    /// Whether there is more of that to do at once: not all is done in one go.
    fn reap(&mut self) -> bool {
        let Some(store) = &mut self.store else { return false };
        let cluster = u64::from(store.info().cluster_size);
        let mut left = (UNMAP_STEP / cluster).max(1);
        for r in self.retiring.iter_mut().filter(|r| r.volume.quiet(r.version)) {
            while let Some(run) = r.next(left) {
                let unmapped = store.disk_mut().unmap(run.first * cluster, run.count * cluster);
                if let Err(e) = unmapped {
                    // Only room on the bdev: whoever gets the cluster zeroes it first.
                    tracing::warn!("freed clusters could not be unmapped: {e}");
                }
                left -= run.count;
                if left == 0 {
                    break;
                }
            }
            if left == 0 {
                break;
            }
        }
        for r in self.retiring.extract_if(.., |r| r.not_yet_unmapped.is_empty()) {
            store.release(r.freed);
        }
        left == 0
    }

    /// Answers the channels' requests: all allocations in one transaction, then each unmap.
    fn serve(&mut self) {
        let mut asked: Vec<(usize, Arc<ChannelShared>, Request)> = Vec::new();
        for (i, volume) in self.volumes.iter().enumerate() {
            volume.requests(|channel, request| asked.push((i, channel.clone(), request)));
        }
        if asked.is_empty() {
            return;
        }
        self.allocate(&asked);
        for (i, channel, request) in asked.iter().filter(|(_, _, r)| r.want == Want::Unmap) {
            let volume = self.volumes[*i].clone();
            let result = self.unmap(&volume, request).map_err(|e| io_error(&e));
            answer(channel, Reply { slot: request.slot, result });
        }
    }

    fn allocate(&mut self, asked: &[(usize, Arc<ChannelShared>, Request)]) {
        let asked: Vec<_> = asked.iter().filter(|(_, _, r)| r.want == Want::Allocate).collect();
        let wants: Vec<_> = asked
            .iter()
            .flat_map(|(i, _, r)| {
                let blob = self.volumes[*i].id.blob;
                (r.first..r.first + r.count).map(move |cluster| (blob, cluster))
            })
            .collect();
        if wants.is_empty() {
            return;
        }
        if let Ok(store) = self.store("allocate")
            && store.info().free_clusters < wants.len() as u64
        {
            self.wait_for_quiet(wants.len() as u64);
        }
        let Ok(store) = self.store("allocate") else {
            for (_, channel, r) in asked {
                answer(channel, Reply { slot: r.slot, result: Err(bdev::IoError::Removed) });
            }
            return;
        };
        let mut answers = store.allocate(&wants).into_iter();
        let mut results = Vec::with_capacity(asked.len());
        for (i, _, r) in &asked {
            let volume = &self.volumes[*i];
            let map = volume.map();
            let mut result = Ok(());
            for (cluster, got) in (r.first..r.first + r.count).zip(answers.by_ref()) {
                match got {
                    Ok(to) => map.set(cluster, to),
                    Err(e) => result = result.and(Err(io_error(&e))),
                }
            }
            self.publish_volume(volume);
            results.push(result);
        }
        self.publish();
        for ((_, channel, r), result) in asked.into_iter().zip(results) {
            answer(channel, Reply { slot: r.slot, result });
        }
    }

    /// Waits, for a while, until freed clusters that channels still use make `count` free ones.
    fn wait_for_quiet(&mut self, count: u64) {
        let deadline = Instant::now() + QUIET_WAIT;
        let mut more = false;
        while !self.retiring.is_empty() && (more || Instant::now() < deadline) {
            more = self.reap();
            if self.store.as_ref().is_none_or(|s| s.info().free_clusters >= count) {
                return;
            }
            if !more {
                thread::sleep(QUIET_POLL / 10);
            }
        }
    }

    /// Takes clusters from a thin volume: durably first, then for the channels.
    fn unmap(&mut self, volume: &Arc<Volume>, request: &Request) -> Result<(), StoreError> {
        let Some(store) = &mut self.store else {
            return Err(StoreError::Stopped { cause: "it was unloaded".into() });
        };
        let freed = store.unmap(volume.id.blob, request.first, request.count)?;
        let map = volume.map();
        for cluster in request.first..request.first + request.count {
            if map.get(cluster) != 0 {
                map.set(cluster, 0);
            }
        }
        let version = volume.bump();
        self.retire(volume, version, freed);
        Ok(())
    }

    /// Deletes a volume. Its bdev was unregistered before.
    pub fn delete(&mut self, op: &str, volume: &Arc<Volume>) -> Result<(), Error> {
        let cluster_size = self.store(op)?.info().cluster_size;
        let deleted = self.store(op)?.delete(volume.id.blob);
        let freed = deleted.map_err(|e| refused(e, op, cluster_size))?;
        let version = volume.remove();
        // Requests that came meanwhile are answered: the blob is gone.
        self.serve();
        self.volumes.retain(|v| !Arc::ptr_eq(v, volume));
        self.retire(volume, version, freed);
        Ok(())
    }

    /// Gives a volume another size in clusters.
    pub fn resize(&mut self, op: &str, volume: &Arc<Volume>, size: u64) -> Result<(), Error> {
        let cluster_size = self.store(op)?.info().cluster_size;
        let say = |e| refused(e, op, cluster_size);
        let blob = volume.id.blob;
        let needed = self.store(op)?.check_resize(blob, size).map_err(say)?;
        let reservation = self.reserve_zeroed(op, needed)?;
        let freed = self.store(op)?.resize_reserved(blob, size, reservation).map_err(say)?;
        let old = volume.map();
        for cluster in size..old.clusters() {
            if old.get(cluster) != 0 {
                old.set(cluster, 0);
            }
        }
        let map = old.resized(size);
        for (cluster, to) in self.store(op)?.clusters(blob).map_err(say)? {
            if cluster >= old.clusters() {
                map.set(cluster, to);
            }
        }
        let version = volume.replace_map(map);
        self.retire(volume, version, freed);
        Ok(())
    }

    /// Ends the use of the store; `destroy` deletes it too.
    pub fn close(&mut self, op: &str, destroy: bool) -> Result<(), Error> {
        for volume in std::mem::take(&mut self.volumes) {
            volume.remove();
            volume.requests(|channel, r| {
                answer(channel, Reply { slot: r.slot, result: Err(bdev::IoError::Removed) });
            });
        }
        while self.reap() {}
        self.retiring.clear();
        let Some(store) = self.store.take() else { return Ok(()) };
        let cluster_size = store.info().cluster_size;
        let closed = if destroy { store.destroy() } else { store.close() };
        closed.map(drop).map_err(|e| refused(e, op, cluster_size))
    }
}

/// Puts a reply into the channel's queue and wakes its thread.
fn answer(channel: &ChannelShared, reply: Reply) {
    let pushed = channel.replies.push(reply);
    assert!(pushed.is_ok(), "the queue has room for every slot");
    channel.waker.wake();
}
