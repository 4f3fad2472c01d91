"""Gateway or libvirtd killed while disks come and go: afterwards all sides agree.

Killed at each step that the target sees; tests/unit/gateway/test_recovery.py stops at all others.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest

from tests.support.agent import Agent
from tests.support.host import Host
from tests.support.night import by_day
from tests.support.relay import Relay, Step
from tests.support.wait import until

pytestmark = [pytest.mark.root, pytest.mark.vm]

NAME = "cut"
CALLS = {
    "attach-disk": "vhost_scsi_controller_add_target",
    "detach-disk": "vhost_scsi_controller_remove_target",
}
"""What changes the target in each."""
STEPS = [
    (words, Step(when, call))
    for words, call in CALLS.items()
    for when in ("before", "unanswered", "answered")
]


@pytest.fixture(scope="module")
def guest(host: Host) -> Agent:
    """A running guest that was defined through the gateway; a volume."""
    host.volumes.create("lvs0/cut", 8 << 20)
    host.volumes.create("lvs0/stays", 8 << 20)
    text = host.config.read_text()
    host.config.write_text(text.replace("[gateway]\n", "[gateway]\nreconcile_s = 1\n"))
    host.stop_gateway()
    host.start_gateway()
    host.define(NAME)
    host.virsh("start", NAME)
    host.virsh("attach-disk", NAME, "/dev/virtlun/lvs0/stays", "sda", "--live", "--config")
    return host.agent(NAME)


def sides(host: Host) -> tuple[set[str], set[str], int]:
    """Returns the disks of the running and the persistent side, and how many LUNs there are."""
    live, config = (
        set(host.virsh("domblklist", NAME, *words).split()[::2]) for words in ((), ("--inactive",))
    )
    (controller,) = host.client.call("vhost_get_controllers")
    return live, config, len(controller["backend_specific"]["scsi"])


def agreed(host: Host, guest: Agent) -> set[str]:
    """Returns the disks once all sides agree."""

    def there() -> set[str] | None:
        live, config, luns = sides(host)
        same = live == config and len(live) == luns
        return live if same and not list((host.scratch / "notes").glob("*")) else None

    live = until(there, lambda: sides(host), every_s=0.1)
    assert live and "sda" in live
    guest.wait_for(f"[ $(ls /sys/block | grep -c '^sd') = {len(live)} ]")
    return live


@pytest.fixture(scope="module")
def relay(host: Host, guest: Agent) -> Iterator[Relay]:
    """Where the gateway's calls of the target are seen."""
    with host.relayed() as relay:
        yield relay


def kill_gateway(host: Host) -> None:
    host.stop_gateway(signal.SIGKILL)


def kill_libvirtd(host: Host) -> None:
    host.libvirtd.kill(signal.SIGKILL)


RESTARTS: dict[Callable[[Host], None], Callable[[Host], object]] = {
    kill_gateway: Host.start_gateway,
    kill_libvirtd: lambda host: host.libvirtd.start(),
}


@by_day(
    "a-before-kill_libvirtd",
    "a-unanswered-kill_gateway",
    "d-answered-kill_libvirtd",
    "d-unanswered-kill_gateway",
)
@pytest.mark.parametrize("kill", RESTARTS, ids=lambda item: item.__name__)
@pytest.mark.parametrize(("command", "step"), STEPS, ids=lambda item: str(item[0]))
def test_killed_in_mid_change(
    host: Host,
    guest: Agent,
    relay: Relay,
    kill: Callable[[Host], None],
    command: str,
    step: Step,
) -> None:
    both_sides = ("--live", "--config")
    attach = ("attach-disk", NAME, "/dev/virtlun/lvs0/cut", "sdb", *both_sides)
    detach = ("detach-disk", NAME, "sdb", *both_sides)
    if command == "detach-disk":
        host.virsh(*attach)
    relay.end_at(step, lambda: kill(host))
    client = subprocess.Popen(
        ["virsh", "-c", host.uri, *(attach if command == "attach-disk" else detach)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    client.wait(90)
    assert relay.hit()
    RESTARTS[kill](host)
    if "sdb" in agreed(host, guest):
        host.virsh(*detach)
    assert agreed(host, guest) == {"sda"}


def test_the_domains_end_without_anybody_elses_help(host: Host, guest: Agent) -> None:
    """Without the hook, and with libvirtd asked directly: the gateway sees it by the event.

    Its next full round would see it as well, and is a day away.
    """
    text = host.config.read_text()
    host.config.write_text(text.replace("reconcile_s = 1\n", "reconcile_s = 86400\n"))
    host.stop_gateway()
    host.start_gateway()
    (host.libvirtd.hooks / "qemu.d/virtlun").unlink()
    host.define("idle")
    stray = f"vm-{'0' * 8}-0000-4000-8000-{'1' * 12}"
    for ctrlr in ("pod-not-ours", stray):
        host.client.call("vhost_create_scsi_controller", ctrlr=ctrlr)
    idle = f"vm-{host.virsh('domuuid', 'idle')}"
    for _ in range(2):  # so many rounds has the controller of a domain that nobody knows
        host.client.call("vhost_create_scsi_controller", ctrlr=idle)
        host.libvirtd.restart()
        # The new connection begins with a round; events are asked for before it.
        until(lambda: idle not in controllers(host), "the gateway's connection is back")
    assert host.virsh_direct("domstate", NAME) == "running"
    until(lambda: stray not in controllers(host), lambda: controllers(host))
    assert len(controllers(host)) == 2
    guest.close()
    host.virsh_direct("destroy", NAME)
    until(lambda: controllers(host) == ["pod-not-ours"], lambda: controllers(host))


def controllers(host: Host) -> list[str]:
    """Returns the names of the target's controllers."""
    return [item["ctrlr"] for item in host.client.call("vhost_get_controllers")]
