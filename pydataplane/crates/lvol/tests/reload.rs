//! An lvstore that is loaded anew: what was reserved for a thick volume that is being zeroed stays its own, and a
//! snapshot whose record seemed to fail is one.

use crate::common::{CLUSTER, PER_CLUSTER, Rig, read_tags, tagged};
use bdev::testing::Fault;
use bdev::{Bdev, IoError, Op};
use lvol::{Error, NewLvol};
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(120);
/// What is zeroed.
const LARGE: u64 = 90;

fn one(op: Op, error: IoError) -> Fault {
    Fault { count: 1, ..Fault::always(op, error) }
}

/// Lets the disk go on, whatever becomes of the test.
struct Release<'a>(&'a Rig);

impl Drop for Release<'_> {
    fn drop(&mut self) {
        self.0.disk.release();
    }
}

/// Has the zeros of a new volume, or of one that grows, held up, does `meanwhile`, and lets them go on.
fn zeroing<R>(rig: &Rig, grow: bool, meanwhile: impl FnOnce() -> R) -> (Result<(), Error>, R) {
    // The channel that is opened next, to write the zeros, is the one that is held up.
    rig.disk.defer(Some(1));
    rig.disk.hold();
    std::thread::scope(|scope| {
        let release = Release(rig);
        let long = scope.spawn(|| match grow {
            false => rig.create("large", LARGE, false).map(drop),
            true => rig.lvstores.resize_lvol("lvs0/large", LARGE * CLUSTER).map(drop),
        });
        let end = Instant::now() + LONG;
        while rig.disk.held() == 0 {
            assert!(Instant::now() < end, "zeroing begins");
            std::thread::sleep(Duration::from_millis(1));
        }
        rig.disk.defer(None);
        let found = meanwhile();
        drop(release);
        (long.join().unwrap(), found)
    })
}

fn reload(rig: &Rig) {
    let latch = rig.disk.flush_latch().unwrap();
    latch.clear();
    assert_eq!(rig.lvstores.reload_on(latch).unwrap(), ["lvs0"]);
}

fn free(rig: &Rig) -> u64 {
    rig.lvstores.lvstore("lvs0").unwrap().free_clusters
}

/// All that is free becomes a volume's, and is written.
fn take_the_rest(rig: &Rig) -> u64 {
    let rest = free(rig);
    rig.create("rest", rest, false).unwrap();
    rig.open("lvs0/rest").write(0, &tagged(7, rest * PER_CLUSTER)).unwrap();
    rest
}

#[test]
fn nobody_gets_what_is_being_zeroed_for_another() {
    for grow in [false, true] {
        let rig = Rig::with_lvs(200);
        if grow {
            rig.create("large", 1, false).unwrap();
        }
        let (zeroed, rest) = zeroing(&rig, grow, || {
            let before = free(&rig);
            // A full disk below stops the lvstore; nothing that was written is lost.
            rig.disk.inject(one(Op::Write, IoError::NoSpace));
            assert!(rig.create("other", 1, true).is_err());
            reload(&rig);
            assert_eq!(free(&rig), before);
            take_the_rest(&rig)
        });
        zeroed.unwrap();
        let whole = read_tags(&mut rig.open("lvs0/rest"), 0, rest * PER_CLUSTER);
        assert!(whole.iter().all(|tag| *tag == 7), "zeros in another volume");
        let zeros = read_tags(&mut rig.open("lvs0/large"), 0, LARGE * PER_CLUSTER);
        assert!(zeros.iter().all(|tag| *tag == 0), "another volume's data");
        let listed = rig.lvstores.lvols(None).unwrap();
        let rig = rig.restart();
        rig.lvstores.examine("disk0").unwrap().unwrap();
        assert_eq!(rig.lvstores.lvols(None).unwrap(), listed);
    }
}

#[test]
fn zeros_that_a_failed_flush_may_have_lost_are_no_volume_s_and_their_clusters_are_free_again() {
    for (grow, stops) in [(false, false), (false, true), (true, true)] {
        let rig = Rig::with_lvs(200);
        rig.create("guest", 1, false).unwrap();
        if grow {
            rig.create("large", 1, false).unwrap();
        }
        let before = free(&rig);
        let (zeroed, ()) = zeroing(&rig, grow, || {
            if stops {
                rig.disk.inject(one(Op::Write, IoError::WriteMedium));
                assert!(rig.create("other", 1, true).is_err());
                reload(&rig);
            } else {
                rig.disk.inject(one(Op::Flush, IoError::Flush));
                assert!(rig.open("lvs0/guest").flush().is_err());
                rig.disk.flush_latch().unwrap().clear().unwrap();
            }
        });
        let e = zeroed.unwrap_err();
        assert!(e.to_string().contains("a flush of bdev disk0 failed"), "{e}");
        assert_eq!(free(&rig), before, "{e}");
        take_the_rest(&rig);
    }
}

#[test]
fn what_is_zeroed_when_a_flush_fails_is_free_again_once_that_is_cleared() {
    let rig = Rig::with_lvs(200);
    rig.create("guest", 1, false).unwrap();
    let before = free(&rig);
    let (zeroed, ()) = zeroing(&rig, false, || {
        rig.disk.inject(one(Op::Flush, IoError::Flush));
        assert!(rig.open("lvs0/guest").flush().is_err());
    });
    assert!(zeroed.is_err());
    rig.disk.flush_latch().unwrap().clear().unwrap();
    assert_eq!(free(&rig), before);
}

/// The record of a snapshot fails, and is there all the same: the volume goes on above what is the snapshot's.
#[test]
fn a_volume_goes_on_of_which_a_load_finds_a_snapshot() {
    let mut found = 0;
    for (skip, op) in (0..3).flat_map(|skip| [(skip, Op::Flush), (skip, Op::Write)]) {
        let rig = Rig::with_lvs(60);
        rig.create("a", 4, true).unwrap();
        let mut a = rig.open("lvs0/a");
        a.write(0, &tagged(1, 2 * PER_CLUSTER)).unwrap();
        a.flush().unwrap();
        rig.disk.inject(Fault { skip, count: 1, ..Fault::always(op, IoError::WriteMedium) });
        let taken = rig.lvstores.snapshot("lvs0/a", &NewLvol::named("s"));
        rig.disk.clear_faults();
        let latch = rig.disk.flush_latch().unwrap();
        latch.clear();
        _ = rig.lvstores.reload_on(latch).unwrap();
        if taken.is_ok() || rig.registry.get("lvs0/s").is_none() {
            continue;
        }
        found += 1;
        // A cluster that the snapshot has, and one that nobody has.
        for lba in [PER_CLUSTER, 3 * PER_CLUSTER] {
            a.write(lba, &tagged(2, 1)).unwrap();
        }
        let first_of_each = |name: &str| {
            let mut channel = rig.open(&format!("lvs0/{name}"));
            [0, 1, 2, 3].map(|at| read_tags(&mut channel, at * PER_CLUSTER, 1)[0])
        };
        assert_eq!(["a", "s"].map(first_of_each), [[1, 2, 0, 2], [1, 1, 0, 0]]);
        assert_eq!(rig.lvstores.check_lvstore("lvs0", false).unwrap().problems, []);
    }
    assert!(found > 0);
}
