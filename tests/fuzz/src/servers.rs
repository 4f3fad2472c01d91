//! What an NBD server can say: any handshake, then replies to requests, in any pieces, to none, too early or
//! twice, and the end of the connection at any point.

use crate::input::Input;
use bdev::{Io, Op};
use guestmem::{IoVec, Sg};
use nbd::{Conversation, Handshake, Note, Rules};

/// I/Os at a time at most, each with memory of its own.
const IOS: usize = 12;
const BLOCK: usize = 512;
/// Blocks of an I/O at most.
const BLOCKS: usize = 8;
const MEMORY: usize = BLOCK * BLOCKS;
/// Bytes of a request and of a reply.
const REQUEST: usize = 28;
const REPLY: usize = 16;
/// What a handshake reads at once at most.
const READ_MAX: usize = 8192;

/// A conversation, and what is to be true of it.
struct Model {
    talk: Conversation,
    memory: Vec<[u8; MEMORY]>,
    runs: Vec<[IoVec; 1]>,
    /// By number: what is in flight.
    asked: [Option<Op>; IOS],
    /// Handles that were seen in requests.
    handles: Vec<[u8; 8]>,
    /// What the server is about to say.
    said: Vec<u8>,
}

/// A handshake of these bytes, and a conversation that they lead. No input may make it panic, end an I/O twice
/// or never, or have bytes of the server come to other memory than that of a READ in flight.
pub fn servers(data: &[u8]) {
    let mut input = Input(data);
    let len = usize::from(input.u16());
    shake_hands(input.bytes(len % 1024));
    let rules = Rules { block_size: BLOCK as u32, payload_max: 1024, write_through: false };
    let mut memory = vec![[0u8; MEMORY]; IOS];
    // SAFETY: the memory stays in place as long as the conversation.
    let run = |bytes: &mut [u8; MEMORY]| unsafe { [IoVec::new(bytes.as_mut_ptr(), MEMORY)] };
    let runs = memory.iter_mut().map(run).collect();
    let mut model = Model {
        talk: Conversation::new(rules),
        memory,
        runs,
        asked: [None; IOS],
        handles: Vec::new(),
        said: Vec::new(),
    };
    while !input.is_empty() {
        match input.u8() % 8 {
            0 | 1 => model.submit(&mut input),
            2 | 3 => model.send(&mut input),
            4 => model.say(&mut input),
            5 | 6 => model.hear(&mut input),
            _ => model.end_connection(input.once_in(3)),
        }
        model.collect();
    }
    model.end_connection(true);
    model.collect();
    assert!(model.asked.iter().all(Option::is_none), "an I/O has not ended");
    assert_eq!(model.talk.in_flight(), 0);
}

fn shake_hands(mut bytes: &[u8]) {
    let (mut handshake, mut answer) = (Handshake::new("e"), Vec::new());
    loop {
        let wants = handshake.wants();
        assert!((1..=READ_MAX).contains(&wants));
        let Some((next, rest)) = bytes.split_at_checked(wants) else { return };
        bytes = rest;
        match handshake.take(next, &mut answer) {
            Ok(None) => {}
            Ok(Some(terms)) => {
                assert!(terms.size <= i64::MAX as u64);
                for block_size in [None, Some(512), Some(4096)] {
                    if let Ok(geometry) = terms.geometry(block_size) {
                        assert!(matches!(geometry.block_size, 512 | 4096));
                        assert!(geometry.bytes() <= terms.size);
                        let features = terms.features(&geometry, false, false);
                        assert!(!features.unmap_zeroes);
                        assert!(terms.can_replace(&terms, 4096, terms.size / 4096).is_ok());
                    }
                }
                return;
            }
            Err(e) => return assert!(!e.to_string().chars().any(char::is_control)),
        }
    }
}

impl Model {
    fn submit(&mut self, input: &mut Input<'_>) {
        let op = Op::ALL[usize::from(input.u8()) % Op::COUNT];
        let blocks = u64::from(input.below(BLOCKS as u16)) + 1;
        let Some(number) = self.asked.iter().position(Option::is_none) else { return };
        let len = blocks as usize * BLOCK;
        // SAFETY: the memory stays in place as long as the conversation.
        self.runs[number] = unsafe { [IoVec::new(self.memory[number].as_mut_ptr(), len)] };
        let sg = match op {
            // SAFETY: as above, and so do the runs, which are not changed before the I/O has ended.
            Op::Read | Op::Write => unsafe { Sg::new(&self.runs[number]) },
            Op::Flush | Op::Unmap | Op::WriteZeroes => Sg::EMPTY,
        };
        let io = Io { op, fua: false, lba: 8 * number as u64, blocks, sg, tag: number as u64 };
        assert!(self.talk.submit(&io, Note::default()), "there is room for more");
        self.asked[number] = Some(op);
    }

    /// The I/O in whose memory a run lies.
    fn owner_of(&self, run: &IoVec) -> Option<usize> {
        let (begin, base) = (run.base().addr(), self.memory.as_ptr().addr());
        let end = base + IOS * MEMORY;
        (base..end).contains(&begin).then(|| {
            let number = (begin - base) / MEMORY;
            assert!(begin + run.len() <= base + (number + 1) * MEMORY, "beyond its memory");
            number
        })
    }

    fn send(&mut self, input: &mut Input<'_>) {
        let mut runs = [IoVec::EMPTY; 24];
        let room = usize::from(input.u8()) % runs.len() + 1;
        let (count, bytes) = self.talk.to_send(&mut runs[..room]);
        assert_eq!(bytes, runs[..count].iter().map(IoVec::len).sum::<usize>());
        for run in &runs[..count] {
            match self.owner_of(run) {
                Some(number) => assert_eq!(self.asked[number], Some(Op::Write)),
                None if run.len() == REQUEST => {
                    let mut handle = [0; 8];
                    // SAFETY: a header of a request, 28 bytes that stay as they are.
                    let header = unsafe { std::slice::from_raw_parts(run.base(), REQUEST) };
                    handle.copy_from_slice(&header[8..16]);
                    self.handles.push(handle);
                }
                None => assert!(run.len() < REQUEST),
            }
        }
        let sent = match input.u8() {
            // All of it, mostly.
            all if all < 160 => bytes,
            _ => usize::from(input.u16()) % (bytes + 1),
        };
        if self.talk.was_sent(sent).is_err() {
            self.end_connection(input.once_in(2));
        }
    }

    /// The server makes up something.
    fn say(&mut self, input: &mut Input<'_>) {
        if self.handles.is_empty() || input.once_in(8) {
            let len = usize::from(input.u8()) % 40;
            self.said.extend(input.bytes(len));
            return;
        }
        let which = usize::from(input.u8()) % self.handles.len();
        let handle = match input.once_in(8) {
            true => self.handles[which],
            false => self.handles.swap_remove(which),
        };
        let error: u32 = match input.u8() % 16 {
            0 => 5,
            1 => 28,
            2 => 108,
            3 => input.u32(),
            _ => 0,
        };
        self.said.extend([0x67, 0x44, 0x66, 0x98]);
        self.said.extend(error.to_be_bytes());
        self.said.extend(handle);
        // Data, as it may be.
        let data = usize::from(input.u8() % 4) * BLOCK;
        self.said.resize(self.said.len() + data, input.u8());
    }

    fn hear(&mut self, input: &mut Input<'_>) {
        let mut runs = [IoVec::EMPTY; 4];
        let count = self.talk.room(&mut runs);
        let mut most = match input.u8() {
            all if all < 160 => usize::MAX,
            few => usize::from(few) % REPLY + 1,
        };
        let mut came = 0;
        for run in &runs[..count] {
            if let Some(number) = self.owner_of(run) {
                assert_eq!(self.asked[number], Some(Op::Read), "its memory is not to be written");
            }
            let bytes = run.len().min(self.said.len()).min(most);
            // SAFETY: the run is memory for so many bytes.
            unsafe { std::ptr::copy_nonoverlapping(self.said.as_ptr(), run.base(), bytes) };
            self.said.drain(..bytes);
            most -= bytes;
            came += bytes;
        }
        if came > 0 && self.talk.was_received(came).is_err() {
            self.end_connection(input.once_in(2));
        }
    }

    fn end_connection(&mut self, fails: bool) {
        self.said.clear();
        self.handles.clear();
        match fails {
            true => self.talk.fail_all(),
            false => self.talk.begin_anew(),
        }
    }

    fn collect(&mut self) {
        _ = self.talk.take_flush_error();
        while let Some(ended) = self.talk.next_ended() {
            let op = self.asked[ended.io.tag as usize].take();
            assert_eq!(op, Some(ended.io.op), "an I/O ended twice");
        }
        let in_flight = self.asked.iter().flatten().count();
        assert_eq!(self.talk.in_flight(), in_flight);
    }
}
