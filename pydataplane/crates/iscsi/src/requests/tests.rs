use super::*;
use crate::sense::About;
use crate::unit::{Capacity, Limits, Mode, Provisioning};
use bdev::{Completions, Geometry, Io};
use reactor::IoContext;
use std::sync::Arc;

const GOOD: Answer =
    Answer { status: 0, about: About::Nothing, key: 0, code: 0, missing: 0, excess: false };
const BUSY: Answer = Answer { status: 8, ..GOOD };

fn check(key: u8, code: u16) -> Answer {
    Answer { status: 2, about: About::Current, key, code, ..GOOD }
}

/// A device without a target, whose I/Os are of one channel.
struct Rig {
    requests: Requests,
    latch: FlushLatch,
    completions: Arc<Completions>,
    memory: Box<[u8]>,
    run: Vec<Box<[IoVec]>>,
    _io: IoContext,
}

impl Rig {
    fn new() -> Rig {
        Rig::with(false, Limits { transfer: 8, unmapped: 4, ..Limits::default() })
    }

    fn with(write_through: bool, limits: Limits) -> Rig {
        let geometry = Geometry { block_size: 512, physical_block_size: 512, num_blocks: 1 << 20 };
        let unit = Unit {
            capacity: Capacity { geometry, thin: true, unmapped_is_zero: true },
            mode: Mode { write_protected: false, fua: true, cache: true },
            limits,
            provisioning: Provisioning { unmap: true, same: true },
            same: true,
            identity: uuid::Uuid::nil(),
        };
        let io = IoContext::new().unwrap();
        Rig {
            requests: Requests::new(unit, write_through),
            latch: FlushLatch::default(),
            completions: Completions::new(&io),
            memory: vec![0; 1 << 20].into(),
            run: Vec::new(),
            _io: io,
        }
    }

    /// An I/O whose data is in runs of so many bytes.
    fn io_in(&mut self, tag: u64, op: Op, lba: u64, blocks: u64, run: usize) -> Io {
        let bytes = blocks as usize * 512;
        // SAFETY: this rig's memory, which lives as long as its I/Os; nobody reads or writes it.
        let part = |at| unsafe {
            IoVec::new(self.memory.as_ptr().add(at).cast_mut(), run.min(bytes - at))
        };
        let runs: Box<[IoVec]> = (0..bytes).step_by(run).map(part).collect();
        // SAFETY: as above; the list is boxed.
        let sg = unsafe { Sg::new(&runs) };
        self.run.push(runs);
        let sg = if matches!(op, Op::Read | Op::Write) { sg } else { Sg::EMPTY };
        Io { op, fua: false, lba, blocks, sg, tag }
    }

    fn come(&mut self, tag: u64, op: Op, lba: u64, blocks: u64) {
        let io = self.io_in(tag, op, lba, blocks, 4096);
        self.give(io, WriteHow::Plain);
    }

    fn give(&mut self, io: Io, how: WriteHow) {
        let mut next = Some(self.completions.request(io, how));
        self.requests.take(|| next.take());
        assert!(next.is_none(), "it was taken");
    }

    /// Sends all that is ready: the places, and the first bytes of the blocks.
    fn send(&mut self) -> Vec<(u16, Cdb)> {
        let mut sent = Vec::new();
        while let Some(at) = self.requests.next_ready() {
            match self.requests.part(at) {
                Ok(part) => sent.push((at, part.cdb)),
                Err(error) => self.requests.finish(at, Err(error)),
            }
        }
        sent
    }

    fn answer(&mut self, at: u16, answer: Answer) {
        self.requests.answered(at, answer, None, &self.latch);
        self.requests.take(|| None);
    }

    fn ended(&self) -> Vec<(u64, Result<(), IoError>)> {
        std::iter::from_fn(|| self.completions.take()).map(|over| (over.tag, over.result)).collect()
    }
}

fn lbas(sent: &[(u16, Cdb)]) -> Vec<u64> {
    sent.iter().map(|(_, cdb)| u64::from_be_bytes(cdb[2..10].try_into().unwrap())).collect()
}

#[test]
fn what_is_longer_than_a_command_is_sent_in_parts_one_after_the_other() {
    let mut rig = Rig::new();
    rig.come(7, Op::Write, 100, 20);
    for (lba, blocks) in [(100, 8), (108, 8), (116, 4)] {
        let sent = rig.send();
        assert_eq!((lbas(&sent), sent[0].1[13]), (vec![lba], blocks));
        assert!(rig.ended().is_empty());
        rig.answer(sent[0].0, GOOD);
    }
    assert_eq!(rig.ended(), [(7, Ok(()))]);
    assert!(rig.requests.is_empty());
}

#[test]
fn a_list_of_many_runs_is_sent_in_whole_blocks() {
    let mut rig = Rig::with(false, Limits::default());
    let io = rig.io_in(1, Op::Read, 0, 8, 2);
    rig.give(io, WriteHow::Plain);
    // 1024 runs of two bytes are four blocks.
    for lba in [0, 4] {
        let at = rig.requests.next_ready().unwrap();
        let part = rig.requests.part(at).unwrap();
        assert_eq!((part.cdb[9], part.cdb[13], part.runs.len()), (lba, 4, RUNS));
        rig.answer(at, GOOD);
    }
    assert_eq!(rig.ended(), [(1, Ok(()))]);
}

#[test]
fn two_changes_of_the_same_blocks_are_never_in_flight_together() {
    let mut rig = Rig::new();
    rig.come(1, Op::Write, 10, 4);
    rig.come(2, Op::Unmap, 13, 4);
    rig.come(3, Op::Write, 16, 4);
    let first = rig.send();
    assert_eq!(lbas(&first), [10]);
    // Reads, and changes of others, go beside them.
    rig.come(4, Op::Read, 13, 4);
    rig.come(5, Op::Write, 20, 1);
    assert_eq!(lbas(&rig.send()), [13, 20]);
    // Nor after a loss, and each as soon as the one before it is over.
    rig.requests.begin_anew();
    let again = rig.send();
    assert_eq!(lbas(&again), [10, 13, 20]);
    rig.answer(first[0].0, GOOD);
    let second = rig.send();
    assert_eq!((second.len(), second[0].1[0]), (1, 0x42));
    rig.answer(second[0].0, GOOD);
    assert_eq!(lbas(&rig.send()), [16]);
    assert_eq!(rig.ended(), [(1, Ok(())), (2, Ok(()))]);
}

#[test]
fn after_a_loss_only_what_was_not_answered_is_sent_again_in_order() {
    let mut rig = Rig::new();
    rig.come(1, Op::Write, 0, 16);
    rig.come(2, Op::Write, 100, 1);
    rig.come(3, Op::Flush, 0, 0);
    let sent = rig.send();
    assert_eq!(lbas(&sent), [0, 100, 0]);
    // The first part of the first; the second altogether.
    rig.answer(sent[0].0, GOOD);
    rig.answer(sent[1].0, GOOD);
    assert_eq!(lbas(&rig.send()), [8]);
    rig.requests.begin_anew();
    let sent = rig.send();
    assert_eq!((lbas(&sent), sent[1].1[0]), (vec![8, 0], 0x91));
    sent.iter().for_each(|(at, _)| rig.answer(*at, GOOD));
    assert_eq!(rig.ended(), [(2, Ok(())), (1, Ok(())), (3, Ok(()))]);
}

#[test]
fn a_comparison_is_never_sent_twice() {
    let mut rig = Rig::new();
    let io = rig.io_in(1, Op::Write, 5, 2, 4096);
    rig.give(Io { blocks: 1, ..io }, WriteHow::Compared);
    // Not sent yet, it is sent; sent, nobody knows what it came to.
    rig.requests.begin_anew();
    let sent = rig.send();
    assert_eq!((sent[0].1[0], sent[0].1[13]), (0x89, 1));
    rig.requests.begin_anew();
    assert_eq!(rig.ended(), [(1, Err(IoError::Aborted))]);
    assert!(rig.send().is_empty() && rig.requests.is_empty());
}

#[test]
fn a_lun_that_has_no_such_command_is_written_to_by_whoever_has_compared() {
    let mut rig = Rig::new();
    let io = rig.io_in(1, Op::Write, 5, 2, 512);
    let halves = io.sg.as_slice().iter().map(IoVec::base).collect::<Vec<_>>();
    rig.give(Io { blocks: 1, ..io }, WriteHow::Compared);
    let at = rig.requests.next_ready().unwrap();
    let sent: Vec<_> = rig.requests.part(at).unwrap().runs.iter().map(IoVec::base).collect();
    assert_eq!(sent, halves);
    rig.answer(at, check(5, 0x2000));
    assert!(rig.ended().is_empty());
    let at = rig.requests.next_ready().unwrap();
    let part = rig.requests.part(at).unwrap();
    assert_eq!((part.cdb[0], part.cdb[9], part.cdb[13]), (0x8A, 5, 1));
    assert_eq!(part.runs.iter().map(IoVec::base).collect::<Vec<_>>(), halves[1..]);
    rig.answer(at, GOOD);
    assert_eq!(rig.ended(), [(1, Ok(()))]);
}

#[test]
fn a_target_that_is_busy_has_a_command_again_for_a_limited_time() {
    let mut rig = Rig::new();
    rig.come(1, Op::Read, 0, 1);
    let sent = rig.send();
    rig.answer(sent[0].0, BUSY);
    assert!(rig.ended().is_empty());
    let due = rig.requests.next_due().unwrap();
    std::thread::sleep(due.saturating_duration_since(Instant::now()));
    let sent = rig.send();
    assert_eq!(sent.len(), 1);
    rig.requests.answered(sent[0].0, check(6, 0x2900), Some(Duration::ZERO), &rig.latch);
    assert_eq!(rig.ended(), [(1, Err(IoError::ReadMedium))]);
}

#[test]
fn zeros_and_holes_are_made_durable_where_writes_are() {
    for (op, opcode) in [(Op::WriteZeroes, 0x93), (Op::Unmap, 0x42)] {
        let mut rig = Rig::with(true, Limits { unmapped: 100, ..Limits::default() });
        rig.come(1, op, 8, 4);
        let sent = rig.send();
        assert_eq!(sent[0].1[0], opcode);
        rig.answer(sent[0].0, GOOD);
        let sent = rig.send();
        assert_eq!((sent[0].1[0], lbas(&sent), sent[0].1[13]), (0x91, vec![8], 4));
        rig.answer(sent[0].0, check(3, 0x0C00));
        assert_eq!(rig.ended(), [(1, Err(IoError::Flush))]);
        assert_eq!(rig.latch.failures(), 1);
    }
    let mut rig = Rig::with(true, Limits::default());
    rig.come(1, Op::Write, 0, 1);
    assert_eq!(rig.send()[0].1[1], 8, "a write is durable by itself");
}

#[test]
fn zeros_that_were_not_made_durable_are_written_again_after_a_loss() {
    for op in [Op::WriteZeroes, Op::Unmap] {
        let mut rig = Rig::with(false, Limits { unmapped: 100, ..Limits::default() });
        let io = rig.io_in(1, op, 8, 4, 4096);
        rig.give(Io { fua: true, ..io }, WriteHow::Plain);
        for _ in 0..2 {
            let sent = rig.send();
            assert!(matches!(sent[0].1[0], 0x93 | 0x42), "{sent:?}");
            rig.answer(sent[0].0, GOOD);
            let sent = rig.send();
            assert_eq!(sent[0].1[0], 0x91);
            rig.requests.begin_anew();
            assert!(rig.ended().is_empty());
        }
    }
}

#[test]
fn a_comparison_that_is_aborted_is_not_sent_again_one_that_was_refused_is() {
    for (answer, again) in [
        (check(0xB, 0x4700), false),
        (Answer { status: 0x40, ..GOOD }, false),
        (check(6, 0x2900), true),
        (BUSY, true),
        (Answer { status: 0x28, ..GOOD }, true),
    ] {
        let mut rig = Rig::new();
        let io = rig.io_in(1, Op::Write, 5, 2, 4096);
        rig.give(Io { blocks: 1, ..io }, WriteHow::Compared);
        let sent = rig.send();
        rig.answer(sent[0].0, answer);
        let ended = rig.ended();
        assert_eq!(ended.is_empty(), again, "{answer:?}");
        assert!(again || ended == [(1, Err(IoError::Aborted))]);
    }
}

#[test]
fn the_oldest_command_without_an_answer_is_known_and_ended_alone() {
    let mut rig = Rig::new();
    assert!(rig.requests.oldest_sent().is_none());
    rig.come(1, Op::Read, 0, 1);
    let first = rig.send();
    let oldest = rig.requests.oldest_sent().unwrap();
    rig.come(2, Op::Read, 8, 1);
    let second = rig.send();
    // Others are answered: that makes it no younger.
    rig.answer(second[0].0, GOOD);
    rig.requests.is_answered();
    assert_eq!(rig.requests.oldest_sent(), Some(oldest));
    rig.come(3, Op::Read, 16, 1);
    std::thread::sleep(Duration::from_millis(1));
    rig.send();
    rig.requests.fail_sent_before(oldest);
    assert_eq!(rig.ended(), [(2, Ok(())), (1, Err(IoError::ReadMedium))]);
    rig.requests.begin_anew();
    assert_eq!(lbas(&rig.send()), [16]);
    assert_eq!(first.len(), 1);
}

#[test]
fn a_change_is_unflushed_until_a_flush_that_came_after_its_answer() {
    let mut rig = Rig::new();
    rig.come(1, Op::Write, 0, 1);
    let write = rig.send();
    // That flush need not have it.
    rig.come(2, Op::Flush, 0, 0);
    let flush = rig.send();
    rig.answer(write[0].0, GOOD);
    rig.answer(flush[0].0, GOOD);
    assert!(rig.requests.take_unflushed() && !rig.requests.take_unflushed());
    rig.come(3, Op::Write, 0, 1);
    let write = rig.send();
    rig.answer(write[0].0, GOOD);
    rig.come(4, Op::Flush, 0, 0);
    let flush = rig.send();
    rig.answer(flush[0].0, GOOD);
    assert!(!rig.requests.take_unflushed());
    let mut rig = Rig::with(true, Limits::default());
    rig.come(1, Op::Write, 0, 1);
    let write = rig.send();
    rig.answer(write[0].0, GOOD);
    assert!(!rig.requests.take_unflushed(), "it was made durable");
}

#[test]
fn a_lun_that_cannot_flush_keeps_nothing_in_a_cache() {
    let mut rig = Rig::new();
    rig.come(1, Op::Flush, 0, 0);
    let sent = rig.send();
    rig.answer(sent[0].0, check(5, 0x2000));
    assert_eq!(rig.ended(), [(1, Ok(()))]);
    assert!(!rig.latch.is_set());
}

#[test]
fn nobody_waits_where_there_is_nothing_and_each_waits_from_when_it_came() {
    let mut rig = Rig::with(false, Limits::default());
    // Its one block is in more runs than a command takes.
    let io = rig.io_in(1, Op::Read, 0, 8, 1);
    rig.requests.unit.capacity.geometry.block_size = 4096;
    rig.give(Io { blocks: 1, ..io }, WriteHow::Plain);
    assert!(rig.requests.waits_since().is_some());
    rig.send();
    assert_eq!(rig.ended(), [(1, Err(IoError::Resources))]);
    assert!(rig.requests.waits_since().is_none());
    let before = Instant::now();
    rig.come(2, Op::Flush, 0, 0);
    assert!(rig.requests.waits_since().unwrap() >= before);
}

#[test]
fn all_that_waits_fails_when_it_is_given_up() {
    let mut rig = Rig::new();
    rig.come(1, Op::Write, 0, 1);
    rig.come(2, Op::Read, 0, 1);
    rig.send();
    rig.come(3, Op::Flush, 0, 0);
    rig.come(4, Op::Write, 0, 1);
    assert!(rig.requests.waits_since().is_some());
    rig.requests.fail_all();
    let mut ended = rig.ended();
    ended.sort_by_key(|(tag, _)| *tag);
    let (write, read) = (Err(IoError::WriteMedium), Err(IoError::ReadMedium));
    assert_eq!(ended, [(1, write), (2, read), (3, Err(IoError::Flush)), (4, write)]);
    assert!(rig.requests.is_empty() && rig.requests.waits_since().is_none());
}
