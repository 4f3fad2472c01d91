"""Persistent reservations: the volumes of which nobody knows who has reserved them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from plugin.cli.doctor.finding import Finding
from plugin.cli.output import client
from pydataplane import supervise
from pydataplane.errors import TargetError

WHAT = "reservations"
LOST = (
    "mend {path} or, once nobody who was kept from the volume can write to it, remove it, which"
    " ends all reservations: its VMs go on by themselves. Or have one of them, with a LUN, replace"
    " it: sg_persist --out --replace-lost --param-sark=KEY --prout-type=TYPE"
)
UNREAD = (
    "mend what holds {path}: the target reads it again by itself; or remove it, which ends all"
    " reservations, once nobody who was kept from the volume can write to it"
)


def records(socket: Path) -> list[Finding]:
    """Returns a finding for each volume of a VM whose record cannot be read; of others none.

    What does not answer has a line of its own, and none here.
    """
    target = client(socket)
    try:
        shown = _shown(target.call("vhost_get_controllers"))
        unknown = [disk for disk in shown if disk.state != "known"]
        if not unknown:
            return []
        bdevs = {bdev["name"]: bdev for bdev in target.call("bdev_get_bdevs")}
        folder = Path(supervise.status(socket)["state_dir"]) / "reservations"
    except TargetError:
        return []
    found: dict[str, Finding] = {}
    for disk in unknown:
        bdev = bdevs.get(disk.bdev)
        uuid = disk.uuid or (bdev["uuid"] if bdev is not None else disk.bdev)
        name = next(iter(bdev["aliases"]), disk.bdev) if bdev is not None else disk.bdev
        found.setdefault(uuid, _finding(name, disk.state, folder / f"{uuid}.json"))
    return list(found.values())


class _Disk(NamedTuple):
    bdev: str
    uuid: str | None
    """The one that the disk was given; None: the bdev's."""
    state: str
    """known, lost or unread."""


def _shown(controllers: Iterable[Mapping[str, Any]]) -> list[_Disk]:
    """Returns the disks of controllers; one of an older target is known."""
    found = []
    for controller in controllers:
        shown = controller["backend_specific"]
        block = shown.get("block")
        luns = [lun for target in shown.get("scsi", []) for lun in target["luns"]]
        disks = [(lun["bdev_name"], lun) for lun in luns]
        disks += [(block["bdev"], block)] if block and block["bdev"] else []
        for bdev, disk in disks:
            found.append(_Disk(bdev, disk.get("uuid"), disk.get("reservations", "known")))
    return found


def _finding(volume: str, state: str, path: Path) -> Finding:
    """Says what became of the record of a volume at `path`, and what to do."""
    lost = state == "lost"
    why = "is damaged" if lost else "cannot be read"
    text = f"{path} {why}: nobody knows who has reserved {volume}, so its VMs cannot use it"
    return Finding(WHAT, "failed", text, (LOST if lost else UNREAD).format(path=path))
