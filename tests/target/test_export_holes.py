"""Tools that look for holes find what a volume has not: its file tells, as any other does.

Needs root and /dev/fuse.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.encryption import KEY, KEY2
from tests.support.night import by_day
from tests.support.target import Target
from tests.target.test_export import MIB, copy, md5, noise, run, volume

DATA = [(2, 3), (9, 10), (11, 13)]
"""What is written, in MiB, which are the clusters: where it begins, and where it ends."""


def data_of(path: str) -> list[tuple[int, int]]:
    """Returns a file's parts that are data, in MiB, as lseek(2) tells them."""
    found: list[tuple[int, int]] = []
    at = 0
    with Path(path).open("rb") as file:
        while True:
            try:
                begin = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:
                return found
            at = os.lseek(file.fileno(), begin, os.SEEK_HOLE)
            assert begin % MIB == at % MIB == 0
            found.append((begin // MIB, at // MIB))


def fill(target: Target, path: str) -> None:
    """Writes the parts of DATA."""
    source, _ = noise(target, 2)
    for begin, end in DATA:
        copy(source, path, f"seek={begin}", f"count={end - begin}", "oflag=direct")


@by_day("clone")
@pytest.mark.parametrize("kind", ["thin", "clone", "encrypted"])
def test_tools_skip_what_is_not_allocated(target: Target, kind: str) -> None:
    options = {}
    if kind == "encrypted":
        target.rpc("accel_crypto_key_create", cipher="AES_XTS", key=KEY, key2=KEY2, name="k")
        options["key_name"] = "k"
    uuid, path = volume(target, 32, thin_provision=True, **options)
    assert data_of(path) == [] and Path(path).stat().st_blocks == 0
    fill(target, path)
    if kind == "clone":
        target.rpc("bdev_lvol_snapshot", lvol_name=uuid, snapshot_name="s")
        target.rpc("bdev_lvol_clone", snapshot_name="lvs0/s", clone_name="c")
        (made,) = target.rpc("bdev_get_bdevs", name="lvs0/c")
        path = target.rpc("virtlun_export_create", bdev_name=made["uuid"])["path"]
    assert data_of(path) == DATA
    assert Path(path).stat().st_blocks * 512 == 4 * MIB
    whole = md5(path)
    for name, *words in (
        ("copied", "cp", "--sparse=auto", path),
        ("converted", "qemu-img", "convert", "-f", "raw", "-O", "raw", path),
    ):
        to = target.directory / name
        run(*words, to)
        assert md5(to) == whole
        assert to.stat().st_blocks * 512 <= 5 * MIB, name
    mapped = json.loads(run("qemu-img", "map", "-f", "raw", "--output=json", path))
    told = [
        (each["start"] // MIB, (each["start"] + each["length"]) // MIB)
        for each in mapped
        if each["data"]
    ]
    assert told == DATA
    archive = target.directory / "archive.tar"
    run("tar", "--sparse", "-C", Path(path).parent, "-cf", archive, Path(path).name)
    assert archive.stat().st_size < 5 * MIB
    run("tar", "-C", target.directory, "-xf", archive)
    assert md5(target.directory / Path(path).name) == whole


def test_holes_come_and_go_with_what_is_written(target: Target) -> None:
    uuid, path = volume(target, 32, thin_provision=True)
    fill(target, path)
    run("fallocate", "--punch-hole", "--offset", "11MiB", "--length", "1MiB", path)
    assert data_of(path) == [(2, 3), (9, 10), (12, 13)]
    copy("/dev/zero", path, "seek=20", "count=1", "oflag=direct")
    target.rpc("bdev_lvol_snapshot", lvol_name=uuid, snapshot_name="s")
    run("fallocate", "--punch-hole", "--offset", "2MiB", "--length", "1MiB", path)
    assert data_of(path) == [(9, 10), (12, 13), (20, 21)]
    target.rpc("bdev_lvol_resize", name=uuid, size_in_mib=48)
    assert data_of(path) == [(9, 10), (12, 13), (20, 21)]
    target.rpc("bdev_lvol_inflate", name=uuid)
    assert data_of(path) == [(0, 48)]


def test_a_thick_volume_is_data(target: Target) -> None:
    _, path = volume(target, 32)
    assert data_of(path) == [(0, 32)]
    assert Path(path).stat().st_blocks * 512 == 32 * MIB
