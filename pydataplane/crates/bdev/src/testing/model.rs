//! A device is a byte array: the property that every backend with a medium is held to.

use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::{AlignedBuf, Bdev, SyncChannel};

/// Size of the device under test, in blocks.
const BLOCKS: u64 = 48;

#[derive(Clone, Debug)]
enum Step {
    Read(u64, u64),
    Write(u64, u64, u8),
    Fua(u64, u64, u8),
    Unmap(u64, u64),
    Zero(u64, u64),
    Flush,
    Reopen,
}

fn step() -> impl Strategy<Value = Step> {
    let range = || (0..BLOCKS + 2, 0..8u64);
    prop_oneof![
        3 => range().prop_map(|(l, n)| Step::Read(l, n)),
        4 => (range(), any::<u8>()).prop_map(|((l, n), v)| Step::Write(l, n, v)),
        1 => (range(), any::<u8>()).prop_map(|((l, n), v)| Step::Fua(l, n, v)),
        1 => range().prop_map(|(l, n)| Step::Unmap(l, n)),
        1 => range().prop_map(|(l, n)| Step::Zero(l, n)),
        1 => Just(Step::Flush),
        1 => Just(Step::Reopen),
    ]
}

/// Runs random steps on devices that `make(blocks)` returns and on a `Vec<u8>`, and compares.
pub(crate) fn check<B: Bdev>(make: impl Fn(u64) -> Arc<B>) {
    check_cases(48, make);
}

/// As [`check`], with the number of cases for each device.
pub(crate) fn check_cases<B: Bdev>(cases: u32, make: impl Fn(u64) -> Arc<B>) {
    let mut runner = TestRunner::new(Config { cases, ..Config::default() });
    runner
        .run(&prop::collection::vec(step(), 1..40), |steps| {
            run(&*make(BLOCKS), &steps);
            Ok(())
        })
        .unwrap();
}

fn run(bdev: &dyn Bdev, steps: &[Step]) {
    let block = bdev.geometry().block_size as usize;
    let mut model = vec![0u8; BLOCKS as usize * block];
    let mut c = SyncChannel::open(bdev).unwrap();
    for s in steps {
        match *s {
            Step::Read(l, n) => {
                let mut b = AlignedBuf::zeroed(n as usize * block);
                b.fill(0xee);
                let r = c.read(l, &mut b);
                assert_eq!(r.is_ok(), l + n <= BLOCKS, "{s:?}: {r:?}");
                if r.is_ok() {
                    assert!(b[..] == model[l as usize * block..][..b.len()], "{s:?}");
                }
            }
            Step::Write(l, n, v) | Step::Fua(l, n, v) => {
                let mut b = AlignedBuf::zeroed(n as usize * block);
                for (i, x) in b.iter_mut().enumerate() {
                    *x = v.wrapping_add((i / 64) as u8);
                }
                let fua = matches!(s, Step::Fua(..));
                let r = if fua { c.write_fua(l, &b) } else { c.write(l, &b) };
                assert_eq!(r.is_ok(), l + n <= BLOCKS, "{s:?}: {r:?}");
                if r.is_ok() {
                    model[l as usize * block..][..b.len()].copy_from_slice(&b);
                }
            }
            Step::Unmap(l, n) | Step::Zero(l, n) => {
                let zero = matches!(s, Step::Zero(..));
                let r = if zero { c.write_zeroes(l, n) } else { c.unmap(l, n) };
                assert_eq!(r.is_ok(), l + n <= BLOCKS, "{s:?}: {r:?}");
                if r.is_ok() {
                    model[l as usize * block..][..n as usize * block].fill(0);
                }
            }
            Step::Flush => c.flush().unwrap(),
            Step::Reopen => c = SyncChannel::open(bdev).unwrap(),
        }
    }
    let mut all = AlignedBuf::zeroed(model.len());
    c.read(0, &mut all).unwrap();
    assert!(all[..] == model[..], "the devices differ in the end");
    let stats = bdev.stats().unwrap().snapshot();
    assert!(stats.op(crate::Op::Read).ops >= 1);
}
