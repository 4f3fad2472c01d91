"""Sockets in front of libvirtd's and the target's that count the calls made through them."""

from __future__ import annotations

import re
import select
import socket
import threading
from collections import Counter
from pathlib import Path

from plugin.gateway.procs import name_of
from plugin.gateway.wire import HEADER_BYTES, KEEPALIVE_PROGRAM, MessageType, unpack_header

CHUNK_BYTES = 1 << 16
_METHOD = re.compile(rb'"method": ?"(\w+)"')


class Counting:
    """Listens on `path`, hands each connection on to the socket `to`, and counts the calls."""

    def __init__(self, path: Path, to: Path, *, libvirt: bool) -> None:
        """`libvirt`: what passes is libvirt's protocol, otherwise JSON-RPC."""
        self.calls: Counter[str] = Counter()
        self._to, self._libvirt = to, libvirt
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Takes no further connection."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(str(self._to))
            threading.Thread(target=self._pass, args=(client, server), daemon=True).start()

    def _pass(self, client: socket.socket, server: socket.socket) -> None:
        said = b""
        with client, server:
            while True:
                for sock in select.select([client, server], [], [])[0]:
                    chunk = sock.recv(CHUNK_BYTES)
                    if not chunk:
                        return
                    if sock is server:
                        client.sendall(chunk)
                        continue
                    said = self._count(said + chunk)
                    server.sendall(chunk)

    def _count(self, said: bytes) -> bytes:
        """Counts the whole calls in `said`; returns the rest."""
        if not self._libvirt:
            self.calls.update(name.decode() for name in _METHOD.findall(said))
            end = max((found.end() for found in _METHOD.finditer(said)), default=0)
            return said[end:]
        while len(said) >= HEADER_BYTES:
            header = unpack_header(said)
            if len(said) < header.length:
                break
            if header.type == MessageType.CALL and header.program != KEEPALIVE_PROGRAM:
                self.calls[name_of(header.procedure)] += 1
            said = said[header.length :]
        return said
