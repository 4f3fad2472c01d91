//! A bdev as a blobstore's disk, on the metadata thread.

use bdev::{AlignedBuf, Bdev, Features, IoError, OpenError, SyncChannel, SyncError};
use blobstore::{Disk, DiskError};

/// Bytes zeroed by one write where the bdev cannot write zeros by itself.
const ZERO_WRITE: usize = 1 << 20;

/// A bdev, used synchronously.
pub(crate) struct BdevDisk {
    channel: SyncChannel,
    features: Features,
    size: u64,
    block: u64,
    /// Longest I/O of one submit, in bytes.
    longest: u64,
}

impl BdevDisk {
    /// Opens `bdev` for the calling thread.
    pub fn open(bdev: &dyn Bdev) -> Result<Self, OpenError> {
        let channel = SyncChannel::open(bdev)?;
        let (geometry, features) = (bdev.geometry(), bdev.features());
        let block = u64::from(geometry.block_size);
        let longest = match features.max_blocks {
            0 => u64::MAX / block * block,
            n => u64::from(n) * block,
        };
        Ok(BdevDisk { channel, features, size: geometry.num_blocks * block, block, longest })
    }

    /// The bdev has another size.
    pub fn resized(&mut self, num_blocks: u64) {
        self.size = num_blocks * self.block;
    }

    /// Runs `f` on (first block, blocks) pieces of a range that one submit can take.
    fn pieces(
        &mut self,
        op: &'static str,
        offset: u64,
        len: u64,
        mut f: impl FnMut(&mut SyncChannel, u64, u64) -> Result<(), SyncError>,
    ) -> Result<(), DiskError> {
        let mut at = 0;
        while at < len {
            let n = (len - at).min(self.longest);
            f(&mut self.channel, (offset + at) / self.block, n / self.block)
                .map_err(|e| failed(op, offset, len, &e))?;
            at += n;
        }
        Ok(())
    }
}

fn failed(op: &'static str, offset: u64, len: u64, e: &SyncError) -> DiskError {
    let cause = format!("bdev {}: {}", e.name, e.cause);
    DiskError { op, offset, len, cause, no_space: e.cause == IoError::NoSpace }
}

impl Disk for BdevDisk {
    fn size(&self) -> u64 {
        self.size
    }

    fn block_size(&self) -> u32 {
        self.block as u32
    }

    fn read(&mut self, offset: u64, buf: &mut [u8]) -> Result<(), DiskError> {
        let (block, start) = (self.block, offset / self.block);
        let len = buf.len() as u64;
        self.pieces("read", offset, len, |channel, lba, blocks| {
            let from = ((lba - start) * block) as usize;
            channel.read(lba, &mut buf[from..from + (blocks * block) as usize])
        })
    }

    fn write(&mut self, offset: u64, buf: &[u8]) -> Result<(), DiskError> {
        let (block, start) = (self.block, offset / self.block);
        self.pieces("write", offset, buf.len() as u64, |channel, lba, blocks| {
            let from = ((lba - start) * block) as usize;
            channel.write(lba, &buf[from..from + (blocks * block) as usize])
        })
    }

    fn write_zeroes(&mut self, offset: u64, len: u64) -> Result<(), DiskError> {
        if self.features.write_zeroes {
            return self.pieces("write_zeroes", offset, len, SyncChannel::write_zeroes);
        }
        let zeros = AlignedBuf::zeroed((ZERO_WRITE as u64).min(len) as usize);
        let mut at = 0;
        while at < len {
            let n = (len - at).min(zeros.len() as u64);
            self.write(offset + at, &zeros[..n as usize])?;
            at += n;
        }
        Ok(())
    }

    fn unmap(&mut self, offset: u64, len: u64) -> Result<(), DiskError> {
        if !self.features.unmap {
            return Ok(());
        }
        self.pieces("unmap", offset, len, SyncChannel::unmap)
    }

    fn flush(&mut self) -> Result<(), DiskError> {
        self.channel.flush().map_err(|e| failed("flush", 0, 0, &e))
    }
}
