//! Encryption at rest: a bdev whose blocks lie encrypted on another bdev.
//!
//! Owns: keys in memory ([`Keys`]), AES-XTS of blocks ([`Xts`]), and the bdev ([`Crypto`]), which is
//! put on any other, such as an lvol. Such queue pairs are [`open`]ed for others, too. Never stores a key, nor shows one in a log, an error or a `Debug`;
//! knows neither lvols nor JSON-RPC. The target's methods call it.
//!
//! On the base lies each block's encrypted data at its own place, and nothing else: no header, so the
//! bdev is as large as its base. The data unit of XTS is a block of the bdev, its tweak the number of
//! the block (64 bits, little endian): what SPDK's crypto bdev has with the tweak mode SIMPLE_LBA, and
//! dm-crypt with `aes-xts-plain64` (for blocks of 4096 bytes with `sector_size` 4096 and
//! `iv_large_sectors`).
//!
//! A block of zeros on the base reads as zeros: it was never written, or was unmapped. So thin volumes
//! stay thin, and UNMAP and WRITE ZEROES mean what they say. Whoever has the disk sees which blocks
//! those are, as he sees which clusters a thin volume has.
//!
//! XTS hides data; it does not notice that somebody changed or put back what lies on the disk.
//!
//! | file | noun |
//! | --- | --- |
//! | `key`, `keys` | [`Key`], [`Keys`] |
//! | `xts` | [`Xts`]: a key made ready for one thread |
//! | `disk` | [`Crypto`]: the bdev |
//! | `channel` | the data path: read it from top to bottom |

#![forbid(unsafe_code)]

mod channel;
mod disk;
mod key;
mod keys;
mod xts;

pub use disk::{CreateError, Crypto, PRODUCT, open};
pub use key::{Key, KeyError};
pub use keys::Keys;
pub use xts::{Failed, Xts};

#[cfg(test)]
mod tests;
