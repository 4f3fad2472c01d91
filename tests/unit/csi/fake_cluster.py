"""NOT an API server, only a dictionary: what the driver's parts ask of one, and say to it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

from csi.batching import BatchedQuestions
from csi.cluster import Cluster
from csi.clustererrors import ConflictError, NotFoundError, UnreachableError
from csi.kinds import Kind
from csi.objects import Object, PersistentVolume


class Said(NamedTuple):
    """An event."""

    name: str
    """Of the object that it is about."""
    reason: str
    message: str
    warning: bool
    node: str
    once: bool


class FakeCluster(Cluster):
    """Objects by kind and name; each change makes a new version. `calls` tells what was asked."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        #: By handle.
        self.volumes: dict[str, PersistentVolume] = {}
        self.calls: list[str] = []
        self.said: list[Said] = []
        #: What every call raises.
        self.failure: Exception | None = None
        #: So many further reads find nobody.
        self.down = 0
        #: So many further changes come after somebody else's.
        self.conflicts = 0
        self.connected = 0
        self.version = 100
        self.forget_names()
        self._heard = {}
        self._lists = BatchedQuestions(self._list_names)

    def connect(self) -> FakeCluster:  # type: ignore[override]
        """What the driver calls to have a cluster."""
        self.connected += 1
        return self

    def put(self, kind: Kind, found: dict[str, Any]) -> Object:
        """Keeps an object under a new version; one being deleted goes with its last finalizer."""
        self.version += 1
        found["metadata"]["resourceVersion"] = str(self.version)
        meta = found["metadata"]
        key = kind.name, meta["name"]
        self.objects[key] = copy.deepcopy(found)
        if "deletionTimestamp" in meta and not meta.get("finalizers"):
            del self.objects[key]
        return copy.deepcopy(found)

    def get(self, kind: Kind, name: str, namespace: str | None = None) -> Object:
        self.calls.append(f"get {kind.name}")
        self._answers()
        found = self.objects.get((kind.name, name))
        if found is None or namespace != found["metadata"].get("namespace", namespace):
            raise NotFoundError(f"cannot read {kind.name} {namespace}/{name}")
        return copy.deepcopy(found)

    def patch(
        self,
        kind: Kind,
        name: str,
        namespace: str | None,
        change: Any,
        *,
        status: bool = False,
    ) -> Object:
        found = dict(self.get(kind, name, namespace))
        self.calls[-1] = f"patch {kind.name}{'/status' * status} {name}"
        if self.conflicts:
            self.conflicts -= 1
            self.put(kind, found)
        version = change.get("metadata", {}).get("resourceVersion")
        if version not in (None, self.objects[kind.name, name]["metadata"]["resourceVersion"]):
            raise ConflictError("the object has been modified")
        return self.put(kind, merged(found, change))

    def _each(self, kind: Kind, namespace: str | None = None, **_: Any) -> Iterator[Object]:
        self.calls.append(f"list {kind.name}")
        yield from [each for (name, _), each in self.objects.items() if name == kind.name]

    def volume(self, name: str) -> PersistentVolume:
        self._answers()
        found = (each for each in self.volumes.values() if each.name == name)
        return next(found, None) or super().volume(name)

    def volume_by_handle(self, handle: str) -> PersistentVolume:
        self._answers()
        if handle not in self.volumes:
            raise NotFoundError(f"no PersistentVolume has the handle {handle}")
        return self.volumes[handle]

    def volumes_of(self, handle: str, *, fresh: bool = False) -> list[PersistentVolume]:
        self._answers()
        found = {each.name: each for each in super().volumes_of(handle, fresh=fresh)}
        found |= {each.name: each for each in self.volumes.values() if each.handle == handle}
        return [each for each in found.values() if each.ours]

    def forget_names(self) -> None:
        """As some seconds later: PersistentVolumes are listed anew where all were listed before."""
        self._names, self._named_at = {}, None

    def event(
        self,
        about: Object,
        reason: str,
        message: str,
        *,
        warning: bool = False,
        node: str = "",
        once: bool = False,
    ) -> None:
        self.said.append(Said(about["metadata"]["name"], reason, message, warning, node, once))

    def _answers(self) -> None:
        if self.failure:
            raise self.failure
        if self.down:
            self.down -= 1
            raise UnreachableError("cannot read it: the API server does not answer")


def merged(found: Any, change: Any) -> Any:
    """Merges as RFC 7386 says."""
    if not isinstance(change, dict):
        return change
    made = dict(found) if isinstance(found, dict) else {}
    for key, value in change.items():
        if value is None:
            made.pop(key, None)
        else:
            made[key] = merged(made.get(key), value)
    return made
