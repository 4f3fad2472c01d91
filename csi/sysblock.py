"""What sysfs tells of block devices. Whoever may not open them may read it."""

from __future__ import annotations

from pathlib import Path

BLOCK = Path("/sys/class/block")
PAGE_BYTES = 4096
"""The longest block: a device's size may be that much less than its volume's."""
SECTOR_BYTES = 512
"""Of /sys/class/block/NAME/size, whatever the device's logical block is."""


def numbers(device: Path) -> tuple[int, int]:
    """Returns the major and minor number of a block device; OSError if there is none."""
    major, minor = (BLOCK / device.name / "dev").read_text().split(":")
    return int(major), int(minor)


def size_of(device: Path) -> int:
    """Returns the bytes of a block device; OSError if there is none."""
    return int((BLOCK / device.name / "size").read_text()) * SECTOR_BYTES
