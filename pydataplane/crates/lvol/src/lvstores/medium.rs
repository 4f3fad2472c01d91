//! What lvstores have on their media, for people who look for a fault.

use super::Lvstores;
use crate::disk::BdevDisk;
use crate::error::Error;
use crate::info::{LvstoreScrubbed, UnreadableData};
use crate::translate::not_loaded;
use blobstore::{BlobId, Checked, Dumped, Error as StoreError, Store};

impl Lvstores {
    /// Compares an lvstore's metadata on the medium with that in memory, while it is used. With `repair`
    /// what differs is written anew, durably.
    ///
    /// # Errors
    /// [`Error::NoLvstore`], [`Error::Stopped`], [`Error::Io`].
    pub fn check_lvstore(&self, lvstore: &str, repair: bool) -> Result<Checked, Error> {
        self.shared.find(lvstore)?.check(repair)
    }

    /// Looks at the lvstore on a bdev that is not loaded. With `repair` a bad copy of the superblock is written
    /// anew, if nothing else is wrong; of all else there is nothing to write it anew from.
    ///
    /// # Errors
    /// [`Error::NoBdev`], [`Error::InUse`] (it is loaded, above all), [`Error::NotAnLvstore`],
    /// [`Error::Io`].
    pub fn check_bdev(&self, bdev: &str, repair: bool) -> Result<Checked, Error> {
        self.look_at(bdev, "check", |disk| Store::examine(disk, repair))
    }

    /// Reads some of the data of an lvstore's volumes, from byte `from` of its device on, while they are
    /// used. Each volume that has a part that cannot be read is told with it.
    ///
    /// # Errors
    /// [`Error::NoLvstore`], [`Error::Stopped`], [`Error::Io`].
    pub fn scrub_lvstore(&self, lvstore: &str, from: u64) -> Result<LvstoreScrubbed, Error> {
        let lvs = self.shared.find(lvstore)?;
        let found = lvs.scrub(from)?;
        let volumes = match found.unreadable.is_empty() {
            true => Vec::new(),
            false => lvs.volumes(),
        };
        let of = |(blob, at): (BlobId, u64)| {
            let volume = volumes.iter().find(|volume| volume.blob() == blob)?;
            let names = volume.names();
            Some((format!("{}/{}", names.lvstore, names.lvol), volume.shown_at(at)))
        };
        let unreadable = found.unreadable.into_iter().map(|part| UnreadableData {
            offset: part.offset,
            length: part.length,
            cause: part.cause,
            lvols: part.blobs.into_iter().filter_map(of).collect(),
        });
        Ok(LvstoreScrubbed {
            bytes: found.bytes,
            unreadable: unreadable.collect(),
            next: found.next,
        })
    }

    /// Tells what an lvstore, in use or not, has on its medium, from metadata page `from` on. Writes nothing.
    ///
    /// # Errors
    /// [`Error::NoLvstore`], [`Error::Stopped`], [`Error::Io`].
    pub fn dump_lvstore(&self, lvstore: &str, from: u64) -> Result<Dumped, Error> {
        self.shared.find(lvstore)?.dump(from)
    }

    /// As [`Lvstores::dump_lvstore`], of one on a bdev that is not loaded.
    ///
    /// # Errors
    /// As [`Lvstores::check_bdev`].
    pub fn dump_bdev(&self, bdev: &str, from: u64) -> Result<Dumped, Error> {
        self.look_at(bdev, "dump", |mut disk| Store::dump(&mut disk, from))
    }

    /// Has `work` use the disk of a bdev whose lvstore is not loaded.
    fn look_at<T>(
        &self,
        bdev: &str,
        what: &str,
        work: impl FnOnce(BdevDisk) -> Result<T, StoreError>,
    ) -> Result<T, Error> {
        let op = format!("{what} the lvstore on bdev {bdev}");
        let claim = self.shared.claim(bdev, &format!("on {bdev}"), &op)?;
        let failed = |cause: String| Error::Io { op: op.clone(), cause };
        let disk = BdevDisk::open(claim.bdev()).map_err(|e| failed(e.to_string()))?;
        work(disk).map_err(|e| match e {
            StoreError::Data(e) | StoreError::Metadata(e) => failed(e.to_string()),
            e => not_loaded(e, bdev),
        })
    }
}
