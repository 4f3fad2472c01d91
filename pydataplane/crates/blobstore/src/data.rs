//! A blob's contents, for programs that use the store as a library. (The `lvol` crate has its own
//! asynchronous path.)

use crate::blob::{BlobId, place};
use crate::disk::Disk;
use crate::error::Error;
use crate::fill::Over;
use crate::shows::Shows;
use crate::store::Store;
use crate::thin::Batch;
use std::collections::BTreeSet;

impl<D: Disk> Store<D> {
    /// Fills `buf` from byte `offset` of a blob.
    ///
    /// # Errors
    /// [`Error::NoBlob`], [`Error::OutOfRange`], [`Error::Data`].
    pub fn read(&mut self, id: BlobId, offset: u64, buf: &mut [u8]) -> Result<(), Error> {
        self.check_range(id, offset, buf.len())?;
        let size = u64::from(self.sb.cluster_size);
        let end = offset + buf.len() as u64;
        self.bring_shown(id.0, place(offset / size).0..place(end.div_ceil(size)).0 + 1)?;
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
        self.bring(id.0, place(offset / size).0..place(last).0 + 1)?;
        // What of `buf` is a cluster's, and at which byte of that.
        let part = |cluster: u64| {
            let starts = offset.max(cluster * size);
            let end = (offset + buf.len() as u64).min((cluster + 1) * size);
            (starts % size, &buf[(starts - offset) as usize..(end - offset) as usize])
        };
        let wants: Vec<_> = (offset / size..=last)
            .filter(|c| match self.blobs[&id.0].cluster(*c) {
                0 => true,
                has => self.is_shared(has),
            })
            .map(|c| (id, c))
            .collect();
        let mut written = BTreeSet::new();
        let add = |store: &mut Self, batch: &mut Batch, id, cluster| {
            let added = store.add_allocation(batch, id, cluster)?;
            let (at, data) = part(cluster);
            if added
                && store.add_data(batch, id, cluster, Over { at, data: Box::new(data.to_vec()) })
            {
                written.insert(cluster);
            }
            Ok(added)
        };
        for answer in self.allocate_by(&wants, add) {
            answer?;
        }
        for cluster in (offset / size..=last).filter(|cluster| !written.contains(cluster)) {
            let (at, data) = part(cluster);
            let to = u64::from(self.blobs[&id.0].cluster(cluster));
            self.disk.write(to * size + at, data).map_err(Error::Data)?;
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
