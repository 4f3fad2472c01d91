"""Requests that wait because an I/O failed, as their disks' error policies have it."""

from __future__ import annotations

from pydataplane import methods
from pydataplane.errors import METHOD_NOT_FOUND, RpcError


def suspended(rpc: methods.Rpc) -> list[methods.SuspendedTarget]:
    """Returns the LUNs that wait; none, where the target is older and has no such thing.

    Raises:
        TargetError: the target does not answer, or refuses.
    """
    try:
        return rpc.call("virtlun_vhost_get_suspended")
    except RpcError as error:
        if error.code != METHOD_NOT_FOUND:
            raise
        return []
