"""Ports of TCP for servers that tests start, and start again."""

from __future__ import annotations

import random
import socket

FIRST, LAST = 20000, 29999
"""Linux gives none of these to who connects (/proc/sys/net/ipv4/ip_local_port_range). One that it
does may be a client's when a server that went away comes back: that of another test, or of who
tries again and again to reach that very server, and reaches itself."""
_chance = random.SystemRandom()


def free_port() -> int:
    """Returns a port of this host that nobody has now."""
    while True:
        port = _chance.randint(FIRST, LAST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
