//! What a logical unit is made with, and why it cannot be.

use crate::characteristics::{Characteristics, CharacteristicsError, MAX_PHYSICAL_BLOCK_BYTES};
use crate::policy::ErrorPolicy;
use crate::records::RecordKeeper;
use crate::reservations::ReservationKeeper;
use bdev::{Bdev, Features};
use std::fmt;
use std::sync::Arc;

/// How a logical unit shows itself.
#[derive(Clone, Debug, Default)]
pub struct LunOptions {
    /// Unit serial number (VPD page 0x80): 1 to [`MAX_SERIAL`] printable ASCII characters. `None`
    /// or empty: the volume's UUID.
    pub serial: Option<String>,
    /// Refuse writes although the bdev takes them.
    pub read_only: bool,
    /// The medium is removable (RMB): initiators say with PREVENT ALLOW MEDIUM REMOVAL while they
    /// use it, and [`LunShared::removal_prevented`] tells. See [`Nexus`] for its unit attentions.
    pub removable: bool,
    /// Bytes of a logical block, 512 or 4096, not less than the bdev's. `None`: the bdev's. Of a
    /// bdev that does not end with a whole block, the rest is out of reach.
    pub block_size: Option<u32>,
    /// What it says of itself otherwise.
    pub characteristics: Characteristics,
    /// What becomes of commands whose I/O fails.
    pub error_policy: ErrorPolicy,
    /// Name of the I_T nexus by which the volume's reservations know who asks: the same after a restart, and
    /// no other unit's. `None`: one that only this unit has, so its registrations end with the process.
    pub nexus: Option<String>,
    /// Where reservations are kept. `None`: nowhere, and they cannot outlive a loss of power (APTPL).
    pub keeper: Option<Arc<dyn ReservationKeeper>>,
    /// Where what else is to outlive the process is kept. `None`: nowhere.
    pub records: Option<Arc<dyn RecordKeeper>>,
    /// What tells initiators more than unit attentions do. `None`: nothing.
    pub transport: Option<Arc<dyn Transport>>,
}

/// What tells the initiators of a unit at once what a unit attention tells them with their next command.
pub trait Transport: Send + Sync {
    /// What an initiator asks a disk for before it uses it is to be asked for again: it could not be answered before.
    /// Called on threads that may wait, with no lock of the unit or its volume held; not to wait itself.
    fn parameters_changed(&self);
}

impl fmt::Debug for dyn Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Transport")
    }
}

impl fmt::Debug for dyn ReservationKeeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReservationKeeper")
    }
}

/// Why a bdev cannot be a logical unit as asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LunError {
    /// The serial is too long or not printable ASCII.
    #[error(
        "serial {0:?} is not 1 to 64 printable ASCII characters: choose a shorter or plainer one"
    )]
    Serial(String),
    /// Something else that it is to say of itself is not possible.
    #[error(transparent)]
    Characteristics(#[from] CharacteristicsError),
    /// The bdev's blocks are not of a size that SCSI disks have here.
    #[error("bdev {name} has blocks of {block_size} bytes: only 512 and 4096 can be a SCSI disk")]
    BlockSize {
        /// Name of the bdev.
        name: String,
        /// Its block size in bytes.
        block_size: u32,
    },
    /// The unit's blocks cannot be made of the bdev's.
    #[error(
        "bdev {name} with blocks of {block_size} bytes cannot be a SCSI disk with blocks of {asked}: \
         ask for 512 or 4096, and for no less than the bdev has"
    )]
    LogicalBlockSize {
        /// Name of the bdev.
        name: String,
        /// Its block size in bytes.
        block_size: u32,
        /// The unit's, as asked for, in bytes.
        asked: u32,
    },
    /// The bdev does less than one of the unit's blocks at a time.
    #[error(
        "bdev {name} does {max_blocks} of its blocks of {block_size} bytes at a time, which is less \
         than one of {asked} bytes: ask for no other block size than its own"
    )]
    Transfer {
        /// Name of the bdev.
        name: String,
        /// Its block size in bytes.
        block_size: u32,
        /// Its longest I/O in its blocks.
        max_blocks: u32,
        /// The unit's block size in bytes.
        asked: u32,
    },
    /// The unit cannot have physical blocks of that size.
    #[error(
        "bdev {name} cannot be a SCSI disk with physical blocks of {asked} bytes: ask for a power of two from \
         {block_size}, its logical block, to {longest}"
    )]
    PhysicalBlockSize {
        /// Name of the bdev.
        name: String,
        /// The unit's logical block size in bytes.
        block_size: u32,
        /// Its largest physical block: one that a command can write.
        longest: u32,
        /// As asked for, in bytes.
        asked: u32,
    },
}

/// log2 of how many blocks of `bdev` a logical block of `block_size` bytes is.
pub(crate) fn shift_of(bdev: &dyn Bdev, block_size: u32) -> Result<u32, LunError> {
    let (own, max_blocks) = (bdev.geometry().block_size, bdev.features().max_blocks);
    if !matches!(block_size, 512 | 4096) || block_size < own {
        return Err(LunError::LogicalBlockSize {
            name: bdev.name().to_owned(),
            block_size: own,
            asked: block_size,
        });
    }
    let ratio = block_size / own;
    if max_blocks != 0 && max_blocks < ratio {
        return Err(LunError::Transfer {
            name: bdev.name().to_owned(),
            block_size: own,
            max_blocks,
            asked: block_size,
        });
    }
    Ok(ratio.ilog2())
}

/// log2 of how many logical blocks of `block_size` bytes a physical one of `asked` bytes is, of a unit that does
/// what `features` says.
pub(crate) fn physical_exponent_of(
    bdev: &dyn Bdev,
    features: &Features,
    block_size: u32,
    asked: u32,
) -> Result<u8, LunError> {
    let most = match features.max_blocks {
        0 => MAX_PHYSICAL_BLOCK_BYTES,
        blocks => blocks.saturating_mul(block_size).min(MAX_PHYSICAL_BLOCK_BYTES),
    };
    // A block of 2^n bytes, whatever the bdev does at a time.
    let longest = 1 << most.max(block_size).ilog2();
    if !asked.is_power_of_two() || !(block_size..=longest).contains(&asked) {
        return Err(LunError::PhysicalBlockSize {
            name: bdev.name().to_owned(),
            block_size,
            longest,
            asked,
        });
    }
    Ok((asked / block_size).ilog2() as u8)
}

/// A bdev's features, with blocks of 2^`shift` of its own. The best alignment of unmap is one for
/// both.
pub(crate) fn in_units(bdev: Features, shift: u32) -> Features {
    let granularity = bdev.unmap_granularity;
    Features {
        optimal_blocks: bdev.optimal_blocks >> shift,
        max_blocks: bdev.max_blocks >> shift,
        unmap_granularity: granularity >> shift.min(granularity.trailing_zeros()),
        ..bdev
    }
}
