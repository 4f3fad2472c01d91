"""What people write for volumes: names of lvstores and volumes, and sizes."""

from __future__ import annotations

import hashlib
import re

from pydataplane.errors import VolumeError

BYTES_MAX = (1 << 63) - (1 << 40)
"""Of a file (off_t), in whole TiB."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""Of an lvstore or a volume."""
VOLUME_NAME = re.compile(rf"{NAME.pattern}(@[A-Za-z0-9._-]{{1,62}})?")
"""Of a volume, or of its snapshot `VOLUME@NAME`."""
NAME_MAX = 63
"""Characters of either."""


def parse_size(text: str) -> int:
    """Returns the bytes that `text` means: a whole number with an optional K, M, G or T (1024^n).

    Raises:
        VolumeError: it is not a size; the text says what one looks like.
    """
    found = re.fullmatch(r"([0-9]{1,40})\s*([KMGT]?)(i?B)?", text.strip(), re.IGNORECASE)
    if not found or int(found[1]) == 0:
        raise VolumeError(f"'{text}' is not a size: give a whole number such as 512M, 10G or 2T")
    size = int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}[found[2].upper()]
    if size > BYTES_MAX:
        raise VolumeError(f"'{text}' is more than any device has: give {BYTES_MAX >> 40}T at most")
    return size


def split_path(path: str) -> tuple[str, str]:
    """Splits `LVSTORE/VOLUME` (also with /dev/virtlun/ before it) and checks both names.

    Raises:
        VolumeError: it is not of that form.
    """
    parts = path.removeprefix("/dev/virtlun/").split("/")
    patterns = (NAME, VOLUME_NAME)
    if len(parts) != 2 or not all(map(re.Pattern.fullmatch, patterns, parts)):
        raise VolumeError(f"'{path}' does not name a volume: write LVSTORE/VOLUME")
    return parts[0], parts[1]


def with_suffix(name: str, suffix: str) -> str:
    """Returns `name` followed by `suffix`, both of a volume's name; what is too long is cut.

    The same of the same two, and others of others.
    """
    if len(name) + len(suffix) <= NAME_MAX:
        return name + suffix
    digest = "-" + hashlib.sha256(name.encode()).hexdigest()[:12]
    return name[: NAME_MAX - len(digest) - len(suffix)] + digest + suffix
