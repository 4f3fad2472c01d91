"""Each lvstore is a storage pool to plain virsh, beside those that libvirtd has itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from lxml import etree

from tests.support.host import Host
from tests.support.libvirtd import VirshError

pytestmark = [pytest.mark.root, pytest.mark.vm]

MIB = 1 << 20
OURS = "virtlun-lvs0"
THEIRS = "theirs"
SCHEMAS = Path("/usr/share/libvirt/schemas")


@pytest.fixture(scope="module")
def pooled(host: Host) -> Iterator[Host]:
    """A host with an lvstore that has two volumes, and a pool of libvirtd's own."""
    host.volumes.create("lvs0/thin", 64 * MIB, thin=True)
    host.volumes.create("lvs0/thick", 16 * MIB)
    folder = host.scratch / "theirs"
    folder.mkdir()
    host.virsh("pool-define-as", THEIRS, "dir", "--target", str(folder))
    host.virsh("pool-start", THEIRS)
    yield host
    host.virsh("pool-destroy", THEIRS)
    host.virsh("pool-undefine", THEIRS)


def names(table: str) -> list[str]:
    """Returns the first word of each row that virsh printed (-q: without a header)."""
    return sorted(row.split()[0] for row in table.splitlines() if row.strip())


def info(text: str) -> dict[str, str]:
    """Returns what virsh prints as NAME: VALUE."""
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def said(host: Host, *words: str) -> str:
    """Returns what virsh says when it refuses."""
    with pytest.raises(VirshError) as caught:
        host.virsh(*words)
    return str(caught.value)


def valid(schema: str, xml: str) -> None:
    """Holds XML against the schema that libvirt has of it."""
    rules = etree.RelaxNG(etree.parse(SCHEMAS / schema))
    rules.assertValid(etree.fromstring(xml.encode()))


@pytest.mark.parametrize(
    ("flags", "both"),
    [
        (("--all",), True),
        ((), True),
        (("--inactive",), False),
        (("--persistent",), True),
        (("--transient",), False),
        (("--type", "dir,zfs"), True),
        (("--type", "logical"), False),
    ],
)
def test_it_is_listed_beside_libvirtds_own(
    pooled: Host, flags: tuple[str, ...], both: bool
) -> None:
    assert names(pooled.virsh("pool-list", *flags)) == ([THEIRS, OURS] if both else [])


def test_lists_tell_autostart_and_type_apart(pooled: Host) -> None:
    assert names(pooled.virsh("pool-list", "--autostart")) == [OURS]
    assert names(pooled.virsh("pool-list", "--no-autostart")) == [THEIRS]
    assert names(pooled.virsh("pool-list", "--type", "zfs")) == [OURS]
    assert names(pooled.virsh("pool-list", "--type", "dir")) == [THEIRS]


def test_it_is_found_by_name_and_uuid_and_describes_itself(pooled: Host) -> None:
    store = pooled.volumes.lvstore("lvs0")
    assert pooled.virsh("pool-uuid", OURS).strip() == store.uuid
    assert pooled.virsh("pool-name", store.uuid).strip() == OURS
    shown = info(pooled.virsh("pool-info", OURS, "--bytes"))
    assert shown["State"] == "running"
    assert shown["Persistent"] == shown["Autostart"] == "yes"
    assert int(shown["Capacity"]) == store.total
    assert int(shown["Available"]) == store.free
    assert int(shown["Allocation"]) == store.total - store.free
    xml = pooled.virsh("pool-dumpxml", OURS)
    valid("storagepool.rng", xml)
    assert ElementTree.fromstring(xml).findtext("source/name") == "lvs0"


def test_volumes_are_listed_and_describe_themselves(pooled: Host) -> None:
    assert names(pooled.virsh("vol-list", OURS)) == ["thick", "thin"]
    thin, thick = (info(pooled.virsh("vol-info", n, OURS, "--bytes")) for n in ("thin", "thick"))
    assert (thin["Type"], thin["Capacity"]) == ("block", f"{64 * MIB} bytes")
    assert thick["Capacity"] == thick["Allocation"] == f"{16 * MIB} bytes"
    assert int(thin["Allocation"].split()[0]) < 64 * MIB
    xml = pooled.virsh("vol-dumpxml", "thin", OURS)
    valid("storagevol.rng", xml)
    assert ElementTree.fromstring(xml).findtext("target/path") == "/dev/virtlun/lvs0/thin"


def test_a_path_is_a_key_and_finds_its_volume(pooled: Host) -> None:
    path = "/dev/virtlun/lvs0/thin"
    assert pooled.virsh("vol-path", "thin", "--pool", OURS).strip() == path
    assert pooled.virsh("vol-key", "thin", "--pool", OURS).strip() == path
    assert pooled.virsh("vol-name", path).strip() == "thin"
    assert pooled.virsh("vol-pool", path).strip() == OURS
    assert "no storage vol with matching" in said(pooled, "vol-name", f"{path}-not")


def test_lvol_snapshots_are_no_volumes(pooled: Host) -> None:
    pooled.volumes.snapshot(["lvs0/thin"], "s")
    assert names(pooled.virsh("vol-list", OURS)) == ["thick", "thin"]
    assert "no storage vol" in said(pooled, "vol-info", "thin@s", OURS)
    pooled.volumes.delete("lvs0/thin@s")


def test_other_pools_and_volumes_are_libvirtds(pooled: Host) -> None:
    pooled.virsh("vol-create-as", THEIRS, "a", "1M")
    path = str(pooled.scratch / "theirs/a")
    for words in (
        ("pool-info", THEIRS),
        ("pool-dumpxml", THEIRS),
        ("vol-list", THEIRS),
        ("vol-info", "a", THEIRS),
        ("vol-pool", path),
    ):
        assert pooled.virsh(*words) == pooled.virsh_direct(*words)
    pooled.virsh("vol-delete", "a", THEIRS)
    for name in ("virtlun-other", "other"):
        assert re.search("no storage pool with matching name", said(pooled, "pool-info", name))
