"""Request queues move from a reactor that has more to do than it can to one that has time."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from plugin.cli import main
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
        words = ["--socket", str(target.rpc_socket), "top", "--count", "1", "--json"]
        shown = json.loads(CliRunner().invoke(main, words).stdout)["reactors"]
        assert [(each["cpu"], each["queues"]) for each in shown] == [(0, 1), (1, 1)]
        assert all(each["busy"] > 0 for each in shown), shown
    assert "goes on on the reactor of CPU 1" in target.words()
