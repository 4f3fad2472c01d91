//! A queue is to move, some of whose requests were taken just now and wait for others.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};

use bdev::testing::{FaultBdev, Wrap, Wrapped};
use bdev::{Io, Submit};

use crate::guest::*;
use crate::host::*;
use crate::inflight::tracked_of;
use crate::moving::{carried_out, moves, places};
use crate::ordered::{good, pass_by, read};

const SIMPLE: u8 = 0;
const ORDERED: u8 = 1;
/// The block whose READ stands still.
const STOPS: u64 = 77;

/// A disk at which a reactor stands still in the midst of what it takes.
struct Stops {
    at: Mutex<(Sender<()>, Receiver<()>)>,
}

impl Wrap for Stops {
    fn instead(&self, io: &Io) -> Option<Submit> {
        if io.lba == STOPS {
            let at = self.at.lock().unwrap_or_else(PoisonError::into_inner);
            at.0.send(()).unwrap();
            _ = at.1.recv();
        }
        None
    }
}

#[test]
fn a_queue_does_not_move_in_the_turn_in_which_an_ordered_request_of_it_was_taken() {
    let (host, gate) = Host::gated(2);
    host.malloc("disk");
    host.add(1, "disk");
    let (stopped, stops) = channel();
    let (go_on, goes_on) = channel();
    let stop = Stops { at: Mutex::new((stopped, goes_on)) };
    host.registry.register(Wrapped::new(FaultBdev::new("stops", 512, 8192), stop)).unwrap();
    host.add(2, "stops");
    let (mut guest, _region) = tracked_of(&host, 4);
    (0..3).for_each(|target| guest.ready(target));
    assert_eq!(places(&host), [(2, 0), (3, 1)]);
    for _ in 0..10 {
        gate.shut();
        let first = read(&mut guest, SIMPLE, 3, 0);
        gate.wait_for(1);
        pass_by(&mut guest, 3);
        // In one batch.
        let kept = host.keep(0);
        let ordered = read(&mut guest, ORDERED, 2, 1);
        let seen = guest.submit(2, flat(2), 2, &rw10(0x28, STOPS as u32, 1), &[], 512);
        drop(kept);
        stops.recv_timeout(DEADLINE).unwrap();
        // The reactor has this message when its turn is over.
        host.controllers.move_queue("vm0", 2, 1);
        std::thread::sleep(std::time::Duration::from_millis(20));
        go_on.send(()).unwrap();
        good(&mut guest, &seen);
        carried_out(&host);
        assert_eq!((places(&host), gate.waiting()), (vec![(2, 0), (3, 1)], 1));
        let later = read(&mut guest, SIMPLE, 3, 3);
        pass_by(&mut guest, 3);
        gate.open();
        [&first, &ordered, &later].into_iter().for_each(|request| good(&mut guest, request));
    }
    moves(&host, 2, 1);
}
