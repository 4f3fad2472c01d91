//! SANITIZE (SBC-3 5.22): what its CDB and parameter list order.

use crate::opcode::Cdb;
use crate::response::Fail;
use crate::sense::Sense;
use guestmem::Sg;

/// Bytes of an OVERWRITE parameter list before its pattern.
const HEADER: usize = 4;

/// How all data is made unreadable, or is formatted.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Method {
    /// What the volume has is overwritten with zeros, and then it has it no more.
    BlockErase,
    /// All blocks are overwritten.
    Overwrite {
        /// What each block begins with, again and again; up to a block.
        pattern: Vec<u8>,
        /// How many times, 1 to 31.
        count: u8,
        /// Every other time with the complement of the pattern.
        invert: bool,
    },
    /// FORMAT UNIT: all blocks read as zeros, and what needs no room for that has none.
    Format,
}

/// An order that is carried out, whatever happens, or has failed.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Order {
    pub(crate) method: Method,
    /// Bytes of the logical block in which the pattern begins anew.
    pub(crate) block_size: u32,
    /// AUSE: after a failure EXIT FAILURE MODE lets the volume be used as it is.
    pub(crate) unrestricted: bool,
    /// It has failed.
    pub(crate) failed: bool,
}

impl Method {
    /// How often the volume is gone through.
    pub(crate) fn passes(&self) -> u8 {
        match self {
            Method::BlockErase => 2,
            Method::Overwrite { count, .. } => *count,
            Method::Format => 1,
        }
    }
}

impl Order {
    /// Whether it is a FORMAT UNIT.
    pub(crate) fn is_format(&self) -> bool {
        self.method == Method::Format
    }
}

/// Reads the CDB, and the parameter list of OVERWRITE for a unit with blocks of `block_size` bytes.
///
/// # Errors
/// INVALID FIELD IN CDB for a parameter list of a wrong length, INVALID FIELD IN PARAMETER LIST for a pattern
/// that is not 1 byte to one block long, a count of 0, or bits for tests of the vendor's.
pub(crate) fn parse(
    cdb: &Cdb,
    overwrite: bool,
    data_out: &Sg,
    block_size: u32,
) -> Result<Order, Fail> {
    const LENGTH_AT: u16 = 7;
    let length = usize::from(cdb.be16(LENGTH_AT.into()));
    let unrestricted = cdb.bit(1, 5);
    let order = |method| Order { method, block_size, unrestricted, failed: false };
    if !overwrite {
        return match length {
            0 => Ok(order(Method::BlockErase)),
            _ => Err(Sense::invalid_cdb(LENGTH_AT, None).into()),
        };
    }
    if length <= HEADER || length > HEADER + block_size as usize {
        return Err(Sense::invalid_cdb(LENGTH_AT, None).into());
    }
    if data_out.len() < length {
        return Err(Fail::Overrun);
    }
    let mut list = vec![0; length];
    data_out.copy_to_slice(0, &mut list);
    let (invert, tests, count) = (list[0] & 0x80 != 0, list[0] & 0x60, list[0] & 0x1F);
    let pattern_length = usize::from(u16::from_be_bytes([list[2], list[3]]));
    if tests != 0 || count == 0 || list[1] != 0 {
        return Err(Sense::invalid_parameter(if list[1] == 0 { 0 } else { 1 }).into());
    }
    if pattern_length == 0 || pattern_length != length - HEADER {
        return Err(Sense::invalid_parameter(2).into());
    }
    let pattern = list.split_off(HEADER);
    Ok(order(Method::Overwrite { pattern, count, invert }))
}
