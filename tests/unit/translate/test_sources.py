"""Disks on a volume, however they name it, and the same on another one."""

from __future__ import annotations

import pytest

from pydataplane.domain.model import Settings
from pydataplane.domain.translate import sources

SETTINGS = Settings()
DOMAIN = """<domain type='kvm'><devices>
  <disk type='{kind}'>  <!-- kept -->
    <source {attrs} startupPolicy='optional'/>
    <target dev='sda'/>
  </disk>
  <disk type='file'><source file='/var/lib/x.img'/><target dev='sdb'/></disk>
  <disk type='file'><source file='/dev/virtlun/wrong'/><target dev='sdc'/></disk>
</devices></domain>"""
WAYS = [
    ("file", "file='/dev/virtlun/{}'"),
    ("block", "dev='/dev/virtlun/{}'"),
    ("network", "protocol='lvol' name='{}'"),
    ("network", "protocol='rbd' name='virtlun/{}'"),
    ("volume", "pool='virtlun-{}' volume='{}'"),
]


def written(kind: str, attrs: str, volume: str) -> str:
    words = volume.split("/") if kind == "volume" else [volume]
    return DOMAIN.format(kind=kind, attrs=attrs.format(*words))


@pytest.mark.parametrize(("kind", "attrs"), WAYS)
def test_a_disk_names_another_volume_in_its_own_way(kind: str, attrs: str) -> None:
    before, after = (written(kind, attrs, volume) for volume in ("lvs0/a", "lvs1/b"))
    assert sources.devs_on(before, "lvs0/a", SETTINGS) == ["sda"]
    assert sources.devs_on(before, "lvs0/b", SETTINGS) == []
    moved = sources.on_another(before, "lvs0/a", "lvs1/b", SETTINGS)
    assert moved.replace('"', "'") == after
    assert sources.on_another(before, "lvs0/b", "lvs1/b", SETTINGS) == before
    alone = sources.disk_on(before, "sda", "lvs1/b", SETTINGS)
    assert alone is not None
    tag = after.split("<source ")[1].split("/>")[0]
    if "lvol" in attrs:  # which libvirtd does not read
        kind, tag = "file", "file='/dev/virtlun/lvs1/b'"
    assert alone.replace('"', "'") == f"<disk type='{kind}'><source {tag}/></disk>"
    assert sources.disk_on(before, "sdz", "lvs1/b", SETTINGS) is None


def test_what_is_inside_of_a_source_is_kept() -> None:
    text = written("file", "file='/dev/virtlun/{}'", "lvs0/a").replace(
        "startupPolicy='optional'/>", "><seclabel relabel='no'/></source>"
    )
    moved = sources.on_another(text, "lvs0/a", "lvs1/a", SETTINGS)
    assert "<source file=\"/dev/virtlun/lvs1/a\"><seclabel relabel='no'/></source>" in moved


def test_what_is_no_xml_names_nothing() -> None:
    assert sources.devs_on("<domain>", "lvs0/a", SETTINGS) == []
    assert sources.disk_on("<domain>", "sda", "lvs0/a", SETTINGS) is None
    assert sources.on_another("<domain>", "lvs0/a", "lvs1/a", SETTINGS) == "<domain>"
