"""Attach, detach and update: what changes in one side of a domain, as the gateway asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.model import Change, LunPlan, Settings, VolumeRef
from pydataplane.domain.names import MAX_TARGETS, controller_name
from pydataplane.domain.translate import memory
from pydataplane.domain.translate.defining import check_new
from pydataplane.domain.translate.operations import define, salvaged
from pydataplane.domain.translate.recognising import disk_of_ours
from pydataplane.domain.xml import disk as disks
from pydataplane.domain.xml import metadata as metadatas
from pydataplane.domain.xml import view as views
from pydataplane.domain.xml.boot import choose, place
from pydataplane.domain.xml.document import Edits, layout
from pydataplane.domain.xml.metadata import Entry, Metadata
from pydataplane.domain.xml.view import View

_NO_UUID = UUID(int=0)
"""For domains that libvirtd gave: they have a UUID."""


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
            already, memory that its definition says is private, or the like), BAD_XML.
    """
    device = disk_of_ours(disk_xml, settings)
    if device is None:
        return None
    document, disk, ref = device
    view = views.required(domain_xml)
    metadata = view.metadata
    if live and (metadata is None or not view.is_served):
        memory.missing(view.domain)  # which no restart would change
        raise TranslateError(
            Refusal.NOT_POSSIBLE_NOW,
            f"domain '{view.name}' runs without a virtlun controller, so a disk cannot be attached"
            f" before a restart: `virtlun domain prepare {view.name}` gives it one at its next"
            " start (else the gateway's log says why), or attach with --config only; then shut it"
            " down and start it again",
        )
    seen = view.client_disks(metadata)
    check_new(seen, disk, ref, Refusal.TARGET_EXISTS)
    lun = LunPlan(
        target=_number(metadata, salvaged(peer_xml), disk.dev or "", ref),
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
    device = disk_of_ours(disk_xml, settings)
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
    if live or _keeps_carrier(view, metadata, entry):
        stored, redefine, plan = metadata, False, view.plan_with(metadata)
        domain_xml = None if live else _with_metadata(view, metadata)
    else:
        changed = _with_metadata(view, metadata)
        domain_xml = define(changed, settings, new_uuid=_NO_UUID).xml
        after = views.required(domain_xml)
        stored = after.metadata or metadata
        redefine, plan = _boot_shape(view) != _boot_shape(after), after.plan_with(stored)
    now = stored.by_dev(entry.lun.dev)
    return Change(
        lun=now.lun if now is not None else entry.lun,
        alias=_alias(entry),
        metadata_xml=layout(metadatas.lines(stored, bare=True), "\n"),
        domain_xml=domain_xml,
        redefine=redefine,
        plan=plan,
    )


def _keeps_carrier(view: View, metadata: Metadata, entry: Entry) -> bool:
    """Whether changed metadata leaves the rest of a persistent definition as it is.

    It does if the controller stays, and the firmware boots what it did. A disk with a boot order is
    for `define`, which knows the other devices with one.
    """
    carrier, disk = view.carrier, entry.disk
    if view.element is None or carrier is None or carrier.stands_in or not metadata.entries:
        return False
    if disk is None or disk.boot is not None:
        return False
    seen = [(disk, lun is not None) for disk, lun in view.client_disks(metadata)]
    boot = choose(seen)
    booted = metadata.by_dev(boot.dev)
    target = booted.lun.target if booted is not None else 0
    now = carrier.boot
    return (boot.order, boot.first, target) == (now.order, now.first, carrier.boot_target)


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
