"""What the domain hook leaves of a domain: every byte but those of the disks that became LUNs.

What was put in is cut out of the result again by its text, what was to go is cut out of the
original, and the tags and texts of both must be the same ones in the same order.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pydataplane.domain.translate import Settings, carry
from tests.kubernetes.kubevirt import domain as kubevirt
from tests.unit.translate.domains import FILES, NAMES
from tests.unit.translate.test_carry import DOMAIN

SOCKET = "/var/run/virtlun/vhost.sock"
SETTINGS = Settings(max_queues=8, reconnect_s=1)
CARRIER = re.compile(
    r"<disk type='vhostuser' device='disk'>(?:(?!</disk>).)*?ua-virtlun-scsi0.*?</disk>", re.S
)
DEVICE = re.compile(r"<(\w+:|)device alias='ua-virtlun-scsi0'>.*?</\1device>", re.S)
OVERRIDE = re.compile(
    r"<qemu:override xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>\s*</qemu:override>"
)
BACKING = re.compile(r"<memoryBacking>\s*</memoryBacking>")
TOKENS = re.compile(r"<!--.*?-->|<!\[CDATA\[.*?\]\]>|<[^>]*>|[^<]+", re.S)
#: As KubeVirt's converter, and what a cluster administrator may have made it write.
ADDED = (
    "",
    "<memoryBacking/>",
    "<memoryBacking><hugepages></hugepages></memoryBacking>",
    '<memoryBacking><source type="memfd"></source></memoryBacking>',
    '<memoryBacking><access mode="shared"></access><nosharepages></nosharepages></memoryBacking>',
    "<!-- <disk> --><description>a &lt; b &amp; \u00e4 <![CDATA[</disk>]]></description>",
    '<commandline xmlns="http://libvirt.org/schemas/domain/qemu/1.0">'
    '<arg value="-fw_cfg"></arg></commandline>',
)


def tokens(text: str) -> list[str]:
    """Returns tags, comments and texts; not the white space between two tags."""
    return [found for found in TOKENS.findall(text) if not found.isspace()]


def without_ours(after: str, before: str) -> str:
    """Returns a domain without what the hook puts in; each part must be there once."""
    for pattern in (CARRIER, DEVICE):
        after, count = pattern.subn("", after)
        assert count == 1, pattern
    after = OVERRIDE.sub("", after)
    for part in ("<source type='memfd'/>", "<access mode='shared'/>"):
        more = after.count(part) - before.count(part)
        assert more in (0, 1), part
        head, found, tail = after.rpartition(part) if more else (after, "", "")
        after = head + tail if found else head
    for opened in re.findall(r"<(memoryBacking|\w+:override)/>", before):
        after = re.sub(rf"<{opened}>\s*</{opened}>", f"<{opened}/>", after)
    return after if BACKING.search(before) else BACKING.sub("", after)


def check(before: str, gone: dict[str, int]) -> None:
    """Checks that nothing is gone but these disks, by alias, and nothing new but ours."""
    kept = before
    for alias in gone:
        disk = rf"<disk\b(?:(?!</disk>).)*?\bname=[\"']{re.escape(alias)}[\"'].*?</disk>"
        kept, count = re.subn(disk, "", kept, flags=re.S)
        assert count == 1, alias
    after = carry(before, SOCKET, gone, SETTINGS)
    assert tokens(without_ours(after, before)) == tokens(kept)


@st.composite
def machines(draw: st.DrawFn) -> tuple[str, dict[str, int]]:
    """Draws a domain as KubeVirt's converter makes it, and the disks that became LUNs."""
    disks: list[dict[str, Any]] = []
    volumes: list[dict[str, Any]] = []
    luns: dict[str, int] = {}
    orders = draw(st.permutations(range(1, 7)))
    for number in range(draw(st.integers(0, 6))):
        name = f"disk{number}"
        disk: dict[str, Any] = {"name": name, "disk": {"bus": draw(st.sampled_from(BUSES))}}
        if draw(st.booleans()):
            disk["bootOrder"] = orders[number]
        if draw(st.booleans()):
            disk["serial"] = f"S<&>{number}"
        kind = draw(st.sampled_from(("lun", "block", "file")))
        if kind == "file":
            volumes.append({"name": name, "hostDisk": {"path": f"/disks/{name}/disk.img"}})
        else:
            volumes.append({"name": name, "persistentVolumeClaim": {"claimName": name}})
        if kind == "lun":
            luns[f"ua-{name}"] = len(luns)
        disks.append(disk)
    interfaces = [{"name": "default"}] * draw(st.integers(0, 1))
    vmi = {
        "metadata": {"namespace": "default", "name": "vm", "uid": "u-1"},
        "spec": {
            "domain": {
                "cpu": {"cores": draw(st.integers(1, 16))},
                "memory": {"guest": "256Mi"},
                "devices": {"disks": disks, "interfaces": interfaces},
            },
            "volumes": volumes,
        },
    }
    made = kubevirt.convert(vmi)
    if draw(st.booleans()):
        made = kubevirt.with_ports(kubevirt.with_placeholders(made, 3), len(interfaces))
    text = kubevirt.encode(made).decode()
    return text.replace("<vcpu", f"{draw(st.sampled_from(ADDED))}<vcpu", 1), luns


BUSES = ("virtio", "scsi", "sata")


@given(machines())
def test_of_a_domain_of_kubevirt_s_nothing_else_changes(
    machine: tuple[str, dict[str, int]],
) -> None:
    check(*machine)


@pytest.mark.parametrize("xml", [path.read_text() for path in FILES], ids=NAMES)
def test_of_a_domain_in_libvirt_s_words_nothing_changes(xml: str) -> None:
    check(xml, {})


def test_of_a_domain_with_comments_and_both_kinds_of_quotes_nothing_else_changes() -> None:
    check(DOMAIN, {"ua-rootdisk": 0, "ua-data": 1})
    check(DOMAIN, {"ua-data": 0})
