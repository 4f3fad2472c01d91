"""What a domain that is defined again, changed or started elsewhere keeps of what it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pydataplane.domain.model import LunPlan
from pydataplane.domain.translate import fronts
from pydataplane.domain.translate.fronts import Fronts
from pydataplane.domain.translate.numbering import Before, Ours, before
from pydataplane.domain.xml import blkdisk
from pydataplane.domain.xml import carrier as carriers
from pydataplane.domain.xml import disk as disks
from pydataplane.domain.xml.carrier import Carrier
from pydataplane.domain.xml.metadata import Metadata
from pydataplane.domain.xml.view import View


@dataclass(frozen=True, slots=True)
class RunningCarrier:
    """The carrier that a running guest has: libvirt refuses one of another name or position."""

    carrier: Carrier
    dev: str
    """Its target dev."""
    before: str | None
    """The target dev of the disk that stands behind it."""

    @classmethod
    def of(cls, view: View) -> RunningCarrier | None:
        """Reads it from libvirtd's XML, None if there is no carrier."""
        carrier, devices = view.carrier, view.domain.child("devices")
        if carrier is None or devices is None:
            return None
        nodes = list(devices.every("disk"))
        at = next(number for number, node in enumerate(nodes) if carriers.is_carrier(node))
        before = nodes[at + 1].value("target", "dev") if at + 1 < len(nodes) else None
        return cls(carrier, nodes[at].value("target", "dev") or "", before)


@dataclass(frozen=True, slots=True)
class Current:
    """What a domain that is defined again keeps."""

    disks: tuple[Before, ...] = ()
    address: str | None = None
    """The carrier's PCI <address> as written."""
    marked: bool = False
    """It has our metadata, if only an empty element: see `translate`."""
    carried: bool = False
    """It has the controller."""
    fronts: Fronts = field(default_factory=dict)
    """What its disks are."""
    running_carrier: RunningCarrier | None = None
    """Of a guest that goes on: its carrier."""
    running: bool = False
    """Its guest goes on."""
    devices: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """The queues that its virtio-blk disks have at libvirtd, by target dev."""
    as_stored: bool = False
    """Nobody defines it anew: its disks stay what they are, and may say what they always did."""
    stored: Mapping[str, Before] = field(default_factory=dict)
    """Then: these disks, by target dev."""

    @classmethod
    def of(cls, view: View | None, *, running: bool = False) -> Current:
        """Reads it from libvirtd's XML, as far as there is any; `running`: of a guest."""
        if view is None:
            return cls()
        found = replace(cls.with_disks(view, view.salvaged), devices=_devices(view))
        if not running:
            return found
        return replace(found, running_carrier=RunningCarrier.of(view), running=True)

    def staying(self, view: View | None, metadata: Metadata | None) -> Current:
        """Returns it with disks that stay what they are in libvirtd's XML, of this metadata."""
        return replace(
            self,
            as_stored=True,
            stored={each.lun.dev: each for each in before(metadata)},
            devices=_devices(view) if view is not None else {},
            fronts={**self.fronts, **fronts.of(metadata)},
        )

    def kept_queues(self, item: Ours) -> Mapping[str, str] | None:
        """Returns the queues that a disk keeps, whatever it asks for; None: those it asks for.

        A LUN has none of its own.
        """
        if item.front == "scsi":
            return {} if self.running or self.as_stored else None
        dev = item.disk.dev or ""
        was = self.stored.get(dev)
        same = was is not None and was.disk is not None and was.disk.queues == item.disk.queues
        return self.devices.get(dev) if self.running or same else None

    def as_it_was(self, lun: LunPlan) -> LunPlan:
        """Returns a disk as its guest sees it, where it stays what it is."""
        was = self.stored.get(lun.dev)
        return lun if was is None else fronts.as_asked(lun, was.lun, was.disk)

    @classmethod
    def with_disks(cls, view: View, metadata: Metadata | None) -> Current:
        """Takes it from libvirtd's XML, but for the disks, which are those of this metadata."""
        return cls(
            before(metadata),
            carriers.address(view.document, view.domain),
            metadata is not None,
            view.carrier is not None,
            fronts.of(metadata),
        )


def _devices(view: View) -> dict[str, dict[str, str]]:
    return {
        node.value("target", "dev") or "": disks.queues(node)
        for node in view.disk_nodes()
        if blkdisk.number_of(node) is not None
    }
