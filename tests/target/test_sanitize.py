"""SANITIZE (SBC-3 4.11) on the real target: all data is gone, whatever becomes of the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pydataplane.errors import RpcError
from tests.support.initiator import Initiator
from tests.support.target import Target
from tests.support.wait import until

MIB = 1 << 20
SIZE_MIB = 64
PASSES = 31
OVERWRITE, BLOCK_ERASE = 1, 2
IMMED = 0x80
GOOD, CHECK_CONDITION = 0, 2
IN_PROGRESS = (2, 0x04, 0x1B)
FORMAT_IN_PROGRESS = (2, 0x04, 0x04)
DEADLINE_S = 120.0


class Machine:
    """A machine with the volume as its disk; it begins anew as often as its target does."""

    def __init__(self, target: Target) -> None:
        self.socket = target.vhost_dir / "vm0"
        self.initiator = self._connect()
        self.progress = 0

    def _connect(self) -> Initiator:
        initiator = Initiator(self.socket)
        initiator.send("connect")
        return initiator

    def reconnect(self) -> None:
        """Goes on after its target went away."""
        self.initiator.kill()
        self.initiator = self._connect()

    def sanitize(self, action: int, data: bytes = b"") -> None:
        """Begins it."""
        length = len(data).to_bytes(2, "big")
        self.begin(bytes([0x48, IMMED | action, 0, 0, 0, 0, 0, *length, 0]), data)

    def begin(self, cdb: bytes, data: bytes = b"") -> None:
        """Sends a command, which is GOOD."""
        answer = self.initiator.cdb(cdb, data_out=data)
        assert (answer["response"], answer["status"]) == (0, GOOD), answer

    def is_sanitized(self) -> bool:
        """Whether that has ended; unit attentions go by."""
        answer = self.initiator.cdb(bytes(6))
        assert answer["response"] == 0, answer
        if answer["status"] == GOOD:
            return True
        sense = answer["sense"]
        key = (sense[2] & 15, sense[12], sense[13])
        if key[0] != 6:
            assert key in {IN_PROGRESS, FORMAT_IN_PROGRESS}, answer
            assert sense[15] == 0x80
            self.progress = int.from_bytes(sense[16:18], "big")
        return False

    def wait(self) -> None:
        """Until it has ended."""
        until(self.is_sanitized, "the end of SANITIZE", DEADLINE_S)


@pytest.fixture
def machine(target: Target) -> Iterator[Machine]:
    """A machine with a thin volume, of which some is written."""
    target.make_lvstore(size=2 * SIZE_MIB * MIB)
    target.make_thin("data", SIZE_MIB)
    target.attach("vm0", "lvs0/data")
    machine = Machine(target)
    machine.wait()
    for mib in (0, 31, SIZE_MIB - 1):
        machine.initiator.write(mib * MIB // 512, b"secret!!" * 64)
    yield machine
    machine.initiator.kill()


def all_of(machine: Machine) -> bytes:
    return b"".join(machine.initiator.read(mib * 2048, 2048) for mib in range(SIZE_MIB))


def records(target: Target) -> list[Path]:
    return list((target.state_dir / "sanitize").glob("*.json"))


def allocated(target: Target) -> int:
    (bdev,) = target.rpc("bdev_get_bdevs", name="lvs0/data")
    clusters: int = bdev["driver_specific"]["lvol"]["num_allocated_clusters"]
    return clusters


@pytest.mark.nightly
def test_a_volume_that_was_erased_has_no_room_and_its_store_no_trace(
    target: Target, machine: Machine
) -> None:
    assert b"secret" in (target.directory / "lvs0.img").read_bytes()
    assert allocated(target) == 3
    machine.sanitize(BLOCK_ERASE)
    machine.wait()
    assert all_of(machine) == bytes(SIZE_MIB * MIB)
    assert allocated(target) == 0
    assert records(target) == []
    assert target.stop() == 0
    assert b"secret" not in (target.directory / "lvs0.img").read_bytes()


@pytest.mark.nightly
def test_a_volume_that_was_formatted_has_no_room_and_can_be_written(
    target: Target, machine: Machine
) -> None:
    machine.begin(bytes([0x1D, 0x04, 0, 0, 0, 0]))  # SEND DIAGNOSTIC, the self-test
    for immediate in (0x02, 0):
        machine.begin(bytes([0x04, 0x10, 0, 0, 0, 0]), bytes([0, immediate, 0, 0]))
        machine.wait()
        assert all_of(machine) == bytes(SIZE_MIB * MIB)
        assert allocated(target) == 0
        assert records(target) == []
        machine.initiator.write(7, b"written!" * 64)
        assert machine.initiator.read(7, 1) == b"written!" * 64


@pytest.mark.nightly
@pytest.mark.parametrize("away", [Target.restart, Target.crash, Target.upgrade])
def test_what_has_begun_is_done_whatever_becomes_of_the_target(
    target: Target, machine: Machine, away: Callable[[Target], Any]
) -> None:
    machine.sanitize(OVERWRITE, bytes([PASSES, 0, 0, 4]) + b"gone")
    assert not machine.is_sanitized()
    assert len(records(target)) == 1
    away(target)
    if away is not Target.upgrade:
        machine.reconnect()
    assert not machine.is_sanitized()
    machine.wait()
    assert machine.progress > 0
    assert records(target) == []
    assert all_of(machine) == b"gone" * (SIZE_MIB * MIB // 4)
    machine.initiator.write(0, b"new data" * 64)
    target.restart()
    machine.reconnect()
    machine.wait()
    assert machine.initiator.read(0, 1) == b"new data" * 64


@pytest.mark.nightly
def test_a_volume_that_is_sanitized_is_neither_copied_nor_left_for_its_copy(
    target: Target, machine: Machine
) -> None:
    """It goes on with the bdev that it began with."""
    disk = {"ctrlr": "vm0", "scsi_target_num": 0}
    target.make_lvstore("lvs1", size=2 * SIZE_MIB * MIB)
    target.make_thin("copy", SIZE_MIB, "lvs1")

    def refused(method: str, **params: str) -> None:
        machine.sanitize(OVERWRITE, bytes([PASSES, 0, 0, 4]) + b"gone")
        with pytest.raises(RpcError, match="being sanitized"):
            target.rpc(method, **disk, **params)
        assert not machine.is_sanitized()
        machine.wait()

    refused("virtlun_lun_copy_start", dst_bdev_name="lvs1/copy")
    target.rpc("virtlun_lun_copy_start", **disk, dst_bdev_name="lvs1/copy")
    until(lambda: target.rpc("virtlun_lun_copy_check", **disk)[0]["state"] == "ready", "the copy")
    refused("virtlun_lun_copy_pivot")
    target.rpc("virtlun_lun_copy_pivot", **disk)
    assert all_of(machine) == b"gone" * (SIZE_MIB * MIB // 4)
