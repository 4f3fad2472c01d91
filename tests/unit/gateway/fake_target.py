"""A FAKE of the target's JSON-RPC server, for unit tests only: a dictionary that answers."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support.rpc_schemas import check_params

MIB = 1 << 20
STORE_UUID = "5a1f0000-0000-4000-8000-000000000000"


class RefusedError(Exception):
    """The fake answers with a JSON-RPC error."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class FakeTarget:
    """Volumes by LVSTORE/LVOL and controllers by name; `calls` notes what was asked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.volumes: dict[str, dict[str, Any]] = {}
        self.controllers: dict[str, dict[int, dict[str, Any]]] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.refuse: dict[str, RefusedError] = {}
        self.gate: dict[str, threading.Event] = {}
        self.exchanges = 0
        """Requests, a batch counted as one."""
        self.open = 0
        """Connections whose other end has not closed them."""
        self.connections: list[socket.socket] = []
        """All that were made, open or not."""
        self.free_mib = 1024
        self.waiting: set[str] = set()
        self.connected: set[str] = set()
        """Controllers that a QEMU is connected to."""
        self.suspended: list[dict[str, Any]] = []
        """What virtlun_vhost_get_suspended tells."""
        self._server: socketserver.ThreadingUnixStreamServer | None = None

    def add_volume(self, alias: str, mib: int = 64) -> str:
        """Makes a volume; returns its UUID."""
        uuid = f"00000000-0000-4000-8000-{len(self.volumes):012d}"
        self.volumes[alias] = {"uuid": uuid, "mib": mib}
        return uuid

    def start(self) -> None:
        """Listens."""
        fake = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                fake.connections.append(self.request)
                text = b""
                fake.open += 1
                while chunk := self.request.recv(65536):
                    text += chunk
                    try:
                        request = json.loads(text)
                    except ValueError:
                        continue
                    text = b""
                    fake.exchanges += 1
                    batch = isinstance(request, list)
                    answer = [fake.answer(r) for r in request] if batch else fake.answer(request)
                    self.request.sendall(json.dumps(answer).encode())
                fake.open -= 1

        self.path.unlink(missing_ok=True)
        self._server = socketserver.ThreadingUnixStreamServer(str(self.path), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Stops listening; the state stays."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            for connection in self.connections:
                with suppress(OSError):  # it is closed
                    connection.shutdown(socket.SHUT_RDWR)
            self.path.unlink(missing_ok=True)
            self._server = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answers one request."""
        method, params = request["method"], request.get("params", {})
        self.calls.append((method, params))
        head = {"jsonrpc": "2.0", "id": request["id"]}
        try:
            if method in self.gate:
                self.gate[method].wait(10)
            if method in self.refuse:
                raise self.refuse[method]
            check_params(method, params)
            return {**head, "result": getattr(self, method)(**params)}
        except RefusedError as error:
            return {**head, "error": {"code": error.code, "message": str(error)}}
        except AssertionError as error:
            return {**head, "error": {"code": -32602, "message": str(error)}}

    def luns(self, controller: str) -> dict[int, str]:
        """Returns bdev by target number."""
        return {n: item["bdev"] for n, item in self.controllers[controller].items()}

    # The methods

    def _bdev(self, alias: str) -> dict[str, Any]:
        volume = self.volumes[alias]
        return {
            "name": volume["uuid"],
            "uuid": volume["uuid"],
            "aliases": [alias],
            "block_size": 512,
            "num_blocks": volume["mib"] * MIB // 512,
            "driver_specific": {
                "lvol": {
                    "lvol_store_uuid": STORE_UUID,
                    "thin_provision": True,
                    "num_allocated_clusters": 3,
                }
            },
        }

    def bdev_get_bdevs(self, name: str | None = None) -> list[dict[str, Any]]:
        found = [self._bdev(a) for a, v in self.volumes.items() if name in (None, a, v["uuid"])]
        if name is not None and not found:
            raise RefusedError(-19, "No such device")
        return found

    def virtlun_lvol_get_sizes(self, names: list[str]) -> dict[str, dict[str, int]]:
        found = {a: v["mib"] * MIB for a, v in self.volumes.items()}
        found |= {v["uuid"]: v["mib"] * MIB for v in self.volumes.values()}
        return {n: {"size": found[n], "allocated": 3 * MIB} for n in names if n in found}

    def bdev_lvol_get_lvstores(self) -> list[dict[str, Any]]:
        return [
            {
                "name": "lvs0",
                "uuid": STORE_UUID,
                "base_bdev": "base",
                "cluster_size": MIB,
                "total_data_clusters": 2048,
                "free_clusters": self.free_mib,
            }
        ]

    def bdev_wait_for_examine(self) -> bool:
        return True

    def bdev_lvol_create(
        self, lvs_name: str, lvol_name: str, size_in_mib: int, thin_provision: bool
    ) -> str:
        if not thin_provision or f"{lvs_name}/{lvol_name}" in self.volumes:
            raise RefusedError(-17, "File exists")
        return self.add_volume(f"{lvs_name}/{lvol_name}", size_in_mib)

    def bdev_lvol_resize(self, name: str, size_in_mib: int) -> bool:
        volume = next(v for v in self.volumes.values() if v["uuid"] == name)
        if size_in_mib - volume["mib"] > self.free_mib:
            raise RefusedError(-28, "No space left on device")
        volume["mib"] = size_in_mib
        return True

    def bdev_get_iostat(self, names: list[str] | None = None) -> dict[str, Any]:
        counters = {
            "num_read_ops": 10,
            "bytes_read": 40960,
            "read_latency_ticks": 1000,
            "num_write_ops": 20,
            "bytes_written": 81920,
            "write_latency_ticks": 2000,
        }
        every = [item["name"] for item in self.bdev_get_bdevs()]
        found = every if names is None else [self.bdev_get_bdevs(n)[0]["name"] for n in names]
        bdevs = [{"name": name, **counters} for name in found]
        return {"tick_rate": 1_000_000, "bdevs": bdevs}

    def vhost_get_controllers(self) -> list[dict[str, Any]]:
        return [
            {
                "ctrlr": name,
                "sessions": [{"vid": 1}] if name in self.connected else [],
                "backend_specific": {
                    "scsi": [
                        {"scsi_dev_num": n, "luns": [{"id": 0, "bdev_name": item["bdev"]}]}
                        for n, item in targets.items()
                    ]
                },
            }
            for name, targets in self.controllers.items()
        ]

    def vhost_create_scsi_controller(self, ctrlr: str, delay: bool = False) -> bool:
        if ctrlr in self.controllers:
            raise RefusedError(-32602, "File exists")
        self.controllers[ctrlr] = {}
        if delay:
            self.waiting.add(ctrlr)
        return True

    def virtlun_vhost_get_suspended(self) -> list[dict[str, Any]]:
        return self.suspended

    def vhost_start_scsi_controller(self, ctrlr: str) -> bool:
        self.waiting.remove(ctrlr)
        return True

    def vhost_delete_controller(self, ctrlr: str) -> bool:
        if self.controllers[ctrlr]:
            raise RefusedError(-16, "Device or resource busy")
        del self.controllers[ctrlr]
        return True

    def vhost_scsi_controller_add_target(
        self, ctrlr: str, scsi_target_num: int, bdev_name: str, **options: Any
    ) -> int:
        if scsi_target_num in self.controllers[ctrlr]:
            raise RefusedError(-17, "File exists")
        self.controllers[ctrlr][scsi_target_num] = {"bdev": bdev_name, **options}
        return scsi_target_num

    def vhost_scsi_controller_remove_target(self, ctrlr: str, scsi_target_num: int) -> bool:
        if scsi_target_num not in self.controllers[ctrlr]:
            raise RefusedError(-19, "No such device")
        del self.controllers[ctrlr][scsi_target_num]
        return True
