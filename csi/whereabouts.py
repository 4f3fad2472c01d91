"""Which node has a volume: asked of the API server, since csi-resizer asks any of the drivers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from csi.cluster import Cluster, ClusterError, NotFoundError
from csi.errors import Code, Failure

IN_POD = "KUBERNETES_SERVICE_HOST"


class Whereabouts:
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
        if self._connect is None:
            return None
        try:
            with self._mutex:
                self._cluster = self._cluster or self._connect()
            return self._cluster.volume_by_handle(handle).node
        except NotFoundError:
            return None
        except ClusterError as error:
            raise Failure(
                Code.UNAVAILABLE, f"which node has volume {handle} is not known: {error}"
            ) from error
