"""An API of OpenStack's as a server; run by a Python that has it.

    python wsgi_service.py MODULE PORT

`MODULE.application` is the API, as a web server has it from the release. Who calls, Keystone's
middleware would say there: here it is USER of the token USER:PROJECT, with all roles.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIServer, make_server

ROLES = "admin,manager,member,reader,service"


class Server(ThreadingMixIn, WSGIServer):
    """One that answers several at a time."""

    daemon_threads = True


def main() -> None:
    """Runs until it is killed."""
    name, port = sys.argv[1:]
    sys.argv[1:] = []  # which the API takes for its own
    api: Callable[..., Iterable[bytes]] = importlib.import_module(name).application

    def told(environment: dict[str, Any], start: Any) -> Iterable[bytes]:
        user, _, project = environment.get("HTTP_X_AUTH_TOKEN", "").partition(":")
        if user and project:
            environment |= {"HTTP_X_USER_ID": user, "HTTP_X_PROJECT_ID": project}
            environment |= {"HTTP_X_ROLES": ROLES}
        return api(environment, start)

    make_server("127.0.0.1", int(port), told, server_class=Server).serve_forever()


if __name__ == "__main__":
    main()
