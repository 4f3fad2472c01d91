"""Attach, detach and update: what changes in one side of a domain, as the gateway asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from uuid import UUID

from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.limits import NONE
from pydataplane.domain.model import Change, FrontEnd, LunPlan, Settings, VolumeRef, local, serving
from pydataplane.domain.names import MAX_TARGETS, controller_name
from pydataplane.domain.translate import fields, fronts, memory
from pydataplane.domain.translate.applying import applied, socket_of
from pydataplane.domain.translate.defining import check_new, queues
from pydataplane.domain.translate.operations import salvaged
from pydataplane.domain.translate.recognising import disk_in, disk_of_ours
from pydataplane.domain.xml import blkdisk, iotune, keptfields
from pydataplane.domain.xml import disk as disks
from pydataplane.domain.xml import view as views
from pydataplane.domain.xml.boot import place
from pydataplane.domain.xml.disk import Disk
from pydataplane.domain.xml.document import layout
from pydataplane.domain.xml.metadata import Entry, Metadata
from pydataplane.domain.xml.view import View


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
    view, peer = views.required(domain_xml), salvaged(peer_xml)
    device = disk_in(disk_xml, view.domain, settings)
    if device is None:
        return None
    document, disk, ref = device
    metadata = view.metadata
    front = fronts.choose(document.root, disk, ref, view.domain, settings, fronts.of(peer))
    fields.check(document.root, disk, ref, front)
    if live:
        _check_attachable(view, front)
    seen = view.client_disks(metadata)
    check_new(seen, disk, ref, Refusal.TARGET_EXISTS)
    number = _number(metadata, peer, disk.dev or "", ref)
    uuid = (uuids or {}).get(ref.alias)
    lun = fronts.planned(disk, ref, target=number, uuid=uuid, front=front)
    order = place([d for d, _ in seen], disk)
    before = next((d.dev for d, ours in seen[order:] if ours is None), None)
    entry = Entry(lun, order, before, disks.stored_text(document, document.root))
    changed = (metadata or _fresh(view)).with_entry(entry)
    change = applied(view, changed, entry, settings, live=live)
    if not live or front == "scsi":
        return change
    socket, again_s = socket_of(view, changed, settings), blkdisk.reconnect_s(settings)
    num_queues = queues(view.domain, settings)
    plan = change.plan
    if plan is not None and not plan.has_scsi:
        own = blkdisk.count(dict(disk.queues), num_queues)
        plan = replace(plan, num_queues=max(plan.num_queues, own))
    lines = blkdisk.disk_lines(document, document.root, lun, socket, num_queues, again_s)
    return replace(change, device_xml=layout(lines, "\n"), plan=plan)


def stays_qemus(domain_xml: str, disk_xml: str, settings: Settings, *, live: bool) -> bool:
    """Whether a disk over the network is to be QEMU's in a domain.

    Its domain, or this host, says so, or it can have none of ours now, as one that is not to be
    read. Arguments as for `attach`.

    Raises:
        TranslateError: as `disk_in`.
    """
    view = views.parse(domain_xml)
    device = disk_in(disk_xml, view.domain, settings) if view is not None else None
    if view is None or device is None:
        return True
    document, disk, ref = device
    if not live:
        return memory.is_private(view.domain)
    try:
        _check_attachable(view, fronts.choose(document.root, disk, ref, view.domain, settings, {}))
    except TranslateError:
        return True
    return False


def _check_attachable(view: View, front: FrontEnd) -> None:
    """Refuses to attach to a running domain that cannot take such a disk before a restart.

    Raises:
        TranslateError: NOT_POSSIBLE_NOW; UNSUPPORTED, nor after it.
    """
    lacks = memory.missing(view.domain)  # what is refused here no restart would change
    if front == "blk":
        if lacks:
            raise TranslateError(
                Refusal.NOT_POSSIBLE_NOW,
                f"domain '{view.name}' runs without shared memory, so a virtlun disk cannot be"
                f" attached before a restart: `virtlun domain prepare {view.name}` has it shared"
                " at its next start, or attach with --config only; then shut it down and start it"
                " again",
            )
        return
    if view.metadata is not None and view.is_served:
        return
    if view.metadata is not None and view.metadata.entries:
        raise TranslateError(
            Refusal.NOT_POSSIBLE_NOW,
            f"domain '{view.name}' has virtio-blk disks alone and no virtlun controller for one of"
            " bus='scsi': use bus='virtio' (a target like vdb), or attach with --config only, shut"
            " it down and start it again",
        )
    raise TranslateError(
        Refusal.NOT_POSSIBLE_NOW,
        f"domain '{view.name}' runs without a virtlun controller, so a disk cannot be attached"
        f" before a restart: `virtlun domain prepare {view.name}` gives it one at its next"
        " start (else the gateway's log says why), or attach with --config only; then shut it"
        " down and start it again",
    )


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
    theirs = views.required(domain_xml).their_nodes()
    if dev is not None and any(node.value("target", "dev") == dev for node in theirs):
        return None
    found = _existing(domain_xml, disk_xml, settings)
    if found is None:
        return None
    return _without(*found, settings, live=live)


def detach_alias(domain_xml: str, alias: str, settings: Settings, *, live: bool) -> Change | None:
    """Removes the disk with this alias (as `present` shows it); None if it is not of ours."""
    view = views.required(domain_xml)
    metadata = view.metadata
    for entry in metadata.entries if metadata is not None else ():
        if metadata is not None and view.alias(entry) == alias:
            return _without(view, metadata, entry, settings, live=live)
    return None


def _without(
    view: View, metadata: Metadata, entry: Entry, settings: Settings, *, live: bool
) -> Change:
    """Removes a disk of ours from one side of a domain."""
    change = applied(view, metadata.without(entry), entry, settings, live=live)
    node = view.blk_node(entry)
    if not live or node is None:
        return change
    return replace(change, device_xml=view.document.source(node))


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
    far = entry.lun.volume.source
    if far is not None and _protocol(disk_xml) == far.protocol:
        # Which it stays, whatever new ones become.
        device = disk_of_ours(disk_xml, serving(settings, far.protocol))
    else:
        device = disk_in(disk_xml, view.domain, settings)
    if device is None:
        raise TranslateError(
            Refusal.CANNOT_CHANGE,
            f"the source of disk '{entry.lun.dev}' cannot be changed to something that is no"
            " virtlun volume; detach the disk and attach the other",
        )
    document, disk, ref = device
    old, before = entry.lun, entry.disk
    front = old.front
    if before is None or before.bus != disk.bus:
        front = fronts.choose(document.root, disk, ref, view.domain, settings, {})
    fields.check(document.root, disk, ref, front, goes_on=live and before is not None)
    uuid = (old.uuid if ref == old.volume else None) or (uuids or {}).get(ref.alias)
    known = fronts.known_as(ref, old, running=live)
    lun = fronts.planned(disk, ref, target=old.target, uuid=uuid, front=front, known_as=known)
    if live:
        asked = lun.characteristics.physical_block_size
        lun = fronts.as_asked(lun, old, before) if asked else fronts.as_shown(lun, old)
        _check_kept(old, lun)
        if old.front == "blk":  # a LUN has none of its own
            _check_queues(old, before or disk, disk)
    rest = metadata.without(entry)
    others = [item for item in view.client_disks(metadata) if item[0].dev != old.dev]
    check_new(others, disk, ref, Refusal.TARGET_EXISTS)
    text = disks.stored_text(document, document.root)
    if live and before is not None:
        text = keptfields.completed(text, entry.text, queues=old.front == "blk")
    if live and lun.limits == NONE != old.limits:  # as libvirt: they stay if they are not named
        lun, text = replace(lun, limits=old.limits), iotune.replaced(text, old.limits)
    new = Entry(lun, entry.order, entry.before, text)
    return applied(view, rest.with_entry(new), new, settings, live=live)


def _protocol(disk_xml: str) -> str | None:
    document = disks.parse_device(disk_xml)
    return None if document is None else document.root.value("source", "protocol")


def moved(
    domain_xml: str,
    dev: str,
    old: tuple[str, str],
    disk_xml: str,
    uuid: str,
    settings: Settings,
    *,
    live: bool,
) -> Change | None:
    """Gives a disk of ours the source of another one, to which its volume was copied.

    None where one side of the domain has no disk of ours there, or one of another volume.

    Args:
        domain_xml: as for `attach`.
        dev: target dev of the disk.
        old: UUID and LVSTORE/LVOL of the volume that it had.
        disk_xml: a <disk> whose source it gets.
        uuid: of the volume that this names.
        settings: of the configuration.
        live: the side is the running domain's.

    Raises:
        TranslateError: `disk_xml` names no volume of ours, or the domain cannot be read.
    """
    view = views.required(domain_xml)
    metadata = view.metadata
    entry = metadata.by_dev(dev) if metadata is not None else None
    if metadata is None or entry is None or entry.lun.bdev_name not in old:
        return None
    given, document = disks.parse_device(disk_xml), disks.parse_device(entry.text)
    ref = disks.volume(given.root, settings) if given is not None else None
    if given is None or document is None or ref is None:
        raise TranslateError(Refusal.INTERNAL, f"the copy of disk {dev} is no virtlun volume")
    lun = replace(entry.lun, volume=ref, uuid=uuid)
    new = Entry(lun, entry.order, entry.before, disks.with_source(document, given))
    rest = metadata.without(entry)
    return applied(view, rest.with_entry(new), new, settings, live=live)


def _check_kept(old: LunPlan, new: LunPlan) -> None:
    """Refuses a change that the guest of a running domain would see.

    Blocks of 512 bytes are what a disk has that says nothing, too.

    Raises:
        TranslateError: CANNOT_CHANGE.
    """
    for name, before, after in (
        ("source", old.volume, new.volume),
        ("target bus", old.front, new.front),
        ("serial", old.serial, new.serial),
        ("readonly", old.read_only, new.read_only),
        ("shareable", old.shareable, new.shareable),
        ("blockio logical_block_size", old.block_size or 512, new.block_size or 512),
        *_shown(old, new),
        ("error_policy", old.error_policy.write, new.error_policy.write),
        ("rerror_policy", old.error_policy.read, new.error_policy.read),
        ("iotune", old.limits, old.limits if new.limits == NONE else new.limits),
    ):
        if before != after:
            raise _fixed(name, old)


def _fixed(name: str, lun: LunPlan) -> TranslateError:
    return TranslateError(
        Refusal.CANNOT_CHANGE,
        f"cannot modify field '{name}' of the disk '{lun.dev}' while the domain runs;"
        " change it with --config, or detach and attach the disk",
    )


def _check_queues(lun: LunPlan, before: Disk, after: Disk) -> None:
    """Refuses other queues than a running domain's client asked for; raises as `_check_kept`."""
    for name, value in after.queues:
        if dict(before.queues).get(name) != value:
            raise _fixed(name, lun)


def _shown(old: LunPlan, new: LunPlan) -> list[tuple[str, object, object]]:
    """Returns each characteristic as libvirt's XML names it, before and after."""
    names = (
        *("wwn", "vendor", "product", "rotation_rate", "physical_block_size"),
        *("removable", "discard", "write_cache"),
    )
    mine, theirs = old.characteristics, new.characteristics
    words = {"write_cache": "cache", "physical_block_size": "blockio physical_block_size"}
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
    if disks.volume(document.root, local(settings)) is None:  # it may be QEMU's
        return None
    raise TranslateError(
        Refusal.DISK_MISSING,
        f"disk {given.dev} not found: domain '{view.name}' has no virtlun disk with this target",
    )


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
    if there is not None and there.lun.volume.image == ref.image and there.lun.target not in used:
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
