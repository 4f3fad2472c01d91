//! The base as the keeper uses it: pages, several at a time, and waiting for them.

use crate::layout::PAGE;
use bdev::{AlignedBuf, Bdev, IoError, Op, OpenError, OwnedChannel, SyncChannel, SyncError};

/// I/Os at a time.
const DEPTH: u16 = 64;

/// A base.
pub(crate) struct Medium {
    one: SyncChannel,
    many: OwnedChannel<usize>,
    /// Blocks of a page.
    per: u64,
    has_fua: bool,
}

impl Medium {
    pub fn open(base: &dyn Bdev) -> Result<Medium, OpenError> {
        Ok(Medium {
            one: SyncChannel::open(base)?,
            many: OwnedChannel::open(base, DEPTH)?,
            per: PAGE as u64 / u64::from(base.geometry().block_size),
            has_fua: base.features().fua,
        })
    }

    /// Reads what begins with a page.
    pub fn read(&mut self, page: u64, bytes: &mut [u8]) -> Result<(), SyncError> {
        self.one.read(page * self.per, bytes)
    }

    /// Writes a page.
    pub fn write(&mut self, page: u64, bytes: &[u8]) -> Result<(), SyncError> {
        let mut buf = AlignedBuf::zeroed(bytes.len());
        buf.copy_from_slice(bytes);
        self.one.write(page * self.per, &buf)
    }

    /// Writes a page; it is durable then.
    pub fn write_durably(&mut self, page: u64, bytes: &[u8]) -> Result<(), SyncError> {
        if !self.has_fua {
            self.write(page, bytes)?;
            return self.one.flush();
        }
        let mut buf = AlignedBuf::zeroed(bytes.len());
        buf.copy_from_slice(bytes);
        self.one.write_fua(page * self.per, &buf)
    }

    /// Makes all that was written durable.
    pub fn flush(&mut self) -> Result<(), SyncError> {
        self.one.flush()
    }

    /// Reads pages, in any order; calls `f` with the number of each in `pages` and what is there.
    pub fn read_all(&mut self, pages: &[u64], mut f: impl FnMut(usize, Result<&[u8], IoError>)) {
        self.each(
            Op::Read,
            pages,
            |_| AlignedBuf::zeroed(PAGE),
            |at, result, buf| {
                f(at, result.map(|()| &buf[..]));
            },
        );
    }

    /// Writes pages, in any order; calls `f` with the number of each in `pages` and what came of it.
    pub fn write_all(
        &mut self,
        pages: &[u64],
        content: impl Fn(usize) -> Vec<u8>,
        mut f: impl FnMut(usize, Result<(), IoError>),
    ) {
        let fill = |at: usize| {
            let mut buf = AlignedBuf::zeroed(PAGE);
            buf.copy_from_slice(&content(at));
            buf
        };
        self.each(Op::Write, pages, fill, |at, result, _| f(at, result));
    }

    fn each(
        &mut self,
        op: Op,
        pages: &[u64],
        buf: impl Fn(usize) -> AlignedBuf,
        mut f: impl FnMut(usize, Result<(), IoError>, AlignedBuf),
    ) {
        let mut over = Vec::new();
        let mut next = 0;
        while next < pages.len() || self.many.in_flight() > 0 {
            while next < pages.len() && !self.many.is_full() {
                let lba = pages[next] * self.per;
                over.extend(self.many.submit(op, lba, self.per, Some(buf(next)), next));
                next += 1;
            }
            if over.is_empty() && self.many.poll(&mut over) == 0 && self.many.in_flight() > 0 {
                self.many.wait(&mut over, 0);
            }
            for f_ in over.drain(..) {
                f(f_.token, f_.result, f_.buf.unwrap_or_else(|| AlignedBuf::zeroed(PAGE)));
            }
        }
    }
}
