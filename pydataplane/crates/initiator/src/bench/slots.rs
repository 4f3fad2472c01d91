//! Preallocated requests: tables, headers, answers and data of every I/O in flight.

use guestmem::GuestRange;
use virtqueue::Desc;

use crate::error::Error;
use crate::ring::Ring;
use crate::session::{Kind, Session};
use crate::{blk, scsi};

/// Descriptors of a request: header, data, answer.
const DESCS: u16 = 3;
/// Byte of a request's memory with the table for reads; 64 bytes further the one for writes.
const TABLE: u64 = 0;
/// Byte with the header.
const HEADER: u64 = 128;
/// Byte with the answer.
const ANSWER: u64 = 192;
/// Bytes of all that; data is elsewhere, aligned to 4 KiB.
const CONTROL: u64 = 320;
/// What an answer is before the target wrote it: no status has this value.
const UNANSWERED: u16 = 0xffff;

/// One request, used again and again.
pub struct Slot {
    header: GuestRange<'static>,
    answer: GuestRange<'static>,
    data: GuestRange<'static>,
    control_at: u64,
    data_at: u64,
    /// Which table the ring's descriptor points to.
    armed: Option<bool>,
    /// Ticks when it was submitted.
    pub started: u64,
    /// Block of the disk, in units of the block size of the benchmark.
    pub block: u64,
    /// Whether it writes.
    pub write: bool,
}

/// All requests of one queue.
pub struct Slots {
    kind: Kind,
    indirect: bool,
    /// Whose turn it is to get a request.
    luns: Vec<[u8; 8]>,
    bs: u32,
    /// Size of a logical block in bytes.
    block_size: u32,
    /// The requests; a chain's head is its index (times three without indirect tables).
    pub slots: Vec<Slot>,
}

impl Slots {
    /// `depth` requests of `bs` bytes, in turn to each of `luns`.
    pub fn new(
        session: &mut Session,
        ring: &Ring,
        depth: u16,
        bs: u32,
        block_size: u32,
        luns: &[[u8; 8]],
        indirect: bool,
    ) -> Result<Slots, Error> {
        let needed = if indirect { depth } else { depth.saturating_mul(DESCS) };
        if needed > ring.at().size {
            return Err(Error::Usage(format!(
                "{depth} I/Os in flight need a queue of {needed} descriptors, not {}",
                ring.at().size
            )));
        }
        let mut slots = Vec::with_capacity(depth.into());
        for _ in 0..depth {
            let control_at = session.arena.alloc(CONTROL, 64)?;
            let data_at = session.arena.alloc(u64::from(bs), 4096)?;
            let part = |gpa, len| {
                let range = session.arena.range(gpa, len)?;
                range.fill(0);
                // SAFETY: the session, which outlives the run, keeps its first region mapped.
                Ok::<_, Error>(unsafe { range.detach() })
            };
            slots.push(Slot {
                header: part(control_at + HEADER, scsi::REQUEST_LEN as u64)?,
                answer: part(control_at + ANSWER, scsi::RESPONSE_LEN as u64)?,
                data: part(data_at, u64::from(bs))?,
                control_at,
                data_at,
                armed: None,
                started: 0,
                block: 0,
                write: false,
            });
        }
        let kind = session.options.kind;
        let made = Slots { kind, indirect, luns: luns.to_vec(), bs, block_size, slots };
        for slot in &made.slots {
            for write in [false, true] {
                let at = slot.control_at + TABLE + if write { 64 } else { 0 };
                for (i, desc) in made.chain(slot, write, 0).into_iter().enumerate() {
                    session.arena.range(at + i as u64 * 16, 16)?.put(0, desc)?;
                }
            }
        }
        Ok(made)
    }

    /// The three descriptors of a request, linked from index `first`.
    fn chain(&self, slot: &Slot, write: bool, first: u16) -> [Desc; DESCS as usize] {
        let (header, answer) = match self.kind {
            Kind::Scsi => (scsi::REQUEST_LEN, scsi::RESPONSE_LEN),
            Kind::Blk => (blk::HEADER_LEN, 1),
        };
        let header = (slot.control_at + HEADER, header as u32, 0);
        let answer = (slot.control_at + ANSWER, answer as u32, Desc::WRITE);
        let data = (slot.data_at, self.bs, if write { 0 } else { Desc::WRITE });
        // virtio-scsi's response comes before data in, virtio-blk's status after it.
        let order = match (self.kind, write) {
            (Kind::Scsi, false) => [header, answer, data],
            _ => [header, data, answer],
        };
        let mut i = 0;
        order.map(|(addr, len, flags)| {
            i += 1;
            let next = if i < DESCS { Desc::NEXT } else { 0 };
            Desc::new(addr, len, flags | next, first + i)
        })
    }

    /// The head of request `index`.
    #[inline(always)]
    fn head(&self, index: usize) -> u16 {
        index as u16 * if self.indirect { 1 } else { DESCS }
    }

    /// The request of a chain that came back.
    #[inline(always)]
    pub fn index_of(&self, head: u32) -> Option<usize> {
        let index = head as usize / if self.indirect { 1 } else { usize::from(DESCS) };
        (index < self.slots.len() && u32::from(self.head(index)) == head).then_some(index)
    }

    /// Fills request `index` and adds it to `ring`.
    #[inline(always)]
    pub fn submit(&mut self, ring: &mut Ring, index: usize, now: u64) -> Result<(), Error> {
        let head = self.head(index);
        let slot = &self.slots[index];
        let (write, block) = (slot.write, slot.block);
        if slot.armed != Some(write) {
            if self.indirect {
                let table = slot.control_at + TABLE + if write { 64 } else { 0 };
                let len = u32::from(DESCS) * 16;
                ring.set_desc(head, Desc::new(table, len, Desc::INDIRECT, 0))?;
            } else {
                for (i, desc) in self.chain(slot, write, head).into_iter().enumerate() {
                    ring.set_desc(head + i as u16, desc)?;
                }
            }
        }
        let byte = block * u64::from(self.bs);
        match self.kind {
            Kind::Scsi => {
                let lba = byte / u64::from(self.block_size);
                let cdb = scsi::read_write_16(write, false, lba, self.bs / self.block_size);
                if slot.armed.is_none() {
                    let lun = self.luns[index % self.luns.len()];
                    slot.header.write_slice(0, &scsi::request(lun, index as u64, &cdb))?;
                } else {
                    slot.header.write_slice(19, &cdb)?;
                }
                slot.answer.put(scsi::STATUS_AT, UNANSWERED)?;
            }
            Kind::Blk => {
                let kind = if write { blk::T_OUT } else { blk::T_IN };
                slot.header.write_slice(0, &blk::header(kind, byte / blk::SECTOR))?;
                slot.answer.put(0, UNANSWERED as u8)?;
            }
        }
        let slot = &mut self.slots[index];
        slot.armed = Some(write);
        slot.started = now;
        ring.add(head);
        Ok(())
    }

    /// Whether the target says that request `index` went well.
    #[inline(always)]
    pub fn is_good(&self, index: usize) -> bool {
        let answer = &self.slots[index].answer;
        match self.kind {
            // Status GOOD and response OK, side by side.
            Kind::Scsi => answer.get::<u16>(scsi::STATUS_AT) == Ok(0),
            Kind::Blk => answer.get::<u8>(0) == Ok(0),
        }
    }

    /// Copies the data of request `index` out.
    pub fn read_data(&self, index: usize, out: &mut [u8]) -> Result<(), Error> {
        Ok(self.slots[index].data.read_slice(0, out)?)
    }

    /// Copies `bytes` into the data of request `index`.
    pub fn write_data(&self, index: usize, bytes: &[u8]) -> Result<(), Error> {
        Ok(self.slots[index].data.write_slice(0, bytes)?)
    }
}
