//! Bdevs whose blocks have protection information: the parameters that ask for them, and how they are shown.

use bdev::{Bdev, Protection, ProtectionType, TUPLE_LEN};
use protection::ProtectedDisk;
use rpc::{Errno, Error};
use schemars::JsonSchema;
use serde::Serialize;
use std::sync::Arc;

/// What a method's parameters ask for, as SPDK names them.
#[derive(Default)]
pub(super) struct Asked {
    pub(super) md_size: Option<u32>,
    pub(super) md_interleave: Option<bool>,
    pub(super) dif_type: Option<i32>,
    pub(super) dif_is_head_of_md: Option<bool>,
    pub(super) dif_pi_format: Option<u32>,
}

impl Asked {
    /// The protection information of the blocks, if they are to have any.
    pub(super) fn checked(&self, method: &str) -> Result<Option<Protection>, Error> {
        let (size, kind) = (self.md_size.unwrap_or(0), self.dif_type.unwrap_or(0));
        let interleaved = self.md_interleave.unwrap_or(false);
        let at_head = self.dif_is_head_of_md.unwrap_or(false);
        let format = self.dif_pi_format.unwrap_or(0);
        let (errno, why) = match (size, kind) {
            (0, 0) if interleaved || at_head || format != 0 => (
                Errno::Inval,
                "asks how metadata is laid out, but \"md_size\" and \"dif_type\" are 0",
            ),
            (0, 0) => return Ok(None),
            (8, 1 | 3) if format == 0 => {
                let kind = if kind == 1 { ProtectionType::Type1 } else { ProtectionType::Type3 };
                return Ok(Some(Protection { kind, interleaved, at_head }));
            }
            (8, 1 | 3) => (Errno::NotSup, "has guards of 16 bits only: \"dif_pi_format\" is 0"),
            (8, 2) => (
                Errno::NotSup,
                "has no \"dif_type\" 2, which takes commands of 32 bytes: 1 and 3 are there",
            ),
            (_, 0) => {
                (Errno::NotSup, "has metadata only for protection information: \"dif_type\" 1 or 3")
            }
            (0, _) => (Errno::Inval, "has \"dif_type\" only together with \"md_size\" 8"),
            (8, _) => (Errno::Inval, "takes 0, 1 or 3 as \"dif_type\""),
            _ => (Errno::NotSup, "has no \"md_size\" but 8, the bytes of protection information"),
        };
        Err(Error::os(errno, format_args!("{method} {why}")))
    }
}

/// The number of a type.
pub(super) fn type_of(kind: ProtectionType) -> u8 {
    match kind {
        ProtectionType::Type1 => 1,
        ProtectionType::Type3 => 3,
    }
}

/// Bytes of metadata of a block with it.
pub(super) fn bytes_of(protection: Option<Protection>) -> u32 {
    protection.map_or(0, |_| TUPLE_LEN as u32)
}

/// `bdev`, or the one that shows its blocks without their protection information.
pub(super) fn shown(bdev: Arc<dyn Bdev>, protection: Option<Protection>) -> Arc<dyn Bdev> {
    match protection {
        None => bdev,
        Some(protection) => ProtectedDisk::new(bdev, protection),
    }
}

/// What SPDK says of the metadata of a bdev that has some.
#[derive(Serialize, JsonSchema)]
pub(super) struct Metadata {
    /// Bytes of a block's metadata.
    md_size: u32,
    /// It lies behind the block's data, and block_size is of both.
    md_interleave: bool,
    /// Type of its protection information: 1 or 3.
    dif_type: u8,
    dif_is_head_of_md: bool,
    enabled_dif_check_types: CheckTypes,
    dif_pi_format: u8,
}

/// What is compared when a block is read or written.
#[derive(Serialize, JsonSchema)]
struct CheckTypes {
    reftag: bool,
    apptag: bool,
    guard: bool,
}

impl Metadata {
    pub(super) fn of(bdev: &dyn Bdev) -> Option<Metadata> {
        let protection = bdev.protection()?;
        let first = protection.kind == ProtectionType::Type1;
        Some(Metadata {
            md_size: TUPLE_LEN as u32,
            md_interleave: protection.interleaved,
            dif_type: type_of(protection.kind),
            dif_is_head_of_md: protection.at_head,
            enabled_dif_check_types: CheckTypes { reftag: first, apptag: false, guard: true },
            dif_pi_format: 0,
        })
    }

    /// Bytes by which SPDK's block_size is more than the data of a block.
    pub(super) fn in_block(&self) -> u32 {
        if self.md_interleave { self.md_size } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_protection_information_of_types_1_and_3_is_metadata() {
        let asked = |md_size, dif_type| Asked {
            md_size: Some(md_size),
            dif_type: Some(dif_type),
            md_interleave: Some(true),
            ..Asked::default()
        };
        let kind = |asked: Asked| asked.checked("m").unwrap().map(|p| (p.kind, p.interleaved));
        assert_eq!(kind(Asked::default()), None);
        assert_eq!(kind(asked(8, 1)), Some((ProtectionType::Type1, true)));
        assert_eq!(kind(asked(8, 3)), Some((ProtectionType::Type3, true)));
        let separate = Asked { md_interleave: None, ..asked(8, 3) };
        assert_eq!(kind(separate), Some((ProtectionType::Type3, false)));
        let why = |asked: Asked| asked.checked("m").unwrap_err().to_string();
        for (asked, part) in [
            (asked(0, 0), "asks how metadata is laid out"),
            (asked(8, 2), "commands of 32 bytes"),
            (asked(16, 1), "no \"md_size\" but 8"),
            (asked(8, 0), "only for protection information"),
            (asked(0, 1), "together with \"md_size\" 8"),
            (asked(8, 4), "takes 0, 1 or 3"),
            (asked(8, -1), "takes 0, 1 or 3"),
            (Asked { dif_pi_format: Some(1), ..asked(8, 1) }, "guards of 16 bits only"),
        ] {
            let why = why(asked);
            assert!(why.contains(part), "{why}");
        }
    }
}
