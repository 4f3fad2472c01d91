//! Commands and completions on one connection, which is one queue, without I/O: which bytes are to be sent, where
//! received ones go, and how each command ended. All that the controller says is checked here.
//!
//! Data goes straight between the caller's memory and the socket; where data has digests, what is sent is copied
//! before, as a guest may change it meanwhile, and the controller would end the connection of all for that. What is
//! received is looked at where it is: a guest that changes that harms itself.
//!
//! Nothing is allocated after [`Conversation::new`].

mod receive;
mod send;

use std::collections::VecDeque;

use bdev::Slots;
use crc_fast::{CrcAlgorithm, Digest};
use guestmem::Sg;

use crate::wire::{CAPSULE, COMMAND, Completion, DIGEST, HEAD_MAX, Terms, kind};

/// Bytes that are handed to the kernel, or asked for, at once; more would keep others of the thread waiting.
pub(crate) const AT_ONCE: usize = 256 << 10;

/// Runs of memory that the kernel takes in one call (UIO_MAXIOV).
pub(crate) const RUNS: usize = 1024;

/// Bytes of headers that are received at once, where no data comes between them.
pub(crate) const HEADERS: usize = 4096;

/// Opcode of the commands of fabrics, and bytes of data of their capsules, on any queue.
const FABRICS: u8 = 0x7F;
pub(crate) const FABRICS_IN_CAPSULE: usize = 8192;

/// Commands of a queue at a time at most.
pub const DEPTH: u16 = 128;

/// Bytes of which a digest is made at once.
const CHUNK: usize = 4096;

/// A bit beside the number of a slot in the identifier of a command, which changes with each use of the slot.
const GENERATION: u16 = 1 << 8;

/// What a command has beside itself.
#[derive(Clone, Copy, Debug)]
pub enum Data {
    /// Nothing.
    None,
    /// Data from the controller: so many bytes from there on.
    In(Sg, usize, usize),
    /// Data to the controller.
    Out(Sg, usize, usize),
}

impl Data {
    fn len(&self) -> usize {
        match self {
            Data::None => 0,
            Data::In(_, _, len) | Data::Out(_, _, len) => *len,
        }
    }
}

/// Why a connection is of no more use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// The type of a PDU is none that is sent to a host.
    #[error("it sent something that is no PDU for a host")]
    NotAPdu,
    /// The lengths of a PDU contradict each other, or what was agreed on.
    #[error("it sent a PDU of a length that cannot be")]
    Length,
    /// A header came damaged.
    #[error("the digest of a header is wrong")]
    HeaderDigest,
    /// No command of this identifier is in flight.
    #[error("it answered a command that was not made, or twice")]
    Unknown,
    /// It cannot have seen all of the command.
    #[error("it answered a command before that was sent")]
    Early,
    /// Data of a command without any, beyond its end, or not in order.
    #[error("it sent data that was not asked for, or at another place")]
    Data,
    /// A request for data of a command without any, beyond its end, or not in order.
    #[error("it asked for data that is not there, or at another place")]
    Transfer,
    /// A command succeeded of which data is missing.
    #[error("it ended a command before all of its data")]
    Short,
    /// It found an error in what was sent: the Fatal Error Status.
    #[error("it ends the connection for an error in what was sent (status {0})")]
    Terminated(u16),
}

/// The end of a command.
#[derive(Clone, Copy, Debug)]
pub struct Ended {
    /// As it was submitted.
    pub tag: u32,
    /// How it ended.
    pub completion: Completion,
    /// The digest of data that came was wrong.
    pub damaged: bool,
}

/// What a slot has to send.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Capsule,
    Data,
}

/// A PDU on its way out.
struct Out {
    kind: Kind,
    header: [u8; HEAD_MAX],
    /// Bytes of the header, up to the data.
    begin: usize,
    /// Where in the data of the command its own begins, and its bytes.
    offset: usize,
    len: usize,
    digest: [u8; DIGEST],
}

/// What the controller has asked for, as far as it is not on its way.
#[derive(Clone, Copy)]
struct Transfer {
    tag: u16,
    offset: usize,
    end: usize,
}

struct Slot {
    used: bool,
    tag: u32,
    data: Data,
    generation: u16,
    out: Out,
    /// Of the capsule: the kernel has had some of it; it has taken all of it.
    handed: bool,
    sent: bool,
    /// Something was heard of it before it was sent.
    early: bool,
    /// It stands in `sending`.
    queued: bool,
    transfer: Option<Transfer>,
    /// Bytes of data that the controller has asked for.
    asked: usize,
    /// Bytes of data that came, and of which PDU it is that comes.
    got: usize,
    damaged: bool,
    answer: Option<Completion>,
}

/// What comes next.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Input {
    Head,
    /// Bytes before the data of this slot.
    Pad(u16, usize),
    Data(u16),
    Digest(u16),
}

/// A PDU of data that comes.
#[derive(Clone, Copy, Default)]
struct Coming {
    /// Where in the data of its command it begins, and its bytes.
    begin: usize,
    len: usize,
    flags: u8,
}

/// See the module.
pub struct Conversation {
    slots: Slots<Slot>,
    terms: Terms,
    /// Bytes of data that a capsule takes.
    in_capsule: usize,
    /// Slots that have something to send, in order.
    sending: VecDeque<u16>,
    /// Bytes of the first of them that are sent.
    sent: usize,
    /// Slots of which something was heard while they were being sent.
    early: u32,
    /// Where data has digests: bytes that are sent next, and how many of them are sent.
    staged: Vec<u8>,
    staged_sent: usize,
    /// Of the data that was staged last.
    running: Digest,
    input: Input,
    coming: Coming,
    headers: Box<[u8; HEADERS]>,
    have: usize,
    /// Bytes of data that were asked for with [`Conversation::room`], which come first.
    data_wanted: usize,
    /// Commands that wait for data.
    reads: u32,
    ended: VecDeque<u16>,
}

fn crc() -> Digest {
    Digest::new(CrcAlgorithm::Crc32Iscsi)
}

impl Conversation {
    /// Nothing is in flight; `depth` commands at most are at a time, [`DEPTH`] at most, whose capsules have up to
    /// `in_capsule` bytes of data.
    pub fn new(terms: Terms, depth: u16, in_capsule: usize) -> Self {
        let slot = |_| Slot {
            used: false,
            tag: 0,
            data: Data::None,
            generation: 0,
            out: Out {
                kind: Kind::Capsule,
                header: [0; HEAD_MAX],
                begin: 0,
                offset: 0,
                len: 0,
                digest: [0; DIGEST],
            },
            handed: false,
            sent: false,
            early: false,
            queued: false,
            transfer: None,
            asked: 0,
            got: 0,
            damaged: false,
            answer: None,
        };
        let depth = depth.min(DEPTH);
        let staged = if terms.data_digest { AT_ONCE } else { 0 };
        Conversation {
            slots: Slots::new(depth, slot),
            terms,
            in_capsule,
            sending: VecDeque::with_capacity(usize::from(depth)),
            sent: 0,
            early: 0,
            staged: Vec::with_capacity(staged),
            staged_sent: 0,
            running: crc(),
            input: Input::Head,
            coming: Coming::default(),
            headers: Box::new([0; HEADERS]),
            have: 0,
            data_wanted: 0,
            reads: 0,
            ended: VecDeque::with_capacity(usize::from(depth)),
        }
    }

    /// Takes a command, whose identifier and data pointer are filled in; `false`: there are too many.
    pub fn submit(&mut self, mut command: [u8; COMMAND], data: Data, tag: u32) -> bool {
        let Some(at) = self.slots.take() else { return false };
        let (len, terms) = (data.len(), self.terms);
        let slot = &mut self.slots[at];
        slot.generation = slot.generation.wrapping_add(GENERATION);
        command[2..4].copy_from_slice(&(slot.generation | at).to_le_bytes());
        // SGLs, not PRPs (base specification, PSDT).
        command[1] |= 0x40;
        let most = if command[0] == FABRICS { FABRICS_IN_CAPSULE } else { self.in_capsule };
        let inside = matches!(data, Data::Out(..)) && len <= most;
        command[32..36].copy_from_slice(&(len as u32).to_le_bytes());
        // Data block at an offset in the capsule, or transport's own.
        command[39] = if inside { 0x01 } else { 0x5A };
        let out = &mut slot.out;
        out.kind = Kind::Capsule;
        out.header[8..CAPSULE].copy_from_slice(&command);
        (out.offset, out.len) = match data {
            Data::Out(_, offset, len) if inside => (offset, len),
            _ => (0, 0),
        };
        out.begin = terms.complete(&mut out.header, kind::COMMAND, 0, CAPSULE, out.len);
        (slot.used, slot.tag, slot.data) = (true, tag, data);
        (slot.handed, slot.sent, slot.early, slot.queued) = (false, false, false, true);
        (slot.transfer, slot.asked, slot.got) = (None, if inside { len } else { 0 }, 0);
        (slot.damaged, slot.answer) = (false, None);
        self.reads += u32::from(matches!(data, Data::In(..)));
        self.sending.push_back(at);
        true
    }

    /// Commands that are not over, or not taken out.
    pub fn in_flight(&self) -> usize {
        self.slots.taken()
    }

    /// How many commands it takes now.
    pub fn left(&self) -> usize {
        self.slots.len() - self.slots.taken()
    }

    /// The next command that is over.
    pub fn next_ended(&mut self) -> Option<Ended> {
        let at = self.ended.pop_front()?;
        let slot = &mut self.slots[at];
        slot.used = false;
        let Slot { tag, damaged, answer, .. } = *slot;
        self.slots.give_back(at);
        Some(Ended { tag, completion: answer.unwrap_or_default(), damaged })
    }

    /// The connection is over, and the kernel has let go of everything: tells of each command that was not
    /// answered its tag and whether the controller may have seen it. Those that were stay to be taken out.
    pub fn take_unanswered(&mut self, mut tell: impl FnMut(u32, bool)) {
        self.sending.clear();
        self.staged.clear();
        (self.sent, self.staged_sent, self.early) = (0, 0, 0);
        (self.have, self.data_wanted, self.reads) = (0, 0, 0);
        self.input = Input::Head;
        for at in 0..self.slots.len() as u16 {
            let slot = &mut self.slots[at];
            let is_over = slot.answer.is_some() && !slot.queued;
            if slot.used && !is_over {
                (slot.used, slot.queued, slot.answer) = (false, false, None);
                tell(slot.tag, slot.handed);
                self.slots.give_back(at);
            }
        }
    }
}
