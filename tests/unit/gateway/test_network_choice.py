"""Domains that say themselves which of their disks over the network are served."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from uuid import UUID

import pytest

from plugin.gateway.domsnapshots import REDEFINE
from plugin.gateway.errors import Code, GatewayError, Refused
from plugin.gateway.events import DeviceEvent
from plugin.gateway.handlers import start as start_handler
from plugin.gateway.messages import (
    STRING,
    Domain,
    DomainCall,
    TypedParam,
    pack_params,
    pack_string,
    read_string,
)
from plugin.gateway.procs import Proc
from plugin.gateway.reconcile import reconcile_domain
from plugin.gateway.xdr import Reader, Writer
from pydataplane.domain import translate
from pydataplane.domain.names import NETWORK_NAMESPACE
from pydataplane.domain.translate import Settings, networkchoice
from tests.unit.gateway.fake_libvirtd import Connection, FakeDomain, Hang
from tests.unit.gateway.test_going_on import WAYS, disk, sent_xml
from tests.unit.gateway.test_images import IMAGE, knows_secret
from tests.unit.gateway.test_moving import Seen
from tests.unit.gateway.world import UUID_1, UUID_2, ReplyError, TestClient, World
from tests.unit.gateway.world import disk as lvol
from tests.unit.gateway.world import plain as client_xml
from tests.unit.gateway.world import play as play_with
from tests.unit.translate.domains import canonical

LIVE, CONFIG = 1, 2
DISK = disk("sdb", "volume-1")
"""On IMAGE."""
NOT_ALLOWED = "asks in its metadata .* that virtlun serves its rbd disks, which this host"
KEY = "virtlun"


def element(serve: str) -> str:
    """Returns the element as a client writes it into a domain."""
    return f'<v:network xmlns:v="{NETWORK_NAMESPACE}" serve="{serve}"/>'


def saying(serve: str | None, devices: str = DISK) -> str:
    """Returns a client's domain."""
    xml = client_xml(devices=devices)
    if serve is None:
        return xml
    return xml.replace("<vcpu>", f"<metadata>{element(serve)}</metadata>\n  <vcpu>", 1)


def put(world: World, serve: str | None, devices: str = DISK) -> FakeDomain:
    """Has libvirtd run such a domain with a controller, by a host that allows all of it."""
    settings = Settings(on_request=frozenset({"rbd"}))
    xml = saying(serve, devices)
    config = translate.define(xml, settings, new_uuid=UUID(int=0)).xml
    live = translate.define(xml, settings, new_uuid=UUID(int=0), controller=True).xml
    return world.libvirtd.add(
        "one", config=config, live=live.replace("<domain ", "<domain id='1' ", 1)
    )


def served(xml: str | None) -> list[str]:
    """Returns the target devs of the disks over the network that are ours in libvirtd's XML."""
    return sorted(networkchoice.served_in(xml or ""))


def play(
    folder: Path, body: Callable[[World], Awaitable[None]], *, host: str = "", asked: str = ""
) -> None:
    """Plays on a host that serves the protocols of `host`, and those of `asked` on request."""

    async def scene(world: World) -> None:
        knows_secret(world.libvirtd)
        await body(world)

    options = {"serve_network": host.split(), "serve_network_on_request": asked.split()}
    play_with(folder, scene, **options)


async def choose(client: TestClient, dom: Domain, text: str | None, flags: int) -> None:
    """Sets the metadata as `virsh metadata --set` does, or removes it."""
    args = dom.write(Writer()).i32(2)
    args.optional(text, args.string).optional(KEY, args.string)
    args.optional(NETWORK_NAMESPACE, args.string).u32(flags)
    await client.call(Proc.SET_METADATA, bytes(args))


def network(serve: str) -> str:
    """Returns the element as virDomainSetMetadata takes it."""
    return f"<network serve='{serve}'/>"


@pytest.mark.parametrize("proc", [Proc.DEFINE_XML, Proc.CREATE_XML])
@pytest.mark.parametrize(
    ("serve", "host", "asked", "ours"),
    [
        (None, "", "rbd", False),
        ("rbd", "", "rbd", True),
        ("", "rbd", "", False),
        ("rbd", "rbd", "", True),
        (None, "rbd", "", True),
        ("rbd nbd", "rbd", "iscsi", True),
        ("nbd", "rbd", "nbd", False),
    ],
)
def test_a_definition_and_a_creation_are_as_the_domain_says(
    tmp_path: Path, proc: Proc, serve: str | None, host: str, asked: str, ours: bool
) -> None:
    async def body(world: World) -> None:
        client = await world.client()
        flags = b"" if proc == Proc.DEFINE_XML else bytes(Writer().u32(0))
        await client.call(proc, pack_string(saying(serve)) + flags)
        dom = world.libvirtd.domains[UUID(UUID_1).bytes]
        xml = dom.config if proc == Proc.DEFINE_XML else dom.live
        assert served(xml) == (["sdb"] if ours else [])
        shown = await client.xml(dom.ref)
        assert IMAGE in shown
        assert (f'serve="{serve}"' in shown) == (serve is not None)
        opened = [name for name, _ in world.target.requests if name == "bdev_rbd_create"]
        assert len(opened) == (ours and proc == Proc.CREATE_XML)

    play(tmp_path, body, host=host, asked=asked)


@pytest.mark.parametrize("asked", ["", "nbd"])
def test_what_the_host_does_not_allow_is_refused_and_nothing_done(
    tmp_path: Path, asked: str
) -> None:
    async def body(world: World) -> None:
        client = await world.client()
        for proc, flags in ((Proc.DEFINE_XML, b""), (Proc.CREATE_XML, bytes(4))):
            with pytest.raises(ReplyError, match=NOT_ALLOWED) as error:
                await client.call(proc, pack_string(saying("rbd")) + flags)
            assert error.value.code == Code.CONFIG_UNSUPPORTED
            assert proc not in world.libvirtd.calls()
        assert world.libvirtd.domains == {}
        dom = put(world, "rbd")
        before = canonical(dom.live or "")
        more = disk("sdc", "volume-2")
        for flags_of in (LIVE, CONFIG, LIVE | CONFIG):
            with pytest.raises(ReplyError, match=NOT_ALLOWED):
                await client.attach(dom.ref, more, flags_of)
        await client.attach(dom.ref, lvol(dev="sdd"), CONFIG)
        await client.detach(dom.ref, lvol(dev="sdd"), CONFIG)
        assert served(dom.live) == served(dom.config) == ["sdb"]
        assert canonical(dom.live or "") == before
        assert "bdev_rbd_create" not in world.target.calls

    play(tmp_path, body, host="", asked=asked)


@pytest.mark.parametrize(
    ("serve", "host", "asked", "ours"),
    [
        (None, "", "rbd", False),
        ("rbd", "", "rbd", True),
        ("", "rbd", "", False),
        (None, "rbd", "", True),
    ],
)
@pytest.mark.parametrize("flags", [LIVE, CONFIG, LIVE | CONFIG])
def test_what_is_attached_is_as_the_domain_says(
    tmp_path: Path, serve: str | None, host: str, asked: str, ours: bool, flags: int
) -> None:
    async def body(world: World) -> None:
        dom = put(world, serve, "")
        made = translate.plan(dom.live or "")
        assert made is not None
        world.target.controllers[made.controller] = {}
        sent = Seen(world, Proc.ATTACH_DEVICE_FLAGS)
        client = await world.client()
        await client.attach(dom.ref, DISK, flags)
        assert (DISK.encode() in sent.payload) is not ours  # whole, as the client sent it
        assert served(dom.live) == (["sdb"] if ours and flags & LIVE else [])
        assert served(dom.config) == (["sdb"] if ours and flags & CONFIG else [])
        assert (IMAGE in world.target.images) == bool(ours and flags & LIVE)

    play(tmp_path, body, host=host, asked=asked)


def test_a_disk_for_both_sides_is_qemus_where_one_of_them_says_so(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = put(world, "rbd", "")
        dom.config = (dom.config or "").replace('serve="rbd"', 'serve=""')
        sent = Seen(world, Proc.ATTACH_DEVICE_FLAGS)
        client = await world.client()
        await client.attach(dom.ref, DISK, LIVE | CONFIG)
        assert DISK.encode() in sent.payload
        assert served(dom.live) == served(dom.config) == []

    play(tmp_path, body, asked="rbd")


def test_a_definition_follows_what_is_said_and_a_guest_keeps_what_it_has(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        client = await world.client()
        await client.register(DeviceEvent.ADDED)
        dom = put(world, None, DISK + lvol(dev="sda"))
        assert served(dom.live) == served(dom.config) == []
        live = dom.live
        await choose(client, dom.ref, network("rbd"), CONFIG)
        assert served(dom.config) == ["sdb"]
        assert dom.live == live
        shown = await client.xml(dom.ref, 2)
        assert f'<virtlun:network xmlns:virtlun="{NETWORK_NAMESPACE}" serve="rbd"/>' in shown
        args = dom.ref.write(Writer()).i32(2)
        args.optional(NETWORK_NAMESPACE, args.string).u32(CONFIG)
        assert "rbd" in read_string(await client.call(Proc.GET_METADATA, bytes(args)))
        defined = dom.config
        await choose(client, dom.ref, network("rbd nbd"), LIVE)
        assert dom.config == defined
        assert served(dom.live) == []
        assert 'serve="rbd nbd"' in (dom.live or "")
        # Of one that does not run the definition is meant where nothing is said of it.
        dom.live = None
        for text, devs in ((network(""), []), (network("rbd"), ["sdb"]), (None, [])):
            await choose(client, dom.ref, text, 0)
            assert served(dom.config) == devs
            plan = translate.plan(dom.config or "")
            assert plan is not None
            assert sorted(lun.dev for lun in plan.luns) == ["sda", *devs]
        assert NETWORK_NAMESPACE not in (dom.config or "")

    play(tmp_path, body, asked="rbd nbd")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (network("rbd"), NOT_ALLOWED),
        (network("rdb"), "'rdb' is none of iscsi, nbd, rbd"),
        ("<network/>", "it has the attribute serve"),
        ("<network", "is wrong"),
        ("<disks serve=''/>", "<disks> is not known there"),
    ],
)
@pytest.mark.parametrize("runs", [True, False])
def test_what_cannot_be_said_changes_nothing(
    tmp_path: Path, text: str, why: str, runs: bool
) -> None:
    async def body(world: World) -> None:
        client, dom = await world.client(), put(world, None)
        if not runs:
            dom.live = None
        before = (dom.live, dom.config)
        with pytest.raises(ReplyError, match=why):
            await choose(client, dom.ref, text, CONFIG)
        for side in (LIVE, LIVE | CONFIG) if runs else ():
            with pytest.raises(ReplyError, match=why):
                await choose(client, dom.ref, text, side)
        assert [NETWORK_NAMESPACE in (xml or "") for xml in (dom.live, dom.config)] == [False] * 2
        assert [served(xml) for xml in (dom.live, dom.config)] == [served(xml) for xml in before]
        assert Proc.DEFINE_XML not in world.libvirtd.calls()

    play(tmp_path, body, asked="nbd")


def test_who_may_not_change_the_domain_is_told_that_alone(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        client, dom = await world.client(), put(world, None)
        world.libvirtd.refuse[Proc.SET_METADATA] = Refused(Code.ACCESS_DENIED, "no")
        for text in (network("rbd"), network("rdb"), None):
            with pytest.raises(ReplyError, match="no") as error:
                await choose(client, dom.ref, text, CONFIG)
            assert error.value.code == Code.ACCESS_DENIED
        assert served(dom.config) == []
        assert Proc.DEFINE_XML not in world.libvirtd.calls()

    play(tmp_path, body)


def test_what_libvirtd_refuses_leaves_neither_word_nor_definition(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        client, dom = await world.client(), put(world, None)
        world.libvirtd.refuse[Proc.DEFINE_XML] = Refused(Code.OPERATION_FAILED, "no free slot")
        for flags in (CONFIG, LIVE | CONFIG):
            with pytest.raises(ReplyError, match="no free slot"):
                await choose(client, dom.ref, network("rbd"), flags)
            assert NETWORK_NAMESPACE not in f"{dom.live}{dom.config}"
            assert served(dom.config) == []
        del world.libvirtd.refuse[Proc.DEFINE_XML]
        await choose(client, dom.ref, network("rbd"), CONFIG)
        assert served(dom.config) == ["sdb"]

    play(tmp_path, body, asked="rbd")


def test_a_call_that_libvirtd_refuses_after_the_definition_leaves_the_one_before(
    tmp_path: Path,
) -> None:
    async def body(world: World) -> None:
        client, dom = await world.client(), put(world, None)
        before, defined = dom.config, []

        def refusing(payload: bytes) -> bytes:
            reader = Reader(payload)
            Domain.read(reader)
            reader.i32()
            if reader.optional(reader.string) is None:  # the question whether the client may
                return b""
            defined.append(served(dom.config))
            raise Refused(Code.INVALID_ARG, "unsupported flags")

        world.libvirtd.answers[Proc.SET_METADATA] = refusing
        with pytest.raises(ReplyError, match="unsupported flags"):
            await choose(client, dom.ref, network("rbd"), CONFIG)
        assert defined == [["sdb"]]
        assert canonical(dom.config or "") == canonical(before or "")

    play(tmp_path, body, asked="rbd")


@pytest.mark.parametrize("done", [False, True])
def test_a_gateway_that_ends_leaves_the_word_with_its_definition(
    tmp_path: Path, done: bool
) -> None:
    """And what was not done is completed by saying it again."""

    async def body(world: World) -> None:
        client, dom = await world.client(), put(world, None)
        hang = world.libvirtd.hang = Hang(Proc.DEFINE_XML, 1, done=done)
        first = asyncio.create_task(choose(client, dom.ref, network("rbd"), CONFIG))
        await hang.reached.wait()
        for connection in world.libvirtd.connections:
            connection.channel.close()
        with pytest.raises((ReplyError, EOFError)):
            await first
        assert (NETWORK_NAMESPACE in (dom.config or "")) is done
        assert served(dom.config) == (["sdb"] if done else [])
        again = await world.client()
        await choose(again, dom.ref, network("rbd"), CONFIG)
        assert served(dom.config) == ["sdb"]
        assert 'serve="rbd"' in (dom.config or "")

    play(tmp_path, body, asked="rbd")


@pytest.mark.parametrize("serve", ["rbd", ""])
@pytest.mark.parametrize("way", WAYS)
def test_a_guest_that_goes_on_keeps_whose_its_disks_are(
    tmp_path: Path, way: str, serve: str
) -> None:
    """Whatever this host allows, and the XML that a client gives says."""
    proc, make = WAYS[way]

    async def body(world: World) -> None:
        dom = put(world, serve, DISK + lvol(dev="sda"))
        now = dom.live or ""
        for saved in (Proc.SAVE_IMAGE_GET_XML_DESC, Proc.MANAGED_SAVE_GET_XML_DESC):
            world.libvirtd.answers[saved] = lambda _: pack_string(now)
        seen = Seen(world, proc)
        client = await world.client()
        shown = translate.present(now, live=False)
        for given in (shown, shown.replace(f'serve="{serve}"', 'serve="iscsi"')):
            await client.call(proc, make(dom.ref, given))
            assert served(sent_xml(seen.payload)) == (["sdb"] if serve else [])

    play(tmp_path, body, host="nbd" if serve else "rbd")


@pytest.mark.parametrize("serve", ["rbd", ""])
def test_a_guest_that_comes_from_another_host_keeps_whose_its_disks_are(
    tmp_path: Path, serve: str
) -> None:
    async def body(world: World) -> None:
        dom = put(world, serve, DISK + lvol(dev="sda"))
        xml = dom.live or ""
        del world.libvirtd.domains[dom.uuid]
        seen = Seen(world, Proc.MIGRATE_PREPARE3_PARAMS)
        client = await world.client()
        given = pack_params([TypedParam("destination_xml", STRING, xml)])
        await client.call(Proc.MIGRATE_PREPARE3_PARAMS, given + bytes(Writer().opaque(b"").u32(1)))
        there = sent_xml(seen.payload)
        assert served(there) == (["sdb"] if serve else [])
        assert f'serve="{serve}"' in there
        assert (IMAGE in world.target.images) == bool(serve)

    play(tmp_path, body, host="" if serve else "rbd")


@pytest.mark.parametrize("serve", ["rbd", ""])
def test_a_gateway_that_starts_again_leaves_disks_whose_they_are(
    tmp_path: Path, serve: str
) -> None:
    async def body(world: World) -> None:
        dom = put(world, serve)
        before = (dom.live, dom.config)
        plan = translate.plan(dom.live or "")
        assert plan is not None
        grants = world.gateway.services.image_grants
        grants.add(plan.controller, {lun.bdev_name: None for lun in plan.luns})
        await reconcile_domain(world.gateway.services, dom.ref)
        assert (dom.live, dom.config) == before
        assert (IMAGE in world.target.images) == bool(serve)

    play(tmp_path, body, host="" if serve else "rbd")


def test_a_start_is_of_what_was_defined(tmp_path: Path) -> None:
    """Whatever the settings of the host are by then."""

    async def body(world: World) -> None:
        client = await world.client()
        for serve in ("rbd", ""):
            dom = put(world, serve)
            dom.live = None
            await client.call(Proc.CREATE_WITH_FLAGS, DomainCall(dom.ref).pack(flags=True))
            assert served(dom.live) == (["sdb"] if serve else [])

    play(tmp_path, body, host="nbd")


@pytest.mark.parametrize("way", [Proc.CREATE_WITH_FLAGS, Proc.CREATE_XML])
@pytest.mark.parametrize("devices", [DISK, DISK + lvol(dev="sda")])
def test_a_start_by_qemu_waits_for_the_target_to_let_go(
    tmp_path: Path, way: Proc, devices: str
) -> None:
    """QEMU would find the image locked, or be without its lock in the middle of a write."""

    async def body(world: World) -> None:
        client, dom = await world.client(), put(world, "rbd", devices)
        dom.live = None
        await client.call(Proc.CREATE_WITH_FLAGS, DomainCall(dom.ref).pack(flags=True))
        (uuid,) = [world.target.volumes[name].uuid for name in world.target.images]
        controller = f"vm-{UUID_1}"
        assert world.target.users(uuid) == [controller]
        world.target.connected.add(controller)
        await choose(client, dom.ref, network(""), CONFIG)
        await client.call(Proc.CREATE_WITH_FLAGS, DomainCall(dom.ref).pack(flags=True))
        assert world.target.users(uuid) == [controller]  # it runs
        dom.live = None
        starts = {
            Proc.CREATE_WITH_FLAGS: DomainCall(dom.ref).pack(flags=True),
            Proc.CREATE_XML: pack_string(saying("", devices)) + bytes(4),
        }
        seen: list[list[str]] = []
        call = world.libvirtd._call

        def noting(connection: Connection, proc: int, payload: bytes) -> bytes:
            if proc in starts:
                seen.append(world.target.users(uuid))
            return call(connection, proc, payload)

        world.libvirtd._call = noting  # type: ignore[method-assign]
        start = asyncio.create_task(client.call(way, starts[way]))
        await asyncio.sleep(0.5)
        assert not start.done()
        assert seen == []
        world.target.connected.clear()
        await start
        assert seen == [[]]
        assert served(dom.live) == []
        assert not world.gateway.services.image_grants.of(controller)

    play(tmp_path, body, asked="rbd")


def test_a_start_by_qemu_is_refused_while_the_last_one_is_connected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_handler, "LEAVE_TRIES", 2)

    async def body(world: World) -> None:
        client, dom = await world.client(), put(world, "rbd")
        dom.live = None
        args = DomainCall(dom.ref).pack(flags=True)
        await client.call(Proc.CREATE_WITH_FLAGS, args)
        world.target.connected.add(f"vm-{UUID_1}")
        await choose(client, dom.ref, network(""), CONFIG)
        dom.live = None
        with pytest.raises(ReplyError, match="is still connected to the target"):
            await client.call(Proc.CREATE_WITH_FLAGS, args)
        assert dom.live is None
        world.target.connected.clear()
        await client.call(Proc.CREATE_WITH_FLAGS, args)
        assert served(dom.live) == []

    play(tmp_path, body, asked="rbd")


def test_metadata_of_ours_that_a_client_writes_gives_it_no_disk(tmp_path: Path) -> None:
    """Not even one that is open for another domain, to whose secret it has no right."""
    shared = DISK.replace("</disk>", "<shareable/></disk>")
    settings = Settings(network=frozenset({"rbd"}))
    other = client_xml("two", UUID_2, shared)
    forged = translate.define(saying(None, shared), settings, new_uuid=UUID(int=0)).xml

    async def body(world: World) -> None:
        client = await world.client()
        dom = world.libvirtd.add(
            "two", config=translate.define(other, settings, new_uuid=UUID(int=0)).xml
        )
        await client.call(Proc.CREATE_WITH_FLAGS, DomainCall(dom.ref).pack(flags=True))
        (uuid,) = [world.target.volumes[name].uuid for name in world.target.images]
        assert world.target.users(uuid) == [f"vm-{UUID_2}"]
        del world.libvirtd.answers[Proc.SECRET_GET_VALUE]
        await client.call(Proc.CREATE_XML, pack_string(forged) + bytes(4))
        assert world.target.users(uuid) == [f"vm-{UUID_2}"]
        assert served(world.libvirtd.domains[UUID(UUID_1).bytes].live) == []

    play(tmp_path, body)


@pytest.mark.parametrize("controller", [False, True])
def test_metadata_of_ours_in_a_snapshot_that_a_client_defines_gives_it_no_disk(
    tmp_path: Path, controller: bool
) -> None:
    shared = DISK.replace("</disk>", "<shareable/></disk>")
    settings = Settings(network=frozenset({"rbd"}))
    plainly = client_xml(devices="")
    forged = translate.define(saying(None, shared), settings, new_uuid=UUID(int=0)).xml
    assert served(forged) == ["sdb"]
    current = translate.define(plainly, settings, new_uuid=UUID(int=0), controller=controller).xml

    async def body(world: World) -> None:
        dom = world.libvirtd.add("one", config=current)
        sent: list[str] = []

        def taking(payload: bytes) -> bytes:
            sent.append(DomainCall.read(payload, text=True, flags=True).text)
            return bytes(dom.ref.write(Writer().string("s")))

        def none(_: bytes) -> bytes:
            raise Refused(Code.NO_DOMAIN_SNAPSHOT, "no such snapshot")

        world.libvirtd.answers[Proc.SNAPSHOT_CREATE_XML] = taking
        world.libvirtd.answers[Proc.SNAPSHOT_GET_XML_DESC] = none
        client = await world.client()
        theirs = f"<domainsnapshot><name>s</name>{plainly}</domainsnapshot>"
        for text in (theirs.replace(plainly, forged), theirs):
            args = DomainCall(dom.ref, text, REDEFINE).pack(text=True, flags=True)
            await client.call(Proc.SNAPSHOT_CREATE_XML, args)
        first, second = sent
        assert IMAGE in first
        inner = first[first.index("<domain ") : first.index("</domain>") + len("</domain>")]
        assert served(inner) == []
        assert second == theirs or controller

    play(tmp_path, body, asked="rbd")


def test_an_image_that_is_open_for_another_domain_is_not_given_to_a_running_one(
    tmp_path: Path,
) -> None:
    async def body(world: World) -> None:
        dom = put(world, "rbd", DISK.replace("</disk>", "<shareable/></disk>"))
        services = world.gateway.services
        plan = translate.plan(dom.live or "")
        assert plan is not None
        (lun,) = plan.luns
        assert lun.uuid is not None
        await services.target.open_image(plan, lun, "key")
        world.target.controllers["vm-other"] = {0: lun.uuid}
        world.target.options["vm-other", 0] = {"shareable": True}
        with pytest.raises(GatewayError, match="by a client that may read its secret"):
            await reconcile_domain(services, dom.ref)
        assert world.target.users(lun.uuid) == ["vm-other"]
        services.image_grants.add(plan.controller, {lun.bdev_name: None})
        await reconcile_domain(services, dom.ref)
        assert sorted(world.target.users(lun.uuid)) == sorted(["vm-other", plan.controller])
        # One that it has it keeps, as of a gateway that noted nothing.
        services.image_grants.forget(plan.controller)
        await reconcile_domain(services, dom.ref)

    play(tmp_path, body)


def test_clients_hear_of_it(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom, client = put(world, None), await world.client()
        await client.register(DeviceEvent.ADDED)
        args = dom.ref.write(Writer().i32(7)).i32(2)
        args.optional(NETWORK_NAMESPACE, args.string)
        await world.libvirtd.event(Proc.CALLBACK_METADATA_CHANGE, bytes(args))
        proc, payload = await client.event()
        assert proc == Proc.CALLBACK_METADATA_CHANGE
        assert NETWORK_NAMESPACE.encode() in payload

    play(tmp_path, body)
