//! Bdevs of all kinds: listing and examination.

use super::BdevName;
use super::limits::{self, RateLimitsInfo};
use super::protected::Metadata;
use crate::app::App;
use crate::errors;
use crate::flusherror;
use crate::flushrecord;
use bdev::{Bdev, ClaimMode, FileBdev, FlushFailure};
use nbd::Nbd;
use rpc::{Errno, Error, Flags, Methods, NoParams};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Longest wait for a bdev to appear, in milliseconds: one day.
const MAX_WAIT_MS: u64 = 86_400_000;

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetBdevs {
    /// Name, alias or UUID of one bdev. Default: all
    #[serde(default)]
    name: Option<String>,
    /// Milliseconds to wait for the named bdev to appear. Default: 0
    #[serde(default)]
    timeout: Option<u64>,
}

/// A bdev, with SPDK's fields.
#[derive(Serialize, JsonSchema)]
struct BdevInfo {
    name: String,
    aliases: Vec<String>,
    product_name: &'static str,
    /// Bytes of a logical block, with its metadata where that is part of it (md_interleave).
    block_size: u32,
    /// Size in logical blocks.
    num_blocks: u64,
    preferred_unmap_granularity: u32,
    #[schemars(with = "String")]
    uuid: Uuid,
    #[serde(flatten)]
    metadata: Option<Metadata>,
    assigned_rate_limits: RateLimitsInfo,
    /// Whether it has any limit: virtlun_bdev_get_limits tells which (ours).
    has_limits: bool,
    /// Whether somebody holds it.
    claimed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    claim_type: Option<&'static str>,
    /// Who holds it (ours).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    claimed_by: Vec<String>,
    zoned: bool,
    supported_io_types: BTreeMap<&'static str, bool>,
    /// Why every flush fails until virtlun_bdev_clear_flush_error, if so (ours).
    #[serde(skip_serializing_if = "Option::is_none")]
    flush_error: Option<String>,
    /// What its kind alone has, under the kind's name.
    driver_specific: Value,
}

fn info(app: &App, bdev: &dyn Bdev) -> BdevInfo {
    let (geometry, features) = (bdev.geometry(), bdev.features());
    let metadata = Metadata::of(bdev);
    let holders = app.registry.owners(bdev.name());
    let claim_type = holders.iter().find_map(|(_, mode)| match mode {
        ClaimMode::Exclusive => Some("exclusive_write"),
        ClaimMode::Shared => Some("read_many_write_shared"),
        ClaimMode::Unchanged => Some("read_many_write_none"),
        ClaimMode::Reader => None,
    });
    let supported = [
        ("read", true),
        ("write", !features.read_only),
        ("unmap", features.unmap && !features.read_only),
        ("flush", true),
        ("reset", false),
        ("nvme_admin", false),
        ("nvme_io", false),
        ("nvme_io_md", false),
        ("write_zeroes", features.write_zeroes && !features.read_only),
        ("zcopy", false),
        ("get_zone_info", false),
        ("zone_management", false),
        ("zone_append", false),
        ("compare", false),
        ("compare_and_write", false),
        ("abort", false),
        ("seek_hole", false),
        ("seek_data", false),
        ("copy", false),
        ("nvme_iov_md", false),
    ];
    BdevInfo {
        name: bdev.name().to_owned(),
        aliases: bdev.aliases(),
        product_name: bdev.product_name(),
        block_size: geometry.block_size + metadata.as_ref().map_or(0, Metadata::in_block),
        num_blocks: geometry.num_blocks,
        preferred_unmap_granularity: features.unmap_granularity,
        uuid: bdev.uuid(),
        metadata,
        assigned_rate_limits: limits::assigned(app, bdev.name()),
        has_limits: app.registry.limits(bdev.name()).get().is_limited(),
        claimed: !holders.is_empty(),
        claim_type,
        claimed_by: holders.into_iter().map(|(owner, _)| owner).collect(),
        zoned: false,
        supported_io_types: supported.into_iter().collect(),
        flush_error: flush_error(bdev),
        driver_specific: app.specific(bdev),
    }
}

fn get_bdevs(app: &App, p: &GetBdevs) -> Result<Vec<BdevInfo>, Error> {
    let Some(name) = &p.name else {
        let mut all = app.registry.list();
        all.extend(app.closed_volumes());
        return Ok(all.iter().map(|b| info(app, &**b)).collect());
    };
    if app.registry.get(name).is_none()
        && let Some(volume) = app.look_at_volume(name)?
    {
        return Ok(vec![info(app, &*volume)]);
    }
    let wait = Duration::from_millis(p.timeout.unwrap_or(0).min(MAX_WAIT_MS));
    let found = app.notices.wait_until(Instant::now() + wait, || app.registry.get(name));
    let bdev = found.ok_or_else(|| app.no_bdev(name))?;
    app.refresh_volume(bdev.name());
    Ok(vec![info(app, &*bdev)])
}

/// Why every flush of `bdev` fails, if so.
pub(super) fn flush_error(bdev: &dyn Bdev) -> Option<String> {
    Some(flusherror::sentence(bdev.flush_latch()?.failure()?, bdev.name()))
}

/// The disk whose latch `bdev` shares.
fn disk_below(app: &App, bdev: &dyn Bdev) -> Option<Arc<dyn Bdev>> {
    let latch = bdev.flush_latch()?;
    let disks = app.registry.list().into_iter();
    let mut disks = disks.filter_map(|b| flushrecord::disk(&app.registry, b.name()));
    disks.find(|disk| disk.flush_latch().is_some_and(|other| std::ptr::eq(latch, other)))
}

/// Clears the latch of `disk`, one of [`disk_below`], if that can be flushed now.
fn clear_latch(app: &App, disk: &str) -> Result<Option<FlushFailure>, Error> {
    let what = format!("bdev {disk} still cannot be flushed");
    if let Some(nbd) = app.registry.get_as::<Nbd>(disk) {
        let why = |e| Error::os(Errno::Io, format_args!("{what}: {e}"));
        return nbd.clear_flush_failure().map_err(why);
    }
    if let Some(lun) = app.registry.get_as::<iscsi::Disk>(disk) {
        let why = |why| Error::os(Errno::Io, format!("{what}: {why}"));
        return lun.clear_flush_failure().map_err(why);
    }
    if let Some(disk) = app.registry.get_as::<nvme::Disk>(disk) {
        let why = |why| Error::os(Errno::Io, format!("{what}: {why}"));
        return disk.clear_flush_failure().map_err(why);
    }
    let file = app.registry.get_as::<FileBdev>(disk).ok_or_else(|| errors::no_bdev(disk))?;
    file.clear_flush_failure().map_err(|e| Error::io(what, &e))
}

fn clear_flush_error(app: &App, name: &str) -> Result<bool, Error> {
    let bdev = app.bdev(name)?;
    let Some(disk) = disk_below(app, &*bdev) else {
        let why = format!("bdev {name} is on no file or block device, so no flush of it can fail");
        return Err(Error::os(Errno::Inval, why));
    };
    let failure = clear_latch(app, disk.name())?;
    if let Some(failure) = failure {
        tracing::warn!(bdev = disk.name(), "flush error cleared: {failure}");
    }
    if let Some(on) = app.registry.get_as::<iscsi::Disk>(disk.name()) {
        // What is there has a latch of its own.
        let is_there = |name: &str| app.registry.get(name).is_some();
        app.config().clear_flush_failures_of_lun(on.lun().identity, is_there);
    }
    // After the latch: at a crash in between the failure is known again, and nobody was told that it
    // is cleared.
    let recorded = app.flush_errors.record().map_err(errors::state);
    let latch = disk.flush_latch().ok_or_else(|| Error::internal("a disk has no latch"))?;
    let reloaded = app.lvstores.reload_on(latch).map_err(errors::lvol)?;
    recorded?;
    Ok(failure.is_some() || !reloaded.is_empty())
}

/// Adds the methods.
pub fn add(methods: &mut Methods, app: &Arc<App>) {
    let a = app.clone();
    methods
        .add("bdev_get_bdevs", "Get all bdevs, or one.", Flags::READ, move |p: GetBdevs| {
            get_bdevs(&a, &p)
        })
        .errors(&[Errno::NoDev, Errno::NoKey]);
    methods.add(
        "bdev_wait_for_examine",
        "Return when all bdevs have been examined, which here is before a bdev is shown at all.",
        Flags::READ,
        |_: NoParams| Ok(true),
    );
    let a = app.clone();
    methods
        .add(
            "bdev_examine",
            "Look for an lvstore on a bdev and load it; for one that could not be loaded before.",
            Flags::LONG_WRITE,
            move |p: BdevName| {
                a.bdev(&p.name)?;
                a.examine(&p.name).map(|()| true)
            },
        )
        .errors(&[Errno::NoDev, Errno::NoKey, Errno::Busy, Errno::IlSeq, Errno::Io]);
    let a = app.clone();
    methods.add(
        "virtlun_guest_disk_close",
        "Close a bdev that was made with guest_disk, at once though it is new; one that anybody uses stays. \
         False where there is none.",
        Flags::WRITE,
        move |p: BdevName| Ok(a.let_go_of_guest_disk(&p.name)),
    );
    let a = app.clone();
    methods
        .add(
            "virtlun_bdev_clear_flush_error",
            "Let flushes of a bdev, and of all on the same file or block device, through again after \
             one failed, and load a stopped lvstore on it anew; false if there was nothing to clear. \
             Until then the failure is known, also after a restart, a crash or an upgrade of the \
             target; deleting the bdev forgets it.",
            Flags::LONG_WRITE,
            move |p: BdevName| clear_flush_error(&a, &p.name),
        )
        .errors(&[
            Errno::NoDev,
            Errno::NoKey,
            Errno::Inval,
            Errno::Busy,
            Errno::IlSeq,
            Errno::Io,
        ]);
}
