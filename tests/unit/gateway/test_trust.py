"""What a client must not get by the gateway: its descriptors, its locks, another's identity."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from plugin.gateway import session
from plugin.gateway.channel import Channel
from plugin.gateway.errors import Code, Refused
from plugin.gateway.events import DeviceEvent
from plugin.gateway.messages import Domain, DomainCall, pack_string
from plugin.gateway.outgoing import Stalled
from plugin.gateway.peer import Peer
from plugin.gateway.procs import Proc
from plugin.gateway.wire import MessageType, message
from plugin.gateway.xdr import Reader, Writer
from pydataplane.domain.xml.document import Document
from tests.unit.gateway.world import (
    NOBODY,
    UUID_1,
    UUID_2,
    ReplyError,
    World,
    disk,
    plain,
    play,
    until,
)

LIVE, CONFIG = 1, 2
OURS = "https://virtlun.dev/xmlns/domain/1"


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_descriptors_of_a_refused_call_are_closed(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        client = await world.client()
        broken = plain(devices=disk() + disk())  # the same target dev twice
        before = 0
        for serial in range(1000, 1040):
            fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]
            payload = bytes(Writer().u32(len(fds)).string(broken).u32(0))
            await client.channel.send(
                message(MessageType.CALL_WITH_FDS, Proc.CREATE_XML_WITH_FILES, serial, payload), fds
            )
            with pytest.raises(ReplyError):
                await client.reply(serial)
            before = before or descriptors()  # with the connections that the first one makes
        assert descriptors() <= before

    play(tmp_path, body)


def test_a_client_that_does_not_read_does_not_hold_a_domain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "STALL_S", 2.0)

    async def body(world: World) -> None:
        dom = world.domain()
        lazy = await world.client()
        world.libvirtd.answers[4242] = lambda payload: bytes(1 << 20)
        for _ in range(4):
            await lazy.send(4242)
        ordinary = "<disk type='file'><source file='/x'/><target dev='vdx' bus='virtio'/></disk>"
        attach = DomainCall(dom.ref, ordinary, LIVE).pack(text=True, flags=True)
        await lazy.send(Proc.ATTACH_DEVICE_FLAGS, attach)
        await until(lambda: Proc.ATTACH_DEVICE_FLAGS in world.libvirtd.calls())
        client = await world.client()
        await client.attach(dom.ref, disk(), LIVE | CONFIG)
        assert "sdb" in await client.xml(dom.ref)

    play(tmp_path, body)


def test_a_write_that_nobody_takes_ends_the_connection() -> None:
    async def body() -> None:
        ours, theirs = socket.socketpair()
        channel = Channel(ours, stall_s=0.1)
        with pytest.raises(Stalled):
            await channel.send(b"\0" * (8 << 20))
        with pytest.raises(ConnectionError):
            await channel.send(b"more")
        channel.close()
        theirs.close()

    asyncio.run(body())


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("kind", [MessageType.CALL, MessageType.CALL_WITH_FDS])
def test_only_root_takes_another_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_only: bool, kind: MessageType
) -> None:
    monkeypatch.setattr("plugin.gateway.session.peer_of", lambda _: NOBODY)

    async def body(world: World) -> None:
        client = await world.client(read_only=read_only)
        payload = Peer(os.getpid(), 0, 0, 0).identity()
        if kind is MessageType.CALL_WITH_FDS:
            payload = bytes(Writer().u32(0)) + payload
        await client.channel.send(message(kind, Proc.SET_IDENTITY, 77, payload))
        with pytest.raises(ReplyError) as error:
            await client.reply(77)
        assert error.value.code == Code.OPERATION_DENIED
        (connection,) = [c for c in world.libvirtd.connections if c.read_only == read_only]
        assert connection.identity["unix-user-id"] == NOBODY.uid

    play(tmp_path, body)


def test_metadata_of_ours_cannot_be_seen_or_changed(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        client = await world.client()
        args = dom.ref.write(Writer()).i32(2)
        args.optional(OURS, args.string).u32(0)
        with pytest.raises(ReplyError) as error:
            await client.call(Proc.GET_METADATA, bytes(args))
        assert error.value.code == Code.NO_DOMAIN_METADATA
        before = dom.live
        args = dom.ref.write(Writer()).i32(2)
        args.optional("<disks/>", args.string).optional("virtlun", args.string)
        args.optional(OURS, args.string).u32(LIVE)
        with pytest.raises(ReplyError) as error:
            await client.call(Proc.SET_METADATA, bytes(args))
        assert error.value.code == Code.OPERATION_DENIED
        assert dom.live == before

    play(tmp_path, body)


def test_what_libvirtd_would_read_less_of_does_not_reach_it(tmp_path: Path) -> None:
    """libvirtd's strings end at a NUL: it would find a whole domain before it, and we no XML."""

    async def body(world: World) -> None:
        dom = world.domain()
        client = await world.client()
        forged = f"<metadata><v:disks xmlns:v='{OURS}' version='1' controller='vm-{UUID_1}'/>"
        xml = plain("two", UUID_2).replace("<devices>", f"{forged}</metadata><devices>", 1) + "\0<"
        device = DomainCall(dom.ref, disk() + "\0<", CONFIG).pack(text=True, flags=True)
        for proc, payload in (
            (Proc.DEFINE_XML, pack_string(xml)),
            (Proc.ATTACH_DEVICE_FLAGS, device),
        ):
            with pytest.raises(ReplyError, match="NUL"):
                await client.call(proc, payload)
            assert proc not in world.libvirtd.calls()

    play(tmp_path, body)


MARK = "<!-- a client's -->"


def two_texts(xml: str) -> bytes:
    return bytes(Writer().string(xml).u32(1).string(xml).u32(0))


@pytest.mark.parametrize(
    ("proc", "payload"),
    [
        (Proc.DEFINE_XML, lambda dom, xml, more: pack_string(xml)),
        (Proc.CREATE_XML, lambda dom, xml, more: bytes(Writer().string(xml).u32(0))),
        (
            Proc.XML_TO_NATIVE,
            lambda dom, xml, more: bytes(Writer().string("qemu-argv").string(xml).u32(0)),
        ),
        (
            Proc.SNAPSHOT_CREATE_XML,
            lambda dom, xml, more: DomainCall(dom, more, 0).pack(text=True, flags=True),
        ),
        (
            Proc.CHECKPOINT_CREATE_XML,
            lambda dom, xml, more: DomainCall(dom, more, 0).pack(text=True, flags=True),
        ),
        (
            Proc.BACKUP_BEGIN,
            lambda dom, xml, more: bytes(
                dom.write(Writer()).string(more).u32(1).string(more).u32(0)
            ),
        ),
        (
            Proc.BLOCK_COPY,
            lambda dom, xml, more: bytes(dom.write(Writer()).string("sdb").string(disk() + more)),
        ),
        (Proc.RESTORE_FLAGS, lambda dom, xml, more: two_texts(xml)),
        (Proc.SAVE_FLAGS, lambda dom, xml, more: bytes(dom.write(Writer())) + two_texts(xml)),
        (
            Proc.MIGRATE_PREPARE3,
            lambda dom, xml, more: bytes(Writer().u32(0).u32(0).u64(0).u32(0).u64(0).string(xml)),
        ),
        (
            Proc.MIGRATE_BEGIN3,
            lambda dom, xml, more: bytes(
                dom.write(Writer()).u32(1).string(xml).u64(0).u32(0).u64(0)
            ),
        ),
        (
            Proc.ATTACH_DEVICE_FLAGS,
            lambda dom, xml, more: DomainCall(dom, more + disk("lvs0/data", "sdc"), LIVE).pack(
                text=True, flags=True
            ),
        ),
    ],
)
def test_what_a_client_wrote_is_read_in_a_thread(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    proc: Proc,
    payload: Callable[[Domain, str, str], bytes],
) -> None:
    """XML may be made to take seconds: they must not be everybody's."""
    read: list[str] = []
    begin = Document.__init__

    def watched(self: Document, text: str) -> None:
        if MARK in text:
            read.append(threading.current_thread().name)
        begin(self, text)

    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        assert dom.live is not None
        client = await world.client()
        made = dom.live.replace("<devices>", f"{MARK}<devices>", 1)
        # Without an image that the client may read, XML for it is nobody's to look at.
        image = pack_string(dom.live)
        world.libvirtd.answers[Proc.SAVE_IMAGE_GET_XML_DESC] = lambda _: image
        monkeypatch.setattr(Document, "__init__", watched)
        with suppress(ReplyError):
            await client.call(proc, payload(dom.ref, made, MARK))

    play(tmp_path, body)
    assert all(name.startswith("xml") for name in read), read
    if proc is not Proc.BLOCK_COPY:
        assert read


def test_events_of_our_own_metadata_are_kept_from_clients(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain()
        client = await world.client()
        await client.register(DeviceEvent.ADDED)

        async def changed(uri: str | None) -> None:
            args = dom.ref.write(Writer().i32(7)).i32(2)
            args.optional(uri, args.string)
            await world.libvirtd.event(Proc.CALLBACK_METADATA_CHANGE, bytes(args))

        for uri in (OURS, "https://virtlun.dev/xmlns/probe/1", "https://example.org/x", None):
            await changed(uri)
        await client.xml(dom.ref)
        seen = []
        for proc, payload in client.messages:
            assert proc == Proc.CALLBACK_METADATA_CHANGE
            reader = Reader(payload)
            reader.i32()
            Domain.read(reader)
            reader.i32()
            seen.append(reader.optional(reader.string))
        assert seen == ["https://example.org/x", None]

    play(tmp_path, body)


def test_an_event_has_libvirtds_name_of_the_domain_not_the_clients(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain()
        watcher, liar = await world.client(), await world.client()
        await watcher.register(DeviceEvent.ADDED)
        await liar.attach(Domain("not-its-name", dom.uuid, 99), disk(), LIVE)
        _, payload = await watcher.event()
        reader = Reader(payload)
        reader.i32()
        assert Domain.read(reader) == Domain("one", dom.uuid, 1)

    play(tmp_path, body)


@pytest.mark.parametrize("call", ["xml", "alias"])
def test_the_carrier_cannot_be_detached(tmp_path: Path, call: str) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        client = await world.client()
        found = re.search(r"<target dev='(\w+)' bus='virtio'/>", dom.live or "")
        assert found is not None
        with pytest.raises(ReplyError, match="carries the virtlun disks"):
            if call == "xml":
                xml = f"<disk type='vhostuser'><target dev='{found[1]}' bus='virtio'/></disk>"
                await client.detach(dom.ref, xml, LIVE)
            else:
                args = DomainCall(dom.ref, "ua-virtlun-scsi0", LIVE).pack(text=True, flags=True)
                await client.call(Proc.DETACH_DEVICE_ALIAS, args)
        assert Proc.DETACH_DEVICE_FLAGS not in world.libvirtd.calls()

    play(tmp_path, body)


@pytest.mark.parametrize(("flags", "taken"), [(LIVE, True), (CONFIG, True), (LIVE | CONFIG, True)])
def test_libvirtds_disk_does_not_take_the_target_dev_of_ours(
    tmp_path: Path, flags: int, taken: bool
) -> None:
    ordinary = "<disk type='file'><source file='/x'/><target dev='{}' bus='scsi'/></disk>"

    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        client = await world.client()
        with pytest.raises(ReplyError, match="target sdb already exists"):
            await client.attach(dom.ref, ordinary.format("sdb"), flags)
        assert (Proc.ATTACH_DEVICE_FLAGS in world.libvirtd.calls()) != taken
        await client.attach(dom.ref, ordinary.format("sdc"), flags)
        assert Proc.ATTACH_DEVICE_FLAGS in world.libvirtd.calls()

    play(tmp_path, body)


def test_a_resize_waits_for_a_detach_and_then_finds_no_disk(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        client, other = await world.client(), await world.client()
        wanting = world.gateway.services.locks._users
        async with world.gateway.services.domain_lock(dom.uuid):
            detach = asyncio.create_task(client.detach(dom.ref, disk(), LIVE | CONFIG))
            await until(lambda: list(wanting.values()) == [2])
            args = dom.ref.write(Writer()).string("sdb").u64(256 << 20).u32(1)
            resize = asyncio.create_task(other.call(Proc.BLOCK_RESIZE, bytes(args)))
            await until(lambda: list(wanting.values()) == [3])
        await detach
        with pytest.raises(ReplyError, match="was not found"):
            await resize
        assert world.target.volumes["lvs0/data"].mib == 64

    play(tmp_path, body)


@pytest.mark.parametrize(
    ("asked", "opened", "ours"),
    [
        ("test:///default", "test:///default", False),
        ("test:///default", None, False),  # libvirtd does not say
        ("qemu:///session", "qemu:///session", False),
        ("qemu:///system?no_verify=1", "qemu:///system?no_verify=1", True),
        (None, "qemu:///system", True),
        (None, "xen:///system", False),
        ("alias", "qemu:///system", True),
        ("qemu:///system", "not asked", True),
    ],
)
def test_handlers_are_for_connections_to_the_hypervisor_we_serve(
    tmp_path: Path, asked: str | None, opened: str | None, ours: bool
) -> None:
    """Another driver's permissions say nothing about a domain of ours, whatever its UUID."""

    async def body(world: World) -> None:
        dom = world.domain()
        if opened is not None:
            world.libvirtd.answers[Proc.CONNECT_GET_URI] = lambda _: pack_string(opened)
        client = await world.raw_client().open(asked)
        await client.register(DeviceEvent.ADDED)
        await client.attach(dom.ref, disk(), LIVE | CONFIG)  # the fake takes what we do not
        luns = world.target.controllers[f"vm-{UUID_1}"]
        assert len(luns) == ours
        assert (Proc.ATTACH_DEVICE_FLAGS in world.libvirtd.calls()) == (not ours)
        shown = "/dev/virtlun/lvs0/data" in await client.xml(dom.ref)
        assert shown == ours
        if not ours:
            other = await world.client()
            await other.attach(dom.ref, disk(), LIVE | CONFIG)
            await client.xml(dom.ref)
        assert bool(client.messages) == ours

    play(tmp_path, body)


def test_who_may_not_connect_where_libvirtd_judges_calls_can_make_no_call(tmp_path: Path) -> None:
    """CONNECT_OPEN itself is judged as root's: the identity follows it."""
    conf = tmp_path / "libvirtd.conf"
    conf.write_text('access_drivers = ["polkit"]\n')

    async def body(world: World) -> None:
        dom = world.domain()
        denied = Refused(Code.ACCESS_DENIED, "'QEMU' denied access")
        world.libvirtd.refuse[Proc.CONNECT_SUPPORTS_FEATURE] = denied
        client = world.raw_client()
        with pytest.raises(ReplyError, match="denied access"):
            await client.open()
        calls = world.libvirtd.calls()
        asked = calls.index(Proc.CONNECT_SUPPORTS_FEATURE)
        assert calls.index(Proc.SET_IDENTITY) < asked, "judged as the client's"
        with pytest.raises(EOFError, match="closed the connection"):
            await client.xml(dom.ref)
        assert Proc.GET_XML_DESC not in world.libvirtd.calls()[asked:]

    play(tmp_path, body, libvirtd_conf=conf)


@pytest.mark.usefixtures("as_nobody")
def test_another_driver_is_no_way_to_another_identity(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        client = await world.raw_client().open("test:///default")
        with pytest.raises(ReplyError, match="only root"):
            await client.call(Proc.SET_IDENTITY, Peer(1, 0, 0, 0).identity())

    play(tmp_path, body)
