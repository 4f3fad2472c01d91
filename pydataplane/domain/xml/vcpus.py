"""Which CPUs of the host a domain's vCPUs run on, as <vcpu cpuset=> and <cputune> say."""

from __future__ import annotations

from pydataplane.domain.xml.document import Node, number

MAX_CPUS = 16_384
"""More than any host has, as libvirt has it (VIR_DOMAIN_CPUMASK_LEN)."""
MAX_NAMED = 2 * MAX_CPUS
"""CPUs that one set names, each as often as it is named: what takes longer is no honest set."""
MAX_SETS = 1_024
MAX_LISTED = 1 << 18
"""Sets of a domain that differ, and CPUs of all of them; with more it counts as bound to none."""


def pinned_to(domain: Node) -> frozenset[frozenset[int]]:
    """Returns the sets of the host's CPUs that the vCPUs are bound to, each once.

    Empty: one of them may run on any. A vCPU without a <vcpupin> of its own has what
    <vcpu cpuset=> says for all.
    """
    node = domain.child("vcpu")
    count = (number(node.text.strip()) if node is not None else None) or 1
    common = cpus_of((node.attrs.get("cpuset") if node is not None else None) or "")
    own: dict[int, frozenset[int]] = {}
    read: dict[str, frozenset[int]] = {}
    cputune = domain.child("cputune")
    for pin in cputune.every("vcpupin") if cputune is not None else ():
        vcpu = number(pin.attrs.get("vcpu"))
        text = pin.attrs.get("cpuset") or ""
        if vcpu is not None and vcpu < count:
            if text not in read:
                read[text] = cpus_of(text)
                if len(read) > MAX_SETS or sum(map(len, read.values())) > MAX_LISTED:
                    return frozenset()
            own[vcpu] = read[text] or common
    sets = {*own.values(), common} if len(own) < count else {*own.values()}
    return frozenset(sets) if all(sets) else frozenset()


def cpus_of(cpuset: str) -> frozenset[int]:
    """Returns the CPUs of a set as libvirt writes them, `1-4,^3,6`; empty if that is none."""
    found: set[int] = set()
    named = 0
    for part in filter(None, (part.strip() for part in cpuset.split(","))):
        taken = part.startswith("^")
        first, _, last = part.removeprefix("^").partition("-")
        begin, end = number(first.strip()), number((last or first).strip())
        if begin is None or end is None or end >= MAX_CPUS:
            return frozenset()
        cpus = range(begin, end + 1)
        named += len(cpus)
        if named > MAX_NAMED:
            return frozenset()
        if taken:
            found.difference_update(cpus)
        else:
            found.update(cpus)
    return frozenset(found)
