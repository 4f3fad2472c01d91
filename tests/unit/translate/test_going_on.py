"""A guest that goes on by other XML: it keeps its disks' numbers and what they say of themselves.

That is a migration with --xml, a save image whose XML is changed, or both after one another.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from lxml import etree

from pydataplane.domain.actions import actions
from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.model import ANY
from pydataplane.domain.observed import Bdev, ObservedDisk, State, is_right
from pydataplane.domain.reconcile import perform
from pydataplane.domain.translate import LunPlan, define, detach, plan, present, update
from pydataplane.domain.xml import network
from tests.support.fake_target import FakeTarget
from tests.unit.translate.domains import (
    NEW_UUID,
    ROOT,
    SETTINGS,
    domain,
    lvol,
    overrides,
    plain,
    translated,
)
from tests.unit.translate.test_change import set_metadata

SERVED = replace(SETTINGS, network=frozenset({"rbd", "nbd", "iscsi"}), allowed=ANY)
SECRET = "457eb676-33da-42ec-9a8c-9293d545c337"
MONS = ("10.0.0.1", "10.0.0.2")
OTHERS = ("10.9.0.7", "10.0.0.2", "10.9.0.8")


def rbd(
    dev: str,
    image: str,
    *,
    hosts: tuple[str, ...] = MONS,
    secret: str = SECRET,
    bus: str = "scsi",
    more: str = "",
) -> str:
    """A disk of a cloud, without a serial of its own."""
    monitors = "".join(f"<host name='{host}' port='6789'/>" for host in hosts)
    return (
        f"<disk type='network' device='disk'><driver name='qemu' type='raw'/>"
        f"<source protocol='rbd' name='volumes/{image}'>{monitors}</source>"
        f"<auth username='cinder'><secret type='ceph' uuid='{secret}'/></auth>"
        f"<target dev='{dev}' bus='{bus}'/>{more}</disk>"
    )


def iscsi(dev: str, portal: str, *, more: str = "") -> str:
    return (
        "<disk type='network' device='disk'><source protocol='iscsi' name='iqn.2026-11.org.x:d/1'>"
        f"<host name='{portal}'/></source><target dev='{dev}' bus='scsi'/>{more}</disk>"
    )


def nbd(dev: str, host: str, export: str) -> str:
    return (
        f"<disk type='network' device='disk'><source protocol='nbd' name='{export}'>"
        f"<host name='{host}'/></source><target dev='{dev}' bus='scsi'/></disk>"
    )


def guest(*disks: str) -> str:
    """Returns a client's domain."""
    return domain(plain("vda", "virtio") + "".join(disks))


def running(*disks: str, gone: str = "") -> str:
    """Returns libvirtd's XML of a running domain; the disk `gone` was detached since it started."""
    made = translated(guest(*disks), SERVED).xml
    if not gone:
        return made
    change = detach(made, gone, SERVED, live=True)
    assert change is not None
    return set_metadata(made, change)


def goes_on(current: str, xml: str, uuids: dict[str, str] | None = None) -> str:
    """Returns libvirtd's XML with which the guest of `current` is to go on by a client's `xml`."""
    made = define(
        xml,
        SETTINGS,
        new_uuid=NEW_UUID,
        current_xml=current,
        served_in=current,
        controller=True,
        running=True,
        uuids=uuids,
    )
    assert made.plan == plan(made.xml)
    return made.xml


def luns(xml: str) -> dict[str, LunPlan]:
    found = plan(xml)
    assert found is not None
    return {lun.dev: lun for lun in found.luns}


def numbers(xml: str) -> dict[str, int]:
    return {dev: lun.target for dev, lun in luns(xml).items()}


def seen(xml: str) -> dict[str, object]:
    """Returns what a guest knows each disk by."""
    return {
        dev: (lun.target, lun.identity, lun.serial, lun.characteristics.wwn, lun.front)
        for dev, lun in luns(xml).items()
    }


def refusal(current: str, xml: str, uuids: dict[str, str] | None = None) -> str:
    with pytest.raises(TranslateError) as refused:
        goes_on(current, xml, uuids)
    assert refused.value.refusal is Refusal.UNSUPPORTED
    assert "\n" not in refused.value.message
    return refused.value.message


WAYS = {
    "reordered": {"hosts": MONS[::-1]},
    "one more": {"hosts": (*MONS, "10.0.0.3")},
    "others": {"hosts": OTHERS},
    "none": {"hosts": ()},
    "secret": {"secret": SECRET.replace("4", "5")},
}


@pytest.mark.parametrize("bus", ["scsi", "virtio"])
@pytest.mark.parametrize("way", WAYS)
def test_after_a_detach_the_other_disks_stay_what_they_are_by_another_way(
    way: str, bus: str
) -> None:
    rest = ("b", "c")
    prefix = "sd" if bus == "scsi" else "vd"
    at = {image: f"{prefix}{'bcd'[n]}" for n, image in enumerate("abc")}
    gone = rbd(at["a"], "a", bus=bus)
    now = running(*(rbd(at[i], i, bus=bus) for i in "abc"))
    change = detach(now, gone, SERVED, live=True)
    assert change is not None
    now = set_metadata(now, change)
    if change.device_xml is not None:  # which QEMU has let go
        now = now.replace(change.device_xml, "")
    assert numbers(now) == {at["b"]: 1, at["c"]: 2}
    other = guest(*(rbd(at[i], i, bus=bus, **WAYS[way]) for i in rest))  # type: ignore[arg-type]
    there = goes_on(now, other)
    assert seen(there) == seen(now)
    for dev, lun in luns(there).items():
        assert lun.volume.source is not None
        assert lun.uuid == network.identity(lun.volume.source), "no other secret opens it"
        assert (lun.known_as is None) == (lun.uuid == luns(now)[dev].uuid)
    assert (luns(there)[at["b"]].uuid == luns(now)[at["b"]].uuid) == (way == "reordered")
    # The other host reads what it is sent, and from there it goes back, or on.
    sent = define(
        there, SETTINGS, new_uuid=NEW_UUID, controller=True, served_in=there, running=True
    )
    assert sent.plan == plan(goes_on(there, there)) == plan(there)
    assert seen(goes_on(there, present(now, live=False))) == seen(now)
    assert all(
        lun.known_as is None for lun in luns(goes_on(there, present(now, live=True))).values()
    )
    third = guest(*(rbd(at[i], i, bus=bus, hosts=("10.1.1.1",)) for i in rest))
    assert seen(goes_on(there, third)) == seen(now)


def test_disks_that_are_listed_in_another_order_keep_their_numbers() -> None:
    now = running(rbd("sdb", "a"), rbd("sdc", "b"), rbd("sdd", "c"), gone=rbd("sdb", "a"))
    there = goes_on(now, guest(rbd("sdd", "c", hosts=OTHERS), rbd("sdc", "b", hosts=OTHERS)))
    assert seen(there) == seen(now)


def test_the_order_of_monitors_makes_no_other_image() -> None:
    one, two = luns(running(rbd("sdb", "a"))), luns(running(rbd("sdb", "a", hosts=MONS[::-1])))
    assert one == two
    now = running(rbd("sdb", "a"))
    assert update(now, rbd("sdb", "a", hosts=MONS[::-1]), SERVED, live=True) is not None
    with pytest.raises(TranslateError, match="is already attached to this domain as sdb"):
        running(rbd("sdb", "a"), rbd("sdc", "a", hosts=MONS[::-1]))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (iscsi("sdb", "10.0.0.1"), iscsi("sdb", "10.0.0.2")),
        (nbd("sdb", "10.0.0.1", "x"), nbd("sdb", "10.0.0.2", "x")),
    ],
)
def test_a_lun_or_export_is_the_same_at_another_address(old: str, new: str) -> None:
    now = running(lvol("sda"), old, gone=lvol("sda"))
    assert numbers(now) == {"sdb": 1}
    there = goes_on(now, guest(new))
    assert seen(there) == seen(now)
    assert luns(there)["sdb"].uuid != luns(now)["sdb"].uuid


def test_an_export_without_a_name_is_known_by_its_server() -> None:
    now = running(nbd("sdb", "10.0.0.1", ""))
    assert "nbd:10.0.0.2:10809/ of disk sdb does not match" in refusal(
        now, guest(nbd("sdb", "10.0.0.2", ""))
    )


@pytest.mark.parametrize(
    ("disks", "says"),
    [
        (
            [rbd("sdc", "c"), rbd("sdd", "b")],
            "source rbd:volumes/c of disk sdc does not match rbd:volumes/b, by which its guest",
        ),
        (
            [rbd("sdc", "b")],
            "disk sdd (rbd:volumes/c, target 2) of the guest is not in the XML",
        ),
        (
            [rbd("sdc", "b"), rbd("sdd", "c"), lvol("sde", "d")],
            "disk sde (lvs0/d) is none that the guest has",
        ),
        (
            [rbd("sdc", "b"), rbd("sde", "c")],
            "disk sdd (rbd:volumes/c, target 2) of the guest is not in the XML",
        ),
        (
            [rbd("sdc", "b", more="<serial>x</serial>"), rbd("sdd", "c")],
            "serial x of disk sdc does not match (none), by which",
        ),
        (
            [rbd("sdc", "b", more="<wwn>5000c50015ea71ad</wwn>"), rbd("sdd", "c")],
            "wwn 5000c50015ea71ad of disk sdc does not match (none), by which",
        ),
        (
            [rbd("sdc", "b", more="<readonly/>"), rbd("sdd", "c")],
            "readonly yes of disk sdc does not match no, by which",
        ),
        (
            [rbd("sdc", "b", bus="virtio"), rbd("sdd", "c")],
            "target bus virtio of disk sdc does not match scsi, by which",
        ),
        (
            [
                rbd("sdc", "b", more="<blockio logical_block_size='4096'/>"),
                rbd("sdd", "c"),
            ],
            "blockio logical_block_size 4096 of disk sdc does not match 512, by which",
        ),
        (
            [
                rbd("sdc", "b", more="<blockio physical_block_size='4096'/>"),
                rbd("sdd", "c"),
            ],
            "blockio physical_block_size 4096 of disk sdc does not match (none), by which",
        ),
        ([lvol("sdc", "b"), rbd("sdd", "c")], "source lvs0/b of disk sdc does not match rbd:"),
        ([], "disk sdc (rbd:volumes/b, target 1) of the guest is not in the XML"),
    ],
)
def test_what_its_guest_would_see_otherwise_is_refused(disks: list[str], says: str) -> None:
    now = running(rbd("sdb", "a"), rbd("sdc", "b"), rbd("sdd", "c"), gone=rbd("sdb", "a"))
    assert says in refusal(now, guest(*disks))


def test_an_alias_of_the_clients_own_stays_that_disks() -> None:
    alias = "<alias name='ua-{}'/>"
    now = running(
        rbd("sdb", "a", more=alias.format("one")), rbd("sdc", "b", more=alias.format("two"))
    )
    swapped = guest(
        rbd("sdb", "a", more=alias.format("two")), rbd("sdc", "b", more=alias.format("one"))
    )
    assert "alias ua-two of disk sdb does not match ua-one" in refusal(now, swapped)
    # Clients that make a disk anew leave it out.
    assert seen(goes_on(now, guest(rbd("sdb", "a"), rbd("sdc", "b")))) == seen(now)


UUID = "aaaaaaaa-0000-4000-8000-000000000001"


def test_a_volume_is_known_by_its_uuid() -> None:
    now = define(
        guest(lvol("sda", "a"), lvol("sdb", "b")),
        SETTINGS,
        new_uuid=NEW_UUID,
        controller=True,
        uuids={"lvs0/a": UUID.replace("1", "2"), "lvs0/b": UUID},
    ).xml
    change = detach(now, lvol("sda", "a"), SETTINGS, live=True)
    assert change is not None
    now = set_metadata(now, change)
    other = guest(lvol("sdb", "renamed"))
    for uuids in ({}, {"lvs0/renamed": UUID}):
        there = luns(goes_on(now, other, uuids))["sdb"]
        assert (there.target, there.uuid, there.volume.lvol) == (1, UUID, "renamed")
    said = refusal(now, other, {"lvs0/renamed": UUID.replace("1", "3")})
    assert f"lvs0/renamed (UUID {UUID.replace('1', '3')}) of disk sdb does not match" in said
    unknown = running(lvol("sdb", "b"))
    assert "lvs0/renamed of disk sdb does not match lvs0/b" in refusal(unknown, other)


def test_volumes_that_changed_places_are_refused() -> None:
    uuids = {"lvs0/a": UUID.replace("1", "2"), "lvs0/b": UUID}
    given = guest(lvol("sda", "a"), lvol("sdb", "b"))
    now = define(given, SETTINGS, new_uuid=NEW_UUID, controller=True, uuids=uuids).xml
    said = refusal(now, guest(lvol("sda", "b"), lvol("sdb", "a")))
    assert f"source lvs0/b (UUID {UUID}) of disk sda does not match lvs0/a" in said


def test_a_definition_keeps_what_its_guest_saw_but_where_several_have_the_image() -> None:
    """XML for the persistent side of a migration, or a define with other monitors."""

    def again(before: str, disk: str) -> LunPlan:
        made = define(guest(disk), SERVED, new_uuid=NEW_UUID, current_xml=before, controller=True)
        (lun,) = luns(made.xml).values()
        return lun

    before = running(rbd("sdb", "a"))
    assert again(before, rbd("sdb", "a", hosts=OTHERS)).identity == luns(before)["sdb"].identity
    assert again(before, rbd("sdb", "b", hosts=OTHERS)).known_as is None
    shared = "<shareable/>"
    before = running(rbd("sdb", "a", more=shared))
    now = again(before, rbd("sdb", "a", hosts=OTHERS, more=shared))
    assert now.known_as is None
    # Its guest, though, goes on with what it knows.
    there = goes_on(before, guest(rbd("sdb", "a", hosts=OTHERS, more=shared)))
    assert seen(there) == seen(before)


def test_what_it_is_known_by_is_of_its_own_image() -> None:
    """Whoever sends the XML cannot have it be known as another image, or as anything."""
    there = goes_on(running(rbd("sdb", "a")), guest(rbd("sdb", "a", hosts=OTHERS)))
    (element,) = etree.fromstring(there.encode()).iter("{*}disks")
    alone = etree.fromstring(etree.tostring(element))
    for disk in alone:
        disk.tag = etree.QName(disk).text
    etree.RelaxNG(etree.parse(ROOT / "schemas/domain-metadata.rng")).assertValid(alone)
    (disk,) = alone
    assert "volumes" not in disk.get("knownby", "volumes")
    escaped = etree.tostring(disk).decode().partition('knownby="')[2].partition('"')[0]
    assert escaped in there
    for wrong in (
        "x",
        "[]",
        "{}",
        "[" * 100_000,
        escaped.replace("{", "{&quot;image&quot;: &quot;b&quot;, ", 1),
    ):
        with pytest.raises(TranslateError, match="is known by is none of its image"):
            plan(there.replace(escaped, wrong))
    other = there.replace("volumes/a", "volumes/b").replace(
        luns(there)["sdb"].uuid or "",
        luns(running(rbd("sdb", "b", hosts=OTHERS)))["sdb"].uuid or "",
    )
    assert luns(other)["sdb"].identity == luns(running(rbd("sdb", "b")))["sdb"].identity


@pytest.mark.parametrize("bus", ["scsi", "virtio"])
def test_the_target_shows_it_as_its_guest_knows_it(bus: str) -> None:
    dev = "sdb" if bus == "scsi" else "vdb"
    now = running(rbd(dev, "a", bus=bus))
    there = plan(goes_on(now, guest(rbd(dev, "a", bus=bus, hosts=OTHERS))))
    assert there is not None
    (lun,) = there.luns
    target = FakeTarget({lun.volume.alias: lun.uuid or ""})
    state = State({}, {lun.bdev_name: Bdev(lun.bdev_name, 512)})
    for action in actions(there, state, whole=True):
        perform(target, action, state)
    shows = ("vhost_scsi_controller_add_target", "vhost_create_blk_controller")
    (sent,) = [given for name, given in target.requests if name in shows]
    assert sent["uuid"] == luns(now)[dev].uuid
    assert sent.get("bdev_name", sent.get("dev_name")) == lun.uuid


def test_a_disk_that_is_shown_as_another_is_not_right() -> None:
    now = running(rbd("sdb", "a"))
    (was,) = luns(now).values()
    (lun,) = luns(goes_on(now, guest(rbd("sdb", "a", hosts=OTHERS)))).values()
    assert lun.uuid is not None
    state = State({}, {lun.bdev_name: Bdev(lun.bdev_name, 512)})
    right = shown(lun.uuid, was.uuid)
    assert is_right(lun, right, state)
    assert not is_right(lun, shown(lun.uuid, None), state)
    assert not is_right(replace(lun, known_as=None), right, state)
    assert is_right(replace(lun, known_as=None), shown(lun.uuid, None), state)


def shown(bdev: str, identity: str | None) -> ObservedDisk:
    return ObservedDisk(bdev, identity or bdev, read_only=False, block_size=512, identity=identity)


def test_a_guest_that_goes_on_keeps_the_queues_of_its_controller() -> None:
    """Its driver uses them all, whatever this host would give to one that boots."""
    client = domain(lvol("sda")).replace("<vcpu>2<", "<vcpu>6<")
    had = translated(client).xml
    for settings in (replace(SETTINGS, max_queues=2), replace(SETTINGS, max_queues=64)):
        for given, current in ((client, had), (had, None)):
            gone_on = define(given, settings, new_uuid=NEW_UUID, current_xml=current, running=True)
            assert gone_on.plan is not None and gone_on.plan.num_queues == 6
            assert overrides(gone_on.xml)["num_queues"] == "6"
    booted = define(had, replace(SETTINGS, max_queues=2), new_uuid=NEW_UUID, current_xml=had)
    assert overrides(booted.xml)["num_queues"] == "2"
