"""Which reactors of a target are near the CPUs that a domain's vCPUs run on.

A request and its answer go from one CPU's cache to the other's: that takes a few times as long
where both share no cache, and longer still between NUMA nodes. On the very core that a vCPU is
bound to a reactor would take its time instead.

Standard library only, and little of that: the hook is made of it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache

from pydataplane.domain.xml.vcpus import cpus_of
from pydataplane.errors import RpcError
from pydataplane.methods import Rpc

SYSTEM = "/sys/devices/system/cpu"


@dataclass(frozen=True, slots=True)
class Cpu:
    """Where a CPU is; each of the sets has itself, and what the kernel does not tell is alone."""

    core: frozenset[int]
    """CPUs of its core."""
    cache: frozenset[int]
    """CPUs that it shares its last level of cache with."""
    node: str
    """Its NUMA node; empty where there is none."""


def topology(cpus: Collection[int], system: str = SYSTEM) -> dict[int, Cpu]:
    """Returns where these CPUs are; those that are not there lack."""
    found = {cpu: _read(cpu, f"{system}/cpu{cpu}") for cpu in cpus}
    return {cpu: read for cpu, read in found.items() if read is not None}


@cache
def _read(cpu: int, folder: str) -> Cpu | None:
    names = _list(folder)
    if not names:
        return None
    itself = frozenset({cpu})
    caches = [f"{folder}/cache/{name}" for name in _list(f"{folder}/cache") if "index" in name]
    last = max(caches, key=lambda path: _text(f"{path}/level"), default="")
    core = cpus_of(_text(f"{folder}/topology/thread_siblings_list"))
    shared = cpus_of(_text(f"{last}/shared_cpu_list"))
    node = next((name for name in names if name.removeprefix("node").isdigit()), "")
    return Cpu(core | itself, shared | itself, node)


def _list(folder: str) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - pathlib is slow to import
    except OSError:
        return []


def _text(path: str) -> str:
    try:
        with open(path) as file:  # noqa: PTH123 - as above
            return file.read().strip()
    except OSError:
        return ""


def nearest(
    reactors: Collection[int], vcpus: Collection[frozenset[int]], host: Mapping[int, Cpu]
) -> set[int]:
    """Returns those of the reactors (their CPUs) that are near the CPUs that vCPUs are bound to.

    For each of these the nearest ones: on its last level of cache, else on its NUMA node, else any.
    None on the core that a vCPU is bound to alone, unless there is no other.
    """
    known = {cpu: host[cpu] for each in vcpus for cpu in each if cpu in host}
    cores = [known[cpu].core for cpu in known]
    taken = {cpu for core in cores if any(each <= core for each in vcpus) for cpu in core}
    free = set(reactors) - taken or set(reactors)
    chosen: set[int] = set()
    for cpu in known.values():
        on_node = {reactor for reactor in free if _node(reactor, host) == cpu.node}
        chosen |= free & cpu.cache or on_node or free
    return chosen or set(reactors)


def _node(cpu: int, host: Mapping[int, Cpu]) -> str | None:
    return host[cpu].node if cpu in host else None


def mask_for(rpc: Rpc, vcpus: Collection[frozenset[int]]) -> str | None:
    """Returns the `cpumask` of a controller whose domain's vCPUs are bound to these sets of CPUs.

    None: all reactors serve it, as a vCPU runs anywhere, all reactors are as good, or the target
    does not tell.

    Raises:
        TargetUnavailable, TargetTimeout: the target does not answer.
    """
    if not vcpus:
        return None
    try:
        told = rpc.call("framework_get_reactors")
    except RpcError:
        return None
    reactors = {int(each["lcore"]) for each in told["reactors"]}
    if len(reactors) < 2:
        return None
    chosen = nearest(reactors, vcpus, topology(reactors.union(*vcpus)))
    if chosen == reactors:
        return None
    return "[" + ",".join(str(cpu) for cpu in sorted(chosen)) + "]"
