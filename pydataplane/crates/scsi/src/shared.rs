//! A logical unit as all threads see it.

use bdev::Bdev;
use std::sync::Arc;

/// How a logical unit shows itself.
#[derive(Clone, Debug, Default)]
pub struct LunOptions {
    /// Unit serial number (VPD page 0x80): 1 to 64 printable ASCII characters. `None` or empty:
    /// the volume's UUID.
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
    /// 3Fh/03h INQUIRY DATA HAS CHANGED.
    InquiryChanged = 4,
    /// 2Ah/09h CAPACITY DATA HAS CHANGED.
    CapacityChanged = 8,
}

/// One initiator session (I_T nexus) of a logical unit.
pub struct Nexus {}

/// A logical unit as all threads see it.
pub struct LunShared {}

impl LunShared {
    /// Makes `bdev` a logical unit.
    pub fn new(_bdev: Arc<dyn Bdev>, _options: LunOptions) -> Result<Arc<Self>, LunError> {
        todo!()
    }

    /// The bdev behind the unit.
    pub fn bdev(&self) -> &Arc<dyn Bdev> {
        todo!()
    }

    /// A new session, with POWER ON pending. It ends when the last `Arc` of it is dropped.
    /// Takes a lock: for control threads.
    pub fn connect(&self) -> Arc<Nexus> {
        todo!()
    }

    /// Whether writes are refused.
    pub fn is_read_only(&self) -> bool {
        todo!()
    }

    /// The bdev's size changed: takes the new one and tells every session (2Ah/09h).
    pub fn notify_resized(&self) {
        todo!()
    }

    /// Makes `attention` pending for every session.
    pub fn post(&self, _attention: UnitAttention) {
        todo!()
    }

    /// LOGICAL UNIT RESET (SAM-5 7.7): every task in flight, of every session, ends as TASK
    /// ABORTED once its outstanding I/O has ended, and every session gets 29h/00h. The transport
    /// answers the task management function when its own tasks are done.
    pub fn reset(&self) {
        todo!()
    }
}
