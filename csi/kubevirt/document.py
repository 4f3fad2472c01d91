"""controller.json: what the node side tells the sidecar of a launcher's pod.

It stands in the folder of the pod's controller, where both see it; the sidecar only reads it. Once
written it says for the rest of the pod's life which volumes are LUNs: the domain is made by it.
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from csi.hosterrors import HostError

FILE = "controller.json"
HOOK_SOCKET = "hook.sock"
"""Beside it: the node hooks, where the driver serves them in the folder."""
MODE = 0o644
"""The sidecar is not root; there is no secret in it."""
BYTES_MAX = 1 << 20
SOCKET_NAME = r"^[A-Za-z0-9._-]{1,64}$"


class LunOf(BaseModel):
    """A volume of the machine that is a LUN of its controller."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    target: int = Field(ge=0, le=254)
    """SCSI target; it is LUN 0 of it."""
    volume: str
    """UUID of the volume."""


class BlkOf(BaseModel):
    """A volume of the machine that is a virtio-blk disk, through a socket of its own."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    socket: str = Field(pattern=SOCKET_NAME)
    """The socket's name in the folder of this document."""
    volume: str
    """UUID of the volume."""


class Controller(BaseModel):
    """What a virtual machine has of its pod's controller."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    version: Literal[1] = 1
    """Of this document."""
    socket: str = Field(default="vhost.sock", pattern=SOCKET_NAME)
    """The socket's name in the folder of this document."""
    reconnect_s: int = Field(default=0, ge=0, le=60)
    """How long QEMU waits before it connects again, seconds; 0: it cannot."""
    absent: str | None = None
    """Why the machine cannot have the controller; then there is no LUN, at most `disks`."""
    luns: dict[str, LunOf] = {}
    """By the name of the volume in the VirtualMachineInstance; their disks leave the domain."""
    disks: dict[str, BlkOf] = {}
    """Likewise, where QEMU has virtio-blk alone; their disks in the domain become these."""
    left: dict[str, str] = {}
    """Volumes of ours that stay block devices of the machine, and why."""


def read(folder: Path) -> Controller | None:
    """Returns the document of a folder, or None if there is none yet.

    Raises:
        HostError: it cannot be read, or is of another version of this program.
    """
    path = folder / FILE
    try:
        with path.open("rb") as file:
            return Controller.model_validate_json(file.read(BYTES_MAX))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise HostError(
            f"{path} cannot be used: {error}; sidecar and driver must be of the same version"
        ) from error


def write(folder: Path, controller: Controller) -> None:
    """Puts the document into a folder, whole or not at all, also for a host that crashes.

    Raises:
        OSError: the folder is gone, or full.
    """
    number, name = tempfile.mkstemp(dir=folder, prefix=f".{FILE}.")
    try:
        with os.fdopen(number, "wb") as file:
            # A sidecar of before there were any refuses the field.
            unknown = None if controller.disks else {"disks"}
            file.write(controller.model_dump_json(indent=2, exclude=unknown).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), MODE)
        Path(name).rename(folder / FILE)
    except BaseException:
        with suppress(FileNotFoundError):
            Path(name).unlink()
        raise


def remove(folder: Path) -> None:
    """Deletes the document; idempotent."""
    (folder / FILE).unlink(missing_ok=True)


def schema() -> dict[str, Any]:
    """Returns the JSON Schema of the document; schemas/kubevirt/controller.schema.json."""
    found = Controller.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | found


if __name__ == "__main__":
    print(json.dumps(schema(), indent=2))
