"""A FAKE of the target, for unit tests of what drives one: dictionaries that answer.

There is one for all. It takes the parameters that schemas/rpc says, and answers what it says there;
what a real target does is tested in tests/target, tests/libvirt and tests/kubernetes.
`tests.support.fake_socket` has it on a real socket.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import NAMESPACE_OID, uuid5

from pydataplane.domain.limiting import SPDK_RATES
from pydataplane.domain.limits import NAMES, Limits, contradiction
from pydataplane.errors import (
    BAD_PARAMETERS,
    BUSY,
    EXISTS,
    INVALID,
    NO_DATA,
    NO_DEVICE,
    NO_SPACE,
    RpcError,
    TargetError,
)
from pydataplane.watchedclient import WatchedClient
from tests.support.rpc_schemas import check_params, check_result

MIB = 1 << 20
LVSTORE = "lvs0"
LVSTORE_UUID = "5a1f0000-0000-4000-8000-000000000000"
ANSWER_DEADLINE_S = 60


@dataclass
class Volume:
    """An lvol."""

    uuid: str
    mib: int = 64
    thin: bool = True
    taken_mib: int = 3
    """What of it is allocated, if it is thin."""
    xattrs: dict[str, str] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    """Those that are not 0."""
    parent: str | None = None
    """Its last snapshot."""

    @property
    def allocated(self) -> int:
        """Bytes."""
        return (self.taken_mib if self.thin else self.mib) * MIB


OF_EACH_BDEV: Mapping[str, Any] = {
    "assigned_rate_limits": dict.fromkeys(
        ("rw_ios_per_sec", "rw_mbytes_per_sec", "r_mbytes_per_sec", "w_mbytes_per_sec"), 0
    ),
    "has_limits": False,
    "zoned": False,
    "supported_io_types": {"read": True, "write": True},
}


class FakeTarget(WatchedClient):
    """A target with an lvstore `lvs0`: what is in it, and what a test has it do otherwise."""

    checksums: dict[str, Any] | None = None
    """What `base`, the bdev of the lvstores, tells of its checksums; then it is on `file`."""

    def __init__(self, volumes: Mapping[str, str] | None = None, *, mib: int = 1024) -> None:  # noqa: PLR0915
        """Begins with thin volumes of these aliases and UUIDs, in a store of `mib`."""
        super().__init__("/nonexistent")
        self.mib = mib
        self.lvstores = {LVSTORE: LVSTORE_UUID}
        self.pools: set[str] = set()
        """Those of `lvstores` that are pools of Ceph."""
        self.arrays: dict[str, str] = {}
        """The kinds of those of `lvstores` that are pools of arrays."""
        self.volumes = {alias: Volume(uuid) for alias, uuid in (volumes or {}).items()}
        self.controllers: dict[str, dict[int, str]] = {}
        """For each controller, the bdev of each target number."""
        self.options: dict[tuple[str, int], dict[str, Any]] = {}
        """What a LUN was added with, by controller and target number."""
        self.blk: dict[str, dict[str, Any]] = {}
        """What a virtio-blk controller was made with; its disk has number 0."""
        self.hidden: dict[tuple[str, int], str] = {}
        """By controller and target number: bdevs of disks that are recorded and not shown."""
        self.owners: dict[str, tuple[int | None, bool]] = {}
        """By controller: the user named for its owner, and whether that has to be a new process."""
        self.exports: set[str] = set()
        self.export_dir = "/export"
        """Nothing makes files there."""
        """The volumes that are files, or devices of ublk."""
        self.disks: dict[str, str] = {}
        """Of the latter: the device's path."""
        self.devices = {"ublk": False, "resizes": False, "why": "the kernel has no ublk"}
        """What devices of ublk there can be."""
        self.connected: set[str] = set()
        """Controllers that a QEMU is connected to."""
        self.delayed: set[str] = set()
        """Controllers that were made to wait for their start."""
        self.copies: dict[tuple[str, int], dict[str, Any]] = {}
        """What virtlun_lun_copy_check tells, by controller and target number."""
        self.images: dict[str, dict[str, Any]] = {}
        self.renumbered: dict[str, str] = {}
        """By URL: which other LUN is there now."""
        """What each open image, among the volumes by POOL/IMAGE or URL, was made with."""
        self.suspended: list[dict[str, Any]] = []
        """What virtlun_vhost_get_suspended tells."""
        self._made = 0

        # What was asked.
        self.calls: list[str] = []
        self.requests: list[tuple[str, dict[str, Any]]] = []

        # What a test wants.
        self.fail: dict[str, Exception] = {}
        """How the next call of a method fails."""
        self.refuse: dict[str, TargetError] = {}
        """How each call of a method is refused."""
        self.gate: dict[str, threading.Event] = {}
        """What a method waits for before it does anything."""
        self.locked: dict[str, bool] = {}
        """Volumes by UUID that are images of a pool, and whether each is locked."""
        self.block_sizes: dict[str, int] = {}
        """Of bdevs by name, where it is not 512."""
        self.flush_error: str | None = None
        self.network = False
        """Whether it may make network connections."""
        self.survives = "crash"
        self.problems: list[str] = []
        self.loaded = True
        """Whether the lvstore is; else nothing of it is seen."""

        # An older target, or SPDK's.
        self.complete: bool | None = True
        """None: it does not say whether all storage is there."""
        self.tells_options = True
        """Whether LUNs show serial and the like, as SPDK's do not."""
        self.counted: set[str] = set()
        """UUIDs of the volumes that have a histogram."""
        self.knows_xattrs = True
        """At the creation of an lvol."""
        self.deletes_whole = True
        """Whether a controller can be deleted with its LUNs."""

    def call_raw(self, method: str, **params: Any) -> Any:
        """Answers a call, as `Client.call_raw`.

        Raises:
            AssertionError: a real target has no such method, or does not take these parameters; or
                this one answers what a real one does not.
        """
        given = {name: value for name, value in params.items() if value is not None}
        self.calls.append(method)
        self.requests.append((method, given))
        with self._question():
            return self._answered(method, given)

    def _answered(self, method: str, given: dict[str, Any]) -> Any:
        if method in self.gate:
            self.gate[method].wait(ANSWER_DEADLINE_S)
        if method in self.fail:
            raise self.fail.pop(method)
        if method in self.refuse:
            raise self.refuse[method]
        check_params(method, given)
        result = getattr(self, method)(**given)
        if self.tells_options and self.complete is not None:
            check_result(method, result)
        return result

    def call_all(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Any]:
        """Answers many calls, as `Client.call_all`."""
        return [self._answer(method, params) for method, params in requests]

    def _answer(self, method: str, params: Mapping[str, Any]) -> Any:
        try:
            return self.call_raw(method, **params)
        except RpcError as error:
            return error

    # For tests

    def add_volume(self, alias: str, mib: int = 64, *, uuid: str = "", thin: bool = True) -> str:
        """Makes a volume; returns its UUID."""
        self._made += 1
        made = uuid or f"00000000-0000-4000-8000-{self._made:012d}"
        self.volumes[alias] = Volume(made, mib, thin)
        return made

    def volume(self, name: str) -> Volume:
        """Returns the volume with this alias or UUID.

        Raises:
            RpcError: ENODEV; there is none.
        """
        return self.volumes[self._alias(name)]

    @property
    def uuids(self) -> list[str]:
        """The UUIDs of all volumes."""
        return [volume.uuid for volume in self.volumes.values()]

    def users(self, uuid: str) -> list[str]:
        """Returns the controllers that have a LUN of this volume."""
        return [name for name, luns in self.controllers.items() if uuid in luns.values()]

    def _alias(self, name: str) -> str:
        if self.loaded:
            for alias, volume in self.volumes.items():
                if name in (alias, volume.uuid):
                    return alias
        raise RpcError(NO_DEVICE, f"bdev {name} does not exist")

    def _controller(self, name: str) -> dict[int, str]:
        if name not in self.controllers:
            raise RpcError(NO_DEVICE, f"controller {name} does not exist")
        return self.controllers[name]

    @property
    def free_mib(self) -> int:
        """What no thick volume takes of the store."""
        return self.mib - sum(each.mib for each in self.volumes.values() if not each.thin)

    @free_mib.setter
    def free_mib(self, value: int) -> None:
        self.mib += value - self.free_mib

    # The methods

    def virtlun_get_status(self) -> dict[str, Any]:
        status = {
            "version": "0",
            "pid": 1,
            "uptime_s": 1.0,
            "rpc_socket": "/socket",
            "vhost_dir": "/vhost",
            "state_dir": "/state",
            "holder_socket": "/holder",
            "holds_sessions": False,
            "user": {"name": "virtlun", "uid": 999, "gid": 999},
            "sandbox": "enforce",
            "refused_calls": [],
            "poll": False,
            "reactors": [],
            "bdevs": len(self.volumes),
            "lvstores": len(self.lvstores),
            "controllers": len(self.controllers),
            "upgrade": None,
            "restore_problems": self.problems,
            "flush_errors": [],
            "waiting": [],
            "images": {"asked": False, "problem": None},
            "iscsi": {"asked": False, "problem": None},
            "network": self.network,
        }
        return status if self.complete is None else status | {"storage_complete": self.complete}

    def bdev_wait_for_examine(self) -> bool:
        return True

    def bdev_get_bdevs(self, name: str | None = None) -> list[dict[str, Any]]:
        if name in ("base", "file"):
            return [self._base(name)]
        if name is not None:
            return [self._bdev(self._alias(name))]
        return [self._bdev(alias) for alias in self.volumes] if self.loaded else []

    def _rbd(self, uuid: str) -> dict[str, Any]:
        """What is told of a volume that is an image of a pool."""
        return {"rbd": {"locked": self.locked[uuid]}} if uuid in self.locked else {}

    def _bdev(self, alias: str) -> dict[str, Any]:
        volume = self.volumes[alias]
        block_size = self.block_sizes.get(volume.uuid, 512)
        lvol = {
            "lvol_store_uuid": self.lvstores.get(alias.partition("/")[0], LVSTORE_UUID),
            "thin_provision": volume.thin,
            "num_allocated_clusters": volume.allocated // MIB,
        }
        if volume.parent:
            lvol["base_snapshot"] = volume.parent
        shown = {
            "name": volume.uuid,
            "aliases": [alias],
            "product_name": "Logical Volume",
            "block_size": block_size,
            "num_blocks": volume.mib * MIB // block_size,
            "preferred_unmap_granularity": MIB // block_size,
            "uuid": volume.uuid,
            "claimed": bool(self.users(volume.uuid)) or volume.uuid in self.exports,
            "driver_specific": self._image(alias) or {"lvol": lvol, **self._rbd(volume.uuid)},
            **OF_EACH_BDEV,
            "assigned_rate_limits": {
                name: volume.limits.get(of, 0) // unit for name, (of, unit) in SPDK_RATES.items()
            },
            "has_limits": bool(volume.limits),
            "supported_io_types": {"read": True, "write": True, "unmap": volume.thin},
        }
        return shown | ({"flush_error": self.flush_error} if self.flush_error else {})

    def _image(self, alias: str) -> dict[str, Any] | None:
        """Returns what is told of an image that is open, or a LUN; None of an lvol."""
        given = self.images.get(alias)
        if given is None:
            return None
        if "url" in given:
            identity = str(uuid5(NAMESPACE_OID, self.renumbered.get(alias, alias)))
            told = {"lun_uuid": identity, "lun_block_size": 512}
            return {"iscsi": {"url": given["url"], **told}}
        told = {name: given[name] for name in ("pool_name", "rbd_name")}
        told["object_size"] = 4 * MIB
        return {"rbd": {**told, "locked": not given.get("incoming", False)}}

    def bdev_rbd_create(self, name: str, pool_name: str, rbd_name: str, **given: Any) -> str:
        if name in self.uuids:
            raise RpcError(EXISTS, f"the name {name} is taken by another bdev")
        alias = f"{pool_name}/{rbd_name}"
        self.volumes[alias] = Volume(name)
        self.images[alias] = {"pool_name": pool_name, "rbd_name": rbd_name, **given}
        return name

    def bdev_iscsi_create(self, name: str, url: str, initiator_iqn: str, **given: Any) -> str:
        if name in self.uuids:
            raise RpcError(EXISTS, f"there is a bdev {name} already")
        is_there = str(uuid5(NAMESPACE_OID, self.renumbered.get(url, url)))
        if given.get("lun_uuid") not in (None, is_there):
            raise RpcError(-5, f"cannot open {name}: another LUN is there than before")
        self.volumes[url] = Volume(name)
        self.images[url] = {"url": url, "initiator_iqn": initiator_iqn, **given}
        return name

    def virtlun_guest_disk_close(self, name: str) -> bool:
        found = [alias for alias in self.images if self.volumes[alias].uuid == name]
        for alias in found:
            if not self.users(name):
                del self.images[alias], self.volumes[alias]
        return bool(found)

    def _base(self, name: str) -> dict[str, Any]:
        """Returns the bdev of the lvstores, or what that is on where it has checksums."""
        checked = self.checksums if name == "base" else None
        return {
            "name": name,
            "aliases": [],
            "product_name": "integrity" if checked else "URING bdev",
            "block_size": 4096,
            "num_blocks": self.mib * MIB // 4096,
            "preferred_unmap_granularity": 1,
            "uuid": LVSTORE_UUID,
            "claimed": True,
            "driver_specific": {"integrity": checked} if checked else {},
            **OF_EACH_BDEV,
        }

    def bdev_get_iostat(self, names: list[str] | None = None) -> dict[str, Any]:
        counted = {
            "num_read_ops": 10,
            "bytes_read": 40960,
            "read_latency_ticks": 1000,
            "num_write_ops": 20,
            "bytes_written": 81920,
            "write_latency_ticks": 2000,
        }
        others = dict.fromkeys(
            (
                *("bytes_unmapped", "num_unmap_ops", "bytes_copied", "num_copy_ops"),
                *("max_read_latency_ticks", "min_read_latency_ticks"),
                *("max_write_latency_ticks", "min_write_latency_ticks"),
                *("unmap_latency_ticks", "max_unmap_latency_ticks", "min_unmap_latency_ticks"),
                *("copy_latency_ticks", "max_copy_latency_ticks", "min_copy_latency_ticks"),
                *("num_flush_ops", "flush_latency_ticks", "bytes_zeroed", "num_write_zeroes_ops"),
            ),
            0,
        )
        chosen = self.uuids if names is None else [self.volume(name).uuid for name in names]
        bdevs = [{"name": uuid, **counted, **others, "io_error": {}} for uuid in chosen]
        return {"tick_rate": 1_000_000, "ticks": 1, "bdevs": bdevs}

    def bdev_lvol_get_lvstores(self, uuid: str | None = None) -> list[dict[str, Any]]:
        shown = {
            "base_bdev": "base",
            "cluster_size": MIB,
            "block_size": 4096,
            "total_data_clusters": self.mib,
            "free_clusters": self.free_mib,
            "max_bdev_size": 1 << 50,
            "format_version": 2,
        }
        stores = self.lvstores.items() if self.loaded else ()
        found = []
        for name, own in sorted(stores):
            kinds = self.arrays | dict.fromkeys(self.pools, "rbd")
            kind = {"kind": kinds[name]} if name in kinds else {}
            found.append({"name": name, "uuid": own, **kind, **shown})
        if uuid is None:
            return found
        one = [store for store in found if store["uuid"] == uuid]
        if not one:
            raise RpcError(NO_DEVICE, "No such device")
        return one

    def bdev_lvol_get_lvols(self, lvs_uuid: str | None = None) -> list[dict[str, Any]]:
        flags = (
            "is_snapshot",
            "is_clone",
            "is_esnap_clone",
            "is_degraded",
            "is_read_only",
            "waits_for_key",
        )
        return [
            {
                "alias": alias,
                "uuid": volume.uuid,
                "name": alias.partition("/")[2],
                "is_thin_provisioned": volume.thin,
                "num_allocated_clusters": volume.allocated // MIB,
                "lvs": {
                    "name": alias.partition("/")[0],
                    "uuid": self.lvstores[alias.partition("/")[0]],
                },
                "size": volume.mib * MIB,
                **dict.fromkeys(flags, False),
            }
            for alias, volume in self.volumes.items()
            if self.lvstores.get(alias.partition("/")[0])
            in ([lvs_uuid] if lvs_uuid else self.lvstores.values())
        ]

    def bdev_lvol_create(
        self,
        lvs_name: str,
        lvol_name: str,
        size_in_mib: int,
        thin_provision: bool = False,
        lvol_uuid: str = "",
        xattrs: dict[str, str] | None = None,
    ) -> str:
        alias = f"{lvs_name}/{lvol_name}"
        if xattrs and not self.knows_xattrs:
            raise RpcError(BAD_PARAMETERS, "unknown field `xattrs`")
        if lvs_name not in self.lvstores:
            raise RpcError(NO_DEVICE, f"lvstore {lvs_name} does not exist")
        if alias in self.volumes:
            raise RpcError(EXISTS, f"lvol {alias} exists")
        if not thin_provision and size_in_mib > self.free_mib:
            raise RpcError(NO_SPACE, "No space left on device")
        uuid = self.add_volume(alias, size_in_mib, uuid=lvol_uuid, thin=thin_provision)
        self.volumes[alias].xattrs |= xattrs or {}
        return uuid

    def bdev_lvol_delete(self, name: str) -> bool:
        uuid = self.volume(name).uuid
        if uuid in self.exports or self.users(uuid):
            raise RpcError(BUSY, "Device or resource busy")
        del self.volumes[self._alias(name)]
        return True

    def bdev_lvol_snapshot(self, lvol_name: str, snapshot_name: str) -> str:
        alias = self._alias(lvol_name)
        taken = f"{alias.partition('/')[0]}/{snapshot_name}"
        if taken in self.volumes:
            raise RpcError(EXISTS, f"lvol {taken} exists")
        self.volumes[alias].thin = True
        return self.add_volume(taken, self.volumes[alias].mib)

    def bdev_lvol_inflate(self, name: str) -> bool:
        self.volume(name).thin = False
        return True

    def bdev_lvol_resize(self, name: str, size_in_mib: int) -> bool:
        volume = self.volume(name)
        if size_in_mib - volume.mib > self.free_mib:
            raise RpcError(NO_SPACE, "No space left on device")
        volume.mib = size_in_mib
        return True

    def virtlun_lvol_get_sizes(self, names: list[str]) -> dict[str, dict[str, int]]:
        known = self.volumes | {each.uuid: each for each in self.volumes.values()}
        found = {name: known[name] for name in names if name in known}
        return {
            name: {"size": volume.mib * MIB, "allocated": volume.allocated}
            for name, volume in found.items()
        }

    def virtlun_lvol_get_xattrs(self, name: str) -> dict[str, str]:
        return dict(self.volume(name).xattrs)

    def virtlun_lvol_set_xattr(self, name: str, xattr_name: str, xattr_value: str) -> bool:
        self.volume(name).xattrs[xattr_name] = xattr_value
        return True

    def virtlun_lvol_remove_xattr(self, name: str, xattr_name: str) -> bool:
        if self.volume(name).xattrs.pop(xattr_name, None) is None:
            raise RpcError(NO_DATA, "No data available")
        return True

    def virtlun_bdev_set_limits(self, name: str, **limits: int) -> bool:
        wrong = contradiction(Limits(**limits))
        if wrong is not None:
            raise RpcError(BAD_PARAMETERS, wrong)
        self.volume(name).limits = {each: value for each, value in limits.items() if value}
        return True

    def virtlun_bdev_get_limits(self, name: str) -> dict[str, int]:
        return dict.fromkeys(NAMES, 0) | self.volume(name).limits

    def bdev_enable_histogram(self, name: str, enable: bool) -> bool:
        """Notes whether the bdev's latencies are counted."""
        (self.counted.add if enable else self.counted.discard)(self.volume(name).uuid)
        return True

    def bdev_set_qos_limit(self, name: str, **rates: int) -> bool:
        limits = self.volume(name).limits
        for rate, value in rates.items():
            of, unit = SPDK_RATES[rate]
            limits.pop(of, None)
            if value:
                limits[of] = value * unit
        return True

    def virtlun_export_create(
        self,
        bdev_name: str,
        read_only: bool = False,
        device: bool = False,
        block_size: int = 512,
    ) -> dict[str, str]:
        assert block_size in (512, 4096)
        if device and self.devices["ublk"] and bdev_name not in self.exports:
            self.disks[bdev_name] = f"/dev/ublkb{len(self.disks)}"
        if self.users(bdev_name) and not read_only:
            raise RpcError(BUSY, f"bdev {bdev_name} is in use by a controller")
        self.exports.add(bdev_name)
        return {"path": self._export(bdev_name)}

    def _export(self, uuid: str) -> str:
        return self.disks.get(uuid) or f"{self.export_dir}/{uuid}"

    def virtlun_export_delete(self, bdev_name: str) -> bool:
        if bdev_name not in self.exports:
            raise RpcError(NO_DEVICE, f"bdev {bdev_name} is not exported")
        self.exports.discard(bdev_name)
        self.disks.pop(bdev_name, None)
        return True

    def virtlun_export_get_devices(self) -> dict[str, Any]:
        return self.devices

    def virtlun_export_list(self) -> list[dict[str, Any]]:
        return [
            {
                "bdev_name": uuid,
                "uuid": uuid,
                "path": self._export(uuid),
                "read_only": False,
                "parked": False,
                "opens": 1,
                "size": MIB,
                "survives": self.survives,
            }
            | ({"flush_error": self.flush_error} if self.flush_error else {})
            for uuid in sorted(self.exports)
        ]

    def virtlun_vhost_get_stats(
        self, name: str | None = None, scsi_target_num: int | None = None
    ) -> list[dict[str, Any]]:
        if name is not None:
            self._controller(name)
        done = {"reads": 10, "read_bytes": 40960, "read_ns": 1_000_000}
        done |= {"writes": 20, "write_bytes": 81920, "write_ns": 2_000_000}
        done |= dict.fromkeys(("flushes", "flush_ns", "others", "errors", "full_waits"), 0)
        counters = ("requests", "errors", "malformed", "interrupts", "events_sent", "events_missed")
        return [
            {
                "ctrlr": each,
                **dict.fromkeys(counters, 0),
                "targets": [
                    {"scsi_target_num": number, "bdev_name": bdev, **done}
                    for number, bdev in luns.items()
                    if scsi_target_num in (None, number)
                ],
            }
            for each, luns in self.controllers.items()
            if name in (None, each)
        ]

    def vhost_get_controllers(self, name: str | None = None) -> list[dict[str, Any]]:
        if name is not None:
            self._controller(name)
        return [
            {
                "ctrlr": each,
                "cpumask": "0x1",
                "delay_base_us": 0,
                "iops_threshold": 0,
                "adaptive_coalescing": False,
                "socket": f"/vhost/{each}",
                "owner": None,
                "owner_uid": None,
                "sessions": [self._session(each)] if each in self.connected else [],
                "backend_specific": self._blk(each)
                or {"scsi": [self._scsi(each, n) for n in luns]},
            }
            for each, luns in self.controllers.items()
            if name in (None, each)
        ]

    @staticmethod
    def _session(controller: str) -> dict[str, Any]:
        return {
            **{"vid": 1, "name": controller, "started": True, "kept": False},
            **{"queues": [], "stopped_queues": []},
        }

    def _blk(self, controller: str) -> dict[str, Any] | None:
        """Returns what is told of a virtio-blk controller; None of any other."""
        given = self.blk.get(controller)
        if given is None:
            return None
        bdev = self.controllers[controller][0]
        block = {
            "bdev": bdev,
            "readonly": given.get("readonly", False),
            "serial": given.get("serial", bdev),
            "uuid": given.get("uuid"),
            "block_size": given.get("block_size", self.block_sizes.get(bdev, 512)),
            "physical_block_size": given.get("physical_block_size"),
            "discard": given.get("discard", True),
            "write_error_policy": given.get("write_error_policy", "report"),
            "read_error_policy": given.get("read_error_policy", "report"),
            "resize_event_at": None,
            "reservations": "known",
        }
        return {"block": block}

    def _scsi(self, controller: str, number: int) -> dict[str, Any]:
        lun = {"id": 0, "bdev_name": self.controllers[controller][number]}
        luns = [lun | self._shown(controller, number) if self.tells_options else lun]
        names = {"id": number, "target_name": f"Target {number}"}
        return {"scsi_dev_num": number, **names, "luns": luns}

    def _shown(self, controller: str, number: int) -> dict[str, Any]:
        """Returns what a LUN says of itself: what it was added with, or else its own."""
        bdev = self.controllers[controller][number]
        own: dict[str, Any] = {
            "serial": self.options.get((controller, number), {}).get("uuid", bdev),
            "read_only": False,
            "block_size": self.block_sizes.get(bdev, 512),
            "removable": False,
            **dict.fromkeys(("uuid", "wwn", "vendor", "product", "rotation_rate")),
            "physical_block_size": None,
            "discard": True,
            "write_cache": True,
            "write_error_policy": "report",
            "read_error_policy": "report",
        }
        given = self.options.get((controller, number), {})
        times = dict.fromkeys(("event_at", "guest_seen_at", "resize_event_at"))
        told = own | {name: value for name, value in given.items() if name in own}
        told |= {"removal_prevented": False, "ejected": False, "reservations": "known"}
        return told | {"attached_at": 1.0, **times}

    def vhost_create_scsi_controller(
        self, ctrlr: str, delay: bool = False, own_folder: bool = False
    ) -> bool:
        if ctrlr in self.controllers:
            raise RpcError(EXISTS, "File exists")
        self.controllers[ctrlr] = {}
        if delay:
            self.delayed.add(ctrlr)
        return True

    def vhost_create_blk_controller(self, ctrlr: str, dev_name: str, **options: Any) -> bool:
        uuid = self.volume(dev_name).uuid
        if ctrlr in self.controllers:
            raise RpcError(EXISTS, "File exists")
        if self.users(uuid) and not options.get("shareable"):
            raise RpcError(BUSY, f"bdev {uuid} is in use")
        self._check_recorded(ctrlr, 0, uuid)
        self.controllers[ctrlr], self.blk[ctrlr] = {0: uuid}, options
        return True

    def vhost_start_scsi_controller(self, ctrlr: str) -> bool:
        self.delayed.remove(ctrlr)
        return True

    def _check_recorded(self, ctrlr: str, number: int, uuid: str) -> None:
        if self.hidden.get((ctrlr, number), uuid) != uuid:
            raise RpcError(BUSY, f"{ctrlr} is on another bdev by what is recorded")
        self.hidden.pop((ctrlr, number), None)

    def vhost_delete_controller(self, ctrlr: str, force: bool | None = None) -> bool:
        # Of a SCSI controller the record alone brings nothing back: it is there.
        if ctrlr not in self.controllers and self.hidden.pop((ctrlr, 0), None) is not None:
            return True
        luns = self._controller(ctrlr)
        if not self.deletes_whole:
            if force is not None:
                raise RpcError(BAD_PARAMETERS, "Invalid parameters")
            if luns and ctrlr not in self.blk:
                raise RpcError(BUSY, "Device or resource busy")
        if ctrlr in self.connected and not force:
            raise RpcError(BUSY, "Device or resource busy")
        self.blk.pop(ctrlr, None)
        self.hidden = {place: bdev for place, bdev in self.hidden.items() if place[0] != ctrlr}
        for number in self.controllers.pop(ctrlr):
            self.options.pop((ctrlr, number), None)
        return True

    def virtlun_controller_set_owner(
        self, ctrlr: str, uid: int | None = None, fresh: bool = False
    ) -> bool:
        self._controller(ctrlr)
        self.owners[ctrlr] = (uid, fresh)
        return True

    def vhost_scsi_controller_add_target(
        self, ctrlr: str, scsi_target_num: int, bdev_name: str, **options: Any
    ) -> int:
        luns, uuid = self._controller(ctrlr), self.volume(bdev_name).uuid
        if scsi_target_num in luns:
            raise RpcError(EXISTS, "File exists")
        shared = all(self._shares(uuid, user, options) for user in self.users(uuid))
        if uuid in self.exports or not shared:
            user = "an export" if uuid in self.exports else "a controller"
            raise RpcError(BUSY, f"bdev {bdev_name} is in use by {user}")
        if options.get("block_size", 4096) < self.block_sizes.get(uuid, 512):
            raise RpcError(INVALID, f"bdev {bdev_name} has larger blocks")
        self._check_recorded(ctrlr, scsi_target_num, uuid)
        luns[scsi_target_num] = uuid
        self.options[ctrlr, scsi_target_num] = options
        return scsi_target_num

    def _shares(self, uuid: str, controller: str, options: Mapping[str, Any]) -> bool:
        """Whether a controller that has the bdev, and who asks for it, both share it."""
        given = [
            self.options.get((controller, number), {})
            for number, bdev in self.controllers[controller].items()
            if bdev == uuid
        ]
        return all(each.get("shareable", False) for each in [*given, options])

    def vhost_scsi_controller_remove_target(self, ctrlr: str, scsi_target_num: int) -> bool:
        luns = self._controller(ctrlr)
        if scsi_target_num not in luns:
            raise RpcError(NO_DEVICE, "No such device")
        del luns[scsi_target_num]
        self.options.pop((ctrlr, scsi_target_num), None)
        return True

    def _copy(self, ctrlr: str, number: int) -> dict[str, Any]:
        if (ctrlr, number) not in self.copies:
            text = f"target {number} of controller {ctrlr} is not being copied"
            raise RpcError(NO_DEVICE, text)
        return self.copies[ctrlr, number]

    def virtlun_lun_copy_start(
        self, ctrlr: str, scsi_target_num: int, dst_bdev_name: str, bytes_per_second: int = 0
    ) -> bool:
        source = self._controller(ctrlr)[scsi_target_num]
        destination = self.volume(dst_bdev_name)
        if self.users(destination.uuid) or (ctrlr, scsi_target_num) in self.copies:
            raise RpcError(BUSY, f"bdev {dst_bdev_name} is in use")
        size = self.volume(source).mib << 20
        self.copies[ctrlr, scsi_target_num] = {
            "ctrlr": ctrlr,
            "scsi_target_num": scsi_target_num,
            "src_bdev_name": source,
            "dst_bdev_name": destination.uuid,
            "state": "copying",
            "copied_bytes": 0,
            "total_bytes": size,
            "bytes_per_second": bytes_per_second,
            "error": None,
        }
        return True

    def virtlun_lun_copy_check(
        self, ctrlr: str | None = None, scsi_target_num: int | None = None
    ) -> list[dict[str, Any]]:
        return [
            dict(copy)
            for (name, number), copy in self.copies.items()
            if ctrlr in (None, name) and scsi_target_num in (None, number)
        ]

    def virtlun_lun_copy_set_limit(
        self, ctrlr: str, scsi_target_num: int, bytes_per_second: int
    ) -> bool:
        self._copy(ctrlr, scsi_target_num)["bytes_per_second"] = bytes_per_second
        return True

    def virtlun_lun_copy_pivot(self, ctrlr: str, scsi_target_num: int) -> bool:
        copy = self._copy(ctrlr, scsi_target_num)
        if copy["state"] != "ready":
            raise RpcError(BUSY, "wait until all are")
        del self.copies[ctrlr, scsi_target_num]
        self.options[ctrlr, scsi_target_num].setdefault("uuid", copy["src_bdev_name"])
        self.controllers[ctrlr][scsi_target_num] = copy["dst_bdev_name"]
        return True

    def virtlun_lun_copy_abort(self, ctrlr: str, scsi_target_num: int) -> bool:
        self._copy(ctrlr, scsi_target_num)
        del self.copies[ctrlr, scsi_target_num]
        return True

    def virtlun_vhost_get_suspended(self) -> list[dict[str, Any]]:
        return self.suspended
