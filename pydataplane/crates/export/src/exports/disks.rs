//! Exports that are devices of ublk's, by their numbers.

use super::{Exports, Make};
use crate::errors::ExportError;
use crate::shape::{Numbered, Shape};
use crate::volume::{Face, Volume};

/// An export that is a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskInfo {
    /// It is `/dev/ublkbN`.
    pub number: u32,
    /// Requests at a time.
    pub depth: u16,
    /// Name of the bdev.
    pub bdev_name: String,
}

impl DiskInfo {
    fn of(volume: &Volume) -> Option<DiskInfo> {
        match volume.face {
            Face::File { .. } => None,
            Face::Disk { number, depth, .. } => {
                Some(DiskInfo { number, depth, bdev_name: volume.bdev.name().to_owned() })
            }
        }
    }
}

impl Exports {
    /// Whether devices can be had: the kernel makes some, and the holder is there that may ask for them.
    ///
    /// # Errors
    /// [`ExportError::Holder`]: nobody answers.
    pub fn has_disks(&self) -> Result<bool, ExportError> {
        self.inner.keeper.has_disks()
    }

    /// Shows the bdev (name, alias or UUID) as the device that `wish` says, parked if it is to be: as
    /// [`Exports::create_disk`], but as that device or not at all.
    ///
    /// # Errors
    /// Those of [`Exports::create_disk`]; [`ExportError::Exported`], [`ExportError::NoDisks`],
    /// [`ExportError::NumberTaken`], [`ExportError::OtherNumber`], [`ExportError::NoDiskLeft`].
    pub fn start_disk(
        &self,
        key: &str,
        wish: Numbered,
        parked: bool,
    ) -> Result<DiskInfo, ExportError> {
        self.make(key, Make { read_only: false, parked, shape: Shape::Disk(wish) })?;
        if parked {
            self.park(key)?;
        }
        let volume = self.require(key)?;
        DiskInfo::of(&volume).ok_or_else(|| ExportError::NotExported(key.to_owned()))
    }

    /// All devices, in the order in which they were made.
    pub fn disks(&self) -> Vec<DiskInfo> {
        let mut volumes: Vec<_> = self.inner.table.read().values().cloned().collect();
        volumes.sort_by_key(|volume| volume.number);
        volumes.iter().filter_map(|volume| DiskInfo::of(volume)).collect()
    }
}
