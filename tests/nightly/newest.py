"""Runs a command where libvirt and QEMU are the newest of Debian's backports.

    python -m tests.nightly.newest pytest -m 'not nightly' tests/libvirt

It sees a copy of this machine's file system (an overlay in memory, in a mount namespace of its
own) with those packages installed over the machine's own, and goes with the command: nothing is
installed here. What is written to the checkout, the cache, the user's home and the folders for
temporary files stays. Needs root, apt and 1 GB of memory.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support import backports
from tests.support.cache import CACHE, ROOT

PACKAGES = (
    "libvirt-daemon-system",
    "libvirt-daemon-driver-qemu",
    "libvirt-clients",
    "qemu-system-x86",
    "qemu-block-extra",
    "qemu-utils",
)
#: The programs whose versions are told.
PROGRAMS = ("libvirtd", "virsh", "qemu-system-x86_64")
#: What is the machine's own.
SHARED = ("/proc", "/sys", "/dev", "/tmp", "/var/tmp", str(Path.home()), str(ROOT), str(CACHE))
#: Of the copy in memory; packages and their indexes take a fifth.
BYTES = 2 << 30


def main() -> int:
    """Returns the command's status."""
    parser = argparse.ArgumentParser(prog="python -m tests.nightly.newest", description=__doc__)
    parser.add_argument("--inside", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what is run")
    given = parser.parse_args()
    if given.inside:
        _inside(Path(given.inside), given.command)
    if os.geteuid() != 0:
        print("only root can mount the copy of the file system: run it as root", file=sys.stderr)
        return 1
    if not given.command:
        parser.error("say what is to be run, such as pytest tests/libvirt")
    # Where SHARED has it: apt of the copy finds its lists by the same path.
    with tempfile.TemporaryDirectory(prefix="virtlun-newest-", dir="/tmp") as folder:
        again = [sys.executable, "-m", "tests.nightly.newest", "--inside", folder, *given.command]
        private = ["unshare", "--mount", "--propagation", "private", "--", *again]
        return subprocess.run(private, check=False, cwd=ROOT).returncode


def _inside(folder: Path, command: list[str]) -> None:
    """Becomes the command, in the copy, from a mount namespace of its own."""
    memory, work = folder / "memory", folder / "apt"
    memory.mkdir()
    work.mkdir()
    _mount("-t", "tmpfs", "-o", f"size={BYTES}", "none", str(memory))
    upper, scratch, root = (memory / name for name in ("upper", "work", "root"))
    for each in (upper, scratch, root):
        each.mkdir()
    layers = f"lowerdir=/,upperdir={upper},workdir={scratch}"
    _mount("-t", "overlay", "-o", layers, "none", str(root))
    for path in sorted(set(SHARED)):
        inside = root / path.lstrip("/")
        inside.mkdir(parents=True, exist_ok=True)
        _mount("--rbind", path, str(inside))
    _mount("-t", "tmpfs", "none", str(root / "run"))
    (root / "run/lock").mkdir()
    backports.install(work, root, PACKAGES)
    # Not chroot: who enters the mount namespace of a process of it is to find this root.
    old = root / "mnt"
    subprocess.run(["pivot_root", str(root), str(old)], check=True)
    os.chdir("/")
    subprocess.run(["umount", "--lazy", "/mnt"], check=True)
    for program in PROGRAMS:
        said = subprocess.run([program, "--version"], check=True, capture_output=True, text=True)
        print(f"{program}: {said.stdout.splitlines()[0]}", flush=True)
    os.chdir(ROOT)
    program = shutil.which(command[0]) or command[0]
    os.execv(program, [program, *command[1:]])


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


if __name__ == "__main__":
    sys.exit(main())
