"""The connection itself: pass-through, trust, identity, bad peers, libvirtd going away."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from plugin.gateway.__main__ import set_up_log
from plugin.gateway.errors import Code, Refused
from plugin.gateway.events import DeviceChange, DeviceEvent
from plugin.gateway.messages import (
    LLONG,
    STRING,
    DomainCall,
    TypedParam,
    XmlCall,
    pack_params,
)
from plugin.gateway.peer import Peer, peer_of, start_time
from plugin.gateway.procs import Proc
from plugin.gateway.upstream import open_arguments
from plugin.gateway.wire import (
    KEEPALIVE_PROGRAM,
    MessageType,
    message,
)
from plugin.gateway.xdr import Writer
from tests.unit.gateway.world import (
    NOBODY,
    UUID_1,
    ReplyError,
    TestClient,
    World,
    disk,
    plain,
    play,
    until,
)

OPEN = open_arguments("qemu:///system")


def test_the_peer_is_who_the_kernel_says() -> None:
    a, b = socket.socketpair()
    with a, b:
        assert peer_of(a) == Peer(os.getpid(), os.getuid(), os.getgid(), start_time(os.getpid()))
    assert start_time(os.getpid()) > 0
    assert start_time(2**22 + 1) == 0


def test_identity_is_handed_on_before_any_other_call(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain()
        world.libvirtd.delay_s[Proc.SET_IDENTITY] = 0.2
        client = world.raw_client()
        # Pipelined: the third call is on the wire before the identity can be set.
        await client.send(Proc.AUTH_LIST)
        await client.send(Proc.CONNECT_OPEN, OPEN)
        serial = await client.send(Proc.LOOKUP_BY_UUID, dom.uuid)
        await client.reply(serial)
        connection = world.libvirtd.connections[0]
        assert [proc for proc, _ in connection.calls] == [
            Proc.AUTH_LIST,
            Proc.CONNECT_OPEN,
            Proc.SET_IDENTITY,
            Proc.LOOKUP_BY_UUID,
        ]
        identity = connection.calls[-1][1]
        assert identity["unix-user-id"] == os.getuid()
        assert identity["process-id"] == os.getpid()
        assert identity["process-time"] == start_time(os.getpid())

    play(tmp_path, body)


@pytest.mark.parametrize("proc", [Proc.GET_XML_DESC, Proc.SET_IDENTITY, Proc.LIST_ALL_DOMAINS])
def test_a_call_before_open_ends_the_connection(tmp_path: Path, proc: Proc) -> None:
    async def body(world: World) -> None:
        client = world.raw_client()
        await client.send(proc)
        await client.send(Proc.CONNECT_OPEN, OPEN)
        assert await client.closed()
        assert world.libvirtd.calls() == []

    play(tmp_path, body)


def test_another_program_before_open_ends_the_connection(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        client = world.raw_client()
        await client.channel.send(message(MessageType.CALL, 1, 1, program=0x20008087))
        assert await client.closed()
        assert world.libvirtd.calls() == []

    play(tmp_path, body)


def test_without_identity_there_is_no_connection(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        world.libvirtd.refuse[Proc.SET_IDENTITY] = Refused(Code.ACCESS_DENIED, "no")
        client = world.raw_client()
        await client.send(Proc.CONNECT_OPEN, OPEN)
        assert await client.closed()

    play(tmp_path, body)


def test_a_failed_open_can_be_tried_again(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain()
        world.libvirtd.refuse[Proc.CONNECT_OPEN] = Refused(Code.NO_CONNECT, "no such driver")
        client = world.raw_client()
        with pytest.raises(ReplyError, match="no such driver"):
            await client.call(Proc.CONNECT_OPEN, OPEN)
        del world.libvirtd.refuse[Proc.CONNECT_OPEN]
        await client.open()
        await client.call(Proc.LOOKUP_BY_UUID, dom.uuid)

    play(tmp_path, body)


@pytest.mark.usefixtures("as_nobody")
def test_only_root_may_set_another_identity(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        client = await world.client()
        root = pack_params([TypedParam("unix-user-id", 4, 0)]) + bytes(Writer().u32(0))
        with pytest.raises(ReplyError, match="only root") as error:
            await client.call(Proc.SET_IDENTITY, root)
        assert error.value.code == Code.OPERATION_DENIED
        assert world.libvirtd.calls().count(Proc.SET_IDENTITY) == 1
        assert world.libvirtd.connections[0].identity["unix-user-id"] == NOBODY.uid

    play(tmp_path, body)


def test_an_identity_set_by_root_holds_for_our_own_calls_too(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain()
        client = await world.client()
        params = [TypedParam("process-id", LLONG, 4711), TypedParam("user-name", STRING, "eve")]
        await client.call(Proc.SET_IDENTITY, pack_params(params) + bytes(Writer().u32(0)))
        await client.attach(dom.ref, disk(), 1)
        seen = [
            identity.get("user-name")
            for connection in world.libvirtd.connections
            for proc, identity in connection.calls
            if proc == Proc.SET_METADATA
        ]
        assert seen and set(seen) == {"eve"}

    play(tmp_path, body)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\0" * 64,
        b"GET / HTTP/1.1\r\n\r\n" * 4,
        b"\xff" * 4096,
        message(MessageType.CALL, 1, 1, OPEN)[:-3],
        message(MessageType.CALL_WITH_FDS, 309, 1, b"\0\0\0\x05"),
    ],
)
def test_garbage_ends_that_connection_only(tmp_path: Path, garbage: bytes) -> None:
    async def body(world: World) -> None:
        dom = world.domain()
        good = await world.client()
        for opened in (False, True):
            bad = await world.client() if opened else world.raw_client()
            with suppress(ConnectionError):
                bad.sock.send(garbage)
                bad.sock.shutdown(socket.SHUT_WR)
            assert await bad.closed()
        await good.call(Proc.LOOKUP_BY_UUID, dom.uuid)

    play(tmp_path, body)


def test_malformed_arguments_are_an_error_of_that_call(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain()
        client = await world.client()
        for proc in (Proc.ATTACH_DEVICE_FLAGS, Proc.DEFINE_XML, Proc.BLOCK_RESIZE, Proc.CREATE):
            with pytest.raises(ReplyError) as error:
                await client.call(proc, b"\0\0\0\xff1234")
            assert error.value.code == Code.RPC
        await client.call(Proc.LOOKUP_BY_UUID, dom.uuid)

    play(tmp_path, body)


def test_an_oversized_call_of_ours_ends_the_connection(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        client = await world.client()
        with suppress(ConnectionError):
            await client.send(Proc.DEFINE_XML, bytes(Writer().u32(5 << 20)) + bytes(5 << 20))
        assert await client.closed()

    play(tmp_path, body)


def test_keepalive_and_unknown_calls_pass_through(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        client = world.raw_client()
        ping = message(MessageType.MESSAGE, 1, 0, program=KEEPALIVE_PROGRAM)
        await client.channel.send(ping)
        header = await client.channel.header()
        assert header is not None
        assert (header.program, header.procedure) == (KEEPALIVE_PROGRAM, 2)
        await client.open()
        world.libvirtd.answers[4242] = lambda payload: payload[::-1]
        assert await client.call(4242, b"abcdefgh") == b"hgfedcba"

    play(tmp_path, body)


def test_descriptors_reach_libvirtd(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        client = await world.client()
        world.libvirtd.answers[443] = lambda payload: b""
        with tempfile.TemporaryFile() as file:
            file.write(b"x" * 1234)
            file.flush()
            call = message(MessageType.CALL_WITH_FDS, 443, 77, bytes(Writer().u32(2)))
            await client.channel.send(call, [os.dup(file.fileno()), os.dup(file.fileno())])
        await client.reply(77)
        assert world.libvirtd.dropped_fds == [1234, 1234]

    play(tmp_path, body)


def test_a_client_that_does_not_read_holds_up_nobody(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain()
        slow = await world.client()
        world.libvirtd.answers[4242] = lambda payload: bytes(1 << 20)
        for _ in range(20):
            await slow.send(4242)
        args = bytes(dom.ref.write(Writer()).string(disk()).u32(3))
        await slow.send(Proc.ATTACH_DEVICE_FLAGS, args)
        quick = await world.client()
        await quick.register(DeviceEvent.ADDED)
        await until(lambda: bool(world.target.controllers[f"vm-{UUID_1}"]))
        async with asyncio.timeout(90):
            await quick.call(Proc.LOOKUP_BY_UUID, dom.uuid)
            world.target.add_volume("lvs0/second")
            await quick.attach(dom.ref, disk("lvs0/second", "sdc"), 3)

    play(tmp_path, body)


def test_a_client_that_lets_events_pile_up_is_disconnected(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain()
        client = await world.client()
        await client.register(DeviceEvent.ADDED)
        change = DeviceChange(DeviceEvent.ADDED, dom.ref, "ua-" + "x" * 4000)
        gateway = world.gateway
        for _ in range(3000):
            gateway.announce(change)
            await asyncio.sleep(0)
        assert await client.closed()

    play(tmp_path, body)


@pytest.mark.usefixtures("as_nobody")
def test_an_event_tells_nobody_of_a_domain_they_may_not_see(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain()
        client = await world.client()
        await client.register(DeviceEvent.ADDED)
        world.libvirtd.refuse[Proc.LOOKUP_BY_UUID] = Refused(Code.ACCESS_DENIED, "no")
        await client.attach(dom.ref, disk(), 1)
        await asyncio.sleep(0.1)
        await client.xml(dom.ref)
        assert client.messages == []

    play(tmp_path, body)


def test_a_deregistered_client_gets_no_events(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain()
        client = await world.client()
        await client.register(DeviceEvent.ADDED)
        await client.call(Proc.CALLBACK_DEREGISTER_ANY, bytes(Writer().i32(7)))
        await client.attach(dom.ref, disk(), 1)
        await client.xml(dom.ref)
        assert client.messages == []

    play(tmp_path, body)


def test_legacy_registrations_get_removals(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        client = await world.client()
        event = bytes(Writer().i32(DeviceEvent.REMOVED.value))
        await client.call(Proc.EVENT_REGISTER_ANY, event)
        await client.detach(dom.ref, disk(), 1)
        proc, _ = await client.event()
        assert proc == Proc.EVENT_DEVICE_REMOVED

    play(tmp_path, body)


def test_libvirtd_going_away_ends_its_clients_and_coming_back_serves_new_ones(
    tmp_path: Path,
) -> None:
    async def body(world: World) -> None:
        dom = world.domain()
        old = await world.client()
        await world.libvirtd.stop()
        assert await old.closed()
        connecting = asyncio.create_task(world.client())
        await asyncio.sleep(0.2)
        world.libvirtd.connections.clear()
        await world.libvirtd.start()
        new = await connecting
        await new.attach(dom.ref, disk(), 1)

    play(tmp_path, body)


def test_a_call_under_way_when_libvirtd_goes_away_fails(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain()
        client = await world.client()
        world.libvirtd.delay_s[Proc.GET_XML_DESC] = 30
        waiting = asyncio.create_task(client.xml(dom.ref))
        await asyncio.sleep(0.1)
        await world.libvirtd.stop()
        with pytest.raises((ReplyError, EOFError, ConnectionError)):
            await waiting

    play(tmp_path, body)


def test_a_stop_lets_calls_begun_finish(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain()
        client = await world.client()
        idle = await world.client()
        world.libvirtd.delay_s[Proc.GET_BLOCK_INFO] = 0.3
        args = DomainCall(dom.ref, "vda").pack(text=True, flags=True)
        waiting = asyncio.create_task(client.call(Proc.GET_BLOCK_INFO, args))
        await until(lambda: Proc.GET_BLOCK_INFO in world.libvirtd.calls())
        gateway = world.gateway
        gateway.stop()
        assert await waiting == bytes(Writer().u64(1).u64(2).u64(3))
        assert await idle.closed()

    play(tmp_path, body)


def test_more_clients_than_slots_wait(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain()
        first, second = await world.client(), await world.client()
        third = TestClient(world.path)
        opening = asyncio.create_task(third.open())
        await asyncio.sleep(0.1)
        assert not opening.done()
        first.channel.close()
        await opening
        await second.call(Proc.LOOKUP_BY_UUID, dom.uuid)
        third.channel.close()

    play(tmp_path, body, max_clients=2)


def test_a_serial_in_use_is_refused(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain()
        client = await world.client()
        gate = world.libvirtd.gate[Proc.GET_BLOCK_INFO] = asyncio.Event()
        args = DomainCall(dom.ref, "vda").pack(text=True, flags=True)
        for _ in range(2):
            await client.channel.send(message(MessageType.CALL, Proc.GET_BLOCK_INFO, 99, args))
        with pytest.raises(ReplyError, match="in use"):
            await client.reply(99)
        gate.set()
        await client.reply(99)

    play(tmp_path, body)


@pytest.mark.parametrize("as_json", [True, False])
def test_no_xml_reaches_the_log_even_when_a_handler_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    as_json: bool,
) -> None:
    async def body(world: World) -> None:
        def broken(*words: object, **named: object) -> None:
            raise ZeroDivisionError("a defect")

        monkeypatch.setattr("pydataplane.domain.translate.define", broken)
        client = await world.client()
        secret = plain(devices=disk() + "<graphics type='vnc' passwd='hunter2'/>")
        with pytest.raises(ReplyError, match="see its log") as error:
            await client.call(Proc.DEFINE_XML, XmlCall(secret, None).pack())
        assert error.value.code == Code.INTERNAL_ERROR

    set_up_log("info", as_json=as_json)
    play(tmp_path, body)
    logged = capsys.readouterr().err
    assert "ZeroDivisionError" in logged
    assert "hunter2" not in logged and "<domain" not in logged


def test_a_client_that_says_nothing_takes_no_connection_of_libvirtds(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        silent = [world.raw_client() for _ in range(20)]
        await until(lambda: len(world.gateway.sessions) == 20)
        assert world.libvirtd.connections == []
        await silent[7].open()
        assert len(world.libvirtd.connections) == 1

    play(tmp_path, body)
