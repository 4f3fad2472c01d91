"""`python -m tests.kubernetes.kubevirt`: how long a machine waits for a disk, and for its growth.

A real cluster, target and guest (`tests.kubernetes.kubevirt` says what is simulated); medians of
several rounds, in milliseconds since the API server was sent the request. On one machine all
clocks are the same. The guest runs in software here, which makes its own part slow.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console

from tests.kubernetes.cluster import API, TOKEN, Cluster
from tests.kubernetes.driver import Deployment
from tests.kubernetes.kubevirt.claims import MIB, claim, vm_volume
from tests.kubernetes.kubevirt.examples import machine
from tests.kubernetes.kubevirt.installed import installed
from tests.kubernetes.kubevirt.simulator import KubeVirt, Machine
from tests.support.agent import Agent
from tests.support.wait import until

OUT = Console(highlight=False, soft_wrap=True)
ROUNDS = 7
STEP_MIB = 16
DEADLINE_S = 60.0
VM_VOLUMES = "/apis/virtlun.dev/v1alpha1/namespaces/default/vmvolumes"
CLAIMS = "/api/v1/namespaces/default/persistentvolumeclaims"

#: Sends one request from inside of the box, and prints when (seconds since the epoch).
SEND = """\
import http.client, ssl, sys, time
method, path, kind, token, ca, host = sys.argv[1:]
body = sys.stdin.read()
secure = ssl.create_default_context(cafile=ca)
link = http.client.HTTPSConnection(host, context=secure)
link.connect()
words = {"Authorization": f"Bearer {token}", "Content-Type": kind}
at = time.time()
link.request(method, path, body, words)
answer = link.getresponse()
text = answer.read()
assert answer.status < 300, text
print(at)
"""

Figures = dict[str, list[float]]


class Bench:
    """One running machine, and what is measured of it."""

    def __init__(self, vm: Machine, agent: Agent) -> None:
        """Measures a machine that runs."""
        self.vm = vm
        self.agent = agent
        self.cluster = vm.cluster
        self.client = vm.kubevirt.deployment.client
        self.figures: Figures = {}

    def send(self, method: str, path: str, body: str, kind: str = "application/json") -> float:
        """Sends a request to the API server; returns when, in seconds since the epoch."""
        words = (method, path, kind, TOKEN, self.cluster.pki.ca, API.removeprefix("https://"))
        done = self.cluster.box.run(sys.executable, "-c", SEND, *words, stdin=body)
        return float(done.stdout)

    def note(self, name: str, begun: float, ended: float) -> None:
        """Keeps a time, in milliseconds."""
        self.figures.setdefault(name, []).append((ended - begun) * 1000)

    def lun(self, target: int) -> dict[str, Any]:
        """Returns what the target says of a LUN of the machine; nothing where there is none."""
        (found,) = self.client.call("vhost_get_controllers", name=f"pod-{self.vm.pod_uid}")
        for one in found["backend_specific"]["scsi"]:
            if one["scsi_dev_num"] == target:
                return dict(one["luns"][0])
        return {}

    def until(self, told: Callable[[], Any], what: str) -> Any:
        """Returns what is true at last."""
        return until(told, what, deadline_s=DEADLINE_S, every_s=0.01)

    def attach(self, number: int) -> None:
        """A VmVolume is made for a claim that is bound, and deleted."""
        name = f"figure-{number}"
        self.cluster.apply(claim(name, storage_class="virtlun-immediate"))
        self.cluster.wait_phase(f"pvc/{name}", "Bound")
        begun = self.send("POST", VM_VOLUMES, vm_volume(name, "vm", name))
        seen = self.until(
            lambda: (lun := self.lun(1)) and lun["guest_seen_at"] and lun, "the guest to see it"
        )
        self.note("VmVolume made: event in the guest's ring", begun, seen["event_at"])
        self.note("VmVolume made: guest has read the disk's size", begun, seen["guest_seen_at"])
        self.agent.wait_for("ls -d /sys/bus/scsi/devices/*:0:1:0/block/*")
        begun = self.send("DELETE", f"{VM_VOLUMES}/{name}", "")
        self.until(lambda: not self.lun(1), "the LUN to go")
        self.note("VmVolume deleted: LUN gone", begun, time.time())
        self.cluster.wait(f"vmvolume/{name}", "delete")
        self.cluster.delete("pvc", name)
        self.agent.wait_for("! ls -d /sys/bus/scsi/devices/*:0:1:0")

    def grow(self, number: int) -> None:
        """The claim that the machine has booted from grows."""
        size = 64 + STEP_MIB * (number + 1)
        seen: list[float] = []

        def watch() -> None:
            self.agent.run(
                "while read -r size < /sys/block/sda/size && "
                f'[ "$size" != {size * MIB // 512} ]; do :; done',
                deadline_s=DEADLINE_S,
            )
            seen.append(time.time())

        watching = threading.Thread(target=watch)
        watching.start()
        before = self.lun(0)["resize_event_at"]
        body = json.dumps({"spec": {"resources": {"requests": {"storage": f"{size}Mi"}}}})
        begun = self.send("PATCH", f"{CLAIMS}/boot", body, "application/merge-patch+json")
        watching.join()
        told = self.until(
            lambda: (at := self.lun(0)["resize_event_at"]) != before and at, "the event"
        )
        self.note("claim grown: event in the guest's ring", begun, told)
        self.note("claim grown: guest has the new size", begun, seen[0])
        self.cluster.wait("pvc/boot", f"jsonpath={{.status.capacity.storage}}={size}Mi")


def show(figures: Figures) -> None:
    """Prints them."""
    OUT.print(f"{'milliseconds':<48}{'median':>8}{'least':>8}{'most':>8}{'rounds':>8}")
    for name, found in figures.items():
        middle, least, most = statistics.median(found), min(found), max(found)
        OUT.print(f"{name:<48}{middle:>8.0f}{least:>8.0f}{most:>8.0f}{len(found):>8}")


def main() -> int:
    """Measures; returns the exit status."""
    parser = argparse.ArgumentParser(prog="tests.kubernetes.kubevirt")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parser.parse_args().rounds
    if os.geteuid() != 0:
        OUT.print("this runs a private Kubernetes node: run it as root", style="red")
        return 1
    with Cluster() as cluster, Deployment(cluster) as deployment:
        kubevirt = KubeVirt(cluster, deployment)
        with installed(deployment), machine(kubevirt) as vm:
            bench = Bench(vm, vm.start())
            for number in range(rounds):
                with OUT.status(f"round {number + 1} of {rounds}"):
                    bench.attach(number)
                    bench.grow(number)
            vm.stop()
            show(bench.figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
