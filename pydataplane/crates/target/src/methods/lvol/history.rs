//! Snapshots and clones.

use super::super::{BdevName, UuidText};
use super::{OF_POOLS, bytes_of, not_awaited};
use crate::app::App;
use crate::errors;
use lvol::{CopyInfo, NewLvol};
use rpc::{Errno, Error, Flags, Methods};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Snapshot {
    /// UUID or LVSTORE/LVOL of what it is taken of.
    lvol_name: String,
    /// Name of the snapshot, without the lvstore.
    snapshot_name: String,
    /// UUID of the snapshot (ours). Default: a random one
    #[serde(default)]
    lvol_uuid: Option<UuidText>,
    /// Xattrs that the snapshot has from the beginning, name to text (ours). Default: none
    #[serde(default)]
    xattrs: Option<BTreeMap<String, String>>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Together {
    /// What they are taken of, all of one lvstore, and their names.
    snapshots: Vec<Snapshot>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Clone {
    /// UUID or LVSTORE/LVOL of the snapshot.
    snapshot_name: String,
    /// Name of the clone, without the lvstore.
    clone_name: String,
    /// UUID of the clone (ours). Default: a random one
    #[serde(default)]
    lvol_uuid: Option<UuidText>,
    /// Xattrs that the clone has from the beginning, name to text (ours). Default: none
    #[serde(default)]
    xattrs: Option<BTreeMap<String, String>>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct CloneBdev {
    /// Name, alias or UUID of the bdev.
    bdev: String,
    /// Name of the lvstore.
    lvs_name: String,
    /// Name of the clone, without the lvstore.
    clone_name: String,
    /// UUID of the clone (ours). Default: a random one
    #[serde(default)]
    lvol_uuid: Option<UuidText>,
    /// Xattrs that the clone has from the beginning, name to text (ours). Default: none
    #[serde(default)]
    xattrs: Option<BTreeMap<String, String>>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetParentBdev {
    /// UUID or LVSTORE/LVOL.
    lvol_name: String,
    /// Name, alias or UUID of the bdev that is to be its parent.
    #[serde(alias = "esnap_name")]
    parent_name: String,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ShallowCopy {
    /// UUID or LVSTORE/LVOL of what is copied, which is read-only.
    src_lvol_name: String,
    /// Bdev that it is copied to.
    dst_bdev_name: String,
}

#[derive(Serialize, JsonSchema)]
struct ShallowCopyBegun {
    /// For bdev_lvol_check_shallow_copy.
    operation_id: u32,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct CheckShallowCopy {
    /// What bdev_lvol_start_shallow_copy returned.
    operation_id: u32,
}

#[derive(Serialize, JsonSchema)]
struct ShallowCopyState {
    copied_clusters: u64,
    total_clusters: u64,
    /// `in progress`, `complete` or `error`.
    state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

fn shallow_copy(app: &App, number: u32) -> Result<ShallowCopyState, Error> {
    let Some(CopyInfo { copied, total, ended }) = app.lvstores.shallow_copy(number) else {
        let why = format!("there is no shallow copy {number}, or its end was told before");
        return Err(Error::os(Errno::NoDev, why));
    };
    let (state, error) = match ended {
        None => ("in progress", None),
        Some(Ok(())) => ("complete", None),
        Some(Err(why)) => ("error", Some(why)),
    };
    Ok(ShallowCopyState { copied_clusters: copied, total_clusters: total, state, error })
}

/// Ranges that one call tells at most, unless fewer are asked for.
const MAX_RANGES: u32 = 65536;

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Allocated {
    /// UUID or LVSTORE/LVOL.
    name: String,
    /// Where to begin, in bytes. Default: 0
    #[serde(default)]
    offset: u64,
    /// Ranges at most, 1 to 65536. Default: 65536
    #[serde(default)]
    max_ranges: Option<u32>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Changed {
    /// UUID or LVSTORE/LVOL, a snapshot or an lvol of the moment.
    name: String,
    /// UUID or LVSTORE/LVOL of a snapshot in the same lvstore.
    since: String,
    /// Where to begin, in bytes. Default: 0
    #[serde(default)]
    offset: u64,
    /// Ranges at most, 1 to 65536. Default: 65536
    #[serde(default)]
    max_ranges: Option<u32>,
}

/// Parts of an lvol, in order.
#[derive(Serialize, JsonSchema)]
struct Ranges {
    /// None may be told though more follow.
    ranges: Vec<Range>,
    /// Where the next call is to begin, in bytes; null after the last.
    next_offset: Option<u64>,
}

/// A part of an lvol, of whole clusters.
#[derive(Serialize, JsonSchema)]
struct Range {
    /// Where it begins, in bytes.
    offset: u64,
    /// Bytes.
    length: u64,
}

fn ranges(
    app: &App,
    name: &str,
    since: Option<&str>,
    offset: u64,
    max: Option<u32>,
) -> Result<Ranges, Error> {
    let most = max.unwrap_or(MAX_RANGES);
    if !(1..=MAX_RANGES).contains(&most) {
        let why = format!("max_ranges is {most}; give 1 to {MAX_RANGES}");
        return Err(Error::os(Errno::Inval, why));
    }
    let found = app.store_of(name).ranges(name, since, offset, most as usize)?;
    let ranges = found.ranges.into_iter();
    Ok(Ranges {
        ranges: ranges.map(|r| Range { offset: r.offset, length: r.length }).collect(),
        next_offset: found.next_offset,
    })
}

fn new_lvol(
    name: String,
    uuid: Option<UuidText>,
    xattrs: Option<BTreeMap<String, String>>,
) -> NewLvol {
    NewLvol { name, uuid: uuid.map(|u| u.0), xattrs: bytes_of(xattrs) }
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetParent {
    /// UUID or LVSTORE/LVOL of what gets another parent.
    lvol_name: String,
    /// UUID or LVSTORE/LVOL of the snapshot.
    parent_name: String,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct RollBack {
    /// UUID or LVSTORE/LVOL.
    lvol_name: String,
    /// UUID or LVSTORE/LVOL of the snapshot.
    snapshot_name: String,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct RollBackTogether {
    /// Each lvol, of one lvstore, and the snapshot that it is to read as.
    rollbacks: Vec<RollBack>,
}

/// Adds the methods.
pub fn add(methods: &mut Methods, app: &Arc<App>) {
    let a = app.clone();
    methods
        .add(
            "bdev_lvol_snapshot",
            "Take a snapshot of an lvol, in use or not, and return its UUID. What was written before is \
             durable then.",
            Flags::LONG_WRITE,
            move |p: Snapshot| {
                let new = new_lvol(p.snapshot_name, p.lvol_uuid, p.xattrs);
                let taken = a.store_of(&p.lvol_name).snapshot(&p.lvol_name, &new);
                taken.map(|info| info.uuid.to_string())
            },
        )
        .errors(&[Errno::NoDev, Errno::Exist, Errno::Busy, Errno::NoSpc, Errno::Inval, Errno::Io])
        .errors(&[Errno::Perm])
        .errors(OF_POOLS);
    let a = app.clone();
    methods
        .add(
            "virtlun_lvol_snapshot_together",
            "Take snapshots of several lvols of one lvstore, all at one instant, and return their UUIDs in \
             order; all are taken or none.",
            Flags::LONG_WRITE,
            move |p: Together| {
                let all: Vec<_> = p
                    .snapshots
                    .into_iter()
                    .map(|s| (s.lvol_name, new_lvol(s.snapshot_name, s.lvol_uuid, s.xattrs)))
                    .collect();
                let all: Vec<_> = all.iter().map(|(of, new)| (of.as_str(), new)).collect();
                let first = all.first().map_or("", |(of, _)| of);
                let taken = a.store_of(first).snapshot_together(&all)?;
                Ok(taken.iter().map(|info| info.uuid.to_string()).collect::<Vec<_>>())
            },
        )
        .errors(&[Errno::NoDev, Errno::Exist, Errno::Busy, Errno::NoSpc, Errno::Inval, Errno::Io])
        .errors(&[Errno::Perm])
        .errors(OF_POOLS);
    let a = app.clone();
    methods
        .add(
            "bdev_lvol_start_shallow_copy",
            "Begin to copy what a read-only lvol itself has, without what its snapshots have, to the same \
             places of a bdev.",
            Flags::READ,
            move |p: ShallowCopy| {
                let store = a.store_of(&p.src_lvol_name);
                let begun = store.shallow_copy(&p.src_lvol_name, &p.dst_bdev_name);
                begun.map(|operation_id| ShallowCopyBegun { operation_id })
            },
        )
        .errors(&[Errno::NoDev, Errno::Busy, Errno::Perm, Errno::Inval, Errno::Io])
        .errors(OF_POOLS);
    let a = app.clone();
    methods
        .add(
            "bdev_lvol_check_shallow_copy",
            "Get how far a shallow copy has come; one that has ended is told once.",
            Flags::READ,
            move |p: CheckShallowCopy| shallow_copy(&a, p.operation_id),
        )
        .errors(&[Errno::NoDev]);
    let a = app.clone();
    methods
        .add(
            "virtlun_lvol_get_allocated_ranges",
            "Get parts of an lvol that may hold anything but zeros, page by page; no data is read.",
            Flags::READ,
            move |p: Allocated| ranges(&a, &p.name, None, p.offset, p.max_ranges),
        )
        .errors(&[Errno::NoDev, Errno::Inval])
        .errors(OF_POOLS);
    let a = app.clone();
    methods
        .add(
            "virtlun_lvol_get_changed_ranges",
            "Get parts of an lvol that may differ from a snapshot, page by page; no data is read.",
            Flags::READ,
            move |p: Changed| ranges(&a, &p.name, Some(&p.since), p.offset, p.max_ranges),
        )
        .errors(&[Errno::NoDev, Errno::Inval])
        .errors(OF_POOLS);
    let a = app.clone();
    methods
        .add(
            "virtlun_lvol_roll_back",
            "Have an lvol that nobody uses read as a snapshot which it is made of, with its size; snapshots that \
             were taken since stay.",
            Flags::LONG_WRITE,
            move |p: RollBack| {
                not_awaited(&a, &p.lvol_name)?;
                let store = a.store_of(&p.lvol_name);
                store.roll_back(&p.lvol_name, &p.snapshot_name).map(|()| true)
            },
        )
        .errors(&[Errno::NoDev, Errno::Busy, Errno::Inval, Errno::Perm, Errno::Io])
        .errors(OF_POOLS);
    let a = app.clone();
    methods
        .add(
            "virtlun_lvol_roll_back_together",
            "Have several lvols of one lvstore that nobody uses read as snapshots in it, each with its snapshot's \
             size and thin: all or none, also if the target or its host ends meanwhile. A snapshot need not be one \
             of the lvol.",
            Flags::LONG_WRITE,
            move |p: RollBackTogether| {
                let all = p.rollbacks.iter().map(|r| (&*r.lvol_name, &*r.snapshot_name));
                let all: Vec<_> = all.collect();
                all.iter().try_for_each(|(lvol, _)| not_awaited(&a, lvol))?;
                let first = all.first().map_or("", |(lvol, _)| lvol);
                a.store_of(first).roll_back_together(&all).map(|()| true)
            },
        )
        .errors(&[Errno::NoDev, Errno::Busy, Errno::Inval, Errno::Perm, Errno::Io])
        .errors(OF_POOLS);
    let a = app.clone();
    methods
        .add(
            "bdev_lvol_clone",
            "Create a clone of a snapshot and return its UUID. It takes nothing until it is written.",
            Flags::LONG_WRITE,
            move |p: Clone| {
                let new = new_lvol(p.clone_name, p.lvol_uuid, p.xattrs);
                let clone = a.store_of(&p.snapshot_name).clone_of(&p.snapshot_name, &new);
                clone.map(|info| info.uuid.to_string())
            },
        )
        .errors(&[Errno::NoDev, Errno::Exist, Errno::Busy, Errno::NoSpc, Errno::Inval, Errno::Io])
        .errors(OF_POOLS);
    let a = app.clone();
    methods
        .add(
            "bdev_lvol_clone_bdev",
            "Create a clone of any bdev, such as a read-only image file, and return its UUID. It takes nothing \
             until it is written; nobody may write to the bdev meanwhile.",
            Flags::LONG_WRITE,
            move |p: CloneBdev| {
                let instead = "clone a snapshot that it has, or copy the bdev";
                a.only_lvstores(&p.lvs_name, instead)?;
                let new = new_lvol(p.clone_name, p.lvol_uuid, p.xattrs);
                let clone = a.lvstores.clone_bdev(&p.bdev, &p.lvs_name, &new);
                clone.map(|info| info.uuid.to_string()).map_err(errors::lvol)
            },
        )
        .errors(&[Errno::NoDev, Errno::Exist, Errno::Busy, Errno::NoSpc, Errno::Inval, Errno::Io])
        .errors(OF_POOLS);
    let a = app.clone();
    methods
        .add(
            "bdev_lvol_inflate",
            "Give an lvol, in use or not, all clusters that it lacks: it is thick then, without a parent.",
            Flags::LONG_WRITE,
            move |p: BdevName| a.store_of(&p.name).inflate(&p.name).map(|()| true),
        )
        .errors(&[Errno::NoDev, Errno::Busy, Errno::NoSpc, Errno::Inval, Errno::Io])
        .errors(OF_POOLS);
    let a = app.clone();
    methods
        .add(
            "bdev_lvol_decouple_parent",
            "Give an lvol, in use or not, what its parent itself has: it has that one's parent then, or none.",
            Flags::LONG_WRITE,
            move |p: BdevName| a.store_of(&p.name).decouple_parent(&p.name).map(|()| true),
        )
        .errors(&[Errno::NoDev, Errno::Busy, Errno::NoSpc, Errno::Inval, Errno::Io])
        .errors(OF_POOLS);
    let a = app.clone();
    methods
        .add(
            "bdev_lvol_set_parent",
            "Give a thin lvol that nobody uses a snapshot of its size as its parent.",
            Flags::LONG_WRITE,
            move |p: SetParent| {
                not_awaited(&a, &p.lvol_name)?;
                let store = a.store_of(&p.lvol_name);
                store.set_parent(&p.lvol_name, &p.parent_name).map(|()| true)
            },
        )
        .errors(&[Errno::NoDev, Errno::Exist, Errno::Busy, Errno::Inval, Errno::Perm, Errno::Io])
        .errors(OF_POOLS);
    let a = app.clone();
    methods
        .add(
            "bdev_lvol_set_parent_bdev",
            "Give a thin lvol that nobody uses a bdev of its size as its parent.",
            Flags::LONG_WRITE,
            move |p: SetParentBdev| {
                let store = a.store_of(&p.lvol_name);
                store.set_parent_bdev(&p.lvol_name, &p.parent_name).map(|()| true)
            },
        )
        .errors(&[Errno::NoDev, Errno::Exist, Errno::Busy, Errno::Inval, Errno::Perm, Errno::Io])
        .errors(OF_POOLS);
}
