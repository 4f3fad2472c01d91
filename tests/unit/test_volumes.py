"""The volume model's own rules; what it does to a real target is in tests/target/test_cli.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from plugin.cli.output import size
from pydataplane.client import Client
from pydataplane.errors import METHOD_NOT_FOUND, RpcError, VolumeError
from pydataplane.lvols import Sizes
from pydataplane.volumenames import parse_size, split_path
from pydataplane.volumes import MIB, SIZES_MAX, Volumes
from tests.support.fake_socket import SocketTarget


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("1", 1), ("4k", 4096), ("64M", 64 << 20), ("10GiB", 10 << 30), ("2 TB", 2 << 40)],
)
def test_sizes_are_powers_of_1024(text: str, bytes_: int) -> None:
    assert parse_size(text) == bytes_


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5G", "10X", "10Q", "G", "1e9", "9" * 5000])
def test_what_is_no_size_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(VolumeError, match="is not a size: give a whole number such as"):
        parse_size(text)


@pytest.mark.parametrize("text", ["8388608T", "9" * 40, "99999999999G"])
def test_a_size_that_no_device_has_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(VolumeError, match="is more than any device has: give 8388607T at most"):
        parse_size(text)


@pytest.mark.parametrize("path", ["lvs0/data", "/dev/virtlun/lvs0/data"])
def test_a_volume_is_written_with_or_without_the_device_prefix(path: str) -> None:
    assert split_path(path) == ("lvs0", "data")


@pytest.mark.parametrize("path", ["data", "a/b/c", "/data", "lvs0/", "lvs0/-x", "lvs0/a b", "../x"])
def test_what_names_no_volume_is_refused(path: str) -> None:
    with pytest.raises(VolumeError, match="write LVSTORE/VOLUME"):
        split_path(path)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0 B"), (1536, "1.5 KiB"), (64 << 20, "64 MiB"), (1 << 40, "1.0 TiB")],
)
def test_bytes_for_people(value: int, shown: str) -> None:
    assert size(value) == shown


def test_the_sizes_of_many_volumes_are_few_calls(tmp_path: Path) -> None:
    target = SocketTarget(tmp_path / "target")
    uuid = target.add_volume("lvs0/data", 5)
    target.start()
    names = ["lvs0/data", uuid, *(f"lvs0/gone-{n}" for n in range(SIZES_MAX)), uuid]
    found = Volumes(Client(target.path)).sizes(names)
    assert found == dict.fromkeys(("lvs0/data", uuid), Sizes(5 * MIB, 3 * MIB))
    asked = [(method, len(params["names"])) for method, params in target.requests]
    assert asked == [("virtlun_lvol_get_sizes", SIZES_MAX), ("virtlun_lvol_get_sizes", 2)]
    target.stop()


def test_a_target_without_our_own_methods_says_sizes_as_well(tmp_path: Path) -> None:
    target = SocketTarget(tmp_path / "target")
    uuid = target.add_volume("lvs0/data", 5)
    target.refuse["virtlun_lvol_get_sizes"] = RpcError(METHOD_NOT_FOUND, "Method not found")
    target.start()
    found = Volumes(Client(target.path)).sizes(["lvs0/data", uuid, "lvs0/gone"])
    assert found == dict.fromkeys(("lvs0/data", uuid), Sizes(5 * MIB, 3 * MIB))
    target.stop()
