"""How many bytes a volume gets for a CSI capacity range."""

from __future__ import annotations

from csi.errors import Code, Failure, invalid
from csi.proto import csi_pb2 as pb
from pydataplane.lvstores import Lvstore
from pydataplane.volumes import MIB

DEFAULT_BYTES = 1 << 30


def wanted_bytes(wanted: pb.CapacityRange) -> int:
    """Returns the least bytes that a range asks for; its limit if it names only that.

    Raises:
        Failure: INVALID_ARGUMENT, the range makes no sense.
    """
    required, limit = wanted.required_bytes, wanted.limit_bytes
    if required < 0 or limit < 0 or (limit and required > limit):
        raise invalid(f"capacity_range {required} to {limit} bytes makes no sense")
    return required or limit


def size_within(wanted: pb.CapacityRange, store: Lvstore, least: int = 0) -> int:
    """Returns the bytes of a volume in this range; `least`, or 1 GiB, if it asks for none.

    Raises:
        Failure: OUT_OF_RANGE, no volume can have such a size; RESOURCE_EXHAUSTED, not here.
    """
    wanted_bytes(wanted)
    required, limit = wanted.required_bytes, wanted.limit_bytes
    size = whole_clusters(required or least or DEFAULT_BYTES, store)
    if not required and limit:
        size = min(size, limit // whole_clusters(1, store) * whole_clusters(1, store)) or size
    if limit and size > limit:
        raise Failure(
            Code.OUT_OF_RANGE,
            f"no volume has {required} to {limit} bytes: sizes are whole clusters of "
            f"{store.cluster_size} bytes",
        )
    if size > store.total and store.tells_room:
        raise Failure(
            Code.RESOURCE_EXHAUSTED,
            f"{size} bytes do not fit in lvstore {store.name}, which has {store.total}: "
            "ask for less, or add to the lvstore",
        )
    return size


def whole_clusters(size: int, store: Lvstore) -> int:
    """Returns `size` bytes rounded up to what the lvstore can make: clusters, and whole MiB."""
    unit = max(store.cluster_size, MIB)
    return -(-size // unit) * unit
