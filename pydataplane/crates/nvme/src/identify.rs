//! What controllers and namespaces say of themselves, checked.

use bdev::{COPY_AT_ONCE, Features, Geometry};
use uuid::Uuid;

use crate::ana::Limits;
use crate::command::IDENTIFY_LEN;
use crate::name::{Identified, Name};
use crate::wire::{u16_at, u32_at, u64_at};

/// Bytes of one READ or WRITE at most, where the controller takes as much.
const PART_MAX: u64 = 1 << 20;
/// Blocks of one command at most (NLB).
const BLOCKS_MAX: u64 = 1 << 16;
/// Blocks of a range that is deallocated at most: the bytes of one with 4096 each fit into 64 bits.
const RANGE_MAX: u64 = 1 << 30;
/// Bytes of one Compare at most, and of what is written then.
const COMPARED_MAX: u64 = COPY_AT_ONCE as u64;
/// Namespaces of a controller that are used at most.
pub(crate) const NAMESPACES_MAX: usize = 128;
/// Bytes of the smallest memory page that there is.
const PAGE_SHIFT: u32 = 12;

/// What a controller can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Controller {
    /// Bytes of data of a command at most.
    pub transfer_max: u64,
    /// Bytes of data of a capsule on an I/O queue.
    pub in_capsule: usize,
    pub compares: bool,
    pub deallocates: bool,
    pub zeroes: bool,
    /// Compare and Write, fused, of so many blocks; 0: not at all.
    pub compared_blocks: u64,
    /// It has a volatile write cache.
    pub cache: bool,
    /// It tells of changed namespaces, and of changed asymmetric access.
    pub tells_namespaces: bool,
    pub tells_ana: bool,
    /// Asymmetric access: the groups that it may tell of; `None`: it has none.
    pub ana: Option<Limits>,
    /// Any command keeps it alive (TBKAS).
    pub traffic_based: bool,
    /// Milliseconds: the steps of its keep-alive timer, and how long it takes to quiesce; 0: it does not say.
    pub keep_alive_step_ms: u64,
    pub quiesce_ms: u64,
    /// Bytes of a Write Zeroes, and blocks of a range that is deallocated, at most; `None`: it does not say.
    pub zeroed_max: Option<u64>,
    pub deallocated_max: Option<u64>,
}

/// Of a text field: what is printable, without the spaces at its end.
fn text(bytes: &[u8]) -> String {
    let text: String = bytes
        .iter()
        .map(|b| char::from(*b))
        .filter(char::is_ascii)
        .filter(|c| !c.is_control())
        .collect();
    text.trim().to_owned()
}

impl Controller {
    /// Reads Identify Controller; `page_shift` is CAP.MPSMIN.
    ///
    /// # Errors
    /// A clause: it is none that bdevs can be on.
    pub(crate) fn parse(data: &[u8; IDENTIFY_LEN], page_shift: u32) -> Result<Self, String> {
        // CNTRLTYPE; older ones do not tell.
        match data[111] {
            0 | 1 => {}
            2 => return Err("it is a discovery controller, which has no namespaces".to_owned()),
            other => return Err(format!("it is no I/O controller, but one of type {other}")),
        }
        let (commands, fused) = (u16_at(data, 520), u16_at(data, 522));
        let (events, capsule) = (u32_at(data, 92), u32_at(data, 1792));
        if data[512] & 0xF > 6 || data[513] & 0xF > 4 {
            return Err("its queue entries are of other sizes than there are".to_owned());
        }
        // In units of 16 bytes, with the command; data at its end, without more of an offset (ICDOFF).
        let capsule = (u64::from(capsule) * 16).saturating_sub(64).min(64 << 10);
        let in_capsule = if u16_at(data, 1800) == 0 { capsule as usize } else { 0 };
        let transfer_max = match u32::from(data[77]) {
            0 => PART_MAX,
            power => 1u64.checked_shl(power + PAGE_SHIFT + page_shift).unwrap_or(PART_MAX),
        };
        Ok(Controller {
            transfer_max: transfer_max.clamp(4096, PART_MAX),
            in_capsule,
            compares: commands & 1 != 0,
            deallocates: commands & 1 << 2 != 0,
            zeroes: commands & 1 << 3 != 0,
            compared_blocks: if fused & 1 != 0 { u64::from(u16_at(data, 532)) + 1 } else { 0 },
            cache: data[525] & 1 != 0,
            tells_namespaces: events & 1 << 8 != 0,
            tells_ana: events & 1 << 11 != 0,
            ana: (data[76] & 1 << 3 != 0)
                .then(|| Limits { highest: u32_at(data, 344), count: u32_at(data, 348) }),
            traffic_based: u32_at(data, 96) & 1 << 6 != 0,
            keep_alive_step_ms: u64::from(u16_at(data, 320)) * 100,
            quiesce_ms: u64::from(u16_at(data, 386)),
            zeroed_max: None,
            deallocated_max: None,
        })
    }

    /// Bytes of its log page of asymmetric access that are to be read, and which groups it may tell of; `None`: it has
    /// none.
    pub(crate) fn ana_log(&self) -> Option<(usize, Limits)> {
        self.ana.map(|limits| (limits.log_len(self.transfer_max), limits))
    }

    /// Takes over what Identify Controller of the NVM command set says: WZSL, DMRSL.
    pub(crate) fn limit(&mut self, data: &[u8; IDENTIFY_LEN], page_shift: u32) {
        let power = u32::from(data[1]);
        self.zeroed_max =
            if power == 0 { None } else { 1u64.checked_shl(power + PAGE_SHIFT + page_shift) };
        self.deallocated_max = Some(u64::from(u32_at(data, 4))).filter(|blocks| *blocks != 0);
    }
}

/// The names of a controller, for people.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    /// Serial number.
    pub serial: String,
    /// Model.
    pub model: String,
    /// Revision of its firmware.
    pub firmware: String,
}

impl Names {
    /// Reads Identify Controller.
    pub(crate) fn parse(data: &[u8; IDENTIFY_LEN]) -> Names {
        Names {
            serial: text(&data[4..24]),
            model: text(&data[24..64]),
            firmware: text(&data[64..72]),
        }
    }

    /// Whether it resets a connection that its host has half closed, once it is through with all that came over it, and
    /// not before: Linux's target, which has this model unless somebody gave it another, waits for the queue's
    /// commands (nvmet_sq_destroy) and then closes a socket that does not linger.
    pub(crate) fn resets_when_through(&self) -> bool {
        self.model == "Linux"
    }
}

/// A namespace, as it was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Namespace {
    pub nsid: u32,
    pub geometry: Geometry,
    pub identity: Uuid,
    /// What it is called by that; `None`: it says nothing of itself, and goes by its number.
    pub name: Option<Name>,
    pub read_only: bool,
    /// What is deallocated reads as zeros.
    pub zeroes: bool,
    /// Write Zeroes may deallocate.
    pub zeroing_deallocates: bool,
    pub thin: bool,
    /// Blocks; 0: none is better than others.
    pub granularity: u32,
    pub optimal: u32,
    pub group: u32,
    /// Blocks of a fused Compare and Write at most, of its own; 0: as the controller.
    pub compared: u64,
}

impl Namespace {
    /// Reads Identify Namespace.
    ///
    /// # Errors
    /// A clause: it is none that a bdev can be on.
    pub(crate) fn parse(
        nsid: u32,
        data: &[u8; IDENTIFY_LEN],
        is: Identified,
    ) -> Result<Self, String> {
        let blocks = u64_at(data, 0);
        let (features, format) = (data[24], data[26]);
        let index = usize::from(format & 0xF | format >> 1 & 0x30);
        let format = 128 + index * 4;
        let (metadata, shift) = (u16_at(data, format), u32::from(data[format + 2]));
        if metadata != 0 || data[29] & 7 != 0 {
            return Err(format!(
                "namespace {nsid} has metadata of {metadata} bytes a block, which is not supported: format it \
                 without"
            ));
        }
        let block_size = 1u32.checked_shl(shift).unwrap_or(0);
        let optimal_performance = features & 1 << 4 != 0;
        let physical = match optimal_performance {
            true => (u32::from(u16_at(data, 64)) + 1).saturating_mul(block_size),
            false => block_size,
        };
        let physical =
            if physical.is_power_of_two() && physical <= 1 << 20 { physical } else { block_size };
        let geometry = Geometry::checked(block_size, physical, blocks)
            .map_err(|why| format!("namespace {nsid}: {why}"))?;
        if blocks.checked_mul(u64::from(block_size)).is_none_or(|bytes| bytes > i64::MAX as u64) {
            return Err(format!("namespace {nsid} has {blocks} blocks, which no disk has"));
        }
        let granularity = if optimal_performance { u32::from(u16_at(data, 68)) + 1 } else { 1 };
        Ok(Namespace {
            nsid,
            geometry,
            identity: is.identity,
            name: is.name,
            read_only: data[99] & 1 != 0,
            zeroes: data[33] & 7 == 1,
            zeroing_deallocates: data[33] & 1 << 3 != 0,
            thin: features & 1 != 0,
            granularity,
            optimal: u32::from(u16_at(data, 46)),
            group: group_of(data),
            compared: match features & 1 << 1 != 0 {
                true => u64::from(u16_at(data, 38)) + 1,
                false => 0,
            },
        })
    }

    pub(crate) fn features(&self, controller: &Controller, write_through: bool) -> Features {
        Features {
            read_only: self.read_only,
            volatile_cache: controller.cache && !write_through,
            // NVM command set specification 3.3.6: each controller honours it.
            fua: true,
            unmap: controller.deallocates,
            unmap_zeroes: self.zeroes,
            // Deallocation is a hint.
            unmap_skips: true,
            write_zeroes: controller.zeroes,
            thin: self.thin,
            unmap_granularity: self.granularity,
            optimal_blocks: self.optimal,
            max_blocks: 0,
            boot: None,
            remote: true,
        }
    }

    /// # Errors
    /// A clause: guests cannot go on with it in place of `old`.
    pub(crate) fn can_replace(&self, old: &Namespace) -> Result<(), String> {
        let nsid = old.nsid;
        if self.identity != old.identity {
            return Err(format!(
                "another namespace {nsid} is there than before: it has another identification"
            ));
        }
        let (is, was) = (self.geometry.block_size, old.geometry.block_size);
        if is != was {
            return Err(format!("blocks of namespace {nsid} are {is} bytes now, not {was}"));
        }
        Ok(())
    }
}

/// The group of namespaces that one is in (ANAGRPID), of Identify Namespace.
pub(crate) fn group_of(data: &[u8; IDENTIFY_LEN]) -> u32 {
    u32_at(data, 92)
}

/// How much of what one command on a namespace takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Most {
    /// Bytes of a READ or WRITE.
    pub transfer: u64,
    /// Blocks.
    pub zeroed: u64,
    pub deallocated: u64,
    pub compared: u64,
}

impl Most {
    pub(crate) fn of(controller: &Controller, namespace: &Namespace) -> Most {
        let block_size = u64::from(namespace.geometry.block_size);
        let transfer = controller.transfer_max / block_size * block_size;
        let compared = match controller.compared_blocks {
            0 => 0,
            most if namespace.compared > 0 => most.max(namespace.compared),
            most => most,
        };
        let compared = if controller.compares { compared } else { 0 };
        Most {
            transfer: transfer.min(BLOCKS_MAX * block_size),
            // Where no limit is told (WZSL): as much as is transferred, as Linux does.
            zeroed: (controller.zeroed_max.unwrap_or(transfer) / block_size).clamp(1, BLOCKS_MAX),
            deallocated: controller.deallocated_max.unwrap_or(RANGE_MAX).min(RANGE_MAX),
            compared: compared.min(COMPARED_MAX.min(transfer) / block_size),
        }
    }
}

/// The numbers of a list of active namespaces, ascending.
///
/// # Errors
/// A clause: they are in no order.
pub(crate) fn active(data: &[u8; IDENTIFY_LEN]) -> Result<Vec<u32>, String> {
    let numbers: Vec<u32> =
        (0..IDENTIFY_LEN).step_by(4).map(|at| u32_at(data, at)).take_while(|n| *n != 0).collect();
    if !numbers.is_sorted_by(|a, b| a < b) {
        return Err("its controller tells its namespaces in no order".to_owned());
    }
    Ok(numbers)
}

/// As many of some numbers, ascending, as there is room for; those that are known come before the others.
pub(crate) fn chosen(mut numbers: Vec<u32>, known: &[u32]) -> Vec<u32> {
    if numbers.len() > NAMESPACES_MAX {
        numbers.sort_by_key(|nsid| !known.contains(nsid));
        numbers.truncate(NAMESPACES_MAX);
        numbers.sort_unstable();
    }
    numbers
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn namespace_data(blocks: u64, shift: u8) -> [u8; IDENTIFY_LEN] {
        let mut data = [0; IDENTIFY_LEN];
        data[..8].copy_from_slice(&blocks.to_le_bytes());
        data[130] = shift;
        data
    }

    pub(crate) fn controller_data() -> [u8; IDENTIFY_LEN] {
        let mut data = [0; IDENTIFY_LEN];
        (data[512], data[513]) = (0x66, 0x44);
        data
    }

    #[test]
    fn a_namespace_is_blocks_of_a_size_without_metadata() {
        let of = |data: &[u8; IDENTIFY_LEN]| Namespace::parse(3, data, Identified::default());
        let told = of(&namespace_data(2048, 9)).unwrap();
        assert_eq!((told.geometry.block_size, told.geometry.num_blocks), (512, 2048));
        assert!(of(&namespace_data(1, 12)).is_ok());
        let refuses = |data: [u8; IDENTIFY_LEN], words: &str| {
            let why = of(&data).unwrap_err();
            assert!(why.contains(words), "{why}");
        };
        refuses(namespace_data(2048, 13), "a block is 512 or 4096 bytes, not 8192");
        refuses(namespace_data(2048, 255), "a block is 512 or 4096 bytes, not 0");
        refuses(namespace_data(0, 9), "no blocks");
        refuses(namespace_data(u64::MAX, 9), "which no disk has");
        let mut data = namespace_data(2048, 9);
        data[128] = 8;
        refuses(data, "has metadata of 8 bytes a block");
        // The largest index of a format is within the structure.
        let mut data = namespace_data(2048, 9);
        data[26] = 0xFF;
        refuses(data, "a block is");
        let mut data = namespace_data(2048, 9);
        (data[24], data[64], data[68], data[33], data[99]) = (0x11, 7, 15, 9, 1);
        let told = of(&data).unwrap();
        assert_eq!((told.geometry.physical_block_size, told.granularity), (4096, 16));
        assert!(told.thin && told.zeroes && told.zeroing_deallocates && told.read_only);
    }

    #[test]
    fn a_controller_says_what_it_takes() {
        let told = Controller::parse(&controller_data(), 0).unwrap();
        assert_eq!((told.transfer_max, told.in_capsule), (PART_MAX, 0));
        let mut data = controller_data();
        (data[77], data[1793], data[522], data[532]) = (5, 2, 1, 3);
        let told = Controller::parse(&data, 0).unwrap();
        assert_eq!(
            (told.transfer_max, told.in_capsule, told.compared_blocks),
            (128 << 10, 8128, 4)
        );
        for (power, shift) in [(255, 0), (1, 15), (60, 15)] {
            data[77] = power;
            assert!(Controller::parse(&data, shift).unwrap().transfer_max <= PART_MAX);
        }
        data[111] = 2;
        assert!(Controller::parse(&data, 0).unwrap_err().contains("discovery"));
    }

    #[test]
    fn what_one_command_takes_is_whole_blocks() {
        let mut data = controller_data();
        (data[77], data[520], data[522]) = (1, 1, 1);
        let controller = Controller::parse(&data, 0).unwrap();
        let of = |shift| {
            let namespace =
                Namespace::parse(1, &namespace_data(99, shift), Identified::default()).unwrap();
            Most::of(&controller, &namespace)
        };
        assert_eq!((of(9).transfer, of(9).zeroed, of(9).compared), (8192, 16, 1));
        assert_eq!((of(12).transfer, of(12).zeroed), (8192, 2));
        let mut limited = controller;
        let mut data = [0; IDENTIFY_LEN];
        limited.limit(&data, 0);
        assert_eq!(limited, controller);
        (data[1], data[5]) = (3, 1);
        limited.limit(&data, 0);
        let namespace = Namespace::parse(1, &namespace_data(99, 9), Identified::default()).unwrap();
        let most = Most::of(&limited, &namespace);
        assert_eq!((most.zeroed, most.deallocated), (64, 256));
    }

    #[test]
    fn active_namespaces_are_a_list_in_order() {
        let mut data = [0; IDENTIFY_LEN];
        (data[0], data[4], data[12]) = (2, 7, 9);
        assert_eq!(active(&data).unwrap(), [2, 7]);
        data[4] = 2;
        assert!(active(&data).is_err());
        let many: Vec<u8> = (1..=1024u32).flat_map(u32::to_le_bytes).collect();
        assert_eq!(active(&many.try_into().unwrap()).unwrap().len(), 1024);
    }

    #[test]
    fn of_too_many_namespaces_those_that_are_known_are_used() {
        let known: Vec<u32> = (10..138).collect();
        assert_eq!(chosen((1..138).collect(), &known), known);
        let known = [500, 700];
        let found = chosen((1..=1024).collect(), &known);
        assert_eq!((found.len(), found[125..].to_vec()), (NAMESPACES_MAX, vec![126, 500, 700]));
        assert_eq!(chosen(vec![3, 9], &known), [3, 9]);
    }
}
