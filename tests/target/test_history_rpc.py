"""What our target's methods for snapshots say and take beyond SPDK's."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import uuid
from pathlib import Path

import pytest

from pydataplane.errors import RpcError
from tests.support.target import Target
from tests.target.test_cli import done

MIB = 1 << 20
VM_MIB = 64


@pytest.fixture
def vm(target: Target) -> Target:
    """A target with the thin volume lvs0/vm."""
    target.make_lvstore("lvs0", 128 * MIB)
    target.make_thin("vm", VM_MIB)
    return target


def write(target: Target, volume: str, *mib: int) -> None:
    """Writes to some MiB of a volume."""
    with target.exported(volume) as path, path.open("rb+", buffering=0) as file:
        for at in mib:
            file.seek(at * MIB + 8192)
            file.write(b"x" * 4096)
        os.fsync(file)


def told(target: Target, method: str, **params: object) -> list[tuple[int, int]]:
    """Returns all ranges, page by page, as (first MiB, MiBs)."""
    found: list[tuple[int, int]] = []
    offset: int | None = 0
    while offset is not None:
        page = target.rpc(method, offset=offset, **params)
        found += [(each["offset"] // MIB, each["length"] // MIB) for each in page["ranges"]]
        offset = page["next_offset"]
    return found


def test_a_snapshot_and_a_clone_are_made_with_their_uuid_and_xattrs(vm: Target) -> None:
    first, second, clone = (str(uuid.uuid4()) for _ in range(3))
    one = {"lvol_name": "lvs0/vm", "snapshot_name": "s1", "lvol_uuid": first}
    assert vm.rpc("bdev_lvol_snapshot", **one, xattrs={"of": "vm"}) == first
    again = one | {"snapshot_name": "s2"}
    with pytest.raises(RpcError, match=first) as caught:
        vm.rpc("bdev_lvol_snapshot", **again)
    assert caught.value.code == -errno.EEXIST
    together = [again | {"lvol_uuid": second, "xattrs": {"n": "2"}}]
    assert vm.rpc("virtlun_lvol_snapshot_together", snapshots=together) == [second]
    made = vm.rpc(
        "bdev_lvol_clone", snapshot_name=first, clone_name="c", lvol_uuid=clone, xattrs={"c": "1"}
    )
    assert made == clone
    vm.crash()
    kept = {each: vm.rpc("virtlun_lvol_get_xattrs", name=each) for each in (first, second, clone)}
    assert kept == {first: {"of": "vm"}, second: {"n": "2"}, clone: {"c": "1"}}


def test_ranges_that_are_allocated_and_that_changed(vm: Target) -> None:
    write(vm, "lvs0/vm", 1, 2, 3, 40)
    vm.rpc("bdev_lvol_snapshot", lvol_name="lvs0/vm", snapshot_name="s1")
    write(vm, "lvs0/vm", 2, 50)
    vm.rpc("bdev_lvol_snapshot", lvol_name="lvs0/vm", snapshot_name="s2")
    write(vm, "lvs0/vm", 63)
    for most in (1, 2, 100):
        told_of = {"max_ranges": most}
        allocated, changed = "virtlun_lvol_get_allocated_ranges", "virtlun_lvol_get_changed_ranges"
        assert told(vm, allocated, name="lvs0/s1", **told_of) == [(1, 3), (40, 1)]
        assert told(vm, allocated, name="lvs0/s2", **told_of) == [(1, 3), (40, 1), (50, 1)]
        assert told(vm, changed, name="lvs0/s2", since="lvs0/s1", **told_of) == [(2, 1), (50, 1)]
        since = told(vm, changed, name="lvs0/vm", since="lvs0/s1", **told_of)
        assert since == [(2, 1), (50, 1), (63, 1)]
    # A snapshot in between is merged; what changed since the first stays known.
    vm.rpc("bdev_lvol_delete", name="lvs0/s2")
    assert told(vm, changed, name="lvs0/vm", since="lvs0/s1") == [(2, 1), (50, 1), (63, 1)]


def test_what_volumes_share(vm: Target) -> None:
    def shared() -> dict[str, tuple[int, int]]:
        names = ["lvs0/vm", "lvs0/s1", "lvs0/c", "lvs0/none"]
        found = vm.rpc("virtlun_lvol_get_space", names=names)
        of = {name: (space["shared"], space["exclusive"]) for name, space in found.items()}
        return {name: (one // MIB, other // MIB) for name, (one, other) in of.items()}

    write(vm, "lvs0/vm", 1, 2, 3)
    assert shared() == {"lvs0/vm": (0, 3)}
    vm.rpc("bdev_lvol_snapshot", lvol_name="lvs0/vm", snapshot_name="s1")
    write(vm, "lvs0/vm", 2, 9)
    assert shared() == {"lvs0/vm": (2, 2), "lvs0/s1": (2, 1)}
    vm.rpc("bdev_lvol_clone", snapshot_name="lvs0/s1", clone_name="c")
    assert shared() == {"lvs0/vm": (2, 2), "lvs0/s1": (3, 0), "lvs0/c": (3, 0)}
    shown = done(vm, "volume", "list")
    assert "EXCLUSIVE" in shown
    rows = {item["path"]: item for item in json.loads(done(vm, "volume", "list", "--json"))}
    assert (rows["lvs0/c"]["shared"], rows["lvs0/c"]["exclusive"]) == (3 * MIB, 0)
    vm.rpc("bdev_lvol_delete", name="lvs0/c")
    free = vm.rpc("bdev_lvol_get_lvstores")[0]["free_clusters"]
    vm.rpc("bdev_lvol_delete", name="lvs0/s1")
    assert vm.rpc("bdev_lvol_get_lvstores")[0]["free_clusters"] == free + 1


@pytest.mark.parametrize(
    ("wrong", "code", "words"),
    [
        ({"max_ranges": 0}, errno.EINVAL, "max_ranges is 0; give 1 to 65536"),
        ({"name": "lvs0/none"}, errno.ENODEV, "lvs0/none"),
        ({"since": "lvs0/none"}, errno.ENODEV, "lvs0/none"),
        ({"since": "lvs1/other"}, errno.EINVAL, "not in one lvstore"),
    ],
)
def test_ranges_that_cannot_be_told(
    vm: Target, wrong: dict[str, object], code: int, words: str
) -> None:
    vm.make_lvstore("lvs1", 64 * MIB)
    vm.rpc("bdev_lvol_create", lvol_name="other", size_in_mib=4, lvs_name="lvs1")
    params: dict[str, object] = {"name": "lvs0/vm", "since": "lvs0/vm"} | wrong
    with pytest.raises(RpcError, match=words) as caught:
        vm.rpc("virtlun_lvol_get_changed_ranges", **params)
    assert caught.value.code == -code


def copied(target: Target, snapshot: str, bdev: str) -> dict[str, object]:
    """Copies what a snapshot itself has, and returns what is said in the end."""
    begun = target.rpc("bdev_lvol_start_shallow_copy", src_lvol_name=snapshot, dst_bdev_name=bdev)
    while True:
        state: dict[str, object] = target.rpc("bdev_lvol_check_shallow_copy", **begun)
        if state["state"] != "in progress":
            return state


def test_a_chain_is_copied_snapshot_by_snapshot(vm: Target) -> None:
    vm.rpc("bdev_malloc_create", name="m0", num_blocks=VM_MIB * 256, block_size=4096)
    vm.rpc("bdev_malloc_create", name="copy", num_blocks=VM_MIB * 2048, block_size=512)
    vm.rpc("bdev_malloc_create", name="small", num_blocks=2048, block_size=512)
    for name, written in (("s1", (1, 2, 3)), ("s2", (2, 40))):
        write(vm, "lvs0/vm", *written)
        vm.rpc("bdev_lvol_snapshot", lvol_name="lvs0/vm", snapshot_name=name)
        state = copied(vm, f"lvs0/{name}", "copy")
        total = len(written)
        assert state == {"state": "complete", "copied_clusters": total, "total_clusters": total}
        with vm.exported("copy") as copy, vm.exported("lvs0/vm") as volume:
            assert copy.read_bytes() == volume.read_bytes()
    gone = {"operation_id": 1}
    with pytest.raises(RpcError, match="told before") as caught:
        vm.rpc("bdev_lvol_check_shallow_copy", **gone)
    assert caught.value.code == -errno.ENODEV
    for of, to, code in (
        ("lvs0/vm", "copy", errno.EPERM),
        ("lvs0/s1", "small", errno.EINVAL),
        ("lvs0/s1", "m0", errno.EINVAL),
        ("lvs0/s1", "none", errno.ENODEV),
        ("lvs0/s1", "lvs0/s2", errno.EPERM),
    ):
        with pytest.raises(RpcError) as caught:
            copied(vm, of, to)
        assert caught.value.code == -code, caught.value


def test_low_space_is_told_before_there_is_none(vm: Target) -> None:
    def told_now() -> list[str]:
        found = vm.rpc("notify_get_notifications")
        return [each["type"] for each in found if each["ctx"] == "lvs0"]

    total = vm.rpc("bdev_lvol_get_lvstores")[0]["total_data_clusters"]
    vm.rpc(
        "bdev_lvol_create", lvol_name="thick", size_in_mib=total - total // 10 - 1, lvs_name="lvs0"
    )
    assert told_now() == []
    write(vm, "lvs0/vm", *range(3))
    assert told_now() == ["virtlun_lvstore_low_space"]
    assert "of it: grow it or delete volumes" in vm.words()
    vm.restart()
    assert told_now() == ["virtlun_lvstore_low_space"], "a new client is told, too"
    vm.rpc("bdev_lvol_delete", name="lvs0/thick")
    assert told_now() == ["virtlun_lvstore_low_space", "virtlun_lvstore_enough_space"]


def punch(path: Path, at: int, length: int) -> None:
    """Has a range of an export's file read as zeros, which gives back what it can."""
    command = ["fallocate", "--punch-hole", "-o", str(at), "-l", str(length), str(path)]
    subprocess.run(command, check=True)


def test_a_hole_in_what_a_snapshot_shows_reads_as_zeros(vm: Target) -> None:
    """Also where it is smaller than a cluster, which an unmap leaves as it was."""
    with vm.exported("lvs0/vm") as path:
        with path.open("rb+", buffering=0) as file:
            file.write(b"x" * 4 * MIB)
            os.fsync(file)
        vm.rpc("bdev_lvol_snapshot", lvol_name="lvs0/vm", snapshot_name="before")
        punch(path, 4096, 8192)
        punch(path, MIB + 4096, 2 * MIB)
        with path.open("rb", buffering=0) as file:
            data = os.pread(file.fileno(), 4 * MIB, 0)
    holes = ((4096, 4096 + 8192), (MIB + 4096, 3 * MIB + 4096))
    expected = bytearray(b"x" * 4 * MIB)
    for start, end in holes:
        expected[start:end] = bytes(end - start)
    assert data == bytes(expected)
    with vm.exported("lvs0/before") as path:
        assert path.read_bytes()[: 4 * MIB] == b"x" * 4 * MIB


def test_a_hole_in_a_volume_that_was_inflated_meanwhile_reads_as_zeros(vm: Target) -> None:
    with vm.exported("lvs0/vm") as path:
        with path.open("rb+", buffering=0) as file:
            file.write(b"x" * 4 * MIB)
        vm.rpc("bdev_lvol_inflate", name="lvs0/vm")
        punch(path, MIB, MIB)
        with path.open("rb", buffering=0) as file:
            data = os.pread(file.fileno(), 4 * MIB, 0)
    assert data == b"x" * MIB + bytes(MIB) + b"x" * 2 * MIB
