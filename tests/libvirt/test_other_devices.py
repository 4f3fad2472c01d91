"""The controller beside other devices of the domain, cold and hot-plugged, in a real libvirtd."""

from __future__ import annotations

import pytest

from tests.support.host import Host

pytestmark = [pytest.mark.root, pytest.mark.vm]

NAME = "many"
PORTS = (
    "<controller type='pci' model='pcie-root'/>"
    + "<controller type='pci' model='pcie-root-port'/>" * 10
)
SCSI = "<controller type='scsi' model='virtio-scsi'/>"


def file_disk(host: Host, dev: str, bus: str) -> str:
    image = host.scratch / f"{dev}.img"
    image.write_bytes(b"\0" * (1 << 20))
    image.chmod(0o666)
    return (
        f"<disk type='file' device='disk'><driver name='qemu' type='raw'/>"
        f"<source file='{image}'/><target dev='{dev}' bus='{bus}'/></disk>"
    )


@pytest.mark.nightly
def test_libvirts_own_disks_come_and_go_beside_ours(host: Host) -> None:
    cold = PORTS + SCSI + "".join(file_disk(host, dev, "virtio") for dev in ("vda", "vdb"))
    host.define(NAME, devices=cold)
    host.virsh("start", NAME)
    agent = host.agent(NAME)
    host.volumes.create("lvs0/many", 32 << 20)
    host.virsh("attach-disk", NAME, "/dev/virtlun/lvs0/many", "sdb", "--live", "--config")
    for dev, bus in (("vdc", "virtio"), ("vdd", "virtio"), ("sdc", "scsi")):
        path = host.scratch / f"{dev}.xml"
        path.write_text(file_disk(host, dev, bus))
        host.virsh("attach-device", NAME, str(path), "--live", "--config")
    agent.wait_for(
        "[ $(ls /sys/block | grep -c '^vd') = 4 ] && [ $(ls /sys/block | grep -c sd) = 2 ]"
    )
    listed = host.virsh("domblklist", NAME).split()[::2]
    assert sorted(listed) == ["sdb", "sdc", "vda", "vdb", "vdc", "vdd"]
    host.virsh("detach-disk", NAME, "vdc", "--live", "--config")
    agent.wait_for("[ $(ls /sys/block | grep -c '^vd') = 3 ]")
    agent.run("dd if=$(ls -d /dev/sd? | head -n 1) of=/dev/null bs=64k count=4")
    agent.close()
    host.virsh("destroy", NAME)
    host.virsh("start", NAME)
    agent = host.agent(NAME)
    agent.wait_for(
        "[ $(ls /sys/block | grep -c '^vd') = 3 ] && [ $(ls /sys/block | grep -c sd) = 2 ]"
    )
    agent.close()
    host.virsh("destroy", NAME)
