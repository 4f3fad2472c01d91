"""How often the tests of restarts end or stop the target, and the seed of what they choose.

`VIRTLUN_RESTARTS` is how many restarts the tests of the night make of each kind, wherever there are
such; what `make test` runs has its own small counts. `VIRTLUN_SEED` repeats what a test chose.
"""

from __future__ import annotations

import os
import secrets

#: Of each kind, by a test of the night.
RESTARTS = int(os.environ.get("VIRTLUN_RESTARTS") or "300")
#: For so many seconds a test stops the target with SIGSTOP: for longer than a guest waits, as Linux
#: gives a SCSI command 30 s. So many targets stand still at a time.
STOPPED_S, AT_ONCE = 60.0, 10


def choose_seed() -> int:
    """Returns a new seed, or that of `VIRTLUN_SEED`; prints the setting that repeats it."""
    seed = int(os.environ.get("VIRTLUN_SEED") or secrets.randbits(32))
    print(f"VIRTLUN_SEED={seed}")
    return seed
