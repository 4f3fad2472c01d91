"""The driver's end of the helper: see `Host`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from csi.host import wire
from csi.hostdevice.loopctl import Loop
from csi.hosterrors import HelperUnavailable, HostError


class Helper:
    """csi.host.Host by another process. Threads may share it; each call has a connection."""

    def __init__(self, path: Path) -> None:
        """Asks the helper at this socket."""
        self._path = path

    def call(self, do: str, volume: str, **arguments: object) -> Any:
        """Asks one question and waits for the answer as long as that takes.

        Raises:
            HelperUnavailable: there is no helper, or it ended before it answered.
            HostError: it refuses, or the host does.
        """
        given = {k: str(v) if isinstance(v, Path) else v for k, v in arguments.items()}
        try:
            with wire.new_socket() as connection:
                connection.connect(str(self._path))
                wire.send(connection, {"do": do, "volume": volume, "with": given})
                answer = wire.receive(connection)
        except (OSError, ValueError) as error:
            raise HelperUnavailable(f"{self._away()}: {error}") from error
        if answer is None:
            raise HelperUnavailable(f"{self._away()}: it ended in the middle of {do}")
        if "failed" in answer:
            raise wire.KINDS.get(str(answer.get("kind")), HostError)(str(answer["failed"]))
        return answer.get("done")

    def check(self) -> str | None:
        """Returns why the helper cannot be reached, or None."""
        try:
            with wire.new_socket() as connection:
                connection.connect(str(self._path))
        except OSError as error:
            return f"{self._away()}: {error.strerror}"
        return None

    def _away(self) -> str:
        return f"virtlun-csi-helper does not answer at {self._path}"

    def loops(self, volume: str) -> list[Loop]:
        """See Host."""
        return [
            Loop(**{**each, "device": Path(each["device"]), "backing": tuple(each["backing"])})
            for each in self.call("loops", volume)
        ]

    def disks(self) -> dict[str, Path]:
        """See Host."""
        return {volume: Path(device) for volume, device in self.call("disks", "").items()}

    def attach(self, volume: str, file: Path, *, read_only: bool, block_size: int) -> Path:
        """See Host."""
        words = {"file": file, "read_only": read_only, "block_size": block_size}
        return Path(self.call("attach", volume, **words))

    def answers(self, volume: str, device: Path) -> bool:
        """See Host."""
        return bool(self.call("answers", volume, device=device))

    def resize(self, volume: str, device: Path) -> None:
        """See Host."""
        self.call("resize", volume, device=device)

    def flush(self, volume: str, device: Path) -> None:
        """See Host."""
        self.call("flush", volume, device=device)

    def release(self, volume: str, device: Path) -> None:
        """See Host."""
        self.call("release", volume, device=device)

    def detach(self, volume: str, device: Path) -> None:
        """See Host."""
        self.call("detach", volume, device=device)

    def holds(self, volume: str, device: Path) -> str:
        """See Host."""
        return str(self.call("holds", volume, device=device))

    def make(self, volume: str, device: Path, fs_type: str) -> None:
        """See Host."""
        self.call("make", volume, device=device, fs_type=fs_type)

    def mount(
        self, volume: str, device: Path, target: Path, fs_type: str, options: list[str]
    ) -> None:
        """See Host."""
        words = {"device": device, "target": target, "fs_type": fs_type, "options": options}
        self.call("mount", volume, **words)

    def grow(self, volume: str, device: Path, target: Path, fs_type: str) -> None:
        """See Host."""
        self.call("grow", volume, device=device, target=target, fs_type=fs_type)

    def bind_device(self, volume: str, device: Path, target: Path) -> None:
        """See Host."""
        self.call("bind_device", volume, device=device, target=target)

    def bind_mount(
        self, volume: str, device: Path, staging: Path, target: Path, *, read_only: bool
    ) -> None:
        """See Host."""
        words = {"device": device, "staging": staging, "target": target, "read_only": read_only}
        self.call("bind_mount", volume, **words)

    def bind_folder(self, volume: str, folder: Path, target: Path) -> None:
        """See Host."""
        self.call("bind_folder", volume, folder=folder, target=target)

    def seal(self, volume: str, target: Path) -> None:
        """See Host."""
        self.call("seal", volume, target=target)

    def unmount(self, volume: str, target: Path) -> None:
        """See Host."""
        self.call("unmount", volume, target=target)

    def remove(self, volume: str, target: Path) -> None:
        """See Host."""
        self.call("remove", volume, target=target)
