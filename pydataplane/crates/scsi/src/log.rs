//! LOG SENSE (SPC-4 6.11): the room of a thin volume, and what every disk has to tell.

use crate::opcode::Cdb;
use crate::reply::send;
use crate::response::Fail;
use crate::sense::Sense;
use crate::shared::LunShared;
use guestmem::Sg;

const SUPPORTED: u8 = 0x00;
const PROVISIONING: u8 = 0x0C;
const TEMPERATURE: u8 = 0x0D;
const INFORMATIONAL_EXCEPTIONS: u8 = 0x2F;
/// With the subpage code FFh the supported pages are listed with their subpages.
const ALL_SUBPAGES: u8 = 0xFF;

/// Cumulative values alone, which is what an initiator asks for.
const CUMULATIVE: u8 = 0b01;
/// FORMAT AND LINKING of parameters: a binary list.
const BINARY: u8 = 0x03;

/// LOG SENSE. Nothing is saved.
///
/// # Errors
/// INVALID FIELD IN CDB for a page that is not there, values that are no counters, and a parameter
/// pointer beyond the last parameter (SPC-4 6.11).
pub(crate) fn sense(unit: &LunShared, cdb: &Cdb, data_in: &Sg) -> Result<u32, Fail> {
    let allocation = usize::from(cdb.be16(7));
    let (values, page, subpage) = (cdb.byte(2) >> 6, cdb.byte(2) & 0x3F, cdb.byte(3));
    if values != CUMULATIVE {
        return Err(Sense::invalid_cdb(2, Some(7)).into());
    }
    let room = unit.room();
    let pages = [SUPPORTED, PROVISIONING, TEMPERATURE, INFORMATIONAL_EXCEPTIONS];
    let pages = pages.into_iter().filter(|page| *page != PROVISIONING || room.is_some());
    if !pages.clone().any(|known| known == page) {
        return Err(Sense::invalid_cdb(2, Some(5)).into());
    }
    if subpage != 0 && (page, subpage) != (SUPPORTED, ALL_SUBPAGES) {
        return Err(Sense::invalid_cdb(3, None).into());
    }
    let last = if page == PROVISIONING { USED } else { 0 };
    if cdb.be16(5) > last {
        return Err(Sense::invalid_cdb(5, None).into());
    }
    match (page, subpage, room) {
        (SUPPORTED, 0, _) => {
            let pages: Vec<u8> = pages.collect();
            let head = [SUPPORTED, 0, 0, pages.len() as u8];
            send(data_in, allocation, &[&head[..], &pages].concat())
        }
        (SUPPORTED, ..) => {
            let mut pages: Vec<u8> = pages.flat_map(|page| [page, 0]).collect();
            pages.splice(2..2, [SUPPORTED, ALL_SUBPAGES]);
            let head = [0x40 | SUPPORTED, ALL_SUBPAGES, 0, pages.len() as u8];
            send(data_in, allocation, &[&head[..], &pages].concat())
        }
        (PROVISIONING, _, Some(room)) => {
            send(data_in, allocation, &provisioning(&room, cdb.be16(5)))
        }
        (TEMPERATURE, ..) => send(data_in, allocation, &temperature()),
        _ => send(data_in, allocation, &informational_exceptions()),
    }
}

/// AVAILABLE and USED LBA MAPPING RESOURCE COUNT: parameters of the page, in its order.
const AVAILABLE: u16 = 0x0001;
const USED: u16 = 0x0002;

/// Logical block provisioning (SBC-3 6.4.4), its parameters from `first` on, in sets of blocks whose size
/// is in VPD page B2h: what the unit has is its own, what there is besides is others', too.
fn provisioning(room: &Room, first: u16) -> Vec<u8> {
    const DEDICATED: u8 = 0b01;
    const SHARED: u8 = 0b10;
    let parameters = [(AVAILABLE, room.available, SHARED), (USED, room.used, DEDICATED)];
    let parameters = parameters.into_iter().filter(|(code, ..)| *code >= first);
    let data: Vec<u8> = parameters
        .flat_map(|(code, sets, scope)| {
            let ([high, low], [a, b, c, d]) = (code.to_be_bytes(), sets.to_be_bytes());
            [high, low, BINARY, 8, a, b, c, d, scope, 0, 0, 0]
        })
        .collect();
    [&[PROVISIONING, 0, 0, data.len() as u8][..], &data].concat()
}

/// Room of a thin unit, in sets of [`SET_BYTES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Room {
    /// What there is to be had yet.
    pub available: u32,
    /// What it has.
    pub used: u32,
}

/// Bytes of a set of blocks (SBC-3 4.7.3.8.2).
pub(crate) const SET_BYTES: u64 = 1 << 20;

/// Temperature (SPC-4 7.3.21): FFh, as a volume has none that could be told.
fn temperature() -> [u8; 10] {
    const UNKNOWN: u8 = 0xFF;
    [TEMPERATURE, 0, 0, 6, 0, 0, BINARY, 2, 0, UNKNOWN]
}

/// Informational exceptions (SPC-4 7.3.9): none, and no temperature.
fn informational_exceptions() -> [u8; 12] {
    const UNKNOWN: u8 = 0xFF;
    [INFORMATIONAL_EXCEPTIONS, 0, 0, 8, 0, 0, BINARY, 4, 0, 0, UNKNOWN, 0]
}
