"""The schemas of `schemas/` are valid, and results are as they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from tests.support.rpc_schemas import strict
from tests.support.target import ROOT, Target

COPIED = {"ctrlr": "vm-1", "scsi_target_num": 0}
READS: dict[str, list[dict[str, Any]]] = {
    "accel_crypto_keys_get": [{}, {"key_name": "k0"}],
    "bdev_error_inject_error": [{"name": "EE_m3", "io_type": "clear", "error_type": "failure"}],
    "bdev_error_resume_pending": [{"name": "EE_m3"}],
    "bdev_enable_histogram": [{"name": "lvs0/v0", "enable": True}],
    "bdev_get_bdevs": [{}, {"name": "lvs0/v0"}],
    "bdev_get_histogram": [{"name": "lvs0/v0"}],
    "bdev_get_histogram_borders": [{"name": "lvs0/v0", "borders": [10, 100]}],
    "bdev_get_iostat": [{}, {"names": ["n0"], "per_channel": True}, {"name": "lvs0/v0"}],
    "bdev_lvol_get_lvols": [{}],
    "bdev_lvol_get_lvstores": [{}],
    "bdev_nvme_get_controllers": [{}],
    "bdev_nvme_get_io_paths": [{}],
    "bdev_reset_iostat": [{}],
    "bdev_wait_for_examine": [{}],
    "virtlun_bdev_get_latencies": [{"borders_ns": [1000]}],
    "virtlun_bdev_get_limits": [{"name": "n0"}],
    "bdev_lvol_start_shallow_copy": [{"src_lvol_name": "lvs0/ro", "dst_bdev_name": "m0"}],
    "bdev_lvol_check_shallow_copy": [{"operation_id": 1}],
    "framework_get_config": [{"name": "bdev"}, {"name": "vhost_scsi"}, {"name": "ublk"}],
    "framework_get_reactors": [{}],
    "framework_get_subsystems": [{}],
    "framework_wait_init": [{}],
    "log_get_level": [{}],
    "log_get_print_level": [{}],
    "log_set_level": [{"level": "INFO"}],
    "log_set_print_level": [{"level": "NOTICE"}],
    "notify_get_notifications": [{}],
    "notify_get_types": [{}],
    "rpc_get_methods": [{}],
    "scsi_get_devices": [{}],
    "spdk_get_version": [{}],
    "spdk_kill_instance": [{"sig_name": "SIGUSR1"}],
    "thread_get_stats": [{}],
    "ublk_get_disks": [{}],
    "bdev_uring_rescan": [{"name": "lvs0-base"}],
    "vhost_controller_set_coalescing": [{"ctrlr": "vm-1", "delay_base_us": 0, "iops_threshold": 1}],
    "vhost_get_controllers": [{}],
    "virtlun_export_get_devices": [{}],
    "virtlun_export_list": [{}],
    "virtlun_get_status": [{}],
    "virtlun_integrity_get": [{}, {"name": "s0"}],
    "virtlun_lun_copy_start": [COPIED | {"dst_bdev_name": "n2"}],
    "virtlun_lun_copy_set_limit": [COPIED | {"bytes_per_second": 0}],
    "virtlun_lun_copy_check": [{}, {"ctrlr": "vm-1"}],
    "virtlun_lun_copy_abort": [COPIED],
    "virtlun_lvol_get_allocated_ranges": [{"name": "lvs0/v0"}],
    "virtlun_lvol_get_changed_ranges": [{"name": "lvs0/v0", "since": "lvs0/v0"}],
    "virtlun_lvol_get_sizes": [{"names": ["lvs0/v0"]}],
    "virtlun_lvol_get_space": [{"names": ["lvs0/v0"]}],
    "virtlun_lvol_get_xattrs": [{"name": "lvs0/v0"}],
    "virtlun_lvol_move_check": [{"name": "lvs0/ro"}],
    "virtlun_lvstore_check": [{"lvs_name": "lvs0"}],
    "virtlun_lvstore_dump": [{"lvs_name": "lvs0"}],
    "virtlun_lvstore_scrub": [{"lvs_name": "lvs0"}],
    "virtlun_vhost_get_stats": [{}, {"name": "vm-1"}],
    "virtlun_vhost_get_suspended": [{}, {"name": "vm-1"}],
    "virtlun_vhost_resume": [{"ctrlr": "vm-1"}],
}
NOT_HERE = {"framework_start_init", "bdev_aio_rescan", "bdev_rbd_get_clusters_info"}


def schemas() -> dict[str, dict[str, Any]]:
    """Returns the schemas in the repository, by method."""
    files = (ROOT / "schemas/rpc").glob("*.json")
    return {file.stem: json.loads(file.read_text()) for file in files}


def validate(schema: Any, value: Any) -> None:
    """Asserts that `value` is as `schema` says."""
    Draft202012Validator(schema).validate(value)


def test_they_are_valid_json_schemas() -> None:
    found = schemas()
    assert len(found) > 50
    for name, schema in found.items():
        assert schema["method"] == name
        Draft202012Validator.check_schema(schema["params"])
        Draft202012Validator.check_schema(schema["result"])


def test_results_are_as_they_say(target: Target) -> None:
    found = schemas()
    target.make_lvstore()
    target.rpc("bdev_lvol_create", lvol_name="v0", size_in_mib=4, lvs_name="lvs0")
    target.rpc("virtlun_lvol_set_xattr", name="lvs0/v0", xattr_name="a", xattr_value="b")
    target.rpc("bdev_null_create", name="n0", num_blocks=8, block_size=512)
    target.rpc("bdev_malloc_create", name="m0", num_blocks=8192, block_size=512)
    target.rpc("bdev_lvol_create", lvol_name="ro", size_in_mib=4, lvs_name="lvs0")
    target.rpc("bdev_lvol_set_read_only", name="lvs0/ro")
    of = target.rpc("bdev_get_bdevs", name="lvs0/v0")[0]["uuid"]
    moves = json.dumps({"of": of, "path": "lvs0/v0", "state": "copying"})
    noted = {"xattr_name": "virtlun.move", "xattr_value": moves}
    target.rpc("virtlun_lvol_set_xattr", name="lvs0/ro", **noted)
    key = {"cipher": "AES_XTS", "key": "01" * 32, "key2": "02" * 32, "name": "k0"}
    target.rpc("accel_crypto_key_create", **key)
    target.rpc("bdev_malloc_create", name="m1", num_blocks=8192, block_size=512)
    target.rpc("bdev_crypto_create", base_bdev_name="m1", name="c0", key_name="k0")
    target.rpc("bdev_malloc_create", name="m2", num_blocks=8192, block_size=512)
    target.rpc("virtlun_integrity_create", base_bdev_name="m2", name="s0")
    target.rpc("bdev_malloc_create", name="m3", num_blocks=8192, block_size=512)
    target.rpc("bdev_error_create", base_name="m3")
    target.rpc("virtlun_export_create", bdev_name="lvs0/v0")
    target.rpc("vhost_create_scsi_controller", ctrlr="vm-1")
    target.rpc("vhost_scsi_controller_add_target", ctrlr="vm-1", scsi_target_num=-1, bdev_name="n0")
    for name in ("n1", "n2"):
        target.rpc("bdev_null_create", name=name, num_blocks=8, block_size=512)
    target.rpc("vhost_create_blk_controller", ctrlr="vm-2", dev_name="n1", serial="disk-2")
    for method, calls in READS.items():
        for params in calls:
            validate(found[method]["params"], params)
            validate(strict(found[method]["result"]), target.rpc(method, **params))
    reads = {name for name, schema in found.items() if not schema["changes_configuration"]}
    assert reads - set(READS) == NOT_HERE
    for schema in ("target", "record"):
        recorded = json.loads((ROOT / f"schemas/config/{schema}.json").read_text())
        validate(recorded, json.loads((target.state_dir / "config.json").read_text()))
    for calls in target.configuration().values():
        for call in calls:
            validate(found[call["method"]]["params"], call["params"])


def test_each_method_of_the_target_is_there(target: Target) -> None:
    assert sorted(schemas()) == target.rpc("rpc_get_methods")
    assert Path(ROOT / "schemas/config/target.json").exists()
