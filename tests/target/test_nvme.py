"""Namespaces of an NVMe/TCP target, as guests meet them: a model that is asked to misbehave."""

from __future__ import annotations

import errno
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pydataplane.errors import EXISTS, INVALID, RpcError
from tests.support.initiator import connected
from tests.support.night import at_night
from tests.support.nvme_target import (
    COMPARE,
    DATASET,
    FLUSH,
    INACCESSIBLE,
    NON_OPTIMIZED,
    NQN,
    OPTIMIZED,
    READ,
    WRITE,
    WRITE_ZEROES,
    Answer,
    Command,
    Namespace,
    NvmeTarget,
)
from tests.support.ports import free_port
from tests.support.restarts import choose_seed
from tests.support.target import Target
from tests.support.wait import until
from tests.target.conftest import MakeTarget
from tests.target.test_inflight import EXTENTS, MIB, QUEUES, Load
from tests.target.test_nbd import outcome, write_one
from tests.target.test_upgrade import upgrade_ends

#: What is driven here, and cannot be without a target.
VERBS = {
    "bdev_nvme_attach_controller",
    "bdev_nvme_detach_controller",
    "bdev_nvme_get_controllers",
    "bdev_nvme_get_io_paths",
    "bdev_nvme_set_options",
}
BLOCK = 512
GOOD, CHECK = 0, 2
MEDIUM_ERROR, MISCOMPARE, ABORTED = 3, 0xE, 0xB
PARAM_CHANGE = 3
IO, NODEV, NOTSUP = -errno.EIO, -errno.ENODEV, -errno.EOPNOTSUPP
SYNCHRONIZE = bytes([0x35, *bytes(9)])
IN_FLIGHT = 8
KEEP_ALIVE_MS = 1000
"""A model that is kept from a processor for longer is lost."""


@pytest.fixture
def target(make_target: MakeTarget) -> Target:
    """A target that may make network connections."""
    return make_target("--network").start()


def attach_controller(
    target: Target, model: NvmeTarget, port: int = 0, name: str = "NVME0", **options: Any
) -> list[str]:
    """Attaches the model by one of its ports; returns the names of the bdevs."""
    params = {"name": name, **model.params(port), **options}
    made: list[str] = target.rpc("bdev_nvme_attach_controller", **params)
    return made


def shown(target: Target, name: str = "NVME0n1") -> dict[str, Any]:
    """What is told of a bdev and its first path."""
    (bdev,) = target.rpc("bdev_get_bdevs", name=name)
    return {**bdev, **bdev["driver_specific"]["nvme"][0]}


def write_ten(lba: int, blocks: int = 1) -> bytes:
    """Returns a WRITE (10)."""
    return struct.pack(">BBIBHB", 0x2A, 0, lba, 0, blocks, 0)


def hurry(target: Target, **options: Any) -> None:
    """Has a controller that is lost be waited for not so long."""
    target.rpc("bdev_nvme_set_options", keep_alive_timeout_ms=KEEP_ALIVE_MS, **options)


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "digests": {"hdgst": True, "ddgst": True},
    "in pieces": {"r2t": 5 * 4096, "h2c": 4096, "c2h": 4096, "success": False, "in_capsule": 0},
    "padded, limited": {"padding": 40, "c2h": 4096, "limits": (1, 4)},
    "4096": {"block_size": 4096, "alignment": 31, "mdts": 1, "queues": 3},
    "aligned, with digests": {"alignment": 20, "hdgst": True, "ddgst": True, "r2t": 65536 - 512},
}


@pytest.mark.parametrize("way", list(WAYS))
def test_a_guest_uses_a_namespace(target: Target, way: str) -> None:
    given = dict(WAYS[way])
    block = given.pop("block_size", BLOCK)
    options: dict[str, Any] = {key: given.pop(key) for key in ("hdgst", "ddgst") if key in given}
    if queues := given.pop("queues", None):
        options["num_io_queues"] = queues
    size = 256 << 10
    space = Namespace(8 * MIB // block, block)
    with NvmeTarget({1: space}, **given) as model:
        assert attach_controller(target, model, **options) == ["NVME0n1"]
        made = shown(target)
        assert (made["block_size"], made["num_blocks"]) == (block, 8 * MIB // block)
        assert made["uuid"] == "6e616d65-7370-6163-652d-757569642d31"
        assert (made["product_name"], made["connected"]) == ("NVMe disk", True)
        target.attach("vm-0", "NVME0n1")
        with connected(target) as guest:
            assert guest.send("capacity")["blocks"] == 8 * MIB // block
            data = random.Random(way).randbytes(size)
            guest.write(8, data, block_size=block)
            assert guest.cdb(SYNCHRONIZE)["status"] == GOOD
            assert space.content[8 * block :][:size] == data
            assert guest.read(8, size // block, block_size=block) == data
            # WRITE SAME(16) of zeros, and with UNMAP.
            for flags in (0, 8):
                cdb = bytes([0x93, flags, *(8).to_bytes(8, "big"), *(16).to_bytes(4, "big"), 0, 0])
                assert outcome(guest.cdb(cdb, data_out=bytes(block))) == (GOOD, 0)
                assert guest.read(8, 16, block_size=block) == bytes(16 * block)
            unmap = struct.pack(">HH4xQI4x", 22, 16, 24, 8)
            cdb = bytes([0x42, *bytes(6), 0, 24, 0])
            assert outcome(guest.cdb(cdb, data_out=unmap)) == (GOOD, 0)
            assert guest.read(32, 8, block_size=block) == data[24 * block : 32 * block]
            # COMPARE AND WRITE, twice the same.
            compared = bytes([0x89, 0, *(32).to_bytes(8, "big"), 0, 0, 0, 1, 0, 0])
            words = data[24 * block : 25 * block] + b"w" * block
            assert outcome(guest.cdb(compared, data_out=words)) == (GOOD, 0)
            assert outcome(guest.cdb(compared, data_out=words)) == (CHECK, MISCOMPARE)
            assert guest.read(32, 1, block_size=block) == b"w" * block
            assert outcome(
                guest.cdb(write_ten(40)[:1] + b"\x08" + write_ten(40)[2:], data_out=bytes(block))
            ) == (GOOD, 0)
            assert model.seen(WRITE)[-1].fua
        assert len(model.seen(FLUSH)) >= 1 and model.seen(DATASET) and model.seen(COMPARE)
        assert model.seen(WRITE_ZEROES)
        if way == "padded, limited":
            ranges = [struct.unpack_from("<4xI", each.data)[0] for each in model.seen(DATASET)]
            assert max(ranges) == 4
        if way == "4096":
            assert max(each.blocks for each in model.seen(READ)) == 2
            assert {each.queue for each in model.seen(READ)} == {1, 2, 3}
        assert target.rpc("vhost_delete_controller", ctrlr="vm-0", force=True) is True
        assert target.rpc("bdev_nvme_detach_controller", name="NVME0") is True
        assert target.rpc("bdev_get_bdevs") == []
        until(lambda: not model.connections, "its connections are closed")
        assert model.controllers[0].configuration >> 14 & 3 == 1, "it was shut down"
        assert "nvme" not in str(target.configuration().get("bdev"))


def test_spdks_client_drives_controllers_and_they_come_back(target: Target) -> None:
    spaces = {1: Namespace(2048), 7: Namespace(4096, uuid=b"namespace-uuid-7")}
    with NvmeTarget(spaces) as model:
        where = ("-t", "tcp", "-a", "127.0.0.1", "-f", "ipv4", "-s", model.port(), "-n", NQN)
        for option in (("-k", "5000"), ("-l", "30")):
            set_options = target.spdk_rpc("bdev_nvme_set_options", *option)
            assert set_options.returncode == 0, set_options
        made = target.spdk_rpc(
            "bdev_nvme_attach_controller", "-b", "NVME0", *where, "-q", "nqn.2026-11.org.virtlun:h"
        )
        assert (made.returncode, made.stdout.split()) == (0, ["NVME0n1", "NVME0n7"]), made
        assert model.controllers[0].keep_alive_ms == 5000
        again = target.spdk_rpc(
            "bdev_nvme_attach_controller", "-b", "NVME0", *where, "-x", "disable"
        )
        assert again.returncode != 0 and "already" in again.stdout + again.stderr
        (controller,) = target.rpc("bdev_nvme_get_controllers")
        assert controller["name"] == "NVME0"
        (path,) = controller["ctrlrs"]
        assert path["state"] == "enabled" and path["cntlid"] == 1
        assert path["trid"]["subnqn"] == NQN and path["trid"]["trsvcid"] == model.port()
        assert path["host"]["nqn"] == "nqn.2026-11.org.virtlun:h"
        listed = target.spdk_rpc("bdev_nvme_get_io_paths", "-n", "NVME0n7")
        assert '"accessible": true' in listed.stdout and "NVME0n1" not in listed.stdout
        target.attach("vm-0", "NVME0n1", "NVME0n7")
        with connected(target) as guest:
            guest.ready(target=1)
            assert guest.send("capacity", target=1)["blocks"] == 4096
            guest.write(9, b"7" * BLOCK, target=1)
        assert spaces[7].content[9 * BLOCK :][:BLOCK] == b"7" * BLOCK
        target.restart()
        target.restored()
        assert shown(target, "NVME0n7")["connected"]
        calls = {call["method"]: call["params"] for call in target.configuration()["bdev"]}
        assert calls["bdev_nvme_set_options"] == {
            "keep_alive_timeout_ms": 5000,
            "ctrlr_loss_timeout_sec": 30,
        }
        assert calls["bdev_nvme_attach_controller"]["hostnqn"] == "nqn.2026-11.org.virtlun:h"
        with connected(target) as guest:
            guest.ready(target=1)
            assert guest.read(9, 1, target=1) == b"7" * BLOCK
        assert target.rpc("vhost_delete_controller", ctrlr="vm-0", force=True) is True
        assert target.spdk_rpc("bdev_nvme_detach_controller", "NVME0").returncode == 0
        assert target.rpc("bdev_get_bdevs") == []


@pytest.mark.parametrize(
    ("rounds", "options"),
    [(1, {}), at_night(20, {}), at_night(3, {"hdgst": True, "ddgst": True})],
    ids=["once", "often", "digests"],
)
def test_verified_io_goes_on_over_losses_of_connections(
    target: Target, rounds: int, options: dict[str, Any]
) -> None:
    rng = random.Random(choose_seed())
    hurry(target)
    with NvmeTarget({1: Namespace(EXTENTS * MIB // BLOCK)}) as model:
        attach_controller(target, model, num_io_queues=2, **options)
        target.attach("vm-0", "NVME0n1")

        def restart() -> None:
            model.vanish()
            model.listen()

        with connected(target, queues=QUEUES, memory=256 * MIB) as guest:
            load = Load(guest, rng)
            ways: list[Callable[[], None]] = [
                lambda: model.drop(queue=2),
                lambda: model.drop(reset=True),
                lambda: model.drop(queue=0),
                model.drop,
                restart,
            ]
            for _ in range(rounds):
                for lose in ways[: None if rounds > 1 else 2]:
                    load.submit(IN_FLIGHT)
                    time.sleep(rng.random() * 0.01)
                    lose()
                    load.submit(4)
                    load.wait_all()
            load.audit()
        until(lambda: shown(target)["connected"], "it is connected")


class Unanswered:
    """Has the next WRITE of a model not be answered; `held` is set when it has come."""

    def __init__(self, model: NvmeTarget) -> None:
        self.model, self.held = model, threading.Event()
        self.order: list[str] = []
        """What became of it, and the first bytes of each WRITE that came after it."""
        model.answering = self.answer

    def answer(self, command: Command, usual: Callable[[Command], Answer]) -> Answer | None:
        """See `NvmeTarget.answering`."""
        if command.opcode == WRITE and self.held.is_set():
            self.order.append(command.data[:1].decode())
        if command.opcode != WRITE or self.held.is_set():
            return usual(command)
        self.command, self.usual = command, usual
        self.held.set()
        return None

    def carry_out(self) -> None:
        """Carries it out after all, as a disk does that took its time."""
        self.usual(self.command)
        self.order.append("late")


@pytest.mark.parametrize(
    "lost", [{"queue": 1}, at_night({}), at_night({"reset": True})], ids=["queue", "all", "reset"]
)
def test_a_write_that_is_carried_out_late_undoes_nothing(
    target: Target, lost: dict[str, Any]
) -> None:
    hurry(target)
    with NvmeTarget() as model:
        attach_controller(target, model)
        target.attach("vm-0", "NVME0n1")
        with connected(target) as guest:
            write = Unanswered(model)
            head = guest.send("submit", cdb=write_ten(5), data_out=b"x" * BLOCK)["head"]
            assert write.held.wait(60)
            model.drop(**lost)
            late = threading.Timer(KEEP_ALIVE_MS / 1000, write.carry_out)
            late.start()
            assert guest.send("wait", head=head)["status"] == GOOD
            guest.write(5, b"y" * BLOCK)
            late.join()
            assert write.order == ["late", "x", "y"]
            assert guest.read(5, 1) == b"y" * BLOCK
        made = shown(target)
        assert made["connections"] == made["ctrlr_data"]["cntlid"] >= 2


def test_linuxs_target_is_waited_for_until_it_is_through(target: Target) -> None:
    through = threading.Event()
    # By its time alone that would take minutes.
    target.rpc("bdev_nvme_set_options", keep_alive_timeout_ms=60_000, timeout_us=2_000_000)
    with NvmeTarget(model_name="Linux", through=through) as model:
        attach_controller(target, model)
        target.attach("vm-0", "NVME0n1")
        with connected(target) as guest:
            write = Unanswered(model)
            head = guest.send("submit", cdb=write_ten(5), data_out=b"x" * BLOCK)["head"]
            assert write.held.wait(60)
            until(lambda: not shown(target)["connected"], "it is lost")
            write.carry_out()
            through.set()
            assert guest.send("wait", head=head)["status"] == GOOD
            assert write.order == ["late", "x"]


def test_a_write_that_may_still_be_carried_out_is_waited_for_and_a_read_is_not(
    target: Target,
) -> None:
    hurry(target)
    with NvmeTarget() as model:
        attach_controller(target, model)
        target.attach("vm-0", "NVME0n1")
        with connected(target) as guest:
            write = Unanswered(model)
            head = guest.send("submit", cdb=write_ten(5), data_out=b"x" * BLOCK)["head"]
            assert write.held.wait(60)
            model.drop(reset=True)
            assert guest.send("wait", head=head)["status"] == GOOD
            (first, second) = model.seen(WRITE)
            assert second.at - first.at >= 3 * KEEP_ALIVE_MS / 1000
            # Of reads alone nothing has to be waited for.
            held = threading.Event()

            def answer(command: Command, usual: Callable[[Command], Answer]) -> Answer | None:
                if command.opcode == READ and not held.is_set():
                    held.set()
                    return None
                return usual(command)

            model.answering = answer
            read = bytes([0x28, *bytes(4), 5, 0, 0, 1, 0])
            head = guest.send("submit", cdb=read, data_in_len=BLOCK)["head"]
            assert held.wait(60)
            model.drop(reset=True)
            answered = guest.send("wait", head=head)
            assert answered["status"] == GOOD
            assert guest.read(5, 1) == b"x" * BLOCK


def test_a_controller_that_is_silent_is_lost_with_its_keep_alive(target: Target) -> None:
    hurry(target)
    with NvmeTarget() as model:
        attach_controller(target, model)
        target.attach("vm-0", "NVME0n1")
        with connected(target) as guest:
            guest.write(0, b"a" * BLOCK)
            hangs = threading.Event()
            usual = model.carry_out

            def carry_out(connection: Any, sqe: bytes, data: bytes) -> Any:
                first = (
                    connection.controller is model.controllers[0] if model.controllers else False
                )
                return None if first and hangs.is_set() else usual(connection, sqe, data)

            model.carry_out = carry_out  # type: ignore[method-assign]
            hangs.set()
            assert write_one(guest) == (GOOD, 0)
            assert shown(target)["connections"] >= 2
        assert "has not answered Keep Alive" in target.words()


def test_errors_of_the_controller_reach_the_guest_or_are_tried_again(target: Target) -> None:
    answers: list[int] = []

    def answer(command: Command, usual: Callable[[Command], Answer]) -> Answer:
        return Answer(answers.pop(0)) if answers and command.opcode == WRITE else usual(command)

    with NvmeTarget(answering=answer) as model:
        attach_controller(target, model)
        target.attach("vm-0", "NVME0n1")
        with connected(target) as guest:
            for status, expected in (
                (0x280, (CHECK, MEDIUM_ERROR)),  # write fault
                (0x083, (0x18, 0)),  # reservation conflict
                (0x020 | 0x4000, (CHECK, 7)),  # write protected
                (0x006 | 0x4000, (CHECK, MEDIUM_ERROR)),  # internal error, which is final
            ):
                answers[:] = [status]
                assert write_one(guest) == expected, hex(status)
            # Interrupted, not ready, an internal error that may pass.
            answers[:] = [0x021, 0x082, 0x006]
            assert write_one(guest) == (GOOD, 0)
            assert not answers


@pytest.mark.parametrize("way", ["twice", "always"])
def test_data_that_comes_damaged_is_asked_for_again(target: Target, way: str) -> None:
    with NvmeTarget() as model:
        attach_controller(target, model, ddgst=True)
        target.attach("vm-0", "NVME0n1")
        with connected(target) as guest:
            guest.write(3, b"d" * BLOCK)
            model.wrong_digest = 2 if way == "twice" else 1000
            read = bytes([0x28, *bytes(4), 3, 0, 0, 1, 0])
            answer = guest.cdb(read, data_in_len=BLOCK)
            expected = (GOOD, 0) if way == "twice" else (CHECK, MEDIUM_ERROR)
            assert outcome(answer) == expected
            assert shown(target)["connections"] == 1


def changed(at: int, value: bytes) -> Callable[[bytes], bytes]:
    """What puts something else into each PDU that a guest's command is answered with."""
    return lambda pdu: pdu[:at] + value + pdu[at + len(value) :]


WRONG: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "length": (changed(4, b"\xff\xff\xff\xff"), "of a length that cannot be"),
    "short length": (changed(4, b"\x08\0\0\0"), "of a length that cannot be"),
    "header": (changed(2, b"\x48"), "of a length that cannot be"),
    "type": (changed(0, b"\x04"), "no PDU for a host"),
    "offset of the data": (changed(3, b"\0"), "of a length that cannot be"),
    "command": (changed(8, b"\xff\x7f"), "a command that was not made"),
    "place": (changed(12, b"\x00\x02\0\0"), "data that was not asked for"),
    "too much": (changed(16, b"\x00\x04\0\0"), "data that was not asked for"),
    "terminated": (changed(0, b"\x03"), "for an error in what was sent"),
    "too early an end": (
        lambda pdu: struct.pack("<BBBBI", 5, 0, 24, 0, 24) + bytes(12) + pdu[8:10] + bytes(2),
        "before all of its data",
    ),
}


@pytest.mark.parametrize("what", list(WRONG))
def test_a_controller_that_says_what_cannot_be_is_connected_to_anew(
    target: Target, what: str
) -> None:
    wrong, words = WRONG[what]
    with NvmeTarget() as model:
        attach_controller(target, model)
        target.attach("vm-0", "NVME0n1")
        with connected(target) as guest:
            guest.write(0, b"g" * BLOCK)
            times = [1]

            def once(pdu: bytes) -> bytes:
                if pdu[0] != 7 or not times:
                    return pdu
                times.pop()
                return wrong(pdu)

            model.wrong = once
            assert guest.read(0, 1) == b"g" * BLOCK
            assert shown(target)["connections"] == 2
        assert words in target.words()


def test_growth_is_told_to_the_guest(target: Target) -> None:
    with NvmeTarget() as model:
        attach_controller(target, model)
        target.attach("vm-0", "NVME0n1")
        with connected(target) as guest:
            guest.send("events")
            for blocks in (20000, 30000):
                model.resize(blocks)
                events = guest.send("events", timeout_ms=60_000)["events"]
                assert [(e["event"], e["reason"]) for e in events] == [
                    (PARAM_CHANGE, 0x2A | 9 << 8)
                ]
                guest.ready()
                assert guest.send("capacity")["blocks"] == blocks
            guest.write(29999, b"e" * BLOCK)
            assert guest.read(29999, 1) == b"e" * BLOCK


def test_io_goes_by_the_best_path_and_by_another_when_that_is_lost(target: Target) -> None:
    hurry(target)
    with NvmeTarget(ports=2, ana=True) as model:
        model.states[1] = NON_OPTIMIZED
        assert attach_controller(target, model) == ["NVME0n1"]
        assert attach_controller(target, model, 1, multipath="failover") == ["NVME0n1"]
        target.attach("vm-0", "NVME0n1")

        def paths() -> list[tuple[bool, bool, bool]]:
            (group,) = target.rpc("bdev_nvme_get_io_paths")["poll_groups"]
            return [(p["current"], p["connected"], p["accessible"]) for p in group["io_paths"]]

        with connected(target) as guest:

            def goes_by() -> int:
                guest.write(1, b"p" * BLOCK)
                return model.seen(WRITE)[-1].port

            assert goes_by() == 0
            until(lambda: paths() == [(True, True, True), (False, True, True)], "it is told")
            model.set_state(INACCESSIBLE, 0)
            assert goes_by() == 1
            until(lambda: paths() == [(False, True, False), (True, True, True)], "it is told")
            model.set_state(OPTIMIZED, 0)
            until(lambda: goes_by() == 0, "it is used again")
            model.vanish(0)
            assert goes_by() == 1
            until(lambda: paths()[0][1] is False, "it is told")
            # Neither, for a while.
            model.vanish(1)
            head = guest.send("submit", cdb=write_ten(5), data_out=b"x" * BLOCK)["head"]
            model.listen(0)
            assert guest.send("wait", head=head)["status"] == GOOD
            assert goes_by() == 0
            model.listen(1)
            until(lambda: paths() == [(True, True, True), (False, True, True)], "it is back")
        target.restart()
        until(lambda: [path[1] for path in paths()] == [True, True], "both are back")
        where = {"traddr": "127.0.0.1", "trsvcid": model.port(0), "trtype": "tcp"}
        assert target.rpc("bdev_nvme_detach_controller", name="NVME0", **where) is True
        until(lambda: [path[1:] for path in paths()] == [(True, True)], "one is left")
        with connected(target) as guest:
            guest.write(2, b"q" * BLOCK)
            assert model.seen(WRITE)[-1].port == 1


def test_a_write_in_doubt_on_a_lost_path_is_not_overtaken_by_another(target: Target) -> None:
    hurry(target)
    with NvmeTarget(ports=2, ana=True) as model:
        attach_controller(target, model)
        attach_controller(target, model, 1, multipath="multipath")
        target.attach("vm-0", "NVME0n1")
        with connected(target) as guest:
            write = Unanswered(model)
            head = guest.send("submit", cdb=write_ten(5), data_out=b"x" * BLOCK)["head"]
            assert write.held.wait(60)
            model.drop(0, reset=True)
            until(lambda: not shown(target)["connected"], "it is lost")
            # Others go on by the other path meanwhile.
            guest.write(9, b"o" * BLOCK)
            (other,) = (each for each in model.seen(WRITE) if each.lba == 9)
            assert other.port == 1
            assert guest.send("wait", head=head)["status"] == GOOD
            again = model.seen(WRITE)[-1]
            since = again.at - write.command.at
            assert again.lba == 5 and since >= 3 * KEEP_ALIVE_MS / 1000


def test_a_path_that_leads_elsewhere_is_refused(target: Target) -> None:
    other = NvmeTarget({1: Namespace(16384, uuid=b"namespace-uuid-2")})
    with NvmeTarget() as model, other:
        attach_controller(target, model)
        error = target.fails("bdev_nvme_attach_controller", name="NVME0", **other.params())
        assert "another namespace 1 is there" in str(error), error
        error = target.fails("bdev_nvme_attach_controller", name="NVME0", **model.params())
        assert isinstance(error, RpcError) and error.code == EXISTS, error
        error = target.fails(
            "bdev_nvme_attach_controller", name="NVME0", **other.params(), hdgst=True
        )
        assert "with the same digests" in str(error), error


def test_io_fails_after_the_time_that_was_asked_for_and_the_disk_comes_back(
    target: Target,
) -> None:
    hurry(target)
    with NvmeTarget() as model:
        attach_controller(target, model, fast_io_fail_timeout_sec=1)
        target.attach("vm-0", "NVME0n1")
        with connected(target) as guest:
            assert write_one(guest) == (GOOD, 0)
            model.vanish()
            assert write_one(guest) == (CHECK, MEDIUM_ERROR)
            refused = "Connection refused"
            until(
                lambda: refused in (shown(target).get("problem") or ""),
                "connecting again has failed",
            )
            # At once from now on.
            assert write_one(guest) == (CHECK, MEDIUM_ERROR)
            model.listen()
            until(lambda: write_one(guest) == (GOOD, 0), "it is used again")


def test_a_controller_and_a_bdev_do_not_have_one_name(target: Target) -> None:
    size = {"num_blocks": 2048, "block_size": 512}
    with NvmeTarget() as model:
        attach_controller(target, model)
        error = target.fails("bdev_malloc_create", name="NVME0", **size)
        assert isinstance(error, RpcError) and error.code == EXISTS, error
        assert "there is an NVMe controller NVME0" in error.message
        target.rpc("bdev_malloc_create", name="m0", **size)
        error = target.fails("bdev_nvme_attach_controller", name="m0", **model.params())
        assert "there is a bdev m0" in str(error), error


def test_a_path_that_is_added_ends_that_io_fails(target: Target) -> None:
    hurry(target)
    with NvmeTarget(ports=2) as model:
        attach_controller(target, model, fast_io_fail_timeout_sec=1)
        target.attach("vm-0", "NVME0n1")
        with connected(target) as guest:
            model.vanish(0)
            assert write_one(guest) == (CHECK, MEDIUM_ERROR)
            attach_controller(target, model, 1, multipath="failover")
            until(lambda: write_one(guest) == (GOOD, 0), "it is used")


def test_one_namespace_that_became_another_takes_no_other_down(target: Target) -> None:
    hurry(target)
    spaces = {1: Namespace(2048), 7: Namespace(2048, uuid=b"namespace-uuid-7")}
    with NvmeTarget(spaces) as model:
        attach_controller(target, model)
        target.attach("vm-0", "NVME0n1")
        with connected(target) as guest:
            spaces[7].uuid = b"namespace-uuid-X"
            model.drop()
            until(lambda: shown(target)["connections"] >= 2, "it is connected anew")
            assert write_one(guest) == (GOOD, 0)
        (group,) = target.rpc("bdev_nvme_get_io_paths", name="NVME0n7")["poll_groups"]
        assert [path["accessible"] for path in group["io_paths"]] == [False]
        until(lambda: "another namespace 7 is there" in target.words(), "it is said")


def test_what_a_namespace_is_is_not_guessed_where_the_controller_fails_to_tell(
    refusing: Callable[..., None],
) -> None:
    def answer(command: Command, usual: Callable[[Command], Answer | None]) -> Answer | None:
        descriptors = command.opcode == 0x06 and command.sqe[40] == 3
        return Answer(0x006) if descriptors else usual(command)

    with NvmeTarget(administering=answer) as model:
        refusing("it refuses Identify: status 0x006", IO, **model.params())


@pytest.mark.nightly
def test_a_controller_that_does_not_tell_of_its_groups_is_connected_to_anew(
    target: Target,
) -> None:
    hangs = threading.Event()

    def answer(command: Command, usual: Callable[[Command], Answer | None]) -> Answer | None:
        return None if command.opcode == 0x02 and hangs.is_set() else usual(command)

    with NvmeTarget(ana=True, administering=answer) as model:
        attach_controller(target, model)
        target.attach("vm-0", "NVME0n1")
        with connected(target) as guest:
            assert write_one(guest) == (GOOD, 0)
            hangs.set()
            model.set_state(NON_OPTIMIZED)
            words = "it has not answered Identify or Get Log Page for too long"
            until(lambda: words in target.words(), "it is lost")
            hangs.clear()
            assert write_one(guest) == (GOOD, 0)
            assert shown(target)["connections"] == 2


def test_a_flush_that_fails_is_remembered_until_it_is_cleared(target: Target) -> None:
    fails = threading.Event()

    def answer(command: Command, usual: Callable[[Command], Answer]) -> Answer:
        return (
            Answer(0x006 | 0x4000) if command.opcode == FLUSH and fails.is_set() else usual(command)
        )

    with NvmeTarget(answering=answer) as model:
        attach_controller(target, model)
        target.attach("vm-0", "NVME0n1")
        with connected(target) as guest:
            assert outcome(guest.cdb(SYNCHRONIZE)) == (GOOD, 0)
            fails.set()
            assert outcome(guest.cdb(SYNCHRONIZE))[0] == CHECK
            assert target.fails("virtlun_bdev_clear_flush_error", name="NVME0n1")
            fails.clear()
            assert outcome(guest.cdb(SYNCHRONIZE))[0] == CHECK
        target.restart()
        (problem,) = target.rpc("virtlun_get_status")["flush_errors"]
        assert "a flush failed" in problem, problem
        assert target.rpc("virtlun_bdev_clear_flush_error", name="NVME0n1") is True
        with connected(target) as guest:
            assert outcome(guest.cdb(SYNCHRONIZE)) == (GOOD, 0)


def test_a_target_that_is_not_there_at_the_start_keeps_nobody_waiting(target: Target) -> None:
    with NvmeTarget({1: Namespace(8 * MIB // BLOCK)}) as model:
        attach_controller(target, model)
        target.rpc("bdev_malloc_create", name="m0", num_blocks=2048, block_size=512)
        target.attach("vm-0", "m0", "NVME0n1")
        with connected(target) as guest:
            guest.ready(target=1)
            guest.write(0, b"s" * BLOCK, target=1)
        assert target.stop() == 0
        model.vanish()
        target.start()
        status = partial(target.rpc, "virtlun_get_status")
        problems = status()["restore_problems"]
        assert any("NVME0" in each and "Connection refused" in each for each in problems), problems
        error = target.fails("bdev_nvme_attach_controller", name="NVME0", **model.params())
        assert isinstance(error, RpcError) and error.code == EXISTS
        with connected(target) as guest:
            assert guest.read(0, 8) == bytes(4096)
            model.listen()
            target.restored()
            guest.ready(target=1)
            assert guest.read(0, 1, target=1) == b"s" * BLOCK
        # Another one is there than before.
        assert target.stop() == 0
        model.namespaces[1].uuid = b"namespace-uuid-X"
        target.start()
        until(
            lambda: "another one than before" in str(status()["restore_problems"]),
            lambda: str(status()["restore_problems"]),
        )
        assert target.rpc("bdev_nvme_detach_controller", name="NVME0") is True
        error = target.fails("bdev_nvme_detach_controller", name="NVME0")
        assert isinstance(error, RpcError) and error.code == NODEV


def test_an_lvstore_on_a_namespace_survives_a_cut_of_both(target: Target, scratch: Path) -> None:
    with NvmeTarget({1: Namespace(32 * MIB // BLOCK)}) as model:
        attach_controller(target, model)
        target.rpc("bdev_lvol_create_lvstore", bdev_name="NVME0n1", lvs_name="lvs0", cluster_sz=MIB)
        target.make_thin("v", 8)
        target.attach("vm-0", "lvs0/v")
        with connected(target) as guest:
            guest.write(0, b"v" * 4096)
            assert outcome(guest.cdb(SYNCHRONIZE)) == (GOOD, 0)
        model.vanish()
        target.kill9()
        model.listen()
        target.start()
        target.restored()
        with connected(target) as guest:
            assert guest.read(0, 8) == b"v" * 4096
        assert target.rpc("virtlun_lvstore_check", lvs_name="lvs0")["problems"] == []
        target.upgrade()
        target.restored()
        with connected(target) as guest:
            assert guest.read(0, 8) == b"v" * 4096


def test_an_upgrade_that_fails_late_leaves_namespaces_and_what_is_on_them(target: Target) -> None:
    with NvmeTarget({1: Namespace(32 * MIB // BLOCK)}) as model:
        attach_controller(target, model)
        target.rpc("bdev_lvol_create_lvstore", bdev_name="NVME0n1", lvs_name="lvs0", cluster_sz=MIB)
        target.make_thin("v", 8)
        target.attach("vm-0", "lvs0/v")
        with connected(target) as guest:
            guest.write(0, b"v" * 4096)
        upgrade_ends(target, "held: end")
        target.restored()
        assert shown(target)["connected"]
        with connected(target) as guest:
            assert guest.read(0, 8) == b"v" * 4096


@pytest.mark.nightly
def test_a_namespace_that_is_away_when_an_upgrade_fails_late_comes_back(target: Target) -> None:
    with NvmeTarget({1: Namespace(32 * MIB // BLOCK)}) as model:
        attach_controller(target, model)
        target.attach("vm-0", "NVME0n1")
        with connected(target) as guest:
            guest.write(0, b"v" * 4096)
        model.vanish()
        upgrade_ends(target, "held: end")
        assert target.rpc("bdev_get_bdevs") == []
        model.listen()
        # With what is on it.
        target.restored()
        assert shown(target)["connected"]
        with connected(target) as guest:
            assert guest.read(0, 8) == b"v" * 4096


@pytest.fixture
def refusing(target: Target) -> Iterator[Callable[..., None]]:
    """What asserts that a call to attach is refused, with these words and this code."""

    def refused(words: str, code: int, **params: Any) -> None:
        asked = {"name": "NVME0", "trtype": "tcp", "traddr": "127.0.0.1", "subnqn": NQN, **params}
        error = target.fails("bdev_nvme_attach_controller", **asked)
        assert isinstance(error, RpcError)
        assert words in str(error), error
        assert error.code == code, error

    yield refused
    assert target.rpc("bdev_get_bdevs") == []


def test_what_makes_no_sense_is_refused_in_a_sentence(
    target: Target, refusing: Callable[..., None]
) -> None:
    refusing("trtype is tcp, not rdma", NOTSUP, trtype="rdma")
    refusing("names are not looked up", INVALID, traddr="storage")
    refusing("is none of ipv6", INVALID, adrfam="ipv6")
    refusing("no NVMe qualified name", INVALID, subnqn="iqn.x")
    refusing("multipath is disable, failover or multipath", INVALID, multipath="x")
    refusing('does not support "psk"', NOTSUP, psk="k")
    refusing("Connection refused", IO, trsvcid=str(free_port()))
    error = target.fails("bdev_nvme_set_options", keep_alive_timeout_ms=0)
    assert "nobody knows when a controller that is lost has ended" in str(error)


@pytest.mark.parametrize(
    ("words", "options", "given"),
    [
        ("has metadata of 8 bytes a block", {"namespaces": {1: Namespace(64, metadata=8)}}, {}),
        ("a block is 512 or 4096 bytes", {"namespaces": {1: Namespace(64, 1024)}}, {}),
        ("shows this host no namespace", {"namespaces": {}}, {}),
        ("wants this host to authenticate", {"authentication": True}, {}),
        ("has the subsystem that name", {}, {"subnqn": "nqn.2026-11.org.virtlun:other"}),
        ("takes only 0 bytes at once", {"h2c": 0}, {}),
    ],
)
def test_a_controller_that_bdevs_cannot_be_on_is_refused_in_a_sentence(
    refusing: Callable[..., None],
    words: str,
    options: dict[str, Any],
    given: dict[str, Any],
) -> None:
    with NvmeTarget(**options) as model:
        refusing(words, IO, **{**model.params(), **given})


def test_without_a_network_nothing_is_connected_to(make_target: MakeTarget) -> None:
    target = make_target().start()
    with NvmeTarget() as model:
        error = target.fails("bdev_nvme_attach_controller", name="NVME0", **model.params())
        assert isinstance(error, RpcError) and error.code == NOTSUP
        assert "start it with --network" in error.message
        assert not model.log
