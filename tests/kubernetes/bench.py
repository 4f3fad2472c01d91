"""`python -m tests.kubernetes.bench`: how long a claim takes to be bound, and memory; prints both.

It stands on the cluster of the tests, so figures are of one machine that is control plane, node and
disk (a file) at once. What is measured:

- *bound at once*: a claim of a class with immediate binding. Most of it is what the provisioner
  waits before it takes the claim (0 to --node-deployment-base-delay, by chance);
- *bound on a node*: a claim whose node is chosen already, as when a pod waits for it.

Time runs from the request that creates the claim to the watch that says Bound.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from csi.cluster import Cluster
from csi.kinds import CLAIM, VOLUME
from csi.objects import SELECTED_NODE
from tests.kubernetes.cluster import NODE
from tests.kubernetes.cluster import Cluster as Machine
from tests.kubernetes.driver import ROOT, Deployment
from tests.kubernetes.sandbox import Process

NAMESPACE = "default"
AT_ONCE = 20
DEADLINE_S = 120.0
CLASSES = {"bound at once": "virtlun-block", "bound on a node": "virtlun-thick"}


@dataclass(frozen=True)
class Figures:
    """Seconds, in order."""

    seconds: list[float]

    def quantile(self, share: float) -> float:
        """Returns the least of them that `share` of them do not exceed, milliseconds."""
        ordered = sorted(self.seconds)
        return ordered[max(0, math.ceil(len(ordered) * share) - 1)] * 1000


class Clock:
    """When each claim was seen to be bound, by a watch of its own."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._seen: dict[str, float] = {}
        self._changed = threading.Condition()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        # `Cluster.watch` has no more of claims than their metadata. This one begins with what
        # there is by then, so that nothing is missed.
        for _, seen in self._cluster._client.watch(CLAIM.resource, namespace=NAMESPACE):
            status = seen.get("status") or {}
            if status.get("phase") == "Bound":
                with self._changed:
                    name = seen["metadata"]["name"]
                    self._seen.setdefault(name, time.monotonic())
                    self._changed.notify_all()

    def bound(self, name: str) -> float:
        """Waits until a claim is bound and returns when it was."""
        with self._changed:
            if not self._changed.wait_for(lambda: name in self._seen, DEADLINE_S):
                raise TimeoutError(f"claim {name} was not bound within {DEADLINE_S:.0f} s")
            return self._seen[name]


def measure(kubeconfig: Path, count: int) -> dict[str, list[float]]:
    """Makes claims, alone and many at once, and returns the seconds of each kind."""
    cluster = Cluster.connect(kubeconfig)
    clock = Clock(cluster)
    found: dict[str, list[float]] = {}
    for what, storage_class in CLASSES.items():
        for together in (1, AT_ONCE):
            seconds = found[f"{what}, {together} at a time"] = []
            for round_ in range(max(1, count // together)):
                names = [f"{storage_class}-{together}-{round_}-{n}" for n in range(together)]
                begun = {}
                for name in names:
                    begun[name] = time.monotonic()
                    cluster.create(CLAIM, claim(name, storage_class), NAMESPACE)
                seconds += [clock.bound(name) - begun[name] for name in names]
                for name in names:
                    cluster.delete(CLAIM, name, NAMESPACE)
                while cluster.items(VOLUME):  # so that no round has another's end in it
                    time.sleep(0.05)
    return found


def claim(name: str, storage_class: str) -> dict[str, Any]:
    """Returns a claim for a block device; with its node, where the class waits for one."""
    waits = storage_class == CLASSES["bound on a node"]
    return {
        "metadata": {"name": name, "annotations": {SELECTED_NODE: NODE} if waits else {}},
        "spec": {
            "storageClassName": storage_class,
            "volumeMode": "Block",
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "16Mi"}},
        },
    }


def memory_mib(process: Process) -> float:
    """Returns the resident memory of a program, MiB."""
    status = Path(f"/proc/{process.inner()}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found.group(1)) / 1024


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="tests.kubernetes.bench", description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="claims of each kind")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        print(json.dumps(measure(given.inside, given.count)))
        return 0
    with Machine() as machine, Deployment(machine) as deployment:
        parts = [deployment.parts[name].process for name in ("virtlun-target", "virtlun-csi")]
        idle = [memory_mib(part) for part in parts]
        words = (sys.executable, "-m", __spec__.name, "--inside", machine.kubeconfig)
        done = machine.box.run(
            *words,
            *("--count", str(given.count)),
            deadline_s=1200,
            env={"PYTHONPATH": str(ROOT)},
        )
        print(f"{'claim to bound':34} {'n':>5} {'p50 ms':>8} {'p99 ms':>8} {'most ms':>8}")
        for what, seconds in json.loads(done.stdout).items():
            figures = Figures(seconds)
            most = [figures.quantile(share) for share in (0.5, 0.99, 1.0)]
            print(f"{what:34} {len(seconds):5} " + " ".join(f"{each:8.0f}" for each in most))
        deployment.wait_clean()
        print(f"\n{'resident memory':34} {'idle':>8} {'after':>8} MiB")
        for part, before in zip(parts, idle, strict=True):
            print(f"{part.name:34} {before:8.1f} {memory_mib(part):8.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
