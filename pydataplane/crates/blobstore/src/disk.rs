//! What a store needs of a device.

use crate::fill::Fill;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use uuid::Uuid;

/// Why a device access failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{op} of {len} bytes at byte {offset}: {cause}")]
pub struct DiskError {
    /// `read`, `write`, `flush`, `write_zeroes` or `unmap`.
    pub op: &'static str,
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
    /// The cause.
    pub cause: String,
    /// Whether the device had no room left for the write.
    pub no_space: bool,
}

/// Bytes that are filled at once where a disk knows no better way.
const FILL_STEP: u64 = 1 << 20;

/// A block device, used synchronously. Offsets and lengths are whole 4096-byte pages, except those
/// of [`Store::read`](crate::Store::read) and [`write`](crate::Store::write), which are the
/// caller's.
///
/// The device may reorder and tear what it was given until [`Disk::flush`] returned `Ok`
/// (`schemas/blobstore.md`, fault model).
pub trait Disk {
    /// Size in bytes.
    fn size(&self) -> u64;
    /// Bytes of a block; informational.
    fn block_size(&self) -> u32 {
        512
    }
    /// Fills `buf` from byte `offset`.
    fn read(&mut self, offset: u64, buf: &mut [u8]) -> Result<(), DiskError>;
    /// Writes `buf` at byte `offset`.
    fn write(&mut self, offset: u64, buf: &[u8]) -> Result<(), DiskError>;
    /// Makes `len` bytes at `offset` read as zeros.
    fn write_zeroes(&mut self, offset: u64, len: u64) -> Result<(), DiskError>;
    /// Fills ranges of `len` bytes, none of them twice. What lies over a range is written with it.
    fn fill(&mut self, fills: &[Fill<'_>], len: u64) -> Result<(), DiskError> {
        fill_by(self, fills, len, |disk, from, bytes| disk.read(from, bytes))
    }
    /// Fills `buf` from byte `offset` of what is outside of the store and a blob's parent. A disk that
    /// knows of none fails.
    fn read_external(
        &mut self,
        parent: Uuid,
        offset: u64,
        buf: &mut [u8],
    ) -> Result<(), DiskError> {
        let (len, cause) = (buf.len() as u64, format!("the external parent {parent} is not there"));
        Err(DiskError { op: "read", offset, len, cause, no_space: false })
    }
    /// As [`Disk::fill`], from offsets of an external parent.
    fn fill_external(
        &mut self,
        parent: Uuid,
        fills: &[Fill<'_>],
        len: u64,
    ) -> Result<(), DiskError> {
        fill_by(self, fills, len, |disk, from, bytes| disk.read_external(parent, from, bytes))
    }
    /// Says that `len` bytes at `offset` are not needed; what they read as afterwards is
    /// undefined. A device that cannot does nothing.
    fn unmap(&mut self, _offset: u64, _len: u64) -> Result<(), DiskError> {
        Ok(())
    }
    /// Whether what [`Disk::unmap`] unmapped reads as zeros, all of it and at once, and durably after a flush.
    fn unmap_zeroes(&self) -> bool {
        false
    }
    /// What begins at byte `offset`: whether it is known to read as zeros, now and durably after a flush, and
    /// for how many bytes. Nobody writes there meanwhile. `None`: such things are not known.
    fn zeros_at(&mut self, _offset: u64) -> Option<(bool, u64)> {
        None
    }
    /// Makes all completed writes durable.
    fn flush(&mut self) -> Result<(), DiskError>;
    /// The time in which completed writes stay readable without a flush, whatever becomes of the process
    /// that wrote them: the boot of the host whose page cache or disk holds them. Not 0. `None`: that is
    /// not known, and a store flushes each change then.
    fn boot(&self) -> Option<u128> {
        None
    }
    /// How many flushes of the device failed so far, whoever asked for them.
    fn failed_flushes(&self) -> u64 {
        0
    }
}

/// Fills each range, from what `read` reads.
fn fill_by<D: Disk + ?Sized>(
    disk: &mut D,
    fills: &[Fill<'_>],
    len: u64,
    read: impl Fn(&mut D, u64, &mut [u8]) -> Result<(), DiskError>,
) -> Result<(), DiskError> {
    let mut bytes = vec![0; len.min(FILL_STEP) as usize];
    for fill in fills {
        for at in (0..len).step_by(bytes.len()) {
            let part = (len - at).min(bytes.len() as u64) as usize;
            let part = &mut bytes[..part];
            if let Some(from) = fill.read_from(at, part.len() as u64) {
                read(disk, from, part)?;
            }
            fill.complete(at, part);
            disk.write(fill.to + at, part)?;
        }
    }
    Ok(())
}

impl<D: Disk + ?Sized> Disk for &mut D {
    fn size(&self) -> u64 {
        (**self).size()
    }
    fn block_size(&self) -> u32 {
        (**self).block_size()
    }
    fn read(&mut self, offset: u64, buf: &mut [u8]) -> Result<(), DiskError> {
        (**self).read(offset, buf)
    }
    fn write(&mut self, offset: u64, buf: &[u8]) -> Result<(), DiskError> {
        (**self).write(offset, buf)
    }
    fn write_zeroes(&mut self, offset: u64, len: u64) -> Result<(), DiskError> {
        (**self).write_zeroes(offset, len)
    }
    fn fill(&mut self, fills: &[Fill<'_>], len: u64) -> Result<(), DiskError> {
        (**self).fill(fills, len)
    }
    fn read_external(
        &mut self,
        parent: Uuid,
        offset: u64,
        buf: &mut [u8],
    ) -> Result<(), DiskError> {
        (**self).read_external(parent, offset, buf)
    }
    fn fill_external(
        &mut self,
        parent: Uuid,
        fills: &[Fill<'_>],
        len: u64,
    ) -> Result<(), DiskError> {
        (**self).fill_external(parent, fills, len)
    }
    fn unmap(&mut self, offset: u64, len: u64) -> Result<(), DiskError> {
        (**self).unmap(offset, len)
    }
    fn unmap_zeroes(&self) -> bool {
        (**self).unmap_zeroes()
    }
    fn zeros_at(&mut self, offset: u64) -> Option<(bool, u64)> {
        (**self).zeros_at(offset)
    }
    fn flush(&mut self) -> Result<(), DiskError> {
        (**self).flush()
    }
    fn boot(&self) -> Option<u128> {
        (**self).boot()
    }
    fn failed_flushes(&self) -> u64 {
        (**self).failed_flushes()
    }
}

/// A file or a kernel block device, for programs and examples.
pub struct FileDisk {
    file: File,
    size: u64,
}

impl FileDisk {
    /// Takes an open file, whose present length is the device's size.
    ///
    /// # Errors
    /// When the length cannot be found.
    pub fn new(file: File) -> io::Result<Self> {
        use std::io::{Seek, SeekFrom};
        let size = (&file).seek(SeekFrom::End(0))?;
        Ok(FileDisk { file, size })
    }
}

/// Zeros that [`FileDisk`] writes at a time.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

impl Disk for FileDisk {
    fn size(&self) -> u64 {
        self.size
    }

    fn read(&mut self, offset: u64, buf: &mut [u8]) -> Result<(), DiskError> {
        let len = buf.len() as u64;
        self.file.read_exact_at(buf, offset).map_err(|e| failed("read", offset, len, &e))
    }

    fn write(&mut self, offset: u64, buf: &[u8]) -> Result<(), DiskError> {
        let len = buf.len() as u64;
        self.file.write_all_at(buf, offset).map_err(|e| failed("write", offset, len, &e))
    }

    fn write_zeroes(&mut self, offset: u64, len: u64) -> Result<(), DiskError> {
        let mut at = 0;
        while at < len {
            let n = (len - at).min(ZEROS.len() as u64);
            self.file
                .write_all_at(&ZEROS[..n as usize], offset + at)
                .map_err(|e| failed("write_zeroes", offset, len, &e))?;
            at += n;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), DiskError> {
        self.file.sync_data().map_err(|e| failed("flush", 0, 0, &e))
    }
}

fn failed(op: &'static str, offset: u64, len: u64, e: &io::Error) -> DiskError {
    let no_space = e.kind() == io::ErrorKind::StorageFull;
    DiskError { op, offset, len, cause: e.to_string(), no_space }
}

/// A device in memory, for tests and examples; everything written is durable at once.
#[derive(Clone)]
pub struct MemDisk(Vec<u8>);

impl MemDisk {
    /// A device of `size` bytes, all zero.
    pub fn new(size: usize) -> Self {
        MemDisk(vec![0; size])
    }

    /// A device with the given contents.
    pub fn from_bytes(bytes: Vec<u8>) -> Self {
        MemDisk(bytes)
    }

    /// What the device holds.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// What the device holds, to damage it.
    pub fn bytes_mut(&mut self) -> &mut Vec<u8> {
        &mut self.0
    }

    fn range(
        &self,
        op: &'static str,
        offset: u64,
        len: u64,
    ) -> Result<std::ops::Range<usize>, DiskError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.0.len() as u64 => Ok(offset as usize..end as usize),
            _ => Err(DiskError {
                op,
                offset,
                len,
                cause: "it ends beyond the device".into(),
                no_space: false,
            }),
        }
    }
}

impl Disk for MemDisk {
    fn size(&self) -> u64 {
        self.0.len() as u64
    }

    fn read(&mut self, offset: u64, buf: &mut [u8]) -> Result<(), DiskError> {
        let range = self.range("read", offset, buf.len() as u64)?;
        buf.copy_from_slice(&self.0[range]);
        Ok(())
    }

    fn write(&mut self, offset: u64, buf: &[u8]) -> Result<(), DiskError> {
        let range = self.range("write", offset, buf.len() as u64)?;
        self.0[range].copy_from_slice(buf);
        Ok(())
    }

    fn write_zeroes(&mut self, offset: u64, len: u64) -> Result<(), DiskError> {
        let range = self.range("write_zeroes", offset, len)?;
        self.0[range].fill(0);
        Ok(())
    }

    fn flush(&mut self) -> Result<(), DiskError> {
        Ok(())
    }
}
