"""A disk image that a BIOS boots: GRUB, and the test guest's kernel and initramfs on it.

No file system: GRUB reads both from ranges of sectors, so the image is made by any user in a
moment, and every byte that boots comes through the disk under test. They are in the one partition
of a table that services which look at images take for a sound one. Needs Debian's grub-pc-bin and
grub-common.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.guest.image import build, pack, unpacked
from tests.support.cache import CACHE
from tests.support.qemu import CMDLINE

SECTOR = 512
MIB = 1 << 20
GRUB = Path("/usr/lib/grub/i386-pc")
#: Where the kernel begins; GRUB itself is before it.
KERNEL_AT = MIB
#: In the first sector.
TABLE_AT, TABLE_END = 446, 510
BOOTS, LINUX, BY_LBA = 0x80, 0x83, b"\xfe\xff\xff"
BESIDE = "/beside"
MODULES = ("biosdisk", "linux", "serial", "terminal")
SCRIPT = """\
serial --unit=0 --speed=115200
terminal_output serial
echo virtlun-bootdisk
linux (hd0){kernel} {command_line}
initrd (hd0){initrd}
boot
"""


def boot_disk(more: str = "", beside: str = "") -> Path:
    """Returns the image, made now where the cache has none of this version.

    `more` are further words of the kernel's command line, `beside` is a shell script that the guest
    runs beside all that it does else. RuntimeError where GRUB is not installed.
    """
    image = build()
    command_line = f"{CMDLINE} {more}".rstrip() + f" rdinit={BESIDE}" * bool(beside)
    words = f"{image.kernel.name} {image.initrd.name} {command_line} {beside}"
    key = hashlib.sha256(Path(__file__).read_bytes() + words.encode())
    path = CACHE / "guest" / f"disk-{key.hexdigest()[:16]}.img"
    if path.exists():
        return path
    # A BIOS reads less in the time in which a guest unpacks it.
    with unpacked() as package:
        kernel = next(package.rglob("vmlinuz*")).read_bytes()
    archives = image.initrd.read_bytes() + (script_archive(beside) if beside else b"")
    initrd = gzip.compress(archives, compresslevel=1)
    initrd_at = KERNEL_AT + _whole_mib(len(kernel))
    loader = _loader(
        SCRIPT.format(
            kernel=_range(KERNEL_AT, len(kernel)),
            initrd=_range(initrd_at, len(initrd)),
            command_line=command_line,
        )
    )
    assert len(loader) <= KERNEL_AT, "GRUB does not fit before the kernel"
    end = initrd_at + _whole_mib(len(initrd))
    partial = path.with_suffix(f".{os.getpid()}")
    with partial.open("wb") as file:
        for at, content in (
            *((0, loader), (TABLE_AT, _table(end))),
            *((KERNEL_AT, kernel), (initrd_at, initrd)),
        ):
            file.seek(at)
            file.write(content)
        file.truncate(end)
    partial.rename(path)
    return path


def _whole_mib(size: int) -> int:
    return -(-size // MIB) * MIB


def _range(at: int, size: int) -> str:
    """Returns GRUB's block list of a range of bytes; what is past its end is zeros."""
    return f"{at // SECTOR}+{-(-size // SECTOR)}"


def script_archive(beside: str, *files: Path) -> bytes:
    """Returns the archive of a script, which is run at BESIDE, and /init after it.

    `files` are in the root folder beside it, by their own names.
    """
    with tempfile.TemporaryDirectory() as folder:
        for each in files:
            shutil.copy(each, folder)
        script = Path(folder + BESIDE)
        null = "/bin/busybox mknod /dev/null c 1 3"  # which what goes on by itself begins with
        script.write_text(f"#!/bin/busybox sh\n{null}\n(\n{beside}) &\nexec /init\n")
        script.chmod(0o755)
        return pack(Path(folder))


def _table(end: int) -> bytes:
    """Returns a table of partitions: one, from the kernel to the `end` of the image."""
    first, size = KERNEL_AT // SECTOR, (end - KERNEL_AT) // SECTOR
    entry = struct.pack("<B3sB3sII", BOOTS, BY_LBA, LINUX, BY_LBA, first, size)
    return entry.ljust(TABLE_END - TABLE_AT, b"\0")


def _loader(script: str) -> bytes:
    """Returns the first sector and the rest of GRUB, which follows it without a gap."""
    core = grub_image(script, "i386-pc", "hd0", MODULES)
    first = (GRUB / "boot.img").read_bytes()
    return first[: SECTOR - 2].ljust(SECTOR - 2, b"\0") + b"\x55\xaa" + core


def grub_image(script: str, kind: str, device: str, modules: Sequence[str]) -> bytes:
    """Returns GRUB with a script, as a BIOS has it from its `device` ("hd0" or "cd").

    `kind` is grub-mkimage's format: "i386-pc-eltorito" is for a CD, as it is; "i386-pc" follows the
    first sector. RuntimeError where GRUB is not installed.
    """
    if not GRUB.is_dir():
        raise RuntimeError("grub-pc-bin is not installed: run `make kubernetes`, then try again")
    name = f"grub-{os.getpid()}"
    folder = CACHE / "guest"
    configuration, image = folder / f"{name}.cfg", folder / f"{name}.core"
    configuration.write_text(script)
    try:
        subprocess.run(
            [
                *("grub-mkimage", f"--format={kind}", f"--prefix=({device})", f"--output={image}"),
                *(f"--config={configuration}", *modules),
            ],
            check=True,
            capture_output=True,
        )
        return image.read_bytes()
    finally:
        configuration.unlink()
        image.unlink(missing_ok=True)


if __name__ == "__main__":
    print(boot_disk())
