"""A volume that is the clone of a read-only image file, as a guest sees it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from pydataplane.errors import RpcError
from tests.support.initiator import connected
from tests.support.night import at_night
from tests.support.target import Target
from tests.target.test_cli import done, refused

MIB = 1 << 20
IMAGE_MIB = 8
MEDIUM_ERROR = 3


def make_image(target: Target) -> Path:
    """Makes an image file of which nothing can be written, and its bdev `img`."""
    file = target.make_file("golden.raw", IMAGE_MIB * MIB)
    file.write_bytes(random.Random(7).randbytes(IMAGE_MIB * MIB))
    file.chmod(0o444)
    add_image(target, file)
    return file


def add_image(target: Target, file: Path, **given: object) -> None:
    """Makes the image's bdev."""
    options = {"name": "img", "filename": str(file), "block_size": 512, "readonly": True}
    target.rpc("bdev_aio_create", **options, **given)


def make_clone(target: Target) -> str:
    """Makes lvs0/vm, a disk of the controller vm-1, of the image."""
    made: str = target.rpc("bdev_lvol_clone_bdev", bdev="img", lvs_name="lvs0", clone_name="vm")
    target.attach("vm-1", "lvs0/vm")
    return made


def all_of(target: Target) -> bytes:
    """Reads the disk as the guest of vm-1."""
    with connected(target, "vm-1") as guest:
        return b"".join(guest.read(at * 128, 128) for at in range(IMAGE_MIB * 16))


@pytest.mark.parametrize("image_first", [True, at_night(False)])
def test_a_clone_of_an_image_is_written_restarted_and_inflated(
    target: Target, image_first: bool
) -> None:
    if not image_first:
        target.make_lvstore()
    expected = bytearray(make_image(target).read_bytes())
    if image_first:
        target.make_lvstore()
    uuid = make_clone(target)
    assert all_of(target) == expected
    with connected(target, "vm-1") as guest:
        for lba, blocks in ((0, 1), (5000, 3), (2047, 2)):
            data = random.Random(lba).randbytes(blocks * 512)
            guest.write(lba, data)
            expected[lba * 512 : lba * 512 + len(data)] = data
        guest.cdb(bytes([0x35, *bytes(9)]))  # SYNCHRONIZE CACHE
    assert all_of(target) == expected
    target.rpc("bdev_lvol_snapshot", lvol_name=uuid, snapshot_name="s1")
    target.restart()
    assert target.rpc("virtlun_get_status")["restore_problems"] == []
    assert all_of(target) == expected
    target.crash()
    assert target.rpc("virtlun_get_status")["restore_problems"] == []
    assert all_of(target) == expected
    claimed = target.rpc("bdev_get_bdevs", name="img")[0]
    assert (claimed["claimed"], claimed["claim_type"]) == (True, "read_many_write_none")
    target.rpc("bdev_lvol_inflate", name=uuid)
    target.rpc("bdev_lvol_delete", name="lvs0/s1")
    assert not target.rpc("bdev_get_bdevs", name="img")[0]["claimed"]
    target.rpc("bdev_aio_delete", name="img")
    assert all_of(target) == expected
    target.restart()
    assert all_of(target) == expected


def test_a_clone_whose_image_is_missing_comes_back_with_it(target: Target) -> None:
    target.make_lvstore()
    file = make_image(target)
    expected = file.read_bytes()
    uuid = make_clone(target)
    image = target.rpc("bdev_get_bdevs", name="img")[0]["uuid"]
    assert target.stop() == 0
    hidden = file.rename(file.with_suffix(".away"))
    target.start()
    shown = json.loads(target.spdk_rpc("bdev_lvol_get_lvols").stdout)
    assert [(lvol["uuid"], lvol["is_degraded"], lvol["is_esnap_clone"]) for lvol in shown] == [
        (uuid, True, True)
    ]
    assert shown[0]["external_snapshot_name"] == image
    (listed,) = json.loads(done(target, "volume", "list", "--json"))
    assert (listed["uuid"], listed["degraded"], listed["external"]) == (uuid, True, image)
    assert f"bdev {image}, which is missing" in done(target, "volume", "list")
    with pytest.raises(RpcError):
        target.rpc("bdev_get_bdevs", name=uuid)
    hidden.rename(file)
    target.rpc("bdev_aio_delete", name="img")
    add_image(target, file, uuid=image)
    assert not target.rpc("bdev_lvol_get_lvols")[0]["is_degraded"]
    assert " bdev img " in done(target, "volume", "list")
    assert target.rpc("virtlun_get_status")["restore_problems"] == []
    assert all_of(target) == expected


def test_a_guest_keeps_what_it_wrote_when_the_image_is_removed(target: Target) -> None:
    target.make_lvstore()
    file = make_image(target)
    uuid = target.rpc("bdev_get_bdevs", name="img")[0]["uuid"]
    make_clone(target)
    with connected(target, "vm-1") as guest:
        guest.write(0, b"x" * 512)
        target.rpc("bdev_aio_delete", name="img")
        answer = guest.cdb(bytes([0x28, 0, 0, 0, 32, 0, 0, 0, 1, 0]), data_in_len=512)
        assert (answer["status"], answer["sense"][2] & 15) == (2, MEDIUM_ERROR)
        assert guest.read(0, 1) == b"x" * 512
        guest.write(1, b"y" * 512)
        add_image(target, file, uuid=uuid)
        assert guest.read(0, 3)[:1024] == b"x" * 512 + b"y" * 512
        assert guest.read(8192, 1) == file.read_bytes()[8192 * 512 :][:512]


def test_the_command_clones_an_image(target: Target) -> None:
    target.make_lvstore()
    file = make_image(target)
    target.rpc("bdev_aio_delete", name="img")
    assert target.spdk_rpc("bdev_aio_create", str(file), "img", "512", "--readonly").returncode == 0
    image = target.rpc("bdev_get_bdevs", name="img")[0]["uuid"]
    for _ in range(2):  # it is safe to repeat
        (made,) = json.loads(done(target, "volume", "clone", "img", "lvs0/vm", "--json"))
        assert (made["path"], made["external"], made["allocated"]) == ("lvs0/vm", image, 0)
    target.make_thin("other", IMAGE_MIB)
    said = refused(target, "volume", "clone", "img", "lvs0/other")
    assert "is not a clone of bdev img" in said
    assert "take a snapshot" in refused(target, "volume", "clone", "lvs0/vm", "lvs0/x")
    assert "none" in refused(target, "volume", "clone", "none", "lvs0/x")
    (whole,) = json.loads(done(target, "volume", "inflate", "lvs0/vm", "--json"))
    assert (whole["external"], whole["allocated"]) == (None, IMAGE_MIB * MIB)
