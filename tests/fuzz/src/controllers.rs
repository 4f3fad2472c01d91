//! What an NVMe controller can say over TCP: any answer to the initialisation, then responses, data and requests for
//! data, to commands in flight or none, in any pieces, and the end of the connection at any point.

use crate::input::Input;
use guestmem::{IoVec, Sg};
use nvme::{Conversation, Data, Terms};

/// Commands at a time at most, each with memory of its own.
const COMMANDS: usize = 8;
const MEMORY: usize = 4096;
/// Bytes of the header of a command, and of all others.
const CAPSULE: usize = 72;
const HEAD: usize = 24;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    None,
    In,
    Out,
}

/// A conversation, and what is to be true of it.
struct Model {
    talk: Conversation,
    terms: Terms,
    memory: Vec<[u8; MEMORY]>,
    runs: Vec<[IoVec; 1]>,
    /// By number: what is in flight, and with how many bytes of data.
    asked: [Option<(Way, usize)>; COMMANDS],
    /// Identifiers that were seen in commands.
    ids: Vec<[u8; 2]>,
    /// What the controller is about to say.
    said: Vec<u8>,
    over: bool,
}

/// A connection of these bytes. No input may make it panic, end a command twice or never, or have bytes of the
/// controller come to other memory than that of a command that reads, in flight.
pub fn controllers(data: &[u8]) {
    let mut input = Input(data);
    let flags = input.u8();
    let (header_digest, data_digest) = (flags & 1 != 0, flags & 2 != 0);
    if let Some(answer) = data.first_chunk::<128>()
        && let Ok(terms) = Terms::parse(answer, header_digest, data_digest)
    {
        assert!(terms.h2c_max >= 4096 && terms.alignment <= 128);
    }
    let alignment = 4 << (flags >> 2 & 3);
    let terms = Terms { header_digest, data_digest, alignment, h2c_max: 1024 };
    let mut memory = vec![[0u8; MEMORY]; COMMANDS];
    // SAFETY: the memory stays in place as long as the conversation.
    let run = |bytes: &mut [u8; MEMORY]| unsafe { [IoVec::new(bytes.as_mut_ptr(), MEMORY)] };
    let runs = memory.iter_mut().map(run).collect();
    let mut model = Model {
        talk: Conversation::new(terms, COMMANDS as u16, 512),
        terms,
        memory,
        runs,
        asked: [None; COMMANDS],
        ids: Vec::new(),
        said: Vec::new(),
        over: false,
    };
    while !input.is_empty() && !model.over {
        match input.u8() % 8 {
            0 | 1 => model.submit(&mut input),
            2 | 3 => model.send(&mut input),
            4 => model.say(&mut input),
            _ => model.hear(&mut input),
        }
        model.collect();
    }
    model.end();
    assert!(model.asked.iter().all(Option::is_none), "a command has not ended");
    assert_eq!(model.talk.in_flight(), 0);
}

impl Model {
    fn submit(&mut self, input: &mut Input<'_>) {
        let Some(number) = self.asked.iter().position(Option::is_none) else { return };
        let len = (usize::from(input.u16()) % MEMORY + 1).min(MEMORY / 2);
        // SAFETY: the memory and its list stay in place as long as the conversation.
        let sg = unsafe { Sg::new(&self.runs[number]) };
        let (way, data) = match input.u8() % 3 {
            0 => (Way::None, Data::None),
            1 => (Way::In, Data::In(sg, 512, len)),
            _ => (Way::Out, Data::Out(sg, 512, len)),
        };
        if self.talk.submit([0; 64], data, number as u32) {
            self.asked[number] = Some((way, len));
        }
    }

    /// The command in whose memory a run lies.
    fn owner_of(&self, run: &IoVec) -> Option<usize> {
        let (begin, base) = (run.base().addr(), self.memory.as_ptr().addr());
        (base..base + COMMANDS * MEMORY).contains(&begin).then(|| {
            let number = (begin - base) / MEMORY;
            let offset = (begin - base) % MEMORY;
            let len = self.asked[number].map_or(0, |(_, len)| len);
            assert!(offset >= 512 && offset + run.len() <= 512 + len, "not its data");
            number
        })
    }

    fn send(&mut self, input: &mut Input<'_>) {
        let mut runs = [IoVec::EMPTY; 24];
        let room = usize::from(input.u8()) % runs.len() + 1;
        let (count, bytes) = self.talk.to_send(&mut runs[..room]);
        assert_eq!(bytes, runs[..count].iter().map(IoVec::len).sum::<usize>());
        for run in &runs[..count] {
            if let Some(number) = self.owner_of(run) {
                assert_eq!(self.asked[number].map(|(way, _)| way), Some(Way::Out));
                continue;
            }
            // SAFETY: what is to be sent stays as it is until it is.
            let bytes = unsafe { std::slice::from_raw_parts(run.base(), run.len()) };
            if bytes.len() >= CAPSULE && bytes[0] == 4 {
                self.ids.push([bytes[10], bytes[11]]);
            }
        }
        let sent = match input.u8() {
            // All of it, mostly.
            all if all < 160 => bytes,
            _ => usize::from(input.u16()) % (bytes + 1),
        };
        self.over |= self.talk.was_sent(sent).is_err();
    }

    /// The controller makes up something.
    fn say(&mut self, input: &mut Input<'_>) {
        if self.ids.is_empty() || input.once_in(16) {
            let len = usize::from(input.u8()) % 40;
            self.said.extend(input.bytes(len));
            return;
        }
        let which = usize::from(input.u8()) % self.ids.len();
        let id = match input.once_in(3) {
            true => self.ids.swap_remove(which),
            false => self.ids[which],
        };
        let (offset, len) = (u32::from(input.u16()) % 3000, u32::from(input.u16()) % 3000);
        let mut pdu = [0; HEAD];
        (pdu[0], pdu[2]) = ([5, 7, 9][usize::from(input.u8()) % 3], HEAD as u8);
        let mut data = Vec::new();
        match pdu[0] {
            5 => {
                pdu[20..22].copy_from_slice(&id);
                pdu[22] = if input.once_in(4) { input.u8() } else { 0 };
            }
            kind => {
                pdu[8..10].copy_from_slice(&id);
                pdu[12..16].copy_from_slice(&offset.to_le_bytes());
                pdu[16..20].copy_from_slice(&len.to_le_bytes());
                if kind == 7 {
                    data.resize(len as usize, input.u8());
                    pdu[1] = input.u8() & 0xC;
                }
            }
        }
        let Terms { header_digest, data_digest, .. } = self.terms;
        let begin = HEAD + if header_digest { 4 } else { 0 };
        let pad = if data.is_empty() { 0 } else { usize::from(input.u8() % 4) };
        let tail = if data_digest && !data.is_empty() { 4 } else { 0 };
        let whole = begin + pad + data.len() + tail;
        pdu[1] |= u8::from(header_digest) | u8::from(tail > 0) << 1;
        pdu[3] = if data.is_empty() { 0 } else { (begin + pad) as u8 };
        pdu[4..8].copy_from_slice(&(whole as u32).to_le_bytes());
        if input.once_in(16) {
            pdu[usize::from(input.u8()) % HEAD] = input.u8();
        }
        self.said.extend(pdu);
        if header_digest {
            self.said.extend(crc(&pdu));
        }
        self.said.resize(self.said.len() + pad, 0);
        self.said.extend(&data);
        if tail > 0 {
            self.said.extend(if input.once_in(8) { [0; 4] } else { crc(&data) });
        }
    }

    fn hear(&mut self, input: &mut Input<'_>) {
        let mut runs = [IoVec::EMPTY; 4];
        let count = self.talk.room(&mut runs);
        let mut most = match input.u8() {
            all if all < 160 => usize::MAX,
            few => usize::from(few) % HEAD + 1,
        };
        let mut came = 0;
        for run in &runs[..count] {
            if let Some(number) = self.owner_of(run) {
                let way = self.asked[number].map(|(way, _)| way);
                assert_eq!(way, Some(Way::In), "its memory is not to be written");
            }
            let bytes = run.len().min(self.said.len()).min(most);
            // SAFETY: the run is memory for so many bytes.
            unsafe { std::ptr::copy_nonoverlapping(self.said.as_ptr(), run.base(), bytes) };
            self.said.drain(..bytes);
            most -= bytes;
            came += bytes;
        }
        self.over |= came > 0 && self.talk.was_received(came).is_err();
    }

    fn end(&mut self) {
        self.collect();
        let asked = &mut self.asked;
        self.talk.take_unanswered(|tag, _| {
            assert!(asked[tag as usize].take().is_some(), "a command ended twice");
        });
    }

    fn collect(&mut self) {
        while let Some(ended) = self.talk.next_ended() {
            let asked = self.asked[ended.tag as usize].take();
            assert!(asked.is_some(), "a command ended twice");
        }
        assert_eq!(self.talk.in_flight(), self.asked.iter().flatten().count());
    }
}

fn crc(bytes: &[u8]) -> [u8; 4] {
    (crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32).to_le_bytes()
}
