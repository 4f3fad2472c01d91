//! Who mounts, and keeps what a mount needs while nobody serves it.

use holder::wire::{NewDisk, Which};
use holder::{Client, Disk, Found, MountError, Mounts, Session};
use parking_lot::Mutex;
use rustix::thread::CapabilitySet;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use uuid::Uuid;

use crate::errors::ExportError;

/// How long the kernel may take to notice that the process is gone that served a device before.
const DISK_TIMEOUT: Duration = Duration::from_secs(40);

/// How often it is asked meanwhile.
const DISK_POLL: Duration = Duration::from_millis(10);

const NO_HOLDER: &str = "no virtlun-holder keeps the exports of this target";
const NO_UBLK: &str = "the kernel has no ublk with user recovery (Linux 6.5), its module ublk_drv was \
                       not loaded when virtlun-holder started, or that is too old or may not use it";
const NO_RESIZE: &str =
    "devices of ublk keep their size while they are used: Linux 6.16 changes it";

/// What devices of ublk can be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Abilities {
    /// Whether there can be any.
    pub ublk: bool,
    /// Whether they can grow while they are used.
    pub resizes: bool,
    /// Why not, as a sentence without its end; empty where all is well.
    pub why: String,
}

/// Who keeps mounts and their descriptors.
pub(crate) enum Keeper {
    /// This process: they end with it.
    Here {
        /// Where.
        mounts: Mounts,
        /// What puts a mount back that was unmounted behind our back.
        trees: Mutex<BTreeMap<Uuid, Option<OwnedFd>>>,
    },
    /// Another process, which outlives this one.
    Holder {
        /// It.
        client: Arc<Client>,
        /// Where.
        mounts: Mounts,
    },
}

impl From<MountError> for ExportError {
    fn from(e: MountError) -> ExportError {
        match e.source.raw_os_error() == Some(rustix::io::Errno::BUSY.raw_os_error()) {
            true => ExportError::DirInUse(e.path),
            false => ExportError::Os { operation: e.operation, path: e.path, source: e.source },
        }
    }
}

/// Whether this process may mount; where it may not, the sandbox does not even allow the call.
fn may_mount() -> bool {
    rustix::thread::capabilities(None)
        .is_ok_and(|have| have.effective.contains(CapabilitySet::SYS_ADMIN))
}

impl Keeper {
    fn mounts(&self) -> &Mounts {
        match self {
            Keeper::Here { mounts, .. } | Keeper::Holder { mounts, .. } => mounts,
        }
    }

    /// The file of a session: in a folder of its own, under a name by which a loop device on it is
    /// known even when nothing is mounted there any more.
    pub fn path(&self, uuid: Uuid) -> PathBuf {
        self.mounts().path(uuid).join(uuid.to_string())
    }

    /// Whether what it keeps outlives this process.
    pub fn outlives(&self) -> bool {
        match self {
            Keeper::Here { .. } => false,
            Keeper::Holder { client, .. } => client.is_connected(),
        }
    }

    /// A session that another process has left.
    pub fn take(&self, uuid: Uuid) -> Result<Option<Session>, ExportError> {
        match self {
            Keeper::Here { .. } => Ok(None),
            Keeper::Holder { client, .. } => Ok(client.take(uuid)?),
        }
    }

    /// Whether devices can be had.
    pub fn has_disks(&self) -> Result<bool, ExportError> {
        match self {
            Keeper::Holder { client, .. } => Ok(client.disks()?),
            Keeper::Here { .. } => Ok(false),
        }
    }

    /// The device of a volume, as `which` says; `None`: none can be had.
    pub fn disk(
        &self,
        uuid: Uuid,
        new: &NewDisk,
        which: Which,
    ) -> Result<Option<Disk>, ExportError> {
        let Keeper::Holder { client, .. } = self else { return Ok(None) };
        if !client.disks()? {
            return Ok(None);
        }
        let number = which.number().unwrap_or_default();
        let end = Instant::now() + DISK_TIMEOUT;
        loop {
            match client.disk(uuid, new, which)? {
                Found::Disk(disk) => return Ok(Some(disk)),
                Found::Busy if Instant::now() < end => thread::sleep(DISK_POLL),
                Found::Busy => return Err(ExportError::DiskInUse(uuid)),
                Found::Taken => return Err(ExportError::NumberTaken(number)),
                Found::Other(there) => {
                    return Err(ExportError::OtherNumber { uuid, there, asked: number });
                }
                Found::None => return Err(ExportError::NoDiskLeft { uuid, asked: number }),
            }
        }
    }

    /// Has a device be seen, or go on, which this process serves already.
    pub fn serve_disk(&self, uuid: Uuid) -> Result<(), ExportError> {
        match self {
            Keeper::Holder { client, .. } => Ok(client.serve(uuid)?),
            Keeper::Here { .. } => Ok(()),
        }
    }

    /// Takes a device away, as soon as what was asked of it is answered.
    pub fn end_disk(&self, uuid: Uuid) -> Result<(), ExportError> {
        match self {
            Keeper::Holder { client, .. } => Ok(client.stop(uuid)?),
            Keeper::Here { .. } => Ok(()),
        }
    }

    /// Whether devices can be had, and whether they can grow while they are used; the sentence says why
    /// not.
    pub fn disk_abilities(&self) -> Abilities {
        let none = |why: String| Abilities { ublk: false, resizes: false, why };
        let client = match self {
            Keeper::Holder { client, .. } => client,
            Keeper::Here { .. } => return none(NO_HOLDER.into()),
        };
        match client.disks().and_then(|disks| Ok((disks, client.resizes()?))) {
            Ok((false, _)) => none(NO_UBLK.into()),
            Ok((true, false)) => Abilities { ublk: true, resizes: false, why: NO_RESIZE.into() },
            Ok((true, true)) => Abilities { ublk: true, resizes: true, why: String::new() },
            Err(e) => none(e.to_string()),
        }
    }

    /// Has a device be of so many bytes.
    ///
    /// # Errors
    /// [`ExportError::Holder`]: the kernel is older than Linux 6.16, or nobody answers.
    pub fn resize_disk(&self, uuid: Uuid, bytes: u64) -> Result<(), ExportError> {
        match self {
            Keeper::Holder { client, .. } => Ok(client.resize(uuid, bytes)?),
            Keeper::Here { .. } => Ok(()),
        }
    }

    /// Whether something has a device alone: a file system, a loop device.
    pub fn is_disk_open(&self, uuid: Uuid) -> Result<bool, ExportError> {
        match self {
            Keeper::Holder { client, .. } => Ok(client.opened(uuid)?),
            Keeper::Here { .. } => Ok(false),
        }
    }

    /// Mounts a new session.
    pub fn mount(&self, uuid: Uuid) -> Result<Session, ExportError> {
        match self {
            Keeper::Holder { client, .. } => Ok(client.mount(uuid)?),
            Keeper::Here { mounts, .. } if !may_mount() => {
                Err(ExportError::NoHolder(mounts.path(uuid)))
            }
            Keeper::Here { mounts, trees } => {
                let session = mounts.mount(uuid)?;
                trees.lock().insert(uuid, mounts.tree(uuid));
                Ok(session)
            }
        }
    }

    /// Mounts a session again if it was unmounted behind our back. Where this process cannot tell, it
    /// is taken to be as it was.
    pub fn put_back(&self, uuid: Uuid) -> Result<(), ExportError> {
        match self {
            // The holder looks: it may see other mounts than this process.
            Keeper::Holder { client, .. } => client.mount(uuid).map(drop)?,
            Keeper::Here { mounts, trees } => {
                if mounts.is_there(uuid).unwrap_or(true) {
                    return Ok(());
                }
                let mut trees = trees.lock();
                let Some(tree) = trees.get_mut(&uuid).and_then(Option::take) else {
                    return Err(ExportError::Unmounted(mounts.path(uuid)));
                };
                mounts.put_back(uuid, tree)?;
                trees.insert(uuid, mounts.tree(uuid));
            }
        }
        Ok(())
    }

    /// Takes a mount away; what has its file open keeps it as long as it is served. Fine where there
    /// is none.
    pub fn end(&self, uuid: Uuid) -> Result<(), ExportError> {
        match self {
            Keeper::Holder { client, .. } => Ok(client.end(uuid)?),
            Keeper::Here { mounts, trees } => {
                trees.lock().remove(&uuid);
                Ok(mounts.unmount(uuid)?)
            }
        }
    }
}
