"""The unmodified `spdk-rpc` of PyPI drives every method that it has a verb for."""

from __future__ import annotations

import importlib
import json
import operator
import os
import pkgutil
import re
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.guest.test_ublk_rpc import VERBS as IN_A_GUEST
from tests.support.target import Target, binary
from tests.target.conftest import MakeTarget
from tests.target.test_iscsi import VERBS as WITH_A_LUN
from tests.target.test_nvme import VERBS as WITH_A_CONTROLLER
from tests.target.test_rbd import VERBS as WITH_A_CLUSTER

MIB = 1 << 20
Call = tuple[str, dict[str, Any]]
Check = Callable[[Any, Target], None]

MALLOC: Call = ("bdev_malloc_create", {"name": "m0", "num_blocks": 131072, "block_size": 512})
EXAMINED: Call = ("bdev_wait_for_examine", {})
RESET: Call = ("bdev_reset_iostat", {})
HISTOGRAM: Call = ("bdev_enable_histogram", {"name": "n0", "enable": True})
NULL: Call = ("bdev_null_create", {"name": "n0", "num_blocks": 2048, "block_size": 512})
STORE: Call = ("bdev_lvol_create_lvstore", {"bdev_name": "m0", "lvs_name": "lvs0"})
LVOL: Call = (
    "bdev_lvol_create",
    {"lvol_name": "v0", "size_in_mib": 4, "lvs_name": "lvs0", "thin_provision": True},
)
THICK: Call = ("bdev_lvol_create", {"lvol_name": "v0", "size_in_mib": 4, "lvs_name": "lvs0"})
SNAPSHOT: Call = ("bdev_lvol_snapshot", {"lvol_name": "lvs0/v0", "snapshot_name": "s0"})
CLONE: Call = ("bdev_lvol_clone", {"snapshot_name": "lvs0/s0", "clone_name": "c0"})
SECRET = ("-k", "01" * 32, "-e", "02" * 32)
KEY: Call = (
    "accel_crypto_key_create",
    {"cipher": "AES_XTS", "key": "01" * 32, "key2": "02" * 32, "name": "k0"},
)
CRYPTO: Call = (
    "bdev_crypto_create",
    {"base_bdev_name": "m0", "name": "c0", "key_name": "k0"},
)
FAILING: Call = ("bdev_error_create", {"base_name": "m0"})
DELAYING: Call = (
    "bdev_delay_create",
    {
        "base_bdev_name": "m0",
        "name": "d0",
        "avg_read_latency": 1,
        "p99_read_latency": 2,
        "avg_write_latency": 3,
        "p99_write_latency": 4,
    },
)
PENDING = {"name": "EE_m0", "io_type": "read", "error_type": "pending"}
ANOTHER: Call = ("bdev_malloc_create", {"name": "m1", "num_blocks": 8192, "block_size": 512})
CLONE_BDEV: Call = (
    "bdev_lvol_clone_bdev",
    {"bdev": "m1", "lvs_name": "lvs0", "clone_name": "e0"},
)
COPY: Call = (
    "bdev_lvol_start_shallow_copy",
    {"src_lvol_name": "lvs0/s0", "dst_bdev_name": "m1"},
)
CONTROLLER: Call = ("vhost_create_scsi_controller", {"ctrlr": "vm-1"})
ADD: Call = (
    "vhost_scsi_controller_add_target",
    {"ctrlr": "vm-1", "scsi_target_num": 3, "bdev_name": "m0"},
)


class Fields(dict[str, Any]):
    """Equals a dictionary that has these fields, and any others."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, dict) and self.items() <= other.items()

    __hash__ = None


def equals(expected: Any) -> Check:
    """The output is `expected`."""

    def check(result: Any, _target: Target) -> None:
        assert result == expected

    return check


def begins(expected: list[str]) -> Check:
    """The output is a list that begins as `expected`; types of our own follow."""

    def check(result: Any, _target: Target) -> None:
        assert result[: len(expected)] == expected

    return check


def has(**expected: Any) -> Check:
    """The output is one object, or a list of one, with these fields."""

    def check(result: Any, _target: Target) -> None:
        found = result[0] if isinstance(result, list) else result
        assert {key: found.get(key) for key in expected} == expected

    return check


def then(method: str, of: Callable[[Any], Any], expected: Any, **params: Any) -> Check:
    """Afterwards `of` the result of `method` is `expected`."""

    def check(_result: Any, target: Target) -> None:
        assert of(target.rpc(method, **params)) == expected

    return check


def names(items: Any) -> list[str]:
    """The names of listed things."""
    return [item["name"] for item in items]


def counted(*counters: str) -> Callable[[Any], Any]:
    """Counters of the one bdev in the result of bdev_get_iostat; alone, without a tuple."""
    return lambda result: operator.itemgetter(*counters)(result["bdevs"][0])


def buckets(histogram: Any) -> tuple[int, int, int]:
    """How many buckets a range has, as a power of two, and the ranges there are."""
    return histogram["granularity"], histogram["min_range"], histogram["max_range"]


def masks(controllers: Any) -> list[str]:
    """The CPU masks of controllers."""
    return [item["cpumask"] for item in controllers]


def both(*checks: Check) -> Check:
    """Each of them."""

    def check(result: Any, target: Target) -> None:
        for each in checks:
            each(result, target)

    return check


def copied(clusters: int) -> Check:
    """A shallow copy, 1, is of so many clusters, and ends."""

    def check(result: Any, target: Target) -> None:
        assert result["total_clusters"] == clusters, result
        ended = {"operation_id": 1}
        while result["state"] == "in progress":
            result = target.rpc("bdev_lvol_check_shallow_copy", **ended)
        assert (result["state"], result["copied_clusters"]) == ("complete", clusters), result

    return check


def answers(expected: bool) -> Check:
    """Whether controller vm-1 answers a VM's GET_FEATURES; else the VM waits."""

    def check(_result: Any, target: Target) -> None:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(str(target.vhost_dir / "vm-1"))
            peer.sendall(struct.pack("<III", 1, 1, 0))
            ready, _, _ = select.select([peer], [], [], 30 if expected else 0.3)
            assert bool(ready) is expected

    return check


def esnaps(lvols: list[dict[str, Any]]) -> dict[str, tuple[bool, bool]]:
    """By alias whether an lvol is the clone of a bdev, and whether that is missing."""
    return {lvol["alias"]: (lvol["is_esnap_clone"], lvol["is_degraded"]) for lvol in lvols}


def kin(items: Any) -> dict[str, str]:
    """Of each lvol bdev, by alias, whose clone it is and whether it is thick."""
    specific = {item["aliases"][0]: item["driver_specific"]["lvol"] for item in items[1:]}
    thick = {True: "", False: " thick"}
    return {
        alias: lvol.get("base_snapshot", "-") + thick[lvol["thin_provision"]]
        for alias, lvol in specific.items()
    }


def injected(items: Any) -> dict[str, list[Any]]:
    """What is to become of I/Os of the second bdev, how many, and beside how many others."""
    asked = items[1]["driver_specific"]["error_disk"]["injected"]
    return {
        kind: [each["error_type"], each["num"], each["queue_depth"]] for kind, each in asked.items()
    }


def delays(items: Any) -> list[int]:
    """Latencies of the second bdev, microseconds."""
    delay = items[1]["driver_specific"]["delay"]
    sides = ("avg_read", "p99_read", "avg_write", "p99_write")
    return [delay[f"{side}_latency"] for side in sides]


def used_clusters(result: Any) -> int:
    """Returns the clusters that the volumes of the only lvstore have."""
    return int(result[0]["total_data_clusters"] - result[0]["free_clusters"])


def lvol(items: Any) -> tuple[str, int]:
    """Alias and size in bytes of the one bdev that is an lvol."""
    (found,) = [item for item in items if item["product_name"] == "Logical Volume"]
    return found["aliases"][0], found["num_blocks"] * found["block_size"]


def targets(controllers: Any) -> list[tuple[int, str]]:
    """Numbers and bdevs of the one controller's targets."""
    (controller,) = controllers
    scsi = controller["backend_specific"]["scsi"]
    return [(item["scsi_dev_num"], item["luns"][0]["bdev_name"]) for item in scsi]


def disks(controllers: Any) -> list[tuple[str, bool]]:
    """Bdev of each virtio-blk controller, and whether it is read-only."""
    found = [item["backend_specific"]["block"] for item in controllers]
    return [(item["bdev"], item["readonly"]) for item in found]


def unchecked(_result: Any, _target: Target) -> None:
    """What a case without a check does."""
    raise AssertionError("the case says nothing of the result")


@dataclass(frozen=True)
class Case:
    """A verb with its arguments: what is there before, and what is true afterwards.

    One without a check fails: an exit status of 0 alone says nothing.
    """

    verb: str
    args: tuple[str, ...] = ()
    before: tuple[Call, ...] = ()
    check: Check = unchecked
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.verb, *self.args))


def is_uuid(result: Any, _target: Target) -> None:
    assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", result)


def file_cases(kind: str, product: str) -> list[Case]:
    """The verbs of a kind of file-backed bdev, aio or uring; FILE is a file of 8 MiB."""
    made: Call = (f"bdev_{kind}_create", {"filename": "FILE", "name": "f0", "block_size": 512})

    def grown(_result: Any, target: Target) -> None:
        with (target.directory / "file").open("ab") as file:
            file.truncate(16 * MIB)
        assert target.spdk_rpc(f"bdev_{kind}_rescan", "f0").returncode == 0
        assert target.rpc("bdev_get_bdevs", name="f0")[0]["num_blocks"] == 16 * MIB // 512

    def shown(result: Any, target: Target) -> None:
        assert result == "f0"
        (bdev,) = target.rpc("bdev_get_bdevs", name="f0")
        assert (bdev["product_name"], bdev["num_blocks"]) == (product, 8 * MIB // 512)
        assert bdev["driver_specific"][kind]["filename"] == str(target.directory / "file")

    return [
        Case(f"bdev_{kind}_create", ("FILE", "f0", "512"), check=shown),
        Case(f"bdev_{kind}_create", ("FILE", "f0"), check=equals("f0")),
        Case(f"bdev_{kind}_rescan", ("f0",), (made,), check=grown),
        Case(f"bdev_{kind}_delete", ("f0",), (made,), then("bdev_get_bdevs", names, [])),
    ]


def grow_cases(kind: str) -> list[Case]:
    """Growing an lvstore on FILE, which has 8 MiB, after the file has grown."""
    base: Call = (f"bdev_{kind}_create", {"filename": "FILE", "name": "f0", "block_size": 512})
    made: Call = (
        "bdev_lvol_create_lvstore",
        {"bdev_name": "f0", "lvs_name": "lvs0", "cluster_sz": 65536},
    )

    def clusters(target: Target) -> tuple[int, int]:
        (store,) = target.rpc("bdev_lvol_get_lvstores")
        return store["total_data_clusters"], store["free_clusters"]

    def grown(result: Any, target: Target) -> None:
        assert result is True, "there was nothing to grow"
        total, free = clusters(target)
        (store,) = target.rpc("bdev_lvol_get_lvstores")
        os.truncate(target.directory / "file", 16 * MIB)
        rescan = (f"bdev_{kind}_rescan", "f0")
        for words in (rescan, ("bdev_lvol_grow_lvstore", "-u", store["uuid"])):
            done = target.spdk_rpc(*words)
            assert done.returncode == 0, done.stderr
            assert _output(done) is True
        assert clusters(target) == (total + 128, free + 128)
        assert target.restart() and clusters(target) == (total + 128, free + 128)

    return [Case("bdev_lvol_grow_lvstore", ("-l", "lvs0"), (base, made, LVOL), grown)]


CASES = [
    Case("rpc_get_methods", check=lambda r, _: None if "bdev_get_bdevs" in r else pytest.fail()),
    Case(
        "rpc_get_methods",
        ("-c", "-i"),
        check=lambda r, t: equals(t.rpc("rpc_get_methods", current=True))(r, t),
    ),
    Case("spdk_get_version", check=has(fields={"major": 0, "minor": 1, "patch": 0, "suffix": ""})),
    Case("spdk_kill_instance", ("SIGUSR1",), check=then("bdev_get_bdevs", names, [])),
    Case(
        "framework_get_subsystems",
        check=equals(
            [
                {"subsystem": "bdev", "depends_on": []},
                {"subsystem": "ublk", "depends_on": ["bdev"]},
                {"subsystem": "scsi", "depends_on": ["bdev"]},
                {"subsystem": "vhost_blk", "depends_on": ["bdev"]},
                {"subsystem": "vhost_scsi", "depends_on": ["scsi"]},
            ]
        ),
    ),
    Case("framework_get_config", ("bdev",), (NULL,), has(method="bdev_null_create")),
    Case("framework_get_config", ("scsi", "--with-batches"), check=equals([])),
    Case("framework_wait_init", check=then("rpc_get_methods", bool, True)),
    Case(
        "framework_start_init",
        check=then("bdev_get_bdevs", names, []),
        options=("--wait-for-rpc",),
    ),
    Case("framework_get_reactors", check=lambda r, _: has(in_interrupt=True)(r["reactors"], _)),
    Case("thread_get_stats", check=lambda r, _: has(name="reactor_0")(r["threads"], _)),
    Case("log_set_level", ("DEBUG",), check=then("log_get_level", str, "DEBUG")),
    Case("log_get_level", check=equals("NOTICE")),
    Case("log_set_print_level", ("ERROR",), check=then("log_get_print_level", str, "ERROR")),
    Case("log_get_print_level", check=equals("NOTICE")),
    Case("notify_get_types", check=begins(["bdev_register", "bdev_unregister", "bdev_resize"])),
    Case(
        "notify_get_notifications",
        ("-i", "0", "-n", "1"),
        (NULL, MALLOC),
        equals([{"type": "bdev_register", "ctx": "n0", "id": 0}]),
    ),
    Case("bdev_get_bdevs", (), (NULL, MALLOC), lambda r, _: equals(["n0", "m0"])(names(r), _)),
    Case(
        "bdev_get_bdevs",
        ("-b", "m0", "-t", "1"),
        (MALLOC,),
        has(name="m0", product_name="Malloc disk", num_blocks=131072, claimed=False),
    ),
    Case(
        "bdev_wait_for_examine", (), (NULL,), then("bdev_get_iostat", counted("bytes_read"), 8192)
    ),
    Case(
        "bdev_examine", ("-b", "n0"), (NULL, EXAMINED, RESET), then("bdev_get_bdevs", names, ["n0"])
    ),
    Case("bdev_get_iostat", (), (NULL,), lambda r, _: has(name="n0")(r["bdevs"], _)),
    Case(
        "bdev_get_iostat",
        ("--names", "n0"),
        (NULL, MALLOC),
        lambda r, t: equals(["n0"])(names(r["bdevs"]), t),
    ),
    Case(
        "bdev_get_iostat", ("--names", "n0", "-c", "--reset-mode", "all"), (NULL,), has(name="n0")
    ),
    Case(
        "bdev_reset_iostat",
        (),
        (NULL, EXAMINED),
        then("bdev_get_iostat", counted("bytes_read", "max_read_latency_ticks"), (0, 0)),
    ),
    Case(
        "bdev_reset_iostat",
        ("-b", "n0", "-m", "maxmin"),
        (NULL, EXAMINED),
        then("bdev_get_iostat", counted("bytes_read", "max_read_latency_ticks"), (8192, 0)),
    ),
    Case(
        "bdev_enable_histogram",
        ("--histogram", "-o", "read", "--granularity", "3", "n0"),
        (NULL,),
        then("bdev_get_histogram", buckets, (3, 0, 61), name="n0"),
    ),
    Case(
        "bdev_get_histogram",
        ("n0",),
        (NULL, HISTOGRAM),
        lambda r, t: equals((7, 0, 57))(buckets(r), t),
    ),
    Case(
        "bdev_get_histogram_borders",
        ("--borders", "10,1000", "n0"),
        (NULL, HISTOGRAM),
        equals({"borders_count": [0, 0, 0]}),
    ),
    Case(
        "accel_crypto_key_create",
        ("-c", "AES_XTS", *SECRET, "-t", "SIMPLE_LBA", "-n", "k0"),
        check=both(equals(True), then("accel_crypto_keys_get", names, ["k0"])),
    ),
    Case(
        "accel_crypto_keys_get",
        ("-k", "k0"),
        (MALLOC, KEY, CRYPTO),
        both(
            has(name="k0", cipher="AES_XTS", tweak_mode="SIMPLE_LBA", bits=256, used_by=["c0"]),
            has(key=None, key2=None),
        ),
    ),
    Case(
        "accel_crypto_key_destroy",
        ("-n", "k0"),
        (KEY,),
        both(equals(True), then("accel_crypto_keys_get", names, [])),
    ),
    Case(
        "bdev_crypto_create",
        ("m0", "c0", "-n", "k0"),
        (MALLOC, KEY),
        both(equals("c0"), then("bdev_get_bdevs", names, ["m0", "c0"])),
    ),
    Case(
        "bdev_crypto_delete",
        ("c0",),
        (MALLOC, KEY, CRYPTO),
        then("bdev_get_bdevs", names, ["m0"]),
    ),
    Case("bdev_malloc_create", ("64", "512"), check=equals("Malloc0")),
    Case(
        "bdev_malloc_create",
        ("-b", "m1", "-u", "5f3c2fd0-6d3f-4a3b-9d24-8cf43cf5f6c1", "-p", "4096", "1.5", "512"),
        check=then(
            "bdev_get_bdevs",
            lambda r: (r[0]["num_blocks"], r[0]["uuid"]),
            (3072, "5f3c2fd0-6d3f-4a3b-9d24-8cf43cf5f6c1"),
            name="m1",
        ),
    ),
    Case(
        "bdev_malloc_create",
        ("-b", "m1", "-m", "8", "-i", "-t", "1", "-d", "-f", "0", "1", "4096"),
        check=then(
            "bdev_get_bdevs",
            operator.itemgetter(0),
            Fields(block_size=4104, num_blocks=256, md_size=8, dif_type=1, dif_is_head_of_md=True),
            name="m1",
        ),
    ),
    Case(
        "bdev_malloc_create",
        ("-b", "m1", "-m", "8", "-t", "3", "1", "512"),
        check=then(
            "bdev_get_bdevs",
            operator.itemgetter(0),
            Fields(block_size=512, md_interleave=False, dif_type=3, dif_pi_format=0),
            name="m1",
        ),
    ),
    Case(
        "bdev_set_qos_limit",
        (
            *("n0", "--rw-ios-per-sec", "3000", "--rw-mbytes-per-sec", "0"),
            *("--r-mbytes-per-sec", "20", "--w-mbytes-per-sec", "10"),
        ),
        (NULL,),
        then(
            "bdev_get_bdevs",
            lambda r: r[0]["assigned_rate_limits"],
            {
                "rw_ios_per_sec": 3000,
                "rw_mbytes_per_sec": 0,
                "r_mbytes_per_sec": 20,
                "w_mbytes_per_sec": 10,
            },
        ),
    ),
    Case("bdev_malloc_delete", ("m0",), (MALLOC,), then("bdev_get_bdevs", names, [])),
    Case("bdev_null_create", ("n1", "16", "4096"), check=equals("n1")),
    Case("bdev_null_delete", ("n0",), (NULL,), then("bdev_get_bdevs", names, [])),
    Case(
        "bdev_null_resize",
        ("n0", "2"),
        (NULL,),
        then("bdev_get_bdevs", lambda r: r[0]["num_blocks"], 4096),
    ),
    *file_cases("aio", "AIO disk"),
    *file_cases("uring", "URING bdev"),
    Case("bdev_lvol_create_lvstore", ("m0", "lvs0"), (MALLOC,), is_uuid),
    Case(
        "bdev_lvol_create_lvstore",
        ("-c", "2097152", "--clear-method", "none", "m0", "lvs0"),
        (MALLOC,),
        then("bdev_lvol_get_lvstores", lambda r: r[0]["cluster_size"], 2 * MIB),
    ),
    Case(
        "bdev_lvol_delete_lvstore",
        ("-l", "lvs0"),
        (MALLOC, STORE, LVOL),
        then("bdev_get_bdevs", names, ["m0"]),
    ),
    Case(
        "bdev_lvol_rename_lvstore",
        ("lvs0", "lvs1"),
        (MALLOC, STORE, LVOL),
        then("bdev_get_bdevs", lvol, ("lvs1/v0", 4 * MIB)),
    ),
    *grow_cases("aio"),
    *grow_cases("uring"),
    Case(
        "bdev_lvol_get_lvstores",
        (),
        (MALLOC, STORE),
        has(name="lvs0", base_bdev="m0", cluster_size=64 << 10, block_size=512),
    ),
    Case("bdev_lvol_get_lvstores", ("-l", "lvs0"), (MALLOC, STORE), has(name="lvs0")),
    Case("bdev_lvol_create", ("-l", "lvs0", "v1", "8"), (MALLOC, STORE), is_uuid),
    Case(
        "bdev_lvol_create",
        ("-l", "lvs0", "-t", "-c", "write_zeroes", "v1", "8"),
        (MALLOC, STORE),
        then("bdev_lvol_get_lvols", lambda r: r[0]["is_thin_provisioned"], True),
    ),
    Case(
        "bdev_lvol_delete",
        ("lvs0/v0",),
        (MALLOC, STORE, LVOL),
        then("bdev_lvol_get_lvols", names, []),
    ),
    Case(
        "bdev_lvol_delete",
        ("lvs0/s0",),
        (MALLOC, STORE, LVOL, SNAPSHOT),
        then("bdev_get_bdevs", kin, {"lvs0/v0": "-"}),
    ),
    Case(
        "bdev_lvol_resize",
        ("lvs0/v0", "6"),
        (MALLOC, STORE, LVOL),
        then("bdev_get_bdevs", lvol, ("lvs0/v0", 6 * MIB)),
    ),
    Case(
        # What it loses is room again.
        "bdev_lvol_resize",
        ("lvs0/v0", "2"),
        (MALLOC, STORE, THICK),
        then("bdev_lvol_get_lvstores", used_clusters, 2 * MIB // (64 << 10)),
    ),
    Case(
        "bdev_lvol_rename",
        ("lvs0/v0", "data"),
        (MALLOC, STORE, LVOL),
        then("bdev_get_bdevs", lvol, ("lvs0/data", 4 * MIB)),
    ),
    Case(
        "bdev_lvol_set_read_only",
        ("lvs0/v0",),
        (MALLOC, STORE, LVOL),
        then("bdev_lvol_get_lvols", lambda r: r[0]["is_read_only"], True),
    ),
    Case(
        "bdev_lvol_snapshot",
        ("lvs0/v0", "s0"),
        (MALLOC, STORE, LVOL),
        then("bdev_get_bdevs", kin, {"lvs0/v0": "s0", "lvs0/s0": "-"}),
    ),
    Case(
        "bdev_error_create",
        ("m0",),
        (MALLOC,),
        both(equals(True), then("bdev_get_bdevs", names, ["m0", "EE_m0"])),
    ),
    Case(
        "bdev_error_inject_error",
        ("EE_m0", "write", "corrupt_data", "-n", "2", "-q", "1", "-o", "9", "-v", "3"),
        (MALLOC, FAILING),
        then("bdev_get_bdevs", injected, {"write": ["corrupt_data", 2, 1]}),
    ),
    Case(
        "bdev_error_resume_pending",
        ("EE_m0",),
        (MALLOC, FAILING, ("bdev_error_inject_error", PENDING)),
        then("bdev_get_bdevs", injected, {"read": ["pending", 1, 0]}),
    ),
    Case("bdev_error_delete", ("EE_m0",), (MALLOC, FAILING), then("bdev_get_bdevs", names, ["m0"])),
    Case(
        "bdev_delay_create",
        ("-b", "m0", "-d", "d0", "-r", "10", "-t", "20", "-w", "30", "-n", "40"),
        (MALLOC,),
        both(equals("d0"), then("bdev_get_bdevs", delays, [10, 20, 30, 40])),
    ),
    Case(
        "bdev_delay_update_latency",
        ("d0", "avg_write", "70"),
        (MALLOC, DELAYING),
        then("bdev_get_bdevs", delays, [1, 2, 70, 4]),
    ),
    Case("bdev_delay_delete", ("d0",), (MALLOC, DELAYING), then("bdev_get_bdevs", names, ["m0"])),
    Case("bdev_lvol_snapshot", ("lvs0/v0", "s0"), (MALLOC, STORE, LVOL), is_uuid),
    Case("bdev_lvol_clone", ("lvs0/s0", "c0"), (MALLOC, STORE, LVOL, SNAPSHOT), is_uuid),
    Case(
        "bdev_lvol_clone",
        ("lvs0/s0", "c0"),
        (MALLOC, STORE, LVOL, SNAPSHOT),
        then("bdev_get_bdevs", kin, {"lvs0/v0": "s0", "lvs0/s0": "-", "lvs0/c0": "s0"}),
    ),
    Case("bdev_lvol_clone_bdev", ("m1", "lvs0", "e0"), (MALLOC, STORE, ANOTHER), is_uuid),
    Case(
        "bdev_lvol_clone_bdev",
        ("m1", "lvs0", "e0"),
        (MALLOC, STORE, ANOTHER),
        then("bdev_lvol_get_lvols", esnaps, {"lvs0/e0": (True, False)}),
    ),
    Case(
        "bdev_lvol_set_parent_bdev",
        ("lvs0/v0", "m1"),
        (MALLOC, STORE, LVOL, ANOTHER),
        then("bdev_lvol_get_lvols", esnaps, {"lvs0/v0": (True, False)}),
    ),
    Case(
        "bdev_lvol_decouple_parent",
        ("lvs0/e0",),
        (MALLOC, STORE, ANOTHER, CLONE_BDEV),
        then("bdev_lvol_get_lvols", esnaps, {"lvs0/e0": (False, False)}),
    ),
    Case(
        "bdev_lvol_inflate",
        ("lvs0/v0",),
        (MALLOC, STORE, LVOL, SNAPSHOT, CLONE),
        then("bdev_get_bdevs", kin, {"lvs0/v0": "- thick", "lvs0/s0": "-", "lvs0/c0": "s0"}),
    ),
    Case(
        "bdev_lvol_start_shallow_copy",
        ("lvs0/s0", "m1"),
        (MALLOC, STORE, LVOL, SNAPSHOT, ANOTHER),
        equals({"operation_id": 1}),
    ),
    Case(
        "bdev_lvol_check_shallow_copy",
        ("1",),
        (MALLOC, STORE, THICK, SNAPSHOT, ANOTHER, COPY),
        copied(4 * MIB // (64 << 10)),
    ),
    Case(
        "bdev_lvol_decouple_parent",
        ("lvs0/c0",),
        (MALLOC, STORE, LVOL, SNAPSHOT, CLONE),
        then("bdev_get_bdevs", kin, {"lvs0/v0": "s0", "lvs0/s0": "-", "lvs0/c0": "-"}),
    ),
    Case(
        "bdev_lvol_set_parent",
        ("lvs0/c0", "lvs0/s0"),
        (MALLOC, STORE, LVOL, SNAPSHOT, CLONE, ("bdev_lvol_decouple_parent", {"name": "lvs0/c0"})),
        then("bdev_get_bdevs", kin, {"lvs0/v0": "s0", "lvs0/s0": "-", "lvs0/c0": "s0"}),
    ),
    Case("bdev_lvol_get_lvols", (), (MALLOC, STORE, LVOL), has(alias="lvs0/v0", name="v0")),
    Case("bdev_lvol_get_lvols", ("-l", "lvs0"), (MALLOC, STORE, LVOL), has(is_degraded=False)),
    Case(
        "vhost_create_scsi_controller",
        ("vm-1",),
        check=then("vhost_get_controllers", lambda r: r[0]["ctrlr"], "vm-1"),
    ),
    Case(
        "vhost_create_scsi_controller",
        ("--cpumask", "0x1", "--delay", "vm-1"),
        check=both(then("vhost_get_controllers", masks, ["0x1"]), answers(False)),
    ),
    Case(
        "vhost_create_blk_controller",
        ("vm-1", "m0", "--cpumask", "0x1", "--transport", "vhost_user_blk"),
        (MALLOC,),
        both(
            then("vhost_get_controllers", masks, ["0x1"]),
            then("vhost_get_controllers", disks, [("m0", False)]),
        ),
    ),
    Case(
        "vhost_create_blk_controller",
        ("vm-1", "m0", "-r"),
        (MALLOC,),
        then("vhost_get_controllers", disks, [("m0", True)]),
    ),
    Case(
        "vhost_start_scsi_controller",
        ("vm-1",),
        (("vhost_create_scsi_controller", {"ctrlr": "vm-1", "delay": True}),),
        answers(True),
    ),
    Case(
        "vhost_scsi_controller_add_target",
        ("vm-1", "-1", "m0"),
        (MALLOC, CONTROLLER),
        lambda r, t: (
            equals(0)(r, t),
            then("vhost_get_controllers", targets, [(0, "m0")])(r, t),
        )[0],
    ),
    Case(
        "vhost_scsi_controller_add_target",
        ("vm-1", "254", "m0"),
        (MALLOC, CONTROLLER),
        equals(254),
    ),
    Case(
        "vhost_scsi_controller_remove_target",
        ("vm-1", "3"),
        (MALLOC, CONTROLLER, ADD),
        then("vhost_get_controllers", targets, []),
    ),
    Case("vhost_get_controllers", (), (MALLOC, CONTROLLER, ADD), has(ctrlr="vm-1", sessions=[])),
    Case("vhost_get_controllers", ("-n", "vm-1"), (CONTROLLER,), has(ctrlr="vm-1")),
    Case(
        "vhost_delete_controller",
        ("vm-1",),
        (MALLOC, CONTROLLER, ADD),
        then("vhost_get_controllers", list, []),
    ),
    Case(
        "scsi_get_devices",
        (),
        (MALLOC, CONTROLLER, ADD),
        equals([{"id": 0, "device_name": "vm-1 Target 3"}]),
    ),
    Case(
        "vhost_controller_set_coalescing",
        ("vm-1", "50", "20000"),
        (CONTROLLER,),
        then(
            "vhost_get_controllers",
            lambda r: (r[0]["delay_base_us"], r[0]["iops_threshold"]),
            (50, 20000),
        ),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_spdk_rpc_drives(case: Case, make_target: MakeTarget) -> None:
    target = make_target(*case.options)
    file = target.make_file("file", 8 * MIB)

    def real(value: Any) -> Any:
        return str(file) if value == "FILE" else value

    target.start()
    for method, params in case.before:
        target.rpc(method, **{key: real(value) for key, value in params.items()})
    done = target.spdk_rpc(case.verb, *map(real, case.args))
    assert done.returncode == 0, done.stdout + done.stderr
    case.check(_output(done), target)


@pytest.mark.parametrize(
    ("verb", "args", "code", "words"),
    [
        ("bdev_lvol_delete", ("lvs0/s0",), -1, "lvs0/c0, lvs0/v0 need it"),
        ("bdev_lvol_clone", ("lvs0/v0", "c1"), -22, "v0 is not a snapshot"),
        ("bdev_lvol_snapshot", ("lvs0/v0", "c0"), -17, "it already exists"),
        ("bdev_lvol_inflate", ("lvs0/none",), -19, "lvol lvs0/none does not exist"),
        ("bdev_lvol_decouple_parent", ("lvs0/s0",), -22, "it has none"),
        ("bdev_lvol_set_parent", ("lvs0/c0", "lvs0/v0"), -22, "v0 is not a snapshot"),
        ("bdev_lvol_set_parent_bdev", ("lvs0/c0", "none"), -19, "bdev none does not exist"),
        ("bdev_lvol_clone_bdev", ("none", "lvs0", "c1"), -19, "bdev none does not exist"),
        ("bdev_lvol_rename", ("lvs0/v0", "s0"), -17, "it already exists"),
        ("bdev_lvol_resize", ("lvs0/s0", "8"), -1, "the lvol is read-only"),
        ("bdev_lvol_set_read_only", ("lvs0/none",), -19, "lvol lvs0/none does not exist"),
        ("bdev_lvol_start_shallow_copy", ("lvs0/v0", "m1"), -1, "the lvol is not read-only"),
        ("bdev_lvol_check_shallow_copy", ("9",), -19, "there is no shallow copy 9"),
    ],
)
def test_spdk_rpc_is_told_why_not(
    make_target: MakeTarget, verb: str, args: tuple[str, ...], code: int, words: str
) -> None:
    target = make_target().start()
    for method, params in (MALLOC, STORE, LVOL, SNAPSHOT, CLONE, ANOTHER):
        target.rpc(method, **params)
    before = target.rpc("bdev_get_bdevs")
    done = target.spdk_rpc(verb, *args)
    assert done.returncode == 1 and f'"code": {code},' in done.stdout, done.stdout
    assert words in done.stdout
    assert target.rpc("bdev_get_bdevs") == before


def _output(done: subprocess.CompletedProcess[str]) -> Any:
    """What spdk-rpc printed: JSON, or a bare word (it strips the quotes), or nothing."""
    text = done.stdout.strip()
    try:
        return json.loads(text) if text else None
    except json.JSONDecodeError:
        return text


def _verbs() -> set[str]:
    """All verbs of the installed spdk-rpc."""
    cli = importlib.import_module("spdk.cli")
    sources = [Path(p) for p in cli.__path__]
    found: set[str] = set()
    for module in pkgutil.iter_modules([str(p) for p in sources]):
        for source in sources:
            text = (source / f"{module.name}.py").read_text()
            found |= set(re.findall(r"add_parser\(\s*['\"]([a-z0-9_]+)['\"]", text))
    return found


def test_every_method_of_ours_that_spdk_rpc_has_a_verb_for_has_a_case() -> None:
    shown = subprocess.run([binary(), "--print-schemas"], capture_output=True, check=True)
    methods = set(json.loads(shown.stdout))
    verbs = _verbs()
    assert len(verbs) > 200
    elsewhere = IN_A_GUEST | WITH_A_CLUSTER | WITH_A_LUN | WITH_A_CONTROLLER
    assert methods & verbs == {case.verb for case in CASES} | elsewhere
    assert all(method.startswith("virtlun_") for method in methods - verbs)


def test_a_saved_configuration_loads_into_another_target(make_target: MakeTarget) -> None:
    first = make_target().start()
    first.make_lvstore()
    volume = first.rpc("bdev_lvol_create", lvol_name="v0", size_in_mib=4, lvs_name="lvs0")
    for method, params in (MALLOC, NULL, CONTROLLER, ADD):
        first.rpc(method, **params)
    first.rpc(
        "vhost_scsi_controller_add_target",
        ctrlr="vm-1",
        scsi_target_num=-1,
        bdev_name="lvs0/v0",
        serial="disk-1",
        read_only=True,
        block_size=4096,
    )
    saved = first.spdk_rpc("save_config")
    assert saved.returncode == 0, saved.stderr
    assert first.stop() == 0
    second = make_target().start()
    loaded = second.spdk_rpc("load_config", stdin=saved.stdout)
    assert loaded.returncode == 0, loaded.stdout + loaded.stderr
    assert second.spdk_rpc("save_config").stdout == saved.stdout
    assert targets(second.rpc("vhost_get_controllers")) == [(0, volume), (3, "m0")]
    # The file that a target is started with means the same.
    assert second.stop() == 0
    config = second.directory / "saved.json"
    config.write_text(saved.stdout)
    third = make_target("--config", str(config)).start()
    assert third.spdk_rpc("save_config").stdout == saved.stdout
    assert third.restart().spdk_rpc("save_config").stdout == saved.stdout


def test_subsystem_configurations_load_too(make_target: MakeTarget) -> None:
    first, second = make_target().start(), make_target().start()
    first.rpc(NULL[0], **NULL[1])
    saved = first.spdk_rpc("save_subsystem_config", "-n", "bdev")
    assert second.spdk_rpc("load_subsystem_config", stdin=saved.stdout).returncode == 0
    assert names(second.rpc("bdev_get_bdevs")) == ["n0"]


def test_verbs_in_a_batch_are_answered_with_an_array(target: Target) -> None:
    done = target.spdk_rpc(
        "--batch-mode", stdin="bdev_null_create n1 1 512\nbdev_get_bdevs\nbdev_null_delete none\n"
    )
    assert done.returncode == 1
    assert '"n1"' in done.stdout
    assert "there is no bdev none" in done.stderr
    assert names(target.rpc("bdev_get_bdevs")) == ["n1"]


def test_a_target_that_waits_for_rpc_initialises_when_told(make_target: MakeTarget) -> None:
    target = make_target().start()
    target.rpc(NULL[0], **NULL[1])
    assert target.stop() == 0
    target.start("--wait-for-rpc")
    assert "may only be called after initialisation" in str(target.fails("bdev_get_bdevs"))
    with subprocess.Popen(
        [
            str(Path(sys.executable).with_name("spdk-rpc")),
            *("-s", str(target.rpc_socket), "framework_wait_init"),
        ]
    ) as waiting:
        time.sleep(0.3)
        assert waiting.poll() is None
        target.rpc("framework_start_init")
        assert waiting.wait(90) == 0
    assert names(target.rpc("bdev_get_bdevs")) == ["n0"]
    assert target.fails("framework_start_init").code == -1  # type: ignore[attr-defined]


def test_text_outside_ascii_survives_the_official_client(target: Target) -> None:
    """It decodes each 4,096 bytes on their own and drops a piece that ends within a character."""
    from spdk.rpc.client import JSONRPCClient  # noqa: PLC0415

    for method, params in (MALLOC, STORE, LVOL):
        target.rpc(method, **params)
    values = {f"x{number}": "é𝄞" * 50 for number in range(20)}
    with JSONRPCClient(str(target.rpc_socket)) as client:
        for name, value in values.items():
            client.virtlun_lvol_set_xattr(name="lvs0/v0", xattr_name=name, xattr_value=value)
        assert client.virtlun_lvol_get_xattrs(name="lvs0/v0") == values
