"""A domain as libvirtd has it, read: where our traces are and what the client would see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.model import LunPlan, Plan, Settings
from pydataplane.domain.names import controller_name
from pydataplane.domain.xml import blkdisk
from pydataplane.domain.xml import carrier as carriers
from pydataplane.domain.xml import metadata as metadatas
from pydataplane.domain.xml.carrier import Carrier
from pydataplane.domain.xml.disk import Disk, read, shown_alias
from pydataplane.domain.xml.document import Document, Edits, Node, NotXmlError, layout, number
from pydataplane.domain.xml.metadata import Entry, Metadata, places
from pydataplane.domain.xml.vcpus import pinned_to

KEPT = 4
"""Domains that stay parsed, which is read-only: both sides of one, and what others ask then."""

KEPT_CHARS = 49_152
"""The longest that do, characters: a domain of 120 disks has 40,000. Parsed, they take some MiB."""

_UUID_PARTS = ((0, 8), (8, 12), (12, 16), (16, 20), (20, None))
"""Of a UUID's digits, between its hyphens; the module uuid is slow to import."""


@dataclass(frozen=True, slots=True)
class View:
    """One <domain> element of a document."""

    document: Document
    domain: Node

    @property
    def name(self) -> str:
        """Returns the domain's name, for messages."""
        node = self.domain.child("name")
        return node.text.strip() if node is not None else ""

    @property
    def element(self) -> Node | None:
        """Returns our element in <metadata>, or None."""
        return metadatas.element(self.domain)

    @property
    def metadata(self) -> Metadata | None:
        """Returns our metadata, None if there is none.

        Raises:
            TranslateError: BAD_XML, it is damaged.
        """
        return None if self.element is None else self._there(metadatas.parse(self.element))

    @property
    def salvaged(self) -> Metadata | None:
        """Returns what of our metadata can be read, None if there is none."""
        return None if self.element is None else self._there(metadatas.salvage(self.element))

    def _there(self, metadata: Metadata) -> Metadata:
        """Returns metadata without virtio-blk disks that libvirtd does not have.

        Those are the devices that libvirtd says: what is left of one whose attach failed, or that a
        guest has let go late, is nothing.
        """
        gone = [e for e in metadata.entries if e.lun.front == "blk" and self.blk_node(e) is None]
        for entry in gone:
            metadata = metadata.without(entry)
        return metadata

    def blk_node(self, entry: Entry) -> Node | None:
        """Returns the device that a virtio-blk disk of ours is, None if there is none."""
        return next((n for n in self.disk_nodes() if blkdisk.is_of(n, entry.lun)), None)

    def alias(self, entry: Entry) -> str:
        """Returns the alias that clients see; of a virtio-blk disk libvirtd chooses it."""
        if entry.lun.front == "blk":
            node = self.blk_node(entry)
            return (node.value("alias", "name") if node is not None else None) or ""
        return shown_alias(entry.lun.dev, entry.disk.alias if entry.disk is not None else None)

    @property
    def carrier(self) -> Carrier | None:
        """Returns what the domain says of our controller, None if it has none."""
        return carriers.read(self.domain)

    @property
    def is_served(self) -> bool:
        """Returns whether the domain has a controller of the target's, not what stands in."""
        carrier = self.carrier
        return carrier is not None and not carrier.stands_in

    @property
    def has_traces(self) -> bool:
        """Returns whether anything of ours is in the domain."""
        return any(
            item is not None
            for item in (self.element, self.carrier, carriers.override(self.domain))
        )

    def disk_nodes(self) -> list[Node]:
        """Returns the <disk> elements without our carrier."""
        devices = self.domain.child("devices")
        disks = devices.every("disk") if devices is not None else iter(())
        return [node for node in disks if not carriers.is_carrier(node)]

    def their_nodes(self) -> list[Node]:
        """Returns the <disk> elements of libvirtd's own disks, without ours and the carrier."""
        return [node for node in self.disk_nodes() if blkdisk.number_of(node) is None]

    @property
    def hidden(self) -> frozenset[str]:
        """Returns the target devs of libvirtd's disks that clients know otherwise, or not at all.

        That are the carrier and the virtio-blk disks of ours.
        """
        return frozenset(dev for node in self.own_nodes() if (dev := node.value("target", "dev")))

    def own_nodes(self) -> list[Node]:
        """Returns the <disk> elements of the carrier and of virtio-blk disks of ours."""
        carrier = carriers.disk(self.domain)
        return [*self._blk_nodes(), *([carrier] if carrier is not None else [])]

    def placed(self, metadata: Metadata | None) -> list[tuple[Node | None, Entry | None]]:
        """Returns the disks that the client sees if this is our metadata, in its order.

        Each with libvirtd's element, None of a LUN; and with the entry of one of ours.
        """
        entries = metadata.entries if metadata is not None else ()
        found: list[tuple[Node | None, Entry | None]] = []
        for node in self.disk_nodes():
            entry = next((e for e in entries if blkdisk.is_of(node, e.lun)), None)
            if metadata is None or entry is not None or blkdisk.number_of(node) is None:
                found.append((node, entry))
        there = [entry for _, entry in found if entry is not None]
        rest = [entry for entry in entries if entry not in there]
        devs = [node.value("target", "dev") if node is not None else None for node, _ in found]
        for place, entry in reversed(places(rest, devs)):
            found.insert(place, (None, entry))
        return found

    def client_disks(self, metadata: Metadata | None) -> list[tuple[Disk, LunPlan | None]]:
        """Returns the disks that the client sees, in its order, with the plans of ours."""
        result: list[tuple[Disk, LunPlan | None]] = []
        for node, entry in self.placed(metadata):
            disk = entry.disk if entry is not None else read(node) if node is not None else None
            if disk is not None:
                result.append((disk, entry.lun if entry is not None else None))
        return result

    @property
    def socket(self) -> str | None:
        """Returns the path of the controller's socket, whoever's it is; None without one.

        Of a domain that has virtio-blk disks alone: what the paths of theirs begin with.
        """
        carrier = self.carrier
        if carrier is not None and not carrier.stands_in:
            return carrier.socket
        path = next((n.value("source", "path") for n in self._blk_nodes()), None)
        return None if path is None else path.rpartition(".")[0]

    def _blk_nodes(self) -> Iterator[Node]:
        return (node for node in self.disk_nodes() if blkdisk.number_of(node) is not None)

    @property
    def num_queues(self) -> int:
        """Returns the request queues of the domain's controllers."""
        carrier = self.carrier
        if carrier is not None:
            return carrier.num_queues
        return max((number(n.value("driver", "queues")) or 1 for n in self._blk_nodes()), default=1)

    @property
    def uuid(self) -> str:
        """The domain's UUID, in lower case; hyphens alone where it has none."""
        node = self.domain.child("uuid")
        digits = "".join(char for char in (node.text if node else "").lower() if char.isalnum())
        return "-".join(digits[start:end] for start, end in _UUID_PARTS)

    def plan(self) -> Plan | None:
        """Returns what the domain needs of the target, None if nothing; raises as `plan_with`."""
        return self.plan_with(self.metadata)

    def plan_with(self, metadata: Metadata | None, socket: str | None = None) -> Plan | None:
        """Returns what the domain needs of the target if this is its metadata, None if nothing.

        `socket` is its controller's where it has no device that says so.

        Raises:
            TranslateError: BAD_XML, the metadata is damaged or another domain's, or the carrier is
                missing.
        """
        carrier, socket = self.carrier, self.socket or socket
        if metadata is None or not (metadata.entries or self.is_served):
            return None
        uuid = self.uuid
        if metadata.controller != controller_name(uuid):
            # A copy of its XML under another UUID: the controller is the original's.
            raise TranslateError(
                Refusal.BAD_XML,
                f"domain '{self.name}' (UUID {uuid}) is a copy of another with that one's virtlun"
                f" controller {metadata.controller}; define it again through the gateway, which"
                " gives it one of its own",
            )
        has_scsi = carrier is not None and not carrier.stands_in
        if socket is None or not (has_scsi or all(e.lun.front == "blk" for e in metadata.entries)):
            raise TranslateError(
                Refusal.BAD_XML,
                f"domain '{self.name}' has virtlun disks in its metadata but no controller for"
                " them; define it again through the gateway",
            )
        luns = tuple(sorted((e.lun for e in metadata.entries), key=lambda lun: lun.target))
        queues = self.num_queues
        plan = Plan(self.name, metadata.controller, socket, queues, luns, self.qemu_uid)
        named = {(n.value("source", "path") or "").rpartition("/")[2] for n in self._blk_nodes()}
        others = tuple(sorted(named - plan.controllers.keys()))
        cpus = pinned_to(self.domain)
        offers = carrier is not None and carrier.protection
        plan = replace(plan, has_scsi=has_scsi, others=others, cpus=cpus)
        return replace(plan, protection=offers)

    @property
    def qemu_uid(self) -> int | None:
        """Returns the number of the user that QEMU runs as; None: libvirt does not say (yet)."""
        for label in self.domain.every("seclabel"):
            node = label.child("label")
            if label.attrs.get("model") == "dac" and node is not None:
                user = number(node.text.strip().split(":")[0].removeprefix("+"))
                if user is not None:
                    return user
        return None


def parse(domain_xml: str) -> View | None:
    """Parses a <domain>; None if it is not well formed or something else.

    One text is asked several things about while a disk changes, so the last ones are kept.
    """
    return _kept(domain_xml) if len(domain_xml) <= KEPT_CHARS else _parsed(domain_xml)


def _parsed(domain_xml: str) -> View | None:
    try:
        document = Document(domain_xml)
    except NotXmlError:
        return None
    root = document.root
    return View(document, root) if root.name == "domain" and not root.namespace else None


_kept = lru_cache(maxsize=KEPT)(_parsed)


def given(xml: bytes) -> View | None:
    """Returns the domain that libvirtd gives its hook, None if it is something else.

    Raises:
        TranslateError: INTERNAL, the XML cannot be read.
    """
    try:
        document = Document(xml.decode())
    except ValueError as error:  # NotXmlError, too
        raise TranslateError(
            Refusal.INTERNAL, f"libvirtd's XML of the domain cannot be read: {error}"
        ) from error
    root = document.root
    return View(document, root) if root.name == "domain" and not root.namespace else None


def replaced(view: View, socket: str | None, settings: Settings) -> str | None:
    """Returns a domain with its controller at `socket`, or without one with what stands in for it.

    Both are one device to the guest: see `carrier`. None where nothing is to be replaced: the
    domain has no carrier or disks of ours, has what is wanted, or its guest has been offered what
    nothing else offers.
    """
    metadata, present, node = view.metadata, view.carrier, carriers.disk(view.domain)
    device = carriers.override(view.domain)
    if metadata is None or metadata.entries or present is None or node is None or device is None:
        return None
    if present.stands_in == (socket is None) or present.protection:
        return None
    path = carriers.NOWHERE if socket is None else socket
    wanted = replace(present, socket=path, stands_in=socket is None)
    document, edits = view.document, Edits(view.document)
    dev = node.value("target", "dev") or ""
    address = carriers.address(document, view.domain)
    again_s = 0 if wanted.stands_in else carriers.reconnect_s(view.domain, settings)
    lines = carriers.disk_lines(wanted, dev, address, again_s)
    edits.replace(node.start, node.end, layout(lines, document.indent(node)))
    lines = carriers.device_lines(wanted, device.prefix)
    edits.replace(device.start, device.end, layout(lines, document.indent(device)))
    return edits.apply()


def refitted(view: View, settings: Settings, *, boots: bool = False) -> str | None:
    """Returns a domain with its controller's reconnect interval as it is to be on this host now.

    `boots`: its guest does, and so gets what devices are to offer now, too. None where there is
    nothing to change: it has no controller of the target's, or is so already.
    """
    present, node = view.carrier, carriers.disk(view.domain)
    source = node.child("source") if node is not None else None
    if source is None or present is None or present.stands_in:
        return None
    document, edits = view.document, Edits(view.document)
    wanted_s = carriers.reconnect_s(view.domain, settings)
    if refits := carriers.reconnect_s_of(source) != wanted_s:
        lines = carriers.source_lines(source.attrs.get("path", ""), wanted_s)
        edits.replace(source.start, source.end, layout(lines, document.indent(source)))
    device = carriers.override(view.domain)
    if boots and device is not None:
        wanted = carriers.protection(view.domain, settings)
        if wanted != present.protection:
            refits = True
            lines = carriers.device_lines(replace(present, protection=wanted), device.prefix)
            edits.replace(device.start, device.end, layout(lines, document.indent(device)))
    return edits.apply() if refits else None


def domains(document: Document) -> Iterator[View]:
    """Yields each domain in a document: a <domain>, or those in a snapshot's or status XML."""
    for node in document.root.walk():
        if node.name in ("domain", "inactiveDomain") and not node.namespace:
            yield View(document, node)


def required(domain_xml: str) -> View:
    """Parses XML that libvirtd gave.

    Raises:
        TranslateError: INTERNAL, it is no domain.
    """
    view = parse(domain_xml)
    if view is None:
        raise TranslateError(Refusal.INTERNAL, "libvirtd's XML of the domain cannot be read")
    return view
