"""The target: whether it serves, and the room in its lvstores."""

from __future__ import annotations

from pathlib import Path

from plugin.cli import io_errors
from plugin.cli.doctor.finding import Finding
from plugin.cli.output import client, size
from pydataplane import supervise
from pydataplane.errors import TargetError

LOW_SHARE = 0.1
"""Less of an lvstore free than this is worth a word: as the target notifies of it."""


def target(socket: Path) -> Finding:
    """Whether the target serves, and what it waits for or could not restore."""
    try:
        found = supervise.status(socket)
        held = io_errors.sentences(io_errors.rows(client(socket)))
    except TargetError as error:
        return Finding("target", "failed", str(error))
    errors = found.get("flush_errors", [])
    if errors:
        return Finding(
            "target",
            "failed",
            f"runs; {'; '.join(map(str, errors))}",
            "mend the disk, then `virtlun bdev clear-flush-error` with its name, which says what "
            "that means, and check what is on it",
        )
    waiting = [
        f"{wait['name']} has waited for {wait['waits_for']} for {float(wait['since_s']):.0f} s"
        for wait in found.get("waiting", [])
    ]
    problems = [*map(str, found["restore_problems"]), *held, *waiting]
    if problems:
        advice = (
            "make room or mend the disk, then `virtlun domain retry`; `virtlun domain errors` says "
            "which VM and volume"
        )
        text = f"runs; {'; '.join(problems)}"
        return Finding("target", "warning", text, advice if held else "")
    return Finding("target", "ok", f"runs: pid {found['pid']}, version {found['version']}")


def host_devices(socket: Path) -> Finding:
    """Which block devices new pods on this host get from the driver, and why."""
    what = "pods' new devices"
    try:
        found = client(socket).call("virtlun_export_get_devices")
    except TargetError:
        return Finding(what, "warning", "not known, for the target does not tell", "start it first")
    if found["resizes"]:
        return Finding(what, "ok", "of ublk, which grow while they are used")
    return Finding(
        what,
        "ok",
        f"loop devices over FUSE, as {found['why']}",
        "`virtlun-csi --host-device ublk` takes such as keep their size" if found["ublk"] else "",
    )


def lvstores(socket: Path) -> Finding:
    """Whether there is a store to cut volumes from, that works and has room."""
    what = "lvstores"
    try:
        stores = client(socket).call("bdev_lvol_get_lvstores")
    except TargetError:
        return Finding(what, "warning", "not known, for the target does not tell", "start it first")
    stopped = [f"{store['name']} ({store['stopped']})" for store in stores if store.get("stopped")]
    if stopped:
        return Finding(
            what,
            "failed",
            f"{', '.join(stopped)}: takes no more changes",
            "mend the file or device that it is on, then `virtlun bdev clear-flush-error` with the "
            "name of its bdev: `virtlun bdev list` has it",
        )
    if not stores:
        return Finding(
            what,
            "warning",
            "none: there is nothing to cut volumes from",
            "virtlun lvstore create lvs0 --file FILE-OR-DEVICE, with --size for a new file",
        )
    rooms = [
        (
            store["name"],
            store["cluster_size"] * store["free_clusters"],
            store["cluster_size"] * store["total_data_clusters"],
        )
        for store in stores
    ]
    found = ", ".join(f"{name} with {size(free)} free" for name, free, _ in rooms)
    full = [name for name, free, total in rooms if free < LOW_SHARE * total]
    if full:
        return Finding(
            what,
            "warning",
            f"{found}: writes to thin volumes fail when nothing is left",
            f"virtlun lvstore resize {full[0]} SIZE, or delete volumes",
        )
    return Finding(what, "ok", found)
