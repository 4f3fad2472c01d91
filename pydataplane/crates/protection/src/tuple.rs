//! The protection information of one block.

use bdev::{Checks, IoError, ProtectionType, TUPLE_LEN};
use crc_fast::CrcAlgorithm;

/// An application tag by which a block is not checked.
const ESCAPE: u16 = 0xFFFF;

/// The protection information of one block (SBC-4 4.22.2), all of it big-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuple {
    /// LOGICAL BLOCK GUARD: CRC of the data.
    pub guard: u16,
    /// LOGICAL BLOCK APPLICATION TAG.
    pub app_tag: u16,
    /// LOGICAL BLOCK REFERENCE TAG.
    pub ref_tag: u32,
}

/// What of a tuple is not as it should be. Where several are, the first of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mismatch {
    /// The guard is not that of the data.
    Guard,
    /// The application tag is another one.
    AppTag,
    /// The reference tag is another block's.
    RefTag,
}

impl From<Mismatch> for IoError {
    fn from(mismatch: Mismatch) -> IoError {
        match mismatch {
            Mismatch::Guard => IoError::Guard,
            Mismatch::AppTag => IoError::AppTag,
            Mismatch::RefTag => IoError::RefTag,
        }
    }
}

/// The guard of `data`: CRC-16 with the polynomial 8BB7h, from 0, no bit reflected (SBC-4 4.22.3).
#[inline]
pub fn guard(data: &[u8]) -> u16 {
    crc_fast::checksum(CrcAlgorithm::Crc16T10Dif, data) as u16
}

impl Tuple {
    /// That of a block that was never written, or was unmapped (SBC-4 4.22.2).
    pub const UNWRITTEN: Tuple = Tuple { guard: !0, app_tag: ESCAPE, ref_tag: !0 };

    /// That of block `lba` with `data`, which came without one. The application tag is 0, unless another one is known
    /// ([`bdev::AppTags`]), and no escape, as SBC-4 has it, so that these blocks are checked as well.
    #[inline]
    pub fn of(kind: ProtectionType, lba: u64, data: &[u8]) -> Tuple {
        let ref_tag = match kind {
            ProtectionType::Type1 => lba as u32,
            ProtectionType::Type3 => !0,
        };
        Tuple { guard: guard(data), app_tag: 0, ref_tag }
    }

    /// As it is for block `lba`, of [`bdev::Tuples::Like`].
    #[inline]
    pub fn at(self, kind: ProtectionType, lba: u64) -> Tuple {
        match kind {
            ProtectionType::Type1 => {
                Tuple { ref_tag: self.ref_tag.wrapping_add(lba as u32), ..self }
            }
            ProtectionType::Type3 => self,
        }
    }

    /// What is [`Tuple::at`] block `lba` this one.
    #[inline]
    pub fn like(self, kind: ProtectionType, lba: u64) -> Tuple {
        match kind {
            ProtectionType::Type1 => {
                Tuple { ref_tag: self.ref_tag.wrapping_sub(lba as u32), ..self }
            }
            ProtectionType::Type3 => self,
        }
    }

    /// What is block `from` in it, made block `to`: a reference tag that is wrong stays as wrong as it is. So
    /// does that of a block which is not to be checked, as it is.
    #[inline]
    pub fn moved(self, kind: ProtectionType, from: u64, to: u64) -> Tuple {
        match kind {
            ProtectionType::Type1 if !self.escapes(kind) => {
                let by = (to as u32).wrapping_sub(from as u32);
                Tuple { ref_tag: self.ref_tag.wrapping_add(by), ..self }
            }
            ProtectionType::Type1 | ProtectionType::Type3 => self,
        }
    }

    /// As it lies behind the block, or in a list of tuples.
    #[inline]
    pub fn from_bytes(bytes: [u8; TUPLE_LEN]) -> Tuple {
        let [g0, g1, a0, a1, r0, r1, r2, r3] = bytes;
        Tuple {
            guard: u16::from_be_bytes([g0, g1]),
            app_tag: u16::from_be_bytes([a0, a1]),
            ref_tag: u32::from_be_bytes([r0, r1, r2, r3]),
        }
    }

    /// The other way.
    #[inline]
    pub fn to_bytes(self) -> [u8; TUPLE_LEN] {
        let [g0, g1] = self.guard.to_be_bytes();
        let [a0, a1] = self.app_tag.to_be_bytes();
        let [r0, r1, r2, r3] = self.ref_tag.to_be_bytes();
        [g0, g1, a0, a1, r0, r1, r2, r3]
    }

    /// Whether the block is not to be checked: its application tag says so, with type 3 together with the
    /// reference tag.
    #[inline]
    pub fn escapes(&self, kind: ProtectionType) -> bool {
        self.app_tag == ESCAPE
            && match kind {
                ProtectionType::Type1 => true,
                ProtectionType::Type3 => self.ref_tag == !0,
            }
    }

    /// Compares it with block `lba` that has `data`.
    #[inline]
    pub fn check(
        &self,
        kind: ProtectionType,
        checks: Checks,
        lba: u64,
        data: &[u8],
    ) -> Result<(), Mismatch> {
        if self.escapes(kind) {
            return Ok(());
        }
        if checks.guard && self.guard != guard(data) {
            return Err(Mismatch::Guard);
        }
        if checks.app_tag.is_some_and(|tag| tag != self.app_tag) {
            return Err(Mismatch::AppTag);
        }
        match kind {
            ProtectionType::Type1 if checks.reference && self.ref_tag != lba as u32 => {
                Err(Mismatch::RefTag)
            }
            ProtectionType::Type1 | ProtectionType::Type3 => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ProtectionType::{Type1, Type3};
    use proptest::prelude::*;

    /// The CRC bit by bit, as SBC-4 4.22.3 has it.
    fn bitwise(data: &[u8]) -> u16 {
        data.iter().fold(0, |crc, byte| {
            (0..8).fold(crc ^ (u16::from(*byte) << 8), |crc: u16, _| {
                (crc << 1) ^ if crc & 0x8000 != 0 { 0x8BB7 } else { 0 }
            })
        })
    }

    #[test]
    fn guards_are_those_of_the_standard() {
        let counting: Vec<u8> = (0..32).collect();
        let backwards: Vec<u8> = (0xE0..=0xFF).rev().collect();
        let mut two = [0; 32];
        two[..2].fill(0xFF);
        for (data, crc) in [
            (&[0; 32][..], 0x0000),
            (&[0xFF; 32], 0xA293),
            (&counting, 0x0224),
            (&two, 0x21B8),
            (&backwards, 0xA0B7),
            (b"123456789", 0xD0DB),
        ] {
            assert_eq!((guard(data), bitwise(data)), (crc, crc), "{data:02x?}");
        }
    }

    #[test]
    fn a_tuple_is_big_endian_in_order() {
        let tuple = Tuple { guard: 0x0102, app_tag: 0x0304, ref_tag: 0x0506_0708 };
        assert_eq!(tuple.to_bytes(), [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(Tuple::from_bytes(tuple.to_bytes()), tuple);
        assert_eq!(Tuple::UNWRITTEN.to_bytes(), [0xFF; 8]);
    }

    #[test]
    fn the_reference_tag_is_the_lower_half_of_the_block_number_with_type_1_alone() {
        let lba = 0x0003_8000_0001;
        let data = [7; 512];
        let one = Tuple::of(Type1, lba, &data);
        assert_eq!((one.ref_tag, one.app_tag), (0x8000_0001, 0));
        assert_eq!(one.check(Type1, Checks::ALL, lba, &data), Ok(()));
        assert_eq!(one.check(Type1, Checks::ALL, lba + 1, &data), Err(Mismatch::RefTag));
        assert_eq!(one.check(Type1, Checks::ALL, lba + (1 << 32), &data), Ok(()));
        let three = Tuple::of(Type3, lba, &data);
        assert_eq!(three.ref_tag, !0);
        assert!(!three.escapes(Type3));
        assert_eq!(three.check(Type3, Checks::ALL, lba + 1, &data), Ok(()));
        assert_eq!(three.check(Type3, Checks::ALL, lba, &[8; 512]), Err(Mismatch::Guard));
    }

    #[test]
    fn escapes_keep_a_block_from_being_checked() {
        let all = Checks { app_tag: Some(5), ..Checks::ALL };
        let escaped = Tuple { guard: 1, app_tag: 0xFFFF, ref_tag: 2 };
        assert_eq!(escaped.check(Type1, all, 9, &[3; 512]), Ok(()));
        // Type 3 needs both tags for that.
        assert_eq!(escaped.check(Type3, all, 9, &[3; 512]), Err(Mismatch::Guard));
        for kind in [Type1, Type3] {
            assert_eq!(Tuple::UNWRITTEN.check(kind, all, 9, &[3; 512]), Ok(()));
        }
    }

    #[test]
    fn only_what_is_asked_for_is_compared_and_the_first_is_told() {
        let (lba, data) = (9, [3; 512]);
        let wrong = Tuple { guard: !guard(&data), app_tag: 1, ref_tag: 8 };
        let all = Checks { app_tag: Some(2), ..Checks::ALL };
        let without = Checks { guard: false, ..all };
        let reference = Checks { app_tag: None, ..without };
        for (checks, told) in [
            (all, Err(Mismatch::Guard)),
            (without, Err(Mismatch::AppTag)),
            (reference, Err(Mismatch::RefTag)),
            (Checks::NONE, Ok(())),
            (Checks { app_tag: Some(1), ..Checks::NONE }, Ok(())),
        ] {
            assert_eq!(wrong.check(Type1, checks, lba, &data), told);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

        #[test]
        fn any_data_has_the_guard_of_the_polynomial(data in prop::collection::vec(any::<u8>(), 0..600)) {
            prop_assert_eq!(guard(&data), bitwise(&data));
        }

        /// A CRC of 16 bits finds each error of up to 16 bits in a row, and each of three bits at most in
        /// blocks of these sizes.
        #[test]
        fn what_is_damaged_is_found(
            large in any::<bool>(),
            seed in any::<u64>(),
            lba in any::<u64>(),
            at in any::<prop::sample::Index>(),
            burst in 1u16..,
        ) {
            let mut data: Vec<u8> = (0..if large { 4096u64 } else { 512 })
                .map(|i| (seed.wrapping_mul(i * 2 + 1) >> 32) as u8)
                .collect();
            for kind in [Type1, Type3] {
                let tuple = Tuple::of(kind, lba, &data);
                prop_assert_eq!(tuple.check(kind, Checks::ALL, lba, &data), Ok(()));
                prop_assert_eq!(Tuple::from_bytes(tuple.to_bytes()), tuple);
                let begin = at.index(data.len() - 1);
                let [first, second] = burst.to_be_bytes();
                data[begin] ^= first;
                data[begin + 1] ^= second;
                prop_assert_eq!(tuple.check(kind, Checks::ALL, lba, &data), Err(Mismatch::Guard));
                data[begin] ^= first;
                data[begin + 1] ^= second;
            }
        }
    }
}
