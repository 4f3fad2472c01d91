"""The <iotune> of a client's <disk>: read, checked, and written anew when the limits change."""

from __future__ import annotations

import re

from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.limits import NAMES, NONE, Limits, contradiction, limits_of
from pydataplane.domain.xml.document import Document, Edits, Lines, Node

_NUMBER = re.compile(r"\s*\+?(\d{1,19})\s*")
"""What libvirt takes, as far as it can be meant."""


def read(node: Node) -> Limits:
    """Reads the limits of a <disk>; what is no number is left for `check`."""
    tune = node.child("iotune")
    return NONE if tune is None else limits_of(_values(tune))


def _values(tune: Node) -> dict[str, int]:
    return {
        name: int(match[1])
        for name in NAMES
        if (child := tune.child(name)) is not None and (match := _NUMBER.fullmatch(child.text))
    }


def check(node: Node, what: str) -> None:
    """Refuses limits that a disk cannot have.

    Raises:
        TranslateError: BAD_XML, a value is no number; UNSUPPORTED, they contradict each other, or
            are of a volume that other domains may have.
    """
    tune = node.child("iotune")
    if tune is None:
        return
    values = _values(tune)
    for child in tune.children:
        if child.name in NAMES and not child.namespace and child.name not in values:
            raise TranslateError(
                Refusal.BAD_XML,
                f"{what}: disk iotune field '{child.name}' must be an integer, 0 or more",
            )
    limits = limits_of(values)
    wrong = contradiction(limits)
    if wrong is not None:
        raise TranslateError(Refusal.UNSUPPORTED, f"{what}: <iotune>: {wrong}")
    if limits != NONE and node.child("shareable") is not None:
        raise TranslateError(
            Refusal.UNSUPPORTED,
            f"{what}: <iotune> is not possible with <shareable/>: the limits would be of all the"
            " domains that have the volume; remove one of the two, or limit the volume itself"
            " (`virtlun volume limits`)",
        )


def replaced(text: str, limits: Limits) -> str:
    """Returns a stored <disk> with these limits in the place of its own.

    Without any it has no <iotune>. The element stands where libvirt writes it, behind <target>.
    """
    document = Document(text)
    root = document.root
    edits = Edits(document)
    for child in root.every("iotune"):
        edits.remove(child)
    if limits != NONE:
        body: Lines = [(1, f"<{name}>{value}</{name}>") for name, value in limits.given.items()]
        lines: Lines = [(0, "<iotune>"), *body, (0, "</iotune>")]
        target = root.child("target")
        if target is not None:
            edits.insert_after(target, lines)
        else:
            edits.append(root, lines)
    return edits.apply()
