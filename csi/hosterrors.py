"""What this host refuses. Nothing else is imported here: the helper, which has rights, needs it."""

from __future__ import annotations


class HostError(Exception):
    """This host refused something: a command failed, a device did not answer."""


class HelperUnavailable(HostError):
    """The helper that has the rights for it does not answer; the same call may be made again."""


class OfflineOnly(HostError):
    """The kernel does not do it to a mounted file system here."""
