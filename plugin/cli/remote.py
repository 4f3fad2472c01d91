"""Ways to libvirt that lead past the gateway, or that it cannot go itself, for `virtlun doctor`."""

from __future__ import annotations

from pathlib import Path

PORTS = {16509: "TCP", 16514: "TLS"}
"""Where libvirtd and virtproxyd listen unless told otherwise, and what for."""
_LISTEN = "0A"


def listening(tables: tuple[Path, ...] = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))) -> str:
    """Returns which of libvirt's ports somebody listens on, in words; '' for none.

    `tables` are as proc_net(5) has them; one that is not there has no sockets.
    """
    found = set()
    for table in tables:
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:
            continue
        for words in (line.split() for line in lines):
            if len(words) > 3 and words[3] == _LISTEN:
                found.add(int(words[1].rpartition(":")[2], 16))
    return " and ".join(f"port {port} ({PORTS[port]})" for port in sorted(found & PORTS.keys()))
