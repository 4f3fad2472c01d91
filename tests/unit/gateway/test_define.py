"""Definitions without a disk of ours: which pass by their bytes alone, and which do not."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from plugin.gateway.messages import Domain, XmlCall
from plugin.gateway.procs import Proc
from plugin.gateway.xdr import Reader
from pydataplane.domain import translate
from tests.unit.gateway.world import ReplyError, TestClient, World, disk, plain, play


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    translated = []
    original = translate.define

    def noting(xml: str, *args: Any, **kwargs: Any) -> translate.Definition:
        translated.append(xml)
        return original(xml, *args, **kwargs)

    async def body(world: World) -> None:
        client = await world.client()
        with suppress(ReplyError):
            await define(client, text)
        assert text in translated

    monkeypatch.setattr(translate, "define", noting)
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
