//! The FUSE calls: attributes are answered here, I/O goes to the worker.

use bdev::Op;
use fuser::{
    AccessFlags, BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, InitFlags, KernelConfig, LockOwner, OpenAccMode, OpenFlags, ReplyAttr,
    ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, TimeOrNow,
    WriteFlags,
};
use parking_lot::{Mutex, MutexGuard, RwLock};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};
use uuid::Uuid;

use crate::request::{MAX_IO_BYTES, Reply, Request, Span, clearing};
use crate::volume::{Volume, attributes};

/// Requests that the kernel may have in flight over all exports, asynchronous ones; what a write
/// holds meanwhile bounds the memory to this times [`MAX_IO_BYTES`].
const MAX_BACKGROUND: u16 = 512;

/// Nothing is remembered by the kernel: sizes change.
const NO_TTL: Duration = Duration::ZERO;

/// The files, by inode.
pub(crate) type Table = Arc<RwLock<BTreeMap<u64, Arc<Volume>>>>;

/// The file system, of one mount.
pub(crate) struct Files {
    table: Table,
    made: SystemTime,
    /// How often each file is open through this mount, by inode.
    opens: Mutex<BTreeMap<u64, u32>>,
}

impl Files {
    /// Of the volumes in `table`, now and later.
    pub fn new(table: Table) -> Files {
        Files { table, made: SystemTime::now(), opens: Mutex::default() }
    }

    fn opens(&self) -> MutexGuard<'_, BTreeMap<u64, u32>> {
        self.opens.lock()
    }

    fn volume(&self, ino: INodeNo) -> Option<Arc<Volume>> {
        self.table.read().get(&ino.0).cloned()
    }

    fn attributes(&self, ino: INodeNo) -> Option<FileAttr> {
        match ino {
            INodeNo::ROOT => Some(attributes(ino, self.made)),
            _ => self.volume(ino).map(|v| v.attributes()),
        }
    }

    fn writable(&self, ino: INodeNo) -> Result<Arc<Volume>, Errno> {
        let volume = self.volume(ino).ok_or(Errno::ESTALE)?;
        if volume.read_only { Err(Errno::EROFS) } else { Ok(volume) }
    }
}

impl Filesystem for Files {
    fn init(&mut self, _: &fuser::Request, config: &mut KernelConfig) -> io::Result<()> {
        // Without it a loop device has one I/O in flight. Linux has had it since 3.13.
        let _ = config.add_capabilities(InitFlags::FUSE_ASYNC_DIO);
        let _ = config.set_max_write(MAX_IO_BYTES);
        let _ = config.set_max_readahead(MAX_IO_BYTES.min(128 * 1024));
        let _ = config.set_max_background(MAX_BACKGROUND);
        Ok(())
    }

    fn lookup(&self, _: &fuser::Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let uuid =
            name.to_str().and_then(|n| Uuid::try_parse(n).ok().filter(|u| u.to_string() == n));
        let table = self.table.read();
        let found = table.values().find(|v| parent == INodeNo::ROOT && Some(v.uuid) == uuid);
        match found {
            Some(volume) => reply.entry(&NO_TTL, &volume.attributes(), Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &fuser::Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.attributes(ino) {
            Some(attr) => reply.attr(&NO_TTL, &attr),
            None => reply.error(Errno::ESTALE),
        }
    }

    fn setattr(
        &self,
        _: &fuser::Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        match self.attributes(ino) {
            None => reply.error(Errno::ESTALE),
            Some(attr) => {
                let same = size.is_none_or(|size| size == attr.size);
                match same && mode.is_none() && uid.is_none() && gid.is_none() {
                    true => reply.attr(&NO_TTL, &attr),
                    false => reply.error(Errno::EPERM),
                }
            }
        }
    }

    fn access(&self, _: &fuser::Request, _: INodeNo, _: AccessFlags, reply: ReplyEmpty) {
        // The mount has default_permissions: the kernel has looked.
        reply.ok();
    }

    fn open(&self, _: &fuser::Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        // Counted under the lock, so that an export that is being deleted is not opened.
        let table = self.table.read();
        match table.get(&ino.0) {
            None => reply.error(Errno::ESTALE),
            Some(v) if v.read_only && flags.acc_mode() != OpenAccMode::O_RDONLY => {
                reply.error(Errno::EROFS);
            }
            Some(v) => {
                v.opens.fetch_add(1, Ordering::Relaxed);
                *self.opens().entry(ino.0).or_default() += 1;
                let flags = FopenFlags::FOPEN_DIRECT_IO
                    | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES
                    | FopenFlags::FOPEN_NOFLUSH;
                reply.opened(FileHandle(ino.0), flags);
            }
        }
    }

    fn release(
        &self,
        _: &fuser::Request,
        ino: INodeNo,
        _: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        let volume = self.volume(ino);
        let mut opens = self.opens();
        if let Some(count) = opens.get_mut(&ino.0) {
            *count -= 1;
            if *count == 0 {
                opens.remove(&ino.0);
            }
            if let Some(volume) = volume {
                volume.opens.fetch_sub(1, Ordering::Relaxed);
            }
        }
        drop(opens);
        reply.ok();
    }

    fn destroy(&mut self) {
        // The kernel does not tell of each close when a mount goes, or its connection is aborted.
        let opens = std::mem::take(&mut *self.opens());
        for (ino, count) in opens {
            if let Some(volume) = self.volume(INodeNo(ino)) {
                volume.opens.fetch_sub(count, Ordering::Relaxed);
            }
        }
    }

    fn read(
        &self,
        _: &fuser::Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let Some(volume) = self.volume(ino) else { return reply.error(Errno::ESTALE) };
        if size > MAX_IO_BYTES {
            return reply.error(Errno::EINVAL);
        }
        let Some(span) = Span::of_read(&volume.bdev.geometry(), offset, size) else {
            return reply.data(&[]);
        };
        let Span { lba, blocks, skip, len } = span;
        let buf = Some(volume.buffer());
        let reply = Reply::Data { reply, skip, len };
        volume.push(Request { op: Op::Read, lba, blocks, buf, reply });
    }

    fn write(
        &self,
        _: &fuser::Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let checked = self.writable(ino).and_then(|volume| {
            let span = Span::exact(&volume.bdev.geometry(), offset, data.len() as u64)?;
            let len = u32::try_from(data.len()).ok().filter(|len| *len <= MAX_IO_BYTES);
            Ok((volume, span, len.ok_or(Errno::EINVAL)?))
        });
        match checked {
            Err(e) => reply.error(e),
            Ok((volume, Span { lba, blocks, .. }, len)) => {
                let mut buf = volume.buffer();
                buf[..data.len()].copy_from_slice(data);
                let reply = Reply::Written { reply, len };
                volume.push(Request { op: Op::Write, lba, blocks, buf: Some(buf), reply });
            }
        }
    }

    fn flush(
        &self,
        _: &fuser::Request,
        _: INodeNo,
        _: FileHandle,
        _: LockOwner,
        reply: ReplyEmpty,
    ) {
        // Called at close(2), which promises nothing; fsync does.
        reply.ok();
    }

    fn fsync(&self, _: &fuser::Request, ino: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        let Some(volume) = self.volume(ino) else { return reply.error(Errno::ESTALE) };
        let reply = Reply::Empty(reply);
        volume.push(Request { op: Op::Flush, lba: 0, blocks: 0, buf: None, reply });
    }

    fn fallocate(
        &self,
        _: &fuser::Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let checked = self.writable(ino).and_then(|volume| {
            let op = clearing(mode, &volume.bdev.features())?;
            let span = Span::exact(&volume.bdev.geometry(), offset, length)?;
            Ok((volume, op, span))
        });
        match checked {
            Err(e) => reply.error(e),
            Ok((volume, op, Span { lba, blocks, .. })) => {
                let reply = Reply::Empty(reply);
                volume.push(Request { op, lba, blocks, buf: None, reply });
            }
        }
    }

    fn readdir(
        &self,
        _: &fuser::Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        if ino != INodeNo::ROOT {
            return reply.error(Errno::ENOTDIR);
        }
        let table = self.table.read();
        let files = table.values().map(|v| (v.ino, FileType::RegularFile, v.uuid.to_string()));
        let dots = [".", ".."].map(|n| (INodeNo::ROOT, FileType::Directory, n.to_owned()));
        let entries = dots.into_iter().chain(files).zip(1u64..);
        for ((ino, kind, name), next) in entries.skip(usize::try_from(offset).unwrap_or(usize::MAX))
        {
            if reply.add(ino, next, kind, name) {
                break;
            }
        }
        reply.ok();
    }
}
