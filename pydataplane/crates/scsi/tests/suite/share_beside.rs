//! Copies that share clusters beside what others do with the units, and over what their token stands for.

use crate::copy::{NOT_REACHABLE, cdb, cscd, list, segment};
use crate::rig::*;
use crate::share::{CLUSTER, Sharer};
use crate::token::{REVOKED, token, write, write_list};
use crate::unit::{BLOCKS, DEADLINE, Unit, disk, medium, on, two_of};
use bdev::Bdev;
use bdev::testing::FaultBdev;
use scsi::Outcome;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

/// The destination's blocks are kept, for a COMPARE AND WRITE whose read does not end. The copy waits for that, and
/// whoever takes away the source meanwhile does not.
#[test]
fn a_source_goes_while_its_copy_waits_for_blocks_of_the_destination() {
    let (source, late) = (disk(0), FaultBdev::new("late", 512, BLOCKS));
    let sharer = Sharer::on(late.clone(), &source, Ok(BLOCKS), Box::new(|| ()));
    let to: Arc<dyn Bdev> = sharer.clone();
    let mut units = two_of([source, to.clone()]);
    late.defer(Some(1));
    let mut other = Unit::new(&to, on("other:0"));
    late.defer(None);
    late.hold();
    let mut compare = cdb16(0x89, 0, CLUSTER, 0);
    compare[13] = 1;
    let (mut comparing, _both) = other.begin(2, &compare, &[0; 1024]);
    // It keeps its blocks, and then reads.
    let (begun, mut done) = (Instant::now(), Vec::with_capacity(1));
    while late.held() == 0 {
        assert!(begun.elapsed() < DEADLINE, "it does not read");
        done.clear();
        other.lun.poll(&mut done);
        for of in &done {
            assert_eq!(other.lun.resume(&mut comparing, of.result), Outcome::Pending);
        }
    }

    let cscds = [cscd(&units[0].0, false), cscd(&units[1].0, false)];
    let order = list(&cscds, &[segment((0, 0), (1, CLUSTER), CLUSTER as u16)]);
    let shared = Arc::clone(&units[0].1.shared);
    let copying = &mut units[1].1;
    let (mut task, _out) = copying.begin(1, &cdb(order.len()), &order);
    // It begins, and waits.
    for _ in 0..20 {
        done.clear();
        copying.lun.poll(&mut done);
        for of in &done {
            assert_eq!(copying.lun.resume(&mut task, of.result), Outcome::Pending);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let (gone, is_gone) = sync_channel(1);
    let going = std::thread::spawn(move || {
        shared.set_replaced(true);
        gone.send(()).unwrap();
    });
    let went = is_gone.recv_timeout(DEADLINE);
    late.release();
    let outcome = other.until_over(&mut comparing, Outcome::Pending);
    Answer { outcome, data: Vec::new() }.good();
    let outcome = copying.until_over(&mut task, Outcome::Pending);
    going.join().unwrap();
    assert!(went.is_ok(), "it waited for the destination");
    assert_eq!(Answer { outcome, data: Vec::new() }.sense(), NOT_REACHABLE);
    assert_eq!(sharer.asked(), []);
}

/// What is written within the blocks of the token revokes it: that is the copy's own write, which is done.
#[test]
fn a_copy_into_the_blocks_of_its_token_is_done_and_revokes_it() {
    let source = disk(0);
    let sharer = Sharer::on(disk(1), &source, Ok(BLOCKS), Box::new(|| ()));
    let mut units = two_of([source, sharer.clone()]);
    let mut expected = medium(&units[1].0);
    let unit = &mut units[1].1;
    let token = token(unit, &[(0, 10 * CLUSTER as u32)]);
    let using = write_list(0, 0, &token, &[(5 * CLUSTER, 2 * CLUSTER as u32)]);
    write(unit, 2, &using).good();
    let bytes = |clusters: u64| (clusters * CLUSTER) as usize * 512;
    expected.copy_within(0..bytes(2), bytes(5));
    assert!(medium(&units[1].0) == expected);
    let unit = &mut units[1].1;
    assert_eq!(write(unit, 3, &using).sense(), REVOKED);
    assert_eq!(sharer.asked(), []);
}
