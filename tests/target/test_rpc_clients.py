"""Many clients of the JSON-RPC socket at once: who asks is answered, whoever else is connected."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydataplane.client import Client
from pydataplane.volumes import Volumes
from tests.support.target import Target

MIB = 1 << 20
MAX_CONNECTIONS = 64
DEADLINE_S = 120.0
"""Of a call, for a machine that does much else; without an answer the test fails."""


@contextlib.contextmanager
def bursts_of_idle_clients(path: Path) -> Iterator[None]:
    """Connects half as many clients again as can be, which ask nothing, over and over."""
    ending = threading.Event()

    def connect() -> None:
        while not ending.wait(0.05):
            with contextlib.ExitStack() as idle:
                for _ in range(MAX_CONNECTIONS * 3 // 2):
                    client = idle.enter_context(socket.socket(socket.AF_UNIX))
                    client.connect(str(path))

    thread = threading.Thread(target=connect)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


def test_every_call_is_answered_beside_bursts_of_clients_that_ask_nothing(target: Target) -> None:
    client = Client(target.rpc_socket, timeout_s=DEADLINE_S)
    volumes = Volumes(client)
    volumes.create_lvstore("lvs0", target.directory / "lvs0.img", 1 << 30)

    def make_and_delete(who: int) -> int:
        for at in range(25):
            made = volumes.create(f"lvs0/v{who}-{at}", 4 * MIB)
            assert volumes.volume(made.uuid).path == f"lvs0/v{who}-{at}"
            volumes.delete(made.uuid)
        return who

    with bursts_of_idle_clients(target.rpc_socket), ThreadPoolExecutor(8) as threads:
        assert list(threads.map(make_and_delete, range(8))) == list(range(8))
    assert volumes.volumes() == []
