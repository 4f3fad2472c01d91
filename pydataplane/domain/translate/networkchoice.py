"""Which disks over the network are ours in a domain: as it says, else as this host's settings say.

    <metadata>
      <virtlun:network xmlns:virtlun="https://virtlun.dev/xmlns/network/1" serve="rbd nbd"/>
    </metadata>

The protocols whose disks are ours; serve="": none. It is the client's own element, which stays in
the domain and is shown: schemas/network-metadata.rng. Nobody else reads it, and no more than a
client's definition and attach are decided by it: what a domain has stays whose it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.model import Settings, local, serving
from pydataplane.domain.names import NAMESPACE, NETWORK_NAMESPACE, PREFIX
from pydataplane.domain.xml import disk as disks
from pydataplane.domain.xml import metadata as metadatas
from pydataplane.domain.xml import view as views
from pydataplane.domain.xml.document import Document, Edits, Node, NotXmlError, attributes
from pydataplane.domain.xml.metadata import Metadata
from pydataplane.domain.xml.network import PROTOCOLS


@dataclass(frozen=True, slots=True)
class Choice:
    """What decides which disks over the network are ours in a domain."""

    domain: str = ""
    """The domain's name, for sentences."""
    asked: frozenset[str] | None = None
    """The protocols that it asks for; None: it says nothing."""
    had: Mapping[str, str] | None = None
    """Where nothing is decided anew, those that are ours: as `served_by`."""

    def settings(self, node: Node, settings: Settings) -> Settings:
        """Returns the settings by which one of its <disk> elements is judged.

        `settings` are this host's.

        Raises:
            TranslateError: UNSUPPORTED, it asks for what this host does not allow.
        """
        if self.had is not None:
            protocol = self.had.get(node.value("target", "dev") or "")
            return local(settings) if protocol is None else serving(local(settings), protocol)
        if self.asked is None:
            return settings
        denied = self.asked - settings.may_serve
        if denied and disks.may_be_far(node, settings, denied):
            protocol = node.value("source", "protocol")
            raise self._denied(protocol or "")
        return replace(settings, network=self.asked & settings.may_serve)

    def check_allowed(self, settings: Settings) -> None:
        """Checks that this host's `settings` allow all that the domain asks for.

        Raises:
            TranslateError: UNSUPPORTED, they do not.
        """
        denied = (self.asked or frozenset()) - settings.may_serve
        if denied:
            raise self._denied(", ".join(sorted(denied)))

    def _denied(self, protocols: str) -> TranslateError:
        return TranslateError(
            Refusal.UNSUPPORTED,
            f"domain '{self.domain}' asks in its metadata (<network serve=>) that virtlun"
            f" serves its {protocols} disks, which this host does not allow: add {protocols} to"
            " serve_network_on_request in virtlun.toml, or leave it out of serve",
        )


def of(domain: Node) -> Choice:
    """Reads what a domain says.

    Raises:
        TranslateError: BAD_XML, it is not to be understood.
    """
    name, nodes = domain.child("name"), _elements(domain)
    found = Choice(name.text.strip() if name is not None else "")
    if not nodes:
        return found
    if len(nodes) > 1:
        raise _bad("there are several of it")
    return replace(found, asked=_protocols(nodes[0]))


def served_by(metadata: Metadata | None) -> dict[str, str]:
    """Returns the disks over the network that are ours in a domain: target dev to protocol."""
    luns = [entry.lun for entry in metadata.entries] if metadata is not None else []
    sources = {lun.dev: lun.volume.source for lun in luns}
    return {dev: source.protocol for dev, source in sources.items() if source is not None}


def served_in(domain_xml: str) -> dict[str, str]:
    """Returns the same of libvirtd's XML of a domain."""
    view = views.parse(domain_xml) if NAMESPACE in domain_xml else None
    return served_by(view.salvaged if view is not None else None)


def check_allowed(domain_xml: str, settings: Settings) -> None:
    """Checks what a running domain asks for, of which no more is used than what is attached later.

    Raises:
        TranslateError: as `of`; UNSUPPORTED, this host does not allow it.
    """
    of(views.required(domain_xml).domain).check_allowed(settings)


def saying(domain_xml: str, element_xml: str | None) -> str:
    """Returns libvirtd's XML of a domain that says something else, or nothing any more.

    `element_xml` is the element as virDomainSetMetadata takes it: in no namespace, or in its own.

    Raises:
        TranslateError: BAD_XML, it is not to be understood.
    """
    view = views.required(domain_xml)
    edits = Edits(view.document)
    nodes = _elements(view.domain)
    for node in nodes:
        edits.remove(node)
    if element_xml is not None:
        try:
            protocols = _protocols(Document(element_xml).root)
        except NotXmlError as error:
            raise _bad(str(error)) from error
        serve = attributes({"serve": " ".join(sorted(protocols))})
        line = f'<{PREFIX}:network xmlns:{PREFIX}="{NETWORK_NAMESPACE}"{serve}/>'
        metadatas.add(view.domain, [(0, line)], edits)
    return edits.apply()


def _elements(domain: Node) -> list[Node]:
    metadata = domain.child("metadata")
    children = metadata.children if metadata is not None else ()
    return [node for node in children if node.namespace == NETWORK_NAMESPACE]


def _protocols(node: Node) -> frozenset[str]:
    if node.name != "network" or node.namespace not in ("", NETWORK_NAMESPACE):
        raise _bad(f"<{node.name}> is not known there")
    if node.attrs.keys() != {"serve"} or node.children or node.text.strip():
        raise _bad("it has the attribute serve, and nothing else")
    words = node.attrs["serve"].split()
    unknown = next((word for word in words if word not in PROTOCOLS), None)
    if unknown is not None:
        raise _bad(f"'{unknown}' is none of {', '.join(sorted(PROTOCOLS))}")
    return frozenset(words)


def _bad(why: str) -> TranslateError:
    return TranslateError(
        Refusal.BAD_XML, f"the metadata <network> of {NETWORK_NAMESPACE} is wrong: {why}"
    )
