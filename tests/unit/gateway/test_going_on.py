"""XML that a client gives for a guest that goes on: its disks stay what the guest knows them as."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import pytest

from plugin.gateway import snapshotsteps
from plugin.gateway.errors import Code, Refused
from plugin.gateway.journal import SnapshotEntry
from plugin.gateway.messages import STRING, Domain, TypedParam, pack_params, pack_string
from plugin.gateway.procs import Proc
from plugin.gateway.xdr import Reader, Writer
from pydataplane.domain import translate
from pydataplane.domain.translate import LunPlan, Settings
from tests.unit.gateway.test_images import knows_secret
from tests.unit.gateway.test_moving import CONTROLLER, Seen, begin, define_managed, perform, prepare
from tests.unit.gateway.world import UUID_1, ReplyError, World, play
from tests.unit.gateway.world import disk as lvol
from tests.unit.gateway.world import plain as client_xml

SERVED = Settings(network=frozenset({"rbd"}))
SECRET = "00010203-0405-0607-0809-0a0b0c0d0e0f"
MONS, OTHERS = ("10.0.0.1", "10.0.0.2"), ("10.0.0.2", "10.0.0.1", "10.0.0.3")
DEVS = {"sda": "a", "sdb": "b", "sdc": "c"}


def disk(dev: str, image: str, hosts: tuple[str, ...] = MONS) -> str:
    monitors = "".join(f"<host name='{host}' port='6789'/>" for host in hosts)
    return (
        f"<disk type='network' device='disk'><source protocol='rbd' name='volumes/{image}'>"
        f"{monitors}</source><auth username='cinder'><secret type='ceph' uuid='{SECRET}'/></auth>"
        f"<target dev='{dev}' bus='scsi'/></disk>"
    )


def guest() -> str:
    """Returns libvirtd's XML of a guest whose first disk was detached since it started."""
    disks = "".join(disk(dev, image) for dev, image in DEVS.items())
    made = translate.define(client_xml(devices=disks), SERVED, new_uuid=UUID(UUID_1))
    change = translate.detach(made.xml, disk("sda", "a"), SERVED, live=False)
    assert change is not None and change.domain_xml is not None
    return change.domain_xml


def wanted(*devs: str, hosts: tuple[str, ...] = OTHERS) -> str:
    """Returns what a client sends for it, with its own names of monitors."""
    return client_xml(devices="".join(disk(dev, DEVS[dev], hosts) for dev in devs))


def luns(xml: str) -> dict[str, LunPlan]:
    found = translate.plan(xml)
    assert found is not None
    return {lun.dev: lun for lun in found.luns}


def params(dom: Domain, field: str, xml: str, *, after: bytes) -> bytes:
    return bytes(dom.write(Writer())) + pack_params([TypedParam(field, STRING, xml)]) + after


def image(xml: str) -> bytes:
    return bytes(Writer().string("/image").string(xml).u32(0))


COOKIE_AND_FLAGS = bytes(Writer().opaque(b"").u32(0))
FLAGS = bytes(Writer().u32(0))
WAYS: dict[str, tuple[Proc, Callable[[Domain, str], bytes]]] = {
    "migrate": (Proc.MIGRATE_BEGIN3, begin),
    "migrate, second call": (Proc.MIGRATE_PERFORM3, perform),
    "migrate, new": (
        Proc.MIGRATE_BEGIN3_PARAMS,
        lambda dom, xml: params(dom, "destination_xml", xml, after=FLAGS),
    ),
    "save": (Proc.SAVE_PARAMS, lambda dom, xml: params(dom, "dxml", xml, after=FLAGS)),
    "managed image": (Proc.MANAGED_SAVE_DEFINE_XML, define_managed),
    "image": (Proc.SAVE_IMAGE_DEFINE_XML, lambda _, xml: image(xml)),
}


def sent_xml(payload: bytes) -> str:
    """Returns the domain in a call's arguments."""
    text = payload.decode(errors="replace")
    start, end = text.index("<domain"), text.index("</domain>")
    return text[start : end + len("</domain>")]


@pytest.mark.parametrize("way", WAYS)
def test_other_monitors_change_nothing_that_the_guest_sees(tmp_path: Path, way: str) -> None:
    proc, make = WAYS[way]

    async def body(world: World) -> None:
        now = guest()
        dom = world.libvirtd.add("one", config=now, live=now.replace("<domain ", "<domain id='1' "))
        for saved in (Proc.SAVE_IMAGE_GET_XML_DESC, Proc.MANAGED_SAVE_GET_XML_DESC):
            world.libvirtd.answers[saved] = lambda _: pack_string(now)
        seen = Seen(world, proc)
        client = await world.client()
        await client.call(proc, make(dom.ref, wanted("sdb", "sdc")))
        was, there = luns(now), luns(sent_xml(seen.payload))
        assert {dev: lun.target for dev, lun in there.items()} == {"sdb": 1, "sdc": 2}
        for dev, lun in there.items():
            assert lun.identity == was[dev].identity and lun.uuid != was[dev].uuid
        seen.payload = b""
        says = r"disk sdc \(rbd:volumes/c, target 2\) of the guest is not in the XML"
        with pytest.raises(ReplyError, match=says):
            await client.call(proc, make(dom.ref, wanted("sdb")))
        swapped = wanted("sdb", "sdc").replace("/b'", "/x'").replace("/c'", "/b'")
        says = "source rbd:volumes/x of disk sdb does not match rbd:volumes/b"
        with pytest.raises(ReplyError, match=says):
            await client.call(proc, make(dom.ref, swapped))
        assert seen.payload == b""

    play(tmp_path, body, serve_network=["rbd"])


def test_xml_for_the_definition_keeps_what_it_can(tmp_path: Path) -> None:
    """It is of the next start: another image is another disk."""

    async def body(world: World) -> None:
        now = guest()
        dom = world.libvirtd.add("one", config=now, live=now)
        proc = Proc.MIGRATE_PERFORM3_PARAMS
        seen = Seen(world, proc)
        client = await world.client()
        head = bytes(dom.ref.write(Writer()).optional(None, Writer().string))
        given = pack_params([TypedParam("persistent_xml", STRING, wanted("sdc"))])
        await client.call(proc, head + given + COOKIE_AND_FLAGS)
        (lun,) = luns(sent_xml(seen.payload)).values()
        assert (lun.target, lun.identity) == (2, luns(now)["sdc"].identity)

    play(tmp_path, body, serve_network=["rbd"])


def test_the_destination_shows_its_disks_as_the_guest_knows_them(tmp_path: Path) -> None:
    now = guest()
    sent = translate.define(
        wanted("sdb", "sdc"),
        SERVED,
        new_uuid=UUID(UUID_1),
        current_xml=now,
        controller=True,
        running=True,
    ).xml

    async def body(world: World) -> None:
        knows_secret(world.libvirtd)
        proc = Proc.MIGRATE_PREPARE3_PARAMS
        Seen(world, proc)
        client = await world.client()
        await client.call(proc, prepare(world, proc, sent))
        added = {
            given["scsi_target_num"]: (given["uuid"], given["bdev_name"])
            for name, given in world.target.requests
            if name == "vhost_scsi_controller_add_target"
        }
        was, there = luns(now), luns(sent)
        assert added == {
            1: (was["sdb"].uuid, there["sdb"].uuid),
            2: (was["sdc"].uuid, there["sdc"].uuid),
        }
        assert CONTROLLER in world.target.controllers

    play(tmp_path, body)


def test_xml_of_an_image_that_nobody_may_read_is_libvirtds_to_refuse(tmp_path: Path) -> None:
    """By what its guest knows its disks, it alone says."""

    async def body(world: World) -> None:
        dom = world.domain(disks=lvol())
        proc = Proc.MANAGED_SAVE_DEFINE_XML
        refused = Refused(Code.ACCESS_DENIED, "no")
        world.libvirtd.refuse[Proc.MANAGED_SAVE_GET_XML_DESC] = refused
        seen = Seen(world, proc)
        client = await world.client()
        sent = define_managed(dom.ref, await client.xml(dom.ref, 2))
        await client.call(proc, sent)
        assert seen.payload == sent

    play(tmp_path, body)


@pytest.mark.parametrize("which", ["renamed", "another", "unknown"])
@pytest.mark.parametrize("way", WAYS)
def test_a_volume_may_have_another_name_and_no_other_volume_is_taken(
    tmp_path: Path, way: str, which: str
) -> None:
    proc, make = WAYS[way]

    async def body(world: World) -> None:
        own = world.target.volumes["lvs0/data"].uuid
        xml = client_xml(devices=lvol())
        uuids = {"lvs0/data": own}
        now = translate.define(xml, SERVED, new_uuid=UUID(UUID_1), controller=True, uuids=uuids).xml
        made = "not known"
        if which == "renamed":
            del world.target.volumes["lvs0/data"]
        if which != "unknown":
            made = world.target.add_volume("lvs0/new", uuid=own if which == "renamed" else "")
        for saved in (Proc.SAVE_IMAGE_GET_XML_DESC, Proc.MANAGED_SAVE_GET_XML_DESC):
            world.libvirtd.answers[saved] = lambda _: pack_string(now)
        dom = world.libvirtd.add("one", config=now, live=now.replace("<domain ", "<domain id='1' "))
        seen = Seen(world, proc)
        client = await world.client()
        sent = make(dom.ref, xml.replace("lvs0/data", "lvs0/new"))
        # Another host may have it by a name that nobody knows here.
        if which == "renamed" or (which == "unknown" and way.startswith("migrate")):
            await client.call(proc, sent)
            (lun,) = luns(sent_xml(seen.payload)).values()
            assert (lun.uuid, lun.volume.alias) == (own, "lvs0/new")
        else:
            says = rf"lvs0/new \(UUID {made}\) of disk sd. does not match lvs0/data \(UUID {own}\)"
            with pytest.raises(ReplyError, match=says):
                await client.call(proc, sent)
            assert seen.payload == b""

    play(tmp_path, body)


def test_a_snapshots_memory_comes_back_with_the_numbers_of_then(tmp_path: Path) -> None:
    """The domain was defined anew since, and its disks have others."""

    async def body(world: World) -> None:
        second = lvol().replace("data", "more").replace("sdb", "sdc")
        world.target.add_volume("lvs0/more")
        then = translate.define(
            client_xml(devices=lvol() + second), SERVED, new_uuid=UUID(UUID_1), controller=True
        ).xml
        now = translate.define(
            client_xml(devices=second + lvol()), SERVED, new_uuid=UUID(UUID_1), controller=True
        ).xml
        numbers = {dev: lun.target for dev, lun in luns(then).items()}
        assert numbers != {dev: lun.target for dev, lun in luns(now).items()}
        dom = world.libvirtd.add("one", config=now)
        client = await world.client()
        await client.xml(dom.ref, 2)
        world.libvirtd.answers[Proc.SAVE_IMAGE_GET_XML_DESC] = lambda _: pack_string(then)
        seen = Seen(world, Proc.RESTORE_FLAGS)
        services = world.gateway.services
        entry = SnapshotEntry(
            operation="revert",
            uuid=UUID_1,
            name="one",
            snapshot="s",
            held=(),
            start=0,
            memory_file="/memory",
        )
        await snapshotsteps._start(services, await services.admin(), entry, dom.ref)
        volumes = world.target.volumes
        assert seen.luns == {
            lun.target: volumes[lun.volume.alias].uuid for lun in luns(then).values()
        }
        reader = Reader(seen.payload)
        assert (reader.string(), reader.optional(reader.string)) == ("/memory", then)

    play(tmp_path, body)
