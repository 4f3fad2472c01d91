//! The dirty log of live migration (vhost-user "Migration": one bit for each 4 KiB page).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use crate::mapping::{Accounts, Beside, Failure, Mapping, Whole};
use crate::range::GuestRange;

/// Bytes of guest memory that one bit of the log stands for (VHOST_LOG_PAGE).
pub const LOG_PAGE: u64 = 4096;
/// Bytes that a log may have: 1 GiB stands for 32 TiB of guest addresses.
const MAX_LOG: u64 = 1 << 30;

/// Why a log could not be used.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// Zero, or more than [`DirtyLog`] takes.
    #[error("dirty log of {0} bytes: must be 1 byte to 1 GiB; check SET_LOG_BASE of the peer")]
    Size(u64),
    /// The file is shorter than offset and size say.
    #[error("dirty log ends at byte {end} of a file of {file} bytes; the peer must size its file")]
    BeyondFile {
        /// Where the log ends, in bytes of the file.
        end: u64,
        /// Bytes of the file.
        file: u64,
    },
    /// The kernel refused the mapping, or too many are mapped.
    #[error("cannot map the dirty log: {0}")]
    Map(io::Error),
}

/// A bitmap shared with the peer. Bits are only ever set here, and only cleared by the peer.
#[derive(Debug)]
pub struct DirtyLog {
    mapping: Mapping,
    len: usize,
    /// What is mapped, for another process that goes on with this guest.
    file: OwnedFd,
    offset: u64,
    _counted: Option<Beside>,
}

impl DirtyLog {
    /// Maps the log of SET_LOG_BASE: `size` bytes of `fd` from byte `offset`. Nobody's memory is it
    /// counted with, unlike [`GuestMemory::make_log`](crate::GuestMemory::make_log).
    pub fn new(fd: BorrowedFd<'_>, offset: u64, size: u64) -> Result<DirtyLog, LogError> {
        let whole = Whole { bytes: size, mappings: 1 };
        Self::map(fd, offset, size, &Accounts::default(), whole, None)
    }

    /// As [`DirtyLog::new`], for the peer with these accounts.
    pub(crate) fn map(
        fd: BorrowedFd<'_>,
        offset: u64,
        size: u64,
        accounts: &Accounts,
        whole: Whole,
        counted: Option<Beside>,
    ) -> Result<DirtyLog, LogError> {
        if size == 0 || size > MAX_LOG {
            return Err(LogError::Size(size));
        }
        let len = size as usize;
        let file = fd.try_clone_to_owned().map_err(LogError::Map)?;
        let mapping = Mapping::new(fd, offset, len, accounts, whole).map_err(|e| match e {
            Failure::Overflow => LogError::Size(size),
            Failure::BeyondFile(file) => {
                LogError::BeyondFile { end: offset.saturating_add(size), file }
            }
            Failure::NoGuard | Failure::TooMuch => LogError::Map(io::ErrorKind::OutOfMemory.into()),
            Failure::FileSystem(_) | Failure::NotAFile => {
                LogError::Map(io::ErrorKind::Unsupported.into())
            }
            Failure::Os(e) => LogError::Map(e),
        })?;
        Ok(DirtyLog { mapping, len, file, offset, _counted: counted })
    }

    /// What [`DirtyLog::new`] was given, for another process: file, offset and size in bytes.
    pub fn file(&self) -> (BorrowedFd<'_>, u64, u64) {
        (self.file.as_fd(), self.offset, self.len as u64)
    }

    /// Guest addresses below this one have a bit.
    pub fn covers(&self) -> u64 {
        self.len as u64 * 8 * LOG_PAGE
    }

    /// Marks the pages of `len` bytes at guest address `gpa`. Pages without a bit are left out.
    ///
    /// The bit is set with a full barrier after the data was written, and always: a bit that is
    /// set already may be about to be cleared by the peer, who then reads the page.
    #[inline]
    pub fn mark(&self, gpa: u64, len: u64) {
        if len == 0 {
            return;
        }
        let bits = self.range();
        let last = gpa.saturating_add(len - 1).min(self.covers() - 1) / LOG_PAGE;
        for page in gpa / LOG_PAGE..=last {
            if let Ok(byte) = bits.atomic_u8((page / 8) as usize) {
                byte.fetch_or(1 << (page % 8), Ordering::SeqCst);
            }
        }
    }

    /// Whether the page of `gpa` is marked (tests, and the peer's own side).
    pub fn is_marked(&self, gpa: u64) -> bool {
        let page = gpa / LOG_PAGE;
        self.range()
            .atomic_u8((page / 8) as usize)
            .is_ok_and(|b| b.load(Ordering::SeqCst) & 1 << (page % 8) != 0)
    }

    /// Whether the peer truncated the file of the log.
    pub fn is_broken(&self) -> bool {
        self.mapping.is_broken()
    }

    #[inline]
    fn range(&self) -> GuestRange<'_> {
        // SAFETY: the mapping has `len` bytes and lives as long as self.
        unsafe { GuestRange::new(self.mapping.data(), self.len) }
    }
}
