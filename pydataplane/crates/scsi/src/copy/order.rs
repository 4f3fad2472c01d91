//! EXTENDED COPY, LID1 and LID4 (SPC-4 6.4, 6.5): what its parameter list orders.

use crate::sense::{Code, Key, Sense};
use crate::shared::LunShared;
use std::sync::Arc;

/// Most CSCD descriptors and segment descriptors of one command.
pub(crate) const MAX_CSCDS: usize = 8;
pub(crate) const MAX_SEGMENTS: usize = 64;
/// MAXIMUM DESCRIPTOR LIST LENGTH, in bytes.
pub(crate) const MAX_DESCRIPTORS: usize = MAX_CSCDS * CSCD_LEN + MAX_SEGMENTS * SEGMENT_LEN;
/// Blocks of a segment at most: what its field holds.
pub(crate) const MAX_SEGMENT_BLOCKS: u64 = u16::MAX as u64;

const CSCD_LEN: usize = 32;
const SEGMENT_LEN: usize = 28;
/// Identification descriptor CSCD descriptor, and block device to block device segment descriptor.
pub(crate) const IDENTIFICATION: u8 = 0xE4;
pub(crate) const BLOCK_TO_BLOCK: u8 = 0x02;

/// Who copies between what of an initiator's units.
#[derive(Clone)]
pub(crate) struct Segment {
    pub(crate) from: Arc<LunShared>,
    pub(crate) to: Arc<LunShared>,
    /// Bytes from the beginning of each; whole blocks of both.
    pub(crate) from_at: u64,
    pub(crate) to_at: u64,
    pub(crate) bytes: u64,
}

impl Segment {
    /// Whether it copies within one disk.
    pub(crate) fn is_within_one(&self) -> bool {
        are_same(&self.from, &self.to)
    }

    /// Its last `bytes` bytes.
    pub(crate) fn last(&self, bytes: u64) -> Segment {
        let before = self.bytes - bytes;
        let (from_at, to_at) = (self.from_at + before, self.to_at + before);
        Segment { from_at, to_at, bytes, ..self.clone() }
    }

    /// Whether `self` writes where `read` is read.
    fn overwrites(&self, read: &Segment) -> bool {
        let (to, from) =
            (self.to_at..self.to_at + self.bytes, read.from_at..read.from_at + read.bytes);
        are_same(&self.to, &read.from) && to.start < from.end && from.start < to.end
    }
}

fn are_same(a: &LunShared, b: &LunShared) -> bool {
    a.bdev().uuid() == b.bdev().uuid()
}

/// Whether the segments, done a second time, could copy other data: one of them writes where it has been read.
pub(crate) fn is_unrepeatable(segments: &[Segment]) -> bool {
    let overwrites = |(nth, segment): (usize, &Segment)| {
        segments[..=nth].iter().any(|read| segment.overwrites(read))
    };
    segments.iter().enumerate().any(overwrites)
}

/// A parameter list, read.
pub(crate) struct Order {
    pub(crate) segments: Vec<Segment>,
    /// LIST IDENTIFIER, by which the initiator asks what has become of it; `None`: it does not.
    pub(crate) list_id: Option<u32>,
}

/// Which of the two parameter lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Lid1,
    Lid4,
}

impl Format {
    /// Bytes before the descriptors.
    const fn header_len(self) -> usize {
        match self {
            Format::Lid1 => 16,
            Format::Lid4 => 48,
        }
    }

    /// Bytes of the longest parameter list.
    pub(crate) const fn max_list(self) -> usize {
        self.header_len() + MAX_DESCRIPTORS
    }
}

/// What stands before the descriptors.
pub(crate) struct Header {
    /// Bytes of the descriptors.
    pub(crate) cscds: usize,
    pub(crate) segments: usize,
    pub(crate) list_id: Option<u32>,
}

impl Header {
    /// Reads it, of a list that may be longer than any that is taken.
    ///
    /// # Errors
    /// INVALID FIELD IN PARAMETER LIST.
    pub(crate) fn read(list: &[u8], format: Format) -> Result<Self, Sense> {
        /// PARAMETER LIST FORMAT, HEADER CSCD DESCRIPTOR LIST LENGTH and TYPE CODE.
        const FORMAT: u8 = 1;
        const HEADER_CSCD_LEN: u16 = 32;
        const HEADER_CSCD: u8 = 0xFF;
        const IMMED: u8 = 0x01;
        let length_error = Sense::illegal(Code::PARAMETER_LIST_LENGTH_ERROR);
        let list = list.get(..format.header_len()).ok_or(length_error)?;
        let (id, cscds, segments, inline_at, immediate) = match format {
            Format::Lid1 => {
                let (cscds, segments) = (be16(list, 2).into(), be32(list, 8) as usize);
                (list[0].into(), cscds, segments, 12, false)
            }
            Format::Lid4 => {
                for (at, is_right) in [
                    (0, list[0] == FORMAT),
                    (2, be16(list, 2) == HEADER_CSCD_LEN),
                    (16, list[16] == HEADER_CSCD),
                ] {
                    if !is_right {
                        return Err(Sense::invalid_parameter(at));
                    }
                }
                let (cscds, segments) = (be16(list, 42).into(), be16(list, 44).into());
                (be32(list, 20), cscds, segments, 46, list[15] & IMMED != 0)
            }
        };
        if list[inline_at..].iter().take(4).any(|byte| *byte != 0) {
            return Err(Sense::invalid_parameter(inline_at as u16)); // there is no inline data
        }
        let list_id = match list[1] >> 3 & 0b11 {
            0 | 2 => Some(id),
            // What nobody can ask for is not done beside who has asked for it.
            3 if id == 0 && !immediate => None,
            _ => return Err(Sense::invalid_parameter(1)),
        };
        Ok(Header { cscds, segments, list_id })
    }
}

/// Finds the initiator's unit of a designator's type and bytes.
pub(crate) type UnitOf<'a> = &'a dyn Fn(u8, &[u8]) -> Option<Arc<LunShared>>;

/// Why a segment cannot be copied (SPC-4 5.17.7.4).
pub(crate) const fn aborted(code: Code) -> Sense {
    Sense::new(Key::CopyAborted, code)
}

/// Reads `list`, whole; `unit_of` finds the initiator's unit of a designator's type and bytes.
///
/// # Errors
/// PARAMETER LIST LENGTH ERROR; TOO MANY or UNSUPPORTED descriptors; INVALID FIELD IN PARAMETER LIST; COPY ABORTED
/// for a unit that the initiator does not have, and for blocks that it has not.
pub(crate) fn read(list: &[u8], format: Format, unit_of: UnitOf<'_>) -> Result<Order, Sense> {
    let length_error = Sense::illegal(Code::PARAMETER_LIST_LENGTH_ERROR);
    let Header { cscds, segments, list_id } = Header::read(list, format)?;
    let (at, begin) = (format.header_len(), format.header_len() + cscds);
    let end = segments.checked_add(begin);
    if end.is_none_or(|end| end > list.len()) || cscds + segments > MAX_DESCRIPTORS {
        return Err(length_error);
    }
    let units = units_of(&list[at..begin], at, unit_of)?;
    let segments = segments_of(&list[begin..begin + segments], begin, &units)?;
    Ok(Order { segments, list_id })
}

/// The units that the descriptors name, in order; `None`: the initiator has no such one.
fn units_of(
    descriptors: &[u8],
    begin: usize,
    unit_of: UnitOf<'_>,
) -> Result<Vec<Option<Arc<LunShared>>>, Sense> {
    let mut units = Vec::new();
    for (index, descriptor) in descriptors.chunks(CSCD_LEN).enumerate() {
        let at = begin + index * CSCD_LEN;
        if descriptor[0] != IDENTIFICATION {
            return Err(Sense::illegal(Code::UNSUPPORTED_CSCD_DESCRIPTOR));
        }
        if descriptor.len() < CSCD_LEN {
            return Err(Sense::illegal(Code::PARAMETER_LIST_LENGTH_ERROR));
        }
        if index == MAX_CSCDS {
            return Err(Sense::illegal(Code::TOO_MANY_CSCD_DESCRIPTORS));
        }
        let (of_unit, kind) = (descriptor[5] >> 4 & 0b11 == 0, descriptor[5] & 0x0F);
        let designator = descriptor[8..28].get(..usize::from(descriptor[7]));
        let Some(designator) = designator.filter(|_| of_unit) else {
            return Err(Sense::invalid_parameter(at as u16 + 5));
        };
        let unit = unit_of(kind, designator);
        let block_size = be32(descriptor, 28) & 0xFF_FFFF;
        if unit.as_ref().is_some_and(|unit| block_size != 0 && block_size != unit.block_size) {
            return Err(Sense::invalid_parameter(at as u16 + 29));
        }
        units.push(unit);
    }
    Ok(units)
}

fn segments_of(
    mut descriptors: &[u8],
    mut at: usize,
    units: &[Option<Arc<LunShared>>],
) -> Result<Vec<Segment>, Sense> {
    const DC: u8 = 0x02;
    let mut segments = Vec::new();
    while !descriptors.is_empty() {
        if descriptors[0] != BLOCK_TO_BLOCK {
            return Err(Sense::illegal(Code::UNSUPPORTED_SEGMENT_DESCRIPTOR));
        }
        let Some((it, rest)) = descriptors.split_at_checked(SEGMENT_LEN) else {
            return Err(Sense::illegal(Code::PARAMETER_LIST_LENGTH_ERROR));
        };
        if segments.len() == MAX_SEGMENTS {
            return Err(Sense::illegal(Code::TOO_MANY_SEGMENT_DESCRIPTORS));
        }
        if usize::from(be16(it, 2)) != SEGMENT_LEN - 4 {
            return Err(Sense::invalid_parameter(at as u16 + 2));
        }
        let unit = |index_at| {
            let unit = units.get(usize::from(be16(it, index_at))).cloned().flatten();
            unit.ok_or(aborted(Code::COPY_TARGET_NOT_REACHABLE))
        };
        let (from, to) = (unit(4)?, unit(6)?);
        let counted = if it[1] & DC == 0 { &from } else { &to };
        let bytes = u64::from(be16(it, 10)) * u64::from(counted.block_size);
        let place = |unit: &LunShared, lba: u64| {
            let block = u64::from(unit.block_size);
            let end = lba.checked_add(bytes / block).filter(|end| *end <= unit.num_blocks());
            let is_whole = bytes.is_multiple_of(block);
            end.filter(|_| is_whole).ok_or(aborted(Code::NO_ADDITIONAL_SENSE)).map(|_| lba * block)
        };
        let (from_at, to_at) = (place(&from, be64(it, 12))?, place(&to, be64(it, 20))?);
        segments.push(Segment { from, to, from_at, to_at, bytes });
        (descriptors, at) = (rest, at + SEGMENT_LEN);
    }
    Ok(segments)
}

pub(crate) fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

pub(crate) fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from(be16(bytes, at)) << 16 | u32::from(be16(bytes, at + 2))
}

pub(crate) fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from(be32(bytes, at)) << 32 | u64::from(be32(bytes, at + 4))
}
