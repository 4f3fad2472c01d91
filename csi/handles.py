"""Handles of volumes and snapshots: UUIDs that tell the lvstore.

A handle is a UUID of version 8 (RFC 9562, 5.8): the first 48 bits are those of the lvstore's UUID,
and the rest is made of the node and the name that the orchestrator chose. So the driver knows of a
handle whether the lvstore that the volume would be in is loaded. Earlier drivers made UUIDs of
version 5, which do not tell; volumes keep them.
"""

from __future__ import annotations

import uuid

NAMESPACE = uuid.UUID("6a3e1f0c-0d4b-5c8e-9b55-76697274756c")
SNAPSHOTS = uuid.UUID("6a3e1f0c-0d4b-5c8e-9b56-76697274756c")
GROUPS = uuid.UUID("6a3e1f0c-0d4b-5c8e-9b57-76697274756c")
"""What names of volumes, of snapshots, and of groups of these are in."""
VERSION = 8
VERSION_BEFORE = 5
VERSION_SHIFT = 76
LVSTORE_SHIFT = 80
"""Bits of a UUID behind those of the lvstore."""


def make(lvstore: str, node: str, name: str, namespace: uuid.UUID = NAMESPACE) -> str:
    """Returns the handle of the volume called `name` of a node, in the lvstore of this UUID.

    With SNAPSHOTS or GROUPS it is that of a snapshot, or of a group of them, of this name.
    """
    lvstore_bits = uuid.UUID(lvstore).int >> LVSTORE_SHIFT << LVSTORE_SHIFT
    rest = uuid.uuid5(namespace, f"{node}/{name}").int & ((1 << VERSION_SHIFT) - 1)
    return str(uuid.UUID(int=lvstore_bits | VERSION << VERSION_SHIFT | rest))


def without_lvstore(node: str, name: str) -> str:
    """Returns the handle that earlier drivers gave the volume called `name` of a node."""
    return str(uuid.uuid5(NAMESPACE, f"{node}/{name}"))


def is_uuid(handle: str) -> bool:
    """Whether a handle can be a volume's at all."""
    try:
        return str(uuid.UUID(handle)) == handle
    except ValueError:
        return False


def tells_lvstore(handle: str) -> bool:
    """Whether a handle names its lvstore; one of an earlier driver, or of nobody, does not."""
    return is_uuid(handle) and uuid.UUID(handle).version == VERSION


def is_made(handle: str) -> bool:
    """Whether a driver can have made a UUID: those that a target or a person takes are others."""
    return is_uuid(handle) and uuid.UUID(handle).version in (VERSION, VERSION_BEFORE)


def may_be_in(handle: str, lvstore: str) -> bool:
    """Whether a handle can be of a volume in the lvstore of this UUID.

    It can be in any where it does not tell.
    """
    if not tells_lvstore(handle):
        return True
    return uuid.UUID(handle).int >> LVSTORE_SHIFT == uuid.UUID(lvstore).int >> LVSTORE_SHIFT
