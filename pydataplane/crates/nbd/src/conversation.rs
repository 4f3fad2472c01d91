//! Requests and replies on one connection, without I/O: which bytes are to be sent, where received ones
//! go, and what each I/O comes to. All that the server says is checked here.
//!
//! An I/O is cut into parts of what the server takes at most; each part is a request of its own, and its
//! handle names it. Data goes straight between the caller's memory and the socket, but for what comes
//! with replies of others in one piece: less than [`HEADERS`] bytes.
//!
//! Nothing is allocated after [`Conversation::new`].

use std::collections::VecDeque;

use bdev::{Io, IoError, Op, Slots};
use guestmem::IoVec;

use crate::wire::{self, REPLY, REQUEST};

/// I/Os at a time at most, and parts of them.
pub(crate) const DEPTH: u16 = 256;

/// Bytes that are handed to the kernel, or asked for, at once; more would keep others of the thread waiting.
pub(crate) const AT_ONCE: usize = 256 << 10;

/// Runs of memory that the kernel takes in one call (UIO_MAXIOV).
pub(crate) const RUNS: usize = 1024;

/// Bytes of replies that are received at once, where no data comes between them.
pub(crate) const HEADERS: usize = 4096;

/// Parts of an I/O that are asked for at a time at most, so that a long one leaves room for others.
const PARTS_MAX: u16 = 16;

/// Bytes of a request without data at most.
const RANGE_MAX: u64 = 1 << 30;

/// What applies to all requests.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Bytes of a block.
    pub block_size: u32,
    /// Bytes of data of a request at most: a multiple of the blocks.
    pub payload_max: u32,
    /// All changes are to be durable when they are answered.
    pub write_through: bool,
}

/// Why a connection is of no more use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// The magic number is another one.
    #[error("it sent something that is no simple reply")]
    NotAReply,
    /// No request of this handle waits for an answer.
    #[error("it answered a request that was not made, or twice")]
    Unknown,
    /// It cannot have seen all of the request.
    #[error("it answered a request before that was sent")]
    Early,
    /// NBD_ESHUTDOWN.
    #[error("it is going away")]
    GoesAway,
}

/// The end of an I/O.
#[derive(Clone, Copy, Debug)]
pub struct Ended {
    /// As it was submitted.
    pub io: Io,
    /// As given when it was.
    pub note: Note,
    /// How it ended.
    pub result: Result<(), IoError>,
}

/// What the caller notes with an I/O.
#[derive(Clone, Copy, Debug, Default)]
pub struct Note {
    /// When it was submitted, in ticks.
    pub begun: u64,
    /// Failed flushes of the device until then.
    pub failures: u64,
}

struct Ask {
    io: Io,
    note: Note,
    used: bool,
    /// It waits to be taken out.
    over: bool,
    /// Bytes that are cut into parts.
    cut: u64,
    bytes: u64,
    /// Parts that are not answered.
    parts: u16,
    error: Option<IoError>,
}

struct Part {
    used: bool,
    ask: u16,
    /// Where in its I/O it begins, in bytes.
    offset: u64,
    len: u32,
    /// Which of all it is: the upper part of its handle.
    serial: u64,
    header: [u8; REQUEST],
    sent: bool,
    answered: Option<Result<(), IoError>>,
    /// Bytes of data that came.
    got: u32,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Input {
    Header,
    Data(u16),
}

/// See the module.
pub struct Conversation {
    asks: Slots<Ask>,
    parts: Slots<Part>,
    rules: Rules,
    serial: u64,
    /// I/Os of which something is not cut yet, in turn.
    cutting: VecDeque<u16>,
    /// Parts that are to be sent, in order.
    sending: VecDeque<u16>,
    /// Bytes of the first of them that are sent.
    sent: usize,
    /// Parts that were answered while they were being sent.
    early: u32,
    input: Input,
    headers: Box<[u8; HEADERS]>,
    have: usize,
    /// Bytes of data that were asked for with [`Conversation::room`], which come first.
    data_wanted: usize,
    /// Parts that wait for data.
    reads: u32,
    ended: VecDeque<u16>,
    answers: u64,
    /// The server's error of a flush that failed.
    flush_error: Option<u32>,
}

impl Conversation {
    /// Nothing is in flight.
    pub fn new(rules: Rules) -> Self {
        let ask = |_| Ask {
            io: Io::flush(0),
            note: Note::default(),
            used: false,
            over: false,
            cut: 0,
            bytes: 0,
            parts: 0,
            error: None,
        };
        let part = |_| Part {
            used: false,
            ask: 0,
            offset: 0,
            len: 0,
            serial: 0,
            header: [0; REQUEST],
            sent: false,
            answered: None,
            got: 0,
        };
        let depth = usize::from(DEPTH);
        Conversation {
            asks: Slots::new(DEPTH, ask),
            parts: Slots::new(DEPTH, part),
            rules,
            serial: 0,
            cutting: VecDeque::with_capacity(depth),
            sending: VecDeque::with_capacity(depth),
            sent: 0,
            early: 0,
            input: Input::Header,
            headers: Box::new([0; HEADERS]),
            have: 0,
            data_wanted: 0,
            reads: 0,
            ended: VecDeque::with_capacity(depth),
            answers: 0,
            flush_error: None,
        }
    }

    /// Takes an I/O, which is checked; `false`: there are too many.
    pub fn submit(&mut self, io: &Io, note: Note) -> bool {
        let Some(at) = self.asks.take() else { return false };
        let bytes = io.bytes(self.rules.block_size);
        self.asks[at] =
            Ask { io: *io, note, used: true, over: false, cut: 0, bytes, parts: 0, error: None };
        self.cutting.push_back(at);
        self.cut();
        true
    }

    /// I/Os that are not over, or not taken out.
    pub fn in_flight(&self) -> usize {
        self.asks.taken()
    }

    /// How many requests were answered so far.
    pub fn answers(&self) -> u64 {
        self.answers
    }

    /// The server's error of a flush that failed since this was asked last.
    pub fn take_flush_error(&mut self) -> Option<u32> {
        self.flush_error.take()
    }

    /// The next I/O that is over.
    pub fn next_ended(&mut self) -> Option<Ended> {
        let at = self.ended.pop_front()?;
        let ask = &mut self.asks[at];
        let ended = Ended { io: ask.io, note: ask.note, result: ask.error.map_or(Ok(()), Err) };
        ask.used = false;
        self.asks.give_back(at);
        Some(ended)
    }

    /// Makes parts of I/Os in turn, as long as there is room.
    fn cut(&mut self) {
        let mut skipped = 0;
        while skipped < self.cutting.len() {
            let at = self.cutting[0];
            if self.asks[at].parts == PARTS_MAX {
                self.cutting.rotate_left(1);
                skipped += 1;
                continue;
            }
            let Some(number) = self.parts.take() else { return };
            skipped = 0;
            let ask = &mut self.asks[at];
            let most = match ask.io.op {
                Op::Read | Op::Write => u64::from(self.rules.payload_max),
                Op::Flush | Op::Unmap | Op::WriteZeroes => {
                    RANGE_MAX - RANGE_MAX % u64::from(self.rules.block_size)
                }
            };
            let len = (ask.bytes - ask.cut).min(most);
            let part = &mut self.parts[number];
            part.used = true;
            part.ask = at;
            part.offset = ask.cut;
            part.len = len as u32;
            ask.cut += len;
            ask.parts += 1;
            self.reads += u32::from(ask.io.op == Op::Read);
            match ask.cut == ask.bytes {
                true => _ = self.cutting.pop_front(),
                false => self.cutting.rotate_left(1),
            }
            self.ask_for(number);
        }
    }

    /// Has a part be sent, under a new handle.
    fn ask_for(&mut self, number: u16) {
        self.serial += 1;
        let part = &mut self.parts[number];
        let io = &self.asks[part.ask].io;
        part.serial = self.serial;
        (part.sent, part.answered, part.got) = (false, None, 0);
        let handle = self.serial << 16 | u64::from(number);
        let offset = match io.op {
            Op::Flush => 0,
            _ => io.lba * u64::from(self.rules.block_size) + part.offset,
        };
        let fua = io.fua || self.rules.write_through;
        part.header = wire::request(io.op, fua, handle, offset, part.len);
        self.sending.push_back(number);
    }

    /// Fills `runs` with what is to be sent next: how many, and their bytes. They stay as they are until
    /// [`Conversation::was_sent`] or [`Conversation::begin_anew`].
    pub fn to_send(&self, runs: &mut [IoVec]) -> (usize, usize) {
        let (mut count, mut bytes) = (0, 0);
        for (n, &number) in self.sending.iter().enumerate() {
            let part = &self.parts[number];
            let skip = if n == 0 { self.sent } else { 0 };
            if skip < REQUEST {
                let Some(run) = runs.get_mut(count) else { break };
                let header = &part.header[skip..];
                // SAFETY: slots stay in place, and this one as it is until it is sent; it is only read.
                *run = unsafe { IoVec::new(header.as_ptr().cast_mut(), header.len()) };
                count += 1;
                bytes += header.len();
            }
            let data = self.data_of(part);
            let begin = skip.saturating_sub(REQUEST);
            if begin < data {
                let sg = &self.asks[part.ask].io.sg;
                let left = data - begin;
                let most = left.min(AT_ONCE.saturating_sub(bytes));
                let begin = part.offset as usize + begin;
                let (used, taken) = sg.slice_as_far(begin, most, &mut runs[count..]);
                count += used;
                bytes += taken;
                if taken < left {
                    break;
                }
            }
            if bytes >= AT_ONCE {
                break;
            }
        }
        (count, bytes)
    }

    /// Bytes that a part sends behind its header.
    fn data_of(&self, part: &Part) -> usize {
        match self.asks[part.ask].io.op {
            Op::Write => part.len as usize,
            Op::Read | Op::Flush | Op::Unmap | Op::WriteZeroes => 0,
        }
    }

    /// So many bytes of what [`Conversation::to_send`] said are sent, and the kernel has let go of them.
    ///
    /// # Errors
    /// [`Broken::Early`].
    pub fn was_sent(&mut self, mut bytes: usize) -> Result<(), Broken> {
        while bytes > 0
            && let Some(&number) = self.sending.front()
        {
            let left = REQUEST + self.data_of(&self.parts[number]) - self.sent;
            if bytes < left {
                self.sent += bytes;
                break;
            }
            bytes -= left;
            self.sent = 0;
            self.sending.pop_front();
            let part = &mut self.parts[number];
            part.sent = true;
            if part.answered.is_some() {
                self.early -= 1;
                self.finish(number);
            }
        }
        if self.early > 0 { Err(Broken::Early) } else { Ok(()) }
    }

    /// Fills `runs` with where the next bytes from the server go: how many. They stay valid until
    /// [`Conversation::was_received`] or [`Conversation::begin_anew`].
    pub fn room(&mut self, runs: &mut [IoVec]) -> usize {
        let (mut count, mut reads) = (0, self.reads);
        self.data_wanted = 0;
        if let Input::Data(number) = self.input {
            let part = &self.parts[number];
            let (len, got) = (part.len as usize, part.got as usize);
            let sg = &self.asks[part.ask].io.sg;
            // One run is left for the next reply.
            let most = runs.len().saturating_sub(1);
            let begin = part.offset as usize + got;
            let (used, taken) = sg.slice_as_far(begin, (len - got).min(AT_ONCE), &mut runs[..most]);
            count = used;
            self.data_wanted = taken;
            if got + taken < len {
                return count;
            }
            reads -= 1;
        }
        // Data behind a reply would have to be copied.
        let most = if reads > 0 { REPLY } else { HEADERS };
        let header = &mut self.headers[self.have..most];
        // SAFETY: boxed, and not used until the kernel has let go of it.
        runs[count] = unsafe { IoVec::new(header.as_mut_ptr(), header.len()) };
        count + 1
    }

    /// So many bytes came into what [`Conversation::room`] said.
    ///
    /// # Errors
    /// [`Broken`].
    ///
    /// # Panics
    /// There was no such room.
    pub fn was_received(&mut self, bytes: usize) -> Result<(), Broken> {
        let data = bytes.min(std::mem::take(&mut self.data_wanted));
        if let Input::Data(number) = self.input {
            let part = &mut self.parts[number];
            part.got += data as u32;
            if part.got < part.len {
                return Ok(());
            }
            self.input = Input::Header;
            self.answer(number, Ok(()));
        }
        self.have += bytes - data;
        assert!(self.have <= HEADERS, "more came than was asked for");
        let mut at = 0;
        while let Some(header) = self.headers[at..self.have].first_chunk::<REPLY>() {
            let (error, handle) = wire::reply(header).ok_or(Broken::NotAReply)?;
            at += REPLY;
            at += self.replied(error, handle, at)?;
        }
        self.headers.copy_within(at..self.have, 0);
        self.have -= at;
        Ok(())
    }

    /// A reply came, and what follows it is at `at`; returns how much of that is its data.
    fn replied(&mut self, error: u32, handle: u64, at: usize) -> Result<usize, Broken> {
        let number = handle as u16;
        let known = number < DEPTH && {
            let part = &self.parts[number];
            part.used && part.serial == handle >> 16 && part.answered.is_none()
        };
        if !known {
            return Err(Broken::Unknown);
        }
        if error == wire::GOES_AWAY {
            return Err(Broken::GoesAway);
        }
        let part = &mut self.parts[number];
        let io = &self.asks[part.ask].io;
        if error != 0 {
            let op = io.op;
            if op == Op::Flush {
                self.flush_error = Some(error);
            }
            self.answer(number, Err(wire::io_error(op, error)));
            return Ok(0);
        }
        if io.op != Op::Read {
            self.answer(number, Ok(()));
            return Ok(0);
        }
        let there = (self.have - at).min(part.len as usize);
        io.sg.copy_from_slice(part.offset as usize, &self.headers[at..at + there]);
        part.got = there as u32;
        if part.got < part.len {
            self.input = Input::Data(number);
        } else {
            self.answer(number, Ok(()));
        }
        Ok(there)
    }

    fn answer(&mut self, number: u16, result: Result<(), IoError>) {
        self.answers += 1;
        let part = &mut self.parts[number];
        part.answered = Some(result);
        if part.sent {
            self.finish(number);
        } else {
            self.early += 1;
        }
    }

    /// A part is sent and answered.
    fn finish(&mut self, number: u16) {
        let part = &mut self.parts[number];
        let (at, result) = (part.ask, part.answered.take());
        part.used = false;
        self.parts.give_back(number);
        let ask = &mut self.asks[at];
        self.reads -= u32::from(ask.io.op == Op::Read);
        ask.parts -= 1;
        if let Some(Err(error)) = result {
            ask.error.get_or_insert(error);
            // Nothing more of it is asked for.
            ask.cut = ask.bytes;
            self.cutting.retain(|cut| *cut != at);
        }
        if ask.parts == 0 && ask.cut == ask.bytes {
            ask.over = true;
            self.ended.push_back(at);
        }
        self.cut();
    }

    /// All that is not answered is sent again, on another connection; the kernel has let go of everything.
    pub fn begin_anew(&mut self) {
        self.sending.clear();
        (self.sent, self.early, self.have, self.data_wanted) = (0, 0, 0, 0);
        self.input = Input::Header;
        for number in (0..DEPTH).filter(|number| self.parts[*number].used) {
            self.sending.push_back(number);
        }
        let parts = &self.parts;
        self.sending.make_contiguous().sort_unstable_by_key(|number| parts[*number].serial);
        for _ in 0..self.sending.len() {
            if let Some(number) = self.sending.pop_front() {
                self.ask_for(number);
            }
        }
    }

    /// All I/Os fail, as nobody answers; the kernel has let go of everything.
    pub fn fail_all(&mut self) {
        self.sending.clear();
        self.cutting.clear();
        (self.sent, self.early, self.have, self.data_wanted, self.reads) = (0, 0, 0, 0, 0);
        self.input = Input::Header;
        for number in 0..DEPTH {
            if std::mem::take(&mut self.parts[number].used) {
                self.parts.give_back(number);
            }
            let ask = &mut self.asks[number];
            if ask.used && !ask.over {
                ask.error.get_or_insert(ask.io.op.failed());
                (ask.over, ask.parts) = (true, 0);
                self.ended.push_back(number);
            }
        }
    }
}
