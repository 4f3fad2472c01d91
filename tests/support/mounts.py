"""A mount namespace of the tests' own.

What makes a namespace, as a libvirtd or a machine with systemd of these tests does, has a copy of
all that is mounted then, and keeps it: the disk below stays in use for as long, whoever has
unmounted it elsewhere. So each process that runs tests has its own mounts, which others do not
copy, and which are gone with it.
"""

from __future__ import annotations

import ctypes
import os
import subprocess

CLONE_NEWNS = 0x20000


def have_own() -> None:
    """Gives the calling thread, and what it starts from now on, a mount namespace; only as root.

    What is unmounted outside is unmounted there as well, and nothing the other way round.
    Raises OSError where the kernel refuses it.
    """
    if os.geteuid():
        return
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
        number = ctypes.get_errno()
        raise OSError(number, f"a mount namespace for the tests: {os.strerror(number)}")
    subprocess.run(["mount", "--make-rslave", "/"], check=True)
