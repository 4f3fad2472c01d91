"""What stands for Neutron and Glance where servers have no network: their REST APIs, in one server.

Nova asks for the ports of a server also where it is to have none: of whatever there is in Neutron,
it is told that there is none. Of images it is told what is in a folder, as cinder_service.py has
it: of an image ID.json is what is known, and ID its data.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

IMAGES = "/v2/images/"


class StandIns:
    """They, at a URL."""

    def __init__(self, images: Path) -> None:
        """Starts them; `images` is the folder."""

        class Handler(_Handler):
            folder = images

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        """Ends them."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    folder: Path

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        image, _, file = path.removeprefix(IMAGES).partition("/")
        if not path.startswith(IMAGES):
            kind = path.rpartition("/")[2].replace("-", "_")
            self._say(200, json.dumps({kind: []}).encode())
        elif not (self.folder / image).is_file():
            self._say(404, b"{}")
        elif file:
            self._say(200, (self.folder / image).read_bytes(), "application/octet-stream")
        else:
            known = json.loads((self.folder / f"{image}.json").read_text())
            self._say(200, json.dumps(known | known.pop("properties")).encode())

    def _say(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing of a call."""
