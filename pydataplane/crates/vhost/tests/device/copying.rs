//! Copies by the target, and what becomes of them as units come and go.

use bdev::Bdev;
use uuid::Uuid;

use crate::guest::*;
use crate::host::*;

/// EXTENDED COPY(LID1): its CDB and its list, from a block of one disk to that of another or of the same.
pub fn extended_copy(from: (Uuid, u64), to: (Uuid, u64), blocks: u16) -> (Vec<u8>, Vec<u8>) {
    let cscd = |disk: Uuid| {
        let head = [0xE4, 0, 0, 0, 1, 0xA, 0, 18, 0x10, 0];
        [&head[..], disk.as_bytes(), &[0, 0, 0, 0, 2, 0]].concat()
    };
    let [high, low] = blocks.to_be_bytes();
    let head = [2, 0, 0, 0x18, 0, 0, 0, 1, 0, 0, high, low];
    let segment = [&head[..], &from.1.to_be_bytes(), &to.1.to_be_bytes()].concat();
    let header = [[9, 0, 0, 64], [0; 4], [0, 0, 0, 28], [0; 4]].concat();
    let list = [header, cscd(from.0), cscd(to.0), segment].concat();
    let mut cdb = vec![0; 16];
    (cdb[0], cdb[13]) = (0x83, list.len() as u8);
    (cdb, list)
}

#[test]
fn the_detach_of_a_unit_ends_copies_from_it_and_to_it() {
    const FROM: u8 = 0;
    const TO: u8 = 1;
    for removed in [FROM, TO] {
        let host = Host::new(1);
        let (from, to) = (host.turnstile("from"), host.gate("to"));
        host.malloc("other");
        for (target, name) in [(FROM, "from"), (TO, "to"), (2, "other")] {
            host.add(target, name);
        }
        let mut guest = Guest::connect(&host.socket(), LINUX);
        (0..3).for_each(|queue| guest.start_queue(queue));
        (0..3).for_each(|target| guest.ready(target));
        let (cdb, list) = extended_copy((from.uuid(), 0), (to.uuid(), 0), 8192);
        // By a third one, which stays.
        let request = guest.submit(2, flat(2), 1, &cdb, &list, 0);
        from.wait_for(1);
        // It waits for a read of that unit which is under way, but not for ever.
        host.controllers.remove_target("vm0", removed.into()).unwrap();
        from.let_through(usize::MAX / 2);
        let (_, written) = guest.used(2);
        let reply = guest.reply(&request, written);
        assert_eq!(reply.response, 0);
        if removed == TO {
            // COPY ABORTED, COPY TARGET DEVICE NOT REACHABLE.
            assert_eq!((reply.sense[2] & 15, &reply.sense[12..14]), (0xA, &[0x0D, 0x02][..]));
            assert_eq!(to.writes(), 0);
        } else {
            // TASK ABORTED. What was read is written, and no more.
            assert_eq!(reply.status, 0x40);
            assert!(to.writes() <= 1);
        }
        guest.ready(2);
    }
}
