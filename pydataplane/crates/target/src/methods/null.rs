//! Bdevs that keep nothing.

use super::{MIB, UuidText, mib_to_bytes, unsupported};
use crate::app::App;
use crate::errors;
use crate::state;
use bdev::{Bdev, Null};
use rpc::{Errno, Error, Flags, Methods};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::sync::Arc;

#[derive(Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Create {
    /// Name.
    name: String,
    /// Bytes of a block: 512 or 4096.
    block_size: u32,
    /// Blocks.
    num_blocks: u64,
    /// UUID. Default: a random one
    #[serde(default)]
    uuid: Option<UuidText>,
    /// Not supported yet but for block_size.
    #[serde(default)]
    physical_block_size: Option<u32>,
    /// Not supported yet but for 0.
    #[serde(default)]
    md_size: Option<u32>,
    /// Not supported yet but for 0.
    #[serde(default)]
    dif_type: Option<i32>,
    /// Not supported yet but for 0.
    #[serde(default)]
    dif_pi_format: Option<u32>,
    /// Not supported yet but for false.
    #[serde(default)]
    dif_is_head_of_md: Option<bool>,
    /// Not supported yet but for 0.
    #[serde(default)]
    preferred_write_granularity: Option<u32>,
    /// Not supported yet but for 0.
    #[serde(default)]
    preferred_write_alignment: Option<u32>,
    /// Not supported yet but for 0.
    #[serde(default)]
    optimal_write_size: Option<u32>,
    /// Not supported yet but for 0.
    #[serde(default)]
    preferred_unmap_granularity: Option<u32>,
    /// Not supported yet but for 0.
    #[serde(default)]
    preferred_unmap_alignment: Option<u32>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Resize {
    /// Name of the bdev.
    name: String,
    /// New size in MiB.
    new_size: u64,
}

fn create(app: &App, mut p: Create) -> Result<String, Error> {
    let some = |value: Option<u32>| value.unwrap_or(0) != 0;
    unsupported(
        "bdev_null_create",
        &[
            (
                "physical_block_size",
                some(p.physical_block_size) && p.physical_block_size != Some(p.block_size),
            ),
            ("md_size", some(p.md_size)),
            ("dif_type", p.dif_type.unwrap_or(0) != 0),
            ("dif_pi_format", some(p.dif_pi_format)),
            ("dif_is_head_of_md", p.dif_is_head_of_md.unwrap_or(false)),
            ("preferred_write_granularity", some(p.preferred_write_granularity)),
            ("preferred_write_alignment", some(p.preferred_write_alignment)),
            ("optimal_write_size", some(p.optimal_write_size)),
            ("preferred_unmap_granularity", some(p.preferred_unmap_granularity)),
            ("preferred_unmap_alignment", some(p.preferred_unmap_alignment)),
        ],
    )?;
    super::check_name(&p.name)?;
    let uuid = p.uuid.map(|u| u.0);
    let null = Null::create(&p.name, p.block_size, p.num_blocks, uuid).map_err(errors::open)?;
    p.uuid = Some(UuidText(null.uuid()));
    super::created(app, null, "bdev_null_create", &p)
}

fn resize(app: &App, p: &Resize) -> Result<bool, Error> {
    let bdev = super::of_kind(app, &p.name, "Null disk")?;
    let null = app.registry.get_as::<Null>(bdev.name());
    let null = null.ok_or_else(|| Error::internal("a null disk is of another type"))?;
    let bytes = mib_to_bytes(p.new_size)?;
    let num_blocks = bytes / u64::from(null.geometry().block_size);
    null.resize(num_blocks).map_err(errors::open)?;
    app.registry.notify_resized(null.name());
    let key = state::bdev_key(null.name());
    app.config().set_param(&key, "num_blocks", json!(num_blocks));
    tracing::debug!(bdev = null.name(), mib = bytes / MIB, "resized");
    Ok(true)
}

/// Adds the methods.
pub fn add(methods: &mut Methods, app: &Arc<App>) {
    let a = app.clone();
    methods
        .add(
            "bdev_null_create",
            "Create a bdev that takes every write and reads as nothing in particular.",
            Flags::WRITE,
            move |p: Create| create(&a, p),
        )
        .errors(&[Errno::Exist, Errno::Inval, Errno::NotSup]);
    super::add_delete(methods, app, "bdev_null_delete", "Delete a null bdev.", "Null disk");
    let a = app.clone();
    methods
        .add(
            "bdev_null_resize",
            "Change the size of a null bdev, in use or not.",
            Flags::WRITE,
            move |p: Resize| resize(&a, &p),
        )
        .errors(&[Errno::NoDev, Errno::Inval]);
}
