"""A target that is only a dictionary, for tests of what drives one; optionally on a real socket."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from pydataplane.errors import RpcError
from pydataplane.methods import Rpc
from tests.support.rpc_schemas import check_params


class FakeTarget(Rpc):
    """A target's controllers and bdevs, with SPDK's answers and error codes."""

    def __init__(self, bdevs: dict[str, str]) -> None:
        self.bdevs = bdevs  # alias -> name
        self.lvstores = {"lvs0"}
        self.controllers: dict[str, dict[int, str]] = {}
        self.options: dict[tuple[str, int], dict[str, Any]] = {}
        self.connected: set[str] = set()
        """Controllers that a QEMU is connected to."""
        self.calls: list[str] = []
        self.owners: dict[str, tuple[int | None, bool]] = {}
        """By controller: the user named for its owner, and whether that has to be a new process."""
        self.block_sizes: dict[str, int] = {}
        """Of bdevs by name, where it is not 512."""
        self.tells_options = True
        """Whether LUNs show serial and the like, as our target's do and SPDK's do not."""

    def call_raw(self, method: str, **params: Any) -> Any:
        given = {key: value for key, value in params.items() if value is not None}
        self.calls.append(method)
        check_params(method, given)
        return getattr(self, method)(**given)

    def bdev_get_bdevs(self, name: str | None = None) -> list[dict[str, Any]]:
        """Lists bdevs, or the one with this name or alias."""
        found = [
            {"name": bdev, "aliases": [alias], "block_size": self.block_sizes.get(bdev, 512)}
            for alias, bdev in self.bdevs.items()
            if name in (None, bdev, alias)
        ]
        if not found:
            raise RpcError(-19, "No such device")
        return found

    def bdev_lvol_create(
        self, lvs_name: str, lvol_name: str, size_in_mib: int, thin_provision: bool
    ) -> str:
        """Makes a bdev."""
        if f"{lvs_name}/{lvol_name}" in self.bdevs:
            raise RpcError(-17, "File exists")
        self.bdevs[f"{lvs_name}/{lvol_name}"] = f"made-{size_in_mib}-{thin_provision}"
        return self.bdevs[f"{lvs_name}/{lvol_name}"]

    def bdev_lvol_get_lvstores(self) -> list[dict[str, Any]]:
        return [{"name": name} for name in sorted(self.lvstores)]

    def bdev_wait_for_examine(self) -> bool:
        return True

    def vhost_get_controllers(self) -> list[dict[str, Any]]:
        return [
            {
                "ctrlr": name,
                "sessions": [{"vid": 1}] if name in self.connected else [],
                "backend_specific": {
                    "scsi": [
                        {"scsi_dev_num": number, "luns": [self._lun(name, number, bdev)]}
                        for number, bdev in luns.items()
                    ]
                },
            }
            for name, luns in self.controllers.items()
        ]

    def _lun(self, controller: str, number: int, bdev: str) -> dict[str, Any]:
        lun: dict[str, Any] = {"id": 0, "bdev_name": bdev}
        if self.tells_options:
            options = self.options.get((controller, number), {})
            lun |= {
                "serial": options.get("serial", bdev),
                "read_only": options.get("read_only", False),
                "block_size": options.get("block_size", self.block_sizes.get(bdev, 512)),
            }
        return lun

    def vhost_create_scsi_controller(self, ctrlr: str) -> bool:
        if ctrlr in self.controllers:
            raise RpcError(-17, "File exists")
        self.controllers[ctrlr] = {}
        return True

    def virtlun_controller_set_owner(
        self, ctrlr: str, uid: int | None = None, fresh: bool = False
    ) -> bool:
        if ctrlr not in self.controllers:
            raise RpcError(-19, "No such device")
        self.owners[ctrlr] = (uid, fresh)
        return True

    def vhost_delete_controller(self, ctrlr: str) -> bool:
        if ctrlr not in self.controllers:
            raise RpcError(-19, "No such device")
        if self.controllers[ctrlr]:
            raise RpcError(-16, "Device or resource busy")
        del self.controllers[ctrlr]
        return True

    def vhost_scsi_controller_add_target(
        self, ctrlr: str, scsi_target_num: int, bdev_name: str, **options: Any
    ) -> int:
        name = self.bdevs.get(bdev_name, bdev_name)
        if name not in self.bdevs.values():
            raise RpcError(-19, f"bdev {bdev_name} does not exist")
        if scsi_target_num in self.controllers[ctrlr]:
            raise RpcError(-17, "File exists")
        if any(name in luns.values() for luns in self.controllers.values()):
            raise RpcError(-16, f"bdev {name} is in use")
        if options.get("block_size", 4096) < self.block_sizes.get(name, 512):
            raise RpcError(-22, f"bdev {name} has larger blocks")
        self.controllers[ctrlr][scsi_target_num] = name
        self.options[ctrlr, scsi_target_num] = options
        return scsi_target_num

    def vhost_scsi_controller_remove_target(self, ctrlr: str, scsi_target_num: int) -> bool:
        if scsi_target_num not in self.controllers.get(ctrlr, {}):
            raise RpcError(-19, "No such device")
        del self.controllers[ctrlr][scsi_target_num]
        self.options.pop((ctrlr, scsi_target_num), None)
        return True


class Server:
    """Serves a FakeTarget's methods as JSON-RPC on a UNIX socket, in pieces as a kernel might.

    `mute` accepts and reads, but never answers.
    """

    def __init__(self, target: FakeTarget, path: Path, *, mute: bool = False) -> None:
        """Listens on `path`."""
        self._target = target
        self._mute = mute
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Server:
        """Begins to serve."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stops serving."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            # A client that goes, with the end of an answer unread, is the last one's matter only.
            with connection, contextlib.suppress(ConnectionError):
                self._talk(connection)

    def _talk(self, connection: socket.socket) -> None:
        data = b""
        while chunk := connection.recv(65536):
            data += chunk
            try:
                request = json.loads(data)
            except ValueError:
                continue
            data = b""
            if self._mute:
                continue
            answer: dict[str, Any] = {"jsonrpc": "2.0", "id": request["id"]}
            try:
                answer["result"] = self._target.call_raw(
                    request["method"], **request.get("params", {})
                )
            except RpcError as error:
                answer["error"] = {"code": error.code, "message": error.message}
            text = json.dumps(answer, ensure_ascii=False).encode() + b"\n"
            for start in range(0, len(text), 7):
                connection.sendall(text[start : start + 7])


class HostTarget(FakeTarget):
    """A FakeTarget that makes the controllers' sockets as files in a folder."""

    def __init__(self, bdevs: dict[str, str], folder: Path) -> None:
        """Begins without controllers."""
        super().__init__(bdevs)
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def vhost_create_scsi_controller(self, ctrlr: str) -> bool:
        """Makes an empty controller and its socket."""
        super().vhost_create_scsi_controller(ctrlr)
        os.mknod(self._folder / ctrlr)
        return True

    def vhost_delete_controller(self, ctrlr: str) -> bool:
        """Deletes an empty controller and its socket."""
        super().vhost_delete_controller(ctrlr)
        (self._folder / ctrlr).unlink()
        return True
