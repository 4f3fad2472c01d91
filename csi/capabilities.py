"""Which ways of using a volume there are: what a claim may ask for, checked in one place.

Block and file system, on one node at a time; a block volume also by several nodes or pods at
once (ReadWriteMany), for live migration and for software that is made for it.
"""

from __future__ import annotations

from collections.abc import Iterable

from csi.errors import invalid, precondition
from csi.proto import csi_pb2 as pb

Mode = pb.VolumeCapability.AccessMode
SINGLE = {
    Mode.SINGLE_NODE_WRITER,
    Mode.SINGLE_NODE_SINGLE_WRITER,
    Mode.SINGLE_NODE_MULTI_WRITER,
    Mode.SINGLE_NODE_READER_ONLY,
}
SHARED_BLOCK = {Mode.MULTI_NODE_MULTI_WRITER, Mode.MULTI_NODE_READER_ONLY}
VOLUME_MODES = {"block": "Block", "mount": "Filesystem"}
FILE_SYSTEMS = ("ext4", "xfs")
XFS_BYTES_MIN = 300 << 20  # mkfs.xfs of xfsprogs 5.19 and newer


def problem(capability: pb.VolumeCapability, *, face: str = "kernel") -> str | None:
    """Returns why a volume cannot be used so, or None if it can."""
    kind = capability.WhichOneof("access_type")
    mode, fs_type = capability.access_mode.mode, capability.mount.fs_type
    name = Mode.Mode.Name(mode) if mode in Mode.Mode.values() else str(mode)
    why = None
    if kind is None:
        why = "a volume capability has no access type: give block or mount"
    elif mode == Mode.UNKNOWN:
        why = "a volume capability has no access mode: give one such as SINGLE_NODE_WRITER"
    elif face == "vhost" and kind == "block":
        why = "a volume of the vhost face is a directory: ask for volumeMode Filesystem"
    elif mode not in (SINGLE | SHARED_BLOCK if kind == "block" else SINGLE):
        instead = (
            "use ReadWriteOnce" if kind == "block" else "use volumeMode Block, or ReadWriteOnce"
        )
        why = f"access mode {name} is not possible with volumeMode {VOLUME_MODES[kind]}: {instead}"
    elif fs_type not in ("", *FILE_SYSTEMS):
        why = f"file system '{fs_type}' is not supported: there are {' and '.join(FILE_SYSTEMS)}"
    return why


def check(capability: pb.VolumeCapability, *, face: str = "kernel") -> None:
    """Checks one capability.

    Raises:
        Failure: INVALID_ARGUMENT, it is not possible.
    """
    if why := problem(capability, face=face):
        raise invalid(why)


def check_all(capabilities: Iterable[pb.VolumeCapability], *, face: str = "kernel") -> None:
    """Checks the capabilities of a volume; there must be at least one.

    Raises:
        Failure: INVALID_ARGUMENT, one is not possible, or there is none.
    """
    found = list(capabilities)
    if not found:
        raise invalid("volume capabilities are missing: say how the volume will be used")
    for capability in found:
        check(capability, face=face)


def check_size(fs_type: str, size: int) -> None:
    """Raises FAILED_PRECONDITION if a file system cannot be made on so few bytes."""
    if fs_type == "xfs" and size < XFS_BYTES_MIN:
        raise precondition(
            f"xfs needs {XFS_BYTES_MIN >> 20} MiB, the volume has {size >> 20}: "
            "ask for more, or use ext4"
        )
