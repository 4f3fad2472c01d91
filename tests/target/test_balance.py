"""Which reactor a request queue runs on, and how it moves to one that has time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from plugin.cli import main
from plugin.metrics import sample
from pydataplane.domain.reactors import topology
from tests.support.initiator import connected
from tests.support.target import Target
from tests.support.wait import until
from tests.target.conftest import MakeTarget
from tests.target.test_fair import neighbour, requests_of, wait_for_requests

READS = ("run", "--bs", "1m", "--iodepth", "64")
"""Of a disk in memory: the reactor copies them."""


def cpus(target: Target, controller: str) -> list[int]:
    """Returns the CPU of each request queue of a controller that runs."""
    (found,) = target.rpc("vhost_get_controllers", name=controller)
    return [queue["cpu"] for session in found["sessions"] for queue in session["queues"]]


def top(target: Target, *options: str) -> str:
    """Returns what one sample of `virtlun top` shows."""
    words = ["--socket", str(target.rpc_socket), "top", "--count", "1", "--interval", "0.2"]
    result = CliRunner().invoke(main, [*words, *options])
    assert result.exit_code == 0, result.output
    return result.stdout


def shown(target: Target) -> list[dict[str, Any]]:
    """Returns the reactors of `virtlun top`."""
    reactors: list[dict[str, Any]] = json.loads(top(target, "--json"))["reactors"]
    return reactors


def node_of(cpu: int) -> int | None:
    """Returns the NUMA node of a CPU; None where the kernel knows none."""
    nodes = [path.name for path in Path(f"/sys/devices/system/cpu/cpu{cpu}").glob("node[0-9]*")]
    return int(nodes[0].removeprefix("node")) if nodes else None


def busy_ns(target: Target) -> list[int]:
    """Returns how long each reactor has been busy."""
    return [each["busy"] for each in target.rpc("framework_get_reactors")["reactors"]]


def masked(target: Target, name: str, mask: str | None) -> Path:
    """Makes a controller with a disk and a mask; returns its socket."""
    target.rpc("bdev_malloc_create", name=name, num_blocks=64 * 2048, block_size=512)
    given = {} if mask is None else {"cpumask": mask}
    target.rpc("vhost_create_scsi_controller", ctrlr=name, **given)
    target.add_lun(name, name)
    return target.vhost_dir / name


@pytest.mark.parametrize(
    ("mask", "found"),
    [("0x2", [1, 1, 1, 1]), ("[0]", [0, 0, 0, 0]), ("0x3", [0, 1, 0, 1]), (None, [0, 1, 0, 1])],
)
def test_queues_begin_on_the_reactors_of_their_controllers_mask(
    make_target: MakeTarget, mask: str | None, found: list[int]
) -> None:
    target = make_target("--cpumask", "[0,1]").start()
    masked(target, "a", mask)
    with connected(target, "a", queues=4):
        assert cpus(target, "a") == found
        queues = {each["cpu"]: each["queues"] for each in shown(target)}
        assert queues == {cpu: found.count(cpu) for cpu in (0, 1)}


def test_a_reactor_outside_of_the_mask_does_nothing(make_target: MakeTarget) -> None:
    target = make_target("--cpumask", "[0,1]").start()
    socket = masked(target, "a", "0x2")
    with neighbour(socket, "run", "--queues", "4"):
        wait_for_requests(target, "a", 0)
        before = busy_ns(target)
        wait_for_requests(target, "a", requests_of(target, "a") + 20_000)
        first, second = (now - then for now, then in zip(busy_ns(target), before, strict=True))
        assert first < second / 10


def test_top_shows_the_numa_node_of_each_reactor(
    make_target: MakeTarget, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = make_target("--cpumask", "[0,1]").start()
    assert [each["node"] for each in shown(target)] == [node_of(0), node_of(1)]

    # A host whose CPUs are of two nodes, the one of none.
    (tmp_path / "cpu0").mkdir()
    (tmp_path / "cpu1/node5").mkdir(parents=True)
    monkeypatch.setattr(sample, "topology", lambda cpus: topology(cpus, str(tmp_path)))
    assert [each["node"] for each in shown(target)] == [None, 5]
    title, *rows = (line.split() for line in top(target).splitlines()[:3])
    assert title[:4] == ["REACTOR", "CPU", "NODE", "BUSY"]
    assert [row[:3] for row in rows] == [["0", "0", "-"], ["1", "1", "5"]]


@pytest.mark.nightly
def test_two_vms_that_keep_one_reactor_busy_have_one_each_in_the_end(
    make_target: MakeTarget,
) -> None:
    target = make_target("--cpumask", "[0,1]").start()
    # Controllers begin on the reactors in turn: the second one, which does nothing, on the other.
    for name in ("a", "nothing", "b"):
        target.rpc("bdev_malloc_create", name=name, num_blocks=64 * 2048, block_size=512)
    sockets = {name: target.attach(name, name) for name in ("a", "nothing", "b")}
    with neighbour(sockets["a"], *READS) as one, neighbour(sockets["b"], *READS) as other:

        def one_each() -> bool:
            return sorted([*cpus(target, "a"), *cpus(target, "b")]) == [0, 1]

        until(one_each, "one of them has moved", deadline_s=120)
        for name in ("a", "b"):
            wait_for_requests(target, name, requests_of(target, name))
        assert (one.poll(), other.poll()) == (None, None), "a guest gave up"
        reactors = shown(target)
        assert [(each["cpu"], each["queues"]) for each in reactors] == [(0, 1), (1, 1)]
        assert all(each["busy"] > 0 for each in reactors), reactors
    assert "goes on on the reactor of CPU 1" in target.words()
