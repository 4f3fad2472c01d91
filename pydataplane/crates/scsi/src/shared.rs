//! A logical unit as all threads see it.

use crate::characteristics::{Characteristics, CharacteristicsError};
use crate::nexus::{Nexus, NexusState, Preventers, UnitAttention};
use crate::policy::ErrorPolicy;
use crate::reservations::{Access, NexusName, ReservationKeeper};
use crate::volume::{Volume, access_of};
use bdev::{Bdev, Features};
use parking_lot::{Mutex, MutexGuard};
use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;
use uuid::Uuid;

/// Longest unit serial number, in bytes.
pub const MAX_SERIAL: usize = 64;

/// Longest transfer of a READ, WRITE or VERIFY, in bytes, unless the bdev's own limit is lower.
/// Reported as MAXIMUM TRANSFER LENGTH in VPD page B0h, and longer ones are refused, as SBC-3 6.6.3
/// has it; nothing is split behind the initiator's back.
pub const MAX_TRANSFER_BYTES: u64 = 4 << 20;
/// Most that one UNMAP can name, in bytes: 1,048,576 blocks of 512, which initiators take for much.
pub const MAX_UNMAP_BYTES: u64 = 512 << 20;
/// Most descriptors of one UNMAP.
pub const MAX_UNMAP_DESCRIPTORS: u16 = 256;
/// Most that one WRITE SAME can write, in blocks: what each form of it can name.
pub const MAX_WRITE_SAME_BLOCKS: u64 = 32 << 10;

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
}

/// A logical unit as all threads see it.
pub struct LunShared {
    bdev: Arc<dyn Bdev>,
    serial: String,
    /// The bdev's; what counts blocks counts the unit's.
    pub(crate) features: Features,
    pub(crate) read_only: bool,
    pub(crate) removable: bool,
    pub(crate) characteristics: Characteristics,
    pub(crate) error_policy: ErrorPolicy,
    /// Bytes of a logical block; does not change.
    pub(crate) block_size: u32,
    /// log2 of logical block size / block size of the bdev.
    pub(crate) bdev_shift: u32,
    /// log2 of physical block size / logical block size.
    pub(crate) physical_exponent: u8,
    /// Capacity as the initiators know it.
    num_blocks: AtomicU64,
    /// Counts LOGICAL UNIT RESETs.
    epoch: AtomicU32,
    /// Nexuses that prevent the removal of the medium.
    preventers: Arc<Preventers>,
    nexuses: Mutex<Vec<Weak<Nexus>>>,
    /// What it shares with other units of the same volume.
    pub(crate) volume: Arc<Volume>,
    nexus_name: NexusName,
    /// What its nexus may do, of [`access_of`].
    access: AtomicU32,
    /// Commands of each of its threads that are not over.
    in_flight: Mutex<Vec<Weak<AtomicU32>>>,
}

impl LunShared {
    /// Makes `bdev` a logical unit.
    pub fn new(bdev: Arc<dyn Bdev>, options: LunOptions) -> Result<Arc<Self>, LunError> {
        let geometry = bdev.geometry();
        if !matches!(geometry.block_size, 512 | 4096) {
            return Err(LunError::BlockSize {
                name: bdev.name().to_owned(),
                block_size: geometry.block_size,
            });
        }
        let serial = match options.serial {
            Some(given) if !given.is_empty() => given,
            _ => bdev.uuid().to_string(),
        };
        if serial.len() > MAX_SERIAL || !serial.bytes().all(|b| (0x20..0x7F).contains(&b)) {
            return Err(LunError::Serial(serial));
        }
        let characteristics = options.characteristics;
        characteristics.check()?;
        let block_size = options.block_size.unwrap_or(geometry.block_size);
        let bdev_shift = shift_of(&*bdev, block_size)?;
        let mut features = in_units(bdev.features(), bdev_shift);
        characteristics.restrict(&mut features);
        let ratio = (geometry.physical_block_size / block_size).max(1);
        let volume = Volume::of(&*bdev, options.keeper);
        let nexus = options.nexus.unwrap_or_else(|| Uuid::new_v4().to_string());
        let unit = Arc::new(LunShared {
            serial,
            features,
            read_only: options.read_only || features.read_only,
            removable: options.removable,
            characteristics,
            error_policy: options.error_policy,
            block_size,
            bdev_shift,
            physical_exponent: ratio.ilog2().min(15) as u8,
            num_blocks: AtomicU64::new(geometry.num_blocks >> bdev_shift),
            epoch: AtomicU32::new(0),
            preventers: Arc::default(),
            nexuses: Mutex::new(Vec::new()),
            volume,
            nexus_name: nexus.into(),
            access: AtomicU32::new(0),
            in_flight: Mutex::default(),
            bdev,
        });
        unit.volume.join(&unit);
        Ok(unit)
    }

    /// Name of its I_T nexus.
    pub(crate) fn nexus_name(&self) -> &NexusName {
        &self.nexus_name
    }

    /// What its nexus may do, as the volume's reservations have it.
    #[inline]
    pub(crate) fn access(&self) -> Access {
        access_of(self.access.load(Ordering::Acquire))
    }

    /// With the lock of the volume's reservations held.
    pub(crate) fn set_access(&self, access: Access) {
        let code = (0..4).find(|code| access_of(*code) == access).unwrap_or(0);
        self.access.store(code, Ordering::SeqCst);
    }

    /// Another thread counts its commands of the unit there.
    pub(crate) fn counts(&self, in_flight: Weak<AtomicU32>) {
        let mut all = self.in_flight.lock();
        all.retain(|other| other.strong_count() > 0);
        all.push(in_flight);
    }

    /// Whether any thread has a command of it that is not over.
    pub(crate) fn is_busy(&self) -> bool {
        let of = |count: Arc<AtomicU32>| count.load(Ordering::SeqCst);
        self.in_flight.lock().iter().filter_map(Weak::upgrade).map(of).any(|count| count > 0)
    }

    /// Every task in flight ends as TASK ABORTED once its outstanding I/O has ended.
    pub(crate) fn abort_tasks(&self) {
        self.epoch.fetch_add(1, Ordering::Release);
    }

    /// The bdev behind the unit.
    pub fn bdev(&self) -> &Arc<dyn Bdev> {
        &self.bdev
    }

    /// Unit serial number (VPD page 0x80).
    pub fn serial(&self) -> &str {
        &self.serial
    }

    /// A new session, with POWER ON pending unless the unit is removable ([`Nexus`] says why). It
    /// ends when the last `Arc` of it is dropped. Takes a lock: for control threads.
    pub fn connect(&self) -> Arc<Nexus> {
        self.volume.reload();
        let first = (!self.removable).then_some(UnitAttention::Reset);
        let reserves = (Arc::clone(&self.volume), Arc::clone(&self.nexus_name));
        let nexus = Arc::new(Nexus::new(first, Arc::clone(&self.preventers), reserves));
        let mut nexuses = self.nexuses();
        nexuses.retain(|n| n.strong_count() > 0);
        nexuses.push(Arc::downgrade(&nexus));
        nexus
    }

    /// A session that goes on where `state` says: the initiator notices nothing. As for
    /// [`LunShared::connect`] otherwise.
    pub fn connect_as(&self, state: NexusState) -> Arc<Nexus> {
        let nexus = self.connect();
        nexus.restore(state);
        nexus
    }

    /// Bytes of a logical block.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Whether writes are refused.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// What it says of itself as its owner chose.
    pub fn characteristics(&self) -> &Characteristics {
        &self.characteristics
    }

    /// What becomes of commands whose I/O fails.
    pub fn error_policy(&self) -> ErrorPolicy {
        self.error_policy
    }

    /// Whether the medium is removable.
    pub fn is_removable(&self) -> bool {
        self.removable
    }

    /// Whether any initiator prevents the removal of the medium: Linux does while a removable disk
    /// is open, a mounted one for instance.
    pub fn removal_prevented(&self) -> bool {
        self.preventers.any()
    }

    /// Decides that the unit goes, for good, unless an initiator prevents the removal of the medium
    /// (`false`). Nobody can prevent it afterwards: to PREVENT ALLOW MEDIUM REMOVAL (SPC-4 6.22)
    /// there is no such unit any more (25h/00h). Other commands are served until the transport has
    /// taken it away.
    pub fn leave_unless_prevented(&self) -> bool {
        self.preventers.close()
    }

    /// When the first of the present sessions first asked for the capacity, since the epoch.
    /// Takes a lock: for control threads.
    pub fn seen_at(&self) -> Option<Duration> {
        let nexuses = self.nexuses();
        nexuses.iter().filter_map(Weak::upgrade).filter_map(|n| n.seen_at()).min()
    }

    /// The bdev's size may have changed: takes the new one and, if it did, tells every session
    /// (2Ah/09h), unless the unit is removable. Until then commands are checked against the old
    /// size. Takes a lock: for control threads.
    pub fn notify_resized(&self) {
        let now = self.bdev.geometry().num_blocks >> self.bdev_shift;
        if self.num_blocks.swap(now, Ordering::Release) != now {
            self.post(UnitAttention::CapacityChanged);
        }
    }

    /// Makes `attention` pending for every session, unless the unit is removable. Takes a lock: for
    /// control threads.
    pub fn post(&self, attention: UnitAttention) {
        if self.removable {
            return;
        }
        for nexus in self.nexuses().iter().filter_map(Weak::upgrade) {
            nexus.post(attention);
        }
    }

    /// LOGICAL UNIT RESET (SAM-5 7.7): every task in flight, of every session, ends as TASK
    /// ABORTED once its outstanding I/O has ended, every session gets 29h/00h (not of a removable
    /// unit), and none prevents the removal of the medium any more (SBC-3 4.11). The transport
    /// answers the task management function when its own tasks are done. Takes a lock that is held
    /// for microseconds.
    pub fn reset(&self) {
        self.abort_tasks();
        self.volume.forget_reserved(None);
        self.nexuses().iter().filter_map(Weak::upgrade).for_each(|n| n.forget_prevention());
        self.post(UnitAttention::Reset);
    }

    /// I_T NEXUS RESET (SAM-5 7.6) of `nexus`, whose tasks the transport ends.
    pub fn reset_nexus(&self, nexus: &Nexus) {
        nexus.forget_prevention();
        nexus.forget_reserved();
        if !self.removable {
            nexus.post(UnitAttention::Reset);
        }
    }

    /// Number of resets so far.
    #[inline]
    pub(crate) fn epoch(&self) -> u32 {
        self.epoch.load(Ordering::Relaxed)
    }

    /// Capacity in blocks, as the initiators know it.
    #[inline]
    pub(crate) fn num_blocks(&self) -> u64 {
        self.num_blocks.load(Ordering::Relaxed)
    }

    /// `bytes` in blocks.
    pub(crate) fn blocks(&self, bytes: u64) -> u64 {
        bytes / u64::from(self.block_size)
    }

    /// Longest READ, WRITE or VERIFY in blocks.
    pub(crate) fn max_transfer_blocks(&self) -> u64 {
        let ours = self.blocks(MAX_TRANSFER_BYTES);
        match self.features.max_blocks {
            0 => ours,
            limit => ours.min(u64::from(limit)),
        }
    }

    fn nexuses(&self) -> MutexGuard<'_, Vec<Weak<Nexus>>> {
        self.nexuses.lock()
    }
}

/// log2 of how many blocks of `bdev` a logical block of `block_size` bytes is.
fn shift_of(bdev: &dyn Bdev, block_size: u32) -> Result<u32, LunError> {
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

/// A bdev's features, with blocks of 2^`shift` of its own. The best alignment of unmap is one for
/// both.
fn in_units(bdev: Features, shift: u32) -> Features {
    let granularity = bdev.unmap_granularity;
    Features {
        max_blocks: bdev.max_blocks >> shift,
        unmap_granularity: granularity >> shift.min(granularity.trailing_zeros()),
        ..bdev
    }
}
