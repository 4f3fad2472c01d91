"""What became of a disk's pivot may be known by the target alone, until the gateway has seen it.

The gateway's journal says so, from before a pivot is asked for: see plugin.gateway.journal.
"""

from __future__ import annotations

import json
import os

from pydataplane.domain.names import CONTROLLER_PREFIX, JOURNAL_VERSION


def asked(folder: str, controller: str) -> str | None:
    """Returns the dev of a disk of a domain whose pivot the journal in `folder` has; None: none.

    `controller` is the domain's.
    """
    uuid = controller.removeprefix(CONTROLLER_PREFIX)
    try:
        names = os.listdir(folder)  # noqa: PTH208 - pathlib is slow to import
    except OSError:  # no gateway ever made it
        return None
    for name in names:
        if name.endswith(".json"):
            try:
                with open(f"{folder}/{name}", "rb") as stream:  # noqa: PTH123
                    entry = json.load(stream)
                if entry.get("version") != JOURNAL_VERSION:
                    continue  # no gateway that is here resolves it
                if entry.get("asked") is True and entry["uuid"] == uuid:
                    return str(entry["dev"])
            except (OSError, ValueError, AttributeError, KeyError):
                continue  # it was just resolved, or is damaged
    return None
