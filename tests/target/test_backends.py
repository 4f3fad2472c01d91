"""What a guest has of each backend: tried on all of them, and compared with the page of docs/."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pydataplane.errors import TargetError
from tests.docs.backends import BACKENDS, PAGE, TRIED, page
from tests.support.ceph import POOL, Ceph, cluster, lacks
from tests.support.encryption import KEY, KEY2
from tests.support.initiator import Initiator, connected
from tests.support.load import load_on
from tests.support.nbdkit import Nbdkit
from tests.support.nvme_target import Namespace, NvmeTarget
from tests.support.target import Target
from tests.support.tgt import Tgt
from tests.support.tgt import lacks as lacks_tgt
from tests.target.conftest import MakeTarget

pytestmark = [
    pytest.mark.skipif(
        bool(lacks() or lacks_tgt()), reason=f"not installed: {lacks()} {lacks_tgt()}"
    ),
    pytest.mark.timeout(300),
]

MIB = 1 << 20
BLOCK = 512
SIZE_MIB, LARGER_MIB = 48, 64
GOOD, CHECK, MISCOMPARE, ILLEGAL = 0, 2, 0xE, 5
PARAM_CHANGE, CAPACITY_CHANGED = 3, 0x2A | 9 << 8
UNMAP = bytes([0x42, *bytes(6), 0, 24, 0])
FLUSH = bytes([0x35, *bytes(9)])


@dataclass
class Made:
    """A bdev of a backend, and how it is made larger; None: it cannot be."""

    bdev: str
    grow: Callable[[], object] | None


class Makers:
    """How each backend is made, of SIZE_MIB; each public method is one of BACKENDS."""

    def __init__(
        self, target: Target, ceph: Ceph, tgt: Tgt, server: Nbdkit, model: NvmeTarget
    ) -> None:
        self._target, self._ceph, self._tgt, self._server = target, ceph, tgt, server
        self._model = model
        target.make_lvstore(size=4 * LARGER_MIB * MIB)

    def memory(self) -> Made:
        blocks = SIZE_MIB * MIB // BLOCK
        self._target.rpc("bdev_malloc_create", name="m0", num_blocks=blocks, block_size=BLOCK)
        return Made("m0", None)

    def file(self) -> Made:
        path = self._target.make_file("f0", SIZE_MIB * MIB)
        self._target.rpc("bdev_uring_create", name="f0", filename=str(path), block_size=BLOCK)

        def grow() -> None:
            os.truncate(path, LARGER_MIB * MIB)
            self._target.rpc("bdev_uring_rescan", name="f0")

        return Made("f0", grow)

    def thick(self) -> Made:
        return self._volume("thick", thin=False)

    def thin(self) -> Made:
        return self._volume("thin", thin=True)

    def _volume(self, name: str, *, thin: bool) -> Made:
        given = {"lvs_name": "lvs0", "lvol_name": name, "size_in_mib": SIZE_MIB}
        self._target.rpc("bdev_lvol_create", thin_provision=thin, **given)
        path = f"lvs0/{name}"
        larger = {"name": path, "size_in_mib": LARGER_MIB}
        return Made(path, lambda: self._target.rpc("bdev_lvol_resize", **larger))

    def rbd(self) -> Made:
        image = self._ceph.image("tried", SIZE_MIB)
        conf = str(self._ceph.conf)
        self._target.rpc("bdev_rbd_register_cluster", name="ceph0", config_file=conf)
        given = {"pool_name": POOL, "rbd_name": image, "block_size": BLOCK}
        self._target.rpc("bdev_rbd_create", name="r0", cluster_name="ceph0", **given)
        words = ("resize", "--no-progress", "--size", f"{LARGER_MIB}M", f"{POOL}/{image}")
        return Made("r0", lambda: self._ceph.rbd(*words))

    def iscsi(self) -> Made:
        self._tgt.disk(size=SIZE_MIB * MIB, thin_provisioning="1")
        iqn = "iqn.2026-11.org.virtlun:host"
        self._target.rpc("bdev_iscsi_create", name="i0", url=self._tgt.url(), initiator_iqn=iqn)

        def grow() -> None:
            # tgt has no other way.
            self._tgt.remove(1)
            self._tgt.disk(size=LARGER_MIB * MIB, thin_provisioning="1")

        return Made("i0", grow)

    def nbd(self) -> Made:
        self._target.rpc("virtlun_nbd_create", name="n0", uri=self._server.uri)

        def grow() -> None:
            self._server.kill9()
            os.truncate(self._server.command[-1], LARGER_MIB * MIB)
            self._server.start()

        return Made("n0", grow)

    def nvme(self) -> Made:
        (made,) = self._target.rpc(
            "bdev_nvme_attach_controller", name="NVME0", **self._model.params(0)
        )
        return Made(made, lambda: self._model.resize(LARGER_MIB * MIB // BLOCK))


@contextlib.contextmanager
def guest_of(target: Target, bdev: str) -> Iterator[Initiator]:
    """A guest with a bdev as its disk, for the duration of a block."""
    target.attach("vm", bdev)
    with connected(target, "vm") as guest:
        yield guest
    target.rpc("vhost_delete_controller", ctrlr="vm", force=True)


def ended(answer: dict[str, Any]) -> tuple[int, int]:
    """Status of a command, and the sense key."""
    assert answer["response"] == 0, answer
    return answer["status"], (answer["sense"][2] & 15 if answer["sense"] else 0)


def did(answer: dict[str, Any]) -> str:
    """Whether a command was carried out; AssertionError if it failed otherwise than as unknown."""
    if ended(answer) == (GOOD, 0):
        return "yes"
    assert ended(answer) == (CHECK, ILLEGAL), answer
    return "no"


def random_data(seed: str, blocks: int = 1) -> bytes:
    return random.Random(seed).randbytes(blocks * BLOCK)


def flush(guest: Initiator) -> str:
    return did(guest.cdb(FLUSH))


def fua(guest: Initiator) -> str:
    """MODE SENSE says whether the bit may be set (DPOFUA, SBC-4 6.5.1)."""
    sense = guest.cdb(bytes([0x1A, 0, 0x3F, 0, 192, 0]), data_in_len=192)
    assert ended(sense) == (GOOD, 0), sense
    told = bool(sense["data_in"][2] & 0x10)
    data = random_data("fua")
    done = did(guest.cdb(bytes([0x2A, 8, 0, 0, 0, 80, 0, 0, 1, 0]), data_out=data))
    assert (done == "yes") is told
    assert done == "no" or guest.read(80, 1) == data
    return done


def unmap(guest: Initiator) -> str:
    """The logical block provisioning page says whether it does anything (LBPU, SBC-4 6.6.7)."""
    page_b2 = guest.cdb(bytes([0x12, 1, 0xB2, 0, 64, 0]), data_in_len=64)
    told = ended(page_b2) == (GOOD, 0) and bool(page_b2["data_in"][5] & 0x80)
    guest.write(2048, random_data("unmap", 8))
    listed = bytearray(24)
    listed[:4] = bytes([0, 22, 0, 16])
    # Eight MiB from the second on, whatever the granularity is.
    listed[8:20] = (2048).to_bytes(8, "big") + (16384).to_bytes(4, "big")
    done = did(guest.cdb(UNMAP, data_out=bytes(listed)))
    assert (done == "yes") is told
    assert done == "no" or guest.read(2048, 8) == bytes(8 * BLOCK)
    return done


def same(guest: Initiator, data: bytes) -> str:
    """WRITE SAME (16) of one block to nine."""
    guest.write(4096, random_data("before", 16))
    cdb = bytes([0x93, 0, *(4097).to_bytes(8, "big"), *(9).to_bytes(4, "big"), 0, 0])
    done = did(guest.cdb(cdb, data_out=data))
    before = random_data("before", 16)
    if done == "yes":
        assert guest.read(4096, 16) == before[:BLOCK] + 9 * data + before[10 * BLOCK :]
    return done


def compare(guest: Initiator) -> str:
    old, new = random_data("old"), random_data("new")
    guest.write(500, old)
    cdb = bytes([0x89, 0, *(500).to_bytes(8, "big"), 0, 0, 0, 1, 0, 0])
    done = did(guest.cdb(cdb, data_out=old + new))
    if done == "yes":
        assert guest.read(500, 1) == new
        assert ended(guest.cdb(cdb, data_out=old + old)) == (CHECK, MISCOMPARE)
        assert guest.read(500, 1) == new
    return done


def reservations(guest: Initiator) -> str:
    """Registers a key (PERSISTENT RESERVE OUT), and reads which there are."""
    key = (0xC0FFEE).to_bytes(8, "big")
    register = bytes([0x5F, 0, 0, 0, 0, 0, 0, 0, 24, 0])
    done = did(guest.cdb(register, data_out=bytes(8) + key + bytes(8)))
    if done == "yes":
        told = guest.cdb(bytes([0x5E, 0, *bytes(5), 0, 64, 0]), data_in_len=64)["data_in"]
        assert told[8:16] == key
        assert ended(guest.cdb(register, data_out=key + bytes(16))) == (GOOD, 0)
    return done


def growth(guest: Initiator, made: Made) -> str:
    if made.grow is None:
        return "no"
    guest.send("events")
    made.grow()
    events = guest.send("events", timeout_ms=60_000)["events"]
    assert [(each["event"], each["reason"]) for each in events] == [
        (PARAM_CHANGE, CAPACITY_CHANGED)
    ]
    guest.ready()
    assert guest.send("capacity")["blocks"] == LARGER_MIB * MIB // BLOCK
    guest.write(LARGER_MIB * MIB // BLOCK - 1, random_data("end"))
    return "yes"


@contextlib.contextmanager
def store_on(target: Target, bdev: str) -> Iterator[str]:
    """An lvstore on a bdev, for the duration of a block."""
    given = {"bdev_name": bdev, "lvs_name": "up", "cluster_sz": MIB}
    target.rpc("bdev_lvol_create_lvstore", **given)
    yield "up"
    target.rpc("bdev_lvol_delete_lvstore", lvs_name="up")


def holds(target: Target, bdev: str) -> str:
    """What a guest writes to it, it reads again."""
    block = target.rpc("bdev_get_bdevs", name=bdev)[0]["block_size"]
    data = random.Random(bdev).randbytes(64 * block)
    with guest_of(target, bdev) as guest:
        guest.write(3, data, block_size=block)
        assert guest.cdb(FLUSH)["status"] == GOOD
        assert guest.read(3, 64, block_size=block) == data
    return "yes"


def lvstore(target: Target, bdev: str) -> str:
    with store_on(target, bdev) as store:
        target.make_thin("v", 8, store)
        return holds(target, f"{store}/v")


def encryption(target: Target, bdev: str) -> str:
    """Its key is in memory alone: each target that was started has to be given it."""
    given = {"cipher": "AES_XTS", "key": KEY, "key2": KEY2, "name": "key"}
    target.rpc("accel_crypto_key_create", **given)
    target.rpc("bdev_crypto_create", base_bdev_name=bdev, name="crypted", key_name="key")
    done = holds(target, "crypted")
    target.rpc("bdev_crypto_delete", name="crypted")
    target.rpc("accel_crypto_key_destroy", key_name="key")
    return done


def checksums(target: Target, bdev: str) -> str:
    target.rpc("virtlun_integrity_create", base_bdev_name=bdev, name="checked")
    done = holds(target, "checked")
    target.rpc("virtlun_integrity_delete", name="checked")
    return done


def protection(target: Target, bdev: str) -> str:
    """READ CAPACITY (16) says so: PROT_EN, with type 1 (SBC-4 5.20.2)."""
    with store_on(target, bdev) as store:
        given = {"lvs_name": store, "lvol_name": "p", "size_in_mib": 8, "dif_type": 1}
        target.rpc("bdev_lvol_create", **given)
        with guest_of(target, f"{store}/p") as guest:
            cdb = bytes([0x9E, 0x10, *bytes(11), 32, 0, 0])
            told = guest.cdb(cdb, data_in_len=32)["data_in"]
            assert told[12] & 0x0F == 1, told
        return holds(target, f"{store}/p")


def upgrade(target: Target, bdev: str) -> str:
    with load_on(target, bdev, seed=1) as load:
        load.progress(50)
        target.upgrade()
        load.progress(50)
    return "yes"


def kill(target: Target, bdev: str) -> str:
    """First without I/O, for it goes on only where what was written is there."""
    data = random_data("kill", 64)
    with guest_of(target, bdev) as guest:
        guest.write(0, data)
        assert guest.cdb(FLUSH)["status"] == GOOD
    target.crash()
    with guest_of(target, bdev) as guest:
        if guest.read(0, 64) != data:
            return "no"
    with load_on(target, bdev, seed=2) as load:
        load.progress(50)
        target.crash()
        load.progress(50)
    return "yes"


LAYERS = {
    "lvstore": lvstore,
    "encryption": encryption,
    "checksums": checksums,
    "protection": protection,
    "upgrade": upgrade,
    "kill": kill,
}


def tried(target: Target, made: Made) -> dict[str, str]:
    """Returns what came of each of TRIED."""
    with guest_of(target, made.bdev) as guest:
        found = {
            "flush": flush(guest),
            "fua": fua(guest),
            "unmap": unmap(guest),
            "zeros": same(guest, bytes(BLOCK)),
            "same": same(guest, random_data("same")),
            "compare": compare(guest),
            "reservations": reservations(guest),
            "growth": growth(guest, made),
        }
    for name, layer in LAYERS.items():
        try:
            found[name] = layer(target, made.bdev)
        except TargetError as refused:
            assert "is in use" not in str(refused), refused
            found[name] = "no"
    return found


@pytest.mark.nightly
def test_a_guest_has_of_each_backend_what_the_page_says(
    make_target: MakeTarget, scratch: Path
) -> None:
    exported = scratch / "exported"
    with exported.open("xb") as file:
        file.truncate(SIZE_MIB * MIB)
    server = Nbdkit(scratch, "file", str(exported))
    model = NvmeTarget({1: Namespace(SIZE_MIB * MIB // BLOCK, BLOCK)})
    with cluster() as ceph, Tgt(scratch) as tgt, server, model:
        target = make_target("--rbd", "--iscsi", "--network").start()
        makers = Makers(target, ceph, tgt, server, model)
        found = {
            (name, backend): outcome
            for backend in BACKENDS
            for name, outcome in tried(target, getattr(makers, backend)()).items()
        }
        assert target.stop() == 0, target.words()
    assert {name for name, _ in found} == TRIED.keys()
    made = page(found)
    if os.environ.get("VIRTLUN_WRITE_DOCS"):
        PAGE.write_text(made)
    assert PAGE.read_text() == made, "if that is right: VIRTLUN_WRITE_DOCS=1"
