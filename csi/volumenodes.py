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
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

from csi import DRIVER_NAME, LVSTORE_KEY, RECEIVED_KEY, attributes
from csi.attributes import Attributes
from csi.cluster import READ_MAX, Cluster
from csi.clustererrors import ClusterError, NotFoundError
from csi.counting import disputed, node_that_counts
from csi.errors import Code, Failure, invalid, precondition
from csi.kinds import ATTRIBUTES_CLASS, CLAIM, STORAGE_CLASS, VOLUME
from csi.objects import Object, PersistentVolume, quantity_bytes
from csi.volumeindex import VolumeIndex
from csi.volumes import OwnedVolume

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
        self.index = VolumeIndex()
        """Filled by whoever watches PersistentVolumes (csi.classwatch)."""
        self._mutex = threading.Lock()

    def node_of(self, handle: str) -> str | None:
        """Returns the node that a volume of ours is tied to; None if there is no such volume.

        It is empty for an image of a pool of Ceph, which is no node's.

        Raises:
            Failure: UNAVAILABLE, the API server does not say.
        """
        if self._connect is None:
            return None
        try:
            found = self._of(handle)
            if not found and self.index.names(handle) is not None:
                found = self._api().volumes_of(handle)
        except ClusterError as error:
            raise Failure(
                Code.UNAVAILABLE, f"which node has volume {handle} is not known: {error}"
            ) from error
        placed = _of_lvstores(found)
        if not placed:
            return "" if found else None
        return node_that_counts(handle, disputed(placed)) or placed[0].node

    @property
    def asks(self) -> bool:
        """Whether there is an API server to be asked."""
        return self._connect is not None

    def placing(
        self, handle: str, name: str = "", *, certain: bool = False
    ) -> list[PersistentVolume]:
        """Returns the PersistentVolumes of a volume of an lvstore, which say on which node it is.

        `name` is that of one which may be among them. That there is none is `certain` if it has to
        be: then all are listed, where the index has none. It may lack one that was just made, or
        for as long as the watch is cut off.

        Raises:
            Failure: UNAVAILABLE, the API server does not say.
        """
        if self._connect is None:
            return []
        with _asked_where(handle):
            found = _of_lvstores(self._of(handle, name))
            if certain and not found and self.index.names(handle) is not None:
                found = _of_lvstores(self._api().volumes_of(handle, fresh=True))
            return found

    def naming(self, handle: str) -> list[PersistentVolume]:
        """Returns all our PersistentVolumes with a handle, as a list of this moment has them.

        Raises:
            Failure: UNAVAILABLE, the API server does not say.
        """
        if self._connect is None:
            return []
        with _asked_where(handle):
            return self._api().volumes_of(handle, fresh=True)

    def _of(self, handle: str, name: str = "") -> list[PersistentVolume]:
        """Returns all our PersistentVolumes with a handle, as they are now.

        Raises:
            ClusterError: the API server does not say.
        """
        names = self.index.names(handle)
        if names is None or len(names) > READ_MAX:
            return self._api().volumes_of(handle)
        return self._api().volumes_called({name, *names} - {""}, handle)

    def is_here(self, volume: PersistentVolume) -> bool:
        """Whether a PersistentVolume is of an lvstore of this node.

        Only an administrator, and this node's credentials, can make such a one.
        """
        return volume.ours and not volume.in_pool and volume.node == self._node

    def parameters_of(self, volume: PersistentVolume) -> dict[str, str]:
        """Returns the parameters of a volume's class; none where that is gone.

        Raises:
            ClusterError: the API server does not say.
        """
        try:
            found = self._api().get(STORAGE_CLASS, volume.storage_class)
        except NotFoundError:
            return {}
        return dict(found.get("parameters") or {})

    def users_elsewhere(self, volume: PersistentVolume) -> list[str]:
        """Returns the pods and VmVolumes on other nodes that have a volume's claim.

        Raises:
            ClusterError: the API server does not say.
        """
        claim = self._claim(volume)
        if volume.claim is None or (
            claim and volume.claim_uid not in ("", claim["metadata"].get("uid"))
        ):
            return []  # of this name there is another claim
        placed = self._api().users_of_claim(*volume.claim)
        return sorted(f"{name} on {node}" for name, node in placed if node not in ("", self._node))

    def note_lvstore(self, volume: PersistentVolume, lvstore: str) -> None:
        """Notes at a PersistentVolume of this node that its volume is in the lvstore of this UUID.

        Raises:
            ClusterError: it cannot be noted now, or somebody has just changed it.
            Failure: ABORTED, it is not of this node any more.
        """
        if not self._annotate(volume, LVSTORE_KEY, lvstore):
            raise Failure(
                Code.ABORTED, f"PersistentVolume {volume.name} has just been given to another node"
            )

    def end_received(self, volume: PersistentVolume) -> None:
        """Takes the name of a snapshot off a PersistentVolume of this node: it is taken over."""
        try:
            self._annotate(volume, RECEIVED_KEY, None)
        except ClusterError as error:  # the next look does it
            log.warning("the received snapshot is named still", of=volume.name, reason=str(error))

    def _annotate(self, volume: PersistentVolume, key: str, value: str | None) -> bool:
        """Gives a PersistentVolume an annotation, or takes it away, as long as it is this node's.

        Returns:
            Whether it is.

        Raises:
            ClusterError: it cannot be noted now, or somebody has just changed it.
        """
        present = self._api().get(VOLUME, volume.name)
        if not self.is_here(PersistentVolume.of(present)):
            return False
        version = present["metadata"]["resourceVersion"]
        meta = {"resourceVersion": version, "annotations": {key: value}}
        self._api().patch(VOLUME, volume.name, None, {"metadata": meta})
        return True

    def of(self, owned: OwnedVolume) -> PersistentVolume | None:
        """Returns the PersistentVolume whose word counts for a volume of this node, or None.

        Of those that fit and are not released it is the one that has the volume's name, as
        csi-provisioner gives it, else the only one. Where there are several, none is believed.

        Raises:
            ClusterError: the API server does not say.
        """
        if self._connect is None:
            return None
        try:
            first = self._api().volume(owned.owner.name)
        except NotFoundError:
            pass
        else:
            if self._may_count(first, owned):
                return first
        found = self._of(owned.volume.uuid)
        count = [each for each in found if self._may_count(each, owned)]
        return count[0] if len(count) == 1 else None

    def fits(self, volume: PersistentVolume, owned: OwnedVolume) -> bool:
        """Whether a PersistentVolume is of a volume of this node, and says rightly where that is.

        That is: whether it is of a pool, and where it is not, that it is of this node: one of an
        lvstore only this node's credentials can make.
        """
        if not volume.ours or volume.handle != owned.volume.uuid:
            return False
        of_pool = owned.volume.pool is not None
        return volume.in_pool == of_pool and (of_pool or volume.node == self._node)

    def counts(self, volume: PersistentVolume, owned: OwnedVolume) -> bool:
        """Whether a PersistentVolume is the one whose word counts for a volume of this node.

        Raises:
            ClusterError: the API server does not say.
        """
        if not self._may_count(volume, owned):
            return False
        if volume.name == owned.owner.name:
            return True
        found = self.of(owned)
        return found is not None and found.name == volume.name

    def _may_count(self, volume: PersistentVolume, owned: OwnedVolume) -> bool:
        return self.fits(volume, owned) and not volume.released

    def check_counts(self, name: str, owned: OwnedVolume) -> None:
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
                f"PersistentVolume {name} has no say in volume {handle}: it does not name the node "
                "or pool of that, is released, or there is another one of that volume; if it "
                "should not be there, set its reclaimPolicy to Retain, then delete it"
            )

    def capacity_of(self, owned: OwnedVolume) -> int:
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

    def asked_of(self, owned: OwnedVolume) -> int | None:
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

    def class_of(self, owned: OwnedVolume) -> Attributes | None:
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

    def _api(self) -> Cluster:
        assert self._connect is not None
        with self._mutex:
            self._cluster = self._cluster or self._connect()
        return self._cluster


@contextmanager
def _asked_where(handle: str) -> Iterator[None]:
    """Raises UNAVAILABLE where the API server does not say on which node a volume is."""
    try:
        yield
    except ClusterError as error:
        raise Failure(
            Code.UNAVAILABLE, f"on which node volume {handle} is is not known: {error}"
        ) from error


def _of_lvstores(found: list[PersistentVolume]) -> list[PersistentVolume]:
    """What has a pool's affinity is no lvstore's, and any node may make it."""
    return [each for each in found if not each.in_pool]
