"""Where lvols are: on which target of this node, in which lvstore; or gone for good.

What the driver makes has a handle that tells the lvstore (`handles`). So one that is gone is told
from one whose lvstore is not loaded.
"""

from __future__ import annotations

from csi import handles
from csi.errors import Code, Failure
from csi.targets import Targets
from pydataplane.client import Client
from pydataplane.errors import VolumeNotFoundError
from pydataplane.lvols import Volume
from pydataplane.lvstores import Lvstore
from pydataplane.volumes import Volumes

RETAIN = {
    "volume": "set the PersistentVolume's reclaim policy to Retain and delete that",
    "snapshot": "set the VolumeSnapshotContent's deletion policy to Retain and delete that",
}
"""What to do with what Kubernetes has of an lvol that is lost for good."""


class Lvols:
    """The lvols of one node's targets, by handle."""

    def __init__(self, targets: Targets, node: str) -> None:
        """Looks on `targets`, those of `node`."""
        self.targets = targets
        self.node = node

    def node_in(self, store: Lvstore) -> str:
        """Returns the node that handles in an lvstore are made of; none in a pool of Ceph.

        There every node makes the same of the same name.
        """
        return "" if store.is_pool else self.node

    def lvstore(self, name: str) -> Lvstore:
        """Returns an lvstore that a class names.

        Raises:
            Failure: RESOURCE_EXHAUSTED, this node has no lvstore or pool of Ceph of that name;
                another one may.
                FAILED_PRECONDITION, several of its targets have one.
        """
        try:
            return self.targets.store(name).store
        except VolumeNotFoundError as error:
            raise Failure(
                Code.RESOURCE_EXHAUSTED,
                f"node {self.node} has no lvstore {name}: make one with `virtlun lvstore create`, "
                "or name another in the StorageClass; a pool of Ceph comes with `virtlun pool add`",
            ) from error

    def at(self, handle: str) -> Volumes:
        """Returns the volumes of the target that has this lvol, or its lvstore."""
        return Volumes(self.targets.of(handle))

    def find(self, handle: str) -> Volume | None:
        """Returns the lvol with this handle, or None."""
        return self.in_lvstore_of(handle, handle) if handles.is_uuid(handle) else None

    def in_lvstore_of(self, handle: str, other: str) -> Volume | None:
        """Returns the lvol `other` where the target that has `handle` has it, or None."""
        try:
            return self.at(handle).volume(other)
        except VolumeNotFoundError:
            return None

    def stores_of(self, handle: str) -> list[Lvstore]:
        """Returns the loaded lvstores that can have an lvol; none where another one can, too.

        Where the handle does not tell, all that the targets were told of have to be loaded.
        """
        if not handles.tells_lvstore(handle):
            for answer in self.targets.ask(_storage_is_complete):
                if not answer.get():
                    return []
            # Asked after that: what was loaded meanwhile is among them.
            return self.targets.gather(_lvstores)
        stores = self.at(handle).lvstores()
        return [store for store in stores if handles.may_be_in(handle, store.uuid)]

    def check_gone(self, handle: str, kind: str = "volume", lvstore: str = "") -> None:
        """Raises UNAVAILABLE unless the lvstore of an lvol is loaded and does not have it.

        `kind` is what the orchestrator calls it, a key of RETAIN. `lvstore` is the UUID of where it
        was last, if it is not in the one that its handle tells.
        """
        if not handles.is_uuid(handle):
            return
        stores = self._called(lvstore) if lvstore else self.stores_of(handle)
        # An lvstore that is being loaded has its lvols in its list before they are bdevs.
        if not stores or any(handle in self._uuids(store) for store in stores):
            raise self.not_loaded(handle, kind)

    def _called(self, lvstore: str) -> list[Lvstore]:
        """Returns the lvstore of a UUID, if it is loaded."""
        if not handles.is_uuid(lvstore):
            return []
        stores = Volumes(self.targets.of_store(lvstore)).lvstores()
        return [store for store in stores if store.uuid == lvstore]

    def _uuids(self, store: Lvstore) -> set[str]:
        return Volumes(self.targets.of_store(store.uuid)).uuids(store)

    def not_loaded(self, handle: str, kind: str = "volume") -> Failure:
        """Returns UNAVAILABLE with what to do about an lvol whose lvstore is not loaded."""
        return Failure(
            Code.UNAVAILABLE,
            f"the lvstore of {kind} {handle} is not loaded on node {self.node}: see `virtlun "
            "lvstore list` there and load it with `virtlun lvstore import` (a pool of Ceph: "
            f"`virtlun pool add`); if it is lost for good, {RETAIN[kind]}",
        )


def _lvstores(client: Client) -> list[Lvstore]:
    return Volumes(client).lvstores()


def _storage_is_complete(client: Client) -> bool:
    """Whether a target has loaded all lvstores that it was told of."""
    status = client.call("virtlun_get_status")
    # An older target does not say it by itself.
    problems = [*status.get("restore_problems", []), *status.get("waiting", [])]
    return bool(status.get("storage_complete", not problems))
