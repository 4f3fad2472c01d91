"""A disk that loses what was written tells all that use it; a thick volume keeps its room."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pydataplane.errors import RpcError
from tests.support.initiator import Initiator
from tests.support.lossy_disk import MIB, fails_to_flush, fill, lossy_disk, run, small_file_system
from tests.support.target import Target
from tests.support.wait import until

ILLEGAL_REQUEST = 5


@pytest.fixture
def small(scratch: Path) -> Iterator[Path]:
    """A file system in memory with room for 24 MiB; needs root."""
    with small_file_system(scratch / "small") as path:
        yield path


@pytest.fixture
def disk(small: Path) -> Iterator[str]:
    """A block device of 64 MiB there."""
    with lossy_disk(small) as made:
        yield made.device


def guest(stack: ExitStack, target: Target, ctrlr: str, bdev: str, **options: Any) -> Initiator:
    """A guest with one disk."""
    target.rpc("vhost_create_scsi_controller", ctrlr=ctrlr)
    add = {"ctrlr": ctrlr, "scsi_target_num": 0, "bdev_name": bdev}
    target.rpc("vhost_scsi_controller_add_target", **add, **options)
    made = stack.enter_context(Initiator(target.vhost_dir / ctrlr))
    made.send("connect")
    made.ready()
    return made


def test_a_lost_write_is_told_to_all_users_of_the_disk_until_it_is_cleared(
    small: Path, disk: str, target: Target
) -> None:
    target.rpc("bdev_aio_create", name="d0", filename=disk, block_size=512)
    (bdev,) = target.rpc("bdev_get_bdevs", name="d0")
    assert bdev["driver_specific"]["aio"]["virtlun_direct"] is False
    assert "flush_error" not in bdev
    with ExitStack() as stack:
        one, two = (guest(stack, target, name, "d0", shareable=True) for name in ("vm-1", "vm-2"))
        assert not fails_to_flush(one)
        filler = fill(small)
        for lba in range(0, 8 * MIB // 512, 2048):
            one.write(lba, bytes([7]) * MIB)
        # The kernel tells the first of them alone.
        assert fails_to_flush(two)
        assert fails_to_flush(one)
        assert fails_to_flush(two)
        (bdev,) = target.rpc("bdev_get_bdevs", name="d0")
        assert "a flush failed" in bdev["flush_error"]
        (problem,) = target.rpc("virtlun_get_status")["flush_errors"]
        assert problem.startswith("bdev d0: a flush failed")
        filler.unlink()
        assert fails_to_flush(one), "room alone does not bring back what is lost"
        assert target.rpc("virtlun_bdev_clear_flush_error", name="d0") is True
        assert target.rpc("virtlun_bdev_clear_flush_error", name="d0") is False
        assert target.rpc("virtlun_get_status")["flush_errors"] == []
        for made in (one, two):
            made.write(0, bytes([8]) * 4096)
            assert not fails_to_flush(made)
        assert two.read(0, 8) == bytes([8]) * 4096


def test_what_the_lvstore_s_own_flush_loses_is_told_to_its_volumes(
    small: Path, disk: str, target: Target
) -> None:
    target.rpc("bdev_aio_create", name="d0", filename=disk, block_size=512)
    target.rpc("bdev_lvol_create_lvstore", bdev_name="d0", lvs_name="lvs0", clear_method="none")
    thin = {"lvs_name": "lvs0", "size_in_mib": 32, "thin_provision": True}
    for name in ("v0", "v1"):
        target.rpc("bdev_lvol_create", lvol_name=name, **thin)
    with ExitStack() as stack:
        one, two = (guest(stack, target, f"vm-{i}", f"lvs0/v{i}") for i in range(2))
        two.write(0, bytes([5]) * MIB)
        assert not fails_to_flush(two)
        # A hole below, whose room somebody else takes.
        file = small / "disk"
        at = file.read_bytes().index(bytes([5]) * MIB)
        run("fallocate", "--punch-hole", "--offset", str(at), "--length", str(MIB), file)
        filler = fill(small)
        two.write(0, bytes([5]) * MIB)
        # The metadata's flush is the first to be told.
        error = target.fails("bdev_lvol_create", lvol_name="v2", **thin)
        assert isinstance(error, RpcError)
        assert fails_to_flush(two)
        assert fails_to_flush(one)
        (store,) = target.rpc("bdev_lvol_get_lvstores")
        assert store["stopped"]
        target.fails("bdev_lvol_create", lvol_name="v3", **thin)
        filler.unlink()
        assert target.rpc("virtlun_bdev_clear_flush_error", name="lvs0/v0") is True
        (store,) = target.rpc("bdev_lvol_get_lvstores")
        assert "stopped" not in store
        one.write(0, bytes([6]) * 4096)
        two.write(0, bytes([7]) * MIB)
        assert not fails_to_flush(two)
        assert (one.read(0, 8), two.read(0, 8)) == (bytes([6]) * 4096, bytes([7]) * 4096)
        target.rpc("bdev_lvol_create", lvol_name="v3", **thin)
    assert "no flush of it can fail" in str(
        target.fails(
            "virtlun_bdev_clear_flush_error",
            name=target.rpc("bdev_null_create", name="n0", num_blocks=8, block_size=512),
        )
    )


def test_a_thick_volume_that_is_refused_leaves_the_room_to_others(
    small: Path, target: Target
) -> None:
    file = small / "lvs"
    with file.open("xb") as sparse:
        sparse.truncate(64 * MIB)
    target.rpc("bdev_uring_create", name="d0", filename=str(file), block_size=512)
    target.rpc("bdev_lvol_create_lvstore", bdev_name="d0", lvs_name="lvs0")
    target.rpc("bdev_lvol_create", lvs_name="lvs0", lvol_name="v0", size_in_mib=8)
    before = file.stat().st_blocks
    for _ in range(2):
        for method, params in (
            ("bdev_lvol_create", {"lvs_name": "lvs0", "lvol_name": "v1"}),
            ("bdev_lvol_resize", {"name": "lvs0/v0"}),
        ):
            error = target.fails(method, size_in_mib=40, **params)
            assert isinstance(error, RpcError)
            assert error.code == -28
            assert "what lies under the lvstore is full" in error.message
            # The metadata may have got a page or two.
            assert file.stat().st_blocks * 512 < before * 512 + MIB
    target.rpc("bdev_lvol_resize", name="lvs0/v0", size_in_mib=12)


@pytest.mark.nightly
def test_a_thick_volume_never_lacks_room_that_it_had(small: Path, target: Target) -> None:
    file = small / "lvs"
    with file.open("xb") as sparse:
        sparse.truncate(64 * MIB)
    target.rpc("bdev_uring_create", name="d0", filename=str(file), block_size=512)
    target.rpc("bdev_lvol_create_lvstore", bdev_name="d0", lvs_name="lvs0")
    for name, is_thin in (("thick", False), ("thin", True)):
        target.rpc(
            "bdev_lvol_create",
            lvs_name="lvs0",
            lvol_name=name,
            size_in_mib=8,
            thin_provision=is_thin,
        )
    read_capacity = bytes([0x9E, 0x10, *bytes(8), *(32).to_bytes(4, "big"), 0, 0])
    provisioning = bytes([0x12, 1, 0xB2, 0, 64, 0])
    # 4 MiB from block 0 on.
    unmap = bytes([0, 22, 0, 16, 0, 0, 0, 0, *bytes(8), *(8192).to_bytes(4, "big"), *bytes(4)])
    with ExitStack() as stack:
        thick, thin = (guest(stack, target, f"vm-{n}", f"lvs0/{n}") for n in ("thick", "thin"))
        for each, deallocates in ((thick, False), (thin, True)):
            capacity = each.cdb(read_capacity, data_in_len=32)["data_in"]
            assert bool(capacity[14] & 0x80) is deallocates, "LBPME"
            page = each.cdb(provisioning, data_in_len=64)["data_in"]
            assert bool(page[5] & 0x80) is deallocates, "LBPU"
            for lba in range(0, 8 * MIB // 512, 2048):
                each.write(lba, bytes([1]) * MIB)
            written = file.stat().st_blocks * 512
            cdb = bytes([0x42, *bytes(6), 0, len(unmap), 0])
            answer = each.cdb(cdb, data_out=unmap)
            assert (answer["status"] == 0) is deallocates, answer
            if not deallocates:
                assert answer["sense"][2] & 15 == ILLEGAL_REQUEST
            # Zeros keep the room.
            zero = bytes([0x93, 0, *(8192).to_bytes(8, "big"), *(4096).to_bytes(4, "big"), 0, 0])
            assert each.cdb(zero, data_out=bytes(512))["status"] == 0
        # Freed clusters go back to the file after the answer.
        until(lambda: file.stat().st_blocks * 512 <= written - 4 * MIB)
        fill(small)
        for lba in range(0, 8 * MIB // 512, 2048):
            thick.write(lba, bytes([2]) * MIB)
        assert not fails_to_flush(thick)
        assert thick.read(0, 8) == bytes([2]) * 4096
        write = bytes([0x2A, 0, *(0).to_bytes(4, "big"), 0, 0, 8, 0])
        # Also what was given back meanwhile.
        fill(small)
        assert thin.cdb(write, data_out=bytes(4096))["status"] != 0, (
            "thin says that it can lack room"
        )
