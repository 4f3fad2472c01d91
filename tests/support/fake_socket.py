"""The fake target on a real UNIX socket, as JSON-RPC, batches too."""

from __future__ import annotations

import json
import os
import socket
import socketserver
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydataplane.errors import BAD_PARAMETERS, RpcError
from tests.support.fake_target import FakeTarget


class SocketTarget(FakeTarget):
    """A FakeTarget that a client reaches by `path`."""

    def __init__(
        self,
        path: Path,
        volumes: Mapping[str, str] | None = None,
        *,
        piece_bytes: int | None = None,
        vhost_dir: Path | None = None,
    ) -> None:
        """Does not listen before `start`.

        It answers in pieces of `piece_bytes`, as a kernel might, and makes the controllers' sockets
        as files in `vhost_dir`, if there is one.
        """
        super().__init__(volumes)
        self.path = path
        self.exchanges = 0
        """Requests, a batch counted as one."""
        self.open = 0
        """Connections whose other end has not closed them."""
        self.connections: list[socket.socket] = []
        """All that were made, open or not."""
        self._piece_bytes = piece_bytes
        self._vhost_dir = vhost_dir
        if vhost_dir:
            vhost_dir.mkdir(exist_ok=True)
        self._server: socketserver.ThreadingUnixStreamServer | None = None

    def start(self, *, mute: bool = False) -> None:
        """Listens; `mute` accepts and reads, but never answers."""
        fake = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                fake.connections.append(self.request)
                fake.open += 1
                # A client that goes with the end of an answer unread is its test's matter.
                with suppress(ConnectionError):
                    fake._talk(self.request, mute=mute)
                fake.open -= 1

        self.path.unlink(missing_ok=True)
        self._server = socketserver.ThreadingUnixStreamServer(str(self.path), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def _talk(self, connection: socket.socket, *, mute: bool) -> None:
        text = b""
        while chunk := connection.recv(65536):
            text += chunk
            try:
                request = json.loads(text)
            except ValueError:
                continue
            text = b""
            if mute:
                continue
            self.exchanges += 1
            batch = isinstance(request, list)
            answer = [self.answer(r) for r in request] if batch else self.answer(request)
            said = json.dumps(answer, ensure_ascii=False).encode() + b"\n"
            size = self._piece_bytes or len(said)
            for start in range(0, len(said), size):
                connection.sendall(said[start : start + size])

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

    @contextmanager
    def serve(self, *, mute: bool = False) -> Iterator[None]:
        """Listens while the body runs."""
        self.start(mute=mute)
        try:
            yield
        finally:
            self.stop()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answers one request."""
        head = {"jsonrpc": "2.0", "id": request["id"]}
        try:
            result = self.call_raw(request["method"], **request.get("params", {}))
        except RpcError as error:
            return {**head, "error": {"code": error.code, "message": error.message}}
        except AssertionError as error:
            return {**head, "error": {"code": BAD_PARAMETERS, "message": str(error)}}
        return {**head, "result": result}

    def vhost_create_scsi_controller(
        self, ctrlr: str, delay: bool = False, own_folder: bool = False
    ) -> bool:
        made = super().vhost_create_scsi_controller(ctrlr, delay, own_folder)
        if self._vhost_dir:
            os.mknod(self._vhost_dir / ctrlr)
        return made

    def vhost_delete_controller(self, ctrlr: str, force: bool | None = None) -> bool:
        gone = super().vhost_delete_controller(ctrlr, force)
        if self._vhost_dir:
            (self._vhost_dir / ctrlr).unlink()
        return gone
