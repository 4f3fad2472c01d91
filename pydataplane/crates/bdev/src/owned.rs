//! Many I/Os at a time for a thread that is no reactor: exports, copies.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use guestmem::{IoVec, Sg};
use reactor::{IoContext, Owner, Waker, ticks};

use crate::{
    AlignedBuf, Bdev, Channel, Completion, Io, IoError, Limits, Op, OpenError, Protected, Slots,
    Submit,
};

/// Longest single wait for a completion before the device is polled again, in microseconds.
const WAIT_US: u64 = 100_000;

/// What was asked of an [`OwnedChannel`], over now.
#[derive(Debug)]
pub struct Finished<T> {
    /// As given to [`OwnedChannel::submit`].
    pub token: T,
    /// The buffer given, with the data of a read.
    pub buf: Option<AlignedBuf>,
    /// How it ended.
    pub result: Result<(), IoError>,
}

struct Slot<T> {
    io: Io,
    with: Option<Protected>,
    /// What `io.sg` points to; its address is stable because slots are boxed as a whole.
    iov: [IoVec; 1],
    buf: Option<AlignedBuf>,
    /// `Some` while the I/O is not over.
    token: Option<T>,
    /// It counts in the limits.
    counted: bool,
}

/// A channel on an I/O context of its own that owns the buffers of its I/Os until they end, so
/// that its use is safe. Belongs to the thread that opened it. Each I/O carries a token of the
/// caller's. Dropping it waits for what is in flight. Where a device is shared, it has a share of its own.
pub struct OwnedChannel<T> {
    channel: Box<dyn Channel>,
    io: IoContext,
    block_size: u32,
    slots: Slots<Slot<T>>,
    /// Slots that the channel was too full to take, or that a limit keeps from it, in order.
    refused: VecDeque<u16>,
    done: Vec<Completion>,
    /// What the device does at most.
    limits: Arc<Limits>,
    /// Nobody heeds that now.
    unlimited: bool,
    /// When a limit lets the first of them begin, in ticks; 0: none keeps it.
    limited_until: u64,
}

impl<T> OwnedChannel<T> {
    /// Opens `bdev` for the calling thread, for at most `depth` I/Os at a time.
    ///
    /// # Errors
    /// What [`Bdev::open`] says, or that the kernel has no I/O context left.
    pub fn open(bdev: &dyn Bdev, depth: u16) -> Result<Self, OpenError> {
        OwnedChannel::open_within(bdev, depth, Arc::default())
    }

    /// As [`OwnedChannel::open`], of I/O that waits in its order while the device does as much as `limits`
    /// let it.
    ///
    /// # Errors
    /// See there.
    pub fn open_within(
        bdev: &dyn Bdev,
        depth: u16,
        limits: Arc<Limits>,
    ) -> Result<Self, OpenError> {
        let io = IoContext::new().map_err(|e| OpenError {
            name: bdev.name().to_owned(),
            why: format!("no I/O context for this thread: {e}"),
        })?;
        let channel = bdev.open(&io.owned_by(Owner::new()))?;
        let slot = |_| Slot {
            io: Io::flush(0),
            with: None,
            iov: [IoVec::EMPTY],
            buf: None,
            token: None,
            counted: false,
        };
        Ok(OwnedChannel {
            channel,
            io,
            block_size: bdev.geometry().block_size,
            slots: Slots::new(depth, slot),
            refused: VecDeque::with_capacity(usize::from(depth)),
            done: Vec::with_capacity(usize::from(depth)),
            limits,
            unlimited: false,
            limited_until: 0,
        })
    }

    /// Wakes the thread out of [`OwnedChannel::wait`].
    pub fn waker(&self) -> Waker {
        self.io.waker()
    }

    /// Ends [`OwnedChannel::wait`] also when `fd` becomes readable (edge triggered: the caller reads
    /// until nothing is left). Its owner keeps it open as long as the channel.
    ///
    /// # Errors
    /// It is watched already, or cannot be.
    pub fn watch(&self, fd: BorrowedFd<'_>) -> std::io::Result<()> {
        self.io.watch_always(fd)
    }

    /// Whether no further I/O is taken now.
    pub fn is_full(&self) -> bool {
        self.slots.is_full()
    }

    /// I/Os that are not over.
    pub fn in_flight(&self) -> usize {
        self.slots.taken()
    }

    /// Starts an I/O on the first `blocks` blocks of `buf`. Returns it if it is over at once.
    /// Only when not [`OwnedChannel::is_full`].
    ///
    /// # Panics
    /// When it is full: the caller looks first.
    pub fn submit(
        &mut self,
        op: Op,
        lba: u64,
        blocks: u64,
        buf: Option<AlignedBuf>,
        token: T,
    ) -> Option<Finished<T>> {
        self.submit_with(op, lba, blocks, buf, None, token)
    }

    /// As [`OwnedChannel::submit`], with protection information, which lies in `buf` as `with` says.
    ///
    /// # Panics
    /// See there.
    pub fn submit_with(
        &mut self,
        op: Op,
        lba: u64,
        blocks: u64,
        buf: Option<AlignedBuf>,
        with: Option<Protected>,
        token: T,
    ) -> Option<Finished<T>> {
        let block = self.block_size as usize;
        let block = with.map_or(block, |with| with.in_list(block));
        let at = self.slots.take().expect("the caller looked whether there is room");
        let slot = &mut self.slots[at];
        slot.buf = buf;
        slot.token = Some(token);
        let data = matches!(op, Op::Read | Op::Write);
        let len = usize::try_from(blocks).ok().and_then(|b| b.checked_mul(block));
        let mut sg = Sg::EMPTY;
        if data {
            let Some((len, buf)) = len.zip(slot.buf.as_mut()).filter(|(l, b)| *l <= b.len()) else {
                return Some(self.finish(at, Err(IoError::BadLength)));
            };
            // SAFETY: the slot keeps the buffer until the I/O is over.
            slot.iov = unsafe { [IoVec::new(buf.as_mut_ptr(), len)] };
            // SAFETY: `iov` is in a boxed slot, not touched until the I/O is over.
            sg = unsafe { Sg::new(&slot.iov) };
        }
        slot.io = Io { op, fua: false, lba, blocks, sg, tag: u64::from(at) };
        slot.with = with;
        slot.counted = false;
        if self.limited_until != 0 || self.is_over_limit(at) {
            self.refused.push_back(at);
            return None;
        }
        self.start(at)
    }

    /// Has everything begin whatever the limits say, or heeds them again: for who waits for the end of what
    /// was submitted.
    pub fn set_unlimited(&mut self, unlimited: bool) {
        self.unlimited = unlimited;
    }

    /// Whether a limit keeps an I/O from beginning; else it counts.
    fn is_over_limit(&mut self, at: u16) -> bool {
        let slot = &mut self.slots[at];
        self.limited_until = 0;
        if !self.limits.is_on() || self.unlimited || slot.counted {
            return false;
        }
        match self.limits.admit(slot.io.op, slot.io.bytes(self.block_size), ticks::now()) {
            Ok(()) => slot.counted = true,
            Err(at) => self.limited_until = at,
        }
        self.limited_until != 0
    }

    fn start(&mut self, at: u16) -> Option<Finished<T>> {
        let slot = &self.slots[at];
        let submit = match &slot.with {
            None => self.channel.submit(&slot.io),
            Some(with) => self.channel.submit_protected(&slot.io, with),
        };
        match submit {
            Submit::Done(result) => return Some(self.finish(at, result)),
            Submit::Pending => {}
            Submit::Full => self.refused.push_back(at),
        }
        None
    }

    fn finish(&mut self, at: u16, result: Result<(), IoError>) -> Finished<T> {
        let slot = &mut self.slots[at];
        let token = slot.token.take().expect("an I/O ends once");
        let buf = slot.buf.take();
        self.slots.give_back(at);
        Finished { token, buf, result }
    }

    /// Appends what is over to `over`; returns how many. Whatever the kernel has told by then is
    /// among it, so that [`OwnedChannel::wait`] may follow.
    pub fn poll(&mut self, over: &mut Vec<Finished<T>>) -> usize {
        let before = over.len();
        self.io.flush();
        loop {
            self.collect(over);
            // What this submits may be over when it returns, and then nothing would end the sleep.
            if self.io.flush() == 0 {
                return over.len() - before;
            }
        }
    }

    fn collect(&mut self, over: &mut Vec<Finished<T>>) {
        let mut done = std::mem::take(&mut self.done);
        done.clear();
        self.channel.poll(&mut done);
        for c in &done {
            let at = u16::try_from(c.tag).expect("a tag is the number of a slot");
            over.push(self.finish(at, c.result));
        }
        self.done = done;
        for _ in 0..self.refused.len() {
            let Some(at) = self.refused.front().copied().filter(|at| !self.is_over_limit(*at))
            else {
                break;
            };
            self.refused.pop_front();
            over.extend(self.start(at));
        }
    }

    /// Submits what [`OwnedChannel::submit`] was given and sleeps, with one system call, until
    /// something may be over, the waker was used, or the wait was long: at most 100 ms with I/O in
    /// flight, else `idle_us` microseconds. Does not sleep when something is over already, which is
    /// then appended to `over`; the rest is for [`OwnedChannel::poll`].
    pub fn wait(&mut self, over: &mut Vec<Finished<T>>, idle_us: u64) {
        let before = over.len();
        self.io.harvest();
        self.collect(over);
        if over.len() > before {
            return;
        }
        let mut limit = if self.in_flight() > 0 { WAIT_US } else { idle_us };
        if self.limited_until != 0 {
            let ticks = self.limited_until.saturating_sub(ticks::now());
            limit = limit.min(ticks::to_ns(ticks).div_ceil(1000));
        }
        if self.io.wait(limit).is_err() {
            std::thread::yield_now();
        }
    }
}

impl<T> Drop for OwnedChannel<T> {
    fn drop(&mut self) {
        // The kernel may still write into the buffers of what is in flight.
        self.unlimited = true;
        let mut over = Vec::new();
        while self.in_flight() > 0 {
            if self.poll(&mut over) == 0 {
                self.wait(&mut over, WAIT_US);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Features, FileBdev, FileKind, FileOptions, Geometry, Malloc, MallocOptions, RateLimits,
    };
    use io_uring::opcode;
    use reactor::UringClient;
    use std::sync::Mutex;

    fn drain<T>(channel: &mut OwnedChannel<T>, over: &mut Vec<Finished<T>>) {
        while channel.in_flight() > 0 {
            if channel.poll(over) == 0 {
                channel.wait(over, WAIT_US);
            }
        }
    }

    /// A disk of 64 blocks.
    fn memory() -> Arc<Malloc> {
        let options = MallocOptions {
            name: "m0".into(),
            block_size: 512,
            physical_block_size: 0,
            num_blocks: 64,
            uuid: None,
        };
        Malloc::create(options).unwrap()
    }

    fn both(bdev: &dyn Bdev) {
        let mut channel = OwnedChannel::open(bdev, 8).unwrap();
        let mut over = Vec::new();
        for lba in 0..64u64 {
            while channel.is_full() {
                if channel.poll(&mut over) == 0 {
                    channel.wait(&mut over, WAIT_US);
                }
            }
            let mut buf = AlignedBuf::zeroed(8192);
            buf[..512].fill(lba as u8 + 1);
            over.extend(channel.submit(Op::Write, lba, 1, Some(buf), lba));
        }
        drain(&mut channel, &mut over);
        assert_eq!(over.len(), 64);
        assert!(over.drain(..).all(|f| f.result.is_ok() && f.buf.is_some()));
        let buf = Some(AlignedBuf::zeroed(64 * 512));
        over.extend(channel.submit(Op::Read, 0, 64, buf, 7));
        drain(&mut channel, &mut over);
        let read = over.pop().unwrap();
        assert_eq!((read.token, read.result), (7, Ok(())));
        let data = read.buf.unwrap();
        assert!(data.chunks(512).zip(1u8..).all(|(block, n)| block.iter().all(|b| *b == n)));
        over.extend(channel.submit(Op::Read, 0, 2, Some(AlignedBuf::zeroed(512)), 8));
        assert_eq!(over.pop().unwrap().result, Err(IoError::BadLength));
        over.extend(channel.submit(Op::Read, 1 << 40, 1, Some(AlignedBuf::zeroed(512)), 9));
        drain(&mut channel, &mut over);
        assert_eq!(over.pop().unwrap().result, Err(IoError::OutOfRange));
    }

    #[test]
    fn memory_and_file_take_many_at_a_time_and_give_buffers_back() {
        both(&*memory());
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(64 * 512).unwrap();
        let options = FileOptions {
            name: "f0".into(),
            path: file.path().into(),
            block_size: Some(512),
            read_only: false,
            uuid: None,
            kind: FileKind::Uring,
        };
        both(&*FileBdev::create(options).unwrap());
    }

    #[test]
    fn what_a_limit_keeps_waits_in_its_order_until_somebody_must_not() {
        let bdev = memory();
        let limits = Arc::new(Limits::default());
        // After one block the next one waits for 512 s.
        let mut slow = RateLimits { operation_bytes: 1, ..RateLimits::default() };
        slow.operations[0].average = 1;
        limits.set(slow).unwrap();
        let mut channel = OwnedChannel::open_within(&*bdev, 8, Arc::clone(&limits)).unwrap();
        let mut over = Vec::new();
        let submit = |channel: &mut OwnedChannel<u64>, over: &mut Vec<Finished<u64>>, n: u64| {
            let buf = Some(AlignedBuf::zeroed(512));
            over.extend(channel.submit(Op::Write, n, 1, buf, n));
        };
        let tokens = |over: &mut Vec<Finished<u64>>| -> Vec<u64> {
            over.drain(..).map(|finished| finished.token).collect()
        };
        (0..4).for_each(|n| submit(&mut channel, &mut over, n));
        channel.wait(&mut over, WAIT_US);
        channel.poll(&mut over);
        assert_eq!(tokens(&mut over), [0]);
        // A flush is not limited, and behind them all the same.
        over.extend(channel.submit(Op::Flush, 0, 0, None, 4));
        assert!(tokens(&mut over).is_empty());
        channel.set_unlimited(true);
        drain(&mut channel, &mut over);
        assert_eq!(tokens(&mut over), [1, 2, 3, 4]);
        channel.set_unlimited(false);
        (5..8).for_each(|n| submit(&mut channel, &mut over, n));
        limits.set(RateLimits::default()).unwrap();
        drain(&mut channel, &mut over);
        assert_eq!(tokens(&mut over), [5, 6, 7]);
        limits.set(slow).unwrap();
        (8..12).for_each(|n| submit(&mut channel, &mut over, n));
        // Its end waits for none of them.
        drop(channel);
    }

    /// Gives an I/O to the kernel when it is polled first, as a file does with one that goes on in
    /// steps. The kernel ends it before the submission returns.
    /// Notes whose its channels are.
    #[derive(Default)]
    struct Steps(Mutex<Vec<Option<Owner>>>);

    struct StepsChannel {
        uring: UringClient,
        tags: VecDeque<u64>,
    }

    impl Bdev for Steps {
        fn name(&self) -> &str {
            "steps"
        }
        fn aliases(&self) -> Vec<String> {
            Vec::new()
        }
        fn uuid(&self) -> uuid::Uuid {
            uuid::Uuid::nil()
        }
        fn product_name(&self) -> &'static str {
            "Steps"
        }
        fn geometry(&self) -> Geometry {
            Geometry { block_size: 512, physical_block_size: 512, num_blocks: 8 }
        }
        fn features(&self) -> Features {
            Features::default()
        }
        fn open(&self, io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
            self.0.lock().unwrap().push(io.owner());
            let uring = io.uring().unwrap().client(8);
            Ok(Box::new(StepsChannel { uring, tags: VecDeque::new() }))
        }
        fn driver_specific(&self) -> serde_json::Value {
            serde_json::Value::Null
        }
    }

    impl Channel for StepsChannel {
        fn submit(&mut self, io: &Io) -> Submit {
            self.tags.push_back(io.tag);
            Submit::Pending
        }

        fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
            let before = done.len();
            while let Some((tag, _)) = self.uring.next_completion() {
                done.push(Completion { tag: u64::from(tag), result: Ok(()), ticks: 0, ended: 0 });
            }
            while let Some(tag) = self.tags.pop_front() {
                // SAFETY: a no-op names no buffer.
                unsafe { self.uring.push(opcode::Nop::new().build(), tag as u32, 0) }.unwrap();
            }
            (done.len() - before) as u32
        }
    }

    #[test]
    fn each_channel_has_an_owner_of_its_own() {
        let steps = Steps::default();
        let _channels = [0, 1].map(|_| OwnedChannel::<()>::open(&steps, 4).unwrap());
        let owners = steps.0.into_inner().unwrap();
        assert!(owners[0].is_some() && owners[1].is_some(), "its I/O is no metadata: {owners:?}");
        assert_ne!(owners[0], owners[1]);
    }

    #[test]
    fn what_ends_while_it_is_submitted_is_not_slept_through() {
        let mut channel = OwnedChannel::open(&Steps::default(), 4).unwrap();
        let mut over = Vec::new();
        assert!(channel.submit(Op::Flush, 0, 0, None, 'a').is_none());
        assert!(channel.submit(Op::Flush, 0, 0, None, 'b').is_none());
        assert_eq!(channel.poll(&mut over), 2);
        assert_eq!(channel.in_flight(), 0);
    }
}
