"""Which disk of ours, if any, the firmware boots, and what the carrier needs for it.

QEMU gives one bootindex to a vhost-user-scsi controller and lets `boot_tpgt` say which of its
targets it means. libvirt gives <boot order=> as bootindex; with <os><boot dev='hd'/> it gives the
first hard disk of its list the index. So the carrier takes the order of our first bootable disk, or
stands so that libvirt's first hard disk is the one that it would be if our disks were libvirt's.
libvirt sorts disks of one bus by target dev (virDomainDiskInsert), hence the carrier's own name:
`ubda` sorts before any vdX of the bus virtio, `vdzzzz` behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.xml.disk import Disk, index

_FIRST = ("ubda", "xvda", "hda", "sda")
"""Names of disk number 0, which sort before or with vda."""
_LAST = tuple(f"vdzz{a}{b}" for b in "zyxwvutsrqponmlkjihgfedcba" for a in ("z", "zz", "zzz"))
"""Names that sort behind any that a client would give."""


@dataclass(frozen=True, slots=True)
class Boot:
    """How the carrier takes part in booting."""

    dev: str | None
    """The disk of ours that the controller boots; None if there is no disk of ours."""
    order: int | None
    """<boot order=> of the carrier."""
    first: bool
    """The carrier sorts before all other disks of its bus."""
    front: bool = field(default=False, compare=False)
    """The carrier is written before the other disks, not behind them."""


def choose(disks: Sequence[tuple[Disk, bool]]) -> Boot:
    """Chooses from the client's disks in their order, each with whether it is ours."""
    ours = [disk for disk, is_ours in disks if is_ours]
    ordered = sorted((d.boot, d.dev or "") for d in ours if d.boot is not None)
    if ordered:
        return Boot(ordered[0][1], ordered[0][0], False)
    hard = [item for item in libvirt_order(disks) if item[0].device in ("disk", "lun")]
    dev = next((disk.dev for disk, is_ours in hard if is_ours), None)
    if not hard:
        return Boot(None, None, False)
    if hard[0][1]:
        # Stays first, too, when libvirt's own disks are attached later.
        return Boot(dev, None, first=True, front=True)
    others = [item for item in disks if not item[1]]
    stand_in = Disk(_LAST[0], "virtio", "disk", None, None, None, False, False)
    behind = libvirt_order([*others, (stand_in, True)])
    boots = next(disk for disk, _ in behind if disk.device in ("disk", "lun"))
    # In front, the carrier pulls the other disks of its bus along with it.
    return Boot(dev, None, first=False, front=boots is not hard[0][0])


def libvirt_order(disks: Iterable[tuple[Disk, bool]]) -> list[tuple[Disk, bool]]:
    """Returns the disks as libvirt lists them, which puts them in one by one: see `place`.

    So those of a bus stand together, where its first one came, in the order of their numbers. To
    insert each would take a client's domain of thousands of disks minutes.
    """
    of_bus: dict[str, list[tuple[Disk, bool]]] = {}
    for item in disks:
        of_bus.setdefault(item[0].bus, []).append(item)
    return [
        item
        for together in of_bus.values()
        for item in sorted(together, key=lambda item: index(item[0].dev))
    ]


def place(disks: Sequence[Disk], new: Disk) -> int:
    """Returns where libvirt puts one more disk into its list (virDomainDiskInsert)."""
    position: int | None = None
    for i in reversed(range(len(disks))):
        if disks[i].bus != new.bus:
            continue
        if index(disks[i].dev) > index(new.dev):
            position = i
        elif position is None:
            position = i + 1
    return len(disks) if position is None else position


def carrier_dev(first: bool, used: Iterable[str | None]) -> str:
    """Returns the carrier's target dev: not in use, and sorting as it must.

    Raises:
        TranslateError: UNSUPPORTED, all of them are in use.
    """
    taken = set(used)
    for dev in _FIRST + _LAST if first else _LAST:
        if dev not in taken:
            return dev
    raise TranslateError(
        Refusal.UNSUPPORTED,
        f"no target dev from {_LAST[-1]} to {_LAST[0]} is free for the virtlun controller: give"
        " one of those disks another",
    )
