//! The thread that serves one export as a device of ublk: takes requests, does I/O, answers. Nobody
//! else touches its queue or its channel.

use bdev::{AlignedBuf, Bdev, Features, Finished, Geometry, OpenError, OwnedChannel};
use reactor::Waker;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use ublk::{Left, Limits, Polled, Queue, Ticket};

use crate::errors::errno;
use crate::request::{DEPTH, MAX_CLEAR_BYTES, Span, longest, longest_io};
use crate::shared::{Order, Shared};
use crate::worker::{IDLE_US, changes, serve_write_back};

/// Longest read or write, in bytes.
const MAX_IO_BYTES: u32 = 512 * 1024;

/// What a device for a bdev is to be, with blocks of `block_size` bytes where the bdev's are shorter; a
/// power of two.
///
/// # Errors
/// The least that a bdev must take at once, in bytes.
pub(crate) fn wanted(
    g: &Geometry,
    features: &Features,
    read_only: bool,
    depth: u16,
    block_size: u32,
) -> Result<holder::wire::NewDisk, u64> {
    let block = u64::from(g.block_size);
    let block_size = block_size.max(g.block_size);
    let clears = |can| if can && !read_only { MAX_CLEAR_BYTES } else { 0 };
    Ok(holder::wire::NewDisk {
        depth,
        max_io_bytes: longest_io(g, features)?.min(MAX_IO_BYTES),
        block_size,
        physical_block_size: g.physical_block_size.min(4096),
        bytes: whole_blocks(g.bytes(), block_size),
        read_only,
        max_discard_bytes: clears(features.unmap),
        max_zeroes_bytes: clears(features.write_zeroes),
        discard_granularity: u32::try_from(u64::from(features.unmap_granularity) * block)
            .unwrap_or(g.block_size),
    })
}

/// What a request of a device is to a bdev with this geometry and these features: operation, first block
/// and number of blocks, which are within the bdev, and 0 of a flush alone.
///
/// # Errors
/// ROFS: it would change the bdev, and changes are refused. OPNOTSUPP: the bdev cannot. INVAL: not whole
/// blocks. NOSPC: beyond the end.
pub fn of_disk(
    op: ublk::Op,
    offset: u64,
    bytes: u64,
    g: &Geometry,
    features: &Features,
    refuses_changes: bool,
) -> Result<(bdev::Op, u64, u64), Errno> {
    let op = match op {
        ublk::Op::Flush => return Ok((bdev::Op::Flush, 0, 0)),
        ublk::Op::Read => bdev::Op::Read,
        ublk::Op::Write { .. } => bdev::Op::Write,
        ublk::Op::Discard => bdev::Op::Unmap,
        ublk::Op::WriteZeroes => bdev::Op::WriteZeroes,
    };
    if changes(op) && refuses_changes {
        return Err(Errno::ROFS);
    }
    match op {
        bdev::Op::Unmap if !features.unmap => return Err(Errno::OPNOTSUPP),
        bdev::Op::WriteZeroes if !features.write_zeroes => return Err(Errno::OPNOTSUPP),
        _ => {}
    }
    let Span { lba, blocks, .. } = Span::exact(g, offset, bytes)?;
    Ok((op, lba, blocks))
}

/// The size of a device with blocks of `block_size` bytes of a bdev that has so many.
pub(crate) fn whole_blocks(bytes: u64, block_size: u32) -> u64 {
    bytes - bytes % u64::from(block_size)
}

/// An export that is to be served.
pub(crate) struct Job {
    /// What the device is of.
    pub bdev: Arc<dyn Bdev>,
    /// Whether writes are refused.
    pub read_only: bool,
    /// What its requests may be.
    pub limits: Limits,
    /// How much I/O the bdev does at most.
    pub rates: Arc<bdev::Limits>,
    /// The CPUs that the thread runs on; none: any.
    pub cpus: Vec<usize>,
    /// `/dev/ublkcN`.
    pub queue: OwnedFd,
    /// What others tell, and are told.
    pub shared: Arc<Shared>,
}

/// What is carried along with an I/O.
struct Waiting {
    ticket: Ticket,
    op: bdev::Op,
    /// What a long unmap or write of zeros has still to do: first block and number.
    rest: (u64, u64),
    /// A write that is to be flushed before it is answered.
    durably: bool,
}

/// A request, or a part of it.
struct Part {
    ticket: Ticket,
    op: bdev::Op,
    lba: u64,
    blocks: u64,
    durably: bool,
    buf: AlignedBuf,
}

type Channel = OwnedChannel<Waiting>;

/// Opens the channel and the queue, says through `ready` how that went, and serves until the device is
/// stopped, or it is told to leave and what was begun is answered. What it returns is to be dropped
/// when the thread has ended.
pub(crate) fn run(job: Job, ready: &SyncSender<Result<Waker, OpenError>>) -> Option<Left> {
    serve_write_back();
    let failed = |e: std::io::Error| OpenError {
        name: job.bdev.name().into(),
        why: format!("its device cannot be served: {e}"),
    };
    let opened = reactor::bind(&job.cpus).map_err(failed).and_then(|()| {
        let channel = Channel::open_within(&*job.bdev, DEPTH, Arc::clone(&job.rates))?;
        let queue = job.queue.try_clone().and_then(|fd| Queue::new(fd, job.limits));
        let queue = queue.map_err(failed)?;
        channel.watch(queue.fd()).map_err(failed)?;
        Ok((channel, queue))
    });
    let (channel, queue) = match opened {
        Ok(opened) => opened,
        Err(e) => {
            let _ = ready.send(Err(e));
            return None;
        }
    };
    let Job { bdev, read_only, shared, queue: device, .. } = job;
    // The queue has its own: another process begins when none is left.
    drop(device);
    let waker = channel.waker();
    let depth = usize::from(DEPTH);
    let mut worker = Worker {
        channel,
        queue,
        bdev,
        read_only,
        shared,
        over: Vec::with_capacity(depth),
        asked: Vec::with_capacity(depth),
        rest: VecDeque::with_capacity(depth),
        changes: 0,
    };
    let _ = ready.send(Ok(waker));
    worker.serve();
    let Worker { channel, queue, .. } = worker;
    // It watches the queue's descriptor.
    drop(channel);
    Some(queue.leave())
}

struct Worker {
    channel: Channel,
    queue: Queue,
    bdev: Arc<dyn Bdev>,
    read_only: bool,
    shared: Arc<Shared>,
    over: Vec<Finished<Waiting>>,
    asked: Vec<ublk::Request>,
    /// What goes on of long requests: they wait their turn again, and so share with the others.
    rest: VecDeque<Part>,
    /// Changes that were taken and are not answered.
    changes: usize,
}

impl Worker {
    fn serve(&mut self) {
        loop {
            let order = self.shared.order();
            // Somebody waits for what was taken.
            self.channel.set_unlimited(order != Order::Serve || self.shared.is_parked());
            self.channel.poll(&mut self.over);
            let mut idle = self.over.is_empty();
            while let Some(finished) = self.over.pop() {
                self.finish(finished);
            }
            for _ in 0..self.rest.len() {
                if self.channel.is_full() {
                    break;
                }
                let Some(part) = self.rest.pop_front() else { break };
                self.start(part);
                idle = false;
            }
            let in_flight = self.channel.in_flight() + self.rest.len();
            // Answers are told with it, too.
            match self.queue.poll(&mut self.asked) {
                Ok(Polled::Served) => {}
                Ok(Polled::Over) => return self.shared.set_over(),
                Err(e) => {
                    tracing::error!("requests of an export cannot be taken any more: {e}");
                    self.shared.set_over();
                    if in_flight == 0 {
                        return;
                    }
                }
            }
            if order == Order::Leave && in_flight == 0 {
                // What was taken and not begun is asked again of the next process.
                return;
            }
            while order != Order::Leave
                && !self.channel.is_full()
                && let Some(request) = self.asked.pop()
            {
                self.take(request, order);
                idle = false;
            }
            if self.changes == 0 {
                self.shared.note_no_changes();
            }
            if idle {
                self.channel.wait(&mut self.over, IDLE_US);
            }
        }
    }

    fn take(&mut self, request: ublk::Request, order: Order) {
        let ublk::Request { ticket, op: asked, offset, bytes, buf } = request;
        let checked = match order {
            Order::Refuse => Err(Errno::NODEV),
            Order::Serve | Order::Leave => {
                let refuses_changes = self.read_only || self.shared.is_parked();
                let (g, features) = (self.bdev.geometry(), self.bdev.features());
                of_disk(asked, offset, bytes, &g, &features, refuses_changes)
            }
        };
        match checked {
            Err(why) => self.queue.commit(ticket, buf, Err(why)),
            Ok((op, lba, blocks)) => {
                let durably = asked == ublk::Op::Write { durably: true };
                self.changes += usize::from(changes(op));
                self.start(Part { ticket, op, lba, blocks, durably, buf });
            }
        }
    }

    /// Begins a request, or the next part of a long one; there is room for it.
    fn start(&mut self, part: Part) {
        let Part { ticket, op, lba, blocks, durably, buf } = part;
        let now = blocks.min(longest(op, &self.bdev.geometry(), &self.bdev.features()));
        let waiting = Waiting { ticket, op, rest: (lba + now, blocks - now), durably };
        if let Some(finished) = self.channel.submit(op, lba, now, Some(buf), waiting) {
            self.finish(finished);
        }
    }

    /// Answers a request that is over, or has it go on.
    fn finish(&mut self, finished: Finished<Waiting>) {
        let Finished { token, buf, result } = finished;
        let Waiting { ticket, op, rest: (lba, blocks), durably } = token;
        let buf = buf.expect("each request has its buffer");
        match result {
            Ok(()) if blocks > 0 => {
                self.rest.push_back(Part { ticket, op, lba, blocks, durably, buf });
                return;
            }
            Ok(()) if durably => {
                // The flush changes nothing any more.
                let (op, lba, blocks) = (bdev::Op::Flush, 0, 0);
                self.changes -= 1;
                self.rest.push_back(Part { ticket, op, lba, blocks, durably: false, buf });
                return;
            }
            result => self.queue.commit(ticket, buf, result.map_err(errno)),
        }
        self.changes -= usize::from(changes(op));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_asked_for_what_its_bdev_can() {
        let g = Geometry { block_size: 512, physical_block_size: 65536, num_blocks: 1 << 20 };
        let features = Features {
            unmap: true,
            write_zeroes: true,
            unmap_granularity: 8,
            max_blocks: 512,
            ..Features::default()
        };
        let disk = wanted(&g, &features, false, DEPTH, 0).unwrap();
        assert_eq!((disk.bytes, disk.block_size, disk.physical_block_size), (1 << 29, 512, 4096));
        assert_eq!((disk.max_io_bytes, disk.discard_granularity), (256 * 1024 - 8192, 4096));
        assert_eq!((disk.max_discard_bytes, disk.max_zeroes_bytes), (1 << 30, 1 << 30));
        let none = wanted(&g, &Features { max_blocks: 0, ..features }, true, 7, 512).unwrap();
        assert_eq!((none.max_discard_bytes, none.max_io_bytes), (0, 512 * 1024));
        assert_eq!((disk.depth, none.depth), (64, 7));
        assert!(wanted(&g, &Features { max_blocks: 8, ..features }, false, 64, 0).is_err());
        let odd = Geometry { num_blocks: 1025, ..g };
        let longer = wanted(&odd, &features, false, DEPTH, 4096).unwrap();
        assert_eq!((longer.bytes, longer.block_size), (1 << 19, 4096));
    }
}
