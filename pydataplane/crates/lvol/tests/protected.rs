//! Lvols with protection information, of a disk that has it or of their own: what a guest writes beside its
//! blocks lies beside them on the disk, or in the lvol, and comes back.

use crate::common::{BLOCK, PER_CLUSTER, Rig, WITH_TUPLE, options, protected};
use ProtectionType::{Type1, Type3};
use bdev::testing::{Fault, FaultBdev};
use bdev::{AlignedBuf, AppTags, Bdev, Checks, IoError, Op, ProtectionType, SyncChannel};
use lvol::{LvolOptions, NewLvol};
use protection::Tuple;

const DATA: usize = BLOCK as usize;

fn rig(kind: ProtectionType) -> Rig {
    let rig = Rig::of_kind(80, Some(kind));
    rig.lvstores.create_lvstore("disk0", "lvs0", &options()).unwrap();
    rig
}

/// One whose lvols keep it themselves.
fn own(kind: ProtectionType) -> Rig {
    Rig { own: Some(kind), ..Rig::with_lvs(120) }
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

/// Bytes of a block of the disk.
fn length(rig: &Rig) -> usize {
    if rig.own.is_some() { DATA } else { WITH_TUPLE }
}

/// The numbers of the blocks of the disk that have the data of a block of a volume.
fn places(rig: &Rig, lba: u64, seed: u64) -> Vec<u64> {
    let (image, data) = (rig.disk.image(), data(lba, seed));
    let has = |(at, block): (u64, &[u8])| (block[..DATA] == data).then_some(at);
    (0..).zip(image.chunks(length(rig))).filter_map(has).collect()
}

/// Damages the block of the disk that has the data of a block of a volume.
fn damage(rig: &Rig, lba: u64, seed: u64) {
    let [at] = places(rig, lba, seed)[..] else { panic!("block {lba} lies at several places") };
    rig.disk.corrupt(at as usize * length(rig) + 100, 0x10);
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
        rig.lvstores.resize_lvol("lvs0/v", 4 * crate::common::CLUSTER).unwrap();
        model.seeds.resize(4 * PER_CLUSTER as usize, 0);
        let mut channel = rig.open("lvs0/v");
        model.write(&mut channel, 3 * PER_CLUSTER - 1, 2, 7);
        model.check(&mut channel);
    }
}

#[test]
fn snapshots_and_clones_show_it_and_keep_it_when_they_part() {
    for rig in [rig(Type1), rig(Type3), own(Type1), own(Type3)] {
        let kind = rig.kind.or(rig.own).unwrap();
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
fn of_a_parent_outside_nothing_is_known_before_it_is_written_to() {
    for kind in [Type1, Type3] {
        let rig = rig(kind);
        rig.registry.register(crate::common::image()).unwrap();
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
        let lba = PER_CLUSTER - 1;
        assert_eq!(read(&mut v, lba), [lba, lba + 1, lba + 2].map(outside));
        v.write_protected(PER_CLUSTER + 9, &blocks(kind, PER_CLUSTER + 9, 1, 1), Checks::ALL)
            .unwrap();
        assert_eq!(read(&mut v, lba), [lba, lba + 1, lba + 2].map(outside));
        assert_eq!(read(&mut v, PER_CLUSTER + 8)[1].1, tuple(kind, PER_CLUSTER + 9, 1));
        // Whatever application tag they are to have, its neighbours can be read; they have one when they are written.
        let last = 2 * PER_CLUSTER - 1;
        let [all, others] = [7, 8].map(|tag| AppTags::new([(tag, 100)]));
        let mut alone = AlignedBuf::zeroed(DATA);
        for neighbour in [PER_CLUSTER, PER_CLUSTER + 8, last] {
            v.read_tagged(neighbour, &mut alone, all).unwrap();
        }
        v.write_tagged(last, &alone, all).unwrap();
        let its = read(&mut v, last - 1)[1].1;
        assert_eq!((its.app_tag, its.escapes(kind)), (7, false));
        v.read_tagged(last, &mut alone, all).unwrap();
        assert_eq!(v.read_tagged(last, &mut alone, others).unwrap_err().cause, IoError::AppTag);
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
            dif_type: None,
            name: name.into(),
            size: 2 * crate::common::CLUSTER,
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
        dif_type: None,
        name: "v".into(),
        size: 2 * crate::common::CLUSTER,
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

#[test]
fn an_lvol_that_keeps_it_itself_gives_back_what_was_written() {
    for (kind, thin) in [(Type1, true), (Type1, false), (Type3, true), (Type3, false)] {
        let rig = own(kind);
        let info = rig.create("v", 61, thin).unwrap();
        assert_eq!((info.size, info.dif_type), (61 * crate::common::CLUSTER, Some(kind)));
        let shown = rig.bdev("lvs0/v").protection().unwrap();
        assert_eq!((shown.kind, shown.interleaved), (kind, false));
        assert_eq!(rig.bdev("lvs0/v").geometry().num_blocks, 61 * PER_CLUSTER);
        let (mut channel, mut model) = (rig.open("lvs0/v"), Model::new(kind, 61));
        model.check(&mut channel);
        model.write(&mut channel, 2 * PER_CLUSTER + 5, 3, 1);
        // Over where one cluster of tuples ends and the next begins.
        model.write(&mut channel, 60 * PER_CLUSTER - 7, 20, 2);
        model.write(&mut channel, PER_CLUSTER - 7, PER_CLUSTER + 40, 3);
        model.check(&mut channel);
        channel.write_zeroes(PER_CLUSTER + 3, PER_CLUSTER + 2).unwrap();
        model.seeds[PER_CLUSTER as usize + 3..2 * PER_CLUSTER as usize + 5].fill(0);
        model.check(&mut channel);
        if thin {
            let before = rig.lvstores.lvol("lvs0/v").unwrap().num_allocated_clusters;
            channel.unmap(0, 20 * PER_CLUSTER).unwrap();
            model.seeds[..20 * PER_CLUSTER as usize].fill(0);
            model.check(&mut channel);
            let after = rig.lvstores.lvol("lvs0/v").unwrap().num_allocated_clusters;
            assert!(after < before, "{after} {before}");
            // What is allocated is told without the clusters of tuples.
            let told = rig.lvstores.ranges("lvs0/v", None, 0, 9).unwrap();
            let [last] = told.ranges[..] else { panic!("{told:?}") };
            let cluster = crate::common::CLUSTER;
            assert_eq!(
                (last.offset, last.length, told.next_offset),
                (59 * cluster, 2 * cluster, None)
            );
            for beyond in [61 * cluster, u64::MAX] {
                assert!(rig.lvstores.ranges("lvs0/v", None, beyond, 9).unwrap().ranges.is_empty());
            }
        }
        drop(channel);
        let rig = rig.restart();
        rig.lvstores.examine("disk0").unwrap().unwrap();
        model.check(&mut rig.open("lvs0/v"));
        // Made smaller and larger again, it has no tuples of what it had.
        model.write(&mut rig.open("lvs0/v"), 30 * PER_CLUSTER, 2 * PER_CLUSTER, 8);
        for clusters in [31, 61, 65] {
            rig.lvstores.resize_lvol("lvs0/v", clusters * crate::common::CLUSTER).unwrap();
            model.seeds.truncate((31 * PER_CLUSTER) as usize);
            model.seeds.resize((clusters * PER_CLUSTER) as usize, 0);
            model.check(&mut rig.open("lvs0/v"));
        }
        model.write(&mut rig.open("lvs0/v"), 64 * PER_CLUSTER - 9, 20, 9);
        model.check(&mut rig.open("lvs0/v"));
    }
}

#[test]
fn a_damaged_block_of_one_that_keeps_it_itself_is_found_in_snapshot_and_clone_too() {
    let rig = own(Type1);
    rig.create("v", 4, true).unwrap();
    let mut v = rig.open("lvs0/v");
    let mut model = Model::new(Type1, 4);
    model.write(&mut v, 100, 60, 1);
    // A snapshot says that nobody was writing.
    rig.lvstores.snapshot("lvs0/v", &new("s")).unwrap();
    damage(&rig, 150, 1);
    let wrong = Err((IoError::Guard, Some(50)));
    assert_eq!(read(&mut rig.open("lvs0/s"), 100, 60), wrong);
    rig.lvstores.clone_lvol("lvs0/s", &new("c")).unwrap();
    // Copied with its neighbours, which are written to.
    model.write(&mut rig.open("lvs0/c"), 149, 1, 2);
    assert_eq!(read(&mut rig.open("lvs0/c"), 100, 60), wrong);
    rig.lvstores.inflate("lvs0/c").unwrap();
    assert_eq!(read(&mut rig.open("lvs0/c"), 100, 60), wrong);
    drop(v);
    let rig = rig.restart();
    rig.lvstores.examine("disk0").unwrap().unwrap();
    for name in ["v", "s", "c"] {
        assert_eq!(read(&mut rig.open(&format!("lvs0/{name}")), 100, 60), wrong, "{name}");
    }
}

#[test]
fn a_shallow_copy_takes_along_what_an_lvol_keeps_itself() {
    let rig = own(Type1);
    rig.create("v", 4, true).unwrap();
    let (mut v, mut model) = (rig.open("lvs0/v"), Model::new(Type1, 4));
    model.write(&mut v, PER_CLUSTER - 3, 9, 1);
    rig.lvstores.snapshot("lvs0/v", &new("s")).unwrap();
    let bytes = 4 * PER_CLUSTER as usize * WITH_TUPLE;
    let below = FaultBdev::with_image("to", WITH_TUPLE as u32, vec![0; bytes]);
    rig.registry.register(protected(below, Type1)).unwrap();
    let number = rig.lvstores.start_shallow_copy("lvs0/s", "to").unwrap();
    let ended = loop {
        match rig.lvstores.shallow_copy(number).unwrap().ended {
            Some(ended) => break ended,
            None => std::thread::yield_now(),
        }
    };
    ended.unwrap();
    model.check(&mut rig.open("to"));
}

#[test]
fn an_encrypted_lvol_may_keep_it_itself_whatever_the_disk_has() {
    for rig in [rig(Type1), own(Type3)] {
        let kind = rig.kind.or(rig.own).unwrap();
        let keys = crypto::Keys::default();
        keys.add(crypto::Key::from_hex("k", &"01".repeat(32), &"02".repeat(32), false).unwrap())
            .unwrap();
        let lvstores = lvol::Lvstores::with_keys(rig.registry.clone(), keys.clone());
        rig.lvstores.unload("lvs0").unwrap();
        lvstores.examine("disk0").unwrap().unwrap();
        let options = LvolOptions {
            dif_type: Some(kind),
            name: "v".into(),
            size: 4 * crate::common::CLUSTER,
            thin: true,
            uuid: None,
            xattrs: Default::default(),
            key: Some(keys.get("k").unwrap()),
        };
        lvstores.create_lvol("lvs0", &options).unwrap();
        let (mut v, mut model) = (rig.open("lvs0/v"), Model::new(kind, 4));
        model.write(&mut v, 3, PER_CLUSTER, 1);
        lvstores.snapshot("lvs0/v", &new("s")).unwrap();
        model.write(&mut v, 40, 1, 2);
        model.check(&mut v);
        assert_eq!(places(&rig, 40, 2), [0; 0], "it lies encrypted");
        let refused =
            lvstores.create_lvol("lvs0", &LvolOptions { name: "w".into(), key: None, ..options });
        assert_eq!(refused.is_ok(), rig.own.is_some(), "{refused:?}");
    }
}

#[test]
fn nothing_mixes_lvols_that_keep_it_themselves_with_others() {
    let mut rig = own(Type1);
    for (name, kind) in [("v", Some(Type1)), ("w", Some(Type3)), ("plain", None)] {
        rig.own = kind;
        rig.create(name, 4, true).unwrap();
        rig.lvstores.snapshot(&format!("lvs0/{name}"), &new(&format!("{name}-s"))).unwrap();
    }
    let lvstores = &rig.lvstores;
    for (volume, snapshot) in [("v", "v-s"), ("plain", "v-s"), ("v", "plain-s"), ("v", "w-s")] {
        let (volume, snapshot) = (format!("lvs0/{volume}"), format!("lvs0/{snapshot}"));
        let refused = lvstores.set_parent(&volume, &snapshot).unwrap_err().to_string();
        assert!(refused.contains("protection information"), "{refused}");
    }
    rig.registry.register(crate::common::image()).unwrap();
    lvstores.resize_lvol("lvs0/v", crate::common::IMAGE * crate::common::CLUSTER).unwrap();
    let refused = lvstores.set_parent_bdev("lvs0/v", "image").unwrap_err().to_string();
    assert!(refused.contains("keeps its protection information itself"), "{refused}");
    // Of another lvstore.
    rig.registry.register(FaultBdev::new("disk1", 512, 80 * PER_CLUSTER)).unwrap();
    lvstores.create_lvstore("disk1", "lvs1", &options()).unwrap();
    let snapshot = lvstores.lvol("lvs0/v-s").unwrap().uuid.to_string();
    let refused = lvstores.clone_bdev(&snapshot, "lvs1", &new("c")).unwrap_err().to_string();
    assert!(refused.contains("keeps its protection information itself"), "{refused}");
}

/// Versions that the blocks of a volume may have, as seeds.
type Seeds = Vec<Vec<u64>>;

/// Writes to two volumes, one a clone of the other's snapshot. Returns what they may have.
fn changes(rig: &Rig, random: &mut u64) -> [Seeds; 2] {
    let none = || vec![vec![0]; 4 * PER_CLUSTER as usize];
    let mut all = [none(), none()];
    let mut cloned = false;
    for seed in 1..24u64 {
        *random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        let chosen = *random >> 33;
        let which = usize::from(cloned && chosen % 2 == 1);
        let name = ["lvs0/v", "lvs0/c"][which];
        let (lba, count) = (chosen >> 8 & 0x1FF, 1 + (chosen >> 4 & 0x3F));
        let count = count.min(4 * PER_CLUSTER - lba);
        let end = (lba + count) as usize;
        if seed == 9 {
            // Whether it is there when that fails is not known.
            all[1] = all[0].clone();
            let snapshot = rig.lvstores.snapshot("lvs0/v", &new("s"));
            if snapshot.is_err() || rig.lvstores.clone_lvol("lvs0/s", &new("c")).is_err() {
                return all;
            }
            cloned = true;
            continue;
        }
        let Some(bdev) = rig.registry.get(name) else { return all };
        let Ok(mut channel) = SyncChannel::open(&*bdev) else { return all };
        let seeds = &mut all[which];
        let done = match seed % 6 {
            3 => channel
                .flush()
                .map(|()| seeds.iter_mut().for_each(|of| drop(of.drain(..of.len() - 1)))),
            5 => {
                // Whole clusters; a part of one stays.
                let (lba, count) = (lba / PER_CLUSTER * PER_CLUSTER, PER_CLUSTER + count);
                let all = &mut seeds[lba as usize..][..PER_CLUSTER as usize];
                all.iter_mut().for_each(|of| of.push(0));
                channel.unmap(lba, count.min(4 * PER_CLUSTER - lba))
            }
            _ => {
                seeds[lba as usize..end].iter_mut().for_each(|of| of.push(seed));
                channel.write_protected(lba, &blocks(Type1, lba, count, seed), Checks::ALL)
            }
        };
        if done.is_err() {
            return all;
        }
    }
    all
}

/// All that is read is something that was written, with its tuple or without one where it was being written.
fn none_is_damaged(rig: &Rig, name: &str, all: &Seeds, what: &str) {
    let mut both = AlignedBuf::zeroed(all.len() * WITH_TUPLE);
    let mut channel = rig.open(name);
    channel
        .read_protected(0, &mut both, Checks::ALL)
        .unwrap_or_else(|e| panic!("{what}: {e}, block {:?}", channel.mismatch()));
    for ((lba, seeds), both) in (0..).zip(all).zip(both.chunks(WITH_TUPLE)) {
        let told = Tuple::from_bytes(both[DATA..].try_into().unwrap());
        let is = |seed: &u64| match seed {
            0 => both[..DATA] == [0; DATA],
            seed => both[..DATA] == data(lba, *seed),
        };
        let Some(seed) = seeds.iter().copied().find(is) else {
            panic!("{what}: block {lba} of {name} has none of {seeds:?}");
        };
        match told == Tuple::UNWRITTEN {
            true => assert!(seed == 0 || seeds.len() > 1, "{what}: block {lba} of {name}"),
            // One of another time that has the same guard, as one in 65,536 has, is taken for its own.
            false => assert!(
                seeds.iter().any(|seed| told == tuple(Type1, lba, *seed))
                    && told.guard == protection::guard(&both[..DATA]),
                "{what}: block {lba} of {name}"
            ),
        }
    }
}

#[test]
fn no_cut_loses_a_tuple_that_was_flushed_or_makes_a_block_look_damaged() {
    for power in [true, false] {
        for point in (0..).step_by(3) {
            let rig = own(Type1);
            rig.create("v", 4, true).unwrap();
            let mut random = point;
            rig.disk.die_after(point);
            let all = changes(&rig, &mut random);
            let survived = !rig.disk.is_dead();
            let disk = rig.disk.clone();
            drop(rig);
            match power {
                true => disk.power_cut(point + 1),
                false => disk.revive(),
            }
            let rig = Rig { own: Some(Type1), ..Rig::on(disk) };
            let what = format!("point {point}, power {power}");
            rig.lvstores.examine("disk0").unwrap().unwrap_or_else(|| panic!("{what}"));
            none_is_damaged(&rig, "lvs0/v", &all[0], &what);
            if rig.registry.get("lvs0/c").is_some() {
                none_is_damaged(&rig, "lvs0/c", &all[1], &what);
            }
            if survived {
                assert!(point > 40, "{point}");
                break;
            }
        }
    }
}

#[test]
fn what_is_unmapped_of_one_that_keeps_it_itself_is_zeros_without_tuples_or_as_it_was() {
    let rig = own(Type1);
    rig.create("v", 4, true).unwrap();
    let features = rig.bdev("lvs0/v").features();
    assert!(features.unmap && features.unmap_zeroes && features.unmap_skips);
    let (mut v, mut model) = (rig.open("lvs0/v"), Model::new(Type1, 4));
    model.write(&mut v, 0, 2 * PER_CLUSTER, 1);
    // A part of a cluster stays, in a volume, and in a clone that has nothing of its own.
    v.unmap(8, 16).unwrap();
    model.check(&mut v);
    rig.lvstores.snapshot("lvs0/v", &new("s")).unwrap();
    rig.lvstores.clone_lvol("lvs0/s", &new("c")).unwrap();
    let mut c = rig.open("lvs0/c");
    c.unmap(8, 16).unwrap();
    model.check(&mut c);
    // It was inflated meanwhile and gives nothing back, but is zeros.
    rig.lvstores.inflate("lvs0/c").unwrap();
    for channel in [&mut c, &mut v] {
        channel.unmap(3, PER_CLUSTER + 9).unwrap();
        model.check(channel);
        channel.unmap(3, 2 * PER_CLUSTER).unwrap();
        let before = model.seeds.clone();
        model.seeds[PER_CLUSTER as usize..2 * PER_CLUSTER as usize].fill(0);
        model.check(channel);
        model.seeds = before;
    }
}

#[test]
fn on_a_bdev_with_other_blocks_it_is_not_shown_and_the_rest_is() {
    let rig = Rig::with_lvs(160);
    rig.create("plain", 2, true).unwrap();
    let rig = Rig { own: Some(Type1), ..rig };
    rig.create("v", 100, true).unwrap();
    let (mut v, mut model) = (rig.open("lvs0/v"), Model::new(Type1, 100));
    (0..100).for_each(|cluster| model.write(&mut v, cluster * PER_CLUSTER, 2, cluster + 1));
    drop(v);
    rig.lvstores.unload("lvs0").unwrap();
    let image = rig.disk.image();
    let other = Rig::on(FaultBdev::with_image("disk0", 4096, image.clone()));
    other.lvstores.examine("disk0").unwrap().unwrap();
    assert!(other.registry.get("lvs0/v").is_none() && other.registry.get("lvs0/plain").is_some());
    let told = other.lvstores.lvol("lvs0/v").unwrap();
    assert_eq!((told.size, told.dif_type), (100 * crate::common::CLUSTER, Some(Type1)));
    let why =
        other.lvstores.resize_lvol("lvs0/v", 101 * crate::common::CLUSTER).unwrap_err().to_string();
    assert!(why.contains("blocks of another size"), "{why}");
    other.lvstores.delete_lvol("lvs0/v").unwrap();
    // With blocks of the right size nothing is lost.
    let rig = Rig::on(FaultBdev::with_image("disk0", BLOCK as u32, image));
    rig.lvstores.examine("disk0").unwrap().unwrap();
    model.check(&mut rig.open("lvs0/v"));
}

#[test]
fn made_smaller_and_larger_and_killed_at_any_point_it_has_no_block_that_looks_damaged() {
    for point in 0..12 {
        let rig = own(Type1);
        rig.create("v", 61, true).unwrap();
        let (lba, cluster) = (60 * PER_CLUSTER, crate::common::CLUSTER);
        let mut v = rig.open("lvs0/v");
        v.write(lba, &data(lba, 1)).unwrap();
        rig.lvstores.resize_lvol("lvs0/v", 30 * cluster).unwrap();
        rig.lvstores.resize_lvol("lvs0/v", 61 * cluster).unwrap();
        v.write(lba, &data(lba, 2)).unwrap();
        v.flush().unwrap();
        rig.disk.die_after(point);
        let _ = v.write(lba, &data(lba, 3));
        drop(v);
        let rig = rig.restart();
        rig.lvstores.examine("disk0").unwrap().unwrap();
        let mut v = rig.open("lvs0/v");
        let mut found = AlignedBuf::zeroed(DATA);
        v.read(lba, &mut found).unwrap_or_else(|e| panic!("point {point}: {e}"));
        assert!([2, 3].iter().any(|seed| found[..] == data(lba, *seed)), "point {point}");
    }
}

#[test]
fn a_growth_that_is_refused_takes_nothing_of_the_lvstore() {
    let rig = own(Type1);
    let keys = crypto::Keys::default();
    let key = crypto::Key::from_hex("k", &"01".repeat(32), &"02".repeat(32), false).unwrap();
    keys.add(key).unwrap();
    rig.lvstores.unload("lvs0").unwrap();
    let with_key = lvol::Lvstores::with_keys(rig.registry.clone(), keys.clone());
    with_key.examine("disk0").unwrap().unwrap();
    let options = LvolOptions {
        dif_type: Some(Type1),
        name: "v".into(),
        size: 4 * crate::common::CLUSTER,
        thin: false,
        uuid: None,
        xattrs: Default::default(),
        key: Some(keys.get("k").unwrap()),
    };
    with_key.create_lvol("lvs0", &options).unwrap();
    with_key.unload("lvs0").unwrap();
    let without = lvol::Lvstores::new(rig.registry.clone());
    let free = || without.lvstores()[0].free_clusters;
    without.examine("disk0").unwrap().unwrap();
    let before = free();
    for _ in 0..3 {
        let why =
            without.resize_lvol("lvs0/v", 40 * crate::common::CLUSTER).unwrap_err().to_string();
        assert!(why.contains("its key is missing"), "{why}");
    }
    // All that was free can be had.
    let all = LvolOptions {
        dif_type: None,
        name: "all".into(),
        size: before * crate::common::CLUSTER,
        key: None,
        ..options
    };
    without.create_lvol("lvs0", &all).unwrap();
    assert_eq!(free(), 0);
}

#[test]
fn two_that_have_their_data_at_other_places_are_not_compared() {
    let rig = Rig::with_lvs(120);
    rig.create("plain", 2, true).unwrap();
    let rig = Rig { own: Some(Type1), ..rig };
    rig.create("v", 2, true).unwrap();
    let rig = Rig { own: Some(Type3), ..rig };
    rig.create("other", 2, true).unwrap();
    for since in ["lvs0/plain", "lvs0/other"] {
        let why = rig.lvstores.ranges("lvs0/v", Some(since), 0, 9).unwrap_err().to_string();
        assert!(why.contains("protection information"), "{why}");
        let why = rig.lvstores.ranges(since, Some("lvs0/v"), 0, 9).unwrap_err().to_string();
        assert!(why.contains("protection information"), "{why}");
    }
}

#[test]
fn killed_while_it_is_made_smaller_and_larger_it_has_no_block_that_looks_damaged() {
    for power in [false, true] {
        for point in (0..).step_by(2) {
            let rig = own(Type1);
            rig.create("v", 61, true).unwrap();
            let cluster = crate::common::CLUSTER;
            let mut v = rig.open("lvs0/v");
            for lba in [0, 29 * PER_CLUSTER, 31 * PER_CLUSTER + 5, 60 * PER_CLUSTER] {
                v.write_protected(lba, &blocks(Type1, lba, 40, 1), Checks::ALL).unwrap();
            }
            v.flush().unwrap();
            rig.disk.die_after(point);
            for clusters in [31, 62] {
                let _ = rig.lvstores.resize_lvol("lvs0/v", clusters * cluster);
            }
            for lba in [30 * PER_CLUSTER, 31 * PER_CLUSTER + 9, 60 * PER_CLUSTER] {
                let _ = v.write_protected(lba, &blocks(Type1, lba, 9, 2), Checks::ALL);
            }
            let _ = v.flush();
            let survived = !rig.disk.is_dead();
            drop(v);
            let disk = rig.disk.clone();
            drop(rig);
            match power {
                true => disk.power_cut(point + 1),
                false => disk.revive(),
            }
            let rig = Rig { own: Some(Type1), ..Rig::on(disk) };
            rig.lvstores.examine("disk0").unwrap().unwrap();
            let mut v = rig.open("lvs0/v");
            let all = rig.bdev("lvs0/v").geometry().num_blocks;
            assert_eq!(read(&mut v, 0, all), Ok(()), "point {point}, power {power}");
            // And it goes on, in a size that it did not have.
            rig.lvstores.resize_lvol("lvs0/v", 63 * cluster).unwrap();
            assert_eq!(read(&mut v, 0, 63 * PER_CLUSTER), Ok(()), "point {point}, power {power}");
            if survived {
                assert!(point > 20, "{point}");
                break;
            }
        }
    }
}

/// As a mirror copies a snapshot that was taken of a volume before it was looked through.
#[test]
fn a_snapshot_of_a_killed_volume_is_copied_and_not_damaged_there() {
    for point in 0..30 {
        let rig = own(Type1);
        rig.create("v", 4, true).unwrap();
        let mut v = rig.open("lvs0/v");
        v.write_protected(0, &blocks(Type1, 0, 40, 1), Checks::ALL).unwrap();
        v.flush().unwrap();
        rig.disk.die_after(point);
        let _ = v.write_protected(0, &blocks(Type1, 0, 40, 2), Checks::ALL);
        drop(v);
        let disk = rig.disk.clone();
        drop(rig);
        disk.revive();
        let rig = Rig { own: Some(Type1), ..Rig::on(disk) };
        rig.lvstores.examine("disk0").unwrap().unwrap();
        rig.lvstores.snapshot("lvs0/v", &new("s")).unwrap();
        let mut s = rig.open("lvs0/s");
        assert_eq!(read(&mut s, 0, 40), Ok(()));
        let mut both = AlignedBuf::zeroed(40 * WITH_TUPLE);
        s.read_protected(0, &mut both, Checks::NONE).unwrap();
        rig.create("w", 4, true).unwrap();
        let mut w = rig.open("lvs0/w");
        w.write_protected(0, &both, Checks::NONE).unwrap();
        assert_eq!(read(&mut w, 0, 40), Ok(()), "point {point}");
    }
}

#[test]
fn what_a_reload_finds_of_another_time_is_marked_before_it_is_written_to() {
    let mut gone_back = 0;
    for op in [Op::Write, Op::Flush] {
        for skip in 0..8 {
            for point in 0..12 {
                let rig = own(Type1);
                rig.create("v", 4, true).unwrap();
                let mut v = rig.open("lvs0/v");
                v.write_protected(0, &blocks(Type1, 0, 40, 1), Checks::ALL).unwrap();
                rig.lvstores.snapshot("lvs0/v", &new("s")).unwrap();
                v.write_protected(0, &blocks(Type1, 0, 40, 2), Checks::ALL).unwrap();
                v.flush().unwrap();
                drop(v);
                let fault = Fault { skip, count: 1, ..Fault::always(op, IoError::WriteMedium) };
                rig.disk.inject(fault);
                let went_back = rig.lvstores.roll_back("lvs0/v", "lvs0/s");
                rig.disk.clear_faults();
                if went_back.is_ok() {
                    break;
                }
                let mut v = rig.open("lvs0/v");
                let latch = rig.disk.flush_latch().unwrap();
                latch.clear();
                let written = v.write_protected(0, &blocks(Type1, 0, 40, 3), Checks::ALL);
                rig.lvstores.reload_on(latch).unwrap();
                let what = format!("{op:?} {skip} {point}: {written:?}");
                assert_eq!(read(&mut v, 0, 40), Ok(()), "{what}, loaded anew");
                let mut found = AlignedBuf::zeroed(DATA);
                v.read(0, &mut found).unwrap();
                gone_back += u32::from(found[..] == data(0, 1));
                v.write_protected(0, &blocks(Type1, 0, 40, 4), Checks::ALL).unwrap();
                // The first may be told of what was lost.
                let _ = v.flush();
                v.flush().unwrap();
                rig.disk.die_after(point);
                let _ = v.write_protected(0, &blocks(Type1, 0, 40, 5), Checks::ALL);
                drop(v);
                let disk = rig.disk.clone();
                drop(rig);
                disk.revive();
                let rig = Rig { own: Some(Type1), ..Rig::on(disk) };
                rig.lvstores.examine("disk0").unwrap().unwrap();
                assert_eq!(read(&mut rig.open("lvs0/v"), 0, 40), Ok(()), "{what}, killed");
            }
        }
    }
    assert!(gone_back > 0, "no reload found it gone back");
}

#[test]
fn what_is_unmapped_where_nothing_was_written_takes_no_room() {
    let rig = own(Type1);
    rig.create("v", 60, true).unwrap();
    let mut v = rig.open("lvs0/v");
    let allocated = || rig.lvstores.lvol("lvs0/v").unwrap().num_allocated_clusters;
    let before = allocated();
    v.unmap(0, 60 * PER_CLUSTER).unwrap();
    v.write_zeroes(7, 59 * PER_CLUSTER).unwrap();
    v.flush().unwrap();
    assert_eq!(allocated(), before);
    // What was written is unmapped with its tuples.
    let mut model = Model::new(Type1, 60);
    model.write(&mut v, PER_CLUSTER, 40, 1);
    let written = allocated();
    v.unmap(0, 60 * PER_CLUSTER).unwrap();
    v.flush().unwrap();
    assert!(allocated() < written);
    model.seeds.fill(0);
    model.check(&mut v);
}
