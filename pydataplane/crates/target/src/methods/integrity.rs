//! Bdevs with checksums. They are not recorded: what is on a base says what they are, and they come with it.

use super::{BdevName, check_name};
use crate::app::App;
use crate::errors;
use ::bdev::Bdev;
use ::integrity::{Counted, Integrity, PRODUCT};
use rpc::{Errno, Error, Flags, Methods};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Create {
    /// Bdev to lie on; what is on it is lost.
    base_bdev_name: String,
    /// Name, which is noted on the base: 1 to 63 bytes.
    name: String,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Get {
    /// Name of one bdev. Default: all
    #[serde(default)]
    name: Option<String>,
}

/// A bdev with checksums.
#[derive(Serialize, JsonSchema)]
struct Info {
    /// Name.
    name: String,
    /// Bdev that it lies on.
    base_bdev_name: String,
    /// Reads, since it was loaded, that met a block which is not what was written to it.
    mismatches: u64,
    /// Numbers of such blocks, of 4096 bytes: some of them.
    damaged_blocks: Vec<u64>,
    /// Pages of checksums that were damaged when they were read.
    damaged_checksum_pages: u64,
    /// Maps that were damaged when it was loaded: the checksums of that part were made anew.
    damaged_maps: u64,
    /// Regions of 1008 blocks that are written to: after a crash their checksums are made anew.
    dirty_regions: u64,
    /// Regions whose checksums are still to be made anew.
    stale_regions: u64,
    /// Regions whose checksums are in memory.
    cached_regions: u64,
}

fn info(each: &Integrity) -> Info {
    let Counted {
        mismatches,
        damaged_checksum_pages,
        damaged_maps,
        dirty_regions,
        stale_regions,
        cached_regions,
    } = each.counted();
    Info {
        name: each.name().to_owned(),
        base_bdev_name: each.base().name().to_owned(),
        mismatches,
        damaged_blocks: each.damaged(),
        damaged_checksum_pages,
        damaged_maps,
        dirty_regions,
        stale_regions,
        cached_regions,
    }
}

fn create(app: &App, p: &Create) -> Result<String, Error> {
    check_name(&p.name)?;
    if app.registry.get(&p.name).is_some() {
        return Err(Error::os(Errno::Exist, format_args!("there is a bdev {} already", p.name)));
    }
    let base = app.bdev(&p.base_bdev_name)?;
    if base.product_name() == "Logical Volume" {
        let why = format!(
            "bdev {} is an lvol; checksums lie below an lvstore: create them on its bdev, or \
             `virtlun lvstore create --checksums`",
            p.base_bdev_name
        );
        return Err(Error::os(Errno::Inval, why));
    }
    let made = Integrity::create(&app.registry, &p.name, base.name()).map_err(errors::integrity)?;
    app.add_bdev(made)?;
    Ok(p.name.clone())
}

fn delete(app: &App, name: &str) -> Result<bool, Error> {
    super::of_kind(app, name, PRODUCT)?;
    let Some(each) = app.registry.get_as::<Integrity>(name) else {
        return Err(errors::no_bdev(name));
    };
    app.registry.unregister_unused(each.name()).map_err(errors::registry)?;
    app.lvstore_problems().remove(each.name());
    each.destroy().map_err(errors::integrity)?;
    Ok(true)
}

fn get(app: &App, p: &Get) -> Result<Vec<Info>, Error> {
    match &p.name {
        None => Ok(Integrity::all(&app.registry).iter().map(|each| info(each)).collect()),
        Some(name) => {
            let bdev = super::of_kind(app, name, PRODUCT)?;
            let each = app.registry.get_as::<Integrity>(bdev.name());
            Ok(each.iter().map(|each| info(each)).collect())
        }
    }
}

/// Adds the methods.
pub fn add(methods: &mut Methods, app: &Arc<App>) {
    let a = app.clone();
    methods
        .add(
            "virtlun_integrity_create",
            "Create a bdev that keeps a checksum of each 4096 bytes on the bdev that it lies on, which it \
             has for itself, and verifies what is read: what is damaged is a medium error. It is noted on \
             the base, and comes with it.",
            Flags::LONG_WRITE,
            move |p: Create| create(&a, &p),
        )
        .errors(&[
            Errno::NoDev,
            Errno::Exist,
            Errno::Busy,
            Errno::Inval,
            Errno::RoFs,
            Errno::Io,
        ]);
    let a = app.clone();
    methods
        .add(
            "virtlun_integrity_delete",
            "Delete a bdev with checksums, and all that is on it; refused while something uses it, such as an \
             lvstore.",
            Flags::LONG_WRITE,
            move |p: BdevName| delete(&a, &p.name),
        )
        .errors(&[Errno::NoDev, Errno::Busy, Errno::Io]);
    let a = app.clone();
    methods
        .add(
            "virtlun_integrity_get",
            "Get all bdevs with checksums, or one: what they found.",
            Flags::READ,
            move |p: Get| get(&a, &p),
        )
        .errors(&[Errno::NoDev]);
}
