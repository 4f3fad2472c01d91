"""The Kubernetes API, as far as the driver needs it; nothing else in this package talks to it.

The client library is lightkube: it is synchronous by itself, as the driver is, and by far the
smallest in files and memory. Objects come as plain JSON; `objects` reads what is decided by.

A `Cluster` may be used from any thread. Every failure is a `ClusterError`: see csi.clustererrors.
"""

from __future__ import annotations

import hashlib
import random
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

import httpx2
import structlog
from lightkube import Client, KubeConfig
from lightkube.config.client_adapter import verify_cluster
from lightkube.config.models import User
from lightkube.core.exceptions import ConfigError
from lightkube.types import PatchType

from csi import DRIVER_NAME, LUN_FINALIZER
from csi.apitransport import MetadataOnly, PacedWatches
from csi.batching import BatchedQuestions
from csi.clustererrors import (
    ClusterError,
    ConflictError,
    ExpiredError,
    NotFoundError,
    sentences,
)
from csi.kinds import CLAIM, EVENT, NODE, POD, STORAGE_CLASS, VM_VOLUME, VMI, VOLUME, Kind
from csi.objects import (
    RESIZE_CONDITIONS,
    SELECTED_NODE,
    Claim,
    Object,
    PersistentVolume,
    StorageClass,
    Vmi,
    handle_of,
)

ANSWER_S = 10.0
"""Longest wait for the API server's answer, seconds."""
WATCH_S = 300
"""The server ends a watch after so many seconds; it is taken up where it ended."""
IDLE_S = 300.0
"""A connection is kept so long for the next call, which then needs no TLS handshake."""
LIST_CHUNK = 500
"""Objects that the server sends at a time."""
SILENCE_S = WATCH_S + 30.0
"""A watch that says nothing for so many seconds, and does not end, has failed."""
RETRY_S = (0.2, 10.0)
"""Waits of a watch that failed: the first, and the longest, seconds."""
NAMES_S = 5.0
"""For so many seconds volumes are not listed again where one that is looked for was among them."""
READ_MAX = 8
"""More volumes of one handle are not read one by one: all are listed."""
COMPONENT = "virtlun-csi"
EVENT_BYTES_MAX = 1024  # of an Event's message; core/v1 refuses more
#: A peer that went away without a word is noticed after 30 s + 3 * 10 s: a watch has no deadline.
KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
]

log = structlog.get_logger()


class Change(NamedTuple):
    """What a watch tells: an object is `present`, or `gone`.

    `complete` follows once all that there is was told, at the beginning and again after a gap in
    which changes may have been missed. Of what vanished in a gap only the name is known.
    """

    what: Literal["present", "gone", "complete"]
    object: Object


class Cluster:
    """The API server, asked with this program's own account."""

    def __init__(self, client: Client, heard: dict[str, float] | None = None) -> None:
        """Uses a client, which notes in `heard` when it began a watch; `connect` makes one."""
        self._client: Any = client  # its types go by classes that are known before it runs
        self._names: dict[str, list[str]] = {}  # handle -> names of our volumes, when last listed
        self._named_at: float | None = None  # monotonic seconds
        self._lists = BatchedQuestions(self._list_names)
        self._heard = heard if heard is not None else {}  # of watches, by plural; also monotonic

    @classmethod
    def connect(cls, kubeconfig: Path | None = None) -> Cluster:
        """Returns the cluster of a kubeconfig file, else the one whose pod this program is in.

        Outside a pod without a file it is $KUBECONFIG, then ~/.kube/config. Nothing is asked of
        the server yet.

        Raises:
            ClusterError: there is no configuration, or one that cannot be read.
        """
        try:
            file = KubeConfig.from_file(kubeconfig) if kubeconfig else KubeConfig.from_env()
            config = file.get()
            assert config is not None
            verify = verify_cluster(config.cluster, config.user or User(), config.abs_file)
            transport = httpx2.HTTPTransport(
                verify=verify,
                limits=httpx2.Limits(keepalive_expiry=IDLE_S),
                socket_options=KEEPALIVE,
            )
            heard: dict[str, float] = {}
            client = Client(
                config._replace(user=config.user or User()),
                timeout=httpx2.Timeout(ANSWER_S),
                field_manager=COMPONENT,
                transport=PacedWatches(MetadataOnly(transport), SILENCE_S, heard),
            )
        except (ConfigError, OSError, KeyError, ValueError, TypeError) as error:
            where = kubeconfig or "in a pod, $KUBECONFIG or ~/.kube/config"
            raise ClusterError(
                f"no Kubernetes API server is configured ({where}: {error}): give the pod a "
                "service account, or name a file with --kubeconfig"
            ) from error
        return cls(client, heard)

    def close(self) -> None:
        """Closes the connections; watches end with an error."""
        self._client.close()

    # Objects of any kind

    def get(self, kind: Kind, name: str, namespace: str | None = None) -> Object:
        """Returns an object as JSON."""
        with sentences("read", kind, name, namespace):
            return _plain(self._client.get(kind.resource, name, **_in(namespace)))

    def items(
        self,
        kind: Kind,
        namespace: str | None = None,
        *,
        labels: Mapping[str, str] | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> list[Object]:
        """Returns the objects of a kind, in one namespace or (None) in all."""
        return list(self._each(kind, namespace, labels=labels, fields=fields))

    def _each(
        self,
        kind: Kind,
        namespace: str | None = None,
        *,
        labels: Mapping[str, str] | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> Iterator[Object]:
        """Yields the same, of which no more than LIST_CHUNK are here at a time."""
        with sentences("list", kind):
            objects = self._client.list(
                kind.resource,
                **_all(kind, namespace),
                chunk_size=LIST_CHUNK,
                labels=dict(labels) if labels else None,
                fields=dict(fields) if fields else None,
            )
            for each in objects:
                yield _plain(each)

    def watch(
        self,
        kind: Kind,
        stop: threading.Event,
        *,
        labels: Mapping[str, str] | None = None,
        known: set[tuple[str, str]] | None = None,
    ) -> Iterator[Change]:
        """Yields the objects of a kind in all namespaces, then every change, until `stop` is set.

        It goes on from where it was when the server ends it, restarts or is away for a while, and
        lists anew when the server no longer knows what happened since.

        It never ends by itself; what goes wrong is logged, and tried again after 0.2 to 10 s.
        It sees `stop` at the next change. In `known` is kept what it has told of, by namespace and
        name: another watch which is given that tells what has vanished since.
        """
        try:
            yield from self._watch(kind, stop, labels, set() if known is None else known)
        finally:
            self._heard.pop(kind.plural, None)

    def heard(self, kind: Kind) -> float | None:
        """Returns when a watch of a kind told something last, or that it goes on.

        In seconds of the monotonic clock; None: it is cut off, or there is none.
        """
        return self._heard.get(kind.plural)

    def _watch(
        self,
        kind: Kind,
        stop: threading.Event,
        labels: Mapping[str, str] | None,
        known: set[tuple[str, str]],
    ) -> Iterator[Change]:
        bound = log.bind(kind=kind.plural)
        selected = {**_all(kind, None), "labels": dict(labels) if labels else None}
        version, failed, failed_at = "", 0, 0.0
        while not stop.is_set():
            try:
                if not version:
                    with sentences("list", kind):
                        objects = self._client.list(
                            kind.resource, chunk_size=LIST_CHUNK, **selected
                        )
                        listed: set[tuple[str, str]] = set()
                        for each in objects:
                            listed.add(name := _name(each))
                            known.add(name)  # now: this list may break in the middle
                            yield Change("present", _plain(each))
                        version = objects.resourceVersion
                    gone_since = known - listed
                    yield from (Change("gone", _named(*name)) for name in gone_since)
                    known -= gone_since
                    listed.clear()
                    self._heard[kind.plural] = time.monotonic()
                    yield Change("complete", {})
                with sentences("watch", kind):
                    for what, each in self._client.watch(
                        kind.resource,
                        server_timeout=WATCH_S,
                        resource_version=version,
                        **selected,
                    ):
                        if failed:
                            bound.info("watching again", failures=failed)
                        failed = 0
                        self._heard[kind.plural] = time.monotonic()
                        version = each["metadata"]["resourceVersion"]
                        if stop.is_set():
                            return
                        gone = what == "DELETED"
                        (known.discard if gone else known.add)(_name(each))
                        yield Change("gone" if gone else "present", _plain(each))
            except ExpiredError:
                self._heard.pop(kind.plural, None)
                version = ""
                failed, failed_at = failed + 1, time.monotonic()
                stop.wait(backoff(failed, *RETRY_S))
            except ClusterError as error:
                begun, now = self._heard.pop(kind.plural, None) is not None, time.monotonic()
                if stop.is_set():
                    return
                if begun and now - failed_at > 2 * RETRY_S[1]:
                    failed = 0  # it went on since, though it had nothing to tell
                failed, failed_at = failed + 1, now
                if failed == 1 or failed % 100 == 0:
                    bound.warning("cannot watch", reason=str(error), failures=failed)
                if isinstance(error, NotFoundError):
                    version = ""
                stop.wait(backoff(failed, *RETRY_S))

    def patch(
        self,
        kind: Kind,
        name: str,
        namespace: str | None,
        change: Mapping[str, Any],
        *,
        status: bool = False,
    ) -> Object:
        """Merges a change into an object, or into its status, and returns it (RFC 7386).

        With `metadata.resourceVersion` in the change it is a ConflictError if the object is of
        another one.
        """
        resource = kind.resource.Status if status else kind.resource
        with sentences("change", kind, name, namespace):
            merge = PatchType.MERGE
            changed = self._client.patch(
                resource, name, dict(change), patch_type=merge, **_in(namespace)
            )
            return _plain(changed)

    def create(self, kind: Kind, given: Mapping[str, Any], namespace: str | None = None) -> Object:
        """Makes an object."""
        made = {"apiVersion": kind.api_version, "kind": kind.name, **given}
        with sentences("make", kind, given["metadata"].get("name", ""), namespace):
            return _plain(self._client.create(kind.resource(made), **_in(namespace)))

    def delete(self, kind: Kind, name: str, namespace: str | None = None) -> None:
        """Deletes an object; it may stay until its finalizers are gone."""
        with sentences("delete", kind, name, namespace):
            self._client.delete(kind.resource, name, **_in(namespace))

    # Claims and volumes

    def claim(self, namespace: str, name: str) -> Claim:
        """Returns a claim with the volume that it is bound to."""
        claim = self.get(CLAIM, name, namespace)
        bound = (claim.get("status") or {}).get("phase") == "Bound"
        volume = claim["spec"].get("volumeName") if bound else None
        return Claim.of(claim, self.volume(volume) if volume else None)

    def volume(self, name: str) -> PersistentVolume:
        """Returns a persistent volume."""
        return PersistentVolume.of(self.get(VOLUME, name))

    def volume_by_handle(self, handle: str) -> PersistentVolume:
        """Returns our persistent volume with this handle; of several, one that is bound if any is.

        The first time it lists all volumes, later it reads the one.
        """
        found = self._named(handle)
        if not found:
            self._lists.ask(handle)
            found = self._named(handle)
        if not found:
            raise NotFoundError(
                f"no PersistentVolume of {DRIVER_NAME} has the handle {handle}: "
                "was it deleted meanwhile?"
            )
        return next((each for each in found if each.bound), found[-1])

    def volumes_of(self, handle: str, *, fresh: bool = False) -> list[PersistentVolume]:
        """Returns all our persistent volumes with this handle.

        One that was made in the last `NAMES_S` may be missing beside others, unless they are to be
        `fresh`: then all are listed, once for all who wait for that.
        """
        listed, names = self._named_at, self._names.get(handle, ())
        soon = listed is not None and time.monotonic() - listed < NAMES_S
        if soon and not fresh and len(names) <= READ_MAX and (found := self._named(handle)):
            return found
        return self._lists.ask(handle)

    def _named(self, handle: str) -> list[PersistentVolume]:
        """Reads our volumes that had this handle when all were listed."""
        return self.volumes_called(self._names.get(handle, ()), handle)

    def volumes_called(self, names: Iterable[str], handle: str) -> list[PersistentVolume]:
        """Returns those of these names that are ours and have this handle, in order of names."""
        found = []
        for name in sorted(names):
            with suppress(NotFoundError):
                found.append(self.volume(name))
        return [each for each in found if each.ours and each.handle == handle]

    def _list_names(self, handles: Set[str]) -> dict[str, list[PersistentVolume]]:
        """Lists all volumes, and returns ours with each of these handles, in order of names."""
        names: dict[str, list[str]] = {}
        found: dict[str, list[PersistentVolume]] = {handle: [] for handle in handles}
        for item in self._each(VOLUME):
            if its := handle_of(item):
                names.setdefault(its, []).append(item["metadata"]["name"])
                if its in found:
                    found[its].append(PersistentVolume.of(item))
        self._names, self._named_at = names, time.monotonic()
        return {its: sorted(each, key=lambda one: one.name) for its, each in found.items()}

    def storage_class(self, name: str) -> StorageClass:
        """Returns a class."""
        return StorageClass.of(self.get(STORAGE_CLASS, name))

    def select_node(self, claim: Claim, node: str) -> None:
        """Tells the provisioner that the claim's first consumer is on `node`."""
        meta = {"resourceVersion": claim.resource_version, "annotations": {SELECTED_NODE: node}}
        self.patch(CLAIM, claim.name, claim.namespace, {"metadata": meta})

    def finish_expansion(self, claim: Claim) -> None:
        """Writes what the kubelet writes when a claim's volume has its new size on its node."""
        assert claim.volume is not None
        kept = [
            each
            for each in claim.object["status"].get("conditions") or ()
            if each["type"] not in RESIZE_CONDITIONS
        ]
        status = {
            "capacity": {"storage": claim.volume.quantity},
            "conditions": kept,
            "allocatedResourceStatuses": {"storage": None},
        }
        meta = {"resourceVersion": claim.resource_version}
        change = {"metadata": meta, "status": status}
        self.patch(CLAIM, claim.name, claim.namespace, change, status=True)

    def pods_of_claim(self, namespace: str, name: str) -> list[str]:
        """Returns the names of the pods that use a claim and have not ended."""
        return sorted(pod["metadata"]["name"] for pod in self._pods_of(namespace, name))

    def _pods_of(self, namespace: str, claim: str) -> list[Object]:
        ended = ("Succeeded", "Failed")
        return [
            pod
            for pod in self.items(POD, namespace)
            if (pod.get("status") or {}).get("phase") not in ended
            and any(claim_of(pod, each) == claim for each in pod["spec"].get("volumes") or ())
        ]

    def users_of_claim(self, namespace: str, name: str) -> list[tuple[str, str]]:
        """Returns who uses a claim, and on which node; nothing where that is not decided.

        That are pods that have not ended, and VmVolumes that have a LUN of it, or may have.
        """
        pods = self._pods_of(namespace, name)
        found = [(pod["metadata"]["name"], pod["spec"].get("nodeName") or "") for pod in pods]
        with suppress(NotFoundError):  # there is no such kind
            for each in self.items(VM_VOLUME, namespace):
                node = (each.get("status") or {}).get("node") or ""
                held = LUN_FINALIZER in (each["metadata"].get("finalizers") or ())
                if held and each["spec"].get("claimName") == name:
                    found.append((f"VmVolume {each['metadata']['name']}", node))
        return found

    def has_node(self, name: str) -> bool:
        """Whether there is a node of this name, ready or not."""
        try:
            self.get(NODE, name)
        except NotFoundError:
            return False
        return True

    # Virtual machines

    def vmi(self, namespace: str, name: str) -> Vmi:
        """Returns a virtual machine that KubeVirt runs."""
        return Vmi.of(self.get(VMI, name, namespace))

    # Finalizers and events

    def set_finalizers(self, kind: Kind, current: Object, wanted: Sequence[str]) -> Object:
        """Replaces an object's finalizers and returns it; ConflictError if it is not the latest."""
        meta = current["metadata"]
        given = {"resourceVersion": meta["resourceVersion"], "finalizers": list(wanted)}
        return self.patch(kind, meta["name"], meta["namespace"], {"metadata": given})

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
        """Tells something of an object, where `kubectl describe` shows it.

        The same thing said again counts up what is there, unless it is to be said `once`. `reason`
        is one CamelCase word.
        """
        meta = about["metadata"]
        text = _cut(message)
        said = f"{meta['uid']}/{reason}/{text}".encode()
        cut = meta["name"][:200].rstrip("-.")
        name = f"{cut}.{hashlib.sha256(said).hexdigest()[:16]}"
        namespace = meta.get("namespace") or "default"
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        given = {
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": {
                "apiVersion": about["apiVersion"],
                "kind": about["kind"],
                "name": meta["name"],
                "namespace": meta.get("namespace", ""),
                "uid": meta["uid"],
                "resourceVersion": meta.get("resourceVersion", ""),
            },
            "reason": reason,
            "message": text,
            "type": "Warning" if warning else "Normal",
            "source": {"component": COMPONENT, "host": node},
            "reportingComponent": COMPONENT,
            "reportingInstance": node,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            self.create(EVENT, given, namespace)
        except ConflictError:
            if once:
                return
            count = self.get(EVENT, name, namespace).get("count") or 1
            self.patch(EVENT, name, namespace, {"count": count + 1, "lastTimestamp": now})


def backoff(failures: int, first_s: float, most_s: float) -> float:
    """Returns how long to wait after so many failures in a row, seconds.

    It doubles from `first_s` to `most_s`, less up to a quarter by chance, so that many do not come
    back at once.
    """
    wait = min(most_s, first_s * 2.0 ** min(failures - 1, 30))
    return wait * random.uniform(0.75, 1.0)  # noqa: S311 - not a secret


def claim_of(pod: Object, volume: Object) -> str | None:
    """Returns the name of the claim that is one of a pod's volumes."""
    if "ephemeral" in volume:
        return f"{pod['metadata']['name']}-{volume['name']}"
    return (volume.get("persistentVolumeClaim") or {}).get("claimName")


def _plain(resource: Any) -> Object:
    return dict(resource)


def _name(resource: Any) -> tuple[str, str]:
    meta = resource["metadata"]
    return meta.get("namespace", ""), meta["name"]


def _named(namespace: str, name: str) -> Object:
    return {"metadata": {"namespace": namespace, "name": name}}


def _in(namespace: str | None) -> dict[str, str]:
    return {"namespace": namespace} if namespace else {}


def _all(kind: Kind, namespace: str | None) -> dict[str, str]:
    return {"namespace": namespace or "*"} if kind.namespaced else {}


def _cut(message: str) -> str:
    encoded = message.encode()
    if len(encoded) <= EVENT_BYTES_MAX:
        return message
    return encoded[: EVENT_BYTES_MAX - 3].decode(errors="ignore") + "..."
