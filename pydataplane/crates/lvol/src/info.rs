//! What callers give and get: options and listings, with SPDK's field names.

use bdev::ProtectionType;
use crypto::Key;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;
use uuid::Uuid;

/// Smallest and largest cluster size that is chosen by default.
const DEFAULT_CLUSTER_SIZES: (u64, u64) = (64 << 10, 1 << 20);
/// Clusters of an lvstore whose cluster size was chosen, unless these are the largest ones. Memory has
/// 8 bytes for each that a volume has.
const DEFAULT_CLUSTERS: u64 = 4 << 20;

/// The cluster size of an lvstore on a bdev of `bytes` bytes where nobody says otherwise: the smallest
/// from 64 KiB to 1 MiB of which there are at most 4 Mi. Small ones make first writes to a clone
/// cheap, as each copies a cluster; many cost memory.
pub fn default_cluster_size(bytes: u64) -> u32 {
    let (least, most) = DEFAULT_CLUSTER_SIZES;
    let size = bytes.div_ceil(DEFAULT_CLUSTERS).checked_next_power_of_two().unwrap_or(most);
    size.clamp(least, most) as u32
}

/// What happens to the data clusters when an lvstore is created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ClearMethod {
    /// Nothing; each cluster is zeroed when it is allocated.
    None,
    /// Unmapped, where the bdev can.
    #[default]
    Unmap,
    /// Written with zeros.
    WriteZeroes,
}

/// How to create an lvstore.
#[derive(Clone, Copy, Debug, Default)]
pub struct LvstoreOptions {
    /// Bytes of a cluster: a power of two from 16 KiB to 1 GiB. `None`: [`default_cluster_size`].
    pub cluster_size: Option<u32>,
    /// What happens to the data clusters.
    pub clear: ClearMethod,
    /// UUID; a random one where `None`.
    pub uuid: Option<Uuid>,
    /// Copies between its lvols share clusters. Targets that are older than that refuse it.
    pub share_clusters: bool,
}

/// How to create an lvol.
#[derive(Clone, Debug)]
pub struct LvolOptions {
    /// Name, unique in its lvstore: 1 to 63 printable ASCII characters without space and slash.
    pub name: String,
    /// Size in bytes, rounded up to whole clusters.
    pub size: u64,
    /// Whether clusters are allocated on first write only.
    pub thin: bool,
    /// UUID; a random one where `None`.
    pub uuid: Option<Uuid>,
    /// Xattrs that it has from the beginning: there is never an lvol without them. Names and values
    /// as [`crate::Lvstores::set_xattr`] takes them.
    pub xattrs: BTreeMap<String, Vec<u8>>,
    /// The type of the protection information that it keeps itself, for ever, in clusters of its own beside those
    /// of its size.
    pub dif_type: Option<ProtectionType>,
    /// What its data is encrypted with, for ever.
    pub key: Option<Arc<Key>>,
}

/// What an lvol shares, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LvolSpace {
    /// Of clusters of its snapshots that it shows, and of its own that a clone shows.
    pub shared: u64,
    /// Of its own clusters that nobody else shows: what its deletion frees.
    pub exclusive: u64,
}

/// What [`Lvstores::scrub_lvstore`](crate::Lvstores::scrub_lvstore) read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LvstoreScrubbed {
    /// Bytes that were read, or could not be.
    pub bytes: u64,
    /// What could not be.
    pub unreadable: Vec<UnreadableData>,
    /// Byte of the device to go on with; `None`: that was all.
    pub next: Option<u64>,
}

/// Data that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnreadableData {
    /// Where it begins on the device, in bytes.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// What the device says.
    pub cause: String,
    /// LVSTORE/LVOL of each volume that has it, and where it begins there, in bytes.
    pub lvols: Vec<(String, u64)>,
}

/// What a snapshot or a clone is to be.
#[derive(Clone, Debug, Default)]
pub struct NewLvol {
    /// Name, as of [`LvolOptions`].
    pub name: String,
    /// UUID; a random one where `None`.
    pub uuid: Option<Uuid>,
    /// Xattrs that it has from the beginning, as of [`LvolOptions`].
    pub xattrs: BTreeMap<String, Vec<u8>>,
}

impl NewLvol {
    /// With this name and nothing else.
    pub fn named(name: impl Into<String>) -> Self {
        NewLvol { name: name.into(), ..NewLvol::default() }
    }
}

/// An lvstore, with the fields of SPDK's `bdev_lvol_get_lvstores`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LvstoreInfo {
    /// Identity.
    pub uuid: Uuid,
    /// Name for people.
    pub name: String,
    /// Name of the bdev that it lies on.
    pub base_bdev: String,
    /// Data clusters in all.
    pub total_data_clusters: u64,
    /// Data clusters that belong to no lvol.
    pub free_clusters: u64,
    /// Bytes of a block of the bdev.
    pub block_size: u32,
    /// Bytes of a cluster.
    pub cluster_size: u32,
    /// Bytes of the largest bdev that it can be grown to (ours, not SPDK's).
    pub max_bdev_size: u64,
    /// Version of its format; one before 2 has no snapshots (ours, not SPDK's).
    pub format_version: u32,
    /// Whether copies between its lvols share clusters.
    pub shares_clusters: bool,
    /// Why it takes no more changes, if it does not (ours, not SPDK's).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stopped: Option<String>,
    /// Thick lvols that are being created or grown (ours, not SPDK's).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub zeroing: Vec<ZeroingInfo>,
}

/// A thick lvol whose clusters are being zeroed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ZeroingInfo {
    /// `LVSTORE/LVOL`.
    pub alias: String,
    /// Identity.
    pub uuid: Uuid,
    /// Bytes that are zeroed.
    pub done: u64,
    /// Bytes to be zeroed.
    pub total: u64,
}

/// The lvstore of an lvol.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LvsRef {
    /// Identity.
    pub uuid: Uuid,
    /// Name for people.
    pub name: String,
}

/// An lvol, with the fields of SPDK's `bdev_lvol_get_lvols` and its size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LvolInfo {
    /// `LVSTORE/LVOL`.
    pub alias: String,
    /// Identity, and the name of its bdev.
    pub uuid: Uuid,
    /// Name for people.
    pub name: String,
    /// Whether clusters are allocated on first write only.
    pub is_thin_provisioned: bool,
    /// Whether it is a snapshot.
    pub is_snapshot: bool,
    /// Whether it is a clone of a snapshot.
    pub is_clone: bool,
    /// Whether it is a clone of a foreign bdev.
    pub is_esnap_clone: bool,
    /// Whether a part of it cannot be read because its parent is missing.
    pub is_degraded: bool,
    /// UUID of the bdev whose clone it is (ours; SPDK says so of the lvol's bdev only).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub external_snapshot_name: Option<String>,
    /// Clusters that it owns.
    pub num_allocated_clusters: u64,
    /// Where it lies.
    pub lvs: LvsRef,
    /// Size in bytes (ours, not SPDK's).
    pub size: u64,
    /// Whether it refuses writes (ours, not SPDK's).
    pub is_read_only: bool,
    /// The type of the protection information that it keeps itself (ours, not SPDK's).
    #[serde(skip)]
    pub dif_type: Option<ProtectionType>,
    /// Name of the key that its data is encrypted with (ours, not SPDK's).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key_name: Option<String>,
    /// Whether it is no bdev because that is not here (ours, not SPDK's).
    pub waits_for_key: bool,
}

/// What an lvol takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LvolSizes {
    /// Its size, bytes.
    pub size: u64,
    /// Bytes of the clusters that it owns.
    pub allocated: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_lvstore_has_small_clusters_and_none_has_too_many() {
        let gib = 1u64 << 30;
        for (gibs, kib) in [(0, 64), (1, 64), (256, 64), (257, 128), (1024, 256), (4096, 1024)] {
            assert_eq!(default_cluster_size(gibs * gib), kib << 10, "{gibs} GiB");
        }
        assert_eq!(default_cluster_size(u64::MAX), 1 << 20);
    }
}
