"""A domain with metadata that was written at libvirtd: others' volumes stay as they are."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from pydataplane.domain.translate import NAMESPACE
from tests.support.host import Host
from tests.support.libvirtd import VirshError

pytestmark = [pytest.mark.root, pytest.mark.vm]

VICTIM, OTHER = "victim", "other"


@pytest.fixture(scope="module")
def named(host: Host) -> Iterator[Host]:
    """Both run; the other's live metadata names the victim's volume, which has a snapshot."""
    host.start_without_guest(VICTIM, "a")
    host.start_without_guest(OTHER, "b")
    host.volumes.snapshot(["lvs0/a"], "kept")
    text = host.virsh_direct("metadata", OTHER, "--uri", NAMESPACE)
    own, theirs = (host.volumes.volume(f"lvs0/{each}").uuid for each in "ba")
    text = text.replace(own, theirs).replace("lvs0/b", "lvs0/a")
    text = re.sub("""lvol=(['"])b""", r"lvol=\1a", text)
    assert host.volumes.volume("lvs0/a").uuid in text
    host.virsh_direct("metadata", OTHER, "--uri", NAMESPACE, "--key", "v", "--set", text, "--live")
    yield host
    for name in (VICTIM, OTHER):
        host.virsh_direct("destroy", name)


@pytest.mark.parametrize(
    "command",
    [
        "blockresize other sdb 64M",
        "blockpull other sdb --wait",
        "blockcommit other sdb --active --pivot",
    ],
)
def test_what_its_controller_does_not_show_is_not_changed(named: Host, command: str) -> None:
    shown = named.virsh("domblklist", OTHER)
    assert re.search(r"sdb +\S*lvs0/\w", shown), shown
    before = {(v.name, v.size, v.parent) for v in named.volumes.volumes("lvs0")}
    with pytest.raises(VirshError) as refused:
        named.virsh(*command.split())
    assert "disk sdb: the controller of other does not show volume lvs0/a now" in str(refused.value)
    assert {(v.name, v.size, v.parent) for v in named.volumes.volumes("lvs0")} == before


def test_what_it_shows_is(named: Host) -> None:
    named.virsh("blockresize", VICTIM, "sda", "64M")
    assert named.volumes.volume("lvs0/a").size == 64 << 20
    named.virsh("blockcommit", VICTIM, "sda", "--active", "--pivot")
    assert "a@kept" not in {v.name for v in named.volumes.volumes("lvs0")}
