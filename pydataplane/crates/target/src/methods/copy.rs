//! Copies of targets' bdevs while their guests use them.

use crate::app::App;
use crate::copies::{self, CopyInfo};
use mirror::Phase;
use rpc::{Errno, Flags, Methods};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Start {
    /// Name of the controller.
    ctrlr: String,
    /// Number of the target; 0 is the disk of a virtio-blk controller.
    scsi_target_num: u8,
    /// Bdev to copy to, which nobody else may use and which is no smaller: name, alias or UUID.
    dst_bdev_name: String,
    /// Bytes a second to read at most; 0 for as many as the disks can. Default: 0
    #[serde(default)]
    bytes_per_second: Option<u64>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Limit {
    /// Name of the controller.
    ctrlr: String,
    /// Number of the target.
    scsi_target_num: u8,
    /// Bytes a second to read at most; 0 for as many as the disks can.
    bytes_per_second: u64,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Of {
    /// Name of the controller.
    ctrlr: String,
    /// Number of the target.
    scsi_target_num: u8,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Which {
    /// Name of one controller. Default: all
    #[serde(default)]
    ctrlr: Option<String>,
    /// Number of one target. Default: all
    #[serde(default)]
    scsi_target_num: Option<u8>,
}

/// A copy.
#[derive(Serialize, JsonSchema)]
struct Copy {
    ctrlr: String,
    scsi_target_num: u8,
    /// Bdev that is copied, which the target is on.
    src_bdev_name: String,
    /// Bdev that it is copied to.
    dst_bdev_name: String,
    /// copying; ready: both have the same, and it can be pivoted; failed: it is over, and waits for its
    /// abort.
    state: &'static str,
    /// Bytes from the start of the bdev that were dealt with, of so many.
    copied_bytes: u64,
    total_bytes: u64,
    /// Bytes a second that are read at most; 0: as many as the disks can.
    bytes_per_second: u64,
    /// Why it failed, in one sentence.
    error: Option<String>,
}

impl From<CopyInfo> for Copy {
    fn from(info: CopyInfo) -> Copy {
        let progress = info.progress;
        Copy {
            ctrlr: info.ctrlr,
            scsi_target_num: info.number,
            src_bdev_name: info.source,
            dst_bdev_name: info.destination,
            state: match progress.phase {
                Phase::Copying => "copying",
                Phase::Ready => "ready",
                Phase::Failed | Phase::Stopped => "failed",
            },
            copied_bytes: progress.copied,
            total_bytes: progress.total,
            bytes_per_second: progress.limit,
            error: progress.failure,
        }
    }
}

/// Adds the methods.
pub fn add(methods: &mut Methods, app: &Arc<App>) {
    let a = app.clone();
    methods
        .add(
            "virtlun_lun_copy_start",
            "Begin to copy the bdev of a target to another, while its guest uses it: what it writes \
             meanwhile goes to both. The copy is lost when this process ends before its pivot.",
            Flags::READ,
            move |p: Start| {
                let limit = p.bytes_per_second.unwrap_or(0);
                copies::start(&a, &p.ctrlr, p.scsi_target_num, &p.dst_bdev_name, limit).map(|()| true)
            },
        )
        .errors(&[Errno::NoDev, Errno::NoKey, Errno::Busy, Errno::Inval, Errno::Io, Errno::NoMem]);
    let a = app.clone();
    methods.add(
        "virtlun_lun_copy_check",
        "Get how far the copies of targets' bdevs have come, of all or of one. One that failed is told until \
         it is aborted.",
        Flags::READ,
        move |p: Which| {
            let all = a.copies.list(p.ctrlr.as_deref(), p.scsi_target_num);
            Ok(all.into_iter().map(Copy::from).collect::<Vec<_>>())
        },
    );
    let a = app.clone();
    methods
        .add(
            "virtlun_lun_copy_set_limit",
            "Limit the copy of a target's bdev to so many bytes a second.",
            Flags::READ,
            move |p: Limit| {
                copies::set_limit(&a, &p.ctrlr, p.scsi_target_num, p.bytes_per_second)
                    .map(|()| true)
            },
        )
        .errors(&[Errno::NoDev]);
    let a = app.clone();
    methods
        .add(
            "virtlun_lun_copy_pivot",
            "Have a target whose bdev is copied, and ready, go on with the copy, as the same disk to its \
             guest: also after a crash, once this has returned.",
            Flags::LONG_WRITE,
            move |p: Of| copies::pivot(&a, &p.ctrlr, p.scsi_target_num).map(|()| true),
        )
        .errors(&[Errno::NoDev, Errno::Busy, Errno::Io]);
    let a = app.clone();
    methods
        .add(
            "virtlun_lun_copy_abort",
            "End the copy of a target's bdev, one that failed as well: the target goes on with its bdev, and \
             the other is free.",
            Flags::READ,
            move |p: Of| {
                copies::abort(&a, &p.ctrlr, p.scsi_target_num)?;
                a.close_unused_volumes_for_good();
                Ok(true)
            },
        )
        .errors(&[Errno::NoDev, Errno::Busy]);
}
