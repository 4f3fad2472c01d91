"""One look at what a target counts, and the rates between two."""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from plugin.metrics.latencies import FINE_NS, Counts, between, counted, percentile_ns
from pydataplane import methods, supervise
from pydataplane.client import Client
from pydataplane.domain.names import CONTROLLER_PREFIX, domain_of
from pydataplane.domain.reactors import topology
from pydataplane.errors import METHOD_NOT_FOUND, RpcError

COUNTERS = ("num_read_ops", "num_write_ops", "bytes_read", "bytes_written")
LATENCIES = ("read_latency_ticks", "write_latency_ticks")


@dataclass(frozen=True)
class Use:
    """A disk of a VM."""

    vm: str
    """Its domain's name; the UUID where that is not visible."""
    controller: str
    target: int | None
    """Number of the SCSI target; None: a virtio-blk disk."""
    cpus: frozenset[int]
    """CPUs of the reactors that serve the controller's queues."""

    @property
    def uuid(self) -> str:
        """Returns what tells the VM from others of its name: the domain's UUID.

        Of a controller of no domain it is what that is called.
        """
        name = self.controller
        return domain_of(name) if name.startswith(CONTROLLER_PREFIX) else name

    @property
    def lun(self) -> str:
        """Returns what to call it: its SCSI target, or the virtio-blk disk's number."""
        return (
            f"scsi {self.target}" if self.target is not None else self.controller.partition(".")[2]
        )


@dataclass
class Sample:
    """What a target's counters say."""

    at: float
    tick_rate: int
    reactors: list[Mapping[str, Any]]
    queues: Counter[int]
    """How many queues are served by CPU."""
    bdevs: dict[str, Mapping[str, Any]]
    """Counters by name."""
    infos: list[methods.Bdev]
    """What they are."""
    uses: dict[str, list[Use]] = field(default_factory=dict)
    """The VMs' disks, by name of the bdev."""
    latencies: dict[str, Counts] | None = None
    """By name of the bdev; None: the target cannot count them."""

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Returns what people call them, by name."""
        return {
            item["name"]: item["aliases"][0] if item["aliases"] else item["name"]
            for item in self.infos
        }


def sample(target: Client, borders_ns: Sequence[int] = FINE_NS) -> Sample:
    """Returns the counters of a target now, with latencies below each of the borders.

    Raises:
        TargetError: it does not answer, or refuses.
    """
    controllers = target.call("vhost_get_controllers")
    iostat = target.call("bdev_get_iostat")
    return Sample(
        at=time.monotonic(),
        tick_rate=iostat["tick_rate"],
        reactors=_reactors(target),
        queues=Counter(
            queue["cpu"]
            for controller in controllers
            for session in controller["sessions"]
            for queue in session.get("queues", ())  # SPDK's does not tell
        ),
        bdevs={item["name"]: item for item in iostat["bdevs"]},
        infos=target.call("bdev_get_bdevs"),
        uses=_uses(controllers),
        latencies=counted(target, borders_ns),
    )


def _uses(controllers: Sequence[methods.Controller]) -> dict[str, list[Use]]:
    uses: defaultdict[str, list[Use]] = defaultdict(list)
    for controller in controllers:
        name = controller["ctrlr"]
        cpus = frozenset(
            queue["cpu"]
            for session in controller["sessions"]
            for queue in session.get("queues", ())
        )
        vm = _vm(controller)
        specific = controller["backend_specific"]
        block = specific.get("block")
        if block and (bdev := block["bdev"]):
            uses[bdev].append(Use(vm, name, None, cpus))
        for scsi in specific.get("scsi") or ():
            for lun in scsi["luns"]:
                uses[lun["bdev_name"]].append(Use(vm, name, scsi["scsi_dev_num"], cpus))
    return dict(uses)


def _vm(controller: methods.Controller) -> str:
    """Returns the name of the VM that a controller is of.

    QEMU has it in its arguments, where libvirt puts it. Where they cannot be read, it is the
    domain's UUID, and what the controller is called where it is of no domain.
    """
    name = controller["ctrlr"]
    owner = controller.get("owner")  # SPDK's does not tell
    if owner and owner["pid"]:
        try:
            words = Path(f"/proc/{owner['pid']}/cmdline").read_bytes().split(b"\0")
        except OSError:
            words = []
        for option, value in pairwise(words):
            found = re.match(rb"guest=((?:[^,]|,,)+)", value)
            if option == b"-name" and found:
                return found[1].replace(b",,", b",").decode(errors="replace")
    return domain_of(name) if name.startswith(CONTROLLER_PREFIX) else name


def _reactors(target: Client) -> list[Mapping[str, Any]]:
    """Returns what the reactors of a target did until now."""
    try:
        return list(supervise.status(target.path)["reactors"])
    except RpcError as error:
        if error.code != METHOD_NOT_FOUND:
            raise
    return [  # SPDK's: in ticks, of which the share is the same
        {
            "index": index,
            "cpu": each["lcore"],
            "busy_ns": each["busy"],
            "idle_ns": each["idle"],
            "sleep_ns": 0,
        }
        for index, each in enumerate(target.call("framework_get_reactors")["reactors"])
    ]


def difference(before: Sample, after: Sample) -> dict[str, Any]:
    """Returns what went on between two looks at a target.

    That is each reactor's place, busy share and queues, and of each bdev by its alias: its
    counters a second; `depth`, how many reads and writes were in flight on average; `p50_ns` and
    `p99_ns`, what half of them and 99 of 100 took at most, None where nothing was counted;
    `share`, its part of all the data and operations of the target; and the VMs that use it. Of each
    VM by its domain's UUID its name, and the same sums and percentiles of all its disks: one that
    others have too counts in full for each.
    """
    seconds = max(after.at - before.at, 1e-6)
    bdevs = {
        after.aliases.get(name, name): _rates(name, before, after, seconds) for name in after.bdevs
    }
    work = sum(_work(row) for row in bdevs.values() if row["uses"]) or 1
    for row in bdevs.values():
        row["share"] = _work(row) / work if row["uses"] else None
    return {
        "reactors": [
            _load(old, new, after)
            for old, new in zip(before.reactors, after.reactors, strict=False)
        ],
        "bdevs": bdevs,
        "vms": _of_vms(before, after, bdevs),
    }


def _of_vms(before: Sample, after: Sample, bdevs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what each VM does with all its disks; `bdevs` are the rates of these, by alias."""
    disks: defaultdict[str, dict[str, str]] = defaultdict(dict)
    names = {}
    for name, uses in after.uses.items():
        if name in after.bdevs:
            for use in uses:
                disks[use.uuid][name] = use.lun
                names[use.uuid] = use.vm
    vms = {}
    for vm, own in disks.items():
        volumes = {name: after.aliases.get(name, name) for name in own}
        rows = [bdevs[volume] for volume in volumes.values()]
        rates: dict[str, Any] = {"name": names[vm]}
        rates |= {key: sum(row[key] for row in rows) for key in COUNTERS}
        apart = [_counted(name, before, after) for name in own]
        _add_percentiles(rates, [sum(each) for each in zip(*filter(None, apart), strict=True)])
        rates["disks"] = [{"volume": volumes[name], "lun": lun} for name, lun in own.items()]
        vms[vm] = rates
    return vms


def _counted(name: str, before: Sample, after: Sample) -> list[int]:
    """Returns the latencies of a bdev's reads and writes in between; none of one not counted."""
    was, now = ((taken.latencies or {}).get(name, {}) for taken in (before, after))
    return between(was, now, ("read", "write"))


def _add_percentiles(rates: dict[str, Any], counts: Sequence[int]) -> None:
    rates["p50_ns"], rates["p99_ns"] = (percentile_ns(counts, share) for share in (0.5, 0.99))


def _rates(name: str, before: Sample, after: Sample, seconds: float) -> dict[str, Any]:
    new, old = after.bdevs[name], before.bdevs.get(name, {})
    rates: dict[str, Any] = {key: (new[key] - old.get(key, 0)) / seconds for key in COUNTERS}
    in_flight = sum(new[key] - old.get(key, 0) for key in LATENCIES)
    rates["depth"] = in_flight / after.tick_rate / seconds
    _add_percentiles(rates, _counted(name, before, after))
    rates["uses"] = [
        {
            "vm": use.vm,
            "uuid": use.uuid,
            "controller": use.controller,
            "lun": use.lun,
            "cpus": sorted(use.cpus),
        }
        for use in after.uses.get(name, ())
    ]
    return rates


UNIT_BYTES = 64 << 10
"""Bytes that are as much work as one operation more."""


def _work(row: Mapping[str, Any]) -> float:
    operations = row["num_read_ops"] + row["num_write_ops"]
    return float(operations + (row["bytes_read"] + row["bytes_written"]) / UNIT_BYTES)


def _load(old: Mapping[str, Any], new: Mapping[str, Any], after: Sample) -> dict[str, Any]:
    spent = {key: new[key] - old[key] for key in ("busy_ns", "idle_ns", "sleep_ns")}
    total = max(sum(spent.values()), 1)
    # One that is not pinned counts as the CPU of its index.
    cpu = new["index"] if new["cpu"] is None else new["cpu"]
    return {
        "index": new["index"],
        "cpu": new["cpu"],
        "node": _node(new["cpu"]),
        "busy": spent["busy_ns"] / total,
        "queues": after.queues[cpu],
    }


def _node(cpu: int | None) -> int | None:
    """Returns the NUMA node of a CPU of this host; None where there is none, or no CPU."""
    if cpu is None:
        return None
    there = topology({cpu}).get(cpu)
    return int(there.node.removeprefix("node")) if there and there.node else None


def noisiest(rates: Mapping[str, Any]) -> tuple[str, float] | None:
    """Returns the name of the VM that keeps the target busiest beside others, and its part.

    That is of what VMs do; None where no VM has a neighbour, or none does anything.
    """
    parts: Counter[str] = Counter()
    names: dict[str, str] = {}
    for row in rates["bdevs"].values():
        vms = {use["uuid"]: use["vm"] for use in row["uses"]}
        names |= vms
        for vm in vms:
            parts[vm] += row["share"] / len(vms)
    if len(parts) < 2 or not any(parts.values()):
        return None
    ((vm, part),) = parts.most_common(1)
    return names[vm], part
