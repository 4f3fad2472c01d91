"""A revert, and a definition from another host, where disks say what is refused by now."""

from __future__ import annotations

from pathlib import Path

import pytest

from plugin.gateway import domsnapshots, snapshotsteps
from plugin.gateway.journal import SnapshotEntry
from plugin.gateway.messages import STRING, TypedParam, pack_params
from plugin.gateway.procs import Proc
from plugin.gateway.reconcile import move_socket
from plugin.gateway.target import Target
from plugin.gateway.xdr import Writer
from pydataplane.domain.errors import TranslateError
from pydataplane.domain.translate.snapshotxml import DiskSnapshot
from tests.unit.gateway.world import UUID_1, World, disk, plain, play

SAID = "<driver queues='4'/>"
"""What an earlier version took of a LUN."""


def earlier(xml: str) -> str:
    """Returns libvirtd's XML of a domain whose LUN asks for queues of its own."""
    at = "bus='scsi'/>"
    assert at in xml
    return xml.replace(at, at + SAID, 1)


def snapshot(xml: str) -> str:
    return f"<domainsnapshot><name>s</name>{xml}</domainsnapshot>"


class Revert:
    """Reverts a running domain to a snapshot, and notes in which order what is done."""

    def __init__(self, world: World, patch: pytest.MonkeyPatch) -> None:
        self.world, self.done = world, list[str]()
        self.dom = world.domain(disks=disk())
        volume = world.target.volumes["lvs0/data"].uuid
        held = (DiskSnapshot("sdb", volume, "lvs0", "data@s", "u"),)
        self.entry = SnapshotEntry("revert", UUID_1, "one", "s", held)
        assert self.dom.config is not None
        self.then = earlier(self.dom.config)

        async def xml_of(*_: object) -> str:
            return snapshot(self.then)

        async def rolled_back(*_: object) -> None:
            self.done.append("rolled back")

        async def nothing(*_: object) -> None:
            return None

        def destroyed(_: bytes) -> bytes:
            self.done.append("destroyed")
            self.dom.live = None
            world.target.connected.clear()
            return b""

        patch.setattr(domsnapshots, "xml_of", xml_of)
        patch.setattr(domsnapshots, "redefine", nothing)
        patch.setattr(Target, "roll_back", rolled_back)
        world.libvirtd.answers[Proc.DESTROY] = destroyed

    async def run(self) -> None:
        await snapshotsteps.revert(self.world.gateway.services, self.entry, self.dom.ref)


def test_a_revert_takes_what_a_snapshot_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(world: World) -> None:
        revert = Revert(world, monkeypatch)
        await revert.run()
        assert revert.done == ["destroyed", "rolled back"]
        assert "queues='4'" in (revert.dom.config or "")

    play(tmp_path, body)


def test_a_revert_that_is_refused_has_done_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(world: World) -> None:
        revert = Revert(world, monkeypatch)
        revert.then = revert.then.replace(SAID, "<driver type='qcow2'/>")
        with pytest.raises(TranslateError, match="driver type 'qcow2'"):
            await revert.run()
        assert revert.done == []
        assert revert.dom.live is not None

    play(tmp_path, body)


def test_a_definition_from_another_host_gets_this_ones_socket(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        assert dom.config is not None
        here = str(world.gateway.services.settings.vhost_dir)
        dom.config = earlier(dom.config.replace(here, "/run/elsewhere"))
        await move_socket(world.gateway.services, dom.ref)
        assert "/run/elsewhere" not in dom.config and here in dom.config
        assert "queues='4'" in dom.config

    play(tmp_path, body)


@pytest.mark.parametrize("said", [SAID, ""], ids=["queues", "none"])
def test_one_xml_is_the_guests_and_the_definitions(tmp_path: Path, said: str) -> None:
    """As Nova gives it."""

    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        assert dom.config is not None and dom.live is not None
        dom.config, dom.live = earlier(dom.config), earlier(dom.live)
        xml = plain(devices=disk().replace("</disk>", f"{said}</disk>"))
        given = [TypedParam(name, STRING, xml) for name in ("destination_xml", "persistent_xml")]
        client = await world.client()
        passed: list[bytes] = []

        def begun(payload: bytes) -> bytes:
            passed.append(payload)
            return b""

        world.libvirtd.answers[Proc.MIGRATE_BEGIN3_PARAMS] = begun
        args = bytes(dom.ref.write(Writer())) + pack_params(given) + bytes(Writer().u32(0))
        await client.call(Proc.MIGRATE_BEGIN3_PARAMS, args)
        assert passed[0].count(b"alias='ua-virtlun-scsi0'") == 2, "both are translated"

    play(tmp_path, body)
