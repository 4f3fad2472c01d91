"""What the API server knows of a volume: which node has it, and how large it is to be.

csi-resizer asks any of the drivers for growth, and that one leaves it to the volume's node.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import structlog

from csi.cluster import Cluster, ClusterError, NotFoundError
from csi.errors import Code, Failure
from csi.objects import PersistentVolume

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

        Raises:
            Failure: UNAVAILABLE, the API server does not say.
        """
        try:
            found = self._volume(handle)
        except ClusterError as error:
            raise Failure(
                Code.UNAVAILABLE, f"which node has volume {handle} is not known: {error}"
            ) from error
        return found.node if found else None

    def capacity_of(self, handle: str) -> int:
        """Returns the bytes that a volume of ours is to have; 0 where nobody says."""
        try:
            found = self._volume(handle)
        except ClusterError as error:
            log.warning("whether a volume is to grow is not known", reason=str(error))
            return 0
        return found.capacity if found else 0

    def _volume(self, handle: str) -> PersistentVolume | None:
        if self._connect is None:
            return None
        with self._mutex:
            self._cluster = self._cluster or self._connect()
        try:
            return self._cluster.volume_by_handle(handle)
        except NotFoundError:
            return None
