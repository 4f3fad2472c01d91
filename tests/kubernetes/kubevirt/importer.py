"""A claim filled with a disk image, as KubeVirt's Containerized Data Importer does.

A pod has the claim as a block device, writes the image to it, flushes, and ends. CDI's image comes
over the network; here it is a file of the node. Where a claim waits for its first consumer,
KubeVirt first makes a pod that is placed as the machine's would be; here that is the same pod.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.kubernetes.cluster import Cluster
from tests.kubernetes.images import BUSYBOX_IMAGE

DEVICE = "/dev/cdi-block-volume"


def fill(cluster: Cluster, claim: str, image: Path, node: str | None = None) -> None:
    """Writes an image to a claim of mode Block, and removes the pod that did it.

    The pod runs on `node`, by default on any that can have it.
    """
    name = f"importer-{claim}"
    cluster.apply(json.dumps(_pod(name, claim, image, node)))
    cluster.wait_phase(f"pod/{name}", "Succeeded")
    cluster.delete("pod", name)


def _pod(name: str, claim: str, image: Path, node: str | None) -> dict[str, object]:
    script = f"dd if=/image of={DEVICE} bs=1M conv=fsync"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "nodeSelector": {"kubernetes.io/hostname": node} if node else {},
            "containers": [
                {
                    "name": "importer",
                    "image": BUSYBOX_IMAGE,
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["sh", "-c", script],
                    "volumeMounts": [{"name": "image", "mountPath": "/image", "readOnly": True}],
                    "volumeDevices": [{"name": "claim", "devicePath": DEVICE}],
                }
            ],
            "volumes": [
                {"name": "image", "hostPath": {"path": str(image), "type": "File"}},
                {"name": "claim", "persistentVolumeClaim": {"claimName": claim}},
            ],
        },
    }
