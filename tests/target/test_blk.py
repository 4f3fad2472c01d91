"""vhost-user-blk of a real daemon: its method, and its device as a guest drives it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from pydataplane.errors import RpcError
from tests.support.frozen import freeze
from tests.support.initiator import Initiator, Refused
from tests.support.night import at_night, by_day
from tests.support.restarts import choose_seed
from tests.support.target import Target, binary
from tests.target.conftest import MakeTarget

MIB = 1 << 20
SECTOR = 512
IN, OUT, FLUSH, GET_ID, DISCARD, WRITE_ZEROES = 0, 1, 4, 8, 11, 13
"""Types of requests (virtio 1.2, 5.2.6)."""
OK, IOERR = 0, 1
"""Values of the status byte."""
F_RO, F_DISCARD, F_WRITE_ZEROES = 1 << 5, 1 << 13, 1 << 14
"""Feature bits (5.2.3)."""
NO_DEVICE, EXISTS, BUSY, INVALID, NOT_SUPPORTED = -19, -17, -16, -22, -95
QUEUES, EXTENTS, ROUNDS = 2, 16, 8
MOST_ROUNDS = 20 * ROUNDS
"""Where a slow test has let the target end all each time, before it is killed."""
DEADLINE_S = 60.0


def disk(target: Target, name: str = "m0", mib: int = 16) -> str:
    target.rpc("bdev_malloc_create", name=name, num_blocks=mib * MIB // SECTOR, block_size=SECTOR)
    return name


def block(target: Target) -> dict[str, Any]:
    """What is told of the only controller's disk."""
    (controller,) = target.rpc("vhost_get_controllers")
    assert list(controller["backend_specific"]) == ["block"]
    shown: dict[str, Any] = controller["backend_specific"]["block"]
    return shown


def refusal(target: Target, **params: Any) -> tuple[int, str]:
    error = target.fails("vhost_create_blk_controller", **params)
    assert isinstance(error, RpcError)
    return error.code, error.message


@pytest.fixture
def guest(target: Target) -> Iterator[Initiator]:
    """A driver of the controller `b0`, not connected."""
    with Initiator(target.vhost_dir / "b0") as guest:
        yield guest


def connect(guest: Initiator, **options: Any) -> dict[str, Any]:
    return guest.send("connect", kind="blk", **options)


def ask(guest: Initiator, kind: int, sector: int = 0, **given: Any) -> tuple[int, bytes]:
    answer = guest.send("blk", kind=kind, sector=sector, **given)
    return answer["status"], answer["data_in"]


def segment(sector: int, sectors: int, flags: int = 0) -> bytes:
    return (
        sector.to_bytes(8, "little") + sectors.to_bytes(4, "little") + flags.to_bytes(4, "little")
    )


def test_what_cannot_be_made_is_refused_in_a_sentence(target: Target) -> None:
    disk(target)
    assert refusal(target, ctrlr="b0", dev_name="none")[0] == NO_DEVICE
    code, words = refusal(target, ctrlr="b0", dev_name="m0", packed_ring=True)
    assert (code, "packed_ring is not supported" in words) == (NOT_SUPPORTED, True)
    code, words = refusal(target, ctrlr="b0", dev_name="m0", transport="vfio_user_blk")
    assert (code, "vhost_user_blk" in words) == (NOT_SUPPORTED, True)
    assert refusal(target, ctrlr="b0", dev_name="m0", cpumask="0x100000")[0] == INVALID
    assert refusal(target, ctrlr="b0", dev_name="m0", block_size=1000)[0] == INVALID
    assert refusal(target, ctrlr="b0", dev_name="m0", serial="s" * 65)[0] == INVALID
    # Nothing is left of those.
    assert target.rpc("vhost_get_controllers") == []
    assert list(target.vhost_dir.iterdir()) == []
    target.rpc("vhost_create_blk_controller", ctrlr="b0", dev_name="m0", packed_ring=False)
    assert refusal(target, ctrlr="b0", dev_name="m0")[0] == EXISTS
    assert refusal(target, ctrlr="b1", dev_name="m0")[0] == BUSY
    for method, params in (
        ("vhost_scsi_controller_add_target", {"scsi_target_num": 0, "bdev_name": "m0"}),
        ("vhost_scsi_controller_remove_target", {"scsi_target_num": 0}),
    ):
        error = target.fails(method, ctrlr="b0", **params)
        assert isinstance(error, RpcError)
        assert (error.code, "has no targets" in error.message) == (INVALID, True)
    assert target.rpc("scsi_get_devices") == []


def test_a_guest_has_its_disk(target: Target, guest: Initiator) -> None:
    target.rpc("vhost_create_blk_controller", ctrlr="b0", dev_name=disk(target), serial="disk-1")
    assert connect(guest, queues=QUEUES)["queue_num"] == 64
    assert guest.send("capacity") == {"ok": True, "blocks": 16 * MIB // SECTOR, "block_size": 512}
    data = random.Random(1).randbytes(64 * SECTOR)
    assert ask(guest, OUT, 100, data_out=data) == (OK, b"")
    assert ask(guest, IN, 100, data_in_len=len(data), queue=1) == (OK, data)
    assert ask(guest, FLUSH) == (OK, b"")
    assert ask(guest, GET_ID, data_in_len=20) == (OK, b"disk-1".ljust(20, b"\0"))
    assert ask(guest, DISCARD, data_out=segment(100, 8)) == (OK, b"")
    assert ask(guest, WRITE_ZEROES, data_out=segment(108, 8, 1)) == (OK, b"")
    found = ask(guest, IN, 100, data_in_len=len(data))
    assert found == (OK, bytes(16 * SECTOR) + data[16 * SECTOR :])
    assert ask(guest, IN, 16 * MIB // SECTOR, data_in_len=SECTOR)[0] == IOERR
    (stats,) = target.rpc("virtlun_vhost_get_stats")
    assert (stats["targets"][0]["writes"], stats["errors"]) == (2, 1)
    error = target.fails("vhost_delete_controller", ctrlr="b0")
    assert isinstance(error, RpcError)
    assert error.code == BUSY
    target.rpc("vhost_delete_controller", ctrlr="b0", force=True)
    assert target.rpc("bdev_get_bdevs")[0]["claimed"] is False


def test_a_disk_that_is_read_only_or_grows_is_told(target: Target, guest: Initiator) -> None:
    target.make_lvstore()
    volume = target.rpc("bdev_lvol_create", lvol_name="v", size_in_mib=8, lvs_name="lvs0")
    target.rpc("vhost_create_blk_controller", ctrlr="b0", dev_name=volume, readonly=True)
    offered = connect(guest)["offered"]
    assert offered & (F_RO | F_DISCARD | F_WRITE_ZEROES) == F_RO
    assert ask(guest, OUT, data_out=bytes(SECTOR))[0] == IOERR
    assert ask(guest, IN, data_in_len=SECTOR)[0] == OK
    assert guest.send("capacity")["blocks"] == 8 * MIB // SECTOR
    target.rpc("bdev_lvol_resize", name=volume, size_in_mib=12)
    assert guest.send("capacity")["blocks"] == 12 * MIB // SECTOR
    assert ask(guest, IN, 12 * MIB // SECTOR - 1, data_in_len=SECTOR)[0] == OK


def test_a_controller_is_there_after_a_restart_and_an_upgrade(
    target: Target, guest: Initiator
) -> None:
    target.make_lvstore()
    target.make_thin("v", 8)
    target.rpc(
        "vhost_create_blk_controller",
        ctrlr="b0",
        dev_name="lvs0/v",
        serial="disk-1",
        block_size=4096,
        discard=False,
        owner_uid=os.getuid(),
    )
    before = target.rpc("vhost_get_controllers")
    saved = target.configuration()
    assert [call["method"] for call in saved["vhost_blk"]] == ["vhost_create_blk_controller"]
    target.restart()
    assert target.rpc("vhost_get_controllers") == before
    assert target.configuration() == saved
    offered = connect(guest)["offered"]
    assert offered & (F_DISCARD | F_WRITE_ZEROES) == F_WRITE_ZEROES
    assert ask(guest, OUT, 8, data_out=b"\7" * 4096)[0] == OK
    target.crash()
    guest.until_connected(keep=True)
    assert ask(guest, IN, 8, data_in_len=4096) == (OK, b"\7" * 4096)
    target.upgrade()
    # The session is the same one: nothing was connected again.
    assert ask(guest, IN, 8, data_in_len=4096) == (OK, b"\7" * 4096)
    assert ask(guest, OUT, 16, data_out=b"\1" * 4096)[0] == OK
    assert target.rpc("vhost_get_controllers")[0]["owner"]["pid"] == guest.pid


def test_a_saved_configuration_loads_into_another_target(make_target: MakeTarget) -> None:
    first = make_target().start()
    disk(first)
    first.rpc("vhost_create_blk_controller", ctrlr="b0", dev_name="m0", readonly=True, serial="s")
    saved = first.spdk_rpc("save_config")
    assert saved.returncode == 0, saved.stderr
    shown = block(first)
    assert first.stop() == 0
    second = make_target().start()
    loaded = second.spdk_rpc("load_config", stdin=saved.stdout)
    assert loaded.returncode == 0, loaded.stdout + loaded.stderr
    assert block(second) == shown
    assert second.spdk_rpc("save_config").stdout == saved.stdout


def test_a_disk_that_comes_late_is_served_then(target: Target, guest: Initiator) -> None:
    file = target.make_file("disk.img", 4 * MIB)
    target.rpc("bdev_uring_create", filename=str(file), name="f0", block_size=SECTOR)
    target.rpc("vhost_create_blk_controller", ctrlr="b0", dev_name="f0")
    assert target.stop() == 0
    away = file.rename(file.with_suffix(".away"))
    target.start()
    # A front end that connects again and again waits until there is somebody.
    with pytest.raises(Refused):
        connect(guest)
    assert "controller b0" in json.dumps(target.rpc("virtlun_get_status"))
    away.rename(file)
    target.rpc("bdev_uring_create", filename=str(file), name="f0", block_size=SECTOR)
    assert connect(guest)["queue_num"] == 64
    assert ask(guest, IN, data_in_len=SECTOR)[0] == OK
    assert block(target)["bdev"] == "f0"


def test_a_bdev_that_is_deleted_leaves_a_controller_without_a_disk(
    target: Target, guest: Initiator
) -> None:
    target.rpc("vhost_create_blk_controller", ctrlr="b0", dev_name=disk(target))
    connect(guest)
    target.rpc("bdev_malloc_delete", name="m0")
    assert ask(guest, IN, data_in_len=SECTOR)[0] == IOERR
    assert (block(target)["bdev"], guest.send("capacity")["blocks"]) == (None, 0)
    guest.send("disconnect")
    target.restart()
    assert target.rpc("vhost_get_controllers") == []


@by_day("randrw")
@pytest.mark.parametrize("rw", ["randrw", "write"])
def test_a_disk_under_load_returns_what_was_written(target: Target, rw: str) -> None:
    target.rpc("vhost_create_blk_controller", ctrlr="b0", dev_name=disk(target, mib=64))
    done = subprocess.run(
        [
            *(str(binary("virtlun-bench")), "run", str(target.vhost_dir / "b0"), "--json"),
            *("--blk", "--verify", "--rw", rw, "--size", "16m", "--iodepth", "16"),
            *("--queues", "2", "--time", "0.5"),
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(done.stdout)
    assert report["ios"] > 0
    assert (report["errors"], report["miscompares"]) == (0, 0)


@dataclass
class Sent:
    """A request that was not answered yet."""

    queue: int
    head: int
    extent: int
    after: bytes
    """Of the extent, when it was answered."""
    reads: bool


@pytest.mark.parametrize("how", ["kill", at_night("term"), at_night("freeze")])
def test_what_is_in_flight_survives_the_target(target: Target, guest: Initiator, how: str) -> None:
    """Each request is answered once and well; an extent holds what was written to it last."""
    rng = random.Random(choose_seed())
    target.make_lvstore("lvs0", 64 * MIB)
    target.make_thin("v", EXTENTS)
    target.rpc("vhost_create_blk_controller", ctrlr="b0", dev_name="lvs0/v")
    connect(guest, queues=QUEUES, memory=256 * MIB)
    held = {extent: bytes(MIB) for extent in range(EXTENTS)}
    replayed = 0

    def submit(extent: int, version: int) -> Sent:
        queue, sector = rng.randrange(QUEUES), extent * MIB // SECTOR
        kind = rng.choice([OUT, OUT, OUT, IN, DISCARD, WRITE_ZEROES])
        length = rng.choice([4096, 65536, MIB])
        given: dict[str, Any] = {"data_in_len": length} if kind == IN else {}
        after = held[extent]
        if kind == OUT:
            given = {"data_out": (f"{extent}:{version};".encode() * MIB)[:length]}
            after = given["data_out"] + after[length:]
        elif kind in (DISCARD, WRITE_ZEROES):
            given = {"data_out": segment(sector, MIB // SECTOR)}
            after = bytes(MIB)
        sent = guest.send("submit_blk", kind=kind, sector=sector, queue=queue, **given)
        return Sent(queue, sent["head"], extent, after, kind == IN)

    def goes_on(version: int) -> bool:
        return version < ROUNDS or (how == "kill" and not replayed)

    for version in takewhile(goes_on, range(MOST_ROUNDS)):
        # Frozen meanwhile, so that it has them all at once.
        freeze(target.pid)
        sent = [submit(extent, version) for extent in range(EXTENTS - 2)]
        os.kill(target.pid, signal.SIGCONT)
        time.sleep(rng.random() * 0.01)
        if how == "freeze":
            freeze(target.pid)
            time.sleep(0.1)
            os.kill(target.pid, signal.SIGCONT)
        elif how == "kill":
            target.kill9()
        else:
            assert target.stop() == 0
        if how != "freeze":
            states = guest.send("inflight")["queues"]
            replayed += sum(len(state["in_flight"]) for state in states)
            # The guest goes on while nobody is there.
            sent += [submit(extent, version) for extent in range(EXTENTS - 2, EXTENTS)]
            target.start()
            guest.until_connected(keep=True)
        for request in sent:
            answer = guest.send(
                "wait_blk",
                head=request.head,
                queue=request.queue,
                timeout_ms=int(DEADLINE_S * 1000),
            )
            assert answer["status"] == OK, answer
            if request.reads:
                data = answer["data_in"]
                assert data == held[request.extent][: len(data)], request
            held[request.extent] = request.after
        for queue in range(QUEUES):
            assert guest.send("raw", queue=queue)["used"] == [], "answered twice"
    for extent, content in held.items():
        assert ask(guest, IN, extent * MIB // SECTOR, data_in_len=MIB) == (OK, content), extent
    assert how != "kill" or replayed > 0
    assert Path(target.vhost_dir / "b0").is_socket()
