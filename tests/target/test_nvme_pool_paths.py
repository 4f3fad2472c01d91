"""A pool of an NVMe/TCP subsystem by several paths, some of which are of no use."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from tests.support.array_pools import info, listed, not_had
from tests.support.initiator import connected
from tests.support.nvme_target import INACCESSIBLE, OPTIMIZED, WRITE
from tests.support.nvme_target import NvmeTarget as Model
from tests.support.target import Target
from tests.support.wait import until
from tests.target.conftest import MakeTarget
from tests.target.test_nvme import hurry
from tests.target.test_nvme_pools import BLOCK, MIB, ONE, SEVEN, add, called, its_paths, spaces


@pytest.fixture
def target(make_target: MakeTarget) -> Target:
    """A target that may make network connections, and waits for none of them for long."""
    made = make_target("--network").start()
    hurry(made, tcp_connect_timeout_ms=300)
    return made


def path(port: str) -> dict[str, str]:
    """A path, as the methods have it."""
    return {"traddr": "127.0.0.1", "trsvcid": port}


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """Something that takes connections and says nothing, as what is dead behind a firewall."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield listener


def taken(listener: socket.socket) -> int:
    """How many have connected since the last look."""
    count = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            listener.accept()[0].close()
            count += 1
    return count


def test_a_path_that_did_not_answer_is_asked_after_those_that_do(
    target: Target, silent: socket.socket
) -> None:
    with Model(spaces(), ports=2) as model:
        ports = [str(silent.getsockname()[1]), model.port(0), model.port(1)]
        add(target, model, paths=[path(port) for port in ports])
        assert taken(silent) == 1
        for _ in range(3):
            assert len(listed(target, "nv0")) == 2
            assert info(target, f"nv0/{called(SEVEN)}")["block_size"] == 4096
        assert taken(silent) == 0
        # I/O goes by the first path that is there, whichever has answered before.
        model.vanish(0)
        assert len(listed(target, "nv0")) == 2
        model.listen(0)
        asked = len(model.log)
        assert len(listed(target, "nv0")) == 2
        assert {each.port for each in model.log[asked:]} == {1}
        target.attach("vm-1", f"nv0/{called(ONE)}")
        until(
            lambda: [each["state"] for each in its_paths(target)] == ["failed", *["enabled"] * 2],
            lambda: f"two are connected: {its_paths(target)}",
        )
        with connected(target, "vm-1") as guest:
            guest.write(0, b"a" * BLOCK)
            assert [each.port for each in model.seen(WRITE)] == [0]
        # Where all others are gone, it is asked.
        target.rpc("vhost_delete_controller", ctrlr="vm-1", force=True)
        until(lambda: not target.rpc("bdev_nvme_get_controllers"), "it is closed")
        for port in range(2):
            model.vanish(port)
        taken(silent)
        assert len(listed(target, "nv0")) == 2
        until(lambda: taken(silent) > 0, "it is asked")


def test_what_is_inaccessible_by_one_path_is_told_as_it_is_by_another(target: Target) -> None:
    with Model(spaces(), ports=2, ana=True, groups=2, hides_sizes=True) as model:
        model.namespaces[7].group = 2
        model.states[0] = INACCESSIBLE
        add(target, model, paths=[path(model.port(port)) for port in range(2)])
        rows = listed(target, "nv0")
        assert [row["problem"] for row in rows.values()] == [None, None]
        assert [row["size"] for row in rows.values()] == [8 * MIB, 8 * MIB]
        # The paths have changed their parts.
        model.states[:2] = [OPTIMIZED, INACCESSIBLE]
        asked = len(model.log)
        assert listed(target, "nv0") == rows
        assert {each.port for each in model.log[asked:]} == {0}
        # By none it is not told, and nobody takes it for empty.
        model.states[0] = INACCESSIBLE
        rows = listed(target, "nv0")
        assert rows[called(ONE)]["size"] == 8 * MIB and rows[called(ONE)]["problem"]
        assert not rows[called(SEVEN)]["problem"]


def test_a_path_that_answers_again_tells_what_is_inaccessible_by_the_other(target: Target) -> None:
    with Model(spaces(), ports=2, ana=True, groups=2, hides_sizes=True) as model:
        model.namespaces[7].group = 2
        model.states[0] = INACCESSIBLE
        add(target, model, paths=[path(model.port(port)) for port in range(2)])
        volume = f"nv0/{called(ONE)}"
        target.rpc("vhost_create_scsi_controller", ctrlr="vm-1")
        model.vanish(1)
        for _ in range(2):
            rows = listed(target, "nv0")
            assert rows[called(ONE)]["problem"] and not rows[called(SEVEN)]["problem"]
        assert str(rows[called(ONE)]["problem"]) in str(not_had(target, volume))
        model.listen(1)
        until(
            lambda: listed(target, "nv0")[called(ONE)]["problem"] is None,
            "the path that was silent is asked",
            deadline_s=10,
        )
        target.add_lun("vm-1", volume)
        with connected(target, "vm-1") as guest:
            guest.write(0, b"a" * BLOCK)
            assert [each.port for each in model.seen(WRITE)] == [1]


def test_what_is_inaccessible_does_not_keep_each_list_waiting(
    target: Target, silent: socket.socket
) -> None:
    hurry(target, tcp_connect_timeout_ms=1000)
    with Model(spaces(), ana=True, groups=2, hides_sizes=True) as model:
        model.namespaces[7].group = 2
        model.states[0] = INACCESSIBLE
        ports = [model.port(), str(silent.getsockname()[1])]
        add(target, model, paths=[path(port) for port in ports])
        assert taken(silent) == 1
        for _ in range(3):
            assert listed(target, "nv0")[called(ONE)]["problem"]
        assert taken(silent) == 0

        def is_asked() -> bool:
            assert listed(target, "nv0")[called(ONE)]["problem"]
            return taken(silent) == 1

        until(is_asked, "it is asked again", deadline_s=30)
