"""How `make demo` ends: nothing is left, but for the logs where it failed.

The host is a fake here; the real one runs the same steps in tests/libvirt/test_main_job.py, and
the real console there, too.
"""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from tests.demo import __main__ as demo
from tests.demo import running
from tests.demo.steps import Story
from tests.support.host import Host


class FakeHost:
    """As much of tests.support.host.Host as the demo's own code touches."""

    life: list[str]

    def __init__(self, scratch: Path, *, keep: bool) -> None:
        self.scratch, self.keep = scratch, keep
        self.uri = "qemu+unix:///system?socket=/s"
        self.paths = self
        self.rpc_socket = scratch / "target.sock"
        self.log = scratch / "target.log"
        (scratch / "target.log").write_text("what the target said\n")

    def close(self) -> None:
        self.life.append("closed")

    __enter__ = Host.__enter__
    __exit__ = Host.__exit__


@pytest.fixture
def life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened, in order; the demo runs in `tmp_path`/demo."""
    happened: list[str] = []

    def scratch() -> Path:
        (tmp_path / "demo").mkdir()
        return tmp_path / "demo"

    def step(_: Story) -> str:
        """a step"""
        happened.append("step")
        return "shown"

    FakeHost.life = happened
    monkeypatch.setattr(demo, "Host", FakeHost)
    monkeypatch.setattr(demo, "scratch_directory", scratch)
    monkeypatch.setattr(demo, "build", lambda: None)
    monkeypatch.setattr(demo, "accelerator", lambda *_: "tcg")
    monkeypatch.setattr(running, "is_root", lambda: True)
    monkeypatch.setattr(demo, "STEPS", (step,))
    monkeypatch.setattr(demo, "shell", lambda *_: happened.append("shell"))
    out = Console(file=io.StringIO(), width=200)
    for module in (demo, running):
        monkeypatch.setattr(module, "OUT", out)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("sys.stdin", Terminal())
    return happened


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def said() -> str:
    file = running.OUT.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_the_guest_is_kept_for_the_shell_and_ended_after_it(
    life: list[str], tmp_path: Path
) -> None:
    assert demo.main(["--shell"]) == 0
    assert life == ["step", "shell", "closed"]
    assert not (tmp_path / "demo").exists()
    assert "everything is removed" in said()


def test_without_the_shell_it_just_ends(life: list[str], tmp_path: Path) -> None:
    assert demo.main([]) == 0
    assert life == ["step", "closed"]
    assert not (tmp_path / "demo").exists()


def test_a_shell_needs_a_terminal(
    life: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert demo.main(["--shell"]) == 1
    assert life == [] and "run it on a terminal" in said()
    assert not (tmp_path / "demo").exists()


def test_logs_are_kept_when_a_step_fails(
    life: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: Story) -> str:
        """a step"""
        raise AssertionError("the guest sees [0] bytes")

    monkeypatch.setattr(demo, "STEPS", (failing,))
    assert demo.main([]) == 1
    assert life == ["closed"]
    assert (tmp_path / "demo/target.log").read_text() == "what the target said\n"
    assert "in failing" in (tmp_path / "demo/traceback.txt").read_text()
    assert "the guest sees [0] bytes" in said()
    for name in ("target.log", "traceback.txt"):
        assert str(tmp_path / "demo" / name) in said()


def test_logs_are_kept_when_the_host_does_not_come_up(
    life: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(scratch: Path, *, keep: bool) -> Host:
        (scratch / "gateway.log").write_text("why\n")
        raise RuntimeError("the gateway did not start")

    monkeypatch.setattr(demo, "Host", failing)
    assert demo.main([]) == 1
    assert "the gateway did not start" in said()
    assert str(tmp_path / "demo/gateway.log") in said()


@pytest.mark.parametrize(("how", "status"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_an_interrupt_leaves_nothing(
    life: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: BaseException,
    status: int,
) -> None:
    def interrupted(_: Story) -> str:
        """a step"""
        raise how

    monkeypatch.setattr(demo, "STEPS", (interrupted,))
    assert demo.main([]) == status
    assert life == ["closed"]
    assert not (tmp_path / "demo").exists()
