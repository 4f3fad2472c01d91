"""`virtlun-csi` that ends by SIGKILL at a chosen step: `-m tests.support.killed FILE OPTION...`.

A step is what changes something outside of the driver: a call of the target, a command of the host,
a loop device made, grown or given up. FILE says where to end, once: `before STEP` or `after STEP`
with the first words of a step's name, or `before N` for the Nth step from now on. It is removed
then, and may be written again at any time. So a test needs no luck to hit the middle of a call.
With `before N PID` another process is killed at that moment, such as the target.

The driver itself is the one that users run; only what it calls is watched.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from csi import commands, kernel  # first of all: others take `run` from it by name
from csi.host.remote import Helper
from csi.hostdevice import loopctl
from pydataplane.client import Client

READS = re.compile(r"_get_|_list$|^blkid$")
COUNTED = re.compile(r"before (?P<more>[0-9]+)(?P<victim> [0-9]+)?")
STEP = "step"


def rpc(_: Client, method: str, **params: Any) -> str:
    """Names a call of the target."""
    return " ".join([method, *(str(params[key]) for key in ("xattr_name",) if key in params)])


def command(*words: str, **_: Any) -> str:
    """Names a command of the host."""
    return words[0]


def mount(_source: str, _target: str, _fs_type: str, flags: int, *_: object) -> str:
    """Names a mount."""
    return "mount --bind" if flags == kernel.MS_BIND else "mount"


#: What the helper is asked for, as what it does is named where the driver does it itself.
ASKED = {
    "attach": "loop attach",
    "resize": "loop grow",
    "release": "loop release",
    "detach": "loop release",
    "bind_device": "mount --bind",
    "bind_mount": "mount --bind",
    "bind_folder": "mount --bind",
    "unmount": "umount",
    "remove": "umount",
}


def asked(_: Helper, do: str, _volume: str, **arguments: object) -> str:
    """Names what the helper is asked for."""
    if do in ("loops", "answers", "holds"):
        return "blkid"
    return f"mkfs.{arguments['fs_type']}" if do == "make" else ASKED.get(do, do)


def loop(name: str) -> Callable[..., str]:
    """Names what is done with a loop device."""
    return lambda *_, **__: f"loop {name}"


class Fuse:
    """What ends the process, at the step that the file names."""

    def __init__(self, file: Path) -> None:
        """Looks at `file` at each step."""
        self._file = file

    def watch(self, owner: object, name: str, describe: Callable[..., str]) -> None:
        """Puts a function of a module or class where steps are noticed; `describe` names them."""
        plain = getattr(owner, name)

        @functools.wraps(plain)
        def watched(*args: Any, **params: Any) -> Any:
            step = describe(*args, **params)
            if READS.search(step):
                return plain(*args, **params)
            self._reach(f"before {step}")
            result = plain(*args, **params)
            print(json.dumps({"event": STEP, STEP: step}), file=sys.stderr, flush=True)
            self._reach(f"after {step}")
            return result

        setattr(owner, name, watched)

    def _reach(self, point: str) -> None:
        try:
            wanted = self._file.read_text().strip()
        except FileNotFoundError:
            return
        counted = COUNTED.fullmatch(wanted)
        victim = (counted and counted["victim"]) or ""
        if counted and point.startswith("before ") and (more := int(counted["more"])) > 1:
            self._file.write_text(f"before {more - 1}{victim}")
        elif point.startswith("before ") if counted else f"{point} ".startswith(f"{wanted} "):
            self._file.unlink()
            os.kill(int(victim or os.getpid()), signal.SIGKILL)


def main() -> None:
    """Runs the driver."""
    fuse = Fuse(Path(sys.argv.pop(1)))
    fuse.watch(commands, "run", command)
    fuse.watch(kernel, "mount", mount)
    fuse.watch(kernel, "umount", lambda _: "umount")
    fuse.watch(Helper, "call", asked)
    fuse.watch(Client, "call", rpc)
    for name in ("attach", "grow", "release"):
        fuse.watch(loopctl, name, loop(name))
    from csi.cli import main as driver  # noqa: PLC0415 - with what is watched

    driver()


if __name__ == "__main__":
    main()
