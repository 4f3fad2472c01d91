"""Which pod a controller's folder belongs to, noted in it for a driver that starts again."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from csi.hosterrors import HostError

FILE = "pod.json"
BYTES_MAX = 4096


@dataclass(frozen=True)
class Pod:
    """A pod with our inline volume, as kubelet names it when it publishes."""

    uid: str
    namespace: str
    name: str
    hook_in_pod: bool
    """Its sidecar calls the node hooks by itself, on a socket in the folder."""


def note(folder: Path, pod: Pod) -> None:
    """Writes it down, whole or not at all, for root alone."""
    path = folder / f".{FILE}.new"
    path.unlink(missing_ok=True)
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(number, "w") as file:
        json.dump(asdict(pod), file)
        file.flush()
        os.fsync(number)
    path.rename(folder / FILE)


def noted(folder: Path) -> Pod | None:
    """Returns the pod of a folder; None if it was never noted.

    Raises:
        HostError: what stands there cannot be read.
    """
    try:
        with (folder / FILE).open("rb") as file:
            return Pod(**json.loads(file.read(BYTES_MAX)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise HostError(f"{folder / FILE} cannot be read: {error}") from error
