//! What virtio 1.2 section 5.6 lays down: structures, constants, the configuration space and the
//! addressing of logical units. All multi-byte fields are little-endian (VIRTIO_F_VERSION_1).

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Index of the control queue (5.6.2).
pub const CONTROL_QUEUE: usize = 0;
/// Index of the event queue (5.6.2).
pub const EVENT_QUEUE: usize = 1;
/// Index of the first request queue (5.6.2).
pub const FIRST_REQUEST_QUEUE: usize = 2;

/// Request queues of one controller, at most. QEMU asks for one per vCPU.
pub const MAX_REQUEST_QUEUES: usize = 64;
/// Virtqueues of one controller, at most: control, event and request queues.
pub const MAX_QUEUES: usize = FIRST_REQUEST_QUEUE + MAX_REQUEST_QUEUES;

/// Targets of one controller, at most: numbers 0 to 254.
pub const MAX_TARGETS: usize = 255;

/// Bytes of a CDB in a request: `cdb_size`, fixed at its default (5.6.4).
pub const CDB_SIZE: usize = 32;
/// Bytes for sense data in a response: `sense_size`, fixed at its default (5.6.4).
pub const SENSE_SIZE: usize = 96;

/// Data segments of one request, at most (`seg_max`).
pub const SEG_MAX: u32 = 126;
/// Data of one request in 512-byte sectors, at most (`max_sectors`): 4 MiB.
pub const MAX_SECTORS: u32 = 8192;
/// Commands that a driver should keep in flight on one LUN (`cmd_per_lun`).
pub const CMD_PER_LUN: u32 = 128;

/// Feature bit: requests carry data in both directions or either (5.6.3).
pub const F_INOUT: u64 = 1 << 0;
/// Feature bit: LUNs come and go, told by events (5.6.3).
pub const F_HOTPLUG: u64 = 1 << 1;
/// Feature bit: LUN parameters change, told by events (5.6.3).
pub const F_CHANGE: u64 = 1 << 2;
/// Feature bit: requests may carry protection information, and their headers say how much (5.6.3).
pub const F_T10_PI: u64 = 1 << 3;
/// Feature bit of vhost: log what is written to guest memory.
pub const F_LOG_ALL: u64 = 1 << 26;
/// Feature bit: no assumption about how a message is cut into descriptors (6.3).
pub const F_ANY_LAYOUT: u64 = 1 << 27;
/// Feature bit: indirect descriptor tables (2.7.5.3).
pub const F_INDIRECT_DESC: u64 = 1 << 28;
/// Feature bit: used_event and avail_event (2.7.7).
pub const F_EVENT_IDX: u64 = 1 << 29;
/// Feature bit of vhost-user: protocol features can be negotiated.
pub const F_PROTOCOL_FEATURES: u64 = 1 << 30;
/// Feature bit: virtio 1.0 or later (6).
pub const F_VERSION_1: u64 = 1 << 32;

/// What a session offers. HOTPLUG and CHANGE are always there: QEMU sends both in SET_FEATURES
/// whether or not they were offered, and gives up the VM when they are refused. T10_PI is there for QEMU's
/// property `t10_pi`, which is off by default; a disk says by itself whether it has such information.
pub const OFFERED_FEATURES: u64 = F_INOUT
    | F_HOTPLUG
    | F_CHANGE
    | F_T10_PI
    | F_LOG_ALL
    | F_ANY_LAYOUT
    | F_INDIRECT_DESC
    | F_EVENT_IDX
    | F_PROTOCOL_FEATURES
    | F_VERSION_1;

/// Response codes of requests and of the control queue (5.6.6.1, 5.6.6.2).
pub mod response {
    /// The request was completed, `status` holds the SCSI status; or the function is complete.
    pub const OK: u8 = 0;
    /// The data did not fit the buffers that the driver gave.
    pub const OVERRUN: u8 = 1;
    /// Ended by ABORT TASK, ABORT TASK SET or CLEAR TASK SET.
    pub const ABORTED: u8 = 2;
    /// There is no such target.
    pub const BAD_TARGET: u8 = 3;
    /// Ended by a reset of the logical unit or the nexus.
    pub const RESET: u8 = 4;
    /// Any other failure of the host.
    pub const FAILURE: u8 = 9;
    /// The task that was asked about is there (control queue only).
    pub const FUNCTION_SUCCEEDED: u8 = 10;
    /// The task management function is not supported (control queue only).
    pub const FUNCTION_REJECTED: u8 = 11;
    /// There is no such LUN (control queue only).
    pub const INCORRECT_LUN: u8 = 12;
}

/// `struct virtio_scsi_req_cmd`, the device-readable part without its CDB tail variations
/// (5.6.6.1): `cdb_size` is 32.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RequestHeader {
    /// Which logical unit; see [`LunAddress`].
    pub lun: [u8; 8],
    /// Name of the command for task management.
    pub id: U64,
    /// SAM task attribute.
    pub task_attr: u8,
    /// SAM priority.
    pub prio: u8,
    /// Command reference number.
    pub crn: u8,
    /// The command.
    pub cdb: [u8; CDB_SIZE],
}
const _: () = assert!(size_of::<RequestHeader>() == 51);

/// `struct virtio_scsi_req_cmd_pi`, the same part where [`F_T10_PI`] was negotiated (5.6.6.1).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ProtectedRequestHeader {
    /// As in [`RequestHeader`], up to the CDB.
    pub head: [u8; 19],
    /// Bytes of protection information before the data to the device.
    pub pi_bytesout: U32,
    /// Bytes of protection information before the data from the device.
    pub pi_bytesin: U32,
    /// The command.
    pub cdb: [u8; CDB_SIZE],
}
const _: () = assert!(size_of::<ProtectedRequestHeader>() == 59);

/// `struct virtio_scsi_req_cmd`, the device-writable part before the sense data (5.6.6.1).
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ResponseHeader {
    /// Valid bytes of the sense data that follows.
    pub sense_len: U32,
    /// Bytes of the data buffers that were not used.
    pub residual: U32,
    /// Status qualifier.
    pub status_qualifier: U16,
    /// SCSI status.
    pub status: u8,
    /// One of [`response`].
    pub response: u8,
}
const _: () = assert!(size_of::<ResponseHeader>() == 12);

/// Bytes of the device-writable part of a request before its data.
pub const RESPONSE_SIZE: usize = size_of::<ResponseHeader>() + SENSE_SIZE;
const _: () = assert!(RESPONSE_SIZE == 108);

/// Values of a request's `task_attr` (5.6.6.1); others count as SIMPLE (0): in any order.
pub mod task_attribute {
    /// After all earlier ones of the logical unit, and before all later ones.
    pub const ORDERED: u8 = 1;
    /// Before all that have not begun.
    pub const HEAD_OF_QUEUE: u8 = 2;
    /// Only during an auto contingent allegiance, which there never is.
    pub const ACA: u8 = 3;

    /// Whether later requests wait for one with this attribute (SAM-5 8.6).
    #[inline(always)]
    pub const fn has_others_wait(attribute: u8) -> bool {
        attribute.wrapping_sub(ORDERED) <= HEAD_OF_QUEUE - ORDERED
    }
}

/// Types of messages on the control queue (5.6.6.2).
pub mod control {
    /// Task management function.
    pub const T_TMF: u32 = 0;
    /// Asynchronous notification: which events can be told.
    pub const T_AN_QUERY: u32 = 1;
    /// Asynchronous notification: tell these.
    pub const T_AN_SUBSCRIBE: u32 = 2;

    /// Abort one task.
    pub const TMF_ABORT_TASK: u32 = 0;
    /// Abort all tasks of this I_T_L nexus.
    pub const TMF_ABORT_TASK_SET: u32 = 1;
    /// Abort all tasks of the task set.
    pub const TMF_CLEAR_TASK_SET: u32 = 3;
    /// Abort all tasks of the nexus and tell unit attention.
    pub const TMF_I_T_NEXUS_RESET: u32 = 4;
    /// Abort all tasks of the LUN and tell unit attention.
    pub const TMF_LOGICAL_UNIT_RESET: u32 = 5;
    /// Is this task there?
    pub const TMF_QUERY_TASK: u32 = 6;
    /// Is any task there?
    pub const TMF_QUERY_TASK_SET: u32 = 7;
}

/// `struct virtio_scsi_ctrl_tmf`, device-readable part (5.6.6.2).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct TmfRequest {
    /// [`control::T_TMF`].
    pub kind: U32,
    /// One of `control::TMF_*`.
    pub subtype: U32,
    /// Which logical unit; see [`LunAddress`].
    pub lun: [u8; 8],
    /// Which command, for those that are about one.
    pub id: U64,
}
const _: () = assert!(size_of::<TmfRequest>() == 24);

/// `struct virtio_scsi_ctrl_an`, device-readable part (5.6.6.2).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct AnRequest {
    /// [`control::T_AN_QUERY`] or [`control::T_AN_SUBSCRIBE`].
    pub kind: U32,
    /// Which logical unit.
    pub lun: [u8; 8],
    /// MMC-5 event bits.
    pub event_requested: U32,
}
const _: () = assert!(size_of::<AnRequest>() == 16);

/// `struct virtio_scsi_event` (5.6.6.3).
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
pub struct EventRecord {
    /// What happened, and [`event::T_EVENTS_MISSED`].
    pub event: U32,
    /// Which logical unit.
    pub lun: [u8; 8],
    /// Details.
    pub reason: U32,
}
const _: () = assert!(size_of::<EventRecord>() == 16);

/// Constants of the event queue (5.6.6.3).
pub mod event {
    /// Flag: at least one event was lost before this one.
    pub const T_EVENTS_MISSED: u32 = 0x8000_0000;
    /// Nothing but the flag.
    pub const T_NO_EVENT: u32 = 0;
    /// A LUN came, went or was reset.
    pub const T_TRANSPORT_RESET: u32 = 1;
    /// A LUN's parameters changed; the reason is ASC | ASCQ << 8.
    pub const T_PARAM_CHANGE: u32 = 3;

    /// Reason: the LUN came.
    pub const RESET_RESCAN: u32 = 1;
    /// Reason: the LUN went.
    pub const RESET_REMOVED: u32 = 2;

    /// Reason of a parameter change: CAPACITY DATA HAS CHANGED (SPC-4, ASC 2Ah ASCQ 09h).
    pub const CAPACITY_DATA_HAS_CHANGED: u32 = 0x2a | (0x09 << 8);
}

/// `struct virtio_scsi_config` (5.6.4).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Config {
    /// Request queues.
    pub num_queues: U32,
    /// Segments of one request.
    pub seg_max: U32,
    /// Sectors of one request.
    pub max_sectors: U32,
    /// Commands in flight per LUN.
    pub cmd_per_lun: U32,
    /// Bytes of an event buffer.
    pub event_info_size: U32,
    /// Bytes of sense data; writable by the driver.
    pub sense_size: U32,
    /// Bytes of a CDB; writable by the driver.
    pub cdb_size: U32,
    /// Highest channel.
    pub max_channel: U16,
    /// Highest target.
    pub max_target: U16,
    /// Highest LUN.
    pub max_lun: U32,
}
const _: () = assert!(size_of::<Config>() == 36);

/// Bytes that GET_CONFIG may reach: SPDK's initiator reads 256 whatever the device.
pub const CONFIG_SPACE: usize = 256;

impl Config {
    /// The configuration of a device with `request_queues` request queues.
    pub fn new(request_queues: u32) -> Self {
        Config {
            num_queues: request_queues.into(),
            seg_max: SEG_MAX.into(),
            max_sectors: MAX_SECTORS.into(),
            cmd_per_lun: CMD_PER_LUN.into(),
            event_info_size: (size_of::<EventRecord>() as u32).into(),
            sense_size: (SENSE_SIZE as u32).into(),
            cdb_size: (CDB_SIZE as u32).into(),
            max_channel: 0.into(),
            max_target: 255.into(),
            max_lun: 16383.into(),
        }
    }

    /// `size` bytes from `offset`, zeros beyond the structure; `None` beyond [`CONFIG_SPACE`].
    pub fn read(&self, offset: usize, size: usize) -> Option<Vec<u8>> {
        let mut space = [0u8; CONFIG_SPACE];
        space[..size_of::<Config>()].copy_from_slice(self.as_bytes());
        space.get(offset..offset.checked_add(size)?).map(<[u8]>::to_vec)
    }

    /// Whether writing `bytes` at `offset` leaves everything as it is: only sense_size and
    /// cdb_size are writable (5.6.4.2), and only with the values that they have.
    pub fn accepts(&self, offset: usize, bytes: &[u8]) -> bool {
        let writable = std::mem::offset_of!(Config, sense_size)
            ..std::mem::offset_of!(Config, cdb_size) + size_of::<U32>();
        let Some(end) = offset.checked_add(bytes.len()) else { return false };
        offset >= writable.start
            && end <= writable.end
            && self.as_bytes().get(offset..end) == Some(bytes)
    }
}

/// Whom a request is for (5.6.6.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LunAddress {
    /// A logical unit of a target.
    Unit {
        /// 0 to 255.
        target: u8,
        /// 0 to 16383; [`LunAddress::NO_LUN`] for an address format that we do not have.
        lun: u16,
    },
    /// The REPORT LUNS well-known logical unit of the whole device.
    ReportLuns,
    /// Neither: there is no such target.
    Invalid,
}

impl LunAddress {
    /// A LUN that no target has.
    pub const NO_LUN: u16 = u16::MAX;

    /// Decodes the field of a request. Peripheral (Linux before 2.6.39, SPDK) and flat space
    /// addressing (Linux, SeaBIOS, Windows) of SAM-5 4.7 are both taken.
    #[inline]
    pub fn decode(field: &[u8; 8]) -> Self {
        match *field {
            [1, target, high, low, 0, 0, 0, 0] => {
                let lun = match high >> 6 {
                    // Peripheral device addressing: the bus must be 0.
                    0b00 if high == 0 => u16::from(low),
                    0b01 => u16::from_be_bytes([high & 0x3f, low]),
                    _ => Self::NO_LUN,
                };
                LunAddress::Unit { target, lun }
            }
            [1, target, ..] => LunAddress::Unit { target, lun: Self::NO_LUN },
            [0xc1, 0x01, 0, 0, 0, 0, 0, 0] => LunAddress::ReportLuns,
            _ => LunAddress::Invalid,
        }
    }

    /// The field of a request, in flat space addressing.
    pub fn flat(target: u8, lun: u16) -> [u8; 8] {
        let [high, low] = lun.to_be_bytes();
        [1, target, 0x40 | high, low, 0, 0, 0, 0]
    }

    /// The field of an event for LUN `lun` below 256. Linux takes bytes 2 and 3 of an event as
    /// the plain LUN, so an event must be in peripheral addressing.
    pub fn event(target: u8, lun: u8) -> [u8; 8] {
        [1, target, 0, lun, 0, 0, 0, 0]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_lun_formats_name_the_same_unit() {
        let unit = LunAddress::Unit { target: 7, lun: 3 };
        assert_eq!(LunAddress::decode(&[1, 7, 0x00, 3, 0, 0, 0, 0]), unit);
        assert_eq!(LunAddress::decode(&[1, 7, 0x40, 3, 0, 0, 0, 0]), unit);
        assert_eq!(LunAddress::decode(&LunAddress::flat(7, 3)), unit);
        assert_eq!(LunAddress::decode(&LunAddress::event(7, 3)), unit);
        assert_eq!(
            LunAddress::decode(&LunAddress::flat(255, 16383)),
            LunAddress::Unit { target: 255, lun: 16383 }
        );
    }

    #[test]
    fn odd_addresses_name_no_unit() {
        let nowhere = LunAddress::Unit { target: 7, lun: LunAddress::NO_LUN };
        // Peripheral addressing on bus 1, logical unit addressing, extended, a second level.
        for field in [
            [1, 7, 0x01, 0, 0, 0, 0, 0],
            [1, 7, 0x80, 0, 0, 0, 0, 0],
            [1, 7, 0xc1, 1, 0, 0, 0, 0],
            [1, 7, 0x40, 0, 0, 0, 0, 9],
        ] {
            assert_eq!(LunAddress::decode(&field), nowhere, "{field:?}");
        }
        assert_eq!(LunAddress::decode(&[0; 8]), LunAddress::Invalid);
        assert_eq!(LunAddress::decode(&[0xc1, 2, 0, 0, 0, 0, 0, 0]), LunAddress::Invalid);
        assert_eq!(LunAddress::decode(&[0xc1, 1, 0, 0, 0, 0, 0, 0]), LunAddress::ReportLuns);
    }

    #[test]
    fn config_is_read_at_any_offset_and_size_up_to_256_bytes() {
        let config = Config::new(4);
        for offset in 0..=CONFIG_SPACE {
            for size in 0..=CONFIG_SPACE - offset {
                assert_eq!(config.read(offset, size).map(|b| b.len()), Some(size));
            }
        }
        assert_eq!(config.read(0, 4).unwrap(), [4, 0, 0, 0]);
        assert_eq!(config.read(20, 8).unwrap(), [96, 0, 0, 0, 32, 0, 0, 0]);
        assert_eq!(config.read(28, 8).unwrap(), [0, 0, 255, 0, 0xff, 0x3f, 0, 0]);
        assert_eq!(config.read(36, 4).unwrap(), [0; 4]);
        assert_eq!(config.read(0, 257), None);
        assert_eq!(config.read(255, 2), None);
        assert_eq!(config.read(usize::MAX, 2), None);
    }

    #[test]
    fn config_takes_back_only_the_sizes_that_it_has() {
        let config = Config::new(1);
        assert!(config.accepts(20, &96u32.to_le_bytes()));
        assert!(config.accepts(24, &32u32.to_le_bytes()));
        assert!(!config.accepts(20, &64u32.to_le_bytes()));
        assert!(!config.accepts(24, &16u32.to_le_bytes()));
        assert!(!config.accepts(0, &1u32.to_le_bytes()));
        assert!(!config.accepts(usize::MAX, &[0, 0]));
    }
}
