//! Bdevs in memory.

use super::protected::{self, Asked};
use super::{UuidText, unsupported};
use crate::app::App;
use crate::errors;
use bdev::{Bdev, Malloc, MallocOptions};
use rpc::{Errno, Error, Flags, Methods};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

#[derive(Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Create {
    /// Name. Default: Malloc0 or the next number that is free
    #[serde(default)]
    name: Option<String>,
    /// Bytes of a block: 512 or 4096.
    block_size: u32,
    /// Blocks.
    num_blocks: u64,
    /// UUID. Default: a random one
    #[serde(default)]
    uuid: Option<UuidText>,
    /// Bytes of a physical block, a power of two. Default: as block_size
    #[serde(default)]
    physical_block_size: Option<u32>,
    /// Not supported yet but for 0.
    #[serde(default)]
    optimal_io_boundary: Option<u32>,
    /// Bytes of metadata of each block: 8 with dif_type, else 0. Default: 0
    #[serde(default)]
    md_size: Option<u32>,
    /// Show metadata as part of the block. Default: false
    #[serde(default)]
    md_interleave: Option<bool>,
    /// Type of T10 protection information: 1 or 3, or 0 for none. Default: 0
    #[serde(default)]
    dif_type: Option<i32>,
    /// Without effect: metadata is as long as protection information. Default: false
    #[serde(default)]
    dif_is_head_of_md: Option<bool>,
    /// Not supported but for 0: guards of 16 bits.
    #[serde(default)]
    dif_pi_format: Option<u32>,
    /// Not supported yet but for -1: memory comes from the node that touches it first.
    #[serde(default)]
    numa_id: Option<i32>,
}

fn create(app: &App, mut p: Create) -> Result<String, Error> {
    unsupported(
        "bdev_malloc_create",
        &[
            ("optimal_io_boundary", p.optimal_io_boundary.unwrap_or(0) != 0),
            ("numa_id", p.numa_id.unwrap_or(-1) != -1),
        ],
    )?;
    let asked = Asked {
        md_size: p.md_size,
        md_interleave: p.md_interleave,
        dif_type: p.dif_type,
        dif_is_head_of_md: p.dif_is_head_of_md,
        dif_pi_format: p.dif_pi_format,
    };
    let protection = asked.checked("bdev_malloc_create")?;
    let name = match p.name.take() {
        Some(name) => name,
        None => (0u64..)
            .map(|i| format!("Malloc{i}"))
            .find(|name| app.registry.get(name).is_none())
            .ok_or_else(|| Error::internal("no name is free"))?,
    };
    super::check_name(&name)?;
    let options = MallocOptions {
        name: name.clone(),
        block_size: p.block_size,
        physical_block_size: p.physical_block_size.unwrap_or(0),
        num_blocks: p.num_blocks,
        uuid: p.uuid.map(|u| u.0),
    };
    let malloc = Malloc::with_metadata(options, protected::bytes_of(protection));
    let malloc = malloc.map_err(errors::open)?;
    if let Some(content) = app.inherited_memory(&name) {
        let loaded = malloc.load(content);
        loaded.map_err(|e| Error::io(format_args!("the content of bdev {name} is lost"), &e))?;
    }
    p.name = Some(name);
    p.uuid = Some(UuidText(malloc.uuid()));
    super::created(app, protected::shown(malloc, protection), "bdev_malloc_create", &p)
}

/// Adds the methods.
pub fn add(methods: &mut Methods, app: &Arc<App>) {
    let a = app.clone();
    methods
        .add(
            "bdev_malloc_create",
            "Create a bdev in memory. Its contents survive an upgrade, but no restart, of the target.",
            Flags::WRITE,
            move |p: Create| create(&a, p),
        )
        .errors(&[Errno::Exist, Errno::Inval, Errno::NotSup]);
    super::add_delete(
        methods,
        app,
        "bdev_malloc_delete",
        "Delete a bdev in memory.",
        "Malloc disk",
    );
}
