"""Small questions to libvirtd's XML of a domain, and the two sides that a change can affect."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from lxml import etree

from plugin.gateway.errors import Code, Refused, UpstreamError
from plugin.gateway.messages import Domain
from plugin.gateway.upstream import AFFECT_CONFIG, AFFECT_LIVE, XML_INACTIVE, Upstream
from plugin.translate import CARRIER_ALIAS

PROBE_NAMESPACE = "https://virtlun.dev/xmlns/probe/1"
"""Namespace of a metadata element that never exists: see `check_may_change`."""

_RUNNING = re.compile(r"<domain\b[^>]*?\sid=['\"](\d+)")


def is_running(xml: str) -> bool:
    """Whether libvirtd's XML describes a running domain: only then the root has an id."""
    return _RUNNING.search(xml) is not None


def identity_of(xml: str) -> tuple[str | None, bytes | None]:
    """Returns name and UUID in a client's XML, as far as they are there."""
    parser = etree.XMLParser(resolve_entities=False, no_network=True)
    try:
        root = etree.fromstring(xml.encode(), parser)
    except (etree.XMLSyntaxError, ValueError):
        return None, None
    name = root.findtext("name")
    digits = re.sub(r"[-\s]", "", root.findtext("uuid") or "")
    valid = re.fullmatch(r"[0-9a-fA-F]{32}", digits)
    return (name.strip() if name else None), (bytes.fromhex(digits) if valid else None)


def disk_dev(xml: str) -> str | None:
    """Returns the target dev in a client's <disk>; None if it is something else or has none."""
    if "<disk" not in xml:
        return None
    parser = etree.XMLParser(resolve_entities=False, no_network=True)
    try:
        root = etree.fromstring(xml.encode(), parser)
    except (etree.XMLSyntaxError, ValueError):
        return None
    target = root.find("target") if root.tag == "disk" else None
    return None if target is None else target.get("dev")


def carrier_dev(xml: str | None) -> str | None:
    """Returns the target dev of the disk that stands for our controller, if any."""
    if xml is None or CARRIER_ALIAS not in xml:
        return None
    root = _parse(xml)
    for disk in root.iterfind("devices/disk"):
        alias, target = disk.find("alias"), disk.find("target")
        if alias is not None and target is not None and alias.get("name") == CARRIER_ALIAS:
            return target.get("dev")
    return None


def without_prefixes(metadata: str) -> str:
    """Returns an element as libvirt gives it in the form that SET_METADATA takes.

    libvirt puts elements without a namespace into the one of the call, and refuses an element that
    declares its prefix itself.
    """
    root = _parse(metadata)
    for element in root.iter(etree.Element):
        element.tag = etree.QName(element).localname
    etree.cleanup_namespaces(root)
    return etree.tostring(root, encoding="unicode", with_tail=False)


def _parse(xml: str) -> etree._Element:
    parser = etree.XMLParser(resolve_entities=False, no_network=True, strip_cdata=False)
    return etree.fromstring(xml.encode(), parser)


async def check_may_change(own: Upstream, dom: Domain, flags: int) -> None:
    """Lets libvirtd judge whether the client may change this domain, and whether `flags` fit it.

    Removing a metadata element that does not exist changes nothing and needs the permissions that
    attaching a device needs (remote_protocol.x: domain:write, domain:save for the persistent side);
    it also resolves or refuses live, config and current as every libvirt call does.

    Raises:
        UpstreamError: libvirtd's own refusal.
    """
    await own.set_metadata(dom, None, flags & (AFFECT_LIVE | AFFECT_CONFIG), uri=PROBE_NAMESPACE)


@dataclass
class Sides:
    """A domain as libvirtd has it. `live` is None if it does not run, `config` if transient."""

    live: str | None
    config: str | None
    to_live: bool
    """Whether the call at hand is for the running domain."""
    to_config: bool
    """Whether it is for the persistent definition."""


def running_as(xml: str, dom: Domain) -> Domain:
    """Returns `dom` with name and id of libvirtd's XML: the client's may be old, or made up."""
    found = _RUNNING.search(xml)
    name = _parse(xml).findtext("name") or dom.name
    return replace(dom, name=name, id=int(found[1]) if found else -1)


async def sides(own: Upstream, dom: Domain, flags: int) -> Sides:
    """Reads both sides and resolves AFFECT_CURRENT; `check_may_change` has passed the flags.

    Raises:
        UpstreamError: libvirtd's own refusal.
    """
    current = await own.xml(dom, 0)
    running = is_running(current)
    live = current if running else None
    config = None
    if not running:
        config = current
    elif await own.persistent(dom):
        config = await own.xml(dom, XML_INACTIVE)
    to_live = bool(flags & AFFECT_LIVE)
    to_config = bool(flags & AFFECT_CONFIG)
    if not to_live and not to_config:
        to_live, to_config = running, not running
    if to_live and live is None:  # it stopped in between
        raise Refused(Code.OPERATION_INVALID, "domain is not running")
    return Sides(live, config, to_live, to_config)


async def current_xml(own: Upstream, name: str | None, uuid: bytes | None) -> str | None:
    """Returns the inactive XML of the domain that a definition would replace, or None.

    A client that may not read the domain is told so by libvirtd when it defines it.
    """
    try:
        if uuid is not None:
            dom = await own.lookup(uuid)
        elif name is not None:
            dom = await own.lookup_name(name)
        else:
            return None
        return await own.xml(dom, XML_INACTIVE)
    except UpstreamError:
        return None
