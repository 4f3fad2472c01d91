"""What goes wrong with a target, as the exceptions that Cinder knows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cinder import exception

from pydataplane.errors import BUSY, NO_SPACE, RpcError, TargetError, VolumeError


@contextmanager
def told(what: str) -> Iterator[None]:
    """Has the errors of a block be Cinder's; `what` begins their sentence, as `volume NAME`."""
    try:
        yield
    except RpcError as error:
        after = ": delete volumes or snapshots there, or add to the lvstore"
        hint = after if error.code == NO_SPACE else ""
        raise exception.VolumeBackendAPIException(data=f"{what}: {error}{hint}") from error
    except (TargetError, VolumeError) as error:
        raise exception.VolumeBackendAPIException(data=f"{what}: {error}") from error


@contextmanager
def told_deleting(what: str, *, snapshot: bool = False) -> Iterator[None]:
    """As `told`; what is in use stays what it is, and can be deleted later."""
    kind = exception.SnapshotIsBusy if snapshot else exception.VolumeIsBusy
    try:
        with told(what):
            yield
    except exception.VolumeBackendAPIException as error:
        cause = error.__cause__
        if isinstance(cause, RpcError) and cause.code == BUSY:
            raise kind(f"{what} is not deleted: {cause}") from cause
        raise
