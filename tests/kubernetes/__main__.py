"""`make demo-kubernetes`: claims, pods and a virtual machine on a real node, told as it goes."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait

from rich.console import Console

from tests.kubernetes import snapshots
from tests.kubernetes.account import NAMESPACE
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.driver import EXAMPLES, Deployment
from tests.kubernetes.events import events
from tests.kubernetes.kubevirt.claims import claim
from tests.kubernetes.kubevirt.demo import MachineStory
from tests.kubernetes.tools import ToolsError, build
from tests.support.wait import until

OUT = Console(highlight=False, soft_wrap=True)
SIZE = ("blockdev", "--getsize64", "/dev/virtlun")
WRITE = "printf '%-4096s' '{}\n' | dd of=/dev/virtlun bs=4096 count=1 conv=fsync iflag=fullblock"
AWAY_S = 3
READ = "dd if=/dev/virtlun bs=4096 count=1 iflag=direct 2>/dev/null | head -n 1"
BAD_CLASS = """\
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: bad}
provisioner: csi.virtlun.dev
"""


class Story:
    """The demo's steps, each a sentence and what it shows."""

    def __init__(self, cluster: Cluster, deployment: Deployment) -> None:
        """Tells of this cluster."""
        self.cluster = cluster
        self.deployment = deployment

    def file_system(self) -> str:
        """A claim and a pod: the volume is made, formatted and mounted when the pod comes"""
        self.cluster.apply(EXAMPLES / "pod-filesystem.yaml")
        self.cluster.wait("pod/writer", "condition=Ready")
        return self.cluster.execute("writer", "df", "-h", "/data")

    def growth(self) -> str:
        """The claim asks for more: the file system grows under the running pod"""
        self.grow("data", "600Mi")
        return self.cluster.execute("writer", "df", "-h", "/data")

    def grow(self, name: str, size: str) -> None:
        """Asks for more and waits until it is there."""
        patch = f'{{"spec":{{"resources":{{"requests":{{"storage":"{size}"}}}}}}}}'
        self.cluster.kubectl("patch", "pvc", name, "-p", patch)
        self.cluster.wait(f"pvc/{name}", f"jsonpath={{.status.capacity.storage}}={size}")

    def snapshot(self) -> str:
        """A snapshot of the claim while its pod writes"""
        self.cluster.shell("writer", "echo before the snapshot > /data/file; sync")
        self.cluster.apply(EXAMPLES / "snapshot.yaml")
        snapshots.wait_ready(self.cluster, "data")
        self.cluster.shell("writer", "echo after it > /data/file; sync")
        return self.cluster.kubectl("get", "volumesnapshot", "data")

    def restore(self) -> str:
        """A larger claim of the snapshot and a clone of the claim in a pod; the snapshot can go"""
        self.cluster.apply(EXAMPLES / "pod-restored.yaml")
        self.cluster.wait("pod/reader", "condition=Ready")
        self.cluster.delete("volumesnapshot", "data")
        said = self.cluster.shell(
            "reader", "tail -n 1 /restored/file /cloned/file; df -h /restored /cloned"
        )
        restored, cloned = said.split("/cloned/file", 1)
        assert "before the snapshot" in restored and "after it" in cloned, said
        return said

    def block(self) -> str:
        """A claim that is bound at once, a raw block device in a pod; it grows there"""
        self.cluster.apply(EXAMPLES / "pod-block.yaml")
        self.cluster.wait_phase("pvc/disk", "Bound")
        self.cluster.wait("pod/raw", "condition=Ready")
        before = self.cluster.execute("raw", *SIZE).strip()
        self.grow("disk", "128Mi")
        after = self.cluster.execute("raw", *SIZE).strip()
        return f"/dev/virtlun had {before} bytes and has {after}"

    def ephemeral(self) -> str:
        """A volume that is a part of its pod: it comes and goes with it"""
        manifest = EXAMPLES / "pod-ephemeral.yaml"
        self.cluster.apply(manifest)
        self.cluster.wait("pod/scratch", "condition=Ready")
        said = self.cluster.kubectl("get", "pvc", "scratch-scratch")
        self.cluster.delete("-f", str(manifest))
        self.cluster.wait("pvc/scratch-scratch", "delete")
        return f"{said}gone with the pod"

    def shared(self) -> str:
        """One block device in two pods at once (ReadWriteMany)"""
        manifest = EXAMPLES / "pods-shared-block.yaml"
        self.cluster.apply(manifest)
        for pod in ("left", "right"):
            self.cluster.wait(f"pod/{pod}", "condition=Ready")
        self.cluster.shell("left", WRITE.format("from the left"))
        said = self.cluster.shell("right", READ)
        self.cluster.delete("-f", str(manifest))
        return f"the right one reads: {said}"

    def capacity(self) -> str:
        """What the scheduler is told of the node's free space"""
        columns = "CLASS:.storageClassName,FREE:.capacity,NODE:.nodeTopology.matchLabels"
        words = ("get", "csistoragecapacities", "-n", NAMESPACE, "-o", f"custom-columns={columns}")
        found = until(
            lambda: self.cluster.kubectl(*words, check=False).splitlines()[1:],
            "the capacity objects",
        )
        return "\n".join(found)

    def refused(self) -> str:
        """A class without lvstore: the claim's events say what is wrong"""
        with (
            self.cluster.applied(BAD_CLASS),
            self.cluster.applied(claim("bad", storage_class="bad")),
        ):
            return str(
                until(
                    lambda: next(
                        (
                            line
                            for line in events(self.cluster, "bad").splitlines()
                            if "lvstore" in line
                        ),
                        "",
                    ),
                    "the event",
                )
            )

    def crash(self) -> str:
        """The driver is killed with -9 while it makes a volume: no pod notices, the claim is bound"""  # noqa: E501
        driver = self.deployment.parts["virtlun-csi"]
        before = driver.restarts
        begun = self.deployment.asked("CreateVolume")
        self.cluster.apply(claim("made", storage_class="virtlun-immediate"))
        until(begun, "the call", every_s=0.002)
        self.deployment.kill("virtlun-csi")
        said = self.cluster.shell("writer", "echo still here > /data/f; cat /data/f")
        self.deployment.wait_ready()
        self.cluster.wait_phase("pvc/made", "Bound")
        return f"the pod: {said}restarts of the driver: {driver.restarts - before}; pvc/made: Bound"

    def target(self) -> str:
        """The target is killed: I/O waits for the next one; what was written is there for a new pod"""  # noqa: E501
        self.cluster.shell("raw", WRITE.format("safe"))
        script = f"{{ {WRITE.format('late')}; }} 2>&1 | tail -n 1"
        with ThreadPoolExecutor(1) as threads:
            with self.deployment.without("virtlun-target"):
                writing = threads.submit(self.cluster.shell, "raw", script, check=False)
                wait([writing], AWAY_S)
                meanwhile = "ended" if writing.done() else "waits"
            self.deployment.wait_ready()
            said = writing.result()  # before Linux 6.9 the device is dead instead
        self.cluster.delete("pod", "raw")
        _, pod = (EXAMPLES / "pod-block.yaml").read_text().split("\n---\n")
        self.cluster.apply(pod)
        self.cluster.wait("pod/raw", "condition=Ready")
        now = self.cluster.shell("raw", READ)
        return f"while it was away, a write {meanwhile}; then: {said}the new pod reads: {now}"

    def look(self) -> str:
        """What Kubernetes and the target say of it"""
        lvols = "\n".join(
            f"lvol {volume.path}: {volume.size >> 20} MiB"
            for volume in self.deployment.volumes.volumes()
        )
        return self.cluster.kubectl("get", "pvc,pod") + lvols

    def end(self) -> str:
        """All of it is deleted: lvols, exports, loop devices and mounts are gone"""
        self.deployment.sweep()
        until(lambda: not self.deployment.volumes.volumes(), "no volume")
        self.deployment.wait_clean()
        return str(self.deployment.census())


def main() -> int:
    """Runs the steps; returns the exit status."""
    if os.geteuid() != 0:
        OUT.print("the demo runs a private Kubernetes node: run it as root", style="red")
        return 1
    begun = time.monotonic()
    try:
        tools = build()
    except ToolsError as error:
        OUT.print(str(error), style="red")
        return 1
    with OUT.status("starting Kubernetes"):
        cluster = Cluster(tools=tools)
    with cluster:
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in cluster.timings.items())
        OUT.print(f"[bold]Kubernetes[/] is up in {cluster.scratch} (ready after: {parts})\n")
        with OUT.status("starting virtlun on it"):
            deployment = Deployment(cluster)
        with (
            deployment,
            snapshots.controller(cluster),
            MachineStory(cluster, deployment) as machine,
        ):
            story = Story(cluster, deployment)
            steps = (
                *(story.file_system, story.snapshot, story.restore, story.growth),
                *(story.block, story.ephemeral, story.shared),
                *(story.capacity, story.refused, story.crash, story.target),
                *(machine.install, machine.fill, machine.boot, machine.attach),
                *(machine.growth, machine.release, machine.end, story.look, story.end),
            )
            for number, step in enumerate(steps, 1):
                OUT.print(f"[bold cyan]{number}. {step.__doc__}[/]")
                at = time.monotonic()
                with OUT.status("..."):
                    shown = step()
                for line in shown.splitlines():
                    OUT.print(f"    {line}", markup=False)
                OUT.print(f"    [dim]{time.monotonic() - at:.1f} s[/]\n")
    OUT.print(f"[bold green]done in {time.monotonic() - begun:.0f} s[/]; everything is removed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
