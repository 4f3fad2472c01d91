"""Whether a volume that is made here can be used where it is wanted."""

from __future__ import annotations

from csi import POOL_KEY, TOPOLOGY_KEY
from csi.errors import Code, Failure
from csi.proto import csi_pb2 as pb
from pydataplane.lvstores import Lvstore


def check(node: str, wanted: pb.TopologyRequirement, store: Lvstore) -> None:
    """Checks that a volume that `node` makes in a store can be used where it is wanted.

    Raises:
        Failure: RESOURCE_EXHAUSTED, it cannot.
    """
    nodes = [topology.segments.get(TOPOLOGY_KEY) for topology in wanted.requisite]
    if store.is_pool:
        key = f"{POOL_KEY}{store.uuid}"
        if nodes and not any(_may_be(node, key, each) for each in wanted.requisite):
            raise Failure(
                Code.RESOURCE_EXHAUSTED,
                f"the volume is wanted on {', '.join(map(str, nodes))}, without the pool "
                f"{store.name} when the driver began there: add the pool to the target there, "
                "then start the driver anew",
            )
    elif nodes and node not in nodes:
        raise Failure(
            Code.RESOURCE_EXHAUSTED,
            f"the volume is wanted on {', '.join(map(str, nodes))}, "
            f"and this driver makes volumes on node {node} only",
        )


def _may_be(node: str, key: str, where: pb.Topology) -> bool:
    """Whether a volume that `node` makes in the pool that has `key` can be used at `where`.

    A class that is bound at once says what its allowedTopologies say: a node alone, perhaps.
    """
    if any(each.startswith(POOL_KEY) for each in where.segments):
        return key in where.segments
    return where.segments.get(TOPOLOGY_KEY) == node
