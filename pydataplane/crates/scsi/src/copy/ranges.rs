//! POPULATE TOKEN and WRITE USING TOKEN (SBC-3 5.8, 5.48): what their parameter lists order.

use super::order::{be16, be32, be64};
use super::token::TOKEN_LEN;
use crate::sense::{Code, Sense};
use crate::shared::LunShared;
use crate::watch::{MAX_RANGES, Range};
use std::time::Duration;

/// Bytes of a token's data, and of what one WRITE USING TOKEN writes, at most.
pub(crate) const MAX_TOKEN_BYTES: u64 = 256 << 20;
/// Bytes that are best copied at once.
pub(crate) const OPTIMAL_BYTES: u64 = 64 << 20;
/// How long a token is good that nobody uses, in seconds: at most, and where the initiator does not say.
pub(crate) const MAX_INACTIVITY_S: u32 = 3600;
pub(crate) const DEFAULT_INACTIVITY_S: u32 = 60;

/// Bytes before the ranges, and of each one.
const POPULATE_HEADER: usize = 16;
const WRITE_HEADER: usize = 536;
const DESCRIPTOR: usize = 16;
/// Longest parameter list: one descriptor more than is taken, to be told so.
pub(crate) const MAX_LIST: usize = WRITE_HEADER + (MAX_RANGES + 1) * DESCRIPTOR;

const IMMED: u8 = 0x01;

/// POPULATE TOKEN.
pub(crate) struct Populate {
    pub(crate) immediate: bool,
    pub(crate) timeout: Duration,
    pub(crate) ranges: Vec<Range>,
}

impl Populate {
    /// # Errors
    /// PARAMETER LIST LENGTH ERROR; INVALID FIELD IN PARAMETER LIST; TOO MANY SEGMENT DESCRIPTORS; LBA OUT OF RANGE.
    pub(crate) fn read(list: &[u8], unit: &LunShared) -> Result<Self, Sense> {
        const RTV: u8 = 0x02;
        let ranges = ranges(list, POPULATE_HEADER, unit)?;
        let timeout = match be32(list, 4) {
            0 => DEFAULT_INACTIVITY_S,
            given if given > MAX_INACTIVITY_S => return Err(Sense::invalid_parameter(4)),
            given => given,
        };
        let known = [super::token::CHANGE_VULNERABLE, super::token::ANY_POINT_IN_TIME];
        if list[2] & RTV != 0 && !known.contains(&be32(list, 8)) {
            return Err(Sense::invalid_parameter(8));
        }
        if total(&ranges) == 0 {
            return Err(Sense::invalid_parameter(POPULATE_HEADER as u16));
        }
        let timeout = Duration::from_secs(timeout.into());
        Ok(Populate { immediate: list[2] & IMMED != 0, timeout, ranges })
    }
}

/// WRITE USING TOKEN.
pub(crate) struct WriteUsing<'a> {
    /// The token is not needed any more.
    pub(crate) delete: bool,
    /// Bytes of the token's data before those that are written.
    pub(crate) offset: u64,
    pub(crate) token: &'a [u8; TOKEN_LEN],
    pub(crate) ranges: Vec<Range>,
}

impl<'a> WriteUsing<'a> {
    /// # Errors
    /// As [`Populate::read`].
    pub(crate) fn read(list: &'a [u8], unit: &LunShared) -> Result<Self, Sense> {
        const DEL_TKN: u8 = 0x02;
        let ranges = ranges(list, WRITE_HEADER, unit)?;
        let offset = be64(list, 8).checked_mul(unit.block_size.into());
        Ok(WriteUsing {
            delete: list[2] & DEL_TKN != 0,
            offset: offset.ok_or(Sense::invalid_parameter(8))?,
            token: list[16..].first_chunk().ok_or(length_error())?,
            ranges,
        })
    }
}

/// Where in a WRITE USING TOKEN parameter list the token is, and the length of its ranges.
pub(crate) const TOKEN_AT: u16 = 16;
pub(crate) const WRITE_LENGTH_AT: u16 = WRITE_HEADER as u16 - 2;

const fn length_error() -> Sense {
    Sense::illegal(Code::PARAMETER_LIST_LENGTH_ERROR)
}

/// Bytes of all ranges.
pub(crate) fn total(ranges: &[Range]) -> u64 {
    ranges.iter().map(|range| range.bytes).sum()
}

/// The block device range descriptors after `header` bytes, of which the last two are their length; they lie on
/// the medium, do not overlap, and are not more than is announced.
fn ranges(list: &[u8], header: usize, unit: &LunShared) -> Result<Vec<Range>, Sense> {
    if list.len() < header {
        return Err(length_error());
    }
    let (data, length) = (usize::from(be16(list, 0)) + 2, usize::from(be16(list, header - 2)));
    if data < header + DESCRIPTOR {
        return Err(Sense::invalid_parameter(0));
    }
    if length < DESCRIPTOR {
        return Err(Sense::invalid_parameter(header as u16 - 2));
    }
    if header + length > data || data > list.len() {
        return Err(length_error());
    }
    // A last descriptor that is not whole is ignored.
    let descriptors = list[header..header + length].chunks_exact(DESCRIPTOR);
    if descriptors.len() > MAX_RANGES {
        return Err(Sense::illegal(Code::TOO_MANY_SEGMENT_DESCRIPTORS));
    }
    let block = u64::from(unit.block_size);
    let mut ranges = Vec::with_capacity(MAX_RANGES);
    let mut all = 0;
    for (index, descriptor) in descriptors.enumerate() {
        let (lba, blocks) = (be64(descriptor, 0), u64::from(be32(descriptor, 8)));
        let end = lba.checked_add(blocks).filter(|end| *end <= unit.num_blocks());
        let at = end.and(lba.checked_mul(block)).ok_or(Sense::illegal(Code::LBA_OUT_OF_RANGE))?;
        let range = Range { at, bytes: blocks * block };
        if blocks == 0 {
            continue;
        }
        all += range.bytes;
        let overlaps =
            |other: &Range| range.at < other.at + other.bytes && other.at < range.at + range.bytes;
        if all > MAX_TOKEN_BYTES || ranges.iter().any(overlaps) {
            return Err(Sense::invalid_parameter((header + index * DESCRIPTOR) as u16));
        }
        ranges.push(range);
    }
    Ok(ranges)
}
