"""A target's client that notices when the target says nothing, and when it is back."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from pydataplane import watchedclient
from pydataplane.errors import TargetTimeout
from pydataplane.watchedclient import WatchedClient
from tests.support.fake_socket import SocketTarget
from tests.support.wait import until

FOREVER_S = 3600.0
"""A deadline that no test lives to see."""


def test_after_one_deadline_nobody_waits_until_it_answers(tmp_path: Path) -> None:
    target = SocketTarget(tmp_path / "t")
    client = WatchedClient(target.path, 2.0)
    with target.serve(mute=True):
        with pytest.raises(TargetTimeout, match=rf"no answer from {target.path} within 2 s"):
            client.call("vhost_get_controllers")
        connections = len(target.connections)
        for _ in range(100):
            with pytest.raises(TargetTimeout, match=f"no answer from {target.path} for "):
                client.call("vhost_get_controllers")
        assert client.silent_s
        assert len(target.connections) - connections <= 1, "the one that waits for an answer"
    with target.serve():
        until(lambda: not client.silent_s, "the target is heard")
        assert client.call("vhost_get_controllers") == []


def test_one_call_that_takes_long_is_no_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(watchedclient, "time", SimpleNamespace(monotonic=lambda: now[0]))
    target = SocketTarget(tmp_path / "t")
    client = WatchedClient(target.path, FOREVER_S)
    gate = target.gate["bdev_get_bdevs"] = threading.Event()
    with target.serve():
        slow = threading.Thread(target=client.call, args=("bdev_get_bdevs",))
        slow.start()
        until(lambda: "bdev_get_bdevs" in target.calls, "it was asked")
        now[0] = 10.0
        assert client.silent_s == 10.0
        client.call("vhost_get_controllers")
        now[0] = 11.0
        assert not client.silent_s, "it has just answered another"
        now[0] = 20.0
        assert client.silent_s == 10.0
        gate.set()
        slow.join()
        assert not client.silent_s
