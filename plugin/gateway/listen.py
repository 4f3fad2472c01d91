"""The gateway's listening sockets: made here, or handed over by systemd."""

from __future__ import annotations

import asyncio
import grp
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from plugin.gateway.libvirtdconf import Auth, setting
from pydataplane.domain.errors import ConfigError

BACKLOG = 128
"""Connections the kernel holds while all slots are taken."""

PATH_MAX_BYTES = 107
"""sockaddr_un.sun_path without its NUL."""

USUAL_GROUP = "libvirt"
"""Whose members use libvirt on most distributions, where libvirtd's own socket is for all."""
USUAL_MODES = {False: 0o660, True: 0o666}
"""Of the read-write and of the read-only socket."""

_FIRST_FD = 3
"""SD_LISTEN_FDS_START."""


@dataclass(frozen=True)
class Listener:
    """A listening socket and the socket of libvirtd behind it."""

    sock: socket.socket
    path: Path
    upstream: Path
    read_only: bool
    auth: Auth
    ours: bool
    """Whether the socket file is ours to remove at the end."""
    slots: asyncio.Semaphore
    """Connections that may still come: readers do not take those of writers."""


@dataclass(frozen=True)
class Admission:
    """Who may connect to a socket."""

    mode: int
    group: str | int
    """Name or number; '' leaves root's."""


def usual(*, read_only: bool) -> Admission:
    """Returns who uses libvirt on most distributions."""
    return Admission(USUAL_MODES[read_only], USUAL_GROUP)


def in_place_of(upstream: Path, libvirtd_conf: Path, *, read_only: bool) -> Admission:
    """Returns who was to use the socket that the gateway has in libvirtd's place.

    That is the usual admission, but for no more than libvirtd.conf says (unix_sock_group,
    unix_sock_rw_perms, unix_sock_ro_perms). Modes there are not of that socket where unix_sock_dir
    is the folder of `upstream`: libvirtd's own was moved, to be used by nobody else. A file that is
    there but cannot be read may be for root alone.
    """
    found = usual(read_only=read_only)
    try:
        text = libvirtd_conf.read_text()
    except FileNotFoundError:
        return found
    except (OSError, UnicodeDecodeError):
        return Admission(0o600, "")
    group = setting(text, "unix_sock_group")
    moved = setting(text, "unix_sock_dir") == str(upstream.parent)
    mode = None if moved else setting(text, f"unix_sock_{'ro' if read_only else 'rw'}_perms")
    try:
        bits = int(mode, 8) if mode is not None else stat.S_IWOTH
    except ValueError:
        bits = 0
    if bits & stat.S_IWOTH:
        return Admission(found.mode, group or found.group)
    if bits & stat.S_IWGRP:
        return Admission(0o660, group or "")  # libvirtd leaves it root's group
    return Admission(0o600, "")


def as_at(upstream: Path, *, read_only: bool) -> Admission:
    """Returns the usual admission, narrowed to those who may connect to libvirtd's own socket.

    One that is not there may be for nobody but root.
    """
    try:
        known = upstream.stat()
    except OSError:
        return Admission(0o600, "")
    if known.st_mode & stat.S_IWOTH:
        return usual(read_only=read_only)
    if known.st_mode & stat.S_IWGRP:
        return Admission(0o660, known.st_gid)
    return Admission(0o600, "")


def listen(path: Path, admission: Admission) -> socket.socket:
    """Makes a listening UNIX socket for those admitted; one left behind is replaced.

    Raises:
        ConfigError: the path is too long or taken, or the socket cannot be made; says what to do.
    """
    if len(os.fsencode(path)) > PATH_MAX_BYTES:
        raise ConfigError(f"{path}: a socket's path has {PATH_MAX_BYTES} bytes at most")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o777)  # nobody connects before mode and group are right
        try:
            sock.bind(str(path))
        finally:
            os.umask(before)
        group = admission.group
        if group != "":
            os.chown(path, -1, group if isinstance(group, int) else grp.getgrnam(group).gr_gid)
        path.chmod(admission.mode)
        sock.listen(BACKLOG)
    except KeyError as error:
        raise ConfigError(
            f"{path}: there is no group {admission.group}: see gateway.socket_group"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    sock.setblocking(False)
    return sock


def _remove_stale(path: Path) -> None:
    if not path.is_socket():
        if path.exists():
            raise ConfigError(f"{path} exists and is not a socket: remove it")
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise ConfigError(f"{path}: another process listens there: stop it or choose another")


def handed_over() -> dict[str, socket.socket]:
    """Returns the sockets systemd made (sd_listen_fds(3)), by path."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return {}
    found = {}
    for number in range(_FIRST_FD, _FIRST_FD + int(os.environ.get("LISTEN_FDS", "0"))):
        sock = socket.socket(fileno=number)
        sock.setblocking(False)
        os.set_inheritable(number, False)
        found[str(sock.getsockname())] = sock
    return found
