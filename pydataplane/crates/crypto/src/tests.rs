use crate::{Crypto, Key, KeyError, Keys};
use bdev::testing::{Fault, FaultBdev};
use bdev::{
    AlignedBuf, Bdev, Event, IoError, Malloc, MallocOptions, Null, Op, OwnedChannel, Registry,
    SyncChannel,
};
use proptest::prelude::*;
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const MIB: usize = 1 << 20;

fn key() -> Arc<Key> {
    Arc::new(Key::from_hex("k", &"1f".repeat(32), &"2e".repeat(32), false).unwrap())
}

fn malloc(registry: &Registry, block_size: u32, bytes: usize) {
    let options = MallocOptions {
        name: "m0".into(),
        block_size,
        physical_block_size: 0,
        num_blocks: bytes as u64 / u64::from(block_size),
        uuid: None,
    };
    registry.register(Malloc::create(options).unwrap()).unwrap();
}

/// A registry with a bdev in memory `m0` and the encrypted one `c0` on it.
fn both(block_size: u32, bytes: usize) -> (Registry, Arc<Crypto>) {
    let registry = Registry::new();
    malloc(&registry, block_size, bytes);
    let crypto = Crypto::create(&registry, "c0", "m0", key()).unwrap();
    registry.register(crypto.clone()).unwrap();
    (registry, crypto)
}

fn pattern(len: usize, seed: u64) -> AlignedBuf {
    let mut buf = AlignedBuf::zeroed(len);
    for (n, word) in buf.chunks_exact_mut(8).enumerate() {
        let value = (n as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ seed);
        word.copy_from_slice(&value.to_le_bytes());
    }
    buf
}

#[test]
fn what_is_written_reads_the_same_and_lies_encrypted_below() {
    for block in [512, 4096] {
        let (registry, crypto) = both(block, 8 * MIB);
        assert_eq!(crypto.geometry(), registry.get("m0").unwrap().geometry());
        let mut c = SyncChannel::open(&*crypto).unwrap();
        for (blocks, lba) in [(1, 3), (7, 100), ((3 * MIB / block as usize) + 5, 777)] {
            let data = pattern(blocks * block as usize, lba);
            c.write(lba, &data).unwrap();
            let mut read = AlignedBuf::zeroed(data.len());
            c.read(lba, &mut read).unwrap();
            assert!(read[..] == data[..], "{blocks} blocks of {block}");
            let mut below = SyncChannel::open(&**crypto.base()).unwrap();
            below.read(lba, &mut read).unwrap();
            for (at, (a, b)) in read.chunks(16).zip(data.chunks(16)).enumerate() {
                assert_ne!(a, b, "16 bytes at {at} are not encrypted");
            }
        }
    }
}

/// A block of 4096 bytes by another implementation: RustCrypto's `aes` and `xts-mode`.
#[test]
fn a_block_lies_as_another_implementation_has_it() {
    let (_registry, crypto) = both(4096, MIB);
    let mut c = SyncChannel::open(&*crypto).unwrap();
    let mut data = AlignedBuf::zeroed(4096);
    data.iter_mut().enumerate().for_each(|(n, byte)| *byte = (n * 7 + n / 256) as u8);
    c.write(0x42, &data).unwrap();
    let mut below = SyncChannel::open(&**crypto.base()).unwrap();
    below.read(0x42, &mut data).unwrap();
    let digest = openssl::sha::sha256(&data);
    let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(hex, "33d86aa003a55f24be1f4d6e4c935af15e0221ea51cf20a89da292ebd2a96c43");
}

#[test]
fn what_was_never_written_or_was_unmapped_reads_as_zeros() {
    let (_registry, crypto) = both(512, 4 * MIB);
    let mut c = SyncChannel::open(&*crypto).unwrap();
    let mut read = pattern(2 * MIB, 1);
    c.read(9, &mut read).unwrap();
    assert!(read.iter().all(|byte| *byte == 0));
    let data = pattern(64 * 512, 2);
    c.write(100, &data).unwrap();
    c.unmap(110, 3).unwrap();
    c.write_zeroes(120, 5).unwrap();
    let mut read = AlignedBuf::zeroed(64 * 512);
    c.read(100, &mut read).unwrap();
    for (n, (a, b)) in read.chunks(512).zip(data.chunks(512)).enumerate() {
        let zero = (10..13).contains(&n) || (20..25).contains(&n);
        assert!(a == if zero { &[0; 512][..] } else { b }, "block {n}");
    }
}

#[test]
fn zeros_that_are_written_are_encrypted_as_all_else() {
    let (_registry, crypto) = both(512, MIB);
    let mut c = SyncChannel::open(&*crypto).unwrap();
    c.write(5, &AlignedBuf::zeroed(1024)).unwrap();
    let mut below = SyncChannel::open(&**crypto.base()).unwrap();
    let mut read = AlignedBuf::zeroed(1024);
    below.read(5, &mut read).unwrap();
    assert!(read.chunks(512).all(|block| block.iter().any(|byte| *byte != 0)));
    assert_ne!(read[..512], read[512..], "each block has a tweak of its own");
    c.read(5, &mut read).unwrap();
    assert!(read.iter().all(|byte| *byte == 0));
}

#[test]
fn an_io_beyond_the_end_or_of_another_length_changes_nothing() {
    let (_registry, crypto) = both(512, MIB);
    let mut c = SyncChannel::open(&*crypto).unwrap();
    let data = pattern(512 * 512, 3);
    assert_eq!(c.write(2048 - 511, &data).unwrap_err().cause, IoError::OutOfRange);
    let mut read = pattern(512 * 511, 1);
    c.read(2048 - 511, &mut read).unwrap();
    assert!(read.iter().all(|byte| *byte == 0));
    let mut short = AlignedBuf::zeroed(700);
    assert_eq!(c.read(0, &mut short).unwrap_err().cause, IoError::BadLength);
    assert_eq!(c.unmap(2048, 1).unwrap_err().cause, IoError::OutOfRange);
    let stats = crypto.stats().unwrap().snapshot();
    assert_eq!((stats.op(Op::Read).ops, stats.op(Op::Write).ops), (1, 0));
    assert_eq!(stats.errors_of(IoError::OutOfRange), 2);
}

#[test]
fn errors_of_the_base_end_the_io_with_the_first_of_them() {
    let registry = Registry::new();
    let base = FaultBdev::new("m0", 512, 8192);
    registry.register(base.clone()).unwrap();
    let crypto = Crypto::create(&registry, "c0", "m0", key()).unwrap();
    let mut c = SyncChannel::open(&*crypto).unwrap();
    for (op, error) in [
        (Op::Write, IoError::NoSpace),
        (Op::Read, IoError::ReadMedium),
        (Op::Flush, IoError::Flush),
    ] {
        base.inject(Fault::always(op, error));
        let mut data = pattern(512 * 1024, 1);
        let failed = match op {
            Op::Write => c.write(0, &data),
            Op::Read => c.read(0, &mut data),
            _ => c.flush(),
        };
        assert_eq!(failed.unwrap_err().cause, error);
        base.clear_faults();
        c.write(0, &data).unwrap();
        c.read(0, &mut data).unwrap();
    }
}

/// More than there are slots, pieces and memory for, over a base that ends I/Os late and in any order.
#[test]
fn more_than_there_is_room_for_waits_and_comes_out_right() {
    const DEPTH: u16 = 400;
    for (seed, blocks) in [(1, 1), (2, 40), (3, 300)] {
        let registry = Registry::new();
        let base = FaultBdev::new("m0", 512, u64::from(DEPTH) * 300);
        registry.register(base.clone()).unwrap();
        let crypto = Crypto::create(&registry, "c0", "m0", key()).unwrap();
        base.defer(Some(seed));
        let mut c = OwnedChannel::open(&*crypto, DEPTH).unwrap();
        let mut over = Vec::new();
        for op in [Op::Write, Op::Read] {
            over.clear();
            for nth in 0..u64::from(DEPTH) {
                let buf = match op {
                    Op::Write => pattern(blocks as usize * 512, nth),
                    _ => AlignedBuf::zeroed(blocks as usize * 512),
                };
                over.extend(c.submit(op, nth * blocks, blocks, Some(buf), nth));
            }
            while c.in_flight() > 0 {
                c.poll(&mut over);
            }
            assert_eq!(over.len(), usize::from(DEPTH));
            for f in &over {
                assert_eq!(f.result, Ok(()));
                let data = f.buf.as_ref().unwrap();
                assert!(data[..] == pattern(data.len(), f.token)[..], "{op:?} {}", f.token);
            }
        }
    }
}

#[test]
fn writes_survive_a_power_cut_after_a_flush_and_fua_is_passed_on() {
    let registry = Registry::new();
    let base = FaultBdev::new("m0", 512, 4096);
    registry.register(base.clone()).unwrap();
    let crypto = Crypto::create(&registry, "c0", "m0", key()).unwrap();
    let mut c = SyncChannel::open(&*crypto).unwrap();
    let (flushed, fua) = (pattern(512 * 300, 1), pattern(512 * 200, 2));
    c.write(0, &flushed).unwrap();
    c.flush().unwrap();
    c.write_fua(1000, &fua).unwrap();
    c.write(2000, &pattern(512 * 200, 3)).unwrap();
    drop(c);
    base.power_cut(7);
    base.revive();
    let mut c = SyncChannel::open(&*crypto).unwrap();
    for (lba, data) in [(0, flushed), (1000, fua)] {
        let mut read = AlignedBuf::zeroed(data.len());
        c.read(lba, &mut read).unwrap();
        assert!(read[..] == data[..]);
    }
}

#[test]
fn the_base_is_its_own_and_follows_in_size_and_end() {
    let registry = Registry::new();
    let null = Null::create("n0", 512, 1000, None).unwrap();
    registry.register(null.clone()).unwrap();
    let _follow = Crypto::follow(&registry);
    let crypto = Crypto::create(&registry, "c0", "n0", key()).unwrap();
    registry.register(crypto.clone()).unwrap();
    let e = Crypto::create(&registry, "c1", "n0", key()).err().unwrap().to_string();
    assert_eq!(e, "bdev n0 is in use by crypto bdev c0: release it there first");
    let e = Crypto::create(&registry, "c1", "n7", key()).err().unwrap().to_string();
    assert_eq!(e, "there is no bdev n7");
    let (tell, told) = mpsc::channel();
    let tell = Mutex::new(tell);
    let _heard = registry.subscribe(move |event| {
        if let Event::Resized(bdev) | Event::Removed(bdev) = event {
            let said = (bdev.name().to_owned(), bdev.geometry().num_blocks);
            let _ = tell.lock().unwrap().send(said);
        }
    });
    null.resize(2000).unwrap();
    registry.notify_resized("n0");
    let mut heard = vec![told.recv().unwrap(), told.recv().unwrap()];
    heard.sort();
    assert_eq!(heard, [("c0".to_owned(), 2000), ("n0".to_owned(), 2000)]);
    drop((crypto, null));
    registry.unregister("n0").unwrap();
    assert!(registry.list().is_empty());
    let heard: Vec<_> =
        (0..2).map(|_| told.recv_timeout(Duration::from_secs(60)).unwrap().0).collect();
    assert!(heard.contains(&"c0".to_owned()), "{heard:?}");
}

#[test]
fn the_same_base_has_the_same_uuid_and_the_key_is_in_use() {
    let registry = Registry::new();
    let uuid = uuid::uuid!("2f5b1c1e-8d1b-4d4f-9a55-3f1f5f0c9c11");
    registry.register(Null::create("n0", 512, 8, Some(uuid)).unwrap()).unwrap();
    let keys = Keys::default();
    let key = Key::from_hex("k", &"01".repeat(16), &"02".repeat(16), false).unwrap();
    keys.add(key).unwrap();
    let create = || Crypto::create(&registry, "c0", "n0", keys.get("k").unwrap()).unwrap();
    let crypto = create();
    assert_eq!(crypto.uuid().get_version_num(), 5);
    assert_eq!(
        crypto.driver_specific().to_string(),
        r#"{"crypto":{"base_bdev_name":"n0","key_name":"k","name":"c0"}}"#
    );
    assert_eq!(keys.destroy("k").unwrap_err(), KeyError::InUse("k".into()));
    let before = crypto.uuid();
    drop(crypto);
    assert_eq!(create().uuid(), before);
    keys.destroy("k").unwrap();
}

#[derive(Clone, Debug)]
enum Step {
    Read(u64, u64),
    Write(u64, u64, u64),
    Unmap(u64, u64),
    Zero(u64, u64),
}

fn step() -> impl Strategy<Value = Step> {
    let range = || (0..300u64, 1..300u64);
    prop_oneof![
        3 => range().prop_map(|(l, n)| Step::Read(l, n)),
        4 => (range(), any::<u64>()).prop_map(|((l, n), v)| Step::Write(l, n, v)),
        1 => range().prop_map(|(l, n)| Step::Unmap(l, n)),
        1 => range().prop_map(|(l, n)| Step::Zero(l, n)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn behaves_as_a_byte_array(steps in prop::collection::vec(step(), 1..30)) {
        let (_registry, crypto) = both(512, 300 * 1024);
        let mut c = SyncChannel::open(&*crypto).unwrap();
        let mut model = vec![0u8; 300 * 1024];
        for s in steps {
            match s {
                Step::Read(l, n) => {
                    let mut buf = AlignedBuf::zeroed(n as usize * 512);
                    c.read(l, &mut buf).unwrap();
                    prop_assert!(buf[..] == model[l as usize * 512..][..buf.len()]);
                }
                Step::Write(l, n, v) => {
                    let buf = pattern(n as usize * 512, v);
                    c.write(l, &buf).unwrap();
                    model[l as usize * 512..][..buf.len()].copy_from_slice(&buf);
                }
                Step::Unmap(l, n) | Step::Zero(l, n) => {
                    if matches!(s, Step::Zero(..)) {
                        c.write_zeroes(l, n).unwrap();
                    } else {
                        c.unmap(l, n).unwrap();
                    }
                    model[l as usize * 512..][..n as usize * 512].fill(0);
                }
            }
        }
    }
}
