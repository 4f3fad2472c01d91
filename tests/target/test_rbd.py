"""Images of a real Ceph as bdevs: the unmodified client, verified I/O, locks, failing clusters."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from plugin.cli.main import main
from pydataplane.errors import RpcError
from tests.support.ceph import POOL, Ceph, cluster, lacks
from tests.support.frozen import frozen
from tests.support.initiator import Initiator, connected
from tests.support.load import load_on
from tests.support.night import at_night
from tests.support.target import Target, TargetFailed
from tests.support.wait import until
from tests.target.conftest import MakeTarget

pytestmark = [
    pytest.mark.skipif(bool(lacks()), reason=f"not installed: {', '.join(lacks())}"),
    pytest.mark.timeout(300),
]

SPDK_RPC = Path(sys.executable).with_name("spdk-rpc")
MIB = 1 << 20
BLOCK = 512
#: What is driven here, and cannot be without a cluster.
VERBS = {
    "bdev_rbd_create",
    "bdev_rbd_delete",
    "bdev_rbd_get_clusters_info",
    "bdev_rbd_register_cluster",
    "bdev_rbd_resize",
    "bdev_rbd_unregister_cluster",
}
IMAGES = 300
CALLS = 48
"""At once: fewer than the target has connections for."""
SAID = (
    r"I/O of image rbd/{0} has not been answered for (\d+) s, by its cluster or as a limit"
    r" of librbd's own \(rbd_qos_\*\) holds it back, and its guests wait for it; images: {0}"
)
"""What doctor finds of a cluster whose OSDs are away."""
NOENT, ACCES, BUSY, EXIST, INVAL, NOTSUP = -2, -13, -16, -17, -22, -95


@pytest.fixture(scope="module")
def ceph() -> Iterator[Ceph]:
    """A cluster whose clients need a key."""
    with cluster(key=True) as made:
        yield made


@pytest.fixture
def target(make_target: MakeTarget, ceph: Ceph) -> Target:
    """A target that is connected to the cluster as `ceph0`."""
    made = make_target("--rbd").start()
    made.rpc("bdev_rbd_register_cluster", name="ceph0", config_file=str(ceph.conf))
    return made


def disk(target: Target, image: str, **given: Any) -> str:
    """Makes a bdev of the image's name."""
    asked = {"name": image.replace("@", "-"), "cluster_name": "ceph0", "block_size": BLOCK, **given}
    name: str = target.rpc("bdev_rbd_create", pool_name=POOL, rbd_name=image, **asked)
    return name


def info(target: Target, name: str) -> dict[str, Any]:
    """Returns what bdev_get_bdevs says of a bdev."""
    (found,) = target.rpc("bdev_get_bdevs", name=name)
    return dict(found)


def doctor(target: Target) -> list[dict[str, str]]:
    """Returns what `virtlun doctor` says of images and clusters."""
    words = ["--socket", str(target.rpc_socket), "doctor", "--json"]
    found = json.loads(CliRunner().invoke(main, words).stdout)
    return [each for each in found if each["what"].startswith(("images of Ceph", "cluster "))]


def cluster_of(target: Target) -> tuple[str, str]:
    """Returns the state of the one cluster, and what doctor found."""
    (said,) = doctor(target)
    assert said["what"] == "cluster ceph0", said
    return said["state"], said["found"]


def hangs(target: Target) -> int:
    """Returns how often the log says that I/O is not answered."""
    return target.words().count("images of cluster ceph0 wait: I/O of image")


def number_of(value: int) -> bytes:
    """A block that holds a number."""
    return value.to_bytes(8, "big") + bytes(BLOCK - 8)


def compare_and_write(guest: Initiator, lba: int, expected: bytes, written: bytes) -> bool:
    """COMPARE AND WRITE; whether the blocks were as expected."""
    cdb = bytes([0x89, 0, *lba.to_bytes(8, "big"), 0, 0, 0, len(written) // BLOCK, 0, 0])
    answer = guest.cdb(cdb, data_out=expected + written)
    if answer["status"] == 2 and answer["sense"][2] & 15 == 0xE:
        return False
    assert (answer["response"], answer["status"]) == (0, 0), answer
    return True


def size_in_mib(target: Target, name: str) -> int:
    """Returns the size of a bdev."""
    return int(info(target, name)["num_blocks"]) * BLOCK // MIB


@contextlib.contextmanager
def guest_of(target: Target, *bdevs: str, ctrlr: str = "vm-1") -> Iterator[Initiator]:
    """A guest whose targets 0 and on are bdevs."""
    target.rpc("vhost_create_scsi_controller", ctrlr=ctrlr)
    for number, bdev in enumerate(bdevs):
        target.add_lun(ctrlr, bdev, number)
    with Initiator(target.vhost_dir / ctrlr) as guest:
        guest.send("connect")
        for number in range(len(bdevs)):
            guest.ready(number)
        yield guest


@pytest.mark.nightly
def test_the_unmodified_client_drives_every_method(make_target: MakeTarget, ceph: Ceph) -> None:
    target, image = make_target("--rbd").start(), ceph.image("plain", 8)

    def call(verb: str, *words: str) -> Any:
        command = [str(SPDK_RPC), "-s", str(target.rpc_socket), verb, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        driven.add(verb)
        with contextlib.suppress(json.JSONDecodeError):
            return json.loads(done.stdout)
        return done.stdout.strip()

    driven: set[str] = set()
    options = ("--user", "admin", "--config-file", str(ceph.conf), "--core-mask", "0x1")
    assert call("bdev_rbd_register_cluster", "ceph0", *options) == "ceph0"
    (one,) = call("bdev_rbd_get_clusters_info")
    assert one == call("bdev_rbd_get_clusters_info", "-b", "ceph0")
    shown = {"cluster_name": "ceph0", "user_id": "admin", "core_mask": "0x1", "connected": True}
    assert one.items() >= {**shown, "config_file": str(ceph.conf), "bdevs": []}.items()
    assert call("bdev_rbd_create", POOL, image, "512", "-c", "ceph0", "-b", "d0") == "d0"
    found = info(target, "d0")
    assert (found["product_name"], found["num_blocks"]) == ("Ceph Rbd Disk", 8 * MIB // 512)
    shown = {"pool_name": POOL, "rbd_name": image, "user_id": "admin"}
    assert found["driver_specific"]["rbd"].items() >= shown.items()
    assert call("bdev_rbd_resize", "d0", "12") is True
    assert size_in_mib(target, "d0") == 12
    with pytest.raises(RpcError) as used:
        target.rpc("bdev_rbd_unregister_cluster", name="ceph0")
    assert (used.value.code, "in use by bdev d0" in used.value.message) == (BUSY, True)
    call("bdev_rbd_delete", "d0")
    ceph.rbd("snap", "create", "--no-progress", f"{POOL}/{image}@then")
    # One of its own, by the options that a cluster would have.
    keyring = f"keyring={ceph.keyring}"
    (host,) = (line for line in ceph.conf.read_text().splitlines() if "mon host" in line)
    monitors = f"mon_host={host.split(' = ')[1]}"
    own = ("--config", monitors, "--config", keyring, "--user", "admin", "-r")
    assert call("bdev_rbd_create", POOL, image, "4096", *own) == "Ceph0"
    assert info(target, "Ceph0")["supported_io_types"]["write"] is False
    assert call("bdev_rbd_create", POOL, f"{image}@then", "512", *own) == "Ceph1"
    # Both by one client, beside that of the cluster with a name.
    assert len((target.state_dir / "rbd-clients").read_text().split()) == 2
    call("bdev_rbd_delete", "Ceph0")
    call("bdev_rbd_delete", "Ceph1")
    call("bdev_rbd_unregister_cluster", "ceph0")
    with pytest.raises(RpcError) as none:
        target.rpc("bdev_rbd_get_clusters_info")
    assert none.value.code == NOENT
    assert driven == VERBS


def test_what_is_asked_for_wrongly_is_refused_in_a_sentence(target: Target, ceph: Ceph) -> None:
    image = ceph.image("asked")
    ceph.image("without-lock", 8, "--image-feature", "layering")
    create = {"pool_name": POOL, "rbd_name": image, "block_size": 512, "cluster_name": "ceph0"}
    for method, params, code, words in (
        ("bdev_rbd_create", {**create, "pool_name": "none"}, NOENT, "ceph osd lspools"),
        (
            "bdev_rbd_create",
            {**create, "rbd_name": "none"},
            NOENT,
            "image rbd/none cannot be opened",
        ),
        ("bdev_rbd_create", {**create, "rbd_name": f"{image}@none"}, NOENT, "cannot be opened"),
        ("bdev_rbd_create", {**create, "block_size": 520}, INVAL, "512 or 4096"),
        ("bdev_rbd_create", {**create, "cluster_name": "none"}, NOENT, "there is no cluster none"),
        ("bdev_rbd_create", {**create, "rbd_name": "without-lock"}, INVAL, "rbd feature enable"),
        ("bdev_rbd_register_cluster", {"name": "ceph0"}, EXIST, "is registered already"),
        ("bdev_rbd_register_cluster", {"name": "c", "config_file": "/none"}, NOENT, "/none cannot"),
        (
            "bdev_rbd_register_cluster",
            {"name": "c", "config_file": str(ceph.conf), "user_id": "nobody"},
            ACCES,
            "may read the key",
        ),
        ("bdev_rbd_unregister_cluster", {"name": "none"}, NOENT, "there is no cluster none"),
    ):
        with pytest.raises(RpcError) as refused:
            target.rpc(method, **params)
        assert (refused.value.code, words in refused.value.message) == (code, True), refused.value
    name = disk(target, "without-lock", shared=True)
    assert size_in_mib(target, name) == 8
    with pytest.raises(RpcError) as smaller:
        target.rpc("bdev_rbd_resize", name=name, new_size=4)
    assert (smaller.value.code, "not become smaller" in smaller.value.message) == (INVAL, True)


@pytest.mark.nightly
def test_a_target_without_the_library_starts_and_says_what_to_do(
    make_target: MakeTarget, ceph: Ceph, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(target: Target) -> str:
        with pytest.raises(RpcError) as error:
            target.rpc("bdev_rbd_register_cluster", name="ceph0", config_file=str(ceph.conf))
        assert error.value.code == NOTSUP
        return error.value.message

    target = make_target().start()
    assert "start it with --rbd" in refused(target)
    (found,) = doctor(target)
    assert (found["state"], "without --rbd" in found["found"]) == ("ok", True)
    # The linker finds this one first.
    (tmp_path / "librbd.so.1").write_text("no library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    target = make_target("--rbd").start()
    said = refused(target)
    assert "librbd.so.1" in said
    assert "install Debian's package librbd1" in said
    target.rpc("bdev_malloc_create", name="m0", num_blocks=2048, block_size=BLOCK)
    (found,) = doctor(target)
    assert (found["state"], "package librbd1" in found["found"]) == ("failed", True)


def test_what_a_guest_writes_is_what_rbd_exports(target: Target, ceph: Ceph) -> None:
    image = ceph.image("written", 64, "--object-size", "1M")
    disk(target, image)
    chance = random.Random(1)
    expected = bytearray(64 * MIB)
    with guest_of(target, image) as guest:
        # Across objects, and of a single block.
        for lba, blocks in ((0, 1), (2047, 2), (2000, 6000), (131071, 1), (40000, 2048)):
            data = chance.randbytes(blocks * BLOCK)
            for at in range(0, blocks, 1000):
                guest.write(lba + at, data[at * BLOCK : (at + 1000) * BLOCK])
            expected[lba * BLOCK : (lba + blocks) * BLOCK] = data
            assert guest.read(lba, min(blocks, 1000)) == data[: 1000 * BLOCK]
        # Block limits: best are whole objects, and 64 KiB are the least that is freed.
        limits = guest.cdb(bytes([0x12, 1, 0xB0, 0, 64, 0]), data_in_len=64)["data_in"]
        assert [int.from_bytes(limits[at : at + 4], "big") for at in (12, 28)] == [2048, 128]
        # UNMAP of two whole objects, WRITE SAME of zeroes of an odd range, SYNCHRONIZE CACHE.
        unmap = bytearray(24)
        unmap[:4] = bytes([0, 22, 0, 16])
        unmap[8:20] = (2048).to_bytes(8, "big") + (4096).to_bytes(4, "big")
        answer = guest.cdb(bytes([0x42, *bytes(6), 0, 24, 0]), data_out=bytes(unmap))
        assert (answer["response"], answer["status"]) == (0, 0), answer
        expected[2048 * BLOCK : 6144 * BLOCK] = bytes(4096 * BLOCK)
        same = bytes([0x93, 0, *(6500).to_bytes(8, "big"), *(777).to_bytes(4, "big"), 0, 0])
        answer = guest.cdb(same, data_out=bytes(BLOCK))
        assert (answer["response"], answer["status"]) == (0, 0), answer
        expected[6500 * BLOCK : 7277 * BLOCK] = bytes(777 * BLOCK)
        # WRITE SAME of a pattern, across objects.
        block = chance.randbytes(BLOCK)
        same = bytes([0x93, 0, *(8000).to_bytes(8, "big"), *(5000).to_bytes(4, "big"), 0, 0])
        answer = guest.cdb(same, data_out=block)
        assert (answer["response"], answer["status"]) == (0, 0), answer
        expected[8000 * BLOCK : 13000 * BLOCK] = 5000 * block
        assert compare_and_write(guest, 13000, bytes(BLOCK), block)
        assert not compare_and_write(guest, 13000, bytes(BLOCK), bytes(BLOCK))
        expected[13000 * BLOCK : 13001 * BLOCK] = block
        answer = guest.cdb(bytes([0x35, *bytes(9)]))
        assert (answer["response"], answer["status"]) == (0, 0), answer
        assert guest.read(6400, 1000) == expected[6400 * BLOCK : 7400 * BLOCK]
    assert ceph.content(image) == expected
    used = json.loads(ceph.rbd("du", "--format", "json", f"{POOL}/{image}"))["images"][0]
    # Objects 0, 3 to 6, 19, 20 and 63; those between were unmapped.
    assert used["used_size"] == 8 * MIB
    before = info(target, image)
    target.restart()
    after = info(target, image)
    assert (after["uuid"], after["num_blocks"]) == (before["uuid"], before["num_blocks"])
    with connected(target, "vm-1") as guest:
        assert guest.read(1000, 1000) == expected[1000 * BLOCK : 2000 * BLOCK]


def test_a_resize_by_the_rbd_command_reaches_the_guest(target: Target, ceph: Ceph) -> None:
    image = ceph.image("grows")
    disk(target, image)
    with guest_of(target, image) as guest:
        ceph.rbd("resize", "--no-progress", "--size", "80M", f"{POOL}/{image}")
        until(lambda: size_in_mib(target, image) == 80, "the target to see the new size")
        # CAPACITY DATA HAS CHANGED.
        (event,) = guest.send("events", timeout_ms=60_000)["events"]
        assert (event["event"], event["reason"] & 0xFF) == (3, 0x2A), event
        guest.ready()
        guest.write(80 * MIB // BLOCK - 1, bytes([7]) * BLOCK)
        target.rpc("bdev_rbd_resize", name=image, new_size=96)
        (event,) = guest.send("events", timeout_ms=60_000)["events"]
        assert event["event"] == 3, event
        guest.ready()
        capacity = guest.cdb(bytes([0x25, *bytes(9)]), data_in_len=8)["data_in"]
        assert int.from_bytes(capacity[:4], "big") == 96 * MIB // BLOCK - 1


def test_a_snapshot_is_a_disk_that_is_only_read(target: Target, ceph: Ceph) -> None:
    image = ceph.image("kept", 8)
    disk(target, image)
    with guest_of(target, image) as guest:
        guest.write(100, bytes([1]) * BLOCK)
        # Through the target, which has the image locked.
        ceph.rbd("snap", "create", "--no-progress", f"{POOL}/{image}@then")
        guest.write(100, bytes([2]) * BLOCK)
        then = disk(target, f"{image}@then")
        with guest_of(target, then, ctrlr="vm-2") as other:
            assert other.read(100, 1) == bytes([1]) * BLOCK
            cdb = bytes([0x2A, 0, 0, 0, 0, 100, 0, 0, 1, 0])
            refused = other.cdb(cdb, data_out=bytes(BLOCK))
            assert refused["status"] == 2, refused
            assert refused["sense"][2] & 15 == 7, "DATA PROTECT"
        assert guest.read(100, 1) == bytes([2]) * BLOCK


def test_a_second_writer_is_refused_and_a_shared_image_has_several(
    target: Target, make_target: MakeTarget, ceph: Ceph
) -> None:
    image = ceph.image("locked", 8)
    disk(target, image)
    other = make_target("--rbd").start()
    other.rpc("bdev_rbd_register_cluster", name="ceph0", config_file=str(ceph.conf))
    with pytest.raises(RpcError) as refused:
        disk(other, image)
    assert (refused.value.code, "is locked by the client at" in refused.value.message) == (
        BUSY,
        True,
    )
    write = ("rbd", "bench", "--io-type", "write", "--io-total", "8K", f"{POOL}/{image}")
    assert "Read-only" in ceph.tried(*write).stderr
    # Whoever only reads may.
    reader = disk(other, image, read_only=True)
    target.rpc("bdev_rbd_delete", name=image)
    other.rpc("bdev_rbd_delete", name=reader)
    disk(other, image, shared=True)
    disk(target, image, shared=True)
    with guest_of(target, image) as here, guest_of(other, image) as there:
        for number in range(1, 6):
            here.write(number, bytes([number]) * BLOCK)
            assert there.read(number, 1) == bytes([number]) * BLOCK
            there.write(number, bytes([number + 100]) * BLOCK)
            assert here.read(number, 1) == bytes([number + 100]) * BLOCK
        # COMPARE AND WRITE is one step for both: each counts up from what it finds there.
        counted = [0, 0]

        def count(which: int, guest: Initiator) -> None:
            while counted[which] < 40:
                found = int.from_bytes(guest.read(9, 1)[:8], "big")
                if compare_and_write(guest, 9, number_of(found), number_of(found + 1)):
                    counted[which] += 1

        counting = [threading.Thread(target=count, args=of) for of in enumerate((here, there))]
        for thread in counting:
            thread.start()
        for thread in counting:
            thread.join()
        assert here.read(9, 1) == there.read(9, 1) == number_of(80)
        # Not where that would be two steps: across objects.
        edge = 4 * MIB // BLOCK - 1
        with pytest.raises(AssertionError, match=r"\(0, 2\)"):
            compare_and_write(here, edge, bytes(2 * BLOCK), bytes(2 * BLOCK))


def test_a_guests_disk_waits_for_the_host_that_has_it_and_for_one_attempt_alone(
    target: Target, make_target: MakeTarget, ceph: Ceph
) -> None:
    """As the destination of a migration is asked, of a disk over the network."""
    image = ceph.image("comes", 8)
    disk(target, image)
    other = make_target("--rbd").start()
    other.rpc("bdev_rbd_register_cluster", name="ceph0", config_file=str(ceph.conf))
    # Who waits takes nothing by himself while anybody has it open.
    with ceph.opened(image):
        comes: dict[str, Any] = {"guest_disk": True, "incoming": True}
        disk(other, image, **comes)
        other.rpc("vhost_create_scsi_controller", ctrlr="vm-2")
        place = {"ctrlr": "vm-2", "scsi_target_num": 0, "bdev_name": image}
        # Another guest, which starts there, has it locked or not at all.
        with pytest.raises(RpcError, match="is locked by the client at"):
            other.rpc("vhost_scsi_controller_add_target", **place)
        assert image not in {each["name"] for each in other.rpc("bdev_get_bdevs")}
        disk(other, image, **comes)
        # Its host has it for another guest since, which goes on there in a later attempt.
        target.rpc("bdev_rbd_delete", name=image)
        disk(target, image)
        disk(other, image, **comes)
        with pytest.raises(RpcError, match="is taken by another bdev"):  # so it stays, for a minute
            disk(other, image, guest_disk=True)
        assert info(other, image)["driver_specific"]["rbd"]["locked"] is False
        other.rpc("vhost_scsi_controller_add_target", **place, incoming=True)
        with pytest.raises(RpcError, match="is taken by another bdev"):  # it is used
            disk(other, image, **comes)
        with guest_of(target, image) as here, ThreadPoolExecutor() as pool:
            here.write(1, bytes([1]) * BLOCK)
            with connected(other, "vm-2") as there:
                read = pool.submit(there.read, 1, 1)
                here.write(1, bytes([2]) * BLOCK)
                assert info(other, image)["driver_specific"]["rbd"]["locked"] is False
                target.rpc("vhost_delete_controller", ctrlr="vm-1", force=True)
                target.rpc("bdev_rbd_delete", name=image)
                assert read.result() == bytes([2]) * BLOCK
                assert info(other, image)["driver_specific"]["rbd"]["locked"] is True
        # A guest that starts there finds it locked, and has it.
        other.rpc("vhost_scsi_controller_remove_target", ctrlr="vm-2", scsi_target_num=0)
        other.rpc("virtlun_guest_disk_close", name=image)
        disk(other, image, **comes)
        assert info(other, image)["driver_specific"]["rbd"]["locked"] is False
        other.rpc("vhost_scsi_controller_add_target", **place)
        assert info(other, image)["driver_specific"]["rbd"]["locked"] is True
        assert "incoming" not in json.dumps(other.configuration())


def test_a_restart_forgets_neither_who_waits_nor_who_was_overtaken(
    target: Target, make_target: MakeTarget, ceph: Ceph
) -> None:
    """Nor does an upgrade, of a disk over the network."""
    image = ceph.image("waits-on", 8)
    other = make_target("--rbd").start()
    other.rpc("bdev_rbd_register_cluster", name="ceph0", config_file=str(ceph.conf))

    def of_other(what: str) -> bool:
        assert other.rpc("virtlun_get_status")["restore_problems"] == []
        return bool(info(other, image)["driver_specific"]["rbd"][what])

    disk(target, image, guest_disk=True)
    other.rpc("vhost_create_scsi_controller", ctrlr="vm-2")
    disk(other, image, guest_disk=True, incoming=True)
    place = {"ctrlr": "vm-2", "scsi_target_num": 0}
    other.rpc("vhost_scsi_controller_add_target", **place, bdev_name=image, incoming=True)
    with guest_of(target, image) as here, ThreadPoolExecutor() as pool:
        for again in (other.restart, other.upgrade):  # who is killed stays a watcher for long
            again()
            assert not of_other("locked") and not of_other("fenced")
        with pytest.raises(RpcError, match="waits for a VM that comes from another host"):
            other.rpc("virtlun_export_create", bdev_name=image)
        with connected(other, "vm-2") as there:
            read = pool.submit(there.read, 1, 1)
            here.write(1, bytes([2]) * BLOCK)
            target.rpc("vhost_delete_controller", ctrlr="vm-1", force=True)
            assert read.result() == bytes([2]) * BLOCK
    for again in (other.restart, other.upgrade):
        again()
        assert of_other("locked") and not of_other("fenced")
    # Another host has it meanwhile, and lets it go: what a guest here has in mind is out of date.
    assert other.stop() == 0
    disk(target, image, guest_disk=True)
    other.start()
    assert of_other("fenced") and not of_other("locked"), "while that host has it"
    target.rpc("bdev_rbd_delete", name=image)
    for again in (other.restart, other.upgrade):
        again()
        assert of_other("fenced") and not of_other("locked")
        with connected(other, "vm-2") as there, pytest.raises(AssertionError):
            there.write(1, bytes([3]) * BLOCK)
    assert json.loads(ceph.rbd("lock", "ls", "--format", "json", f"{POOL}/{image}")) == []
    with pytest.raises(RpcError, match="somebody has it still: detach it from all guests"):
        disk(other, image, guest_disk=True)
    assert ceph.content(image)[BLOCK : 2 * BLOCK] == bytes([2]) * BLOCK
    # Another guest has it as any.
    other.rpc("vhost_scsi_controller_remove_target", **place)
    disk(other, image, guest_disk=True)
    other.rpc("vhost_scsi_controller_add_target", **place, bdev_name=image)
    assert of_other("locked") and not of_other("fenced")


@pytest.mark.parametrize(
    "becomes",
    [pytest.param(r"\1..b007b007", id="boot"), at_night(r"\1", id="older-target")],
)
def test_what_an_older_target_or_another_boot_recorded_of_an_image_keeps_nobody_from_it(
    target: Target, ceph: Ceph, becomes: str
) -> None:
    """An older one did not say whether it had been locked here, and who used it is gone."""
    image = ceph.image(f"older-{len(becomes)}", 8)
    disk(target, image, guest_disk=True)
    target.rpc("vhost_create_scsi_controller", ctrlr="vm-1")
    target.add_lun("vm-1", image, 0)
    assert target.stop() == 0
    record = target.state_dir / "config.json"
    recorded = r'(?<="generation": ")([0-9a-f-]{36})[.][.][0-9a-f]{8}(?=")'
    text, count = re.subn(recorded, becomes, record.read_text())
    assert count == 1, text
    record.write_text(text)
    ceph.rbd("image-meta", "set", f"{POOL}/{image}", "virtlun.generation", "other")
    for again in (target.start, target.restart):
        again()
        said = info(target, image)["driver_specific"]["rbd"]
        assert (said["locked"], said["fenced"]) == (True, False)


def test_a_host_that_was_fenced_serves_the_image_no_more(target: Target, ceph: Ceph) -> None:
    image = ceph.image("fenced", 8)
    disk(target, image, guest_disk=True)
    target.rpc("bdev_malloc_create", name="m0", num_blocks=2048, block_size=BLOCK)
    with guest_of(target, image, "m0") as guest:
        guest.write(1, bytes([1]) * BLOCK)
        (lock,) = json.loads(ceph.rbd("lock", "ls", "--format", "json", f"{POOL}/{image}"))
        ceph.run("ceph", "osd", "blocklist", "add", lock["address"])
        cdb = bytes([0x2A, 0, 0, 0, 0, 1, 0, 0, 1, 0])

        def fails() -> bool:
            return bool(guest.cdb(cdb, data_out=bytes([2]) * BLOCK)["status"] == 2)

        until(fails, "the cluster to tell")
        read = guest.cdb(bytes([0x28, *cdb[1:]]), data_in_len=BLOCK)
        assert read["status"] == 2, read
        until(lambda: info(target, image)["driver_specific"]["rbd"]["fenced"], "it is told")
        with pytest.raises(RpcError, match="somebody has it still: detach it from all guests"):
            disk(target, image, guest_disk=True)  # for another guest
        until(lambda: "has fenced this host" in target.words())
        guest.write(1, bytes([3]) * BLOCK, target=1)
    assert target.words().count("has fenced this host") == 1
    # Nobody wrote there but the host before its OSDs knew that it is fenced.
    written = [bytes(BLOCK) + bytes([each]) * BLOCK + bytes(BLOCK) for each in (1, 2)]
    assert ceph.content(image)[: 3 * BLOCK] in written
    ceph.run("ceph", "osd", "blocklist", "rm", lock["address"])


def test_a_target_that_is_killed_has_its_images_again_at_once(target: Target, ceph: Ceph) -> None:
    image = ceph.image("again")
    disk(target, image)
    with guest_of(target, image) as guest:
        guest.write(5, bytes([5]) * BLOCK)
        target.kill9()
    target.start()
    # When the target was ready: nobody waited for the cluster to give up the client before.
    assert size_in_mib(target, image) == 64
    assert "this target's process before, and is free" in target.words()
    with connected(target, "vm-1") as guest:
        assert guest.read(5, 1) == bytes([5]) * BLOCK
        guest.write(6, bytes([6]) * BLOCK)
    assert ceph.content(image)[5 * BLOCK : 7 * BLOCK] == bytes([5]) * BLOCK + bytes([6]) * BLOCK


@pytest.mark.nightly
def test_an_upgrade_takes_images_along_under_load(target: Target, ceph: Ceph) -> None:
    image = ceph.image("upgraded")
    disk(target, image)
    with load_on(target, image, seed=2) as load:
        load.progress(50)
        target.upgrade()
        load.progress(50)
        target.crash()
        load.progress(50)


@pytest.mark.nightly
def test_an_osd_that_is_stopped_or_killed_delays_its_images_alone(
    target: Target, ceph: Ceph
) -> None:
    image = ceph.image("osd")
    disk(target, image)
    target.rpc("bdev_malloc_create", name="m0", num_blocks=65536, block_size=BLOCK)
    with load_on(target, image, seed=3) as load, load_on(target, "m0", seed=4) as other:
        load.progress(50)
        with frozen(ceph.pid("osd.0")):
            other.progress(500)
            before = load.operations
            other.progress(500)
            assert load.operations == before, "what the OSD has is answered without it"
        load.progress(50)
        until(lambda: cluster_of(target)[0] == "ok", "doctor to find nothing")
        before = hangs(target)
        ceph.kill_osd()
        other.progress(500)
        # Said once in the log, and by doctor as long as it is so.
        until(lambda: hangs(target) > before, "the log to say so")
        state, said = cluster_of(target)
        words = re.fullmatch(SAID.format(image), said)
        assert state == "failed" and words and int(words[1]) >= 5, said
        other.progress(500)
        ceph.start_osd()
        load.progress(50)
        until(lambda: cluster_of(target)[0] == "ok", "doctor to find nothing")
        until(lambda: "images of cluster ceph0 go on" in target.words(), "the log to say so")
    assert hangs(target) == before + 1


@pytest.mark.nightly
def test_a_monitor_that_is_stopped_or_killed_delays_no_io(target: Target, ceph: Ceph) -> None:
    image = ceph.image("monitor")
    disk(target, image)
    no_answer = f"its monitors have not answered within 3 s; images: {image}"
    with load_on(target, image, seed=6) as load:
        load.progress(50)
        with frozen(ceph.pid("mon.a")):
            load.progress(200)
            assert cluster_of(target) == ("failed", no_answer)
            load.progress(200)
        until(lambda: cluster_of(target)[0] == "ok", "doctor to find nothing")
        load.progress(200)
        ceph.kill_monitor()
        load.progress(200)
        assert cluster_of(target) == ("failed", no_answer)
        # One that is not answered yet is not asked again.
        assert cluster_of(target) == ("failed", no_answer)
        # And what needs a monitor goes on when there is one: an OSD that comes back.
        ceph.kill_osd()
        until(lambda: hangs(target) == 1, "the log to say so")
        state, said = cluster_of(target)
        assert state == "failed" and said.endswith(no_answer), said
        ceph.start_monitor()
        ceph.start_osd()
        load.progress(200)
        until(lambda: cluster_of(target)[0] == "ok", "doctor to find nothing")


@pytest.mark.nightly
def test_300_images_opened_at_once_stall_nobody(target: Target, ceph: Ceph) -> None:
    images = [f"many{n}" for n in range(IMAGES)]
    target.rpc("virtlun_rbd_pool_create", name="p", cluster_name="ceph0", pool_name=POOL)
    thin = {"lvs_name": "p", "size_in_mib": 8, "thin_provision": True}
    for image in images:
        target.rpc("bdev_lvol_create", lvol_name=image, **thin)
    target.rpc("virtlun_rbd_pool_delete", name="p")
    (file := target.directory / "d0.img").touch()
    os.truncate(file, 32 * MIB)
    target.rpc("bdev_aio_create", name="d0", filename=str(file), block_size=BLOCK)
    with load_on(target, "d0", seed=5) as load:
        # The cluster does not answer, so that all are under way while the other disk is used.
        with ThreadPoolExecutor(CALLS) as calls:
            with frozen(ceph.pid("osd.0")):
                opened = [calls.submit(disk, target, image) for image in images]
                load.progress(500)
                assert not any(each.done() for each in opened)
            assert [each.result() for each in opened] == images
        load.progress(50)
        # A target that starts opens all of them at once.
        with frozen(ceph.pid("osd.0")):
            target.crash()
            load.progress(500)
            there = {bdev["name"] for bdev in target.rpc("bdev_get_bdevs")}
            assert there == {"d0"}
        until(lambda: len(target.rpc("bdev_get_bdevs")) == IMAGES + 1, "all to be open")
        load.progress(50)


def test_an_upgrade_is_given_up_where_io_does_not_end_and_the_guest_goes_on(
    target: Target, ceph: Ceph
) -> None:
    image = ceph.image("hangs")
    disk(target, image)
    with guest_of(target, image) as guest:
        guest.write(0, bytes([1]) * BLOCK)
        with frozen(ceph.pid("osd.0")):
            write = bytes([0x2A, 0, 0, 0, 0, 8, 0, 0, 1, 0])
            sent = guest.send("submit", cdb=write, data_out=bytes([2]) * BLOCK, target=0)
            with pytest.raises(TargetFailed):
                target.upgrade()
            assert "has not answered for 5 s; no guest was held for it" in target.words()
        answer = guest.send("wait", head=sent["head"], timeout_ms=60_000)
        assert (answer["response"], answer["status"]) == (0, 0), answer
        assert guest.read(8, 1) == bytes([2]) * BLOCK
        target.upgrade()
        assert guest.read(8, 1) == bytes([2]) * BLOCK


@pytest.mark.nightly
def test_a_target_stops_although_io_of_a_guest_has_not_ended(target: Target, ceph: Ceph) -> None:
    image = ceph.image("unanswered", 8)
    disk(target, image)
    with guest_of(target, image) as guest:
        guest.write(8, bytes([1]) * BLOCK)
        with frozen(ceph.pid("osd.0")):
            write = bytes([0x2A, 0, 0, 0, 0, 8, 0, 0, 1, 0])
            guest.send("submit", cdb=write, data_out=bytes([2]) * BLOCK, target=0)
            assert target.stop() == 1
        assert "I/O of a VM has not ended" in target.words()
        target.start()
    # An OSD that was stopped for so long takes its time to hear of the cluster again.
    until(lambda: image in {bdev["name"] for bdev in target.rpc("bdev_get_bdevs")}, "the image")
    with connected(target, "vm-1") as guest:
        # The cluster has kept the process before out since then, so nothing of it comes late.
        assert "this target's process before, and is free" in target.words()
        before = guest.read(8, 1)
        assert before in (bytes([1]) * BLOCK, bytes([2]) * BLOCK)
        guest.write(8, bytes([3]) * BLOCK)
        assert guest.read(8, 1) == bytes([3]) * BLOCK


@pytest.mark.nightly
def test_a_target_stops_and_starts_while_its_cluster_does_not_answer(
    target: Target, ceph: Ceph
) -> None:
    image = ceph.image("away", 8)
    disk(target, image)
    target.rpc("bdev_malloc_create", name="m0", num_blocks=2048, block_size=BLOCK)
    with guest_of(target, image, "m0") as guest:
        guest.write(0, bytes([9]) * BLOCK)
    with frozen(ceph.pid("osd.0")), frozen(ceph.pid("mon.a")):
        # The image cannot be closed, which is said.
        assert target.stop() == 1
        assert "its cluster does not answer, so its image is not closed" in target.words()
        target.start()
        assert size_in_mib(target, "m0") == 1
        (waits,) = target.rpc("bdev_rbd_get_clusters_info")
        assert (waits["connected"], bool(waits["problem"])) == (False, True)
        (said,) = doctor(target)
        assert (said["what"], said["state"]) == ("cluster ceph0", "failed")
        assert f"wait for it: {image}" in said["found"]
        with pytest.raises(RpcError):
            info(target, image)
    until(lambda: image in {bdev["name"] for bdev in target.rpc("bdev_get_bdevs")}, "the image")
    assert doctor(target)[0]["state"] == "ok"
    with connected(target, "vm-1") as guest:
        assert guest.read(0, 1) == bytes([9]) * BLOCK


def test_a_key_is_recorded_for_the_target_alone_and_shown_to_nobody(
    make_target: MakeTarget, ceph: Ceph
) -> None:
    image, target = ceph.image("secret", 8), make_target("--rbd").start()
    key = ceph.run("ceph-authtool", str(ceph.keyring), "-n", "client.admin", "-p").strip()
    (host,) = (line for line in ceph.conf.read_text().splitlines() if "mon host" in line)
    options = {"mon_host": host.split(" = ")[1], "key": key}
    target.rpc("bdev_rbd_register_cluster", name="ceph0", config_param=options)
    disk(target, image)
    record = target.state_dir / "config.json"
    assert key in record.read_text()
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    target.restart()
    assert size_in_mib(target, image) == 8
    (cluster_,) = target.rpc("bdev_rbd_get_clusters_info")
    assert cluster_["config_param"] == {"mon_host": options["mon_host"]}
    shown = [
        target.rpc("framework_get_config", name="bdev"),
        target.rpc("bdev_get_bdevs"),
        target.rpc("virtlun_get_status"),
    ]
    assert key not in json.dumps(shown) + target.words()
    wrong = {**options, "key": key[:-6] + "AAAA=="}
    with pytest.raises(RpcError) as refused:
        target.rpc("bdev_rbd_register_cluster", name="other", config_param=wrong)
    assert "may read the key" in refused.value.message
    assert wrong["key"] not in target.words()


def test_a_configuration_without_monitors_is_refused(
    make_target: MakeTarget, tmp_path: Path
) -> None:
    target, empty = make_target("--rbd").start(), tmp_path / "ceph.conf"
    empty.write_text("[global]\n")
    with pytest.raises(RpcError) as refused:
        target.rpc("bdev_rbd_register_cluster", name="ceph0", config_file=str(empty))
    assert "cannot be reached" in refused.value.message
