//! Why an export is refused, and what a failed I/O is to the kernel.

use bdev::{IoError, OpenError, RegistryError};
use holder::ClientError;
use rustix::io::Errno;
use std::io;
use std::path::PathBuf;
use uuid::Uuid;

/// Why a control operation was refused.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// There is no such bdev, or another face has it.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// It is there and is not exported.
    #[error("bdev {0} is not exported; virtlun_export_list lists those that are")]
    NotExported(String),
    /// It is exported the other way.
    #[error("bdev {name} is exported {how} already; delete that export first")]
    OtherMode {
        /// Name of the bdev.
        name: String,
        /// `read-only` or `for writing`.
        how: &'static str,
    },
    /// Somebody has its file open.
    #[error(
        "the export of bdev {name} is open {opens} times; unmount and detach its loop device first"
    )]
    Open {
        /// Name of the bdev.
        name: String,
        /// How often its file is open.
        opens: u32,
    },
    /// It is deleted, and I/O of its file does not end.
    #[error(
        "the export of bdev {name} is deleted, but still has I/O in flight after {seconds} s; the bdev \
         stays in use until that ends"
    )]
    StillEnding {
        /// Name of the bdev.
        name: String,
        /// How long was waited, in seconds.
        seconds: u64,
    },
    /// What is written to its file does not end.
    #[error(
        "the export of bdev {name} still writes after {seconds} s and was not parked; stop what \
         writes to its file, and try again"
    )]
    Changing {
        /// Name of the bdev.
        name: String,
        /// How long was waited, in seconds.
        seconds: u64,
    },
    /// Its channel cannot be opened.
    #[error(transparent)]
    Channel(#[from] OpenError),
    /// It takes I/Os that are too short for a file.
    #[error("bdev {name} takes {bytes} bytes at a time, and an export needs {needed}")]
    ShortIo {
        /// Name of the bdev.
        name: String,
        /// Most bytes it takes.
        bytes: u64,
        /// Least that is needed.
        needed: u64,
    },
    /// The place is another process's mount.
    #[error("{0} is mounted by another living process; stop that one first")]
    DirInUse(PathBuf),
    /// The device is another process's.
    #[error(
        "the ublk device of volume {0} is served by another living process; stop that one first"
    )]
    DiskInUse(Uuid),
    /// It is to be a device of a number, and is exported some other way.
    #[error("bdev {name} is exported already, as {path}; delete that export first")]
    Exported {
        /// Name of the bdev.
        name: String,
        /// The file or device.
        path: PathBuf,
    },
    /// Nobody can make devices.
    #[error(
        "this target gets no ublk devices: the kernel has no ublk with user recovery (Linux 6.5), its \
         module ublk_drv is not loaded, or there is no virtlun-holder that may use it"
    )]
    NoDisks,
    /// The number is another volume's, or somebody else's.
    #[error("/dev/ublkb{0} is there already and is not this volume's; choose another number")]
    NumberTaken(u32),
    /// The volume's device has another number.
    #[error(
        "volume {uuid} was left as /dev/ublkb{there}, not {asked}: what has that open waits for it; ask \
         for that number"
    )]
    OtherNumber {
        /// The volume.
        uuid: Uuid,
        /// The number that it has.
        there: u32,
        /// The number that was asked for.
        asked: u32,
    },
    /// There is nothing to go on with.
    #[error("no target has left /dev/ublkb{asked} of volume {uuid}: there is nothing to recover")]
    NoDiskLeft {
        /// The volume.
        uuid: Uuid,
        /// The number that was asked for.
        asked: u32,
    },
    /// Its mount was unmounted behind our back, and cannot be put back.
    #[error("{0} was unmounted by somebody, and its file is still open; close it, then try again")]
    Unmounted(PathBuf),
    /// Nobody can mount there: there is no holder, and this process has no right to.
    #[error(
        "there is no virtlun-holder, and this target may not mount {0} itself: start virtlun-holder, \
         then the target with its --holder-socket"
    )]
    NoHolder(PathBuf),
    /// The holder of mounts is not there, or says no.
    #[error(transparent)]
    Holder(#[from] ClientError),
    /// The operating system says no.
    #[error("cannot {operation} {path}: {source}")]
    Os {
        /// What was tried.
        operation: &'static str,
        /// On what.
        path: PathBuf,
        /// The answer.
        source: io::Error,
    },
}

/// What a failed I/O is to the kernel. Through a loop device all but ENOSPC become EIO.
pub(crate) fn errno(e: IoError) -> Errno {
    match e {
        IoError::OutOfRange | IoError::NoSpace => Errno::NOSPC,
        IoError::BadLength => Errno::INVAL,
        IoError::ReadOnly => Errno::ROFS,
        IoError::ReadMedium | IoError::WriteMedium | IoError::Flush | IoError::Aborted => Errno::IO,
        IoError::Guard | IoError::AppTag | IoError::RefTag | IoError::Miscompare => Errno::ILSEQ,
        IoError::Unsupported => Errno::OPNOTSUPP,
        IoError::Removed => Errno::NODEV,
        IoError::Resources => Errno::NOMEM,
        IoError::Reserved => Errno::BUSY,
    }
}
