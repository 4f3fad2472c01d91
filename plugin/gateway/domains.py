"""Small questions to libvirtd's XML of a domain, and the two sides that a change can affect."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from uuid import UUID

from plugin.gateway.errors import Code, Refused, UpstreamError
from plugin.gateway.messages import Domain
from plugin.gateway.upstream import AFFECT_CONFIG, AFFECT_LIVE, XML_INACTIVE, Upstream
from pydataplane.domain.translate import CARRIER_ALIAS
from pydataplane.domain.xml import carrier as carriers
from pydataplane.domain.xml import view as views
from pydataplane.domain.xml.disk import parse_device
from pydataplane.domain.xml.document import NotXmlError, number, root_of, texts_of

PROBE_NAMESPACE = "https://virtlun.dev/xmlns/probe/1"
"""Namespace of a metadata element that never exists: see `check_may_change`."""


def is_running(xml: str) -> bool:
    """Whether libvirtd's XML describes a running domain: only then the root has an id."""
    return _id_of(xml) is not None


async def is_active(admin: Upstream, uuid: bytes) -> bool:
    """Whether libvirtd has a domain (its UUID) running; raises GatewayError if it does not say."""
    try:
        return await admin.active(await admin.lookup(uuid))
    except UpstreamError as error:
        if error.code == Code.NO_DOMAIN:
            return False
        raise


def _id_of(xml: str) -> int | None:
    try:
        name, attributes = root_of(xml)
    except NotXmlError:
        return None
    return number(attributes.get("id")) if name == "domain" else None


def identity_of(xml: str) -> tuple[str | None, bytes | None]:
    """Returns name and UUID in a client's XML, as far as they are there; reads little more."""
    try:
        root, found = texts_of(xml, ("name", "uuid"))
    except NotXmlError:
        return None, None
    if root != "domain":
        return None, None
    try:
        uuid = UUID("".join(found["uuid"].split())).bytes
    except (KeyError, ValueError):
        uuid = None
    return found.get("name", "").strip() or None, uuid


_SPACE = r"[ \t\r\n]"
_NAME = r"<name>(?P<name>[^<&]*)</name>"
_UUID = r"<uuid>(?P<uuid>[0-9A-Fa-f-]{32,36})</uuid>"
_HEAD = tuple(
    re.compile(
        rf"""{_SPACE}*+<domain(?:{_SPACE}++(?!xmlns=)[A-Za-z:]++=(?:'[^'<&]*+'|"[^"<&]*+"))*+"""
        rf"{_SPACE}*+>{_SPACE}*+{first}{_SPACE}*+{second}"
    )
    for first, second in ((_NAME, _UUID), (_UUID, _NAME))
)
"""How libvirt, and nearly every client of it, begins a domain."""


def identity_at_once(xml: str) -> tuple[str | None, bytes | None] | None:
    """Returns what `identity_of` does, where the XML begins as usual; None: ask that.

    Parses nothing, in a time that grows with the beginning alone: it may be long.
    """
    found = _HEAD[0].match(xml) or _HEAD[1].match(xml)
    if found is None:
        return None
    try:
        uuid = UUID(found["uuid"]).bytes
    except ValueError:
        return None
    return found["name"].strip() or None, uuid


def disk_dev(xml: str) -> str | None:
    """Returns the target dev in a client's <disk>; None if it is something else or has none."""
    document = parse_device(xml) if "<disk" in xml else None
    return None if document is None else document.root.value("target", "dev")


def carrier_dev(xml: str | None) -> str | None:
    """Returns the target dev of the disk that stands for our controller, if any."""
    view = views.parse(xml) if xml is not None and CARRIER_ALIAS in xml else None
    node = carriers.disk(view.domain) if view is not None else None
    return None if node is None else node.value("target", "dev")


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
    """A domain as libvirtd has it: `live` is None if it does not run, `config` if it is transient.

    Or if the call is not for it: see `sides`.
    """

    live: str | None
    config: str | None
    to_live: bool
    """Whether the call at hand is for the running domain."""
    to_config: bool
    """Whether it is for the persistent definition."""


def running_as(xml: str, dom: Domain) -> Domain:
    """Returns `dom` with name and id of libvirtd's XML: the client's may be old, or made up."""
    number = _id_of(xml)
    return replace(dom, name=identity_of(xml)[0] or dom.name, id=-1 if number is None else number)


async def sides(own: Upstream, dom: Domain, flags: int, *, peer: bool = False) -> Sides:
    """Reads what a call is for and resolves AFFECT_CURRENT; `check_may_change` passed the flags.

    With `peer` the persistent side is read in any case; of a transient domain it is the running
    one then.

    Raises:
        UpstreamError: libvirtd's own refusal.
    """
    current = await own.xml(dom, 0)
    running = is_running(current)
    live = current if running else None
    to_live = bool(flags & AFFECT_LIVE)
    to_config = bool(flags & AFFECT_CONFIG)
    if not to_live and not to_config:
        to_live, to_config = running, not running
    if to_live and live is None:  # it stopped in between
        raise Refused(Code.OPERATION_INVALID, "domain is not running")
    config = None
    if not running:
        config = current
    elif (peer and not to_config) or (to_config and await own.persistent(dom)):
        config = await own.xml(dom, XML_INACTIVE)
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
