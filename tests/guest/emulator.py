"""The QEMUs that guests run in: Debian's own, and a newer one unpacked beside it.

What a VM can do when its target restarts depends on its QEMU: only 8.2 and newer reconnect a
vhost-user-scsi device. Debian 12 has 7.2, and 10.0 among its backports. `python -m
tests.guest.emulator` downloads the latter from the mirror that this machine's apt uses and unpacks
it into the cache; nothing is installed, and apt's own lists stay as they are. Needs apt and
dpkg-deb; not root.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.support import backports
from tests.support.cache import CACHE

PROGRAM = "qemu-system-x86_64"
#: What QEMU is made of, modules too: in place of one that is missing it takes the machine's own
#: QEMU's, and aborts. apt adds the libraries that it needs and this machine lacks.
PACKAGES = (
    "qemu-system-x86",
    "qemu-system-common",
    "qemu-system-data",
    "qemu-system-modules-opengl",
    "qemu-system-modules-spice",
    "seabios",
)
#: Runs the unpacked QEMU with its own libraries, modules and firmware, which lie beside it. It is
#: called by its path. `exec` keeps the PID.
WRAPPER = f"""\
#!/bin/sh
root="${{0%/*}}/root"
export LD_LIBRARY_PATH="$root/usr/lib/x86_64-linux-gnu:$root/lib/x86_64-linux-gnu"
export QEMU_MODULE_DIR="$root/usr/lib/x86_64-linux-gnu/qemu"
exec "$root/usr/bin/{PROGRAM}" -L "$root/usr/share/qemu" -L "$root/usr/share/seabios" "$@"
"""


@dataclass(frozen=True)
class Emulator:
    """One QEMU: the path of its program and its version, such as (7, 2)."""

    path: Path
    version: tuple[int, int]

    @property
    def reconnects(self) -> bool:
        """Whether its vhost-user-scsi device connects again to a target that restarted."""
        return self.version >= (8, 2)

    def __str__(self) -> str:
        """Returns its name in tests."""
        return "qemu-{}.{}".format(*self.version)


def of(path: Path) -> Emulator:
    """Asks the program at `path` for its version; RuntimeError if it does not run."""
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"version (\d+)\.(\d+)", done.stdout)
    if done.returncode or not found:
        raise RuntimeError(f"{path} does not run: {done.stderr.strip() or done.stdout.strip()}")
    return Emulator(path, (int(found[1]), int(found[2])))


def stock() -> Emulator:
    """Returns the machine's own QEMU; RuntimeError if there is none."""
    path = shutil.which(PROGRAM)
    if path is None:
        raise RuntimeError(f"{PROGRAM} is not installed: run `make setup`, then try again")
    return of(Path(path))


def newer() -> Emulator:
    """Returns the newer QEMU, unpacking it where the cache has none.

    Raises:
        RuntimeError: it cannot be had; the text says why.
    """
    folder = CACHE / "emulators"
    made = hashlib.sha256(repr((PACKAGES, WRAPPER)).encode()).hexdigest()[:8]
    unpacked = sorted(folder.glob(f"qemu_*_{made}/{PROGRAM}"))
    if unpacked:
        return of(unpacked[-1])
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="partial-", dir=folder) as partial:
        work = Path(partial)
        packages = backports.download(work, PACKAGES)
        version = next(p.name.split("_")[1] for p in packages if p.name.startswith(PACKAGES[0]))
        place = folder / f"qemu_{version.replace('%3a', '.')}_{made}"
        tree = work / "tree"
        tree.mkdir()
        for package in packages:
            subprocess.run(["dpkg-deb", "-x", package, tree / "root"], check=True)
        wrapper = tree / PROGRAM
        wrapper.write_text(WRAPPER)
        wrapper.chmod(0o755)
        emulator = of(wrapper)  # what is in the cache has run once
        if not emulator.reconnects:
            raise RuntimeError(f"the newer QEMU is {emulator}, but 8.2 or newer is needed")
        try:
            tree.rename(place)
        except OSError:
            if not place.exists():
                raise
            # Another process was faster.
    return of(place / PROGRAM)


if __name__ == "__main__":
    for each in (stock(), newer()):
        print(f"{each} {each.path}")
