"""What TAB completes in a shell, by its own completion, with a real target."""

from __future__ import annotations

import os
import pty
import select
import shlex
import shutil
import signal
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


@pytest.mark.nightly
@pytest.mark.skipif(not shutil.which("fish"), reason="not installed: fish")
def test_fish_completes_the_same(environment: dict[str, str]) -> None:
    def fish(line: str) -> list[str]:
        script = f"virtlun completion fish | source; complete --do-complete {shlex.quote(line)}"
        ran = subprocess.run(
            ["fish", "--no-config", "--command", script],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert ran.stderr == ""
        return [row.split("\t")[0] for row in ran.stdout.splitlines()]

    assert fish("virtlun vol") == ["volume"]
    assert fish("virtlun volume del") == ["delete"]
    assert fish("virtlun volume delete lvs0/d") == ["lvs0/data", "lvs0/data@s"]
    assert fish("virtlun volume create l") == ["lvs0"]


@pytest.mark.nightly
@pytest.mark.skipif(not shutil.which("zsh"), reason="not installed: zsh")
def test_zsh_completes_the_same_at_a_terminal(environment: dict[str, str]) -> None:
    """The completion of zsh is a part of its line editor, so it has one, and TAB is pressed."""
    process, terminal = pty.fork()
    if process == 0:
        os.execvpe("zsh", ["zsh", "-f", "-i"], environment | {"TERM": "vt100", "PS1": "> "})
    try:

        def types(text: str, answer: str) -> None:
            os.write(terminal, text.encode())
            seen = ""
            while answer not in seen:
                ready, _, _ = select.select([terminal], [], [], 60)
                assert ready, f"{answer!r} is not in {seen!r}"
                seen += os.read(terminal, 65536).decode(errors="replace")

        begin = "autoload -Uz compinit && compinit -D -u && source <(virtlun completion zsh)"
        types(f"{begin} && print loa''ded\n", "loaded")
        # What stands in the line is printed, not run: ^A is its beginning.
        for line, whole in (
            ("virtlun vol", "virtlun volume"),
            ("virtlun volume del", "virtlun volume delete"),
            ("virtlun volume delete lvs0/o", "virtlun volume delete lvs0/other"),
            ("virtlun volume create l", "virtlun volume create lvs0"),
        ):
            types(f"{line}\t\x01print -r -- 'st'ands \n", f"stands {whole}\r\n")
    finally:
        os.close(terminal)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
