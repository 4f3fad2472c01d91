//! A disk for tests that is one in memory but for some of it. Tests beside the crate have this file, too.

use blobstore::{Disk, DiskError, MemDisk};

/// What [`Wrapped`] does otherwise than its disk.
pub trait Wrap {
    /// See [`Disk::size`], with that of the disk.
    fn size(&self, of: u64) -> u64 {
        of
    }

    /// Before the disk has an operation, "read", "write", "write_zeroes" or "flush", on so many bytes.
    ///
    /// # Errors
    /// It ends so, and the disk does not get it.
    fn before(&mut self, _op: &'static str, _offset: u64, _len: u64) -> Result<(), DiskError> {
        Ok(())
    }
}

/// A disk in memory that does otherwise what `with` says.
pub struct Wrapped<W> {
    pub disk: MemDisk,
    pub with: W,
}

impl<W: Wrap> Disk for Wrapped<W> {
    fn size(&self) -> u64 {
        self.with.size(self.disk.size())
    }

    fn read(&mut self, offset: u64, buf: &mut [u8]) -> Result<(), DiskError> {
        self.with.before("read", offset, buf.len() as u64)?;
        self.disk.read(offset, buf)
    }

    fn write(&mut self, offset: u64, buf: &[u8]) -> Result<(), DiskError> {
        self.with.before("write", offset, buf.len() as u64)?;
        self.disk.write(offset, buf)
    }

    fn write_zeroes(&mut self, offset: u64, len: u64) -> Result<(), DiskError> {
        self.with.before("write_zeroes", offset, len)?;
        self.disk.write_zeroes(offset, len)
    }

    fn flush(&mut self) -> Result<(), DiskError> {
        self.with.before("flush", 0, 0)?;
        self.disk.flush()
    }
}

/// The end of an operation of [`Wrap::before`].
pub fn failed(op: &'static str, offset: u64, len: u64) -> DiskError {
    DiskError { op, offset, len, cause: "injected".into(), no_space: false }
}
