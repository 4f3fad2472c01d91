//! Copies beside whoever takes one of their units away.

use super::*;
use crate::LunOptions;
use bdev::Null;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::Instant;

/// How long one that works with a unit waits for the next one to begin.
const AMID: Duration = Duration::from_millis(20);
const DEADLINE: Duration = Duration::from_secs(60);

/// Two work with a unit in turns, each until the other one has begun: so there is always one, as long as they do not
/// give way to whoever takes the unit away.
fn unit_goes_amid(
    work: impl Fn(&mut Party, &Run, &dyn Fn()) -> Result<(), Ended> + Sync,
) -> Result<(), &'static str> {
    let disk = Null::create("n0", 512, 8, None).unwrap();
    let unit = LunShared::new(disk, LunOptions::default()).unwrap();
    let (begun, over) = (AtomicUsize::new(0), AtomicBool::new(false));
    let amid = || {
        let (mine, since) = (begun.fetch_add(1, Ordering::SeqCst) + 1, Instant::now());
        while begun.load(Ordering::SeqCst) == mine && since.elapsed() < AMID {
            thread::yield_now();
        }
    };
    let gone = Ended::Failed(aborted(Code::COPY_TARGET_NOT_REACHABLE));
    thread::scope(|scope| {
        let (tell, told) = sync_channel(1);
        for _ in 0..2 {
            scope.spawn(|| {
                let run = Run::new(&unit, &Arc::new(Operation::new(&Cdb([0; 32]), None, false)));
                let mut party = Party::new(&unit, false).unwrap();
                while !over.load(Ordering::SeqCst) {
                    match work(&mut party, &run, &amid) {
                        Ok(()) => {}
                        ended => return assert_eq!(ended, Err(gone)),
                    }
                }
            });
        }
        while begun.load(Ordering::SeqCst) < 4 {
            thread::yield_now();
        }
        let unit = &unit;
        scope.spawn(move || {
            unit.set_replaced(true);
            tell.send(()).unwrap();
        });
        let went = told.recv_timeout(DEADLINE);
        over.store(true, Ordering::SeqCst);
        went.map_err(|_| "it waits for as long as they go on")
    })
}

#[test]
fn a_unit_goes_while_copies_take_turns_with_it() {
    let io = |party: &mut Party, run: &Run, amid: &dyn Fn()| {
        party.work(run, None, |_| {
            amid();
            Ok(())
        })
    };
    assert_eq!(unit_goes_amid(io), Ok(()));
}

#[test]
fn a_unit_goes_while_others_share_what_it_has_in_turns() {
    let held = |party: &mut Party, run: &Run, amid: &dyn Fn()| {
        let done = party.held(run, || {
            amid();
            Ok(())
        })?;
        if done.is_none() {
            thread::sleep(PAUSE);
        }
        Ok(())
    };
    assert_eq!(unit_goes_amid(held), Ok(()));
}
