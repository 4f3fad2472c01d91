"""`virsh domfsinfo` and `guestinfo`, by QEMU's agent, of file systems on disks of ours."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.guest.agent_image import build_with_agent
from tests.support.agent import Agent
from tests.support.domain import publish
from tests.support.guest_agent import CHANNEL, start_agent
from tests.support.host import Host

pytestmark = [pytest.mark.root, pytest.mark.vm]

NAME = "guestinfo"
DISK = (
    "<disk type='file'><source file='/dev/virtlun/lvs0/{0}'/><target dev='{0}' bus='scsi'/></disk>"
)


@pytest.fixture(scope="module")
def guest(host: Host) -> Iterator[Agent]:
    """A guest with a file system on each of two disks, the second one attached while it runs."""
    host.image = publish(build_with_agent(), host.scratch)
    for name in ("sdx", "sdy"):
        host.volumes.create(f"lvs0/{name}", 16 << 20)
    host.define(NAME, devices=DISK.format("sdx") + CHANNEL)
    host.virsh("start", NAME)
    agent = host.agent(NAME)
    agent.wait_for("[ -b /dev/sda ]")
    host.virsh("attach-disk", NAME, "/dev/virtlun/lvs0/sdy", "sdy", "--live")
    agent.wait_for("[ -b /dev/sdb ]")
    for name in ("sda", "sdb"):
        agent.run(
            f"mkfs.ext4 -q /dev/{name} && mkdir -p /run/{name} && mount /dev/{name} /run/{name}"
        )
    start_agent(host, NAME, agent)
    yield agent
    agent.close()
    host.virsh("destroy", NAME)


UDEV = r"""
mkdir -p /run/udev/data
for disk in sda sdb; do
    naa=$(sg_inq --export --page=di /dev/$disk | sed -n 's/^SCSI_IDENT_LUN_NAA[A-Z_]*=//p')
    printf 'I:1\nE:ID_SERIAL=3%s\n' "$naa" >/run/udev/data/b$(cat /sys/block/$disk/dev)
done
"""
"""What udev notes of disks: this guest has none. `scsi_id` makes the serial so, of VPD page 83h."""


def shown(host: Host) -> list[list[str]]:
    """Returns what virsh says of each file system of ours, its disk last."""
    lines = [line.split() for line in host.virsh("domfsinfo", NAME).splitlines()]
    return sorted(line for line in lines if line[0].startswith("/run"))


@pytest.mark.nightly
def test_what_tells_disks_not_apart_names_none(host: Host, guest: Agent) -> None:
    """QEMU's agent says target 0 of each."""
    assert shown(host) == [["/run/sda", "sda", "ext4"], ["/run/sdb", "sdb", "ext4"]]
    said = host.virsh("guestinfo", NAME, "--filesystem", "--disk")
    assert "fs.0.name" in said and "alias" not in said


def test_file_systems_are_on_the_clients_disks(host: Host, guest: Agent) -> None:
    guest.run(UDEV)
    carried = host.virsh_direct("domfsinfo", NAME)
    assert "sdx" not in carried and "sdy" not in carried, "libvirtd names the carrier"
    assert shown(host) == [
        ["/run/sda", "sda", "ext4", "sdx"],
        ["/run/sdb", "sdb", "ext4", "sdy"],
    ]


@pytest.mark.nightly
def test_guestinfo_names_the_clients_disks(host: Host, guest: Agent) -> None:
    guest.run(UDEV)
    said = host.virsh("guestinfo", NAME, "--filesystem", "--disk")
    values = dict(line.split(":", 1) for line in said.splitlines())
    found = {key.strip(): value.strip() for key, value in values.items()}
    by_name = {found[f"fs.{n}.name"]: found[f"fs.{n}.disk.0.alias"] for n in range(2)}
    assert by_name == {"sda": "sdx", "sdb": "sdy"}
    disks = {found[f"disk.{n}.name"]: found[f"disk.{n}.alias"] for n in range(2)}
    assert disks == {"/dev/sda": "sdx", "/dev/sdb": "sdy"}


@pytest.mark.nightly
def test_passwords_and_keys_of_users_are_the_agents_matter(host: Host, guest: Agent) -> None:
    guest.run("mkdir -p /etc /root && printf 'root:x:0:0::/root:/bin/sh\\n' > /etc/passwd")
    # Of this guest, which has nobody's password; it notes what QEMU's agent gives it.
    guest.run(
        "place=${PATH%%:*}; mkdir -p $place && printf '#!/bin/sh\\ncat > /tmp/told\\n' >"
        " $place/chpasswd && chmod +x $place/chpasswd"
    )
    (keys := host.scratch / "keys").write_text("ssh-ed25519 AAAAC3Nza somebody@somewhere\n")
    host.virsh("set-user-sshkeys", NAME, "root", "--file", str(keys))
    assert guest.run("cat /root/.ssh/authorized_keys") == keys.read_text()
    assert host.virsh("get-user-sshkeys", NAME, "root").strip() == keys.read_text().strip()
    host.virsh("set-user-sshkeys", NAME, "root", "--file", str(keys), "--remove")
    assert host.virsh("get-user-sshkeys", NAME, "root").strip() == ""
    host.virsh("set-user-password", NAME, "root", "open-sesame")
    assert guest.run("cat /tmp/told") == "root:open-sesame\n"
    assert shown(host), "the agent answers us, too"
