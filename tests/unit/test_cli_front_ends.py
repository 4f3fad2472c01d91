"""What `virtlun` says of LUNs and virtio-blk disks."""

from __future__ import annotations

from types import SimpleNamespace
from uuid import UUID

import pytest

from plugin.cli import domain as domain_commands
from plugin.cli import domains
from plugin.cli.doctor import guests, libvirt
from plugin.config import Config
from pydataplane.domain import translate
from pydataplane.domain.names import NETWORK_NAMESPACE
from pydataplane.domain.translate import Settings
from tests.unit.gateway.world import UUID_1, disk, plain
from tests.unit.translate.domains import lvol


def test_doctor_knows_that_virtio_blk_disks_come_back_with_any_qemu() -> None:
    def of(*devices: str) -> str:
        xml = plain(devices="".join(devices))
        return translate.define(xml, Settings(), new_uuid=UUID(UUID_1)).xml

    blk = lvol("vda", "root", bus="virtio")
    (found,) = guests.judged([of(blk)], Settings())
    assert (found.state, found.found[:1]) == ("ok", "1")
    (found,) = guests.judged([of(blk, disk())], Settings())
    assert "one does not connect again: it loses its LUNs if" in found.found


def test_domain_list_tells_virtio_blk_disks_from_luns() -> None:
    """Also one that the domain's XML does not have: what a guest has not let go yet."""
    devices = lvol("vda", "root", bus="virtio")
    xml = translate.define(plain(devices=devices), Settings(), new_uuid=UUID(UUID_1)).xml
    handle = SimpleNamespace(
        name=lambda: "one", isActive=lambda: 1, UUIDString=lambda: UUID_1, XMLDesc=lambda _: xml
    )
    served = {f"vm-{UUID_1}.0": {0: ["lvs0/root"]}, f"vm-{UUID_1}.3": {0: ["lvs0/late"]}}
    rows = domain_commands._rows(handle, served)
    assert [(row["dev"], row["volume"], row["target"], row["as"]) for row in rows] == [
        ("vda", "lvs0/root", 0, "virtio-blk"),
        (None, "lvs0/late", 3, "virtio-blk"),
    ]


def test_a_domain_that_asks_for_what_this_host_does_not_allow_is_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It came from another host; what clients see of it says no more."""
    monkeypatch.setattr(domains, "config", Config)
    export = (
        "<disk type='network' device='disk'><source protocol='nbd' name='x'><host name='10.0.0.1'/>"
        "</source><target dev='sdb' bus='scsi'/></disk>"
    )
    said = f"<metadata><network xmlns='{NETWORK_NAMESPACE}' serve='nbd'/></metadata><vcpu>"
    xml = plain(devices=export).replace("<vcpu>", said)
    handle = SimpleNamespace(
        name=lambda: "one", isActive=lambda: 1, UUIDString=lambda: UUID_1, XMLDesc=lambda _: xml
    )
    (row,) = domain_commands._rows(handle, {})
    assert (row["dev"], row["target"], row["served"]) == ("sdb", 0, False)


SCSI, BLK = 'name "vhost-user-scsi-pci"', 'name "vhost-user-blk-pci"'


@pytest.mark.parametrize(
    ("setting", "devices", "state", "says"),
    [
        ("auto", SCSI + BLK, "ok", "LUNs of vhost-user-scsi, with bus='virtio' virtio-blk disks"),
        ("auto", BLK, "ok", "virtio-blk disks alone"),
        ("auto", SCSI, "warning", "no vhost-user-blk-pci for bus='virtio'"),
        ("auto", "", "failed", "neither"),
        ("scsi", SCSI + BLK, "ok", "LUNs of vhost-user-scsi"),
        ("scsi", BLK, "failed", "no vhost-user-scsi-pci, and front_end"),
        ("blk", SCSI + BLK, "ok", "virtio-blk disks of vhost-user-blk"),
        ("blk", SCSI, "failed", "no vhost-user-blk-pci, and front_end"),
    ],
)
def test_doctor_says_which_front_end_disks_get(
    monkeypatch: pytest.MonkeyPatch, setting: str, devices: str, state: str, says: str
) -> None:
    monkeypatch.setattr(libvirt, "run", lambda *_: devices)
    found = libvirt.front_ends(setting)  # type: ignore[arg-type]
    assert (found.state, says in found.found) == (state, True), found
    assert found.state == "ok" or found.advice
