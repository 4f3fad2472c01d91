"""Definitions without a disk of ours: which pass by their bytes alone, and which do not."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from plugin.gateway.domains import identity_at_once, identity_of
from plugin.gateway.messages import Domain, XmlCall
from plugin.gateway.procs import Proc
from plugin.gateway.xdr import Reader
from pydataplane.domain import translate
from tests.unit.gateway.world import UUID_1, ReplyError, TestClient, World, disk, plain, play


async def define(client: TestClient, xml: str) -> Domain:
    return Domain.read(Reader(await client.call(Proc.DEFINE_XML, XmlCall(xml, None).pack())))


def never(*_: object, **__: object) -> None:
    raise AssertionError("parsed")


def test_a_definition_without_a_word_of_ours_is_not_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(world: World) -> None:
        client = await world.client()
        theirs = plain(devices="<disk type='file'><source file='/a'/><target dev='vda'/></disk>")
        for _ in range(2):  # a new one, and again
            before = Counter(world.libvirtd.calls())
            dom = await define(client, theirs)
            assert world.libvirtd.domains[dom.uuid].config == theirs
            asked = Counter(world.libvirtd.calls()) - before
        assert asked == {Proc.GET_METADATA: 1, Proc.DEFINE_XML: 1}

    monkeypatch.setattr("pydataplane.domain.xml.document.Document.__init__", never)
    play(tmp_path, body)


def test_the_usual_beginning_of_a_definition_is_read_in_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(world: World) -> None:
        dom = await define(await world.client(), plain())
        assert world.libvirtd.domains[dom.uuid].config == plain()

    monkeypatch.setattr("plugin.gateway.parsing.ClientParser.parse", never)
    play(tmp_path, body)


HEADS = [
    *(
        f"{before}<domain{attributes}>{space}{first}{space}{second}<devices/></domain>"
        for before in ("", "\n ", "<?xml version='1.0'?>", "<!-- <name>no</name> -->")
        for attributes in (
            "",
            " type='kvm'",
            ' type = "kvm"',
            " id='3' type=\"k'vm\" ",
            " xmlns='urn:other'",
            " xmlns:q='http://libvirt.org/schemas/domain/qemu/1.0' type='kvm'",
            " xmlns:a='urn:a' a:b='<'",
            " type='a&amp;b'",
        )
        for space in ("", "\n  ", "<!-- a -->")
        for first, second in (
            ("<name>one</name>", f"<uuid>{UUID_1}</uuid>"),
            (f"<uuid>{UUID_1}</uuid>", "<name>one</name>"),
            (f"<uuid>{UUID_1.replace('-', '').upper()}</uuid>", "<name> o&#110;e </name>"),
            (f"<uuid>{UUID_1}</uuid>", "<name> one\n</name>"),
            (f"<uuid> {UUID_1} </uuid>", "<name><![CDATA[one]]></name>"),
            (f"<uuid>{UUID_1[:-1]}</uuid>", "<name/>"),
            (f"<uuid>{UUID_1[:-1]}g</uuid>", "<name></name>"),
            ("<uuid>{11111111-1111-4111-8111-111111111111}</uuid>", "<name>one</name>"),
            ("<name>one<b/></name>", f"<uuid>{UUID_1}</uuid>"),
            ("<title>one</title>", f"<name>two</name><uuid>{UUID_1}</uuid>"),
        )
    ),
    "<domains><name>one</name><uuid>" + UUID_1 + "</uuid></domains>",
    "",
]


def test_what_is_read_at_once_of_a_definition_is_what_parsing_it_reads() -> None:
    found = [(identity_at_once(xml), identity_of(xml), xml) for xml in HEADS]
    for at_once, parsed, xml in found:
        assert at_once in (None, parsed), xml
    assert sum(at_once is not None for at_once, _, _ in found) >= 40


@pytest.fixture
def translated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The definitions that are parsed and translated, as they come."""
    found: list[str] = []
    original = translate.define

    def noting(xml: str, *args: Any, **kwargs: Any) -> translate.Definition:
        found.append(xml)
        return original(xml, *args, **kwargs)

    monkeypatch.setattr(translate, "define", noting)
    return found


@pytest.mark.parametrize("controllers", ["all", "needed"])
@pytest.mark.parametrize("named", [False, True])
def test_a_transient_domain_without_a_word_of_ours_is_not_parsed_unless_it_may_get_a_controller(
    tmp_path: Path, translated: list[str], controllers: str, named: bool
) -> None:
    async def body(world: World) -> None:
        if named:  # there is a definition of it, with something of ours
            world.domain(running=False, disks=disk())
        client = await world.client()
        await client.call(Proc.CREATE_XML, XmlCall(plain(), 0).pack())
        assert bool(translated) == (named or controllers == "all")

    play(tmp_path, body, controllers=controllers)


PREFIX_IN_PARTS = '<!DOCTYPE domain [<!ENTITY % a "<!ATTLIST source dev CDATA \'/dev/vir">]>'


@pytest.mark.parametrize(
    "text",
    [
        plain(devices=disk()),
        plain(devices=disk().replace("/dev/virtlun", "/dev/virt&#108;un")),
        plain(devices="<disk type='network'><source protocol='lvol' name='lvs0/data'/></disk>"),
        plain().replace("<devices>", "<metadata><a xmlns='urn:virtlun'/></metadata><devices>"),
        PREFIX_IN_PARTS + plain(),
        "<?xml version='1.0' encoding='UTF-7'?>" + plain(),
    ],
)
def test_what_its_bytes_do_not_tell_of_is_parsed(
    tmp_path: Path, translated: list[str], text: str
) -> None:
    async def body(world: World) -> None:
        client = await world.client()
        with suppress(ReplyError):
            await define(client, text)
        assert text in translated

    play(tmp_path, body)


def test_a_marked_domain_keeps_its_mark_without_a_word_of_ours(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        client = await world.client()
        dom = await define(client, plain(devices=disk()))
        again = plain()
        assert translate.is_foreign(again, world.config.settings())
        await define(client, again)
        assert translate.is_marked(world.libvirtd.domains[dom.uuid].config or "")

    play(tmp_path, body)
