"""A whole domain to libvirtd and back, and what its XML at libvirtd says of us."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from uuid import UUID

from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.model import Definition, LunPlan, Plan, Settings
from pydataplane.domain.names import CARRIER_ALIAS, NAMESPACE, PREFIX, controller_name
from pydataplane.domain.translate import memory, networkchoice
from pydataplane.domain.translate.current import Current
from pydataplane.domain.translate.defining import translate
from pydataplane.domain.translate.networkchoice import Choice
from pydataplane.domain.translate.presenting import restore
from pydataplane.domain.translate.recognising import check_encoding, check_readable
from pydataplane.domain.xml import carrier as carriers
from pydataplane.domain.xml import metadata as metadatas
from pydataplane.domain.xml import view as views
from pydataplane.domain.xml.document import Document, NotXmlError, layout
from pydataplane.domain.xml.metadata import Metadata


def define(
    domain_xml: str,
    settings: Settings,
    *,
    new_uuid: UUID,
    current_xml: str | None = None,
    uuids: Mapping[str, str] | None = None,
    controller: bool = False,
    served_in: str | None = None,
    running: bool = False,
    as_stored: bool = False,
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
        served_in: where no client defines the domain: libvirtd's XML of it, whose disks over the
            network stay whose they are there, whatever it or `settings` say; '' has none of ours.
        running: it is of a guest that goes on, on another host or later, as `current_xml` has it,
            or `domain_xml` itself: its controller stays as it is.
        as_stored: nobody defines it anew: `domain_xml` is libvirtd's, or a client's of a domain
            that migrates. A disk that says what it does in `served_in` is what it is there,
            also where an earlier version took what is refused now.

    Raises:
        TranslateError: a disk of ours is malformed, doubled or not possible in this domain, or the
            domain asks for what this host does not allow: see `networkchoice`. One without a disk
            of ours never fails otherwise: it is left without a controller. One that cannot be read,
            but may have one, does, and as `check_encoding`.
    """
    check_encoding(domain_xml)
    view = views.parse(domain_xml)
    if view is None:
        check_readable(domain_xml, settings)
        return Definition(domain_xml, None)
    current = views.parse(current_xml) if current_xml else None
    if view.has_traces:
        current = current or view
        domain_xml = restore(view.document, [view], live=False)
        view = views.required(domain_xml)
    kept = Current.of(current, running=running)
    if as_stored:
        own = views.parse(served_in) if served_in else None
        kept = kept.staying(own, own.salvaged if own is not None else None)
    if served_in is None:
        choice = networkchoice.of(view.domain)
    else:
        choice = Choice(had=networkchoice.served_in(served_in))
    return translate(
        domain_xml,
        view,
        kept,
        settings,
        new_uuid,
        uuids or {},
        controller=controller,
        choice=choice,
    )


def present(domain_xml: str, *, live: bool) -> str:
    """Turns libvirtd's XML of a domain back into the client's, for dumpxml and the like.

    `live` (the XML describes a running domain) adds an <alias> to disks that have none, as
    libvirtd does. Never fails: XML without traces of ours comes back as the very same string, and
    an entry of the metadata that is no disk is left out. Domains inside a snapshot's XML count,
    too.
    """
    if NAMESPACE not in domain_xml and CARRIER_ALIAS not in domain_xml:
        return domain_xml
    try:
        document = Document(domain_xml)
    except NotXmlError:
        return domain_xml
    found = [view for view in views.domains(document) if view.has_traces]
    return restore(document, found, live=live) if found else domain_xml


def check_memory(domain_xml: str) -> None:
    """Refuses a domain that can have no controller, for its definition says whose its memory is.

    Raises:
        TranslateError: UNSUPPORTED, it is private or on a disk.
    """
    view = views.parse(domain_xml)
    if view is not None:
        memory.missing(view.domain)


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


def has_devices(domain_xml: str) -> bool:
    """Returns whether libvirtd's XML of a domain has a controller or a virtio-blk disk of ours."""
    view = views.parse(domain_xml) if PREFIX in domain_xml else None
    return view is not None and view.element is not None and bool(view.hidden)


def is_marked(domain_xml: str) -> bool:
    """Returns whether libvirtd's XML of a domain has metadata of ours, if only the mark."""
    view = views.parse(domain_xml) if NAMESPACE in domain_xml else None
    return view is not None and view.element is not None


def mark(domain_uuid: str) -> str:
    """Returns the mark of a domain that is to have a controller, for virDomainSetMetadata."""
    return layout(metadatas.lines(Metadata(controller_name(domain_uuid)), bare=True), "\n")


def without_target(domain_xml: str) -> str | None:
    """Returns a saved or migrating domain with what stands in for its controller: see `carrier`.

    None if that cannot be, or is so already: it has no controller, or disks of ours, or a guest
    that carries protection information.

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


def refitted(domain_xml: str, settings: Settings, *, boots: bool = False) -> str | None:
    """Returns libvirtd's domain with its controller's reconnect interval as it is to be here, now.

    What is told of QEMU may have changed since it was defined. `boots`: its guest does, and gets
    what its controller is to offer, too. None where nothing is to be changed.
    """
    view = views.parse(domain_xml) if NAMESPACE in domain_xml else None
    return None if view is None else views.refitted(view, settings, boots=boots)


def check_protection(domain_xml: str, settings: Settings) -> None:
    """Refuses a guest that carries protection information, where its QEMU does not.

    Raises:
        TranslateError: UNSUPPORTED, the domain's QEMU (on this host) is known not to.
    """
    view = views.parse(domain_xml) if CARRIER_ALIAS in domain_xml else None
    if view is not None:
        carriers.check_protection(view.domain, settings)


def socket(domain_xml: str) -> str | None:
    """Returns the path of the socket of a domain's controller; None if it has none of ours."""
    view = views.parse(domain_xml) if NAMESPACE in domain_xml else None
    return None if view is None else view.socket


def find(domain_xml: str, path: str, settings: Settings) -> LunPlan | None:
    """Returns the disk that `path` (target dev, source path or LVSTORE/LVOL) means, or None.

    For the block calls (resize, info, stats) on libvirtd's XML of the side in question.
    """
    metadata = salvaged(domain_xml)
    luns = [entry.lun for entry in metadata.entries] if metadata is not None else []
    return meant(luns, path, settings)


def meant(luns: Iterable[LunPlan], path: str, settings: Settings) -> LunPlan | None:
    """Returns which of a domain's disks `path` means: a target dev, source path or LVSTORE/LVOL.

    A target dev goes before all names, and the name of a volume before that of an image of Ceph.
    """
    all_of_it = list(luns)
    by_dev = [lun for lun in all_of_it if lun.dev == path]
    by_name = [lun for lun in all_of_it if path in _names(lun, settings)]
    by_path = [lun for lun in all_of_it if path == lun.volume.path(settings.path_prefix)]
    return next(iter(by_dev + by_name + by_path), None)


def _names(lun: LunPlan, settings: Settings) -> tuple[str, str]:
    return lun.volume.alias, settings.rbd_prefix + lun.volume.alias


def salvaged(domain_xml: str | None) -> Metadata | None:
    """Returns what of our metadata can be read in a domain's XML, None if nothing."""
    view = views.parse(domain_xml) if domain_xml and NAMESPACE in domain_xml else None
    return None if view is None else view.salvaged
