"""A guest with a controller and without a disk of ours migrates from libvirtd to libvirtd.

No gateway has a part in it. Where the other host has the hook, with a target or without, the guest
goes on there; a host that has nothing of ours cannot have it, and it goes on where it is. Both
hosts have one `vhost_dir`, as hosts do that are set up alike, and each sees its own there.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pydataplane.emulator import reconnects
from tests.support.host import Host
from tests.support.libvirtd import NEWER_QEMU, virsh
from tests.support.ports import free_port
from tests.support.wait import until

pytestmark = [pytest.mark.root, pytest.mark.vm, pytest.mark.nightly]

MIB = 1 << 20
NAME = "roaming"
OLDER_QEMU = Path("/usr/bin/qemu-system-x86_64")
NO_CONTROLLER = "Failed to connect to"
SERVED, STAND_IN = "value='vhost-user-scsi-pci'", "value='virtio-scsi-pci'"


@dataclass
class Two:
    """The host with the guest, and the one that it is to go to."""

    source: Host
    there: Host

    def command(self, to: Host) -> list[str]:
        """The words of virsh for a live migration to a host's libvirtd."""
        uri = f"tcp://127.0.0.1:{free_port()}"
        return ["migrate", NAME, to.libvirtd.uri(), "--live", "--migrateuri", uri]

    def start(self, emulator: Path) -> None:
        """Starts the guest with a controller; it tells that it runs. Then no gateway does."""
        self.source.define(NAME, emulator=emulator, memory_mib=128)
        self.source.virsh("start", NAME)
        agent = self.source.agent(NAME)
        agent.run(
            "(while true; do echo beat $(ls /sys/class/scsi_host) >/dev/ttyS0; sleep 0.2; done)"
            " >/dev/null 2>&1 &"
        )
        agent.close()
        assert sessions(self.source) == 1
        for host in (self.source, self.there):
            host.stop_gateway()

    def runs(self, host: Host, device: str) -> None:
        """Checks that the guest runs on a host with that device, which it knows as before."""
        assert host.virsh_direct("domstate", NAME) == "running"
        other = STAND_IN if device == SERVED else SERVED
        xml = host.virsh_direct("dumpxml", NAME)
        assert device in xml and other not in xml
        assert sessions(host) == (1 if device == SERVED else 0)
        log = self.source.scratch / f"{NAME}-console.log"
        seen = log.stat().st_size
        # The first may be of before.
        until(
            lambda: log.read_bytes()[seen:].decode(errors="replace").count("beat host0") > 1,
            lambda: f"the guest's words:\n{self.source.console(NAME)[-1000:]}",
        )


def sessions(host: Host) -> int:
    """The controllers of a host's target, each with one session; 0: no target runs."""
    if not host.paths.rpc_socket.exists():
        return 0
    found = host.client.call("vhost_get_controllers")
    assert all(len(item["sessions"]) == 1 for item in found), found
    return len(found)


@pytest.fixture
def two() -> Iterator[Two]:
    """Both hosts; the second one's libvirtd and QEMUs see its controllers where the first's are."""
    ids = [f"c0ffee00-0000-4000-8000-00000000000{n}" for n in (7, 8)]
    with Host(keep=True, host_uuid=ids[0]) as source, Host(keep=True, host_uuid=ids[1]) as there:
        here, theirs = source.paths.vhost_dir, there.paths.vhost_dir
        subprocess.run(
            there.libvirtd.command("mount", "--bind", str(theirs), str(here)), check=True
        )
        there.config.write_text(there.config.read_text().replace(str(theirs), str(here)))
        yield Two(source, there)


@pytest.mark.parametrize("target", [True, False], ids=["target", "no target"])
def test_the_hook_alone_takes_it_with_a_target_or_without(two: Two, target: bool) -> None:
    two.start(NEWER_QEMU)
    source, there = two.source, two.there
    if not target:
        there.stop_target()
    source.virsh_direct(*two.command(there), deadline_s=240)
    two.runs(there, SERVED if target else STAND_IN)
    until(lambda: sessions(source) == 0, "no controller where the guest was")
    # Back, where a target answers.
    virsh(there.libvirtd.uri(), *two.command(source), deadline_s=240)
    two.runs(source, SERVED)
    assert sessions(there) == 0
    attach(source)


@pytest.mark.parametrize("emulator", [OLDER_QEMU, NEWER_QEMU], ids=["older", "newer"])
def test_a_host_without_anything_of_ours_cannot_have_it(two: Two, emulator: Path) -> None:
    """Its QEMU fails, or waits for the controller until somebody ends it; the guest goes on."""
    two.start(emulator)
    source, there = two.source, two.there
    there.stop_target()
    (there.libvirtd.hooks / "qemu.d/virtlun").unlink()
    there.libvirtd.restart()
    process = subprocess.Popen(
        ["virsh", "-q", "-c", source.libvirtd.uri(), *two.command(there)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if emulator == NEWER_QEMU or reconnects(str(emulator), None):
        until(lambda: NO_CONTROLLER in there.libvirtd.qemu_log(NAME), "QEMU to look for it")
        two.runs(source, SERVED)
        assert process.poll() is None, process.communicate()[0]
        there.virsh_direct("destroy", NAME, check=False)  # it fails when QEMU is gone at once
    said = process.communicate(timeout=120)[0]
    assert process.returncode != 0
    assert f"{NO_CONTROLLER} '{source.paths.vhost_dir}/" in said
    assert there.virsh_direct("list", "--all", "--name") == ""
    two.runs(source, SERVED)
    attach(source)


def attach(host: Host) -> None:
    """Attaches a disk, which the guest sees; so its controller works."""
    host.start_gateway()
    host.volumes.create("lvs0/more", 8 * MIB)
    host.virsh("attach-disk", NAME, "/dev/virtlun/lvs0/more", "sdb", "--live")
    until(lambda: re.search("Attached SCSI disk", host.console(NAME)), "the guest sees the disk")
