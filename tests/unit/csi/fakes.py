"""A double of a host for tests of the driver's logic: NOT a kernel, only dictionaries.

What the real one does is tested by tests/target/test_csi_sanity.py and tests/kubernetes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from csi.mounts import Mount
from pydataplane.errors import BUSY, RpcError, TargetUnavailable
from tests.support.fake_target import MIB, FakeTarget


class FakeHost:
    """A host's devices, mounts and file systems; stands for HostDevice, Host and mounts."""

    def __init__(self, target: FakeTarget) -> None:
        self._target = target
        self._next = 0
        self.devices: dict[tuple[str, bool], Path] = {}
        self.contents: dict[str, str] = {}
        self.mounted: list[Mount] = []
        self.made: list[tuple[str, str]] = []
        self.grown: list[str] = []
        self.dead: set[str] = set()
        self.flushed: list[str] = []
        self.crash_in_make = False
        #: Bytes that devices lack, of what another node has just grown.
        self.behind = 0

    # HostDevice
    def attach(
        self,
        volume: str,
        *,
        read_only: bool = False,
        block_size: int = 512,
        shared: bool = False,
    ) -> Path:
        assert block_size in (512, 4096)
        if self._target.users(volume):
            raise RpcError(BUSY, "in use by a controller", "virtlun_export_create")
        self._target.exports.add(volume)
        if (volume, read_only) not in self.devices:
            self._next += 1
            self.devices[volume, read_only] = Path(f"/dev/loop{self._next}")
        return self.devices[volume, read_only]

    def device(self, volume: str, *, read_only: bool = False) -> Path | None:
        return self.devices.get((volume, read_only))

    def answers(self, volume: str) -> bool:
        return volume not in self.dead

    def grow(self, volume: str, *mounted: object) -> None:
        """Grows a device, or what is mounted of it."""
        self.grown += [] if mounted else [volume]

    def flush(self, volume: str) -> None:
        self.flushed.append(volume)

    def detach(self, volume: str) -> None:
        self.devices = {key: path for key, path in self.devices.items() if key[0] != volume}
        self._target.exports.discard(volume)

    def attached(self) -> list[str]:
        return sorted({volume for volume, _ in self.devices})

    def present(self) -> list[str]:
        return self.attached()

    # mounts
    def numbers(self, device: Path) -> tuple[int, int]:
        return 7, int(device.name.removeprefix("loop"))

    def real(self, path: Path) -> str:
        return str(path)

    def table(self) -> list[Mount]:
        return self.mounted

    def at(self, target: Path) -> Mount | None:
        return next((each for each in self.mounted if each.target == str(target)), None)

    def of_device(self, device: Path) -> list[Mount]:
        number = self.numbers(device)
        return [m for m in self.mounted if m.device == number or m.root == f"/{device.name}"]

    # Host
    def check(self) -> str | None:
        return None

    def bind_folder(self, volume: str, folder: Path, target: Path) -> None:
        root = f"/virtlun/vhost/{folder.name}"
        self.mounted.append(Mount(str(target), (0, 9), root, True, "tmpfs"))

    def bind_device(self, volume: str, device: Path, target: Path) -> None:
        self.mounted.append(Mount(str(target), (0, 5), f"/{device.name}", False, "devtmpfs"))

    def bind_mount(
        self, volume: str, device: Path, staging: Path, target: Path, *, read_only: bool
    ) -> None:
        below = self.at(staging)
        assert below is not None and below.device == self.numbers(device)
        target.mkdir(exist_ok=True)
        self.mounted.append(Mount(str(target), below.device, "/", read_only, below.fs_type))

    def seal(self, volume: str, target: Path) -> None:
        self.mounted = [
            replace(each, read_only=True) if each.target == str(target) else each
            for each in self.mounted
        ]

    def unmount(self, volume: str, target: Path) -> None:
        self.mounted = [each for each in self.mounted if each.target != str(target)]

    def remove(self, volume: str, target: Path) -> None:
        self.unmount(volume, target)

    def holds(self, volume: str, device: Path) -> str:
        return self.contents.get(self._volume(device), "")

    def make(self, volume: str, device: Path, fs_type: str) -> None:
        self.made.append((self._volume(device), fs_type))
        if self.crash_in_make:
            self.contents[self._volume(device)] = "half of something"
            raise TargetUnavailable("the driver is killed here")
        self.contents[self._volume(device)] = fs_type

    def mount(
        self, volume: str, device: Path, target: Path, fs_type: str, options: list[str]
    ) -> None:
        assert self.holds(volume, device) == fs_type
        read_only = "ro" in options
        self.mounted.append(Mount(str(target), self.numbers(device), "/", read_only, fs_type))

    # sysblock
    PAGE_BYTES = 4096

    def size_of(self, device: Path) -> int:
        return self._target.volume(self._volume(device)).mib * MIB - self.behind

    def _volume(self, device: Path) -> str:
        return next(volume for (volume, _), path in self.devices.items() if path == device)
