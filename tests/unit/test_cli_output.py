"""What the commands print: whole names, plain texts, JSON, and nothing where a pipe is closed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from plugin import qemu_user
from plugin.cli import main
from plugin.cli.contents import UnknownContentsError, contents
from plugin.cli.output import confirm, errors_as_sentences, show, text
from plugin.cli.target import _group_of_qemu
from pydataplane import supervise

VIRTLUN = str(Path(sys.executable).parent / "virtlun")
LONG = "lvs0/" + "n" * 60


@pytest.mark.parametrize("columns", ["40", "200"])
def test_no_name_is_cut_however_narrow_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    rows = [{"path": LONG, "uuid": "00000000-0000-4000-8000-000000000001"}]
    show(rows, [("VOLUME", "path", text), ("UUID", "uuid", text)], as_json=False, empty="")
    shown = capsys.readouterr().out
    assert LONG in shown and rows[0]["uuid"] in shown and "…" not in shown


def test_a_name_is_text_whatever_it_looks_like(capsys: pytest.CaptureFixture[str]) -> None:
    show([{"name": "vm[red]1"}], [("NAME", "name", text)], as_json=False, empty="")
    assert "vm[red]1" in capsys.readouterr().out


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    vm = Path(__file__).parents[2] / "examples/libvirt/vm.xml"
    try:
        for words in (["domain", "translate", str(vm)], ["doctor", "--json"], ["--help"]):
            done = subprocess.run(
                [VIRTLUN, *words], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
            )
            assert done.stderr == "", words
    finally:
        os.close(writer)


def test_a_closed_pipe_passes_to_click() -> None:
    @errors_as_sentences
    def writes() -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        writes()


def test_what_nobody_confirms_is_not_done() -> None:
    @click.command()
    def command() -> None:
        confirm("Destroy it?")
        click.echo("done")

    assert CliRunner().invoke(command, input="y\n").stdout.endswith("done\n")
    for said in ("", "n\n"):
        done = CliRunner().invoke(command, input=said)
        assert done.exit_code == 1
        assert "done" not in done.stdout
        assert "add --yes" in done.stderr.splitlines()[-1]


def test_stopping_a_target_that_does_not_run_is_no_error(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["--socket", str(tmp_path / "none"), "target", "stop"])
    assert done.exit_code == 0
    assert "no target runs on" in done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root's rights away, so it needs them")
def test_a_socket_that_is_not_for_this_user_is_said_to_be_so(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir()
    path = folder / "rpc"
    for parent in (folder, *folder.parents):
        parent.chmod(parent.stat().st_mode | 0o011)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen(1)
        path.chmod(0o600)
        program = (
            "import os, sys; from plugin.cli import main\n"
            "os.setgroups([]); os.setgid(65534); os.setuid(65534); main(sys.argv[1:])"
        )
        for words in (["volume", "list"], ["target", "stop"], ["target", "start"]):
            done = subprocess.run(
                [sys.executable, "-c", program, "--socket", str(path), *words],
                capture_output=True,
                text=True,
                check=False,
                cwd="/",
            )
            assert done.returncode == 1
            assert done.stderr == (
                f"Error: {path} is not for this user: run as root, or start virtlun-target with "
                "--rpc-group and a group of this user\n"
            )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--interval", "0"), "--interval"),
        (("--interval", "nan"), "--interval"),
        (("--interval", "1e99"), "--interval"),
        (("--interval", "-1"), "--interval"),
        (("--count", "0"), "--count"),
        (("--count", "-5"), "--count"),
    ],
)
def test_top_refuses_numbers_that_mean_nothing(words: tuple[str, ...], says: str) -> None:
    done = CliRunner().invoke(main, ["top", *words])
    assert done.exit_code == 2
    assert says in done.stderr


def test_the_target_gives_its_sockets_to_qemus_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[str, ...]] = []

    def start(_: supervise.TargetPaths, options: tuple[str, ...]) -> int:
        given.append(options)
        return 1

    monkeypatch.setattr(supervise, "start", start)
    monkeypatch.setattr("plugin.cli.target._group_of_qemu", lambda: "kvm")
    words = ["--socket", str(tmp_path / "s"), "target", "start"]
    assert CliRunner().invoke(main, words).exit_code == 0
    assert CliRunner().invoke(main, [*words, "--socket-group", "qemu"]).exit_code == 0
    own = ("--socket-group=104", "--poll")
    assert CliRunner().invoke(main, [*words, "--", *own]).exit_code == 0
    monkeypatch.setattr("plugin.cli.target._group_of_qemu", lambda: None)
    assert CliRunner().invoke(main, words).exit_code == 0
    held = "--hold-sessions"
    assert given == [
        (held, "--socket-group", "kvm"),
        (held, "--socket-group", "qemu"),
        (held, *own),
        (held,),
    ]


def test_a_target_that_does_not_start_says_why(tmp_path: Path) -> None:
    words = ["--socket", str(tmp_path / "s"), "target", "start", "--log", str(tmp_path / "log")]
    words += ["--vhost-dir", str(tmp_path / "v"), "--state-dir", str(tmp_path / "state")]
    for option, said in (("--frob", "unexpected argument '--frob'"), ("--cpumask=0", "no CPU")):
        done = CliRunner().invoke(main, [*words, "--", option])
        assert done.exit_code == 1
        assert said in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_qemus_group_is_its_users(monkeypatch: pytest.MonkeyPatch) -> None:
    root = qemu_user.entry("root")

    def entry(name: str) -> object:
        if name != "qemu":
            raise KeyError(name)
        return root

    monkeypatch.setattr(qemu_user, "entry", entry)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert _group_of_qemu() == "root"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert _group_of_qemu() is None, "only root may give sockets away"


def test_contents_are_told_as_far_as_blkid_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "disk"
    path.write_bytes(bytes(4 << 20))
    assert contents(path) == ""
    subprocess.run(["mkfs.ext4", "-q", "-F", str(path)], check=True)
    assert contents(path) == "ext4"
    path.write_bytes(bytes(4 << 20))
    with path.open("r+b") as file:
        file.seek(446)
        file.write(bytes([0, 0, 2, 0, 0x83, 0, 3, 0, 1, 0, 0, 0, 0xFF, 0x1F, 0, 0]))
        file.seek(510)
        file.write(b"\x55\xaa")
    assert contents(path) == "a partition table (dos)"
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(UnknownContentsError, match="not installed"):
        contents(path)


def test_every_command_has_help_and_a_summary_that_is_not_cut() -> None:
    def commands(group: click.Group, words: list[str]) -> list[list[str]]:
        found = [words]
        for name, command in group.commands.items():
            more = [*words, name]
            found += commands(command, more) if isinstance(command, click.Group) else [more]
        return found

    for words in commands(main, []):
        done = CliRunner().invoke(main, [*words, "--help"], terminal_width=80)
        assert done.exit_code == 0, words
        assert "Usage: " in done.stdout
        assert "..." not in done.stdout.partition("Commands:")[2], done.stdout


def test_json_of_no_rows_is_an_empty_list(capsys: pytest.CaptureFixture[str]) -> None:
    show([], [("NAME", "name", text)], as_json=True, empty="none: make one")
    assert json.loads(capsys.readouterr().out) == []
