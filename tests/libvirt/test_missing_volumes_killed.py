"""A target that is killed while a start makes a domain's volume, at each step of that.

A file of its own, because all of it is with one gateway that makes volumes, and a relay before the
target: tests that share neither may come before or after.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.libvirt.test_missing_volumes import (
    WAYS,
    assert_unused,
    configured,
    define,
    known,
    volume,
)
from tests.support.host import Host
from tests.support.night import by_day
from tests.support.relay import Relay, Step

pytestmark = [pytest.mark.root, pytest.mark.vm]

CALLS = (
    "bdev_lvol_create",
    "vhost_create_scsi_controller",
    "virtlun_controller_set_owner",
    "vhost_scsi_controller_add_target",
)
"""What a start changes at the target, in this order."""

STEPS = (
    *(Step("before", call) for call in CALLS),
    *(Step("unanswered", call) for call in CALLS),
    "QEMU is there",
    "started",
)


@pytest.fixture(scope="module")
def relay(host: Host) -> Iterator[Relay]:
    """What the gateway and the hook take for the target's socket."""
    configured(host, "create_missing_mib = 64")
    with host.relayed() as relay:
        yield relay
    configured(host, "")


@by_day("virsh-before bdev_lvol_create", "virsh_direct-before virtlun_controller_set_owner")
@pytest.mark.parametrize(
    ("way", "step"),
    [
        pytest.param(
            way,
            step,
            id=f"{way}-{step if isinstance(step, str) else ' '.join(step)}",
            # By day half of the steps once, the two ways in turn.
            marks=[pytest.mark.nightly] if (nth + 2 * of) % (2 * len(WAYS)) else [],
        )
        for of, way in enumerate(WAYS)
        for nth, step in enumerate(STEPS)
    ],
)
def test_a_target_killed_in_the_middle_of_a_start(
    host: Host, relay: Relay, way: str, step: Step | str
) -> None:
    """The volume then exists or not, and the next start finds or makes it; never a second one."""
    name = f"crash-{WAYS.index(way)}-{STEPS.index(step)}"
    uuid = define(host, name)
    if isinstance(step, Step):
        relay.end_at(step)
        getattr(host, way)("start", name, check=False)
        assert relay.hit()
    else:
        kill_at(host, way, name, step)
    host.virsh_direct("destroy", name, check=False)
    host.start_target()
    left = volume(host, name)
    assert (left is None) == (step == Step("before", "bdev_lvol_create"))
    recorded = known(host, name, uuid)
    if recorded is not None:
        assert left is not None, "what is recorded was durable before"
        assert left.uuid == recorded
    getattr(host, way)("start", name)
    after = volume(host, name)
    assert after is not None
    assert left is None or left.uuid == after.uuid
    assert known(host, name, uuid) == after.uuid
    assert [v.path for v in host.volumes.volumes()].count(after.path) == 1
    host.virsh_direct("destroy", name)
    host.virsh("undefine", name)
    assert_unused(host)
    host.volumes.delete(after.uuid)


def kill_at(host: Host, way: str, name: str, step: str) -> None:
    """Starts a domain and kills the target when QEMU has begun, or when all is done."""
    with ThreadPoolExecutor(1) as thread:
        starting = thread.submit(getattr(host, way), "start", name, check=step == "started")
        if step == "started":
            starting.result()
        else:
            pid_file = host.libvirtd.scratch / f"run-libvirt/qemu/{name}.pid"
            while not pid_file.exists():
                # It may have been made since, and the start be over.
                assert not starting.done() or pid_file.exists(), starting.result()
                time.sleep(0.001)
        host.kill_target()
        starting.result()
