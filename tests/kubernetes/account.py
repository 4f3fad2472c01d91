"""The driver's account on a test cluster, and tokens of it as kubelet gives them to pods."""

from __future__ import annotations

import json

from tests.kubernetes.cluster import Cluster

NAMESPACE = "virtlun"
ACCOUNT = "virtlun-csi"


def make_pod(cluster: Cluster, name: str, node: str) -> None:
    """Makes a pod of a node that no kubelet starts: the account's token is bound to it.

    Its containers are processes of the node here. Kubelet refuses it for its selector.
    """
    spec = {
        "serviceAccountName": ACCOUNT,
        "nodeName": node,
        "nodeSelector": {"tests": "runs-as-processes"},
        "tolerations": [{"operator": "Exists"}],
        "containers": [{"name": "none", "image": "busybox:stable"}],
    }
    meta = {"name": name, "namespace": NAMESPACE}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}
    cluster.kubectl("create", "-f", "-", stdin=json.dumps(pod))


def token(cluster: Cluster, *bound: str) -> str:
    """Returns a token for a day, bound to an object of a KIND and NAME, or (no words) to none.

    One of a pod tells the API server the pod's name and its node, one of a node that alone.
    """
    options = ("--bound-object-kind", "--bound-object-name") if bound else ()
    words = [f"{option}={word}" for option, word in zip(options, bound, strict=True)]
    create = ("create", "token", ACCOUNT, "-n", NAMESPACE, "--duration=24h")
    return cluster.kubectl(*create, *words).strip()
