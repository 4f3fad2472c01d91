"""virtlun installed as a user installs it: the DaemonSets of examples/kubernetes in containerd.

Where `driver.Deployment` runs the manifests' commands as processes, here kubelet runs the manifests
themselves, from images that are made here under the names that they have there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.kubernetes import snapshots
from tests.kubernetes.account import NAMESPACE
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.daemonset import IMAGE_PROGRAM
from tests.kubernetes.driver import EXAMPLES, documents
from tests.kubernetes.images import image
from tests.kubernetes.program_image import NAME, program_image
from tests.support.wait import until

SETS = ("virtlun-holder", "virtlun-target", "virtlun-csi")
#: The same image by another name, for updates.
NEXT = "virtlun:0.1.1"
NEXT_NAME = f"docker.io/library/{NEXT}"
#: Where the manifests look for it: the box has a /var/lib of its own.
KUBELET_DIR = Path("/var/lib/kubelet")
READY_DEADLINE_S = 120.0
LVSTORE = "lvs0"


class Installed:
    """The DaemonSets' pods on the one node of a cluster, whose kubelet is in `KUBELET_DIR`."""

    def __init__(self, cluster: Cluster) -> None:
        """Installs as examples/kubernetes/README.md says, and waits until all pods are ready."""
        self.cluster = cluster
        self._import_images()
        snapshots.define(cluster)
        for manifest in ("csidriver", "rbac", "node-policy", "daemonset", "storageclasses"):
            cluster.apply(EXAMPLES / f"{manifest}.yaml")
        for name in SETS:
            self.wait_ready(name)
        self.execute(
            "virtlun-target",
            *("virtlun", "lvstore", "create", LVSTORE),
            *("--file", f"/var/lib/virtlun/{LVSTORE}.img", "--size", "100G"),
        )

    def _import_images(self) -> None:
        node = self.cluster.nodes[0]
        node.import_image(program_image(node.folder / "virtlun.tar", [NAME, NEXT_NAME]))
        for name, spec in self.sidecars().items():
            program = self.cluster.tools.path(name)
            entry = {"Entrypoint": [f"/{name}"]}
            node.import_image(
                image(node.folder / "sidecar.tar", [spec], {name: program}, {}, entry)
            )

    def sidecars(self) -> dict[str, str]:
        """Returns the images of the manifests that are not ours, by their program."""
        text = self.cluster.kubectl(
            *("create", "--dry-run=client", "-o", "json", "-f", EXAMPLES / "daemonset.yaml")
        )
        found = {}
        for daemonset in documents(text):
            for container in daemonset["spec"]["template"]["spec"]["containers"]:
                named = IMAGE_PROGRAM.search(container["image"])
                if named:
                    found[named.group(1)] = container["image"]
        return found

    def pods(self, name: str) -> list[dict[str, Any]]:
        """Returns the pods of a DaemonSet that are not going."""
        found = self.cluster.items("pod", "-n", NAMESPACE, "-l", f"app={name}")
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def pod(self, name: str) -> dict[str, Any]:
        """Returns the pod of a DaemonSet."""
        (pod,) = self.pods(name)
        return pod

    def wait_ready(self, name: str, unlike: str = "") -> str:
        """Waits until a DaemonSet has a ready pod, other than one of that UID; returns its UID."""

        def ready() -> str:
            pods = self.pods(name)
            conditions = pods[0]["status"].get("conditions", []) if len(pods) == 1 else []
            if any(one["type"] == "Ready" and one["status"] == "True" for one in conditions):
                uid = str(pods[0]["metadata"]["uid"])
                return uid if uid != unlike else ""
            return ""

        what = f"a ready pod of {name}"
        try:
            return until(ready, what, deadline_s=READY_DEADLINE_S, every_s=0.2)
        except Exception as error:
            where = ("-n", NAMESPACE, "-l", f"app={name}")
            told = self.cluster.kubectl("describe", "pod", *where, check=False)
            said = self.cluster.kubectl(
                "logs", *where, "--all-containers", "--tail=30", check=False
            )
            raise AssertionError(f"{error}\n{told[-6000:]}\n{said[-3000:]}") from None

    def execute(self, name: str, *words: str, container: str = "") -> str:
        """Runs a command in the pod of a DaemonSet and returns its output."""
        pod = self.pod(name)["metadata"]["name"]
        where = ("-c", container or name)
        return self.cluster.kubectl("-n", NAMESPACE, "exec", pod, *where, "--", *words)

    def update(self, name: str, *, delete: bool) -> None:
        """Gives a DaemonSet's own containers the other image, and waits until the pod has it.

        `delete` its pod first, as an operator does where the set does not do so itself.
        """
        before = self.pod(name)["metadata"]["uid"]
        self.cluster.kubectl(
            *("-n", NAMESPACE, "set", "image", f"daemonset/{name}"),
            *(f"{container}={NEXT}" for container in self.own(name)),
        )
        if delete:
            self.cluster.kubectl("-n", NAMESPACE, "delete", "pod", "-l", f"app={name}")
        self.wait_ready(name, unlike=before)
        for container in self.pod(name)["spec"]["containers"]:
            if container["name"] in self.own(name):
                assert container["image"] == NEXT, json.dumps(container)

    def own(self, name: str) -> list[str]:
        """Returns the containers of a DaemonSet that are of our image."""
        containers = self.pod(name)["spec"]["containers"]
        return [each["name"] for each in containers if each["name"].startswith("virtlun-")]

    def restarts(self) -> dict[str, int]:
        """Returns how often each container was started again."""
        return {
            status["name"]: status["restartCount"]
            for name in SETS
            for pod in self.pods(name)
            for status in pod["status"]["containerStatuses"]
        }

    def remove(self) -> None:
        """Removes the DaemonSets and waits until their pods are gone."""
        self.cluster.kubectl("delete", "--wait=true", "-f", EXAMPLES / "daemonset.yaml")
        for name in SETS:
            where = ("-n", NAMESPACE, "-l", f"app={name}")
            self.cluster.kubectl("wait", "pod", *where, "--for=delete", "--timeout=90s")
