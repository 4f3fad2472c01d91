"""Clients that lie: valid conversations with some bytes changed, cut or repeated."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from pathlib import Path

import pytest

from plugin.gateway.messages import DomainCall, XmlCall
from plugin.gateway.procs import Proc
from plugin.gateway.upstream import open_arguments
from plugin.gateway.wire import KEEPALIVE_PROGRAM, MessageType, message
from plugin.gateway.xdr import Writer
from tests.unit.gateway.world import World, disk, plain, play, until

ROUNDS = 25
"""Conversations of one seed."""


def conversation(world: World) -> list[bytes]:
    """Returns messages as a client sends them, one of each kind that the gateway reads."""
    dom = world.domain().ref
    calls = [
        (Proc.AUTH_LIST, b""),
        (Proc.CONNECT_OPEN, open_arguments("qemu:///system")),
        (Proc.CALLBACK_REGISTER_ANY, bytes(Writer().i32(19).u32(0))),
        (Proc.DEFINE_XML_FLAGS, XmlCall(plain(devices=disk()), 0).pack()),
        (Proc.GET_XML_DESC, DomainCall(dom).pack(flags=True)),
        (Proc.ATTACH_DEVICE_FLAGS, DomainCall(dom, disk(), 3).pack(text=True, flags=True)),
        (Proc.GET_BLOCK_INFO, DomainCall(dom, "sdb").pack(text=True, flags=True)),
        (Proc.BLOCK_STATS, DomainCall(dom, "sdb").pack(text=True)),
        (Proc.BLOCK_RESIZE, bytes(dom.write(Writer()).string("sdb").u64(1 << 27).u32(1))),
        (Proc.DETACH_DEVICE_FLAGS, DomainCall(dom, disk(), 3).pack(text=True, flags=True)),
        (Proc.BLOCK_PEEK, bytes(dom.write(Writer()).string("sdb").u64(0).u32(1).u32(0))),
    ]
    found = [message(MessageType.CALL, proc, n, args) for n, (proc, args) in enumerate(calls, 1)]
    found.append(message(MessageType.MESSAGE, 1, 0, program=KEEPALIVE_PROGRAM))
    found.append(message(MessageType.STREAM, 208, 5, b"data"))
    return found


def spoil(messages: list[bytes], rng: random.Random) -> bytes:
    """Returns the conversation with one to four things wrong with it."""
    parts = [bytearray(item) for item in messages]
    for _ in range(rng.randint(1, 4)):
        part = rng.choice(parts)
        kind = rng.randrange(5)
        if kind == 0 and part:
            part[rng.randrange(len(part))] ^= 1 << rng.randrange(8)
        elif kind == 1:
            word = rng.choice([0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 28, 33_554_436])
            start = 4 * rng.randrange(len(part) // 4 or 1)
            part[start : start + 4] = word.to_bytes(4, "big")
        elif kind == 2:
            del part[rng.randrange(len(part) + 1) :]
        elif kind == 3:
            part += rng.randbytes(rng.randrange(1, 64))
        else:
            parts.insert(rng.randrange(len(parts)), bytearray(part))
    return b"".join(parts)


@pytest.mark.parametrize("seed", range(4))
def test_a_lying_client_harms_nobody_else(tmp_path: Path, seed: int) -> None:
    async def body(world: World) -> None:
        rng = random.Random(seed)
        messages = conversation(world)
        bystander = await world.client()
        dom = next(iter(world.libvirtd.domains.values()))
        for _ in range(ROUNDS):
            liar = world.raw_client()
            loop = asyncio.get_running_loop()
            with suppress(ConnectionError, TimeoutError):
                await asyncio.wait_for(loop.sock_sendall(liar.sock, spoil(messages, rng)), 2)
                await liar.closed(0.05)
            liar.channel.close()
            await bystander.call(Proc.LOOKUP_BY_UUID, dom.uuid)
        await until(lambda: len(world.gateway.sessions) == 1)
        assert world.target.requests, "some got as far as the target"

    play(tmp_path, body)
