"""A disk with programs of this machine, for a guest that has none of its folders."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.guest.emulator import newer
from tests.guest.image import Kernel, build
from tests.support.qemu import Guest

#: Where Linux 6.12 fails now and then when a server of ublk is killed: io_uring has work listed at
#: the end of the process, and what that belongs to is gone. Nothing of ours runs there.
KERNEL_FAULT = "io_fallback_tw"
#: Where `mount` puts it in the guest.
PLACE = "/programs"


def copy_libraries(binary: Path, folder: Path) -> None:
    """Copies the libraries that a program or library is linked with to a folder.

    subprocess.CalledProcessError if it is not linked with any, or is none.
    """
    linked = subprocess.run(["ldd", binary], capture_output=True, text=True, check=True).stdout
    for library in re.findall(r"=> (/\S+)", linked):
        if not (folder / Path(library).name).exists():
            shutil.copy(library, folder)


def make(
    folder: Path, programs: dict[str, Path], also: Callable[[Path], None] | None = None
) -> Path:
    """Makes an ext4 image of `programs` (by the name that each has there) with their libraries.

    `also` is called with the folder that becomes the image, to add what else is to be there.
    Returns its path, in `folder`. subprocess.CalledProcessError if a program or tool is missing.
    """
    tree = folder / "programs"
    (tree / "lib").mkdir(parents=True)
    for name, path in programs.items():
        shutil.copy(path, tree / name)
        copy_libraries(path, tree / "lib")
    if also:
        also(tree)
    image = folder / "programs.img"
    used = sum(path.stat().st_size for path in tree.rglob("*") if path.is_file())
    with image.open("wb") as file:
        file.truncate((used * 5 // 4 + (8 << 20)) & ~0xFFFFF)
    subprocess.run(
        ["mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-d", tree, image],
        check=True,
        capture_output=True,
    )
    shutil.rmtree(tree)
    return image


@contextlib.contextmanager
def guest(
    scratch: Path,
    programs: dict[str, Path],
    kernel: Kernel,
    *,
    memory_mib: int = 512,
    vcpus: int = 1,
    also: Callable[[Path], None] | None = None,
) -> Iterator[Guest]:
    """Boots a guest with `programs` as `make` takes them; nothing surprised its kernel at the end.

    `scratch` is a folder for its disk, its sockets and its logs.
    """
    image = make(scratch, programs, also)
    with Guest(
        build(kernel),
        scratch,
        emulator=newer(),
        deadline_s=300.0,
        memory_mib=memory_mib,
        vcpus=vcpus,
        extra=options(image),
    ) as running:
        running.run(MOUNT)
        running.run(LOOP)
        yield running
        unsurprised(running)


def unsurprised(guest: Guest) -> None:
    """Checks what a guest's kernel has said since the last time, and forgets it.

    A test ends as one that is expected to fail where the kernel fell over KERNEL_FAULT.
    """
    words = guest.run("dmesg -c")
    if f"RIP: 0010:{KERNEL_FAULT}" in words:
        pytest.xfail(f"Linux 6.12 failed in {KERNEL_FAULT}, as whom it served was killed")
    assert "WARNING" not in words and "BUG:" not in words, words


@contextlib.contextmanager
def explained(guest: Guest) -> Iterator[None]:
    """Looks first at what the guest's kernel has said, as `unsurprised`, if the rest fails."""
    try:
        yield
    except Exception:
        unsurprised(guest)
        raise


def options(image: Path) -> tuple[str, ...]:
    """Returns QEMU's options: a virtio-blk disk that cannot be written, found by its serial."""
    return (
        *("-drive", f"file={image},if=none,id=programs,format=raw,readonly=on"),
        *("-device", "virtio-blk-pci,drive=programs,serial=programs"),
    )


#: Mounts it in the guest.
MOUNT = (
    f"mkdir -p {PLACE}; for disk in /sys/block/vd*; do "
    f'[ "$(cat $disk/serial)" = programs ] && mount -t ext4 -o ro /dev/${{disk##*/}} {PLACE}; '
    f"done; grep -q {PLACE} /proc/mounts"
)

#: Loads the driver of loop devices, which makes some.
LOOP = "[ ! -e /modules/loop.ko ] || insmod /modules/loop.ko"


def run(name: str) -> str:
    """Returns the command that runs a program there with its own libraries."""
    return f"env LD_LIBRARY_PATH={PLACE}/lib {PLACE}/{name}"
