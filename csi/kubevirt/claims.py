"""The claims of a virtual machine: what the API server says of each, and which can be a LUN."""

from __future__ import annotations

from typing import Protocol

from csi.clustererrors import ClusterError
from csi.errors import Code, Failure
from csi.kubevirt.machine import MachineVolume
from csi.objects import Claim, Vmi


class ClaimSource(Protocol):
    """What of csi.cluster.Cluster is needed for it."""

    def claim(self, namespace: str, name: str) -> Claim:
        """Returns a claim with the volume that it is bound to."""


def claim_of(cluster: ClaimSource, vmi: Vmi, volume: MachineVolume) -> Claim:
    """Returns the claim of a machine's volume.

    Raises:
        Failure: UNAVAILABLE, the API server does not say.
    """
    try:
        return cluster.claim(vmi.namespace, volume.claim)
    except ClusterError as error:
        raise Failure(
            Code.UNAVAILABLE,
            f"volume {volume.name} of virtual machine {vmi.namespace}/{vmi.name} is not known: "
            f"{error}",
        ) from error


def unfit(volume: MachineVolume, claim: Claim) -> str | None:
    """Returns why a claim of ours cannot be a LUN, whatever its target, or None if it can."""
    if not claim.block:
        return "its volumeMode is Filesystem, and only a Block claim can be a LUN"
    if claim.shared and claim.volume is not None and claim.volume.in_pool:
        return (
            "it is ReadWriteMany and of a pool of Ceph, so that the machine can be migrated, which "
            "one with a LUN cannot; ask for ReadWriteOnce to have a LUN"
        )
    return volume.unsuited
