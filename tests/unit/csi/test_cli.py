"""The driver's command line: what it cannot use is refused in one sentence, and nothing is left."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from csi.cli import main


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("--endpoint", "tcp://0.0.0.0:1"), 2, "--endpoint tcp://0.0.0.0:1: only a UNIX socket"),
        (("--node-id", ""), 2, "--node-id is empty"),
        (("--http", "nonsense"), 1, "--http: 'nonsense' is not ADDRESS:PORT"),
        (("--http", "127.0.0.1:99999"), 1, "is not ADDRESS:PORT"),
        (("--http", "192.0.2.1:9810"), 1, "--http 192.0.2.1:9810: Cannot assign requested address"),
        (("--endpoint", f"unix:///tmp/{'x' * 120}"), 1, "a socket's path has 107 bytes at most"),
    ],
)
def test_a_wrong_option_is_one_sentence(
    tmp_path: Path, words: tuple[str, ...], status: int, said: str
) -> None:
    endpoint = tmp_path / "csi.sock"
    done = CliRunner().invoke(main, ["--node-id", "n", "--endpoint", f"unix://{endpoint}", *words])
    assert (done.exit_code, len(done.stderr.strip().splitlines()[-1:])) == (status, 1)
    assert said in done.stderr.splitlines()[-1]
    assert not endpoint.exists()


def test_a_taken_port_is_told_by_its_address(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        words = ["--node-id", "n", "--endpoint", str(tmp_path / "s"), "--http", address]
        done = CliRunner().invoke(main, words)
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1] == f"Error: --http {address}: Address already in use"
