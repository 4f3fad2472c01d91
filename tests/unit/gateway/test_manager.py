"""What the gateway tells the service manager that has started it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from plugin.gateway import manager


@pytest.mark.parametrize("abstract", [False, True])
def test_manager_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abstract: bool) -> None:
    name = f"@virtlun-notify-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
        own.bind(name.replace("@", "\0") if abstract else name)
        own.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        manager.tell("READY=1")
        assert own.recv(100) == b"READY=1"


def test_one_that_cannot_be_told_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "none"))
    manager.tell("READY=1")
    assert "the service manager could not be told" in capsys.readouterr().out
    monkeypatch.delenv("NOTIFY_SOCKET")
    manager.tell("READY=1")
