//! MODE SENSE (SPC-4 6.13, 6.14). Nothing can be changed or saved: there is no MODE SELECT.

use crate::opcode::Cdb;
use crate::reply::Reply;
use crate::response::Fail;
use crate::sense::{Code, Sense};
use crate::shared::LunShared;
use guestmem::Sg;

const CACHING: u8 = 0x08;
const CONTROL: u8 = 0x0A;
const INFORMATIONAL_EXCEPTIONS: u8 = 0x1C;
const ALL_PAGES: u8 = 0x3F;
const ALL_SUBPAGES: u8 = 0xFF;
/// Room for every page.
const PAGES_MAX: usize = 20 + 12 + 12;

/// DEVICE-SPECIFIC PARAMETER (SBC-3 6.5.1).
const WRITE_PROTECTED: u8 = 0x80;
const DPO_FUA: u8 = 0x10;

/// PAGE CONTROL (SPC-4 6.13).
#[derive(Clone, Copy, PartialEq, Eq)]
enum Values {
    /// Current and default ones are the same.
    Current,
    /// A mask of what MODE SELECT could change: nothing.
    Changeable,
}

/// MODE SENSE(6).
pub(crate) fn sense6(unit: &LunShared, cdb: &Cdb, data_in: &Sg) -> Result<u32, Fail> {
    let (pages, length) = pages(unit, cdb)?;
    let descriptor = short_descriptor(unit);
    let descriptor = if cdb.bit(1, 3) { &[][..] } else { &descriptor[..] };
    let total = 4 + descriptor.len() + length;
    let mut reply = Reply::new(data_in, usize::from(cdb.byte(4)));
    reply.put(&[(total - 1) as u8, 0, device_specific(unit), descriptor.len() as u8]);
    reply.put(descriptor);
    reply.put(&pages[..length]);
    reply.end()
}

/// MODE SENSE(10).
pub(crate) fn sense10(unit: &LunShared, cdb: &Cdb, data_in: &Sg) -> Result<u32, Fail> {
    let (pages, length) = pages(unit, cdb)?;
    let long = cdb.bit(1, 4);
    let (short_form, long_form) = (short_descriptor(unit), long_descriptor(unit));
    let descriptor = match (cdb.bit(1, 3), long) {
        (true, _) => &[][..],
        (false, false) => &short_form[..],
        (false, true) => &long_form[..],
    };
    let total = 8 + descriptor.len() + length;
    let size = ((total - 2) as u16).to_be_bytes();
    let long_lba = u8::from(long && !descriptor.is_empty());
    let mut reply = Reply::new(data_in, usize::from(cdb.be16(7)));
    let header =
        [size[0], size[1], 0, device_specific(unit), long_lba, 0, 0, descriptor.len() as u8];
    reply.put(&header);
    reply.put(descriptor);
    reply.put(&pages[..length]);
    reply.end()
}

fn device_specific(unit: &LunShared) -> u8 {
    DPO_FUA | if unit.read_only { WRITE_PROTECTED } else { 0 }
}

/// Short LBA mode parameter block descriptor (SBC-3 6.5.2.2).
fn short_descriptor(unit: &LunShared) -> [u8; 8] {
    let blocks = u32::try_from(unit.num_blocks()).unwrap_or(u32::MAX);
    let mut data = [0u8; 8];
    data[..4].copy_from_slice(&blocks.to_be_bytes());
    data[4..].copy_from_slice(&unit.block_size.to_be_bytes());
    data
}

/// Long LBA mode parameter block descriptor (SBC-3 6.5.2.3).
fn long_descriptor(unit: &LunShared) -> [u8; 16] {
    let mut data = [0u8; 16];
    data[..8].copy_from_slice(&unit.num_blocks().to_be_bytes());
    data[12..].copy_from_slice(&unit.block_size.to_be_bytes());
    data
}

/// The pages that the CDB asks for, and their length.
fn pages(unit: &LunShared, cdb: &Cdb) -> Result<([u8; PAGES_MAX], usize), Fail> {
    let values = match cdb.byte(2) >> 6 {
        0 | 2 => Values::Current,
        1 => Values::Changeable,
        _ => return Err(Sense::illegal(Code::SAVING_PARAMETERS_NOT_SUPPORTED).into()),
    };
    let (page, subpage) = (cdb.byte(2) & 0x3F, cdb.byte(3));
    if !matches!(subpage, 0 | ALL_SUBPAGES) {
        return Err(Sense::invalid_cdb(3, None).into());
    }
    let mut data = [0u8; PAGES_MAX];
    let mut length = 0;
    let mut put = |bytes: &[u8]| {
        data[length..length + bytes.len()].copy_from_slice(bytes);
        length += bytes.len();
    };
    let wants = |code: u8| page == code || page == ALL_PAGES;
    if wants(CACHING) {
        put(&caching(unit, values));
    }
    if wants(CONTROL) {
        put(&control(values));
    }
    if wants(INFORMATIONAL_EXCEPTIONS) {
        put(&informational_exceptions(values));
    }
    if length == 0 {
        return Err(Sense::invalid_cdb(2, Some(5)).into());
    }
    Ok((data, length))
}

/// Caching (SBC-3 6.5.5): WCE tells whether completed writes need a flush.
fn caching(unit: &LunShared, values: Values) -> [u8; 20] {
    let mut page = [0u8; 20];
    page[0] = CACHING;
    page[1] = 18;
    if values == Values::Current && unit.features.volatile_cache {
        page[2] = 0x04; // WCE
    }
    page
}

/// Control (SPC-4 7.5): no log of globally saved parameters, commands in any order, and aborted
/// tasks end as TASK ABORTED.
fn control(values: Values) -> [u8; 12] {
    let mut page = [0u8; 12];
    page[0] = CONTROL;
    page[1] = 10;
    if values == Values::Current {
        page[2] = 0x02; // GLTSD
        page[3] = 0x10; // QUEUE ALGORITHM MODIFIER: unrestricted reordering
        page[5] = 0x40; // TAS
    }
    page
}

/// Informational exceptions control (SPC-4 7.5): none are reported.
fn informational_exceptions(values: Values) -> [u8; 12] {
    let mut page = [0u8; 12];
    page[0] = INFORMATIONAL_EXCEPTIONS;
    page[1] = 10;
    if values == Values::Current {
        page[2] = 0x08; // DEXCPT
    }
    page
}
