//! The control device.

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use zerocopy::IntoBytes;

use crate::abi::{self, ANY_DEVICE, CtrlCmd, DevInfo, NO_QUEUE, SECTOR, attr, ctrl, flag};
use crate::request::Limits;
use crate::ring::Commands;

/// What a device needs of the driver: Linux 6.4.
const NEEDED: u64 = flag::USER_RECOVERY | flag::USER_RECOVERY_REISSUE | flag::CMD_IOCTL_ENCODE;

/// A device that is to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct New {
    /// What requests may be.
    pub limits: Limits,
    /// Bytes of a block of the medium, as a hint.
    pub physical_block_size: u32,
    /// Its size in bytes, whole blocks.
    pub bytes: u64,
    /// Whether it is not to be written.
    pub read_only: bool,
    /// Bytes of a discard at most; 0: it takes none.
    pub max_discard_bytes: u64,
    /// Bytes of a write of zeros at most; 0: it takes none.
    pub max_zeroes_bytes: u64,
    /// Bytes that are discarded together, as a hint.
    pub discard_granularity: u32,
    /// For who makes it; the driver keeps it as long as the device.
    pub mark: u64,
    /// Its number, below [`abi::NUMBERS`]; `None`: any that is free.
    pub number: Option<u32>,
}

/// A device, as the driver tells of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    /// Its number.
    pub id: u32,
    /// Whether it waits for [`Control::start_recovery`] ([`abi::state::QUIESCED`]).
    pub quiesced: bool,
    /// Whether it is served ([`abi::state::LIVE`]).
    pub live: bool,
    /// Requests at a time.
    pub depth: u16,
    /// Bytes of one read or write at most.
    pub max_io_bytes: u32,
    /// [`New::mark`].
    pub mark: u64,
}

/// `/dev/ublkcN`, which requests come through.
fn queue_path(id: u32) -> PathBuf {
    format!("/dev/ublkc{id}").into()
}

/// Sectors in so many bytes, as many as a field has.
fn sectors(bytes: u64) -> u32 {
    u32::try_from(bytes / SECTOR).unwrap_or(u32::MAX)
}

fn shift(bytes: u32) -> u8 {
    bytes.max(1).ilog2() as u8
}

/// What the driver is told as the server's process (`ublksrv_pid`): this one, which opens each queue, and
/// not the one that it gives the queue to. Before Linux 6.17 the driver only repeats the number. Newer
/// ones compare it with the process that has opened `/dev/ublkcN` (commit c2c8089f325e, "ublk: validate
/// ublk server pid", in ublk_ctrl_start_dev and ublk_ctrl_end_recovery), at first with its number outside
/// of all PID namespaces: until the stable releases of early 2026 ("ublk: fix ublksrv pid handling for
/// pid namespaces") a process in a namespace of its own is refused (INVAL). Since then the number counts
/// as this process sees it.
fn server_pid() -> u64 {
    u64::from(std::process::id())
}

/// A command that waits: for the server of the device, or for who has it open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slow {
    /// [`Control::start`].
    Start,
    /// [`Control::end_recovery`].
    EndRecovery,
    /// [`Control::stop`].
    Stop,
    /// [`Control::delete`].
    Delete,
}

/// Commands at a time.
const DEPTH: u32 = 256;

/// The control device, for one thread. Each method waits for the driver; those for whom the server has
/// to do something meanwhile say so, and can be begun ([`Control::begin`]) by a thread that cannot wait.
/// It needs CAP_SYS_ADMIN.
pub struct Control {
    device: OwnedFd,
    commands: RefCell<Commands>,
    /// A second descriptor of the ring.
    ring: OwnedFd,
}

impl Control {
    /// Opens it.
    ///
    /// # Errors
    /// The system's: the kernel has no ublk, or its module is not loaded (ENOENT), no right to.
    pub fn open() -> io::Result<Control> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let device = rustix::fs::open(abi::CONTROL, flags, Mode::empty())?;
        let commands = Commands::new(DEPTH)?;
        let ring = commands.fd().try_clone_to_owned()?;
        Ok(Control { device, commands: RefCell::new(commands), ring })
    }

    fn send(&self, number: u32, cmd: CtrlCmd, data: &mut [u8]) -> Result<(), Errno> {
        let cmd = CtrlCmd { queue_id: NO_QUEUE, ..cmd };
        self.commands.borrow_mut().call(self.device.as_fd(), number, cmd, data)
    }

    /// A command of a device, with a number.
    fn of(&self, number: u32, dev_id: u32, data: u64) -> Result<(), Errno> {
        self.send(number, CtrlCmd { dev_id, data, ..CtrlCmd::default() }, &mut [])
    }

    /// Begins a command of device `id`; [`Control::ended`] tells of its end by `name`, not `u64::MAX`.
    ///
    /// # Errors
    /// The kernel takes no command now.
    pub fn begin(&self, id: u32, slow: Slow, name: u64) -> Result<(), Errno> {
        let (number, data) = match slow {
            Slow::Start => (ctrl::START_DEV, server_pid()),
            Slow::EndRecovery => (ctrl::END_USER_RECOVERY, server_pid()),
            Slow::Stop => (ctrl::STOP_DEV, 0),
            Slow::Delete => (ctrl::DEL_DEV, 0),
        };
        let cmd = CtrlCmd { dev_id: id, queue_id: NO_QUEUE, data, ..CtrlCmd::default() };
        self.commands.borrow_mut().begin(self.device.as_fd(), number, cmd, name)
    }

    /// The next command that was begun and has ended: its name, and how. To be asked before one waits
    /// for [`Control::fd`].
    pub fn ended(&self) -> Option<(u64, Result<(), Errno>)> {
        let (name, result) = self.commands.borrow_mut().next()?;
        let failed = result < 0;
        Some((name, if failed { Err(Errno::from_raw_os_error(-result)) } else { Ok(()) }))
    }

    /// Becomes readable when a command has ended that was begun.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.ring.as_fd()
    }

    /// The devices that there are, whoever made them.
    ///
    /// # Errors
    /// The system's.
    pub fn devices(&self) -> io::Result<Vec<Device>> {
        let number = |name: std::ffi::OsString| name.to_str()?.strip_prefix("ublkc")?.parse().ok();
        let mut all = Vec::new();
        for entry in std::fs::read_dir("/sys/class/ublk-char")? {
            let Some(id) = number(entry?.file_name()) else { continue };
            match self.device(id) {
                Ok(device) => all.push(device),
                Err(Errno::NODEV) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(all)
    }

    /// What the driver can ([`abi::flag`]).
    ///
    /// # Errors
    /// The driver's; it is older than Linux 6.5.
    pub fn features(&self) -> Result<u64, Errno> {
        let mut features = [0; 8];
        self.send(ctrl::GET_FEATURES, CtrlCmd::default(), &mut features)?;
        Ok(u64::from_ne_bytes(features))
    }

    /// Whether it can recover devices, as far as it tells.
    pub fn recovers(&self) -> bool {
        self.features().is_ok_and(|features| features & NEEDED == NEEDED)
    }

    /// Whether it can change the size of a device that is used, as far as it tells: Linux 6.16.
    pub fn resizes(&self) -> bool {
        self.features().is_ok_and(|features| features & flag::UPDATE_SIZE != 0)
    }

    /// Makes a device that nobody sees before [`Control::start`]; returns its number.
    ///
    /// # Errors
    /// The driver's; EXIST: the number is another device's; OPNOTSUPP: it cannot recover devices.
    pub fn add(&self, new: &New) -> Result<u32, Errno> {
        let mut info = DevInfo {
            nr_hw_queues: 1,
            queue_depth: new.limits.depth,
            max_io_buf_bytes: new.limits.max_io_bytes,
            dev_id: new.number.unwrap_or(ANY_DEVICE),
            flags: NEEDED,
            ublksrv_flags: new.mark,
            ..DevInfo::default()
        };
        let cmd = CtrlCmd { dev_id: info.dev_id, ..CtrlCmd::default() };
        self.send(ctrl::ADD_DEV, cmd, info.as_mut_bytes())?;
        let id = info.dev_id;
        let as_asked = info.flags & NEEDED == NEEDED && info.queue_depth == new.limits.depth;
        let set = match as_asked {
            true => self.set_params(id, new),
            false => Err(Errno::OPNOTSUPP),
        };
        if let Err(e) = set {
            _ = self.delete(id);
            return Err(e);
        }
        Ok(id)
    }

    fn set_params(&self, id: u32, new: &New) -> Result<(), Errno> {
        let read_only = if new.read_only { attr::READ_ONLY } else { 0 };
        let basic = abi::ParamBasic {
            attrs: attr::VOLATILE_CACHE | attr::FUA | read_only,
            logical_bs_shift: shift(new.limits.block_size),
            physical_bs_shift: shift(new.physical_block_size.max(new.limits.block_size)),
            io_opt_shift: shift(new.limits.max_io_bytes),
            io_min_shift: shift(new.physical_block_size.max(new.limits.block_size)),
            max_sectors: sectors(u64::from(new.limits.max_io_bytes)),
            dev_sectors: new.bytes / SECTOR,
            ..abi::ParamBasic::default()
        };
        let discard = abi::ParamDiscard {
            discard_granularity: new.discard_granularity.max(new.limits.block_size),
            max_discard_sectors: sectors(new.max_discard_bytes),
            max_write_zeroes_sectors: sectors(new.max_zeroes_bytes),
            max_discard_segments: 1,
            ..abi::ParamDiscard::default()
        };
        let some = new.max_discard_bytes > 0 || new.max_zeroes_bytes > 0;
        let mut params = abi::params(&basic, some.then_some(&discard));
        let cmd = CtrlCmd { dev_id: id, ..CtrlCmd::default() };
        self.send(ctrl::SET_PARAMS, cmd, &mut params)
    }

    /// Opens `/dev/ublkcN` for who serves the device. Only one may have it open.
    ///
    /// # Errors
    /// The system's; BUSY: somebody has it.
    pub fn open_queue(&self, id: u32) -> Result<OwnedFd, Errno> {
        rustix::fs::open(queue_path(id), OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
    }

    /// Shows `/dev/ublkbN`. Waits until the server has given all tags to the driver, which then reads
    /// the table of partitions through it. The queue was opened here ([`Control::open_queue`]), whoever
    /// serves it.
    ///
    /// # Errors
    /// The driver's; INVAL: the queue was opened by another process, or Linux is between 6.17 and early
    /// 2026 and this process in a PID namespace of its own.
    pub fn start(&self, id: u32) -> Result<(), Errno> {
        self.of(ctrl::START_DEV, id, server_pid())
    }

    /// Takes `/dev/ublkbN` away; what has it open gets errors. Waits until the server, if there is
    /// one, has answered what it has.
    ///
    /// # Errors
    /// The driver's.
    pub fn stop(&self, id: u32) -> Result<(), Errno> {
        self.of(ctrl::STOP_DEV, id, 0)
    }

    /// Stops a device and removes it. Waits until the server has answered, and nobody has
    /// `/dev/ublkcN` open or `/dev/ublkbN`.
    ///
    /// # Errors
    /// The driver's; NODEV: there is none.
    pub fn delete(&self, id: u32) -> Result<(), Errno> {
        self.of(ctrl::DEL_DEV, id, 0)
    }

    /// What the driver tells of a device.
    ///
    /// # Errors
    /// The driver's; NODEV: there is none.
    pub fn device(&self, id: u32) -> Result<Device, Errno> {
        let mut info = DevInfo::default();
        let cmd = CtrlCmd { dev_id: id, ..CtrlCmd::default() };
        self.send(ctrl::GET_DEV_INFO, cmd, info.as_mut_bytes())?;
        Ok(Device {
            id,
            quiesced: info.state == abi::state::QUIESCED,
            live: info.state == abi::state::LIVE,
            depth: info.queue_depth,
            max_io_bytes: info.max_io_buf_bytes,
            mark: info.ublksrv_flags,
        })
    }

    /// Prepares a device whose server ended for the next one.
    ///
    /// # Errors
    /// The driver's; BUSY: something of the ended server is still there, try again.
    pub fn start_recovery(&self, id: u32) -> Result<(), Errno> {
        self.of(ctrl::START_USER_RECOVERY, id, 0)
    }

    /// Has the device go on. Waits until the server has given all tags to the driver. The queue was
    /// opened here, as for [`Control::start`].
    ///
    /// # Errors
    /// Those of [`Control::start`].
    pub fn end_recovery(&self, id: u32) -> Result<(), Errno> {
        self.of(ctrl::END_USER_RECOVERY, id, server_pid())
    }

    /// Makes a device larger or smaller.
    ///
    /// # Errors
    /// OPNOTSUPP: Linux 6.16 and newer can.
    pub fn resize(&self, id: u32, bytes: u64) -> Result<(), Errno> {
        self.of(ctrl::UPDATE_SIZE, id, bytes / SECTOR)
    }

    /// Has the driver look after so many milliseconds whether the server of an unanswered request
    /// still lives, instead of after 30 s; a living one may take as long as it needs.
    ///
    /// # Errors
    /// The system's.
    pub fn set_timeout(&self, id: u32, milliseconds: u32) -> io::Result<()> {
        let path = format!("/sys/block/ublkb{id}/queue/io_timeout");
        std::fs::write(path, milliseconds.to_string())
    }
}
