//! The thread that serves one export: takes requests, does I/O, answers. Nobody else touches its
//! descriptor of `/dev/fuse` or its channel.

use bdev::{AlignedBuf, Bdev, Finished, Geometry, OpenError, OwnedChannel};
use reactor::Waker;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use zerocopy::IntoBytes;

use crate::abi::{self, O_DSYNC, OpenOut, WriteIn, WriteOut, flag, fopen};
use crate::call::{Body, Call, HEAD_BYTES, Malformed, SMALL_BYTES, parse};
use crate::device::{Device, Taken};
use crate::errors::errno;
use crate::file::{self, Facts};
use crate::record::Record;
use crate::request::{
    DEPTH, Limits, MAX_READ_BYTES, Pool, Request, Span, Wants, clearing, longest,
};
use crate::shared::{Order, Shared};

/// Bytes of them at which no more requests are taken: what one export has in memory.
const IN_FLIGHT_BYTES: usize = 16 << 20;

/// Longest sleep with nothing in flight, in microseconds: a request wakes the thread.
pub(crate) const IDLE_US: u64 = 60_000_000;

/// What is carried along with an I/O.
struct Waiting {
    unique: u64,
    wants: Wants,
    op: bdev::Op,
    /// What a long unmap or write of zeros has still to do: first block and number.
    rest: (u64, u64),
    /// Bytes of memory that it counts for.
    bytes: usize,
}

type Channel = OwnedChannel<Waiting>;

/// An answer's body, or a failure; `None`: an I/O was begun.
type Answer = Option<Result<usize, Errno>>;

/// Says to the kernel that this thread takes part in writing memory out: an allocation here must not
/// wait for that, which may wait for us (prctl(2), PR_SET_IO_FLUSHER). It needs CAP_SYS_RESOURCE;
/// without it the kernel's own reserves have to do.
pub(crate) fn serve_write_back() {
    let _ = rustix::process::configure_io_flusher_behavior(true);
}

/// Whether an operation changes data.
pub(crate) fn changes(op: bdev::Op) -> bool {
    match op {
        bdev::Op::Write | bdev::Op::Unmap | bdev::Op::WriteZeroes => true,
        bdev::Op::Read | bdev::Op::Flush => false,
    }
}

/// An export that is to be served.
pub(crate) struct Job {
    /// What the file is of.
    pub bdev: Arc<dyn Bdev>,
    /// What the file is.
    pub facts: Facts,
    /// What the kernel may send at once.
    pub limits: Limits,
    /// How much I/O the bdev does at most.
    pub rates: Arc<bdev::Limits>,
    /// The kernel's end.
    pub device: Device,
    /// What another process needs to go on; one that was resumed has been negotiated.
    pub record: Record,
    /// Whether another process served it before.
    pub resumed: bool,
    /// What others tell, and are told.
    pub shared: Arc<Shared>,
}

/// Opens the channel, says through `ready` how that went, and serves until it is told to end and
/// what was taken is answered.
pub(crate) fn run(mut job: Job, ready: &SyncSender<Result<Waker, OpenError>>) {
    serve_write_back();
    let opened = Channel::open_within(&*job.bdev, DEPTH, Arc::clone(&job.rates));
    let opened = opened.and_then(|channel| {
        let failed =
            |e| OpenError { name: job.bdev.name().into(), why: format!("no wake-up: {e}") };
        channel.watch(job.device.fd()).map_err(failed)?;
        Ok(channel)
    });
    let channel = match opened {
        Ok(channel) => channel,
        Err(e) => {
            let _ = ready.send(Err(e));
            return;
        }
    };
    if job.resumed {
        // Before the first request is taken, so that all that the process before had taken and not
        // answered comes once, and before anything newer.
        if let Err(e) = job.device.resend()
            && !job.record.was_left()
        {
            tracing::error!(uuid = %job.facts.uuid, "requests of a killed process are lost: {e}");
        }
        if let Err(e) = job.record.resume() {
            tracing::error!(uuid = %job.facts.uuid, "its record cannot be written: {e}");
        }
        job.shared.set_agreed(resends(job.record.abilities()));
    }
    let waker = channel.waker();
    let mut worker = Worker::new(job, channel);
    let _ = ready.send(Ok(waker));
    worker.serve();
    if worker.job.shared.order() == Order::Leave {
        worker.job.record.leave();
    }
}

struct Worker {
    // Before the descriptor that it watches.
    channel: Channel,
    job: Job,
    /// Where the next request goes, and the data of a write.
    spare: AlignedBuf,
    head: [u8; HEAD_BYTES],
    /// A request that is no write, and the answer to one that needs no I/O.
    small: [u8; SMALL_BYTES],
    pool: Pool,
    over: Vec<Finished<Waiting>>,
    /// What goes on of long requests: they wait their turn again, and so share with the others.
    rest: VecDeque<Request>,
    /// Changes that were taken and are not answered.
    changes: usize,
    /// Bytes of memory that is with the bdev.
    bytes: usize,
    /// The kernel had nothing more to ask, and nobody has waited since.
    drained: bool,
}

impl Worker {
    fn new(job: Job, channel: Channel) -> Worker {
        let mut pool = Pool::default();
        Worker {
            job,
            channel,
            spare: pool.take(),
            head: [0; HEAD_BYTES],
            small: [0; SMALL_BYTES],
            pool,
            over: Vec::with_capacity(usize::from(DEPTH)),
            rest: VecDeque::with_capacity(usize::from(DEPTH)),
            changes: 0,
            bytes: 0,
            drained: false,
        }
    }

    fn serve(&mut self) {
        loop {
            let order = self.job.shared.order();
            // Somebody waits for what was taken.
            self.channel.set_unlimited(order != Order::Serve || self.job.shared.is_parked());
            self.channel.poll(&mut self.over);
            let mut idle = self.over.is_empty();
            while let Some(finished) = self.over.pop() {
                self.finish(finished);
            }
            for _ in 0..self.rest.len() {
                if self.channel.is_full() {
                    break;
                }
                let Some(request) = self.rest.pop_front() else { break };
                self.start(request);
                idle = false;
            }
            idle &= self.take_all(order) == 0;
            if self.changes == 0 {
                self.job.shared.note_no_changes();
            }
            let in_flight = self.channel.in_flight() + self.rest.len();
            let nothing_asked = self.drained || order == Order::Leave || self.job.shared.is_over();
            if order != Order::Serve && in_flight == 0 && nothing_asked {
                return;
            }
            // What was begun is submitted by the system call that sleeps: whoever asks more wakes it.
            if idle || (self.drained && self.rest.is_empty()) {
                self.channel.wait(&mut self.over, IDLE_US);
                self.drained = false;
            }
        }
    }

    /// Takes what the kernel asks for, as far as there is room, and returns how many requests.
    fn take_all(&mut self, order: Order) -> usize {
        let mut taken = 0;
        while taken < usize::from(DEPTH)
            && !self.drained
            && order != Order::Leave
            && !self.job.shared.is_over()
            && !self.channel.is_full()
            && self.bytes < IN_FLIGHT_BYTES
        {
            match self.take(order) {
                true => taken += 1,
                false => self.drained = true,
            }
        }
        taken
    }

    /// Takes a request and answers it or begins its I/O; whether there was one.
    fn take(&mut self, order: Order) -> bool {
        let len = match self.job.device.take(&mut self.head, &mut self.spare) {
            Taken::Packet(len) => len,
            Taken::Nothing => return false,
            Taken::Over => {
                self.job.shared.set_over();
                return false;
            }
        };
        let more = len.saturating_sub(HEAD_BYTES).min(SMALL_BYTES - HEAD_BYTES);
        let known = HEAD_BYTES.min(len) + more;
        let mut small = self.small;
        small[..HEAD_BYTES].copy_from_slice(&self.head);
        small[HEAD_BYTES..][..more].copy_from_slice(&self.spare[..more]);
        match parse(&small[..known], len) {
            Ok(call) => {
                let unique = call.unique;
                let answer = match order {
                    Order::Serve | Order::Leave => self.call(call),
                    Order::Refuse => refused(&call),
                };
                match answer {
                    Some(Ok(len)) => self.job.device.answer(unique, &self.small[..len], &[]),
                    Some(Err(why)) => self.job.device.refuse(unique, why),
                    None => {}
                }
            }
            Err(Malformed::Body { unique }) => self.job.device.refuse(unique, Errno::INVAL),
            Err(Malformed::NoHeader) => {}
        }
        true
    }

    fn call(&mut self, call: Call<'_>) -> Answer {
        let Call { unique, node, body } = call;
        let bdev = Arc::clone(&self.job.bdev);
        let facts = &self.job.facts;
        let answer = match body {
            Body::Read(read) if node == abi::FILE => {
                return self.read(unique, read.offset, read.size);
            }
            Body::Write(write) if node == abi::FILE => {
                return self.write(unique, &write);
            }
            Body::Fsync => {
                self.start(Request::flush(unique, Wants::Done));
                return None;
            }
            Body::Fallocate(f) if node == abi::FILE => {
                return self.clear(unique, f.mode as i32, f.offset, f.length);
            }
            Body::Silent => return None,
            Body::Init { minor, max_readahead, flags } => self.init(minor, max_readahead, flags),
            Body::Lookup(name) => file::lookup(node, name, facts, &*bdev).map(|out| self.put(&out)),
            Body::Getattr => file::getattr(node, None, facts, &*bdev).map(|out| self.put(&out)),
            Body::Setattr(wanted) => {
                file::getattr(node, Some(&wanted), facts, &*bdev).map(|out| self.put(&out))
            }
            Body::Open(flags) if node == abi::FILE => self.open(unique, flags),
            Body::Opendir if node == abi::ROOT => Ok(self.put(&OpenOut::default())),
            Body::Release(handle) => {
                if self.job.record.released(handle) {
                    self.job.shared.release();
                }
                Ok(0)
            }
            Body::Readdir(read) if node == abi::ROOT => {
                Ok(file::readdir(read.offset, read.size, facts, &mut self.small))
            }
            Body::Lseek(wanted) if node == abi::FILE => {
                file::lseek(&wanted, &*bdev).map(|out| self.put(&out))
            }
            Body::Statfs => Ok(self.put(&file::statfs())),
            Body::Grant => Ok(0),
            Body::Change => Err(Errno::PERM),
            Body::Unknown => Err(Errno::NOSYS),
            _ => Err(Errno::STALE),
        };
        Some(answer)
    }

    /// Puts an answer where it is sent from; returns its length.
    fn put(&mut self, out: &(impl IntoBytes + zerocopy::Immutable)) -> usize {
        let bytes = out.as_bytes();
        self.small[..bytes.len()].copy_from_slice(bytes);
        bytes.len()
    }

    fn init(&mut self, minor: u32, max_readahead: u32, flags: u64) -> Result<usize, Errno> {
        let limits = self.job.limits;
        let out = file::init(minor, max_readahead, flags, limits).ok_or(Errno::PROTO)?;
        self.job.record.begin(flags, limits.max_write)?;
        self.job.shared.set_agreed(resends(flags));
        Ok(self.put(&out))
    }

    fn open(&mut self, unique: u64, flags: u32) -> Result<usize, Errno> {
        /// The access mode in open(2)'s flags.
        const O_ACCMODE: u32 = 0o3;
        if self.job.facts.read_only && flags & O_ACCMODE != 0 {
            return Err(Errno::ROFS);
        }
        let handle = unique & !abi::UNIQUE_RESEND;
        let again = unique != handle;
        self.job.shared.open()?;
        let noted = self.job.record.opened(handle, again);
        if noted != Ok(true) {
            self.job.shared.release();
        }
        noted?;
        let open_flags = fopen::DIRECT_IO | fopen::PARALLEL_DIRECT_WRITES | fopen::NOFLUSH;
        Ok(self.put(&OpenOut { fh: handle, open_flags, padding: 0 }))
    }

    fn geometry(&self) -> Geometry {
        self.job.bdev.geometry()
    }

    /// The buffer that a request was taken into; the next one has another.
    fn buffer(&mut self) -> AlignedBuf {
        let next = self.pool.take();
        std::mem::replace(&mut self.spare, next)
    }

    fn read(&mut self, unique: u64, offset: u64, size: u32) -> Answer {
        if size > MAX_READ_BYTES {
            return Some(Err(Errno::INVAL));
        }
        let Some(span) = Span::of_read(&self.geometry(), offset, size) else { return Some(Ok(0)) };
        let Span { lba, blocks, skip, len } = span;
        let (buf, wants) = (Some(self.buffer()), Wants::Data { skip, len });
        self.start(Request { unique, op: bdev::Op::Read, lba, blocks, buf, wants });
        None
    }

    /// Whether changes are taken now.
    fn check_open(&self) -> Result<(), Errno> {
        match self.job.facts.read_only || self.job.shared.is_parked() {
            true => Err(Errno::ROFS),
            false => Ok(()),
        }
    }

    fn write(&mut self, unique: u64, write: &WriteIn) -> Answer {
        let WriteIn { offset, size, flags, .. } = *write;
        let checked = self.check_open().and_then(|()| match size <= crate::MAX_IO_BYTES {
            true => Span::exact(&self.geometry(), offset, u64::from(size)),
            false => Err(Errno::INVAL),
        });
        match checked {
            Err(why) => Some(Err(why)),
            Ok(Span { lba, blocks, .. }) => {
                // In direct I/O the kernel leaves that to us.
                let durably = flags & O_DSYNC != 0;
                let wants = Wants::Written { len: size, durably };
                let buf = Some(self.buffer());
                self.changes += 1;
                self.start(Request { unique, op: bdev::Op::Write, lba, blocks, buf, wants });
                None
            }
        }
    }

    fn clear(&mut self, unique: u64, mode: i32, offset: u64, length: u64) -> Answer {
        let checked = self.check_open().and_then(|()| {
            let op = clearing(mode, &self.job.bdev.features())?;
            Ok((op, Span::exact(&self.geometry(), offset, length)?))
        });
        match checked {
            Err(why) => Some(Err(why)),
            Ok((op, Span { lba, blocks, .. })) => {
                self.changes += 1;
                self.start(Request { unique, op, lba, blocks, buf: None, wants: Wants::Done });
                None
            }
        }
    }

    /// Begins a request, or the next part of a long one; there is room for it.
    fn start(&mut self, request: Request) {
        let Request { unique, op, lba, blocks, buf, wants } = request;
        let geometry = self.geometry();
        let now = blocks.min(longest(op, &geometry, &self.job.bdev.features()));
        let bytes = match buf {
            Some(_) => now as usize * geometry.block_size as usize,
            None => 0,
        };
        self.bytes += bytes;
        let rest = (lba + now, blocks - now);
        let waiting = Waiting { unique, wants, op, rest, bytes };
        if let Some(finished) = self.channel.submit(op, lba, now, buf, waiting) {
            self.finish(finished);
        }
    }

    /// Answers a request that is over, or has it go on.
    fn finish(&mut self, finished: Finished<Waiting>) {
        let Finished { token, buf, result } = finished;
        let Waiting { unique, wants, op, rest: (lba, blocks), bytes } = token;
        self.bytes -= bytes;
        let device = &self.job.device;
        match (result, wants) {
            (Err(e), _) => device.refuse(unique, errno(e)),
            (Ok(()), _) if blocks > 0 => {
                self.rest.push_back(Request { unique, op, lba, blocks, buf, wants });
                return;
            }
            (Ok(()), Wants::Data { skip, len }) => {
                match buf.as_ref().and_then(|buf| buf.get(skip..skip + len)) {
                    Some(data) => device.answer(unique, data, &[]),
                    None => device.refuse(unique, Errno::IO),
                }
            }
            (Ok(()), Wants::Written { len, durably: true }) => {
                let wants = Wants::Written { len, durably: false };
                self.rest.push_back(Request::flush(unique, wants));
            }
            (Ok(()), Wants::Written { len: size, durably: false }) => {
                device.answer(unique, WriteOut { size, padding: 0 }.as_bytes(), &[]);
            }
            (Ok(()), Wants::Done) => device.answer(unique, &[], &[]),
        }
        self.changes -= usize::from(changes(op));
        if let Some(buf) = buf {
            self.pool.put(buf);
        }
    }
}

/// What an export that ends answers.
fn refused(call: &Call<'_>) -> Answer {
    match call.body {
        Body::Silent => None,
        Body::Release(_) | Body::Grant => Some(Ok(0)),
        _ => Some(Err(Errno::NODEV)),
    }
}

/// Whether a process that is killed leaves nothing undone on a kernel of these abilities.
pub(crate) fn resends(abilities: u64) -> bool {
    abilities & flag::HAS_RESEND != 0
}
