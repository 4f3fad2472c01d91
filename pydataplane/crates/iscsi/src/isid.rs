//! The initiator's part of a session's identifier (RFC 7143 11.12.5).

use std::fmt;

use uuid::Uuid;

use crate::address::Address;

/// See the file's comment: of the random kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isid(pub(crate) [u8; 5]);

impl Isid {
    /// That of a device: the same whenever it is made, so that it ends a session that is left of it.
    pub fn of(initiator: &str, address: &Address, name: &str) -> Isid {
        let text = format!("{initiator}\0{address}\0{name}");
        let [a, b, c, d, e, ..] = *Uuid::new_v5(&Uuid::NAMESPACE_OID, text.as_bytes()).as_bytes();
        Isid([a, b, c, d, e])
    }

    /// One that nobody else has, as far as that can be said.
    pub fn random() -> Isid {
        let [a, b, c, d, e, ..] = *Uuid::new_v4().as_bytes();
        Isid([a, b, c, d, e])
    }

    /// Reads what [`Isid::to_string`] gives.
    pub fn parse(text: &str) -> Option<Isid> {
        let digits =
            text.strip_prefix("80").filter(|digits| digits.len() == 10 && digits.is_ascii())?;
        let mut isid = [0; 5];
        for (byte, at) in isid.iter_mut().zip((0..10).step_by(2)) {
            *byte = u8::from_str_radix(&digits[at..at + 2], 16).ok()?;
        }
        Some(Isid(isid))
    }
}

impl fmt::Display for Isid {
    /// Twelve hexadecimal digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("80")?;
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identifier_is_twelve_digits_of_the_random_kind() {
        let isid = Isid([0, 1, 0xab, 0xff, 9]);
        assert_eq!(isid.to_string(), "800001abff09");
        assert_eq!(Isid::parse("800001abff09"), Some(isid));
        for wrong in ["", "800001abff", "400001abff09", "800001abfg09", "800001abff0900"] {
            assert_eq!(Isid::parse(wrong), None, "{wrong}");
        }
        assert_ne!(Isid::random(), Isid::random());
        let address = |url| Address::parse(url).unwrap();
        let of = Isid::of("i", &address("iscsi://me%one@h/t/1"), "a");
        assert_eq!(Isid::of("i", &address("iscsi://me%two@h/t/1"), "a"), of);
        assert_ne!(Isid::of("i", &address("iscsi://me%one@h/t/2"), "a"), of);
        assert_ne!(Isid::of("j", &address("iscsi://me%one@h/t/1"), "a"), of);
        assert_ne!(Isid::of("i", &address("iscsi://me%one@h/t/1"), "b"), of);
    }
}
