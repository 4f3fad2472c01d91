"""What may be asked of the helper: the operations of `LocalHost`, their arguments checked.

Who asks is the driver, which serves gRPC, HTTP and what the API server says, and which somebody may
have taken over. The most that one gains here is what the driver may do anyway: use the volumes of
this node's targets, at the paths that kubelet has for them.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from csi.host.local import LocalHost
from csi.host.records import Records
from csi.host.rootedpaths import CSI_VOLUMES, RootedPaths, SeveralRoots
from csi.hostdevice import loopctl, ublkctl
from csi.hosterrors import HostError
from csi.mounts import Mount

UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
FOLDER = re.compile(rf"(?:csi|pod)-{UUID}")
"""What the driver calls the controllers whose folders it gives to pods."""
DEVICE = re.compile(rf"/dev/loop\d{{1,7}}|{ublkctl.DEVICE.pattern}")
LOOP_MAJOR = 7
UBLK_MAJOR = 259
"""Of all block devices whose drivers have no major number of their own."""
FILE_SYSTEMS = ("ext4", "xfs")
EXPORT_TYPE = "fuse.virtlun"
DELETED = "//deleted"
"""Behind the root of a mount whose folder is gone (proc_pid_mountinfo)."""
BLOCK_SIZES = (512, 4096)
MAKE_MOUNTS = {"mount", "bind_device", "bind_mount", "bind_folder"}
"""Operations after which something is mounted at `target`."""
HANDLE_BYTES_MAX = 128  # csi.v1
OPTIONS_MAX = 64

Checks = dict[str, Callable[[Any], Any]]
"""Of an operation's arguments: each returns the argument, or raises HostError."""


class Confined:
    """Answers questions: the name of an operation, and its arguments as JSON has them."""

    def __init__(self, kubelet: Path, exports: Sequence[Path], vhost: Sequence[Path]) -> None:
        """Mounts below kubelet's folder what is in the targets' folders of exports and sockets."""
        self._vhost = vhost
        self._exports = exports
        self._records = Records(kubelet)
        self._mount_points = RootedPaths(kubelet, CSI_VOLUMES, ours=self._is_ours)
        self._local = LocalHost(
            self._mount_points,
            SeveralRoots({root: RootedPaths(root, (), fs_type=EXPORT_TYPE) for root in exports}),
            SeveralRoots({root: RootedPaths(root, ()) for root in vhost}),
            disks=exports,
        )
        device: Checks = {"device": _device}
        target: Checks = {"target": _path}
        fs_type: Checks = {"fs_type": _fs_type}
        do = self._local
        self._operations: dict[str, tuple[Callable[..., object], Checks]] = {
            "loops": (self._loops, {}),
            "attach": (
                do.attach,
                {"file": _path, "read_only": _bool, "block_size": _block_size},
            ),
            "answers": (do.answers, device),
            "resize": (do.resize, device),
            "flush": (do.flush, device),
            "release": (do.release, device),
            "detach": (do.detach, device),
            "holds": (do.holds, device),
            "make": (do.make, device | fs_type),
            "mount": (do.mount, device | target | fs_type | {"options": _options}),
            "grow": (do.grow, device | target | fs_type),
            "bind_device": (do.bind_device, device | target),
            "bind_mount": (
                do.bind_mount,
                device | {"staging": _path} | target | {"read_only": _bool},
            ),
            "bind_folder": (do.bind_folder, {"folder": _path} | target),
            "seal": (do.seal, target),
            "unmount": (do.unmount, target),
            "remove": (do.remove, target),
        }

    def do(self, name: str, volume: str, arguments: dict[str, Any]) -> object:
        """Does an operation and returns what it returns, as JSON can have it.

        Raises:
            HostError: it is refused, or fails.
        """
        if name == "disks":
            return {whose: str(device) for whose, device in self._local.disks().items()}
        if name not in self._operations:
            raise HostError(f"the helper has no operation '{name}'")
        act, checks = self._operations[name]
        handle = _handle(volume)
        needs_uuid = "device" in checks or name in ("loops", "attach")
        if needs_uuid and not re.fullmatch(UUID, handle):
            raise HostError(f"'{handle}' is no volume of the target")
        if arguments.keys() != checks.keys():
            raise HostError(f"operation {name} has the arguments {', '.join(checks) or 'none'}")
        given = {key: check(arguments[key]) for key, check in checks.items()}
        if name == "attach" and not self._is_export(given["file"], handle):
            raise HostError(f"{given['file']} is not the export of volume {handle}")
        if name in MAKE_MOUNTS:
            self._mount_points.check(given["target"])
            self._records.check(given["target"], handle)
        if name == "bind_folder":
            self._check_folder(handle, given["folder"], given["target"])
        found = act(handle, **given)
        return str(found) if isinstance(found, Path) else found

    def _loops(self, volume: str) -> list[dict[str, object]]:
        return [{**vars(loop), "device": str(loop.device)} for loop in self._local.loops(volume)]

    def _is_export(self, file: Path, volume: str) -> bool:
        if ublkctl.is_device(file):
            return self._local.disks().get(volume) == file
        return file.name == volume and file.parent.parent in self._exports

    def _check_folder(self, volume: str, folder: Path, target: Path) -> None:
        """Raises HostError for a folder that is not of this volume's controller, or this pod's."""
        if folder.parent not in self._vhost or not FOLDER.fullmatch(folder.name):
            raise HostError(f"{folder} is no folder of a controller that the driver makes")
        whose, uuid = folder.name.split("-", 1)
        if uuid != volume if whose == "csi" else uuid not in target.parts:
            raise HostError(f"{folder} is not the folder of volume {volume} at {target}")

    def _is_ours(self, mount: Mount) -> bool:
        """Whether a mount is one of those that the operations make."""
        major, minor = mount.device
        name = Path(mount.root.removesuffix(DELETED)).name
        if mount.fs_type in FILE_SYSTEMS and major == LOOP_MAJOR:
            return self._is_volume(f"loop{minor}")
        if mount.fs_type in FILE_SYSTEMS and major == UBLK_MAJOR:
            disk = ublkctl.name_of(mount.device)
            return disk is None or self._is_disk(disk)
        if mount.fs_type == "devtmpfs" and mount.root == f"/{name}":
            return self._is_volume(name) or self._is_disk(name)
        if FOLDER.fullmatch(name) is None:
            return False
        return any(mount.device == _device_of(folder) for folder in self._vhost)

    def _is_disk(self, name: str) -> bool:
        """Whether a device is of ublk and a volume's, or not there any more."""
        device = Path("/dev") / name
        if not ublkctl.is_device(device):
            return False
        return name not in ublkctl.names() or device in self._local.disks().values()

    def _is_volume(self, loop: str) -> bool:
        """Whether a loop device is over what can be an export, or over no file any more.

        It is not asked itself, as that would wait for a target that is away. Of a file system that
        is not mounted here any more the kernel has but the file's name.
        """
        if not re.fullmatch(r"loop\d+", loop):
            return False
        path = loopctl.file_path(loop)
        if path is None or self._is_disk(path.name):
            return True
        there = any(path.is_relative_to(root) for root in self._exports)
        there |= path.parent == Path("/")
        return there and re.fullmatch(UUID, path.name) is not None


def _device_of(folder: Path) -> tuple[int, int] | None:
    """Returns the device number of the file system that a folder is on, or is to be on."""
    for each in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            number = each.stat().st_dev
            return os.major(number), os.minor(number)
    return None


def _handle(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value.encode()) <= HANDLE_BYTES_MAX:
        raise HostError(f"a volume has a handle of 1 to {HANDLE_BYTES_MAX} bytes")
    return value


def _path(value: Any) -> Path:
    # Path() would remove what is not as it should be
    if not isinstance(value, str) or not value.startswith("/") or str(Path(value)) != value:
        raise HostError(f"{value!r} is no absolute path in its shortest form")
    if ".." in Path(value).parts or "\0" in value:
        raise HostError(f"{value!r} is no absolute path in its shortest form")
    return Path(value)


def _device(value: Any) -> Path:
    if not isinstance(value, str) or not DEVICE.fullmatch(value):
        raise HostError(f"{value!r} is no loop device, and none of ublk")
    return Path(value)


def _fs_type(value: Any) -> str:
    if value not in FILE_SYSTEMS:
        raise HostError(f"{value!r} is not one of the file systems {', '.join(FILE_SYSTEMS)}")
    return str(value)


def _options(value: Any) -> list[str]:
    if not isinstance(value, list) or len(value) > OPTIONS_MAX:
        raise HostError(f"mount options are a list of {OPTIONS_MAX} at most")
    if not all(isinstance(each, str) for each in value):
        raise HostError("a mount option is a text")
    return value


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise HostError(f"{value!r} is neither true nor false")
    return value


def _block_size(value: Any) -> int:
    if isinstance(value, bool) or value not in BLOCK_SIZES:
        raise HostError(f"{value!r} is no size of a block: there are {BLOCK_SIZES}")
    return int(value)
