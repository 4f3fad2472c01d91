//! Large transfers: what of them goes to the kernel in a turn, and of which channel.

use super::*;

/// Bytes of large transfers of these tests, several pieces and a part of one.
const LONG: usize = 2 * large::PIECE + large::PIECE / 2;

#[test]
fn a_large_transfer_goes_in_pieces_of_which_the_next_turn_gets_the_next() {
    let mut rig = rig();
    let (out, back) = (rig.range(0, LONG), rig.range(LONG, LONG));
    // The second in three runs, of which one is longer than a piece.
    let cuts = [0, 0x3000, 0x3000 + large::PIECE + 0x200, LONG];
    let parts: Vec<_> = cuts.windows(2).map(|c| rig.range(LONG + c[0], c[1] - c[0])).collect();
    let data = fill(&out, 1);
    let (pushed, runs) = rig.run(Op::Write, &[out]);
    let at = |n: usize, len: usize| {
        Pushed::plain(opcode::Write::CODE, runs[0].base().wrapping_add(n * large::PIECE), len)
    };
    assert_eq!(pushed, [at(0, large::PIECE), at(1, large::PIECE), at(2, large::PIECE / 2)]);
    let (pushed, runs) = rig.run(Op::Read, &parts);
    let single = |run: usize, within: usize, len: usize| {
        Pushed::plain(opcode::Read::CODE, runs[run].base().wrapping_add(within), len)
    };
    let last = LONG - cuts[2];
    assert_eq!(
        pushed,
        [
            single(0, 0, 0x3000),
            single(1, 0, large::PIECE),
            single(1, large::PIECE, 0x200),
            single(2, 0, large::PIECE),
            single(2, large::PIECE, last - large::PIECE),
        ]
    );
    assert_eq!(bytes(&back), data);
}

#[test]
fn runs_that_fit_in_a_piece_go_to_the_kernel_as_one_list() {
    let mut rig = rig();
    let parts: Vec<_> = (0..10).map(|n| rig.range(n * 0x1_0000, 0xfe00)).collect();
    let data: Vec<_> = parts.iter().zip(1..).map(|(part, seed)| fill(part, seed)).collect();
    for (op, opcode) in [(Op::Write, opcode::Writev::CODE), (Op::Read, opcode::Readv::CODE)] {
        let (pushed, runs) = rig.run(op, &parts);
        let list = |first: usize, len: usize| Pushed::plain(opcode, &raw const runs[first], len);
        assert_eq!(pushed, [list(0, 4), list(4, 4), list(8, 2)], "{op:?}");
        if op == Op::Write {
            parts.iter().for_each(|part| part.fill(0));
        }
    }
    assert!(parts.iter().zip(&data).all(|(part, data)| bytes(part) == *data));
}

#[test]
fn between_two_polls_the_kernel_gets_so_much_of_large_transfers_and_no_more() {
    let mut rig = rig();
    // SAFETY: the memory outlives the I/O, which ends below.
    let runs = [unsafe { rig.range(0, LONG).to_iovec() }];
    for tag in 0..8 {
        // SAFETY: so does the list.
        let sg = unsafe { Sg::new(&runs) };
        let blocks = (LONG / BLOCK) as u64;
        let io = Io { op: Op::Read, fua: false, lba: 0, blocks, sg, tag };
        assert_eq!(rig.channel.submit(&io), Submit::Pending);
        assert_eq!(rig.channel.pushed.len(), 1);
    }
    let (mut done, mut before) = (Vec::with_capacity(8), rig.channel.pushed.len());
    while done.len() < 8 {
        if rig.channel.poll(&mut done) == 0 {
            rig.io.wait(600_000_000).unwrap();
        }
        let given: u32 = rig.channel.pushed[before..].iter().map(|p| p.len).sum();
        assert!(given as usize <= large::PIECE, "{given} bytes in one turn");
        before = rig.channel.pushed.len();
    }
    assert!(done.iter().all(|c| c.result == Ok(())), "{done:?}");
    assert_eq!(rig.channel.pushed.len(), 8 * 3);
}

/// Channels on one thread, each of which has a read of so many pieces to make.
struct Crowd {
    channels: Vec<Option<FileChannel>>,
    io: IoContext,
    done: Vec<Completion>,
    /// Pieces in the kernel.
    flying: u32,
    _runs: Box<[IoVec]>,
    rig: Rig,
}

impl Crowd {
    fn new(channels: usize, pieces: usize) -> Crowd {
        let rig = rig();
        let len = pieces * large::PIECE;
        // SAFETY: the rig, which lives as long, keeps the memory.
        let runs = Box::new([unsafe { rig.range(0, len).to_iovec() }]);
        let mut all = Vec::new();
        for tag in 0..channels as u64 {
            let shared = rig.channel.shared.clone();
            let mut channel = FileChannel::new(shared, Stats::new().channel(), &rig.io).unwrap();
            // SAFETY: and the list is kept, too.
            let sg = unsafe { Sg::new(&*runs) };
            let io = Io { op: Op::Read, fua: false, lba: 0, blocks: (len / BLOCK) as u64, sg, tag };
            assert_eq!(channel.submit(&io), Submit::Pending);
            all.push(Some(channel));
        }
        let (io, done) = (rig.io.clone(), Vec::with_capacity(channels));
        Crowd { channels: all, io, done, flying: 0, _runs: runs, rig }
    }

    /// A turn of the thread, in which `polled` are looked at, and all that the kernel has ends. Returns
    /// which channels handed how many bytes to it.
    fn turn(&mut self, polled: impl Fn(usize) -> bool) -> Vec<(usize, usize)> {
        let mut given = Vec::new();
        for (n, channel) in self.channels.iter_mut().enumerate() {
            let Some(channel) = channel.as_mut().filter(|_| polled(n)) else { continue };
            channel.poll(&mut self.done);
            self.flying += channel.pushed.len() as u32;
            let bytes: u32 = channel.pushed.drain(..).map(|p| p.len).sum();
            if bytes > 0 {
                given.push((n, bytes as usize));
            }
        }
        self.flying -= self.io.flush();
        while self.flying > 0 {
            self.flying -= self.io.wait(600_000_000).unwrap();
        }
        given
    }

    /// Waits for the end of what is under way, and expects that all reads of `channels` went well.
    fn end(mut self, channels: usize) {
        while self.done.len() < channels {
            self.turn(|_| true);
            self.rig.io.wait(1000).unwrap();
        }
        assert!(self.done.iter().all(|c| c.result == Ok(())), "{:?}", self.done);
    }
}

#[test]
fn a_turn_of_the_thread_gets_so_much_of_all_channels_in_rotation() {
    const CHANNELS: usize = 64;
    const PIECES: usize = 4;
    let mut crowd = Crowd::new(CHANNELS, PIECES);
    for piece in 0..PIECES {
        for n in 0..CHANNELS {
            assert_eq!(crowd.turn(|_| true), [(n, large::PIECE)], "piece {piece}");
        }
    }
    assert_eq!(crowd.turn(|_| true), []);
    crowd.end(CHANNELS);
}

#[test]
fn a_channel_that_is_dropped_or_not_polled_keeps_no_other_one_waiting() {
    let mut crowd = Crowd::new(5, 4);
    let whole = |n| [(n, large::PIECE)];
    assert_eq!(crowd.turn(|_| true), whole(0));
    // The first, and one in the middle.
    for n in [1, 3] {
        crowd.channels[n] = None;
    }
    for n in [0, 2, 4, 0] {
        assert_eq!(crowd.turn(|_| true), whole(n));
    }
    // It is waited for in one turn; then it is the last.
    let without = |n| n != 2;
    assert_eq!(crowd.turn(without), []);
    for n in [4, 0] {
        assert_eq!(crowd.turn(without), whole(n));
    }
    for n in [2, 4] {
        assert_eq!(crowd.turn(|_| true), whole(n));
    }
    crowd.end(3);
}

#[test]
fn a_channel_whose_pieces_are_all_in_the_kernel_stands_in_nobodys_way() {
    let mut crowd = Crowd::new(2, 2);
    let [Some(a), Some(_)] = &mut crowd.channels[..] else { panic!("two channels") };
    // As if the disk did not answer to its share of them.
    a.large.pieces.pretend(PIECES_MAX as i32 / 2);
    assert_eq!(crowd.turn(|_| true), [(0, large::PIECE)], "before that");
    for _ in 0..2 {
        assert_eq!(crowd.turn(|_| true), [(1, large::PIECE)]);
    }
    let [Some(a), Some(_)] = &mut crowd.channels[..] else { panic!("two channels") };
    a.large.pieces.pretend(-(PIECES_MAX as i32) / 2);
    assert_eq!(crowd.turn(|_| true), [(0, large::PIECE)]);
    crowd.end(2);
}

#[test]
fn an_owner_has_so_many_pieces_of_a_file_of_which_each_channel_has_its_share() {
    const CHANNELS: u32 = 4;
    let mut crowd = Crowd::new(CHANNELS as usize, 15);
    let shared = crowd.rig.channel.shared.clone();
    // SAFETY: as in `Crowd::new`.
    let sg = unsafe { Sg::new(&crowd._runs) };
    for tag in 4..32 {
        let blocks = (sg.len() / BLOCK) as u64;
        let io = Io { op: Op::Read, fua: false, lba: 0, blocks, sg, tag };
        let channel = crowd.channels[tag as usize % 4].as_mut().unwrap();
        assert_eq!(channel.submit(&io), Submit::Pending);
    }
    // What has ended is not looked at.
    let push = |crowd: &mut Crowd| {
        for _ in 0..2 * PIECES_MAX {
            crowd.channels.iter_mut().flatten().for_each(FileChannel::push_pieces);
            crowd.io.flush();
        }
        crowd.channels.iter().flatten().map(|c| c.large.pieces.flying()).collect::<Vec<_>>()
    };
    assert_eq!(shared.larges.owners().0, 1);
    assert_eq!(push(&mut crowd), [PIECES_MAX / CHANNELS; 4]);
    crowd.channels.truncate(1);
    assert_eq!(push(&mut crowd), [PIECES_MAX]);
    crowd.channels[0].as_mut().unwrap().pushed.clear();
    crowd.done = Vec::with_capacity(8);
    while crowd.done.len() < 8 {
        if crowd.channels[0].as_mut().unwrap().poll(&mut crowd.done) == 0 {
            crowd.io.wait(600_000_000).unwrap();
        }
    }
    assert!(crowd.done.iter().all(|c| c.result == Ok(())), "{:?}", crowd.done);
    assert_eq!(shared.larges.owners().0, 0);
}

/// A write of `runs` that is to be durable.
///
/// # Safety
/// The rig outlives it, and so do `runs`.
unsafe fn durable(runs: &[IoVec], tag: u64) -> Io {
    // SAFETY: the caller's promise.
    let sg = unsafe { Sg::new(runs) };
    Io { op: Op::Write, fua: true, lba: 0, blocks: (sg.len() / BLOCK) as u64, sg, tag }
}

/// What the kernel has ended, as [`FileChannel::poll`] gets it, waited for.
fn ended(rig: &mut Rig) -> (u32, i32) {
    loop {
        rig.io.flush();
        match rig.channel.uring.next_completion() {
            Some(completion) => return completion,
            None => rig.io.wait(600_000_000).unwrap(),
        };
    }
}

/// Has all pieces of slot 0 written, and sees that no flush begins before the last one has ended, nor the
/// write with it: a power cut at any step loses nothing that was acknowledged.
fn write_pieces(rig: &mut Rig) {
    let count = LONG.div_ceil(large::PIECE);
    for nth in 1..=count {
        rig.channel.push_pieces();
        let (token, result) = ended(rig);
        assert_eq!(token & 0xffff, 0, "a piece");
        let flushes = |rig: &Rig| {
            rig.channel.pushed.iter().filter(|p| p.opcode == opcode::Fsync::CODE).count()
        };
        assert_eq!(flushes(rig), 0, "with {nth} of {count} pieces");
        assert_eq!(rig.channel.piece_ended(0, token, result), None, "nothing is durable yet");
        assert_eq!(flushes(rig), usize::from(nth == count));
    }
}

#[test]
fn a_durable_write_is_cut_and_acknowledged_when_a_flush_after_its_last_piece_has_ended() {
    let mut rig = rig();
    let data = fill(&rig.range(0, LONG), 1);
    // SAFETY: the memory outlives the I/O, which ends below.
    let runs = [unsafe { rig.range(0, LONG).to_iovec() }];
    // SAFETY: so does the list.
    let io = unsafe { durable(&runs, 1) };
    assert_eq!(rig.channel.submit(&io), Submit::Pending);
    write_pieces(&mut rig);
    // Whenever the power is cut before this, nothing was promised.
    let (token, result) = ended(&mut rig);
    assert_eq!((token as u16, result), (FDATASYNC, 0));
    rig.channel.flushed(result);
    assert_eq!(polled(&mut rig.channel, &rig.io), (1, Ok(())));
    assert!(rig.channel.pushed.iter().all(|p| p.len as usize <= large::PIECE));
    assert_eq!(std::fs::read(rig._file.path()).unwrap()[..LONG], data);
    // What is no longer than a piece is made durable by the kernel in one step.
    rig.channel.pushed.clear();
    // SAFETY: as above.
    let runs = [unsafe { rig.range(0, large::PIECE).to_iovec() }];
    // SAFETY: as above.
    assert_eq!(rig.channel.submit(&unsafe { durable(&runs, 2) }), Submit::Pending);
    assert_eq!(polled(&mut rig.channel, &rig.io), (2, Ok(())));
    let rw_flags = libc::RWF_DSYNC as u32;
    let whole = Pushed::plain(opcode::Write::CODE, runs[0].base(), large::PIECE);
    assert_eq!(rig.channel.pushed, [Pushed { rw_flags, ..whole }]);
}

#[test]
fn a_cut_durable_write_fails_with_its_flush_and_with_any_that_failed_meanwhile() {
    let mut rig = rig();
    // SAFETY: the memory outlives the I/Os, which end below.
    let runs = [unsafe { rig.range(0, LONG).to_iovec() }];
    // SAFETY: so does the list.
    assert_eq!(rig.channel.submit(&unsafe { durable(&runs, 1) }), Submit::Pending);
    write_pieces(&mut rig);
    assert_eq!(ended(&mut rig).0 as u16, FDATASYNC);
    rig.channel.flushed(-libc::EIO);
    assert_eq!(polled(&mut rig.channel, &rig.io), (1, Err(IoError::Flush)));
    let failure = rig.channel.shared.latch.clear().unwrap();
    assert_eq!(failure.cause, FlushCause::Flush);
    // Of another channel, cleared at once.
    rig.channel.pushed.clear();
    // SAFETY: as above.
    assert_eq!(rig.channel.submit(&unsafe { durable(&runs, 2) }), Submit::Pending);
    rig.channel.shared.latch.set(FlushCause::Flush, None);
    assert!(rig.channel.shared.latch.clear().is_some());
    write_pieces(&mut rig);
    assert_eq!(polled(&mut rig.channel, &rig.io), (2, Err(IoError::Flush)));
}

#[test]
fn a_durable_write_with_a_piece_that_failed_begins_again_as_a_whole_which_is_durable() {
    let mut rig = rig();
    // SAFETY: the memory outlives the I/O, which ends below.
    let runs = [unsafe { rig.range(0, LONG).to_iovec() }];
    // SAFETY: so does the list.
    assert_eq!(rig.channel.submit(&unsafe { durable(&runs, 1) }), Submit::Pending);
    let (token, _) = ended(&mut rig);
    assert_eq!(rig.channel.piece_ended(0, token, -libc::EIO), None);
    assert_eq!(polled(&mut rig.channel, &rig.io), (1, Ok(())));
    let last = rig.channel.pushed.last().unwrap();
    assert_eq!((last.len as usize, last.rw_flags), (LONG, libc::RWF_DSYNC as u32));
}

#[test]
fn a_piece_that_fails_has_the_whole_begin_again_and_the_rest_waits_for_nobody() {
    let mut rig = rig();
    // SAFETY: the memory outlives the I/O, which ends below.
    let runs = [unsafe { rig.range(0, LONG).to_iovec() }];
    // SAFETY: so does the list.
    let sg = unsafe { Sg::new(&runs) };
    let io = Io { op: Op::Read, fua: false, lba: 0, blocks: (LONG / BLOCK) as u64, sg, tag: 1 };
    assert_eq!(rig.channel.submit(&io), Submit::Pending);
    let (token, result) = loop {
        rig.io.flush();
        match rig.channel.uring.next_completion() {
            Some(completion) => break completion,
            None => rig.io.wait(600_000_000).unwrap(),
        };
    };
    assert_eq!(result as usize, large::PIECE);
    // As if the disk had given up: none of the others follows.
    assert_eq!(rig.channel.piece_ended(0, token, -libc::EIO), None);
    assert!(rig.channel.large.queue.is_empty());
    assert_eq!(polled(&mut rig.channel, &rig.io), (1, Ok(())));
    let whole = Pushed::plain(opcode::Read::CODE, runs[0].base(), LONG);
    assert_eq!(rig.channel.pushed[1..], [whole]);
    // What is truncated is told by the whole.
    let file = rig._file.as_file();
    file.set_len(large::PIECE as u64 + 4096).unwrap();
    let io = Io { tag: 2, ..io };
    assert_eq!(rig.channel.submit(&io), Submit::Pending);
    assert_eq!(polled(&mut rig.channel, &rig.io), (2, Err(IoError::ReadMedium)));
}
