"""Ways to libvirt that lead past the gateway, or that it cannot go itself, for `virtlun doctor`."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from plugin.gateway import libvirtdconf

PORTS = {16509: "TCP", 16514: "TLS"}
"""Where libvirtd and virtproxyd listen unless told otherwise, and what for."""
DAEMONS = ("libvirtd", "virtproxyd")
_LISTEN = "0A"


def ports(libvirtd_conf: Path, units: Sequence[Path] = ()) -> dict[int, str]:
    """Returns the ports on which libvirt may listen, and what for.

    Those are its own, what `tcp_port` and `tls_port` in libvirtd.conf and in virtproxyd.conf beside
    it say, and what systemd listens on for them; `units` are systemd's folders.
    """
    found = dict(PORTS)
    for kind in PORTS.values():
        words = []
        for daemon in DAEMONS:
            file = libvirtd_conf.with_name(f"{daemon}.conf")
            if daemon == DAEMONS[0]:
                file = libvirtd_conf
            words.append(libvirtdconf.setting(_text(file), f"{kind.lower()}_port") or "")
            name = f"{daemon}-{kind.lower()}.socket"
            for folder in units:
                for unit in (folder / name, *(folder / f"{name}.d").glob("*.conf")):
                    words += re.findall(r"(?m)^ListenStream=.*?([^:\s]+)\s*$", _text(unit))
        found |= {port: kind for port in map(_number, words) if port is not None}
    return found


def _text(file: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return file.read_text()
    return ""


def _number(word: str) -> int | None:
    """Returns a port by its number, or by its name in services(5); None if it is neither."""
    if word.isdecimal():
        return int(word)
    with suppress(OSError):
        return socket.getservbyname(word, "tcp")
    return None


def listening(
    kinds: Mapping[int, str],
    tables: tuple[Path, ...] = (Path("/proc/net/tcp"), Path("/proc/net/tcp6")),
) -> str:
    """Returns which of libvirt's ports somebody listens on, in words; '' for none.

    `kinds` are those of `ports`, `tables` as proc_net(5) has them; one that is not there has no
    sockets.
    """
    found = set()
    for table in tables:
        for words in (line.split() for line in _text(table).splitlines()[1:]):
            if len(words) > 3 and words[3] == _LISTEN:
                found.add(int(words[1].rpartition(":")[2], 16))
    return " and ".join(f"port {port} ({kinds[port]})" for port in sorted(found & kinds.keys()))
