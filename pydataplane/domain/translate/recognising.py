"""Whether a device that a client sends is a disk of ours, and of which volume.

One over the network is ours in some domains: see `networkchoice`.
"""

from __future__ import annotations

import re

from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.model import Settings, VolumeRef
from pydataplane.domain.names import PREFIX
from pydataplane.domain.translate import fronts, networkchoice
from pydataplane.domain.xml import disk as disks
from pydataplane.domain.xml.disk import Disk
from pydataplane.domain.xml.document import Document, Node, NotXmlError, UnreadError
from pydataplane.domain.xml.network import PROTOCOLS

_ENCODING = re.compile(r"\ufeff?<\?xml\s[^>]*?\bencoding\s*=\s*[\"']([^\"'>]*)")
_OF_ASCII = re.compile(
    r"utf-?(8|16)|(us-)?ascii|(iso-?8859|latin|windows|cp)-?\d+|koi8-[ru]", re.IGNORECASE | re.ASCII
)
"""Encodings in which ASCII characters are themselves; UTF-16 cannot be declared in another one."""


def recognise(disk_xml: str, settings: Settings) -> VolumeRef | None:
    """Returns the volume that a device's XML names, or None if it is no disk of ours.

    Anything that is not one well-formed <disk> element gives None (libvirtd judges it).

    Raises:
        TranslateError: it names a volume of ours, but wrongly, or may name one where that cannot be
            read (BAD_XML); or it asks for what our disks cannot do (UNSUPPORTED: a CD-ROM, an IDE
            bus, qcow2, encryption, I/O limits, ...).
    """
    check_encoding(disk_xml)
    device = disk_of_ours(disk_xml, settings)
    if device is None:
        check_readable(disk_xml, settings)
        return None
    return device[2]


def may_be_far(disk_xml: str, settings: Settings) -> bool:
    """Whether a device's XML is a disk over the network, so that its domain may say whose it is.

    Raises:
        TranslateError: as `check_encoding`.
    """
    check_encoding(disk_xml)
    document = disks.parse_device(disk_xml)
    return document is not None and disks.may_be_far(document.root, settings, PROTOCOLS)


def names_network(disk_xml: str) -> bool:
    """Whether a device's XML may be one for `may_be_far`; parses nothing."""
    return "&" in disk_xml or any(protocol in disk_xml for protocol in PROTOCOLS)


def may_be_ours(disk_xml: str, settings: Settings) -> bool:
    """Whether a device's or a domain's XML can name a volume of ours; parses nothing.

    What is written with references (`&#47;dev...`) may be anything.
    """
    words = (settings.path_prefix, settings.rbd_prefix, settings.protocol, settings.pool_prefix)
    every = (*words, *settings.may_serve)
    return "&" in disk_xml or any(word and word in disk_xml for word in every)


def is_foreign(xml: str, settings: Settings) -> bool:
    """Whether a domain's XML has nothing of ours, and no trace; parses nothing.

    No where that cannot be told from its bytes: with references and document types, and in another
    encoding, anything can be written without a word of it being there.
    """
    if may_be_ours(xml, settings) or "<!DOCTYPE" in xml:
        return False
    return PREFIX not in xml and not ("<?xml" in xml and "encoding" in xml)


def check_encoding(xml: str) -> None:
    """Refuses XML that says that its ASCII characters are others.

    It comes as UTF-8. Newer versions of libxml2 believe the declaration, and would find names of
    ours where there is not a letter of them (libvirt 9.0 on Debian 12 does not).

    Raises:
        TranslateError: BAD_XML.
    """
    declared = _ENCODING.match(xml)
    if declared is not None and not _OF_ASCII.fullmatch(declared[1]):
        raise TranslateError(
            Refusal.BAD_XML,
            "this XML declares another encoding than UTF-8, in which it comes: leave the"
            " declaration out",
        )


def check_readable(xml: str, settings: Settings) -> None:
    """Refuses what libvirtd would take as a disk of its own because it is not read here.

    Raises:
        TranslateError: BAD_XML, it may name a volume of ours, and is too big or has a document
            type; or as `check_encoding`.
    """
    check_encoding(xml)
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


def volume_format(disk_xml: str) -> str | None:
    """Returns the format that a <disk> says that its source has; None where it does not."""
    document = disks.parse_device(disk_xml)
    return None if document is None else document.root.value("driver", "type")


def disk_in(xml: str, domain: Node, settings: Settings) -> tuple[Document, Disk, VolumeRef] | None:
    """As `disk_of_ours`, of a disk that a domain is to have, which may say whose it is.

    Raises:
        TranslateError: as `disk_of_ours`; UNSUPPORTED, the domain asks for what this host, whose
            `settings` are, does not allow.
    """
    document = disks.parse_device(xml)
    if document is None:
        return None
    if disks.may_be_far(document.root, settings, PROTOCOLS):
        settings = networkchoice.of(domain).settings(document.root, settings)
    return _ours(document, settings)


def disk_of_ours(xml: str, settings: Settings) -> tuple[Document, Disk, VolumeRef] | None:
    """Returns a disk of ours, parsed; None if `xml` is something else.

    It is checked but for what its front end, which the domain decides on, cannot be, and for
    queues, which a guest that has it keeps.

    Raises:
        TranslateError: as `recognise`, but for what cannot be read.
    """
    document = disks.parse_device(xml)
    return None if document is None else _ours(document, settings)


def _ours(document: Document, settings: Settings) -> tuple[Document, Disk, VolumeRef] | None:
    ref = disks.volume(document.root, settings)
    if ref is None:
        return None
    disk = disks.read(document.root)
    if ref.source is None:  # else its domain may leave it to QEMU
        fronts.check_any(document.root, disk, ref)
    return document, disk, ref
