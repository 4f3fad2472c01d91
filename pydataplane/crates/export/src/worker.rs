//! The thread that serves one export: mailbox, channel, answers.

use bdev::{Bdev, Finished, OpenError, OwnedChannel};
use reactor::Waker;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use crate::request::{Reply, Request, longest};
use crate::volume::Mailbox;

/// I/Os of one export that are with its bdev at a time; more wait.
pub const DEPTH: u16 = 64;

/// Longest sleep with nothing in flight, in microseconds: a request wakes the thread.
const IDLE_US: u64 = 60_000_000;

/// What is carried along with an I/O.
struct Waiting {
    reply: Reply,
    op: bdev::Op,
    /// What a long unmap or write of zeros has still to do: first block and number.
    rest: (u64, u64),
}

type Channel = OwnedChannel<Waiting>;

/// Says to the kernel that this thread, and those that it starts, take part in writing memory out:
/// an allocation here must not wait for that, which may wait for us (prctl(2), PR_SET_IO_FLUSHER).
/// It needs CAP_SYS_RESOURCE; without it the kernel's own reserves have to do.
pub(crate) fn serve_write_back() {
    let _ = rustix::process::configure_io_flusher_behavior(true);
}

/// Opens the channel, says through `ready` how that went, and serves until the mailbox is closed
/// and what was in it is answered.
pub(crate) fn run(
    bdev: &Arc<dyn Bdev>,
    mailbox: &Mailbox,
    ready: &SyncSender<Result<Waker, OpenError>>,
) {
    serve_write_back();
    let mut channel = match Channel::open(&**bdev, DEPTH) {
        Ok(channel) => channel,
        Err(e) => {
            let _ = ready.send(Err(e));
            return;
        }
    };
    let _ = ready.send(Ok(channel.waker()));
    let mut incoming = VecDeque::new();
    let mut over = Vec::with_capacity(usize::from(DEPTH));
    loop {
        let closed = mailbox.take(&mut incoming);
        channel.poll(&mut over);
        while !channel.is_full()
            && let Some(request) = incoming.pop_front()
        {
            over.extend(submit(&mut channel, &**bdev, request));
        }
        if over.is_empty() {
            if closed && incoming.is_empty() && channel.in_flight() == 0 {
                return;
            }
            channel.wait(IDLE_US);
        }
        // What goes on waits its turn again, so that it shares with the others.
        incoming.extend(over.drain(..).filter_map(|finished| answer(mailbox, finished)));
    }
}

/// Starts a request, or the first part of a long one.
fn submit(channel: &mut Channel, bdev: &dyn Bdev, request: Request) -> Option<Finished<Waiting>> {
    let Request { op, lba, blocks, buf, reply } = request;
    let now = blocks.min(longest(op, &bdev.geometry(), &bdev.features()));
    channel.submit(op, lba, now, buf, Waiting { reply, op, rest: (lba + now, blocks - now) })
}

/// Answers a request that is over; returns what is still to do of a long one.
fn answer(mailbox: &Mailbox, finished: Finished<Waiting>) -> Option<Request> {
    let Finished { token: Waiting { reply, op, rest: (lba, blocks) }, buf, result } = finished;
    if result.is_ok() && blocks > 0 {
        return Some(Request { op, lba, blocks, buf, reply });
    }
    reply.send(result, buf.as_ref());
    mailbox.answered(op, buf);
    None
}
