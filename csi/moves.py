"""Volumes that were sent to another node: whose counts, and who takes over what was received.

`virtlun volume send` and `receive` carry a volume to another node, with its UUID, and an
administrator gives its PersistentVolume the affinity of that (MutablePVNodeAffinity). Then two
nodes have a volume of this handle, and one PersistentVolume says which counts:

    affinity              the node; every other one leaves its volume alone
    RECEIVED_KEY          the last snapshot that is sent; what has another one is older
    LVSTORE_KEY           the lvstore in which it was used last; none: the one that its handle tells

The new node's driver takes over what was received when it is asked for it for the first time: it
notes its lvstore there, then the owner at the volume, and takes RECEIVED_KEY away. From then on
what the old node has is older, also if the affinity is set back: it counts again when it has
received what is newer, by which the volume is nobody's (plugin.streams.receiving), and is taken
over there.

Where several PersistentVolumes name a volume, csi.counting says which node's counts.

Outside of a pod, where no API server is asked, what is on this node counts, also after it has
received what is newer.
"""

from __future__ import annotations

from collections.abc import Mapping

import structlog
from pydantic import ValidationError

from csi import DRIVER_NAME, LVSTORE_KEY, RECEIVED_KEY, TOPOLOGY_KEY, handles
from csi.clustererrors import ClusterError
from csi.counting import disputed, keepers, node_that_counts
from csi.errors import Code, Failure, precondition
from csi.lvols import RETAIN
from csi.objects import PersistentVolume
from csi.parameters import Parameters
from csi.volumelimits import LIMITS_XATTR
from csi.volumenodes import VolumeNodes
from csi.volumes import BEFORE_XATTR, OWNER_XATTR, OwnedVolume, OwnedVolumes, Owner, read_owner
from pydataplane.domain import limiting
from pydataplane.lvols import Volume

RECEIVE_XATTR = "virtlun.receive"
"""At a volume that is being received, and not whole (plugin.streams.receiving)."""
HARMLESS = {limiting.XATTR, "virtlun.encryption", LIMITS_XATTR, BEFORE_XATTR}
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

    def find(self, handle: str) -> OwnedVolume | None:
        """Returns the volume with this handle; None: this node's does not count, or is not there.

        Raises:
            Failure: FAILED_PRECONDITION, it is older than what another node has, not whole, or
                cannot be taken over, or its PersistentVolume names no node, or several;
                UNAVAILABLE, the API server does not say.
        """
        if self._volumes.lvols.find(handle) is None:
            return None
        return self._found(handle)[0]

    def _found(
        self, handle: str, named: list[PersistentVolume] | None = None
    ) -> tuple[OwnedVolume | None, list[PersistentVolume]]:
        """Returns the same, and what the API server says of it: one answer decides.

        It is not asked where its answer is given, of all that have the handle.
        """
        volume = self._volumes.lvols.find(handle)
        if volume is None:
            return None, self._said(handle, named)
        if volume.pool or volume.snapshot:
            return self._volumes.find(handle), []
        owner, noted = self._volumes.noted(volume)
        owned = OwnedVolume(volume, owner) if owner else None
        if self._nodes is None or not self._nodes.asks:
            return owned or self._restored(volume, noted), []
        name = owner.name if owner else ""
        said = self._said(handle, named, name=name, certain=owned is not None)
        if said and said[0].node != self._node:
            return None, said
        if owned is not None:
            self._check_whole(volume, noted)
            self._check_newest(handle, volume, said)
        elif said and handles.is_made(handle):
            owned = self._taken_over(volume, noted, said)
        return owned, said

    def _check_whole(self, volume: Volume, noted: Mapping[str, str]) -> None:
        if RECEIVE_XATTR in noted:
            raise precondition(
                f"volume {volume.path} of node {self._node} is being received, and not whole: let "
                "`virtlun volume receive` come to its end, or have it taken back (`--take-back`)"
            )

    def _check_newest(self, handle: str, volume: Volume, said: list[PersistentVolume]) -> None:
        """Raises FAILED_PRECONDITION if a volume of the driver is older than another node's."""
        asks = handles.tells_lvstore(handle) or any(each.lvstore for each in said)
        here = self._lvstore_of(volume) if said and asks else ""
        for each in said:
            if not each.lvstore and not handles.may_be_in(handle, here):
                raise precondition(
                    f"volume {volume.path} of node {self._node} is in lvstore {here}, in which "
                    f"{handle} was not made, and PersistentVolume {each.name} does not say that "
                    "it was moved there: if it is the newest, say so by "
                    f"`kubectl annotate pv {each.name} {LVSTORE_KEY}={here}`"
                )
            if each.lvstore not in ("", here):
                raise precondition(
                    f"volume {volume.path} of node {self._node} is older than the one that "
                    f"PersistentVolume {each.name} was used with, in lvstore {each.lvstore}: send "
                    "that back, or give up what was written to it by "
                    f"`kubectl annotate pv {each.name} {LVSTORE_KEY}-`"
                )
        for each in said:
            if each.received and self._nodes:
                if _last_of(volume) != each.received:
                    raise precondition(
                        f"volume {volume.path} of node {self._node} is to have snapshot "
                        f"@{each.received}, says PersistentVolume {each.name}, and its last one "
                        f"is {volume.parent or 'none'}: send that, or let it count as it is by "
                        f"`kubectl annotate pv {each.name} {RECEIVED_KEY}-`"
                    )
                self._nodes.end_received(each)

    def _restored(self, volume: Volume, noted: Mapping[str, str]) -> OwnedVolume | None:
        """Gives a volume back the owner that it had before it received what is newer.

        None: it had none.
        """
        before = read_owner(noted.get(BEFORE_XATTR))
        if before is None or any(each not in HARMLESS for each in noted):
            return None
        self._volumes.own(volume, before)
        return OwnedVolume(volume, before)

    def get(self, handle: str) -> OwnedVolume:
        """Returns the volume with this handle.

        Raises:
            Failure: as `find`; FAILED_PRECONDITION, it is of another node; NOT_FOUND or
                UNAVAILABLE, it is not here.
        """
        found, said = self._found(handle)
        if found is not None:
            return found
        self._check_here(handle, said)
        raise self._missing(handle, said)

    def elsewhere(self, handle: str) -> str | None:
        """Returns the other node that a volume is of, which may be here, too; else None."""
        said = self._said(handle)
        return said[0].node if said and said[0].node != self._node else None

    def delete(self, handle: str) -> OwnedVolume | None:
        """Deletes a volume, idempotent, and returns what it was; None: it was gone.

        Raises:
            Failure: as `get`, and `OwnedVolumes.delete`; a volume of another node is never gone.
        """
        volume = self._volumes.lvols.find(handle)
        named = None
        if volume is not None:  # else there is nothing to keep, and nothing to list all objects for
            image = volume.pool is not None
            named = self._named(handle, image=image)
            self._check_last_use(handle, keepers(named, None if image else self._node))
        found, said = self._found(handle, named)
        if found is None:
            self._check_here(handle, said)
            there = self._volumes.lvols.find(handle) is not None
            if said and not there and said[0].lvstore:
                self._volumes.lvols.check_gone(handle, lvstore=said[0].lvstore)
                return None
            if said and not there and not self._made_here(handle, said):
                raise self._missing(handle, said)
        self._volumes.delete(handle, absent=volume is None)
        return found

    def _named(self, handle: str, *, image: bool) -> list[PersistentVolume]:
        """Returns all that have a handle, of a volume of an lvstore or of an image, at this moment.

        What has a pool's affinity is no lvstore's, and any node may make it.
        """
        if self._nodes is None or not handles.is_uuid(handle):
            return []
        return [each for each in self._nodes.naming(handle) if image or not each.in_pool]

    def _said(
        self,
        handle: str,
        named: list[PersistentVolume] | None = None,
        *,
        name: str = "",
        certain: bool = False,
    ) -> list[PersistentVolume]:
        """Returns the PersistentVolumes of the node whose volume of an lvstore counts.

        Raises:
            Failure: FAILED_PRECONDITION, a PersistentVolume does not name one node, or which of
                several nodes' counts is not certain; UNAVAILABLE.
        """
        if self._nodes is None or not handles.is_uuid(handle):
            return []
        if (placed := named) is None:
            placed = self._nodes.placing(handle, name, certain=certain)
        here = [each for each in placed if self._nodes.is_here(each)]
        rivals = disputed(placed)
        counts = node_that_counts(handle, rivals)
        if rivals and counts is None and any(each in here for each in rivals):
            raise self._undecided(handle, rivals)
        if here and (not rivals or counts == self._node):
            return here
        # One that names no node and was never moved, by hand perhaps, says nothing.
        said = [each for each in placed if each.node is not None or each.lvstore or each.received]
        for each in said:
            if each.node is None:
                raise precondition(
                    f"the nodeAffinity of PersistentVolume {each.name} does not name one node of "
                    f"volume {handle}: let it be `{TOPOLOGY_KEY} In [NODE]` with the node that "
                    "has what counts; until then none uses or deletes the volume"
                )
        others = [each for each in rivals if each.node == counts] or rivals
        return others or said

    def _undecided(self, handle: str, rivals: list[PersistentVolume]) -> Failure:
        named = ", ".join(sorted(f"{each.name} of node {each.node}" for each in rivals))
        return precondition(
            f"volume {handle} is of several PersistentVolumes, {named}, and which of them has "
            "what counts is not certain, so that each node leaves what it has of it alone: set the "
            "reclaimPolicy of all but the one that is to count to Retain, then delete them and "
            "their claims"
        )

    def _check_last_use(self, handle: str, kept: list[PersistentVolume]) -> None:
        """Raises FAILED_PRECONDITION if a volume is to go that another object still stands for."""
        if names := sorted(each.name for each in kept):
            raise precondition(
                f"volume {handle} is not deleted: PersistentVolume {', '.join(names)} has it, too; "
                "set the reclaimPolicy of the one that is to go to Retain, then delete that"
            )

    def _made_here(self, handle: str, said: list[PersistentVolume]) -> bool:
        """Whether a volume that is not there was made on this node, in an lvstore that is loaded.

        An earlier driver's handle does not tell the lvstore, but the node.
        """
        if handles.tells_lvstore(handle) or not handles.is_made(handle):
            return bool(self._volumes.lvols.stores_of(handle))
        return any(handle == handles.without_lvstore(self._node, each.name) for each in said)

    def _check_here(self, handle: str, said: list[PersistentVolume]) -> None:
        if said and said[0].node != self._node:
            raise precondition(
                f"volume {handle} is of node {said[0].node}, says the nodeAffinity of "
                f"PersistentVolume {said[0].name}: node {self._node} leaves what it has of it alone"
            )

    def _missing(self, handle: str, said: list[PersistentVolume]) -> Failure:
        if not said or said[0].lvstore or self._made_here(handle, said):
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

    def _taken_over(
        self, volume: Volume, noted: Mapping[str, str], said: list[PersistentVolume]
    ) -> OwnedVolume:
        """Makes the driver's what this node has received of the PersistentVolume that names it.

        Raises:
            Failure: FAILED_PRECONDITION, it is not whole, not the newest, or somebody else's.
        """
        assert self._nodes is not None
        if len(said) > 1:
            names = ", ".join(sorted(each.name for each in said))
            raise precondition(
                f"PersistentVolumes {names} all name volume {volume.uuid}: leave one"
            )
        pv = said[0]
        self._check_free(volume, noted, pv)
        self._check_last(volume, pv)
        try:
            if users := self._nodes.users_elsewhere(pv):
                raise precondition(
                    f"volume {volume.path} is not taken over for PersistentVolume {pv.name} "
                    f"while the old one is used ({', '.join(users)}): stop that, then send what it "
                    "has written since"
                )
            owner = self._owner(volume, pv)
            self._nodes.note_lvstore(pv, self._lvstore_of(volume))
            self._check_counts(volume.uuid, pv)
        except ClusterError as error:
            raise Failure(
                Code.UNAVAILABLE, f"volume {volume.uuid} is not taken over yet: {error}"
            ) from error
        owned = self._made_ours(volume, owner, pv)
        self._nodes.end_received(pv)
        log.info("taken over", volume_id=volume.uuid, lvol=volume.path, of=pv.name)
        return owned

    def _check_counts(self, handle: str, pv: PersistentVolume) -> None:
        """Raises a Failure unless this node counts still, now that it is noted at its object.

        Of two nodes that look after they have noted it, one at least sees the other's note.
        """
        said = self._said(handle, self._named(handle, image=False))
        self._check_here(handle, said)
        if pv.name not in {each.name for each in said}:
            raise Failure(
                Code.ABORTED, f"PersistentVolume {pv.name} of volume {handle} has just gone"
            )

    def _made_ours(self, volume: Volume, owner: Owner, pv: PersistentVolume) -> OwnedVolume:
        """Notes the owner, unless somebody has begun with the volume since it was looked at."""
        self._volumes.own(volume, owner)
        try:
            now = self._volumes.lvols.find(volume.uuid) or volume
            found, noted = self._volumes.noted(now)
            self._check_free(now, {k: v for k, v in noted.items() if k != OWNER_XATTR}, pv)
            self._check_last(now, pv)
        except Failure:
            self._volumes.disown(volume)
            raise
        return OwnedVolume(now, found or owner)

    def _check_free(self, volume: Volume, noted: Mapping[str, str], said: PersistentVolume) -> None:
        """Raises FAILED_PRECONDITION if a volume is not whole, or is somebody's."""
        if others := sorted(set(noted) - HARMLESS):
            raise precondition(
                f"volume {volume.path} is not taken over for PersistentVolume {said.name}: its "
                f"xattrs ({', '.join(others)}) say that it is not whole, or somebody else's; see "
                "`virtlun volume receive` to the end, or receive it anew"
            )

    def _check_last(self, volume: Volume, said: PersistentVolume) -> None:
        """Raises FAILED_PRECONDITION unless a volume has the last snapshot that was sent."""
        if not said.received:
            raise precondition(
                f"volume {volume.path} is not taken over for PersistentVolume {said.name}, as "
                "nobody says what it has to have: name the last snapshot that is sent by "
                f"`kubectl annotate pv {said.name} {RECEIVED_KEY}=SNAPSHOT`"
            )
        if _last_of(volume) != said.received:
            raise precondition(
                f"volume {volume.path} is not taken over for PersistentVolume {said.name}: its "
                f"last snapshot is {volume.parent or 'none'}, and @{said.received} is to be "
                f"(annotation {RECEIVED_KEY}): send that, with `--since` what is there"
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


def _last_of(volume: Volume) -> str:
    """Returns the name of a volume's last snapshot; '' if it has none."""
    return (volume.parent or "").partition("@")[2]
