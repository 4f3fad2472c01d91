"""Each way to name a volume, with plain virsh: what the client gave comes back."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree import ElementTree

import pytest

from tests.support.agent import Agent
from tests.support.host import Host
from tests.support.libvirtd import VirshError
from tests.support.night import by_day
from tests.support.wait import until

pytestmark = [pytest.mark.root, pytest.mark.vm]

NAME = "ways"
MIB = 1 << 20
SIDES = ((), ("--inactive",))
PORT = (
    "<controller type='pci' index='0' model='pcie-root'/>"
    + "<controller type='pci' model='pcie-root-port'/>" * 6
)
"""Where QEMU plugs a virtio-blk disk: one more than its other devices take."""


@pytest.fixture(scope="module")
def guest(host: Host) -> Iterator[Agent]:
    """A running guest, and the volume lvs0/v."""
    host.volumes.create("lvs0/v", 8 * MIB)
    host.define(NAME, devices=PORT)
    host.virsh("start", NAME)
    agent = host.agent(NAME)
    yield agent
    agent.close()
    host.virsh("destroy", NAME)


def shown(host: Host, *words: str) -> ElementTree.Element:
    """Returns the only <disk> that a client sees."""
    xml = host.virsh("dumpxml", NAME, *words)
    (disk,) = ElementTree.fromstring(xml).findall("devices/disk")
    return disk


def has(element: ElementTree.Element, given: ElementTree.Element) -> bool:
    """Whether an element has all that `given` has, in any order."""
    return (
        given.tag == element.tag
        and given.attrib.items() <= element.attrib.items()
        and (given.text or "").strip() == (element.text or "").strip()
        and all(any(has(mine, its) for mine in element) for its in given)
    )


@by_day("/dev/virtlun/lvs0/v-", "lvs0/v --sourcetype network --source-protocol lvol-")
@pytest.mark.parametrize(
    ("words", "source"),
    [
        (["/dev/virtlun/lvs0/v"], {"file": "/dev/virtlun/lvs0/v"}),
        (["/dev/virtlun/lvs0/v", "--sourcetype", "block"], {"dev": "/dev/virtlun/lvs0/v"}),
        (
            ["lvs0/v", "--sourcetype", "network", "--source-protocol", "lvol"],
            {"protocol": "lvol", "name": "lvs0/v"},
        ),
        (
            ["virtlun/lvs0/v", "--sourcetype", "network", "--source-protocol", "rbd"],
            {"protocol": "rbd", "name": "virtlun/lvs0/v"},
        ),
    ],
    ids=lambda item: " ".join(item) if isinstance(item, list) else "",
)
def test_attach_disk(host: Host, guest: Agent, words: list[str], source: dict[str, str]) -> None:
    path, *more = words
    host.virsh("attach-disk", NAME, path, "sdb", *more, "--live", "--config")
    for side in SIDES:
        found = shown(host, *side).find("source")
        assert found is not None and source.items() <= found.attrib.items()
    guest.wait_for(f"[ $(cat /sys/block/sda/size) = {8 * MIB // 512} ]")
    host.virsh("detach-disk", NAME, "sdb", "--live", "--config")
    guest.wait_for("[ ! -e /sys/block/sda ]")


POOL = (
    "<disk type='volume' device='disk'><driver name='qemu' type='raw' cache='none'/>"
    "<source pool='virtlun-lvs0' volume='v'/><target dev='sdc' bus='scsi'/></disk>"
)
LUN = (
    "<disk type='block' device='lun'><source dev='/dev/virtlun/lvs0/v'/>"
    "<target dev='sdd' bus='scsi'/>"
    "<address type='drive' controller='3' bus='0' target='1' unit='7'/></disk>"
)
NOVA = (
    "<disk type='network' device='disk'><driver name='qemu' type='raw' cache='none'"
    " discard='unmap'/><source protocol='rbd' name='virtlun/lvs0/v'/>"
    "<target dev='vdb' bus='virtio'/><serial>0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9</serial>"
    "<alias name='ua-0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9'/></disk>"
)
SAFE = (
    "<disk type='file' device='disk'><source file='/dev/virtlun/lvs0/v'/>"
    "<target dev='sde' bus='scsi'/><readonly/><shareable/><serial>R3AD ONLY</serial></disk>"
)


@by_day("pool", "nova")
@pytest.mark.parametrize("xml", [POOL, LUN, NOVA, SAFE], ids=["pool", "lun", "nova", "readonly"])
def test_attach_device_gives_back_what_it_got(host: Host, guest: Agent, xml: str) -> None:
    path = host.scratch / "device.xml"
    path.write_text(xml)
    given = ElementTree.fromstring(xml)
    host.virsh("attach-device", NAME, str(path), "--live", "--config")
    for side in (*SIDES, ("--security-info",), ("--migratable",)):
        disk = shown(host, *side)
        assert has(disk, given), ElementTree.tostring(disk)
    is_blk = xml is NOVA
    dev = "vda" if is_blk else "sda"
    guest.wait_for(f"[ -b /dev/{dev} ]")
    serial = given.findtext("serial")
    if serial is not None and is_blk:
        assert guest.run("cat /sys/block/vda/serial") == serial[:20]
    elif serial is not None:
        guest.wait_for(f"grep -aq '{serial}' /sys/block/sda/device/vpd_pg80")
        guest.wait_for(f"grep -aq '{serial}' /sys/block/sda/device/vpd_pg83")
    read_only = given.find("readonly") is not None
    assert guest.run(f"cat /sys/block/{dev}/ro").strip() == str(int(read_only))
    write = guest.run(f"dd if=/dev/zero of=/dev/{dev} bs=64k count=1 oflag=direct", check=False)
    assert ("not permitted" in write or "Read-only" in write) == read_only
    # The way virsh and Nova detach: with the element that dumpxml shows.
    path.write_text(ElementTree.tostring(shown(host), encoding="unicode"))
    host.virsh("detach-device", NAME, str(path), "--live", "--config")
    guest.wait_for(f"[ ! -e /sys/block/{dev} ]")
    assert host.virsh("domblklist", NAME, "--inactive") == ""
    # libvirtd hears of it from QEMU, and may have waited for the guest in vain before.
    until(lambda: host.virsh("domblklist", NAME) == "", "nobody has it")


def test_a_snapshot_of_a_disk_in_use_is_a_read_only_disk(host: Host, guest: Agent) -> None:
    """And a clone of it is a disk that the guest may write, beside the first one."""
    host.virsh("attach-disk", NAME, "/dev/virtlun/lvs0/v", "sdb", "--live")
    guest.wait_for("[ -b /dev/sda ]")
    guest.run("(yes first || true) | dd of=/dev/sda bs=4096 count=256 iflag=fullblock oflag=direct")
    host.volumes.snapshot(["lvs0/v"], "now")
    guest.run("(yes later || true) | dd of=/dev/sda bs=4096 count=256 iflag=fullblock oflag=direct")
    host.volumes.clone("lvs0/v@now", "copy")
    snapshot, copy = "/dev/virtlun/lvs0/v@now", "/dev/virtlun/lvs0/copy"
    host.virsh("attach-disk", NAME, snapshot, "sdc", "--mode", "readonly", "--live")
    guest.wait_for("[ -b /dev/sdb ]")
    host.virsh("attach-disk", NAME, copy, "sdd", "--live")
    guest.wait_for("[ -b /dev/sdc ]")
    assert [guest.run(f"head -c 5 /dev/sd{name}") for name in "abc"] == ["later", "first", "first"]
    assert guest.run("cat /sys/block/sdb/ro /sys/block/sdc/ro").split() == ["1", "0"]
    guest.run("(yes other || true) | dd of=/dev/sdc bs=4096 count=9 iflag=fullblock oflag=direct")
    assert [guest.run(f"head -c 5 /dev/sd{name}") for name in "abc"] == ["later", "first", "other"]
    listed = host.virsh("domblklist", NAME)
    assert snapshot in listed and copy in listed, listed
    for dev in ("sdd", "sdc", "sdb"):
        host.virsh("detach-disk", NAME, dev, "--live")
    guest.wait_for("! ls /sys/block | grep -q '^sd'")
    host.volumes.delete("lvs0/copy")
    host.volumes.delete("lvs0/v@now")
    assert host.volumes.volume("lvs0/v").parent is None


@pytest.mark.nightly
def test_a_disk_has_the_blocks_that_its_blockio_asks_for(host: Host, guest: Agent) -> None:
    disk = (
        "<disk type='block' device='disk'><source dev='/dev/virtlun/lvs0/v'/>"
        "<blockio logical_block_size='{0}' physical_block_size='16384'/>"
        "<target dev='sdb' bus='scsi'/></disk>"
    )
    path = host.scratch / "device.xml"

    def attach(size: int) -> None:
        path.write_text(disk.format(size))
        host.virsh("attach-device", NAME, str(path), "--live", "--config")
        for side in SIDES:
            assert has(shown(host, *side), ElementTree.fromstring(disk.format(size)))
        guest.wait_for("[ -b /dev/sda ]")
        assert guest.run("cat /sys/block/sda/queue/logical_block_size").strip() == str(size)
        (controller,) = host.client.call("vhost_get_controllers")
        ((lun,),) = [each["luns"] for each in controller["backend_specific"]["scsi"]]
        assert (lun["block_size"], lun["physical_block_size"]) == (size, 16384)
        assert guest.run("cat /sys/block/sda/queue/physical_block_size").strip() == "16384"

    def detach() -> None:
        host.virsh("detach-disk", NAME, "sdb", "--live", "--config")
        guest.wait_for("[ ! -e /sys/block/sda ]")

    def checksum(blocks: str) -> str:
        read = f"dd if=/dev/sda iflag=direct {blocks} 2>/dev/null | md5sum"
        return guest.run(read).split()[0]

    attach(4096)
    guest.run("dd if=/dev/urandom of=/dev/sda bs=4096 seek=3 count=64 oflag=direct")
    written = checksum("bs=4096 skip=3 count=64")
    assert checksum("bs=4096 skip=67 count=64") != written
    # The gateway starts again, and nothing is found wrong with the disk.
    host.stop_gateway()
    host.start_gateway()
    host.virsh("blockresize", NAME, "sdb", f"{16 * MIB}B")
    guest.wait_for(f"[ $(cat /sys/block/sda/size) = {16 * MIB // 512} ]")
    last = 16 * MIB // 4096 - 1
    guest.run(f"dd if=/dev/zero of=/dev/sda bs=4096 seek={last} count=1 oflag=direct")
    assert checksum("bs=4096 skip=3 count=64") == written
    for wrong in ("1024", "8192"):
        path.write_text(disk.format(wrong).replace("sdb", "sdc"))
        with pytest.raises(VirshError, match=f"logical_block_size {wrong} is not possible"):
            host.virsh("attach-device", NAME, str(path), "--live", "--config")
    path.write_text(disk.format(512))
    with pytest.raises(VirshError, match="cannot modify field 'blockio logical_block_size'"):
        host.virsh("update-device", NAME, str(path), "--live")
    path.write_text(disk.format(4096).replace("16384", "8192"))
    with pytest.raises(VirshError, match="cannot modify field 'blockio physical_block_size'"):
        host.virsh("update-device", NAME, str(path), "--live")
    detach()
    attach(512)
    assert checksum("bs=512 skip=24 count=512") == written, "the same bytes"
    detach()
    host.volumes.resize("lvs0/v", 8 * MIB)
