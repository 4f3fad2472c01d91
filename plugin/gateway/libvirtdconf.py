"""What libvirtd.conf, or virtqemud.conf beside it, says: who may connect, and who is asked then.

It says it to libvirtd, which sees the gateway and not its clients: so the gateway does to them what
is written there. Of each setting that cannot be read the stricter value counts.
"""

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

VIRTQEMUD = "virtqemud"
"""libvirt's daemon for QEMU where there is one for each driver."""


class Auth(StrEnum):
    """What libvirtd's own socket would ask of a client. SASL is between client and libvirtd."""

    NONE = "none"
    POLKIT = "polkit"
    SASL = "sasl"


def configured(libvirtd_conf: Path, *, read_only: bool) -> Auth:
    """Returns what libvirtd.conf asks for on one of its sockets.

    libvirtd's default, where the line or the file is missing, is polkit; so is ours, and for
    whatever cannot be read: this must fail closed.
    """
    key = "auth_unix_ro" if read_only else "auth_unix_rw"
    try:
        text = libvirtd_conf.read_text()
    except (OSError, UnicodeDecodeError):
        return Auth.POLKIT
    try:
        return Auth(setting(text, key) or Auth.POLKIT)
    except ValueError:
        return Auth.POLKIT


def setting(text: str, key: str) -> str | None:
    """Returns what libvirtd.conf (its text) says of a key that is a string; None: nothing."""
    found = re.findall(
        rf"^\s*{key}\s*=\s*(?:\"([^\"\n]*)\"|'([^'\n]*)'|([^\s#\"']+))\s*(?:#.*)?$",
        text,
        re.MULTILINE,
    )
    return "".join(found[-1]) if found else None


def configuration_of(libvirtd_conf: Path, upstream: Path) -> Path:
    """Returns the file of the daemon behind a socket: virtqemud has its own beside libvirtd's."""
    if upstream.name.startswith(VIRTQEMUD):
        return libvirtd_conf.with_name(f"{VIRTQEMUD}.conf")
    return libvirtd_conf


def judges_calls(libvirtd_conf: Path) -> bool:
    """Whether libvirtd or virtqemud asks polkit about each call.

    `access_drivers` in libvirtd.conf, or in virtqemud.conf beside it, has it: behind a socket of
    libvirtd's name may be virtproxyd, which passes calls on to virtqemud.

    libvirtd's default is that it does not. A file that is there but cannot be read counts as yes.
    """
    return any(
        _judges(libvirtd_conf.with_name(name)) for name in (libvirtd_conf.name, f"{VIRTQEMUD}.conf")
    )


def _judges(conf: Path) -> bool:
    try:
        found_at = conf.stat()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return _judges_calls(conf, found_at.st_ino, found_at.st_mtime_ns, found_at.st_size)


@lru_cache(maxsize=8)
def _judges_calls(conf: Path, *_version: int) -> bool:
    """Reads the file; it is asked for at each call of a client, and hardly ever changes."""
    try:
        text = conf.read_text()
    except FileNotFoundError:
        return False
    except (OSError, UnicodeDecodeError):
        return True
    plain = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)
    found = re.findall(r"^\s*access_drivers\s*=\s*(\[[^\]]*\]|\S+)", plain, re.MULTILINE)
    return bool(found) and "polkit" in found[-1]
