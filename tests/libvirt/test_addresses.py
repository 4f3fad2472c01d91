"""Addresses that the client chooses, where the controller of our disks is already: real libvirtd.

The client does not see the controller, so it may name the controller's PCI address for a device of
its own. A definition is honoured, and the controller goes elsewhere. Where a device is attached, to
a running domain or its definition, libvirtd refuses it in its own sentence.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.host import Host
from tests.support.libvirtd import VirshError

pytestmark = [pytest.mark.root, pytest.mark.vm]

NAME = "addresses"
MIB = 1 << 20
DISK = (
    "<disk type='file' device='disk'><source file='/dev/virtlun/lvs0/addresses'/>"
    "<target dev='{dev}' bus='scsi'/><address type='drive' controller='0' bus='0' target='0'"
    " unit='{unit}'/></disk>"
)
RNG = "<rng model='virtio'><backend model='random'>/dev/urandom</backend>{address}</rng>"


def carrier(host: Host, *words: str) -> dict[str, str]:
    """Returns the PCI address that libvirtd has for our controller."""
    tree = ElementTree.fromstring(host.virsh_direct("dumpxml", NAME, *words))
    (address,) = tree.findall("devices/disk[@type='vhostuser']/address")
    return address.attrib


def devices(host: Host, path: str, *words: str) -> list[ElementTree.Element]:
    """Returns elements of the domain's XML as clients see it."""
    return ElementTree.fromstring(host.virsh("dumpxml", NAME, *words)).findall(f"devices/{path}")


@pytest.fixture(scope="module")
def own(host: Host) -> Path:
    """The image of a disk of libvirt's own."""
    file = host.scratch / "own.img"
    file.write_bytes(bytes(MIB))
    file.chmod(0o666)
    return file


@pytest.fixture
def vm(host: Host) -> Iterator[Host]:
    """A domain with a volume, that runs."""
    made = host.volumes.create("lvs0/addresses", 8 * MIB)
    host.define(NAME, devices=DISK.format(dev="sda", unit=3))
    host.virsh("start", NAME, "--paused")
    yield host
    host.virsh("destroy", NAME, check=False)
    host.virsh("undefine", NAME)
    host.volumes.delete(made.uuid)


def test_a_device_at_the_controllers_pci_address_is_refused_where_it_is_added(vm: Host) -> None:
    sides = (
        ("--live", (), "Attempted double use of PCI Address {where}"),
        ("--config", ("--inactive",), "a device with the same address already exists"),
    )
    for side, words, sentence in sides:
        taken = carrier(vm, *words)
        text = "".join(f" {name}='{value}'" for name, value in taken.items())
        path = vm.scratch / "rng.xml"
        path.write_text(RNG.format(address=f"<address{text}/>"))
        with pytest.raises(VirshError) as refused:
            vm.virsh("attach-device", NAME, str(path), side)
        where = f"0000:{int(taken['bus'], 16):02x}:{int(taken['slot'], 16):02x}.0"
        assert str(refused.value).endswith(sentence.format(where=where))
        assert carrier(vm, *words) == taken
    path.write_text(RNG.format(address=""))
    vm.virsh("attach-device", NAME, str(path), "--config")


def test_a_definition_with_a_device_there_is_honoured(vm: Host) -> None:
    before = carrier(vm, "--inactive")
    text = "".join(f" {name}='{value}'" for name, value in before.items())
    xml = vm.virsh("dumpxml", NAME, "--inactive")
    path = vm.scratch / "moved.xml"
    device = RNG.format(address=f"<address{text}/>")
    path.write_text(xml.replace("</devices>", f"{device}</devices>"))
    vm.virsh("define", str(path))
    after = carrier(vm, "--inactive")
    assert after != before
    (shown,) = devices(vm, "rng/address", "--inactive")
    assert shown.attrib == before
    vm.virsh("destroy", NAME)
    vm.virsh("start", NAME, "--paused")
    assert carrier(vm) == after


@pytest.mark.nightly
def test_a_scsi_address_is_free_for_a_disk_of_libvirts_own(vm: Host, own: Path) -> None:
    """Our disks are at no controller of libvirt's, whatever address they show."""
    path = vm.scratch / "own.xml"
    disk = DISK.format(dev="sdb", unit=3).replace("/dev/virtlun/lvs0/addresses", str(own))
    path.write_text(disk)
    vm.virsh("attach-device", NAME, str(path), "--config")
    shown = [address.attrib for address in devices(vm, "disk/address[@type='drive']", "--inactive")]
    assert [address["unit"] for address in shown] == ["3", "3"]
    vm.virsh("destroy", NAME)
    vm.virsh("start", NAME, "--paused")
    lines = vm.virsh("domblklist", NAME).split()
    assert {"sda", "sdb", str(own)} <= set(lines)
    # What is shown can be defined again.
    path.write_text(vm.virsh("dumpxml", NAME, "--inactive"))
    vm.virsh("define", str(path))
