"""The calls of the translation, as the gateway makes them."""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.model import Change, Definition, LunPlan, Plan, Settings, VolumeRef
from pydataplane.domain.names import CARRIER_ALIAS, MAX_TARGETS, NAMESPACE, controller_name
from pydataplane.domain.translate import fields
from pydataplane.domain.translate.defining import Current, check_new, translate
from pydataplane.domain.translate.presenting import restore
from pydataplane.domain.xml import disk as disks
from pydataplane.domain.xml import metadata as metadatas
from pydataplane.domain.xml import view as views
from pydataplane.domain.xml.boot import place
from pydataplane.domain.xml.disk import Disk
from pydataplane.domain.xml.document import Document, Edits, NotXmlError, UnreadError, layout
from pydataplane.domain.xml.metadata import Entry, Metadata
from pydataplane.domain.xml.view import View

_NO_UUID = UUID(int=0)
"""For domains that libvirtd gave: they have a UUID."""


def recognise(disk_xml: str, settings: Settings) -> VolumeRef | None:
    """Returns the volume that a device's XML names, or None if it is no disk of ours.

    Anything that is not one well-formed <disk> element gives None (libvirtd judges it).

    Raises:
        TranslateError: it names a volume of ours, but wrongly, or may name one where that cannot be
            read (BAD_XML); or it asks for what our disks cannot do (UNSUPPORTED: a CD-ROM, an IDE
            bus, qcow2, encryption, I/O limits, ...).
    """
    device = _device(disk_xml, settings)
    if device is None:
        _check_readable(disk_xml, settings)
        return None
    return device[2]


def may_be_ours(disk_xml: str, settings: Settings) -> bool:
    """Whether a device's or a domain's XML can name a volume of ours; parses nothing.

    What is written with references (`&#47;dev...`) may be anything.
    """
    words = (settings.path_prefix, settings.rbd_prefix, settings.protocol, settings.pool_prefix)
    return "&" in disk_xml or any(word and word in disk_xml for word in words)


def _check_readable(xml: str, settings: Settings) -> None:
    """Refuses what libvirtd would take as a disk of its own because it is not read here.

    Raises:
        TranslateError: BAD_XML, it may name a volume of ours, and is too big or has a document
            type.
    """
    if not may_be_ours(xml, settings):
        return
    try:
        Document(xml)
    except UnreadError as error:
        raise TranslateError(
            Refusal.BAD_XML,
            f"this XML may name virtlun volumes and has {error}: leave out what no disk needs",
        ) from error
    except NotXmlError:
        return


def volume_of(disk_xml: str, settings: Settings) -> VolumeRef | None:
    """Returns the volume that a <disk> names as its source, whatever else it says; None if none.

    Raises:
        TranslateError: BAD_XML, it names one of ours wrongly.
    """
    document = disks.parse_device(disk_xml)
    return None if document is None else disks.volume(document.root, settings)


def define(
    domain_xml: str,
    settings: Settings,
    *,
    new_uuid: UUID,
    current_xml: str | None = None,
    uuids: Mapping[str, str] | None = None,
    controller: bool = False,
) -> Definition:
    """Turns a client's domain into what libvirtd gets, for define and create.

    Args:
        domain_xml: the client's XML; one that is translated already gives the same again.
        settings: of the configuration.
        new_uuid: becomes the domain's UUID if the XML has none (the controller is named after it).
        current_xml: libvirtd's present inactive XML of the domain, untranslated, so that disks
            keep their target numbers and the controller its PCI address. Ask libvirtd for it by
            the UUID (or, without one, by the name) in `domain_xml`; None if there is none.
        uuids: LVSTORE/LVOL to volume UUID, as far as known.
        controller: the domain gets one also without a disk of ours, if its memory can be shared.

    Raises:
        TranslateError: a disk of ours is malformed, doubled or not possible in this domain. A
            domain without a disk of ours never fails here: it is left without a controller. One
            that cannot be read, but may have one, does.
    """
    view = views.parse(domain_xml)
    if view is None:
        _check_readable(domain_xml, settings)
        return Definition(domain_xml, None)
    current = views.parse(current_xml) if current_xml else None
    if view.has_traces:
        current = current or view
        domain_xml = restore(view.document, [view], live=False)
        view = views.required(domain_xml)
    return translate(
        domain_xml,
        view,
        Current.of(current),
        settings,
        new_uuid,
        uuids or {},
        controller=controller,
    )


def present(domain_xml: str, *, live: bool, settings: Settings) -> str:
    """Turns libvirtd's XML of a domain back into the client's, for dumpxml and the like.

    `live` (the XML describes a running domain) adds an <alias> to disks that have none, as
    libvirtd does. Never fails: XML without traces of ours comes back as the very same string, and
    an entry of the metadata that is no disk is left out. Domains inside a snapshot's XML count,
    too.
    """
    del settings  # the metadata alone says what the client gave
    if NAMESPACE not in domain_xml and CARRIER_ALIAS not in domain_xml:
        return domain_xml
    try:
        document = Document(domain_xml)
    except NotXmlError:
        return domain_xml
    found = [view for view in views.domains(document) if view.has_traces]
    return restore(document, found, live=live) if found else domain_xml


def attach(
    domain_xml: str,
    disk_xml: str,
    settings: Settings,
    *,
    live: bool,
    peer_xml: str | None = None,
    uuids: Mapping[str, str] | None = None,
) -> Change | None:
    """Adds a disk of ours to one side of a domain; None if `disk_xml` is no disk of ours.

    Args:
        domain_xml: libvirtd's XML (untranslated) of the affected side, with VIR_DOMAIN_XML_SECURE
            and, for the persistent side, VIR_DOMAIN_XML_INACTIVE.
        disk_xml: as the client sent it.
        settings: of the configuration.
        live: the side is the running domain's.
        peer_xml: libvirtd's XML of the other side, if any: the target number is then the one that
            the same disk has there, or is free on both.
        uuids: LVSTORE/LVOL to volume UUID, as far as known.

    Raises:
        TranslateError: TARGET_EXISTS (dev, volume or serial is there already), NOT_POSSIBLE_NOW (a
            running domain without our controller or shared memory), UNSUPPORTED (255 disks
            already, or the like), BAD_XML.
    """
    device = _device(disk_xml, settings)
    if device is None:
        return None
    document, disk, ref = device
    view = views.required(domain_xml)
    metadata = view.metadata
    if live and (metadata is None or not view.is_served):
        raise TranslateError(
            Refusal.NOT_POSSIBLE_NOW,
            f"domain '{view.name}' runs without a virtlun controller, so a disk cannot be attached"
            f" before it was restarted: `virtlun domain prepare {view.name}` gives it one at its"
            " next start, or attach with --config only; then shut it down and start it again",
        )
    seen = view.client_disks(metadata)
    check_new(seen, disk, ref, Refusal.TARGET_EXISTS)
    lun = LunPlan(
        target=_number(metadata, _metadata(peer_xml), disk.dev or "", ref),
        dev=disk.dev or "",
        volume=ref,
        uuid=(uuids or {}).get(ref.alias),
        serial=disk.serial,
        read_only=disk.read_only,
        shareable=disk.shareable,
        block_size=disk.block_size,
        characteristics=disk.characteristics,
        error_policy=disk.error_policy,
    )
    order = place([d for d, _ in seen], disk)
    before = next((d.dev for d, ours in seen[order:] if ours is None), None)
    entry = Entry(lun, order, before, disks.stored_text(document, document.root))
    changed = (metadata or _fresh(view)).with_entry(entry)
    return _change(view, changed, entry, settings, live=live)


def detach(domain_xml: str, disk_xml: str, settings: Settings, *, live: bool) -> Change | None:
    """Removes the disk with the target dev that `disk_xml` names; None if it is not of ours.

    As libvirtd does, the target dev decides; the rest may be minimal or a dumpxml sent back. What
    was defined at libvirtd itself may have a disk of libvirtd's own that names a volume of ours.

    Raises:
        TranslateError: DISK_MISSING: `disk_xml` names a volume of ours, but no disk of the domain
            has this target dev.
    """
    document = disks.parse_device(disk_xml)
    dev = document.root.value("target", "dev") if document is not None else None
    theirs = views.required(domain_xml).disk_nodes()
    if dev is not None and any(node.value("target", "dev") == dev for node in theirs):
        return None
    found = _existing(domain_xml, disk_xml, settings)
    if found is None:
        return None
    view, metadata, entry = found
    return _change(view, metadata.without(entry), entry, settings, live=live)


def detach_alias(domain_xml: str, alias: str, settings: Settings, *, live: bool) -> Change | None:
    """Removes the disk with this alias (as `present` shows it); None if it is not of ours."""
    view = views.required(domain_xml)
    metadata = view.metadata
    for entry in metadata.entries if metadata is not None else ():
        if metadata is not None and _alias(entry) == alias:
            return _change(view, metadata.without(entry), entry, settings, live=live)
    return None


def update(
    domain_xml: str,
    disk_xml: str,
    settings: Settings,
    *,
    live: bool,
    uuids: Mapping[str, str] | None = None,
) -> Change | None:
    """Replaces the XML of the disk with the same target dev; None if it is not of ours.

    The persistent side takes any change. The running side takes only what the guest does not see.

    Raises:
        TranslateError: CANNOT_CHANGE: volume, serial, readonly, shareable or block size of a
            running domain's disk, or to a disk that is not of ours; DISK_MISSING; and as
            `recognise`.
    """
    found = _existing(domain_xml, disk_xml, settings)
    if found is None:
        return None
    view, metadata, entry = found
    device = _device(disk_xml, settings)
    if device is None:
        raise TranslateError(
            Refusal.CANNOT_CHANGE,
            f"the source of disk '{entry.lun.dev}' cannot be changed to something that is no"
            " virtlun volume; detach the disk and attach the other",
        )
    document, disk, ref = device
    old = entry.lun
    lun = LunPlan(
        target=old.target,
        dev=old.dev,
        volume=ref,
        uuid=(old.uuid if ref == old.volume else None) or (uuids or {}).get(ref.alias),
        serial=disk.serial,
        read_only=disk.read_only,
        shareable=disk.shareable,
        block_size=disk.block_size,
        characteristics=disk.characteristics,
        error_policy=disk.error_policy,
    )
    if live:
        _check_kept(old, lun)
    rest = metadata.without(entry)
    others = [item for item in view.client_disks(metadata) if item[0].dev != old.dev]
    check_new(others, disk, ref, Refusal.TARGET_EXISTS)
    new = Entry(lun, entry.order, entry.before, disks.stored_text(document, document.root))
    return _change(view, rest.with_entry(new), new, settings, live=live)


def _check_kept(old: LunPlan, new: LunPlan) -> None:
    """Refuses a change that the guest of a running domain would see.

    Blocks of 512 bytes are what a disk has that says nothing, too.

    Raises:
        TranslateError: CANNOT_CHANGE.
    """
    for name, before, after in (
        ("source", old.volume, new.volume),
        ("serial", old.serial, new.serial),
        ("readonly", old.read_only, new.read_only),
        ("shareable", old.shareable, new.shareable),
        ("blockio logical_block_size", old.block_size or 512, new.block_size or 512),
        *_shown(old, new),
        ("error_policy", old.error_policy.write, new.error_policy.write),
        ("rerror_policy", old.error_policy.read, new.error_policy.read),
    ):
        if before != after:
            raise TranslateError(
                Refusal.CANNOT_CHANGE,
                f"cannot modify field '{name}' of the disk '{old.dev}' while the domain runs;"
                " change it with --config, or detach and attach the disk",
            )


def _shown(old: LunPlan, new: LunPlan) -> list[tuple[str, object, object]]:
    """Returns each characteristic as libvirt's XML names it, before and after."""
    names = ("wwn", "vendor", "product", "rotation_rate", "removable", "discard", "write_cache")
    mine, theirs = old.characteristics, new.characteristics
    words = {"write_cache": "cache"}
    return [(words.get(n, n), getattr(mine, n), getattr(theirs, n)) for n in names]


def identify(domain_xml: str, uuids: Mapping[str, str]) -> str | None:
    """Records volumes' UUIDs in one side of a domain, where it does not know them.

    Args:
        domain_xml: libvirtd's XML (untranslated) of that side.
        uuids: LVSTORE/LVOL to volume UUID.

    Returns:
        The element for virDomainSetMetadata, as `Change.metadata_xml`; None if nothing is new.

    Raises:
        TranslateError: BAD_XML, our metadata is damaged.
    """
    view = views.parse(domain_xml) if NAMESPACE in domain_xml else None
    metadata = view.metadata if view is not None else None
    if metadata is None:
        return None
    known = metadata.identified(uuids)
    return None if known == metadata else layout(metadatas.lines(known, bare=True), "\n")


def element(domain_xml: str) -> str | None:
    """Returns our metadata element of libvirtd's XML of a domain, for `settable`; None without.

    libvirtd declares the namespace on the element itself. What cannot stand alone is written anew.
    """
    view = views.parse(domain_xml) if NAMESPACE in domain_xml else None
    node = view.element if view is not None else None
    if view is None or node is None:
        return None
    text = view.document.source(node)
    try:
        Document(text)
    except NotXmlError:
        return layout(metadatas.lines(metadatas.salvage(node), bare=False), "\n")
    return text


def settable(element_xml: str) -> str:
    """Returns our metadata element, as libvirt gives it, as virDomainSetMetadata takes it.

    libvirt puts elements without a namespace into the one of the call, and refuses an element that
    declares its prefix itself.

    Raises:
        TranslateError: BAD_XML, it is damaged.
    """
    try:
        root = Document(element_xml).root
    except NotXmlError as error:
        raise TranslateError(Refusal.BAD_XML, f"the virtlun metadata is no XML: {error}") from error
    return layout(metadatas.lines(metadatas.parse(root), bare=True), "\n")


def plan(domain_xml: str) -> Plan | None:
    """Reads from libvirtd's XML what the domain needs of the target; None if it has none of ours.

    Raises:
        TranslateError: our metadata is there, but damaged (BAD_XML).
    """
    if NAMESPACE not in domain_xml:
        return None
    view = views.parse(domain_xml)
    return None if view is None else view.plan()


def has_controller(domain_xml: str) -> bool:
    """Returns whether libvirtd's XML of a domain has a controller of ours, or what stands in."""
    view = views.parse(domain_xml) if CARRIER_ALIAS in domain_xml else None
    return view is not None and view.carrier is not None


def is_marked(domain_xml: str) -> bool:
    """Returns whether libvirtd's XML of a domain has metadata of ours, if only the mark."""
    view = views.parse(domain_xml) if NAMESPACE in domain_xml else None
    return view is not None and view.element is not None


def mark(domain_uuid: str) -> str:
    """Returns the mark of a domain that is to have a controller, for virDomainSetMetadata."""
    return layout(metadatas.lines(Metadata(controller_name(domain_uuid)), bare=True), "\n")


def without_target(domain_xml: str) -> str | None:
    """Returns a saved or migrating domain with what stands in for its controller: see `carrier`.

    None if that cannot be, or is so already: it has no controller, or disks of ours.

    Raises:
        TranslateError: BAD_XML, our metadata is damaged.
    """
    view = views.parse(domain_xml) if NAMESPACE in domain_xml else None
    if view is None or view.plan() is None:
        return None
    return views.replaced(view, None, Settings())


def with_target(domain_xml: str, settings: Settings) -> str | None:
    """Returns a saved or migrating domain with its controller in the place of what stands in.

    None if nothing stands in for it.

    Raises:
        TranslateError: BAD_XML, our metadata is damaged.
    """
    view = views.parse(domain_xml) if NAMESPACE in domain_xml else None
    metadata = view.metadata if view is not None else None
    if view is None or metadata is None:
        return None
    path = f"{settings.vhost_dir.rstrip('/')}/{metadata.controller}"
    return views.replaced(view, path, settings)


def socket(domain_xml: str) -> str | None:
    """Returns the path of the socket of a domain's controller; None if it has none of ours."""
    view = views.parse(domain_xml) if NAMESPACE in domain_xml else None
    return None if view is None else view.socket


def find(domain_xml: str, path: str, settings: Settings) -> LunPlan | None:
    """Returns the disk that `path` (target dev, source path or LVSTORE/LVOL) means, or None.

    For the block calls (resize, info, stats) on libvirtd's XML of the side in question.
    """
    metadata = _metadata(domain_xml)
    luns = [entry.lun for entry in metadata.entries] if metadata is not None else []
    return next((lun for lun in luns if means(lun, path, settings)), None)


def means(lun: LunPlan, path: str, settings: Settings) -> bool:
    """Whether `path` (target dev, source path or LVSTORE/LVOL) means this disk."""
    alias = lun.volume.alias
    return path in (lun.dev, alias, settings.path_prefix + alias, settings.rbd_prefix + alias)


def _device(xml: str, settings: Settings) -> tuple[Document, Disk, VolumeRef] | None:
    """Returns a disk of ours, parsed and checked; None if `xml` is something else."""
    document = disks.parse_device(xml)
    if document is None:
        return None
    ref = disks.volume(document.root, settings)
    if ref is None:
        return None
    disk = disks.read(document.root)
    fields.check(document.root, disk, ref)
    return document, disk, ref


def _metadata(domain_xml: str | None) -> Metadata | None:
    """Returns what of our metadata can be read in a domain's XML, None if nothing."""
    view = views.parse(domain_xml) if domain_xml and NAMESPACE in domain_xml else None
    return None if view is None else view.salvaged


def _existing(
    domain_xml: str, disk_xml: str, settings: Settings
) -> tuple[View, Metadata, Entry] | None:
    """Returns the entry that a detach or update means; None if it means no disk of ours."""
    document = disks.parse_device(disk_xml)
    if document is None:
        return None
    given = disks.read(document.root)
    view = views.required(domain_xml)
    metadata = view.metadata
    entry = metadata.by_dev(given.dev) if metadata is not None else None
    if metadata is not None and entry is not None:
        return view, metadata, entry
    if disks.volume(document.root, settings) is None:
        return None
    raise TranslateError(
        Refusal.DISK_MISSING,
        f"disk {given.dev} not found: domain '{view.name}' has no virtlun disk with this target",
    )


def _alias(entry: Entry) -> str:
    disk = entry.disk
    return disks.shown_alias(entry.lun.dev, disk.alias if disk is not None else None)


def _fresh(view: View) -> Metadata:
    """Returns empty metadata for a domain that libvirtd gave, so it has a UUID.

    Raises:
        TranslateError: INTERNAL, it has none.
    """
    node = view.domain.child("uuid")
    try:
        return Metadata(controller_name(UUID(node.text.strip() if node is not None else "")))
    except ValueError as error:
        raise TranslateError(
            Refusal.INTERNAL, f"libvirtd's XML of domain '{view.name}' has no UUID"
        ) from error


def _number(mine: Metadata | None, peer: Metadata | None, dev: str, ref: VolumeRef) -> int:
    """Chooses a new disk's target number.

    Raises:
        TranslateError: UNSUPPORTED, all are taken.
    """
    used = {e.lun.target for e in mine.entries} if mine is not None else set()
    there = peer.by_dev(dev) if peer is not None else None
    if there is not None and there.lun.volume == ref and there.lun.target not in used:
        return there.lun.target
    elsewhere = {e.lun.target for e in peer.entries} if peer is not None else set()
    for taken in (used | elsewhere, used):
        free = next((n for n in range(MAX_TARGETS) if n not in taken), None)
        if free is not None:
            return free
    raise TranslateError(
        Refusal.UNSUPPORTED,
        f"the domain has {MAX_TARGETS} virtlun disks already, the most that its controller can"
        " have; detach one first",
    )


def _change(
    view: View, metadata: Metadata, entry: Entry, settings: Settings, *, live: bool
) -> Change:
    """Puts changed metadata into one side of a domain."""
    changed = _with_metadata(view, metadata)
    if live:
        after, domain_xml = views.required(changed), None
    else:
        domain_xml = define(changed, settings, new_uuid=_NO_UUID).xml
        after = views.required(domain_xml)
    settled = after.metadata or metadata
    now = settled.by_dev(entry.lun.dev)
    return Change(
        lun=now.lun if now is not None else entry.lun,
        alias=_alias(entry),
        metadata_xml=layout(metadatas.lines(settled, bare=True), "\n"),
        domain_xml=domain_xml,
        redefine=not live and _boot_shape(view) != _boot_shape(after),
        plan=after.plan(),
    )


def _boot_shape(view: View) -> object:
    """Returns what of our controller stands outside of the metadata and may change."""
    carrier = view.carrier
    return None if carrier is None else (carrier.boot, carrier.boot_target)


def _with_metadata(view: View, metadata: Metadata) -> str:
    """Returns the domain's XML with our metadata replaced or added."""
    edits = Edits(view.document)
    lines = metadatas.lines(metadata, bare=False)
    element = view.element
    if element is None:
        metadatas.add(view.domain, lines, edits)
    else:
        text = layout(lines, view.document.indent(element))
        edits.replace(element.start, element.end, text)
    return edits.apply()
