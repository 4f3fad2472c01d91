"""The target: whether it serves, what it may do on this host, and the room in its lvstores."""

from __future__ import annotations

from pathlib import Path

from plugin.cli import io_errors
from plugin.cli.doctor.finding import Finding
from plugin.cli.output import client, size
from pydataplane import supervise
from pydataplane.errors import TargetError

LOW_SHARE = 0.05
"""Less of an lvstore free than this is worth a word."""
TARGET_USER = "virtlun"
CAPABILITIES = {
    0: "CHOWN",
    1: "DAC_OVERRIDE",
    2: "DAC_READ_SEARCH",
    3: "FOWNER",
    6: "SETGID",
    7: "SETUID",
    8: "SETPCAP",
    12: "NET_ADMIN",
    14: "IPC_LOCK",
    17: "SYS_RAWIO",
    19: "SYS_PTRACE",
    21: "SYS_ADMIN",
    23: "SYS_NICE",
    24: "SYS_RESOURCE",
}
"""Those that a target is likely to have, by number."""


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


def rights(socket: Path) -> Finding:
    """What could be done by who runs code in the target: user, capabilities, system calls."""
    what = "the target's rights"
    try:
        found = supervise.status(socket)
        status = _process_status(int(found["pid"]))
    except (TargetError, OSError, ValueError):
        return Finding(what, "warning", "not known, for the target does not tell", "start it first")
    user = found.get("user", {}).get("name", status["Uid"].split()[0])
    capabilities = _capabilities(int(status["CapEff"], 16))
    confined = status.get("Seccomp") == "2" and found.get("sandbox", "enforce") == "enforce"
    facts = (
        f"user {user}",
        f"capabilities {', '.join(capabilities) or 'none'}",
        f"no_new_privs {'set' if status.get('NoNewPrivs') == '1' else 'not set'}",
        f"seccomp {'enforced' if confined else 'not enforced'}",
    )
    refused = found.get("refused_calls", [])
    if refused:
        return Finding(
            what,
            "warning",
            f"{'; '.join(facts)}; refused system calls: {', '.join(refused)}",
            "report this with the target's log: the target lacks a call, or a guest attacks it",
        )
    if status["Uid"].split()[1] == "0" or capabilities:
        return Finding(
            what,
            "warning",
            "; ".join(facts),
            f"make a user for it (systemd-sysusers, or useradd --system {TARGET_USER}), then start "
            "it again",
        )
    if not confined:
        return Finding(what, "warning", "; ".join(facts), "start it without --no-sandbox")
    return Finding(what, "ok", "; ".join(facts))


def _process_status(pid: int) -> dict[str, str]:
    """Returns the fields of proc_pid_status(5)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _capabilities(bits: int) -> list[str]:
    """Returns the names of those that are set, as linux/capability.h numbers them."""
    return [
        CAPABILITIES.get(number, f"number {number}")
        for number in range(bits.bit_length())
        if bits >> number & 1
    ]


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
