"""A disk of ours is shown as libvirt shows its own: what a client left out is there.

Each disk of ours stands beside a plain raw file that was given the same <driver>.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.host import Host
from tests.support.night import by_day

pytestmark = [pytest.mark.root, pytest.mark.vm]

NAME = "shown"
MIB = 1 << 20
DRIVERS = (
    "",
    "<driver cache='none'/>",
    "<driver name='qemu' cache='none' discard='unmap'/>",
    "<driver type='raw' cache='none' io='native'/>",
    "<driver name='qemu' type='aio'/>",
)
PLAIN = {"name": "qemu", "type": "raw"}


def ours(index: int) -> str:
    return f"sd{'abcdefghij'[index]}"


def theirs(index: int) -> str:
    return f"vd{'abcdefghij'[index]}"


@pytest.fixture(scope="module")
def domain(host: Host) -> Iterator[Host]:
    """A running domain with nothing to boot."""
    host.scratch.chmod(0o777)
    disks = ""
    for index, driver in enumerate(DRIVERS):
        host.volumes.create(f"lvs0/{ours(index)}", MIB, thin=True)
        file = new_file(host, theirs(index))
        disks += disk(f"/dev/virtlun/lvs0/{ours(index)}", ours(index), driver)
        disks += disk(str(file), theirs(index), driver)
    host.volumes.create("lvs0/more", MIB, thin=True)
    path = host.scratch / "shown.xml"
    path.write_text(
        f"<domain type='qemu'><name>{NAME}</name><memory unit='MiB'>64</memory><os>"
        f"<type arch='x86_64' machine='q35'>hvm</type></os><devices>{disks}</devices></domain>"
    )
    host.virsh("define", str(path))
    host.virsh("start", NAME)
    yield host
    host.virsh("destroy", NAME, check=False)
    host.virsh("undefine", NAME, "--snapshots-metadata", "--managed-save", check=False)


def new_file(host: Host, name: str) -> Path:
    file = host.scratch / f"{name}.img"
    file.write_bytes(bytes(MIB))
    file.chmod(0o666)
    return file


def disk(source: str, dev: str, driver: str = "") -> str:
    return (
        f"<disk type='file' device='disk'>{driver}<source file='{source}'/>"
        f"<target dev='{dev}'/></disk>"
    )


def shown(xml: str) -> dict[str, ElementTree.Element]:
    """Returns the disks of a domain, or of one inside of another document, by target dev."""
    tree = ElementTree.fromstring(xml)
    found = tree.findall("devices/disk") or tree.findall("domain/devices/disk")
    return {each.find("target").get("dev", ""): each for each in found}  # type: ignore[union-attr]


def driver(element: ElementTree.Element) -> list[tuple[str, str]]:
    """Returns the attributes of a disk's first child in their order, which must be its <driver>."""
    assert element[0].tag == "driver"
    return list(element[0].items())


def check(xml: str) -> None:
    """Asserts that each disk of ours has the <driver> of the file beside it."""
    disks = shown(xml)
    assert len(disks) == 2 * len(DRIVERS)
    for index in range(len(DRIVERS)):
        mine, other = disks[ours(index)], disks[theirs(index)]
        assert driver(mine) == driver(other)
        order = [child.tag for child in other]
        assert [child.tag for child in mine] == [
            tag for tag in order if tag not in ("backingStore", "address")
        ]


@by_day("flags0", "flags2")
@pytest.mark.parametrize("flags", [[], ["--inactive"], ["--migratable"], ["--security-info"]])
def test_the_driver_is_libvirts(domain: Host, flags: list[str]) -> None:
    xml = domain.virsh("dumpxml", NAME, *flags)
    check(xml)
    assert dict(driver(shown(xml)["sda"])) == PLAIN
    kept = domain.virsh_direct("dumpxml", NAME, *flags)
    assert kept.count("<driver") == 2 * len(DRIVERS), "what is kept is what the client wrote"


def test_in_a_snapshot_and_in_saved_domains(domain: Host) -> None:
    left = [f"{theirs(index)},snapshot=no" for index in range(len(DRIVERS))]
    specs = [word for each in left for word in ("--diskspec", each)]
    domain.virsh("snapshot-create-as", NAME, "s", "--disk-only", *specs)
    check(domain.virsh("snapshot-dumpxml", NAME, "s"))
    domain.virsh("snapshot-delete", NAME, "s")
    image = domain.scratch / "shown.saved"
    domain.virsh("save", NAME, str(image))
    check(domain.virsh("save-image-dumpxml", str(image)))
    domain.virsh("restore", str(image))
    domain.virsh("managedsave", NAME)
    check(domain.virsh("managedsave-dumpxml", NAME))
    domain.virsh("start", NAME)


def test_what_is_shown_can_be_defined_and_is_shown_again(domain: Host) -> None:
    path = domain.scratch / "again.xml"

    def again(*flags: str) -> str:
        path.write_text(domain.virsh("dumpxml", NAME, *flags))
        domain.virsh("define", "--validate", str(path))
        return domain.virsh("dumpxml", NAME, "--inactive")

    before = domain.virsh("dumpxml", NAME, "--inactive")
    assert again("--inactive") == before
    first = again()  # libvirt keeps more of its own of what a running domain shows
    check(first)
    assert again() == first
    assert again("--inactive") == first


@by_day("--live")
@pytest.mark.parametrize("where", ["--live", "--config"])
def test_attach_update_and_detach_take_it_with_and_without(domain: Host, where: str) -> None:
    flags = ["--inactive"] if where == "--config" else []
    bare = domain.scratch / "bare.xml"
    bare.write_text(disk("/dev/virtlun/lvs0/more", "sdx"))
    whole = domain.scratch / "whole.xml"
    before = domain.virsh("dumpxml", NAME, *flags)

    def element() -> ElementTree.Element:
        return shown(domain.virsh("dumpxml", NAME, *flags))["sdx"]

    domain.virsh("attach-disk", NAME, "/dev/virtlun/lvs0/more", "sdx", where)
    assert dict(driver(element())) == PLAIN
    said = domain.virsh("domblklist", NAME, "--details", *flags)
    assert ["file", "disk", "sdx", "/dev/virtlun/lvs0/more"] in [
        line.split() for line in said.splitlines()
    ]
    whole.write_text(ElementTree.tostring(element(), encoding="unicode"))
    for file in (whole, bare):
        domain.virsh("update-device", NAME, str(file), where)
        assert dict(driver(element())) == PLAIN
    domain.virsh("detach-device", NAME, str(bare), where)
    domain.virsh("attach-device", NAME, str(bare), where)
    assert dict(driver(element())) == PLAIN
    domain.virsh("detach-device", NAME, str(whole), where)
    domain.virsh(
        *("attach-disk", NAME, "/dev/virtlun/lvs0/more", "sdx", where, "--cache", "none"),
        *("--driver", "qemu"),
    )
    assert driver(element()) == [("name", "qemu"), ("type", "raw"), ("cache", "none")]
    domain.virsh("detach-disk", NAME, "sdx", where)
    assert domain.virsh("dumpxml", NAME, *flags) == before
