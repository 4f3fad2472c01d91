//! Lvols with a key of their own: what is noted of it in the store, and the keys that are here.
//!
//! Each block lies encrypted at its place in the lvol (crate `crypto`), so what the store does with
//! clusters, it does with encrypted ones: a snapshot or a clone has its parent's key, and no other.
//! While the key is not here, the lvol is no bdev.

use crypto::{Key, Keys};
use std::sync::Arc;

/// Xattr of an lvol that is encrypted: the name of its key, a space, and the check value of that. Lvols
/// are made with it, or without it for ever.
pub const ENCRYPTION_XATTR: &str = "virtlun.encryption";

/// Which key the data of an lvol is encrypted with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Encryption {
    /// Name of the key.
    pub key: String,
    /// Its check value, which tells it from others and nothing else of it.
    pub check: String,
}

impl Encryption {
    /// What is noted. Something else than is ever written names a key that nobody can have.
    pub(crate) fn of_xattr(value: &[u8]) -> Self {
        let text = String::from_utf8_lossy(value);
        let (key, check) = text.rsplit_once(' ').unwrap_or((&text, ""));
        Encryption { key: key.to_owned(), check: check.to_owned() }
    }

    pub(crate) fn to_xattr(&self) -> Vec<u8> {
        format!("{} {}", self.key, self.check).into_bytes()
    }

    /// The key, if it is among `keys`: another one of its name is not.
    pub(crate) fn find(&self, keys: &Keys) -> Option<Arc<Key>> {
        let key = keys.get(&self.key).ok()?;
        key.check().is_ok_and(|check| check == self.check).then_some(key)
    }
}

/// An lvol that is encrypted, with a key of its own.
#[derive(Clone, Debug)]
pub struct Encrypted {
    /// `LVSTORE/LVOL`.
    pub alias: String,
    /// Its key.
    pub encryption: Encryption,
    /// It is no bdev, as the key is not here.
    pub waits: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_noted_is_read_back_and_nothing_else_names_a_key_that_can_be() {
        let noted = Encryption { key: "a b".into(), check: "0123".into() };
        assert_eq!(Encryption::of_xattr(&noted.to_xattr()), noted);
        let keys = Keys::default();
        let key = Key::from_hex("k", &"01".repeat(32), &"02".repeat(32), false).unwrap();
        let check = key.check().unwrap();
        keys.add(key).unwrap();
        let of = |text: &str| Encryption::of_xattr(text.as_bytes()).find(&keys).is_some();
        assert!(of(&format!("k {check}")));
        for other in ["", "k", "k ", "k 0", &check, &format!("other {check}")] {
            assert!(!of(other), "{other}");
        }
    }
}
