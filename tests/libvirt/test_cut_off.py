"""Gateway, libvirtd and target killed while disks come and go: afterwards all sides agree.

tests/unit/gateway/test_recovery.py stops between any two steps; here chance does, with real ones.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from tests.support.agent import Agent
from tests.support.host import Host

pytestmark = [pytest.mark.root, pytest.mark.vm]

NAME = "cut"
DELAYS_MS = (15, 25, 35, 50)
SETTLED_S = 60.0


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


def settled(host: Host, guest: Agent) -> set[str]:
    """Returns the disks once all sides agree."""
    end = time.monotonic() + SETTLED_S
    while True:
        live, config, luns = sides(host)
        if live == config and len(live) == luns and not list((host.scratch / "notes").glob("*")):
            break
        assert time.monotonic() < end, (live, config, luns)
        time.sleep(0.1)
    guest.wait_for(f"[ $(ls /sys/block | grep -c '^sd') = {luns} ]")
    assert "sda" in live
    return live


def kill_gateway(host: Host) -> None:
    host.stop_gateway(signal.SIGKILL)
    host.start_gateway()


def kill_libvirtd(host: Host) -> None:
    host.libvirtd.kill(signal.SIGKILL)
    host.libvirtd.start()


@pytest.mark.parametrize("kill", [kill_gateway, kill_libvirtd], ids=lambda item: item.__name__)
def test_killed_in_mid_change(host: Host, guest: Agent, kill: Callable[[Host], None]) -> None:
    source = "/dev/virtlun/lvs0/cut"
    for delay_ms in DELAYS_MS:
        for words in (
            ["attach-disk", NAME, source, "sdb", "--live", "--config"],
            ["detach-disk", NAME, "sdb", "--live", "--config"],
        ):
            client = subprocess.Popen(
                ["virsh", "-c", host.uri, *words],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            time.sleep(delay_ms / 1000)
            kill(host)
            client.wait(60)
            settled(host, guest)
        if "sdb" in settled(host, guest):
            host.virsh("detach-disk", NAME, "sdb", "--live", "--config")
    assert settled(host, guest) == {"sda"}


def test_the_domains_end_without_anybody_elses_help(host: Host, guest: Agent) -> None:
    """Without the hook, and with libvirtd asked directly: the gateway sees it by the event."""
    (host.libvirtd.hooks / "qemu.d/virtlun").unlink()
    host.libvirtd.restart()
    assert host.virsh_direct("domstate", NAME) == "running"
    time.sleep(2)  # the gateway's connection is back
    host.client.call("vhost_create_scsi_controller", ctrlr="pod-not-ours")
    host.client.call(
        "vhost_create_scsi_controller", ctrlr=f"vm-{'0' * 8}-0000-4000-8000-{'1' * 12}"
    )
    guest.close()
    host.virsh_direct("destroy", NAME)
    end = time.monotonic() + SETTLED_S
    while [item["ctrlr"] for item in host.client.call("vhost_get_controllers")] != ["pod-not-ours"]:
        assert time.monotonic() < end
        time.sleep(0.1)
