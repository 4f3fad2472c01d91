"""How much I/O a disk may do: the 19 numbers of libvirt's <iotune>, and which go together.

The target takes them by the same names (virtlun_bdev_set_limits); they are of the disk's volume.

Standard library only: the hook is made of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

MAX = 1_000_000_000_000_000
"""The largest value that libvirt gives to QEMU (QEMU_BLOCK_IOTUNE_MAX)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes and operations a second; 0: as many as there can be.

    `_max` is the rate of a burst, which may last for `_max_length` seconds, 0 meaning 1.
    """

    total_bytes_sec: int = 0
    read_bytes_sec: int = 0
    write_bytes_sec: int = 0
    total_iops_sec: int = 0
    read_iops_sec: int = 0
    write_iops_sec: int = 0
    total_bytes_sec_max: int = 0
    read_bytes_sec_max: int = 0
    write_bytes_sec_max: int = 0
    total_iops_sec_max: int = 0
    read_iops_sec_max: int = 0
    write_iops_sec_max: int = 0
    size_iops_sec: int = 0
    """Bytes that count as one operation; what is larger counts as several."""
    total_bytes_sec_max_length: int = 0
    read_bytes_sec_max_length: int = 0
    write_bytes_sec_max_length: int = 0
    total_iops_sec_max_length: int = 0
    read_iops_sec_max_length: int = 0
    write_iops_sec_max_length: int = 0

    @property
    def given(self) -> dict[str, int]:
        """Returns those that are not 0, in libvirt's order."""
        return {name: value for name, value in self.all.items() if value}

    @property
    def all(self) -> dict[str, int]:
        """Returns all of them by name, in libvirt's order."""
        return {name: int(getattr(self, name)) for name in NAMES}


NAMES = tuple(each.name for each in fields(Limits))
"""In the order in which libvirt shows them."""

KINDS = ("bytes_sec", "iops_sec", "bytes_sec_max", "iops_sec_max")
"""Of which the total goes without those of reads and writes, and these without that."""

WAYS = ("total", "read", "write")

RATES = tuple(f"{way}_{kind}" for kind in KINDS[:2] for way in WAYS)

NONE = Limits()
"""Nothing is limited."""


def limits_of(values: Mapping[str, object]) -> Limits:
    """Returns the limits with these values, without a length of a burst that there is not.

    A length of 1 is what a burst has that says none.
    """
    own = {name: value for name in NAMES if isinstance(value := values.get(name), int) and value}
    for rate in RATES:
        if not own.get(f"{rate}_max") and own.get(f"{rate}_max_length") == 1:
            del own[f"{rate}_max_length"]
    return Limits(**own)


def doubled(limits: Limits) -> str | None:
    """Returns, as libvirt says it, of what both the total and a part of it are limited."""
    given = limits.given
    for kind in KINDS:
        if f"total_{kind}" in given and given.keys() & {f"read_{kind}", f"write_{kind}"}:
            return f"total and read/write of {kind} cannot be set at the same time"
    return None


def unbased(limits: Limits) -> str | None:
    """Returns which value means nothing beside the others, as libvirt or QEMU says it."""
    values = limits.all
    for rate in RATES:
        burst, length = values[f"{rate}_max"], values[f"{rate}_max_length"]
        if burst and not values[rate]:
            return f"value '{rate}_max' cannot be set if '{rate}' is not set"
        if burst and burst < values[rate]:
            return f"value '{rate}_max' cannot be smaller than '{rate}'"
        if length and not burst:
            return f"value '{rate}_max_length' cannot be set if '{rate}_max' is not set"
        if burst * length > MAX:
            return f"value '{rate}_max_length' is too long for that of '{rate}_max'"
    iops = [rate for rate in RATES if "iops" in rate]
    if limits.size_iops_sec and not any(values[rate] for rate in iops):
        return f"value 'size_iops_sec' cannot be set if none of {', '.join(iops)} is set"
    return None


def too_large(limits: Limits) -> str | None:
    """Returns which value is larger than libvirt takes it, None if none is."""
    for name, value in limits.given.items():
        if value > MAX:
            return f"value '{name}' must be no more than {MAX}"
    return None


def contradiction(limits: Limits) -> str | None:
    """Returns why a disk cannot have these limits, None if it can."""
    return doubled(limits) or unbased(limits) or too_large(limits)


def merged(old: Limits, new: Mapping[str, int]) -> Limits:
    """Returns what a disk has after virDomainSetBlockIoTune with these values.

    As libvirt's QEMU driver: of bytes, of operations, and of the bursts of each, what a call does
    not name is 0 if it names another of its kind, else it stays; so it is with the lengths, of
    which one that was set and is 0 now is 1 as long as there is a burst.
    """
    values = {name: int(new.get(name, 0)) for name in NAMES}
    before = old.all
    for kind in (*KINDS, "bytes_sec_max_length", "iops_sec_max_length"):
        names = [f"{way}_{kind}" for way in WAYS]
        if not any(name in new for name in names):
            values |= {name: before[name] for name in names}
    if "size_iops_sec" not in new:
        values["size_iops_sec"] = before["size_iops_sec"]
    for rate in RATES:
        length = f"{rate}_max_length"
        if before[length] and not values[length] and values[f"{rate}_max"]:
            values[length] = 1
    return limits_of(values)
