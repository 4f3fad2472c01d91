"""The virtlun command where it needs no target: which configuration it goes by."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from plugin.cli import main
from plugin.config import Config
from pydataplane import supervise
from tests.unit.translate.domains import domain

DISK = (
    "<disk type='block' device='disk'><source dev='/disks/lvs0/v'/>"
    "<target dev='sda' bus='scsi'/></disk>"
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "virtlun.toml"
    path.write_text(
        "[target]\nrpc_socket = '/s/rpc'\nvhost_dir = '/s/vhost'\n"
        "[disks]\npath_prefix = '/disks/'\nmax_queues = 1\n"
    )
    return path


def test_domain_translate_goes_by_the_configuration(config: Path) -> None:
    words = ("domain", "translate", "--plan", "-")
    done = CliRunner().invoke(main, ["--config", str(config), *words], input=domain(DISK))
    assert done.exit_code == 0, done.output
    plan = json.loads(done.stdout)
    assert plan["socket"] == f"/s/vhost/{plan['controller']}"
    assert plan["num_queues"] == 1
    assert [lun["volume"] for lun in plan["luns"]] == [{"lvstore": "lvs0", "lvol": "v"}]
    named = CliRunner(env={"VIRTLUN_CONFIG": str(config)}).invoke(main, words, input=domain(DISK))
    assert named.stdout == done.stdout


def test_target_start_goes_by_the_configuration(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[supervise.TargetPaths] = []

    def start(paths: supervise.TargetPaths, _options: tuple[str, ...]) -> int:
        started.append(paths)
        return 1

    monkeypatch.setattr(supervise, "start", start)
    words = ["--config", str(config), "target", "start"]
    assert CliRunner().invoke(main, words).exit_code == 0
    assert CliRunner().invoke(main, ["--socket", "/other", *words]).exit_code == 0
    assert CliRunner().invoke(main, [*words, "--vhost-dir", "/w"]).exit_code == 0
    assert [(str(p.rpc_socket), str(p.vhost_dir)) for p in started] == [
        ("/s/rpc", "/s/vhost"),
        ("/other", "/s/vhost"),
        ("/s/rpc", "/w"),
    ]


def test_a_wrong_configuration_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "virtlun.toml"
    path.write_text("[disks]\nmax_queues = 0\n")
    done = CliRunner().invoke(main, ["--config", str(path), "volume", "list"])
    assert done.exit_code == 1
    assert done.stderr.startswith(f"Error: {path}: disks.max_queues: ")
    gone = CliRunner().invoke(main, ["--config", str(tmp_path / "none"), "volume", "list"])
    assert gone.exit_code == 1
    assert "there is no such file" in gone.stderr


def test_the_targets_own_defaults_are_those_of_the_configuration() -> None:
    paths, section = supervise.TargetPaths(), Config().target
    assert (paths.rpc_socket, paths.vhost_dir) == (section.rpc_socket, section.vhost_dir)
