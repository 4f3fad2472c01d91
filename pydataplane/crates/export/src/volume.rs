//! One exported bdev.

use bdev::{AlignedBuf, Bdev, Claim, ClaimMode, IoError, Op, Registry, RegistryError};
use fuser::{FileAttr, FileType, INodeNo};
use parking_lot::{Condvar, Mutex, MutexGuard};
use reactor::Waker;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant, SystemTime};
use uuid::Uuid;

use crate::errors::ExportError;
use crate::request::{MAX_IO_BYTES, Pool, Request};
use crate::worker;

#[derive(Debug, Default)]
struct Queue {
    requests: VecDeque<Request>,
    pool: Pool,
    closed: bool,
    /// Takes no changes: the bdev is somebody else's to write.
    parked: bool,
    /// Changes that were taken and are not answered.
    changes: usize,
}

/// From the dispatcher to a worker, with the buffers that go round between them.
#[derive(Debug, Default)]
pub(crate) struct Mailbox {
    queue: Mutex<Queue>,
    /// The last change was answered.
    unchanged: Condvar,
}

/// Whether an operation changes data.
fn changes(op: Op) -> bool {
    match op {
        Op::Write | Op::Unmap | Op::WriteZeroes => true,
        Op::Read | Op::Flush => false,
    }
}

impl Mailbox {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock()
    }

    /// Moves all requests to the end of `incoming`; whether no more will come.
    pub fn take(&self, incoming: &mut VecDeque<Request>) -> bool {
        let mut inner = self.lock();
        incoming.append(&mut inner.requests);
        inner.closed
    }

    /// A buffer for an I/O.
    pub fn buffer(&self) -> AlignedBuf {
        self.lock().pool.take()
    }

    /// A request for `op` was answered: counts it and takes its buffer back.
    pub fn answered(&self, op: Op, buf: Option<AlignedBuf>) {
        let mut inner = self.lock();
        if let Some(buf) = buf {
            inner.pool.put(buf);
        }
        if changes(op) {
            inner.changes -= 1;
            if inner.changes == 0 {
                self.unchanged.notify_all();
            }
        }
    }

    fn push(&self, request: Request) -> Result<(), (Request, IoError)> {
        let mut inner = self.lock();
        let changes = changes(request.op);
        if inner.closed {
            return Err((request, IoError::Removed));
        }
        if inner.parked && changes {
            return Err((request, IoError::ReadOnly));
        }
        inner.changes += usize::from(changes);
        inner.requests.push_back(request);
        Ok(())
    }

    /// Takes no changes from now on, and waits until those taken are answered. `false`: not
    /// within `timeout`, and then it takes them again.
    fn park(&self, timeout: Duration) -> bool {
        let end = Instant::now() + timeout;
        let mut inner = self.lock();
        inner.parked = true;
        while inner.changes != 0 {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                inner.parked = false;
                return false;
            }
            self.unchanged.wait_for(&mut inner, left);
        }
        true
    }

    fn unpark(&self) {
        self.lock().parked = false;
    }

    fn is_parked(&self) -> bool {
        self.lock().parked
    }

    fn close(&self) {
        self.lock().closed = true;
    }
}

/// One exported bdev: a file in the mount.
pub(crate) struct Volume {
    pub ino: INodeNo,
    pub uuid: Uuid,
    pub read_only: bool,
    /// How often its file is open.
    pub opens: AtomicU32,
    pub bdev: Arc<dyn Bdev>,
    mailbox: Arc<Mailbox>,
    waker: Waker,
    made: SystemTime,
    /// Who holds the bdev, as claims name it.
    owner: String,
    /// Taken when it ends. Held while the claim changes hands.
    service: Mutex<Option<Service>>,
}

/// The claim of an export. Its thread lets go of it, after its channel, when all I/O has ended.
type Hold = Arc<Mutex<Option<Claim>>>;

/// What an export has while it is served.
struct Service {
    hold: Hold,
    /// Closed when the thread has let go of everything.
    ended: Receiver<()>,
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

impl Volume {
    /// Claims the bdev for `owner` and starts serving it.
    pub fn start(
        ino: INodeNo,
        registry: &Registry,
        bdev: &str,
        owner: String,
        read_only: bool,
        parked: bool,
    ) -> Result<Volume, ExportError> {
        let claim = claim(registry, bdev, &owner, parked)?;
        let bdev = Arc::clone(claim.bdev());
        let (features, geometry) = (bdev.features(), bdev.geometry());
        let most = u64::from(features.max_blocks) * u64::from(geometry.block_size);
        if features.max_blocks != 0 && most < u64::from(MAX_IO_BYTES) + 8192 {
            let name = bdev.name().to_owned();
            let needed = u64::from(MAX_IO_BYTES) + 8192;
            return Err(ExportError::ShortIo { name, bytes: most, needed });
        }
        let mailbox = Arc::new(Mailbox::default());
        mailbox.lock().parked = parked;
        let (ready, opened) = mpsc::sync_channel(1);
        let hold: Hold = Arc::new(Mutex::new(Some(claim)));
        let (serves, ended) = mpsc::channel::<()>();
        let (served, from, holds) = (Arc::clone(&bdev), Arc::clone(&mailbox), Arc::clone(&hold));
        thread::Builder::new()
            .name(format!("export-{}", &bdev.uuid().to_string()[..8]))
            .spawn(move || {
                worker::run(&served, &from, &ready);
                drop((served, from));
                drop(held(&holds).take());
                drop(serves);
            })
            .map_err(|source| ExportError::Os {
                operation: "start a thread for",
                path: bdev.name().into(),
                source,
            })?;
        let gone = || bdev::OpenError { name: bdev.name().into(), why: "its thread ended".into() };
        let opened = opened.recv().map_err(|_| gone()).and_then(|opened| opened);
        let waker = opened.inspect_err(|_| drop(held(&hold).take()))?;
        Ok(Volume {
            ino,
            uuid: bdev.uuid(),
            read_only: read_only || features.read_only,
            opens: AtomicU32::new(0),
            bdev,
            mailbox,
            waker,
            made: SystemTime::now(),
            owner,
            service: Mutex::new(Some(Service { hold, ended })),
        })
    }

    /// A buffer of [`MAX_IO_BYTES`] and two blocks.
    pub fn buffer(&self) -> AlignedBuf {
        self.mailbox.buffer()
    }

    /// Gives a request to the worker; one that comes after the end is answered with ENODEV, and a
    /// change while the export is parked with EROFS.
    pub fn push(&self, request: Request) {
        match self.mailbox.push(request) {
            Ok(()) => self.waker.wake(),
            Err((refused, why)) => refused.reply.send(Err(why), None),
        }
    }

    /// Whether others may have the bdev to write.
    pub fn is_parked(&self) -> bool {
        self.mailbox.is_parked()
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
        if self.mailbox.is_parked() {
            return Ok(());
        }
        if !self.mailbox.park(timeout) {
            return Err(ExportError::Changing { name: name(), seconds: timeout.as_secs() });
        }
        match claim(registry, self.bdev.name(), &self.owner, true) {
            // In this order: at no moment is the bdev without a holder.
            Ok(reader) => *held(hold) = Some(reader),
            Err(e) => {
                self.mailbox.unpark();
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
        if self.mailbox.is_parked() {
            let alone = claim(registry, self.bdev.name(), &self.owner, false)?;
            *held(hold) = Some(alone);
            self.mailbox.unpark();
        }
        Ok(())
    }

    /// Takes no more requests. The thread answers what is in flight, closes the channel and lets go of
    /// the bdev, whether or not somebody waits for that with the result. Safe to repeat.
    pub fn end(&self) -> Ending {
        let service = self.service().take();
        if service.is_some() {
            self.mailbox.close();
            self.waker.wake();
        }
        Ending(service.map(|service| service.ended))
    }

    /// Attributes now; the size follows the bdev.
    pub fn attributes(&self) -> FileAttr {
        let geometry = self.bdev.geometry();
        FileAttr {
            size: geometry.bytes(),
            blocks: geometry.bytes() / 512,
            kind: FileType::RegularFile,
            perm: if self.read_only { 0o400 } else { 0o600 },
            nlink: 1,
            blksize: geometry.physical_block_size.max(4096),
            ..attributes(self.ino, self.made)
        }
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        _ = self.end();
    }
}

/// An export whose I/O in flight has to end.
#[must_use = "its bdev is in use until then"]
pub(crate) struct Ending(Option<Receiver<()>>);

impl Ending {
    /// Waits until the bdev was let go of; `false`: not within `timeout`.
    pub fn wait(self, timeout: Duration) -> bool {
        let waited = self.0.map(|ended| ended.recv_timeout(timeout));
        waited != Some(Err(RecvTimeoutError::Timeout))
    }
}

/// Attributes of the mount's folder, of which a file's differ.
pub(crate) fn attributes(ino: INodeNo, made: SystemTime) -> FileAttr {
    FileAttr {
        ino,
        size: 0,
        blocks: 0,
        atime: made,
        mtime: made,
        ctime: made,
        crtime: made,
        kind: FileType::Directory,
        perm: 0o755,
        nlink: 2,
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}
