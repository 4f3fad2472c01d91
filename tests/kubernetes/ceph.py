"""A real Ceph on a test cluster's nodes, and their targets with a pool of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydataplane.volumes import Volumes
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.driver import EXAMPLES, Deployment, documents
from tests.support.ceph import COMMAND_DEADLINE_S, POOL, Ceph
from tests.support.examples import used
from tests.support.scratch import short_directory
from tests.support.wait import until

PATCH = EXAMPLES / "ceph/target.patch.yaml"
STORE = "ceph0"
"""As the example's class names it."""
KEY = "csi.virtlun.dev/pool-"


class NodesCeph(Ceph):
    """One whose daemons are in the box of the nodes, and end with that."""

    def __init__(self, directory: Path, cluster: Cluster, **options: Any) -> None:
        """Makes and starts it; the options are those of any Ceph."""
        self._cluster = cluster
        super().__init__(directory, **options)

    def tried(
        self, *command: str, deadline_s: float = COMMAND_DEADLINE_S
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command of Ceph's in the box."""
        done = self._cluster.box.run(
            *command, check=False, deadline_s=deadline_s, env={"CEPH_CONF": str(self.conf)}
        )
        return subprocess.CompletedProcess(command, done.returncode, done.stdout, done.stderr)

    def stop(self) -> None:
        """Ends all of it; the daemons' numbers are the box's."""
        self._went_down()
        for daemon in ("osd.0", "mon.a"):
            number = str(self.pid(daemon))
            self._cluster.box.run("kill", "-KILL", number)


@contextmanager
def ceph_of(cluster: Cluster, **options: Any) -> Iterator[NodesCeph]:
    """A Ceph, with options of any, for the duration of a block."""
    with short_directory("ceph-", "/var/tmp") as directory:
        made = NodesCeph(directory, cluster, **options)
        try:
            yield made
        finally:
            made.stop()


@contextmanager
def with_pool(deployment: Deployment, ceph: Ceph) -> Iterator[str]:
    """A node has the pool for the duration of a block: by the patch, and the command; its UUID.

    Its driver and sidecars begin anew, so that Kubernetes hears of it. Several nodes are one
    machine here: each driver sees the loop devices over its own target's files alone.
    """
    target = deployment.parts["virtlun-target"]
    before = target.container
    words = ("patch", "--local", "-f", EXAMPLES / "daemonset.yaml", "--type=json", "-o", "json")
    text = deployment.cluster.kubectl(*words, f"--patch-file={used(PATCH)}")
    patched = next(each for each in documents(text) if each["metadata"]["name"] == before.name)
    [container] = deployment.containers_of(patched)
    assert "--rbd" in container.arguments
    folder = deployment.run_dir / "export"
    own: list[Path | str] = [sys.executable, "-m", "tests.support.own_loops", folder]
    with (
        deployment.programs_as({"virtlun-csi": [*own, "csi.cli"]}),
        deployment.programs_as({"virtlun-csi-helper": [*own, "csi.host.cli"]}),
    ):
        target.container = container
        _begin_anew(deployment, "virtlun-target")
        deployment.wait_ready()
        store = Volumes(deployment.client).add_pool(STORE, POOL, conf=ceph.conf)
        for name in ("virtlun-csi-helper", "virtlun-csi", "csi-provisioner"):
            _begin_anew(deployment, name)
        deployment.wait_ready()
        until(lambda: f"{KEY}{store.uuid}" in _keys(deployment), "the pool's topology key")
        yield store.uuid
        Volumes(deployment.client).remove_pool(STORE)
    target.container = before
    for name in ("virtlun-target", "virtlun-csi-helper", "virtlun-csi", "csi-provisioner"):
        _begin_anew(deployment, name)
    deployment.wait_ready()
    node = deployment.node.name
    deployment.cluster.kubectl("label", "node", node, f"{KEY}{store.uuid}-")


def _begin_anew(deployment: Deployment, name: str) -> None:
    """Ends a part in order, which comes back as it is configured now."""
    part = deployment.parts[name]
    restarts = part.restarts
    deployment.stop(name)
    until(lambda: part.restarts > restarts, f"the restart of {name}", deadline_s=90)


def _keys(deployment: Deployment) -> list[str]:
    drivers = deployment.cluster.get("csinode", deployment.node.name)["spec"]["drivers"] or []
    return [key for each in drivers for key in each["topologyKeys"]]
