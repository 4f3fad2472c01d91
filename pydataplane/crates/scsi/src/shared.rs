//! A logical unit as all threads see it.

use crate::sense::{Code, Key, Sense};
use bdev::{Bdev, Features};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Longest unit serial number, in bytes.
pub const MAX_SERIAL: usize = 64;

/// Longest transfer of a READ, WRITE or VERIFY, in bytes, unless the bdev's own limit is lower.
/// Reported as MAXIMUM TRANSFER LENGTH in VPD page B0h, and longer ones are refused, as SBC-3 6.6.3
/// has it; nothing is split behind the initiator's back.
pub const MAX_TRANSFER_BYTES: u64 = 4 << 20;
/// Most that one UNMAP can name, in bytes.
pub const MAX_UNMAP_BYTES: u64 = 1 << 30;
/// Most descriptors of one UNMAP.
pub const MAX_UNMAP_DESCRIPTORS: u16 = 256;
/// Most that one WRITE SAME can write, in bytes.
pub const MAX_WRITE_SAME_BYTES: u64 = 1 << 30;

/// How a logical unit shows itself.
#[derive(Clone, Debug, Default)]
pub struct LunOptions {
    /// Unit serial number (VPD page 0x80): 1 to [`MAX_SERIAL`] printable ASCII characters. `None`
    /// or empty: the volume's UUID.
    pub serial: Option<String>,
    /// Refuse writes although the bdev takes them.
    pub read_only: bool,
}

/// Why a bdev cannot be a logical unit as asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LunError {
    /// The serial is too long or not printable ASCII.
    #[error(
        "serial {0:?} is not 1 to 64 printable ASCII characters: choose a shorter or plainer one"
    )]
    Serial(String),
    /// The bdev's blocks are not of a size that SCSI disks have here.
    #[error("bdev {name} has blocks of {block_size} bytes: only 512 and 4096 can be a SCSI disk")]
    BlockSize {
        /// Name of the bdev.
        name: String,
        /// Its block size in bytes.
        block_size: u32,
    },
}

/// A unit attention condition (SAM-5 5.14), in order of precedence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum UnitAttention {
    /// 29h/00h POWER ON, RESET, OR BUS DEVICE RESET OCCURRED.
    Reset = 1,
    /// 3Fh/0Eh REPORTED LUNS DATA HAS CHANGED.
    LunsChanged = 2,
    /// 2Ah/09h CAPACITY DATA HAS CHANGED.
    CapacityChanged = 4,
    /// 3Fh/03h INQUIRY DATA HAS CHANGED.
    InquiryChanged = 8,
}

impl UnitAttention {
    const BY_PRECEDENCE: [UnitAttention; 4] = [
        UnitAttention::Reset,
        UnitAttention::LunsChanged,
        UnitAttention::CapacityChanged,
        UnitAttention::InquiryChanged,
    ];

    fn sense(self) -> Sense {
        let code = match self {
            UnitAttention::Reset => Code::POWER_ON_OR_RESET,
            UnitAttention::LunsChanged => Code::REPORTED_LUNS_DATA_HAS_CHANGED,
            UnitAttention::CapacityChanged => Code::CAPACITY_DATA_HAS_CHANGED,
            UnitAttention::InquiryChanged => Code::INQUIRY_DATA_HAS_CHANGED,
        };
        Sense::new(Key::UnitAttention, code)
    }
}

/// One initiator session (I_T nexus) of a logical unit.
pub struct Nexus {
    /// Bits of [`UnitAttention`].
    pending: AtomicU32,
}

impl Nexus {
    fn new() -> Self {
        Nexus { pending: AtomicU32::new(UnitAttention::Reset as u32) }
    }

    fn post(&self, attention: UnitAttention) {
        self.pending.fetch_or(attention as u32, Ordering::Release);
    }

    /// Whether an attention is pending.
    #[inline]
    pub(crate) fn has_attention(&self) -> bool {
        self.pending.load(Ordering::Relaxed) != 0
    }

    /// Takes the first pending attention, which is then reported and gone.
    #[cold]
    pub(crate) fn take(&self) -> Option<Sense> {
        UnitAttention::BY_PRECEDENCE.into_iter().find(|a| self.clear(*a)).map(UnitAttention::sense)
    }

    /// Forgets `attention`; says whether it was pending.
    pub(crate) fn clear(&self, attention: UnitAttention) -> bool {
        let bit = attention as u32;
        self.pending.fetch_and(!bit, Ordering::AcqRel) & bit != 0
    }
}

/// A logical unit as all threads see it.
pub struct LunShared {
    bdev: Arc<dyn Bdev>,
    serial: String,
    pub(crate) features: Features,
    pub(crate) read_only: bool,
    /// Bytes of a logical block; does not change.
    pub(crate) block_size: u32,
    /// log2 of physical block size / logical block size.
    pub(crate) physical_exponent: u8,
    /// Capacity as the initiators know it.
    num_blocks: AtomicU64,
    /// Counts LOGICAL UNIT RESETs.
    epoch: AtomicU32,
    nexuses: Mutex<Vec<Weak<Nexus>>>,
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
        let features = bdev.features();
        let ratio = (geometry.physical_block_size / geometry.block_size).max(1);
        Ok(Arc::new(LunShared {
            serial,
            features,
            read_only: options.read_only || features.read_only,
            block_size: geometry.block_size,
            physical_exponent: ratio.ilog2().min(15) as u8,
            num_blocks: AtomicU64::new(geometry.num_blocks),
            epoch: AtomicU32::new(0),
            nexuses: Mutex::new(Vec::new()),
            bdev,
        }))
    }

    /// The bdev behind the unit.
    pub fn bdev(&self) -> &Arc<dyn Bdev> {
        &self.bdev
    }

    /// Unit serial number (VPD page 0x80).
    pub fn serial(&self) -> &str {
        &self.serial
    }

    /// A new session, with POWER ON pending. It ends when the last `Arc` of it is dropped.
    /// Takes a lock: for control threads.
    pub fn connect(&self) -> Arc<Nexus> {
        let nexus = Arc::new(Nexus::new());
        let mut nexuses = self.nexuses();
        nexuses.retain(|n| n.strong_count() > 0);
        nexuses.push(Arc::downgrade(&nexus));
        nexus
    }

    /// Whether writes are refused.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// The bdev's size may have changed: takes the new one and, if it did, tells every session
    /// (2Ah/09h). Until then commands are checked against the old size. Takes a lock: for control
    /// threads.
    pub fn notify_resized(&self) {
        let now = self.bdev.geometry().num_blocks;
        if self.num_blocks.swap(now, Ordering::Release) != now {
            self.post(UnitAttention::CapacityChanged);
        }
    }

    /// Makes `attention` pending for every session. Takes a lock: for control threads.
    pub fn post(&self, attention: UnitAttention) {
        for nexus in self.nexuses().iter().filter_map(Weak::upgrade) {
            nexus.post(attention);
        }
    }

    /// LOGICAL UNIT RESET (SAM-5 7.7): every task in flight, of every session, ends as TASK
    /// ABORTED once its outstanding I/O has ended, and every session gets 29h/00h. The transport
    /// answers the task management function when its own tasks are done. Takes a lock that is
    /// held for microseconds.
    pub fn reset(&self) {
        self.epoch.fetch_add(1, Ordering::Release);
        self.post(UnitAttention::Reset);
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
        self.nexuses.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
