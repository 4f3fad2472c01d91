"""Domains that name a volume that has moved, of which one does not take its new definition."""

from __future__ import annotations

import re
from typing import Any

import pytest

from plugin.moves.naming import Domains
from pydataplane.domain.model import Settings
from pydataplane.errors import VolumeError

libvirt = pytest.importorskip("libvirt")

XML = """<domain type='qemu'><name>{}</name><devices>
<disk type='file'><source file='/dev/virtlun/lvs0/v'/><target dev='sda' bus='scsi'/></disk>
</devices></domain>"""


class Handle:
    def __init__(self, name: str) -> None:
        self._name, self.xml = name, XML.format(name)

    def name(self) -> str:
        return self._name

    def XMLDesc(self, flags: int) -> str:  # noqa: N802 - as libvirt has it
        return self.xml


class Opened:
    """A libvirt with three domains, of which some are refused."""

    def __init__(self) -> None:
        self.all = {name: Handle(name) for name in "abc"}
        self.refused = {"b"}

    def listAllDomains(self, flags: int) -> list[Handle]:  # noqa: N802
        return list(self.all.values())

    def defineXML(self, xml: str) -> Any:  # noqa: N802
        (name,) = re.findall("<name>(.*)</name>", xml)
        if name in self.refused:
            libvirt.virResetLastError()  # a real one of before would be told instead
            raise libvirt.libvirtError("no")
        self.all[name].xml = xml


def test_one_that_is_refused_is_named_and_the_others_name_the_new_volume() -> None:
    opened = Opened()
    domains = Domains(opened, Settings())
    with pytest.raises(VolumeError, match=r"lvs0/v is lvs1/v now, and domains do not .*: b \(no\)"):
        domains.redefine("lvs0/v", "lvs1/v")
    named = {name for name, handle in opened.all.items() if "lvs1/v" in handle.xml}
    assert named == {"a", "c"}
    opened.refused.clear()
    assert domains.redefine("lvs0/v", "lvs1/v") == ["b"]
