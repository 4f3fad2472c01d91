"""Opens paths below a root part by part, so that no link leads a mount elsewhere."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from csi import kernel, mounts
from csi.hosterrors import HostError
from csi.mounts import Mount

CSI_VOLUMES = (
    r"pods/[^/]+/volumes/kubernetes\.io~csi/[^/]+/mount",
    r"plugins/kubernetes\.io/csi/(?:csi\.virtlun\.dev|pv)/[^/]+/globalmount",
    r"plugins/kubernetes\.io/csi/volumeDevices/(?:publish/[^/]+|staging)/[^/]+",
)
"""Where kubelet has CSI drivers mount, below its own folder."""
MOUNTS_MAX = 64
"""Mounts at one path on top of each other."""


class RootedPaths:
    """Paths to mount at below a root. Without `shapes`: all of them, links above it followed."""

    def __init__(
        self,
        root: Path = Path("/"),
        shapes: Sequence[str] | None = None,
        *,
        ours: Callable[[Mount], bool] | None = None,
        fs_type: str = "",
    ) -> None:
        """Of the paths below `root` that have one of the `shapes`, regular expressions.

        Nothing is unmounted but what is `ours`, and a file is one of a file system of `fs_type`.
        """
        self._ours = ours or (lambda _: True)
        self._fs_type = fs_type
        self._root = root
        self._shapes = None if shapes is None else [re.compile(each) for each in shapes]
        self._resolve = kernel.RESOLVE_NO_MAGICLINKS
        if shapes is not None:
            self._resolve |= kernel.RESOLVE_BENEATH | kernel.RESOLVE_NO_SYMLINKS

    @contextlib.contextmanager
    def folder(self, path: Path) -> Iterator[int]:
        """Opens a folder below the root, whatever its shape; HostError if it cannot be."""
        with self._opened(path, os.O_PATH | os.O_DIRECTORY) as number:
            yield number

    @contextlib.contextmanager
    def file(self, path: Path) -> Iterator[int]:
        """Opens the place of a file below the root, whatever its shape, neither to read nor write.

        Raises:
            HostError: it cannot be, or is no file.
        """
        with self._opened(path, os.O_PATH | os.O_NOFOLLOW) as number:
            if not stat.S_ISREG(os.fstat(number).st_mode):
                raise HostError(f"{path} is no file")
            if self._fs_type and not self._is_of_type(os.fstat(number).st_dev):
                raise HostError(f"{path} is no file of a file system of type {self._fs_type}")
            yield number

    def check(self, target: Path) -> None:
        """Raises HostError for a path at which nothing may be mounted or unmounted."""
        below = self._below(target)
        if self._shapes is not None and not any(each.fullmatch(below) for each in self._shapes):
            raise HostError(f"{target} is not where kubelet has CSI volumes below {self._root}")

    def check_ours(self, mount: Mount) -> None:
        """Raises HostError for a mount that is not to be changed."""
        if not self._ours(mount):
            raise HostError(
                f"what is mounted at {mount.target} ({mount.fs_type}) is not this driver's"
            )

    @contextlib.contextmanager
    def point(self, target: Path, *, folder: bool) -> Iterator[str]:
        """Makes a mount point, a folder or a file, if it is not there; yields a path of it.

        That one leads to it whatever happens to the path meanwhile, and is of this process.

        Raises:
            HostError: it may not be there, or something else is. With shapes, also what is mounted.
        """
        self.check(target)
        if self._shapes is None:
            target.parent.mkdir(parents=True, exist_ok=True)
        with self.folder(target.parent) as parent:
            with contextlib.suppress(FileExistsError):
                if folder:
                    os.mkdir(target.name, 0o750, dir_fd=parent)
                else:
                    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                    os.close(os.open(target.name, flags, 0o640, dir_fd=parent))
            flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
            number = os.open(target.name, flags, dir_fd=parent)
            try:
                mode = os.fstat(number).st_mode
                if self._shapes is not None and _mount_of(number) != _mount_of(parent):
                    raise HostError(f"something is mounted at {target}: it is not covered")
                if not (stat.S_ISDIR(mode) if folder else stat.S_ISREG(mode)):
                    raise HostError(f"{target} is no {'folder' if folder else 'file'}: remove it")
                yield descriptor_path(number)
            finally:
                os.close(number)

    @contextlib.contextmanager
    def present(self, target: Path) -> Iterator[str]:
        """Yields a path, of this process alone, of what is uppermost at another one."""
        self.check(target)
        with self.folder(target.parent) as parent:
            number = os.open(target.name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
            try:
                yield descriptor_path(number)
            finally:
                os.close(number)

    def unmount(self, target: Path) -> None:
        """Unmounts everything at a path; HostError for what is in use."""
        self.check(target)
        for _ in range(MOUNTS_MAX):
            found = mounts.at(target)
            if found is None:
                return
            self.check_ours(found)
            with self.folder(target.parent) as parent:
                try:
                    kernel.umount(f"{descriptor_path(parent)}/{target.name}")
                except OSError as error:
                    raise HostError(f"cannot unmount {target}: {error.strerror}") from error

    def remove(self, target: Path) -> None:
        """Removes a mount point, if it is there; HostError for a folder with something in it."""
        self.check(target)
        if not os.path.lexists(target.parent):
            return
        with self.folder(target.parent) as parent:
            try:
                if stat.S_ISDIR(os.stat(target.name, dir_fd=parent, follow_symlinks=False).st_mode):
                    os.rmdir(target.name, dir_fd=parent)
                else:
                    os.unlink(target.name, dir_fd=parent)
            except FileNotFoundError:
                pass
            except OSError as error:
                raise HostError(f"cannot remove {target}: {error.strerror}") from error

    def _is_of_type(self, device: int) -> bool:
        number = os.major(device), os.minor(device)
        return any(m.device == number and m.fs_type == self._fs_type for m in mounts.table())

    def _below(self, path: Path) -> str:
        """Returns a path as one of the root; HostError where it is not below it."""
        text = str(path)
        if not path.is_absolute() or ".." in path.parts or "\0" in text:
            raise HostError(f"'{text}' is no absolute path without ..")
        if path == self._root or not path.is_relative_to(self._root):
            raise HostError(f"{path} is not below {self._root}")
        return str(path.relative_to(self._root))

    @contextlib.contextmanager
    def _opened(self, path: Path, flags: int) -> Iterator[int]:
        below = "." if path == self._root else self._below(path)
        try:
            root = os.open(self._root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                number = kernel.openat2(root, below, flags, self._resolve)
            finally:
                os.close(root)
        except OSError as error:
            raise HostError(f"cannot open {path} without following links: {error}") from error
        try:
            yield number
        finally:
            os.close(number)


class SeveralRoots:
    """Paths below several roots, each with its own rules; without a root there are none."""

    def __init__(self, roots: Mapping[Path, RootedPaths]) -> None:
        """`roots` has the paths below each root."""
        self._roots = roots

    def folder(self, path: Path) -> AbstractContextManager[int]:
        """As `RootedPaths.folder` of the root that the path is below; HostError without one."""
        return self._of(path).folder(path)

    def file(self, path: Path) -> AbstractContextManager[int]:
        """As `RootedPaths.file` of the root that the path is below; HostError without one."""
        return self._of(path).file(path)

    def _of(self, path: Path) -> RootedPaths:
        """Returns the paths of the innermost root."""
        found = [root for root in self._roots if path.is_relative_to(root)]
        if not found:
            raise HostError(f"{path} is not below {' or '.join(map(str, self._roots))}")
        return self._roots[max(found, key=lambda root: len(root.parts))]


def _mount_of(number: int) -> str:
    """Returns the number of the mount that an open file was reached through (proc_pid_fdinfo)."""
    lines = Path(f"/proc/self/fdinfo/{number}").read_text().splitlines()
    return next(line for line in lines if line.startswith("mnt_id:"))


def descriptor_path(number: int) -> str:
    """Returns a path that leads to an open file, in this process."""
    return f"/proc/self/fd/{number}"
