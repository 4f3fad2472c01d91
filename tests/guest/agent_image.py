"""The test guest with QEMU's guest agent and with XFS, which most guests boot without.

The kernel unpacks several archives one after the other, so what is added lies behind the guest's
own initramfs. `python -m tests.guest.agent_image` builds it into the cache. Needs apt (to download
the agent's package, which is not installed), dpkg-deb, cpio, objcopy and this machine's libraries,
which are those of the same Debian.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

from tests.guest.image import (
    Image,
    build,
    copy_modules,
    copy_program,
    installed,
    modules_in,
    pack,
    unpacked,
)
from tests.support.cache import CACHE

PACKAGE = "qemu-guest-agent"
TOOLS = ("dumpe2fs", "mkfs.xfs", "xfs_logprint")
#: In load order, in /modules of the guest; nothing loads them by itself.
MODULES = ("libcrc32c", "xfs")


def build_with_agent() -> Image:
    """Returns the guest image with /tools/qemu-ga, building it where the cache has none of it.

    Raises:
        RuntimeError: a tool, a library or the package is missing; the text says which.
    """
    plain = build()
    folder = CACHE / "guest"
    package = _package(folder)
    key = hashlib.sha256(
        b"\0".join([Path(__file__).read_bytes(), package.name.encode(), plain.initrd.name.encode()])
    ).hexdigest()[:16]
    image = Image(plain.kernel, folder / f"initrd-agent-{key}.img")
    if image.initrd.exists():
        return image
    with tempfile.TemporaryDirectory(prefix="agent-", dir=folder) as work:
        agent, rootfs = Path(work) / "package", Path(work) / "root"
        subprocess.run(["dpkg-deb", "-x", package, agent], check=True)
        for name in ("modules", "tools/lib"):
            (rootfs / name).mkdir(parents=True)
        copy_program(agent / "usr/sbin/qemu-ga", rootfs)
        for tool in TOOLS:
            copy_program(installed(tool), rootfs)
        with unpacked() as kernel:
            for name in copy_modules(MODULES, modules_in(kernel), rootfs):
                # half of XFS are names for debuggers
                module = rootfs / f"modules/{name}.ko"
                subprocess.run(["objcopy", "--strip-debug", module], check=True)
        partial = image.initrd.with_suffix(f".{os.getpid()}")
        partial.write_bytes(plain.initrd.read_bytes() + pack(rootfs))
        partial.chmod(0o644)
        partial.rename(image.initrd)
    return image


def _package(folder: Path) -> Path:
    """Returns the agent's package, which is downloaded once."""
    cached = sorted(folder.glob(f"{PACKAGE}_*.deb"))
    if cached:
        return cached[-1]
    with tempfile.TemporaryDirectory(prefix="partial-", dir=folder) as work:
        done = subprocess.run(
            ["apt-get", "download", "-q", "-o", "APT::Sandbox::User=", PACKAGE],
            cwd=work,
            capture_output=True,
            text=True,
            check=False,
        )
        found = sorted(Path(work).glob("*.deb"))
        if done.returncode or not found:
            raise RuntimeError(
                f"apt cannot download {PACKAGE}: run `apt-get update`, then try again\n"
                f"{done.stderr}"
            )
        return found[-1].rename(folder / found[-1].name)


if __name__ == "__main__":
    built = build_with_agent()
    print(f"kernel {built.kernel}\ninitrd {built.initrd}")
