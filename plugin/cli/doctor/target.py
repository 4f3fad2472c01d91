"""The target: whether it serves, the room in its lvstores, and what its disks gave back wrongly."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plugin.cli import io_errors
from plugin.cli.doctor.finding import Finding
from plugin.cli.output import client, size
from plugin.config import Config
from pydataplane import supervise
from pydataplane.errors import METHOD_NOT_FOUND, RpcError, TargetError

LOW_SHARE = 0.1
"""Less of an lvstore free than this is worth a word: as the target notifies of it."""

START_WITH = (
    "`virtlun target upgrade -- --{name}`; with the units install the drop-in "
    "examples/systemd/{name}.conf, which says how"
)

CHECKSUM_ADVICE = (
    "look after the disk; `virtlun lvstore scrub` says which volumes have damage, to be restored "
    "there from a backup; `virtlun lvstore check --repair` mends metadata"
)


def target(socket: Path) -> Finding:
    """Whether the target serves, and what it waits for or could not restore."""
    try:
        found = supervise.status(socket)
        held = io_errors.sentences(io_errors.rows(client(socket)))
    except TargetError as error:
        if isinstance(error, RpcError) and error.code == METHOD_NOT_FOUND:
            return _other(socket)
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


def _other(socket: Path) -> Finding:
    """Says what a target is that is not ours, or older."""
    try:
        version = client(socket).call("spdk_get_version")["version"]
    except TargetError as error:
        return Finding("target", "failed", str(error))
    return Finding("target", "ok", f"runs: {version}, which does not tell how it is")


def holds_sessions(socket: Path) -> bool:
    """Returns whether VMs' connections outlive the target; False where it does not tell."""
    try:
        return bool(supervise.status(socket).get("holds_sessions"))
    except TargetError:
        return False


def kept_controllers(socket: Path) -> frozenset[str]:
    """Returns the controllers whose VM's connection outlives the target, as far as it tells."""
    try:
        found = client(socket).call("vhost_get_controllers")
    except TargetError:
        return frozenset()
    kept = (item for item in found if any(session.get("kept") for session in item["sessions"]))
    return frozenset(item["ctrlr"] for item in kept)


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
    found = ", ".join(
        f"{name} with {size(free)} free" if total else f"{name}, whose room is not known"
        for name, free, total in rooms
    )
    full = [name for name, free, total in rooms if free < LOW_SHARE * total]
    if full:
        pools = {store["name"] for store in stores if store.get("kind") == "rbd"}
        more = (
            "give its cluster more"
            if full[0] in pools
            else f"virtlun lvstore resize {full[0]} SIZE"
        )
        return Finding(
            what,
            "warning",
            f"{found}: writes to thin volumes fail when nothing is left",
            f"{more}, or delete volumes",
        )
    return Finding(what, "ok", found)


def checksums(socket: Path) -> list[Finding]:
    """What the bdevs with checksums read that was not what was written; of none, nothing."""
    what = "checksums"
    try:
        present = client(socket).call("virtlun_integrity_get")
    except TargetError:
        return []  # the target's own line says it, or it is one without
    if not present:
        return []
    bad = []
    for bdev in present:
        counts = (
            (bdev["mismatches"], "reads"),
            (bdev["damaged_checksum_pages"], "pages of checksums"),
            (bdev["damaged_maps"], "maps"),
        )
        found = [f"{count} {what_of}" for count, what_of in counts if count]
        if found:
            bad.append(f"{bdev['name']} ({', '.join(found)})")
    if bad:
        text = f"a disk gave back other data than was written to it: {'; '.join(bad)}"
        return [Finding(what, "failed", text, CHECKSUM_ADVICE)]
    names = ", ".join(bdev["name"] for bdev in present)
    return [Finding(what, "ok", f"of {names}: no mismatch since the target has them")]


def none_served(what: str, found: Mapping[str, Any], name: str, wanted: bool) -> Finding | None:
    """Says why disks are not served that the target serves if it has the option `name`.

    `found` is what it tells of them, `wanted` whether virtlun.toml has them served. None: they are.
    """
    if not found["asked"] and wanted:
        text = f"virtlun.toml has them served, but the target was started without --{name}"
        return Finding(what, "failed", text, START_WITH.format(name=name))
    if not found["asked"]:
        return Finding(what, "ok", f"none are served: the target was started without --{name}")
    if found["problem"]:
        return Finding(what, "failed", str(found["problem"]), "install it, then restart the target")
    return None


def images(socket: Path, settings: Config) -> list[Finding]:
    """Whether images of Ceph can be served, where that was asked for, and each cluster answers."""
    what = "images of Ceph"
    try:
        found = supervise.status(socket).get("images", {"asked": False})
        wanted = settings.target.rbd or settings.disks.may_serve("rbd")
        if none := none_served(what, found, "rbd", wanted):
            return [none]
        clusters = client(socket).call("bdev_rbd_get_clusters_info")
    except TargetError as error:
        if isinstance(error, RpcError) and error.code == -errno.ENOENT:
            advice = "spdk-rpc -s SOCKET bdev_rbd_register_cluster NAME"
            return [Finding(what, "ok", "librbd is there; no cluster is registered", advice)]
        why = "not known, for the target does not tell"
        return [Finding(what, "warning", why, "start it first")]
    assert isinstance(clusters, list)
    return [_cluster(each) for each in clusters]


def nbd_servers(socket: Path, settings: Config) -> list[Finding]:
    """Whether exports of NBD servers can be served, where that is wanted; else nothing."""
    what = "NBD servers"
    if not settings.target.network and not settings.disks.may_serve("nbd"):
        return []
    try:
        reachable = supervise.status(socket).get("network", False)
    except TargetError:
        return [Finding(what, "warning", "not known, for the target does not tell", "start it")]
    if reachable:
        return [Finding(what, "ok", "the target may connect to those by TCP, too")]
    text = "those of this host's UNIX sockets alone, as the target was started without --network"
    return [Finding(what, "warning", text, START_WITH.format(name="network"))]


def _cluster(found: Mapping[str, Any]) -> Finding:
    """Says whether a cluster answers, and whom it concerns."""
    what = f"cluster {found['cluster_name']}"
    bdevs = ", ".join(found["bdevs"])
    if found["connected"] and "problem" in found:
        advice = "`ceph -s` on this host says what it lacks; I/O goes on by itself when it answers"
        return Finding(what, "failed", f"{found['problem']}; images: {bdevs or 'none'}", advice)
    if found["connected"]:
        return Finding(what, "ok", f"connected; images: {bdevs or 'none'}")
    waiting = f"; these wait for it: {bdevs}" if bdevs else ""
    return Finding(
        what,
        "failed",
        f"{found['problem']}{waiting}",
        "`ceph -s` on this host says whether it works; the target goes on asking",
    )
