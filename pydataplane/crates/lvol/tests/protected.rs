//! Lvols of an lvstore on a disk with protection information: what a guest writes beside its blocks lies
//! beside them on the disk, and comes back.

mod common;

use ProtectionType::{Type1, Type3};
use bdev::testing::FaultBdev;
use bdev::{AlignedBuf, Checks, IoError, ProtectionType, SyncChannel};
use common::{BLOCK, PER_CLUSTER, Rig, WITH_TUPLE, options, protected};
use lvol::{LvolOptions, NewLvol};
use protection::Tuple;

const DATA: usize = BLOCK as usize;

fn rig(kind: ProtectionType) -> Rig {
    let rig = Rig::of_kind(80, Some(kind));
    rig.lvstores.create_lvstore("disk0", "lvs0", &options()).unwrap();
    rig
}

/// The data of a block, which no other has.
fn data(lba: u64, seed: u64) -> [u8; DATA] {
    let word = (seed << 32 | lba).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    std::array::from_fn(|n| word[n % 8].wrapping_add(n as u8))
}

/// Its tuple, as a guest makes it that has something to say in each of the tags that are its own.
fn tuple(kind: ProtectionType, lba: u64, seed: u64) -> Tuple {
    let tuple = Tuple { app_tag: 0x5A00 | seed as u16, ..Tuple::of(kind, lba, &data(lba, seed)) };
    match kind {
        Type1 => tuple,
        Type3 => Tuple { ref_tag: 0xABCD_0000 | seed as u32, ..tuple },
    }
}

/// Blocks with their tuples behind them.
fn blocks(kind: ProtectionType, lba: u64, count: u64, seed: u64) -> AlignedBuf {
    let mut both = AlignedBuf::zeroed(count as usize * WITH_TUPLE);
    for (nth, one) in both.chunks_mut(WITH_TUPLE).enumerate() {
        let lba = lba + nth as u64;
        one[..DATA].copy_from_slice(&data(lba, seed));
        one[DATA..].copy_from_slice(&tuple(kind, lba, seed).to_bytes());
    }
    both
}

/// What is expected of a volume: which seed each block was written with; 0: it was not.
struct Model {
    kind: ProtectionType,
    seeds: Vec<u64>,
}

impl Model {
    fn new(kind: ProtectionType, clusters: u64) -> Model {
        Model { kind, seeds: vec![0; (clusters * PER_CLUSTER) as usize] }
    }

    fn write(&mut self, channel: &mut SyncChannel, lba: u64, count: u64, seed: u64) {
        let both = blocks(self.kind, lba, count, seed);
        channel.write_protected(lba, &both, Checks::ALL).unwrap();
        self.seeds[lba as usize..(lba + count) as usize].fill(seed);
    }

    /// All of it, data and tuples, and the data alone.
    #[track_caller]
    fn check(&self, channel: &mut SyncChannel) {
        let all = self.seeds.len();
        let mut both = AlignedBuf::zeroed(all * WITH_TUPLE);
        both.fill(0x77);
        channel.read_protected(0, &mut both, Checks::ALL).unwrap();
        let mut alone = AlignedBuf::zeroed(all * DATA);
        channel.read(0, &mut alone).unwrap();
        for (lba, seed) in (0..).zip(&self.seeds) {
            let (found, told) = both[lba as usize * WITH_TUPLE..][..WITH_TUPLE].split_at(DATA);
            let (expected, tuple) = match seed {
                0 => ([0; DATA], Tuple::UNWRITTEN),
                seed => (data(lba, *seed), tuple(self.kind, lba, *seed)),
            };
            let told = Tuple::from_bytes(told.try_into().unwrap());
            assert!(found == expected, "the data of block {lba}, of {seed}");
            assert_eq!(told, tuple, "block {lba}, of {seed}");
            assert!(alone[lba as usize * DATA..][..DATA] == expected, "block {lba} alone");
        }
    }
}

/// The numbers of the blocks of the disk that have the data of a block of a volume.
fn places(rig: &Rig, lba: u64, seed: u64) -> Vec<u64> {
    let (image, data) = (rig.disk.image(), data(lba, seed));
    let has = |(at, block): (u64, &[u8])| (block[..DATA] == data).then_some(at);
    (0..).zip(image.chunks(WITH_TUPLE)).filter_map(has).collect()
}

/// Damages the block of the disk that has the data of a block of a volume.
fn damage(rig: &Rig, lba: u64, seed: u64) {
    let [at] = places(rig, lba, seed)[..] else { panic!("block {lba} lies at several places") };
    rig.disk.corrupt(at as usize * WITH_TUPLE + 100, 0x10);
}

fn new(name: &str) -> NewLvol {
    NewLvol::named(name)
}

/// How a read ends, with tuples and without, and which of its blocks was wrong.
fn read(channel: &mut SyncChannel, lba: u64, count: u64) -> Result<(), (IoError, Option<u64>)> {
    let mut alone = AlignedBuf::zeroed(count as usize * DATA);
    let plain = channel.read(lba, &mut alone).map_err(|e| (e.cause, channel.mismatch()));
    let mut both = AlignedBuf::zeroed(count as usize * WITH_TUPLE);
    let carried = channel.read_protected(lba, &mut both, Checks::ALL);
    let carried = carried.map_err(|e| (e.cause, channel.mismatch()));
    assert_eq!(plain, carried);
    carried
}

#[test]
fn what_a_guest_writes_beside_its_blocks_lies_beside_them_and_comes_back() {
    for (kind, thin) in [(Type1, true), (Type1, false), (Type3, true), (Type3, false)] {
        let rig = rig(kind);
        // So that the numbers of its blocks are nowhere those of the disk's.
        rig.create("first", 3, false).unwrap();
        rig.create("v", 3, thin).unwrap();
        let shown = rig.bdev("lvs0/v").protection().unwrap();
        assert_eq!((shown.kind, shown.interleaved), (kind, false));
        assert_eq!(rig.bdev("lvs0/v").geometry().block_size, BLOCK as u32);
        let (mut channel, mut model) = (rig.open("lvs0/v"), Model::new(kind, 3));
        model.check(&mut channel);
        // In the clusters' order, and not.
        model.write(&mut channel, 2 * PER_CLUSTER + 5, 3, 1);
        model.write(&mut channel, PER_CLUSTER - 7, 20, 2);
        model.check(&mut channel);
        model.write(&mut channel, PER_CLUSTER - 7, PER_CLUSTER + 40, 3);
        model.write(&mut channel, 40, 1, 4);
        model.check(&mut channel);
        // On the disk it is a block as any.
        let [at] = places(&rig, 40, 4)[..] else { panic!("it lies there once") };
        assert_ne!(at, 40);
        let mut below = AlignedBuf::zeroed(WITH_TUPLE);
        rig.open("disk0").read_protected(at, &mut below, Checks::ALL).unwrap();
        let told = Tuple::from_bytes(below[DATA..].try_into().unwrap());
        let moved = tuple(kind, 40, 4);
        assert_eq!(told, if kind == Type1 { Tuple { ref_tag: at as u32, ..moved } } else { moved });
        // What comes without tuples gets some.
        channel.write(300, &data(300, 5)).unwrap();
        let mut both = AlignedBuf::zeroed(WITH_TUPLE);
        channel.read_protected(300, &mut both, Checks::ALL).unwrap();
        let made = Tuple::of(kind, 300, &data(300, 5));
        assert_eq!(both[DATA..], made.to_bytes());
        model.write(&mut channel, 300, 1, 6);
        // A part of a cluster, a whole one, both.
        channel.write_zeroes(PER_CLUSTER + 3, PER_CLUSTER + 2).unwrap();
        model.seeds[PER_CLUSTER as usize + 3..2 * PER_CLUSTER as usize + 5].fill(0);
        model.check(&mut channel);
        if thin {
            channel.unmap(0, PER_CLUSTER).unwrap();
            model.seeds[..PER_CLUSTER as usize].fill(0);
            model.check(&mut channel);
        }
        drop(channel);
        let rig = rig.restart();
        rig.lvstores.examine("disk0").unwrap().unwrap();
        model.check(&mut rig.open("lvs0/v"));
        rig.lvstores.resize_lvol("lvs0/v", 4 * common::CLUSTER).unwrap();
        model.seeds.resize(4 * PER_CLUSTER as usize, 0);
        let mut channel = rig.open("lvs0/v");
        model.write(&mut channel, 3 * PER_CLUSTER - 1, 2, 7);
        model.check(&mut channel);
    }
}

#[test]
fn snapshots_and_clones_show_it_and_keep_it_when_they_part() {
    for kind in [Type1, Type3] {
        let rig = rig(kind);
        rig.create("v", 3, true).unwrap();
        let (mut v, mut model) = (rig.open("lvs0/v"), Model::new(kind, 3));
        model.write(&mut v, 10, PER_CLUSTER, 1);
        rig.lvstores.snapshot_together(&[("lvs0/v", &new("s"))]).unwrap();
        let of_snapshot = Model { kind, seeds: model.seeds.clone() };
        // Into a cluster that is copied, into two, and over a whole one.
        model.write(&mut v, 20, 2, 2);
        model.write(&mut v, PER_CLUSTER + 1, PER_CLUSTER, 3);
        model.check(&mut v);
        of_snapshot.check(&mut rig.open("lvs0/s"));
        // Three below each other, each with something of its own in one cluster.
        let mut of_clone = Model { kind, seeds: of_snapshot.seeds.clone() };
        let mut last = "s".to_owned();
        for depth in 1..=3u64 {
            let (name, snapshot) = (format!("c{depth}"), format!("s{depth}"));
            rig.lvstores.clone_lvol(&format!("lvs0/{last}"), &new(&name)).unwrap();
            let mut clone = rig.open(&format!("lvs0/{name}"));
            of_clone.write(&mut clone, 30 + depth, 1, 10 + depth);
            of_clone.check(&mut clone);
            if depth < 3 {
                rig.lvstores.snapshot(&format!("lvs0/{name}"), &new(&snapshot)).unwrap();
                last = snapshot;
            }
        }
        let mut clone = rig.open("lvs0/c3");
        of_clone.write(&mut clone, 2 * PER_CLUSTER + 9, 1, 20);
        rig.lvstores.decouple_parent("lvs0/c3").unwrap();
        of_clone.check(&mut clone);
        rig.lvstores.inflate("lvs0/c3").unwrap();
        of_clone.check(&mut clone);
        of_snapshot.check(&mut rig.open("lvs0/s"));
        // The snapshot's clusters become those of who is left.
        drop((clone, v));
        for name in ["c3", "c2", "s2", "c1", "s1"] {
            rig.lvstores.delete_lvol(&format!("lvs0/{name}")).unwrap();
        }
        model.check(&mut rig.open("lvs0/v"));
        rig.lvstores.roll_back("lvs0/v", "lvs0/s").unwrap();
        of_snapshot.check(&mut rig.open("lvs0/v"));
        rig.lvstores.delete_lvol("lvs0/s").unwrap();
        of_snapshot.check(&mut rig.open("lvs0/v"));
    }
}

#[test]
fn what_is_not_as_its_tuple_says_is_refused_both_ways_with_its_place_in_the_io() {
    for kind in [Type1, Type3] {
        let rig = rig(kind);
        rig.create("v", 3, true).unwrap();
        let mut channel = rig.open("lvs0/v");
        let (lba, count) = (PER_CLUSTER - 9, 20);
        let mut model = Model::new(kind, 3);
        // The clusters do not lie one behind the other.
        model.write(&mut channel, PER_CLUSTER, 1, 1);
        model.write(&mut channel, lba, count, 2);
        let good = blocks(kind, lba, count, 2);
        let all = Checks { app_tag: Some(0x5A02), ..Checks::ALL };
        for nth in [4usize, 15] {
            for (byte, error, without) in [
                (0, IoError::Guard, Checks { guard: false, ..all }),
                (2, IoError::AppTag, Checks { app_tag: None, ..all }),
                (7, IoError::RefTag, Checks { reference: false, ..all }),
            ] {
                if (error, kind) == (IoError::RefTag, Type3) {
                    continue; // it is the guest's
                }
                let mut bad = good.clone();
                bad[nth * WITH_TUPLE + DATA + byte] ^= 1;
                let ends = channel.write_protected(lba, &bad, all).unwrap_err();
                assert_eq!((ends.cause, channel.mismatch()), (error, Some(nth as u64)));
                model.check(&mut channel);
                // Who asks for it may write it, gets it back as it was, and finds out.
                channel.write_protected(lba, &bad, without).unwrap();
                let mut back = AlignedBuf::zeroed(bad.len());
                channel.read_protected(lba, &mut back, Checks::NONE).unwrap();
                assert!(back[..] == bad[..]);
                let ends = channel.read_protected(lba, &mut back, all).unwrap_err();
                assert_eq!((ends.cause, channel.mismatch()), (error, Some(nth as u64)));
                assert_eq!(channel.mismatch(), None, "once");
                channel.write_protected(lba, &good, all).unwrap();
            }
        }
        // The numbers are the volume's: a tuple with the disk's is wrong, with type 1.
        let [at] = places(&rig, lba, 2)[..] else { panic!("it lies there once") };
        let mut below = AlignedBuf::zeroed(WITH_TUPLE);
        rig.open("disk0").read_protected(at, &mut below, Checks::ALL).unwrap();
        let ends = channel.write_protected(lba, &below, Checks::ALL).map_err(|e| e.cause);
        assert_eq!(ends, if kind == Type1 { Err(IoError::RefTag) } else { Ok(()) });
        model.check(&mut channel);
        let beyond = channel.read_protected(3 * PER_CLUSTER - 1, &mut good.clone(), Checks::ALL);
        assert_eq!(beyond.unwrap_err().cause, IoError::OutOfRange);
    }
}

#[test]
fn a_damaged_block_is_found_and_no_copy_makes_it_right() {
    for kind in [Type1, Type3] {
        let rig = rig(kind);
        rig.create("v", 2, true).unwrap();
        let mut v = rig.open("lvs0/v");
        let mut model = Model::new(kind, 2);
        model.write(&mut v, 0, 1, 9);
        model.write(&mut v, 100, 60, 1);
        damage(&rig, 150, 1);
        let wrong = Err((IoError::Guard, Some(50)));
        assert_eq!(read(&mut v, 100, 60), wrong);
        assert_eq!((read(&mut v, 100, 50), read(&mut v, 151, 9)), (Ok(()), Ok(())));
        // Copied with its neighbours, which are written to.
        rig.lvstores.snapshot("lvs0/v", &new("s")).unwrap();
        model.write(&mut v, 149, 1, 2);
        v.write(151, &data(151, 3)).unwrap();
        assert_eq!(places(&rig, 148, 1).len(), 2, "its cluster was not copied");
        assert_eq!(read(&mut v, 100, 60), wrong);
        assert_eq!((read(&mut v, 100, 50), read(&mut v, 151, 9)), (Ok(()), Ok(())));
        // And without that.
        rig.lvstores.clone_lvol("lvs0/s", &new("c")).unwrap();
        rig.lvstores.inflate("lvs0/c").unwrap();
        assert_eq!(places(&rig, 148, 1).len(), 3);
        rig.lvstores.delete_lvol("lvs0/v").unwrap();
        let mut c = rig.open("lvs0/c");
        assert_eq!(read(&mut c, 100, 60), wrong);
        // It is as damaged as it was, for who wants to see it.
        let mut both = AlignedBuf::zeroed(WITH_TUPLE);
        c.read_protected(150, &mut both, Checks::NONE).unwrap();
        both[100] ^= 0x10;
        assert!(both[..] == blocks(kind, 150, 1, 1)[..]);
        c.write_protected(150, &both, Checks::ALL).unwrap();
        assert_eq!(read(&mut c, 100, 60), Ok(()));
        // Another block of the disk in its place, with its tuple.
        let (from, to) = (places(&rig, 0, 9)[0] as usize, places(&rig, 150, 1));
        let moved = rig.disk.image()[from * WITH_TUPLE..][..WITH_TUPLE].to_vec();
        for at in to {
            SyncChannel::open(&*rig.disk).unwrap().write(at, &moved).unwrap();
        }
        let misplaced = Err((IoError::RefTag, Some(50)));
        assert_eq!(read(&mut c, 100, 60), if kind == Type1 { misplaced } else { Ok(()) });
    }
}

#[test]
fn of_a_parent_outside_nothing_is_known_before_it_is_copied() {
    for kind in [Type1, Type3] {
        let rig = rig(kind);
        rig.registry.register(common::image()).unwrap();
        rig.lvstores.clone_bdev("image", "lvs0", &new("v")).unwrap();
        let mut v = rig.open("lvs0/v");
        assert!(rig.bdev("lvs0/v").protection().is_some());
        let read = |v: &mut SyncChannel, lba: u64| {
            let mut both = AlignedBuf::zeroed(3 * WITH_TUPLE);
            v.read_protected(lba, &mut both, Checks::ALL).unwrap();
            let of = |one: &[u8]| {
                let tag = u64::from_le_bytes(one[..8].try_into().unwrap());
                (tag, Tuple::from_bytes(one[DATA..].try_into().unwrap()))
            };
            both.chunks(WITH_TUPLE).map(of).collect::<Vec<_>>()
        };
        let outside = |lba: u64| (lba + 1, Tuple::UNWRITTEN);
        let copied = |lba: u64| (lba + 1, Tuple::of(kind, lba, &common::tagged(lba + 1, 1)));
        let lba = PER_CLUSTER - 1;
        assert_eq!(read(&mut v, lba), [lba, lba + 1, lba + 2].map(outside));
        v.write_protected(PER_CLUSTER + 9, &blocks(kind, PER_CLUSTER + 9, 1, 1), Checks::ALL)
            .unwrap();
        assert_eq!(read(&mut v, lba), [outside(lba), copied(lba + 1), copied(lba + 2)]);
        assert_eq!(read(&mut v, PER_CLUSTER + 8)[1].1, tuple(kind, PER_CLUSTER + 9, 1));
    }
}

#[test]
fn a_shallow_copy_takes_it_along_to_a_bdev_that_has_it() {
    let rig = rig(Type1);
    rig.create("v", 2, true).unwrap();
    let (mut v, mut model) = (rig.open("lvs0/v"), Model::new(Type1, 2));
    model.write(&mut v, PER_CLUSTER - 3, 9, 1);
    rig.lvstores.snapshot("lvs0/v", &new("s")).unwrap();
    let bytes = 2 * PER_CLUSTER as usize * WITH_TUPLE;
    let below = FaultBdev::with_image("to", WITH_TUPLE as u32, vec![0; bytes]);
    rig.registry.register(protected(below, Type1)).unwrap();
    let copy = || {
        let number = rig.lvstores.start_shallow_copy("lvs0/s", "to").unwrap();
        loop {
            match rig.lvstores.shallow_copy(number).unwrap().ended {
                Some(ended) => break ended,
                None => std::thread::yield_now(),
            }
        }
    };
    copy().unwrap();
    model.check(&mut rig.open("to"));
    damage(&rig, PER_CLUSTER + 1, 1);
    let why = copy().unwrap_err();
    assert!(why.contains("guard"), "{why}");
}

#[test]
fn a_volume_of_an_lvstore_on_a_volume_has_its_own_numbers_too() {
    for kind in [Type1, Type3] {
        let rig = rig(kind);
        rig.create("first", 2, false).unwrap();
        rig.create("outer", 40, true).unwrap();
        rig.lvstores.create_lvstore("lvs0/outer", "lvs1", &options()).unwrap();
        let thin = |name: &str| LvolOptions {
            name: name.into(),
            size: 2 * common::CLUSTER,
            thin: true,
            uuid: None,
            xattrs: Default::default(),
            key: None,
        };
        rig.lvstores.create_lvol("lvs1", &thin("v")).unwrap();
        let (mut v, mut model) = (rig.open("lvs1/v"), Model::new(kind, 2));
        model.write(&mut v, PER_CLUSTER - 4, 9, 1);
        rig.lvstores.snapshot("lvs1/v", &new("s")).unwrap();
        model.write(&mut v, PER_CLUSTER + 1, 1, 2);
        model.check(&mut v);
        let all = places(&rig, PER_CLUSTER + 4, 1);
        assert_eq!(all.len(), 2, "its cluster was not copied");
        all.iter().for_each(|at| rig.disk.corrupt(*at as usize * WITH_TUPLE, 1));
        assert_eq!(read(&mut v, PER_CLUSTER - 4, 9), Err((IoError::Guard, Some(8))));
        drop(v);
        // It needs the other one for its last flush.
        rig.lvstores.unload("lvs1").unwrap();
    }
}

#[test]
fn lvols_without_it_take_none() {
    let rig = Rig::with_lvs(80);
    rig.create("v", 1, true).unwrap();
    assert!(rig.bdev("lvs0/v").protection().is_none());
    let mut v = rig.open("lvs0/v");
    let both = blocks(Type1, 0, 1, 1);
    let ends = v.write_protected(0, &both, Checks::ALL).unwrap_err().cause;
    assert_eq!((ends, v.mismatch()), (IoError::Unsupported, None));
}

#[test]
fn an_encrypted_lvol_shows_none_and_works() {
    let rig = rig(Type1);
    let keys = crypto::Keys::default();
    keys.add(crypto::Key::from_hex("k", &"01".repeat(32), &"02".repeat(32), false).unwrap())
        .unwrap();
    let lvstores = lvol::Lvstores::with_keys(rig.registry.clone(), keys.clone());
    rig.lvstores.unload("lvs0").unwrap();
    lvstores.examine("disk0").unwrap().unwrap();
    let options = LvolOptions {
        name: "v".into(),
        size: 2 * common::CLUSTER,
        thin: true,
        uuid: None,
        xattrs: Default::default(),
        key: Some(keys.get("k").unwrap()),
    };
    lvstores.create_lvol("lvs0", &options).unwrap();
    assert!(rig.bdev("lvs0/v").protection().is_none());
    let mut v = rig.open("lvs0/v");
    v.write(3, &data(3, 1)).unwrap();
    lvstores.snapshot("lvs0/v", &new("s")).unwrap();
    v.write(4, &data(4, 1)).unwrap();
    let mut found = AlignedBuf::zeroed(2 * DATA);
    v.read(3, &mut found).unwrap();
    assert!(found[..] == [data(3, 1), data(4, 1)].concat()[..]);
}
