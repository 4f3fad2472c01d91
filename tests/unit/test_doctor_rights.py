"""What doctor makes of what holder and helper tell of their rights."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from csi.host.server import Server
from plugin.cli.doctor import rights
from plugin.cli.doctor.finding import Finding
from tests.support.scratch import short_directory

HELPERS = 1 << 1 | 1 << 21 | 1 << 24
"""CAP_DAC_OVERRIDE, CAP_SYS_ADMIN, CAP_SYS_RESOURCE."""
GOOD = {"uid": 0, "capabilities": HELPERS, "no_new_privs": True, "seccomp": True, "refused": []}


class Nothing:
    """Operations of which none is asked."""

    def do(self, name: str, volume: str, arguments: dict[str, Any]) -> object:
        """Does nothing."""
        raise AssertionError(name)


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short one for the helper's socket."""
    with short_directory("vd-") as folder:
        monkeypatch.setattr(rights, "HELPER_SOCKET", folder / "helper.sock")
        yield folder / "helper.sock"


def answered(path: Path, answer: bytes) -> Finding:
    """Looks at a helper that gives this answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()

        def answer_once() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(4096)
                peer.send(answer)

        thread = threading.Thread(target=answer_once)
        thread.start()
        found = rights.helper()
        thread.join(60)
    path.unlink()
    return found


def test_a_real_helper_tells(path: Path) -> None:
    """Its own process, this one, as the kernel has it, and which calls it denied."""
    server = Server(path, Nothing(), os.geteuid(), lambda: ["bpf", "setns"])
    threading.Thread(target=server.serve, daemon=True).start()
    found = rights.helper()
    assert found.state == "warning"
    user = "root" if os.geteuid() == 0 else str(os.geteuid())
    assert found.found.startswith(f"user {user}; capabilities ")
    assert found.found.endswith("; refused system calls: bpf, setns")
    assert "helper's log" in found.advice


@pytest.mark.parametrize(
    ("change", "state", "advice"),
    [
        ({}, "ok", ""),
        ({"capabilities": 1 << 21}, "ok", ""),
        ({"capabilities": HELPERS | 1 << 12}, "warning", "it gives up NET_ADMIN"),
        ({"seccomp": False}, "warning", "start it without --no-sandbox"),
        ({"refused": ["bpf"]}, "warning", "somebody attacks it"),
    ],
)
def test_what_a_helper_says_is_judged(
    path: Path, change: dict[str, Any], state: str, advice: str
) -> None:
    found = answered(path, json.dumps({"done": GOOD | change}).encode())
    assert found.state == state, found
    assert advice in found.advice


@pytest.mark.parametrize("answer", [b"", b"x", b"{}", b'{"failed": "no"}', b'{"done": []}'])
def test_one_that_does_not_tell_is_not_trusted(path: Path, answer: bytes) -> None:
    found = answered(path, answer)
    assert (found.state, found.found[:9]) == ("warning", "not known")


def test_none_is_nothing_to_worry_about(path: Path) -> None:
    found = rights.helper()
    assert found.state == "ok"
    assert found.found.startswith(f"none runs at {path}")
