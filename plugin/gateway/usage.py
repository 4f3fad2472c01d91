"""What guests did with LUNs, as the target counts it: libvirt's block statistics.

The target counts for each LUN of a controller, from when its QEMU came, or from when the LUN was
attached if that is later. So the numbers begin at 0 with each start of a VM, as those of libvirt's
own disks, and of a shared volume each VM has its own.

SPDK's own target counts for each bdev alone: since that was made, and for all its VMs together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import Any

from pydataplane import methods
from pydataplane.client import Client
from pydataplane.domain.model import DiskAddress
from pydataplane.domain.observed import observe
from pydataplane.errors import BAD_PARAMETERS, METHOD_NOT_FOUND, NO_DEVICE, RpcError

NS_PER_S = 1_000_000_000

CONTROLLERS_MAX = 8
"""Controllers that are asked for by name, in one exchange; of more all are asked for at once."""


Unit = DiskAddress
"""A disk that a domain has while it runs."""


@dataclass(frozen=True)
class Usage:
    """What a guest did with one disk: operations, bytes and nanoseconds."""

    reads: int
    read_bytes: int
    read_ns: int
    writes: int
    written_bytes: int
    write_ns: int
    flushes: int = 0
    flush_ns: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def ask(client: Client, units: Iterable[Unit]) -> dict[Unit, Usage]:
    """Returns what guests did with these LUNs; those that the target does not have are left out.

    Raises:
        TargetError: it refuses or does not answer.
    """
    wanted = set(units)
    try:
        controllers = _statistics(client, wanted)
    except RpcError as error:
        if error.code != METHOD_NOT_FOUND:
            raise
        return _of_bdevs(client, wanted)
    return {
        unit: _usage(item)
        for controller in controllers
        for item in controller["targets"]
        if (unit := Unit(controller["ctrlr"], item["scsi_target_num"])) in wanted
    }


def _of_bdevs(client: Client, units: set[Unit]) -> dict[Unit, Usage]:
    """Returns what was done with the bdevs of these LUNs."""
    state = observe(client)
    bdevs = {
        unit: shown.bdev
        for unit in units
        if (shown := state.controllers.get(unit.controller, {}).get(unit.target)) is not None
    }
    told = client.call("bdev_get_iostat")
    counted = {each["name"]: each for each in told["bdevs"]}
    return {
        unit: _of_bdev(counted[bdev], told["tick_rate"])
        for unit, bdev in bdevs.items()
        if bdev in counted
    }


def _of_bdev(item: Mapping[str, Any], tick_rate: int) -> Usage:
    """Reads what was done with one bdev; `tick_rate` are ticks a second."""
    return Usage(
        reads=item["num_read_ops"],
        read_bytes=item["bytes_read"],
        read_ns=item["read_latency_ticks"] * NS_PER_S // tick_rate,
        writes=item["num_write_ops"],
        written_bytes=item["bytes_written"],
        write_ns=item["write_latency_ticks"] * NS_PER_S // tick_rate,
    )


def _statistics(client: Client, units: set[Unit]) -> list[methods.ControllerStats]:
    """Asks for no more than is needed, in one exchange; another one with an older target."""
    if len(units) == 1:
        (unit,) = units
        try:
            return client.call(
                "virtlun_vhost_get_stats", name=unit.controller, scsi_target_num=unit.target
            )
        except RpcError as error:
            if error.code == NO_DEVICE:
                return []
            if error.code != BAD_PARAMETERS:
                raise
    names = sorted({unit.controller for unit in units})
    if len(names) > CONTROLLERS_MAX:
        return client.call("virtlun_vhost_get_stats")
    by_name = client.call_for_each("virtlun_vhost_get_stats", names, lambda name: {"name": name})
    return [controller for answer in by_name.values() for controller in answer]


def _usage(item: methods.TargetStats) -> Usage:
    return Usage(
        reads=item["reads"],
        read_bytes=item["read_bytes"],
        read_ns=item["read_ns"],
        writes=item["writes"],
        written_bytes=item["write_bytes"],
        write_ns=item["write_ns"],
        flushes=item["flushes"],
        flush_ns=item["flush_ns"],
    )
