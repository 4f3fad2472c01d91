"""What TAB completes in a shell, by its own completion: bash, with a real target."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cache import ROOT
from tests.support.target import Target

MIB = 1 << 20


@pytest.fixture
def environment(target: Target, tmp_path: Path) -> dict[str, str]:
    """Of a shell in which `virtlun` is this checkout's, with two volumes and a snapshot."""
    target.make_lvstore("lvs0", 64 * MIB)
    for name in ("data", "other"):
        target.make_thin(name, 8)
    target.rpc("bdev_lvol_snapshot", lvol_name="lvs0/data", snapshot_name="data@s")
    program = tmp_path / "virtlun"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from plugin.cli import main\nmain(prog_name='virtlun')\n"
    )
    program.chmod(0o755)
    return os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "VIRTLUN_TARGET_SOCKET": str(target.rpc_socket),
    }


def completed(environment: dict[str, str], *words: str) -> list[str]:
    """Returns what bash completes the last word to."""
    script = (
        'eval "$(virtlun completion bash)"; COMP_WORDS=(virtlun "$@"); '
        "COMP_CWORD=$#; _virtlun_completion virtlun; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    ran = subprocess.run(
        ["bash", "-c", script, "bash", *words],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stderr == ""
    return ran.stdout.split()


def test_commands_options_and_names(environment: dict[str, str]) -> None:
    assert completed(environment, "vol") == ["volume"]
    assert completed(environment, "volume", "del") == ["delete"]
    assert completed(environment, "volume", "delete", "lvs0/d") == ["lvs0/data", "lvs0/data@s"]
    assert completed(environment, "volume", "create", "l") == ["lvs0"]
    assert completed(environment, "lvstore", "check", "") == ["lvs0"]


def test_without_a_target_no_name_is_known(environment: dict[str, str]) -> None:
    away = environment | {"VIRTLUN_TARGET_SOCKET": "/nowhere"}
    assert completed(away, "volume", "delete", "") == []
