//! What configured things are called, and which call makes which.

use super::call::{Call, Subsystem};
use serde_json::{Value, json};

/// What the keys of bdevs begin with.
pub const BDEV_KEY: &str = "bdev ";

/// What the keys of the owners of controllers begin with.
pub const OWNER_KEY: &str = "owner of controller ";

/// Key of the ublk target.
pub const UBLK_KEY: &str = "ublk target";

/// Key of what holds for all bdevs on LUNs of iSCSI targets.
pub const ISCSI_OPTIONS_KEY: &str = "iSCSI options";

/// Key of what holds for NVMe controllers.
pub const NVME_OPTIONS_KEY: &str = "NVMe options";

/// Key of a bdev; of an NVMe controller's, by the controller's name.
pub fn bdev_key(name: &str) -> String {
    format!("{BDEV_KEY}{name}")
}

/// Key of a cluster of Ceph.
pub fn cluster_key(name: &str) -> String {
    format!("cluster {name}")
}

/// Key of a pool whose images, LUNs or namespaces are volumes.
pub fn pool_key(name: &str) -> String {
    format!("pool {name}")
}

/// Key of an export of a bdev.
pub fn export_key(bdev: &str) -> String {
    format!("export of bdev {bdev}")
}

/// Key of a controller.
pub fn controller_key(ctrlr: &str) -> String {
    format!("controller {ctrlr}")
}

/// Key of a target of a controller.
pub fn target_key(ctrlr: &str, number: u64) -> String {
    format!("target {number} of controller {ctrlr}")
}

/// Key of whom a controller belongs to.
pub fn owner_key(ctrlr: &str) -> String {
    format!("{OWNER_KEY}{ctrlr}")
}

/// Key of a controller's coalescing.
pub fn coalescing_key(ctrlr: &str) -> String {
    format!("coalescing of controller {ctrlr}")
}

/// Key of the limits of a bdev.
pub fn limits_key(bdev: &str) -> String {
    format!("limits of bdev {bdev}")
}

/// Whose a call is, and what it makes.
pub fn identify(call: &Call) -> (Subsystem, String) {
    let text = |name: &str| call.params.get(name).and_then(Value::as_str).unwrap_or_default();
    match call.method.as_str() {
        "vhost_create_scsi_controller" => (Subsystem::VhostScsi, controller_key(text("ctrlr"))),
        "vhost_create_blk_controller" => (Subsystem::VhostBlk, controller_key(text("ctrlr"))),
        "vhost_scsi_controller_add_target" => {
            let number = call.params.get("scsi_target_num").and_then(Value::as_u64);
            (Subsystem::VhostScsi, target_key(text("ctrlr"), number.unwrap_or_default()))
        }
        "virtlun_bdev_set_limits" => (Subsystem::Bdev, limits_key(text("name"))),
        "bdev_rbd_register_cluster" => (Subsystem::Bdev, cluster_key(text("name"))),
        "bdev_iscsi_set_options" => (Subsystem::Bdev, ISCSI_OPTIONS_KEY.to_owned()),
        "bdev_nvme_set_options" => (Subsystem::Bdev, NVME_OPTIONS_KEY.to_owned()),
        "bdev_nvme_attach_controller" => (Subsystem::Bdev, bdev_key(text("name"))),
        "virtlun_rbd_pool_create" | "virtlun_iscsi_pool_create" | "virtlun_nvme_pool_create" => {
            (Subsystem::Bdev, pool_key(text("name")))
        }
        "virtlun_export_create" => (Subsystem::Bdev, export_key(text("bdev_name"))),
        "ublk_create_target" => (Subsystem::Ublk, UBLK_KEY.to_owned()),
        "ublk_start_disk" => (Subsystem::Ublk, export_key(text("bdev_name"))),
        "virtlun_controller_set_owner" => (Subsystem::VhostScsi, owner_key(text("ctrlr"))),
        "vhost_controller_set_coalescing" => (Subsystem::VhostScsi, coalescing_key(text("ctrlr"))),
        "vhost_start_scsi_controller" => {
            (Subsystem::VhostScsi, format!("start of controller {}", text("ctrlr")))
        }
        "bdev_error_create" => {
            let name = format!("{}{}", faults::Failing::PREFIX, text("base_name"));
            (Subsystem::Bdev, bdev_key(&name))
        }
        "virtlun_nbd_create" => (Subsystem::Bdev, bdev_key(text("name"))),
        method if method.starts_with("bdev_") && method.ends_with("_create") => {
            (Subsystem::Bdev, bdev_key(text("name")))
        }
        // Written by another version: kept as it is.
        method => (Subsystem::Bdev, format!("{method} {}", json!(call.params))),
    }
}
