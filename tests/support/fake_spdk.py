"""A FAKE of SPDK's own target: it refuses what is ours alone, and in SPDK's words.

What is ours alone, schemas/rpc says: methods that begin with `virtlun_`, and parameters whose
description says "(ours)". How it is refused is as SPDK 26.09 does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydataplane.domain.limiting import SPDK_RATES
from pydataplane.errors import (
    BAD_PARAMETERS,
    EXISTS,
    INTERNAL_ERROR,
    INVALID,
    METHOD_NOT_FOUND,
    NO_DEVICE,
    RpcError,
)
from tests.support.fake_socket import SocketTarget
from tests.support.rpc_schemas import methods

TARGETS = 8
"""Of a controller."""
BUSY_LIMITS = "Failed to configure rate limit: Resource temporarily unavailable"


class FakeSpdk(SocketTarget):
    """SPDK's target on a socket."""

    def __init__(self, path: Path, volumes: Mapping[str, str]) -> None:
        """Begins with thin volumes of these aliases and UUIDs; does not listen."""
        super().__init__(path, volumes)
        self.tells_options = False

    def _answered(self, method: str, given: dict[str, Any]) -> Any:
        if method.startswith("virtlun_") or not hasattr(self, method):
            raise RpcError(METHOD_NOT_FOUND, "Method not found")
        described = methods()[method]["params"].get("properties", {})
        unknown = [name for name in given if "(ours" in described[name].get("description", "")]
        of_vhost = method.startswith("vhost_")
        if unknown and method != "vhost_create_blk_controller":  # that ignores them
            if of_vhost:
                raise RpcError(BAD_PARAMETERS, "Invalid argument")
            raise RpcError(INTERNAL_ERROR, "spdk_json_decode_object failed")
        if method == "bdev_get_bdevs":
            return [self._without_ours(bdev) for bdev in super()._answered(method, given)]
        try:
            return super()._answered(method, given)
        except RpcError as error:
            if of_vhost or (method.startswith("bdev_lvol_") and error.code != NO_DEVICE):
                raise RpcError(BAD_PARAMETERS, os.strerror(-error.code)) from error
            raise

    def _without_ours(self, bdev: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in bdev.items() if name != "has_limits"}

    def bdev_uring_create(self, filename: str, name: str, block_size: int | None = None) -> str:
        if block_size is None and Path(filename).is_file():
            raise RpcError(INTERNAL_ERROR, "Unable to create URING bdev.")
        return name

    def bdev_lvol_create_lvstore(self, bdev_name: str, lvs_name: str) -> str:
        if lvs_name in self.lvstores:
            raise RpcError(EXISTS, "File exists")
        self.lvstores[lvs_name] = f"uuid-of-{lvs_name}"
        return self.lvstores[lvs_name]

    def bdev_lvol_snapshot(self, lvol_name: str, snapshot_name: str) -> str:
        lvstore = self._alias(lvol_name).partition("/")[0]
        return self.add_volume(f"{lvstore}/{snapshot_name}")

    def bdev_set_qos_limit(self, name: str, **rates: int) -> bool:
        volume = self.volume(name)
        has = any(of in volume.limits for of, _ in SPDK_RATES.values())
        if has and not self.connected.intersection(self.users(volume.uuid)):
            raise RpcError(BAD_PARAMETERS, BUSY_LIMITS)
        return super().bdev_set_qos_limit(name, **rates)

    def vhost_scsi_controller_add_target(
        self, ctrlr: str, scsi_target_num: int, bdev_name: str, **options: Any
    ) -> int:
        if scsi_target_num >= TARGETS:
            raise RpcError(INVALID, "Invalid argument")
        return super().vhost_scsi_controller_add_target(
            ctrlr, scsi_target_num, bdev_name, **options
        )

    def spdk_get_version(self) -> dict[str, Any]:
        fields = {"major": 26, "minor": 9, "patch": 0, "suffix": ""}
        return {"version": "SPDK v26.09", "fields": fields}

    def framework_get_reactors(self) -> dict[str, Any]:
        reactor = {"lcore": 1, "tid": 1, "busy": 10, "idle": 30, "in_interrupt": False}
        return {"tick_rate": 1_000_000, "pid": 1, "reactors": [reactor | {"lw_threads": []}]}
