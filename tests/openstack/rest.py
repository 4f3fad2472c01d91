"""A REST API of OpenStack's, as its clients call it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any


class Refused(Exception):
    """What the API answered to a call that it does not do."""


class Rest:
    """An API at a URL."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        """Each call has `headers`."""
        self._url, self._headers = url, {"Content-Type": "application/json"} | dict(headers)

    def get(self, path: str) -> dict[str, Any]:
        """Returns what there is at a path."""
        return self.call("GET", path)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Has something made or done."""
        return self.call("POST", path, body)

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Makes a call; raises Refused where it is refused."""
        request = urllib.request.Request(
            f"{self._url}/{path}",
            method=method,
            data=json.dumps(body).encode() if body is not None else None,
            headers=self._headers,
        )
        try:
            with urllib.request.urlopen(request, timeout=180) as answer:
                said = answer.read()
        except urllib.error.HTTPError as error:
            raise Refused(f"{error.code} {error.read().decode()}") from error
        return json.loads(said) if said else {}
