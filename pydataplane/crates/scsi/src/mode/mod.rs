//! Mode pages (SPC-4 7.5, SBC-3 6.5): MODE SENSE here, MODE SELECT in `select`, and what can be set in `state`.
//!
//! What is set is the volume's, for all its initiators (MPP 00b, page 87h): whether writes are cached, whether
//! they are refused, the format of sense data, and which application tags blocks are to have.

mod select;
mod state;
mod tags;

use crate::opcode::Cdb;
use crate::reply::Reply;
use crate::response::Fail;
use crate::sense::{Code, Sense};
use crate::shared::LunShared;
use guestmem::Sg;
pub(crate) use select::List;
pub(crate) use state::{Keeping, ModeState, Modes};
pub(crate) use tags::TagRanges;

const CACHING: u8 = 0x08;
const CONTROL: u8 = 0x0A;
/// Its subpages.
const CONTROL_EXTENSION: u8 = 0x01;
const APPLICATION_TAG: u8 = 0x02;
const INFORMATIONAL_EXCEPTIONS: u8 = 0x1C;
/// Its subpage.
const PROVISIONING: u8 = 0x02;
const ALL_PAGES: u8 = 0x3F;
const ALL_SUBPAGES: u8 = 0xFF;
/// Bytes of a page that has none but reserved or few fields, and a subpage.
const LONG_PAGE: usize = 32;
/// Bytes of the longest page, and room for every page.
const PAGE_MAX: usize = tags::PAGE;
const PAGES_MAX: usize = 20 + 12 + LONG_PAGE + PAGE_MAX + 12 + LONG_PAGE;
/// MODE SENSE(6) has all of them, behind a header and a block descriptor.
const _: () = assert!(4 + 8 + PAGES_MAX <= u8::MAX as usize);
/// Every page and its subpage, in the order in which they are listed.
const PAGES: [(u8, u8); 6] = [
    (CACHING, 0),
    (CONTROL, 0),
    (CONTROL, CONTROL_EXTENSION),
    (CONTROL, APPLICATION_TAG),
    (INFORMATIONAL_EXCEPTIONS, 0),
    (INFORMATIONAL_EXCEPTIONS, PROVISIONING),
];

/// DEVICE-SPECIFIC PARAMETER (SBC-3 6.5.1).
const WRITE_PROTECTED: u8 = 0x80;
const DPO_FUA: u8 = 0x10;

/// PAGE CONTROL (SPC-4 6.13).
#[derive(Clone, Copy, PartialEq, Eq)]
enum Values {
    /// Current, default or saved ones.
    Of(Modes),
    /// A mask of what MODE SELECT can change.
    Changeable,
}

/// A mode page.
#[derive(Clone, Copy)]
struct Page {
    data: [u8; PAGE_MAX],
    length: usize,
}

impl Page {
    const EMPTY: Page = Page { data: [0; PAGE_MAX], length: 0 };

    /// Of `length` bytes in all, without a subpage.
    fn new(code: u8, length: usize) -> Page {
        let mut page = Page { data: [0; PAGE_MAX], length };
        (page.data[0], page.data[1]) = (code, length as u8 - 2);
        page
    }

    /// Of `length` bytes in all, with a subpage.
    fn sub(code: u8, subpage: u8, length: usize) -> Page {
        const SPF: u8 = 0x40;
        let mut page = Page { data: [0; PAGE_MAX], length };
        page.data[..4].copy_from_slice(&[SPF | code, subpage, 0, length as u8 - 4]);
        page
    }

    fn bytes(&self) -> &[u8] {
        &self.data[..self.length]
    }
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
    let protected = unit.read_only || unit.has_mode(Modes::WRITE_PROTECTED);
    DPO_FUA | if protected { WRITE_PROTECTED } else { 0 }
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
    const PS: u8 = 0x80;
    let can_save = unit.volume.records().is_some();
    let (current, saved) = unit.volume.modes();
    let values = match cdb.byte(2) >> 6 {
        0 => Values::Of(current),
        1 => Values::Changeable,
        2 => Values::Of(Modes::default()),
        _ if can_save => Values::Of(saved),
        _ => return Err(Sense::illegal(Code::SAVING_PARAMETERS_NOT_SUPPORTED).into()),
    };
    let (code, subpage) = (cdb.byte(2) & 0x3F, cdb.byte(3));
    if code == ALL_PAGES && !matches!(subpage, 0 | ALL_SUBPAGES) {
        return Err(Sense::invalid_cdb(3, None).into()); // reserved (SPC-4 6.13)
    }
    let mut data = [0u8; PAGES_MAX];
    let mut length = 0;
    let mut known = false;
    for (of, sub) in PAGES {
        if code != ALL_PAGES && code != of {
            continue;
        }
        known = true;
        if subpage != sub && subpage != ALL_SUBPAGES {
            continue;
        }
        let Some(page) = page(unit, of, sub, values) else { continue };
        data[length..length + page.length].copy_from_slice(page.bytes());
        if can_save && matches!((of, sub), (CACHING | CONTROL, 0) | (CONTROL, APPLICATION_TAG)) {
            data[length] |= PS;
        }
        length += page.length;
    }
    match (known, length) {
        (false, _) => Err(Sense::invalid_cdb(2, Some(5)).into()),
        (true, 0) => Err(Sense::invalid_cdb(3, None).into()),
        (true, _) => Ok((data, length)),
    }
}

/// A page, with these values; `None` where there is none.
fn page(unit: &LunShared, code: u8, subpage: u8, values: Values) -> Option<Page> {
    match (code, subpage) {
        (CACHING, 0) => Some(caching(unit, values)),
        (CONTROL, 0) => Some(control(unit, values)),
        (CONTROL, CONTROL_EXTENSION) => Some(control_extension()),
        (CONTROL, APPLICATION_TAG) => unit.protection.map(|_| application_tag(unit, values)),
        (INFORMATIONAL_EXCEPTIONS, 0) => Some(informational_exceptions(values)),
        (INFORMATIONAL_EXCEPTIONS, PROVISIONING) => {
            unit.room().map(|_| logical_block_provisioning(values))
        }
        _ => None,
    }
}

/// Caching (SBC-3 6.5.5): WCE tells whether completed writes need a flush. Where there is no volatile cache
/// it cannot be set.
fn caching(unit: &LunShared, values: Values) -> Page {
    const WCE: u8 = 0x04;
    let mut page = Page::new(CACHING, 20);
    let is_set = match values {
        Values::Of(modes) => !modes.no_cache,
        Values::Changeable => true,
    };
    if is_set && unit.features.volatile_cache {
        page.data[2] = WCE;
    }
    page
}

/// Control (SPC-4 7.5.8): a task set for each I_T nexus, as ORDERED, CLEAR TASK SET and QUERY TASK SET are about
/// one VM's tasks, whoever shares the volume; no log of globally saved parameters, commands in any order, and
/// aborted tasks end as TASK ABORTED. D_SENSE can be set, SWP where writes are not refused anyhow, and ATMPE where there are
/// application tags.
fn control(unit: &LunShared, values: Values) -> Page {
    // TST 001b.
    const SET_PER_NEXUS: u8 = 0x20;
    const GLTSD: u8 = 0x02;
    const D_SENSE: u8 = 0x04;
    const UNRESTRICTED_REORDERING: u8 = 0x10;
    const SWP: u8 = 0x08;
    const TAS: u8 = 0x40;
    // Application tags are the initiators'.
    const ATO: u8 = 0x80;
    // They are to be those of the Application Tag mode page.
    const ATMPE: u8 = 0x20;
    let tags = if unit.protection.is_some() { ATO } else { 0 };
    let mut page = Page::new(CONTROL, 12);
    match values {
        Values::Of(modes) => {
            let format = if modes.descriptor_sense { D_SENSE } else { 0 };
            page.data[2] = SET_PER_NEXUS | GLTSD | format;
            page.data[3] = UNRESTRICTED_REORDERING;
            page.data[4] = if modes.write_protected { SWP } else { 0 };
            let compared = modes.tags_enabled && unit.protection.is_some();
            page.data[5] = TAS | tags | if compared { ATMPE } else { 0 };
        }
        Values::Changeable => {
            page.data[2] = D_SENSE;
            page.data[4] = if unit.read_only { 0 } else { SWP };
            page.data[5] = if tags != 0 { ATMPE } else { 0 };
        }
    }
    page
}

/// Control extension (SPC-4 7.5.9): no clock to be set, no priorities, sense data of any length.
fn control_extension() -> Page {
    Page::sub(CONTROL, CONTROL_EXTENSION, LONG_PAGE)
}

/// Application tag (SBC-4 6.5.3): what is set and lies on the medium, which may have become smaller.
fn application_tag(unit: &LunShared, values: Values) -> Page {
    let mut page = Page::sub(CONTROL, APPLICATION_TAG, tags::PAGE);
    let descriptors = &mut page.data[tags::HEADER..];
    match values {
        Values::Of(modes) => modes.tags.cut(unit.num_blocks()).encode(descriptors),
        Values::Changeable => tags::changeable(descriptors),
    }
    page
}

/// Informational exceptions control (SPC-4 7.5): none are reported.
fn informational_exceptions(values: Values) -> Page {
    const DEXCPT: u8 = 0x08;
    let mut page = Page::new(INFORMATIONAL_EXCEPTIONS, 12);
    if values != Values::Changeable {
        page.data[2] = DEXCPT;
    }
    page
}

/// Logical block provisioning (SBC-3 6.5.8): a threshold for what there is and one for what it has, neither of
/// which is enabled, nor can be: how much room is left is the host's to watch.
fn logical_block_provisioning(values: Values) -> Page {
    const INCREASING: u8 = 0b001;
    const AVAILABLE: u8 = 0x01;
    const USED: u8 = 0x02;
    let mut page = Page::sub(INFORMATIONAL_EXCEPTIONS, PROVISIONING, LONG_PAGE);
    if values != Values::Changeable {
        page.data[16..18].copy_from_slice(&[0, AVAILABLE]);
        page.data[24..26].copy_from_slice(&[INCREASING, USED]);
    }
    page
}
