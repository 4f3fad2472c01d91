//! What a target writes down of an export for the one that serves it next.
//!
//! It is in a memfd that the holder has a descriptor of, together with the one of `/dev/fuse`, so it
//! lives as long as the mount. A process that is killed leaves it as its last write did; no write
//! crosses a page.
//!
//! | offset | bytes | what |
//! | --- | --- | --- |
//! | 0 | 8 | `VTEXPORT` |
//! | 8 | 4 | version of this layout: 1; another one is not read, and the export begins anew |
//! | 12 | 4 | state: 0 nothing was negotiated, 1 served, 2 left with nothing in flight |
//! | 16 | 8 | abilities of the kernel, as INIT gave them |
//! | 24 | 4 | `max_write` that was negotiated, in bytes |
//! | 28 | 4 | zero |
//! | 32 | 8 | when the mount was made, in seconds since 1970 |
//! | 4096 | 8 each | handles that are open; 0 is a free place |
//!
//! A handle is the `unique` of the OPEN that made it. The kernel asks again what the dead process
//! had taken and not answered: an OPEN that was noted is found to be, and so is a RELEASE.

use rustix::io::{Errno, pread, pwrite};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Layout that is written and read.
const VERSION: u32 = 1;
const MAGIC: [u8; 8] = *b"VTEXPORT";

/// Where handles begin.
const HANDLES_AT: u64 = 4096;

/// Handles of one file at a time.
pub(crate) const HANDLES_MAX: usize = 8192;

const _: () = assert!(HANDLES_AT + 8 * HANDLES_MAX as u64 <= holder::RECORD_BYTES);

/// Nothing in flight is known to be answered.
const SERVED: u32 = 1;
/// All that was taken is answered.
const LEFT: u32 = 2;

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct Header {
    magic: [u8; 8],
    version: u32,
    state: u32,
    abilities: u64,
    max_write: u32,
    zero: u32,
    made_s: u64,
}

/// The record of one mount, of which this process is the only writer.
#[derive(Debug)]
pub(crate) struct Record {
    file: Arc<OwnedFd>,
    header: Header,
    /// As they stand in the file.
    handles: Vec<u64>,
    open: u32,
}

impl Record {
    /// Of a new mount; nothing is written before [`Record::begin`].
    pub fn new(file: Arc<OwnedFd>, made_s: u64) -> Record {
        let header = Header { magic: MAGIC, version: VERSION, made_s, ..Header::default() };
        Record { file, header, handles: vec![0; HANDLES_MAX], open: 0 }
    }

    /// As the one before has left it; `None`: it is of no use.
    pub fn read(file: Arc<OwnedFd>) -> Option<Record> {
        let mut header = Header::default();
        if pread(&*file, header.as_mut_bytes(), 0) != Ok(size_of::<Header>()) {
            return None;
        }
        let known = header.magic == MAGIC && header.version == VERSION;
        if !known || !matches!(header.state, SERVED | LEFT) {
            return None;
        }
        let mut handles = vec![0u64; HANDLES_MAX];
        if pread(&*file, handles.as_mut_bytes(), HANDLES_AT) != Ok(8 * HANDLES_MAX) {
            return None;
        }
        let open = handles.iter().filter(|handle| **handle != 0).count() as u32;
        Some(Record { file, header, handles, open })
    }

    /// Notes what INIT has settled.
    ///
    /// # Errors
    /// The memfd cannot be written: no memory.
    pub fn begin(&mut self, abilities: u64, max_write: u32) -> Result<(), Errno> {
        self.header = Header { abilities, max_write, state: SERVED, ..self.header };
        self.write(self.header.as_bytes(), 0)
    }

    /// Notes that it is served again.
    ///
    /// # Errors
    /// As [`Record::begin`].
    pub fn resume(&mut self) -> Result<(), Errno> {
        self.header.state = SERVED;
        self.write(self.header.as_bytes(), 0)
    }

    /// Notes that all that was taken is answered, and no more will be taken by this process.
    pub fn leave(&mut self) {
        if self.header.state == SERVED {
            self.header.state = LEFT;
            // If it fails, the next one has the kernel send again what it has: nothing.
            let _ = self.write(self.header.as_bytes(), 0);
        }
    }

    fn write(&self, bytes: &[u8], at: u64) -> Result<(), Errno> {
        match pwrite(&*self.file, bytes, at)? {
            written if written == bytes.len() => Ok(()),
            _ => Err(Errno::IO),
        }
    }

    /// Whether the one before answered all that it took.
    pub fn was_left(&self) -> bool {
        self.header.state == LEFT
    }

    /// Abilities of the kernel ([`crate::abi::flag`]).
    pub fn abilities(&self) -> u64 {
        self.header.abilities
    }

    /// Longest write that was negotiated, in bytes.
    pub fn max_write(&self) -> u32 {
        self.header.max_write
    }

    /// When the mount was made, in seconds since 1970.
    pub fn made_s(&self) -> u64 {
        self.header.made_s
    }

    /// Handles that are open.
    pub fn open_handles(&self) -> u32 {
        self.open
    }

    /// Notes a handle, not 0; `again`: it may be noted already. Whether it is a new one.
    ///
    /// # Errors
    /// NFILE: [`HANDLES_MAX`] are open.
    pub fn opened(&mut self, handle: u64, again: bool) -> Result<bool, Errno> {
        if again && self.handles.contains(&handle) {
            return Ok(false);
        }
        let free = self.handles.iter().position(|handle| *handle == 0).ok_or(Errno::NFILE)?;
        self.write(&handle.to_ne_bytes(), HANDLES_AT + 8 * free as u64)?;
        self.handles[free] = handle;
        self.open += 1;
        Ok(true)
    }

    /// Forgets a handle; whether it was there.
    pub fn released(&mut self, handle: u64) -> bool {
        let found = self.handles.iter().position(|there| *there == handle && handle != 0);
        let Some(at) = found else { return false };
        // A memfd's page that was written once can be written.
        let _ = self.write(&[0; 8], HANDLES_AT + 8 * at as u64);
        self.handles[at] = 0;
        self.open -= 1;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> Arc<OwnedFd> {
        let file = tempfile::tempfile().unwrap();
        file.set_len(holder::RECORD_BYTES).unwrap();
        Arc::new(file.into())
    }

    #[test]
    fn the_next_one_finds_what_was_noted() {
        let file = file();
        assert!(Record::read(file.clone()).is_none());
        let mut record = Record::new(file.clone(), 77);
        record.begin(1 << 39, 4096).unwrap();
        assert!(record.opened(4, false).unwrap());
        assert!(record.opened(8, false).unwrap());
        assert!(record.released(4) && !record.released(4) && !record.released(0));
        drop(record);
        let mut record = Record::read(file.clone()).unwrap();
        assert_eq!((record.abilities(), record.max_write(), record.made_s()), (1 << 39, 4096, 77));
        assert_eq!((record.open_handles(), record.was_left()), (1, false));
        // Asked again.
        assert!(!record.opened(8, true).unwrap());
        assert!(record.opened(12, true).unwrap());
        record.leave();
        let mut record = Record::read(file.clone()).unwrap();
        assert_eq!((record.open_handles(), record.was_left()), (2, true));
        record.resume().unwrap();
        assert!(!Record::read(file).unwrap().was_left());
    }

    #[test]
    fn there_is_a_bound_and_another_version_is_left() {
        let file = file();
        let mut record = Record::new(file.clone(), 0);
        record.begin(0, 4096).unwrap();
        for handle in 1..=HANDLES_MAX as u64 {
            record.opened(handle, false).unwrap();
        }
        assert_eq!(record.opened(1 << 20, false), Err(Errno::NFILE));
        assert_eq!(Record::read(file.clone()).unwrap().open_handles(), HANDLES_MAX as u32);
        pwrite(&*file, &2u32.to_ne_bytes(), 8).unwrap();
        assert!(Record::read(file).is_none());
    }
}
