//! ROD tokens (SPC-4 5.17.6, 6.32): 512 bytes that stand for blocks of a unit as they were at one point in time.
//!
//! A token is "point in time copy - change vulnerable": nothing is copied when it is made, and it is revoked when
//! any of its blocks is about to change (`watch` says why none changes unnoticed). What it says can be read in it
//! but for its last part, which is random and which no guest can guess; all of it is compared. It is known to the
//! controller on which it was made alone, and as long as its unit is there: no guest reaches by one a volume that
//! it has no unit of.

use super::work::Ended;
use crate::inquiry::naa;
use crate::sense::{Code, Sense};
use crate::shared::LunShared;
use crate::watch::{Range, Watch, Watched};
use std::sync::Arc;
use uuid::Uuid;

pub(crate) const TOKEN_LEN: usize = 512;
/// ROD types (SPC-4 5.17.6.2): of ours, and what may be asked for instead; of zeros.
pub(crate) const CHANGE_VULNERABLE: u32 = 0x0080_0001;
pub(crate) const ANY_POINT_IN_TIME: u32 = 0x0080_FFFF;
pub(crate) const ZEROS: u32 = 0xFFFF_0001;
/// Tokens of a unit that are known at a time, those among them that are no longer good.
pub(crate) const MAX_TOKENS: usize = 16;

/// ROD TOKEN LENGTH: what follows it.
const LENGTH: u16 = TOKEN_LEN as u16 - 8;
/// Where the random part is, of 122 random bits in each 16 bytes.
const RANDOM: std::ops::Range<usize> = 160..224;

/// One that was made.
pub(crate) struct Token {
    bytes: [u8; TOKEN_LEN],
    pub(crate) unit: std::sync::Weak<LunShared>,
    pub(crate) ranges: Vec<Range>,
    watch: Watch,
}

impl Token {
    /// One of blocks of the unit that are watched. Nobody knows it yet.
    pub(crate) fn new(unit: &Arc<LunShared>, ranges: Vec<Range>, watch: Watch) -> Self {
        let bytes = bytes(unit, super::ranges::total(&ranges));
        Token { bytes, unit: Arc::downgrade(unit), ranges, watch }
    }

    pub(crate) fn bytes(&self) -> &[u8; TOKEN_LEN] {
        &self.bytes
    }

    /// Whether `given` is it, in a time that does not depend on where they differ.
    pub(crate) fn is(&self, given: &[u8; TOKEN_LEN]) -> bool {
        self.bytes.iter().zip(given).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
    }

    pub(crate) fn watch(&self) -> &Watch {
        &self.watch
    }

    pub(crate) fn is_good(&self) -> bool {
        self.watch.state() == Watched::Unchanged
    }

    /// Whether some of its blocks are among these, of the same volume.
    pub(crate) fn covers(&self, unit: &LunShared, range: Range) -> bool {
        let its = self.unit.upgrade();
        let same = its.is_some_and(|its| its.bdev().uuid() == unit.bdev().uuid());
        let end = |range: &Range| range.at + range.bytes;
        same && self.ranges.iter().any(|its| its.at < end(&range) && range.at < end(its))
    }

    /// Whether its blocks are what they were.
    ///
    /// # Errors
    /// Why it is no longer good (SPC-4 annex F, 23h).
    pub(crate) fn check(&self) -> Result<(), Sense> {
        match self.watch.state() {
            Watched::Unchanged => Ok(()),
            Watched::Changed => Err(Sense::illegal(Code::TOKEN_REVOKED)),
            Watched::Expired => Err(Sense::illegal(Code::TOKEN_EXPIRED)),
            Watched::Deleted => Err(Sense::illegal(Code::TOKEN_DELETED)),
        }
    }

    /// As [`Token::check`], amid the work.
    pub(crate) fn check_amid(&self) -> Result<(), Ended> {
        self.check().map_err(Ended::Failed)
    }
}

/// Whether the token that an initiator gave is of a type that is known: of zeros, or one of ours.
///
/// # Errors
/// UNSUPPORTED TOKEN TYPE; INVALID TOKEN LENGTH.
pub(crate) fn is_of_zeros(given: &[u8; TOKEN_LEN]) -> Result<bool, Sense> {
    let kind = super::order::be32(given, 0);
    if kind != ZEROS && kind != CHANGE_VULNERABLE {
        return Err(Sense::illegal(Code::UNSUPPORTED_TOKEN_TYPE));
    }
    if super::order::be16(given, 6) != LENGTH {
        return Err(Sense::illegal(Code::INVALID_TOKEN_LENGTH));
    }
    Ok(kind == ZEROS)
}

/// A token for so many bytes of a unit (SPC-4 6.32, table 109), as no other one is.
fn bytes(unit: &LunShared, count: u64) -> [u8; TOKEN_LEN] {
    /// Identification descriptor CSCD descriptor, of a binary NAA designator.
    const CREATOR: [u8; 8] = [super::order::IDENTIFICATION, 0, 0, 0, 1, 3, 0, 8];
    /// A binary UUID designator of the target device.
    const TARGET_DEVICE: [u8; 6] = [1, 0x2A, 0, 18, 0x10, 0];
    let mut token = [0; TOKEN_LEN];
    let mut put = |at: usize, bytes: &[u8]| token[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &CHANGE_VULNERABLE.to_be_bytes());
    put(6, &LENGTH.to_be_bytes());
    // COPY MANAGER ROD TOKEN IDENTIFIER.
    put(8, &Uuid::new_v4().as_bytes()[8..]);
    put(16, &CREATOR);
    put(24, &naa(unit));
    put(45, &unit.block_size.to_be_bytes()[1..]);
    put(48, &u128::from(count).to_be_bytes());
    // As READ CAPACITY(16) has it.
    put(96, &unit.block_size.to_be_bytes());
    put(101, &[unit.physical_exponent]);
    put(128, &TARGET_DEVICE);
    put(134, unit.identity().as_bytes());
    for at in RANDOM.step_by(16) {
        put(at, Uuid::new_v4().as_bytes());
    }
    token
}
