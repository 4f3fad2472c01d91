"""Doubles for tests of the driver's logic: NOT a target and NOT a kernel, only dictionaries.

What the real ones do is tested by tests/target/test_csi_sanity.py and tests/kubernetes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from csi.mounts import Mount
from pydataplane.client import Client
from pydataplane.errors import RpcError, TargetUnavailable
from tests.support.rpc_schemas import check_params

MIB = 1 << 20
LVSTORE = "lvs0"
LVSTORE_UUID = "11111111-1111-4111-8111-111111111111"


class FakeTarget(Client):
    """A target with one lvstore; `fail` names the next method that is to fail, and how."""

    def __init__(self, size: int = 1024 * MIB) -> None:
        super().__init__("/nonexistent")
        self.size = size
        self.lvols: dict[str, dict[str, Any]] = {}
        self.notes: dict[str, dict[str, str]] = {}
        self.exports: dict[str, str] = {}
        self.luns: dict[str, str] = {}
        self.block_size: int | None = None  # of the LUN added last
        self.calls: list[str] = []
        self.fail: dict[str, Exception] = {}
        self.survives = "crash"
        self.flush_error: str | None = None
        self.loaded = True  # the lvstore; else nothing of it is seen
        self.complete: bool | None = True  # None: it is older and does not say it
        self.problems: list[str] = []
        self.knows_xattrs = True  # at creation; an older target does not

    def call_raw(self, method: str, **params: Any) -> Any:
        self.calls.append(method)
        if method in self.fail:
            raise self.fail.pop(method)
        given = {name: value for name, value in params.items() if value is not None}
        check_params(method, given)
        return getattr(self, method)(**given)

    def virtlun_get_status(self) -> dict[str, Any]:
        found = {"pid": 1, "vhost_dir": "/vhost", "restore_problems": self.problems, "waiting": []}
        return found if self.complete is None else found | {"storage_complete": self.complete}

    def bdev_lvol_get_lvols(self, lvs_uuid: str) -> list[dict[str, Any]]:
        assert lvs_uuid == LVSTORE_UUID
        return [{"uuid": uuid} for uuid in self.lvols]

    def bdev_lvol_get_lvstores(self) -> list[dict[str, Any]]:
        if not self.loaded:
            return []
        used = sum(lvol["size"] for lvol in self.lvols.values() if not lvol["thin"])
        return [
            {
                "name": LVSTORE,
                "uuid": LVSTORE_UUID,
                "base_bdev": "base",
                "cluster_size": MIB,
                "total_data_clusters": self.size // MIB,
                "free_clusters": (self.size - used) // MIB,
            }
        ]

    def bdev_get_bdevs(self, name: str | None = None) -> list[dict[str, Any]]:
        found = [
            {
                "name": uuid,
                "uuid": uuid,
                "aliases": [f"{LVSTORE}/{lvol['name']}"],
                "num_blocks": lvol["size"] // 512,
                "block_size": 512,
                "driver_specific": {
                    "lvol": {"lvol_store_uuid": LVSTORE_UUID, "thin_provision": lvol["thin"]}
                },
            }
            | ({"flush_error": self.flush_error} if self.flush_error else {})
            for uuid, lvol in (self.lvols if self.loaded else {}).items()
            if name in (None, uuid, f"{LVSTORE}/{lvol['name']}")
        ]
        if name is not None and not found:
            raise RpcError(-19, f"bdev {name} does not exist", "bdev_get_bdevs")
        return found

    def bdev_lvol_create(
        self,
        lvol_name: str,
        size_in_mib: int,
        thin_provision: bool,
        lvs_name: str,
        lvol_uuid: str | None,
        xattrs: dict[str, str] | None = None,
    ) -> str:
        assert lvs_name == LVSTORE
        if xattrs and not self.knows_xattrs:
            raise RpcError(-32602, "unknown field `xattrs`", "bdev_lvol_create")
        uuid = lvol_uuid or f"22222222-2222-4222-8222-{len(self.lvols):012}"
        if any(lvol["name"] == lvol_name for lvol in self.lvols.values()):
            raise RpcError(-17, f"lvol {lvol_name} exists", "bdev_lvol_create")
        (store,) = self.bdev_lvol_get_lvstores()
        if not thin_provision and size_in_mib > store["free_clusters"]:
            raise RpcError(-28, "No space left on device", "bdev_lvol_create")
        self.lvols[uuid] = {"name": lvol_name, "size": size_in_mib * MIB, "thin": thin_provision}
        self.notes[uuid] = dict(xattrs or {})
        return uuid

    def bdev_lvol_delete(self, name: str) -> bool:
        if name in self.exports:
            raise RpcError(-16, "Device or resource busy", "bdev_lvol_delete")
        del self.lvols[name], self.notes[name]
        return True

    def bdev_lvol_resize(self, name: str, size_in_mib: int) -> bool:
        (store,) = self.bdev_lvol_get_lvstores()
        if size_in_mib * MIB - self.lvols[name]["size"] > store["free_clusters"] * MIB:
            raise RpcError(-28, "No space left on device", "bdev_lvol_resize")
        self.lvols[name]["size"] = size_in_mib * MIB
        return True

    def vhost_create_scsi_controller(self, ctrlr: str, own_folder: bool) -> bool:
        assert own_folder
        if ctrlr in self.luns:
            raise RpcError(-17, "File exists", "vhost_create_scsi_controller")
        self.luns[ctrlr] = ""
        return True

    def vhost_scsi_controller_add_target(
        self, ctrlr: str, scsi_target_num: int, bdev_name: str, block_size: int | None = None
    ) -> int:
        self.block_size = block_size
        method = "vhost_scsi_controller_add_target"
        if self.luns[ctrlr]:
            raise RpcError(-17, "File exists", method)
        if self.exports.setdefault(bdev_name, "controller") != "controller":
            raise RpcError(-16, "in use by an export", method)
        self.luns[ctrlr] = bdev_name
        return scsi_target_num

    def vhost_get_controllers(self, name: str) -> list[dict[str, str]]:
        if name not in self.luns:
            raise RpcError(-19, "No such device", "vhost_get_controllers")
        return [{"ctrlr": name}]

    def vhost_delete_controller(self, ctrlr: str) -> bool:
        if ctrlr not in self.luns:
            raise RpcError(-19, "No such device", "vhost_delete_controller")
        self.exports.pop(self.luns.pop(ctrlr), None)
        return True

    def virtlun_export_list(self) -> list[dict[str, str]]:
        exports = [volume for volume, face in self.exports.items() if face == "export"]
        return [
            {"bdev_name": each, "path": f"/export/{each}", "survives": self.survives}
            | ({"flush_error": self.flush_error} if self.flush_error else {})
            for each in exports
        ]

    def virtlun_lvol_get_xattrs(self, name: str) -> dict[str, str]:
        return dict(self.notes[name])

    def virtlun_lvol_set_xattr(self, name: str, xattr_name: str, xattr_value: str) -> bool:
        self.notes[name][xattr_name] = xattr_value
        return True

    def virtlun_lvol_remove_xattr(self, name: str, xattr_name: str) -> bool:
        if self.notes[name].pop(xattr_name, None) is None:
            raise RpcError(-61, "No data available", "virtlun_lvol_remove_xattr")
        return True


class FakeHost:
    """A host's devices, mounts and file systems; stands for HostDevice, Host and mounts."""

    def __init__(self, target: FakeTarget) -> None:
        self._target = target
        self._next = 0
        self.devices: dict[tuple[str, bool], Path] = {}
        self.contents: dict[str, str] = {}
        self.mounted: list[Mount] = []
        self.made: list[tuple[str, str]] = []
        self.grown: list[str] = []
        self.dead: set[str] = set()
        self.flushed: list[str] = []
        self.crash_in_make = False

    # HostDevice
    def attach(self, volume: str, *, read_only: bool = False, block_size: int = 512) -> Path:
        assert block_size in (512, 4096)
        if self._target.exports.setdefault(volume, "export") != "export":
            raise RpcError(-16, "in use by a controller", "virtlun_export_create")
        if (volume, read_only) not in self.devices:
            self._next += 1
            self.devices[volume, read_only] = Path(f"/dev/loop{self._next}")
        return self.devices[volume, read_only]

    def device(self, volume: str, *, read_only: bool = False) -> Path | None:
        return self.devices.get((volume, read_only))

    def answers(self, volume: str) -> bool:
        return volume not in self.dead

    def grow(self, volume: str, *mounted: object) -> None:
        """Grows a device, or what is mounted of it."""
        self.grown += [] if mounted else [volume]

    def flush(self, volume: str) -> None:
        self.flushed.append(volume)

    def detach(self, volume: str) -> None:
        self.devices = {key: path for key, path in self.devices.items() if key[0] != volume}
        if self._target.exports.get(volume) == "export":
            del self._target.exports[volume]

    def attached(self) -> list[str]:
        return sorted({volume for volume, _ in self.devices})

    def present(self) -> list[str]:
        return self.attached()

    # mounts
    def numbers(self, device: Path) -> tuple[int, int]:
        return 7, int(device.name.removeprefix("loop"))

    def real(self, path: Path) -> str:
        return str(path)

    def table(self) -> list[Mount]:
        return self.mounted

    def at(self, target: Path) -> Mount | None:
        return next((each for each in self.mounted if each.target == str(target)), None)

    def of_device(self, device: Path) -> list[Mount]:
        number = self.numbers(device)
        return [m for m in self.mounted if m.device == number or m.root == f"/{device.name}"]

    # Host
    def check(self) -> str | None:
        return None

    def bind_folder(self, volume: str, folder: Path, target: Path) -> None:
        root = f"/virtlun/vhost/{folder.name}"
        self.mounted.append(Mount(str(target), (0, 9), root, True, "tmpfs"))

    def bind_device(self, volume: str, device: Path, target: Path) -> None:
        self.mounted.append(Mount(str(target), (0, 5), f"/{device.name}", False, "devtmpfs"))

    def bind_mount(
        self, volume: str, device: Path, staging: Path, target: Path, *, read_only: bool
    ) -> None:
        below = self.at(staging)
        assert below is not None and below.device == self.numbers(device)
        target.mkdir(exist_ok=True)
        self.mounted.append(Mount(str(target), below.device, "/", read_only, below.fs_type))

    def seal(self, volume: str, target: Path) -> None:
        self.mounted = [
            replace(each, read_only=True) if each.target == str(target) else each
            for each in self.mounted
        ]

    def unmount(self, volume: str, target: Path) -> None:
        self.mounted = [each for each in self.mounted if each.target != str(target)]

    def remove(self, volume: str, target: Path) -> None:
        self.unmount(volume, target)

    def holds(self, volume: str, device: Path) -> str:
        return self.contents.get(self._volume(device), "")

    def make(self, volume: str, device: Path, fs_type: str) -> None:
        self.made.append((self._volume(device), fs_type))
        if self.crash_in_make:
            self.contents[self._volume(device)] = "half of something"
            raise TargetUnavailable("the driver is killed here")
        self.contents[self._volume(device)] = fs_type

    def mount(
        self, volume: str, device: Path, target: Path, fs_type: str, options: list[str]
    ) -> None:
        assert self.holds(volume, device) == fs_type
        read_only = "ro" in options
        self.mounted.append(Mount(str(target), self.numbers(device), "/", read_only, fs_type))

    # sysblock
    def size_of(self, device: Path) -> int:
        size: int = self._target.lvols[self._volume(device)]["size"]
        return size

    def _volume(self, device: Path) -> str:
        return next(volume for (volume, _), path in self.devices.items() if path == device)
