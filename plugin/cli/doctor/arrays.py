"""Arrays whose LUNs or namespaces are disks: whether they answer, and each disk can be used."""

from __future__ import annotations

from pathlib import Path

from plugin.cli.doctor.finding import Finding
from plugin.cli.doctor.target import none_served
from plugin.cli.output import client
from plugin.config import Config
from pydataplane import methods, supervise
from pydataplane.client import Client
from pydataplane.errors import TargetError
from pydataplane.lvols import problem_of

ARRAYS = {
    "iscsi": ("LUNs", "iSCSI target", "the login"),
    "nvme": ("namespaces", "NVMe subsystem", "the hostnqn"),
}
"""By kind of pool: its disks, what has them, and what lets in."""


def luns(socket: Path, settings: Config) -> list[Finding]:
    """Whether LUNs of iSCSI targets can be served, and each has a session."""
    what = "LUNs of iSCSI targets"
    try:
        found = supervise.status(socket).get("iscsi", {"asked": False})
        wanted = settings.target.iscsi or settings.disks.may_serve("iscsi")
        if none := none_served(what, found, "iscsi", wanted):
            return [none]
        pools = _pools_of(client(socket), "iscsi")
        return [*pools, _sessions(what, client(socket).call("bdev_get_bdevs"))]
    except TargetError:
        why = "not known, for the target does not tell"
        return [Finding(what, "warning", why, "start it first")]


def _sessions(what: str, bdevs: list[methods.Bdev]) -> Finding:
    """Says which LUNs have no session, or cannot be disks."""
    each = {
        (*bdev["aliases"], bdev["name"])[0]: bdev.get("driver_specific", {}).get("iscsi")
        for bdev in bdevs
    }
    there = {name: lun for name, lun in each.items() if lun is not None}
    used = {name: lun for name, lun in there.items() if "connected" in lun}
    bad = [f"{name}: {lun['problem']}" for name, lun in used.items() if "problem" in lun]
    if bad:
        advice = "see to its target and the network; the bdev goes on logging in, and its I/O waits"
        return Finding(what, "failed", "; ".join(bad), advice)
    bad = [f"{name}: {lun['problem']}" for name, lun in there.items() if "problem" in lun]
    if bad:
        advice = "no VM can have it: see to it at the array"
        return Finding(what, "warning", "; ".join(bad), advice)
    if not used:
        text = "libiscsi is there; no LUN is used"
        return Finding(what, "ok", text, "" if there else "bdev_iscsi_create")
    return Finding(what, "ok", f"{', '.join(used)}: connected")


def _pools_of(target: Client, kind: str) -> list[Finding]:
    """Whether each array of a kind answers whose disks are a pool."""
    disks, array, more = ARRAYS[kind]
    found = []
    for store in target.call("bdev_lvol_get_lvstores"):
        if store.get("kind") != kind:
            continue
        what, place = f"pool {store['name']}", store["base_bdev"]
        try:
            volumes = target.call("bdev_lvol_get_lvols", lvs_name=store["name"])
        except TargetError as error:  # also where it does not answer in time
            advice = f"see to the {array}, the network, and {more} that the pool has"
            found.append(Finding(what, "failed", str(error), advice))
        else:
            found.append(Finding(what, "ok", f"{len(volumes)} {disks} at {place}"))
    return found


def namespaces(socket: Path) -> list[Finding]:
    """Whether NVMe subsystems answer, and each of their volumes can be used; nothing without."""
    try:
        pools = _pools_of(client(socket), "nvme")
        bdevs = client(socket).call("bdev_get_bdevs")
    except TargetError:
        return []
    used = {bdev["name"]: bdev for bdev in bdevs if "nvme" in bdev.get("driver_specific", {})}
    what = "NVMe namespaces"
    if not pools and not used:
        return []
    named = {(*bdev["aliases"], name)[0]: bdev for name, bdev in used.items()}
    open_ = [
        name
        for name, bdev in named.items()
        if any("connected" in path for path in bdev["driver_specific"]["nvme"])
    ]
    bad = {name: why for name, bdev in named.items() if (why := problem_of(bdev))}
    if lost := [f"{name}: {why}" for name, why in bad.items() if name in open_]:
        advice = "see to the array and the network; the target goes on connecting"
        return [*pools, Finding(what, "failed", "; ".join(lost), advice)]
    lost = [
        f"{name}: {path['trid']['traddr']}:{path['trid']['trsvcid']}: {path['problem']}"
        for name in open_
        for path in named[name]["driver_specific"]["nvme"]
        if path.get("problem")
    ]
    if lost:
        advice = "I/O goes by another path meanwhile: see to this one"
        return [*pools, Finding(what, "warning", "; ".join(lost), advice)]
    if bad:
        advice = "no VM can have it: see to it at the array"
        text = "; ".join(f"{name}: {why}" for name, why in bad.items())
        return [*pools, Finding(what, "warning", text, advice)]
    text = f"{', '.join(open_)}: connected" if open_ else "none is used"
    return [*pools, Finding(what, "ok", text)]
