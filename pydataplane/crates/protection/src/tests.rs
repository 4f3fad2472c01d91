//! A device with protection information, on memory and on files.

use crate::{ProtectedDisk, Tuple, guard};
use ProtectionType::{Type1, Type3};
use bdev::{
    AlignedBuf, Bdev, Channel, Checks, Completion, FileBdev, FileKind, FileOptions, Io, IoError,
    Malloc, MallocOptions, Op, Protected, Protection, ProtectionType, Submit, SyncChannel,
    TUPLE_LEN, Tuples,
};
use guestmem::{IoVec, Sg};
use proptest::prelude::*;
use reactor::IoContext;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tempfile::NamedTempFile;

const BLOCKS: u64 = 600;

fn shown(kind: ProtectionType) -> Protection {
    Protection { kind, interleaved: true, at_head: false }
}

fn memory(kind: ProtectionType, block_size: u32) -> Arc<ProtectedDisk> {
    let options = MallocOptions {
        name: "m0".into(),
        block_size,
        physical_block_size: 0,
        num_blocks: BLOCKS,
        uuid: None,
    };
    ProtectedDisk::new(Malloc::with_metadata(options, 8).unwrap(), shown(kind))
}

/// On a file in `folder`.
fn file(
    kind: ProtectionType,
    block_size: u32,
    folder: &str,
) -> (Arc<ProtectedDisk>, NamedTempFile) {
    let file = NamedTempFile::new_in(folder).unwrap();
    file.as_file().set_len(BLOCKS * u64::from(block_size + 8)).unwrap();
    let options = FileOptions {
        name: "f0".into(),
        path: file.path().into(),
        block_size: Some(block_size),
        read_only: false,
        uuid: None,
        kind: FileKind::Aio,
    };
    let below = FileBdev::with_metadata(options, 8, None).unwrap();
    assert!(!below.is_direct());
    (ProtectedDisk::new(below, shown(kind)), file)
}

fn pattern(len: usize, seed: u64) -> AlignedBuf {
    let mut buf = AlignedBuf::zeroed(len);
    for (n, word) in buf.chunks_exact_mut(8).enumerate() {
        let value = (n as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ seed);
        word.copy_from_slice(&value.to_le_bytes());
    }
    buf
}

/// A queue pair that waits.
struct Waiting {
    channel: Box<dyn Channel>,
    io: IoContext,
}

impl Waiting {
    fn open(disk: &dyn Bdev) -> Waiting {
        let io = IoContext::new().unwrap();
        Waiting { channel: disk.open(&io).unwrap(), io }
    }

    /// An I/O with tuples, and the block that was wrong.
    fn run(
        &mut self,
        op: Op,
        (lba, blocks): (u64, u64),
        data: &mut [u8],
        tuples: Option<&mut [u8]>,
        checks: Checks,
    ) -> Result<(), (IoError, Option<u64>)> {
        self.run_as(op, (lba, blocks), data, tuples, checks, None)
    }

    /// The same, of one whose first block has another number for who asks.
    fn run_as(
        &mut self,
        op: Op,
        (lba, blocks): (u64, u64),
        data: &mut [u8],
        tuples: Option<&mut [u8]>,
        checks: Checks,
        first: Option<u32>,
    ) -> Result<(), (IoError, Option<u64>)> {
        // In runs that end within blocks and tuples.
        fn runs(bytes: &mut [u8], len: usize) -> Vec<IoVec> {
            // SAFETY: the bytes outlive the I/O, which ends within `run`.
            bytes.chunks_mut(len).map(|c| unsafe { IoVec::new(c.as_mut_ptr(), c.len()) }).collect()
        }
        let of_data = runs(data, 777);
        let of_tuples = tuples.map(|t| runs(t, 13));
        // SAFETY: the lists outlive the I/O, too.
        let (sg, tuples) = unsafe {
            let apart = |list: &Vec<IoVec>| Tuples::Apart(Sg::new(list), 0);
            (Sg::new(&of_data), of_tuples.as_ref().map_or(Tuples::Behind, apart))
        };
        let io = Io { op, fua: false, lba, blocks, sg, tag: 7 };
        let with = Protected { first, ..Protected::new(tuples, checks) };
        self.ended(&io, &with).map_err(|e| (e, self.channel.mismatch(7).map(|nth| lba + nth)))
    }

    /// A write of blocks that have one tuple.
    fn like(&mut self, lba: u64, data: &mut [u8], like: [u8; TUPLE_LEN], first: Option<u32>) {
        // SAFETY: the data outlives the I/O, which ends within this.
        let runs = [unsafe { IoVec::new(data.as_mut_ptr(), data.len()) }];
        // SAFETY: so do the runs.
        let sg = unsafe { Sg::new(&runs) };
        let blocks = (data.len() / 512) as u64;
        let io = Io { op: Op::Write, fua: false, lba, blocks, sg, tag: 7 };
        let with = Protected { first, ..Protected::new(Tuples::Like(like), Checks::ALL) };
        self.ended(&io, &with).unwrap();
    }

    /// How an I/O ends.
    fn ended(&mut self, io: &Io, with: &Protected) -> Result<(), IoError> {
        match self.channel.submit_protected(io, with) {
            Submit::Done(result) => result,
            Submit::Full => panic!("there is room"),
            Submit::Pending => {
                let mut done: Vec<Completion> = Vec::with_capacity(1);
                while self.channel.poll(&mut done) == 0 {
                    self.io.wait(1000).unwrap();
                }
                assert_eq!(done[0].tag, 7);
                done[0].result
            }
        }
    }
}

/// Every kind of disk here.
fn each(mut f: impl FnMut(&Arc<ProtectedDisk>, ProtectionType, usize)) {
    for block in [512, 4096] {
        for kind in [Type1, Type3] {
            f(&memory(kind, block), kind, block as usize);
            for folder in ["/var/tmp", "/dev/shm"] {
                let (disk, _file) = file(kind, block, folder);
                f(&disk, kind, block as usize);
            }
        }
    }
}

#[test]
fn what_is_written_reads_the_same_and_has_its_tuple_behind_it() {
    each(|disk, kind, block| {
        let geometry = disk.geometry();
        assert_eq!((geometry.block_size as usize, geometry.num_blocks), (block, BLOCKS));
        let mut c = SyncChannel::open(&**disk).unwrap();
        let mut below = SyncChannel::open(&*disk.bare().unwrap()).unwrap();
        for (blocks, lba) in [(1, 3), (7, 100), (400, 177)] {
            let data = pattern(blocks * block, lba);
            c.write(lba, &data).unwrap();
            let mut read = AlignedBuf::zeroed(data.len());
            c.read(lba, &mut read).unwrap();
            assert!(read[..] == data[..], "{blocks} blocks of {block}");
            let mut raw = AlignedBuf::zeroed(blocks * (block + 8));
            below.read(lba, &mut raw).unwrap();
            for (nth, one) in raw.chunks(block + 8).enumerate() {
                let tuple = Tuple::from_bytes(std::array::from_fn(|n| !one[block + n]));
                assert_eq!(tuple, Tuple::of(kind, lba + nth as u64, &one[..block]));
            }
        }
        c.flush().unwrap();
        c.write_fua(5, &pattern(block, 1)).unwrap();
        // Blocks that were never written, or are not any more, read as zeros and take no room.
        c.unmap(100, 3).unwrap();
        c.write_zeroes(104, 2).unwrap();
        let mut read = pattern(8 * block, 9);
        c.read(99, &mut read).unwrap();
        let zero: Vec<_> = read.chunks(block).map(|b| b.iter().all(|byte| *byte == 0)).collect();
        assert_eq!(zero, [true, true, true, true, false, true, true, false]);
        let mut w = Waiting::open(&**disk);
        let (mut data, mut tuples) = (vec![0; 2 * block], vec![0; 16]);
        w.run(Op::Read, (102, 2), &mut data, Some(&mut tuples), Checks::ALL).unwrap();
        assert_eq!(tuples[..8], [0xFF; 8]);
        assert_eq!(tuples[..2], Tuple::UNWRITTEN.to_bytes()[..2]);
        assert_eq!(tuples[8..10], guard(&data[block..]).to_be_bytes());
        let stats = disk.stats().unwrap().snapshot();
        assert_eq!(stats.op(Op::Write).bytes, (409 * block) as u64);
    });
}

#[test]
fn a_block_that_is_damaged_or_misplaced_below_is_told_with_its_number() {
    each(|disk, kind, block| {
        let mut c = SyncChannel::open(&**disk).unwrap();
        let mut below = SyncChannel::open(&*disk.bare().unwrap()).unwrap();
        c.write(0, &pattern(300 * block, 1)).unwrap();
        let mut raw = AlignedBuf::zeroed(300 * (block + 8));
        below.read(0, &mut raw).unwrap();
        let mut w = Waiting::open(&**disk);
        let mut first = |lba, blocks| {
            let mut data = vec![0; blocks as usize * block];
            let mut tuples = vec![0; blocks as usize * 8];
            w.run(Op::Read, (lba, blocks), &mut data, Some(&mut tuples), Checks::ALL)
        };
        // A bit of the data, then of the guard.
        for at in [block / 2, block] {
            let mut bad = raw[250 * (block + 8)..251 * (block + 8)].to_vec();
            bad[at] ^= 0x10;
            below.write(250, &bad).unwrap();
            assert_eq!(first(0, 300), Err((IoError::Guard, Some(250))), "byte {at} of {block}");
            let e = c.read(250, &mut AlignedBuf::zeroed(block)).unwrap_err();
            assert_eq!(e.cause, IoError::Guard);
            assert_eq!(first(0, 250), Ok(()));
            assert_eq!(first(251, 49), Ok(()));
        }
        // It is written again, and good.
        c.write(250, &pattern(block, 2)).unwrap();
        assert_eq!(first(0, 300), Ok(()));
        // Two blocks change places, with their tuples: type 3 has nothing to know them by.
        let [a, b] = [17, 200].map(|n: usize| raw[n * (block + 8)..(n + 1) * (block + 8)].to_vec());
        below.write(17, &b).unwrap();
        below.write(200, &a).unwrap();
        match kind {
            Type1 => assert_eq!(first(0, 300), Err((IoError::RefTag, Some(17)))),
            Type3 => assert_eq!(first(0, 300), Ok(())),
        }
        // What lay there earlier was right once: nobody can know it.
        c.write(17, &pattern(block, 3)).unwrap();
        c.write(200, &pattern(block, 4)).unwrap();
        below.write(200, &b).unwrap();
        assert_eq!(first(0, 300), Ok(()));
        let mut read = AlignedBuf::zeroed(block);
        c.read(200, &mut read).unwrap();
        assert!(read[..] == b[..block]);
    });
}

#[test]
fn tuples_of_the_writer_are_compared_kept_and_given_back() {
    each(|disk, kind, block| {
        let mut w = Waiting::open(&**disk);
        let blocks = 240usize;
        let mut data = pattern(blocks * block, 5);
        let tuple = |nth: usize, data: &[u8]| Tuple {
            app_tag: 0x1234,
            ..Tuple::of(kind, 9 + nth as u64, &data[nth * block..(nth + 1) * block])
        };
        let mut tuples: Vec<u8> = (0..blocks).flat_map(|n| tuple(n, &data).to_bytes()).collect();
        let all = Checks { app_tag: Some(0x1234), ..Checks::ALL };
        w.run(Op::Write, (9, 240), &mut data, Some(&mut tuples), all).unwrap();
        let (mut read, mut with) = (vec![0; data.len()], vec![0; tuples.len()]);
        w.run(Op::Read, (9, 240), &mut read, Some(&mut with), all).unwrap();
        assert!(read[..] == data[..] && with == tuples);

        // Behind each block.
        let mut both: Vec<u8> = data
            .chunks(block)
            .zip(tuples.chunks(8))
            .flat_map(|(data, tuple)| [data, tuple].concat())
            .collect();
        let mut read = vec![0; both.len()];
        w.run(Op::Read, (9, 240), &mut read, None, all).unwrap();
        assert!(read == both);
        w.run(Op::Write, (9, 240), &mut both, None, all).unwrap();

        // Each check for itself; the block is not written.
        let wrong = [
            (0, IoError::Guard, Checks { guard: false, ..all }),
            (2, IoError::AppTag, Checks { app_tag: None, ..all }),
            (4, IoError::RefTag, Checks { reference: false, ..all }),
        ];
        for (byte, error, without) in wrong {
            let mut bad = tuples.clone();
            bad[231 * 8 + byte] ^= 1;
            let mut other = pattern(data.len(), 6);
            other[231 * block..232 * block].copy_from_slice(&data[231 * block..232 * block]);
            other[..231 * block].copy_from_slice(&data[..231 * block]);
            let ends = w.run(Op::Write, (9, 240), &mut other, Some(&mut bad), all);
            if error == IoError::RefTag && kind == Type3 {
                assert_eq!(ends.unwrap_err().1, Some(9 + 232), "the next block has another guard");
            } else {
                assert_eq!(ends, Err((error, Some(9 + 231))));
            }
            w.run(Op::Write, (9, 240), &mut data, Some(&mut bad), without).unwrap();
            let ends = w.run(Op::Read, (9, 240), &mut read[..data.len()], Some(&mut with), all);
            match (error, kind) {
                (IoError::RefTag, Type3) => assert_eq!(ends, Ok(())),
                _ => assert_eq!(ends, Err((error, Some(9 + 231)))),
            }
            let none = Checks::NONE;
            w.run(Op::Read, (9, 240), &mut read[..data.len()], Some(&mut with), none).unwrap();
            assert!(with == bad);
        }

        // Lists that are too short, and places beyond the end.
        let short = w.run(Op::Write, (9, 240), &mut data, Some(&mut tuples[8..]), all);
        assert_eq!(short, Err((IoError::BadLength, None)));
        let beyond = w.run(Op::Read, (BLOCKS - 1, 240), &mut data, Some(&mut tuples), all);
        assert_eq!(beyond, Err((IoError::OutOfRange, None)));
        let data_alone = w.run(Op::Read, (9, 240), &mut data, None, all);
        assert_eq!(data_alone, Err((IoError::BadLength, None)));
    });
}

#[test]
fn blocks_may_have_other_numbers_for_who_asks_and_no_tag_becomes_right_by_it() {
    for kind in [Type1, Type3] {
        let disk = memory(kind, 512);
        let mut w = Waiting::open(&*disk);
        // Eight from block 100 on, which are 7 and the following ones to who asks.
        let mut data = pattern(8 * 512, 1);
        let tuple = |nth: usize, data: &[u8]| Tuple {
            app_tag: 9,
            ..Tuple::of(kind, 7 + nth as u64, &data[nth * 512..(nth + 1) * 512])
        };
        let good: Vec<u8> = (0..8).flat_map(|n| tuple(n, &data).to_bytes()).collect();
        let mut run = |op, first, tuples: &mut Vec<u8>, checks| {
            w.run_as(op, (100, 8), &mut data, Some(tuples), checks, first)
        };
        run(Op::Write, Some(7), &mut good.clone(), Checks::ALL).unwrap();
        let mut back = vec![0; 64];
        run(Op::Read, Some(7), &mut back, Checks::ALL).unwrap();
        assert_eq!(back, good);
        run(Op::Read, None, &mut back, Checks::ALL).unwrap();
        assert_eq!(
            back[..8],
            Tuple {
                ref_tag: if kind == Type1 { 100 } else { !0 },
                ..tuple(0, &pattern(8 * 512, 1))
            }
            .to_bytes()
        );
        // The disk's own number is as wrong as any other to who has another one, and stays wrong; one that is
        // not to be checked is given back as it was, as one that was never written is.
        let mut odd = good.clone();
        odd[8..16]
            .copy_from_slice(&Tuple { ref_tag: 101, ..tuple(1, &pattern(8 * 512, 1)) }.to_bytes());
        odd[16..24].copy_from_slice(&[1, 2, 0xFF, 0xFF, 3, 4, 5, 6]);
        odd[24..32].copy_from_slice(&[0xFF; 8]);
        let ends = run(Op::Write, Some(7), &mut odd.clone(), Checks::ALL);
        let without = Checks { guard: false, reference: false, ..Checks::ALL };
        if kind == Type1 {
            assert_eq!(ends, Err((IoError::RefTag, Some(101))));
        }
        run(Op::Write, Some(7), &mut odd.clone(), without).unwrap();
        run(Op::Read, Some(7), &mut back, without).unwrap();
        assert_eq!(back, odd);
        if kind == Type1 {
            for first in [Some(7), None] {
                let ends = run(Op::Read, first, &mut back, Checks::ALL);
                assert_eq!(ends, Err((IoError::RefTag, Some(101))));
            }
        }
        // The tuple of each block, counted from the one that it is to who asks.
        let block = pattern(512, 3);
        let mut same: Vec<u8> = (0..8).flat_map(|_| block.to_vec()).collect();
        let like = Tuple::of(kind, 7, &block).like(kind, 7).to_bytes();
        w.like(100, &mut same, like, Some(7));
        w.run_as(Op::Read, (100, 8), &mut same, Some(&mut back), Checks::ALL, Some(7)).unwrap();
        let expected = |nth: u64| Tuple::of(kind, 7 + nth, &block).to_bytes();
        assert_eq!(back, (0..8).flat_map(expected).collect::<Vec<_>>());
    }
}

#[test]
fn a_tuple_that_is_half_old_while_it_is_written_is_read_again() {
    for at in 0..TUPLE_LEN {
        let (disk, _file) = file(Type1, 512, "/tmp");
        let mut channel = SyncChannel::open(&*disk).unwrap();
        channel.write(0, &pattern(4 * 512, 1)).unwrap();
        let bare = disk.bare().unwrap();
        let mut below = SyncChannel::open(&*bare).unwrap();
        let mut whole = AlignedBuf::zeroed(520);
        below.read(2, &mut whole).unwrap();
        let mut torn = AlignedBuf::zeroed(520);
        torn.copy_from_slice(&whole);
        torn[512 + at] = !torn[512 + at];
        below.write(2, &torn).unwrap();
        let mut writer = disk.writer();
        writer.begin(2, 1);
        std::thread::scope(|s| {
            s.spawn(|| {
                std::thread::sleep(std::time::Duration::from_millis(20));
                SyncChannel::open(&*bare).unwrap().write(2, &whole).unwrap();
                writer.end(2, 1);
            });
            let mut read = AlignedBuf::zeroed(4 * 512);
            let ends = channel.read(0, &mut read);
            assert!(ends.is_ok(), "byte {at}: {ends:?}");
            assert!(*read == *pattern(4 * 512, 1));
        });
    }
}

#[test]
fn io_at_the_same_blocks_at_the_same_time_leaves_them_whole() {
    each(|disk, _, block| {
        let over = AtomicBool::new(false);
        std::thread::scope(|s| {
            let writers: Vec<_> = (0..2u64)
                .map(|t| {
                    s.spawn(move || {
                        let mut c = SyncChannel::open(&**disk).unwrap();
                        for i in 0..300 {
                            c.write(i % 3, &pattern(20 * block, i * 2 + t)).unwrap();
                            if i % 16 == t {
                                c.unmap(i % 5, 9).unwrap();
                            }
                        }
                    })
                })
                .collect();
            s.spawn(|| {
                let mut c = SyncChannel::open(&**disk).unwrap();
                let mut buf = AlignedBuf::zeroed(23 * block);
                while !over.load(Ordering::Relaxed) {
                    c.read(0, &mut buf).unwrap();
                }
            });
            writers.into_iter().for_each(|w| w.join().unwrap());
            over.store(true, Ordering::Relaxed);
        });
    });
}

#[derive(Clone, Debug)]
enum Step {
    Read(u64, u64),
    Write(u64, u64, u64),
    Unmap(u64, u64),
    Zero(u64, u64),
}

fn step() -> impl Strategy<Value = Step> {
    let range = || (0..BLOCKS - 150, 0..150u64);
    prop_oneof![
        range().prop_map(|(l, n)| Step::Read(l, n)),
        (range(), any::<u64>()).prop_map(|((l, n), v)| Step::Write(l, n, v)),
        range().prop_map(|(l, n)| Step::Unmap(l, n)),
        range().prop_map(|(l, n)| Step::Zero(l, n)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn it_is_a_disk(steps in prop::collection::vec(step(), 1..30), in_memory in any::<bool>()) {
        let (on_file, _file) = file(Type1, 512, "/var/tmp");
        let disk = if in_memory { memory(Type1, 512) } else { on_file };
        let mut model = vec![0u8; BLOCKS as usize * 512];
        let mut c = SyncChannel::open(&*disk).unwrap();
        let bytes = |l: u64, n: u64| l as usize * 512..(l + n) as usize * 512;
        for step in steps {
            match step {
                Step::Read(l, n) => {
                    let mut read = AlignedBuf::zeroed(n as usize * 512);
                    c.read(l, &mut read).unwrap();
                    prop_assert!(read[..] == model[bytes(l, n)]);
                }
                Step::Write(l, n, seed) => {
                    let data = pattern(n as usize * 512, seed);
                    c.write(l, &data).unwrap();
                    model[bytes(l, n)].copy_from_slice(&data);
                }
                Step::Unmap(l, n) => {
                    c.unmap(l, n).unwrap();
                    model[bytes(l, n)].fill(0);
                }
                Step::Zero(l, n) => {
                    c.write_zeroes(l, n).unwrap();
                    model[bytes(l, n)].fill(0);
                }
            }
        }
        let mut read = AlignedBuf::zeroed(model.len());
        c.read(0, &mut read).unwrap();
        prop_assert!(read[..] == model[..]);
    }
}

#[test]
fn a_file_for_it_is_a_regular_one_and_has_a_block_at_least() {
    let short = NamedTempFile::new().unwrap();
    short.as_file().set_len(519).unwrap();
    let options = FileOptions {
        name: "f0".into(),
        path: short.path().into(),
        block_size: None,
        read_only: false,
        uuid: None,
        kind: FileKind::Uring,
    };
    let why = FileBdev::with_metadata(options.clone(), 8, None).err().unwrap().to_string();
    assert!(why.contains("has 519 bytes, less than one block of 520"), "{why}");
    short.as_file().set_len(1040).unwrap();
    let below = FileBdev::with_metadata(options, 8, None).unwrap();
    assert_eq!(ProtectedDisk::new(below, shown(Type1)).geometry().num_blocks, 2);
    assert_eq!(TUPLE_LEN, 8);
}
