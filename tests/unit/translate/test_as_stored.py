"""Domains that nobody defines anew: what an earlier version took of their disks passes, and stays.

That is a revert, a definition that came from another host, or one that a guest takes along.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from pydataplane.domain.errors import TranslateError
from pydataplane.domain.model import Definition
from pydataplane.domain.translate import Settings, attach, define, present
from tests.unit.translate.domains import NEW_UUID, SETTINGS, domain, lvol, tree

QUEUED = "<driver name='qemu' type='raw' queues='{}' queue_size='{}' event_idx='off'/>"
LUN = lvol("sda", more="<driver queues='4'/>")
BLOCKS = "<blockio physical_block_size='4096'/>"
DISK = lvol("vda", bus="virtio", more=BLOCKS + QUEUED.format(100, 100))
"""A virtio-blk disk whose queue_size no disk has."""
ELSEWHERE = replace(SETTINGS, vhost_dir="/run/elsewhere", max_queues=8)


def earlier(client: str) -> str:
    """Returns libvirtd's definition as an earlier version made it, whatever the disks asked for."""
    plain = client.replace(BLOCKS, "").replace(QUEUED.format(100, 100), "")
    made = define(plain.replace("<driver queues='4'/>", ""), SETTINGS, new_uuid=NEW_UUID).xml
    for dev, bus, more in (
        ("sda", "scsi", "<driver queues='4'/>"),
        ("vda", "virtio", BLOCKS + QUEUED.format(100, 100)),
    ):
        target = f"<target dev='{dev}' bus='{bus}'/>"
        made = made.replace(target, target + more, 1)
    return made


def as_stored(xml: str, had: str, settings: Settings = SETTINGS) -> Definition:
    return define(xml, settings, new_uuid=NEW_UUID, current_xml=had, served_in=had, as_stored=True)


def device(xml: str) -> dict[str, str]:
    """Returns what the virtio-blk disk of a definition has of queues."""
    (driver,) = tree(xml).findall("devices/disk[target]/driver[@queues]")
    return {
        str(name): str(value)
        for name, value in driver.attrib.items()
        if name not in ("name", "type")
    }


def test_a_definition_from_another_host_is_what_it_was_but_for_the_socket() -> None:
    had = earlier(domain(LUN + DISK.replace("/v'", "/w'")))
    moved = as_stored(had, had, ELSEWHERE)
    assert moved.plan is not None and moved.plan.socket.startswith("/run/elsewhere/")
    assert device(moved.xml) == device(had) == {"queues": "2"}
    assert "physicalblocksize" not in moved.xml
    assert [lun.characteristics.physical_block_size for lun in moved.plan.luns] == [None] * 2
    assert tree(present(moved.xml, live=False)).find("devices/disk/driver").get("queues") == "4"  # type: ignore[union-attr]
    with pytest.raises(TranslateError, match="queues='4' of <driver> is not possible"):
        define(had, ELSEWHERE, new_uuid=NEW_UUID, current_xml=had)


def test_a_snapshot_of_then_passes_whatever_the_domain_is_now() -> None:
    then = earlier(domain(DISK))
    now = define(domain(lvol("sda", "other")), SETTINGS, new_uuid=NEW_UUID).xml
    made = define(
        then, SETTINGS, new_uuid=NEW_UUID, current_xml=now, served_in=then, as_stored=True
    )
    assert device(made.xml) == {"queues": "2"}
    assert made.plan is not None and [lun.front for lun in made.plan.luns] == ["blk"]


def test_one_xml_is_for_both_sides_of_a_migration() -> None:
    had = earlier(domain(LUN))
    for said in (LUN, lvol("sda")):
        new = domain(said)
        assert as_stored(new, had).plan is not None
        gone_on = define(
            new, SETTINGS, new_uuid=NEW_UUID, current_xml=had, served_in=had, running=True
        )
        assert gone_on.plan is not None


def test_a_client_that_asks_for_something_else_is_checked() -> None:
    had = earlier(domain(DISK))
    assert device(as_stored(domain(DISK), had).xml) == {"queues": "2"}
    chosen = lvol("vda", bus="virtio", more=QUEUED.format(4, 256))
    assert device(as_stored(domain(chosen), had).xml)["queues"] == "4"
    for wrong in (QUEUED.format(4, 100), QUEUED.format("many", 256)):
        with pytest.raises(TranslateError, match="of <driver> is not possible"):
            as_stored(domain(lvol("vda", bus="virtio", more=wrong)), had)
    # Devices in what a client sends are not libvirtd's: what it says of them counts for nothing.
    forged = had.replace("queues='2'", "queues='2' queue_size='3'").replace("'100'", "'101'")
    with pytest.raises(TranslateError, match="of <driver> is not possible"):
        as_stored(forged, had)


def test_the_other_disks_do_not_matter_to_one_that_is_attached() -> None:
    had = earlier(domain(DISK))
    change = attach(had, lvol("vdb", "w", bus="virtio"), SETTINGS, live=False)
    assert change is not None and change.domain_xml is not None
    assert {"queues": "2"} in [
        {k: v for k, v in each.attrib.items() if k not in ("name", "type")}
        for each in tree(change.domain_xml).findall("devices/disk/driver")
    ]
    assert "physicalblocksize" not in change.domain_xml
