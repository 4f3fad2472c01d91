//! Lvols with keys of their own, of all lvstores.

use super::Lvstores;
use crate::encryption::Encrypted;
use crate::error::Error;

impl Lvstores {
    /// A key is here: the lvols that waited for it become bdevs.
    ///
    /// # Errors
    /// [`Error::Waiting`]; the lvols of other lvstores are bdevs all the same.
    pub fn key_comes(&self, key: &str) -> Result<(), Error> {
        let stores = self.shared.stores.lock().clone();
        stores.iter().map(|lvs| lvs.key_comes(key)).fold(Ok(()), Result::and)
    }

    /// The lvols that are encrypted with keys of their own.
    pub fn encrypted(&self) -> Vec<Encrypted> {
        let stores = self.shared.stores.lock().clone();
        stores.iter().flat_map(|lvs| lvs.encrypted().collect::<Vec<_>>()).collect()
    }

    /// The name of the key that an lvol (UUID or `LVSTORE/LVOL`) waits for, if it does.
    pub fn awaited_key(&self, lvol: &str) -> Option<String> {
        let (lvs, volume) = self.shared.find_lvol(lvol).ok()?;
        let encryption = volume.id.encryption.as_ref()?;
        lvs.waits_for_key(&volume).then(|| encryption.key.clone())
    }
}
