//! A blob's contents, for programs that use the store as a library. (The `lvol` crate has its own
//! asynchronous path.)

use crate::blob::BlobId;
use crate::disk::Disk;
use crate::error::Error;
use crate::shows::Shows;
use crate::store::Store;

impl<D: Disk> Store<D> {
    /// Fills `buf` from byte `offset` of a blob.
    ///
    /// # Errors
    /// [`Error::NoBlob`], [`Error::OutOfRange`], [`Error::Data`].
    pub fn read(&mut self, id: BlobId, offset: u64, buf: &mut [u8]) -> Result<(), Error> {
        self.check_range(id, offset, buf.len())?;
        let size = u64::from(self.sb.cluster_size);
        let mut done = 0;
        while done < buf.len() {
            let at = offset + done as u64;
            let n = ((size - at % size) as usize).min(buf.len() - done);
            let part = &mut buf[done..done + n];
            match self.source(id.0, at / size) {
                Shows::Zeros => part.fill(0),
                Shows::External(parent) => {
                    self.disk.read_external(parent, at, part).map_err(Error::Data)?
                }
                Shows::Cluster(c) => {
                    self.disk.read(u64::from(c) * size + at % size, part).map_err(Error::Data)?
                }
            }
            done += n;
        }
        Ok(())
    }

    /// Writes `buf` at byte `offset` of a blob, allocating what is not allocated. Durable after
    /// [`Store::sync`].
    ///
    /// # Errors
    /// [`Error::NoBlob`], [`Error::OutOfRange`], [`Error::ReadOnly`], [`Error::NoSpace`],
    /// [`Error::Data`]; then a part may be written.
    pub fn write(&mut self, id: BlobId, offset: u64, buf: &[u8]) -> Result<(), Error> {
        self.check_range(id, offset, buf.len())?;
        let blob = self.get(id)?;
        if blob.read_only() {
            return Err(Error::ReadOnly { name: blob.name.clone() });
        }
        if buf.is_empty() {
            return Ok(());
        }
        let size = u64::from(self.sb.cluster_size);
        let last = (offset + buf.len() as u64 - 1) / size;
        let wants: Vec<_> = (offset / size..=last)
            .filter(|c| self.blobs[&id.0].cluster(*c) == 0)
            .map(|c| (id, c))
            .collect();
        for answer in self.allocate(&wants) {
            answer?;
        }
        let mut done = 0;
        while done < buf.len() {
            let at = offset + done as u64;
            let n = ((size - at % size) as usize).min(buf.len() - done);
            let cluster = u64::from(self.blobs[&id.0].cluster(at / size));
            let written = self.disk.write(cluster * size + at % size, &buf[done..done + n]);
            written.map_err(Error::Data)?;
            done += n;
        }
        Ok(())
    }

    fn check_range(&self, id: BlobId, offset: u64, len: usize) -> Result<(), Error> {
        let blob = self.get(id)?;
        let size = blob.size * u64::from(self.sb.cluster_size);
        let end = offset.saturating_add(len as u64);
        if end > size {
            return Err(Error::OutOfRange { name: blob.name.clone(), size, end });
        }
        Ok(())
    }
}
