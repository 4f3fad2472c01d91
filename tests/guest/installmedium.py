"""An installation medium: a CD-ROM's image that a BIOS boots, and that installs a disk's image.

What is installed is `boot_disk` of tests/guest/bootdisk.py; the guest then boots anew. Needs
Debian's grub-pc-bin, grub-common and xorriso.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

from tests.guest import bootdisk
from tests.guest.bootdisk import BESIDE, MODULES, boot_disk, grub_image, script_archive
from tests.guest.image import build, unpacked
from tests.support.cache import CACHE
from tests.support.qemu import CMDLINE

SCRIPT = f"""\
serial --unit=0 --speed=115200
terminal_output serial
echo virtlun-installation
linux (cd)/vmlinuz {CMDLINE} rdinit={BESIDE}
initrd (cd)/initrd.gz
boot
"""
INSTALL = """\
export PATH=/tools:/sbin:/bin:/usr/sbin:/usr/bin
while sleep 1; do
    for disk in /dev/vda /dev/sda; do
        [ -b $disk ] && dd if=/{image} of=$disk bs=1M conv=fsync && reboot -f
    done
done
"""


def install_medium(beside: str) -> Path:
    """Returns the image, made now where the cache has none of this version.

    It installs on the first disk, which has room for `boot_disk`, with the shell script `beside`
    that runs each time that it boots. RuntimeError where GRUB is not installed.
    """
    disk = boot_disk(beside=beside)
    key = hashlib.sha256(f"{disk.name} {SCRIPT} {INSTALL}".encode())
    for module in (__file__, bootdisk.__file__):
        key.update(Path(module).read_bytes())
    path = CACHE / "guest" / f"install-{key.hexdigest()[:16]}.iso"
    if path.exists():
        return path
    archive = script_archive(INSTALL.format(image=disk.name), disk)
    initrd = build().initrd.read_bytes() + archive
    partial = path.with_suffix(f".{os.getpid()}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with unpacked() as package:
            kernel = next(package.rglob("vmlinuz*")).read_bytes()
        (folder / "vmlinuz").write_bytes(kernel)
        (folder / "initrd.gz").write_bytes(gzip.compress(initrd, compresslevel=1))
        modules = (*MODULES, "iso9660")
        (folder / "grub.img").write_bytes(grub_image(SCRIPT, "i386-pc-eltorito", "cd", modules))
        subprocess.run(
            [
                *("xorrisofs", "-quiet", "-output", str(partial), "-eltorito-boot", "grub.img"),
                *("-no-emul-boot", "-boot-load-size", "4", "-boot-info-table", str(folder)),
            ],
            check=True,
            capture_output=True,
        )
    partial.rename(path)
    return path


if __name__ == "__main__":
    print(install_medium(""))
