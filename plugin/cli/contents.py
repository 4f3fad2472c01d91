"""What a file or device holds before it becomes an lvstore: nobody's data is overwritten."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

FOUND, NOTHING, SEVERAL = 0, 2, 8
"""Exit statuses of blkid -p."""
DEADLINE_S = 30.0


class UnknownContentsError(Exception):
    """It cannot be told what is on the device; the text says why."""


def contents(path: Path) -> str:
    """Returns what `path` holds (a file system, a partition table, RAID, LVM ...), '' for nothing.

    An lvstore counts as nothing here: the target itself refuses to overwrite one.

    Raises:
        UnknownContentsError: blkid is not installed, or cannot read it.
    """
    folders = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    program = shutil.which("blkid", path=folders)
    if program is None:
        raise UnknownContentsError("blkid, which would tell, is not installed")
    try:
        done = subprocess.run(
            [program, "-p", "-o", "export", "--", str(path)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=DEADLINE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnknownContentsError(str(error)) from error
    if done.returncode == NOTHING and os.access(path, os.R_OK):
        return ""
    if done.returncode == SEVERAL:
        return "several file systems or tables"
    if done.returncode != FOUND:
        raise UnknownContentsError(done.stderr.strip() or f"{path} cannot be read")
    values = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    if "TYPE" in values:
        return values["TYPE"]
    return f"a partition table ({values.get('PTTYPE', 'of an unknown kind')})"
