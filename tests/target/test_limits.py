"""Limits of a bdev's I/O: what is set, shown and recorded, and that VMs and files keep to it.

Nothing here says how fast anything is. A limit of one operation a second, of operations of a byte,
lets one request of a block begin and keeps the next one for 512 s, longer than any test takes.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest

from pydataplane.errors import RpcError
from tests.support.initiator import Initiator, connected
from tests.support.target import Target
from tests.support.wait import until

BLOCK, MIB = 512, 1 << 20
ONE = {"total_iops_sec": 1, "size_iops_sec": 1}
QUEUE = 2
"""The first request queue, over all queues."""
READ = bytes([0x28, *bytes(7), 1, 0])


@pytest.fixture
def disk(target: Target) -> str:
    """The name of a disk that is target 0 of the controller c0."""
    image = target.make_file("disk.img", 4 * MIB)
    target.rpc("bdev_uring_create", filename=str(image), name="disk", block_size=BLOCK)
    target.attach("c0", "disk")
    return "disk"


@pytest.fixture
def guest(target: Target, disk: str) -> Iterator[Initiator]:
    """A driver of that disk."""
    with connected(target, "c0") as guest:
        yield guest


def shown(target: Target, name: str) -> dict[str, int]:
    """Returns the limits of a bdev, without those that are 0."""
    limits = target.rpc("virtlun_bdev_get_limits", name=name)
    assert len(limits) == 19
    return {word: value for word, value in limits.items() if value}


def limit(target: Target, name: str, **limits: int) -> None:
    target.rpc("virtlun_bdev_set_limits", name=name, **limits)


def recorded(target: Target) -> list[dict[str, Any]]:
    """Returns what the state directory has of limits."""
    calls = target.configuration()["bdev"]
    return [call["params"] for call in calls if call["method"] == "virtlun_bdev_set_limits"]


def assigned(target: Target, name: str) -> list[int]:
    """Returns what SPDK's list of bdevs shows."""
    (found,) = target.rpc("bdev_get_bdevs", name=name)
    words = ("rw_ios_per_sec", "rw_mbytes_per_sec", "r_mbytes_per_sec", "w_mbytes_per_sec")
    return [found["assigned_rate_limits"][word] for word in words]


def test_all_of_them_last_until_they_are_taken_away(target: Target, disk: str) -> None:
    limits = {
        "read_bytes_sec": 5 * MIB,
        "read_bytes_sec_max": 50 * MIB,
        "read_bytes_sec_max_length": 3,
        "write_bytes_sec": 4 * MIB,
        "total_iops_sec": 700,
        "total_iops_sec_max": 900,
        "size_iops_sec": 8192,
    }
    assert shown(target, disk) == {}
    for _ in range(2):
        limit(target, disk, **limits)
        assert shown(target, disk) == limits
    assert recorded(target) == [{"name": disk, **limits}]
    assert assigned(target, disk) == [700, 0, 5, 4]
    target.restart()
    assert shown(target, disk) == limits
    target.crash()
    assert shown(target, disk) == limits
    target.upgrade()
    assert shown(target, disk) == limits
    limit(target, disk, write_iops_sec=9)
    assert shown(target, disk) == {"write_iops_sec": 9}
    limit(target, disk)
    assert (shown(target, disk), recorded(target)) == ({}, [])


def test_they_go_with_their_bdev(target: Target, disk: str) -> None:
    target.rpc("bdev_malloc_create", name="m", num_blocks=131072, block_size=BLOCK)
    target.rpc("bdev_lvol_create_lvstore", bdev_name="m", lvs_name="lvs")
    uuid = target.rpc("bdev_lvol_create", lvs_name="lvs", lvol_name="v", size_in_mib=4)
    limit(target, "lvs/v", **ONE)
    limit(target, disk, **ONE)
    assert [params["name"] for params in recorded(target)] == [uuid, disk]
    target.rpc("bdev_lvol_rename", old_name="lvs/v", new_name="w")
    assert shown(target, "lvs/w") == ONE
    target.rpc("bdev_lvol_delete", name="lvs/w")
    assert [params["name"] for params in recorded(target)] == [disk]
    target.rpc("vhost_scsi_controller_remove_target", ctrlr="c0", scsi_target_num=0)
    target.rpc("bdev_uring_delete", name=disk)
    assert recorded(target) == []
    target.rpc("bdev_null_create", name=disk, num_blocks=2048, block_size=BLOCK)
    assert shown(target, disk) == {}


def test_volumes_keep_theirs_when_their_lvstore_is_taken_away_and_comes_back(
    target: Target,
) -> None:
    image = target.make_file("store.img", 64 * MIB)
    given = {"filename": str(image), "name": "base", "block_size": BLOCK}
    target.rpc("bdev_uring_create", **given)
    target.rpc("bdev_lvol_create_lvstore", bdev_name="base", lvs_name="lvs")
    target.rpc("bdev_lvol_create", lvs_name="lvs", lvol_name="v", size_in_mib=4)
    limit(target, "lvs/v", **ONE)
    limit(target, "base", **ONE)
    target.rpc("bdev_uring_delete", name="base")
    target.rpc("bdev_uring_create", **given)
    assert shown(target, "lvs/v") == ONE
    assert shown(target, "base") == {}


def test_one_that_could_not_be_restored_leaves_none_to_the_next_of_its_name(
    target: Target, disk: str
) -> None:
    limit(target, disk, **ONE)
    (target.directory / "disk.img").rename(target.directory / "away.img")
    target.restart()
    target.rpc("bdev_uring_delete", name=disk)
    assert recorded(target) == []
    target.rpc("bdev_null_create", name=disk, num_blocks=2048, block_size=BLOCK)
    assert shown(target, disk) == {}


def test_spdk_s_method_changes_what_it_names(target: Target, disk: str) -> None:
    limit(target, disk, read_bytes_sec=MIB, read_bytes_sec_max=2 * MIB, write_iops_sec=5)
    with pytest.raises(RpcError, match="operations in total and operations of reads or writes"):
        target.rpc("bdev_set_qos_limit", name=disk, rw_ios_per_sec=2000)
    limit(target, disk, read_bytes_sec=MIB, read_bytes_sec_max=2 * MIB)
    target.rpc("bdev_set_qos_limit", name=disk, rw_ios_per_sec=2000, w_mbytes_per_sec=7)
    both = {"read_bytes_sec": MIB, "read_bytes_sec_max": 2 * MIB}
    assert shown(target, disk) == {**both, "total_iops_sec": 2000, "write_bytes_sec": 7 * MIB}
    target.rpc("bdev_set_qos_limit", name=disk, r_mbytes_per_sec=0, w_mbytes_per_sec=0)
    assert assigned(target, disk) == [2000, 0, 0, 0]
    target.rpc("bdev_set_qos_limit", name=disk, rw_ios_per_sec=0)
    assert (shown(target, disk), recorded(target)) == ({}, [])
    with pytest.raises(RpcError, match="no rate limit is given"):
        target.rpc("bdev_set_qos_limit", name=disk)


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (
            {"total_bytes_sec": 1, "read_bytes_sec": 1},
            "bytes in total and bytes of reads or writes cannot be limited together",
        ),
        (
            {"read_iops_sec_max": 5},
            "a burst of operations of reads needs a limit of operations of reads",
        ),
        (
            {"write_bytes_sec": 5, "write_bytes_sec_max": 4},
            "a burst of bytes of writes is slower than the limit: 4 and not 5",
        ),
        (
            {"total_iops_sec": 5, "total_iops_sec_max_length": 2},
            "the length of a burst of operations in total needs a rate of the burst",
        ),
        ({"size_iops_sec": 4096}, "the size of an operation needs a limit of operations"),
        ({"total_bytes_sec": 1 << 63}, "a limit of bytes in total, with its burst, is above 10"),
    ],
)
def test_what_contradicts_itself_is_refused_and_changes_nothing(
    target: Target, disk: str, limits: dict[str, int], why: str
) -> None:
    limit(target, disk, **ONE)
    with pytest.raises(RpcError) as refused:
        limit(target, disk, **limits)
    assert refused.value.code == -32602
    assert f"bdev disk is not limited so: {why}" in str(refused.value)
    assert shown(target, disk) == ONE


def test_a_bdev_that_is_not_there_has_none(target: Target) -> None:
    for method, params in (
        ("virtlun_bdev_set_limits", ONE),
        ("virtlun_bdev_get_limits", {}),
        ("bdev_set_qos_limit", {"rw_ios_per_sec": 1}),
    ):
        with pytest.raises(RpcError, match="there is no bdev nothing"):
            target.rpc(method, name="nothing", **params)
    for wrong in ({"total_iops": 1}, {"total_iops_sec": -1}, {"total_iops_sec": "1"}):
        with pytest.raises(RpcError) as refused:
            target.rpc("virtlun_bdev_set_limits", name="nothing", **wrong)
        assert refused.value.code == -32602


def waits(guest: Initiator) -> int:
    """Submits a READ that its limit keeps; returns its number."""
    head: int = guest.send("submit", cdb=READ, data_in_len=BLOCK)["head"]
    return head


def alone_in_flight(guest: Initiator, head: int) -> None:
    """Waits until that request alone is marked; of others, the answer may come first."""
    marked = partial(guest.send, "inflight")
    until(
        lambda: marked()["queues"][QUEUE]["in_flight"] == [head],
        lambda: f"{head} alone is in flight: {marked()['queues'][QUEUE]}",
    )


def test_a_vm_keeps_to_it_also_after_a_restart(target: Target, guest: Initiator) -> None:
    target.rpc("bdev_null_create", name="other", num_blocks=2048, block_size=BLOCK)
    target.add_lun("c0", "other", 1)
    guest.ready(target=1)
    limit(target, "disk", **ONE)
    guest.read(0, 1)
    head = waits(guest)
    # Its other disk does not wait, and what the guest asks of it meanwhile ends first.
    for lba in range(20):
        guest.read(lba, 1, target=1)
    alone_in_flight(guest, head)
    limit(target, "disk")
    guest.send("wait", head=head)
    guest.read(0, 1)
    limit(target, "disk", **ONE)
    target.restart()
    guest.send("reconnect")
    guest.ready()
    guest.read(0, 1)
    head = waits(guest)
    guest.ready(target=1)
    guest.read(0, 1, target=1)
    alone_in_flight(guest, head)
    # The next program submits it again, and has the limit from the first request on.
    target.upgrade()
    limit(target, "disk")
    guest.send("wait", head=head)


def test_a_stop_and_a_detach_wait_for_no_limit(target: Target, guest: Initiator) -> None:
    limit(target, "disk", **ONE)
    guest.read(0, 1)
    head = waits(guest)
    began = time.monotonic()
    target.rpc("vhost_scsi_controller_remove_target", ctrlr="c0", scsi_target_num=0)
    guest.send("wait", head=head)
    limit(target, "disk")
    target.add_lun("c0", "disk")
    guest.ready()
    limit(target, "disk", **ONE)
    guest.read(0, 1)
    waits(guest)
    assert target.stop() == 0, target.words()
    assert time.monotonic() - began < 200, "it waited for the limit"


@pytest.mark.root
def test_a_file_keeps_to_it(target: Target) -> None:
    image = target.make_file("file.img", 4 * MIB)
    target.rpc("bdev_uring_create", filename=str(image), name="file", block_size=BLOCK)
    limit(target, "file", **ONE)
    with target.exported("file") as path:
        node = os.open(path, os.O_RDONLY | os.O_DIRECT)
        ends: list[int] = []

        def read() -> None:
            with mmap(-1, 4096) as buffer:
                ends.append(os.preadv(node, [buffer], 0))

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        until(lambda: len(ends) == 1, "one begins")
        # Of whoever asks what the file is, nothing is limited.
        assert Path(path).stat().st_size == 4 * MIB
        assert len(ends) == 1
        limit(target, "file")
        for reader in readers:
            reader.join()
        os.close(node)
        assert ends == [4096] * 3


@pytest.mark.root
def test_a_file_with_a_limit_of_reads_is_written_at_full_speed(target: Target) -> None:
    image = target.make_file("file.img", 4 * MIB)
    target.rpc("bdev_uring_create", filename=str(image), name="file", block_size=BLOCK)
    limit(target, "file", read_iops_sec=1, size_iops_sec=1)
    with target.exported("file") as path, mmap(-1, 4096) as data:
        node = os.open(path, os.O_RDWR | os.O_DIRECT)
        ends: list[int] = []

        def read() -> None:
            with mmap(-1, 4096) as buffer:
                ends.append(os.preadv(node, [buffer], 0))

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        until(lambda: len(ends) == 1, "one begins")
        for n in range(100):
            assert os.pwritev(node, [data], n * 4096) == 4096
        os.fsync(node)
        assert len(ends) == 1
        limit(target, "file")
        for reader in readers:
            reader.join()
        os.close(node)


def test_the_configuration_that_is_saved_has_them(target: Target, disk: str) -> None:
    limit(target, disk, **ONE)
    text = json.dumps(target.rpc("framework_get_config", name="bdev"))
    assert '"virtlun_bdev_set_limits"' in text
