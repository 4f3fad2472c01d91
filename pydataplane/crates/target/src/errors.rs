//! Errors of the layers below as JSON-RPC errors: the one place where their codes are chosen.

use crate::privilege;
use crate::state::StateError;
use bdev::{OpenError, RegistryError};
use export::ExportError;
use rpc::{Errno, Error};
use rustix::fs::Access;
use std::path::Path;
use vhost_scsi::{ControllerError, SocketError};

/// Of the bdev registry.
pub fn registry(e: RegistryError) -> Error {
    let errno = match &e {
        RegistryError::NotFound(_) => Errno::NoDev,
        RegistryError::NameTaken { .. } => Errno::Exist,
        RegistryError::Claimed { .. } | RegistryError::StillHeld { .. } => Errno::Busy,
    };
    Error::os(errno, e)
}

/// Of the lvstores, which know SPDK's errno of each.
pub fn lvol(e: lvol::Error) -> Error {
    Error::os(Errno::from_raw(-e.errno()), e)
}

/// Of checksums.
pub fn integrity(e: integrity::Error) -> Error {
    use integrity::Error as E;
    let errno = match e {
        E::Registry(e) => return registry(e),
        E::Name(_) | E::Size { .. } | E::GrewTooMuch { .. } => Errno::Inval,
        E::ReadOnly(_) => Errno::RoFs,
        E::Exists { .. } => Errno::Exist,
        E::Damaged { .. } | E::Truncated { .. } | E::Io(_) | E::Open(_) | E::Thread { .. } => {
            Errno::Io
        }
    };
    Error::os(errno, e)
}

/// Of making or opening a bdev with parameters that it cannot have.
pub fn open(e: OpenError) -> Error {
    Error::os(Errno::Inval, e)
}

/// Of opening a file or block device at `path`.
pub fn open_file(path: &Path, e: OpenError) -> Error {
    let errno = match std::fs::metadata(path) {
        Err(why) => os(&why),
        // The layer below has a sentence and no code; a test of the target holds these words.
        Ok(_) if e.why.contains(" in use") => Errno::Busy,
        Ok(_) if e.why.contains("may not be opened") => Errno::Access,
        Ok(_) => Errno::Inval,
    };
    match privilege::may(path, Access::READ_OK | Access::WRITE_OK) {
        Err(why) if errno == Errno::Access => Error::os(errno, format_args!("{e}; {why}")),
        _ => Error::os(errno, e),
    }
}

/// Of recording the configuration, when the change itself was made.
pub fn state(e: StateError) -> Error {
    Error::os(
        Errno::Io,
        format_args!("the change was made but is not recorded, so a restart would lose it: {e}"),
    )
}

/// There is no bdev of that name.
pub fn no_bdev(name: &str) -> Error {
    Error::os(
        Errno::NoDev,
        format_args!("there is no bdev {name}; bdev_get_bdevs lists those there are"),
    )
}

/// An encrypted lvol is no bdev, as its key is not here.
pub fn waits_for_key(lvol: &str, key: &str) -> Error {
    Error::os(
        Errno::NoKey,
        format_args!("lvol {lvol} waits for its key {key}: give it with `virtlun key create`"),
    )
}

/// What was being restored was deleted or replaced meanwhile.
pub fn not_wanted(key: &str) -> Error {
    Error::os(Errno::NoDev, format_args!("{key} was deleted or replaced before its disk answered"))
}

/// Of clusters of Ceph and their images.
pub fn rbd(e: rbd::Error) -> Error {
    Error::os(Errno::from_raw(e.errno()), e)
}

/// Of pools of Ceph whose images are volumes, as of lvols.
pub fn pool(e: rbd::Error) -> Error {
    use rustix::io::Errno as Os;
    let errno = match Os::from_raw_os_error(e.errno()) {
        Os::NOENT => Errno::NoDev,
        Os::NOTEMPTY | Os::ROFS => Errno::Busy,
        errno => Errno::from_raw(errno.raw_os_error()),
    };
    Error::os(errno, e)
}

/// There is no volume of that name in a pool.
pub fn no_volume(name: &str) -> Error {
    let why = format!("volume {name} does not exist; list the volumes to see what is there");
    Error::os(Errno::NoDev, why)
}

/// A volume of a pool has no such note.
pub fn no_xattr(volume: &str, xattr: &str) -> Error {
    let why = format!("volume {volume} has no xattr {xattr}; list its xattrs to see what is there");
    Error::os(Errno::NoData, why)
}

/// Of exports.
pub fn export(e: ExportError) -> Error {
    let errno = match &e {
        ExportError::Registry(e) => return registry(e.clone()),
        ExportError::NotExported(_) | ExportError::NoDiskLeft { .. } => Errno::NoDev,
        ExportError::OtherMode { .. }
        | ExportError::NumberTaken(_)
        | ExportError::OtherNumber { .. } => Errno::Exist,
        ExportError::NoDisks => Errno::NoEnt,
        ExportError::Open { .. }
        | ExportError::Exported { .. }
        | ExportError::StillEnding { .. }
        | ExportError::Changing { .. }
        | ExportError::Unmounted(_)
        | ExportError::DirInUse(_)
        | ExportError::DiskInUse(_) => Errno::Busy,
        ExportError::Channel(_) | ExportError::Holder(_) => Errno::Io,
        ExportError::NoHolder(_) => Errno::Perm,
        ExportError::ShortIo { .. } => Errno::NotSup,
        ExportError::Os { source, .. } => os(source),
    };
    Error::os(errno, e)
}

/// A bdev stays because it is exported.
pub fn exported(export: &export::Info) -> Error {
    Error::os(
        Errno::Busy,
        format_args!(
            "bdev {} is in use by the export {}: delete that first with virtlun_export_delete",
            export.bdev_name,
            export.path.display()
        ),
    )
}

/// Of controllers and their targets.
pub fn controller(e: ControllerError) -> Error {
    let errno = match &e {
        ControllerError::Exists(_) | ControllerError::TargetTaken { .. } => Errno::Exist,
        ControllerError::NotFound(_) | ControllerError::NoTarget { .. } => Errno::NoDev,
        ControllerError::Connected(_)
        | ControllerError::Waiting { .. }
        | ControllerError::Prevented { .. }
        | ControllerError::Stays { .. }
        | ControllerError::StillBusy { .. }
        | ControllerError::StillEnding { .. } => Errno::Busy,
        ControllerError::Full(_) => Errno::NoSpc,
        ControllerError::Name(_)
        | ControllerError::NoReactor(_)
        | ControllerError::TargetNumber(_)
        | ControllerError::NotScsi(_)
        | ControllerError::Lun(_) => Errno::Inval,
        ControllerError::Registry(e) => return registry(e.clone()),
        ControllerError::Open(_) => Errno::Io,
        ControllerError::Socket(socket) => match socket {
            SocketError::TooLong { .. } => Errno::NameTooLong,
            SocketError::InUse(_) => Errno::Busy,
            SocketError::NotASocket(_) => Errno::Exist,
            SocketError::Os { why, .. } => os(why),
        },
        ControllerError::HandOver(_) => Errno::Io,
        ControllerError::Start { why, .. } => os(why),
    };
    let forbidden = Some(rustix::io::Errno::PERM.raw_os_error());
    match &e {
        ControllerError::Socket(SocketError::Os { why, .. }) if why.raw_os_error() == forbidden => {
            let cure = "the target's user is not in that group: start it with --groups GROUP";
            Error::os(errno, format_args!("{e}; {cure}"))
        }
        _ => Error::os(errno, e),
    }
}

fn os(e: &std::io::Error) -> Errno {
    Errno::from_raw(e.raw_os_error().unwrap_or(Errno::Io as i32))
}
