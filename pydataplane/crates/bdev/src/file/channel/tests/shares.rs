//! Requests of several owners of one file.

use reactor::Owner;

use super::*;

/// Bytes of the file, and of the memory that is read into.
const SIZE: usize = 1 << 20;

/// Channels on one file, each of the owner of that number, and their thread.
struct Guests<const N: usize> {
    channels: [FileChannel; N],
    shared: Arc<Shared>,
    io: IoContext,
    memory: GuestMemory,
    runs: Vec<IoVec>,
    _file: tempfile::NamedTempFile,
}

fn guests<const N: usize>(numbers: [usize; N]) -> Guests<N> {
    let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
    file.as_file().set_len(SIZE as u64).unwrap();
    let mut shared = open(file.path(), Some(BLOCK as u32), 0, false, None).unwrap();
    // Whatever the file system of this machine has.
    (shared.direct, shared.in_memory, shared.mem_align) = (true, false, 1);
    let shared = Arc::new(shared);
    let io = IoContext::new().unwrap();
    let owners: [Owner; N] = std::array::from_fn(|_| Owner::new());
    let channels = numbers.map(|nth| {
        let io = io.owned_by(owners[nth]);
        FileChannel::new(shared.clone(), Stats::new().channel(), &io).unwrap()
    });
    let memory = GuestMemory::memfd(&[(GUEST, SIZE as u64)]).unwrap();
    let runs = (0..SIZE / 4096)
        .map(|nth| {
            let range = memory.range(GUEST + nth as u64 * 4096, 4096).unwrap();
            // SAFETY: the memory is dropped after the channels.
            unsafe { range.detach().to_iovec() }
        })
        .collect();
    Guests { channels, shared, io, memory, runs, _file: file }
}

impl<const N: usize> Guests<N> {
    /// Reads the 4 KiB of that number.
    fn read(&mut self, channel: usize, nth: u64) {
        // SAFETY: the list and the memory are dropped after the channels.
        let sg = unsafe { Sg::new(std::slice::from_ref(&self.runs[nth as usize])) };
        let io = Io { op: Op::Read, fua: false, lba: nth * 8, blocks: 8, sg, tag: nth };
        assert_eq!(self.channels[channel].submit(&io), Submit::Pending);
    }

    /// The numbers of what was read by a channel, in the order in which the kernel had it.
    fn pushed(&self, channel: usize) -> Vec<u64> {
        let base = self.memory.range(GUEST, 1).unwrap().as_ptr() as u64;
        self.channels[channel].pushed.iter().map(|p| (p.addr - base) / 4096).collect()
    }

    /// Polls one channel until `count` I/Os have ended.
    fn poll(&mut self, channel: usize, count: usize) -> Vec<Completion> {
        let mut done = Vec::with_capacity(count);
        while done.len() < count {
            if self.channels[channel].poll(&mut done) == 0 {
                self.io.wait(600_000_000).unwrap();
            }
        }
        assert!(done.iter().all(|c| c.result == Ok(())), "{done:?}");
        done
    }
}

#[test]
fn the_thread_knows_whose_large_transfers_a_channel_makes() {
    let guests = guests([0, 0, 1]);
    let [a, b, c] = guests.channels.each_ref().map(|channel| channel.uring.owner());
    assert!(a.is_some() && c.is_some());
    assert!(a == b && a != c, "{a:?} {b:?} {c:?}");
}

#[test]
fn what_is_beyond_an_owners_share_waits_in_order_and_nobody_else_waits_for_it() {
    let mut guests = guests([0, 1]);
    guests.shared.owners.fix(4);
    (0..32).for_each(|nth| guests.read(0, nth));
    assert_eq!(guests.pushed(0), [0, 1, 2, 3]);
    // A neighbour that comes later, and comes again.
    for nth in 100..103 {
        guests.read(1, nth);
        assert_eq!(guests.pushed(1).last(), Some(&nth));
        guests.poll(1, 1);
    }
    let mut ended = 0;
    while ended < 32 {
        let mut done = Vec::with_capacity(1);
        if guests.channels[0].poll(&mut done) == 0 {
            guests.io.wait(600_000_000).unwrap();
        }
        ended += done.len();
        assert_eq!(guests.pushed(0).len(), (ended + 4).min(32), "one goes for each that ends");
    }
    assert_eq!(guests.pushed(0), Vec::from_iter(0..32));
    assert!(guests.channels.iter().all(|c| c.held.is_empty() && c.slots.taken() == 0));
}

#[test]
fn a_lone_owner_has_its_whole_depth_in_the_kernel() {
    let mut guests = guests([0, 0]);
    for nth in 0..u64::from(DEPTH) / 2 {
        guests.read(0, nth);
        guests.read(1, nth);
    }
    for channel in [0, 1] {
        assert_eq!(guests.pushed(channel).len(), usize::from(DEPTH) / 2);
        guests.poll(channel, usize::from(DEPTH) / 2);
    }
}

#[test]
fn all_channels_of_an_owner_have_one_share() {
    let mut guests = guests([0, 0, 1]);
    guests.shared.owners.fix(4);
    (0..6).for_each(|nth| guests.read(0, nth));
    guests.read(1, 10);
    guests.read(2, 20);
    assert_eq!((guests.pushed(0).len(), guests.pushed(1).len(), guests.pushed(2).len()), (4, 0, 1));
    // All that is before it in the other channel has ended.
    guests.poll(0, 6);
    assert_eq!(guests.poll(1, 1)[0].tag, 10);
    guests.poll(2, 1);
}

#[test]
fn a_busy_channel_does_not_keep_its_owners_others_from_the_disk() {
    let mut guests = guests([0, 0, 0]);
    guests.shared.owners.fix(2);
    (0..64).for_each(|nth| guests.read(0, nth));
    (100..108).for_each(|nth| guests.read(1, nth));
    (200..208).for_each(|nth| guests.read(2, nth));
    let mut ended = [0; 3];
    while ended[1..] != [8, 8] {
        for (channel, ended) in ended.iter_mut().enumerate() {
            let mut done = Vec::with_capacity(1);
            guests.channels[channel].poll(&mut done);
            *ended += done.len();
        }
        guests.io.flush();
        assert!(ended[0] <= 24, "{ended:?}: each has its turn");
    }
    guests.poll(0, 64 - ended[0]);
    let owner = guests.channels[0].share.owner().unwrap();
    assert_eq!(guests.shared.owners.flying_of(owner), Some(0));
}

#[test]
fn room_that_was_given_to_a_channel_that_goes_is_given_to_the_next() {
    let mut guests = guests([0, 0, 0, 0]);
    guests.shared.owners.fix(1);
    (0..4).for_each(|channel| guests.read(channel, channel as u64));
    guests.poll(0, 1);
    let owner = guests.channels[0].share.owner().unwrap();
    assert_eq!(guests.shared.owners.flying_of(owner), Some(1), "the second one's");
    let [first, second, third, fourth] = guests.channels;
    // The third one stands in the queue still, the second one has room and does not use it.
    drop((third, second));
    assert_eq!(guests.shared.owners.flying_of(owner), Some(1), "the fourth one's");
    guests.io.flush();
    let mut fourth = fourth;
    assert_eq!(polled(&mut fourth, &guests.io), (3, Ok(())));
    drop(first);
    assert_eq!(guests.shared.owners.flying_of(owner), Some(0));
    drop(fourth);
    assert_eq!(guests.shared.owners.flying_of(owner), None);
}

#[test]
fn a_thread_that_has_nothing_with_the_disk_is_woken_when_its_owner_has_room() {
    let mut guests = guests([0]);
    guests.shared.owners.fix(1);
    // Another thread's.
    let other = IoContext::new().unwrap();
    let owner = guests.channels[0].share.owner().unwrap();
    let stats = Stats::new().channel();
    let mut late = FileChannel::new(guests.shared.clone(), stats, &other.owned_by(owner)).unwrap();
    guests.read(0, 0);
    // SAFETY: as in `read`.
    let sg = unsafe { Sg::new(std::slice::from_ref(&guests.runs[1])) };
    let io = Io { op: Op::Read, fua: false, lba: 8, blocks: 8, sg, tag: 1 };
    assert_eq!(late.submit(&io), Submit::Pending);
    assert_eq!(late.poll(&mut Vec::with_capacity(1)), 0);
    assert_eq!(late.pushed.len(), 0);
    guests.poll(0, 1);
    // Ten minutes: a lost wake-up would show as a hang.
    assert_eq!(other.wait(600_000_000).unwrap(), 0);
    assert_eq!(polled(&mut late, &other), (1, Ok(())));
}

#[test]
fn an_owner_that_goes_with_requests_that_wait_leaves_nothing_behind() {
    let mut guests = guests([0, 1]);
    guests.shared.owners.fix(2);
    (0..9).for_each(|nth| guests.read(0, nth));
    let owner = guests.channels[0].share.owner().unwrap();
    assert_eq!(guests.shared.owners.flying_of(owner), Some(2));
    let io = guests.io.owned_by(owner);
    let again = FileChannel::new(guests.shared.clone(), Stats::new().channel(), &io).unwrap();
    guests.channels[0] = again;
    assert_eq!(guests.shared.owners.flying_of(owner), Some(0));
    guests.read(0, 0);
    guests.poll(0, 1);
    drop(guests.channels);
    assert_eq!(guests.shared.owners.flying_of(owner), None);
}

#[test]
fn a_flush_does_not_wait_for_what_was_not_acknowledged() {
    let mut guests = guests([0]);
    guests.shared.owners.fix(0);
    guests.read(0, 1);
    assert_eq!(guests.channels[0].submit(&Io::flush(2)), Submit::Pending);
    assert_eq!(guests.poll(0, 1)[0].tag, 2);
    assert_eq!(guests.channels[0].held.len(), 1);
    // What comes later stays behind what waits.
    guests.shared.owners.fix(4);
    guests.channels[0].pushed.clear();
    guests.read(0, 3);
    assert_eq!(guests.channels[0].held.len(), 2);
    guests.poll(0, 2);
    assert_eq!(guests.pushed(0), [1, 3]);
}

#[test]
fn a_durable_write_that_waited_while_something_was_lost_fails() {
    let mut guests = guests([0]);
    let write = |guests: &mut Guests<1>, fua, tag| {
        // SAFETY: as in `read`.
        let sg = unsafe { Sg::new(std::slice::from_ref(&guests.runs[0])) };
        let io = Io { op: Op::Write, fua, lba: 0, blocks: 8, sg, tag };
        assert_eq!(guests.channels[0].submit(&io), Submit::Pending);
    };
    guests.shared.owners.fix(0);
    write(&mut guests, true, 1);
    write(&mut guests, false, 2);
    guests.shared.latch.set(crate::FlushCause::Metadata, None);
    // Whoever clears it does not know of those that wait.
    assert!(guests.shared.latch.clear().is_some());
    write(&mut guests, true, 3);
    guests.shared.owners.fix(4);
    let mut done = Vec::with_capacity(4);
    while done.len() < 3 {
        if guests.channels[0].poll(&mut done) == 0 {
            guests.io.wait(600_000_000).unwrap();
        }
    }
    done.sort_by_key(|c| c.tag);
    let results: Vec<_> = done.iter().map(|c| c.result).collect();
    assert_eq!(results, [Err(IoError::Flush), Ok(()), Ok(())]);
}

#[test]
fn pieces_of_large_transfers_count() {
    let mut guests = guests([0]);
    guests.shared.owners.fix(0);
    let range = guests.memory.range(GUEST, SIZE as u64).unwrap();
    // SAFETY: the memory is dropped after the channels.
    let run = unsafe { range.detach().to_iovec() };
    // SAFETY: so is the list.
    let sg = unsafe { Sg::new(std::slice::from_ref(&run)) };
    let io = Io { op: Op::Read, fua: false, lba: 0, blocks: (SIZE / BLOCK) as u64, sg, tag: 7 };
    assert_eq!(guests.channels[0].submit(&io), Submit::Pending);
    let owner = guests.channels[0].share.owner().unwrap();
    let mut done = Vec::with_capacity(1);
    assert_eq!(guests.channels[0].poll(&mut done), 0);
    assert_eq!(guests.channels[0].pushed, [], "a piece waits for room as others do");
    guests.shared.owners.fix(2);
    while done.is_empty() {
        let flying = guests.channels[0].large.pieces.flying();
        assert!(flying <= 2, "{flying}");
        // Room that was given to it and that it has not used is counted, too.
        assert!([flying, flying + 1].contains(&guests.shared.owners.flying_of(owner).unwrap()));
        if guests.channels[0].poll(&mut done) == 0 {
            guests.io.wait(600_000_000).unwrap();
        }
    }
    assert_eq!((done[0].tag, done[0].result), (7, Ok(())));
    assert_eq!(guests.channels[0].pushed.len(), SIZE / large::PIECE);
    assert_eq!(guests.shared.owners.flying_of(owner), Some(0));
}

/// Has each channel read so many times all that the file has, in pieces.
fn read_all<const N: usize>(guests: &mut Guests<N>, run: &[IoVec; 1], times: u64) {
    // Only what the file may have in pieces counts here.
    guests.shared.owners.fix(u32::MAX);
    for (tag, channel) in (0..times).flat_map(|tag| (0..N).map(move |channel| (tag, channel))) {
        // SAFETY: the caller keeps the list and the memory longer than the channels.
        let sg = unsafe { Sg::new(run) };
        let io = Io { op: Op::Read, fua: false, lba: 0, blocks: (SIZE / BLOCK) as u64, sg, tag };
        assert_eq!(guests.channels[channel].submit(&io), Submit::Pending);
    }
}

#[test]
fn a_guest_of_many_channels_has_as_many_large_pieces_as_one_of_one_channel() {
    let mut guests = guests([0, 0, 0, 0, 0, 0, 1]);
    let range = guests.memory.range(GUEST, SIZE as u64).unwrap();
    // SAFETY: the memory is dropped after the channels.
    let run = [unsafe { range.detach().to_iovec() }];
    read_all(&mut guests, &run, 16);
    assert_eq!(guests.shared.larges.owners(), (2, 2));
    let half = usize::try_from(PIECES_MAX / 2).unwrap();
    // What has ended is not looked at.
    for _ in 0..4 * PIECES_MAX {
        guests.channels.iter_mut().for_each(FileChannel::push_pieces);
        guests.io.flush();
    }
    let pieces = guests.channels.each_ref().map(|channel| channel.pushed.len());
    assert_eq!((pieces[..6].iter().sum::<usize>(), pieces[6]), (half - 2, half), "{pieces:?}");
    assert!(pieces[..6].iter().all(|count| *count == half / 6), "{pieces:?}");
    // When it has no more, the others have all of them.
    guests.poll(6, 16);
    assert_eq!(guests.shared.larges.owners(), (1, 2));
    guests.poll(0, 16);
    (1..6).for_each(|channel| drop(guests.poll(channel, 16)));
    assert_eq!(guests.shared.larges.owners(), (0, 2));
    drop(guests.channels);
    assert_eq!(guests.shared.larges.owners(), (0, 0));
}

#[test]
fn where_there_is_less_than_a_piece_for_each_channel_they_have_turns() {
    const OF_FIRST: usize = 9;
    let mut numbers = [0; OF_FIRST + 15];
    (OF_FIRST..numbers.len()).for_each(|channel| numbers[channel] = channel);
    let mut guests = guests(numbers);
    let range = guests.memory.range(GUEST, SIZE as u64).unwrap();
    // SAFETY: the memory is dropped after the channels.
    let run = [unsafe { range.detach().to_iovec() }];
    read_all(&mut guests, &run, 1);
    let (share, whole) = (PIECES_MAX / 16, SIZE / large::PIECE);
    let mut left = Vec::from_iter(0..numbers.len());
    while !left.is_empty() {
        left.retain(|&channel| {
            let mut done = Vec::with_capacity(1);
            guests.channels[channel].poll(&mut done) == 0
        });
        guests.io.wait(0).unwrap();
        let first = &guests.channels[..OF_FIRST];
        let flying: u32 = first.iter().map(|channel| channel.large.pieces.flying()).sum();
        // Who has ended leaves the others more.
        assert!(flying <= share || left.len() < numbers.len(), "{flying}");
        let pushed: Vec<_> = first.iter().map(|channel| channel.pushed.len()).collect();
        let (least, most) = (pushed.iter().min().unwrap(), pushed.iter().max().unwrap());
        assert!(most - least <= 2, "{pushed:?}");
    }
    assert!(guests.channels.iter().all(|channel| channel.pushed.len() == whole));
}

#[test]
fn a_part_of_a_range_is_one_request_and_the_next_has_its_turn_behind_others() {
    for op in [Op::Unmap, Op::WriteZeroes] {
        let mut guests = guests([0, 1]);
        guests.shared.owners.fix(1);
        let blocks = (SIZE / BLOCK) as u64;
        let range = |tag| Io { op, fua: false, lba: 0, blocks, sg: Sg::EMPTY, tag };
        for tag in [1000, 1001] {
            assert_eq!(guests.channels[0].submit(&range(tag)), Submit::Pending);
        }
        guests.read(0, 7);
        assert_eq!(guests.channels[0].pushed.len(), 1, "one for all that it has");
        // A neighbour does not wait for it.
        guests.read(1, 100);
        assert_eq!(guests.pushed(1), [100]);
        guests.poll(1, 1);
        let owner = guests.channels[0].share.owner().unwrap();
        let mut done = Vec::with_capacity(4);
        while done.len() < 3 {
            assert!(guests.shared.owners.flying_of(owner).unwrap() <= 1);
            assert!(guests.channels[0].working.count <= 1);
            if guests.channels[0].poll(&mut done) == 0 {
                guests.io.wait(600_000_000).unwrap();
            }
        }
        assert!(done.iter().all(|c| c.result == Ok(())), "{done:?}");
        let at = |is: fn(&Pushed) -> bool| guests.channels[0].pushed.iter().position(is);
        // After one part of each, of which each range has several.
        assert_eq!(at(|p| p.opcode == opcode::Read::CODE), Some(2));
        assert!(guests.channels[0].pushed.len() >= 5);
        assert_eq!(done[0].tag, 7);
        assert_eq!(guests.shared.owners.flying_of(owner), Some(0));
        assert!(guests.channels[0].held.is_empty());
    }
}

#[test]
fn a_lone_owner_has_parts_of_all_its_ranges_in_the_kernel() {
    let mut guests = guests([0]);
    let blocks = (SIZE / BLOCK) as u64;
    for tag in 0..8 {
        let io = Io { op: Op::Unmap, fua: false, lba: 0, blocks, sg: Sg::EMPTY, tag };
        assert_eq!(guests.channels[0].submit(&io), Submit::Pending);
    }
    assert_eq!((guests.channels[0].pushed.len(), guests.channels[0].held.len()), (8, 0));
    guests.poll(0, 8);
    let owner = guests.channels[0].share.owner().unwrap();
    assert_eq!(guests.shared.owners.flying_of(owner), Some(0));
}
