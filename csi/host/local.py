"""The operations on the host, done in this process: see `Host`."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from csi import filesystems, kernel, mounts, sysblock
from csi.host.rootedpaths import RootedPaths, SeveralRoots, descriptor_path
from csi.hostdevice import loopctl, ublkctl
from csi.hostdevice.loopctl import DEAD, Loop
from csi.hosterrors import HostError

EXPORT_DIR = Path("/run/virtlun/export")
PREFIX = "virtlun:"
READ_ONLY_SUFFIX = ":ro"
KEPT = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
"""Flags of a mount that a change of it would clear; statvfs(2) has the same numbers."""


class LocalHost:
    """csi.host.Host in this process, which needs root's rights for it."""

    def __init__(
        self,
        mount_points: RootedPaths | None = None,
        exports: RootedPaths | SeveralRoots | None = None,
        folders: RootedPaths | SeveralRoots | None = None,
        disks: Sequence[Path] | None = None,
    ) -> None:
        """Mounts at `mount_points` files of `exports` and what is in `folders`; None: at any path.

        Devices of ublk are those that holders have noted in `disks`; None: what the target says.
        """
        self._links = ublkctl.Links([EXPORT_DIR] if disks is None else disks)
        self._checks_links = disks is not None
        self._mount_points = mount_points or RootedPaths()
        self._exports = exports or RootedPaths()
        self._folders = folders or RootedPaths()

    def check(self) -> str | None:
        """Returns None: this process is there."""
        return None

    # Loop devices

    def loops(self, volume: str) -> list[Loop]:
        """Returns the volume's loop devices."""
        files = (volume, *ublkctl.names())
        found = (loop for file in files for loop in loopctl.loops(file))
        return [loop for loop in found if loop.name in _names(volume)]

    def disks(self) -> dict[str, Path]:
        """Returns the devices of ublk by volume."""
        return self._links.all()

    def attach(self, volume: str, file: Path, *, read_only: bool, block_size: int) -> Path:
        """Puts a loop device over the target's file of the volume, unless one is there.

        It may be of a driver that was killed while its question was underway.
        """
        name = f"{PREFIX}{volume}{READ_ONLY_SUFFIX if read_only else ''}"
        with self._backing(volume, file, read_only=read_only) as number:
            found = os.fstat(number)
            backing = loopctl.encoded(found.st_dev), found.st_ino
            for loop in self.loops(volume):
                if loop.backing == backing and loop.name == name and not loop.leaving:
                    return loop.device
            path = Path(descriptor_path(number))
            return loopctl.attach(path, name, read_only=read_only, block_size=block_size)

    def answers(self, volume: str, device: Path) -> bool:
        """Whether a device's first bytes can be read from its file, not from memory."""
        with self._own(volume, device):
            return _answers(device)

    def resize(self, volume: str, device: Path) -> None:
        """Lets a loop device take its file's size."""
        with self._own(volume, device):
            loopctl.grow(device)

    def flush(self, volume: str, device: Path) -> None:
        """Writes out and drops a device's page cache."""
        with self._own(volume, device, gone=True) as loop:
            if ublkctl.is_device(device):
                loopctl.flush_device(device)
            elif loop is not None and not loop.name.startswith(DEAD):
                loopctl.flush(loop)

    def release(self, volume: str, device: Path) -> None:
        """Takes a device off its file."""
        with self._own(volume, device, gone=True) as loop:
            if loop is not None:
                loopctl.release(loop)

    def detach(self, volume: str, device: Path) -> None:
        """Takes a device off its file and waits until it is off."""
        with self._own(volume, device, gone=True) as loop:
            if loop is not None:
                loopctl.release(loop)
        if loop is not None:
            loopctl.wait_gone(loop)

    # File systems

    def holds(self, volume: str, device: Path) -> str:
        """Returns the type of what is on a device."""
        with self._own(volume, device):
            return filesystems.holds(device)

    def make(self, volume: str, device: Path, fs_type: str) -> None:
        """Formats a device that is not mounted."""
        with self._own(volume, device):
            if found := mounts.of_device(device):
                raise HostError(f"{device} is in use at {found[0].target} and is not formatted")
            filesystems.make(device, fs_type)

    def mount(
        self, volume: str, device: Path, target: Path, fs_type: str, options: list[str]
    ) -> None:
        """Mounts a device's file system, and grows it to the device."""
        with self._own(volume, device), self._mount_points.point(target, folder=True) as place:
            filesystems.mount(
                *(device, target, fs_type, options, place),
                unmount=lambda: self._mount_points.unmount(target),
            )

    def grow(self, volume: str, device: Path, target: Path, fs_type: str) -> None:
        """Grows the file system of a device, mounted at `target`."""
        with self._own(volume, device):
            with self._mount_points.present(target) as place:
                _check_is_on(device, place, target)
            filesystems.grow(device, target, fs_type)

    # Mounts

    def bind_device(self, volume: str, device: Path, target: Path) -> None:
        """Makes a device appear at a path."""
        with self._own(volume, device), self._mount_points.point(target, folder=False) as place:
            _bind(str(device), place, target)

    def bind_mount(
        self, volume: str, device: Path, staging: Path, target: Path, *, read_only: bool
    ) -> None:
        """Makes the device's file system, mounted at `staging`, appear at another path.

        A read-only one is writable for a moment: who finds one, after a crash perhaps, seals it.
        """
        with self._own(volume, device), self._mount_points.present(staging) as source:
            _check_is_on(device, source, staging)
            with self._mount_points.point(target, folder=True) as place:
                _bind(source, place, target)
        if read_only:
            self._seal_or_unmount(volume, target)

    def bind_folder(self, volume: str, folder: Path, target: Path) -> None:
        """Makes the folder of a controller appear at a path, read-only, in the same way."""
        with (
            self._folders.folder(folder) as source,
            self._mount_points.point(target, folder=True) as place,
        ):
            _bind(descriptor_path(source), place, target)
        self._seal_or_unmount(volume, target)

    def seal(self, volume: str, target: Path) -> None:
        """Makes what is mounted at a path read-only there."""
        present = mounts.at(target)
        if present is None or present.read_only:
            return
        self._mount_points.check_ours(present)
        flags = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY
        with self._mount_points.present(target) as place:
            try:
                kept = os.statvfs(place).f_flag & KEPT
                kernel.mount("none", place, "", flags | kept)
            except OSError as error:
                raise HostError(f"cannot make {target} read-only: {error.strerror}") from error

    def unmount(self, volume: str, target: Path) -> None:
        """Unmounts every mount at a path."""
        self._mount_points.unmount(target)

    def remove(self, volume: str, target: Path) -> None:
        """Unmounts a path and removes its mount point."""
        self.unmount(volume, target)
        self._mount_points.remove(target)

    def _seal_or_unmount(self, volume: str, target: Path) -> None:
        try:
            self.seal(volume, target)
        except HostError:
            self.unmount(volume, target)
            raise

    @contextlib.contextmanager
    def _backing(self, volume: str, file: Path, *, read_only: bool) -> Iterator[int]:
        """Opens the place of what a loop device is to be over; HostError for another volume's."""
        if not ublkctl.is_device(file):
            with self._exports.file(file) as number:
                yield number
            return
        if not read_only:
            raise HostError(f"{file} is used as it is: a loop device over it is read-only")
        with self._own(volume, file):
            number = os.open(file, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                yield number
            finally:
                os.close(number)

    @contextlib.contextmanager
    def _own(self, volume: str, device: Path, *, gone: bool = False) -> Iterator[Loop | None]:
        """Holds a device of the volume open, so that it stays that one; HostError for another.

        `gone`: None for one that is not in use any more, as for one of ublk.
        """
        is_disk = ublkctl.is_device(device)
        if is_disk and self._checks_links:
            self._links.check(volume, device)
        with contextlib.ExitStack() as opened:
            try:
                node = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise HostError(f"{device} cannot be opened: {error.strerror}") from error
            opened.callback(os.close, node)
            loop = None if is_disk else loopctl.status(device)
            if is_disk or (loop is None and gone):
                yield None
            elif loop is None or loop.name not in _names(volume):
                raise HostError(f"{device} is not of volume {volume}")
            else:
                yield loop


def _check_is_on(device: Path, place: str, path: Path) -> None:
    """Raises HostError for a place, which is `path`, that is not on a device's file system."""
    if Path(place).stat().st_dev != device.stat().st_rdev:
        raise HostError(f"what is mounted at {path} is not {device}")


def _answers(device: Path) -> bool:
    """Whether a device's first bytes can be read from its file, not from memory."""
    try:
        node = os.open(device, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        try:
            with mmap.mmap(-1, sysblock.PAGE_BYTES) as page:
                return os.preadv(node, [page], 0) == sysblock.PAGE_BYTES
        finally:
            os.close(node)
    except OSError:
        return False


def _names(volume: str) -> set[str]:
    """Returns what the loop devices of a volume are called."""
    own = f"{PREFIX}{volume}"
    return {own, f"{own}{READ_ONLY_SUFFIX}", f"{DEAD}{volume}"}


def _bind(source: str, place: str, target: Path) -> None:
    try:
        kernel.mount(source, place, "", kernel.MS_BIND)
    except OSError as error:
        raise HostError(f"cannot bind to {target}: {error.strerror}") from error
