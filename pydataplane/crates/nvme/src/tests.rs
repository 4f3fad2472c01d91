//! What a controller may say, byte by byte, and what becomes of the commands; and the I/Os of guests over the loss of
//! paths.

use guestmem::{IoVec, Sg};

use crate::conversation::{Broken, Conversation, Data, Ended};
use crate::wire::{self, CAPSULE, HEAD, Terms, flag, kind};

const PLAIN: Terms =
    Terms { header_digest: false, data_digest: false, alignment: 4, h2c_max: 8192 };
const DIGESTS: Terms = Terms { header_digest: true, data_digest: true, ..PLAIN };

/// A conversation, with memory for one command.
struct Talk {
    talk: Conversation,
    terms: Terms,
    data: Vec<u8>,
    run: Box<[IoVec; 1]>,
}

impl Talk {
    fn new(terms: Terms, in_capsule: usize) -> Talk {
        let mut data: Vec<u8> = (0..32768).map(|n| (n * 7 + n / 255) as u8).collect();
        // SAFETY: the vector is not changed in length, so it stays in place as long as this.
        let run = unsafe { Box::new([IoVec::new(data.as_mut_ptr(), data.len())]) };
        Talk { talk: Conversation::new(terms, 4, in_capsule), terms, data, run }
    }

    fn sg(&self) -> Sg {
        // SAFETY: boxed, and not changed.
        unsafe { Sg::new(&*self.run) }
    }

    fn submit(&mut self, data: Data, tag: u32) {
        assert!(self.talk.submit([0; 64], data, tag));
    }

    /// All that is to be sent.
    fn sent(&mut self) -> Vec<u8> {
        let mut all = Vec::new();
        loop {
            let mut runs = [IoVec::EMPTY; 8];
            let (count, bytes) = self.talk.to_send(&mut runs);
            if count == 0 {
                return all;
            }
            for run in &runs[..count] {
                // SAFETY: what is to be sent stays as it is until it is.
                all.extend_from_slice(unsafe { std::slice::from_raw_parts(run.base(), run.len()) });
            }
            self.talk.was_sent(bytes).unwrap();
        }
    }

    /// These bytes come, so many at a time at most.
    fn hear_by(&mut self, mut bytes: &[u8], most: usize) -> Result<(), Broken> {
        while !bytes.is_empty() {
            let mut runs = [IoVec::EMPTY; 4];
            let count = self.talk.room(&mut runs);
            let (mut came, mut left) = (0, most);
            for run in &runs[..count] {
                let take = run.len().min(bytes.len()).min(left);
                // SAFETY: the run is memory for so many bytes.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), run.base(), take) };
                bytes = &bytes[take..];
                (came, left) = (came + take, left - take);
            }
            self.talk.was_received(came)?;
        }
        Ok(())
    }

    fn hear(&mut self, bytes: &[u8]) -> Result<(), Broken> {
        self.hear_by(bytes, usize::MAX)
    }

    /// A PDU of the controller.
    fn pdu(&self, kind: u8, flags: u8, fields: &[u8], data: &[u8]) -> Vec<u8> {
        let mut header = [0; wire::HEAD_MAX];
        header[8..8 + fields.len()].copy_from_slice(fields);
        let terms = Terms { alignment: 4, ..self.terms };
        let begin = terms.complete(&mut header, kind, flags, HEAD, data.len());
        let mut all = header[..begin].to_vec();
        all.extend_from_slice(data);
        if !data.is_empty() && self.terms.data_digest {
            all.extend(wire::digest(data));
        }
        all
    }

    fn response(&self, id: &[u8], status: u16) -> Vec<u8> {
        let mut fields = [0; 16];
        fields[12..14].copy_from_slice(id);
        fields[14..16].copy_from_slice(&(status << 1).to_le_bytes());
        self.pdu(kind::RESPONSE, 0, &fields, &[])
    }

    fn transfer(&self, id: &[u8], offset: u32, len: u32) -> Vec<u8> {
        let fields = [id, &[7, 9], &offset.to_le_bytes(), &len.to_le_bytes()].concat();
        self.pdu(kind::R2T, 0, &fields, &[])
    }

    fn data(&self, id: &[u8], flags: u8, offset: u32, data: &[u8]) -> Vec<u8> {
        let len = (data.len() as u32).to_le_bytes();
        let fields = [id, &[0, 0], &offset.to_le_bytes(), &len].concat();
        self.pdu(kind::C2H_DATA, flags, &fields, data)
    }

    fn ended(&mut self) -> Option<Ended> {
        self.talk.next_ended()
    }
}

/// The identifier of the command in a capsule.
fn id_of(capsule: &[u8]) -> [u8; 2] {
    [capsule[10], capsule[11]]
}

#[test]
fn data_goes_with_its_command_where_there_is_room_and_by_request_else() {
    for terms in [PLAIN, DIGESTS] {
        let mut talk = Talk::new(terms, 4096);
        talk.submit(Data::Out(talk.sg(), 0, 4096), 5);
        let capsule = talk.sent();
        let begin = CAPSULE + if terms.header_digest { 4 } else { 0 };
        assert_eq!((capsule[0], capsule[3] as usize, capsule[8 + 39]), (4, begin, 0x01));
        assert_eq!(capsule[begin..][..4096], talk.data[..4096]);
        if terms.data_digest {
            assert_eq!(capsule[begin + 4096..], wire::digest(&talk.data[..4096]));
        }
        talk.hear(&talk.response(&id_of(&capsule), 0)).unwrap();
        assert_eq!(talk.ended().unwrap().tag, 5);

        talk.submit(Data::Out(talk.sg(), 100, 20000), 6);
        let capsule = talk.sent();
        assert_eq!((capsule.len(), capsule[8 + 39]), (begin, 0x5A));
        let id = id_of(&capsule);
        let mut data = Vec::new();
        for (offset, len) in [(0, 12288), (12288, 7712)] {
            talk.hear(&talk.transfer(&id, offset, len)).unwrap();
            let mut pdus = &talk.sent()[..];
            let mut at = offset;
            while !pdus.is_empty() {
                assert_eq!((pdus[0], [pdus[8], pdus[9]], &pdus[10..12]), (6, id, &[7, 9][..]));
                assert_eq!(wire::u32_at(pdus, 12), at);
                let len = wire::u32_at(pdus, 16);
                let begin = usize::from(pdus[3]);
                assert!(len <= 8192);
                data.extend_from_slice(&pdus[begin..begin + len as usize]);
                at += len;
                let last = at == offset + 12288 || at == 20000;
                assert_eq!(pdus[1] & flag::LAST != 0, last);
                pdus = &pdus[wire::u32_at(pdus, 4) as usize..];
            }
        }
        assert!(data[..] == talk.data[100..20100]);
        talk.hear(&talk.response(&id, 0x280)).unwrap();
        let ended = talk.ended().unwrap();
        assert_eq!((ended.tag, ended.completion.status, ended.damaged), (6, 0x280, false));
        assert_eq!(talk.talk.in_flight(), 0);
    }
}

#[test]
fn data_comes_in_any_pieces_to_where_it_belongs_and_nowhere_else() {
    let told: Vec<u8> = (0..12000u32).map(|n| (n * 3) as u8).collect();
    for terms in [PLAIN, DIGESTS] {
        for most in [1, 5, 24, 4000, usize::MAX] {
            for success in [0, flag::SUCCESS] {
                let mut talk = Talk::new(terms, 4096);
                let before = talk.data.clone();
                talk.submit(Data::In(talk.sg(), 512, 12000), 1);
                let id = id_of(&talk.sent());
                talk.hear_by(&talk.data(&id, 0, 0, &told[..8192]), most).unwrap();
                assert!(talk.ended().is_none());
                let last = talk.data(&id, flag::LAST | success, 8192, &told[8192..]);
                talk.hear_by(&last, most).unwrap();
                if success == 0 {
                    assert!(talk.ended().is_none());
                    talk.hear_by(&talk.response(&id, 0), most).unwrap();
                }
                let ended = talk.ended().unwrap();
                assert_eq!((ended.completion.status, ended.damaged), (0, false));
                assert!(talk.data[512..12512] == told[..]);
                assert!(talk.data[..512] == before[..512] && talk.data[12512..] == before[12512..]);
            }
        }
    }
}

#[test]
fn a_wrong_digest_of_data_is_told_and_one_of_a_header_ends_the_connection() {
    let mut talk = Talk::new(DIGESTS, 4096);
    talk.submit(Data::In(talk.sg(), 0, 512), 1);
    let id = id_of(&talk.sent());
    let mut pdu = talk.data(&id, flag::LAST | flag::SUCCESS, 0, &[1; 512]);
    let end = pdu.len() - 1;
    pdu[end] ^= 1;
    talk.hear(&pdu).unwrap();
    assert!(talk.ended().unwrap().damaged);
    talk.submit(Data::None, 2);
    let id = id_of(&talk.sent());
    let mut pdu = talk.response(&id, 0);
    pdu[25] ^= 1;
    assert_eq!(talk.hear(&pdu), Err(Broken::HeaderDigest));
}

#[test]
fn what_a_controller_must_not_say_ends_the_connection() {
    type Says = fn(&Talk, [u8; 2]) -> Vec<u8>;
    let of_reads: [(Says, Broken); 9] = [
        (|t, id| t.data(&id, 0, 512, &[0; 512]), Broken::Data),
        (|t, id| t.data(&id, 0, 0, &[0; 1536]), Broken::Data),
        (|t, id| t.data(&[id[0] ^ 1, id[1]], 0, 0, &[0; 512]), Broken::Unknown),
        (|t, id| t.data(&[id[0], id[1] ^ 1], 0, 0, &[0; 512]), Broken::Unknown),
        (|t, id| t.data(&id, flag::SUCCESS, 0, &[0; 512]), Broken::Length),
        (|t, id| t.data(&id, flag::LAST, 0, &[0; 512]), Broken::Short),
        (|t, id| t.response(&id, 0), Broken::Short),
        (|t, id| t.transfer(&id, 0, 512), Broken::Transfer),
        (|t, id| t.pdu(kind::C2H_TERMINATE, 0, &id, &[]), Broken::Terminated(0)),
    ];
    for (n, (says, broken)) in of_reads.into_iter().enumerate() {
        let mut talk = Talk::new(PLAIN, 4096);
        talk.submit(Data::In(talk.sg(), 0, 1024), 1);
        let id = id_of(&talk.sent());
        let heard = talk.hear(&says(&talk, id));
        match broken {
            Broken::Terminated(_) => assert!(matches!(heard, Err(Broken::Terminated(_)))),
            _ => assert_eq!(heard, Err(broken), "{n}"),
        }
    }
    let of_writes: [(Says, Broken); 6] = [
        (|t, id| t.transfer(&id, 512, 512), Broken::Transfer),
        (|t, id| t.transfer(&id, 0, 0), Broken::Transfer),
        (|t, id| t.transfer(&id, 0, 8193), Broken::Transfer),
        (|t, id| [t.transfer(&id, 0, 512), t.transfer(&id, 0, 512)].concat(), Broken::Transfer),
        (|t, id| t.response(&id, 0), Broken::Short),
        (|t, id| t.data(&id, 0, 0, &[0; 512]), Broken::Data),
    ];
    for (n, (says, broken)) in of_writes.into_iter().enumerate() {
        let mut talk = Talk::new(PLAIN, 4096);
        talk.submit(Data::Out(talk.sg(), 0, 8192), 1);
        let id = id_of(&talk.sent());
        assert_eq!(talk.hear(&says(&talk, id)), Err(broken), "{n}");
        let mut left = Vec::new();
        talk.talk.take_unanswered(|tag, handed| left.push((tag, handed)));
        assert_eq!(left, [(1, true)]);
        assert_eq!(talk.talk.in_flight(), 0);
    }
    // Twice, and before it can know.
    let mut talk = Talk::new(PLAIN, 4096);
    talk.submit(Data::None, 1);
    let id = id_of(&talk.sent());
    let twice = [talk.response(&id, 0), talk.response(&id, 0)].concat();
    assert_eq!(talk.hear(&twice), Err(Broken::Unknown));
    let mut talk = Talk::new(PLAIN, 4096);
    talk.submit(Data::None, 1);
    assert_eq!(talk.hear(&talk.response(&[0, 1], 0)), Err(Broken::Early));
    let mut left = Vec::new();
    talk.talk.take_unanswered(|tag, handed| left.push((tag, handed)));
    assert_eq!(left, [(1, false)]);
}

#[test]
fn an_answer_may_come_before_the_kernel_says_that_its_command_is_sent_but_not_before_it_is() {
    for whole in [true, false] {
        let mut talk = Talk::new(PLAIN, 0);
        talk.submit(Data::None, 1);
        let mut runs = [IoVec::EMPTY; 4];
        let (_, bytes) = talk.talk.to_send(&mut runs);
        talk.hear(&talk.response(&[0, 1], 0)).unwrap();
        assert!(talk.ended().is_none());
        let sent = talk.talk.was_sent(if whole { bytes } else { bytes - 1 });
        assert_eq!(sent, if whole { Ok(()) } else { Err(Broken::Early) });
        assert_eq!(talk.ended().is_some(), whole);
    }
}

#[test]
fn a_command_may_fail_while_its_data_is_on_its_way_but_not_succeed() {
    for status in [0x082, 0] {
        let mut talk = Talk::new(PLAIN, 0);
        talk.submit(Data::Out(talk.sg(), 0, 8192), 1);
        let id = id_of(&talk.sent());
        talk.hear(&talk.transfer(&id, 0, 8192)).unwrap();
        let mut runs = [IoVec::EMPTY; 4];
        let (_, bytes) = talk.talk.to_send(&mut runs);
        talk.hear(&talk.response(&id, status)).unwrap();
        let sent = talk.talk.was_sent(bytes - 1);
        assert_eq!(sent, if status == 0 { Err(Broken::Early) } else { Ok(()) });
        if status != 0 {
            talk.talk.was_sent(1).unwrap();
            assert_eq!(talk.ended().unwrap().completion.status, status);
        }
    }
}
