"""What the driver does to its host with rights that it need not have itself.

`Host` is all of it: loop devices over the target's files, file systems on them, mounts. `LocalHost`
does it in this process. `Helper` is the same asked of another process, which has the rights: the
program `virtlun-csi-helper`, a container of its own, so that the driver, which serves gRPC and HTTP
and talks to the API server, can do without any.

    driver -> helper --- SOCK_SEQPACKET ---> server -> confined -> local -> kernel, mkfs, ...

There is no operation that runs a command or takes any path. Whoever asks names a volume; a device
must be that volume's loop device, a path one that kubelet made for that volume, without links, and
what is unmounted or made read-only a mount of ours.

| module | noun |
| --- | --- |
| `rootedpaths` | paths below a root, opened part by part |
| `local` | the operations |
| `records` | which volume kubelet made a path for |
| `confined` | which of them may be asked for |
| `syscalls` | which system calls nobody in the helper needs |
| `rights` | what the helper may do to the host, for who asks |
| `wire` | a question and its answer as packets |
| `server`, `cli` | the helper |
| `remote` | the driver's end |

The helper's side imports nothing but Python's own library and the driver's parts for the host.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from csi.hostdevice.loopctl import Loop


class Host(Protocol):
    """Each method may be repeated after a crash at any point, and raises HostError.

    `volume` is a volume's handle. A `device` is a loop device of that volume, or one of ublk.
    """

    def check(self) -> str | None:
        """Returns why nothing can be done at the moment, or None."""

    def loops(self, volume: str) -> list[Loop]:
        """Returns the volume's loop devices. To tell what one is, the kernel asks its file."""

    def disks(self) -> dict[str, Path]:
        """Returns the devices of ublk by volume, as the virtlun-holder has noted them."""

    def attach(self, volume: str, file: Path, *, read_only: bool, block_size: int) -> Path:
        """Puts a new loop device over the target's file of the volume; `block_size` in bytes.

        In place of the file may be the volume's device of ublk, if it is to be read-only.
        """

    def answers(self, volume: str, device: Path) -> bool:
        """Whether a device's first bytes can be read from its file."""

    def resize(self, volume: str, device: Path) -> None:
        """Lets a loop device take its file's size."""

    def flush(self, volume: str, device: Path) -> None:
        """Writes out and drops a device's page cache."""

    def release(self, volume: str, device: Path) -> None:
        """Takes a device off its file, now or when the last one that has it open closes it."""

    def detach(self, volume: str, device: Path) -> None:
        """Takes a device off its file and waits until it is off."""

    def holds(self, volume: str, device: Path) -> str:
        """Returns the type of what is on a device; '' for nothing."""

    def make(self, volume: str, device: Path, fs_type: str) -> None:
        """Formats a device that is not mounted, whatever it holds."""

    def mount(
        self, volume: str, device: Path, target: Path, fs_type: str, options: list[str]
    ) -> None:
        """Mounts a device's file system, and grows it to the device."""

    def grow(self, volume: str, device: Path, target: Path, fs_type: str) -> None:
        """Grows the file system of a device, mounted at `target`; OfflineOnly where it cannot."""

    def bind_device(self, volume: str, device: Path, target: Path) -> None:
        """Makes a device appear at a path."""

    def bind_mount(
        self, volume: str, device: Path, staging: Path, target: Path, *, read_only: bool
    ) -> None:
        """Makes the device's file system, mounted at `staging`, appear at another path."""

    def bind_folder(self, volume: str, folder: Path, target: Path) -> None:
        """Makes the folder of a controller appear at a path, read-only."""

    def seal(self, volume: str, target: Path) -> None:
        """Makes what is mounted at a path read-only there, if it is not."""

    def unmount(self, volume: str, target: Path) -> None:
        """Unmounts every mount at a path; one in use is an error."""

    def remove(self, volume: str, target: Path) -> None:
        """Unmounts a path and removes its mount point."""
