//! What the tests of this crate share.
#![allow(dead_code)] // `keepers`, which is a program of its own, uses a part

pub mod late;
pub mod sharing;

use bdev::testing::FaultBdev;
use bdev::{AlignedBuf, Bdev, Protection, ProtectionType, Registry, SyncChannel, TUPLE_LEN};
use lvol::{ClearMethod, LvolInfo, LvolOptions, LvstoreOptions, Lvstores};
use protection::ProtectedDisk;
use std::sync::Arc;

pub const BLOCK: u64 = 512;
pub const CLUSTER: u64 = 64 << 10;
/// Blocks of a cluster.
pub const PER_CLUSTER: u64 = CLUSTER / BLOCK;

/// Bytes of a block and its tuple.
pub const WITH_TUPLE: usize = BLOCK as usize + TUPLE_LEN;

/// The bdev whose blocks lie on `below` with their tuples.
pub fn protected(below: Arc<dyn Bdev>, kind: ProtectionType) -> Arc<ProtectedDisk> {
    ProtectedDisk::new(below, Protection { kind, interleaved: true, at_head: false })
}

/// A registry with a fault-injecting disk `disk0` and a manager of lvstores.
pub struct Rig {
    pub registry: Registry,
    pub disk: Arc<FaultBdev>,
    pub lvstores: Lvstores,
    /// Of the disk's protection information, if `disk0` has that.
    pub kind: Option<ProtectionType>,
    /// Of what its lvols keep themselves.
    pub own: Option<ProtectionType>,
}

impl Rig {
    /// On a disk of `clusters` clusters, of which 23 are metadata's.
    pub fn new(clusters: u64) -> Rig {
        Rig::on(FaultBdev::new("disk0", BLOCK as u32, clusters * PER_CLUSTER))
    }

    /// On a disk of `clusters` clusters, whose blocks have a tuple behind them where it has a `kind`.
    pub fn of_kind(clusters: u64, kind: Option<ProtectionType>) -> Rig {
        let Some(kind) = kind else { return Rig::new(clusters) };
        let bytes = clusters as usize * PER_CLUSTER as usize * WITH_TUPLE;
        let disk = FaultBdev::with_image("disk0", WITH_TUPLE as u32, vec![0; bytes]);
        Rig::again(disk, Some(kind))
    }

    pub fn on(disk: Arc<FaultBdev>) -> Rig {
        Rig::again(disk, None)
    }

    fn again(disk: Arc<FaultBdev>, kind: Option<ProtectionType>) -> Rig {
        let registry = Registry::new();
        match kind {
            None => registry.register(disk.clone()).unwrap(),
            Some(kind) => registry.register(protected(disk.clone(), kind)).unwrap(),
        };
        Rig { lvstores: Lvstores::new(registry.clone()), registry, disk, kind, own: None }
    }

    pub fn with_lvs(clusters: u64) -> Rig {
        let rig = Rig::new(clusters);
        rig.lvstores.create_lvstore("disk0", "lvs0", &options()).unwrap();
        rig
    }

    pub fn create(&self, name: &str, clusters: u64, thin: bool) -> Result<LvolInfo, lvol::Error> {
        let size = clusters * CLUSTER;
        let options = LvolOptions {
            dif_type: self.own,
            name: name.into(),
            size,
            thin,
            uuid: None,
            xattrs: Default::default(),
            key: None,
        };
        self.lvstores.create_lvol("lvs0", &options)
    }

    pub fn bdev(&self, key: &str) -> Arc<dyn Bdev> {
        self.registry.get(key).unwrap_or_else(|| panic!("no bdev {key}"))
    }

    pub fn open(&self, key: &str) -> SyncChannel {
        SyncChannel::open(&*self.bdev(key)).unwrap()
    }

    /// Another process: the same disk, nothing else.
    pub fn restart(self) -> Rig {
        let (disk, kind, own) = (self.disk.clone(), self.kind, self.own);
        drop(self);
        disk.revive();
        Rig { own, ..Rig::again(disk, kind) }
    }
}

pub fn options() -> LvstoreOptions {
    LvstoreOptions {
        cluster_size: Some(CLUSTER as u32),
        clear: ClearMethod::None,
        ..LvstoreOptions::default()
    }
}

/// `blocks` blocks whose every 8 bytes are `tag`.
pub fn tagged(tag: u64, blocks: u64) -> AlignedBuf {
    let mut buf = AlignedBuf::zeroed((blocks * BLOCK) as usize);
    buf.chunks_exact_mut(8).for_each(|w| w.copy_from_slice(&tag.to_le_bytes()));
    buf
}

/// The tag of each block; panics when a block is a mixture.
pub fn tags(buf: &[u8]) -> Vec<u64> {
    buf.chunks_exact(BLOCK as usize)
        .map(|block| {
            assert!(block.chunks_exact(8).all(|w| w == &block[..8]), "a block is a mixture");
            u64::from_le_bytes(block[..8].try_into().unwrap())
        })
        .collect()
}

pub fn read_tags(channel: &mut SyncChannel, lba: u64, blocks: u64) -> Vec<u64> {
    let mut buf = tagged(u64::MAX, blocks);
    channel.read(lba, &mut buf).unwrap();
    tags(&buf)
}

/// Clusters of [`image`].
pub const IMAGE: u64 = 8;

/// A bdev `image`, whose block `n` has the tag `n + 1`.
pub fn image() -> Arc<FaultBdev> {
    let bytes: Vec<u8> = image_tags().iter().flat_map(|tag| tag.to_le_bytes().repeat(64)).collect();
    FaultBdev::with_image("image", BLOCK as u32, bytes)
}

/// The tags of the blocks of [`image`].
pub fn image_tags() -> Vec<u64> {
    (1..=IMAGE * PER_CLUSTER).collect()
}
