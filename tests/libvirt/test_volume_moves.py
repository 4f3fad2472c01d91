"""`virtlun volume move` of volumes that domains name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from plugin.cli import main
from tests.support.host import Host

pytestmark = [pytest.mark.root, pytest.mark.vm]

MIB = 1 << 20


@pytest.fixture(scope="module")
def domain(host: Host) -> Iterator[Host]:
    """A host with a second lvstore."""
    host.volumes.create_lvstore("lvs1", host.scratch / "lvs1.img", 256 * MIB)
    yield host


def command(host: Host, *words: str) -> list[str]:
    return ["--config", str(host.config), "volume", "move", *words]


def move(host: Host, *words: str) -> Result:
    return CliRunner().invoke(main, command(host, *words))


def moved(host: Host, *words: str) -> dict[str, Any]:
    result = move(host, *words, "--json")
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)
    return dict(found)


def refused(host: Host, *words: str) -> str:
    result = move(host, *words)
    assert result.exit_code == 1, result.output
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    return result.stderr


OFF = """<domain type='qemu'><name>{name}</name><memory unit='MiB'>64</memory><os>
<type arch='x86_64' machine='q35'>hvm</type></os><devices>
<disk type='file'><source file='/dev/virtlun/lvs0/off'/><target dev='sda' bus='scsi'/></disk>
<disk type='volume'><source pool='virtlun-lvs0' volume='off2'/><target dev='sdb' bus='scsi'/></disk>
</devices></domain>"""


def test_domains_that_are_off_name_the_new_volume(domain: Host) -> None:
    for name in ("off", "off2"):
        domain.volumes.create(f"lvs0/{name}", 8 * MIB, thin=True)
    for name in ("one", "two"):
        file = domain.scratch / f"{name}.xml"
        file.write_text(OFF.format(name=name))
        domain.virsh("define", str(file))
    assert moved(domain, "lvs0/off", "lvs1")["domains"] == ["one", "two"]
    assert moved(domain, "lvs0/off2", "lvs1/new")["domains"] == ["one", "two"]
    for name in ("one", "two"):
        shown = domain.virsh("dumpxml", name).replace('"', "'")
        assert "<source file='/dev/virtlun/lvs1/off'/>" in shown
        assert "<source pool='virtlun-lvs1' volume='new'/>" in shown
        assert domain.volumes.volume("lvs1/new").uuid in domain.virsh_direct("dumpxml", name)
    domain.virsh("start", "one")
    # One of them uses it, and goes on; the other one follows.
    for of, to in (("lvs1/off", "lvs0"), ("lvs0/off", "lvs1")):
        found = moved(domain, of, to)
        assert found["domains"] == ["one", "two"] and found["pause_us"] > 0
        for name in ("one", "two"):
            assert f"/dev/virtlun/{to}/off" in domain.virsh("dumpxml", name)
    domain.virsh("managedsave", "one")
    assert "domain one, which is saved, goes on with volume lvs1/off" in refused(
        domain, "lvs1/off", "lvs0"
    )
    domain.virsh("managedsave-remove", "one")
    direct = refused(domain, "lvs1/off", "lvs0", "--connect", domain.libvirtd.uri())
    assert "is libvirtd itself" in direct, direct
    for name in ("one", "two"):
        domain.virsh("undefine", name)
    for volume in ("off", "new"):
        domain.volumes.delete(f"lvs1/{volume}")
