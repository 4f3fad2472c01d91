//! A source that carries out an UNMAP in part, as a volume does with parts of clusters: what the guest reads
//! there afterwards it reads on the copy, too.

use super::{BLOCK, drain, filled, image, wait_until};
use crate::{Mirror, Options, Phase};
use bdev::testing::{FaultBdev, Wrap, Wrapped};
use bdev::{Features, Finished, Io, Op, OwnedChannel, Submit};
use std::thread;

/// It leaves all as it was.
struct Skipping {
    write_zeroes: bool,
}

impl Wrap for Skipping {
    fn features(&self, of: Features) -> Features {
        Features { unmap_skips: true, write_zeroes: self.write_zeroes, ..of }
    }
    fn instead(&self, io: &Io) -> Option<Submit> {
        (io.op == Op::Unmap).then_some(Submit::Done(Ok(())))
    }
}

#[test]
fn both_read_the_same_after_an_unmap_that_the_source_would_not_carry_out() {
    for write_zeroes in [true, false] {
        let disk = FaultBdev::with_image("source", BLOCK as u32, image(0));
        let copy = FaultBdev::with_image("destination", BLOCK as u32, image(9));
        let source = Wrapped::new(disk.clone(), Skipping { write_zeroes });
        let mirror = Mirror::new(source, copy.clone(), Options::default()).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| mirror.run());
            let ready = || mirror.progress().phase == Phase::Ready;
            wait_until("ready", ready);
            let mut channel = OwnedChannel::open(&*mirror, 4).unwrap();
            let mut over: Vec<Finished<u64>> = Vec::new();
            over.extend(channel.submit(Op::Write, 1000, 16, Some(filled(16, 7)), 1));
            over.extend(drain(&mut channel));
            over.extend(channel.submit(Op::Unmap, 1003, 5, None, 2));
            over.extend(drain(&mut channel));
            assert!(over.len() == 2 && over.iter().all(|f| f.result.is_ok()));
            wait_until("ready again", ready);
            assert!(disk.image() == copy.image(), "they differ, write zeroes {write_zeroes}");
            let zeros = disk.image()[1003 * BLOCK] == 0;
            assert_eq!(zeros, write_zeroes, "the source does what it can");
            mirror.stop();
        });
    }
}
