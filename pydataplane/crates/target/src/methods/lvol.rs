//! Lvstores and lvols.

mod history;
mod medium;

use super::crypto as keys;
use super::protected::{Asked, type_of};
use super::{BdevName, UuidText, limits, mib_to_bytes, unsupported};
use crate::app::App;
use crate::errors;
use crate::moves;
use crate::pools::Pool;
use crate::restore::bdev_of;
use crate::state::Item;
use crate::stores::Store;
use crate::volume::Volume;
use bdev::TUPLE_LEN;
use lvol::{ClearMethod, LvolInfo, LvolOptions, LvolSizes, LvolSpace, LvstoreInfo, LvstoreOptions};
use rpc::{Code, Errno, Error, Flags, Methods};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// What methods that work on pools of Ceph, too, fail with beside what else they may.
pub const OF_POOLS: &[Errno] = &[Errno::NotSup, Errno::Access, Errno::TimedOut];

#[derive(Clone, Copy, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum LvsClear {
    None,
    Unmap,
    WriteZeroes,
}

#[derive(Clone, Copy, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum LvolClear {
    Default,
    None,
    Unmap,
    WriteZeroes,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct CreateLvstore {
    /// Bdev to put it on.
    bdev_name: String,
    /// Name of the lvstore.
    lvs_name: String,
    /// Bytes of a cluster, a power of two. Default: from 65536 to 1048576, by the size of the bdev
    #[serde(default)]
    cluster_sz: Option<u32>,
    /// What happens to the data region. Default: unmap
    #[serde(default)]
    clear_method: Option<LvsClear>,
    /// Not supported: the space for metadata is chosen by the size of the bdev.
    #[serde(default)]
    num_md_pages_per_cluster_ratio: Option<u32>,
    /// Not supported but for 4096.
    #[serde(default)]
    md_page_size: Option<u32>,
    /// UUID of the lvstore (ours). Default: a random one
    #[serde(default)]
    uuid: Option<UuidText>,
    /// EXTENDED COPY and ODX between its lvols share clusters instead of copying data; older targets refuse the
    /// lvstore (ours). Default: false
    #[serde(default)]
    share_clusters: Option<bool>,
}

/// One lvstore, by UUID or by name.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct LvstoreRef {
    /// UUID of the lvstore.
    #[serde(default)]
    uuid: Option<String>,
    /// Name of the lvstore.
    #[serde(default)]
    lvs_name: Option<String>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct UpgradeLvstore {
    /// UUID of the lvstore.
    #[serde(default)]
    uuid: Option<String>,
    /// Name of the lvstore.
    #[serde(default)]
    lvs_name: Option<String>,
    /// Has it share clusters from then on, as of `bdev_lvol_create_lvstore`. Default: it does so if it did before
    #[serde(default)]
    share_clusters: Option<bool>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetLvols {
    /// UUID of an lvstore. Default: all lvstores
    #[serde(default)]
    lvs_uuid: Option<String>,
    /// Name of an lvstore. Default: all lvstores
    #[serde(default)]
    lvs_name: Option<String>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetSizes {
    /// UUIDs or LVSTORE/LVOL.
    names: Vec<String>,
}

/// What an lvol takes.
#[derive(Serialize, JsonSchema)]
struct Sizes {
    /// Its size, bytes.
    size: u64,
    /// Bytes of the clusters that it owns.
    allocated: u64,
}

/// What an lvol shares, bytes.
#[derive(Serialize, JsonSchema)]
struct Space {
    /// Of clusters of its snapshots that it shows, and of its own that a clone shows.
    shared: u64,
    /// Of its own clusters that nobody else shows: what its deletion frees.
    exclusive: u64,
}

fn space(app: &App, names: Vec<String>) -> Result<BTreeMap<String, Space>, Error> {
    let mut found = BTreeMap::new();
    for name in names {
        match app.lvstores.space(&name) {
            Ok(LvolSpace { shared, exclusive }) => {
                found.insert(name, Space { shared, exclusive });
            }
            Err(lvol::Error::NoLvol { .. }) => {}
            Err(e) => return Err(errors::lvol(e)),
        }
    }
    Ok(found)
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Rename {
    /// Its name now; an lvol's UUID or LVSTORE/LVOL.
    old_name: String,
    /// Its new name; an lvol's without the lvstore.
    new_name: String,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct CreateLvol {
    /// Name of the lvol.
    lvol_name: String,
    /// Size in MiB, rounded up to clusters.
    size_in_mib: u64,
    /// Allocate clusters on first write only. Default: false
    #[serde(default)]
    thin_provision: Option<bool>,
    /// UUID of the lvstore.
    #[serde(default)]
    uuid: Option<String>,
    /// Name of the lvstore.
    #[serde(default)]
    lvs_name: Option<String>,
    /// How clusters are cleared; an lvol always reads as zeros at first. Default: default
    #[serde(default)]
    #[allow(dead_code)]
    clear_method: Option<LvolClear>,
    /// UUID of the lvol (ours). Default: a random one
    #[serde(default)]
    lvol_uuid: Option<UuidText>,
    /// Xattrs that the lvol has from the beginning, name to text: there is never an lvol without
    /// them (ours). Default: none
    #[serde(default)]
    xattrs: Option<BTreeMap<String, String>>,
    /// Type of protection information (T10 DIF, 8 bytes a block) that it, its snapshots and its clones keep in
    /// clusters of their own beside those of its size: 1 or 3 (ours). Default: 0, none but what the lvstore's
    /// bdev has
    #[serde(default)]
    dif_type: Option<i32>,
    /// Name of the key that its data is encrypted with, and that of its snapshots and clones (ours).
    /// Default: not encrypted
    #[serde(default)]
    key_name: Option<String>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Resize {
    /// UUID or LVSTORE/LVOL.
    name: String,
    /// New size in MiB, rounded up to clusters.
    size_in_mib: u64,
}

/// An lvstore, with SPDK's fields.
#[derive(Serialize, JsonSchema)]
struct Lvstore {
    uuid: String,
    name: String,
    base_bdev: String,
    total_data_clusters: u64,
    free_clusters: u64,
    /// Bytes of a block.
    block_size: u32,
    /// Bytes of a cluster.
    cluster_size: u32,
    /// Bytes of the largest bdev that it can be grown to (ours).
    max_bdev_size: u64,
    /// Version of its format on the disk; one before 2 has no snapshots (ours).
    format_version: u32,
    /// Whether copies between its lvols share clusters, if so (ours).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    share_clusters: bool,
    /// What it is, if it is no lvstore: `rbd`, a pool of Ceph; `iscsi`, one of LUNs of an iSCSI target (ours).
    #[serde(skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    /// Why it takes no more changes, if so (ours).
    #[serde(skip_serializing_if = "Option::is_none")]
    stopped: Option<String>,
    /// Thick lvols that are being created or grown (ours).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    zeroing: Vec<Zeroing>,
}

/// A thick lvol whose clusters are being zeroed.
#[derive(Serialize, JsonSchema)]
struct Zeroing {
    /// LVSTORE/LVOL.
    alias: String,
    uuid: String,
    /// Bytes that are zeroed.
    done: u64,
    /// Bytes to be zeroed.
    total: u64,
}

impl From<LvstoreInfo> for Lvstore {
    fn from(i: LvstoreInfo) -> Lvstore {
        Lvstore {
            uuid: i.uuid.to_string(),
            name: i.name,
            base_bdev: i.base_bdev,
            total_data_clusters: i.total_data_clusters,
            free_clusters: i.free_clusters,
            block_size: i.block_size,
            cluster_size: i.cluster_size,
            max_bdev_size: i.max_bdev_size,
            format_version: i.format_version,
            share_clusters: i.shares_clusters,
            kind: None,
            stopped: i.stopped,
            zeroing: i.zeroing.into_iter().map(Zeroing::from).collect(),
        }
    }
}

impl From<lvol::ZeroingInfo> for Zeroing {
    fn from(z: lvol::ZeroingInfo) -> Zeroing {
        Zeroing { alias: z.alias, uuid: z.uuid.to_string(), done: z.done, total: z.total }
    }
}

/// An lvol, with SPDK's fields.
#[derive(Serialize, JsonSchema)]
struct Lvol {
    /// LVSTORE/LVOL.
    alias: String,
    /// Identity, and the name of its bdev.
    uuid: String,
    name: String,
    is_thin_provisioned: bool,
    is_snapshot: bool,
    is_clone: bool,
    is_esnap_clone: bool,
    is_degraded: bool,
    num_allocated_clusters: u64,
    lvs: LvsName,
    /// Bytes (ours).
    size: u64,
    /// Whether it refuses writes (ours).
    is_read_only: bool,
    /// UUID of the bdev whose clone it is (ours; SPDK has it in bdev_get_bdevs only).
    #[serde(skip_serializing_if = "Option::is_none")]
    external_snapshot_name: Option<String>,
    /// Type of the protection information that it keeps itself (ours).
    #[serde(skip_serializing_if = "Option::is_none")]
    dif_type: Option<u8>,
    /// Name of the key that its data is encrypted with (ours).
    #[serde(skip_serializing_if = "Option::is_none")]
    key_name: Option<String>,
    /// Whether it is no bdev because that key is not here (ours).
    waits_for_key: bool,
}

#[derive(Serialize, JsonSchema)]
struct LvsName {
    name: String,
    uuid: String,
}

impl From<LvolInfo> for Lvol {
    fn from(i: LvolInfo) -> Lvol {
        Lvol {
            alias: i.alias,
            uuid: i.uuid.to_string(),
            name: i.name,
            is_thin_provisioned: i.is_thin_provisioned,
            is_snapshot: i.is_snapshot,
            is_clone: i.is_clone,
            is_esnap_clone: i.is_esnap_clone,
            is_degraded: i.is_degraded,
            num_allocated_clusters: i.num_allocated_clusters,
            lvs: LvsName { name: i.lvs.name, uuid: i.lvs.uuid.to_string() },
            size: i.size,
            is_read_only: i.is_read_only,
            external_snapshot_name: i.external_snapshot_name,
            dif_type: i.dif_type.map(type_of),
            key_name: i.key_name,
            waits_for_key: i.waits_for_key,
        }
    }
}

/// The one of UUID and name that is given.
fn either(uuid: Option<String>, name: Option<String>) -> Result<Option<String>, Error> {
    match (uuid, name) {
        (Some(_), Some(_)) => Err(Error::os(
            Errno::Inval,
            "the UUID and the name of an lvstore are given; give one of them",
        )),
        (uuid, name) => Ok(uuid.or(name)),
    }
}

fn required(uuid: Option<String>, name: Option<String>) -> Result<String, Error> {
    either(uuid, name)?.ok_or_else(|| {
        Error::os(Errno::Inval, "the lvstore is not named; give its UUID or its name")
    })
}

fn create_lvstore(app: &App, p: &CreateLvstore) -> Result<String, Error> {
    unsupported(
        "bdev_lvol_create_lvstore",
        &[
            ("num_md_pages_per_cluster_ratio", p.num_md_pages_per_cluster_ratio.is_some()),
            ("md_page_size", !matches!(p.md_page_size, None | Some(4096))),
        ],
    )?;
    app.check_no_pool(&p.lvs_name)?;
    let options = LvstoreOptions {
        cluster_size: p.cluster_sz,
        clear: match p.clear_method {
            Some(LvsClear::None) => ClearMethod::None,
            Some(LvsClear::WriteZeroes) => ClearMethod::WriteZeroes,
            Some(LvsClear::Unmap) | None => ClearMethod::Unmap,
        },
        uuid: p.uuid.map(|u| u.0),
        share_clusters: p.share_clusters.unwrap_or(false),
    };
    let wait = app
        .waits
        .begin(format!("lvstore {}", p.lvs_name), format!("bdev {} to be written", p.bdev_name));
    let created = app.lvstores.create_lvstore(&p.bdev_name, &p.lvs_name, &options);
    drop(wait);
    created.map(|uuid| uuid.to_string()).map_err(errors::lvol)
}

fn get_lvstores(app: &App, p: LvstoreRef) -> Result<Vec<Lvstore>, Error> {
    let name = either(p.uuid, p.lvs_name)?;
    let store =
        |pool: &Pool| Lvstore { kind: Some(pool.backend.kind()), ..Lvstore::from(pool.info()) };
    if let Some(pool) = name.as_ref().and_then(|name| app.pools.get(name)) {
        return Ok(vec![store(&pool)]);
    }
    if let Some(lvstore) = name {
        let found = app.lvstores.lvstore(&lvstore).map_err(errors::lvol)?;
        return Ok(vec![found.into()]);
    }
    let lvstores = app.lvstores.lvstores().into_iter().map(Lvstore::from);
    Ok(lvstores.chain(app.pools.list().iter().map(|pool| store(pool))).collect())
}

/// All volumes, or those of one store; of pools as far as they answer soon.
fn get_lvols(app: &App, name: Option<&str>) -> Result<Vec<LvolInfo>, Error> {
    if let Some(name) = name {
        return app.store(name).volumes(Some(name));
    }
    let mut all = app.lvstores.volumes(None)?;
    for pool in app.pools.list() {
        all.extend(pool.volumes_or_known().iter().map(|volume| pool.lvol(volume)));
    }
    all.sort_by(|a, b| a.alias.cmp(&b.alias));
    Ok(all)
}

fn sizes(app: &App, names: &[String]) -> BTreeMap<String, Sizes> {
    let found = app.lvstores.sizes(names).into_iter();
    let found = found
        .map(|(name, LvolSizes { size, allocated })| (name.to_owned(), Sizes { size, allocated }));
    let mut found: BTreeMap<_, _> = found.collect();
    if app.pools.is_empty() || found.len() == names.len() {
        return found;
    }
    let sizes = |volume: &Volume| Sizes { size: volume.size, allocated: volume.allocated };
    if let [name] = names {
        // It is asked for again and again.
        let pool = app.pools.of(name);
        if pool.as_ref().is_some_and(|pool| !pool.is_ceph())
            && let Some(bdev) = app.registry.get(name)
        {
            // An open LUN is looked at by itself.
            let size = bdev.geometry().bytes();
            found.insert(name.clone(), Sizes { size, allocated: size });
            return found;
        }
        let volume = pool.and_then(|pool| pool.volume_or_known(name));
        found.extend(volume.map(|volume| (name.clone(), sizes(&volume))));
        return found;
    }
    for pool in app.pools.list() {
        let volumes = pool.volumes_or_known();
        let by_uuid: BTreeMap<_, _> = volumes.iter().map(|v| (v.uuid.to_string(), v)).collect();
        let by_alias: BTreeMap<_, _> = volumes.iter().map(|v| (pool.alias(v), v)).collect();
        for name in names {
            let volume = by_uuid.get(name).or_else(|| by_alias.get(name));
            found.extend(volume.map(|volume| (name.clone(), sizes(volume))));
        }
    }
    found
}

/// Xattrs as the store keeps them.
fn bytes_of(xattrs: Option<BTreeMap<String, String>>) -> BTreeMap<String, Vec<u8>> {
    let all = xattrs.unwrap_or_default().into_iter();
    all.map(|(name, text)| (name, text.into_bytes())).collect()
}

fn create_lvol(app: &App, p: CreateLvol) -> Result<String, Error> {
    let lvstore = required(p.uuid, p.lvs_name)?;
    let what = format!("lvol {lvstore}/{}", p.lvol_name);
    let key = p.key_name.map(|name| keys::given(app, &name, &what, Errno::NoKey)).transpose()?;
    let asked = Asked {
        md_size: p.dif_type.filter(|kind| *kind != 0).map(|_| TUPLE_LEN as u32),
        dif_type: p.dif_type,
        ..Asked::default()
    };
    let dif_type = asked.checked("bdev_lvol_create")?.map(|protection| protection.kind);
    let options = LvolOptions {
        dif_type,
        name: p.lvol_name,
        size: mib_to_bytes(p.size_in_mib)?,
        thin: p.thin_provision.unwrap_or(false),
        uuid: p.lvol_uuid.map(|u| u.0),
        xattrs: bytes_of(p.xattrs),
        key,
    };
    let created = app.store(&lvstore).create(&lvstore, &options);
    created.map(|lvol| lvol.uuid.to_string())
}

/// Refuses what nobody may do to an lvol in use, where it waits for its key and somebody for it: it is
/// no bdev then, so nobody claims it.
fn not_awaited(app: &App, name: &str) -> Result<(), Error> {
    app.lvstores.lvol(name).map_or(Ok(()), |lvol| check_not_awaited(app, &lvol))
}

fn check_not_awaited(app: &App, lvol: &LvolInfo) -> Result<(), Error> {
    let Some(key) = lvol.key_name.as_ref().filter(|_| lvol.waits_for_key) else { return Ok(()) };
    let uuid = lvol.uuid.to_string();
    let config = app.config();
    let waits = |item: &&Item| item.problem.is_some() && bdev_of(item) == Some(&*uuid);
    match config.items().find(waits) {
        None => Ok(()),
        Some(item) => Err(Error::os(
            Errno::Busy,
            format_args!(
                "lvol {} waits for its key {key}, and {} for it: give the key, or take that away first",
                lvol.alias, item.key
            ),
        )),
    }
}

/// Deletes `lvols` by `delete`; keys that go with the last lvol that they are of are wiped.
fn delete(
    app: &App,
    lvols: &[LvolInfo],
    delete: impl FnOnce() -> Result<(), Error>,
) -> Result<bool, Error> {
    lvols.iter().try_for_each(|lvol| check_not_awaited(app, lvol))?;
    let turn = app.copies.turn();
    // Else that takes its time, and is nothing to copies.
    let _turn = moves::check_deleted(app, lvols)?.then_some(turn);
    delete()?;
    lvols.iter().for_each(|lvol| limits::forget(app, &lvol.uuid.to_string()));
    let keys: BTreeSet<_> = lvols.iter().filter_map(|lvol| lvol.key_name.as_ref()).collect();
    keys.into_iter().for_each(|key| keys::let_go(app, key));
    Ok(true)
}

fn add_lvstores(methods: &mut Methods, app: &Arc<App>) {
    let a = app.clone();
    methods
        .add(
            "bdev_lvol_create_lvstore",
            "Create an lvstore on a bdev and return its UUID.",
            Flags::LONG_WRITE,
            move |p: CreateLvstore| create_lvstore(&a, &p),
        )
        .errors(&[
            Errno::NoDev,
            Errno::Exist,
            Errno::Busy,
            Errno::Inval,
            Errno::NoSpc,
            Errno::NotSup,
            Errno::Io,
        ]);
    let a = app.clone();
    methods
        .add(
            "bdev_lvol_delete_lvstore",
            "Delete an lvstore with all its lvols; refused while one of them is in use.",
            Flags::LONG_WRITE,
            move |p: LvstoreRef| {
                let lvstore = required(p.uuid, p.lvs_name)?;
                a.only_lvstores(&lvstore, "virtlun_rbd_pool_delete lets go of it")?;
                let lvols = a.lvstores.lvols(Some(&lvstore)).map_err(errors::lvol)?;
                moves::check_destroyed(&a, &lvols)?;
                delete(&a, &lvols, || a.lvstores.destroy_lvstore(&lvstore).map_err(errors::lvol))
            },
        )
        .errors(&[Errno::NoDev, Errno::Busy, Errno::Inval, Errno::Io])
        .errors(OF_POOLS);
    let a = app.clone();
    methods
        .add(
            "bdev_lvol_rename_lvstore",
            "Rename an lvstore; the aliases of its lvols follow.",
            Flags::LONG_WRITE,
            move |p: Rename| {
                a.only_lvstores(&p.old_name, "delete it and create it with another name")?;
                a.check_no_pool(&p.new_name)?;
                let renamed = a.lvstores.rename_lvstore(&p.old_name, &p.new_name);
                renamed.map(|()| true).map_err(errors::lvol)
            },
        )
        .errors(&[Errno::NoDev, Errno::Exist, Errno::Inval, Errno::Io])
        .errors(OF_POOLS);
    let a = app.clone();
    methods
        .add(
            "bdev_lvol_grow_lvstore",
            "Grow an lvstore, in use or not, to the size that its bdev has now.",
            Flags::LONG_WRITE,
            move |p: LvstoreRef| {
                let lvstore = required(p.uuid, p.lvs_name)?;
                a.only_lvstores(&lvstore, "it has the room that its cluster has")?;
                a.lvstores.grow_lvstore(&lvstore).map(|_| true).map_err(errors::lvol)
            },
        )
        .errors(&[Errno::NoDev, Errno::NoSpc, Errno::IlSeq, Errno::Inval, Errno::Io])
        .errors(OF_POOLS);
    let a = app.clone();
    methods
        .add(
            "virtlun_lvstore_upgrade",
            "Give an lvstore, in use or not, the newest version of its format; older targets refuse it then.",
            Flags::LONG_WRITE,
            move |p: UpgradeLvstore| {
                let lvstore = required(p.uuid, p.lvs_name)?;
                a.only_lvstores(&lvstore, "its format is Ceph's")?;
                let shares = p.share_clusters.unwrap_or(false);
                a.lvstores.upgrade_lvstore(&lvstore, shares).map(|_| true).map_err(errors::lvol)
            },
        )
        .errors(&[Errno::NoDev, Errno::Inval, Errno::Io])
        .errors(OF_POOLS);
    let a = app.clone();
    methods
        .add(
            "bdev_lvol_get_lvstores",
            "Get all lvstores, or one.",
            Flags::READ,
            move |p: LvstoreRef| get_lvstores(&a, p),
        )
        .errors(&[Errno::NoDev, Errno::Inval]);
}

/// Adds the methods.
pub fn add(methods: &mut Methods, app: &Arc<App>) {
    add_lvstores(methods, app);
    history::add(methods, app);
    medium::add(methods, app);
    let a = app.clone();
    methods
        .add(
            "bdev_lvol_create",
            "Create an lvol and return its UUID, which is the name of its bdev.",
            Flags::LONG_WRITE,
            move |p: CreateLvol| create_lvol(&a, p),
        )
        .errors(&[
            Errno::NoDev,
            Errno::NoKey,
            Errno::Exist,
            Errno::Busy,
            Errno::NoSpc,
            Errno::Inval,
            Errno::Io,
        ])
        .errors(&[Errno::Canceled, Errno::NotSup])
        .errors(OF_POOLS);
    let a = app.clone();
    methods
        .add(
            "virtlun_lvol_cancel",
            "Cancel the creation or growth of a thick lvol that is being zeroed; nothing of it stays.",
            Flags::LONG_WRITE,
            move |p: BdevName| a.store_of(&p.name).cancel(&p.name).map(|()| true),
        )
        .errors(&[Errno::NoDev])
        .errors(OF_POOLS);
    let a = app.clone();
    methods
        .add(
            "bdev_lvol_delete",
            "Delete an lvol and its data; refused while it is in use. A snapshot's one clone takes over what \
             it shows; one with more clones is refused.",
            Flags::LONG_WRITE,
            move |p: BdevName| {
                let store = a.store_of(&p.name);
                match store.volume(&p.name) {
                    Err(why) if why.code == Code::Os(Errno::NoDev) => {
                        if a.complete_deletion(&p.name)? { Ok(true) } else { Err(why) }
                    }
                    volume => delete(&a, &[volume?], || store.delete(&p.name)),
                }
            },
        )
        .errors(&[Errno::NoDev, Errno::Busy, Errno::Perm, Errno::NoSpc, Errno::Io])
        .errors(OF_POOLS);
    let a = app.clone();
    methods
        .add(
            "bdev_lvol_resize",
            "Grow or shrink an lvol, in use or not.",
            Flags::LONG_WRITE,
            move |p: Resize| {
                let size = mib_to_bytes(p.size_in_mib)?;
                a.store_of(&p.name).resize(&p.name, size).map(|()| true)
            },
        )
        .errors(&[Errno::NoDev, Errno::Busy, Errno::NoSpc, Errno::Inval, Errno::Perm, Errno::Io])
        .errors(&[Errno::Canceled])
        .errors(OF_POOLS);
    let a = app.clone();
    methods
        .add(
            "bdev_lvol_rename",
            "Rename an lvol. Its UUID, the name of its bdev, stays.",
            Flags::LONG_WRITE,
            move |p: Rename| {
                let store = a.store_of(&p.old_name);
                store.rename(&p.old_name, &p.new_name).map(|()| true)
            },
        )
        .errors(&[Errno::NoDev, Errno::Exist, Errno::Inval, Errno::Io])
        .errors(OF_POOLS);
    let a = app.clone();
    methods
        .add(
            "bdev_lvol_set_read_only",
            "Make an lvol read-only for good; refused while it is in use.",
            Flags::LONG_WRITE,
            move |p: BdevName| {
                not_awaited(&a, &p.name)?;
                a.store_of(&p.name).set_read_only(&p.name).map(|()| true)
            },
        )
        .errors(&[Errno::NoDev, Errno::Busy, Errno::Io])
        .errors(OF_POOLS);
    let a = app.clone();
    methods
        .add(
            "bdev_lvol_get_lvols",
            "Get the lvols of all lvstores, or of one.",
            Flags::READ,
            move |p: GetLvols| {
                let lvstore = either(p.lvs_uuid, p.lvs_name)?;
                let lvols = get_lvols(&a, lvstore.as_deref())?;
                Ok(lvols.into_iter().map(Lvol::from).collect::<Vec<_>>())
            },
        )
        .errors(&[Errno::NoDev, Errno::Inval])
        .errors(OF_POOLS);
    let a = app.clone();
    methods.add(
        "virtlun_lvol_get_sizes",
        "Get the sizes of many lvols, by the name that was given; one that is not there is left out.",
        Flags::READ,
        move |p: GetSizes| Ok(sizes(&a, &p.names)),
    );
    let a = app.clone();
    methods.add(
        "virtlun_lvol_get_space",
        "Get what lvols share with their snapshots and clones, by the name that was given; one that is not \
         there is left out. Each of their clusters is looked at.",
        Flags::READ,
        move |p: GetSizes| space(&a, p.names),
    );
}
