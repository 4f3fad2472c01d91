"""Which of the PersistentVolumes of one volume of an lvstore count, where they name several nodes.

Each node's driver asks this for itself, so all have to come to the same answer, and none may when
that is not certain: two nodes that both count would both write.
"""

from __future__ import annotations

from collections.abc import Sequence

from csi import handles
from csi.objects import PersistentVolume


def disputed(placed: Sequence[PersistentVolume]) -> list[PersistentVolume]:
    """Returns those with a node of which one is to count; of one node, if it is not disputed.

    That are the bound ones; where there is none, those whose claim is not gone.
    """
    live = [each for each in placed if each.node is not None and not each.released]
    return [each for each in live if each.bound] or live


def node_that_counts(handle: str, rivals: Sequence[PersistentVolume]) -> str | None:
    """Returns the node whose PersistentVolume counts; None: it is not decided.

    Of several it is the one with that which the handle was made for, or with the one that was used
    last. Credentials of a node can make neither for another node's volume, but where a claim is
    bound to what they have made.
    """
    nodes = {each.node for each in rivals}
    if len(nodes) > 1:
        nodes = {each.node for each in rivals if was_made_for(handle, each) or is_used(each)}
    return nodes.pop() if len(nodes) == 1 else None


def was_made_for(handle: str, volume: PersistentVolume) -> bool:
    """Whether a driver made a handle for the PersistentVolume of this name and node."""
    if volume.node is None or not handles.is_made(handle):
        return False
    if handles.tells_lvstore(handle):
        return handles.make(handle, volume.node, volume.name) == handle
    return handles.without_lvstore(volume.node, volume.name) == handle


def is_used(volume: PersistentVolume) -> bool:
    """Whether a volume was taken over for a PersistentVolume that still has its claim."""
    return volume.bound and bool(volume.lvstore)


def keepers(named: Sequence[PersistentVolume], node: str | None) -> list[PersistentVolume]:
    """Returns those of a handle for which a volume of a node is not to be deleted.

    Without a node it is an image of a pool, which is the very volume of all that have its handle.

    Whoever asks for that has an object whose claim is gone, and which is not retained: it names the
    node, or none. Where the only such one is not so, who asks is of the past, and that one not.
    Another is of the past when its claim is gone, too; it keeps the volume nonetheless if it is to
    be retained and may be of this very volume, or if it is that of another node which was used
    last.
    """
    mine = [each for each in named if node is None or each.node in (None, node)]
    if not mine:
        return []
    used_here = any(each.lvstore for each in mine)

    def keeps(each: PersistentVolume) -> bool:
        if not each.released:
            return True
        return each.retained if each in mine else bool(each.lvstore) and not used_here

    return [each for each in named if keeps(each)]
