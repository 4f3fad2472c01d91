"""On which of a node's targets a machine's controller is made: the one that has its volumes.

A machine has one controller, and with it LUNs of one target, as with libvirt. Claims of another
target stay block devices, which the machine starts with all the same.
"""

from __future__ import annotations

from csi.kubevirt import machine
from csi.kubevirt.claims import ClaimSource, claim_of, unfit
from csi.objects import Vmi
from csi.targets import Targets
from pydataplane.client import Client


class Placement:
    """Chooses; may be used from any thread."""

    def __init__(self, targets: Targets, cluster: ClaimSource) -> None:
        """Among `targets`; `cluster` tells of claims."""
        self._targets = targets
        self._cluster = cluster

    def target_of(self, vmi: Vmi, lvstore: str = "") -> Client:
        """Returns the target for a machine's controller.

        It is the one with `lvstore` (name or UUID), where that is given. Else it has the first
        claim, as the machine boots them, that can be a LUN; the first target, where there is none.

        Raises:
            Failure: UNAVAILABLE, the API server does not tell of a claim; FAILED_PRECONDITION,
                several targets have the lvstore.
            VolumeNotFoundError: no target has the lvstore.
            TargetUnavailable, RpcError: one that may have it does not say.
        """
        if lvstore:
            return self._targets.store(lvstore).client
        if self._targets.sole is not None:
            return self._targets.sole
        volumes = {volume.name: volume for volume in machine.volumes(vmi)}
        for name in machine.boot_order(vmi):
            if (volume := volumes.get(name)) is None:
                continue
            claim = claim_of(self._cluster, vmi, volume)
            if claim.handle is not None and unfit(volume, claim) is None:
                return self._targets.of(claim.handle)
        return self._targets.clients[0]
