//! A channel against a base that keeps what it was given until the test lets go of it.

use super::*;
use crate::asked::MetaThread;
use crate::asked::{Request, Want};
use crate::map::Map;
use crate::volume::{Identity, Names};
use bdev::{Bdev, COPY_AT_ONCE, Null};
use blobstore::{BlobOptions, MemDisk, Store, StoreOptions};
use guestmem::{Bounce, Sg};
use reactor::Bell;
use reactor::IoContext;
use uuid::Uuid;

/// Clusters of the volume, of one block each.
const CLUSTERS: u64 = 128;

/// Every I/O is pending, and over at the next poll.
#[derive(Default)]
struct Held(Vec<u64>);

impl Channel for Held {
    fn submit(&mut self, io: &Io) -> Submit {
        self.0.push(io.tag);
        Submit::Pending
    }
    fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        let room = done.capacity() - done.len();
        let over = self.0.drain(..room.min(self.0.len()));
        done.extend(over.map(|tag| Completion { tag, result: Ok(()), ticks: 7, ended: 8 }));
        done.len() as u32
    }
}

fn channel() -> (Arc<Volume>, LvolChannel, IoContext) {
    channel_of(CLUSTERS)
}

/// A thin volume of so many clusters without a metadata thread, and a channel of it on a [`Held`] base.
fn channel_of(clusters: u64) -> (Arc<Volume>, LvolChannel, IoContext) {
    let options = StoreOptions { name: "s".into(), uuid: Uuid::nil(), cluster_size: 64 << 10 };
    let mut store = Store::create_store(MemDisk::new(8 << 20), &options).unwrap();
    let blob = BlobOptions {
        dif: None,
        name: "b".into(),
        uuid: Uuid::nil(),
        size: clusters,
        thin: true,
        xattrs: Default::default(),
    };
    let blob = store.create(&blob).unwrap();
    let id = Identity {
        uuid: Uuid::nil(),
        lvstore: Uuid::nil(),
        unmaps: true,
        shift: 0,
        encryption: None,
        dif: None,
    };
    let names = Names { lvstore: "s".into(), lvol: "b".into() };
    let base: Arc<dyn Bdev> = Null::create("n", 512, 1 << 20, None).unwrap();
    let thread = MetaThread::new(Bell::default(), Arc::default());
    let volume = Volume::new(id, names, blob, false, base, Map::new(clusters), thread);
    let io = IoContext::new().unwrap();
    let channel = LvolChannel::new(volume.clone(), Box::new(Held::default()), &volume.stats, &io);
    (volume, channel, io)
}

/// A write of the first `blocks` blocks.
fn write(buf: &Bounce, blocks: u64) -> Io {
    let sg = buf.sg(blocks as usize * 512).unwrap();
    Io { op: Op::Write, fua: false, lba: 0, blocks, sg, tag: 9 }
}

/// What a completion says, but for how long it took.
fn ended(c: &Completion) -> (u64, Result<(), IoError>) {
    (c.tag, c.result)
}

#[test]
fn what_is_passed_on_as_a_whole_takes_as_long_as_the_base_says() {
    let (volume, mut channel, _io) = channel();
    volume.view().own.set(0, 5);
    let buf = Bounce::new();
    assert_eq!(channel.submit(&write(&buf, 1)), Submit::Pending);
    let mut done = Vec::with_capacity(4);
    assert_eq!(channel.poll(&mut done), 1);
    assert_eq!(done, [Completion { tag: 9, result: Ok(()), ticks: 7, ended: 8 }]);
    let written = *volume.stats.snapshot().op(Op::Write);
    assert_eq!((written.ops, written.bytes, written.max_ticks), (1, 512, 7));
}

#[test]
fn one_poll_takes_all_that_the_base_finished() {
    let (volume, mut channel, _io) = channel();
    // Every cluster alone, so that each is a piece; more pieces than one poll of the base takes.
    (0..CLUSTERS).for_each(|c| volume.view().own.set(c, 2 * (CLUSTERS - c) as u32));
    let buf = Bounce::new();
    let io = write(&buf, BASE_DONE as u64 + 36);
    assert_eq!(channel.submit(&io), Submit::Pending);
    let mut done = Vec::with_capacity(4);
    assert_eq!(channel.poll(&mut done), 1, "pieces were left with the base");
    assert_eq!(done.iter().map(ended).collect::<Vec<_>>(), [(9, Ok(()))]);
}

#[test]
fn what_was_asked_for_a_volume_that_goes_away_ends() {
    let (volume, mut channel, io) = channel();
    let buf = Bounce::new();
    let mut done = Vec::with_capacity(4);
    let removed = [(9, Err(IoError::Removed))];

    // Parked, then the volume goes and its metadata thread with it.
    assert_eq!(channel.submit(&write(&buf, 4)), Submit::Pending);
    assert_eq!(channel.poll(&mut done), 0);
    volume.remove();
    assert_eq!(channel.poll(&mut done), 1);
    assert_eq!(done.iter().map(ended).collect::<Vec<_>>(), removed);

    // Parked by a channel that had looked at the volume just before it went: it wakes itself,
    // because nobody else will.
    done.clear();
    io.wait(0).unwrap();
    let at = channel.slots.take().unwrap();
    channel.slots[at] = Slot::new(write(&buf, 4), None, 0);
    channel.ask(Request::of(at, Want::Allocate, 0, 4));
    let begun = std::time::Instant::now();
    io.wait(600_000_000).unwrap();
    assert!(begun.elapsed().as_secs() < 60, "nobody woke the thread");
    assert_eq!(channel.poll(&mut done), 1);
    assert_eq!(done.iter().map(ended).collect::<Vec<_>>(), removed);
}

#[test]
fn what_meets_a_volume_without_its_map_waits_for_it() {
    let (volume, mut channel, _io) = channel();
    let view = volume.view();
    view.own.set(3, 33);
    volume.replace_view(view.without_map());
    let buf = Bounce::new();
    let mut done = Vec::with_capacity(4);
    for (op, lba) in [(Op::Read, 3), (Op::Read, 0), (Op::Write, 3), (Op::Unmap, 3)] {
        let io = Io { op, lba, ..write(&buf, 1) };
        assert_eq!(channel.submit(&io), Submit::Pending, "{op:?}");
        assert_eq!(channel.poll(&mut done), 0);
        let mut asked = Vec::new();
        volume.requests(|_, request| asked.push(request));
        let wanted = if op == Op::Write { Want::Allocate } else { Want::Map };
        let [Request { slot, want, first, count: 1, data }] = &asked[..] else {
            panic!("{} requests", asked.len())
        };
        let (slot, want, first) = (*slot, *want, *first);
        assert_eq!(data.is_some(), op == Op::Write, "it may show a parent");
        assert_eq!((want, first), (wanted, lba), "{op:?}");
        // The metadata thread reads it, and lets go of it again before the channel looks.
        let answer = |channel: &mut LvolChannel, result| {
            let reply = crate::asked::Reply { slot, result, written: false };
            channel.pins.shared().replies.push(reply).unwrap();
        };
        answer(&mut channel, Ok(()));
        assert_eq!(channel.poll(&mut done), 0, "{op:?}");
        let mut again = 0;
        volume.requests(|_, request| again += u32::from(request.want == wanted));
        assert_eq!(again, 1);
        // It cannot be read.
        answer(&mut channel, Err(IoError::ReadMedium));
        assert_eq!(channel.poll(&mut done), 1);
        assert_eq!(ended(&done.pop().unwrap()), (9, Err(IoError::ReadMedium)));
    }
    assert_eq!(channel.sparse_run(0, 128), bdev::Run { hole: false, blocks: 1 });
    let io = Io { op: Op::Read, lba: 3, ..write(&buf, 1) };
    assert_eq!(channel.submit(&io), Submit::Pending);
    volume.requests(|_, _| ());
    volume.replace_view(view);
    let reply = crate::asked::Reply { slot: 0, result: Ok(()), written: false };
    channel.pins.shared().replies.push(reply).unwrap();
    while done.is_empty() {
        channel.poll(&mut done);
    }
    assert_eq!(ended(&done[0]), (9, Ok(())));
    assert_eq!(channel.sparse_run(0, 128), bdev::Run { hole: true, blocks: 3 });
}

#[test]
fn a_channel_without_io_does_not_keep_a_map_that_its_volume_let_go_of() {
    let (volume, mut channel, _io) = channel();
    let view = volume.view();
    view.own.set(0, 5);
    let buf = Bounce::new();
    let mut done = Vec::with_capacity(4);
    assert_eq!(channel.submit(&write(&buf, 1)), Submit::Pending);
    assert_eq!(channel.poll(&mut done), 1);
    let map = Arc::downgrade(&view.own);
    volume.replace_view(view.without_map());
    drop(view);
    assert!(map.upgrade().is_some(), "the channel has not looked yet");
    channel.poll(&mut done);
    assert!(map.upgrade().is_none());
}

#[test]
#[allow(unsafe_code)]
fn a_long_read_of_unallocated_clusters_is_zeroed_a_piece_a_poll() {
    const PIECES: usize = 4;
    let (_volume, mut channel, io) = channel_of((PIECES * COPY_AT_ONCE / 512) as u64);
    let mut memory = vec![0xa5u8; PIECES * COPY_AT_ONCE];
    // SAFETY: `memory` outlives the list.
    let run = [unsafe { guestmem::IoVec::new(memory.as_mut_ptr(), memory.len()) }];
    // SAFETY: `run` and `memory` outlive the I/Os, which end below.
    let sg = unsafe { Sg::new(&run) };
    let blocks = (PIECES * COPY_AT_ONCE / 512) as u64;
    let read = Io { op: Op::Read, fua: false, lba: 0, blocks, sg, tag: 1 };
    assert_eq!(channel.submit(&read), Submit::Pending);
    let mut done = Vec::with_capacity(4);
    let mut polls = 0;
    while done.is_empty() {
        // It keeps its thread awake: ten minutes would be noticed.
        io.wait(600_000_000).unwrap();
        channel.poll(&mut done);
        polls += 1;
    }
    assert_eq!(polls + 1, PIECES, "one piece was zeroed by submit");
    assert_eq!(done.iter().map(ended).collect::<Vec<_>>(), [(1, Ok(()))]);
    assert!(memory.iter().all(|b| *b == 0));
    // A short one is over at once.
    let buf = Bounce::new();
    let short = Io { blocks: 8, sg: buf.sg(4096).unwrap(), tag: 2, ..read };
    assert_eq!(channel.submit(&short), Submit::Done(Ok(())));
}

#[test]
fn a_run_is_cut_at_what_was_asked_and_at_what_one_look_sees() {
    let (volume, mut channel, _io) = channel_of(3 * RUN_CLUSTERS);
    let end = volume.view().clusters();
    let own = volume.view().own;
    let mut of = |lba, blocks| {
        let bdev::Run { hole, blocks } = channel.sparse_run(lba, blocks);
        assert_eq!(channel.pins.shared().active.load(std::sync::atomic::Ordering::Acquire), 0);
        (hole, blocks)
    };
    (10..end).for_each(|cluster| own.set(cluster, 5 + cluster as u32));
    own.set(15, blobstore::HOLE);
    assert_eq!(of(0, end), (true, 10));
    assert_eq!(of(10, end - 10), (false, 5));
    assert_eq!(of(15, end - 15), (true, 1));
    assert_eq!(of(16, 2), (false, 2));
    assert_eq!(of(16, end - 16), (false, RUN_CLUSTERS + 1));
}
