"""Disks that leave type, device, driver or bus to libvirt: they are shown as libvirt shows its own.

Everything else about them is as if the client had written them.
"""

from __future__ import annotations

import pytest
from lxml import etree

from pydataplane.domain.translate import attach, present
from tests.unit.translate.domains import (
    SETTINGS,
    canonical,
    disk_sources,
    domain,
    plain,
    pretty,
    translated,
    tree,
)

BLOCK = "<source dev='/dev/virtlun/lvs0/v'/>"
FILE = "<source file='/dev/virtlun/lvs0/v'/>"
POOL = "<source pool='virtlun-lvs0' volume='v'/>"
SDB = "<target dev='sdb' bus='scsi'/>"
DRIVER = "<driver name='qemu' type='raw'/>"
CASES = [
    # as given, and as libvirt would show it
    (
        f"<disk type='block'>{BLOCK}<target dev='sdb'/></disk>",
        f"<disk type='block' device='disk'>{DRIVER}{BLOCK}{SDB}</disk>",
    ),
    (
        f"<disk>{FILE}<target dev='vdb'/></disk>",
        f"<disk type='file' device='disk'>{DRIVER}{FILE}<target dev='vdb' bus='virtio'/></disk>",
    ),
    (
        f"<disk type='file' device='lun'>{FILE}<target dev='sdb' tray='closed'></target></disk>",
        f"<disk type='file' device='lun'>{DRIVER}{FILE}"
        "<target dev='sdb' tray='closed' bus='scsi'></target></disk>",
    ),
    (
        f'<disk\n  type="file"\n>{FILE}<target\tbus="virtio" dev="sdb" /></disk>',
        f"<disk\n  type=\"file\" device='disk'\n>{DRIVER}{FILE}"
        '<target\tbus="virtio" dev="sdb" /></disk>',
    ),
    (
        f"<disk type='volume' device='disk'>{POOL}{SDB}</disk>",
        f"<disk type='volume' device='disk'>{DRIVER}{POOL}{SDB}</disk>",
    ),
    *(
        (
            f"<disk type='file' device='disk'>{given}{FILE}{SDB}</disk>",
            f"<disk type='file' device='disk'>{shown}{FILE}{SDB}</disk>",
        )
        for given, shown in (
            ("<driver/>", DRIVER),
            ("<driver></driver>", "<driver name='qemu' type='raw'></driver>"),
            ("<driver type='raw'/>", DRIVER),
            ('<driver name="qemu" />', "<driver name=\"qemu\" type='raw' />"),
            ("<driver name='qemu' type='aio'/>", DRIVER),
            ("<driver cache='none'/>", "<driver name='qemu' type='raw' cache='none'/>"),
            (
                "<driver name='qemu' cache='none' discard='unmap'/>",
                "<driver name='qemu' type='raw' cache='none' discard='unmap'/>",
            ),
            (
                "<driver\tio='native'\n name='qemu' type='raw'/>",
                "<driver\tio='native'\n name='qemu' type='raw'/>",
            ),
            (
                "<driver io='native' name='qemu'/>",
                "<driver type='raw' io='native' name='qemu'/>",
            ),
            (
                "<driver ioeventfd='on'><iothreads/></driver>",
                "<driver name='qemu' type='raw' ioeventfd='on'><iothreads/></driver>",
            ),
        )
    ),
    (  # as written, in whatever order
        f"<disk type='file' device='disk'>{FILE}{SDB}<driver name='qemu' cache='none'/></disk>",
        f"<disk type='file' device='disk'>{FILE}{SDB}"
        "<driver name='qemu' type='raw' cache='none'/></disk>",
    ),
    (
        f"<disk type='file' device='disk'>\n      {FILE}\n      {SDB}\n    </disk>",
        f"<disk type='file' device='disk'>\n      {DRIVER}\n      {FILE}\n      {SDB}\n    </disk>",
    ),
]


@pytest.mark.parametrize(("given", "shown"), CASES)
def test_what_the_client_left_out_is_shown(given: str, shown: str) -> None:
    other = plain("vda", "virtio") + "\n    "
    there = translated(domain(other + given))
    assert present(there.xml, live=False) == domain(other + shown)
    live = tree(present(there.xml, live=True)).findall("devices/disk")[-1]
    alias = live.find("alias")
    assert alias is not None
    live.remove(alias)
    assert canonical(etree.tostring(live, encoding="unicode")) == canonical(shown)


@pytest.mark.parametrize(("given", "shown"), CASES)
def test_the_plan_is_that_of_the_whole_disk(given: str, shown: str) -> None:
    short = translated(domain(plain("sda", "scsi") + given, os="<boot dev='hd'/>"))
    whole = translated(domain(plain("sda", "scsi") + shown, os="<boot dev='hd'/>"))
    assert short.plan == whole.plan
    assert short.plan is not None
    assert [lun.volume.alias for lun in short.plan.luns] == ["lvs0/v"]


@pytest.mark.parametrize(("given", "shown"), CASES)
@pytest.mark.parametrize("rewritten", [False, True], ids=["as sent", "as libvirtd writes it"])
def test_defining_what_was_shown_changes_nothing_more(
    given: str, shown: str, rewritten: bool
) -> None:
    there = translated(domain(given))
    first = pretty(there.xml) if rewritten else there.xml
    back = present(first, live=False)
    again = translated(back, current=first)
    assert again.plan == there.plan
    assert disk_sources(present(again.xml, live=False)) == [canonical(shown).strip()]
    assert translated(present(again.xml, live=False)).xml == again.xml


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize(("given", "shown"), CASES)
def test_an_attached_disk_is_completed_too(given: str, shown: str, live: bool) -> None:
    before = translated(domain(plain("vda", "virtio"))).xml
    change = attach(before, given, SETTINGS, live=False)
    whole = attach(before, shown, SETTINGS, live=False)
    assert change is not None
    assert whole is not None
    assert change.lun == whole.lun
    assert change.domain_xml is not None
    disks = tree(present(change.domain_xml, live=live)).findall("devices/disk")
    disk, whole_disk = disks[-1], tree(shown)
    assert (disk.find("alias") is not None) == live
    assert disk.items() == whole_disk.items()
    target, whole_target = disk.find("target"), whole_disk.find("target")
    assert target is not None
    assert whole_target is not None
    assert target.items() == whole_target.items()
