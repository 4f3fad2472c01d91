//! What goes to the kernel: the caller's own memory where direct I/O takes it, else a copy.

use guestmem::{GuestMemory, GuestRange, IoVec, Sg};
use io_uring::{opcode, squeue};

use super::super::bounce::BOUNCE_SIZE;
use super::super::open::open;
use super::*;
use crate::{FlushCause, Stats};

mod fuse;
mod pieces;
mod ranges;
mod shares;

/// The fields of a submission that say where its data is (`struct io_uring_sqe`, io_uring.h).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pushed {
    opcode: u8,
    /// Of the data, or of the `struct iovec`s.
    addr: u64,
    /// Bytes, or `struct iovec`s.
    len: u32,
    /// One of the kernel's workers makes the call.
    by_worker: bool,
    /// `RWF_` flags of a read or write, `IORING_FSYNC_` flags of an fsync.
    rw_flags: u32,
}

impl Pushed {
    pub(super) fn of(entry: &squeue::Entry) -> Pushed {
        const { assert!(size_of::<squeue::Entry>() == 64) }
        // SAFETY: an entry is the 64 bytes of the kernel's structure, without padding.
        let bytes: &[u8; 64] = unsafe { &*std::ptr::from_ref(entry).cast() };
        let field = |at: usize| &bytes[at..];
        Pushed {
            opcode: bytes[0],
            addr: u64::from_ne_bytes(*field(16).first_chunk().expect("64 bytes")),
            len: u32::from_ne_bytes(*field(24).first_chunk().expect("64 bytes")),
            by_worker: bytes[1] & squeue::Flags::ASYNC.bits() != 0,
            rw_flags: u32::from_ne_bytes(*field(28).first_chunk().expect("64 bytes")),
        }
    }

    fn at(opcode: u8, range: &GuestRange<'_>) -> Pushed {
        Pushed::plain(opcode, range.as_ptr(), range.len())
    }

    /// One that the kernel may begin in the submission.
    fn plain<T>(opcode: u8, addr: *const T, len: usize) -> Pushed {
        Pushed { opcode, addr: addr as u64, len: len as u32, by_worker: false, rw_flags: 0 }
    }
}

const BLOCK: usize = 512;
/// Guest address of the memory of these tests.
const GUEST: u64 = 0x10_0000;

struct Rig {
    channel: FileChannel,
    io: IoContext,
    memory: GuestMemory,
    _file: tempfile::NamedTempFile,
}

/// A channel on a file where direct I/O wants memory that is aligned to 512 bytes, and a guest.
fn rig() -> Rig {
    rig_on(|_| ())
}

/// As [`rig`], on a file that is `made` otherwise.
fn rig_on(made: impl FnOnce(&mut Shared)) -> Rig {
    let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
    file.as_file().set_len(4 << 20).unwrap();
    let mut shared = open(file.path(), Some(BLOCK as u32), 0, false, None).unwrap();
    // Whatever the file system of this machine wants.
    shared.mem_align = BLOCK;
    shared.in_memory = false;
    made(&mut shared);
    let io = IoContext::new().unwrap();
    let channel = FileChannel::new(Arc::new(shared), Stats::new().channel(), &io).unwrap();
    let memory = GuestMemory::memfd(&[(GUEST, 4 << 20)]).unwrap();
    Rig { channel, io, memory, _file: file }
}

impl Rig {
    fn range(&self, offset: usize, len: usize) -> GuestRange<'static> {
        let range = self.memory.range(GUEST + offset as u64, len as u64).unwrap();
        // SAFETY: the rig keeps the memory longer than the test keeps the range.
        unsafe { range.detach() }
    }

    /// Runs `op` from block 1 on with these parts of the guest's memory. Returns what was pushed,
    /// and the list as it was given.
    fn run(&mut self, op: Op, parts: &[GuestRange<'_>]) -> (Vec<Pushed>, Vec<IoVec>) {
        // SAFETY: the memory outlives the I/O, which ends below.
        let runs: Vec<IoVec> = parts.iter().map(|part| unsafe { part.to_iovec() }).collect();
        // SAFETY: so does the list.
        let sg = unsafe { Sg::new(&runs) };
        let blocks = (sg.len() / BLOCK) as u64;
        let io = Io { op, fua: false, lba: 1, blocks, sg, tag: 3 };
        assert_eq!(self.channel.submit(&io), Submit::Pending);
        let mut done = Vec::with_capacity(1);
        while self.channel.poll(&mut done) == 0 {
            self.io.wait(600_000_000).unwrap();
        }
        assert_eq!((done[0].tag, done[0].result), (3, Ok(())));
        (std::mem::take(&mut self.channel.pushed), runs)
    }

    fn bounce_buffers(&self) -> std::ops::Range<u64> {
        let base = self.channel.bounces.base_of_all() as u64;
        base..base + 16 * BOUNCE_SIZE as u64
    }
}

/// Two channels on a file, as two threads have them, and their thread's I/O context.
fn two_channels() -> ([FileChannel; 2], Arc<Shared>, IoContext, tempfile::NamedTempFile) {
    let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let shared = Arc::new(open(file.path(), Some(BLOCK as u32), 0, false, None).unwrap());
    let io = IoContext::new().unwrap();
    let channels =
        [0, 1].map(|_| FileChannel::new(shared.clone(), Stats::new().channel(), &io).unwrap());
    (channels, shared, io, file)
}

/// The completion of the one I/O that the kernel has of a channel.
fn from_the_kernel(channel: &mut FileChannel, io: &IoContext) -> (u16, i32) {
    loop {
        io.flush();
        match channel.uring.next_completion() {
            Some((token, result)) => return (token as u16, result),
            None => io.wait(600_000_000).unwrap(),
        };
    }
}

fn polled(channel: &mut FileChannel, io: &IoContext) -> (u64, Result<(), IoError>) {
    let mut done = Vec::with_capacity(1);
    while channel.poll(&mut done) == 0 {
        io.wait(600_000_000).unwrap();
    }
    (done[0].tag, done[0].result)
}

#[test]
fn reads_and_writes_name_the_file_by_the_rings_number_where_it_has_one() {
    let mut rig = rig();
    let registers = rig.channel.file.is_registered();
    if !registers {
        println!("skipped: rings register files since Linux 6.15");
    }
    let slot = |op| {
        let io = Io { op, fua: false, lba: 0, blocks: 1, sg: Sg::EMPTY, tag: 0 };
        Slot::new(io, Step::Plain, 0)
    };
    let channel = &mut rig.channel;
    for (op, by_number) in [
        (Op::Read, registers),
        (Op::Write, registers),
        // One of the kernel's workers would look it up.
        (Op::Unmap, false),
        (Op::WriteZeroes, false),
    ] {
        let (file, zeroes) = (channel.file, channel.zeroes);
        let (entry, _) = slot(op).entry(&channel.shared, file, &mut channel.bounces, zeroes);
        // SAFETY: an entry is the 64 bytes of the kernel's structure, without padding.
        let bytes: &[u8; 64] = unsafe { &*std::ptr::from_ref(&entry).cast() };
        let fixed = bytes[1] & squeue::Flags::FIXED_FILE.bits() != 0;
        assert_eq!(fixed, by_number, "{op:?}");
        let fd = i32::from_ne_bytes(*bytes[4..].first_chunk().expect("64 bytes"));
        assert_eq!(fd == channel.shared.fd.as_raw_fd(), !fixed, "{op:?}");
    }
    // Only where the submission itself looks it up.
    assert!(!rig_on(|shared| shared.in_memory = true).channel.file.is_registered());
    assert!(!rig_on(|shared| shared.submit_waits = true).channel.file.is_registered());
}

#[test]
fn a_failed_flush_fails_those_that_wait_for_it_and_all_later_ones() {
    let ([mut a, mut b], shared, io, _file) = two_channels();
    assert_eq!(a.submit(&Io::flush(1)), Submit::Pending);
    // This one is answered by the next fdatasync, whoever begins it.
    assert_eq!(b.submit(&Io::flush(2)), Submit::Pending);
    let mut done = Vec::with_capacity(2);
    assert_eq!(b.poll(&mut done), 0);
    assert_eq!((a.pushed.len(), b.pushed.len()), (1, 0), "one at a time");
    assert_eq!(from_the_kernel(&mut a, &io), (FDATASYNC, 0));
    a.flushed(-libc::EIO);
    assert_eq!(polled(&mut a, &io), (1, Err(IoError::Flush)));
    assert_eq!(polled(&mut b, &io), (2, Err(IoError::Flush)));
    assert_eq!(b.submit(&Io::flush(4)), Submit::Done(Err(IoError::Flush)));
    // No write is durable by itself either; others go on.
    let zeros = |fua| Io { op: Op::WriteZeroes, fua, lba: 0, blocks: 1, sg: Sg::EMPTY, tag: 6 };
    assert_eq!(b.submit(&zeros(true)), Submit::Done(Err(IoError::Flush)));
    assert_eq!(b.submit(&zeros(false)), Submit::Pending);
    assert_eq!(polled(&mut b, &io), (6, Ok(())));
    let failure = shared.latch.clear().unwrap();
    assert_eq!((failure.cause, failure.errno), (FlushCause::Flush, Some(libc::EIO)));
    assert_eq!(b.submit(&Io::flush(5)), Submit::Pending);
    assert_eq!(polled(&mut b, &io), (5, Ok(())));
}

#[test]
fn a_failure_that_is_cleared_at_once_fails_the_flushes_that_waited_all_the_same() {
    let ([mut a, mut b], shared, io, _file) = two_channels();
    assert_eq!(a.submit(&Io::flush(1)), Submit::Pending);
    assert_eq!(b.submit(&Io::flush(2)), Submit::Pending);
    assert_eq!(from_the_kernel(&mut a, &io), (FDATASYNC, 0));
    a.flushed(-libc::EIO);
    // Before either thread has looked at those that wait.
    assert!(shared.latch.clear().is_some());
    assert_eq!(polled(&mut a, &io), (1, Err(IoError::Flush)));
    assert_eq!(polled(&mut b, &io), (2, Err(IoError::Flush)));
    assert_eq!(b.submit(&Io::flush(3)), Submit::Pending);
    assert_eq!(polled(&mut b, &io), (3, Ok(())));
}

#[test]
fn a_failure_while_a_durable_write_is_under_way_fails_it_also_when_it_is_cleared_before_its_flush()
{
    let ([mut a, mut b], shared, io, _file) = two_channels();
    // Zeros are written, and then flushed.
    shared.zero_range.store(false, Relaxed);
    let zeros = Io { op: Op::WriteZeroes, fua: true, lba: 0, blocks: 1, sg: Sg::EMPTY, tag: 6 };
    assert_eq!(b.submit(&zeros), Submit::Pending);
    let (n, written) = from_the_kernel(&mut b, &io);
    assert_eq!(usize::try_from(written), Ok(BLOCK));
    // This took the report of whatever was lost.
    assert_eq!(a.submit(&Io::flush(1)), Submit::Pending);
    assert_eq!(from_the_kernel(&mut a, &io), (FDATASYNC, 0));
    a.flushed(-libc::EIO);
    assert!(shared.latch.clear().is_some());
    assert_eq!(b.stepped(n, written), None);
    assert_eq!(polled(&mut b, &io), (6, Err(IoError::Flush)));
    assert_eq!(b.submit(&zeros), Submit::Pending);
    assert_eq!(polled(&mut b, &io), (6, Ok(())));
}

#[test]
fn any_number_of_flushes_take_one_fdatasync_that_begins_after_them() {
    let ([mut a, mut b], _shared, io, _file) = two_channels();
    assert_eq!(a.submit(&Io::flush(0)), Submit::Pending);
    for tag in 1..u64::from(DEPTH) {
        assert_eq!(a.submit(&Io::flush(tag)), Submit::Pending);
    }
    for tag in 0..u64::from(DEPTH) {
        assert_eq!(b.submit(&Io::flush(tag)), Submit::Pending);
    }
    let (mut of_a, mut of_b) = (Vec::with_capacity(512), Vec::with_capacity(512));
    while of_a.is_empty() {
        if a.poll(&mut of_a) == 0 {
            io.wait(600_000_000).unwrap();
        }
    }
    assert_eq!(of_a.len(), 1, "the first alone was asked for before it began");
    while of_a.len() + of_b.len() < 2 * usize::from(DEPTH) {
        if a.poll(&mut of_a) + b.poll(&mut of_b) == 0 {
            io.wait(600_000_000).unwrap();
        }
    }
    assert!(of_a.iter().chain(&of_b).all(|c| c.result == Ok(())));
    assert_eq!(a.pushed.len() + b.pushed.len(), 2);
}

#[test]
fn a_flush_that_may_pass_is_tried_again() {
    let ([mut a, _b], shared, io, _file) = two_channels();
    assert_eq!(a.submit(&Io::flush(1)), Submit::Pending);
    assert_eq!(from_the_kernel(&mut a, &io), (FDATASYNC, 0));
    a.flushed(-libc::EINTR);
    assert_eq!(polled(&mut a, &io), (1, Ok(())));
    assert_eq!(a.pushed.len(), 2);
    assert!(!shared.latch.is_set());
}

#[test]
fn a_file_takes_few_of_the_kernels_workers() {
    let ([mut a, mut b], shared, io, _file) = two_channels();
    let zero = |tag| {
        let sg = Sg::EMPTY;
        Io { op: Op::WriteZeroes, fua: false, lba: tag, blocks: 1, sg, tag }
    };
    for tag in 0..u64::from(DEPTH) {
        assert_eq!(a.submit(&zero(tag)), Submit::Pending);
    }
    assert_eq!(a.pushed.len(), WORKERS_MAX as usize);
    // Who has none may have one.
    for tag in 0..3 {
        assert_eq!(b.submit(&zero(tag)), Submit::Pending);
    }
    assert_eq!(b.pushed.len(), 1);
    let mut done = Vec::with_capacity(512);
    while done.len() < usize::from(DEPTH) + 3 {
        if a.poll(&mut done) + b.poll(&mut done) == 0 {
            io.wait(600_000_000).unwrap();
        }
        assert!(shared.workers.load(Relaxed) <= WORKERS_MAX + 1);
    }
    assert!(done.iter().all(|c| c.result == Ok(())), "{done:?}");
    assert_eq!(shared.workers.load(Relaxed), 0);
}

#[test]
fn flushes_that_succeed_beside_one_another_end_together() {
    let ([mut a, mut b], _shared, io, _file) = two_channels();
    for tag in 0..4 {
        assert_eq!(a.submit(&Io::flush(tag)), Submit::Pending);
        assert_eq!(b.submit(&Io::flush(tag)), Submit::Pending);
    }
    let mut done = Vec::with_capacity(16);
    while done.len() < 8 {
        if a.poll(&mut done) + b.poll(&mut done) == 0 {
            io.wait(600_000_000).unwrap();
        }
    }
    assert!(done.iter().all(|c| c.result == Ok(())), "{done:?}");
}

#[test]
fn what_the_kernel_says_of_a_flush_is_latched() {
    let (reader, _writer) = std::io::pipe().unwrap();
    let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let mut shared = open(file.path(), Some(BLOCK as u32), 0, false, None).unwrap();
    // A pipe cannot be flushed.
    shared.fd = reader.into();
    let (shared, io) = (Arc::new(shared), IoContext::new().unwrap());
    let mut channel = FileChannel::new(shared.clone(), Stats::new().channel(), &io).unwrap();
    assert_eq!(channel.submit(&Io::flush(1)), Submit::Pending);
    assert_eq!(polled(&mut channel, &io).1, Err(IoError::Flush));
    assert_eq!(shared.latch.failure().unwrap().errno, Some(libc::EINVAL));
}

#[test]
fn a_channel_that_goes_with_a_flush_in_the_kernel_holds_nobody_up() {
    let ([mut a, mut b], _shared, io, _file) = two_channels();
    assert_eq!(a.submit(&Io::flush(1)), Submit::Pending);
    assert_eq!(b.submit(&Io::flush(2)), Submit::Pending);
    drop(a);
    assert_eq!(polled(&mut b, &io), (2, Ok(())));
}

#[test]
fn who_is_woken_for_an_earlier_fdatasync_waits_for_the_one_that_goes_on() {
    let ([mut a, _b], shared, io, _file) = two_channels();
    // Another thread's. The one that had the one before has not told all of its end yet.
    let number = shared.flushes.begin().unwrap();
    assert_eq!(a.submit(&Io::flush(1)), Submit::Pending);
    shared.flushes.waiters.tell();
    // Ten minutes: a lost wake-up would show as a hang.
    io.wait(600_000_000).unwrap();
    let mut done = Vec::with_capacity(1);
    assert_eq!(a.poll(&mut done), 0);
    shared.flushes.end(number, true);
    io.wait(600_000_000).unwrap();
    assert_eq!(polled(&mut a, &io), (1, Ok(())));
}

#[test]
fn no_fdatasync_begins_that_nobody_would_wait_for() {
    let ([mut a, mut b], shared, io, _file) = two_channels();
    assert_eq!(b.submit(&Io::flush(1)), Submit::Pending);
    assert_eq!(a.submit(&Io::flush(2)), Submit::Pending);
    assert_eq!(from_the_kernel(&mut b, &io), (FDATASYNC, 0));
    b.flushed(0);
    // The one that answers it, too, before this thread goes on.
    assert_eq!(b.submit(&Io::flush(3)), Submit::Pending);
    assert_eq!(from_the_kernel(&mut b, &io), (FDATASYNC, 0));
    b.flushed(0);
    a.begin_flush();
    assert_eq!(a.pushed.len(), 0);
    assert_eq!(shared.flushes.under_way(), None);
    assert_eq!(polled(&mut a, &io), (2, Ok(())));
    // Nor is it counted as one that made something durable.
    assert_eq!(b.submit(&Io::flush(4)), Submit::Pending);
    assert_eq!(b.pushed.len(), 3);
}

#[test]
fn a_flush_whose_fdatasync_is_in_the_kernel_is_not_answered_before_its_end() {
    let ([mut a, mut b], shared, io, _file) = two_channels();
    assert_eq!(a.submit(&Io::flush(1)), Submit::Pending);
    assert_eq!(from_the_kernel(&mut a, &io), (FDATASYNC, 0));
    shared.latch.set(FlushCause::Metadata, None);
    let mut done = Vec::with_capacity(1);
    assert_eq!(a.poll(&mut done), 0, "who asked would not look again");
    a.flushed(0);
    assert_eq!(polled(&mut a, &io), (1, Err(IoError::Flush)));
    assert_eq!(shared.flushes.under_way(), None);
    shared.latch.clear().unwrap();
    assert_eq!(b.submit(&Io::flush(2)), Submit::Pending);
    assert_eq!(polled(&mut b, &io), (2, Ok(())));
}

fn fill(range: &GuestRange<'_>, seed: usize) -> Vec<u8> {
    let bytes: Vec<u8> = (0..range.len()).map(|i| ((i + seed) * 7 % 251) as u8).collect();
    range.write_slice(0, &bytes).unwrap();
    bytes
}

fn bytes(range: &GuestRange<'_>) -> Vec<u8> {
    let mut bytes = vec![0; range.len()];
    range.read_slice(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn the_guests_own_pages_go_to_the_kernel() {
    let mut rig = rig();
    let (out, back) = (rig.range(0x1000, 0x4000), rig.range(0x8200, 0x4000));
    let data = fill(&out, 1);
    assert_eq!(rig.run(Op::Write, &[out]).0, [Pushed::at(opcode::Write::CODE, &out)]);
    assert_eq!(rig.run(Op::Read, &[back]).0, [Pushed::at(opcode::Read::CODE, &back)]);
    assert_eq!(bytes(&back), data);
}

#[test]
fn scattered_pages_go_to_the_kernel_as_the_list_that_the_caller_made() {
    let mut rig = rig();
    let parts = [rig.range(0x2000, 0x200), rig.range(0x9000, 0x1000), rig.range(0x600, 0x600)];
    let data: Vec<_> = parts.iter().zip(1..).map(|(part, seed)| fill(part, seed)).collect();
    for (op, code) in [(Op::Write, opcode::Writev::CODE), (Op::Read, opcode::Readv::CODE)] {
        let (pushed, runs) = rig.run(op, &parts);
        let list = Pushed::plain(code, runs.as_ptr(), 3);
        assert_eq!(pushed, [list], "{op:?}");
        for (run, part) in runs.iter().zip(&parts) {
            assert_eq!((run.base(), run.len()), (part.as_ptr(), part.len()));
        }
        if op == Op::Write {
            parts.iter().for_each(|part| part.fill(0));
        }
    }
    assert!(parts.iter().zip(&data).all(|(part, data)| bytes(part) == *data));
}

#[test]
fn what_is_not_aligned_goes_through_a_bounce_buffer_and_gives_it_back() {
    let mut rig = rig();
    let bounce = rig.bounce_buffers();
    // At an odd address; in two runs that are cut within a block; longer than a bounce buffer.
    let cases: [Vec<GuestRange<'_>>; 3] = [
        vec![rig.range(0x1001, 0x1000)],
        vec![rig.range(0x3000, 0x100), rig.range(0x5100, 0xf00)],
        vec![rig.range(0x11, 0x2_0000)],
    ];
    for parts in cases {
        let data: Vec<_> = parts.iter().zip(1..).map(|(part, seed)| fill(part, seed)).collect();
        let total: usize = parts.iter().map(GuestRange::len).sum();
        for (op, code) in [(Op::Write, opcode::Write::CODE), (Op::Read, opcode::Read::CODE)] {
            let (pushed, _) = rig.run(op, &parts);
            assert_eq!(pushed.len(), total.div_ceil(BOUNCE_SIZE), "{op:?}");
            for step in pushed {
                assert_eq!(step.opcode, code);
                assert!(bounce.contains(&step.addr), "{step:?} is not in {bounce:?}");
            }
            if op == Op::Write {
                parts.iter().for_each(|part| part.fill(0));
            }
        }
        assert!(parts.iter().zip(&data).all(|(part, data)| bytes(part) == *data));
        // None is kept: so many can be taken again.
        let all: Vec<_> = std::iter::from_fn(|| rig.channel.bounces.take()).collect();
        assert_eq!(all.len(), 16);
        all.into_iter().for_each(|b| rig.channel.bounces.give_back(b));
    }
}
