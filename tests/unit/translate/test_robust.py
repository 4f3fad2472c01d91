"""Damaged and hostile XML: every call answers, or refuses with a TranslateError; nothing else."""

from __future__ import annotations

import contextlib

from hypothesis import given, settings
from hypothesis import strategies as st

from pydataplane.domain.errors import TranslateError
from pydataplane.domain.translate import (
    attach,
    define,
    detach,
    find,
    plan,
    present,
    recognise,
    update,
)
from pydataplane.domain.xml.document import Document, NotXmlError
from pydataplane.domain.xml.view import given as given_by_libvirtd
from tests.unit.translate.domains import FILES, NEW_UUID, SETTINGS, lvol, translated

THERE = [translated(path.read_text()).xml for path in FILES]
ENCODING = "encoding="
PIECES = st.sampled_from(
    [
        "",
        "<",
        ">",
        "/",
        '"',
        "'",
        "]]>",
        "<![CDATA[",
        "<!--",
        "-->",
        "&lt;",
        "&",
        "\x00",
        "ä",
        "-1",
        "<disk>",
        "</disk>",
        "</devices>",
        "<domain>",
        "0",
        "vm-",
        "<?x?>",
        "xmlns='u'",
        "\r\n",
        " ",
    ]
)


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """Draws a domain, the client's or libvirtd's, with a few places overwritten."""
    xml = draw(st.sampled_from(THERE + [path.read_text() for path in FILES]))
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(xml)))
        length = draw(st.integers(0, 12))
        xml = xml[:start] + draw(PIECES) + xml[start + length :]
    return xml


@given(damaged())
@settings(max_examples=300)
def test_damage_is_answered_or_refused(xml: str) -> None:
    present(xml, live=True)
    find(xml, "sda", SETTINGS)
    with contextlib.suppress(TranslateError):
        define(xml, SETTINGS, new_uuid=NEW_UUID)
    with contextlib.suppress(TranslateError):
        plan(xml)
    with contextlib.suppress(TranslateError):
        given_by_libvirtd(xml.encode())
    for live in (True, False):
        for call in (attach, detach, update):
            for disk in (lvol("sdy", "y"), lvol("sda", "root")):
                with contextlib.suppress(TranslateError):
                    call(xml, disk, SETTINGS, live=live)


@given(damaged())
@settings(max_examples=200)
def test_what_was_well_formed_stays_so(xml: str) -> None:
    try:
        Document(xml)
    except NotXmlError:
        assert present(xml, live=False) is xml
        try:
            assert define(xml, SETTINGS, new_uuid=NEW_UUID).xml is xml
        except TranslateError:
            assert ENCODING in xml, "only what declares an encoding is refused unread"
        return
    Document(present(xml, live=True))
    with contextlib.suppress(TranslateError):
        Document(define(xml, SETTINGS, new_uuid=NEW_UUID).xml)


@given(st.text(max_size=40), st.text(max_size=40))
def test_any_device_is_answered_or_refused(head: str, tail: str) -> None:
    for xml in (head, f"<disk {head}>{tail}</disk>", f"<disk type='file'><source {head}/></disk>"):
        with contextlib.suppress(TranslateError):
            recognise(xml, SETTINGS)
