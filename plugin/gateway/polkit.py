"""The check that libvirtd leaves out because it sees the gateway's uid 0: polkit, for UNIX sockets.

libvirtd exempts root from polkit. Every client of the gateway arrives there as root, so where
libvirtd.conf asks for polkit the gateway asks it, with the actions and the subject that libvirtd
would use (remote_daemon_dispatch.c, remoteDispatchAuthPolkit).
"""

from __future__ import annotations

import asyncio
import re
from enum import StrEnum
from pathlib import Path

from plugin.gateway.errors import Code, Refused
from plugin.gateway.peer import Peer

MANAGE = "org.libvirt.unix.manage"
MONITOR = "org.libvirt.unix.monitor"

ANSWER_S = 300.0
"""How long a person may take to type a password into polkit's agent, seconds."""


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
    found = re.findall(rf"^\s*{key}\s*=\s*[\"']?(\w+)[\"']?\s*(?:#.*)?$", text, re.MULTILINE)
    try:
        return Auth(found[-1]) if found else Auth.POLKIT
    except ValueError:
        return Auth.POLKIT


async def check(peer: Peer, action: str, pkcheck: str = "pkcheck") -> None:
    """Asks polkit whether the peer may do `action`.

    Raises:
        Refused: it may not, or nobody could be asked; with the code libvirtd would use.
    """
    if not peer.start_time:
        raise Refused(Code.AUTH_FAILED, f"process {peer.pid} is gone: polkit cannot be asked")
    subject = f"{peer.pid},{peer.start_time},{peer.uid}"
    words = ["--action-id", action, "--process", subject, "--allow-user-interaction"]
    try:
        process = await asyncio.create_subprocess_exec(
            pkcheck,
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError as error:
        raise Refused(
            Code.AUTH_FAILED, f"polkit cannot be asked about {action}: {pkcheck}: {error.strerror}"
        ) from error
    try:
        status = await asyncio.wait_for(process.wait(), ANSWER_S)
    except TimeoutError:
        status = -1
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if status == 0:
        return
    if status == 2:
        raise Refused(
            Code.AUTH_UNAVAILABLE, f"no polkit agent available to authenticate action '{action}'"
        )
    if status == 3:
        raise Refused(Code.AUTH_CANCELLED, "user cancelled authentication process")
    raise Refused(Code.AUTH_FAILED, f"access denied by policy for action '{action}'")
