"""Cinder's volumes and snapshots in an lvstore, also where each step is cut off.

Cinder itself is not there: tests/openstack has it.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from plugin.openstack.lvols import HIDDEN, Lvols
from pydataplane.client import Client
from pydataplane.errors import BUSY, RpcError, VolumeError, VolumeNotFoundError
from pydataplane.lvols import Volume
from pydataplane.volumes import Volumes
from tests.support.target import Target
from tests.target.conftest import MakeTarget

MIB = 1 << 20
SIZE, LARGER = 8 * MIB, 16 * MIB
READS = re.compile("_get_|_list$")


class Death(Exception):
    """The driver ended."""


class Mortal(Client):
    """The client of a driver that ends at one of its calls that change something."""

    def __init__(self, target: Target) -> None:
        super().__init__(target.rpc_socket)
        self.lives: float = float("inf")
        """Such calls, of which each counts once as it is made and once as it is answered."""

    def call_raw(self, method: str, **params: Any) -> Any:
        """Ends before or after the call."""
        if READS.search(method):
            return super().call_raw(method, **params)
        self._step()
        answer = super().call_raw(method, **params)
        self._step()
        return answer

    def _step(self) -> None:
        self.lives -= 1
        if self.lives < 0:
            raise Death


class Store:
    """An lvstore of a running target, and Cinder's volumes in it."""

    def __init__(self, target: Target) -> None:
        self.client = Mortal(target)
        self.volumes = Volumes(Client(target.rpc_socket))
        self.volumes.create_lvstore("lvs0", target.directory / "lvs0.img", 256 * MIB)
        self.lvols = Lvols(Volumes(self.client), "lvs0")
        self.target = target

    def write(self, name: str, text: bytes) -> None:
        """Writes to the beginning of a volume."""
        with self.target.exported(f"lvs0/{name}") as path, path.open("r+b") as file:
            file.write(text.ljust(4096, b"\0"))

    def read(self, name: str) -> bytes:
        """Returns 16 bytes from the beginning of a volume or snapshot."""
        with self.target.exported(f"lvs0/{name}") as path, path.open("rb") as file:
            return file.read(16).rstrip(b"\0")

    def names(self) -> dict[str, Volume]:
        """Returns all lvols by name."""
        return {each.name: each for each in self.volumes.volumes()}

    def free(self) -> int:
        """Returns the bytes that are free."""
        return self.volumes.lvstore("lvs0").free


@pytest.fixture(scope="module")
def shared(make_shared_target: MakeTarget) -> Store:
    return Store(make_shared_target().start())


@pytest.fixture
def store(shared: Store) -> Iterator[Store]:
    """One that is empty, and is to be left so."""
    free = shared.free()
    assert not shared.names()
    yield shared
    for name in [each for each in shared.names() if not each.startswith(HIDDEN)]:
        shared.lvols.delete_snapshot(name)
    assert (list(shared.names()), shared.free()) == ([], free)


def until_done(store: Store, call: Callable[[], None]) -> int:
    """Makes a call that is cut off at its first step, then at its second, until it is not.

    Each begins where the one before it ended; returns how many were cut off.
    """
    for lives in itertools.count():
        store.client.lives = lives
        try:
            call()
        except Death:
            continue
        finally:
            store.client.lives = float("inf")
        return lives
    raise AssertionError


def test_a_life_that_is_cut_off_at_each_step(store: Store) -> None:
    lvols = store.lvols
    cut = until_done(store, lambda: lvols.create("a", SIZE, thin=True, key=None))
    store.write("a", b"first")
    cut += until_done(store, lambda: lvols.grow("a", LARGER))
    cut += until_done(store, lambda: lvols.snapshot("a", "s"))
    store.write("a", b"second")
    cut += until_done(store, lambda: lvols.clone_snapshot("s", "of-s", LARGER + SIZE, thin=True))
    cut += until_done(store, lambda: lvols.clone_volume("a", "of-a", LARGER, thin=False))
    assert store.read("of-s") == b"first" and store.read("of-a") == b"second"
    found = store.names()
    assert found["of-s"].size == LARGER + SIZE
    assert not found["of-a"].thin and found["of-a"].parent is None
    assert "cinder.unfinished" not in store.volumes.xattrs("lvs0/of-s")
    cut += until_done(store, lambda: lvols.roll_back("a", "s"))
    assert store.read("a") == b"first"
    cut += until_done(store, lambda: lvols.rename("a", "b"))
    for name in ("s", "b", "of-s", "of-a"):
        delete = lvols.delete_snapshot if name == "s" else lvols.delete
        cut += until_done(store, functools.partial(delete, name))
    assert not store.names()
    assert cut >= 30


def test_a_snapshot_goes_when_it_is_needed_no_more(store: Store) -> None:
    lvols = store.lvols
    lvols.create("a", SIZE, thin=True, key=None)
    store.write("a", b"kept")
    lvols.snapshot("a", "s")
    lvols.clone_snapshot("s", "c", SIZE, thin=True)
    lvols.delete_snapshot("s")
    assert "s" in store.names(), "both show it"
    assert "s" not in [each.name for each, _ in lvols.all()]
    lvols.delete_snapshot("s")
    lvols.delete("a")
    assert list(store.names()) == ["c"]
    assert store.read("c") == b"kept"


def test_a_clones_snapshot_is_nobodys(store: Store) -> None:
    lvols = store.lvols
    lvols.create("a", SIZE, thin=True, key=None)
    lvols.clone_volume("a", "b", SIZE, thin=True)
    assert sorted(each.name for each, _ in lvols.all()) == ["a", "b"]
    assert sum(name.startswith(HIDDEN) for name in store.names()) == 1
    lvols.delete("a")
    assert list(store.names()) == ["b"]


def test_what_is_in_use_is_not_deleted(store: Store) -> None:
    lvols, client = store.lvols, store.volumes.client
    lvols.create("a", SIZE, thin=True, key=None)
    client.call("vhost_create_scsi_controller", ctrlr="vm")
    client.call(
        "vhost_scsi_controller_add_target", ctrlr="vm", scsi_target_num=0, bdev_name="lvs0/a"
    )
    assert [used for _, used in lvols.all()] == [True]
    with pytest.raises(RpcError) as refused:
        lvols.delete("a")
    assert refused.value.code == BUSY
    lvols.snapshot("a", "s")
    with lvols.frozen("a") as frozen:
        assert lvols.export(frozen).read_bytes() == bytes(SIZE)
    client.call("vhost_scsi_controller_remove_target", ctrlr="vm", scsi_target_num=0)
    client.call("vhost_delete_controller", ctrlr="vm")


def test_names_that_are_taken_and_lvstores_that_are_not_there(store: Store) -> None:
    lvols = store.lvols
    lvols.create("a", SIZE, thin=True, key=None)
    lvols.create("b", SIZE, thin=True, key=None)
    with pytest.raises(VolumeError, match="lvs0/b exists already"):
        lvols.rename("a", "b")
    with pytest.raises(VolumeNotFoundError, match="no volume lvs0/c"):
        lvols.rename("c", "d")
    elsewhere = Lvols(store.volumes, "lvs1")
    for call in (elsewhere.delete, elsewhere.delete_snapshot):
        with pytest.raises(VolumeNotFoundError, match="no lvstore lvs1"):
            call("a")
