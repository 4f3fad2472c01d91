"""What targets export of a volume, whichever kind of device stands on it."""

from __future__ import annotations

from csi.targets import Targets
from pydataplane import methods
from pydataplane.client import Client
from pydataplane.volumes import Volumes


def find(client: Client, volume: str) -> methods.Export | None:
    """Returns the target's export of a volume; None: there is none."""
    exports = client.call("virtlun_export_list")
    return next((export for export in exports if export["bdev_name"] == volume), None)


def delete(targets: Targets, volume: str) -> None:
    """Ends the export of a volume on each target that may have it; idempotent.

    Raises:
        RpcError: BUSY, it is in use.
    """
    for client in targets.holders(volume):
        Volumes(client).end_export(volume)


def all_of(targets: Targets) -> list[methods.Export]:
    """Returns the exports of all targets."""
    return targets.gather(lambda client: client.call("virtlun_export_list"))
