"""Bare libvirt clients for the benchmark: calls packed once, replies counted and not decoded.

So what is measured is the server. The many of `load` are a process of their own, on one thread,
each with one call under way at a time, as a client of libvirt's has it.
"""

from __future__ import annotations

import itertools
import multiprocessing
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from plugin.gateway.procs import Proc
from plugin.gateway.upstream import open_arguments
from plugin.gateway.wire import HEADER_BYTES, MessageType, Status, message, unpack_header

CHUNK_BYTES = 1 << 20
DEADLINE_S = 120.0
WARM_UP_S = 0.3

Request = tuple[int, bytes]
"""Procedure and arguments."""


class CallFailed(RuntimeError):
    """libvirtd, or the gateway, answered with an error; the text is the reply's bytes."""


class Client:
    """One connection to `path`, opened as libvirt's own remote driver does it."""

    def __init__(self, path: Path) -> None:
        """Connects and opens the hypervisor; raises CallFailed or OSError."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(DEADLINE_S)
        self.sock.connect(str(path))
        self._serials = itertools.count(1)
        self._buffer = bytearray(CHUNK_BYTES)
        self.call((Proc.AUTH_LIST, b""))
        self.call((Proc.CONNECT_OPEN, open_arguments("qemu:///system")))

    def call(self, request: Request) -> bytes:
        """Makes one call and returns the reply's payload; events that come before are dropped."""
        serial = next(self._serials)
        self.sock.sendall(message(MessageType.CALL, request[0], serial, request[1]))
        while True:
            header = unpack_header(self._exactly(HEADER_BYTES))
            payload = self._exactly(header.payload_bytes)
            if header.type != MessageType.REPLY or header.serial != serial:
                continue
            if header.status != Status.OK:
                raise CallFailed(f"procedure {request[0]}: {payload!r}")
            return payload

    def _exactly(self, size: int) -> bytes:
        if size > len(self._buffer):
            self._buffer = bytearray(size)
        view, have = memoryview(self._buffer), 0
        while have < size:
            got = self.sock.recv_into(view[have:size])
            if not got:
                raise CallFailed("the connection was closed")
            have += got
        return bytes(view[:size])

    def close(self) -> None:
        """Closes the connection."""
        self.sock.close()


def latencies(path: Path, requests: Sequence[Request], seconds: float) -> list[float]:
    """Returns how long each call of one client took, seconds; `requests` in turn."""
    client = Client(path)
    found: list[float] = []
    try:
        for request in requests[:20]:
            client.call(request)
        end = time.perf_counter() + seconds
        for request in itertools.cycle(requests):
            start = time.perf_counter()
            if start > end and found:
                return found
            client.call(request)
            found.append(time.perf_counter() - start)
    finally:
        client.close()
    return found


@dataclass(frozen=True)
class Load:
    """What the clients of one `Clients` did while they were measured."""

    calls: int
    seconds: float
    p50_s: float
    p99_s: float

    @property
    def rate(self) -> float:
        """Calls a second."""
        return self.calls / self.seconds


class Clients:
    """`count` clients in a process of their own that call without a pause until `stop`."""

    def __init__(self, path: Path, count: int, requests: Sequence[Request]) -> None:
        """Returns once all are connected and have been answered once."""
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_many, args=(path, count, requests, theirs), daemon=True
        )
        self._process.start()
        theirs.close()
        if not self._pipe.poll(DEADLINE_S) or self._pipe.recv() != "ready":
            raise CallFailed(f"{count} clients of {path} did not come up")

    def stop(self) -> Load:
        """Ends them and returns what they did."""
        self._pipe.send("stop")
        if not self._pipe.poll(DEADLINE_S):
            raise CallFailed("the clients do not end")
        load = self._pipe.recv()
        self._process.join()
        if not isinstance(load, Load):
            raise CallFailed(str(load))
        return load


def _many(path: Path, count: int, requests: Sequence[Request], pipe: Connection) -> None:
    try:
        _call_all(path, count, requests, pipe)
    except (OSError, CallFailed, EOFError) as error:
        pipe.send(f"a client failed: {error}")


def _call_all(path: Path, count: int, requests: Sequence[Request], pipe: Connection) -> None:
    packed = [message(MessageType.CALL, number, 9, body) for number, body in requests]
    socks = [Client(path).sock for _ in range(count)]
    poll = select.epoll()
    by_number = {sock.fileno(): sock for sock in socks}
    want = dict.fromkeys(by_number, 0)  # bytes of the reply still to come
    next_of = {number: nth % len(packed) for nth, number in enumerate(by_number)}
    since: dict[int, float] = {}
    took: list[float] = []

    def ask(number: int) -> None:
        nth = next_of[number]
        next_of[number] = (nth + 1) % len(packed)
        since[number] = time.perf_counter()
        by_number[number].sendall(packed[nth])

    for number in by_number:
        poll.register(number, select.EPOLLIN)
    poll.register(pipe.fileno(), select.EPOLLIN)
    for number in by_number:
        ask(number)
    buffer = memoryview(bytearray(CHUNK_BYTES))
    begun = time.perf_counter()
    warm = False
    while True:
        for number, _ in poll.poll(DEADLINE_S):
            if number == pipe.fileno():
                pipe.recv()
                seconds = time.perf_counter() - begun
                took.sort()
                p50, p99 = (took[int(len(took) * part)] if took else 0.0 for part in (0.5, 0.99))
                pipe.send(Load(len(took), seconds, p50, p99))
                return
            got = by_number[number].recv_into(buffer)
            if not got:
                raise CallFailed("the connection was closed")
            if not want[number]:
                # A reply's first piece has at least its header: servers write whole messages.
                want[number] = struct.unpack_from(">I", buffer)[0]
                if struct.unpack_from(">I", buffer, HEADER_BYTES - 4)[0] != Status.OK:
                    raise CallFailed(bytes(buffer[:got]).decode(errors="replace"))
            want[number] -= got
            if not want[number]:
                took.append(time.perf_counter() - since[number])
                ask(number)
        if not warm and time.perf_counter() - begun > WARM_UP_S:
            warm, begun = True, time.perf_counter()
            took.clear()
            pipe.send("ready")
