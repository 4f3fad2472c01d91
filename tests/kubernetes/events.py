"""Events of Kubernetes' objects, as tests look for them."""

from __future__ import annotations

from tests.kubernetes.cluster import Cluster
from tests.support.wait import DEADLINE_S, until


def events(cluster: Cluster, name: str, uid: str = "") -> str:
    """Returns the events of an object, a line each; with `uid` of no earlier one of its name."""
    wanted = f"involvedObject.name={name}" + (f",involvedObject.uid={uid}" if uid else "")
    found = cluster.items("events", "--field-selector", wanted)
    return "\n".join(f"{event['reason']}: {event['message']}" for event in found)


def wait_event(
    cluster: Cluster, name: str, text: str, uid: str = "", deadline_s: float = DEADLINE_S
) -> None:
    """Waits for an event with a text: it may come after the state that it is about."""
    until(
        lambda: text in events(cluster, name, uid),
        lambda: f"an event with {text!r} among those of {name}:\n{events(cluster, name, uid)}",
        deadline_s,
    )
