"""How the programs of a backup are started: as whom, and by whom.

What clients name files for runs as QEMU's user, as libvirt's own backups do. Where systemd runs
the host, it is a unit of its own: the gateway's may write almost nowhere and has no network.
"""

from __future__ import annotations

import asyncio
import os
import pwd
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from plugin import qemu_user

SYSTEMD = Path("/run/systemd/system")
"""There where systemd is the first process: sd_booted(3)."""

_log = structlog.get_logger(__name__)

DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL")


@dataclass(frozen=True, slots=True)
class Launch:
    """How a backup's programs that clients name files for are started."""

    unit: str
    """Begins the names of the units, where there are some."""
    user: pwd.struct_passwd | None
    """As whom; None: as the gateway."""
    systemd: bool

    @classmethod
    def of(cls, unit: str) -> Launch:
        """Finds out what this host has."""
        if os.geteuid() != 0:
            return cls(unit, None, systemd=False)
        return cls(unit, _qemu_user(), systemd=SYSTEMD.is_dir())

    def command(self, words: Sequence[str], what: str) -> list[str]:
        """Returns the command line that runs `words`, with standard input and output as given.

        `what` ends the unit's name.
        """
        user = self.user
        if self.systemd:
            ids = [] if user is None else [f"--uid={user.pw_uid}", f"--gid={user.pw_gid}"]
            unit = f"--unit={self.unit}-{what}"
            # To end in order it might wait for a target that is away.
            end = "--property=KillSignal=SIGKILL"
            # systemd puts variables in the place of what follows a `$`.
            as_given = [word.replace("$", "$$") for word in words]
            return [
                "systemd-run",
                "--quiet",
                "--collect",
                "--pipe",
                unit,
                end,
                *ids,
                "--",
                *as_given,
            ]
        ids = []
        if user is not None:
            ids = [f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--init-groups"]
        return [*DIES_WITH_US, *ids, "--", *words]

    def give(self, path: Path) -> None:
        """Has a file or folder of ours belong to the user; of a symbolic link itself."""
        if self.user is not None:
            os.chown(path, self.user.pw_uid, self.user.pw_gid, follow_symlinks=False)


def _qemu_user() -> pwd.struct_passwd | None:
    for name in qemu_user.NAMES:
        try:
            return qemu_user.entry(name)
        except KeyError:
            continue
    return None


def unit_of(domain: str) -> str:
    """Returns what begins the names of the units of a domain's backup (its UUID)."""
    return f"virtlun-backup-{domain}"


def folder_in(parent: Path, domain: str) -> Path:
    """Returns the folder, in `parent`, of the sockets of a domain's backup (its UUID)."""
    return parent / f"backup-{domain}"


async def stop(launch: Launch, what: str) -> None:
    """Ends a program that an earlier gateway left; without systemd none outlives it."""
    if launch.systemd:
        unit = f"{launch.unit}-{what}.service"
        await _run(["systemctl", "stop", "--quiet", unit])


async def remove(launch: Launch, files: Sequence[str]) -> None:
    """Removes files that a backup did not finish; what is not there is no error."""
    if files and await _run(launch.command(["rm", "-f", "--", *files], "remover")):
        _log.warning("files of a backup that failed are left", files=list(files))


async def _run(words: Sequence[str]) -> int:
    process = await asyncio.create_subprocess_exec(*words, stdin=asyncio.subprocess.DEVNULL)
    return await process.wait()
