//! What a LUN says of itself: INQUIRY, its pages, its capacity and its mode. The target is another machine's
//! program: what it says is read as far as it goes, and checked.

use bdev::{Features, Geometry};
use uuid::Uuid;

use crate::lun::Lun;

/// Bytes of one command at most; longer I/O is done in parts.
const PART_MAX: u64 = 4 << 20;
/// Blocks that one command zeroes or deallocates at most where the LUN names no limit: the target does it all
/// at once.
const ZEROED_AT_ONCE: u64 = 64 << 20;
/// Most bytes of a LUN, as files and the kernel count them.
const BYTES_MAX: u64 = i64::MAX as u64;

/// What READ CAPACITY (16) tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Capacity {
    pub geometry: Geometry,
    /// LBPME: provisioned thinly.
    pub thin: bool,
    /// LBPRZ: what is deallocated reads as zeros.
    pub unmapped_is_zero: bool,
}

impl Capacity {
    /// # Errors
    /// A clause: no bdev can be like that.
    pub(crate) fn parse(data: &[u8]) -> Result<Capacity, String> {
        if data.len() < 16 {
            return Err("it tells no capacity".to_owned());
        }
        let (last, block_size) = (u64_at(data, 0), u32_at(data, 8));
        let exponent = u32::from(data[13] & 0xF);
        let physical = block_size.checked_shl(exponent).filter(|p| p >> exponent == block_size);
        let num_blocks = last.checked_add(1).filter(|blocks| {
            blocks.checked_mul(u64::from(block_size)).is_some_and(|bytes| bytes <= BYTES_MAX)
        });
        let num_blocks = num_blocks.ok_or_else(|| {
            format!("it says that its last block of {block_size} bytes is number {last}, which no disk has")
        })?;
        // What does not fit is only advice.
        let geometry = Geometry::checked(block_size, physical.unwrap_or(block_size), num_blocks)?;
        let thin = data[14] & 0x80 != 0;
        Ok(Capacity { geometry, thin, unmapped_is_zero: data[14] & 0x40 != 0 })
    }
}

/// What the device-specific parameter and the caching page of MODE SENSE tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mode {
    pub write_protected: bool,
    /// DPOFUA: a write can be made durable by itself.
    pub fua: bool,
    /// WCE.
    pub cache: bool,
}

impl Mode {
    /// Of a LUN that tells nothing.
    pub(crate) const UNKNOWN: Mode = Mode { write_protected: false, fua: false, cache: true };

    /// Of the header (6) and the pages that follow.
    pub(crate) fn parse(data: &[u8]) -> Mode {
        let Some((header, _)) = data.split_at_checked(4) else { return Mode::UNKNOWN };
        let end = data.len().min(usize::from(header[0]) + 1);
        let mut pages = data.get(4 + usize::from(header[3])..end).unwrap_or_default();
        let mut mode = Mode {
            write_protected: header[2] & 0x80 != 0,
            fua: header[2] & 0x10 != 0,
            cache: true,
        };
        while let [code, len, rest @ ..] = pages {
            // SBC-4 6.5.5.
            if code & 0x7F == 8
                && let Some(flags) = rest.first()
            {
                mode.cache = flags & 4 != 0;
            }
            pages = rest.get(usize::from(*len)..).unwrap_or_default();
        }
        mode
    }
}

/// What the block limits page (B0h) tells; 0: nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Blocks of one command.
    pub transfer: u32,
    /// Blocks that are best.
    pub optimal: u32,
    /// Blocks that are compared and written.
    pub compared: u8,
    pub unmapped: u32,
    pub granularity: u32,
    pub same: u64,
}

impl Limits {
    pub(crate) fn parse(page: &[u8]) -> Limits {
        let u32_at = |at| if page.len() >= at + 4 { u32_at(page, at) } else { 0 };
        Limits {
            transfer: u32_at(8),
            optimal: u32_at(12),
            compared: page.get(5).copied().unwrap_or(0),
            // Without room for a range there is no UNMAP.
            unmapped: if u32_at(24) == 0 { 0 } else { u32_at(20) },
            granularity: u32_at(28),
            same: if page.len() >= 44 { u64_at(page, 36) } else { 0 },
        }
    }
}

/// How blocks are deallocated: the logical block provisioning page (B2h).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Provisioning {
    /// LBPU: by UNMAP.
    pub unmap: bool,
    /// LBPWS: by WRITE SAME (16).
    pub same: bool,
}

impl Provisioning {
    pub(crate) fn parse(page: &[u8]) -> Provisioning {
        let flags = page.get(5).copied().unwrap_or(0);
        Provisioning { unmap: flags & 0x80 != 0, same: flags & 0x40 != 0 }
    }
}

/// What a page of vital product data holds, as far as it came.
fn page_data(page: &[u8]) -> &[u8] {
    let data = page.get(4..).unwrap_or_default();
    &data[..data.len().min(page_len(page).saturating_sub(4))]
}

/// Bytes that such a page has altogether.
pub(crate) fn page_len(page: &[u8]) -> usize {
    page.get(2..4).map_or(0, |len| 4 + usize::from(u16::from_be_bytes([len[0], len[1]])))
}

/// The identity of a LUN of `target`, by the best designator of the device identification page (83h), the same
/// on every host; else by its serial number (80h); `None`: it has neither.
pub(crate) fn identity(target: &str, page: &[u8], serial: &[u8]) -> Option<Uuid> {
    let mut left = page_data(page);
    let mut best = Some((0, page_data(serial).trim_ascii())).filter(|(_, s)| !s.is_empty());
    while let [_, kind, _, len, rest @ ..] = left {
        // The last one may be cut.
        let Some((designator, rest)) = rest.split_at_checked(usize::from(*len)) else { break };
        left = rest;
        // Of the logical unit, not of the port.
        if kind & 0x30 != 0 || designator.is_empty() {
            continue;
        }
        // NAA, EUI-64, UUID, name, vendor's.
        let rank = match kind & 0xF {
            3 => 5,
            2 => 4,
            0xA => 3,
            8 => 2,
            1 => 1,
            _ => continue,
        };
        if best.is_none_or(|(other, _): (u8, _)| other < rank) {
            best = Some((rank, designator));
        }
    }
    // Many are the same at each target of a make.
    let (_, designator) = best?;
    Some(bdev::identity_in(target, designator))
}

/// Whether an operation code is supported, by what REPORT SUPPORTED OPERATION CODES tells of it.
pub(crate) fn is_supported(data: &[u8]) -> bool {
    data.get(1).is_some_and(|flags| matches!(flags & 7, 3 | 5))
}

/// LUNs that one target is asked for at most.
pub(crate) const LUNS_MAX: usize = 1024;

/// The numbers of the LUNs that REPORT LUNS tells, in order, as far as they came: those of the peripheral and the
/// flat address space (SAM-5 4.7.7), which others are not of.
///
/// # Errors
/// A clause: it tells nothing.
pub(crate) fn luns(data: &[u8]) -> Result<Vec<u16>, String> {
    let Some((head, all)) = data.split_at_checked(8) else {
        return Err("the target does not tell its LUNs".to_owned());
    };
    let told = usize::try_from(u32_at(head, 0)).unwrap_or(usize::MAX);
    let number = |field: &[u8]| match (field[0] >> 6, field[0] & 0x3F) {
        (0, 0) => Some(u16::from(field[1])),
        (1, high) => Some(u16::from(high) << 8 | u16::from(field[1])),
        _ => None,
    };
    let fields = all[..all.len().min(told)].chunks_exact(8).take(LUNS_MAX);
    let mut luns: Vec<u16> = fields.filter_map(number).collect();
    luns.sort_unstable();
    luns.dedup();
    Ok(luns)
}

/// Whether it is a disk, by the standard INQUIRY data.
///
/// # Errors
/// A clause: it is none.
pub(crate) fn is_disk(inquiry: &[u8]) -> Result<(), String> {
    match inquiry.first() {
        Some(0) => Ok(()),
        Some(other) if other >> 5 != 0 => Err("the target has no such LUN".to_owned()),
        Some(other) => Err(format!("it is no disk, but a device of type {:#04x}", other & 0x1F)),
        None => Err("it says nothing of itself".to_owned()),
    }
}

/// A LUN, as it was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unit {
    pub capacity: Capacity,
    pub mode: Mode,
    pub limits: Limits,
    pub provisioning: Provisioning,
    /// WRITE SAME (16) is supported.
    pub same: bool,
    pub identity: Uuid,
}

impl Unit {
    fn block_size(&self) -> u64 {
        u64::from(self.capacity.geometry.block_size)
    }

    pub(crate) fn lun(&self) -> Lun {
        Lun { identity: self.identity, block_size: self.capacity.geometry.block_size }
    }

    /// Bytes of one READ or WRITE at most, whole blocks.
    pub(crate) fn part_max(&self) -> u64 {
        let told = match self.limits.transfer {
            0 => PART_MAX,
            blocks => u64::from(blocks) * self.block_size(),
        };
        told.min(PART_MAX)
    }

    /// Blocks of one WRITE SAME at most.
    pub(crate) fn same_max(&self) -> u32 {
        let most = ZEROED_AT_ONCE / self.block_size();
        let told = if self.limits.same == 0 { most } else { self.limits.same };
        told.min(most) as u32
    }

    /// Blocks of one UNMAP at most.
    pub(crate) fn unmap_max(&self) -> u32 {
        self.limits.unmapped.min(u32::MAX - 1)
    }

    /// Whether blocks are deallocated by UNMAP; else by WRITE SAME, if at all.
    pub(crate) fn unmaps(&self) -> bool {
        self.provisioning.unmap && self.limits.unmapped != 0
    }

    pub(crate) fn features(&self, write_through: bool) -> Features {
        let Unit { capacity, mode, limits, .. } = *self;
        Features {
            read_only: mode.write_protected,
            volatile_cache: mode.cache && !write_through,
            fua: mode.fua,
            unmap: self.unmaps() || self.provisioning.same,
            unmap_zeroes: capacity.unmapped_is_zero,
            // UNMAP is a hint; what is not of its granularity stays.
            unmap_skips: true,
            write_zeroes: self.same,
            thin: capacity.thin,
            unmap_granularity: limits.granularity.max(1),
            optimal_blocks: limits.optimal,
            max_blocks: 0,
            boot: None,
            remote: true,
        }
    }

    /// Whether guests that have a LUN like `old` can go on with this one.
    ///
    /// # Errors
    /// A clause that says why not.
    pub(crate) fn can_replace(&self, old: &Unit) -> Result<(), String> {
        old.lun().check(self.lun())?;
        let can = |what: &str| Err(format!("{what}: delete the bdev and create it again"));
        if self.mode.cache && !old.mode.cache {
            return can("it has a volatile cache now, and had none");
        }
        if self.mode.cache && old.mode.fua && !self.mode.fua {
            return can("it makes no write durable by itself (FUA) any more");
        }
        if old.capacity.unmapped_is_zero && !self.capacity.unmapped_is_zero {
            return can("what is deallocated does not read as zeros any more");
        }
        if old.capacity.thin && !self.capacity.thin {
            return can("it is not thin any more");
        }
        Ok(())
    }
}

fn u32_at(data: &[u8], at: usize) -> u32 {
    data[at..at + 4].iter().fold(0, |n, b| n << 8 | u32::from(*b))
}

fn u64_at(data: &[u8], at: usize) -> u64 {
    u64::from(u32_at(data, at)) << 32 | u64::from(u32_at(data, at + 4))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn whatever_a_lun_says_is_read_as_far_as_it_goes(
            data in prop::collection::vec(any::<u8>(), 0..300),
            sizes in prop::sample::select(vec![512u32, 4096]),
        ) {
            _ = is_disk(&data);
            _ = is_supported(&data);
            if let Ok(found) = luns(&data) {
                prop_assert!(found.len() <= LUNS_MAX && found.is_sorted());
            }
            _ = identity("t", &data, &data);
            let (mode, limits) = (Mode::parse(&data), Limits::parse(&data));
            let provisioning = Provisioning::parse(&data);
            let mut told = data.clone();
            if told.len() > 11 {
                told[8..12].copy_from_slice(&sizes.to_be_bytes());
            }
            if let Ok(capacity) = Capacity::parse(&told) {
                let geometry = capacity.geometry;
                prop_assert!(geometry.num_blocks > 0 && geometry.bytes() <= BYTES_MAX);
                prop_assert!(geometry.physical_block_size % geometry.block_size == 0);
                let unit =
                    Unit { capacity, mode, limits, provisioning, same: true, identity: Uuid::nil() };
                let features = unit.features(false);
                prop_assert!(unit.part_max() >= u64::from(geometry.block_size));
                prop_assert!(unit.part_max().is_multiple_of(u64::from(geometry.block_size)));
                prop_assert!(unit.same_max() > 0 && features.unmap_granularity > 0);
                prop_assert!(!unit.unmaps() || unit.unmap_max() > 0);
            }
        }
    }

    fn capacity(last: u64, block_size: u32, exponent: u8, flags: u8) -> Result<Capacity, String> {
        let mut data = [0; 32];
        data[..8].copy_from_slice(&last.to_be_bytes());
        data[8..12].copy_from_slice(&block_size.to_be_bytes());
        (data[13], data[14]) = (exponent, flags);
        Capacity::parse(&data)
    }

    fn unit() -> Unit {
        Unit {
            capacity: capacity(2047, 512, 3, 0xC0).unwrap(),
            mode: Mode { write_protected: false, fua: true, cache: true },
            limits: Limits::default(),
            provisioning: Provisioning { unmap: true, same: true },
            same: true,
            identity: identity("t", &[0, 0x83, 0, 7, 1, 3, 0, 3, 1, 2, 3], &[]).unwrap(),
        }
    }

    #[test]
    fn a_capacity_is_blocks_their_size_and_that_of_physical_ones() {
        let told = capacity(2047, 512, 3, 0xC0).unwrap();
        let geometry = Geometry { block_size: 512, physical_block_size: 4096, num_blocks: 2048 };
        assert_eq!(told, Capacity { geometry, thin: true, unmapped_is_zero: true });
        let told = capacity(0, 4096, 0, 0).unwrap();
        assert_eq!((told.geometry.num_blocks, told.geometry.physical_block_size), (1, 4096));
        assert!(!told.thin && !told.unmapped_is_zero);
        assert_eq!(
            capacity(1 << 40, 4096, 15, 0).unwrap().geometry.physical_block_size,
            4096 << 15
        );
    }

    #[test]
    fn a_capacity_that_no_disk_has_is_refused_in_a_clause() {
        for (last, block_size, words) in [
            (2047, 3, "a block is 512 or 4096 bytes, not 3"),
            (2047, 0, "a block is 512 or 4096 bytes, not 0"),
            (2047, u32::MAX, "a block is 512 or 4096 bytes"),
            // No blocks at all: the last one is the one before the first.
            (u64::MAX, 512, "which no disk has"),
            (u64::MAX - 1, 4096, "which no disk has"),
            (1 << 62, 512, "which no disk has"),
        ] {
            let why = capacity(last, block_size, 0, 0).unwrap_err();
            assert!(why.contains(words), "{last} {block_size}: {why}");
        }
        assert_eq!(Capacity::parse(&[0; 15]).unwrap_err(), "it tells no capacity");
        assert!(Capacity::parse(&[]).is_err());
    }

    #[test]
    fn a_mode_page_says_whether_writes_are_cached_and_can_be_durable() {
        let mode = |data: &[u8]| {
            let Mode { write_protected, fua, cache } = Mode::parse(data);
            (write_protected, fua, cache)
        };
        assert_eq!(mode(&[6, 0, 0x90, 0, 8, 2, 0, 0]), (true, true, false));
        assert_eq!(mode(&[6, 0, 0, 0, 8, 2, 4, 0]), (false, false, true));
        // Behind a block descriptor and another page, and with its PS bit.
        let long = [0x15, 0, 0x10, 8, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 0, 0, 0x88, 2, 0, 0, 0, 0];
        assert_eq!(mode(&long), (false, true, false));
        for short in [&[][..], &[3], &[3, 0, 0, 0], &[255, 0, 0, 255, 8], &[255, 0, 0, 0, 8, 255]] {
            assert!(Mode::parse(short).cache, "{short:?}");
        }
    }

    #[test]
    fn limits_are_read_as_far_as_they_go() {
        let mut page = [0; 64];
        (page[5], page[11], page[15], page[23], page[27], page[31], page[43]) =
            (1, 2, 3, 4, 5, 6, 7);
        let told =
            Limits { transfer: 2, optimal: 3, compared: 1, unmapped: 4, granularity: 6, same: 7 };
        assert_eq!(Limits::parse(&page), told);
        page[27] = 0;
        assert_eq!(Limits::parse(&page).unmapped, 0);
        assert_eq!(
            Limits::parse(&page[..12]),
            Limits { transfer: 2, compared: 1, ..Limits::default() }
        );
        assert_eq!(Limits::parse(&[]), Limits::default());
        assert_eq!(
            Provisioning::parse(&[0, 0, 0, 0, 0, 0x40]),
            Provisioning { unmap: false, same: true }
        );
        assert_eq!(Provisioning::parse(&[0, 0]), Provisioning::default());
    }

    #[test]
    fn an_identity_is_that_of_the_lun_the_same_everywhere() {
        let page = [0, 0x83, 0, 16, 1, 3, 0, 2, 9, 9, 2, 0x13, 0, 1, 5, 1, 1, 0, 1, 4];
        let identity = |target, page| identity(target, page, &[]);
        let naa = identity("t", &page).unwrap();
        assert_eq!(identity("t", &[0, 0x83, 0, 6, 1, 3, 0, 2, 9, 9]).unwrap(), naa);
        // What is behind the page is none of it; one that is cut is none.
        let behind = [0, 0x83, 0, 6, 1, 3, 0, 2, 9, 9, 1, 3, 0, 1, 7];
        let cut = [0, 0x83, 1, 0, 1, 1, 0, 1, 4, 1, 3, 0, 2, 9, 9, 1, 3, 0, 200, 1];
        assert_eq!([&behind[..], &cut].map(|page| identity("t", page)), [Some(naa); 2]);
        assert_ne!(identity("u", &page).unwrap(), naa);
        assert_ne!(identity("t", &[0, 0x83, 0, 6, 1, 3, 0, 2, 9, 8]).unwrap(), naa);
        // That of a port only, none, and one that is longer than its page.
        for none in [
            &[0, 0x83, 0, 5, 1, 0x13, 0, 1, 5][..],
            &[0, 0x83, 0, 0],
            &[],
            &[0, 0, 0, 4, 1, 3, 0, 9],
        ] {
            assert_eq!(identity("t", none), None, "{none:?}");
        }
    }

    #[test]
    fn a_lun_without_identification_is_known_by_its_serial_number() {
        let serial = |text: &[u8; 4]| [&[0, 0x80, 0, 4][..], text].concat();
        let of = |page: &[u8], text| identity("t", page, &serial(text));
        assert_eq!(of(&[], b" 12 "), of(&[], b"12  "));
        assert_ne!(of(&[], b"1234"), of(&[], b"1235"));
        assert_eq!(of(&[], b"    "), None);
        let naa = [0, 0x83, 0, 6, 1, 3, 0, 2, 9, 9];
        assert_eq!(of(&naa, b"1234"), identity("t", &naa, &[]));
    }

    #[test]
    fn the_luns_of_a_target_are_read_as_far_as_they_came() {
        let mut data = vec![0, 0, 0, 48, 0, 0, 0, 0];
        // Flat 300, peripheral 3 twice, one on another bus, an extended one, and one that is beyond the length.
        for field in [[0x41, 0x2C], [0, 3], [0, 3], [1, 3], [0xC1, 1], [0, 1], [0, 9]] {
            data.extend_from_slice(&[field[0], field[1], 0, 0, 0, 0, 0, 0]);
        }
        assert_eq!(luns(&data).unwrap(), [1, 3, 300]);
        assert_eq!(luns(&data[..20]).unwrap(), [300]);
        assert!(luns(&data[..8]).unwrap().is_empty());
        assert!(luns(&[0; 7]).unwrap_err().contains("does not tell"));
    }

    #[test]
    fn only_a_disk_is_one() {
        assert!(is_disk(&[0, 0]).is_ok());
        assert_eq!(is_disk(&[0x0C]).unwrap_err(), "it is no disk, but a device of type 0x0c");
        assert_eq!(is_disk(&[0x7F]).unwrap_err(), "the target has no such LUN");
        assert!(is_disk(&[]).is_err());
        assert!(is_supported(&[0, 3]) && is_supported(&[0, 5]) && !is_supported(&[0, 1]));
        assert!(!is_supported(&[]));
    }

    #[test]
    fn what_a_lun_names_no_limit_for_has_one_of_ours() {
        let unit = unit();
        assert_eq!((unit.part_max(), unit.same_max()), (4 << 20, (64 << 20) / 512));
        let limits =
            Limits { transfer: 1, same: u64::MAX, unmapped: u32::MAX, ..Limits::default() };
        let unit = Unit { limits, ..unit };
        assert_eq!((unit.part_max(), unit.same_max()), (512, (64 << 20) / 512));
        assert!(unit.unmaps() && unit.unmap_max() == u32::MAX - 1);
        assert!(unit.features(false).volatile_cache && !unit.features(true).volatile_cache);
    }

    #[test]
    fn guests_go_on_only_with_the_same_lun() {
        let old = unit();
        assert!(old.can_replace(&old).is_ok());
        let other = Unit { identity: Uuid::nil(), ..old };
        assert!(other.can_replace(&old).unwrap_err().contains("another LUN"));
        let other = Unit { capacity: capacity(2047, 4096, 0, 0).unwrap(), ..old };
        assert_eq!(other.can_replace(&old).unwrap_err(), "its blocks are 4096 bytes now, not 512");
        let larger = Unit { capacity: capacity(4095, 512, 3, 0xC0).unwrap(), ..old };
        assert!(larger.can_replace(&old).is_ok());
    }
}
