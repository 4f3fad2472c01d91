//! What comes over a connection: where it goes, and whether it can be.

use guestmem::IoVec;

use super::{
    AT_ONCE, Broken, CHUNK, Coming, Conversation, Data, GENERATION, HEADERS, Input, Kind, Transfer,
    crc,
};
use crate::wire::{self, COMPLETION, Completion, DIGEST, HEAD, flag, kind, u16_at, u32_at};

impl Conversation {
    /// Fills `runs`, two or more, with where the next bytes from the controller go: how many. They stay valid until
    /// [`Conversation::was_received`] or [`Conversation::take_unanswered`].
    pub fn room(&mut self, runs: &mut [IoVec]) -> usize {
        let (mut count, mut most) = (0, self.wanted());
        self.data_wanted = 0;
        if let Input::Data(at) = self.input {
            let slot = &self.slots[at];
            if let Data::In(sg, offset, _) = &slot.data {
                let left = self.coming.begin + self.coming.len - slot.got;
                // One run is left for what follows.
                let free = runs.len().saturating_sub(1);
                let (used, taken) =
                    sg.slice_as_far(offset + slot.got, left.min(AT_ONCE), &mut runs[..free]);
                (count, self.data_wanted) = (used, taken);
                if taken < left {
                    return count;
                }
                most = self.terms.head() + if self.has_data_digest() { DIGEST } else { 0 };
            }
        } else if self.reads == 0 {
            most = HEADERS;
        }
        // Data behind a header would have to be copied.
        let header = &mut self.headers[self.have..most.max(self.have)];
        // SAFETY: boxed, and not used until the kernel has let go of it.
        runs[count] = unsafe { IoVec::new(header.as_mut_ptr(), header.len()) };
        count + 1
    }

    /// Bytes in `headers` that make up what comes next.
    fn wanted(&self) -> usize {
        match self.input {
            Input::Head => self.terms.head(),
            Input::Pad(_, left) => left,
            Input::Data(_) => 0,
            Input::Digest(_) => DIGEST,
        }
    }

    fn has_data_digest(&self) -> bool {
        self.coming.flags & flag::DATA_DIGEST != 0
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
        if let Input::Data(at) = self.input {
            self.slots[at].got += data;
            if self.slots[at].got < self.coming.begin + self.coming.len {
                return Ok(());
            }
            self.data_came(at)?;
        }
        self.have += bytes - data;
        assert!(self.have <= HEADERS, "more came than was asked for");
        let mut from = 0;
        loop {
            let there = self.have - from;
            match self.input {
                Input::Data(at) => {
                    let slot = &mut self.slots[at];
                    let left = self.coming.begin + self.coming.len - slot.got;
                    let take = left.min(there);
                    if let Data::In(sg, offset, _) = &slot.data {
                        sg.copy_from_slice(offset + slot.got, &self.headers[from..from + take]);
                    }
                    slot.got += take;
                    from += take;
                    if take < left {
                        break;
                    }
                    self.data_came(at)?;
                }
                Input::Pad(at, left) => {
                    let take = left.min(there);
                    from += take;
                    if take < left {
                        self.input = Input::Pad(at, left - take);
                        break;
                    }
                    self.input = Input::Data(at);
                }
                Input::Digest(at) => {
                    let Some(told) = self.headers[from..self.have].first_chunk::<DIGEST>() else {
                        break;
                    };
                    let told = *told;
                    from += DIGEST;
                    self.check_data(at, told);
                    self.data_ends(at)?;
                }
                Input::Head => {
                    let len = self.terms.head();
                    if there < len {
                        break;
                    }
                    let mut head = [0; HEAD];
                    head.copy_from_slice(&self.headers[from..from + HEAD]);
                    if self.terms.header_digest
                        && head[0] != kind::C2H_TERMINATE
                        && wire::digest(&head) != self.headers[from + HEAD..from + len]
                    {
                        return Err(Broken::HeaderDigest);
                    }
                    from += len;
                    self.heard(&head)?;
                }
            }
        }
        self.headers.copy_within(from..self.have, 0);
        self.have -= from;
        Ok(())
    }

    /// A header came.
    fn heard(&mut self, head: &[u8; HEAD]) -> Result<(), Broken> {
        let (is, flags, len) = (head[0], head[1], u32_at(head, 4) as usize);
        if is == kind::C2H_TERMINATE {
            return Err(Broken::Terminated(u16_at(head, 8)));
        }
        if !matches!(is, kind::RESPONSE | kind::C2H_DATA | kind::R2T) {
            return Err(Broken::NotAPdu);
        }
        let digests = flags & flag::HEADER_DIGEST != 0;
        if usize::from(head[2]) != HEAD || digests != self.terms.header_digest {
            return Err(Broken::Length);
        }
        if is != kind::C2H_DATA && (len != self.terms.head() || flags & flag::DATA_DIGEST != 0) {
            return Err(Broken::Length);
        }
        match is {
            kind::RESPONSE => {
                let (id, completion) = Completion::parse(&head[8..8 + COMPLETION]);
                let at = self.known(id)?;
                let slot = &self.slots[at];
                if let Data::In(_, _, len) = slot.data
                    && completion.status & 0x7FF == 0
                    && slot.got < len
                {
                    return Err(Broken::Short);
                }
                self.answer(at, completion)
            }
            kind::R2T => self.asked(head),
            _ => self.data_comes(head),
        }
    }

    /// The slot of a command in flight that something is said of.
    fn known(&mut self, id: u16) -> Result<u16, Broken> {
        let at = id & (GENERATION - 1);
        if at >= self.slots.len() as u16 {
            return Err(Broken::Unknown);
        }
        let slot = &mut self.slots[at];
        let is_it = slot.used && slot.generation == id & !(GENERATION - 1);
        if !is_it || slot.answer.is_some() {
            return Err(Broken::Unknown);
        }
        if !slot.handed {
            return Err(Broken::Early);
        }
        if slot.out.kind == Kind::Capsule {
            self.note_early(at);
        }
        Ok(at)
    }

    /// What was heard of a slot cannot be, unless what it sends is sent, which the kernel may not have told yet.
    fn note_early(&mut self, at: u16) {
        let slot = &mut self.slots[at];
        if slot.queued && !slot.early {
            slot.early = true;
            self.early += 1;
        }
    }

    fn answer(&mut self, at: u16, completion: Completion) -> Result<(), Broken> {
        let slot = &mut self.slots[at];
        let is_whole = match slot.data {
            Data::Out(_, _, len) => slot.asked == len && slot.transfer.is_none(),
            _ => true,
        };
        // A command may fail before all of its data is there.
        if completion.status & 0x7FF == 0 {
            if !is_whole {
                return Err(Broken::Short);
            }
            self.note_early(at);
        }
        let slot = &mut self.slots[at];
        slot.answer = Some(completion);
        slot.transfer = None;
        if !slot.queued {
            self.finish(at);
        }
        Ok(())
    }

    /// A command is sent and answered.
    pub(super) fn finish(&mut self, at: u16) {
        self.reads -= u32::from(matches!(self.slots[at].data, Data::In(..)));
        self.ended.push_back(at);
    }

    /// The controller asks for data (R2T).
    fn asked(&mut self, head: &[u8; HEAD]) -> Result<(), Broken> {
        let at = self.known(u16_at(head, 8))?;
        let (tag, offset, len) =
            (u16_at(head, 10), u32_at(head, 12) as usize, u32_at(head, 16) as usize);
        let slot = &mut self.slots[at];
        let Data::Out(_, _, all) = slot.data else { return Err(Broken::Transfer) };
        let is_next = slot.transfer.is_none() && offset == slot.asked;
        // A capsule that has its data, and one that is through with another request, have nothing to ask for.
        let end = offset.checked_add(len).filter(|end| is_next && len > 0 && *end <= all);
        let Some(end) = end else { return Err(Broken::Transfer) };
        slot.asked = end;
        slot.transfer = Some(Transfer { tag, offset, end });
        self.note_early(at);
        self.send_data(at);
        Ok(())
    }

    /// A PDU of data begins (C2HData).
    fn data_comes(&mut self, head: &[u8; HEAD]) -> Result<(), Broken> {
        let at = self.known(u16_at(head, 8))?;
        let (flags, begin) = (head[1], usize::from(head[3]));
        let (offset, len) = (u32_at(head, 12) as usize, u32_at(head, 16) as usize);
        let slot = &mut self.slots[at];
        let Data::In(_, _, all) = slot.data else { return Err(Broken::Data) };
        let end = offset.checked_add(len).filter(|end| *end <= all);
        if end.is_none() || offset != slot.got || len == 0 {
            return Err(Broken::Data);
        }
        let has_digest = flags & flag::DATA_DIGEST != 0;
        let whole = begin + len + if has_digest { DIGEST } else { 0 };
        let is_last = flags & flag::LAST != 0;
        if has_digest != self.terms.data_digest
            || begin < self.terms.head()
            || whole != u32_at(head, 4) as usize
            || flags & flag::SUCCESS != 0 && !is_last
        {
            return Err(Broken::Length);
        }
        if is_last && end != Some(all) {
            return Err(Broken::Short);
        }
        self.coming = Coming { begin: offset, len, flags };
        self.input = match begin - self.terms.head() {
            0 => Input::Data(at),
            pad => Input::Pad(at, pad),
        };
        Ok(())
    }

    /// All data of a PDU is there.
    fn data_came(&mut self, at: u16) -> Result<(), Broken> {
        if self.has_data_digest() {
            self.input = Input::Digest(at);
            return Ok(());
        }
        self.data_ends(at)
    }

    fn data_ends(&mut self, at: u16) -> Result<(), Broken> {
        self.input = Input::Head;
        match self.coming.flags & flag::SUCCESS != 0 {
            true => self.answer(at, Completion::default()),
            false => Ok(()),
        }
    }

    fn check_data(&mut self, at: u16, told: [u8; DIGEST]) {
        let (mut sum, mut chunk) = (crc(), [0; CHUNK]);
        let slot = &mut self.slots[at];
        let Data::In(sg, offset, _) = &slot.data else { return };
        let Coming { begin, len, .. } = self.coming;
        let mut done = 0;
        while done < len {
            let take = (len - done).min(CHUNK);
            sg.copy_to_slice(offset + begin + done, &mut chunk[..take]);
            sum.update(&chunk[..take]);
            done += take;
        }
        slot.damaged |= (sum.finalize() as u32).to_le_bytes() != told;
    }
}
