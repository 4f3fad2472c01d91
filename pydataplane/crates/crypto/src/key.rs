//! A key: 64 or 32 secret bytes with a name.

use openssl::error::ErrorStack;
use openssl::hash::MessageDigest;
use openssl::pkey::PKey;
use openssl::sign::Signer;
use std::fmt;
use zeroize::Zeroizing;

/// Hexadecimal digits of a half of a key of AES-128 and of AES-256.
const DIGITS: [usize; 2] = [32, 64];

/// Bytes of a check value.
const CHECK_BYTES: usize = 8;

/// What a check value is computed of, with the key.
const CHECK_LABEL: &[u8] = b"virtlun key check 1";

/// Why text is no key. It never says what the text is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// Of another length.
    #[error(
        "{part} of key {name} has {digits} digits; AES_XTS takes two halves of 64 hexadecimal \
             digits (AES-256) or of 32 (AES-128)"
    )]
    Length {
        /// Name of the key.
        name: String,
        /// Which parameter.
        part: &'static str,
        /// What it has.
        digits: usize,
    },
    /// Something other than hexadecimal digits.
    #[error("{part} of key {name} is not hexadecimal")]
    Digits {
        /// Name of the key.
        name: String,
        /// Which parameter.
        part: &'static str,
    },
    /// Of two lengths.
    #[error("the two halves of key {name} are of different lengths")]
    Halves {
        /// Name of the key.
        name: String,
    },
    /// The halves are the same, which weakens XTS (NIST SP 800-38E, FIPS 140 IG C.I).
    #[error("the two halves of key {name} are the same; make a key of random digits")]
    Same {
        /// Name of the key.
        name: String,
    },
    /// There is one of that name.
    #[error("there is a key {0} already; destroy it first")]
    Exists(String),
    /// There is none of that name.
    #[error("there is no key {0}")]
    NotFound(String),
    /// A bdev uses it.
    #[error("key {0} is in use; delete the bdevs with it first")]
    InUse(String),
    /// The library does not take it.
    #[error("key {name} cannot be used: {why}")]
    Library {
        /// Name of the key.
        name: String,
        /// What the library says.
        why: String,
    },
}

/// A key of AES-XTS, wiped when it is dropped.
pub struct Key {
    name: String,
    /// The key of the data, then the key of the tweaks.
    secret: Zeroizing<Vec<u8>>,
    with_last: bool,
}

impl Key {
    /// The key `name` of its two halves in hexadecimal. With `with_last` it goes with the last bdev
    /// that uses it.
    ///
    /// # Errors
    /// [`KeyError`], which says nothing of the digits.
    pub fn from_hex(name: &str, data: &str, tweak: &str, with_last: bool) -> Result<Key, KeyError> {
        let mut secret = Zeroizing::new(Vec::with_capacity(DIGITS[1]));
        for (part, text) in [("key", data), ("key2", tweak)] {
            if !DIGITS.contains(&text.len()) {
                let (name, digits) = (name.to_owned(), text.chars().count());
                return Err(KeyError::Length { name, part, digits });
            }
            for pair in text.as_bytes().chunks_exact(2) {
                let digit = |of: u8| char::from(of).to_digit(16);
                let Some((high, low)) = digit(pair[0]).zip(digit(pair[1])) else {
                    return Err(KeyError::Digits { name: name.to_owned(), part });
                };
                secret.push((high << 4 | low) as u8);
            }
        }
        if data.len() != tweak.len() {
            return Err(KeyError::Halves { name: name.to_owned() });
        }
        Key::from_bytes(name, secret, with_last)
    }

    /// The key `name` of its bytes, those for the data first.
    ///
    /// # Errors
    /// As [`Key::from_hex`].
    pub fn from_bytes(
        name: &str,
        secret: Zeroizing<Vec<u8>>,
        with_last: bool,
    ) -> Result<Key, KeyError> {
        if !DIGITS.contains(&secret.len()) {
            let (name, digits) = (name.to_owned(), secret.len());
            return Err(KeyError::Length { name, part: "the whole", digits });
        }
        let (data, tweak) = secret.split_at(secret.len() / 2);
        if openssl::memcmp::eq(data, tweak) {
            return Err(KeyError::Same { name: name.to_owned() });
        }
        Ok(Key { name: name.to_owned(), secret, with_last })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it goes with the last bdev that uses it.
    pub fn goes_with_last(&self) -> bool {
        self.with_last
    }

    /// The secret: the key of the data, then that of the tweaks.
    pub fn secret(&self) -> &[u8] {
        &self.secret
    }

    /// Bits of each half, as in the cipher's name: 128 or 256.
    pub fn bits(&self) -> usize {
        self.secret.len() / 2 * 8
    }

    /// A value by which another key is told from this one, as 16 hexadecimal digits: the first 64 bits
    /// of HMAC-SHA-256 (RFC 2104) of a constant with the key. Nothing of a random key follows from it,
    /// so it may be recorded; two bdevs with the same key have the same one.
    ///
    /// # Errors
    /// [`KeyError::Library`].
    pub fn check(&self) -> Result<String, KeyError> {
        let mac = || -> Result<Vec<u8>, ErrorStack> {
            let key = PKey::hmac(&self.secret)?;
            Signer::new(MessageDigest::sha256(), &key)?.sign_oneshot_to_vec(CHECK_LABEL)
        };
        let mac = mac().map_err(|e| self.library(&e))?;
        Ok(mac[..CHECK_BYTES].iter().map(|byte| format!("{byte:02x}")).collect())
    }

    pub(crate) fn library(&self, e: &ErrorStack) -> KeyError {
        KeyError::Library { name: self.name.clone(), why: e.to_string() }
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Key").field(&self.name).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn halves(digits: usize) -> (String, String) {
        ("0123456789abcdef".repeat(digits / 16), "FEDCBA9876543210".repeat(digits / 16))
    }

    #[test]
    fn text_becomes_a_key_and_nothing_shows_it() {
        for (digits, bits) in [(32, 128), (64, 256)] {
            let (data, tweak) = halves(digits);
            let key = Key::from_hex("k", &data, &tweak, false).unwrap();
            assert_eq!((key.bits(), key.secret().len()), (bits, digits));
            assert_eq!(key.secret()[..3], [0x01, 0x23, 0x45]);
            assert_eq!(key.secret()[digits / 2..][..3], [0xfe, 0xdc, 0xba]);
            assert_eq!(format!("{key:?}"), "Key(\"k\")");
        }
    }

    #[test]
    fn what_is_no_key_is_refused_without_being_shown() {
        let (data, tweak) = halves(64);
        let why = |data: &str, tweak: &str| Key::from_hex("k", data, tweak, false).unwrap_err();
        let of = |data: &str, tweak: &str| why(data, tweak).to_string();
        assert!(of(&data[1..], &tweak).starts_with("key of key k has 63 digits"));
        assert!(of(&data, "").starts_with("key2 of key k has 0 digits"));
        assert_eq!(of(&data, &tweak[..32]), "the two halves of key k are of different lengths");
        let odd = format!("{}xy", &tweak[..62]);
        assert_eq!(of(&data, &odd), "key2 of key k is not hexadecimal");
        let wide = format!("{}\u{e9}", &tweak[..62]);
        assert_eq!(of(&data, &wide), "key2 of key k is not hexadecimal");
        let same = data.to_uppercase();
        assert!(matches!(why(&data, &same), KeyError::Same { .. }));
        for e in [of(&data[1..], &tweak), of(&data, &odd), of(&data, &same)] {
            assert!(!e.contains("0123") && !e.contains("FEDC"), "{e}");
        }
    }

    #[test]
    fn the_check_value_tells_keys_apart() {
        let (data, tweak) = halves(64);
        let check = |a: &str, b: &str| Key::from_hex("k", a, b, false).unwrap().check().unwrap();
        let own = check(&data, &tweak);
        // Computed with Python's hmac and hashlib.
        assert_eq!(own, "2e508827e2398cef");
        assert_eq!(own, check(&data.to_uppercase(), &tweak));
        assert_ne!(own, check(&tweak, &data));
        assert_ne!(own, check(&data[..32], &tweak[..32]));
    }
}
