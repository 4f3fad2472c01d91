//! One exported bdev.

use bdev::{AlignedBuf, Bdev, Claim, IoError};
use fuser::{FileAttr, FileType, INodeNo};
use reactor::Waker;
use std::collections::VecDeque;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::{self, JoinHandle};
use std::time::SystemTime;
use uuid::Uuid;

use crate::errors::ExportError;
use crate::request::{MAX_IO_BYTES, Pool, Request};
use crate::worker;

#[derive(Debug, Default)]
struct Queue {
    requests: VecDeque<Request>,
    pool: Pool,
    closed: bool,
}

/// From the dispatcher to a worker, with the buffers that go round between them.
#[derive(Debug, Default)]
pub(crate) struct Mailbox(Mutex<Queue>);

impl Mailbox {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Takes a buffer back.
    pub fn give_back(&self, buf: AlignedBuf) {
        self.lock().pool.put(buf);
    }

    fn push(&self, request: Request) -> Result<(), Request> {
        let mut inner = self.lock();
        if inner.closed {
            return Err(request);
        }
        inner.requests.push_back(request);
        Ok(())
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
    /// Taken when it ends: first the thread with its channel, then the claim.
    service: Mutex<Option<(JoinHandle<()>, Claim)>>,
}

impl Volume {
    /// Starts serving the claimed bdev.
    pub fn start(ino: INodeNo, claim: Claim, read_only: bool) -> Result<Volume, ExportError> {
        let bdev = Arc::clone(claim.bdev());
        let (features, geometry) = (bdev.features(), bdev.geometry());
        let most = u64::from(features.max_blocks) * u64::from(geometry.block_size);
        if features.max_blocks != 0 && most < u64::from(MAX_IO_BYTES) + 8192 {
            let name = bdev.name().to_owned();
            let needed = u64::from(MAX_IO_BYTES) + 8192;
            return Err(ExportError::ShortIo { name, bytes: most, needed });
        }
        let mailbox = Arc::new(Mailbox::default());
        let (ready, opened) = mpsc::sync_channel(1);
        let (served, from) = (Arc::clone(&bdev), Arc::clone(&mailbox));
        let thread = thread::Builder::new()
            .name(format!("export-{}", &bdev.uuid().to_string()[..8]))
            .spawn(move || worker::run(&served, &from, &ready))
            .map_err(|source| ExportError::Os {
                operation: "start a thread for",
                path: bdev.name().into(),
                source,
            })?;
        let gone = || bdev::OpenError { name: bdev.name().into(), why: "its thread ended".into() };
        let waker = opened.recv().map_err(|_| gone())??;
        Ok(Volume {
            ino,
            uuid: bdev.uuid(),
            read_only: read_only || features.read_only,
            opens: AtomicU32::new(0),
            bdev,
            mailbox,
            waker,
            made: SystemTime::now(),
            service: Mutex::new(Some((thread, claim))),
        })
    }

    /// A buffer of [`MAX_IO_BYTES`] and two blocks.
    pub fn buffer(&self) -> AlignedBuf {
        self.mailbox.buffer()
    }

    /// Gives a request to the worker; one that comes after the end is answered with ENODEV.
    pub fn push(&self, request: Request) {
        match self.mailbox.push(request) {
            Ok(()) => self.waker.wake(),
            Err(late) => late.reply.send(Err(IoError::Removed), None),
        }
    }

    /// Answers what is in flight, closes the channel and lets go of the bdev. Safe to repeat.
    pub fn stop(&self) {
        let service = self.service.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((thread, claim)) = service {
            self.mailbox.close();
            self.waker.wake();
            if thread.join().is_err() {
                tracing::error!(bdev = self.bdev.name(), "the thread of an export panicked");
            }
            drop(claim);
        }
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
        self.stop();
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
