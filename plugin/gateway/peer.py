"""Who is at the other end of a client's socket."""

from __future__ import annotations

import grp
import pwd
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from plugin.gateway.messages import LLONG, STRING, ULLONG, TypedParam, pack_params
from plugin.gateway.xdr import Writer

_UCRED = struct.Struct("3i")
_START_TIME_FIELD = 22
"""Field of /proc/PID/stat, counted from 1 (proc(5))."""


@dataclass(frozen=True)
class Peer:
    """The process that connected, as the kernel reports it.

    `start_time` is in clock ticks since boot, 0 if the process was gone already; with it a reused
    pid cannot pass for its predecessor.
    """

    pid: int
    uid: int
    gid: int
    start_time: int

    def identity(self) -> bytes:
        """Returns the arguments of CONNECT_SET_IDENTITY that say who this is."""
        params = [
            TypedParam("unix-user-id", ULLONG, self.uid),
            TypedParam("unix-group-id", ULLONG, self.gid),
            TypedParam("process-id", LLONG, self.pid),
        ]
        if self.start_time:
            params.append(TypedParam("process-time", ULLONG, self.start_time))
        with suppress(KeyError):  # a user without an entry: the number says who
            params.append(TypedParam("user-name", STRING, pwd.getpwuid(self.uid).pw_name))
        with suppress(KeyError):
            params.append(TypedParam("group-name", STRING, grp.getgrgid(self.gid).gr_name))
        return pack_params(params) + bytes(Writer().u32(0))


def peer_of(sock: socket.socket) -> Peer:
    """Returns who is connected to `sock` (SO_PEERCRED: as of the time of connecting)."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, gid = _UCRED.unpack(raw)
    return Peer(pid, uid, gid, start_time(pid))


def start_time(pid: int) -> int:
    """Returns when a process started, in clock ticks since boot; 0 if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # The name in field 2 may hold spaces and parentheses: count from after the last one.
    fields = text.rpartition(")")[2].split()
    return int(fields[_START_TIME_FIELD - 3])
