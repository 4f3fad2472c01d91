//! The first write to a cluster of a clone is done with the cluster: what is copied, and the guest's data over
//! that, are one write, before the cluster is the volume's. One of a whole cluster reads nothing.

use crate::common::{PER_CLUSTER, Rig, image, image_tags, read_tags, tagged};
use bdev::testing::{Fault, FaultBdev};
use bdev::{AlignedBuf, Finished, Io, IoError, Op, OwnedChannel, Submit};
use guestmem::Bounce;
use lvol::NewLvol;
use reactor::IoContext;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::Duration;

/// Clusters of each volume.
const CLUSTERS: u64 = 8;
const BLOCKS: u64 = CLUSTERS * PER_CLUSTER;

/// What the three volumes show at first: zeros, their snapshot, a bdev.
const KINDS: [&str; 3] = ["thin", "clone", "outside"];

fn shown(kind: &str) -> Vec<u64> {
    match kind {
        "thin" => vec![0; BLOCKS as usize],
        "clone" => (0..BLOCKS).map(|block| 100_000 + block).collect(),
        _ => image_tags(),
    }
}

/// An lvstore with a volume of each kind, all durable.
fn rig() -> Rig {
    let rig = Rig::with_lvs(96);
    rig.create("thin", CLUSTERS, true).unwrap();
    rig.create("clone", CLUSTERS, true).unwrap();
    let bytes: Vec<u8> =
        shown("clone").iter().flat_map(|tag| tag.to_le_bytes().repeat(64)).collect();
    let mut data = AlignedBuf::zeroed(bytes.len());
    data.copy_from_slice(&bytes);
    let mut volume = rig.open("lvs0/clone");
    volume.write(0, &data).unwrap();
    volume.flush().unwrap();
    drop(volume);
    rig.lvstores.snapshot("lvs0/clone", &NewLvol::named("snapshot")).unwrap();
    rig.registry.register(image()).unwrap();
    rig.lvstores.clone_bdev("image", "lvs0", &NewLvol::named("outside")).unwrap();
    rig
}

fn all_of(rig: &Rig, kind: &str) -> Vec<u64> {
    read_tags(&mut rig.open(&format!("lvs0/{kind}")), 0, BLOCKS)
}

fn owned(rig: &Rig, kind: &str) -> u64 {
    rig.lvstores.lvol(&format!("lvs0/{kind}")).unwrap().num_allocated_clusters
}

/// Many writes at once.
struct Writer {
    channel: OwnedChannel<u64>,
    over: Vec<Finished<u64>>,
}

impl Writer {
    fn open(rig: &Rig, kind: &str) -> Self {
        let bdev = rig.bdev(&format!("lvs0/{kind}"));
        Writer { channel: OwnedChannel::open(&*bdev, 200).unwrap(), over: Vec::new() }
    }

    fn submit(&mut self, lba: u64, blocks: u64, tag: u64) {
        let buf = Some(tagged(tag, blocks));
        self.over.extend(self.channel.submit(Op::Write, lba, blocks, buf, tag));
    }

    fn drain(&mut self) -> Vec<Result<(), IoError>> {
        while self.channel.in_flight() > 0 {
            if self.channel.poll(&mut self.over) == 0 {
                self.channel.wait(&mut self.over, 1000);
            }
        }
        self.over.drain(..).map(|finished| finished.result).collect()
    }
}

#[test]
fn a_first_write_is_two_writes_below_the_cluster_and_its_record() {
    let rig = rig();
    for kind in KINDS {
        // Zeros are told to the disk without data, and what is beside them is written then.
        let below = if kind == "thin" { 3 } else { 2 };
        let mut expected = shown(kind);
        let mut volume = rig.open(&format!("lvs0/{kind}"));
        for (cluster, tag) in [(1, 7), (4, 8)] {
            let lba = cluster * PER_CLUSTER + 5;
            let before = rig.disk.changes();
            volume.write(lba, &tagged(tag, 3)).unwrap();
            assert_eq!(rig.disk.changes() - before, below, "{kind}");
            expected[lba as usize..lba as usize + 3].fill(tag);
        }
        // What is there is written to as ever.
        let before = rig.disk.changes();
        volume.write(PER_CLUSTER + 7, &tagged(9, 2)).unwrap();
        assert_eq!(rig.disk.changes() - before, 1, "{kind}");
        expected[PER_CLUSTER as usize + 7..PER_CLUSTER as usize + 9].fill(9);
        // The last cluster of a longer write has all that it needs; the others are zeroed or copied.
        let lba = 5 * PER_CLUSTER - 4;
        volume.write(lba, &tagged(10, 8)).unwrap();
        expected[lba as usize..lba as usize + 8].fill(10);
        assert_eq!(all_of(&rig, kind), expected, "{kind}");
        assert_eq!(owned(&rig, kind), 3);
    }
    assert_eq!(all_of(&rig, "snapshot"), shown("clone"));
}

#[test]
fn a_write_of_a_whole_cluster_reads_nothing_of_what_was_there() {
    for kind in ["clone", "outside"] {
        let rig = rig();
        let below = if kind == "clone" {
            &rig.disk
        } else {
            &rig.registry.get_as::<FaultBdev>("image").unwrap()
        };
        below.inject(Fault::always(Op::Read, IoError::ReadMedium));
        let mut volume = rig.open(&format!("lvs0/{kind}"));
        let before = rig.disk.changes();
        volume.write(2 * PER_CLUSTER, &tagged(5, PER_CLUSTER)).unwrap();
        assert_eq!(rig.disk.changes() - before, 2, "{kind}");
        // One that leaves something of it does.
        volume.write(3 * PER_CLUSTER, &tagged(6, PER_CLUSTER - 1)).unwrap_err();
        below.clear_faults();
        let mut expected = shown(kind);
        expected[2 * PER_CLUSTER as usize..3 * PER_CLUSTER as usize].fill(5);
        assert_eq!(all_of(&rig, kind), expected, "{kind}");
        assert_eq!(owned(&rig, kind), 1);
    }
}

#[test]
fn many_first_writes_to_one_cluster_are_all_there_and_few_below() {
    for kind in KINDS {
        let rig = rig();
        let mut expected = shown(kind);
        let mut writer = Writer::open(&rig, kind);
        let before = rig.disk.changes();
        // Another one is in the metadata thread's hands meanwhile, as is likely.
        for n in 0..60 {
            writer.submit(2 * n, 1, 1 + n);
            expected[2 * n as usize] = 1 + n;
        }
        assert!(writer.drain().iter().all(Result::is_ok));
        assert!(rig.disk.changes() - before <= 2 + 60);
        assert_eq!(all_of(&rig, kind), expected, "{kind}");
        assert_eq!(owned(&rig, kind), 1);
    }
}

#[test]
fn of_writes_at_once_to_one_block_each_is_whole_and_what_follows_one_wins() {
    for kind in KINDS {
        for round in 0..CLUSTERS {
            let rig = rig();
            let lba = round * PER_CLUSTER + 9;
            thread::scope(|scope| {
                for tag in [1, 2, 3] {
                    let rig = &rig;
                    scope.spawn(move || {
                        let mut writer = Writer::open(rig, kind);
                        writer.submit(lba, 4, tag);
                        assert_eq!(writer.drain(), [Ok(())]);
                    });
                }
            });
            let found = read_tags(&mut rig.open(&format!("lvs0/{kind}")), lba, 4);
            assert!([1, 2, 3].contains(&found[0]) && found == [found[0]; 4], "{kind}: {found:?}");
            let mut writer = Writer::open(&rig, kind);
            writer.submit(lba, 4, 9);
            assert_eq!(writer.drain(), [Ok(())]);
            let mut expected = shown(kind);
            expected[lba as usize..lba as usize + 4].fill(9);
            assert_eq!(all_of(&rig, kind), expected, "{kind}");
        }
    }
}

#[test]
fn more_writes_than_there_are_buffers_are_done_all_the_same() {
    let rig = Rig::with_lvs(400);
    rig.create("clone", 160, true).unwrap();
    let mut volume = rig.open("lvs0/clone");
    (0..160).for_each(|c| volume.write(c * PER_CLUSTER, &tagged(1000 + c, PER_CLUSTER)).unwrap());
    drop(volume);
    rig.lvstores.snapshot("lvs0/clone", &NewLvol::named("snapshot")).unwrap();
    let rig = rig.reopened();
    // The metadata thread is kept in its first round until all were given.
    rig.disk.hold();
    let mut writer = Writer::open(&rig, "clone");
    (0..160).for_each(|c| writer.submit(c * PER_CLUSTER + 3, 2, 1 + c));
    thread::sleep(Duration::from_millis(20));
    rig.disk.release();
    let over = writer.drain();
    assert!(over.len() == 160 && over.iter().all(Result::is_ok));
    let found = read_tags(&mut rig.open("lvs0/clone"), 0, 160 * PER_CLUSTER);
    for (c, found) in found.chunks(PER_CLUSTER as usize).enumerate() {
        let mut expected = vec![1000 + c as u64; PER_CLUSTER as usize];
        expected[3..5].fill(1 + c as u64);
        assert_eq!(found, expected, "cluster {c}");
    }
}

/// Another process, whose disk does its I/O when it is polled.
trait Reopened {
    fn reopened(self) -> Rig;
}

impl Reopened for Rig {
    fn reopened(self) -> Rig {
        let rig = self.restart();
        rig.disk.defer(Some(1));
        rig.lvstores.examine("disk0").unwrap().unwrap();
        rig
    }
}

/// A write, in the metadata thread's hands as a rule, and one that waits behind it, when their channels
/// go. Returns whether the first was written, and after checking that the other one was not.
fn channels_go() -> bool {
    let rig = rig().reopened();
    rig.disk.hold();
    let buf = Bounce::new();
    let asked = |lba: u64| {
        let io = IoContext::new().unwrap();
        let mut channel = rig.bdev("lvs0/clone").open(&io).unwrap();
        let sg = buf.sg(512).unwrap();
        let write = Io { op: Op::Write, fua: false, lba, blocks: 1, sg, tag: 0 };
        assert_eq!(channel.submit(&write), Submit::Pending);
        (channel, io)
    };
    let first = asked(0);
    while rig.disk.held() == 0 {
        thread::sleep(Duration::from_millis(1));
    }
    drop(asked(3 * PER_CLUSTER));
    let released = AtomicBool::new(false);
    let waited = thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(100));
            released.store(true, Relaxed);
            rig.disk.release();
        });
        drop(first);
        released.load(Relaxed)
    });
    let shows = all_of(&rig, "clone");
    assert_eq!(shows[1..], shown("clone")[1..]);
    let written = shows[0] == 0;
    assert!(written || shows[0] == shown("clone")[0]);
    assert!(waited || !written, "the channel was gone when it was written");
    written
}

#[test]
fn nothing_is_written_any_more_for_a_channel_that_is_gone() {
    // What is held may be another of the thread's I/Os. The data is not taken then.
    assert!((0..20).any(|_| channels_go()), "none was ever in the thread's hands");
}

#[test]
fn a_first_write_that_fails_leaves_what_was_shown() {
    for kind in ["clone", "outside"] {
        for error in [IoError::NoSpace, IoError::WriteMedium] {
            let rig = rig();
            let mut volume = rig.open(&format!("lvs0/{kind}"));
            // What an external parent shows is tried again, cluster by cluster.
            let count = if kind == "outside" { 2 } else { 1 };
            let failing = Fault { count, ..Fault::always(Op::Write, error) };
            rig.disk.inject(failing);
            let e = volume.write(PER_CLUSTER + 1, &tagged(7, 1)).unwrap_err();
            assert_eq!(e.cause, error, "{kind}");
            assert_eq!(all_of(&rig, kind), shown(kind), "{kind}");
            rig.disk.clear_faults();
            volume.write(PER_CLUSTER + 1, &tagged(7, 1)).unwrap();
            let mut expected = shown(kind);
            expected[PER_CLUSTER as usize + 1] = 7;
            assert_eq!(all_of(&rig, kind), expected, "{kind}");
        }
    }
}

/// Two first writes, a flush, a third with FUA. Returns what is certainly there, and what was written.
fn workload(rig: &Rig, kind: &str) -> (Vec<u64>, Vec<u64>) {
    let (mut sure, mut written) = (shown(kind), shown(kind));
    let mut volume = rig.open(&format!("lvs0/{kind}"));
    for (lba, blocks, tag) in [(PER_CLUSTER + 3, 6, 1), (4 * PER_CLUSTER, PER_CLUSTER, 2)] {
        written[lba as usize..(lba + blocks) as usize].fill(tag);
        if volume.write(lba, &tagged(tag, blocks)).is_err() {
            return (sure, written);
        }
    }
    if volume.flush().is_ok() {
        sure.clone_from(&written);
    }
    let (lba, tag) = (6 * PER_CLUSTER + 100, 3);
    written[lba as usize..lba as usize + 2].fill(tag);
    if volume.write_fua(lba, &tagged(tag, 2)).is_ok() {
        sure.clone_from(&written);
    }
    (sure, written)
}

#[test]
fn crash_at_every_change_of_first_writes_leaves_what_was_shown_or_written_and_what_was_flushed() {
    let fresh = || {
        let rig = rig();
        let disk = rig.disk.clone();
        drop(rig);
        disk.image()
    };
    let image_bytes = fresh();
    let load = |disk: Arc<FaultBdev>| {
        let rig = Rig::on(disk);
        rig.registry.register(image()).unwrap();
        rig.lvstores.examine("disk0").unwrap().unwrap();
        rig
    };
    // The bdev `image` has another UUID in each process; its clone is tried without a power cut above.
    let given = std::env::var("VIRTLUN_LVOL_CASES").ok();
    let seeds = given.map_or(4, |n| n.parse().expect("a number"));
    for kind in ["thin", "clone"] {
        let total = {
            let rig = load(FaultBdev::with_image("disk0", 512, image_bytes.clone()));
            let before = rig.disk.changes();
            workload(&rig, kind);
            rig.disk.changes() - before
        };
        assert!(total > 8, "the workload makes only {total} changes");
        for changes in 0..=total {
            for seed in (0..seeds).chain([u64::MAX]) {
                let disk = FaultBdev::with_image("disk0", 512, image_bytes.clone());
                if seed % 2 == 0 {
                    disk.tell_zeros();
                }
                let rig = load(disk.clone());
                disk.die_after(changes);
                let (sure, written) = workload(&rig, kind);
                drop(rig);
                disk.power_cut(seed);
                let rig = load(disk);
                let why = format!("{kind}, die_after({changes}), power_cut({seed})");
                for (block, tag) in all_of(&rig, kind).into_iter().enumerate() {
                    let fits = tag == sure[block] || tag == written[block];
                    assert!(
                        fits,
                        "{why}: block {block} has {tag}, not {} or {}",
                        sure[block], written[block]
                    );
                }
                assert_eq!(all_of(&rig, "snapshot"), shown("clone"), "{why}");
            }
        }
    }
}
