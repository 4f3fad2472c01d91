//! Volumes of an lvstore with keys of their own: registered when these come.

use super::Lvs;
use crate::encryption::{ENCRYPTION_XATTR, Encrypted};
use crate::error::Error;
use crate::volume::Volume;
use blobstore::HistoryOptions;

impl Lvs {
    /// A key is here: the lvols that waited for it become bdevs.
    pub fn key_comes(&self, key: &str) -> Result<(), Error> {
        let with_it = |volume: &Volume| volume.id.encryption.as_ref().is_some_and(|e| e.key == key);
        let volumes: Vec<_> = self.volumes().into_iter().filter(|v| with_it(v)).collect();
        if volumes.is_empty() {
            return Ok(());
        }
        let _turn = self.turn(&format!("show the lvols with key {key}"))?;
        let waiting = volumes.iter().filter(|volume| self.waits_for_key(volume));
        waiting.map(|volume| self.register(volume)).fold(Ok(()), Result::and)
    }

    /// Whether a volume is no bdev because its key is not here.
    pub fn waits_for_key(&self, volume: &Volume) -> bool {
        volume.id.encryption.is_some() && self.registry.get(&volume.name).is_none()
    }

    /// The volumes that are encrypted.
    pub fn encrypted(&self) -> impl Iterator<Item = Encrypted> + '_ {
        self.volumes().into_iter().filter_map(|volume| {
            let encryption = volume.id.encryption.clone()?;
            let waits = self.waits_for_key(&volume);
            Some(Encrypted { alias: volume.alias(), encryption, waits })
        })
    }

    /// Gives what shows the data of `volume` the same key.
    pub(super) fn inherit_key(&self, volume: &Volume, options: &mut HistoryOptions) {
        if let Some(encryption) = &volume.id.encryption {
            options.xattrs.insert(ENCRYPTION_XATTR.to_owned(), encryption.to_xattr());
        }
    }

    /// Refuses `op` where two volumes do not keep the same protection information themselves: their clusters
    /// do not mean the same.
    pub fn same_dif(&self, op: &str, one: &Volume, other: &Volume) -> Result<(), Error> {
        if one.id.dif == other.id.dif {
            return Ok(());
        }
        let why = "they do not both keep protection information of the same type themselves, and so have \
                   their data at other places; choose two that do"
            .to_owned();
        Err(Error::BadParameter { op: op.to_owned(), why })
    }

    /// Refuses `op` where two volumes do not have the same key, or not both have none; so with protection
    /// information that they keep themselves.
    pub(super) fn same_key(&self, op: &str, one: &Volume, other: &Volume) -> Result<(), Error> {
        self.same_dif(op, one, other)?;
        if one.id.encryption == other.id.encryption {
            return Ok(());
        }
        let why = "they are not encrypted with the same key, so that one would read the other's \
                   data wrongly"
            .to_owned();
        Err(Error::BadParameter { op: op.to_owned(), why })
    }
}

/// Refuses xattrs that say which key an lvol has: these are not the caller's.
pub(crate) fn not_reserved<'a>(
    op: &str,
    names: impl IntoIterator<Item = &'a String>,
) -> Result<(), Error> {
    match names.into_iter().any(|name| name == ENCRYPTION_XATTR) {
        false => Ok(()),
        true => {
            let why = format!("xattr {ENCRYPTION_XATTR} says with which key an lvol was created");
            Err(Error::BadParameter { op: op.to_owned(), why })
        }
    }
}
