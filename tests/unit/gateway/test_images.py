"""Disks over the network: who asks libvirtd for their secrets, and what becomes of their images."""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from uuid import UUID

import pytest

from plugin.config import Config
from plugin.gateway import domsnapshots, snapshotsteps
from plugin.gateway.domsnapshots import REVERT_FORCE, REVERT_RUNNING, Snapshot
from plugin.gateway.errors import Code, GatewayError, Refused
from plugin.gateway.handlers import reverting
from plugin.gateway.messages import STRING, TypedParam, pack_params, pack_string
from plugin.gateway.procs import Proc
from plugin.gateway.reconcile import reconcile_domain
from plugin.gateway.targets import Targets
from plugin.gateway.xdr import Reader, Writer
from pydataplane.domain import images, translate
from pydataplane.domain.translate import Settings
from pydataplane.domain.translate.snapshotxml import DiskSnapshot, SnapshotXml
from pydataplane.errors import RpcError
from tests.support.fake_socket import SocketTarget
from tests.support.fake_target import FakeTarget
from tests.unit.gateway.fake_libvirtd import FakeLibvirtd
from tests.unit.gateway.world import UUID_1, UUID_2, ReplyError, World, plain, play
from tests.unit.gateway.world import disk as lvol

LIVE, CONFIG = 1, 2
VALUE = bytes(range(28))
KEY = base64.b64encode(VALUE).decode()
SECRET = bytes(range(16))
IMAGE = "volumes/volume-1"


def disk(more: str = "", secret: str = "uuid='00010203-0405-0607-0809-0a0b0c0d0e0f'") -> str:
    return (
        f"<disk type='network' device='disk'><source protocol='rbd' name='{IMAGE}'>"
        "<host name='10.0.0.1' port='6789'/><host name='::1' port='3300'/></source>"
        f"<auth username='cinder'><secret type='ceph' {secret}/></auth>"
        f"<target dev='sdb' bus='scsi'/>{more}</disk>"
    )


def knows_secret(libvirtd: FakeLibvirtd) -> None:
    """Has libvirtd know the secret, by UUID and by usage."""
    found = bytes(Writer().fixed(SECRET).i32(2).string("cinder's"))

    def by_uuid(payload: bytes) -> bytes:
        assert payload == SECRET
        return found

    def by_usage(payload: bytes) -> bytes:
        reader = Reader(payload)
        assert (reader.i32(), reader.string()) == (2, "cinder's")
        return found

    def value(payload: bytes) -> bytes:
        assert payload == found + bytes(4)
        return bytes(Writer().opaque(VALUE))

    libvirtd.answers[Proc.SECRET_LOOKUP_BY_UUID] = by_uuid
    libvirtd.answers[Proc.SECRET_LOOKUP_BY_USAGE] = by_usage
    libvirtd.answers[Proc.SECRET_GET_VALUE] = value


def played(folder: Path, body: Callable[[World], Awaitable[None]]) -> None:
    """Plays with rbd and iscsi served, and a secret."""

    async def scene(world: World) -> None:
        knows_secret(world.libvirtd)
        await body(world)

    play(folder, scene, serve_network=["rbd", "iscsi"])


def taken(sent: list[bytes], payload: bytes) -> bytes:
    """Notes a call's payload; returns an empty answer."""
    sent.append(payload)
    return b""


def askers(world: World) -> list[object]:
    """Returns under whose identity the secret's value was asked for, each time."""
    return [
        identity.get("unix-user-id")
        for connection in world.libvirtd.connections
        for proc, identity in connection.calls
        if proc == Proc.SECRET_GET_VALUE
    ]


@pytest.mark.parametrize("secret", ["", "usage="])
def test_the_key_is_asked_for_in_the_clients_name_and_goes_to_the_target_alone(
    tmp_path: Path, secret: str, capfd: pytest.CaptureFixture[str]
) -> None:
    xml = disk(secret='usage="cinder\'s"') if secret else disk()

    async def body(world: World) -> None:
        dom = world.domain()
        client = await world.client()
        await client.attach(dom.ref, xml, LIVE | CONFIG)
        assert askers(world) == [os.getuid()]
        assert world.target.images[IMAGE]["config"] == {
            "mon_host": "10.0.0.1:6789,[::1]:3300",
            "key": KEY,
        }
        assert world.target.images[IMAGE]["user_id"] == "cinder"
        having = [name for name, given in world.target.requests if KEY in str(given)]
        assert having == ["bdev_rbd_create"]
        assert KEY not in f"{dom.live}{dom.config}{await client.xml(dom.ref)}"
        assert IMAGE in await client.xml(dom.ref)

    played(tmp_path, body)
    assert not any(KEY in p.read_text() for p in tmp_path.rglob("*") if p.is_file())
    out = capfd.readouterr()
    assert "attached" in out.err + out.out
    assert KEY not in out.err + out.out


def test_a_password_is_asked_for_by_its_own_kind_and_goes_to_the_target_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    password = "open?sesame@12"
    url = "iscsi://10.0.0.1:3260/iqn.2001-05.com.array:vols/3"
    xml = (
        "<disk type='network' device='disk'><source protocol='iscsi'"
        " name='iqn.2001-05.com.array:vols/3'><host name='10.0.0.1'/><auth username='me'>"
        "<secret type='iscsi' usage='array'/></auth></source><target dev='sdb' bus='scsi'/></disk>"
    )
    found = bytes(Writer().fixed(SECRET).i32(3).string("array"))
    values = [b"two\nlines", password.encode()]

    def by_usage(payload: bytes) -> bytes:
        reader = Reader(payload)
        assert (reader.i32(), reader.string()) == (3, "array")
        return found

    async def body(world: World) -> None:
        world.libvirtd.answers[Proc.SECRET_LOOKUP_BY_USAGE] = by_usage
        world.libvirtd.answers[Proc.SECRET_GET_VALUE] = lambda _: bytes(
            Writer().opaque(values.pop(0))
        )
        dom = world.domain()
        client = await world.client()
        with pytest.raises(ReplyError, match="is no password of CHAP"):
            await client.attach(dom.ref, xml, LIVE)
        assert world.target.images == {}
        await client.attach(dom.ref, xml, LIVE)
        made = world.target.images[url]
        assert (made["user"], made["password"]) == ("me", password)
        assert made["initiator_iqn"] == f"iqn.2008-11.org.linux-kvm:{UUID_1}"
        having = [name for name, given in world.target.requests if password in str(given)]
        assert having == ["bdev_iscsi_create"]
        assert askers(world) == [os.getuid()] * 2
        assert password not in f"{dom.live}{dom.config}{await client.xml(dom.ref)}"

    played(tmp_path, body)
    assert not any(password in p.read_text() for p in tmp_path.rglob("*") if p.is_file())
    out = capfd.readouterr()
    assert password not in out.err + out.out


@pytest.mark.parametrize(
    ("proc", "why", "says"),
    [
        (
            Proc.SECRET_LOOKUP_BY_UUID,
            Refused(Code.NO_DOMAIN, "no secret with matching uuid"),
            "no secret with matching uuid",
        ),
        (
            Proc.SECRET_GET_VALUE,
            Refused(Code.ACCESS_DENIED, "access denied: secret"),
            "access denied: secret",
        ),
        (
            Proc.SECRET_GET_VALUE,
            Refused(Code.INVALID_SECRET, "secret is private"),
            "tells it to QEMU alone",
        ),
    ],
)
def test_who_may_not_have_the_secret_gets_libvirtds_refusal_and_no_disk(
    tmp_path: Path, proc: Proc, why: Refused, says: str
) -> None:
    async def body(world: World) -> None:
        del world.libvirtd.answers[proc]
        world.libvirtd.refuse[proc] = why
        dom = world.domain()
        client = await world.client()
        with pytest.raises(ReplyError, match=says):
            await client.attach(dom.ref, disk(), LIVE | CONFIG)
        assert IMAGE not in f"{dom.live}{dom.config}"
        assert "bdev_rbd_create" not in world.target.calls

    played(tmp_path, body)


def test_an_image_that_is_open_for_another_domain_takes_the_right_to_its_secret(
    tmp_path: Path,
) -> None:
    async def body(world: World) -> None:
        one, two = world.domain(), world.domain("two", UUID_2)
        client, shared = await world.client(), disk("<shareable/>")
        await client.attach(one.ref, shared, LIVE)
        del world.libvirtd.answers[Proc.SECRET_GET_VALUE]
        world.libvirtd.refuse[Proc.SECRET_GET_VALUE] = Refused(Code.ACCESS_DENIED, "no")
        with pytest.raises(ReplyError, match="no"):
            await client.attach(two.ref, shared, LIVE)
        del world.libvirtd.refuse[Proc.SECRET_GET_VALUE]
        knows_secret(world.libvirtd)
        await client.attach(two.ref, shared, LIVE)
        assert list(world.target.images) == [IMAGE]
        (uuid,) = {lun for luns in world.target.controllers.values() for lun in luns.values()}
        assert world.target.users(uuid) == [f"vm-{UUID_1}", f"vm-{UUID_2}"]

    played(tmp_path, body)


def test_an_attach_that_fails_closes_what_it_has_opened_and_nothing_else(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        one, two = world.domain(), world.domain("two", UUID_2)
        client = await world.client()
        world.target.refuse["vhost_scsi_controller_add_target"] = RpcError(-5, "no")
        with pytest.raises(ReplyError, match="no"):
            await client.attach(one.ref, disk(), LIVE)
        assert world.target.images == {}
        del world.target.refuse["vhost_scsi_controller_add_target"]
        await client.attach(one.ref, disk(), LIVE)
        with pytest.raises(ReplyError, match="is in use by domain one"):
            await client.attach(two.ref, disk(), LIVE)
        assert IMAGE in world.target.images
        assert "virtlun_guest_disk_close" in world.target.calls
        world.target.refuse["bdev_rbd_create"] = RpcError(-2, "there is no such image")
        other = disk().replace(IMAGE, "volumes/other").replace("sdb", "sdc")
        says = "disk sdc .image rbd:volumes/other.: there is no such image"
        with pytest.raises(ReplyError, match=says):
            await client.attach(one.ref, other, LIVE)

    played(tmp_path, body)


@pytest.mark.parametrize("serves", [["rbd"], []])
def test_an_image_of_a_guest_that_comes_is_left_to_the_host_that_has_it(
    tmp_path: Path, serves: list[str]
) -> None:
    """Also where this host's own disks of the kind are QEMU's."""
    other = disk().replace(IMAGE, "volumes/other").replace("sdb", "sdc")
    settings = Settings(network=frozenset({"rbd"}))
    xml = translate.define(plain(devices=disk() + other), settings, new_uuid=UUID(UUID_1)).xml
    params = pack_params([TypedParam("destination_xml", STRING, xml)])
    sent = params + bytes(Writer().opaque(b"").u32(1))

    async def body(world: World) -> None:
        knows_secret(world.libvirtd)
        client, proc, target = await world.client(), Proc.MIGRATE_PREPARE3_PARAMS, world.target
        world.libvirtd.refuse[proc] = Refused(Code.OPERATION_FAILED, "no room")
        with pytest.raises(ReplyError, match="no room"):
            await client.call(proc, sent)
        assert target.controllers == {}
        for name in [each.uuid for alias, each in target.volumes.items() if alias in target.images]:
            target.virtlun_guest_disk_close(name)  # as the target does by itself
        target.requests.clear()
        del world.libvirtd.refuse[proc]
        world.libvirtd.answers[proc] = lambda _: b""
        await client.call(proc, sent)
        made = [given for name, given in target.requests if name == "bdev_rbd_create"]
        # What is open already is asked for once more, as it is, so that it stays.
        asked = [(given["rbd_name"], given.get("incoming")) for given in made]
        assert asked == [("volume-1", True), ("other", True), ("volume-1", None)]
        assert {given["config"]["key"] for given in made} == {KEY}
        assert askers(world) == [os.getuid()] * 4
        assert [each["incoming"] for each in target.options.values()] == [True, True]
        # What is left of an attempt whose gateway was killed does not keep them open.
        target.requests.clear()
        await client.call(proc, sent)
        called = [name for name, _ in target.requests]
        assert called.index("vhost_delete_controller") < called.index("bdev_rbd_create")

    play(tmp_path, body, serve_network=serves)


def test_an_image_of_a_guest_that_comes_which_is_closed_meanwhile_is_not_taken_for_it(
    tmp_path: Path,
) -> None:
    other = disk().replace(IMAGE, "volumes/other").replace("sdb", "sdc")
    settings = Settings(network=frozenset({"rbd"}))
    xml = translate.define(plain(devices=disk() + other), settings, new_uuid=UUID(UUID_1)).xml
    params = pack_params([TypedParam("destination_xml", STRING, xml)])

    async def body(world: World) -> None:
        target, client = world.target, await world.client()
        create = target.bdev_rbd_create

        def closes_the_first(name: str, pool_name: str, rbd_name: str, **given: object) -> str:
            made = create(name, pool_name, rbd_name, **given)
            if rbd_name == "other":
                target.virtlun_guest_disk_close(target.volumes[IMAGE].uuid)
            return made

        target.bdev_rbd_create = closes_the_first  # type: ignore[method-assign]
        with pytest.raises(ReplyError, match=r"volume-1 was closed while others were opened"):
            await client.call(
                Proc.MIGRATE_PREPARE3_PARAMS, params + bytes(Writer().opaque(b"").u32(1))
            )
        assert (target.images, target.controllers) == ({}, {})

    played(tmp_path, body)


def test_an_image_that_the_target_goes_on_to_try_is_not_lost() -> None:
    settings = Settings(network=frozenset({"rbd"}))
    made = translate.define(plain(devices=disk()), settings, new_uuid=UUID(UUID_1))
    assert made.plan is not None
    (lun,) = images.of_plan(made.plan)
    target = FakeTarget()
    assert not images.has_image(target, lun)
    target.problems = [f"bdev {lun.bdev_name} is not restored: its cluster is away"]
    assert images.has_image(target, lun)
    target.problems = []
    assert images.open_image(target, f"vm-{UUID_1}", lun, KEY)
    assert images.has_image(target, lun)
    assert not images.open_image(target, f"vm-{UUID_1}", lun, KEY)


def test_for_a_domain_without_a_controller_libvirtd_gets_what_its_client_sent(
    tmp_path: Path,
) -> None:
    async def body(world: World) -> None:
        xml = (world.domain("two", UUID_2).live or "").split("<metadata>")[0]
        bare = f"{xml.split('<memoryBacking>')[0]}<devices/></domain>"
        dom = world.libvirtd.add("bare", live=bare.replace(UUID_2, UUID_1))
        got: list[bytes] = []
        world.libvirtd.answers[Proc.ATTACH_DEVICE_FLAGS] = lambda p: taken(got, p)
        client = await world.client()
        await client.attach(dom.ref, disk(), LIVE)
        (payload,) = got
        assert disk().encode() in payload
        assert askers(world) == []
        assert world.target.images == {}

    played(tmp_path, body)


def test_a_guest_that_comes_from_another_host_keeps_qemus_disk(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        sent: list[bytes] = []
        world.libvirtd.answers[Proc.MIGRATE_PREPARE3_PARAMS] = lambda p: taken(sent, p)
        elsewhere = translate.define(
            plain(devices=disk()), Settings(), new_uuid=UUID(UUID_1), controller=True
        )
        params = [TypedParam("destination_xml", STRING, elsewhere.xml)]
        client = await world.client()
        payload = pack_params(params) + bytes(Writer().opaque(b"").u32(1))
        await client.call(Proc.MIGRATE_PREPARE3_PARAMS, payload)
        (payload,) = sent
        assert b"<source protocol='rbd'" in payload
        assert b"network=" not in payload
        assert "bdev_rbd_create" not in world.target.calls
        assert askers(world) == []

    played(tmp_path, body)


def test_an_image_that_is_restored_with_other_xml_keeps_qemus_disk(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        saved = translate.define(
            plain(devices=disk()), Settings(), new_uuid=UUID(UUID_1), controller=True
        ).xml
        sent: list[bytes] = []
        world.libvirtd.answers[Proc.SAVE_IMAGE_GET_XML_DESC] = lambda _: pack_string(saved)
        world.libvirtd.answers[Proc.SAVE_IMAGE_DEFINE_XML] = lambda p: taken(sent, p)
        client = await world.client()
        given = translate.present(saved, live=False)
        args = bytes(Writer().string("/image").string(given).u32(0))
        await client.call(Proc.SAVE_IMAGE_DEFINE_XML, args)
        (payload,) = sent
        assert b"<source protocol='rbd'" in payload
        assert b"network=" not in payload

    played(tmp_path, body)


def served(xml: str, *, live: bool = True) -> str:
    """Returns a domain as libvirtd has it, with its disks over the network served by the target."""
    settings = Settings(network=frozenset({"rbd"}))
    made = translate.define(xml, settings, new_uuid=UUID(UUID_1)).xml
    return made.replace("<domain ", "<domain id='1' ", 1) if live else made


def test_what_no_client_had_opened_is_not_opened_in_the_gateways_name(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        services = world.gateway.services
        xml = plain(devices=disk() + lvol(dev="sdc"))
        dom = world.libvirtd.add("one", live=served(xml))
        with pytest.raises(GatewayError, match="was not opened for this domain by a client"):
            await reconcile_domain(services, dom.ref)
        assert askers(world) == []
        assert "bdev_rbd_create" not in world.target.calls
        (shown,) = world.target.controllers.values()
        assert list(shown.values()) == [world.target.volumes["lvs0/data"].uuid]
        # Another domain's is no reason, either.
        other = world.domain("two", UUID_2)
        await (await world.client()).attach(other.ref, disk(), LIVE)
        world.target.controllers.clear()
        world.target.virtlun_guest_disk_close(next(iter(world.target.images.values()))["uuid"])
        with pytest.raises(GatewayError, match="was not opened for this domain by a client"):
            await reconcile_domain(services, dom.ref)
        assert world.target.images == {}

    played(tmp_path, body)


def test_what_a_client_had_opened_comes_back_with_the_target_and_ends_with_the_domain(
    tmp_path: Path,
) -> None:
    async def body(world: World) -> None:
        services, dom = world.gateway.services, world.domain()
        await (await world.client()).attach(dom.ref, disk(), LIVE)
        (given,) = world.target.images.values()
        name = f"vm-{UUID_1}"
        assert services.image_grants.has(name, given["uuid"])
        world.target.controllers.clear()
        world.target.virtlun_guest_disk_close(given["uuid"])
        assert world.target.images == {}
        await reconcile_domain(services, dom.ref)
        assert list(world.target.controllers[name].values()) == [given["uuid"]]
        dom.live = None
        await reconcile_domain(services, dom.ref)
        assert not services.image_grants.has(name, given["uuid"])

    played(tmp_path, body)


def test_a_running_guest_has_the_lun_that_it_had_or_none(tmp_path: Path) -> None:
    url = "iscsi://10.0.0.1:3260/iqn.2001-05.com.array:vols/3"
    xml = (
        "<disk type='network' device='disk'><source protocol='iscsi'"
        " name='iqn.2001-05.com.array:vols/3'><host name='10.0.0.1'/></source>"
        "<target dev='sdb' bus='scsi'/></disk>"
    )

    async def body(world: World) -> None:
        services, dom = world.gateway.services, world.domain()
        await (await world.client()).attach(dom.ref, xml, LIVE)
        (given,) = world.target.images.values()
        name, own = f"vm-{UUID_1}", given["uuid"]
        noted = services.image_grants.lun(name, own)
        assert noted is not None and noted.block_size == 512

        def lose() -> None:
            world.target.controllers.clear()
            world.target.virtlun_guest_disk_close(own)
            assert world.target.images == {}

        lose()
        await reconcile_domain(services, dom.ref)
        assert world.target.images[url]["lun_uuid"] == noted.uuid
        lose()
        world.target.renumbered[url] = "another LUN"
        with pytest.raises(GatewayError, match="another LUN is there"):
            await reconcile_domain(services, dom.ref)
        assert world.target.images == {}
        del world.target.renumbered[url]
        services.image_grants.forget(name)
        with pytest.raises(GatewayError, match="its number may be another one's by now"):
            await reconcile_domain(services, dom.ref)
        assert world.target.images == {}

    played(tmp_path, body)


def test_a_secret_for_something_else_is_not_asked_for_its_value(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        other = bytes(Writer().fixed(SECRET).i32(3).string("array"))
        world.libvirtd.answers[Proc.SECRET_LOOKUP_BY_UUID] = lambda _: other
        del world.libvirtd.answers[Proc.SECRET_GET_VALUE]
        client = await world.client()
        with pytest.raises(ReplyError, match="name one with <usage type='ceph'>"):
            await client.attach(world.domain().ref, disk(), LIVE)
        assert world.target.images == {}

    played(tmp_path, body)


def test_of_a_cluster_that_is_silent_one_image_is_asked_for(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        services = world.gateway.services
        far = disk().replace(IMAGE, "volumes/other").replace("sdb", "sdd")
        dom = world.libvirtd.add("one", live=served(plain(devices=disk() + far)))
        named = translate.plan(dom.live or "")
        assert named is not None
        services.image_grants.add(named.controller, {lun.bdev_name: None for lun in named.luns})
        for error, tries in ((RpcError(-110, "no answer"), 1), (RpcError(-2, "no image"), 2)):
            world.target.refuse["bdev_rbd_create"] = error
            world.target.calls.clear()
            with pytest.raises(GatewayError, match=str(error)):
                await reconcile_domain(services, dom.ref)
            assert world.target.calls.count("bdev_rbd_create") == tries

    played(tmp_path, body)


def test_a_revert_does_nothing_before_it_has_the_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    plan = translate.plan(served(plain(devices=disk())))
    held = SnapshotXml(
        "s", "running", None, (), (), (), (DiskSnapshot("sda", "v", "lvs0", "a@s", "u"),)
    )

    async def returned(value: object) -> object:
        return value

    async def reverted(*_: object) -> None:
        done.append("reverted")

    monkeypatch.setattr(domsnapshots, "read", lambda *_: returned(held))
    monkeypatch.setattr(reverting, "_judged", lambda *_: returned(None))
    monkeypatch.setattr(reverting, "_check_revert", lambda *_: returned(plan))
    monkeypatch.setattr(snapshotsteps, "revert", reverted)

    async def body(world: World) -> None:
        dom = world.domain(running=False)
        client = await world.client()
        running = bytes(Snapshot("s", dom.ref).write(Writer()).u32(REVERT_RUNNING))
        world.libvirtd.refuse[Proc.SECRET_GET_VALUE] = Refused(Code.ACCESS_DENIED, "no right")
        with pytest.raises(ReplyError, match="no right"):
            await client.call(Proc.REVERT_TO_SNAPSHOT, running)
        assert done == []
        await client.call(
            Proc.REVERT_TO_SNAPSHOT, bytes(Snapshot("s", dom.ref).write(Writer()).u32(0))
        )
        assert done == ["reverted"], "a domain that stays off needs none"
        del world.libvirtd.refuse[Proc.SECRET_GET_VALUE]
        await client.call(Proc.REVERT_TO_SNAPSHOT, running)
        assert done == ["reverted"] * 2
        assert IMAGE in world.target.images
        assert askers(world) == [os.getuid()] * 2

    played(tmp_path, body)


def test_memory_does_not_go_back_without_a_disk_that_is_not_in_the_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forwarded: list[bytes] = []

    async def unjudged(*_: object) -> None:
        return None

    monkeypatch.setattr(reverting, "_judged", unjudged)

    async def body(world: World) -> None:
        inside = served(plain(devices=disk()), live=False)
        xml = "<domainsnapshot><name>s</name><state>running</state>{}<disks/>{}</domainsnapshot>"
        memory = "<memory snapshot='external' file='/m'/>"
        shown = [xml.format(memory, inside)]
        world.libvirtd.answers[Proc.SNAPSHOT_GET_XML_DESC] = lambda _: pack_string(shown[0])
        world.libvirtd.answers[Proc.REVERT_TO_SNAPSHOT] = lambda p: taken(forwarded, p)
        dom = world.domain()
        client = await world.client()
        plainly, forced = (
            bytes(Snapshot("s", dom.ref).write(Writer()).u32(flags)) for flags in (0, REVERT_FORCE)
        )
        with pytest.raises(ReplyError, match="but not what sdb had then"):
            await client.call(Proc.REVERT_TO_SNAPSHOT, plainly)
        assert forwarded == []
        await client.call(Proc.REVERT_TO_SNAPSHOT, forced)
        for harmless in (
            xml.format("<memory snapshot='no'/>", inside),
            xml.format(memory, served(plain(devices=disk("<readonly/>")), live=False)),
        ):
            shown[0] = harmless
            await client.call(Proc.REVERT_TO_SNAPSHOT, plainly)
        assert forwarded == [forced, plainly, plainly]

    played(tmp_path, body)


def test_images_that_are_open_stay_while_others_are_opened(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        far = [disk().replace(IMAGE, f"volumes/{n}").replace("sdb", f"sd{n}") for n in "xyz"]
        dom = world.libvirtd.add("one", config=served(plain(devices="".join(far)), live=False))
        client = await world.client()
        await client.call(Proc.CREATE, bytes(dom.ref.write(Writer())))
        given = [params for name, params in world.target.requests if name == "bdev_rbd_create"]
        assert [params["rbd_name"] for params in given] == [*"xyxzxy"]
        assert all(params["config"]["key"] == KEY for params in given)
        assert len(askers(world)) == 3

    played(tmp_path, body)


def test_an_image_that_two_targets_have_open_is_the_plans_own(tmp_path: Path) -> None:
    served_plan = translate.plan(served(plain(devices=disk("<shareable/>"))))
    assert served_plan is not None
    (lun,) = images.of_plan(served_plan)
    first = SocketTarget(tmp_path / "first")
    other = SocketTarget(tmp_path / "other")
    config = Config.model_validate(
        {
            "target": {"rpc_socket": first.path, "vhost_dir": "/run/virtlun/vhost"},
            "targets": {"gold": {"rpc_socket": other.path, "vhost_dir": "/gold"}},
        }
    )

    async def body() -> None:
        targets = Targets(config)
        for target in (first, other):
            images.open_image(target, f"vm-{UUID_1}", lun, KEY)
        with pytest.raises(GatewayError, match="give one of the two lvstores another"):
            await targets.volume(lun.bdev_name)
        assert (await targets.image(served_plan, lun)).uuid == lun.uuid
        targets.close()

    with first.serve(), other.serve():
        asyncio.run(body())
