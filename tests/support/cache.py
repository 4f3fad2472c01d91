"""Where tests keep what takes long to make and is the same in every checkout.

Each user names what it keeps by a hash of all that decides its content, and writes it elsewhere
first, so that several checkouts may use one cache at a time. What belongs to one checkout, such as
logs and results, is in `LOCAL`.
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Of this checkout; `make` keeps its stamps there, too.
LOCAL = ROOT / ".cache"


def _home() -> Path:
    given = os.environ.get("VIRTLUN_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "virtlun"


#: $VIRTLUN_CACHE, else one in the user's cache.
CACHE = _home()
