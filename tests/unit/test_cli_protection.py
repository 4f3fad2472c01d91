"""What `virtlun` says of guests that carry protection information."""

from __future__ import annotations

import contextlib
import json
import platform
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID

import pytest
from click.testing import CliRunner

from plugin.cli import domain as domain_commands
from plugin.cli import main
from plugin.cli.doctor import guests, protection
from plugin.config import Config
from pydataplane import emulator
from pydataplane.domain import translate
from pydataplane.domain.translate import Settings
from tests.unit.gateway.world import UUID_1, disk, plain


def carrying(*, protection: bool, qemu: bool = True) -> Settings:
    return Settings(protection=protection, qemu_protects=lambda *_: qemu)


def test_doctor_names_each_vm_that_runs_without_protection_information() -> None:
    def of(given: str, settings: Settings) -> str:
        return translate.define(given, settings, new_uuid=UUID(UUID_1)).xml

    now, client = carrying(protection=True), plain(devices=disk())
    blk = disk(dev="vdb").replace("bus='scsi'", "bus='virtio'")
    fine = [of(client, now), of(plain(devices=blk), now), plain()]
    (found,) = protection.judged(fine, now)
    assert (found.what, found.state, found.advice) == ("protection information", "ok", "")
    before = of(client, carrying(protection=False))
    for settings, why, advice in (
        (now, "as it was started before", "stop it and start it through the gateway"),
        (carrying(protection=True, qemu=False), "whose QEMU is not known", "name QEMU 7.2 or"),
    ):
        (found,) = protection.judged([*fine, before], settings)
        assert found.state == "warning" and found.advice.startswith(advice)
        assert found.found.startswith(f"one runs without it, {why}")


@pytest.mark.parametrize("said", ["t10_pi", "none"])
def test_doctor_says_whether_qemu_lets_guests_carry_it(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where that is configured; of others it has no line."""
    monkeypatch.setattr(emulator, "FOLDERS", (str(tmp_path),))
    monkeypatch.setattr(emulator, "OUTSIDE", str(tmp_path / "none"))
    program = tmp_path / f"qemu-system-{platform.machine()}"
    program.write_bytes(b"QEMU emulator version 10.0.2 \0" + said.encode() + b"\0")
    program.chmod(0o755)
    monkeypatch.setattr(guests, "running", lambda _: [])
    assert protection.carried(Config()) == []
    on = Config.model_validate({"disks": {"protection": True}})
    (found,) = protection.carried(on)
    assert found.state == ("ok" if said == "t10_pi" else "warning")
    assert bool(found.advice) == (found.state == "warning")


@pytest.mark.parametrize("on", [True, False])
def test_domain_show_says_that_a_guest_carries_it(
    on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = translate.define(plain(devices=disk()), carrying(protection=on), new_uuid=UUID(UUID_1))
    handle = SimpleNamespace(
        name=lambda: "one",
        isActive=lambda: 1,
        UUIDString=lambda: UUID_1,
        XMLDesc=lambda _: made.xml,
    )
    opened = SimpleNamespace(listAllDomains=lambda: [handle])
    monkeypatch.setattr(domain_commands, "connection", lambda _: contextlib.nullcontext(opened))
    config = tmp_path / "virtlun.toml"
    config.write_text(f"[target]\nrpc_socket = '{tmp_path}/rpc'\n[disks]\nprotection = true\n")
    monkeypatch.setattr(emulator, "protects", lambda *_: True)
    words = ["--config", str(config), "domain", "show", "one"]
    shown = CliRunner().invoke(main, words)
    assert shown.exit_code == 0, shown.output
    assert ("protection  carried by the guest" in shown.stdout) == on
    plan = json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)["plan"]
    assert plan["protection"] is on
    # A gateway shows what the client wrote, of which nobody knows how it runs.
    handle.XMLDesc = lambda _: plain(devices=disk())
    assert "protection" not in CliRunner().invoke(main, words).stdout
