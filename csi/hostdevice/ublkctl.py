"""Devices of the ublk driver as this host tells of them: whose they are, and their cache.

Which device is which volume's the driver tells to nobody without an io_uring. The virtlun-holder,
which has them made, has a link for each in its target's folder of exports, which is root's:
`UUID.disk -> /dev/ublkbN`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from csi import sysblock
from csi.hosterrors import HostError

DEVICE = re.compile(r"/dev/ublkb\d{1,7}")
SUFFIX = ".disk"
OWNERS = {0, os.geteuid()}
"""Who may have made a link, and its folder."""


def is_device(path: Path) -> bool:
    """Whether a path is that of a device of ublk; whether there is one is not asked."""
    return DEVICE.fullmatch(str(path)) is not None


def names() -> list[str]:
    """Returns the names of the devices that there are, whoever made them."""
    return sorted(each.name for each in sysblock.BLOCK.glob("ublkb*"))


def name_of(number: tuple[int, int]) -> str | None:
    """Returns the name of the block device of this major and minor number; None: it is gone."""
    try:
        return Path(f"/sys/dev/block/{number[0]}:{number[1]}").readlink().name
    except OSError:
        return None


class Links:
    """The links of holders, each in a folder of exports."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Reads the links in these folders."""
        self._folders = folders

    def all(self) -> dict[str, Path]:
        """Returns each volume's device; it may not be there yet, or not any more."""
        return dict(self._each())

    def check(self, volume: str, device: Path) -> None:
        """Raises HostError for a device that is not the volume's."""
        if (volume, device) not in set(self._each()):
            raise HostError(f"{device} is not of volume {volume}, as the virtlun-holder has noted")

    def _each(self) -> Iterator[tuple[str, Path]]:
        for folder in self._folders:
            with contextlib.suppress(OSError):
                if os.lstat(folder).st_uid not in OWNERS:
                    continue
                for link in folder.glob(f"*{SUFFIX}"):
                    with contextlib.suppress(OSError):
                        device = link.readlink()
                        if os.lstat(link).st_uid in OWNERS and is_device(device):
                            yield link.name.removesuffix(SUFFIX), device
