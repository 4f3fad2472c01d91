"""The copy of a volume that nobody uses: the target's, of a LUN that no guest is connected to.

The LUN is of a controller that is made for it, so that nobody else begins to use the volume; a
target that is restarted has it again, without the copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from plugin.gateway import lvolcopies
from plugin.gateway.lvolcopies import Disk
from pydataplane.client import Client
from pydataplane.domain.observed import observe
from pydataplane.errors import EXISTS, NO_DEVICE, RpcError, VolumeError

LOOK_S = 0.1
"""How often the target is asked how far it is, seconds."""

PREFIX = "move-"
"""Controllers whose name begins so have a volume that moves."""

Progress = Callable[[int, int], None]


def controller(source: str) -> str:
    """Returns the name of the controller that has a volume (its UUID) meanwhile."""
    return PREFIX + source


def hold(client: Client, copying: Client, source: str) -> None:
    """Keeps others from using a volume (its UUID); safe to repeat.

    Raises:
        TargetError: it is in use, or the target refuses or does not answer.
    """
    disk = Disk(controller(source), 0)
    shown = observe(client).controllers.get(disk.controller, {}).get(0)
    if shown is None or shown.bdev != source:
        # On the other one since an earlier call, shown or not: the old one may have changed.
        end(copying, source)
        _show(client, disk, source)


def copy(client: Client, copying: Client, source: str, to: str, progress: Progress) -> None:
    """Copies a volume that is held to another one (UUIDs); all is there, durably, in the end.

    Nobody has the old one from then on. `copying` waits for what takes its time.

    Raises:
        VolumeError: the copy failed.
        TargetError: the target refuses or does not answer.
    """
    disk = Disk(controller(source), 0)
    while True:
        found = lvolcopies.found(client, disk)
        if found is not None and (found.state == "failed" or found.destination != to):
            lvolcopies.abort(client, disk)
            if found.destination == to:
                raise VolumeError(found.error or "the copy failed")
            found = None
        if found is None:
            lvolcopies.start(client, disk, to, 0)
            continue
        progress(found.done, found.total)
        if found.state == "ready":
            break
        time.sleep(LOOK_S)
    lvolcopies.pivot(copying, disk)  # which flushes the new one


def _show(client: Client, disk: Disk, source: str) -> None:
    try:
        client.call("vhost_create_scsi_controller", ctrlr=disk.controller)
    except RpcError as error:
        if error.code != EXISTS:
            raise
    client.call(
        "vhost_scsi_controller_add_target",
        ctrlr=disk.controller,
        scsi_target_num=disk.target,
        bdev_name=source,
    )


def end(client: Client, source: str) -> None:
    """Lets go of a volume (its UUID), and ends its copy, if there is one; safe to repeat."""
    lvolcopies.abort(client, Disk(controller(source), 0))
    try:
        client.call("vhost_delete_controller", ctrlr=controller(source))
    except RpcError as error:
        if error.code != NO_DEVICE:
            raise
