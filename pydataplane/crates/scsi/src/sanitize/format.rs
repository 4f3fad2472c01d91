//! FORMAT UNIT (SBC-3 5.3): what its CDB and parameter list order.

use super::order::{Method, Order};
use crate::opcode::Cdb;
use crate::response::Fail;
use crate::sense::{Code, Sense};
use bdev::ProtectionType;
use guestmem::Sg;

/// A FORMAT UNIT.
pub(crate) struct Format {
    pub(crate) order: Order,
    /// It is answered when it has begun.
    pub(crate) immediate: bool,
    /// Bytes of its parameter list.
    pub(crate) length: u32,
}

/// Reads the CDB and the parameter list for a unit with blocks of `block_size` bytes, whose `protection` a
/// format leaves as it is. No block is defective, so that lists of defects are empty, and what FOV, DPRY, DCRT
/// and STPF say of them changes nothing.
///
/// # Errors
/// INVALID FIELD IN CDB for another type of protection, or for fields of a list where there is none; PARAMETER
/// LIST LENGTH ERROR for a list that ends before its header does; INVALID FIELD IN PARAMETER LIST for a list of
/// defects, a pattern, or an interval of protection.
pub(crate) fn parse(
    cdb: &Cdb,
    data_out: &Sg,
    block_size: u32,
    protection: Option<ProtectionType>,
) -> Result<Format, Fail> {
    const FMTPINFO: u8 = 7;
    const LONGLIST: u8 = 5;
    const FMTDATA: u8 = 4;
    const CMPLST: u8 = 3;
    // FMTPINFO and PROTECTION FIELD USAGE (SBC-3 5.3.1, table 38).
    let (information, usage) = match protection {
        None => (0b00, 0b000),
        Some(ProtectionType::Type1) => (0b10, 0b000),
        Some(ProtectionType::Type3) => (0b11, 0b001),
    };
    if cdb.byte(1) >> 6 != information {
        return Err(Sense::invalid_cdb(1, Some(FMTPINFO)).into());
    }
    let method = Method::Format;
    let order = Order { method, block_size, unrestricted: false, failed: false };
    let long = cdb.bit(1, LONGLIST);
    if !cdb.bit(1, FMTDATA) {
        for bit in [LONGLIST, CMPLST] {
            if cdb.bit(1, bit) {
                return Err(Sense::invalid_cdb(1, Some(bit)).into());
            }
        }
        // Its usage is 0 then.
        return match usage {
            0 => Ok(Format { order, immediate: false, length: 0 }),
            _ => Err(Sense::invalid_cdb(1, Some(FMTPINFO)).into()),
        };
    }
    let mut header = [0u8; 8];
    let header = if long { &mut header[..] } else { &mut header[..4] };
    if data_out.copy_to_slice(0, header) != header.len() {
        return Err(Sense::illegal(Code::PARAMETER_LIST_LENGTH_ERROR).into());
    }
    let immediate = check(header, usage)?;
    Ok(Format { order, immediate, length: header.len() as u32 })
}

/// Whether a header with that PROTECTION FIELD USAGE says IMMED.
fn check(header: &[u8], usage: u8) -> Result<bool, Sense> {
    const FOV: u8 = 0x80;
    const DPRY: u8 = 0x40;
    const DCRT: u8 = 0x20;
    const STPF: u8 = 0x10;
    const IMMED: u8 = 0x02;
    let (flags, rest) = (header[1], &header[2..]);
    let options = flags & (DPRY | DCRT | STPF);
    if header[0] != usage {
        return Err(Sense::invalid_parameter(0));
    }
    if flags & !(FOV | DPRY | DCRT | STPF | IMMED) != 0 || (flags & FOV == 0 && options != 0) {
        return Err(Sense::invalid_parameter(1));
    }
    match rest.iter().position(|byte| *byte != 0) {
        Some(at) => Err(Sense::invalid_parameter(2 + at as u16)),
        None => Ok(flags & IMMED != 0),
    }
}
