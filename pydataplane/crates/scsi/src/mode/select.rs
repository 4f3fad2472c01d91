//! MODE SELECT (SPC-4 6.10, 6.11): the whole parameter list is checked before anything is changed.

use super::state::Modes;
use super::tags::{self, TagRanges};
use super::{ALL_SUBPAGES, APPLICATION_TAG, CACHING, CONTROL, Page, Values, page};
use crate::opcode::Cdb;
use crate::response::Fail;
use crate::sense::{Code, Sense};
use crate::shared::LunShared;
use guestmem::Sg;

/// Longest parameter list that is taken, in bytes: some times all pages.
const LONGEST: usize = 512;
/// Header of the 6 and of the 10-byte command.
const HEADER_6: usize = 4;
const HEADER_10: usize = 8;

/// A parameter list, whole.
pub(crate) struct List {
    data: [u8; LONGEST],
    length: usize,
    /// Where the pages begin.
    pages_at: usize,
}

impl List {
    /// That of a command with a header of `header` bytes; `None`: there is nothing in it.
    ///
    /// # Errors
    /// PARAMETER LIST LENGTH ERROR, and INVALID FIELD IN PARAMETER LIST for another size of the unit or its
    /// blocks, which cannot be set.
    pub(crate) fn read(
        unit: &LunShared,
        cdb: &Cdb,
        data_out: &Sg,
        is_long: bool,
    ) -> Result<Option<List>, Fail> {
        const PF: u8 = 4;
        let (header, length) = match is_long {
            true => (HEADER_10, usize::from(cdb.be16(7))),
            false => (HEADER_6, usize::from(cdb.byte(4))),
        };
        if length == 0 {
            return Ok(None);
        }
        if !cdb.bit(1, PF) {
            return Err(Sense::invalid_cdb(1, Some(PF)).into());
        }
        if length < header || length > LONGEST {
            return Err(too_short());
        }
        if data_out.len() < length {
            return Err(Fail::Overrun);
        }
        let mut data = [0; LONGEST];
        data_out.copy_to_slice(0, &mut data[..length]);
        let (medium_type_at, long_lba, descriptors) = match is_long {
            true => (2, data[4] & 1 != 0, usize::from(u16::from_be_bytes([data[6], data[7]]))),
            false => (1, false, usize::from(data[3])),
        };
        if data[medium_type_at] != 0 {
            return Err(Sense::invalid_parameter(medium_type_at as u16).into());
        }
        let of_one = if long_lba { 16 } else { 8 };
        if descriptors != 0 && descriptors != of_one {
            return Err(Sense::invalid_parameter(header as u16 - 1).into());
        }
        let pages_at = header + descriptors;
        if length < pages_at {
            return Err(too_short());
        }
        if descriptors != 0 {
            check_descriptor(unit, &data[header..pages_at], header)?;
        }
        Ok(Some(List { data, length, pages_at }))
    }

    /// The parameters that it makes of `modes`.
    ///
    /// # Errors
    /// PARAMETER LIST LENGTH ERROR for a page that is not whole; INVALID FIELD IN PARAMETER LIST for one that
    /// there is not or that is not as long, and for what cannot be set.
    pub(crate) fn apply(&self, unit: &LunShared, modes: Modes) -> Result<Modes, Fail> {
        let (mut now, mut at) = (modes, self.pages_at);
        while at < self.length {
            let rest = &self.data[at..self.length];
            let has_subpage = rest[0] & 0x40 != 0;
            let head = if has_subpage { 4 } else { 2 };
            if rest.len() < head {
                return Err(too_short());
            }
            let (code, subpage) = (rest[0] & 0x3F, if has_subpage { rest[1] } else { 0 });
            let present = Some(subpage)
                .filter(|subpage| *subpage != ALL_SUBPAGES)
                .and_then(|subpage| page(unit, code, subpage, Values::Of(modes)))
                .filter(|present| (present.bytes()[0] & 0x40 != 0) == has_subpage);
            let Some(present) = present else {
                return Err(Sense::invalid_parameter(at as u16).into());
            };
            let present = present.bytes();
            if rest[head - 1] != present[head - 1] || (has_subpage && rest[2] != 0) {
                return Err(Sense::invalid_parameter((at + head - 1) as u16).into());
            }
            let Some(asked) = rest.get(..present.len()) else { return Err(too_short()) };
            let mask = page(unit, code, subpage, Values::Changeable).unwrap_or(Page::EMPTY);
            for byte in head..present.len() {
                if (asked[byte] ^ present[byte]) & !mask.bytes()[byte] != 0 {
                    return Err(Sense::invalid_parameter((at + byte) as u16).into());
                }
            }
            match code {
                CACHING if unit.features.volatile_cache => now.no_cache = asked[2] & 0x04 == 0,
                CONTROL if subpage == 0 => {
                    now.descriptor_sense = asked[2] & 0x04 != 0;
                    now.write_protected = asked[4] & 0x08 != 0;
                    // A unit that shows no tags leaves those of others.
                    if unit.protection.is_some() {
                        now.tags_enabled = asked[5] & 0x20 != 0;
                    }
                }
                // What lies beyond the end and is not shown stays, unless something is changed.
                CONTROL if subpage == APPLICATION_TAG && asked[head..] != present[head..] => {
                    let ranges = TagRanges::parse(&asked[tags::HEADER..], unit.num_blocks());
                    now.tags = ranges.map_err(|byte| {
                        Sense::invalid_parameter((at + tags::HEADER + byte) as u16)
                    })?;
                }
                _ => {}
            }
            at += present.len();
        }
        Ok(now)
    }
}

fn too_short() -> Fail {
    Sense::illegal(Code::PARAMETER_LIST_LENGTH_ERROR).into()
}

/// The block descriptor names the unit's own size, or none, and its own blocks (SBC-3 6.5.2).
fn check_descriptor(unit: &LunShared, descriptor: &[u8], at: usize) -> Result<(), Fail> {
    let number = |from: usize, to: usize| {
        descriptor[from..to].iter().fold(0u64, |all, byte| all << 8 | u64::from(*byte))
    };
    let is_long = descriptor.len() == 16;
    let (blocks, most) = match is_long {
        true => (number(0, 8), u64::MAX),
        false => (number(0, 4), u32::MAX.into()),
    };
    if blocks != 0 && blocks != most && blocks != unit.num_blocks() {
        return Err(Sense::invalid_parameter(at as u16).into());
    }
    let size_at = if is_long { 12 } else { 5 };
    if number(size_at, descriptor.len()) != u64::from(unit.block_size) {
        return Err(Sense::invalid_parameter((at + size_at) as u16).into());
    }
    Ok(())
}
