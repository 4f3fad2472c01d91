"""What the gateway asks polkit itself, with the actions and subjects that libvirtd would use.

- Whether a client may connect (`check`). libvirtd exempts root from this, and every client of the
  gateway arrives there as root (remote_daemon_dispatch.c, remoteDispatchAuthPolkit).
- Whether a client may start a domain, or the like (`may`), where libvirtd.conf has the access
  driver polkit. libvirtd judges that itself, and its word counts; but the controller has to be
  there before it does, and for somebody who may not start the domain nothing is to happen on the
  target (viraccessdriverpolkit.c, virAccessDriverPolkitCheckDomain).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from plugin.gateway.errors import Code, Refused
from plugin.gateway.messages import read_params
from plugin.gateway.peer import Peer

MANAGE = "org.libvirt.unix.manage"
MONITOR = "org.libvirt.unix.monitor"
START = "org.libvirt.api.domain.start"
MIGRATE = "org.libvirt.api.domain.migrate"
WRITE = "org.libvirt.api.domain.write"
DELETE = "org.libvirt.api.domain.delete"

ANSWER_S = 300.0
"""How long a person may take to type a password into polkit's agent, seconds."""


async def check(peer: Peer, action: str, pkcheck: str = "pkcheck") -> None:
    """Asks polkit whether the peer may do `action`.

    Raises:
        Refused: it may not, or nobody could be asked; with the code libvirtd would use.
    """
    if not peer.start_time:
        raise Refused(Code.AUTH_FAILED, f"process {peer.pid} is gone: polkit cannot be asked")
    subject = f"{peer.pid},{peer.start_time},{peer.uid}"
    status = await _ask(pkcheck, action, subject, "--allow-user-interaction")
    if status == 0:
        return
    if status == 2:
        raise Refused(
            Code.AUTH_UNAVAILABLE, f"no polkit agent available to authenticate action '{action}'"
        )
    if status == 3:
        raise Refused(Code.AUTH_CANCELLED, "user cancelled authentication process")
    raise Refused(Code.AUTH_FAILED, f"access denied by policy for action '{action}'")


async def may(
    identity: bytes, actions: Sequence[str], name: str, uuid: str, pkcheck: str = "pkcheck"
) -> bool:
    """Asks polkit whether a client may do all of `actions` to the domain with this name and UUID.

    `identity` is what libvirtd was told of the client (arguments of CONNECT_SET_IDENTITY). False
    as well where polkit cannot be asked; libvirtd's answer to the call then says why.
    """
    return await may_do(identity, actions, {"domain_name": name, "domain_uuid": uuid}, pkcheck)


async def may_do(
    identity: bytes,
    actions: Sequence[str],
    of: Mapping[str, str],
    pkcheck: str = "pkcheck",
) -> bool:
    """Asks polkit whether a client may do all of `actions`, as `may`, to what `of` says."""
    known = read_params(identity)
    pid, since, uid = (known.get(k) for k in ("process-id", "process-time", "unix-user-id"))
    if pid is None or since is None or uid is None:
        return False
    details = {"connect_driver": "QEMU", **of}
    words = [word for key, value in details.items() for word in ("--detail", key, value)]
    try:
        for action in actions:
            if await _ask(pkcheck, action, f"{pid},{since},{uid}", *words) != 0:
                return False
    except Refused:
        return False
    return True


async def _ask(pkcheck: str, action: str, subject: str, *more: str) -> int:
    """Returns pkcheck's status.

    Raises:
        Refused: it cannot be run.
    """
    words = ["--action-id", action, "--process", subject, *more]
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
    return status
