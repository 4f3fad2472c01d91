"""Where the targets of a host are, for the gateway, the commands and the hook."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from plugin.cli import main
from plugin.config import Config
from plugin.hook.config import Config as HookConfig
from plugin.targets import TargetAddress, address, addresses
from pydataplane.domain.errors import ConfigError
from pydataplane.sockets import name_of, start_command
from pydataplane.supervise import TargetPaths


def config(folder: Path, **targets: dict[str, str]) -> Config:
    """Returns a configuration whose first target is in `folder`."""
    first = {"rpc_socket": f"{folder}/target.sock", "vhost_dir": f"{folder}/vhost"}
    return Config.model_validate({"target": first, "targets": targets})


def test_targets_are_found_beside_the_first_one(tmp_path: Path) -> None:
    for name in ("silver", "gold", "vhost"):
        (tmp_path / name).mkdir()
    for name in ("silver", "gold"):
        (tmp_path / name / "target.sock").touch()
    elsewhere = {"rpc_socket": "/e/r.sock", "vhost_dir": "/e/v"}
    found = addresses(config(tmp_path, iron=elsewhere, silver=elsewhere | {"rpc_socket": "/s"}))
    assert [at.label for at in found] == ["default", "iron", "silver", "gold"]
    assert found[1] == TargetAddress("iron", Path("/e/r.sock"), Path("/e/v"))
    assert found[2].rpc_socket == Path("/s"), "what is configured goes before what is found"
    assert found[3] == TargetAddress("gold", tmp_path / "gold/target.sock", tmp_path / "gold/vhost")


def test_one_that_does_not_run_has_its_place(tmp_path: Path) -> None:
    at = address(config(tmp_path), "gold")
    assert at == TargetAddress("gold", tmp_path / "gold/target.sock", tmp_path / "gold/vhost")
    assert address(config(tmp_path), None).rpc_socket == tmp_path / "target.sock"


def test_packaged_paths_of_a_name() -> None:
    paths = TargetPaths.of("gold")
    assert paths.rpc_socket == address(Config(), "gold").rpc_socket
    assert paths.vhost_dir == address(Config(), "gold").vhost_dir
    assert paths.state_dir == Path("/var/lib/virtlun/gold/target")
    assert (name_of(paths.rpc_socket), name_of(TargetPaths().rpc_socket)) == ("gold", None)
    assert start_command(paths.rpc_socket) == "virtlun --target gold target start"
    assert start_command(Path("/x/gold/target.sock")) == "virtlun target start"


@pytest.mark.parametrize(
    ("socket", "expected"),
    [
        ("/run/v/vhost/vm-1", "/run/v/t.sock"),
        ("/run/v/gold/vhost/vm-1", "/run/v/gold/t.sock"),
        ("/e/v/vm-1", "/e/r.sock"),
        ("/somewhere/else/vm-1", "/run/v/t.sock"),
        ("/run/v/gold/more/vhost/vm-1", "/run/v/t.sock"),
        ("", "/run/v/t.sock"),
    ],
)
def test_the_hook_tells_the_target_by_the_folder(
    tmp_path: Path, socket: str, expected: str
) -> None:
    file = tmp_path / "virtlun.toml"
    file.write_text(
        '[target]\nrpc_socket = "/run/v/t.sock"\nvhost_dir = "/run/v/vhost"\n'
        '[targets.iron]\nrpc_socket = "/e/r.sock"\nvhost_dir = "/e/v"\n'
    )
    assert HookConfig(str(file)).rpc_socket_of(socket) == expected


def test_the_hook_refuses_a_target_without_folder(tmp_path: Path) -> None:
    file = tmp_path / "virtlun.toml"
    file.write_text('[targets.iron]\nrpc_socket = "/e/r.sock"\n')
    with pytest.raises(ConfigError, match=r"\[hook\] and \[gateway\]: KeyError\('vhost_dir'\)"):
        HookConfig(str(file))


def test_a_name_that_is_none_is_refused() -> None:
    done = CliRunner().invoke(main, ["--target", "../x", "target", "list"])
    assert done.exit_code == 2
    assert "a target's name has small letters, digits and hyphens, 23 at most" in done.output
