"""The guests that tests and the demo boot: a cloud kernel of Debian's and a small initramfs.

The kernel is the release's own or, for what that has not, the one of its backports.

`python -m tests.guest.image` builds it into the cache; it is built again only when this file, the
init script, a program in C beside it or the kernel package changed. Needs apt (to download the
kernel package), dpkg, cpio, gcc and the tools named in `TOOLS`, all installed by `make setup`.

Most machines that run these tests have no KVM, where whatever a guest does takes ten times as long.
So nothing is left to be unpacked in it: the kernel is the ELF file that a bzImage unpacks to, which
QEMU begins at its PVH entry, and the initramfs is not compressed.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import lzma
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support import backports
from tests.support.cache import CACHE

INIT = Path(__file__).with_name("init")

#: Our own programs for the guest.
PROGRAMS = sorted(Path(__file__).parent.glob("*.c"))

#: Modules with their dependencies, in load order (the cloud kernel has ext4 and NVMe built in).
MODULES = (
    "virtio_ring",
    "virtio",
    "virtio_pci_modern_dev",
    "virtio_pci_legacy_dev",
    "virtio_pci",
    "crc64",
    "crc64-rocksoft",
    "crc-t10dif",
    "t10-pi",
    "scsi_common",
    "scsi_mod",
    "virtio_scsi",
    "sd_mod",
    "sg",
    "virtio_blk",
    "virtio_console",
    "fuse",
    "loop",
    "ublk_drv",
)
#: Of these, what is loaded only where a test has it: it makes devices.
ON_DEMAND = ("loop",)

#: Debian programs that go into the guest beside busybox, with the libraries that they need.
TOOLS = (
    "blkdiscard",
    "ddpt",
    "ddptctl",
    "lsblk",
    "mkfs.ext4",
    "resize2fs",
    "sg_compare_and_write",
    "sg_copy_results",
    "sg_dd",
    "sg_format",
    "sg_get_lba_status",
    "sg_inq",
    "sg_logs",
    "sg_luns",
    "sg_modes",
    "sg_opcodes",
    "sg_persist",
    "sg_prevent",
    "sg_raw",
    "sg_read",
    "sg_read_buffer",
    "sg_readcap",
    "sg_reassign",
    "sg_requests",
    "sg_reset",
    "sg_rtpg",
    "sg_sanitize",
    "sg_seek",
    "sg_senddiag",
    "sg_start",
    "sg_stpg",
    "sg_sync",
    "sg_timestamp",
    "sg_turs",
    "sg_unmap",
    "sg_verify",
    "sg_vpd",
    "sg_wr_mode",
    "sg_write_buffer",
    "sg_write_same",
    "sg_write_verify",
    "sg_write_x",
    "sg_xcopy",
)


#: What unpacks a kernel, by the bytes that it begins with.
UNPACK = {
    b"\x02\x21\x4c\x18": ("lz4", "-dcq"),
    b"\xfd7zXZ": ("xz", "-dcq"),
    b"\x28\xb5\x2f\xfd": ("zstd", "-dcq"),
    b"\x1f\x8b": ("gzip", "-dcq"),
}

#: File names of the packages of kernels.
PACKAGE = "linux-image-*-cloud-amd64_*.deb"
#: Of what a newer one is split into beside it.
PARTS = "linux-[bm]*-cloud-amd64_*.deb"


@dataclass(frozen=True)
class Image:
    """A bootable guest: paths of its kernel and of its initramfs."""

    kernel: Path
    initrd: Path


class Kernel(enum.Enum):
    """Which kernel a guest has."""

    RELEASE = ""
    """Linux 6.1."""
    BACKPORTS = "backports"
    """Linux 6.12, which has ublk. Without KVM it needs the newer QEMU: in 7.2 it often panics."""
    NEWEST = "newest"
    """Of the next release's backports: 6.16 or newer, whose ublk can change a device's size. Needs
    the newer QEMU as BACKPORTS does."""


def build(kernel: Kernel = Kernel.RELEASE) -> Image:
    """Returns the guest image, building it where the cache has none of this version.

    Raises:
        RuntimeError: a tool or module is missing on this machine; the text says which.
    """
    folder = CACHE / "guest" / kernel.value
    folder.mkdir(parents=True, exist_ok=True)
    packages = _kernel_packages(folder, kernel)
    sources = [path.read_bytes() for path in (Path(__file__), INIT, *PROGRAMS)]
    key = hashlib.sha256(b"\0".join([*sources, packages[0].name.encode()])).hexdigest()[:16]
    image = Image(folder / f"vmlinux-{key}", folder / f"initrd-{key}.img")
    if image.kernel.exists() and image.initrd.exists():
        return image
    with (
        tempfile.TemporaryDirectory(prefix="tree-", dir=folder) as tree,
        unpacked(kernel) as package,
    ):
        _fill(Path(tree), modules_in(package))
        initrd = pack(Path(tree))
        for data, path in (
            (elf_of(next(package.rglob("vmlinuz*")).read_bytes()), image.kernel),
            (initrd, image.initrd),
        ):
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_bytes(data)
            partial.chmod(0o644)
            partial.rename(path)
    return image


def elf_of(kernel: bytes) -> bytes:
    """Returns the ELF file that is compressed in a bzImage (Linux' x86/boot protocol 2.08 and on).

    Raises:
        RuntimeError: it is compressed in a way that is not known here.
    """
    sectors = kernel[0x1F1] or 4
    offset, length = struct.unpack_from("<II", kernel, 0x248)
    begin = (sectors + 1) * 512 + offset
    payload = kernel[begin : begin + length]
    # But for gzip, which says so itself, the size behind it is the kernel's own addition.
    for magic, program in UNPACK.items():
        if payload.startswith(magic):
            data = payload if program[0] == "gzip" else payload[:-4]
            return subprocess.run(program, input=data, stdout=subprocess.PIPE, check=True).stdout
    raise RuntimeError(f"a kernel that begins with {payload[:4].hex()} cannot be unpacked")


def with_tools(image: Image, *tools: str) -> Image:
    """Returns an image with more of this machine's programs, which few tests need.

    The kernel unpacks what is appended to an initramfs over it.

    Raises:
        RuntimeError: one is missing on this machine; the text says which.
    """
    initrd = image.initrd.with_name(f"{image.initrd.stem}-{'-'.join(tools)}.img")
    if not initrd.exists():
        with tempfile.TemporaryDirectory(prefix="tools-", dir=image.initrd.parent) as work:
            rootfs, partial = Path(work) / "root", Path(work) / "initrd"
            (rootfs / "tools/lib").mkdir(parents=True)
            for tool in tools:
                copy_program(installed(tool), rootfs)
            partial.write_bytes(image.initrd.read_bytes() + pack(rootfs))
            partial.chmod(0o644)
            partial.rename(initrd)
    return Image(image.kernel, initrd)


@contextlib.contextmanager
def unpacked(kernel: Kernel = Kernel.RELEASE) -> Iterator[Path]:
    """A folder with what the kernel's packages have, for the length of a block."""
    folder = CACHE / "guest" / kernel.value
    with tempfile.TemporaryDirectory(prefix="package-", dir=folder) as work:
        for package in _kernel_packages(folder, kernel):
            subprocess.run(["dpkg-deb", "-x", package, work], check=True)
        yield Path(work)


def modules_in(package: Path) -> Path:
    """Returns the folder of modules among what `unpacked` has."""
    # since Debian 13 in /usr
    return next(iter([*package.glob("lib/modules/*"), *package.glob("usr/lib/modules/*")]))


def _kernel_packages(folder: Path, kernel: Kernel) -> list[Path]:
    """Downloads Debian's current cloud kernel, the package of the image first; or has it cached."""
    cached = sorted(folder.glob(PACKAGE))
    if cached:
        return [cached[-1], *sorted(folder.glob(PARTS))]
    if kernel is Kernel.NEWEST:
        with tempfile.TemporaryDirectory(prefix="partial-", dir=folder) as work:
            # the image last: with it they are all there
            downloaded = backports.newest_kernel(Path(work))
            downloaded.sort(key=lambda path: path.match(PACKAGE))
            for path in downloaded:
                path.rename(folder / path.name)
        return _kernel_packages(folder, kernel)
    if kernel is Kernel.BACKPORTS:
        with tempfile.TemporaryDirectory(prefix="partial-", dir=folder) as work:
            downloaded = backports.download(Path(work), ["linux-image-cloud-amd64"])
            package = next(path for path in downloaded if path.match(PACKAGE))
            return [package.rename(folder / package.name)]
    depends = subprocess.run(
        ["apt-cache", "depends", "linux-image-cloud-amd64"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    found = re.search(r"Depends: (linux-image-\d\S*-cloud-amd64)", depends)
    if not found:
        raise RuntimeError(
            "apt knows no linux-image-cloud-amd64: run `apt-get update`, then try again"
        )
    subprocess.run(
        ["apt-get", "download", "-q", found[1]], cwd=folder, check=True, capture_output=True
    )
    return [sorted(folder.glob(PACKAGE))[-1]]


def _fill(rootfs: Path, modules: Path) -> None:
    """Lays out the initramfs: init, busybox, modules and tools."""
    folders = ("bin", "dev", "etc", "mnt", "modules", "proc", "run", "sys", "tmp", "tools/lib")
    for name in folders:
        (rootfs / name).mkdir(parents=True)
    (rootfs / "etc/mtab").symlink_to("/proc/mounts")
    shutil.copy(INIT, rootfs / "init")
    (rootfs / "init").chmod(0o755)
    _install_busybox(rootfs)
    copied = copy_modules(MODULES, modules, rootfs)
    order = [f"{name}.ko" for name in copied if name not in ON_DEMAND]
    (rootfs / "modules/order").write_text("\n".join(order) + "\n")
    for tool in TOOLS:
        copy_program(installed(tool), rootfs)
    for source in PROGRAMS:
        _compile(source, rootfs / "tools" / source.stem)
    (rootfs / "lib64").mkdir()
    shutil.copy("/lib64/ld-linux-x86-64.so.2", rootfs / "lib64")


def _install_busybox(rootfs: Path) -> None:
    """Copies busybox, with the names of all that it can do, as `busybox --install -s` has them."""
    shutil.copy("/bin/busybox", rootfs / "bin/busybox")
    listed = subprocess.run(
        ["busybox", "--list-full"], check=True, capture_output=True, text=True
    ).stdout
    for name in listed.split():
        link = rootfs / name
        link.parent.mkdir(parents=True, exist_ok=True)
        if name != "bin/busybox" and not link.exists():
            link.symlink_to("/bin/busybox")


def copy_modules(names: Sequence[str], modules: Path, rootfs: Path) -> list[str]:
    """Copies modules; returns those that there are. The others are built into this kernel."""
    available = {path.name.split(".ko")[0]: path for path in modules.rglob("*.ko*")}
    copied = [name for name in names if name in available]
    for name in copied:
        module = available[name].read_bytes()
        packed = available[name].suffix == ".xz"
        (rootfs / f"modules/{name}.ko").write_bytes(lzma.decompress(module) if packed else module)
    return copied


def installed(tool: str) -> Path:
    """Returns where this machine has a program; RuntimeError if it has not."""
    path = shutil.which(tool, path="/usr/sbin:/usr/bin:/sbin:/bin")
    if path is None:
        raise RuntimeError(f"{tool} is not installed: run `make setup`, then try again")
    return Path(path)


def copy_program(path: Path, rootfs: Path) -> None:
    """Copies a program with the libraries that it needs; RuntimeError if one is missing."""
    shutil.copy(path, rootfs / "tools" / path.name)
    linked = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
    missing = re.findall(r"(\S+) => not found", linked)
    if missing:
        raise RuntimeError(f"{path.name} needs {', '.join(missing)}: run `make setup`")
    for library in re.findall(r"=> (/\S+)", linked):
        target = rootfs / "tools/lib" / Path(library).name
        if not target.exists():
            shutil.copy(library, target)


def _compile(source: Path, program: Path) -> None:
    """Compiles one of our programs; RuntimeError with what the compiler said."""
    options = ["-O2", "-Wall", "-Wextra", "-Werror", "-static", "-pthread", "-s"]
    done = subprocess.run(
        ["gcc", *options, "-o", program, source], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{source} does not compile:\n{done.stderr}")


def pack(rootfs: Path) -> bytes:
    """Returns the tree as a newc archive."""
    names = "\0".join(str(path.relative_to(rootfs)) for path in sorted(rootfs.rglob("*"))).encode()
    return subprocess.run(
        ["cpio", "-o", "-0", "-H", "newc", "--quiet", "-R", "0:0"],
        cwd=rootfs,
        input=names,
        stdout=subprocess.PIPE,
        check=True,
    ).stdout


if __name__ == "__main__":
    for each in Kernel:
        built = build(each)
        print(f"kernel {built.kernel}\ninitrd {built.initrd}")
