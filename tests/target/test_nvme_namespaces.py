"""Namespaces of an NVMe/TCP target that come, go and change, and its paths."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from pydataplane.errors import BUSY, RpcError
from tests.support.frozen import frozen
from tests.support.initiator import connected
from tests.support.nvme_target import (
    FLUSH,
    INACCESSIBLE,
    NON_OPTIMIZED,
    OPTIMIZED,
    WRITE,
    Answer,
    Command,
    Namespace,
    NvmeTarget,
)
from tests.support.target import Target
from tests.support.wait import until
from tests.target.conftest import MakeTarget
from tests.target.test_nvme import (
    GOOD,
    SYNCHRONIZE,
    attach_controller,
    hurry,
    shown,
    write_ten,
)

BLOCK = 512


@pytest.fixture
def target(make_target: MakeTarget) -> Target:
    """A target that may make network connections."""
    return make_target("--network").start()


def names(target: Target) -> list[str]:
    """The bdevs that there are."""
    return sorted(bdev["name"] for bdev in target.rpc("bdev_get_bdevs"))


def state(target: Target, name: str) -> str:
    """How a namespace can be used by its controller's first path."""
    told: str = shown(target, name)["ns_data"]["ana_state"]
    return told


def accessible(target: Target) -> dict[str, list[bool]]:
    """By bdev: whether it can be used by each of the paths."""
    (group,) = target.rpc("bdev_nvme_get_io_paths")["poll_groups"]
    found: dict[str, list[bool]] = {}
    for path in group["io_paths"]:
        found.setdefault(path["bdev_name"], []).append(path["accessible"])
    return found


def problems(target: Target) -> str:
    """What is not restored, in one text."""
    found: list[str] = target.rpc("virtlun_get_status")["restore_problems"]
    return "; ".join(found)


def test_a_controller_is_detached_as_a_whole_or_not(target: Target) -> None:
    spaces = {1: Namespace(2048), 7: Namespace(2048, uuid=b"namespace-uuid-7")}
    with NvmeTarget(spaces) as model:
        assert attach_controller(target, model) == ["NVME0n1", "NVME0n7"]
        target.rpc("virtlun_export_create", bdev_name="NVME0n7")
        error = target.fails("bdev_nvme_detach_controller", name="NVME0")
        assert isinstance(error, RpcError) and error.code == BUSY, error
        assert names(target) == ["NVME0n1", "NVME0n7"]


@pytest.mark.nightly
def test_a_controller_is_detached_also_where_somebody_lets_go_late(target: Target) -> None:
    held, goes = threading.Event(), threading.Event()

    def answer(command: Command, usual: Callable[[Command], Answer]) -> Answer:
        if command.opcode == WRITE:
            held.set()
            assert goes.wait(60)
        return usual(command)

    spaces = {1: Namespace(2048), 7: Namespace(2048, uuid=b"namespace-uuid-7")}
    with NvmeTarget(spaces, answering=answer) as model:
        attach_controller(target, model)
        target.attach("vm-0", "NVME0n1")
        with connected(target) as guest:
            guest.send("submit", cdb=write_ten(5), data_out=b"h" * BLOCK)
            assert held.wait(60)
            error = target.fails("bdev_nvme_detach_controller", name="NVME0")
            assert isinstance(error, RpcError) and error.code == BUSY, error
            goes.set()
            until(lambda: names(target) == [], "both are gone")
        assert "nvme" not in str(target.configuration().get("bdev"))
        until(lambda: not model.connections, "its connections are closed")


@pytest.mark.nightly
def test_where_one_namespace_stays_the_others_of_its_controller_come_back(target: Target) -> None:
    hangs = threading.Event()

    def answer(command: Command, usual: Callable[[Command], Answer]) -> Answer | None:
        return None if hangs.is_set() and command.nsid == 7 else usual(command)

    hurry(target)
    spaces = {1: Namespace(2048), 7: Namespace(65536, uuid=b"namespace-uuid-7")}
    with NvmeTarget(spaces, answering=answer) as model:
        attach_controller(target, model, fast_io_fail_timeout_sec=12)
        target.rpc("bdev_lvol_create_lvstore", bdev_name="NVME0n7", lvs_name="lvs0")
        target.make_thin("v", 8)
        target.attach("vm-0", "lvs0/v")
        with connected(target) as guest:
            hangs.set()
            guest.send("submit", cdb=write_ten(5), data_out=b"h" * BLOCK)
            assert target.fails("bdev_nvme_detach_controller", name="NVME0")
            until(lambda: {"NVME0n1", "NVME0n7"} <= set(names(target)), "none is gone")
            hangs.clear()
            model.drop()
            until(lambda: shown(target, "NVME0n7")["connections"] == 2, "it is connected anew")


def test_paths_that_are_detached_at_the_same_time_leave_none_on_record(target: Target) -> None:
    with NvmeTarget(ports=4) as model:
        for port in range(4):
            attach_controller(target, model, port)

        def detach(port: int) -> None:
            where = {"traddr": "127.0.0.1", "trsvcid": model.port(port), "trtype": "tcp"}
            assert target.rpc("bdev_nvme_detach_controller", name="NVME0", **where) is True

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(detach, [0, 1, 3]))
        recorded = {call["method"]: call["params"] for call in target.configuration()["bdev"]}
        left = recorded["bdev_nvme_attach_controller"]
        assert left["trsvcid"] == model.port(2) and "paths" not in left
        detach(2)
        assert names(target) == []


def test_a_path_that_is_still_in_use_keeps_no_other_from_being_added(target: Target) -> None:
    held, goes = threading.Event(), threading.Event()

    def answer(command: Command, usual: Callable[[Command], Answer]) -> Answer:
        if command.opcode == WRITE and command.port == 0 and not held.is_set():
            held.set()
            assert goes.wait(120)
        return usual(command)

    def ports() -> list[str]:
        (group,) = target.rpc("bdev_nvme_get_io_paths")["poll_groups"]
        return [path["transport"]["trsvcid"] for path in group["io_paths"] if path["connected"]]

    with NvmeTarget(ports=9, answering=answer) as model:
        for port in range(8):
            attach_controller(target, model, port)
        target.attach("vm-0", "NVME0n1")
        with connected(target) as guest:
            head = guest.send("submit", cdb=write_ten(5), data_out=b"u" * BLOCK)["head"]
            assert held.wait(60)
            where = {"traddr": "127.0.0.1", "trsvcid": model.port(), "trtype": "tcp"}
            assert target.rpc("bdev_nvme_detach_controller", name="NVME0", **where) is True
            attach_controller(target, model, 8)
            until(lambda: ports() == [model.port(n) for n in range(1, 9)], "it is a path")
            goes.set()
            assert guest.send("wait", head=head)["status"] == GOOD


@pytest.mark.parametrize("tells", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_namespace_that_comes_later_is_a_bdev_and_stays_one(target: Target, tells: bool) -> None:
    with NvmeTarget({1: Namespace(2048)}, tells=tells) as model:
        assert attach_controller(target, model) == ["NVME0n1"]
        model.add(3, Namespace(4096, uuid=b"namespace-uuid-3"))
        until(lambda: names(target) == ["NVME0n1", "NVME0n3"], "it is a bdev")
        target.attach("vm-0", "NVME0n3")
        with connected(target) as guest:
            guest.write(9, b"3" * BLOCK)
        assert model.namespaces[3].content[9 * BLOCK :][:BLOCK] == b"3" * BLOCK
        # With a new connection, too; one that no bdev can be on is none.
        model.tells = False
        model.add(4, Namespace(64, uuid=b"namespace-uuid-4"))
        model.add(5, Namespace(64, uuid=b"namespace-uuid-5", metadata=8))
        model.drop()
        until(lambda: "NVME0n4" in names(target), "it is a bdev")
        target.restart()
        until(lambda: names(target) == ["NVME0n1", "NVME0n3", "NVME0n4"], "all are back")
        with connected(target) as guest:
            assert guest.read(9, 1) == b"3" * BLOCK
        assert target.rpc("vhost_delete_controller", ctrlr="vm-0", force=True) is True
        assert target.rpc("bdev_nvme_detach_controller", name="NVME0") is True
        assert names(target) == []


def test_what_changes_while_a_controller_is_looked_at_is_seen(target: Target) -> None:
    def answer(command: Command, usual: Callable[[Command], Answer | None]) -> Answer | None:
        told = usual(command)
        if command.opcode == 0x06 and command.sqe[40] == 2 and 3 not in model.namespaces:
            model.add(3, Namespace(64, uuid=b"namespace-uuid-3"))
        if command.opcode == 0x02 and command.sqe[40] == 0x0C and not model.changes:
            model.set_state(NON_OPTIMIZED)
        return told

    with NvmeTarget(ana=True, administering=answer) as model:
        assert attach_controller(target, model) == ["NVME0n1"]
        until(lambda: names(target) == ["NVME0n1", "NVME0n3"], "what came is a bdev")
        until(lambda: state(target, "NVME0n1") == "non_optimized", "its state is told")


def test_a_namespace_that_one_path_finds_while_another_looks_is_used_by_both(
    target: Target,
) -> None:
    asks, found = threading.Event(), threading.Event()

    def answer(command: Command, usual: Callable[[Command], Answer | None]) -> Answer | None:
        if command.opcode == 0x06 and command.sqe[40] == 2 and 3 in model.namespaces:
            if command.port == 1:
                asks.set()
            assert (found if command.port == 1 else asks).wait(120)
        return usual(command)

    with NvmeTarget(ports=2, administering=answer) as model:
        attach_controller(target, model)
        attach_controller(target, model, 1)
        until(lambda: accessible(target) == {"NVME0n1": [True, True]}, "both are used")
        model.add(3, Namespace(64, uuid=b"namespace-uuid-3"))
        until(lambda: names(target) == ["NVME0n1", "NVME0n3"], "one path has found it")
        found.set()
        until(lambda: accessible(target)["NVME0n3"] == [True, True], "both are used")


def test_a_namespace_that_a_path_does_not_carry_as_another_is_not_used_there(
    target: Target,
) -> None:
    lists, weaker = {0: [1], 1: [1]}, threading.Event()

    def answer(command: Command, usual: Callable[[Command], Answer | None]) -> Answer | None:
        told = usual(command)
        if command.opcode != 0x06 or told is None:
            return told
        page = bytearray(told.data)
        if command.sqe[40] == 2:
            shows = lists[command.port]
            page[:] = struct.pack(f"<{len(shows)}I", *shows).ljust(4096, b"\0")
        elif command.sqe[40] == 1 and command.port == 1 and weaker.is_set():
            page[77] = 1  # MDTS
        return replace(told, data=bytes(page))

    with NvmeTarget(ports=2, administering=answer) as model:
        attach_controller(target, model)
        attach_controller(target, model, 1)
        until(lambda: accessible(target) == {"NVME0n1": [True, True]}, "both are used")
        weaker.set()
        model.namespaces[9] = Namespace(64, uuid=b"namespace-uuid-9")
        lists[1] = [9]
        model.drop(1)
        until(lambda: accessible(target).get("NVME0n9") == [False, True], "it is used")
        # It is there again, and takes less than guests were told.
        lists[1] = [1, 9]
        model.add(9, model.namespaces[9])
        until(lambda: "takes less at once of namespace 1" in target.words(), "it is refused")
        until(lambda: accessible(target)["NVME0n1"] == [True, False], "it is not used there")


def test_the_size_of_another_namespace_is_not_taken_over(target: Target) -> None:
    spaces = {1: Namespace(2048), 7: Namespace(2048, uuid=b"namespace-uuid-7")}
    others = {1: Namespace(2048), 7: Namespace(64, uuid=b"namespace-uuid-X")}
    with NvmeTarget(spaces) as model, NvmeTarget(others, first_controller=9) as other:
        attach_controller(target, model)
        attach_controller(target, other)
        expected = {"NVME0n1": [True, True], "NVME0n7": [True, False]}
        until(lambda: accessible(target) == expected, "it is used as far as it is the same")
        assert shown(target, "NVME0n7")["num_blocks"] == 2048
        # Nor with an event, or with the next connection.
        other.resize(128, 7)
        other.resize(4096)
        until(lambda: shown(target)["num_blocks"] == 4096, "it is told")
        other.drop()
        until(lambda: len(other.controllers) == 2, "it is connected anew")
        until(lambda: accessible(target)["NVME0n1"] == [True, True], "it is used again")
        assert shown(target, "NVME0n7")["num_blocks"] == 2048


@pytest.mark.parametrize("told", [True, False], ids=["told", "connected anew"])
def test_a_namespace_that_is_deleted_keeps_no_flush_failure(target: Target, told: bool) -> None:
    fails = threading.Event()

    def answer(command: Command, usual: Callable[[Command], Answer]) -> Answer:
        is_failure = command.opcode == FLUSH and fails.is_set()
        return Answer(0x006 | 0x4000) if is_failure else usual(command)

    spaces = {1: Namespace(2048), 7: Namespace(2048, uuid=b"namespace-uuid-7")}
    with NvmeTarget(spaces, answering=answer, tells=told) as model:
        attach_controller(target, model, fast_io_fail_timeout_sec=2)
        target.attach("vm-0", "NVME0n1")
        with connected(target) as guest:
            fails.set()
            assert guest.cdb(SYNCHRONIZE)["status"] != GOOD
            fails.clear()
            model.remove(7)
            if not told:
                model.drop()
            expected = {"NVME0n1": [True], "NVME0n7": [False]}
            until(lambda: accessible(target) == expected, "it is not there")
            assert target.rpc("virtlun_bdev_clear_flush_error", name="NVME0n1") is True
            assert guest.cdb(SYNCHRONIZE)["status"] == GOOD


@pytest.mark.nightly
def test_a_look_at_a_controller_may_take_long_if_no_command_does(target: Target) -> None:
    slow = threading.Event()

    def answer(command: Command, usual: Callable[[Command], Answer | None]) -> Answer | None:
        if slow.is_set() and command.opcode in (0x02, 0x06):
            time.sleep(3)
        return usual(command)

    with NvmeTarget(administering=answer) as model:
        attach_controller(target, model)
        slow.set()
        # Six commands, of which each may take ten seconds.
        model.add(3, Namespace(64, uuid=b"namespace-uuid-3"))
        until(lambda: names(target) == ["NVME0n1", "NVME0n3"], "it is a bdev")
        assert shown(target)["connections"] == 1


def test_a_namespace_that_is_missing_keeps_no_other_away(target: Target) -> None:
    seven = Namespace(2048, uuid=b"namespace-uuid-7")
    with NvmeTarget({1: Namespace(2048), 7: seven}) as model:
        attach_controller(target, model)
        target.attach("vm-0", "NVME0n1", "NVME0n7")
        with connected(target) as guest:
            guest.ready(target=1)
            guest.write(5, b"7" * BLOCK, target=1)
        assert target.stop() == 0
        # Another one has its number; its own comes back later.
        model.namespaces[7] = Namespace(2048, uuid=b"namespace-uuid-X")
        target.start()
        until(lambda: names(target) == ["NVME0n1"], "the other one is back")
        until(lambda: "or others than before: 7" in problems(target), lambda: problems(target))
        until(lambda: "namespace 7 is another one than before" in target.words(), "it is said")
        with connected(target) as guest:
            assert guest.read(5, 1) == bytes(BLOCK)
            model.add(7, seven)
            until(lambda: names(target) == ["NVME0n1", "NVME0n7"], "it is back")
            until(lambda: not problems(target), "all is well")
            guest.ready(target=1)
            assert guest.read(5, 1, target=1) == b"7" * BLOCK
        assert not any(model.namespaces[7].content[: 5 * BLOCK])


def test_that_one_namespace_is_missing_is_told_also_where_another_is_new(target: Target) -> None:
    seven = Namespace(2048, uuid=b"namespace-uuid-7")
    with NvmeTarget({1: Namespace(2048), 7: seven}) as model:
        attach_controller(target, model)
        assert target.stop() == 0
        del model.namespaces[7]
        model.namespaces[8] = Namespace(64, uuid=b"namespace-uuid-8")
        target.start()
        until(lambda: names(target) == ["NVME0n1", "NVME0n8"], "what is there is back")
        until(lambda: "or others than before: 7" in problems(target), lambda: problems(target))
        assert "could not be restored" not in target.words()
        model.add(7, seven)
        until(lambda: not problems(target), "all is well")
        until(lambda: names(target) == ["NVME0n1", "NVME0n7", "NVME0n8"], "it is back")


def test_a_namespace_whose_name_is_taken_keeps_no_other_away(target: Target) -> None:
    def product() -> object:
        (bdev,) = target.rpc("bdev_get_bdevs", name="NVME0n3")
        return bdev["product_name"]

    with NvmeTarget({1: Namespace(2048), 2: Namespace(2048)}) as model:
        # Two of one UUID.
        assert attach_controller(target, model) == ["NVME0n1"]
        assert "as others are on them or have their names or UUIDs: 2" in problems(target)
        model.remove(2)
        target.rpc("bdev_malloc_create", name="NVME0n3", num_blocks=2048, block_size=512)
        model.add(3, Namespace(64, uuid=b"namespace-uuid-3"))
        until(lambda: "or UUIDs: 2, 3" in problems(target), "it is found")
        target.restart()
        until(lambda: names(target) == ["NVME0n1", "NVME0n3"], "both are back")
        until(lambda: "or UUIDs: 3" in problems(target), "it is found")
        assert product() == "Malloc disk"
        recorded = {call["method"]: call["params"] for call in target.configuration()["bdev"]}
        spaces = recorded["bdev_nvme_attach_controller"]["namespaces"]
        assert [each["nsid"] for each in spaces] == [1]
        target.rpc("bdev_malloc_delete", name="NVME0n3")
        until(lambda: names(target) == ["NVME0n1", "NVME0n3"], "it is a bdev")
        assert product() == "NVMe disk"
        until(lambda: not problems(target), "all is well")


def test_groups_of_namespaces_are_told_by_one_command(target: Target) -> None:
    spaces = {
        1: Namespace(2048),
        # Of what 4096 bytes tell the last one is cut off.
        2: Namespace(2048, uuid=b"namespace-uuid-2", group=128),
        3: Namespace(2048, uuid=b"namespace-uuid-3", group=300),
    }
    others = {128: NON_OPTIMIZED, 127: INACCESSIBLE, 129: INACCESSIBLE}
    with NvmeTarget(
        spaces, ana=True, groups=300, other_groups=others, ignores_offset=True
    ) as model:
        attach_controller(target, model)
        for how in (INACCESSIBLE, OPTIMIZED, INACCESSIBLE):
            model.set_state(how)
            is_there = [how == OPTIMIZED]
            expected = {"NVME0n1": is_there, "NVME0n2": [True], "NVME0n3": [True]}
            until(lambda: accessible(target) == expected, "it is told")  # noqa: B023
        assert state(target, "NVME0n2") == "non_optimized"
        target.attach("vm-0", "NVME0n3")
        with connected(target) as guest:
            guest.write(1, b"g" * BLOCK)
            assert guest.read(1, 1) == b"g" * BLOCK
        assert shown(target)["connections"] == 1
        logs = [each.sqe for each in model.log if each.queue == 0 and each.opcode == 0x02]
        asked = {(sqe[40], int.from_bytes(sqe[42:46], "little") * 4 + 4) for sqe in logs}
        assert (0x0C, 16 + 32 * 300) in asked and len(asked) == 1, asked


def test_a_controller_that_keeps_time_hears_of_its_host(target: Target) -> None:
    target.rpc("bdev_nvme_set_options", keep_alive_timeout_ms=2000)
    with NvmeTarget(keeps_time=True) as model:
        attach_controller(target, model)
        target.attach("vm-0", "NVME0n1")

        def kept_alive() -> int:
            return sum(each.queue == 0 and each.opcode == 0x18 for each in model.log)

        until(lambda: kept_alive() >= 5, "it is kept alive while nothing else is asked")
        assert shown(target)["connections"] == 1 and not model.controllers[0].expired
        with connected(target) as guest:
            with frozen(target.pid):
                until(lambda: model.controllers[0].expired, "its time is over")
            head = guest.send("submit", cdb=write_ten(5), data_out=b"k" * BLOCK)["head"]
            assert guest.send("wait", head=head)["status"] == GOOD
            assert shown(target)["connections"] == 2
        assert model.namespaces[1].content[5 * BLOCK :][:BLOCK] == b"k" * BLOCK
