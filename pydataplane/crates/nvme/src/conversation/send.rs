//! What goes over a connection: commands, and the data that the controller asks for.

use guestmem::IoVec;

use super::{AT_ONCE, Broken, Conversation, Data, Kind, Out, crc};
use crate::wire::{DIGEST, HEAD, HEAD_MAX, flag, kind};

impl Conversation {
    /// Bytes of the PDU that a slot sends.
    pub(super) fn size(&self, at: u16) -> usize {
        let Out { begin, len, .. } = self.slots[at].out;
        begin + len + if len > 0 && self.terms.data_digest { DIGEST } else { 0 }
    }

    /// Fills `runs` with what is to be sent next: how many, and their bytes. They stay as they are until
    /// [`Conversation::was_sent`] or [`Conversation::take_unanswered`].
    pub fn to_send(&mut self, runs: &mut [IoVec]) -> (usize, usize) {
        if self.terms.data_digest {
            self.stage();
            let rest = &mut self.staged[self.staged_sent..];
            if rest.is_empty() {
                return (0, 0);
            }
            // SAFETY: the buffer stays in place, and is not refilled before all of it is sent; it is only read.
            runs[0] = unsafe { IoVec::new(rest.as_mut_ptr(), rest.len()) };
            return (1, rest.len());
        }
        let (mut count, mut bytes) = (0, 0);
        for (n, &at) in self.sending.iter().enumerate() {
            let slot = &mut self.slots[at];
            let skip = if n == 0 { self.sent } else { 0 };
            let Out { begin, len, offset, .. } = slot.out;
            if skip < begin {
                let Some(run) = runs.get_mut(count) else { break };
                let header = &mut slot.out.header[skip..begin];
                // SAFETY: slots stay in place, and this one as it is until it is sent; it is only read.
                *run = unsafe { IoVec::new(header.as_mut_ptr(), header.len()) };
                slot.handed = true;
                count += 1;
                bytes += begin - skip;
            }
            let from = skip.saturating_sub(begin);
            if let Data::Out(sg, ..) = &slot.data
                && from < len
            {
                let most = (len - from).min(AT_ONCE.saturating_sub(bytes));
                let (used, taken) = sg.slice_as_far(offset + from, most, &mut runs[count..]);
                count += used;
                bytes += taken;
                if taken < len - from {
                    break;
                }
            }
            if bytes >= AT_ONCE {
                break;
            }
        }
        (count, bytes)
    }

    /// Copies what is to be sent next, with the digests of data, once all that was copied before is sent.
    pub(super) fn stage(&mut self) {
        if self.staged_sent < self.staged.len() {
            return;
        }
        self.staged.clear();
        self.staged_sent = 0;
        for (n, &at) in self.sending.iter().enumerate() {
            let slot = &mut self.slots[at];
            let skip = if n == 0 { self.sent } else { 0 };
            let out = &mut slot.out;
            let (end, room) = (out.begin + out.len, |staged: &Vec<u8>| AT_ONCE - staged.len());
            if room(&self.staged) < HEAD_MAX + DIGEST {
                break;
            }
            if skip < out.begin {
                self.staged.extend_from_slice(&out.header[skip..out.begin]);
                slot.handed = true;
            }
            let from = skip.saturating_sub(out.begin);
            if let Data::Out(sg, ..) = &slot.data
                && from < out.len
            {
                if from == 0 {
                    self.running = crc();
                }
                let take = (out.len - from).min(room(&self.staged) - DIGEST);
                let old = self.staged.len();
                self.staged.resize(old + take, 0);
                sg.copy_to_slice(out.offset + from, &mut self.staged[old..]);
                self.running.update(&self.staged[old..]);
                if from + take < out.len {
                    break;
                }
                out.digest = (self.running.finalize() as u32).to_le_bytes();
            }
            if out.len > 0 {
                self.staged.extend_from_slice(&out.digest[skip.saturating_sub(end)..]);
            }
        }
    }

    /// So many bytes of what [`Conversation::to_send`] said are sent, and the kernel has let go of them.
    ///
    /// # Errors
    /// [`Broken::Early`].
    pub fn was_sent(&mut self, mut bytes: usize) -> Result<(), Broken> {
        if self.terms.data_digest {
            self.staged_sent += bytes;
        }
        while bytes > 0
            && let Some(&at) = self.sending.front()
        {
            let left = self.size(at) - self.sent;
            if bytes < left {
                self.sent += bytes;
                break;
            }
            bytes -= left;
            self.sent = 0;
            self.sending.pop_front();
            let slot = &mut self.slots[at];
            slot.queued = false;
            if slot.out.kind == Kind::Capsule {
                slot.sent = true;
            }
            if std::mem::take(&mut slot.early) {
                self.early -= 1;
            }
            match slot.answer {
                Some(_) => self.finish(at),
                None => self.send_data(at),
            }
        }
        if self.early > 0 { Err(Broken::Early) } else { Ok(()) }
    }

    /// Has the next PDU of what the controller asked for be sent.
    pub(super) fn send_data(&mut self, at: u16) {
        let terms = self.terms;
        let slot = &mut self.slots[at];
        let (Some(transfer), false, true) = (&mut slot.transfer, slot.queued, slot.sent) else {
            return;
        };
        let Data::Out(_, begin, _) = slot.data else { return };
        let (tag, offset) = (transfer.tag, transfer.offset);
        let len = (transfer.end - offset).min(terms.h2c_max as usize);
        transfer.offset += len;
        let is_last = transfer.offset == transfer.end;
        if is_last {
            slot.transfer = None;
        }
        let out = &mut slot.out;
        (out.kind, out.offset, out.len) = (Kind::Data, begin + offset, len);
        out.header[8..HEAD].fill(0);
        out.header[8..10].copy_from_slice(&(slot.generation | at).to_le_bytes());
        out.header[10..12].copy_from_slice(&tag.to_le_bytes());
        out.header[12..16].copy_from_slice(&(offset as u32).to_le_bytes());
        out.header[16..20].copy_from_slice(&(len as u32).to_le_bytes());
        let flags = if is_last { flag::LAST } else { 0 };
        out.begin = terms.complete(&mut out.header, kind::H2C_DATA, flags, HEAD, len);
        slot.queued = true;
        self.sending.push_back(at);
    }
}
