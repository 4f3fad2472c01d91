//! INQUIRY (SPC-4 6.6): standard data and vital product data pages.
//!
//! A volume is its UUID everywhere. Page 83h names it three times: a locally assigned NAA that
//! every initiator understands (we own no IEEE company id, so no NAA 6h), a T10 vendor
//! designator with the serial, and the UUID itself.

use crate::block::max_compare_and_write;
use crate::characteristics::VENDOR_LEN;
use crate::copy::{self, THIRD_PARTY_COPY};
use crate::log::SET_BYTES;
use crate::opcode::Cdb;
use crate::ports::{self, TPGS};
use crate::reply::{Reply, send};
use crate::response::Fail;
use crate::sense::{SENSE_LEN, Sense};
use crate::shared::{
    LunShared, MAX_SERIAL, MAX_UNMAP_BYTES, MAX_UNMAP_DESCRIPTORS, MAX_WRITE_SAME_BLOCKS,
};
use bdev::ProtectionType;
use guestmem::Sg;
use uuid::Uuid;

/// T10 VENDOR IDENTIFICATION, unless another was chosen.
const VENDOR: &str = "VIRTLUN";
/// PRODUCT REVISION LEVEL: this crate's major and minor version.
const REVISION: &str =
    concat!(env!("CARGO_PKG_VERSION_MAJOR"), ".", env!("CARGO_PKG_VERSION_MINOR"));

/// Peripheral device type of a direct access block device, and the qualifier "connected".
const DISK: u8 = 0x00;
/// A well-known logical unit.
const WELL_KNOWN: u8 = 0x1E;
/// Qualifier 011b, type 1Fh: there is no such logical unit.
const NO_UNIT: u8 = 0x7F;

const STANDARD_LEN: usize = 96;
/// SAM-5, SPC-4, SBC-3, without a revision (SPC-4 6.6.2).
const VERSION_DESCRIPTORS: [u16; 3] = [0x00A0, 0x0460, 0x04C0];

const VPD_SUPPORTED: u8 = 0x00;
const VPD_SERIAL: u8 = 0x80;
const VPD_DESIGNATORS: u8 = 0x83;
const VPD_EXTENDED: u8 = 0x86;
const VPD_MODE_POLICY: u8 = 0x87;
const VPD_PORTS: u8 = 0x88;
const VPD_THIRD_PARTY_COPY: u8 = 0x8F;
const VPD_BLOCK_LIMITS: u8 = 0xB0;
const VPD_CHARACTERISTICS: u8 = 0xB1;
const VPD_PROVISIONING: u8 = 0xB2;
/// Every page, in ascending order (SPC-4 7.8). Of SBC-4's there is no B3h (no referrals), B4h (nothing has a
/// length of its own), B5h (a disk's utilization tells its wear, which is not ours to tell) nor B6h (no zones).
const VPD_PAGES: [u8; 10] = [
    VPD_SUPPORTED,
    VPD_SERIAL,
    VPD_DESIGNATORS,
    VPD_EXTENDED,
    VPD_MODE_POLICY,
    VPD_PORTS,
    VPD_THIRD_PARTY_COPY,
    VPD_BLOCK_LIMITS,
    VPD_CHARACTERISTICS,
    VPD_PROVISIONING,
];

/// Length of the block limits and characteristics pages with their headers (SBC-3 6.6.3, 6.6.2).
const LONG_PAGE: usize = 64;

/// INQUIRY of a logical unit that exists.
pub(crate) fn inquiry(unit: &LunShared, cdb: &Cdb, data_in: &Sg) -> Result<u32, Fail> {
    let allocation = usize::from(cdb.be16(3));
    let page = cdb.byte(2);
    if !cdb.bit(1, 0) {
        if page != 0 {
            return Err(Sense::invalid_cdb(2, None).into());
        }
        let chosen = unit.characteristics().product.as_deref();
        let product = chosen.unwrap_or(unit.bdev().product_name());
        let mut data = standard(DISK, unit.removable, vendor(unit), product);
        data[5] = TPGS | THIRD_PARTY_COPY | u8::from(unit.protection.is_some()); // PROTECT
        return send(data_in, allocation, &data);
    }
    match page {
        VPD_SUPPORTED => send(data_in, allocation, &supported()),
        VPD_SERIAL => {
            let mut page = Page::new(VPD_SERIAL);
            page.put(unit.serial().as_bytes());
            send(data_in, allocation, page.end())
        }
        VPD_DESIGNATORS => send(data_in, allocation, designators(unit).end()),
        VPD_EXTENDED => send(data_in, allocation, &extended(unit)),
        // MPP 00b: what is set is set for all.
        VPD_MODE_POLICY => send(data_in, allocation, &[0, page, 0, 4, 0x3F, 0xFF, 0, 0]),
        VPD_PORTS => {
            let mut reply = Reply::new(data_in, allocation);
            ports::page(unit, page, &mut reply);
            reply.end()
        }
        VPD_THIRD_PARTY_COPY => {
            let mut reply = Reply::new(data_in, allocation);
            copy::page(unit, page, &mut reply);
            reply.end()
        }
        VPD_BLOCK_LIMITS => send(data_in, allocation, &block_limits(unit)),
        VPD_CHARACTERISTICS => send(data_in, allocation, &characteristics(unit)),
        VPD_PROVISIONING => send(data_in, allocation, &provisioning(unit)),
        _ => Err(Sense::invalid_cdb(2, None).into()),
    }
}

/// Whether two units say the same of themselves in INQUIRY data, and in READ CAPACITY but for the size.
pub(crate) fn look_the_same(a: &LunShared, b: &LunShared) -> bool {
    let said = |unit: &LunShared| {
        let product = unit.characteristics().product.as_deref();
        let product = product.unwrap_or(unit.bdev().product_name());
        (
            standard(DISK, unit.removable, vendor(unit), product),
            designators(unit).end().to_vec(),
            block_limits(unit),
            characteristics(unit),
            provisioning(unit),
            unit.protection,
        )
    };
    said(a) == said(b) && (a.block_size, a.physical_exponent) == (b.block_size, b.physical_exponent)
}

/// INQUIRY of a logical unit that the target does not have (SPC-4 6.6.2).
pub(crate) fn inquiry_missing(cdb: &Cdb, data_in: &Sg) -> Result<u32, Fail> {
    if cdb.bit(1, 0) || cdb.byte(2) != 0 {
        return Err(Sense::invalid_cdb(if cdb.bit(1, 0) { 1 } else { 2 }, None).into());
    }
    send(data_in, usize::from(cdb.be16(3)), &standard(NO_UNIT, false, VENDOR, ""))
}

/// INQUIRY of the REPORT LUNS well-known logical unit, which has no vital product data (SPC-4 8.2).
pub(crate) fn inquiry_well_known(cdb: &Cdb, data_in: &Sg) -> Result<u32, Fail> {
    if cdb.bit(1, 0) || cdb.byte(2) != 0 {
        return Err(Sense::invalid_cdb(if cdb.bit(1, 0) { 1 } else { 2 }, None).into());
    }
    send(data_in, usize::from(cdb.be16(3)), &standard(WELL_KNOWN, false, VENDOR, "REPORT LUNS"))
}

/// Standard INQUIRY data (SPC-4 6.6.2).
fn standard(peripheral: u8, removable: bool, vendor: &str, product: &str) -> [u8; STANDARD_LEN] {
    let mut data = [0u8; STANDARD_LEN];
    data[0] = peripheral;
    data[1] = if removable { 0x80 } else { 0 }; // RMB
    data[2] = 0x06; // SPC-4
    data[3] = 0x12; // HISUP, response data format 2
    data[4] = (STANDARD_LEN - 5) as u8;
    data[7] = 0x02; // CMDQUE
    put_ascii(&mut data[8..16], vendor);
    put_ascii(&mut data[16..32], product);
    put_ascii(&mut data[32..36], REVISION);
    for (i, version) in VERSION_DESCRIPTORS.iter().enumerate() {
        data[58 + 2 * i..60 + 2 * i].copy_from_slice(&version.to_be_bytes());
    }
    data
}

/// The unit's T10 VENDOR IDENTIFICATION.
fn vendor(unit: &LunShared) -> &str {
    unit.characteristics().vendor.as_deref().unwrap_or(VENDOR)
}

/// `text` left-aligned, cut or padded with spaces to the field (SPC-4 4.3.1).
fn put_ascii(field: &mut [u8], text: &str) {
    field.fill(b' ');
    for (to, from) in field.iter_mut().zip(text.bytes()) {
        *to = if (0x20..0x7F).contains(&from) { from } else { b'?' };
    }
}

fn supported() -> [u8; 4 + VPD_PAGES.len()] {
    let mut data = [0u8; 4 + VPD_PAGES.len()];
    data[3] = VPD_PAGES.len() as u8;
    data[4..].copy_from_slice(&VPD_PAGES);
    data
}

/// Longest page of designators: those of the unit with the longest serial, and of its port.
const PAGE_MAX: usize = 4 + 12 + 12 + MAX_SERIAL + 22 + 28;

/// A page of designators or text.
struct Page {
    data: [u8; PAGE_MAX],
    length: usize,
}

impl Page {
    fn new(code: u8) -> Self {
        let mut page = Page { data: [0; PAGE_MAX], length: 4 };
        page.data[1] = code;
        page
    }

    fn put(&mut self, bytes: &[u8]) {
        self.data[self.length..self.length + bytes.len()].copy_from_slice(bytes);
        self.length += bytes.len();
    }

    /// A designation descriptor (SPC-4 7.8.6) associated with the logical unit.
    fn designator(&mut self, code_set: u8, kind: u8, parts: &[&[u8]]) {
        let length: usize = parts.iter().map(|p| p.len()).sum();
        self.put(&[code_set, kind, 0, length as u8]);
        parts.iter().for_each(|p| self.put(p));
    }

    fn end(&mut self) -> &[u8] {
        let length = (self.length - 4) as u16;
        self.data[2..4].copy_from_slice(&length.to_be_bytes());
        &self.data[..self.length]
    }
}

/// Device identification (SPC-4 7.8.6; the UUID designator: SPC-5 7.7.6.11).
fn designators(unit: &LunShared) -> Page {
    const BINARY: u8 = 1;
    const ASCII: u8 = 2;
    const T10_VENDOR: u8 = 1;
    const NAA: u8 = 3;
    const UUID: u8 = 0xA;
    let uuid = unit.identity();
    let mut page = Page::new(VPD_DESIGNATORS);
    let naa = naa(unit);
    let mut by = [0; VENDOR_LEN];
    put_ascii(&mut by, vendor(unit));
    page.designator(BINARY, NAA, &[&naa]);
    page.designator(ASCII, T10_VENDOR, &[&by, unit.serial().as_bytes()]);
    page.designator(BINARY, UUID, &[&[0x10, 0], uuid.as_bytes()]);
    page.put(&ports::designators(unit.nexus_name()));
    page
}

/// The NAA designator of a unit.
pub(crate) fn naa(unit: &LunShared) -> [u8; 8] {
    unit.characteristics().wwn.map_or_else(|| local_naa(unit.identity()), u64::to_be_bytes)
}

/// NAA 3h, locally assigned (SPC-4 7.8.6.6): 60 bits, the two halves of the UUID XORed.
fn local_naa(uuid: Uuid) -> [u8; 8] {
    let (high, low) = uuid.as_u64_pair();
    (((high ^ low) & 0x0FFF_FFFF_FFFF_FFFF) | 0x3000_0000_0000_0000).to_be_bytes()
}

/// Extended INQUIRY data (SPC-4 7.8.8; NO_PI_CHK: SPC-5 7.7.7): commands are SIMPLE, ORDERED or HEAD OF QUEUE, a nexus
/// loses its own unit attentions alone, and a tuple that says so has its block not checked when it is written, either.
fn extended(unit: &LunShared) -> [u8; LONG_PAGE] {
    const HEADSUP_ORDSUP_SIMPSUP: u8 = 0x07;
    const V_SUP: u8 = 0x01;
    const LUICLR: u8 = 0x01;
    const GRD_CHK: u8 = 0x04;
    const APP_CHK: u8 = 0x02;
    const REF_CHK: u8 = 0x01;
    const NO_PI_CHK: u8 = 0x20;
    /// SPT 000b: type 1; 100b: type 3.
    const SPT_TYPE_3: u8 = 0b100 << 3;
    let mut data = [0u8; LONG_PAGE];
    data[1] = VPD_EXTENDED;
    data[3] = (LONG_PAGE - 4) as u8;
    data[4] = match unit.protection {
        None => 0,
        Some(ProtectionType::Type1) => GRD_CHK | APP_CHK | REF_CHK,
        Some(ProtectionType::Type3) => SPT_TYPE_3 | GRD_CHK | APP_CHK,
    };
    data[5] = HEADSUP_ORDSUP_SIMPSUP;
    data[6] = if unit.features.volatile_cache { V_SUP } else { 0 };
    data[7] = LUICLR | if unit.protection.is_some() { NO_PI_CHK } else { 0 };
    data[13] = SENSE_LEN as u8;
    data
}

/// Block limits (SBC-3 6.6.3).
fn block_limits(unit: &LunShared) -> [u8; LONG_PAGE] {
    let mut data = [0u8; LONG_PAGE];
    data[1] = VPD_BLOCK_LIMITS;
    data[3] = (LONG_PAGE - 4) as u8;
    data[4] = 0x01; // WSNZ: WRITE SAME does not mean "to the end" by 0 blocks
    data[5] = max_compare_and_write(unit) as u8;
    data[6..8].copy_from_slice(&(1u16 << unit.physical_exponent).to_be_bytes());
    data[8..12].copy_from_slice(&(unit.max_transfer_blocks() as u32).to_be_bytes());
    data[12..16].copy_from_slice(&unit.features.optimal_blocks.to_be_bytes());
    if unit.features.unmap {
        let blocks = unit.blocks(MAX_UNMAP_BYTES) as u32;
        data[20..24].copy_from_slice(&blocks.to_be_bytes());
        data[24..28].copy_from_slice(&u32::from(MAX_UNMAP_DESCRIPTORS).to_be_bytes());
        let granularity = unit.features.unmap_granularity;
        data[28..32].copy_from_slice(&granularity.to_be_bytes());
        if granularity != 0 {
            data[32] = 0x80; // UGAVALID, alignment 0
        }
    }
    data[36..44].copy_from_slice(&MAX_WRITE_SAME_BLOCKS.to_be_bytes());
    // MAXIMUM ATOMIC TRANSFER LENGTH and ATOMIC ALIGNMENT (SBC-4 6.6.4); no granularity, no boundary.
    let atomic = unit.atomic_blocks();
    data[44..48].copy_from_slice(&atomic.to_be_bytes());
    data[48..52].copy_from_slice(&(if atomic > 1 { atomic } else { 0 }).to_be_bytes());
    data
}

/// Block device characteristics (SBC-3 6.6.2).
fn characteristics(unit: &LunShared) -> [u8; LONG_PAGE] {
    let mut data = [0u8; LONG_PAGE];
    data[1] = VPD_CHARACTERISTICS;
    data[3] = (LONG_PAGE - 4) as u8;
    let rate = unit.characteristics().rotation_rate.unwrap_or(1); // it does not rotate
    data[4..6].copy_from_slice(&rate.to_be_bytes());
    if unit.abilities.block_erase {
        data[7] = 0x40; // WABEREQ 01b: what was erased can be read before it is written
    }
    data
}

/// Logical block provisioning (SBC-3 6.6.4).
fn provisioning(unit: &LunShared) -> [u8; 8] {
    let features = &unit.features;
    let mut data = [0u8; 8];
    data[1] = VPD_PROVISIONING;
    data[3] = 4;
    if unit.room().is_some() {
        data[4] = (SET_BYTES / u64::from(unit.block_size)).ilog2() as u8; // THRESHOLD EXPONENT
    }
    if features.unmap {
        data[5] = 0xE0; // LBPU, LBPWS, LBPWS10
        if features.unmap_zeroes {
            data[5] |= 0x04; // LBPRZ 001b
        }
        // Thin, or resource provisioned: Windows unmaps neither of the other two.
        data[6] = if features.thin { 2 } else { 1 };
    }
    data
}
