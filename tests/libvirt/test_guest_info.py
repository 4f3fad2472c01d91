"""`virsh domfsinfo` and `guestinfo` of a guest whose file systems are on disks of ours.

The guest's agent is a script in the guest: what it tells of a disk's place it reads in the kernel's
own /sys, as QEMU's agent does.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.agent import Agent
from tests.support.host import Host
from tests.support.wait import until

pytestmark = [pytest.mark.root, pytest.mark.vm]

NAME = "guestinfo"
CHANNEL = "<channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>"
DISK = (
    "<disk type='file'><source file='/dev/virtlun/lvs0/{0}'/><target dev='{0}' bus='scsi'/></disk>"
)
SCRIPT = r"""
address() {
    path=$(readlink -f "/sys/block/$1/device")
    pci=$(echo "$path" | grep -o '[0-9a-f]*:[0-9a-f]*:[0-9a-f]*\.[0-9a-f]' | tail -n 1)
    pci=$(echo "$pci" | tr ':.' '  ')
    set -- $pci $(basename "$path" | tr ':' ' ')
    printf '{"pci-controller":{"domain":%d,"bus":%d,"slot":%d,"function":%d},"bus-type":"scsi",' \
        "0x$1" "0x$2" "0x$3" "0x$4"
    printf '"bus":%d,"target":%d,"unit":%d}' "$6" "$7" "$8"
}
filesystem() {
    printf '{"name":"%s","mountpoint":"/run/%s","type":"ext4",' "$1" "$1"
    printf '"disk":[%s]}' "$(address "$1")"
}
disk() {
    printf '{"name":"/dev/%s","partition":false,"address":%s}' "$1" "$(address "$1")"
}
answer() { printf '{"return":%s}\n' "$1" >&4; }
exec 4<>"/dev/$1"
while :; do
    read -r line <&4 || { sleep 0.1; continue; } # nobody has the host's end open
    case $line in
        *guest-sync*) answer "$(echo "$line" | grep -o '"id": *[0-9]*' | grep -o '[0-9]*$')" ;;
        *guest-get-fsinfo*) answer "[$(filesystem sdb),$(filesystem sda)]" ;;
        *guest-get-disks*) answer "[$(disk sdb),$(disk sda)]" ;;
        *) printf '{"error":{"class":"CommandNotFound","desc":"unknown"}}\n' >&4 ;;
    esac
done
"""


@pytest.fixture(scope="module")
def guest(host: Host) -> Iterator[Agent]:
    """A guest with a file system on each of two disks, the second one attached while it runs."""
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
    agent.run(f"cat >/tmp/agent <<'EOF'\n{SCRIPT}\nEOF")
    port = agent.wait_for("basename $(dirname $(grep -l org.qemu /sys/class/virtio-ports/*/name))")
    agent.run(f"setsid sh /tmp/agent {port.strip()} >/tmp/agent.log 2>&1 </dev/null &")
    until(lambda: "ext4" in host.virsh_direct("domfsinfo", NAME, check=False), "the agent answers")
    yield agent
    agent.close()
    host.virsh("destroy", NAME)


def test_file_systems_are_on_the_clients_disks(host: Host, guest: Agent) -> None:
    carried = host.virsh_direct("domfsinfo", NAME)
    assert "sdx" not in carried and "sdy" not in carried, "libvirtd names the carrier"
    shown = [line.split() for line in host.virsh("domfsinfo", NAME).splitlines()]
    assert sorted(line for line in shown if line[0].startswith("/run")) == [
        ["/run/sda", "sda", "ext4", "sdx"],
        ["/run/sdb", "sdb", "ext4", "sdy"],
    ]


def test_guestinfo_names_the_clients_disks(host: Host, guest: Agent) -> None:
    said = host.virsh("guestinfo", NAME, "--filesystem", "--disk")
    values = dict(line.split(":", 1) for line in said.splitlines())
    found = {key.strip(): value.strip() for key, value in values.items()}
    by_name = {found[f"fs.{n}.name"]: found[f"fs.{n}.disk.0.alias"] for n in range(2)}
    assert by_name == {"sda": "sdx", "sdb": "sdy"}
    disks = {found[f"disk.{n}.name"]: found[f"disk.{n}.alias"] for n in range(2)}
    assert disks == {"/dev/sda": "sdx", "/dev/sdb": "sdy"}
