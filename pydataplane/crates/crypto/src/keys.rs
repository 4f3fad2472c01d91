//! All keys of the process, by name.

use crate::{Key, KeyError};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

/// All keys. Cheap to clone; every clone is the same.
#[derive(Clone, Default)]
pub struct Keys(Arc<Mutex<BTreeMap<String, Arc<Key>>>>);

impl Keys {
    /// Adds a key.
    ///
    /// # Errors
    /// [`KeyError::Exists`].
    pub fn add(&self, key: Key) -> Result<Arc<Key>, KeyError> {
        let mut keys = self.0.lock();
        if keys.contains_key(key.name()) {
            return Err(KeyError::Exists(key.name().to_owned()));
        }
        let key = Arc::new(key);
        keys.insert(key.name().to_owned(), key.clone());
        Ok(key)
    }

    /// The key of that name; as long as it is held it is in use.
    ///
    /// # Errors
    /// [`KeyError::NotFound`].
    pub fn get(&self, name: &str) -> Result<Arc<Key>, KeyError> {
        self.0.lock().get(name).cloned().ok_or_else(|| KeyError::NotFound(name.to_owned()))
    }

    /// All keys, in the order of their names, each in use as long as it is held.
    pub fn list(&self) -> Vec<Arc<Key>> {
        self.0.lock().values().cloned().collect()
    }

    /// Wipes the key of that name.
    ///
    /// # Errors
    /// [`KeyError::NotFound`]; [`KeyError::InUse`], and nothing changed.
    pub fn destroy(&self, name: &str) -> Result<(), KeyError> {
        let mut keys = self.0.lock();
        let key = keys.get(name).ok_or_else(|| KeyError::NotFound(name.to_owned()))?;
        // Nobody can take it meanwhile: that needs the lock.
        if Arc::strong_count(key) > 1 {
            return Err(KeyError::InUse(name.to_owned()));
        }
        keys.remove(name);
        Ok(())
    }

    /// Wipes the key of that name if it is to go with the last bdev that uses it, and none does any
    /// more; whether it did.
    pub fn destroy_unused(&self, name: &str) -> bool {
        let goes = self.get(name).is_ok_and(|key| key.goes_with_last());
        goes && self.destroy(name).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str, with_last: bool) -> Key {
        Key::from_hex(name, &"01".repeat(32), &"02".repeat(32), with_last).unwrap()
    }

    #[test]
    fn a_key_stays_while_it_is_used() {
        let keys = Keys::default();
        assert_eq!(keys.get("k").unwrap_err(), KeyError::NotFound("k".into()));
        let used = keys.add(key("k", true)).unwrap();
        assert_eq!(keys.add(key("k", false)).unwrap_err(), KeyError::Exists("k".into()));
        assert_eq!(keys.destroy("k").unwrap_err(), KeyError::InUse("k".into()));
        assert!(!keys.destroy_unused("k"));
        drop(used);
        keys.add(key("other", false)).unwrap();
        assert!(!keys.destroy_unused("other") && keys.destroy_unused("k"));
        let left: Vec<_> = keys.list().iter().map(|key| key.name().to_owned()).collect();
        assert_eq!(left, ["other"]);
        keys.destroy("other").unwrap();
        assert_eq!(keys.destroy("other").unwrap_err(), KeyError::NotFound("other".into()));
    }
}
