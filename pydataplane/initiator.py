"""The name of this host as an iSCSI initiator."""

from __future__ import annotations

import re
import uuid
from pathlib import Path

#: Where open-iscsi has it, which os-brick reads, too.
NAME_FILE = Path("/etc/iscsi/initiatorname.iscsi")
MACHINE_ID = Path("/etc/machine-id")
PREFIX = "iqn.2026-11.dev.virtlun:"
_LINE = re.compile(r"^\s*InitiatorName\s*=\s*(\S+)\s*$", re.MULTILINE)
_SPACE = uuid.UUID("1f1c37c2-4b2f-4b0e-9d39-5c0f8bb6d7a4")


def own_name() -> str:
    """Returns the name that the host has for open-iscsi; else one made of its machine ID.

    The latter is hashed, as machine IDs are not for networks (machine-id(5)).
    """
    try:
        found = _LINE.search(NAME_FILE.read_text())
    except (OSError, UnicodeDecodeError):
        found = None
    if found is not None:
        return found[1]
    return f"{PREFIX}{uuid.uuid5(_SPACE, MACHINE_ID.read_text().strip()).hex[:16]}"
