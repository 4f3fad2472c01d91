"""What the API server knows of a volume: which node has it, how large it is to be, its class.

csi-resizer asks any of the drivers for growth or for another VolumeAttributesClass, and that one
leaves it to the volume's node. So each node may write a larger capacity, or another class, into any
PersistentVolume. What the volume's node believes is the claim, which asks for no more than its user
wrote.

A node's credentials may also make PersistentVolumes of images of pools, with any handle. So of a
volume that is here only that PersistentVolume is asked whose word counts (`VolumeNodes.of`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import structlog

from csi import DRIVER_NAME, attributes
from csi.attributes import Attributes
from csi.cluster import Cluster
from csi.clustererrors import ClusterError, NotFoundError
from csi.errors import Code, Failure, invalid, precondition
from csi.kinds import ATTRIBUTES_CLASS, CLAIM
from csi.objects import Object, PersistentVolume, quantity_bytes
from csi.volumes import Owned

IN_POD = "KUBERNETES_SERVICE_HOST"

log = structlog.get_logger()


class VolumeNodes:
    """Tells of persistent volumes; may be asked from any thread."""

    def __init__(self, node: str, connect: Callable[[], Cluster] | None = None) -> None:
        """Is asked by the driver of `node`.

        Uses `connect` at the first question; by default only in a pod (elsewhere: no answer).
        """
        self._node = node
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

    def of(self, owned: Owned) -> PersistentVolume | None:
        """Returns the PersistentVolume whose word counts for a volume of this node, or None.

        It is the one that has the volume's name, as csi-provisioner gives it; another one of the
        same handle only where there is none. It says rightly whether it is of a pool, and where it
        is not, names this node: one of an lvstore only this node's credentials can make.

        Raises:
            ClusterError: the API server does not say.
        """
        if self._connect is None:
            return None
        handle = owned.volume.uuid
        try:
            found: PersistentVolume | None = self._api().volume(owned.owner.name)
        except NotFoundError:
            found = None
        if found is None or not found.ours or found.handle != handle:
            found = self._volume(handle)
        return found if found is not None and self._fits(found, owned) else None

    def counts(self, volume: PersistentVolume, owned: Owned) -> bool:
        """Whether a PersistentVolume is the one whose word counts for a volume of this node.

        Raises:
            ClusterError: the API server does not say.
        """
        if volume.name == owned.owner.name:
            return self._fits(volume, owned)
        found = self.of(owned) if self._fits(volume, owned) else None
        return found is not None and found.name == volume.name

    def check_counts(self, name: str, owned: Owned) -> None:
        """Checks that the PersistentVolume of this name is the one whose word counts for a volume.

        Raises:
            Failure: FAILED_PRECONDITION, it is not; UNAVAILABLE, the API server does not say.
        """
        if self._connect is None:
            return
        handle = owned.volume.uuid
        try:
            found = self.counts(self._api().volume(name), owned)
        except NotFoundError:
            found = False
        except ClusterError as error:
            raise Failure(
                Code.UNAVAILABLE, f"whether volume {handle} is that of {name} is not known: {error}"
            ) from error
        if not found:
            raise precondition(
                f"PersistentVolume {name} has no say in volume {handle}: that is not of the node "
                "or pool that it names, or another one has its name; delete it"
            )

    def _fits(self, volume: PersistentVolume, owned: Owned) -> bool:
        if not volume.ours or volume.handle != owned.volume.uuid:
            return False
        of_pool = owned.volume.pool is not None
        return volume.in_pool == of_pool and (of_pool or volume.node == self._node)

    def capacity_of(self, owned: Owned) -> int:
        """Returns the bytes that a volume of this node is to have; 0 where nobody says."""
        try:
            found = self.of(owned)
            asked = self._asked(found)
        except ClusterError as error:
            log.warning("whether a volume is to grow is not known", reason=str(error))
            return 0
        if found is None:
            return 0
        return found.capacity if asked is None else min(found.capacity, asked)

    def asked_of(self, owned: Owned) -> int | None:
        """Returns the bytes that the claim of a volume here asks for; None if it has no claim.

        Raises:
            Failure: UNAVAILABLE, the API server does not say.
        """
        try:
            return self._asked(self.of(owned))
        except ClusterError as error:
            handle = owned.volume.uuid
            raise Failure(
                Code.UNAVAILABLE, f"how large volume {handle} is to be is not known: {error}"
            ) from error

    def class_of(self, owned: Owned) -> Attributes | None:
        """Returns what the class of a volume of this node says; None where nobody does."""
        try:
            found = self.of(owned)
            return self.class_for(found) if found is not None else None
        except (ClusterError, Failure) as error:
            log.warning("how a volume is to be limited is not known", reason=str(error))
            return None

    def class_for(self, volume: PersistentVolume) -> Attributes | None:
        """Returns what the class says that a volume and its claim agree on.

        None: it has no class; or its claim asks for another one, is not bound to it yet, or is
        gone; or the class is gone.

        Raises:
            ClusterError: the API server does not say.
            Failure: INVALID_ARGUMENT, the class is not one of ours.
        """
        name = volume.attributes_class
        claim = self._claim(volume) if name is not None else None
        if name is None or claim is None:
            return None
        asked = claim["spec"]
        if (asked.get("volumeName"), asked.get("volumeAttributesClassName")) != (volume.name, name):
            return None
        try:
            found = self._api().get(ATTRIBUTES_CLASS, name)
        except NotFoundError:
            return None
        if found["driverName"] != DRIVER_NAME:
            raise invalid(f"VolumeAttributesClass {name} is of {found['driverName']}: name another")
        return attributes.read(found.get("parameters") or {})

    def _asked(self, found: PersistentVolume | None) -> int | None:
        claim = self._claim(found) if found is not None else None
        if claim is None:
            return None
        return quantity_bytes(claim["spec"]["resources"]["requests"]["storage"])

    def _claim(self, volume: PersistentVolume) -> Object | None:
        """Returns the claim that a volume is reserved for, None if there is none."""
        if volume.claim is None:
            return None
        namespace, name = volume.claim
        try:
            return self._api().get(CLAIM, name, namespace)
        except NotFoundError:
            return None

    def _volume(self, handle: str) -> PersistentVolume | None:
        if self._connect is None:
            return None
        try:
            return self._api().volume_by_handle(handle)
        except NotFoundError:
            return None

    def _api(self) -> Cluster:
        assert self._connect is not None
        with self._mutex:
            self._cluster = self._cluster or self._connect()
        return self._cluster
