"""The target dies before each write and flush of an operation on snapshots and clones.

The thread of the lvstore is stopped before the nth time that it gives its disk something to do, and
the process killed there. The next target finds what was there before or what is there afterwards,
nothing else, and the operation can be done again. What the kernel had by then is on the disk: power
cuts are in crates/blobstore/tests/crash.rs.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pydataplane.errors import RpcError, TargetUnavailable
from tests.support import tracer
from tests.support.night import by_day
from tests.support.target import Target
from tests.support.tracer import Tracer

pytestmark = pytest.mark.skipif(not tracer.is_possible(), reason="the tracer knows x86-64 alone")

MIB = 1 << 20
BLOCK = 4096
CLUSTER = 64 << 10

Call = tuple[str, dict[str, Any]]
OPERATIONS: list[Call] = [
    ("bdev_lvol_snapshot", {"lvol_name": "lvs0/vm", "snapshot_name": "s3"}),
    (
        "virtlun_lvol_snapshot_together",
        {
            "snapshots": [
                {"lvol_name": "lvs0/vm", "snapshot_name": "together-vm"},
                {"lvol_name": "lvs0/copy", "snapshot_name": "together-copy"},
            ]
        },
    ),
    ("bdev_lvol_clone", {"snapshot_name": "lvs0/s2", "clone_name": "another"}),
    ("bdev_lvol_clone_bdev", {"bdev": "image", "lvs_name": "lvs0", "clone_name": "another"}),
    ("bdev_lvol_inflate", {"name": "lvs0/copy"}),
    ("bdev_lvol_inflate", {"name": "lvs0/outside"}),
    ("bdev_lvol_decouple_parent", {"name": "lvs0/vm"}),
    ("bdev_lvol_set_parent", {"lvol_name": "lvs0/copy", "parent_name": "lvs0/s2"}),
    ("bdev_lvol_set_parent_bdev", {"lvol_name": "lvs0/copy", "parent_name": "image"}),
    ("virtlun_lvol_roll_back", {"lvol_name": "lvs0/vm", "snapshot_name": "lvs0/s1"}),
    (
        "virtlun_lvol_roll_back_together",
        {
            "rollbacks": [
                {"lvol_name": "lvs0/vm", "snapshot_name": "lvs0/s1"},
                {"lvol_name": "lvs0/copy", "snapshot_name": "lvs0/s2"},
            ]
        },
    ),
    ("bdev_lvol_delete", {"name": "lvs0/s2"}),
    ("bdev_lvol_delete", {"name": "lvs0/copy"}),
    ("bdev_lvol_resize", {"name": "lvs0/vm", "size_in_mib": 1}),
    ("bdev_lvol_resize", {"name": "lvs0/vm", "size_in_mib": 3}),
    (
        "virtlun_lvol_set_xattr",
        {"name": "lvs0/vm", "xattr_name": "owner", "xattr_value": "x" * 2000},
    ),
    ("virtlun_lvol_remove_xattr", {"name": "lvs0/copy", "xattr_name": "kept"}),
    ("bdev_lvol_rename", {"old_name": "lvs0/s1", "new_name": "first"}),
    ("bdev_lvol_set_read_only", {"name": "lvs0/copy"}),
]
COPYING = ("bdev_lvol_inflate", "bdev_lvol_decouple_parent")
"""Those that are done in more than one record; until the last the volume has more of its own."""

State = dict[str, tuple[str | None, bool, bool, bool, str, str]]


def exported(target: Target, volume: str) -> Path:
    """Returns the file that the kernel has of a volume."""
    return Path(target.rpc("virtlun_export_create", bdev_name=volume)["path"])


def write(target: Target, volume: str, tag: int, clusters: list[int]) -> None:
    """Writes a block into clusters of a volume, durably."""
    file = os.open(exported(target, volume), os.O_RDWR)
    for cluster in clusters:
        os.pwrite(file, bytes([tag, cluster]) * (BLOCK // 2), cluster * CLUSTER + tag * BLOCK)
    os.fsync(file)
    os.close(file)
    target.rpc("virtlun_export_delete", bdev_name=volume)


def state(target: Target) -> State:
    """Returns of each volume its parent, if it is a snapshot, thin, read-only, xattrs, and data."""
    found: State = {}
    read_only = {each["alias"]: each["is_read_only"] for each in target.rpc("bdev_lvol_get_lvols")}
    for item in target.rpc("bdev_get_bdevs"):
        lvol = item["driver_specific"].get("lvol")
        if lvol is None:
            continue
        (alias,) = item["aliases"]
        digest = hashlib.sha256(exported(target, alias).read_bytes()).hexdigest()
        target.rpc("virtlun_export_delete", bdev_name=alias)
        parent = lvol.get("base_snapshot") or lvol.get("external_snapshot_name")
        kin = parent, lvol["snapshot"], lvol["thin_provision"], read_only[alias]
        xattrs = target.rpc("virtlun_lvol_get_xattrs", name=alias)
        found[alias] = (*kin, json.dumps(xattrs, sort_keys=True), digest)
    return found


def free(target: Target) -> int:
    """Returns the free clusters of the lvstore."""
    (store,) = target.rpc("bdev_lvol_get_lvstores")
    clusters: int = store["free_clusters"]
    return clusters


def dies(target: Target, operation: Call, nth: int) -> bool:
    """Does an operation in a target that dies before the nth I/O of it; whether it came there."""
    method, params = operation
    pid = target.pid

    def call() -> None:
        with contextlib.suppress(TargetUnavailable):
            target.rpc(method, **params)

    with ThreadPoolExecutor(1) as pool:
        with Tracer(pid, tracer.thread_named(pid, "lvstore")) as traced:
            done = pool.submit(call)
            reached = traced.kill_before_submission(nth, done.done)
        done.result()
    return reached


@by_day(
    "virtlun_lvol_snapshot_together",
    "bdev_lvol_clone",
    "bdev_lvol_inflate0",
    "bdev_lvol_set_parent",
    "virtlun_lvol_roll_back",
    "bdev_lvol_delete0",
    "bdev_lvol_resize1",
)
@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(
            operation,
            id=operation[0],
            # of the two copies by day that of a snapshot's data
            marks=[pytest.mark.nightly] if operation[1].get("name") == "lvs0/outside" else [],
        )
        for operation in OPERATIONS
    ],
)
def test_it_has_happened_or_not(target: Target, operation: Call) -> None:
    method, params = operation
    disk, kept = target.make_file("store.img", 24 * MIB), target.directory / "kept.img"
    target.rpc("bdev_uring_create", filename=str(disk), name="disk", block_size=512)
    target.rpc("bdev_lvol_create_lvstore", bdev_name="disk", lvs_name="lvs0", cluster_sz=CLUSTER)
    target.rpc(
        "bdev_lvol_create", lvs_name="lvs0", lvol_name="vm", size_in_mib=2, thin_provision=True
    )
    write(target, "lvs0/vm", 1, [0, 1, 2, 17, 31])
    target.rpc("bdev_lvol_snapshot", lvol_name="lvs0/vm", snapshot_name="s1")
    target.rpc("bdev_lvol_clone", snapshot_name="lvs0/s1", clone_name="copy")
    write(target, "lvs0/vm", 2, [1, 3, 30])
    target.rpc("bdev_lvol_snapshot", lvol_name="lvs0/vm", snapshot_name="s2")
    write(target, "lvs0/vm", 3, [0, 3, 9])
    write(target, "lvs0/copy", 4, [2])
    image = target.make_file("image.raw", 2 * MIB)
    image.write_bytes(bytes(range(256)) * (2 * MIB // 256))
    image.chmod(0o444)
    target.rpc("bdev_aio_create", name="image", filename=str(image), block_size=512, readonly=True)
    target.rpc("bdev_lvol_clone_bdev", bdev="image", lvs_name="lvs0", clone_name="outside")
    write(target, "lvs0/outside", 5, [0, 7])
    target.rpc("virtlun_lvol_set_xattr", name="lvs0/copy", xattr_name="kept", xattr_value="so far")
    before = state(target), free(target)
    target.kill9()
    shutil.copyfile(disk, kept)

    target.start()
    target.rpc(method, **params)
    after = state(target), free(target)
    assert after != before
    for nth in itertools.count():
        target.kill9()
        shutil.copyfile(kept, disk)
        target.start()
        reached = dies(target, operation, nth)
        target.crash()
        now = state(target), free(target)
        if method in COPYING:
            assert now[0] in (before[0], after[0])
            assert after[1] <= now[1] <= before[1]
        else:
            assert now in (before, after)
        if now[0] == before[0]:
            assert reached, "it was acknowledged"
            target.rpc(method, **params)
        elif method != "bdev_lvol_decouple_parent":  # which would go on to the next one
            with contextlib.suppress(RpcError):
                target.rpc(method, **params)
        assert (state(target), free(target)) == after
        if not reached:
            assert nth >= 2, "a record and its flush at least"
            print(f"{method}: {nth} places")
            break
