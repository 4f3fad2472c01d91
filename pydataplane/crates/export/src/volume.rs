//! One exported bdev: its claim, its thread, its mount or device.

use bdev::{Bdev, Claim, ClaimMode, OpenError, Registry, RegistryError};
use holder::wire::NewDisk;
use holder::{Disk, Session};
use parking_lot::{Mutex, MutexGuard};
use reactor::Waker;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime};
use ublk::Left;
use uuid::Uuid;

use crate::device::Device;
use crate::disk;
use crate::errors::ExportError;
use crate::file::Facts;
use crate::keeper::Keeper;
use crate::record::Record;
use crate::request::{Limits, longest_io, pages_limit};
use crate::shape::Shape;
use crate::shared::{Order, Shared};
use crate::worker::{self, Job, resends};

/// How long the kernel may take to ask how a new mount is served. It does so at once.
const AGREE_TIMEOUT: Duration = Duration::from_secs(5);

/// One exported bdev: a mount with a file, or a device.
pub(crate) struct Volume {
    pub uuid: Uuid,
    /// In which order they were made.
    pub number: u64,
    pub read_only: bool,
    pub bdev: Arc<dyn Bdev>,
    pub face: Face,
    shared: Arc<Shared>,
    waker: Waker,
    /// Who holds the bdev, as claims name it.
    owner: String,
    /// Taken when it ends. Held while the claim changes hands.
    service: Mutex<Option<Service>>,
}

/// How the kernel shows a bdev.
pub(crate) enum Face {
    /// As a file. Its descriptors, for a holder that has lost them.
    File {
        /// `/dev/fuse`.
        fuse: Arc<OwnedFd>,
        /// What the next process must know.
        record: Arc<OwnedFd>,
    },
    /// As `/dev/ublkbN`.
    Disk {
        /// N.
        number: u32,
        /// Requests at a time.
        depth: u16,
        /// Bytes of its block.
        block_size: u32,
    },
}

/// The claim of an export. Its thread lets go of it, after its channel, when all I/O has ended.
type Hold = Arc<Mutex<Option<Claim>>>;

/// What an export has while it is served.
struct Service {
    hold: Hold,
    worker: Worker,
}

/// The thread of an export.
struct Worker {
    /// Closed when the thread has let go of everything.
    ended: Receiver<()>,
    thread: JoinHandle<Option<Left>>,
}

fn held(hold: &Hold) -> MutexGuard<'_, Option<Claim>> {
    hold.lock()
}

/// The claim of an export, parked or not, under the name `owner`.
fn claim(
    registry: &Registry,
    bdev: &str,
    owner: &str,
    parked: bool,
) -> Result<Claim, RegistryError> {
    match parked {
        // Only so that the bdev stays as long as its channel here.
        true => registry.claim_as(bdev, &format!("{owner}, which is parked"), ClaimMode::Reader),
        false => registry.claim(bdev, owner),
    }
}

/// How a bdev is exported.
pub(crate) struct Way {
    pub number: u64,
    pub read_only: bool,
    pub parked: bool,
    /// What it is to be.
    pub shape: Shape,
    /// Who holds the bdev, as claims name it.
    pub owner: String,
}

/// The session that another process has left, if one can go on with it.
fn resumable(session: Session, uuid: Uuid, longest: u32) -> Option<(Session, Record)> {
    let record = Arc::new(session.record);
    let read = Record::read(Arc::clone(&record));
    let why = match &read {
        None => "what was left of it cannot be read",
        Some(read) if !read.was_left() && !resends(read.abilities()) => {
            "its target was killed, and only Linux 6.9 and newer send again what it had taken"
        }
        Some(read) if read.max_write() > longest => "its bdev takes shorter writes now",
        Some(_) => "",
    };
    let read = read.filter(|_| why.is_empty());
    if read.is_none() {
        tracing::error!(%uuid, "the export begins anew, what has it open gets errors: {why}");
    }
    Some((Session { fuse: session.fuse, record: record.try_clone().ok()? }, read?))
}

impl Volume {
    /// Claims the bdev and starts serving it: what another process has left of its export, else a
    /// new mount or device.
    pub fn start(
        registry: &Registry,
        bdev: &str,
        keeper: &Keeper,
        way: Way,
    ) -> Result<Volume, ExportError> {
        let claim = claim(registry, bdev, &way.owner, way.parked)?;
        let (bdev, rates) = (Arc::clone(claim.bdev()), claim.limits());
        let hold: Hold = Arc::new(Mutex::new(Some(claim)));
        let uuid = bdev.uuid();
        let left = keeper.take(uuid)?;
        let disk = match way.shape {
            Shape::DiskOrFile { .. } | Shape::Disk(_) if left.is_none() => {
                keeper.disk(uuid, &wanted(&bdev, &way)?, way.shape.which())?
            }
            _ => None,
        };
        match (disk, &way.shape) {
            (Some(disk), _) => Volume::serve_disk((bdev, rates), keeper, way, hold, disk),
            (None, Shape::Disk(_)) if left.is_none() => Err(ExportError::NoDisks),
            (None, Shape::Disk(_)) => {
                let (name, path) = (bdev.name().to_owned(), keeper.path(uuid));
                Err(ExportError::Exported { name, path })
            }
            (None, _) => Volume::serve_file((bdev, rates), keeper, way, hold, left),
        }
    }

    fn serve_file(
        (bdev, rates): (Arc<dyn Bdev>, Arc<bdev::Limits>),
        keeper: &Keeper,
        way: Way,
        hold: Hold,
        left: Option<Session>,
    ) -> Result<Volume, ExportError> {
        let Way { number, read_only, parked, owner, .. } = way;
        let (features, geometry) = (bdev.features(), bdev.geometry());
        let longest = longest_io(&geometry, &features).map_err(|e| short_io(&*bdev, e))?;
        let uuid = bdev.uuid();
        let was_left = left.is_some();
        let left = left.and_then(|session| resumable(session, uuid, longest));
        let resumed = left.is_some();
        let (fuse, file, record) = match left {
            Some((session, record)) => (session.fuse, Arc::new(session.record), record),
            None => {
                if was_left {
                    keeper.end(uuid)?;
                }
                let Session { fuse, record } = keeper.mount(uuid)?;
                let made = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
                let file = Arc::new(record);
                (fuse, Arc::clone(&file), Record::new(file, made.unwrap_or_default().as_secs()))
            }
        };
        let fuse = Arc::new(fuse);
        let read_only = read_only || features.read_only;
        let shared = Arc::new(Shared::new(parked, record.open_handles()));
        let facts = Facts { uuid, read_only, made_s: record.made_s() };
        let job = Job {
            bdev: Arc::clone(&bdev),
            facts,
            limits: Limits::new(longest, pages_limit()),
            rates,
            device: Device::new(Arc::clone(&fuse)),
            record,
            resumed,
            shared: Arc::clone(&shared),
        };
        let begun = begin(&*bdev, &hold, move |ready| {
            worker::run(job, ready);
            None
        });
        let (waker, worker) = match begun {
            Ok(begun) => begun,
            Err(e) => {
                // What another process has left waits for the next attempt.
                if !resumed && let Err(e) = keeper.end(uuid) {
                    tracing::warn!("{e}");
                }
                return Err(e);
            }
        };
        // What it survives is known from then on.
        if !shared.wait_agreed(AGREE_TIMEOUT) {
            tracing::warn!(%uuid, "the kernel has not asked yet how its export is served");
        }
        let service = Mutex::new(Some(Service { hold, worker }));
        let face = Face::File { fuse, record: file };
        Ok(Volume { uuid, number, read_only, bdev, face, shared, waker, owner, service })
    }

    fn serve_disk(
        (bdev, rates): (Arc<dyn Bdev>, Arc<bdev::Limits>),
        keeper: &Keeper,
        way: Way,
        hold: Hold,
        disk: Disk,
    ) -> Result<Volume, ExportError> {
        let wanted = wanted(&bdev, &way)?;
        let Way { number, read_only, parked, owner, shape } = way;
        let uuid = bdev.uuid();
        let Disk { id, left, depth, max_io_bytes, queue } = disk;
        if max_io_bytes > wanted.max_io_bytes {
            // Not given up: its bdev may be as it was, the next time.
            return Err(short_io(&*bdev, u64::from(max_io_bytes)));
        }
        let read_only = read_only || bdev.features().read_only;
        let shared = Arc::new(Shared::new(parked, 0));
        let job = disk::Job {
            bdev: Arc::clone(&bdev),
            read_only,
            limits: ublk::Limits { depth, max_io_bytes, block_size: wanted.block_size },
            rates,
            cpus: shape.cpus(),
            queue,
            shared: Arc::clone(&shared),
        };
        let begun = begin(&*bdev, &hold, move |ready| disk::run(job, ready));
        let failed = |e: ExportError| {
            // What another process has left waits for the next attempt.
            if !left && let Err(e) = keeper.end_disk(uuid) {
                tracing::warn!("{e}");
            }
            e
        };
        let (waker, worker) = begun.map_err(failed)?;
        let service = Mutex::new(Some(Service { hold, worker }));
        let face = Face::Disk { number: id, depth, block_size: wanted.block_size };
        let volume = Volume { uuid, number, read_only, bdev, face, shared, waker, owner, service };
        if let Err(e) = keeper.serve_disk(uuid) {
            // A new one has no users to be refused, and a holder that is gone does not end the thread.
            drop(volume.end(Order::Leave));
            return Err(failed(e));
        }
        if left {
            // Its bdev may have grown when nobody served it.
            volume.fit_disk(keeper);
        }
        Ok(volume)
    }

    /// The device's path; `None`: it is a file.
    pub fn disk_path(&self) -> Option<PathBuf> {
        match self.face {
            Face::File { .. } => None,
            Face::Disk { number, .. } => Some(format!("/dev/ublkb{number}").into()),
        }
    }

    /// Has a device take its bdev's size, where the kernel changes that of one that is used.
    pub fn fit_disk(&self, keeper: &Keeper) {
        let Face::Disk { block_size, .. } = self.face else { return };
        let name = self.bdev.name();
        let can = keeper.disk_abilities();
        if !can.resizes {
            return tracing::debug!(bdev = name, "its device keeps its size: {}", can.why);
        }
        let bytes = disk::whole_blocks(self.bdev.geometry().bytes(), block_size);
        if let Err(e) = keeper.resize_disk(self.uuid, bytes) {
            tracing::warn!(bdev = name, "its device keeps its size: {e}");
        }
    }

    /// Whether others may have the bdev to write.
    pub fn is_parked(&self) -> bool {
        self.shared.is_parked()
    }

    /// How often the file is open.
    pub fn opens(&self) -> u32 {
        self.shared.opens()
    }

    /// Whether the kernel sends again what a killed process had taken.
    pub fn survives_a_crash(&self) -> bool {
        matches!(self.face, Face::Disk { .. }) || self.shared.resends()
    }

    /// Whether its connection to the kernel is over, so that it serves nobody any more.
    pub fn is_over(&self) -> bool {
        self.shared.is_over()
    }

    /// Lets nobody open the file any more; `false`: it is open, and not `force`.
    pub fn close(&self, force: bool) -> bool {
        self.shared.close(force)
    }

    fn service(&self) -> MutexGuard<'_, Option<Service>> {
        self.service.lock()
    }

    /// Refuses changes from now on, waits for those in flight, and lets others claim the bdev;
    /// reads are served on. Does nothing to a parked one.
    ///
    /// # Errors
    /// [`ExportError::Changing`] after `timeout`, [`ExportError::NotExported`] when it ends
    /// meanwhile; nothing changed.
    pub fn park(&self, registry: &Registry, timeout: Duration) -> Result<(), ExportError> {
        let mut service = self.service();
        let name = || self.bdev.name().to_owned();
        let hold = &service.as_mut().ok_or_else(|| ExportError::NotExported(name()))?.hold;
        if self.shared.is_parked() {
            return Ok(());
        }
        if !self.shared.park(timeout, || self.waker.wake()) {
            return Err(ExportError::Changing { name: name(), seconds: timeout.as_secs() });
        }
        match claim(registry, self.bdev.name(), &self.owner, true) {
            // In this order: at no moment is the bdev without a holder.
            Ok(reader) => *held(hold) = Some(reader),
            Err(e) => {
                self.shared.unpark();
                return Err(e.into());
            }
        }
        Ok(())
    }

    /// Claims the bdev alone and takes changes again. Does nothing to one that is not parked.
    ///
    /// # Errors
    /// Somebody else holds the bdev; it stays parked.
    pub fn unpark(&self, registry: &Registry) -> Result<(), ExportError> {
        let mut service = self.service();
        let name = || self.bdev.name().to_owned();
        let hold = &service.as_mut().ok_or_else(|| ExportError::NotExported(name()))?.hold;
        if self.shared.is_parked() {
            let alone = claim(registry, self.bdev.name(), &self.owner, false)?;
            *held(hold) = Some(alone);
            self.shared.unpark();
        }
        Ok(())
    }

    /// Has the thread refuse everything, or leave what comes to another process. It answers what is
    /// in flight, closes the channel and lets go of the bdev, whether or not somebody waits for that
    /// with the result. Safe to repeat.
    pub fn end(&self, how: Order) -> Ending {
        let service = self.service().take();
        if service.is_some() {
            self.shared.end(how);
            self.waker.wake();
        }
        Ending(service.map(|service| service.worker))
    }
}

/// What a bdev's device is to be.
fn wanted(bdev: &Arc<dyn Bdev>, way: &Way) -> Result<NewDisk, ExportError> {
    let (geometry, features) = (bdev.geometry(), bdev.features());
    let read_only = way.read_only || features.read_only;
    disk::wanted(&geometry, &features, read_only, way.shape.depth(), way.shape.block_size())
        .map_err(|needed| short_io(&**bdev, needed))
}

fn short_io(bdev: &dyn Bdev, needed: u64) -> ExportError {
    let bytes = u64::from(bdev.features().max_blocks) * u64::from(bdev.geometry().block_size);
    ExportError::ShortIo { name: bdev.name().to_owned(), bytes, needed }
}

/// Starts the thread; returns what wakes it, and what tells of its end.
fn begin(
    bdev: &dyn Bdev,
    hold: &Hold,
    run: impl FnOnce(&SyncSender<Result<Waker, OpenError>>) -> Option<Left> + Send + 'static,
) -> Result<(Waker, Worker), ExportError> {
    let name = bdev.name().to_owned();
    let (ready, opened) = mpsc::sync_channel(1);
    let (serves, ended) = mpsc::channel::<()>();
    let holds = Arc::clone(hold);
    let thread = thread::Builder::new()
        .name(format!("export-{}", &bdev.uuid().to_string()[..8]))
        .spawn(move || {
            let left = run(&ready);
            drop(held(&holds).take());
            drop(serves);
            left
        })
        .map_err(|source| ExportError::Os {
            operation: "start a thread for",
            path: name.clone().into(),
            source,
        })?;
    let gone = || OpenError { name, why: "its thread ended".into() };
    let opened = opened.recv().map_err(|_| gone()).and_then(|opened| opened);
    let waker = opened.inspect_err(|_| drop(held(hold).take()))?;
    Ok((waker, Worker { ended, thread }))
}

impl Drop for Volume {
    fn drop(&mut self) {
        _ = self.end(Order::Refuse);
    }
}

/// An export whose I/O in flight has to end.
#[must_use = "its bdev is in use until then"]
pub(crate) struct Ending(Option<Worker>);

impl Ending {
    /// Waits until the bdev was let go of; `false`: not within `timeout`.
    pub fn wait(self, timeout: Duration) -> bool {
        let Some(worker) = self.0 else { return true };
        if worker.ended.recv_timeout(timeout) == Err(RecvTimeoutError::Timeout) {
            return false;
        }
        // It has nothing left to do but to end; that it panicked would have ended the process. What it
        // leaves of a device is dropped here, after that.
        _ = worker.thread.join();
        true
    }
}
