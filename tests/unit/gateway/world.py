"""A gateway between clients and the fakes, all in one event loop."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from uuid import UUID

from plugin.config import Config, DisksSection, GatewaySection, HookSection, TargetSection
from plugin.gateway.channel import Channel
from plugin.gateway.events import DeviceEvent
from plugin.gateway.messages import Domain, DomainCall, read_string
from plugin.gateway.peer import Peer, start_time
from plugin.gateway.procs import Proc
from plugin.gateway.server import Gateway
from plugin.gateway.upstream import open_arguments
from plugin.gateway.wire import MESSAGE_MAX_BYTES, MessageType, Status, message
from plugin.gateway.xdr import Reader, Writer
from pydataplane.domain import translate
from tests.support.fake_socket import SocketTarget
from tests.unit.gateway.fake_libvirtd import FakeDomain, FakeLibvirtd

UUID_1 = "11111111-1111-4111-8111-111111111111"
UUID_2 = "22222222-2222-4222-8222-222222222222"

NOBODY = Peer(os.getpid(), 65534, 65534, start_time(os.getpid()))
"""This process, as if an ordinary user ran it."""

PLAIN = """\
<domain type='qemu'>
  <name>{name}</name>
  <uuid>{uuid}</uuid>
  <memory unit='KiB'>131072</memory>
  <vcpu>1</vcpu>
  <os><type arch='x86_64' machine='q35'>hvm</type></os>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>{devices}
  </devices>
</domain>"""


def plain(name: str = "one", uuid: str = UUID_1, devices: str = "") -> str:
    """Returns a domain as a client writes it."""
    return PLAIN.format(name=name, uuid=uuid, devices=devices)


def disk(alias: str = "lvs0/data", dev: str = "sdb", extra: str = "") -> str:
    """Returns a disk of ours as a client writes it."""
    return (
        f"<disk type='block' device='disk'><source dev='/dev/virtlun/{alias}'/>"
        f"<target dev='{dev}' bus='scsi'/>{extra}</disk>"
    )


async def until(condition: Callable[[], bool], deadline_s: float = 90.0) -> None:
    """Returns when `condition` holds; for what happens in another thread or task."""
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class ReplyError(Exception):
    """The call failed with libvirt's `code`."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class TestClient:
    """What a libvirt client does, bare."""

    __test__ = False

    def __init__(self, path: Path) -> None:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(path))
        self.sock = sock
        self.channel = Channel(sock)
        self.messages: list[tuple[int, bytes]] = []
        self._serials = itertools.count(1)

    async def open(self, uri: str | None = "qemu:///system") -> TestClient:
        """Goes the way to an open connection as libvirt's remote driver does."""
        await self.call(Proc.AUTH_LIST)
        await self.call(Proc.CONNECT_OPEN, open_arguments(uri))
        return self

    async def send(self, proc: int, payload: bytes = b"") -> int:
        """Sends a call without waiting for the reply; returns its serial."""
        serial = next(self._serials)
        await self.channel.send(message(MessageType.CALL, proc, serial, payload))
        return serial

    async def call(self, proc: int, payload: bytes = b"") -> bytes:
        """Calls and returns the result; raises ReplyError."""
        return await self.reply(await self.send(proc, payload))

    async def reply(self, serial: int, deadline_s: float = 60.0) -> bytes:
        """Waits for the reply to `serial`; collects messages on the way."""
        async with asyncio.timeout(deadline_s):
            while (header := await self.channel.header()) is not None:
                payload, _ = await self.channel.payload(header, MESSAGE_MAX_BYTES)
                if header.type == MessageType.MESSAGE:
                    self.messages.append((header.procedure, payload))
                elif header.serial == serial:
                    if header.status == Status.OK:
                        return payload
                    reader = Reader(payload)
                    code = reader.i32()
                    reader.i32()
                    raise ReplyError(code, reader.optional(reader.string) or "")
        raise EOFError("the gateway closed the connection")

    async def closed(self, deadline_s: float = 60.0) -> bool:
        """Whether the gateway closes the connection, after what it still sends."""
        async with asyncio.timeout(deadline_s):
            try:
                while (header := await self.channel.header()) is not None:
                    await self.channel.discard(header)
            except ConnectionError:
                pass
        return True

    async def event(self, deadline_s: float = 60.0) -> tuple[int, bytes]:
        """Returns the next message that is no reply."""
        if self.messages:
            return self.messages.pop(0)
        async with asyncio.timeout(deadline_s):
            header = await self.channel.header()
            assert header is not None and header.type == MessageType.MESSAGE
            payload, _ = await self.channel.payload(header, MESSAGE_MAX_BYTES)
            return header.procedure, payload

    async def register(self, event: DeviceEvent, dom: Domain | None = None) -> None:
        """Registers for an event, for all domains or one."""
        args = Writer().i32(event.value)
        args.optional(dom, lambda value: value.write(args))
        await self.call(Proc.CALLBACK_REGISTER_ANY, bytes(args))

    async def attach(self, dom: Domain, xml: str, flags: int) -> None:
        """Attaches a device."""
        args = DomainCall(dom, xml, flags).pack(text=True, flags=True)
        await self.call(Proc.ATTACH_DEVICE_FLAGS, args)

    async def detach(self, dom: Domain, xml: str, flags: int) -> None:
        """Detaches a device."""
        args = DomainCall(dom, xml, flags).pack(text=True, flags=True)
        await self.call(Proc.DETACH_DEVICE_FLAGS, args)

    async def xml(self, dom: Domain, flags: int = 0) -> str:
        """Returns the domain's XML."""
        args = DomainCall(dom, flags=flags).pack(flags=True)
        return read_string(await self.call(Proc.GET_XML_DESC, args))


class World:
    """The fakes, the gateway and its clients."""

    def __init__(self, folder: Path, **options: object) -> None:
        timeout_s = options.pop("timeout_s", 10)
        served = options.pop("serve_network", [])
        on_request = options.pop("serve_network_on_request", [])
        self.libvirtd = FakeLibvirtd(folder / "libvirtd")
        self.target = SocketTarget(folder / "target")
        self.target.add_volume("lvs0/data")
        self.path, self.path_ro = folder / "gw", folder / "gw-ro"
        values = {"auth": "none", "auth_ro": "none", "socket_group": "", "reconcile": False}
        self.config = Config(
            target=TargetSection.model_validate(
                {
                    "rpc_socket": self.target.path,
                    "vhost_dir": Path("/run/virtlun/vhost"),
                    "timeout_s": timeout_s,
                }
            ),
            # Not as the machine's own QEMU has it.
            disks=DisksSection.model_validate(
                {
                    "reconnect_s": 0,
                    "serve_network": served,
                    "serve_network_on_request": on_request,
                    "iscsi_portals": ["10.0.0.0/8"],
                }
            ),
            hook=HookSection(state_dir=folder / "hook"),
            gateway=GatewaySection.model_validate(
                {
                    **values,
                    "listen": self.path,
                    "listen_ro": self.path_ro,
                    "upstream": self.libvirtd.path,
                    "upstream_ro": self.libvirtd.path_ro,
                    "state_dir": folder / "notes",
                    **options,
                }
            ),
        )
        self._clients: list[TestClient] = []
        self.gateway: Gateway

    async def client(self, *, read_only: bool = False) -> TestClient:
        """Returns a client with an open connection."""
        return await self.raw_client(read_only=read_only).open()

    def raw_client(self, *, read_only: bool = False) -> TestClient:
        """Returns a client that is only connected."""
        client = TestClient(self.path_ro if read_only else self.path)
        self._clients.append(client)
        return client

    def domain(
        self,
        name: str = "one",
        uuid: str = UUID_1,
        *,
        running: bool = True,
        persistent: bool = True,
        disks: str = "",
    ) -> FakeDomain:
        """Puts a domain into libvirtd as a gateway does; if it runs, with controller and LUNs."""
        xml, settings = plain(name, uuid, disks), self.config.settings()
        config = translate.define(xml, settings, new_uuid=UUID(int=0)).xml
        made = translate.define(xml, settings, new_uuid=UUID(int=0), controller=True)
        assert made.plan is not None
        if running:
            self.target.controllers[made.plan.controller] = {
                lun.target: self.target.volumes[lun.volume.alias].uuid for lun in made.plan.luns
            }
            self.target.options |= {
                (made.plan.controller, lun.target): {"shareable": lun.shareable}
                for lun in made.plan.luns
            }
        return self.libvirtd.add(
            name,
            config=config if persistent else None,
            live=made.xml.replace("<domain ", "<domain id='1' ", 1) if running else None,
        )


def play(folder: Path, body: Callable[[World], Awaitable[None]], **options: object) -> None:
    """Runs `body` with a world whose gateway has these options in its [gateway] section.

    But `timeout_s`, which is how long a call of the target may take, seconds, and `serve_network`
    and `serve_network_on_request`.
    """

    async def scene() -> None:
        world = World(folder, **options)
        await world.libvirtd.start()
        world.target.start()
        gateway = world.gateway = Gateway(world.config)
        gateway.open()
        running = asyncio.create_task(gateway.run())
        try:
            async with asyncio.timeout(60):
                await body(world)
        finally:
            for client in world._clients:
                client.channel.close()
            gateway.stop()
            async with asyncio.timeout(90):
                await running
            await world.libvirtd.stop()
            world.target.stop()
        assert not gateway.sessions

    asyncio.run(scene())


def nothing_done(world: World) -> bool:
    """Whether the target has seen only questions."""
    return all("_get_" in method for method, _ in world.target.requests)


def judged(folder: Path, allowed: str) -> dict[str, str]:
    """Returns options under which libvirtd judges calls by polkit, which allows some actions.

    A script stands for pkcheck; tests/libvirt/test_polkit.py has the real one.
    """
    conf = folder / "libvirtd.conf"
    conf.write_text('access_drivers = [ "polkit" ]\n')
    program = folder / "pkcheck"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {folder}/asked\n'
        f'echo " {allowed} " | grep -q " ${{2#org.libvirt.api.domain.}} "\n'
    )
    program.chmod(0o755)
    return {"libvirtd_conf": str(conf), "pkcheck": str(program)}
