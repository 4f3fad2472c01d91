"""A configuration given with --config, beside what the target recorded itself."""

from __future__ import annotations

import json
from typing import Any

from tests.support.target import Target
from tests.target.conftest import MakeTarget


def call(method: str, **params: Any) -> dict[str, Any]:
    """Returns a call as it stands in the file."""
    return {"method": method, "params": params}


def targets(target: Target) -> dict[int, str]:
    """Returns the bdev of each target of the controller."""
    (controller,) = target.rpc("vhost_get_controllers")
    luns = controller["backend_specific"]["scsi"]
    return {lun["scsi_dev_num"]: lun["luns"][0]["bdev_name"] for lun in luns}


def test_targets_whose_numbers_are_chosen_come_once_each(make_target: MakeTarget) -> None:
    target = make_target()
    bdevs = ["n0", "n1", "n2"]
    calls = [
        {
            "subsystem": "bdev",
            "config": [
                call("bdev_null_create", name=name, num_blocks=2048, block_size=512)
                for name in bdevs
            ],
        },
        {
            "subsystem": "vhost_scsi",
            "config": [
                call("vhost_create_scsi_controller", ctrlr="vm-1"),
                *(
                    call(
                        "vhost_scsi_controller_add_target",
                        ctrlr="vm-1",
                        scsi_target_num=-1,
                        bdev_name=name,
                    )
                    for name in bdevs
                ),
            ],
        },
    ]
    config = target.directory / "config.json"
    config.write_text(json.dumps({"subsystems": calls}))
    target.options += ("--config", str(config))
    target.start()
    assert targets(target) == dict(enumerate(bdevs))
    target.restart()
    assert targets(target) == dict(enumerate(bdevs))
    assert target.rpc("virtlun_get_status")["restore_problems"] == []
