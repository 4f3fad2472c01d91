"""The user as whom libvirt runs QEMU: it must reach the controllers' sockets."""

from __future__ import annotations

import pwd

NAMES = ("libvirt-qemu", "qemu")
"""On Debian and Ubuntu, on Fedora and RHEL."""


def entry(name: str) -> pwd.struct_passwd:
    """Returns a user's entry of the password file; KeyError if there is none."""
    return pwd.getpwnam(name)
