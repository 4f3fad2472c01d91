"""The hook's record of the volumes that a domain has had, for the hook cannot change its metadata.

One file a controller: {"version": 1, "volumes": {"LVSTORE/LVOL": UUID}}. It tells a lost volume
from one that never existed. The gateway moves what it says into the domain's metadata. And an
empty file beside it while the controller's guest is expected from another host.

Standard library only: the hook is made of it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress

from pydataplane.domain.errors import RecordError

EXPECTED_S = 10
"""How long, in seconds, a guest that is about to come is expected: libvirt asks twice in a row."""


def read(folder: str, controller: str) -> dict[str, str]:
    """Returns the UUIDs (by LVSTORE/LVOL) that are recorded for a controller.

    Raises:
        RecordError: there is a record, but it cannot be read: to go on might hide a loss.
    """
    path = f"{folder}/{controller}.json"
    try:
        with open(path, "rb") as stream:  # noqa: PTH123 - pathlib is slow to import
            volumes = json.load(stream)["volumes"]
        return {str(alias): str(uuid) for alias, uuid in volumes.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordError(
            f"{path}, which records the volumes that the domain had, cannot be read ({error!r});"
            " remove it if all of them are there"
        ) from error


def write(folder: str, controller: str, uuids: Mapping[str, str]) -> None:
    """Records the UUIDs (by LVSTORE/LVOL) of a controller, durably; without any, no record stays.

    Raises:
        RecordError: that cannot be written.
    """
    path = f"{folder}/{controller}.json"
    try:
        if not uuids:
            if os.path.exists(path):  # noqa: PTH110
                os.unlink(path)  # noqa: PTH108
            return
        os.makedirs(folder, mode=0o755, exist_ok=True)  # noqa: PTH103
        with open(f"{path}.new", "w") as stream:  # noqa: PTH123
            json.dump({"version": 1, "volumes": dict(uuids)}, stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.rename(f"{path}.new", path)  # noqa: PTH104
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise RecordError(
            f"{path}: the domain's volumes cannot be recorded ({error.strerror or error});"
            " make hook.state_dir of virtlun.toml a folder that can be written"
        ) from error


def expect(folder: str, controller: str) -> None:
    """Notes that the guest of a controller is about to come from another host.

    Where that cannot be noted, a volume that the other host has locked is refused.
    """
    with suppress(OSError):
        os.makedirs(folder, mode=0o755, exist_ok=True)  # noqa: PTH103
        with open(_expected(folder, controller), "w"):  # noqa: PTH123
            pass


def take_expected(folder: str, controller: str) -> bool:
    """Whether the guest of a controller comes from another host; the note of it goes."""
    path = _expected(folder, controller)
    try:
        age_s = time.time() - os.stat(path).st_mtime  # noqa: PTH116
        os.unlink(path)  # noqa: PTH108
    except OSError:
        return False
    return 0 <= age_s < EXPECTED_S


def _expected(folder: str, controller: str) -> str:
    return f"{folder}/{controller}.incoming"
