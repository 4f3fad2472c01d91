"""`make demo-kubernetes`: claims, pods and a virtual machine on a real node, told as it goes."""

from __future__ import annotations

import os
import sys
import time

from rich.console import Console

from tests.kubernetes.cluster import Cluster
from tests.kubernetes.driver import EXAMPLES, Deployment
from tests.kubernetes.kubevirt.demo import MachineStory
from tests.kubernetes.sandbox import wait_for
from tests.kubernetes.tools import ToolsError, build

OUT = Console(highlight=False, soft_wrap=True)


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
        patch = '{"spec":{"resources":{"requests":{"storage":"600Mi"}}}}'
        self.cluster.kubectl("patch", "pvc", "data", "-p", patch)
        self.cluster.wait("pvc/data", "jsonpath={.status.capacity.storage}=600Mi")
        return self.cluster.execute("writer", "df", "-h", "/data")

    def block(self) -> str:
        """A raw block device in a pod"""
        self.cluster.apply(EXAMPLES / "pod-block.yaml")
        self.cluster.wait("pod/raw", "condition=Ready")
        size = self.cluster.execute("raw", "blockdev", "--getsize64", "/dev/virtlun")
        return f"/dev/virtlun has {size.strip()} bytes"

    def crash(self) -> str:
        """The driver is killed with -9: pods do not notice, and it comes back"""
        self.deployment.kill("virtlun-csi")
        said = self.cluster.execute("writer", "sh", "-c", "echo still here > /data/f; cat /data/f")
        self.deployment.wait_ready()
        return said

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
        wait_for(lambda: not self.deployment.volumes.volumes(), "no volume", seconds=60)
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
        with deployment, MachineStory(cluster, deployment) as machine:
            story = Story(cluster, deployment)
            steps = (
                *(story.file_system, story.growth, story.block, story.crash),
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
