"""`virtlun volume limits`: by hand what virsh blkdeviotune does for a disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from plugin.cli import main
from pydataplane.domain.limits import MAX, NAMES
from pydataplane.errors import METHOD_NOT_FOUND, RpcError
from tests.support.fake_socket import SocketTarget


@pytest.fixture
def target(tmp_path: Path) -> Iterator[SocketTarget]:
    made = SocketTarget(tmp_path / "rpc", {"lvs0/data": "00000000-0000-4000-8000-00000000da7a"})
    made.start()
    yield made
    made.stop()


def run(target: SocketTarget, *words: str) -> Result:
    return CliRunner().invoke(
        main, ["--socket", str(target.path), "volume", "limits", "lvs0/data", *words]
    )


def limits(target: SocketTarget) -> dict[str, int]:
    return target.volumes["lvs0/data"].limits


def test_they_are_set_shown_and_ended(target: SocketTarget) -> None:
    assert run(target).stderr == "volume lvs0/data has no I/O limits\n"
    done = run(target, "--total-iops-sec", "500", "--read-bytes-sec", "10M")
    assert done.exit_code == 0, done.output
    assert limits(target) == {"total_iops_sec": 500, "read_bytes_sec": 10 << 20}
    assert done.stdout.split() == [
        *("LIMIT", "VALUE", "read_bytes_sec", "10485760", "total_iops_sec", "500"),
    ]
    # Of what kind nothing is named, all stays.
    assert run(target, "--write-bytes-sec", "4096").exit_code == 0
    assert limits(target) == {"total_iops_sec": 500, "write_bytes_sec": 4096}
    asked = target.calls.count("virtlun_bdev_set_limits")
    told = json.loads(run(target, "--json").stdout)
    assert told == {"path": "lvs0/data", **dict.fromkeys(NAMES, 0), **limits(target)}
    assert run(target, "--total-iops-sec", "500").exit_code == 0
    assert target.calls.count("virtlun_bdev_set_limits") == asked, "they are so already"
    for _ in range(2):
        assert run(target, "--none").exit_code == 0
        assert limits(target) == {}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--total-iops-sec", "1", "--read-iops-sec", "1"],
            "volume lvs0/data: total and read/write of iops_sec cannot be set at the same time",
        ),
        (["--read-iops-sec-max", "1"], "'read_iops_sec_max' cannot be set if 'read_iops_sec' is"),
        (["--total-bytes-sec", "many"], "'many' is not a size"),
        (["--total-iops-sec", str(MAX + 1)], f"must be no more than {MAX}"),
        (["--none", "--total-iops-sec", "1"], "--none goes without other limits"),
    ],
)
def test_what_cannot_be_is_one_sentence(target: SocketTarget, words: list[str], says: str) -> None:
    done = run(target, *words)
    assert done.exit_code != 0
    assert says in done.stderr
    assert limits(target) == {}


def test_a_volume_that_is_not_there_and_a_target_that_cannot(target: SocketTarget) -> None:
    words = ["--socket", str(target.path), "volume", "limits", "lvs0/none"]
    assert "lvs0/none" in CliRunner().invoke(main, words).stderr
    for method in ("virtlun_bdev_get_limits", "virtlun_bdev_set_limits"):
        target.refuse[method] = RpcError(METHOD_NOT_FOUND, "Method not found")
    assert "SPDK's or an older one" in run(target, "--read-iops-sec", "1").stderr
    assert run(target, "--total-bytes-sec", "3M").exit_code == 0
    assert "3145728" in run(target).stdout
