"""A question to the helper and its answer: one packet each, JSON, on a connection for the two.

    {"do": "mount", "volume": HANDLE, "with": {"device": "/dev/loop0", ...}}
    {"done": RESULT} or {"failed": "one sentence", "kind": "HostError"}

    {"do": "rights"}: what `virtlun doctor` asks, see `rights`

Both ends are of one version: they are two containers of one pod.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

from csi.hosterrors import HostError, OfflineOnly

PACKET_BYTES = 64 << 10
KINDS = {kind.__name__: kind for kind in (HostError, OfflineOnly)}
CREDENTIALS = struct.Struct("3i")  # struct ucred


def new_socket() -> socket.socket:
    """Returns a socket of packets, not connected."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def send(connection: socket.socket, words: dict[str, Any]) -> None:
    """Sends one packet.

    Raises:
        HostError: it is too long.
        OSError: the other end is gone.
    """
    packet = json.dumps(words).encode()
    if len(packet) > PACKET_BYTES:
        raise HostError(f"a packet of {len(packet)} bytes is longer than {PACKET_BYTES}")
    connection.send(packet)


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """Receives one packet; None when the other end is gone.

    Raises:
        ValueError: it is no JSON object.
    """
    packet = connection.recv(PACKET_BYTES + 1)
    if not packet:
        return None
    try:
        found = json.loads(packet) if len(packet) <= PACKET_BYTES else None
    except RecursionError as error:
        raise ValueError("the packet is nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError("the packet is no JSON object")
    return found


def peer(connection: socket.socket) -> tuple[int, int]:
    """Returns process and user of the other end; the process is 0 if it is not visible here."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, uid, _ = CREDENTIALS.unpack(told)
    return pid, uid
