"""What the API server knows of a volume: which node has it, and how large it is to be.

csi-resizer asks any of the drivers for growth, and that one leaves it to the volume's node. So each
node may write a larger capacity into any PersistentVolume. What the volume's node believes is the
claim, which asks for no more than its user wrote.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import structlog

from csi.cluster import Cluster
from csi.clustererrors import ClusterError, NotFoundError
from csi.errors import Code, Failure
from csi.kinds import CLAIM
from csi.objects import PersistentVolume, quantity_bytes

IN_POD = "KUBERNETES_SERVICE_HOST"

log = structlog.get_logger()


class VolumeNodes:
    """Tells of persistent volumes by their handle; may be asked from any thread."""

    def __init__(self, connect: Callable[[], Cluster] | None = None) -> None:
        """Uses `connect` at the first question; by default only in a pod (elsewhere: no answer)."""
        self._connect = connect or (Cluster.connect if IN_POD in os.environ else None)
        self._cluster: Cluster | None = None
        self._mutex = threading.Lock()

    def node_of(self, handle: str) -> str | None:
        """Returns the node that a volume of ours is tied to; None if there is no such volume.

        It is empty for an image of a pool of Ceph, which is no node's.

        Raises:
            Failure: UNAVAILABLE, the API server does not say.
        """
        try:
            found = self._volume(handle)
        except ClusterError as error:
            raise Failure(
                Code.UNAVAILABLE, f"which node has volume {handle} is not known: {error}"
            ) from error
        if found is None:
            return None
        return "" if found.in_pool else found.node

    def capacity_of(self, handle: str) -> int:
        """Returns the bytes that a volume of ours is to have; 0 where nobody says."""
        try:
            found = self._volume(handle)
            asked = self._asked(found)
        except ClusterError as error:
            log.warning("whether a volume is to grow is not known", reason=str(error))
            return 0
        if found is None:
            return 0
        return found.capacity if asked is None else min(found.capacity, asked)

    def asked_of(self, handle: str) -> int | None:
        """Returns the bytes that the claim of a volume of ours asks for; None if it has no claim.

        Raises:
            Failure: UNAVAILABLE, the API server does not say.
        """
        try:
            return self._asked(self._volume(handle))
        except ClusterError as error:
            raise Failure(
                Code.UNAVAILABLE, f"how large volume {handle} is to be is not known: {error}"
            ) from error

    def _asked(self, found: PersistentVolume | None) -> int | None:
        if found is None or found.claim is None:
            return None
        assert self._cluster is not None
        namespace, name = found.claim
        try:
            claim = self._cluster.get(CLAIM, name, namespace)
        except NotFoundError:
            return None
        return quantity_bytes(claim["spec"]["resources"]["requests"]["storage"])

    def _volume(self, handle: str) -> PersistentVolume | None:
        if self._connect is None:
            return None
        with self._mutex:
            self._cluster = self._cluster or self._connect()
        try:
            return self._cluster.volume_by_handle(handle)
        except NotFoundError:
            return None
