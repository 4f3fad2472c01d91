"""Saving, restoring and migrating: which XML libvirtd gets, by old calls and new."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from plugin.gateway.errors import Code, Refused
from plugin.gateway.messages import (
    STRING,
    UINT,
    ULLONG,
    Domain,
    TypedParam,
    XmlCall,
    pack_params,
    pack_string,
)
from plugin.gateway.procs import Proc
from plugin.gateway.xdr import Reader, Writer
from tests.unit.gateway.world import (
    UUID_1,
    UUID_2,
    ReplyError,
    TestClient,
    World,
    disk,
    judged,
    nothing_done,
    play,
)

CONTROLLER = f"vm-{UUID_1}"
COOKIE = b"<qemu-migration/>"


class Seen:
    """Answers a call and keeps its arguments."""

    def __init__(self, world: World, proc: Proc, answer: bytes = b"") -> None:
        self.payload = b""
        self._answer = answer
        self.luns: dict[int, str] = {}
        self._world = world
        world.libvirtd.answers[proc] = self._take

    def _take(self, payload: bytes) -> bytes:
        self.payload = payload
        if CONTROLLER in self._world.target.controllers:
            self.luns = self._world.target.controllers[CONTROLLER]
        return self._answer


async def clients_xml(client: TestClient, dom: Domain) -> str:
    """Returns what a client would send: what it sees, with a change of its own."""
    xml = await client.xml(dom, 2)
    assert "vhostuser" not in xml and "lvs0/data" in xml
    return xml.replace("<vcpu>1</vcpu>", "<vcpu>3</vcpu>")


def is_libvirts(xml: str) -> bool:
    return "vhost-user-scsi-pci" in xml and "<vcpu>3</vcpu>" in xml and CONTROLLER in xml


def texts(params: list[TypedParam]) -> dict[str, str]:
    return {param.field: str(param.value) for param in params}


def begin(dom: Domain, xml: str) -> bytes:
    writer = dom.write(Writer())
    return bytes(writer.optional(xml, writer.string).u64(1).optional("n", writer.string).u64(0))


def perform(dom: Domain, xml: str) -> bytes:
    writer = dom.write(Writer())
    writer.optional(xml, writer.string).opaque(COOKIE).optional("d", writer.string)
    return bytes(writer.optional(None, writer.string).u64(3).u32(0).u64(0))


def save(dom: Domain, xml: str) -> bytes:
    writer = dom.write(Writer()).string("/image")
    return bytes(writer.optional(xml, writer.string).u32(4))


def define_managed(dom: Domain, xml: str) -> bytes:
    writer = dom.write(Writer())
    return bytes(writer.optional(xml, writer.string).u32(0))


@pytest.mark.parametrize(
    ("proc", "make", "skip"),
    [
        (Proc.MIGRATE_BEGIN3, begin, 0),
        (Proc.MIGRATE_PERFORM3, perform, 0),
        (Proc.SAVE_FLAGS, save, 1),
        (Proc.MANAGED_SAVE_DEFINE_XML, define_managed, 0),
    ],
)
def test_xml_among_words(
    tmp_path: Path, proc: Proc, make: Callable[[Domain, str], bytes], skip: int
) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        saved = pack_string(dom.live or "")
        world.libvirtd.answers[Proc.MANAGED_SAVE_GET_XML_DESC] = lambda _: saved
        seen = Seen(world, proc)
        client = await world.client()
        sent = make(dom.ref, await clients_xml(client, dom.ref))
        await client.call(proc, sent)
        theirs, ours = Reader(seen.payload), Reader(sent)
        for reader in (theirs, ours):
            Domain.read(reader)
            for _ in range(skip):
                reader.string()
        xml = theirs.optional(theirs.string)
        ours.optional(ours.string)
        assert xml is not None and is_libvirts(xml)
        assert seen.payload[theirs.offset :] == sent[ours.offset :], "the rest as it was"
        without = dom.ref.write(Writer())
        if skip:
            without.string("/image")
        await client.call(proc, bytes(without.u32(0)) + sent[ours.offset :])
        assert seen.payload == bytes(without) + sent[ours.offset :]

    play(tmp_path, body)


@pytest.mark.parametrize(
    ("proc", "field", "before", "after"),
    [
        (Proc.MIGRATE_BEGIN3_PARAMS, "destination_xml", b"", b""),
        (Proc.MIGRATE_PERFORM3_PARAMS, "destination_xml", b"\0\0\0\0", b"\0\0\0\0"),
        (Proc.MIGRATE_PERFORM3_PARAMS, "persistent_xml", b"\0\0\0\0", b"\0\0\0\0"),
        (Proc.SAVE_PARAMS, "dxml", b"", b""),
    ],
)
def test_xml_among_parameters(
    tmp_path: Path, proc: Proc, field: str, before: bytes, after: bytes
) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        seen = Seen(world, proc)
        client = await world.client()
        params = [
            TypedParam("bandwidth", ULLONG, 7),
            TypedParam(field, STRING, await clients_xml(client, dom.ref)),
            TypedParam("parallel.connections", UINT, 2),
        ]
        head = bytes(dom.ref.write(Writer())) + before
        rest = after + bytes(Writer().u32(5))
        await client.call(proc, head + pack_params(params) + rest)
        assert seen.payload.startswith(head) and seen.payload.endswith(rest)
        reader = Reader(seen.payload, len(head))
        found = reader.array(lambda: TypedParam.read(reader), 9)
        assert is_libvirts(texts(found)[field])
        assert [found[0], found[2]] == [params[0], params[2]]

    play(tmp_path, body)


@pytest.mark.parametrize(
    ("flag", "why"),
    [(1 << 15, "post-copy is not"), (1 << 6, "does not copy"), (1 << 7, "not copy")],
)
@pytest.mark.parametrize(
    "proc",
    [
        Proc.MIGRATE_BEGIN3,
        Proc.MIGRATE_PERFORM3,
        Proc.MIGRATE_BEGIN3_PARAMS,
        Proc.MIGRATE_PERFORM3_PARAMS,
    ],
)
def test_what_a_migration_cannot_do_is_refused_before_it_begins(
    tmp_path: Path, proc: Proc, flag: int, why: str
) -> None:
    def sent(dom: Domain, *disks: str) -> bytes:
        writer = dom.write(Writer())
        if proc in (Proc.MIGRATE_BEGIN3, Proc.MIGRATE_PERFORM3):
            writer.optional(None, writer.string)
            if proc == Proc.MIGRATE_PERFORM3:
                writer.opaque(COOKIE).optional("d", writer.string).optional(None, writer.string)
            return bytes(writer.u64(1 | flag).optional(None, writer.string).u64(0))
        if proc == Proc.MIGRATE_PERFORM3_PARAMS:
            writer.optional(None, writer.string)
        words = bytes(writer) + pack_params([TypedParam("migrate_disks", STRING, d) for d in disks])
        cookie = bytes(Writer().opaque(COOKIE)) if proc == Proc.MIGRATE_PERFORM3_PARAMS else b""
        return words + cookie + bytes(Writer().u32(1 | flag))

    async def body(world: World) -> None:
        ours, plain = world.domain(disks=disk()), world.domain("plain", UUID_2)
        seen = Seen(world, proc)
        client = await world.client()
        with pytest.raises(ReplyError, match=why):
            await client.call(proc, sent(ours.ref))
        assert seen.payload == b""
        await client.call(proc, sent(plain.ref))
        assert seen.payload, "without a disk of ours it is libvirt's affair"
        if flag != 1 << 15 and proc in (Proc.MIGRATE_BEGIN3_PARAMS, Proc.MIGRATE_PERFORM3_PARAMS):
            seen.payload = b""
            await client.call(proc, sent(ours.ref, "vdb"))
            assert seen.payload, "no disk of ours is meant"

    play(tmp_path, body)


def prepare(world: World, proc: Proc, xml: str) -> bytes:
    if proc in (Proc.MIGRATE_PREPARE3_PARAMS, Proc.MIGRATE_PREPARE_TUNNEL3_PARAMS):
        params = [TypedParam("destination_xml", STRING, xml)]
        return pack_params(params) + bytes(Writer().opaque(COOKIE).u32(1))
    writer = Writer().opaque(COOKIE)
    if proc == Proc.MIGRATE_PREPARE3:
        writer.optional("tcp://x", writer.string)
    return bytes(writer.u64(1).optional(None, writer.string).u64(0).string(xml))


@pytest.mark.parametrize(
    "proc",
    [
        Proc.MIGRATE_PREPARE3,
        Proc.MIGRATE_PREPARE_TUNNEL3,
        Proc.MIGRATE_PREPARE3_PARAMS,
        Proc.MIGRATE_PREPARE_TUNNEL3_PARAMS,
    ],
)
def test_the_destination_is_ready_before_libvirtd_is_asked(tmp_path: Path, proc: Proc) -> None:
    async def body(world: World) -> None:
        dom = world.domain(running=False, disks=disk())
        xml = (dom.config or "").replace("/run/virtlun/vhost/", "/elsewhere/")
        world.libvirtd.domains.clear()  # it is another host's
        seen = Seen(world, proc)
        client = await world.client()
        await client.call(proc, prepare(world, proc, xml))
        assert seen.luns == {0: world.target.volumes["lvs0/data"].uuid}
        assert b"/elsewhere/" not in seen.payload
        assert f"/run/virtlun/vhost/{CONTROLLER}".encode() in seen.payload
        # What was left of the guest, which went on elsewhere since, is made anew.
        world.target.requests.clear()
        await client.call(proc, prepare(world, proc, xml))
        called = [name for name, _ in world.target.requests]
        made = called.index("vhost_create_scsi_controller")
        assert called.index("vhost_delete_controller") < made
        seen.payload = b""
        world.target.controllers.clear()
        del world.target.volumes["lvs0/data"]
        with pytest.raises(ReplyError, match="lvs0/data"):
            await client.call(proc, prepare(world, proc, xml))
        assert seen.payload == b"" and world.target.controllers == {}, "no empty volume instead"
        plain = prepare(world, proc, "<domain type='qemu'><name>x</name></domain>")
        await client.call(proc, plain)
        assert seen.payload == plain

    play(tmp_path, body)


@pytest.mark.parametrize("proc", [Proc.RESTORE, Proc.RESTORE_FLAGS, Proc.RESTORE_PARAMS])
def test_a_restored_guest_finds_its_controller(tmp_path: Path, proc: Proc) -> None:
    async def body(world: World) -> None:
        dom = world.domain(running=False, disks=disk())
        image = dom.config or ""
        world.libvirtd.answers[Proc.SAVE_IMAGE_GET_XML_DESC] = lambda _: pack_string(image)
        seen = Seen(world, proc)
        client = await world.client()
        xml = await clients_xml(client, dom.ref)
        if proc == Proc.RESTORE:
            sent = bytes(Writer().string("/image"))
        elif proc == Proc.RESTORE_FLAGS:
            writer = Writer().string("/image")
            sent = bytes(writer.optional(xml, writer.string).u32(2))
        else:
            params = [TypedParam("file", STRING, "/image"), TypedParam("dxml", STRING, xml)]
            sent = pack_params(params) + bytes(Writer().u32(2))
        await client.call(proc, sent)
        assert seen.luns == {0: world.target.volumes["lvs0/data"].uuid}
        if proc == Proc.RESTORE:
            assert seen.payload == sent
        else:
            assert b"vhost-user-scsi-pci" in seen.payload and b"<vcpu>3" in seen.payload
            assert seen.payload.endswith(sent[-4:])

    play(tmp_path, body)


@pytest.mark.usefixtures("as_nobody")
@pytest.mark.parametrize(
    "allowed", ["", "start", "start write", "start migrate", "start write migrate"]
)
@pytest.mark.parametrize("proc", [Proc.RESTORE_FLAGS, Proc.MIGRATE_PREPARE3_PARAMS])
def test_nothing_is_prepared_for_whoever_lacks_one_of_the_rights(
    tmp_path: Path, proc: Proc, allowed: str
) -> None:
    """Those that remote_protocol.x has with the call."""

    async def body(world: World) -> None:
        dom = world.domain(running=False, disks=disk())
        xml = dom.config or ""
        world.libvirtd.answers[Proc.SAVE_IMAGE_GET_XML_DESC] = lambda _: pack_string(xml)
        needed = {"start", "write"} | ({"migrate"} if proc != Proc.RESTORE_FLAGS else set())
        may = needed <= set(allowed.split())
        seen = Seen(world, proc)
        if not may:
            world.libvirtd.refuse[proc] = Refused(Code.ACCESS_DENIED, "libvirtd's own words")
        world.target.requests.clear()
        client = await world.client()
        sent = restore_call(proc) if proc == Proc.RESTORE_FLAGS else prepare(world, proc, xml)
        if may:
            await client.call(proc, sent)
            assert seen.luns == {0: world.target.volumes["lvs0/data"].uuid}
        else:
            with pytest.raises(ReplyError, match="libvirtd's own words"):
                await client.call(proc, sent)
            assert nothing_done(world)

    play(tmp_path, body, **judged(tmp_path, allowed))


def test_save_images_are_shown_and_defined_as_the_clients(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(running=False, disks=disk())
        image = (dom.config or "").replace(
            "<source dev", "<driver name='qemu' type='raw'/><source dev"
        )
        for proc in (Proc.SAVE_IMAGE_GET_XML_DESC, Proc.MANAGED_SAVE_GET_XML_DESC):
            world.libvirtd.answers[proc] = lambda _: pack_string(image)
        client = await world.client()
        args = bytes(Writer().string("/image").u32(0))
        shown = Reader(await client.call(Proc.SAVE_IMAGE_GET_XML_DESC, args)).string()
        assert "vhostuser" not in shown and "lvs0/data" in shown
        seen = Seen(world, Proc.SAVE_IMAGE_DEFINE_XML)
        args = bytes(Writer().string("/image").string(shown).u32(0))
        await client.call(Proc.SAVE_IMAGE_DEFINE_XML, args)
        reader = Reader(seen.payload)
        assert reader.string() == "/image"
        assert reader.string() == image, "what it was, byte for byte"

    play(tmp_path, body)


def restore_call(proc: Proc, xml: str | None = None) -> bytes:
    """The arguments of a restore of /image."""
    writer = Writer().string("/image")
    return bytes(writer.optional(xml, writer.string).u32(0) if proc != Proc.RESTORE else writer)


@pytest.mark.parametrize("with_xml", [False, True], ids=["image", "image and XML"])
def test_an_image_that_is_exchanged_before_its_domain_is_held_prepares_nothing(
    tmp_path: Path, with_xml: bool
) -> None:
    async def body(world: World) -> None:
        dom = world.domain(running=False, disks=disk())
        image = (dom.config or "").replace("<vcpu>1<", "<vcpu>2<")
        shown = iter([image])
        world.libvirtd.answers[Proc.SAVE_IMAGE_GET_XML_DESC] = lambda _: pack_string(
            next(shown, dom.config or "")
        )
        seen = Seen(world, Proc.RESTORE_FLAGS)
        client = await world.client()
        with pytest.raises(ReplyError, match="/image has changed while it was read"):
            xml = dom.config if with_xml else None
            await client.call(Proc.RESTORE_FLAGS, restore_call(Proc.RESTORE_FLAGS, xml))
        assert world.target.controllers == {} and seen.payload == b""

    play(tmp_path, body)


@pytest.mark.parametrize("image", [None, UUID_2], ids=["unreadable", "another's"])
def test_of_xml_that_is_not_the_images_nothing_is_prepared(
    tmp_path: Path, image: str | None
) -> None:
    """The XML names the victim with its volume; what libvirtd was given, it says no to."""

    async def body(world: World) -> None:
        victim = world.domain(running=False, disks=disk())
        xml = victim.config or ""

        def read(_: bytes) -> bytes:
            if image is None:
                raise Refused(Code.ACCESS_DENIED, "no")
            return pack_string(xml.replace(UUID_1, image))

        world.libvirtd.answers[Proc.SAVE_IMAGE_GET_XML_DESC] = read
        seen = Seen(world, Proc.RESTORE_FLAGS)
        client = await world.client()
        sent = restore_call(Proc.RESTORE_FLAGS, xml)
        await client.call(Proc.RESTORE_FLAGS, sent)
        assert seen.payload == sent and seen.luns == {}
        made = ("vhost_create_scsi_controller", "vhost_scsi_controller_add_target")
        assert not [method for method in world.target.calls if method in made]

    play(tmp_path, body)


def test_what_is_kept_of_a_definition_is_read_when_nobody_changes_it(tmp_path: Path) -> None:
    """A creation waits for whoever changes the domain, and only then looks at what there is."""

    async def body(world: World) -> None:
        dom = world.domain(running=False, disks=disk())
        client, services = await world.client(), world.gateway.services
        looks = (Proc.LOOKUP_BY_UUID, Proc.GET_XML_DESC, Proc.CREATE_XML)
        payload = XmlCall((dom.config or "").replace("<vcpu>1<", "<vcpu>3<"), 0).pack()
        async with services.domain_lock(dom.uuid):
            await services.admin()
            serial = await client.send(Proc.CREATE_XML, payload)
            # What comes after it on the same connection has come to libvirtd.
            await client.call(Proc.LIST_ALL_DOMAINS, bytes(Writer().i32(1).u32(0)))
            await asyncio.sleep(0.2)
            assert not [call for call in world.libvirtd.calls() if call in looks]
        await client.reply(serial)
        assert dom.live is not None and "<vcpu>3<" in dom.live

    play(tmp_path, body)
