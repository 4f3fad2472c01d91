//! Logical volumes: blobs of a blobstore as bdevs.
//!
//! Owns: the [`Lvstores`] manager (create, load, delete and list lvstores and lvols), one metadata
//! thread per lvstore, and the lvol bdev with its data path. Never knows SCSI, vhost or JSON-RPC;
//! called by the target's method implementations and, through [`bdev::Bdev`], by whoever does I/O.
//!
//! | file | noun | thread |
//! | --- | --- | --- |
//! | `lvstores` | [`Lvstores`]: finds objects by name or UUID | any control thread |
//! | `lvs` | one loaded lvstore: claim, registry, control operations; `lvols`: those on one volume; `parents`: bdevs that can be some; `turns`: one at a time | any control thread |
//! | `meta` | the blobstore and its changes, clusters that wait; `maps`: when volumes have their maps in memory | one per lvstore |
//! | `served` | a volume and what its channels asked for | as `meta` |
//! | `rounds` | requests of channels: a round, a record | as `meta` |
//! | `history` | snapshots and clones: who shows what | as `meta` |
//! | `share` | copies by metadata alone; `sharing`: which they are possible for, on any thread | as `meta` |
//! | `reload` | from the medium again, in use, after a failure | as `meta` |
//! | `zeroing` | the zeros of a thick volume to be | the control thread that makes it |
//! | `lvol` | the bdev face of an lvol | any |
//! | `asked` | what a channel asks of `meta`, what the two share, which volumes have channels | both |
//! | `gauges` | what everybody may know of an lvstore without asking `meta` | written by `meta`, read by any |
//! | `copying` | copies of what a snapshot itself has to a bdev | one for each |
//! | `space` | what a volume shares, and what is its alone | any control thread |
//! | `ranges` | what is allocated, and what changed between two snapshots | any control thread |
//! | `volume` | an lvol as all share it: names, map, version, channels | any |
//! | `map` | clusters of a volume to clusters of the device | written by `meta`, read by channels |
//! | `pins` | which version of its map a channel has in use | as `channel`; read by `meta` |
//! | `channel` | the data path; `pieces`: what is not passed on as a whole | the reactor that opened it |
//! | `external` | bdevs that are parents: held, or missing | any; `channel/outside`: as `channel` |
//! | `encryption` | lvols with keys of their own, which are bdevs while these are here | any |
//! | `data` | what first writes have, copied for `meta` | both |
//! | `parts` | room for pieces | as `channel` |
//! | `disk` | the bdev as the blobstore's disk | as `meta`; the one that loads |
//! | `translate` | the blobstore's errors as [`Error`]s and those of an I/O | any |
//! | `info`, `error` | what callers give and get | any |
//!
//! Where the bdev's blocks have protection information, so have a volume's, unless it is encrypted: what a
//! guest has beside its blocks goes with them to the bdev and back (`channel`), which compares it and moves
//! reference tags between the volume's numbers and its own ([`bdev::Protected::first`]). Copies take it along as
//! it is (`disk/copy`). Nothing of it is in the store. A volume can also keep it itself, in clusters among its
//! own ([`protection::Area`]): that lies above all that is told here, as the key does, and for it those
//! clusters are as any.
//!
//! Errors: [`Error`], one sentence each. After a metadata write or any flush of the bdev has failed the
//! lvstore takes no more changes and every flush fails ([`bdev::FlushLatch`]), until somebody clears
//! that; other I/O to allocated clusters goes on. So it does where the lvstore is loaded while that is
//! latched: then nothing is written before it is cleared.

#![deny(unsafe_code)] // allowed in `parts` alone

mod asked;
mod channel;
mod copying;
mod data;
mod disk;
mod encryption;
mod error;
mod external;
mod gauges;
mod history;
mod info;
mod lvol;
mod lvs;
mod lvstores;
mod map;
mod meta;
mod parts;
mod pins;
mod ranges;
mod reload;
mod rounds;
mod served;
mod share;
mod sharing;
mod space;
mod translate;
mod volume;
mod zeroing;

pub use copying::CopyInfo;
pub use encryption::{ENCRYPTION_XATTR, Encrypted, Encryption};
pub use error::Error;
pub use info::{
    ClearMethod, LvolInfo, LvolOptions, LvolSizes, LvolSpace, LvsRef, LvstoreInfo, LvstoreOptions,
    LvstoreScrubbed, NewLvol, UnreadableData, ZeroingInfo, default_cluster_size,
};
pub use lvstores::Lvstores;
pub use ranges::{Range, Ranges};
