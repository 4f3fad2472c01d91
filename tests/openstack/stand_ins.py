"""What stands for Neutron where servers have no network: its REST API.

Nova asks for the ports of a server also where it is to have none: of whatever there is in Neutron,
it is told that there is none.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


class StandIns:
    """It, at a URL."""

    def __init__(self) -> None:
        """Starts it."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        """Ends it."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        kind = urlsplit(self.path).path.rpartition("/")[2].replace("-", "_")
        body = json.dumps({kind: []}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing of a call."""
