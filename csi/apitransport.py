"""How requests to the Kubernetes API are sent; `cluster` says what they are.

Each is a transport of httpx2 around another one, seen by nobody above the client library.
"""

from __future__ import annotations

import json
import time

import httpx2

SHORT_S = 1.0
"""Minimum seconds between two watches of one kind."""
CLAIMS = "/api/v1/persistentvolumeclaims"
"""The path of the claims of all namespaces."""
PARTIAL = "application/json;as={};g=meta.k8s.io;v=v1"
EMPTY_BYTES = 1024
"""An answer of fewer bytes may be a list of none."""


class MetadataOnly(httpx2.BaseTransport):
    """Asks for nothing but the metadata of claims, where those of all namespaces are asked for.

    Each node of a cluster watches them for their versions and finalizers; the few that it has to do
    with are read one by one.
    """

    def __init__(self, transport: httpx2.BaseTransport) -> None:
        """Sends with `transport`."""
        self._transport = transport

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Sends a request."""
        if request.method == "GET" and request.url.path.endswith(CLAIMS):
            kind = "PartialObjectMetadata"
            watches = "watch" in request.url.params
            request.headers["Accept"] = PARTIAL.format(kind if watches else f"{kind}List")
            answer = self._transport.handle_request(request)
            return answer if watches else _listed(answer)
        return self._transport.handle_request(request)

    def close(self) -> None:
        """Closes the connections."""
        self._transport.close()


def _listed(answer: httpx2.Response) -> httpx2.Response:
    """Returns a list's answer with an array in it, also of none.

    Of metadata alone the API server then writes null, which the client library does not take.
    """
    length = int(answer.headers.get("Content-Length", EMPTY_BYTES))
    if answer.status_code != 200 or length >= EMPTY_BYTES:
        return answer
    content = answer.read()
    answer.close()
    given = json.loads(content)
    if given.get("items") is not None:
        return httpx2.Response(200, content=content)
    return httpx2.Response(200, json={**given, "items": []})


class PacedWatches(httpx2.BaseTransport):
    """Lets a watch begin no sooner than SHORT_S after the last one of its kind, and end.

    The library takes a watch up again as soon as the server has ended it, so a server or proxy that
    ends each at once would be asked without a pause. One that says nothing for longer than a watch
    takes, and keeps the connection, would not be noticed: the library waits without end.
    """

    def __init__(
        self, transport: httpx2.BaseTransport, silence_s: float, heard: dict[str, float]
    ) -> None:
        """Sends with `transport`, and waits for each part of a watch for `silence_s` seconds.

        In `heard` is noted when a watch began, in seconds of the monotonic clock, by plural.
        """
        self._transport = transport
        self._silence_s = silence_s
        self._heard = heard
        self._begun: dict[str, float] = {}  # by path, monotonic; of the size of the kinds

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Sends a request, if need be after a wait."""
        if "watch" not in request.url.params:
            return self._transport.handle_request(request)
        path = request.url.path
        last = self._begun.get(path)
        if last is not None:
            time.sleep(max(0.0, last + SHORT_S - time.monotonic()))
        self._begun[path] = time.monotonic()
        waits = request.extensions.get("timeout") or {}
        request.extensions = {
            **request.extensions,
            "timeout": {**waits, "read": self._silence_s},
        }
        answer = self._transport.handle_request(request)
        if answer.status_code == 200:
            self._heard[path.rsplit("/", 1)[1]] = time.monotonic()
        return answer

    def close(self) -> None:
        """Closes the connections."""
        self._transport.close()
