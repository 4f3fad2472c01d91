"""An lvstore as the first format has it, made by a target of that time."""

from __future__ import annotations

import errno
import gzip
import itertools
import os
import shutil
from pathlib import Path

import pytest

from pydataplane.errors import RpcError
from tests.support import tracer
from tests.support.target import Target
from tests.target.test_cli import done, refused
from tests.target.test_history_kills import dies

MADE = Path(__file__).with_name("lvstore-format-1.img.gz")
"""8 MiB with `old/thick` of 1 MiB and `old/thin` of 256 MiB, each with three texts."""
MIB = 1 << 20


@pytest.fixture
def old(target: Target) -> Target:
    """A target that has loaded it."""
    file = target.directory / "old.img"
    file.write_bytes(gzip.decompress(MADE.read_bytes()))
    done(target, "lvstore", "import", str(file))
    return target


def texts(target: Target, volume: str, kind: str, size: int) -> None:
    """Compares what a volume that began as `old/KIND` has."""
    path = target.rpc("virtlun_export_create", bdev_name=volume)["path"]
    file = os.open(path, os.O_RDONLY)
    try:
        for at in (0, 69632, size - 4096):
            assert os.pread(file, 4096, at) == f"{kind} at {at}".encode().ljust(4096, b".")
        assert os.pread(file, 4096, 20000) == bytes(4096)
    finally:
        os.close(file)
    target.rpc("virtlun_export_delete", bdev_name=volume)


def check(target: Target) -> None:
    """All that it was made with is there."""
    texts(target, "old/thick", "thick", 1 * MIB)
    texts(target, "old/thin", "thin", 256 * MIB)
    assert target.rpc("virtlun_lvol_get_xattrs", name="old/thin") == {"owner": "claim-1"}


def version(target: Target) -> int:
    (store,) = target.rpc("bdev_lvol_get_lvstores")
    found: int = store["format_version"]
    return found


def test_it_is_loaded_and_has_snapshots_once_it_is_upgraded(old: Target) -> None:
    check(old)
    assert version(old) == 1
    said = refused(old, "volume", "snapshot", "old/thin", "before")
    assert "version 1 of the format" in said
    assert "virtlun lvstore upgrade" in said
    failed = old.fails("bdev_lvol_snapshot", lvol_name="old/thin", snapshot_name="s")
    assert isinstance(failed, RpcError)
    assert failed.code == -errno.EINVAL
    # It is as usable as it was, and stays what it is.
    done(old, "volume", "create", "old/more", "1M", "--thin")
    done(old, "volume", "delete", "old/more", "--yes")
    old.crash()
    check(old)
    assert version(old) == 1

    done(old, "lvstore", "upgrade", "old", "--yes")
    done(old, "lvstore", "upgrade", "old", "--yes")
    assert version(old) == 2
    old.crash()
    assert version(old) == 2
    check(old)
    done(old, "volume", "snapshot", "old/thin", "after")
    done(old, "volume", "clone", "old/thin@after", "copy")
    old.crash()
    check(old)
    texts(old, "old/copy", "thin", 256 * MIB)
    texts(old, "old/thin@after", "thin", 256 * MIB)


@pytest.mark.skipif(not tracer.is_possible(), reason="the tracer knows x86-64 alone")
def test_a_target_that_dies_while_it_upgrades_leaves_the_old_version_or_the_new_one(
    old: Target,
) -> None:
    file, kept = old.directory / "old.img", old.directory / "kept.img"
    old.kill9()
    shutil.copyfile(file, kept)
    found = []
    for nth in itertools.count():
        shutil.copyfile(kept, file)
        old.start()
        reached = dies(old, ("virtlun_lvstore_upgrade", {"lvs_name": "old"}), nth)
        old.crash()
        check(old)
        found.append(version(old))
        done(old, "lvstore", "upgrade", "old", "--yes")
        done(old, "volume", "snapshot", "old/thin", "after")
        check(old)
        old.kill9()
        if not reached:
            break
    # Each of the superblock's two copies is written, and flushed.
    assert len(found) > 4
    assert (found[0], found[-1]) == (1, 2)
    assert found == sorted(found), "what was there once stays"
