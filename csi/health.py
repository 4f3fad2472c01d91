"""HTTP for the kubelet and Prometheus: /healthz, /readyz and /metrics."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

Check = Callable[[], str | None]


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Binds without asking DNS for the host's name, as HTTPServer does: it may not answer."""
        TCPServer.server_bind(self)


class _HttpServer6(_HttpServer):
    address_family = socket.AF_INET6


class Server:
    """Answers /healthz, /readyz and /metrics.

    Unhealthy is what a restart of the driver mends: kubelet refused it, or its socket is gone. A
    target that does not answer makes it unready only.
    """

    def __init__(
        self, address: tuple[str, int], registry: CollectorRegistry, healthy: Check, ready: Check
    ) -> None:
        """Listens; the checks return what is wrong, or None.

        Raises:
            OSError: the address is taken.
        """

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self._answer(200, generate_latest(registry), CONTENT_TYPE_LATEST)
                elif self.path in ("/healthz", "/readyz"):
                    wrong = healthy() if self.path == "/healthz" else healthy() or ready()
                    self._answer(503 if wrong else 200, f"{wrong or 'ok'}\n".encode())
                else:
                    self._answer(404, b"there are /healthz, /readyz and /metrics\n")

            def _answer(self, status: int, body: bytes, kind: str = "text/plain") -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - base's name
                """Scrapes are not worth a line."""

        ipv6 = ":" in address[0]
        self._server = (_HttpServer6 if ipv6 else _HttpServer)(address, Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
