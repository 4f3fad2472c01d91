//! What is done with one volume of an lvstore: made, grown, renamed, deleted.

use super::Lvs;
use super::encryption::not_reserved;
use super::turns::Turn;
use crate::encryption::{ENCRYPTION_XATTR, Encryption};
use crate::error::Error;
use crate::info::{LvolInfo, LvolOptions};
use crate::meta::Meta;
use crate::translate::refused;
use crate::volume::Volume;
use crate::zeroing::Guard;
use bdev::ProtectionType;
use blobstore::{BlobOptions, Dif, DifType, Reservation, StoreInfo};
use protection::{Area, Layout};
use std::sync::Arc;
use std::time::Duration;
use uuid::Uuid;

impl Lvs {
    pub fn create_lvol(&self, options: &LvolOptions) -> Result<LvolInfo, Error> {
        let alias = format!("{}/{}", self.name(), options.name);
        let op = format!("create lvol {alias}");
        not_reserved(&op, options.xattrs.keys())?;
        let mut xattrs = options.xattrs.clone();
        if let Some(key) = &options.key {
            let check = key
                .check()
                .map_err(|e| Error::BadParameter { op: op.clone(), why: e.to_string() })?;
            let encryption = Encryption { key: key.name().to_owned(), check };
            xattrs.insert(ENCRYPTION_XATTR.to_owned(), encryption.to_xattr());
        }
        let turn = self.turn(&op)?;
        let uuid = options.uuid.unwrap_or_else(Uuid::new_v4);
        for key in [&alias, &uuid.to_string()] {
            if self.registry.get(key).is_some() {
                return Err(Error::AlreadyExists { what: format!("lvol {key}") });
            }
        }
        self.not_zeroing(&op, &[&options.name, &uuid.to_string()])?;
        let (dif, layout) = self.dif(&op, options)?;
        let size = self.clusters(&op, options.size)?;
        let size = layout.map_or(size, |layout| layout.clusters(size));
        let (name, thin) = (options.name.clone(), options.thin);
        let blob = BlobOptions { name, uuid, size, thin, dif, xattrs };
        let cluster_size = self.info.cluster_size;
        let reserved = {
            let (op, blob) = (op.clone(), blob.clone());
            self.meta(&op.clone(), move |meta| {
                let store = meta.store(&op)?;
                store.check_create(&blob).map_err(|e| refused(e, &op, cluster_size))?;
                meta.reserve(&op, if blob.thin { 0 } else { blob.size })
            })?
        };
        let zeroing = self.zeroings.begin(alias, options.name.clone(), uuid);
        let (reserved, turn) = self.zero(&op, &zeroing, reserved, turn)?;
        let (base, info) = (self.base.clone(), self.info.clone());
        let (job_op, lvstore) = (op.clone(), self.name());
        // What was zeroed is worth a wait.
        let timeout = if blob.thin { self.timeout } else { Duration::MAX };
        let volume = self.meta_within(timeout, &op, move |meta| {
            let say = |e| refused(e, &job_op, cluster_size);
            let thread = meta.thread.clone();
            let (store, reserved) = meta.own(&job_op, reserved)?;
            let id = store.create_reserved(&blob, reserved).map_err(say)?;
            let blob = store.blob(id).map_err(say)?;
            let info = StoreInfo { name: lvstore, ..info };
            let volume = Volume::of_blob(store, &info, &blob, &base, &thread);
            meta.add_volume(volume.clone());
            meta.relate(&volume);
            Ok(volume)
        })?;
        if let Err(e) = self.register(&volume) {
            self.meta_within(Duration::MAX, &op.clone(), move |meta| meta.delete(&op, &volume))?;
            return Err(e);
        }
        let info = self.volume_info(&volume);
        self.volumes.lock().insert(uuid, volume);
        drop(turn);
        Ok(info)
    }

    /// Zeroes what was reserved, with the turn of other operations meanwhile. Where there is nothing
    /// to zero the turn is kept.
    fn zero<'a>(
        &'a self,
        op: &str,
        zeroing: &Guard<'_>,
        reserved: Reservation,
        turn: Turn<'a>,
    ) -> Result<(Reservation, Turn<'a>), Error> {
        let turn = if reserved.runs().is_empty() {
            Some(turn)
        } else {
            drop(turn);
            None
        };
        let zeroed = zeroing.write(op, &self.base, self.info.cluster_size, reserved.runs());
        let turn = turn.or_else(|| self.control.take(Duration::MAX));
        match (zeroed, turn) {
            (Ok(()), Some(turn)) => Ok((reserved, turn)),
            (zeroed, _) => {
                let unreserve = move |meta: &mut Meta| {
                    meta.unreserve(reserved);
                    Ok(())
                };
                let _ = self.meta_within(Duration::MAX, op, unreserve);
                Err(zeroed.err().unwrap_or_else(|| self.waiting(op)))
            }
        }
    }

    pub fn delete_lvol(&self, volume: &Arc<Volume>) -> Result<(), Error> {
        let op = format!("delete lvol {}", volume.alias());
        let _turn = self.turn(&op)?;
        self.not_zeroing(&op, &[&volume.id.uuid.to_string()])?;
        self.not_shared(&op, volume)?;
        self.hide(&op, volume)?;
        let deleted = {
            let (op, volume) = (op.clone(), volume.clone());
            self.meta(&op.clone(), move |meta| meta.delete(&op, &volume))
        };
        if let Err(e) = deleted {
            // It is still there, as far as anybody knows: its data can be read.
            self.register(volume)?;
            return Err(e);
        }
        self.volumes.lock().remove(&volume.id.uuid);
        Ok(())
    }

    /// Returns whether the size changed.
    pub fn resize_lvol(&self, volume: &Arc<Volume>, size: u64) -> Result<bool, Error> {
        let op = format!("resize lvol {} to {size} bytes", volume.alias());
        let turn = self.turn(&op)?;
        let uuid = volume.id.uuid;
        self.not_zeroing(&op, &[&uuid.to_string()])?;
        let clusters = self.clusters(&op, size)?;
        let clusters = volume.id.dif.map_or(clusters, |(_, layout)| layout.clusters(clusters));
        let before = volume.size();
        if size > before {
            self.forget_tuples(&op, volume)?;
        }
        let (blob, cluster_size, job_op) = (volume.blob(), self.info.cluster_size, op.clone());
        let reserved = self.meta(&op, move |meta| {
            let needed = meta.store(&job_op)?.check_resize(blob, clusters);
            let needed = needed.map_err(|e| refused(e, &job_op, cluster_size))?;
            meta.reserve(&job_op, needed)
        })?;
        let zeroing = self.zeroings.begin(volume.alias(), volume.names().lvol, uuid);
        let (reserved, turn) = self.zero(&op, &zeroing, reserved, turn)?;
        let job = volume.clone();
        self.meta_within(Duration::MAX, &op.clone(), move |meta| {
            meta.resize(&op, &job, clusters, reserved)
        })?;
        if volume.size() < before {
            let lvol = self.lvol_of(volume);
            lvol.iter().filter_map(|lvol| lvol.area()).for_each(Area::shrunk);
        }
        drop(turn);
        Ok(volume.size() != before)
    }

    pub fn rename_lvol(&self, volume: &Arc<Volume>, new_name: &str) -> Result<(), Error> {
        let op = format!("rename lvol {} to {new_name}", volume.alias());
        let _turn = self.turn(&op)?;
        let alias = format!("{}/{new_name}", self.name());
        self.not_zeroing(&op, &[new_name, &volume.id.uuid.to_string()])?;
        if let Some(other) = self.registry.get(&alias)
            && other.uuid() != volume.id.uuid
        {
            return Err(Error::AlreadyExists { what: format!("lvol {alias}") });
        }
        let (job, name) = (volume.blob(), new_name.to_owned());
        let cluster_size = self.info.cluster_size;
        self.meta(&op.clone(), move |meta| {
            meta.store(&op)?.rename(job, &name).map_err(|e| refused(e, &op, cluster_size))
        })?;
        volume.rename(|names| names.lvol = new_name.to_owned());
        Ok(())
    }

    pub fn set_read_only(&self, volume: &Arc<Volume>) -> Result<(), Error> {
        let op = format!("make lvol {} read-only", volume.alias());
        let _turn = self.turn(&op)?;
        self.not_zeroing(&op, &[&volume.id.uuid.to_string()])?;
        if volume.is_read_only() {
            return Ok(());
        }
        self.hide(&op, volume)?;
        let (job, cluster_size) = (volume.blob(), self.info.cluster_size);
        let done = self.meta(&op.clone(), move |meta| {
            meta.store(&op)?.set_read_only(job).map_err(|e| refused(e, &op, cluster_size))
        });
        if done.is_ok() {
            volume.set_read_only();
            volume.bump();
        }
        self.register(volume)?;
        done
    }

    /// Refuses while a volume of one of these names or UUIDs is being zeroed.
    pub(super) fn not_zeroing(&self, op: &str, ids: &[&str]) -> Result<(), Error> {
        let found = ids.iter().find_map(|id| self.zeroings.find(id));
        found.map_or(Ok(()), |zeroing| Err(zeroing.underway(op)))
    }

    /// Cancels the creation or growth of a volume; `false`: there is none under way.
    pub fn cancel(&self, lvol: &str) -> bool {
        let found = self.zeroings.find(lvol);
        found.as_ref().inspect(|zeroing| zeroing.cancel()).is_some()
    }

    /// What a volume of these options has of protection information of its own.
    fn dif(&self, op: &str, options: &LvolOptions) -> Result<(Option<Dif>, Option<Layout>), Error> {
        let Some(kind) = options.dif_type else { return Ok((None, None)) };
        if self.base.protection().is_some() && options.key.is_none() {
            let why = format!(
                "bdev {} has protection information, which its lvols have as well; leave the type out",
                self.base.name()
            );
            return Err(Error::BadParameter { op: op.to_owned(), why });
        }
        let kind = match kind {
            ProtectionType::Type1 => DifType::Type1,
            ProtectionType::Type3 => DifType::Type3,
        };
        let block_size = self.base.geometry().block_size;
        let layout = Layout::new(block_size, self.info.cluster_size);
        Ok((Some(Dif { kind, large_blocks: block_size == 4096 }), Some(layout)))
    }

    /// Has a volume that grows have no tuples of blocks that it had, before it was made smaller.
    fn forget_tuples(&self, op: &str, volume: &Volume) -> Result<(), Error> {
        if volume.id.dif.is_none() {
            return Ok(());
        }
        let lvol = self.lvol_of(volume);
        let Some(area) = lvol.as_ref().and_then(|lvol| lvol.area()) else {
            let why = "it keeps protection information itself, which has to be changed, and is no bdev now: \
                       its key is missing, or the lvstore's bdev has blocks of another size"
                .to_owned();
            return Err(Error::BadParameter { op: op.to_owned(), why });
        };
        area.forget_beyond().map_err(|e| Error::Io { op: op.to_owned(), cause: e.to_string() })
    }

    /// Whole clusters for a size in bytes.
    fn clusters(&self, op: &str, size: u64) -> Result<u64, Error> {
        if size == 0 {
            let why = "a size of 0 bytes is not possible; give the size that is needed".into();
            return Err(Error::BadParameter { op: op.to_owned(), why });
        }
        Ok(size.div_ceil(u64::from(self.info.cluster_size)))
    }
}
