"""The API server as tests ask it: without a process for each question.

kubectl takes a tenth of a second of a processor a call, which was half of what these tests took. So
one `kubectl proxy`, which has the administrator's credentials, listens on a UNIX socket that can be
reached from outside of the box.

A call here is the request that kubectl would make, by the words that it takes: kinds by any of
their names, and of options only those below. `Api.understands` says whether words are such.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import yaml  # type: ignore[import-untyped]

from tests.kubernetes.sandbox import SandboxError
from tests.support import examples
from tests.support.wait import until

Object = dict[str, Any]
DISCOVERY = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
JSON = "application/json"
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
NOT_FOUND = 404
ANSWER_DEADLINE_S = 60.0
#: Of what is applied, as kubectl calls itself.
MANAGER = "kubectl"
PATH = re.compile(r"jsonpath=\{((?:\.\w+)+)\}=(.+)")
CONDITION = re.compile(r"condition=(\w+)")


class ApiError(SandboxError):
    """The API server refused a request; the text is its sentence."""

    def __init__(self, status: int, text: str) -> None:
        """`status` is HTTP's."""
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Kind:
    """A kind of objects: where the API server has it."""

    base: str
    """The path of its group and version."""
    plural: str
    namespaced: bool


@dataclass
class Words:
    """What words of `kubectl get` and `kubectl delete` name."""

    kinds: list[str]
    names: list[str] = field(default_factory=list)
    namespace: str | None = "default"
    """None: all."""
    query: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, words: tuple[str, ...]) -> Words | None:
        """Returns what they name, or None where they are others than are understood here."""
        first, *rest = words
        if first.startswith("-"):
            return None
        kind, _, name = first.partition("/")
        read = cls(kind.split(","), [name] if name else [])
        left = iter(rest)
        for word in left:
            option, _, value = word.partition("=")
            if option in {"-A", "--all-namespaces"}:
                read.namespace = None
            elif option in {"-n", "--namespace"}:
                read.namespace = value or next(left)
            elif option in {"-l", "--selector"}:
                read.query["labelSelector"] = value or next(left)
            elif option == "--field-selector":
                read.query["fieldSelector"] = value or next(left)
            elif word.startswith("-"):
                return None
            else:
                read.names.append(word)
        return read


class _Connection(http.client.HTTPConnection):
    """A connection to the proxy's socket."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """As http.client asks for it."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class Api:
    """The API server, behind the socket of a `kubectl proxy`."""

    def __init__(self, path: Path) -> None:
        """`path` is the socket's; it need not be there yet."""
        self._path = path
        self._kinds: dict[str, Kind] = {}

    # Requests

    def request(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None = None,
        body: str | None = None,
        kind: str = JSON,
        accept: str = JSON,
    ) -> Any:
        """Returns the answer to one request, parsed where it is JSON.

        Raises:
            ApiError: the API server refused it.
            OSError: nobody answers.
        """
        connection = _Connection(self._path, ANSWER_DEADLINE_S)
        try:
            headers = {"Accept": accept} | ({"Content-Type": kind} if body is not None else {})
            connection.request(method, _url(path, query), body, headers)
            answer = connection.getresponse()
            text = answer.read().decode()
        except http.client.HTTPException as error:
            raise OSError(f"no answer of the API server: {error}") from error
        finally:
            connection.close()
        if answer.status >= http.HTTPStatus.BAD_REQUEST:
            raise ApiError(answer.status, _sentence(text))
        return json.loads(text) if "json" in (answer.headers["Content-Type"] or "") else text

    def kind(self, name: str) -> Kind:
        """Returns a kind by one of the names that kubectl takes, or by APIVERSION KIND.

        Raises:
            SandboxError: there is none of this name.
        """
        if found := self._found(name):
            return found
        raise SandboxError(f"the API server has no kind {name}")

    def _found(self, name: str) -> Kind | None:
        if name.lower() not in self._kinds:  # the first time, or it is new
            self._kinds = dict(self._discover())
        return self._kinds.get(name.lower())

    def _discover(self) -> Iterator[tuple[str, Kind]]:
        """Yields kinds by their names, those last that have precedence: the core group's."""
        groups: list[Object] = []
        for place in ("apis", "api"):
            said = self.request("GET", f"/{place}", accept=DISCOVERY)
            groups = [*groups, *reversed(said["items"])]
        for group in groups:
            name = group["metadata"].get("name", "")
            for version in reversed(group["versions"]):
                base = (
                    f"/apis/{name}/{version['version']}" if name else f"/api/{version['version']}"
                )
                for each in version.get("resources", ()):
                    found = Kind(base, each["resource"], each["scope"] == "Namespaced")
                    shown = each["responseKind"]["kind"]
                    api_version = base.removeprefix("/apis/").removeprefix("/api/")
                    names = (each["resource"], each["singularResource"], shown)
                    full = (f"{each['resource']}.{name}", f"{api_version} {shown}")
                    for one in (*names, *full, *each.get("shortNames", ())):
                        yield one.lower(), found

    def _place(self, kind: Kind, namespace: str | None, name: str = "") -> str:
        scope = f"/namespaces/{namespace}" if kind.namespaced and namespace else ""
        return f"{kind.base}{scope}/{kind.plural}{f'/{name}' if name else ''}"

    # What kubectl does

    def get(self, words: Words) -> Object:
        """Returns the object that is named, or all of the kinds as `items`."""
        if words.names:
            [name], [kind] = words.names, words.kinds
            place = self._place(self.kind(kind), words.namespace, name)
            return _shown(self.request("GET", place, words.query))
        items: list[Object] = []
        for kind in words.kinds:
            place = self._place(self.kind(kind), words.namespace)
            found = self.request("GET", place, words.query)
            shown = {
                "kind": found["kind"].removesuffix("List"),
                "apiVersion": found["apiVersion"],
            }
            items += [shown | _shown(each) for each in found["items"]]
        return {"items": items}

    def apply(self, manifest: str, query: dict[str, str] | None = None) -> None:
        """Applies the objects of a manifest as `kubectl apply --server-side` does, strictly."""
        for given in _documents(manifest):
            self.request(
                "PATCH",
                self._of(given),
                {"fieldManager": MANAGER, "fieldValidation": "Strict", **(query or {})},
                json.dumps(given),
                APPLY,
            )
            if not (query or {}).get("dryRun"):
                examples.applied(given)

    def _of(self, given: Object) -> str:
        name = f"{given['apiVersion']} {given['kind']}"
        # A new one is in the list some seconds after it is established: that is made anew then.
        kind = until(lambda: self._found(name), f"the API server's kind {name}")
        meta = given["metadata"]
        return self._place(kind, meta.get("namespace", "default"), meta["name"])

    def patch(self, kind: str, name: str, change: Object, namespace: str = "default") -> None:
        """Merges something into an object; None takes a key away."""
        place = self._place(self.kind(kind), namespace, name)
        self.request("PATCH", place, body=json.dumps(change), kind=MERGE)

    def delete_objects(self, manifest: str) -> None:
        """Deletes the objects of a manifest, of which some may be gone; they are going then."""
        for given in _documents(manifest):
            self._delete(self._of(given))

    def delete(self, words: Words, *, deadline_s: float | None) -> None:
        """Deletes objects by name, and waits until they are gone unless there is no deadline."""
        [kind] = words.kinds
        for name in words.names:
            self._delete(self._place(self.kind(kind), words.namespace, name))
        if deadline_s is not None:
            for name in words.names:
                if not self.wait(f"{kind}/{name}", "delete", deadline_s, words.namespace):
                    raise SandboxError(f"{kind} {name} is still there after {deadline_s:.0f} s")

    def delete_all(self, kind: str, query: dict[str, str] | None = None) -> None:
        """Deletes all objects of a kind in the namespace `default`; they are going then."""
        self.request("DELETE", self._place(self.kind(kind), "default"), query)

    def _delete(self, place: str) -> None:
        try:
            self.request("DELETE", place, body='{"propagationPolicy": "Background"}')
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise

    def wait(
        self, what: str, state: str, deadline_s: float, namespace: str | None = "default"
    ) -> bool:
        """Waits until an object, KIND/NAME, is in a state; False if it is not by then.

        The states are those that `understands` knows.

        Raises:
            ApiError: there is no such object, unless the state is `delete`.
        """
        kind, _, name = what.partition("/")
        end = time.monotonic() + deadline_s
        for seen in self._seen(self.kind(kind), name, namespace, end):
            if state == "delete":
                if seen is None:
                    return True
            elif seen is None:
                raise ApiError(NOT_FOUND, f"{kind} {name} not found")
            elif _is(seen, state):
                return True
        return False

    @staticmethod
    def understands(state: str) -> bool:
        """Whether `wait` knows how to look for a state."""
        return state == "delete" or bool(PATH.fullmatch(state) or CONDITION.fullmatch(state))

    def _seen(
        self, kind: Kind, name: str, namespace: str | None, end: float
    ) -> Iterator[Object | None]:
        """Yields an object as it is and each time that it changes; None where it is gone."""
        while True:
            try:
                now = self.request("GET", self._place(kind, namespace, name))
            except ApiError as error:
                if error.status != NOT_FOUND:
                    raise
                yield None
                return
            yield now
            left_s = end - time.monotonic()
            if left_s <= 0:
                return
            query = {
                "watch": "true",
                "fieldSelector": f"metadata.name={name}",
                "resourceVersion": now["metadata"]["resourceVersion"],
                "timeoutSeconds": f"{max(1, int(left_s))}",
            }
            for event in self._events(_url(self._place(kind, namespace), query), left_s):
                if event["type"] == "DELETED":
                    yield None
                    return
                if event["type"] == "ERROR":  # that version is too old; it is asked for again
                    break
                yield event["object"]

    def _events(self, url: str, deadline_s: float) -> Iterator[Object]:
        """Yields the events of a watch, until the server or the deadline ends it."""
        connection = _Connection(self._path, deadline_s + 1)
        try:
            connection.request("GET", url)
            answer = connection.getresponse()
            if answer.status >= http.HTTPStatus.BAD_REQUEST:
                raise ApiError(answer.status, _sentence(answer.read().decode()))
            while line := answer.readline():
                yield json.loads(line)
        except (TimeoutError, http.client.HTTPException):
            return
        finally:
            connection.close()


def _url(path: str, query: dict[str, str] | None) -> str:
    return f"{path}?{urlencode(query)}" if query else path


def _sentence(text: str) -> str:
    try:
        said = json.loads(text)
    except ValueError:
        return text
    return f"{said.get('reason', '')}: {said.get('message', text)}"


def _shown(given: Object) -> Object:
    """Returns an object without what kubectl does not show either: who manages which field."""
    given["metadata"].pop("managedFields", None)
    return given


def _documents(manifest: str) -> Iterator[Object]:
    yield from (given for given in yaml.safe_load_all(manifest) if given)


def _is(seen: Object, state: str) -> bool:
    if asked := PATH.fullmatch(state):
        value: Any = seen
        for name in asked[1].split(".")[1:]:
            value = value.get(name) if isinstance(value, dict) else None
        return str(value) == asked[2]
    asked = CONDITION.fullmatch(state)
    assert asked, state
    found = (seen.get("status") or {}).get("conditions") or []
    return any(one["type"] == asked[1] and one["status"] == "True" for one in found)
