"""One side of a domain with changed disks of ours: its XML, and what the target must have."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

from pydataplane.domain.model import Change, Settings
from pydataplane.domain.translate.current import Current
from pydataplane.domain.translate.defining import translate
from pydataplane.domain.translate.networkchoice import Choice, served_by
from pydataplane.domain.translate.presenting import restore
from pydataplane.domain.xml import blkdisk
from pydataplane.domain.xml import metadata as metadatas
from pydataplane.domain.xml import view as views
from pydataplane.domain.xml.boot import choose
from pydataplane.domain.xml.document import Edits, layout
from pydataplane.domain.xml.metadata import Entry, Metadata
from pydataplane.domain.xml.view import View

_NO_UUID = UUID(int=0)
"""For domains that libvirtd gave: they have a UUID."""


def applied(
    view: View,
    metadata: Metadata,
    entry: Entry,
    settings: Settings,
    *,
    live: bool,
    same: bool = False,
) -> Change:
    """Puts changed metadata into one side of a domain; `same`: it is all that changes."""
    if live or same or _keeps_devices(view, metadata, entry):
        stored, redefine = metadata, False
        plan = view.plan_with(metadata, socket_of(view, metadata, settings))
        domain_xml = None if live else _with_metadata(view, metadata)
    else:
        client = restore(view.document, [view], live=False, metadata=metadata)
        current = Current.with_disks(view, metadata).staying(view, metadata)
        others = {dev: had for dev, had in current.devices.items() if dev != entry.lun.dev}
        current = replace(current, devices=others)  # the changed one's are as it asks
        domain_xml = translate(
            client,
            views.required(client),
            current,
            settings,
            _NO_UUID,
            {},
            controller=False,
            choice=Choice(had=served_by(metadata)),
        ).xml
        after = views.required(domain_xml)
        stored = after.metadata or metadata
        redefine, plan = _devices(view) != _devices(after), after.plan_with(stored)
    now = stored.by_dev(entry.lun.dev)
    return Change(
        lun=now.lun if now is not None else entry.lun,
        alias=view.alias(entry),
        metadata_xml=layout(metadatas.lines(stored, bare=True), "\n"),
        domain_xml=domain_xml,
        redefine=redefine,
        plan=plan,
    )


def socket_of(view: View, metadata: Metadata, settings: Settings) -> str:
    """Returns the path of the socket that a domain's controller has, or would have."""
    return view.socket or f"{settings.vhost_dir.rstrip('/')}/{metadata.controller}"


def _keeps_devices(view: View, metadata: Metadata, entry: Entry) -> bool:
    """Whether changed metadata leaves the rest of a persistent definition as it is.

    It does if the controller stays, and the firmware boots what it did. A disk with a boot order is
    for `translate`, which knows the other devices with one, as is one that is a device itself.
    """
    if view.blk_node(entry) is not None or entry.lun.front == "blk":
        return False
    carrier, disk = view.carrier, entry.disk
    if view.element is None or carrier is None or carrier.stands_in:
        return False
    if all(e.lun.front == "blk" for e in metadata.entries):
        return False
    if disk is None or disk.boot is not None:
        return False
    seen = [(disk, lun is not None) for disk, lun in view.client_disks(metadata)]
    boot = choose(seen)
    booted = metadata.by_dev(boot.dev)
    target = booted.lun.target if booted is not None else 0
    now = carrier.boot
    return (boot.order, boot.first, target) == (now.order, now.first, carrier.boot_target)


def _devices(view: View) -> object:
    """Returns what of ours stands outside of the metadata and may change."""
    carrier = view.carrier
    boot = None if carrier is None else (carrier.boot, carrier.boot_target)
    return boot, [
        view.document.source(node)
        for node in view.disk_nodes()
        if blkdisk.number_of(node) is not None
    ]


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
