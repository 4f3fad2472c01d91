//! The data path: one queue pair on an encrypted bdev, on top of one queue pair on its base.
//!
//! A write is copied out of the guest's memory and encrypted in memory of the channel's own, which the
//! base bdev gets: what the guest does to its memory meanwhile neither reaches the medium nor makes a
//! difference between pieces. A read is decrypted there and copied to the guest, which never sees
//! encrypted data nor can have other data decrypted. [`InPieces`] has the rest.

use crate::Key;
use crate::xts::{Failed, Xts};
use bdev::{
    Bdev, COPY_AT_ONCE, Channel, Completion, InPieces, Io, IoError, Layer, Part, Pieces, Received,
    Run, Stats, Submit,
};
use reactor::Waker;
use std::sync::Arc;

pub(crate) struct CryptoChannel(InPieces<Encrypting>);

struct Encrypting {
    xts: Xts,
    /// Bytes of a block.
    block: usize,
    /// Blocks of a piece at most.
    longest: u64,
    disk: Arc<dyn Bdev>,
    /// As long as it is used.
    _key: Arc<Key>,
}

impl Channel for CryptoChannel {
    #[inline]
    fn submit(&mut self, io: &Io) -> Submit {
        self.0.submit(io)
    }

    #[inline]
    fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        self.0.poll(done)
    }

    fn sparse_run(&mut self, lba: u64, blocks: u64) -> Run {
        self.0.pieces.sparse_run(lba, blocks)
    }
}

impl CryptoChannel {
    /// On a queue pair of `disk`, of which it shows the blocks decrypted.
    pub fn new(
        disk: Arc<dyn Bdev>,
        base: Box<dyn Channel>,
        (xts, key): (Xts, Arc<Key>),
        stats: &Arc<Stats>,
        waker: Waker,
    ) -> Self {
        let block = disk.geometry().block_size as usize;
        let most = (COPY_AT_ONCE / block) as u64;
        let longest = match disk.features().max_blocks {
            0 => most,
            blocks => most.min(u64::from(blocks)),
        };
        let layer = Encrypting { xts, block, longest, disk, _key: key };
        CryptoChannel(InPieces::new(Pieces::new(base), layer, stats.channel(), waker))
    }
}

impl Layer for Encrypting {
    type With = ();
    const PLAIN: () = ();

    fn block(&self) -> usize {
        self.block
    }

    fn block_below(&self) -> usize {
        self.block
    }

    fn longest(&self) -> u64 {
        self.longest
    }

    fn check(&self, io: &Io, (): &()) -> Result<(), IoError> {
        io.check(&self.disk.geometry(), &self.disk.features())
    }

    fn fill(&mut self, Part { io, at, cursor, pieces, .. }: Part<'_, ()>) -> Result<(), IoError> {
        let (block, xts) = (self.block, &mut self.xts);
        let from = cursor as usize * block;
        let encrypted = pieces.each(at, |begin, bytes| {
            io.sg.copy_to_slice(from + begin, bytes);
            xts.encrypt(io.lba + ((from + begin) / block) as u64, bytes)
        });
        encrypted.map_err(|_| IoError::Resources)
    }

    fn received(&mut self, Part { io, at, cursor, pieces, .. }: Part<'_, ()>) -> Received {
        let (block, xts) = (self.block, &mut self.xts);
        let from = cursor as usize * block;
        let decrypted = pieces.each(at, |begin, bytes| {
            xts.decrypt(io.lba + ((from + begin) / block) as u64, bytes)?;
            io.sg.copy_from_slice(from + begin, bytes);
            Ok::<_, Failed>(())
        });
        Received::Over(decrypted.map_err(|_| IoError::Resources))
    }
}
