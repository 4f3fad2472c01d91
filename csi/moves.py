"""Volumes that were sent to another node: whose counts, and who takes over what was received.

`virtlun volume send` and `receive` carry a volume to another node, with its UUID, and an
administrator gives its PersistentVolume the affinity of that (MutablePVNodeAffinity). Then two
nodes have a volume of this handle, and one PersistentVolume says which counts:

    affinity              the node; every other one leaves its volume alone
    LVSTORE_KEY           the lvstore in which it was used last; none: the one that its handle tells

The new node's driver takes over what was received when it is asked for it for the first time: it
notes its lvstore there, then the owner at the volume. From then on what the old node has is older,
also if the affinity is set back: it counts again when it has received what is newer, by which the
volume is nobody's (plugin.streams.receiving), and is taken over there.

Outside of a pod, where no API server is asked, what is on this node counts.
"""

from __future__ import annotations

import structlog
from pydantic import ValidationError

from csi import DRIVER_NAME, LVSTORE_KEY, handles
from csi.clustererrors import ClusterError
from csi.errors import Code, Failure, precondition
from csi.lvols import RETAIN
from csi.objects import PersistentVolume
from csi.parameters import Parameters
from csi.volumelimits import LIMITS_XATTR
from csi.volumenodes import VolumeNodes
from csi.volumes import OWNER_XATTR, Owned, OwnedVolumes, Owner
from pydataplane.domain import limiting
from pydataplane.lvols import Volume

HARMLESS = {limiting.XATTR, "virtlun.encryption", LIMITS_XATTR}
"""Xattrs that a volume may have that is taken over. Any other says that it is not whole, or that
somebody else has it."""

log = structlog.get_logger()


class Moves:
    """The volumes of one node that count; those that came from another one are taken over."""

    def __init__(self, volumes: OwnedVolumes, nodes: VolumeNodes | None = None) -> None:
        """Asks `nodes` what the API server says; None: nobody does."""
        self._volumes = volumes
        self._nodes = nodes

    @property
    def _node(self) -> str:
        return self._volumes.lvols.node

    def find(self, handle: str) -> Owned | None:
        """Returns the volume with this handle; None: this node's does not count, or is not there.

        Raises:
            Failure: FAILED_PRECONDITION, it is older than what another node has, or cannot be taken
                over; UNAVAILABLE, the API server does not say.
        """
        owned = self._volumes.find(handle)
        if self._nodes is None or (owned is not None and owned.volume.pool):
            return owned
        if owned is None:
            return self._taken_over(handle)
        said = self._nodes.placing(handle, owned.owner.name)
        if not said:
            return owned
        if said[0].node != self._node:
            return None
        lvstores = {each.lvstore for each in said}
        if "" in lvstores or self._lvstore_of(owned.volume) in lvstores:
            return owned
        self._volumes.forget(handle)
        if self._volumes.find(handle) is not None:
            name, lvstore = said[0].name, said[0].lvstore
            raise precondition(
                f"volume {owned.volume.path} of node {self._node} is older than the one that "
                f"PersistentVolume {name} was used with, in lvstore {lvstore}: send that back, or "
                f"give up what was written to it by `kubectl annotate pv {name} {LVSTORE_KEY}-`"
            )
        return self._taken_over(handle)

    def get(self, handle: str) -> Owned:
        """Returns the volume with this handle.

        Raises:
            Failure: as `find`; FAILED_PRECONDITION, it is of another node; NOT_FOUND or
                UNAVAILABLE, it is not here.
        """
        found = self.find(handle)
        if found is not None:
            return found
        said = self._said(handle)
        self._check_here(handle, said)
        raise self._missing(handle, said)

    def elsewhere(self, handle: str) -> str | None:
        """Returns the other node that a volume is of, which may be here, too; else None."""
        said = self._said(handle)
        return said[0].node if said and said[0].node != self._node else None

    def delete(self, handle: str) -> Owned | None:
        """Deletes a volume, idempotent, and returns what it was; None: it was gone.

        Raises:
            Failure: as `get`, and `OwnedVolumes.delete`; a volume of another node is never gone.
        """
        found = self.find(handle)
        if found is None:
            said = self._said(handle)
            self._check_here(handle, said)
            if said and said[0].lvstore and self._volumes.lvols.find(handle) is None:
                self._volumes.lvols.check_gone(handle, lvstore=said[0].lvstore)
                return None
            if said and not self._volumes.lvols.stores_of(handle):
                raise self._missing(handle, said)
        self._volumes.delete(handle)
        return found

    def _said(self, handle: str) -> list[PersistentVolume]:
        return self._nodes.placing(handle) if self._nodes and handles.is_uuid(handle) else []

    def _check_here(self, handle: str, said: list[PersistentVolume]) -> None:
        if said and said[0].node != self._node:
            raise precondition(
                f"volume {handle} is of node {said[0].node}, says the nodeAffinity of "
                f"PersistentVolume {said[0].name}: node {self._node} leaves what it has of it alone"
            )

    def _missing(self, handle: str, said: list[PersistentVolume]) -> Failure:
        if not said or said[0].lvstore or self._volumes.lvols.stores_of(handle):
            return self._volumes.missing(handle)
        return Failure(
            Code.UNAVAILABLE,
            f"volume {handle} is not on node {self._node}, which the nodeAffinity of "
            f"PersistentVolume {said[0].name} names: receive it there (`virtlun volume receive "
            f"--uuid {handle}`) or set the nodeAffinity back, where it is to come from another "
            "node; else load its lvstore (`virtlun lvstore import`), or if that is lost for good, "
            f"{RETAIN['volume']}",
        )

    def _lvstore_of(self, volume: Volume) -> str:
        return self._volumes.lvols.at(volume.uuid).lvstore(volume.lvstore).uuid

    # What was received

    def _taken_over(self, handle: str) -> Owned | None:
        """Makes the driver's what this node has received of a PersistentVolume that names it.

        None: there is nothing, or nobody says that it is one.

        Raises:
            Failure: FAILED_PRECONDITION, it is not whole, or somebody else's.
        """
        if self._nodes is None or not handles.is_made(handle):
            return None
        volume = self._volumes.lvols.find(handle)
        if volume is None or volume.snapshot or volume.pool:
            return None
        said = self._nodes.placing(handle)
        if not said or said[0].node != self._node:
            return None
        if len(said) > 1:
            names = ", ".join(sorted(each.name for each in said))
            raise precondition(f"PersistentVolumes {names} all name volume {handle}: leave one")
        self._check_free(volume, said[0])
        try:
            if pods := self._nodes.pods_elsewhere(said[0]):
                raise precondition(
                    f"volume {volume.path} is not taken over for PersistentVolume {said[0].name} "
                    f"while the old one is used ({', '.join(pods)}): stop that, then send what it "
                    "has written since"
                )
            owner = self._owner(volume, said[0])
            self._nodes.note_lvstore(said[0], self._lvstore_of(volume))
        except ClusterError as error:
            raise Failure(
                Code.UNAVAILABLE, f"volume {handle} is not taken over yet: {error}"
            ) from error
        log.info("taken over", volume_id=handle, lvol=volume.path, of=said[0].name)
        return self._volumes.own(volume, owner)

    def _check_free(self, volume: Volume, said: PersistentVolume) -> None:
        """Raises FAILED_PRECONDITION if a volume is not whole, or is somebody's."""
        noted = self._volumes.lvols.at(volume.uuid).xattrs(volume.uuid)
        if OWNER_XATTR in noted or any(each not in HARMLESS for each in noted):
            others = ", ".join(sorted(set(noted) - HARMLESS))
            raise precondition(
                f"volume {volume.path} is not taken over for PersistentVolume {said.name}: its "
                f"xattrs ({others}) say that it is not whole, or somebody else's; see `virtlun "
                "volume receive` to the end, or receive it anew"
            )

    def _owner(self, volume: Volume, said: PersistentVolume) -> Owner:
        """Returns what a volume is to keep: what the old one kept, as far as it is known here.

        Raises:
            Failure: FAILED_PRECONDITION, the PersistentVolume says what no volume of ours is.
        """
        context = {
            key.removeprefix(f"{DRIVER_NAME}/"): value
            for key, value in said.context.items()
            if key.startswith(f"{DRIVER_NAME}/")
        }
        assert self._nodes is not None
        of_class = self._nodes.parameters_of(said)
        wanted = of_class.get("encryptionKey")
        if wanted is not None and wanted != volume.key:
            raise precondition(
                f"volume {volume.path} of PersistentVolume {said.name} has "
                f"{volume.key or 'no key'}, and StorageClass {said.storage_class} says "
                f"encryptionKey {wanted}: delete it and receive it anew with `--key {wanted}`"
            )
        thin = "true" if volume.thin else "false"
        overcommit = of_class.get("overcommit") if volume.thin else None
        known = {"overcommit": overcommit, "encryptionKey": volume.key}
        given = {"lvstore": volume.lvstore, "thin": thin} | context
        given |= {key: value for key, value in known.items() if value is not None}
        try:
            parameters = Parameters.model_validate(given, by_alias=True, by_name=False)
        except ValidationError as error:
            raise precondition(
                f"PersistentVolume {said.name} says what no volume of {DRIVER_NAME} is: {error}"
            ) from error
        claim = "/".join(said.claim) if said.claim else ""
        return Owner(DRIVER_NAME, said.name, claim, parameters.kept())
