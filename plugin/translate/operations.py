"""The calls of the translation, as the gateway makes them."""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

from plugin.translate.model import Change, Definition, LunPlan, Plan, Settings, VolumeRef


def recognise(disk_xml: str, settings: Settings) -> VolumeRef | None:
    """Returns the volume that a device's XML names, or None if it is no disk of ours.

    Anything that is not one well-formed <disk> element gives None (libvirtd judges it).

    Raises:
        TranslateError: it names a volume of ours, but wrongly (BAD_XML), or asks for what our disks
            cannot do (UNSUPPORTED: a CD-ROM, an IDE bus, qcow2, encryption, I/O limits, ...).
    """
    raise NotImplementedError


def define(
    domain_xml: str,
    settings: Settings,
    *,
    new_uuid: UUID,
    current_xml: str | None = None,
    uuids: Mapping[str, str] | None = None,
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

    Raises:
        TranslateError: a disk of ours is malformed, doubled or not possible in this domain. A
            domain without a disk of ours never fails here: it is left without a controller.
    """
    raise NotImplementedError


def present(domain_xml: str, *, live: bool, settings: Settings) -> str:
    """Turns libvirtd's XML of a domain back into the client's, for dumpxml and the like.

    `live` (the XML describes a running domain) adds an <alias> to disks that have none, as
    libvirtd does. Never fails: XML without traces of ours comes back as the very same string, and
    an entry of the metadata that is no disk is left out.
    """
    raise NotImplementedError


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
    raise NotImplementedError


def detach(domain_xml: str, disk_xml: str, settings: Settings, *, live: bool) -> Change | None:
    """Removes the disk with the target dev that `disk_xml` names; None if it is not of ours.

    As libvirtd does, the target dev decides; the rest may be minimal or a dumpxml sent back.

    Raises:
        TranslateError: DISK_MISSING: `disk_xml` names a volume of ours, but no disk of the domain
            has this target dev.
    """
    raise NotImplementedError


def detach_alias(domain_xml: str, alias: str, settings: Settings, *, live: bool) -> Change | None:
    """Removes the disk with this alias (as `present` shows it); None if it is not of ours."""
    raise NotImplementedError


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
        TranslateError: CANNOT_CHANGE: volume, serial, readonly or shareable of a running domain's
            disk; DISK_MISSING; and as `recognise`.
    """
    raise NotImplementedError


def plan(domain_xml: str) -> Plan | None:
    """Reads from libvirtd's XML what the domain needs of the target; None if it has none of ours.

    Raises:
        TranslateError: our metadata is there, but damaged (BAD_XML).
    """
    raise NotImplementedError


def find(domain_xml: str, path: str, settings: Settings) -> LunPlan | None:
    """Returns the disk that `path` (target dev, source path or LVSTORE/LVOL) means, or None.

    For the block calls (resize, info, stats) on libvirtd's XML of the side in question.
    """
    raise NotImplementedError
