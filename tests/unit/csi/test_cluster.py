"""The Kubernetes client where the server misbehaves; a double answers, no server does so on demand.

What a server does otherwise is tested with a real one, in tests/kubernetes.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from lightkube import Client, KubeConfig
from lightkube.config.models import Cluster as ServerConfig
from lightkube.config.models import User

import csi.apitransport
import csi.cluster
from csi.apitransport import MetadataOnly, PacedWatches
from csi.cluster import NAMES_S, READ_MAX, Change, Cluster
from csi.clustererrors import (
    ClusterError,
    ConflictError,
    ForbiddenError,
    NotFoundError,
    RefusedError,
    UnreachableError,
)
from csi.kinds import CLAIM, VM_VOLUME, VMI
from tests.support.wait import until

Answer = httpx2.Response | Exception


class Server:
    """Gives prepared answers one after the other, and remembers what it was asked."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []
        self.bodies: list[Any] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.asked.append(f"{request.method} {request.url.path}?{request.url.query.decode()}")
        self.bodies.append(json.loads(request.content) if request.content else None)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def cluster(server: Server, transport: httpx2.BaseTransport | None = None) -> Cluster:
    """Returns a client of it."""
    config = KubeConfig.from_one(cluster=ServerConfig(server="http://server"), user=User()).get()
    assert config is not None
    return Cluster(Client(config, transport=transport or httpx2.MockTransport(server)))


def status(code: int, message: str, name: str = "data") -> httpx2.Response:
    """Returns a refusal as the API server sends it."""
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": code,
        "message": message,
        "details": {"name": name} if name else {},
    }
    return httpx2.Response(code, json=body)


def volume(name: str, version: int) -> dict[str, Any]:
    """Returns an object."""
    meta = {"namespace": "ns", "name": name, "resourceVersion": str(version)}
    return {"metadata": meta, "spec": {}}


def listed(version: int, *names: str) -> httpx2.Response:
    """Returns a list's answer."""
    meta = {"resourceVersion": str(version)}
    items = [volume(name, version) for name in names]
    return httpx2.Response(200, json={"metadata": meta, "items": items})


def told(*events: tuple[str, dict[str, Any]], then: Exception | None = None) -> httpx2.Response:
    """Returns a watch's answer, which ends or breaks after these."""

    def lines() -> Iterator[bytes]:
        for what, found in events:
            yield json.dumps({"type": what, "object": found}).encode() + b"\n"
        if then is not None:
            raise then

    return httpx2.Response(200, content=lines())


def watched(server: Server, count: int) -> list[tuple[str, str]]:
    """Returns the first changes of a watch, as kind and name."""
    stop = threading.Event()
    found: list[tuple[str, str]] = []
    for change in cluster(server).watch(VM_VOLUME, stop):
        found.append(_short(change))
        if len(found) == count:
            stop.set()
            break
    return found


def _short(change: Change) -> tuple[str, str]:
    return change.what, change.object["metadata"]["name"] if change.object else ""


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csi.cluster, "RETRY_S", (0.001, 0.001))


# Failures


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        (status(404, 'pvc "data" not found'), NotFoundError, 'ns/data: pvc "data" not found; is'),
        (status(403, "no rights."), ForbiddenError, "no rights; compare the account's rights"),
        (status(401, "Unauthorized"), ForbiddenError, "check the service account"),
        (status(409, "modified"), ConflictError, "modified; it is looked at again"),
        (status(422, "spec is wrong"), RefusedError, "spec is wrong; see the message"),
        (status(500, "etcd is away"), UnreachableError, "etcd is away; it is tried again"),
        (status(429, "too many"), UnreachableError, "it is tried again"),
        (httpx2.Response(502, text="<html>"), UnreachableError, "HTTP status 502"),
        (httpx2.ConnectError("refused"), UnreachableError, "does not answer (refused)"),
        (httpx2.ReadTimeout(""), UnreachableError, "does not answer (ReadTimeout)"),
        (httpx2.Response(200, text="garbage"), UnreachableError, "does not answer"),
    ],
)
def test_every_failure_is_one_sentence_of_its_own_kind(
    answer: Answer, kind: type[ClusterError], text: str
) -> None:
    with pytest.raises(ClusterError) as caught:
        cluster(Server(answer)).claim("ns", "data")
    assert type(caught.value) is kind
    assert str(caught.value).startswith("cannot read PersistentVolumeClaim ns/data: ")
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_kind_that_the_server_does_not_know_is_said_with_what_to_do() -> None:
    for answer in (status(404, "not found", name=""), httpx2.Response(404, text="404 page")):
        with pytest.raises(NotFoundError, match="knows no virtualmachineinstances; install Kube"):
            cluster(Server(answer)).vmi("ns", "vm")


def test_no_configuration_is_said_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="no Kubernetes API server is configured"):
        Cluster.connect(tmp_path / "none")
    (tmp_path / "config").write_text("clusters: 7")
    with pytest.raises(ClusterError, match="is configured"):
        Cluster.connect(tmp_path / "config")


@pytest.mark.parametrize("name", ["..", "../../other/secrets/key", "a?watch=1", "a#b", "A", "a\n"])
def test_a_name_never_leads_to_another_object(name: str) -> None:
    """The server's answer would be about an object that the user may have no right to."""
    server = Server()
    asking = cluster(server)
    asks: list[Callable[[], object]] = [
        lambda: asking.claim("ns", name),
        lambda: asking.claim(name, "data"),
        lambda: asking.patch(CLAIM, name, "ns", {}),
        lambda: asking.delete(CLAIM, name, "ns"),
    ]
    for ask in asks:
        with pytest.raises(NotFoundError, match="no object has such a name") as caught:
            ask()
        assert "\n" not in str(caught.value)
    assert not asking.has_node(name)
    assert server.asked == []


# Watches


def test_a_watch_lists_and_goes_on_from_there() -> None:
    server = Server(listed(5, "a", "b"), told(("MODIFIED", volume("a", 6))))
    expected = [("present", "a"), ("present", "b"), ("complete", ""), ("present", "a")]
    assert watched(server, 4) == expected
    assert "watch=true" in server.asked[1]
    assert "resourceVersion=5" in server.asked[1]


def test_of_the_claims_of_all_namespaces_nothing_but_metadata_is_asked_for() -> None:
    server = Server(listed(5), told(), listed(5), status(404, "none"))
    accepted: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        accepted.append(request.headers.get("Accept", ""))
        return server(request)

    asking = cluster(server, MetadataOnly(httpx2.MockTransport(answer)))
    stop = threading.Event()
    server.answers[1] = told(("ADDED", volume("a", 6)))
    for change in asking.watch(CLAIM, stop):
        if change.what == "present":
            break
    asking.items(VM_VOLUME)
    with pytest.raises(NotFoundError):
        asking.claim("ns", "data")
    assert "as=PartialObjectMetadataList;" in accepted[0]
    assert "as=PartialObjectMetadata;" in accepted[1]
    assert not any("Partial" in each for each in accepted[2:])


def test_a_cluster_without_claims_is_watched() -> None:
    """What the API server says there, byte by byte."""
    none = (
        b'{"kind":"PartialObjectMetadataList","apiVersion":"meta.k8s.io/v1",'
        b'"metadata":{"resourceVersion":"673"},"items":null}\n'
    )
    server = Server(
        httpx2.Response(200, content=none, headers={"Content-Type": "application/json"}),
        told(("ADDED", volume("a", 674))),
    )
    asking = cluster(server, MetadataOnly(httpx2.MockTransport(server)))
    changes = asking.watch(CLAIM, threading.Event())
    assert [next(changes).what, next(changes).what] == ["complete", "present"]
    assert "resourceVersion=673" in server.asked[1]


def test_what_is_selected_by_labels_is_selected_by_the_server() -> None:
    server = Server(listed(5), told(("ADDED", volume("a", 6))))
    stop = threading.Event()
    for change in cluster(server).watch(VMI, stop, labels={"kubevirt.io/nodeName": "n1"}):
        if change.what == "present":
            break
    assert len(server.asked) == 2, "a list and a watch"
    assert all("labelSelector=kubevirt.io%2FnodeName%3Dn1" in ask for ask in server.asked)


def test_a_watch_that_breaks_or_ends_goes_on_where_it_was() -> None:
    server = Server(
        listed(5, "a"),
        told(("ADDED", volume("b", 6)), then=httpx2.RemoteProtocolError("cut off")),
        httpx2.ConnectError("refused"),
        told(("DELETED", volume("a", 7))),
        told(("ADDED", volume("c", 8))),
    )
    expected = [
        ("present", "a"),
        ("complete", ""),
        ("present", "b"),
        ("gone", "a"),
        ("present", "c"),
    ]
    assert watched(server, 5) == expected
    assert [ask.split("resourceVersion=")[1][0] for ask in server.asked[1:]] == list("5667")


@pytest.mark.parametrize("how", ["answer", "event"])
def test_a_watch_lists_anew_after_a_gap_and_tells_what_vanished(how: str) -> None:
    expired = {"kind": "Status", "code": 410, "message": "too old", "status": "Failure"}
    gap = status(410, "too old", name="") if how == "answer" else told(("ERROR", expired))
    server = Server(listed(5, "a", "b"), gap, listed(9, "b", "c"), told(("ADDED", volume("d", 10))))
    assert watched(server, 8) == [
        ("present", "a"),
        ("present", "b"),
        ("complete", ""),
        ("present", "b"),
        ("present", "c"),
        ("gone", "a"),
        ("complete", ""),
        ("present", "d"),
    ]


def test_a_list_that_breaks_in_the_middle_is_begun_again() -> None:
    half = listed(5, "a")
    half = httpx2.Response(
        200,
        json={
            "metadata": {"resourceVersion": "5", "continue": "more"},
            "items": [volume("a", 5)],
        },
    )
    server = Server(half, status(500, "away"), listed(6, "b"))
    assert watched(server, 4) == [
        ("present", "a"),
        ("present", "b"),
        ("gone", "a"),
        ("complete", ""),
    ]


def test_a_gap_at_once_after_a_gap_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []

    def backoff(failures: int, *_: float) -> float:
        waits.append(failures)
        return 0.0

    monkeypatch.setattr(csi.cluster, "backoff", backoff)
    gap = status(410, "too old", name="")
    server = Server(listed(5), gap, listed(6), gap, listed(7), told(("ADDED", volume("a", 8))))
    assert watched(server, 4) == [*[("complete", "")] * 3, ("present", "a")]
    assert waits == [1, 2]


def test_watches_that_end_at_once_do_not_come_thick_and_fast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    server = Server(listed(5), told(), told(), told(("ADDED", volume("a", 6))))
    paced = cluster(server, PacedWatches(httpx2.MockTransport(server), 7.0, {}))
    found = []
    for change in paced.watch(VM_VOLUME, threading.Event()):
        found.append(_short(change))
        if len(found) == 2:
            break
    assert found == [("complete", ""), ("present", "a")]
    assert len(waits) == 2
    assert all(0.5 < wait <= 1.0 for wait in waits)
    paced.close()


def test_a_watch_is_heard_while_it_goes_on_and_waits_for_no_silence_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    heard: dict[str, float] = {}
    waits: list[float] = []
    server = Server(
        listed(5, "a"), told(), told(("ADDED", volume("b", 6)), then=httpx2.ReadTimeout("silent"))
    )
    server.answers += [status(500, "away"), told(("ADDED", volume("c", 7)))]
    failing: list[float | None] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        waits.append(request.extensions["timeout"]["read"])
        if len(waits) > 3:
            failing.append(asking.heard(VM_VOLUME))
        return server(request)

    paced = PacedWatches(httpx2.MockTransport(answer), 7.0, heard)
    config = KubeConfig.from_one(cluster=ServerConfig(server="http://server"), user=User()).get()
    assert config is not None
    asking = Cluster(Client(config, transport=paced), heard)
    changes = asking.watch(VM_VOLUME, threading.Event())
    assert asking.heard(VM_VOLUME) is None
    assert [_short(next(changes)) for _ in range(2)] == [("present", "a"), ("complete", "")]
    first = asking.heard(VM_VOLUME)
    assert first is not None
    assert _short(next(changes)) == ("present", "b")
    assert (asking.heard(VM_VOLUME) or 0) > first
    assert _short(next(changes)) == ("present", "c")
    assert asking.heard(VM_VOLUME) is not None
    assert failing == [None, None]
    assert waits[1:] == [7.0] * 4
    changes.close()  # type: ignore[attr-defined]
    assert asking.heard(VM_VOLUME) is None


@pytest.mark.parametrize(("longest_s", "counted"), [(0.0, 1), (100.0, 3)])
def test_failures_are_counted_anew_once_a_watch_went_on_that_had_nothing_to_tell(
    longest_s: float, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not those of one that begins and breaks at once, over and over."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(csi.cluster, "RETRY_S", (0.0, longest_s))
    failures: list[int] = []

    def backoff(failed: int, *_: float) -> float:
        failures.append(failed)
        return 0.0

    monkeypatch.setattr(csi.cluster, "backoff", backoff)
    away = status(500, "away")
    server = Server(listed(5), away, away, told(), away, told(("ADDED", volume("a", 6))))
    heard: dict[str, float] = {}
    paced = PacedWatches(httpx2.MockTransport(server), 7.0, heard)
    config = KubeConfig.from_one(cluster=ServerConfig(server="http://server"), user=User()).get()
    assert config is not None
    changes = Cluster(Client(config, transport=paced), heard).watch(VM_VOLUME, threading.Event())
    assert [next(changes).what for _ in range(2)] == ["complete", "present"]
    assert failures == [1, 2, counted]


def test_what_vanished_between_two_watches_is_told() -> None:
    known: set[tuple[str, str]] = set()
    server = Server(listed(5, "a", "b"), listed(9, "b"))
    for expected in (
        [("present", "a"), ("present", "b"), ("complete", "")],
        [("present", "b"), ("gone", "a"), ("complete", "")],
    ):
        changes = cluster(server).watch(VM_VOLUME, threading.Event(), known=known)
        assert [_short(next(changes)) for _ in range(3)] == expected
    assert [name for _, name in known] == ["b"]


def test_a_kind_that_comes_later_is_waited_for() -> None:
    server = Server(status(404, "no", name=""), status(404, "no", name=""), listed(5, "a"))
    assert watched(server, 2) == [("present", "a"), ("complete", "")]


# Changes


def test_finalizers_are_those_of_the_object_that_was_looked_at() -> None:
    """Another one of its name that was made meanwhile keeps its own."""
    found = volume("data", 5)
    server = Server(httpx2.Response(200, json=found), status(409, "modified"))
    asking = cluster(server)
    asking.set_finalizers(CLAIM, found, ["ours"])
    assert server.bodies[0]["metadata"] == {"resourceVersion": "5", "finalizers": ["ours"]}
    with pytest.raises(ConflictError):
        asking.set_finalizers(CLAIM, found, [])


def test_an_event_said_again_is_counted() -> None:
    about = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "uid": "u"}}
    ok = httpx2.Response(201, json={})
    server = Server(ok, status(409, "exists"), httpx2.Response(200, json={"count": 4}), ok)
    for _ in range(2):
        cluster(server).event(about, "Said", "x" * 2000)
    assert server.bodies[0]["metadata"]["name"] == server.bodies[1]["metadata"]["name"]
    assert len(server.bodies[0]["message"]) == 1024
    assert server.bodies[3]["count"] == 5


def test_an_event_of_an_object_with_a_long_name_has_a_name_too() -> None:
    server = Server(httpx2.Response(201, json={}))
    meta = {"name": "a" * 199 + "-" + "b", "uid": "u"}
    cluster(server).event({"apiVersion": "v1", "kind": "Pod", "metadata": meta}, "Said", "it")
    assert server.bodies[0]["metadata"]["name"].startswith("a" * 199 + ".")


def _volume(name: str, handle: str, phase: str = "Bound") -> dict[str, Any]:
    csi_part = {"driver": "csi.virtlun.dev", "volumeHandle": handle}
    spec = {"csi": csi_part, "capacity": {"storage": "1Gi"}}
    return {"metadata": {"name": name}, "spec": spec, "status": {"phase": phase}}


def test_a_volume_s_name_is_looked_for_once() -> None:
    one = httpx2.Response(200, json=_volume("pv1", "h1"))
    everything = {"metadata": {"resourceVersion": "1"}, "items": [_volume("pv1", "h1")]}
    server = Server(httpx2.Response(200, json=everything), one, one, status(404, "gone"))
    server.answers.append(httpx2.Response(200, json={"metadata": {}, "items": []}))
    asking = cluster(server)
    assert asking.volume_by_handle("h1").name == "pv1"
    assert asking.volume_by_handle("h1").name == "pv1"
    with pytest.raises(NotFoundError, match="has the handle h1"):
        asking.volume_by_handle("h1")
    assert [ask.split("?")[0].rsplit("/", 1)[1] for ask in server.asked] == [
        "persistentvolumes",
        *["pv1"] * 3,
        "persistentvolumes",
    ]
    assert VMI.plural == "virtualmachineinstances"


def test_all_volumes_of_a_handle_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def everything(*found: dict[str, Any]) -> httpx2.Response:
        return httpx2.Response(200, json={"metadata": {}, "items": list(found)})

    one, two, three = _volume("pv1", "h1"), _volume("pv2", "h1", "Released"), _volume("pv3", "h3")
    server = Server(everything(two, one))
    asking = cluster(server)

    def found(handle: str, *, fresh: bool = False) -> list[tuple[str, bool]]:
        return [(each.name, each.released) for each in asking.volumes_of(handle, fresh=fresh)]

    assert found("h1") == [("pv1", False), ("pv2", True)]
    # Soon after nothing is listed that was there.
    server.answers += [httpx2.Response(200, json=one), status(404, "gone")]
    assert found("h1") == [("pv1", False)]
    # What was not there is looked for.
    server.answers += [everything(one, three)]
    assert found("h3") == [("pv3", False)]
    # One may have come beside what is known: that is seen later, or where it has to be.
    server.answers += [everything(one, two, three)]
    assert found("h3", fresh=True) == [("pv3", False)]
    now[0] += NAMES_S
    server.answers += [everything(one, two)]
    assert found("h1") == [("pv1", False), ("pv2", True)]
    # Of very many each costs a question: all are listed.
    many = [_volume(f"pv{at}", "h1") for at in range(READ_MAX + 1)]
    server.answers += [everything(*many), everything(*many)]
    assert len(found("h1", fresh=True)) == len(found("h1")) == READ_MAX + 1
    assert server.answers == []


def test_volumes_are_listed_once_for_all_who_ask_meanwhile() -> None:
    everything = {"metadata": {}, "items": [_volume(f"pv{at}", f"h{at}") for at in range(9)]}
    go, asked = threading.Event(), threading.Event()

    def answer(_: httpx2.Request) -> httpx2.Response:
        lists.append(len(lists))
        asked.set()
        assert go.wait(30)
        return httpx2.Response(200, json=everything)

    lists: list[int] = []
    asking = cluster(Server(), httpx2.MockTransport(answer))
    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(asking.volumes_of, "h0", fresh=True)
        assert asked.wait(30)
        rest = [pool.submit(asking.volumes_of, f"h{at}", fresh=True) for at in range(1, 9)]
        until(lambda: asking._lists._next and len(asking._lists._next[1]) == 8, "all to wait")
        go.set()
        assert [each.name for each in first.result()] == ["pv0"]
        names = [each.name for found in rest for each in found.result()]
    assert names == [f"pv{at}" for at in range(1, 9)]
    assert lists == [0, 1]
