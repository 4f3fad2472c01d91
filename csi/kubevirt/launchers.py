"""Whose pods get a controller: launchers of virtual machines, and nobody else's.

Any user may write an inline volume of any driver into a pod. Who gets one of ours gets a vhost-user
socket, behind which the target maps what the pod says is its memory. So the driver looks at the pod
itself, and not only at what kubelet tells; that nobody but KubeVirt makes such a pod is the matter
of an admission policy (examples/kubernetes/kubevirt/launchers-only.yaml).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from csi.cluster import Cluster
from csi.clustererrors import ClusterError, NotFoundError
from csi.errors import Code, Failure, precondition
from csi.kinds import POD
from csi.kubevirt.pods import Pod
from csi.objects import Vmi

LABEL = "kubevirt.io"
LAUNCHER = "virt-launcher"
KIND = "VirtualMachineInstance"
GROUP = "kubevirt.io/"


class Launchers:
    """Asks the API server; may be used from any thread."""

    def __init__(self, cluster: Cluster) -> None:
        """Uses `cluster` for every question."""
        self._cluster = cluster

    def machine_of(self, pod: Pod) -> Vmi:
        """Returns the virtual machine that there is and a pod is the launcher of.

        Raises:
            Failure: FAILED_PRECONDITION, it is not; UNAVAILABLE, the API server does not say.
        """
        about = f"pod {pod.namespace}/{pod.name}"
        try:
            found = self._cluster.get(POD, pod.name, pod.namespace)
            if found["metadata"]["uid"] != pod.uid:
                raise precondition(f"{about} is another one now: kubelet asks for the earlier one")
            owner = _machine_of(found["metadata"])
            if owner is None:
                raise precondition(
                    f"{about} is no launcher of a virtual machine (label {LABEL}={LAUNCHER}, "
                    f"controlled by a {KIND}): give ordinary pods claims instead of this driver's "
                    "inline volume"
                )
            machine = self._cluster.vmi(pod.namespace, owner["name"])
            if machine.uid != owner["uid"]:
                raise precondition(
                    f"{about} is the launcher of an earlier virtual machine {owner['name']}: "
                    "delete the pod"
                )
            return machine
        except NotFoundError as error:
            raise precondition(f"{about} gets no controller: {error}") from error
        except ClusterError as error:
            raise Failure(
                Code.UNAVAILABLE, f"whether {about} is a launcher is not known: {error}"
            ) from error


def _machine_of(meta: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the reference to the machine that a launcher's pod is of, by the pod's metadata."""
    if (meta.get("labels") or {}).get(LABEL) != LAUNCHER:
        return None
    for owner in meta.get("ownerReferences") or ():
        ours = owner["kind"] == KIND and owner["apiVersion"].startswith(GROUP)
        if ours and owner.get("controller"):
            found: Mapping[str, Any] = owner
            return found
    return None
