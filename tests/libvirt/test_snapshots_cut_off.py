"""Gateway killed while a snapshot is taken, reverted to or deleted: nothing stays half done.

Killed at each step that the target sees. Afterwards the guest runs, what libvirtd lists has its
lvol snapshots, and there are no others; the same call again does the rest.
"""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator

import pytest

from tests.support.host import Host
from tests.support.night import by_day
from tests.support.relay import Relay, Step
from tests.support.wait import until

pytestmark = [pytest.mark.root, pytest.mark.vm]

NAME = "cut"
CALLS = {
    "snapshot-create-as": "virtlun_lvol_snapshot_together",
    "snapshot-revert": "virtlun_lvol_roll_back_together",
    "snapshot-delete": "bdev_lvol_delete",
}
AT_NIGHT = (
    ("snapshot-create-as", "answered"),
    ("snapshot-revert", "before"),
    ("snapshot-revert", "answered"),
    ("snapshot-delete", "before"),
)
STEPS = [
    pytest.param(
        command,
        Step(when, call),
        id=f"{command} {when}",
        marks=[pytest.mark.nightly] if (command, when) in AT_NIGHT else [],
    )
    for command, call in CALLS.items()
    for when in ("before", "unanswered", "answered")
]


@pytest.fixture(scope="module")
def relay(host: Host) -> Iterator[Relay]:
    """Where the gateway's calls of the target are seen; a running domain with two volumes."""
    host.start_without_guest(NAME, "a", "b")
    with host.relayed() as relay:
        yield relay
    host.virsh("destroy", NAME)


def snapshots_at_rest(host: Host) -> set[str]:
    """Returns the snapshots that libvirtd lists, once nothing is under way."""
    until(lambda: not list((host.scratch / "notes").glob("*")), "the journal is empty")
    names = set(host.virsh("snapshot-list", NAME, "--name").split())
    found = {v.name for v in host.volumes.volumes("lvs0") if v.snapshot}
    assert found == {f"{volume}@{name}" for volume in "ab" for name in names}
    for name in names:
        shown = host.virsh("snapshot-dumpxml", NAME, name)
        assert re.findall(r"<disk name='(\w+)' snapshot='internal'", shown) == ["sda", "sdb"]
    return names


@by_day("disks-snapshot-create-as unanswered", "disks-snapshot-revert unanswered")
@pytest.mark.parametrize(("command", "step"), STEPS)
@pytest.mark.parametrize(
    "memory",
    [
        pytest.param(False, id="disks"),
        pytest.param(True, id="memory", marks=pytest.mark.nightly),
    ],
)
def test_killed_in_mid_change(
    host: Host, relay: Relay, memory: bool, command: str, step: Step
) -> None:
    take = ("snapshot-create-as", NAME, "s", *(() if memory else ("--disk-only",)))
    words = {
        "snapshot-create-as": take,
        "snapshot-revert": ("snapshot-revert", NAME, "s", "--running"),
        "snapshot-delete": ("snapshot-delete", NAME, "s"),
    }[command]
    if command != "snapshot-create-as":
        host.virsh(*take)
    relay.end_at(step, lambda: host.stop_gateway(signal.SIGKILL))
    subprocess.run(
        ["virsh", "-c", host.uri, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=90,
        check=False,
    )
    assert relay.hit()
    host.start_gateway()
    if command == "snapshot-delete":
        until(lambda: host.has_gateway, "the gateway is back")
        if "s" in host.virsh("snapshot-list", NAME, "--name").split():
            host.virsh(*words)  # of which what is left is done
        assert snapshots_at_rest(host) == set()
    elif command == "snapshot-create-as":
        if "s" not in snapshots_at_rest(host):
            host.virsh(*words)
        assert snapshots_at_rest(host) == {"s"}
    else:
        assert snapshots_at_rest(host) == {"s"}
        assert host.virsh("snapshot-current", NAME, "--name") == "s"
        host.virsh(*words)
    until(lambda: host.virsh("domstate", NAME) == "running", "it runs")
    if snapshots_at_rest(host):
        host.virsh("snapshot-delete", NAME, "s")
    assert snapshots_at_rest(host) == set()
    assert not list((host.scratch / "memory").glob("*"))
