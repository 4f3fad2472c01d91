"""Keys and encrypted bdevs of a target, and guests of them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pydataplane.errors import RpcError
from tests.support.initiator import Initiator
from tests.support.target import Target

KEY, KEY2 = bytes(range(32)).hex(), bytes(range(100, 132)).hex()
OTHER = bytes(range(200, 232)).hex()
MARK = b"no disk shows this, but its guest does"


def give_key(target: Target, name: str = "k0", *, key: str = KEY, **options: Any) -> None:
    """Gives a key."""
    target.rpc(
        "accel_crypto_key_create", cipher="AES_XTS", key=key, key2=KEY2, name=name, **options
    )


def encrypt(target: Target, base: str, name: str = "c0", key: str = "k0") -> None:
    """Makes an encrypted bdev."""
    made = target.rpc("bdev_crypto_create", base_bdev_name=base, name=name, key_name=key)
    assert made == name


def code(target: Target, method: str, **params: Any) -> tuple[int, str]:
    """Returns with which errno a call is refused, and its sentence."""
    error = target.fails(method, **params)
    assert isinstance(error, RpcError), error
    assert_no_key(str(error))
    return -error.code, str(error)


def assert_no_key(text: str) -> None:
    """Neither half of a key, nor a part of one, is in the text."""
    for key in (KEY, KEY2, OTHER):
        for at in range(0, len(key), 16):
            part = key[at : at + 16]
            assert part not in text.lower(), text
            assert str(list(bytes.fromhex(part)))[1:-1] not in text, text


def in_memory(target: Target, wanted: bytes) -> int:
    """Returns how often bytes stand in the writable memory of the target."""
    found = 0
    with Path(f"/proc/{target.pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{target.pid}/maps").read_text().splitlines():
            place, access, *rest = line.split()
            if not access.startswith("rw") or rest[-1] in ("[vvar]", "[vsyscall]"):
                continue
            begin, end = (int(each, 16) for each in place.split("-"))
            if end - begin > 256 << 20:
                continue  # reserved addresses, such as arenas of guests
            with contextlib.suppress(OSError):
                memory.seek(begin)
                there = b""
                while part := memory.read(end - begin - len(there)):
                    there += part
                found += there.count(wanted)
    return found


def make_encrypted(target: Target, mib: int = 16, *, size: int = 64 << 20) -> Path:
    """Makes c0 on the thin volume lvs0/v0, with the key k0; returns the file of lvs0, of `size`."""
    file = target.make_lvstore(size=size)
    target.make_thin("v0", mib)
    give_key(target)
    encrypt(target, "lvs0/v0")
    return file


@contextlib.contextmanager
def waiting_guest(
    target: Target, controller: str = "vm-1"
) -> Iterator[tuple[Initiator, Future[dict[str, Any]]]]:
    """A guest that connects to a controller which is not served, and its connection to come.

    As a QEMU does it tries again; one that was let wait for an answer would stand still.
    """
    with ThreadPoolExecutor(1) as pool, Initiator(target.vhost_dir / controller) as each:
        connected = pool.submit(each.until_connected, "connect")
        with contextlib.suppress(TimeoutError):
            pytest.fail(f"it was served: {connected.result(0.3)}")
        yield each, connected


def marked(length: int, seed: int = 1) -> bytes:
    """Bytes of no pattern but for the mark every 512."""
    data = bytearray(random.Random(seed).randbytes(length))
    for at in range(0, length, 512):
        data[at : at + len(MARK)] = MARK
    return bytes(data)
