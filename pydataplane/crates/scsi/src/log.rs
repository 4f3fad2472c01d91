//! LOG SENSE (SPC-4 6.11): what the unit has counted, which is nothing that is not asked for elsewhere.

use crate::opcode::Cdb;
use crate::reply::send;
use crate::response::Fail;
use crate::sense::Sense;
use guestmem::Sg;

const SUPPORTED: u8 = 0x00;
const TEMPERATURE: u8 = 0x0D;
/// With the subpage code FFh the supported pages are listed with their subpages.
const ALL_SUBPAGES: u8 = 0xFF;

/// Cumulative values alone, which is what an initiator asks for.
const CUMULATIVE: u8 = 0b01;

/// LOG SENSE. Nothing is saved.
///
/// # Errors
/// INVALID FIELD IN CDB for a page that is not there, values that are no counters, and a parameter
/// pointer beyond the last parameter (SPC-4 6.11).
pub(crate) fn sense(cdb: &Cdb, data_in: &Sg) -> Result<u32, Fail> {
    let allocation = usize::from(cdb.be16(7));
    let (values, page, subpage) = (cdb.byte(2) >> 6, cdb.byte(2) & 0x3F, cdb.byte(3));
    if values != CUMULATIVE {
        return Err(Sense::invalid_cdb(2, Some(7)).into());
    }
    let pointer = cdb.be16(5);
    match (page, subpage) {
        (SUPPORTED | TEMPERATURE, 0) | (SUPPORTED, ALL_SUBPAGES) => {}
        (SUPPORTED | TEMPERATURE, _) => return Err(Sense::invalid_cdb(3, None).into()),
        _ => return Err(Sense::invalid_cdb(2, Some(5)).into()),
    }
    let last = 0;
    if pointer > last {
        return Err(Sense::invalid_cdb(5, None).into());
    }
    match (page, subpage) {
        (SUPPORTED, 0) => send(data_in, allocation, &[SUPPORTED, 0, 0, 2, SUPPORTED, TEMPERATURE]),
        (SUPPORTED, _) => {
            let pages = [SUPPORTED, 0, SUPPORTED, ALL_SUBPAGES, TEMPERATURE, 0];
            let head = [0x40 | SUPPORTED, ALL_SUBPAGES, 0, pages.len() as u8];
            send(data_in, allocation, &[&head[..], &pages[..]].concat())
        }
        _ => send(data_in, allocation, &temperature()),
    }
}

/// Temperature (SPC-4 7.3.21): FFh, as a volume has none that could be told.
fn temperature() -> [u8; 10] {
    const UNKNOWN: u8 = 0xFF;
    /// FORMAT AND LINKING: a binary list.
    const BINARY: u8 = 0x03;
    [TEMPERATURE, 0, 0, 6, 0, 0, BINARY, 2, 0, UNKNOWN]
}
