//! Commands of the ublk driver: linux/ublk_cmd.h of Linux 6.12. All numbers are in the machine's own
//! byte order.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of a sector, in which the driver counts whatever a device's blocks are.
pub const SECTOR: u64 = 512;

/// The device that makes devices.
pub const CONTROL: &str = "/dev/ublk-control";

/// Numbers that devices can have: from 0, as many as there are minor numbers (`UBLK_MAX_UBLKS`).
pub const NUMBERS: u32 = 1 << 20;

/// What a command without a queue says in place of its number.
pub const NO_QUEUE: u16 = u16::MAX;

/// What a new device says in place of its number: any that is free.
pub const ANY_DEVICE: u32 = u32::MAX;

/// `_IOC` of linux/ioctl.h, for the driver's letter.
const fn ioc(direction: u32, number: u32, bytes: usize) -> u32 {
    direction << 30 | (bytes as u32) << 16 | (b'u' as u32) << 8 | number
}

const READ: u32 = 2;
const WRITE: u32 = 1;

const fn control(direction: u32, number: u32) -> u32 {
    ioc(direction, number, size_of::<CtrlCmd>())
}

/// Commands of the control device.
pub mod ctrl {
    #![allow(missing_docs, reason = "the names are the kernel's")]
    use super::{READ, WRITE, control};
    pub const GET_DEV_INFO: u32 = control(READ, 0x02);
    pub const ADD_DEV: u32 = control(READ | WRITE, 0x04);
    pub const DEL_DEV: u32 = control(READ | WRITE, 0x05);
    pub const START_DEV: u32 = control(READ | WRITE, 0x06);
    pub const STOP_DEV: u32 = control(READ | WRITE, 0x07);
    pub const SET_PARAMS: u32 = control(READ | WRITE, 0x08);
    pub const START_USER_RECOVERY: u32 = control(READ | WRITE, 0x10);
    pub const END_USER_RECOVERY: u32 = control(READ | WRITE, 0x11);
    pub const GET_FEATURES: u32 = control(READ, 0x13);
    /// Since Linux 6.16.
    pub const UPDATE_SIZE: u32 = control(READ | WRITE, 0x15);
}

/// Commands of a device's queue.
pub mod io {
    #![allow(missing_docs, reason = "the names are the kernel's")]
    use super::{IoCmd, READ, WRITE, ioc};
    pub const FETCH_REQ: u32 = ioc(READ | WRITE, 0x20, size_of::<IoCmd>());
    pub const COMMIT_AND_FETCH_REQ: u32 = ioc(READ | WRITE, 0x21, size_of::<IoCmd>());
}

/// Abilities of the driver and of a device (`UBLK_F_*`).
pub mod flag {
    /// A device stays when its server ends, and what is asked of it waits.
    pub const USER_RECOVERY: u64 = 1 << 3;
    /// What the ended server had taken is asked again.
    pub const USER_RECOVERY_REISSUE: u64 = 1 << 4;
    /// Commands are numbered as ioctls are.
    pub const CMD_IOCTL_ENCODE: u64 = 1 << 6;
    /// [`super::ctrl::UPDATE_SIZE`].
    pub const UPDATE_SIZE: u64 = 1 << 10;
}

/// What a device is (`UBLK_ATTR_*`).
pub mod attr {
    /// It cannot be written.
    pub const READ_ONLY: u32 = 1;
    /// It is asked to flush.
    pub const VOLATILE_CACHE: u32 = 1 << 2;
    /// Writes may ask to be durable when they are answered.
    pub const FUA: u32 = 1 << 3;
}

/// Which parameters are there (`UBLK_PARAM_TYPE_*`).
pub mod param {
    /// [`super::ParamBasic`].
    pub const BASIC: u32 = 1;
    /// [`super::ParamDiscard`].
    pub const DISCARD: u32 = 1 << 1;
}

/// Whether a device is served (`UBLK_S_DEV_*`).
pub mod state {
    /// Not started yet, or stopped.
    pub const DEAD: u16 = 0;
    /// Served.
    pub const LIVE: u16 = 1;
    /// Its server ended, and it can be recovered.
    pub const QUIESCED: u16 = 2;
}

/// Operations, in the low byte of a request's first word (`UBLK_IO_OP_*`).
pub mod op {
    #![allow(missing_docs, reason = "the names are the kernel's")]
    pub const READ: u8 = 0;
    pub const WRITE: u8 = 1;
    pub const FLUSH: u8 = 2;
    pub const DISCARD: u8 = 3;
    pub const WRITE_ZEROES: u8 = 5;
}

/// A write is to be durable when it is answered (`UBLK_IO_F_FUA`).
pub const IO_FUA: u32 = 1 << 13;

macro_rules! layouts {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $kind:ty,)* } = $bytes:literal)*) => {$(
        $(#[$doc])*
        #[repr(C)]
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
        )]
        #[allow(missing_docs, reason = "the names are the kernel's")]
        pub struct $name { $(pub $field: $kind,)* }
        const _: () = assert!(size_of::<$name>() == $bytes);
    )*};
}

layouts! {
    /// A command of the control device (`ublksrv_ctrl_cmd`).
    CtrlCmd {
        dev_id: u32, queue_id: u16, len: u16, addr: u64, data: u64, dev_path_len: u16, pad: u16,
        reserved: u32,
    } = 32
    /// A device (`ublksrv_ctrl_dev_info`).
    DevInfo {
        nr_hw_queues: u16, queue_depth: u16, state: u16, pad0: u16, max_io_buf_bytes: u32,
        dev_id: u32, ublksrv_pid: i32, pad1: u32, flags: u64, ublksrv_flags: u64, owner_uid: u32,
        owner_gid: u32, reserved1: u64, reserved2: u64,
    } = 64
    /// What each device has (`ublk_param_basic`).
    ParamBasic {
        attrs: u32, logical_bs_shift: u8, physical_bs_shift: u8, io_opt_shift: u8,
        io_min_shift: u8, max_sectors: u32, chunk_sectors: u32, dev_sectors: u64,
        virt_boundary_mask: u64,
    } = 32
    /// What one has that takes discards or writes of zeros (`ublk_param_discard`).
    ParamDiscard {
        discard_alignment: u32, discard_granularity: u32, max_discard_sectors: u32,
        max_write_zeroes_sectors: u32, max_discard_segments: u16, reserved0: u16,
    } = 20
    /// A command of a queue (`ublksrv_io_cmd`).
    IoCmd { q_id: u16, tag: u16, result: i32, addr: u64, } = 16
    /// A request, in the kernel's table (`ublksrv_io_desc`).
    IoDesc { op_flags: u32, nr_sectors: u32, start_sector: u64, addr: u64, } = 24
}

/// Bytes of `ublk_params` up to what is known here.
pub const PARAMS_BYTES: usize = 8 + size_of::<ParamBasic>() + size_of::<ParamDiscard>();

/// Parameters as SET_PARAMS takes them (`ublk_params`).
pub fn params(basic: &ParamBasic, discard: Option<&ParamDiscard>) -> [u8; PARAMS_BYTES] {
    let types = param::BASIC | if discard.is_some() { param::DISCARD } else { 0 };
    let none = ParamDiscard::default();
    let parts = [
        &(PARAMS_BYTES as u32).to_ne_bytes()[..],
        &types.to_ne_bytes(),
        basic.as_bytes(),
        discard.unwrap_or(&none).as_bytes(),
    ];
    let mut bytes = [0; PARAMS_BYTES];
    let mut at = 0;
    for part in parts {
        bytes[at..at + part.len()].copy_from_slice(part);
        at += part.len();
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    /// By hand from the header of the kernel, which C's preprocessor would make of it.
    #[test]
    fn commands_have_the_kernels_numbers() {
        assert_eq!(ctrl::GET_DEV_INFO, 0x8020_7502);
        assert_eq!(ctrl::ADD_DEV, 0xc020_7504);
        assert_eq!(ctrl::START_USER_RECOVERY, 0xc020_7510);
        assert_eq!(ctrl::GET_FEATURES, 0x8020_7513);
        assert_eq!(io::FETCH_REQ, 0xc010_7520);
        assert_eq!(io::COMMIT_AND_FETCH_REQ, 0xc010_7521);
    }

    #[test]
    fn fields_stand_where_the_kernel_reads_them() {
        assert_eq!((offset_of!(CtrlCmd, addr), offset_of!(CtrlCmd, data)), (8, 16));
        assert_eq!((offset_of!(DevInfo, flags), offset_of!(DevInfo, owner_uid)), (24, 40));
        assert_eq!(offset_of!(ParamBasic, dev_sectors), 16);
        assert_eq!((offset_of!(IoCmd, result), offset_of!(IoDesc, addr)), (4, 16));
    }

    #[test]
    fn parameters_follow_each_other_without_gaps() {
        let basic = ParamBasic { attrs: 1, virt_boundary_mask: 2, ..ParamBasic::default() };
        let discard = ParamDiscard { discard_alignment: 3, ..ParamDiscard::default() };
        let bytes = params(&basic, Some(&discard));
        let word = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
        assert_eq!((word(0), word(4), word(8), word(32), word(40)), (60, 3, 1, 2, 3));
        assert_eq!(params(&basic, None)[4..8], 1u32.to_ne_bytes());
    }
}
