//! A bdev as a blobstore's disk, on the metadata thread.

mod copy;

use crate::external::Externals;
use bdev::{
    AlignedBuf, Bdev, Features, FlushLatch, IoError, Op, OpenError, SyncChannel, SyncError,
};
use blobstore::{Disk, DiskError, Fill};
use copy::{Copier, Failed, Source};
use std::collections::HashMap;
use std::sync::Arc;
use uuid::Uuid;

/// Bytes zeroed by one write where the bdev cannot write zeros by itself.
const ZERO_WRITE: usize = 1 << 20;

/// A bdev, used synchronously.
pub(crate) struct BdevDisk {
    channel: SyncChannel,
    bdev: Arc<dyn Bdev>,
    features: Features,
    /// It says where it reads as zeros, and nobody needs more of zeros than that.
    tells_zeros: bool,
    size: u64,
    block: u64,
    /// Longest I/O of one submit, in bytes.
    longest: u64,
    /// Opened when something is copied for the first time.
    copier: Option<Copier>,
    /// Where parents outside of the store are found, and how those are read that were.
    externals: Option<Arc<Externals>>,
    sources: HashMap<Uuid, Source>,
}

impl BdevDisk {
    /// Opens `bdev` for the calling thread.
    pub fn open(bdev: &Arc<dyn Bdev>) -> Result<Self, OpenError> {
        let channel = SyncChannel::open(&**bdev)?;
        let (geometry, features) = (bdev.geometry(), bdev.features());
        let block = u64::from(geometry.block_size);
        let longest = match features.max_blocks {
            0 => u64::MAX / block * block,
            n => u64::from(n) * block,
        };
        let tells_zeros = bdev.known_zeros(0).is_some();
        let bdev = bdev.clone();
        Ok(BdevDisk {
            channel,
            bdev,
            features,
            tells_zeros,
            size: geometry.num_blocks * block,
            block,
            longest,
            copier: None,
            externals: None,
            sources: HashMap::new(),
        })
    }

    /// Says where parents outside of the store are found.
    pub fn set_externals(&mut self, externals: Arc<Externals>) {
        self.externals = Some(externals);
    }

    fn copier(&mut self, len: u64) -> Result<&mut Copier, DiskError> {
        if self.copier.is_none() {
            let opened = Copier::open(&*self.bdev, self.block, self.longest);
            let failed = |e: OpenError| not_opened("copy", len, &e);
            self.copier = Some(opened.map_err(failed)?);
        }
        Ok(self.copier.as_mut().expect("made above"))
    }

    /// How an external parent that is there is read.
    fn source(&mut self, parent: Uuid, len: u64) -> Result<Source, DiskError> {
        let external = self.externals.as_ref().map(|externals| externals.get(parent));
        let presence = external.as_ref().map_or(0, |external| external.presence());
        match self.sources.remove(&parent) {
            Some(source) if source.presence == presence => return Ok(source),
            _ => {}
        }
        let Some(bdev) = external.and_then(|external| external.bdev()) else {
            let cause = format!("the external parent {parent} is not there");
            return Err(DiskError { op: "read", offset: 0, len, cause, no_space: false });
        };
        Source::open(&*bdev, presence).map_err(|e| not_opened("read", len, &e))
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
                .map_err(|e| failed(op, offset, len, &e.name, e.cause))?;
            at += n;
        }
        Ok(())
    }
}

fn not_opened(op: &'static str, len: u64, e: &OpenError) -> DiskError {
    DiskError { op, offset: 0, len, cause: e.to_string(), no_space: false }
}

fn failed(op: &'static str, offset: u64, len: u64, bdev: &str, error: IoError) -> DiskError {
    let cause = format!("bdev {bdev}: {error}");
    DiskError { op, offset, len, cause, no_space: error == IoError::NoSpace }
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

    fn fill(&mut self, fills: &[Fill<'_>], len: u64) -> Result<(), DiskError> {
        let filled = self.copier(len)?.fill(fills, len);
        filled.map_err(|Failed { op, offset, error }| {
            failed(op, offset, len, self.bdev.name(), error)
        })
    }

    fn fill_external(
        &mut self,
        parent: Uuid,
        fills: &[Fill<'_>],
        len: u64,
    ) -> Result<(), DiskError> {
        let mut source = self.source(parent, len)?;
        let filled = self.copier(len)?.fill_from(&mut source, fills, len);
        self.sources.insert(parent, source);
        filled.map_err(|Failed { op, offset, error }| {
            let external = parent.to_string();
            let of = if op == "read" { &external } else { self.bdev.name() };
            failed(op, offset, len, of, error)
        })
    }

    fn unmap(&mut self, offset: u64, len: u64) -> Result<(), DiskError> {
        if !self.features.unmap {
            return Ok(());
        }
        self.pieces("unmap", offset, len, SyncChannel::unmap)
    }

    fn unmap_zeroes(&self) -> bool {
        // Whether a block without protection information is one of zeros is the reader's choice.
        let choice = self.bdev.protection().is_some();
        self.tells_zeros && !choice && self.features.zeroing() == Some(Op::Unmap)
    }

    fn zeros_at(&mut self, offset: u64) -> Option<(bool, u64)> {
        let run = self.bdev.known_zeros(offset / self.block)?;
        Some((run.hole, run.blocks * self.block))
    }

    fn flush(&mut self) -> Result<(), DiskError> {
        self.channel.flush().map_err(|e| failed("flush", 0, 0, &e.name, e.cause))
    }

    fn boot(&self) -> Option<u128> {
        self.features.boot
    }

    fn failed_flushes(&self) -> u64 {
        self.bdev.flush_latch().map_or(0, FlushLatch::failures)
    }
}
