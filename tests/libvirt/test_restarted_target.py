"""What a libvirt VM sees of a restarted target where nothing is configured. Real QEMUs."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.agent import Agent
from tests.support.host import Host
from tests.support.libvirtd import NEWER_QEMU
from tests.support.verified_io import VerifiedIo
from tests.support.wait import until

pytestmark = [pytest.mark.root, pytest.mark.vm]

DEADLINE_S = 120.0
SIZE_MIB = 16
VCPUS, DEPTH = 2, 4
STOCK = Path("/usr/bin/qemu-system-x86_64")
AGAIN = "<reconnect enabled='yes' timeout='1'/>"


@pytest.fixture
def vm(host: Host) -> Iterator[Callable[..., str]]:
    """Defines a domain whose disk is a new volume, which reads as zeros; returns its name."""
    made: list[str] = []

    def make(name: str, **options: Any) -> str:
        made.append(name)
        host.volumes.create(f"lvs0/{name}", SIZE_MIB << 20, thin=True)
        disk = (
            "<disk type='file' device='disk'>"
            f"<source file='/dev/virtlun/lvs0/{name}'/><target dev='sda' bus='scsi'/></disk>"
        )
        host.define(name, devices=disk, vcpus=VCPUS, **options)
        return name

    yield make
    for name in made:
        host.virsh("destroy", name, check=False)
        host.virsh("undefine", name, check=False)
        host.volumes.delete(f"lvs0/{name}")


def inside(host: Host, name: str, *words: str) -> str:
    """Returns libvirtd's own XML of a domain."""
    return host.virsh_direct("dumpxml", name, *words)


def doctor(host: Host) -> list[dict[str, str]]:
    """Returns what `virtlun doctor` finds of the VMs that run."""
    words = [host.program("virtlun"), "--config", str(host.config), "doctor", "--json"]
    done = subprocess.run(
        host.libvirtd.command(*words), capture_output=True, text=True, timeout=90, check=False
    )
    return [item for item in json.loads(done.stdout) if item["what"] == "running VMs"]


def restarts(host: Host, io: VerifiedIo, guest: Agent, name: str) -> None:
    """Ends the target under I/O in both ways; the guest must notice a pause and nothing else."""
    for end in (host.kill_target, host.stop_target, host.kill_target):
        before = io.status().requests
        end()
        host.start_target()
        io.goes_on(before, DEADLINE_S)
    io.finish()
    assert "I/O error" not in guest.run("dmesg")
    assert host.virsh("domstate", name).strip() == "running"


@pytest.mark.nightly
def test_a_guest_goes_on_when_the_target_is_killed_or_stopped(
    host: Host, vm: Callable[..., str]
) -> None:
    seed = int(os.environ.get("VIRTLUN_SEED") or secrets.randbits(32))
    print(f"VIRTLUN_SEED={seed}")
    assert "reconnect_s" not in host.config.read_text(), "this is about the default"
    name = vm("newer", emulator=NEWER_QEMU)
    host.virsh("start", name)
    assert AGAIN in inside(host, name)
    assert "reconnect" not in host.virsh("dumpxml", name), "clients do not see the controller"
    guest = host.agent(name)
    try:
        guest.wait_for("[ -b /dev/sda ]", DEADLINE_S)
        io = VerifiedIo(guest, "sda", seed=seed, threads=VCPUS, depth=DEPTH)
        restarts(host, io, guest, name)
    finally:
        guest.close()


@pytest.mark.nightly
def test_an_older_qemu_starts_because_it_is_not_told_to_connect_again(
    host: Host, vm: Callable[..., str]
) -> None:
    """Debian 12's own refuses the device that is told to."""
    name = vm("older", emulator=STOCK)
    assert "<reconnect" not in inside(host, name)
    host.virsh("start", name)
    (advice,) = [item["advice"] for item in doctor(host) if item["found"].startswith(name)]
    assert advice.startswith("start the target with --hold-sessions")
    assert "its QEMU cannot: that takes 8.2 or newer in <emulator>" in advice
    host.virsh("destroy", name)


@pytest.mark.nightly
def test_a_start_brings_a_definition_of_old_up_to_date(host: Host, vm: Callable[..., str]) -> None:
    """It was made with another QEMU in its place, or before the choice was made by itself."""
    name = vm("of-old", emulator=NEWER_QEMU)
    again = re.compile(r"\s*<reconnect [^>]*/>\s*")
    path = host.scratch / "of-old.xml"
    path.write_text(again.sub("", inside(host, name, "--inactive")))
    host.virsh_direct("define", str(path))
    assert AGAIN not in inside(host, name, "--inactive")
    host.virsh("start", name)
    assert AGAIN in inside(host, name) and AGAIN in inside(host, name, "--inactive")
    host.virsh("destroy", name)
    # What libvirtd itself starts is as it was defined; the gateway has nothing to do with it.
    host.virsh_direct("define", str(path))
    host.virsh_direct("start", name)
    assert AGAIN not in inside(host, name)
    lost = "does not connect again: it loses its disks if the target restarts"
    (advice,) = [item["advice"] for item in doctor(host) if item["found"] == f"{name} {lost}"]
    assert advice == "stop it and start it once through the gateway, or migrate it"
    host.virsh("destroy", name)
    host.virsh("start", name)
    assert not [item for item in doctor(host) if item["found"].startswith(name)]


@pytest.mark.nightly
def test_a_saved_guest_is_restored_as_its_qemu_can_connect_now(
    host: Host, vm: Callable[..., str]
) -> None:
    """By the hook, whoever restores it."""
    name = vm("saved", emulator=NEWER_QEMU)
    path = host.scratch / "saved.xml"
    path.write_text(re.sub(r"\s*<reconnect [^>]*/>\s*", "", inside(host, name, "--inactive")))
    host.virsh_direct("define", str(path))
    host.virsh_direct("start", name)
    guest = host.agent(name)
    guest.wait_for("[ -b /dev/sda ]", DEADLINE_S)
    guest.close()
    image = host.scratch / "saved.img"
    host.virsh_direct("save", name, str(image), deadline_s=240)
    host.virsh_direct("restore", str(image), deadline_s=240)
    assert AGAIN in inside(host, name)
    until(lambda: host.virsh("domstate", name).strip() == "running", "it runs", DEADLINE_S)
    guest = host.agent(name)
    try:
        host.kill_target()
        host.start_target()
        read = "dd if=/dev/sda of=/dev/null bs=1M count=4 iflag=direct"
        guest.run(read, DEADLINE_S)
        assert "I/O error" not in guest.run("dmesg")
    finally:
        guest.close()
