//! Snapshots and clones.

use super::super::BdevName;
use crate::app::App;
use crate::errors;
use rpc::{Errno, Flags, Methods};
use schemars::JsonSchema;
use serde::Deserialize;
use std::sync::Arc;

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Snapshot {
    /// UUID or LVSTORE/LVOL of what it is taken of.
    lvol_name: String,
    /// Name of the snapshot, without the lvstore.
    snapshot_name: String,
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
    /// UUID or LVSTORE/LVOL of one of its snapshots.
    snapshot_name: String,
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
                let taken = a.lvstores.snapshot(&p.lvol_name, &p.snapshot_name);
                taken.map(|info| info.uuid.to_string()).map_err(errors::lvol)
            },
        )
        .errors(&[Errno::NoDev, Errno::Exist, Errno::Busy, Errno::NoSpc, Errno::Inval, Errno::Io])
        .errors(&[Errno::Perm]);
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
                    .iter()
                    .map(|s| (s.lvol_name.as_str(), s.snapshot_name.as_str()))
                    .collect();
                let taken = a.lvstores.snapshot_together(&all).map_err(errors::lvol)?;
                Ok(taken.iter().map(|info| info.uuid.to_string()).collect::<Vec<_>>())
            },
        )
        .errors(&[Errno::NoDev, Errno::Exist, Errno::Busy, Errno::NoSpc, Errno::Inval, Errno::Io])
        .errors(&[Errno::Perm]);
    let a = app.clone();
    methods
        .add(
            "virtlun_lvol_roll_back",
            "Have an lvol that nobody uses read as one of its snapshots, with its size; snapshots that were \
             taken since stay.",
            Flags::LONG_WRITE,
            move |p: RollBack| {
                let done = a.lvstores.roll_back(&p.lvol_name, &p.snapshot_name);
                done.map(|_| true).map_err(errors::lvol)
            },
        )
        .errors(&[Errno::NoDev, Errno::Busy, Errno::Inval, Errno::Perm, Errno::Io]);
    let a = app.clone();
    methods
        .add(
            "bdev_lvol_clone",
            "Create a clone of a snapshot and return its UUID. It takes nothing until it is written.",
            Flags::LONG_WRITE,
            move |p: Clone| {
                let clone = a.lvstores.clone_lvol(&p.snapshot_name, &p.clone_name);
                clone.map(|info| info.uuid.to_string()).map_err(errors::lvol)
            },
        )
        .errors(&[Errno::NoDev, Errno::Exist, Errno::Busy, Errno::NoSpc, Errno::Inval, Errno::Io]);
    let a = app.clone();
    methods
        .add(
            "bdev_lvol_inflate",
            "Give an lvol, in use or not, all clusters that it lacks: it is thick then, without a parent.",
            Flags::LONG_WRITE,
            move |p: BdevName| a.lvstores.inflate(&p.name).map(|()| true).map_err(errors::lvol),
        )
        .errors(&[Errno::NoDev, Errno::Busy, Errno::NoSpc, Errno::Inval, Errno::Io]);
    let a = app.clone();
    methods
        .add(
            "bdev_lvol_decouple_parent",
            "Give an lvol, in use or not, what its parent itself has: it has that one's parent then, or none.",
            Flags::LONG_WRITE,
            move |p: BdevName| {
                a.lvstores.decouple_parent(&p.name).map(|()| true).map_err(errors::lvol)
            },
        )
        .errors(&[Errno::NoDev, Errno::Busy, Errno::NoSpc, Errno::Inval, Errno::Io]);
    let a = app.clone();
    methods
        .add(
            "bdev_lvol_set_parent",
            "Give a thin lvol that nobody uses a snapshot of its size as its parent.",
            Flags::LONG_WRITE,
            move |p: SetParent| {
                let set = a.lvstores.set_parent(&p.lvol_name, &p.parent_name);
                set.map(|()| true).map_err(errors::lvol)
            },
        )
        .errors(&[Errno::NoDev, Errno::Busy, Errno::Inval, Errno::Perm, Errno::Io]);
}
