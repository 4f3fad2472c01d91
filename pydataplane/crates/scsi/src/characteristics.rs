//! What a logical unit says of itself beyond its volume, where its owner chose it.

use bdev::Features;
use uuid::Uuid;

/// Longest T10 VENDOR IDENTIFICATION in bytes (SPC-4 6.6.2).
pub const VENDOR_LEN: usize = 8;
/// Longest PRODUCT IDENTIFICATION in bytes (SPC-4 6.6.2).
pub const PRODUCT_LEN: usize = 16;
/// Largest physical block in bytes, as QEMU's for its own disks; the exponent has room for it.
pub const MAX_PHYSICAL_BLOCK_BYTES: u32 = 2 << 20;

/// Chosen characteristics; the default of each is the volume's own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Characteristics {
    /// Whose disk it shows itself as: the UUID designator of VPD page 83h, of which serial number and world
    /// wide name are made that were not chosen. `None`: the volume's own.
    pub uuid: Option<Uuid>,
    /// World wide name, the NAA designator of VPD page 83h (SPC-4 7.8.6.6), of a format of 8 bytes:
    /// its first digit is 2, 3 or 5. `None`: locally assigned, made of the volume's UUID.
    pub wwn: Option<u64>,
    /// T10 VENDOR IDENTIFICATION: up to [`VENDOR_LEN`] printable ASCII characters.
    pub vendor: Option<String>,
    /// PRODUCT IDENTIFICATION: up to [`PRODUCT_LEN`] printable ASCII characters.
    pub product: Option<String>,
    /// MEDIUM ROTATION RATE (SBC-3 6.6.2) as it stands in VPD page B1h: 1, it does not rotate, or
    /// from 0401h turns a minute. `None`: it does not rotate.
    pub rotation_rate: Option<u16>,
    /// Bytes of a physical block (LOGICAL BLOCKS PER PHYSICAL BLOCK EXPONENT, SBC-3 5.16.2): a power of two, from
    /// a logical block to [`MAX_PHYSICAL_BLOCK_BYTES`]. `None`: the volume's.
    pub physical_block_size: Option<u32>,
    /// The unit does not offer UNMAP, although the volume takes it.
    pub no_unmap: bool,
    /// There is no volatile cache (WCE 0): what changes the medium is durable before its status.
    pub write_through: bool,
}

/// Why characteristics cannot be a logical unit's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CharacteristicsError {
    /// The world wide name has a format that is not of 8 bytes.
    #[error("wwn {0:016x} does not begin with 2, 3 or 5, so it is no name of 8 bytes")]
    Wwn(u64),
    /// A text of INQUIRY is too long or not printable ASCII.
    #[error("{what} {given:?} is not up to {longest} printable ASCII characters")]
    Text {
        /// Which one.
        what: &'static str,
        /// What was given.
        given: String,
        /// The most characters that it can have.
        longest: usize,
    },
    /// The rotation rate is one that SBC-3 reserves.
    #[error("rotation_rate {0} is not 1, for a disk that does not rotate, or 1025 to 65534")]
    RotationRate(u16),
}

impl Characteristics {
    /// Whether a unit can show them.
    pub(crate) fn check(&self) -> Result<(), CharacteristicsError> {
        if let Some(wwn) = self.wwn.filter(|wwn| !matches!(wwn >> 60, 2 | 3 | 5)) {
            return Err(CharacteristicsError::Wwn(wwn));
        }
        text("vendor", self.vendor.as_deref(), VENDOR_LEN)?;
        text("product", self.product.as_deref(), PRODUCT_LEN)?;
        match self.rotation_rate {
            None | Some(1 | 0x0401..=0xFFFE) => Ok(()),
            Some(rate) => Err(CharacteristicsError::RotationRate(rate)),
        }
    }

    /// Takes from what the bdev can do what the unit is not to show.
    pub(crate) fn restrict(&self, features: &mut Features) {
        features.unmap &= !self.no_unmap;
        features.thin &= !self.no_unmap;
        features.volatile_cache &= !self.write_through;
    }
}

fn text(
    what: &'static str,
    given: Option<&str>,
    longest: usize,
) -> Result<(), CharacteristicsError> {
    let given = given.unwrap_or_default();
    if given.len() > longest || !given.bytes().all(|b| (0x20..0x7F).contains(&b)) {
        return Err(CharacteristicsError::Text { what, given: given.to_owned(), longest });
    }
    Ok(())
}
