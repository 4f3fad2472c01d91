"""What Cinder tells of a volume's attachment, in the shapes that Nova 34 and os-brick know."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydataplane.lvols import Volume

RBD_PREFIX = "virtlun/"
"""Of <source protocol='rbd' name=>, by which the gateway knows its volumes (`rbd_prefix`)."""


def is_of_server(connector: Mapping[str, Any]) -> bool:
    """Whether it is Nova that attaches, to a server: it says as which device.

    Cinder's own services, and Glance's, attach to their host: they say none, or no device.
    """
    return str(connector.get("mountpoint") or "").startswith("/dev/")


BLOCK_SIZE = 512
"""In bytes: what Nova takes a disk to have that says nothing."""


def to_server(lvstore: str, lvol: Volume) -> dict[str, Any]:
    """Returns the connection of a volume to a server.

    Of the types that Nova has, rbd is the one that needs nothing of the host and is not refused
    when the volume grows. Nova makes a disk of it whose source the gateway takes for LVSTORE/LVOL;
    QEMU itself could not open it, so that a host without the gateway fails. Blocks other than of
    512 bytes are the disk's <blockio>, whose attributes Nova wants as text.
    """
    data: dict[str, Any] = {
        "name": f"{RBD_PREFIX}{lvstore}/{lvol.name}",
        "hosts": [],
        "ports": [],
        "auth_enabled": False,
        "discard": True,
    }
    if lvol.block_size != BLOCK_SIZE:
        data["logical_block_size"] = data["physical_block_size"] = str(lvol.block_size)
    return {"driver_volume_type": "rbd", "data": data}


def to_host(device: Path) -> dict[str, Any]:
    """Returns the connection of a volume to this host, whose block device `device` is."""
    return {"driver_volume_type": "local", "data": {"device_path": str(device)}}
