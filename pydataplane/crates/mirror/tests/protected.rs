//! Disks with protection information are copied with it: what lies beside each block is what lay there, right or
//! wrong, and what a guest brings meanwhile is on both.

use bdev::testing::FaultBdev;
use bdev::{
    AlignedBuf, Bdev, Checks, Completion, Io, IoError, Op, Protected, Protection, ProtectionType,
    Submit, SyncChannel, TUPLE_LEN, Tuples,
};
use guestmem::{IoVec, Sg};
use mirror::{Mirror, MirrorError, Options, Phase};
use protection::{ProtectedDisk, Tuple};
use reactor::IoContext;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

const DEADLINE: Duration = Duration::from_secs(60);
const BLOCK: usize = 512;
const WHOLE: usize = BLOCK + TUPLE_LEN;
/// Some chunks of the copy.
const BLOCKS: u64 = 5 * 512 + 24;

fn shown(name: &str, kind: ProtectionType) -> (Arc<FaultBdev>, Arc<dyn Bdev>) {
    let below = FaultBdev::with_image(name, WHOLE as u32, vec![0; BLOCKS as usize * WHOLE]);
    let protection = Protection { kind, interleaved: true, at_head: false };
    (below.clone(), ProtectedDisk::new(below, protection))
}

/// Blocks with their tuples, as a guest makes them.
fn blocks(kind: ProtectionType, lba: u64, count: u64, seed: u8) -> AlignedBuf {
    let mut all = AlignedBuf::zeroed(count as usize * WHOLE);
    for (lba, whole) in (lba..).zip(all.chunks_mut(WHOLE)) {
        let (data, tuple) = whole.split_at_mut(BLOCK);
        data.fill(seed ^ lba as u8);
        let its = Tuple { app_tag: 0x5A00 | u16::from(seed), ..Tuple::of(kind, lba, data) };
        tuple.copy_from_slice(&its.to_bytes());
    }
    all
}

/// Waits until all is copied.
fn is_ready(mirror: &Mirror) {
    let since = Instant::now();
    while mirror.progress().phase == Phase::Copying && since.elapsed() < DEADLINE {
        thread::sleep(Duration::from_millis(1));
    }
    let ready = mirror.progress();
    assert_eq!(ready.phase, Phase::Ready, "{ready:?}");
}

/// Runs `f` while the copy runs, from the moment on in which it is ready.
fn when_ready(mirror: &Mirror, f: impl FnOnce()) {
    thread::scope(|scope| {
        scope.spawn(|| mirror.run());
        let all = || {
            is_ready(mirror);
            f();
        };
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(all));
        mirror.stop();
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

/// Writes blocks whose tuples are in a list of their own, behind one that is not theirs.
fn write_apart(mirror: &Mirror, lba: u64, count: u64, blocks: &[u8]) -> Result<(), IoError> {
    let io = IoContext::new().unwrap();
    let mut channel = mirror.open(&io).unwrap();
    let (mut data, mut tuples) = (Vec::new(), vec![0xEE; TUPLE_LEN]);
    for whole in blocks.chunks(WHOLE) {
        data.extend(&whole[..BLOCK]);
        tuples.extend(&whole[BLOCK..]);
    }
    let run = |bytes: &mut Vec<u8>| {
        // SAFETY: both outlive the I/O, which ends below, and are not touched before that.
        [unsafe { IoVec::new(bytes.as_mut_ptr(), bytes.len()) }]
    };
    let (of_data, of_tuples) = (run(&mut data), run(&mut tuples));
    // SAFETY: the lists outlive the I/O, too.
    let (sg, tuples) = unsafe { (Sg::new(&of_data), Sg::new(&of_tuples)) };
    let write = Io { op: Op::Write, fua: false, lba, blocks: count, sg, tag: 7 };
    let with = Protected::new(Tuples::Apart(tuples, 1), Checks::ALL);
    match channel.submit_protected(&write, &with) {
        Submit::Done(result) => result,
        Submit::Full => panic!("there is room"),
        Submit::Pending => {
            let (since, mut done) = (Instant::now(), Vec::<Completion>::with_capacity(1));
            while channel.poll(&mut done) == 0 {
                assert!(since.elapsed() < DEADLINE, "it does not end");
            }
            done[0].result
        }
    }
}

#[test]
fn tuples_are_taken_along_as_they_are_and_written_to_both() {
    for kind in [ProtectionType::Type1, ProtectionType::Type3] {
        let ((of_source, source), (of_target, target)) =
            (shown("source", kind), shown("target", kind));
        let mut channel = SyncChannel::open(&*source).unwrap();
        // Some are there, some are zeros that were written, some were never written.
        channel.write_protected(3, &blocks(kind, 3, 700, 1), Checks::ALL).unwrap();
        channel.write(1200, &AlignedBuf::zeroed(30 * BLOCK)).unwrap();
        SyncChannel::open(&*target).unwrap().write(2000, &AlignedBuf::zeroed(BLOCK)).unwrap();
        // One is wrong, and stays so.
        of_source.corrupt(10 * WHOLE + 5, 0x40);
        let mirror = Mirror::new(source.clone(), target, Options::default()).unwrap();
        assert_eq!(mirror.protection(), source.protection());
        when_ready(&mirror, || {
            let are_same = |when| assert!(of_source.image() == of_target.image(), "{when}");
            are_same("copied");
            let mut unit = SyncChannel::open(&*mirror).unwrap();
            let refused = unit.read(8, &mut AlignedBuf::zeroed(4 * BLOCK)).unwrap_err();
            assert_eq!((refused.cause, unit.mismatch()), (IoError::Guard, Some(2)));

            // More than is taken to the destination at a time.
            unit.write_protected(100, &blocks(kind, 100, 400, 2), Checks::ALL).unwrap();
            unit.write(600, &AlignedBuf::zeroed(200 * BLOCK)).unwrap();
            write_apart(&mirror, 900, 300, &blocks(kind, 900, 300, 3)).unwrap();
            unit.write_zeroes(1190, 100).unwrap();
            are_same("written");
            let mut read = AlignedBuf::zeroed(300 * WHOLE);
            unit.read_protected(900, &mut read[..290 * WHOLE], Checks::ALL).unwrap();
            assert!(read[..290 * WHOLE] == blocks(kind, 900, 300, 3)[..290 * WHOLE]);

            // What is wrong is refused by both, and is no end of the copy.
            let mut wrong = blocks(kind, 50, 8, 4);
            wrong[3 * WHOLE] ^= 1;
            let refused = unit.write_protected(50, &wrong, Checks::ALL).unwrap_err();
            assert_eq!((refused.cause, unit.mismatch()), (IoError::Guard, Some(3)));
            assert_eq!(write_apart(&mirror, 50, 8, &wrong), Err(IoError::Guard));
            is_ready(&mirror);
            are_same("refused");

            // Each has written some of what comes before that, and not the same.
            let mut wrong = blocks(kind, 50, 800, 5);
            wrong[790 * WHOLE] ^= 1;
            let refused = unit.write_protected(50, &wrong, Checks::ALL).unwrap_err();
            assert_eq!((refused.cause, unit.mismatch()), (IoError::Guard, Some(790)));
            is_ready(&mirror);
            are_same("refused in part");
        });
    }
}

#[test]
fn tuples_go_nowhere_where_they_have_no_place() {
    let (_, source) = shown("source", ProtectionType::Type1);
    let refused = |target| {
        Mirror::new(source.clone(), target, Options::default()).map(drop).unwrap_err().to_string()
    };
    let bare: Arc<dyn Bdev> = FaultBdev::new("bare", BLOCK as u32, BLOCKS);
    assert_eq!(
        refused(bare.clone()),
        "bdev source has protection information, and bdev bare has none: copy it to one that has"
    );
    let (_, other) = shown("other", ProtectionType::Type3);
    assert!(refused(other).contains("of different types"));
    // The other way the destination makes them.
    let mirror = Mirror::new(bare, source, Options::default()).map_err(|e: MirrorError| e);
    assert_eq!(mirror.unwrap().protection(), None);
}
