"""What clients ask for in <domaincheckpoint> and <domainbackup>, and how it shows."""

from __future__ import annotations

from uuid import UUID

import pytest

from pydataplane.domain.errors import TranslateError
from pydataplane.domain.translate import Settings, define
from pydataplane.domain.translate.backups import (
    Server,
    backup_requested,
    checkpoint_requested,
    show_backup,
    show_checkpoint,
)

NEW_UUID = UUID("11111111-1111-4111-8111-111111111111")

SETTINGS = Settings()
DOMAIN = (
    "<domain type='qemu'><name>vm</name><memory unit='MiB'>64</memory>"
    "<os><type arch='x86_64' machine='q35'>hvm</type></os><devices>"
    "<disk type='file' device='disk'><source file='/dev/virtlun/lvs0/a'/>"
    "<target dev='sda' bus='scsi'/></disk>"
    "<disk type='file' device='disk'><source file='/dev/virtlun/lvs0/b'/>"
    "<target dev='sdb' bus='scsi'/><readonly/></disk>"
    "<disk type='file' device='disk'><source file='/srv/c'/><target dev='vda'/></disk>"
    "<disk type='file' device='cdrom'><source file='/srv/d'/><target dev='sdc'/></disk>"
    "</devices></domain>"
)


@pytest.fixture(scope="module")
def domain() -> str:
    """libvirtd's XML of a domain with two disks of ours and two of its own."""
    return define(DOMAIN, SETTINGS, new_uuid=NEW_UUID).xml


def test_all_that_a_guest_can_write_is_in_it_where_nothing_is_listed(domain: str) -> None:
    request = checkpoint_requested("<domaincheckpoint/>", domain, SETTINGS)
    assert request is not None
    assert (request.name, request.created_s) == (None, None)
    assert [lun.dev for lun in request.luns] == ["sda"]
    assert request.others == ("vda",)
    backup = backup_requested("<domainbackup/>", domain, SETTINGS)
    assert backup is not None
    assert [disk.lun.dev for disk in backup.disks] == ["sda"]
    assert (backup.others, set(backup.left)) == (("vda",), {"sdb", "sdc"})


def test_a_disk_is_named_by_its_target_or_its_source(domain: str) -> None:
    for name in ("sda", "lvs0/a", "/dev/virtlun/lvs0/a"):
        xml = f"<domainbackup><disks><disk name='{name}'/></disks></domainbackup>"
        request = backup_requested(xml, domain, SETTINGS)
        assert request is not None and request.others == ()
        assert [disk.lun.dev for disk in request.disks] == ["sda"]


def test_a_pull_as_it_is_shown(domain: str) -> None:
    xml = (
        "<domainbackup mode='pull'><incremental>c</incremental>"
        "<server name='h' port='10809'/><disks>"
        "<disk name='sda' exportname='x&amp;y'/><disk name='sdb' backupmode='full'/>"
        "<disk name='vda' backup='no'/></disks></domainbackup>"
    )
    request = backup_requested(xml, domain, SETTINGS)
    assert request is not None
    assert request.server == Server("tcp", host="h", port=10809)
    assert [(disk.incremental, disk.bitmap) for disk in request.disks] == [
        ("c", "backup-sda"),
        (None, "backup-sdb"),
    ]
    assert show_backup(request, []).splitlines() == [
        "<domainbackup mode='pull'>",
        "  <incremental>c</incremental>",
        "  <server transport='tcp' name='h' port='10809'/>",
        "  <disks>",
        "    <disk name='sda' backup='yes' backupmode='incremental' incremental='c'"
        " exportname='x&amp;y' exportbitmap='backup-sda'/>",
        "    <disk name='sdb' backup='yes' backupmode='full' exportname='sdb'/>",
        "    <disk name='vda' backup='no'/>",
        "    <disk name='sdc' backup='no'/>",
        "  </disks>",
        "</domainbackup>",
    ]


def test_a_checkpoint_as_it_is_shown() -> None:
    assert show_checkpoint("a<b", None, None, 7, [("sda", 4096)]).splitlines() == [
        "<domaincheckpoint>",
        "  <name>a&lt;b</name>",
        "  <creationTime>7</creationTime>",
        "  <disks>",
        "    <disk name='sda' checkpoint='bitmap' bitmap='a&lt;b' size='4096'/>",
        "  </disks>",
        "</domaincheckpoint>",
    ]


@pytest.mark.parametrize("xml", ["", "<x/>", "<domainbackup>", "<!DOCTYPE x><domainbackup/>"])
def test_what_is_something_else_is_libvirtds(domain: str, xml: str) -> None:
    assert backup_requested(xml, domain, SETTINGS) is None
    assert checkpoint_requested(xml, domain, SETTINGS) is None
    assert backup_requested("<domainbackup/>", "<x/>", SETTINGS) is None


@pytest.mark.parametrize(
    ("xml", "sentence"),
    [
        ("<domainbackup mode='x'/>", "unknown backup mode 'x'"),
        ("<domainbackup><server/></domainbackup>", "requires pull mode"),
        ("<domainbackup mode='pull'/>", "needs port= from 1 to 65535"),
        ("<domainbackup mode='pull'><server port='0'/></domainbackup>", "needs port="),
        ("<domainbackup mode='pull'><server port='65536'/></domainbackup>", "needs port="),
        ("<domainbackup mode='pull'><server port='9999999999'/></domainbackup>", "needs port="),
        ("<domainbackup mode='pull'><server port='\u0661'/></domainbackup>", "needs port="),
        ("<domainbackup mode='pull'><server transport='rdma'/></domainbackup>", "rdma is not"),
        ("<domainbackup mode='pull'><server tls='yes' port='1'/></domainbackup>", "without TLS"),
        (
            "<domainbackup mode='pull'><server transport='unix' socket='s'/></domainbackup>",
            "must be absolute",
        ),
        (
            "<domainbackup><disks><disk name='sda' backupmode='incremental'/></disks>"
            "</domainbackup>",
            "needs the name of a checkpoint",
        ),
        (
            "<domainbackup><disks><disk name='sda' type='network'/></disks></domainbackup>",
            "unsupported disk backup type 'network'",
        ),
        ("<domainbackup><disks><disk/></disks></domainbackup>", "no disk named ''"),
    ],
)
def test_what_cannot_be_is_refused(domain: str, xml: str, sentence: str) -> None:
    with pytest.raises(TranslateError) as caught:
        backup_requested(xml, domain, SETTINGS)
    assert sentence in str(caught.value)
