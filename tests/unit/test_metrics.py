"""Rates, percentiles and Prometheus' metrics, of numbers that are given."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner

from plugin.cli import main, top
from plugin.metrics.latencies import FINE_NS, Counting, between, percentile_ns
from plugin.metrics.sample import Sample, Use, difference, noisiest
from pydataplane.client import Client
from pydataplane.domain.reactors import Cpu
from pydataplane.errors import NO_DEVICE, RpcError

IO = {
    "num_read_ops": 10,
    "num_write_ops": 0,
    "bytes_read": 4096,
    "bytes_written": 0,
    "read_latency_ticks": 0,
    "write_latency_ticks": 0,
}


def taken(at: float, bdevs: dict[str, Any], **others: Any) -> Sample:
    """Returns a look at a target whose clock has 1000 ticks a second."""
    fields: dict[str, Any] = {"reactors": [], "queues": Counter(), "infos": [], **others}
    return Sample(at=at, tick_rate=1000, bdevs=bdevs, **fields)


def below(*latencies_ns: int) -> list[int]:
    """Returns how many of some latencies are below each border, and how many there are."""
    counts = [sum(each < border for each in latencies_ns) for border in FINE_NS]
    return [*counts, len(latencies_ns)]


def test_rates_are_differences_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {3: Cpu(frozenset({3}), frozenset({3}), "node1")}
    monkeypatch.setattr("plugin.metrics.sample.topology", lambda _: there)
    reactor = {"index": 0, "cpu": 3, "busy_ns": 0, "idle_ns": 0, "sleep_ns": 0}
    anywhere = {**reactor, "index": 1, "cpu": None}
    before = taken(1.0, {"v": IO}, reactors=[reactor, anywhere])
    after = taken(
        3.0,
        {
            "v": {**IO, "num_read_ops": 30, "read_latency_ticks": 8000},
            "new": {**IO, "bytes_read": 8},
        },
        reactors=[{**reactor, "busy_ns": 25, "sleep_ns": 75}, {**anywhere, "busy_ns": 5}],
        queues=Counter({3: 5, 0: 1}),
        infos=[{"name": "new", "aliases": ["lvs0/new"]}],
    )
    rates = difference(before, after)
    assert rates["reactors"] == [
        {"index": 0, "cpu": 3, "node": 1, "busy": 0.25, "queues": 5},
        {"index": 1, "cpu": None, "node": None, "busy": 1.0, "queues": 0},
    ]
    v = rates["bdevs"]["v"]
    assert (v["num_read_ops"], v["bytes_read"]) == (10, 0)
    # Eight seconds of latency in two: four in flight on average.
    assert v["depth"] == 4
    assert (v["p50_ns"], v["p99_ns"], v["share"]) == (None, None, None)
    assert rates["bdevs"]["lvs0/new"]["bytes_read"] == 4


def test_percentiles_are_of_what_was_counted_in_between() -> None:
    slow, fast = 1_500_000, 15_000
    before = taken(0.0, {"v": IO}, latencies={"v": {"read": below(slow), "flush": below(slow)}})
    counts = {"read": below(slow, *[fast] * 50), "write": below(*[fast] * 48, slow, slow)}
    after = taken(1.0, {"v": IO}, latencies={"v": {**counts, "flush": below(*[slow] * 90)}})
    v = difference(before, after)["bdevs"]["v"]
    # Of two borders that one lies between the upper is at most 1.19 times the lower.
    assert fast / 1.2 <= v["p50_ns"] <= fast * 1.2
    assert slow / 1.2 <= v["p99_ns"] <= slow * 1.2


def test_a_vm_does_what_all_its_disks_do() -> None:
    fast, slow = 15_000, 1_500_000

    def use(uuid: str, number: int) -> Use:
        return Use("web", f"vm-{uuid}.{number}", number, frozenset())

    before = taken(0.0, {"a": IO, "b": IO, "c": IO})
    after = taken(
        2.0,
        {"a": {**IO, "num_read_ops": 30}, "b": {**IO, "num_write_ops": 40}, "c": IO},
        infos=[{"name": "a", "aliases": ["lvs0/a"]}],
        uses={"a": [use("one", 0)], "b": [use("one", 1), use("two", 0)], "gone": [use("one", 2)]},
        latencies={"a": {"read": below(*[fast] * 90)}, "b": {"write": below(*[slow] * 10)}},
    )
    vms = difference(before, after)["vms"]
    assert vms.keys() == {"one", "two"}
    one, two = vms["one"], vms["two"]
    # Of two targets, or two of libvirt's daemons, they may have one name.
    assert (one["name"], two["name"]) == ("web", "web")
    assert (one["num_read_ops"], one["num_write_ops"]) == (10, 20)
    assert one["disks"] == [{"volume": "lvs0/a", "lun": "scsi 0"}, {"volume": "b", "lun": "scsi 1"}]
    assert one["p50_ns"] <= fast * 1.2 < slow / 1.2 <= one["p99_ns"]
    assert (two["num_read_ops"], two["num_write_ops"]) == (0, 20)
    assert slow / 1.2 <= two["p50_ns"]


@pytest.mark.parametrize(
    ("old", "new", "apart"),
    [
        ([1, 2], [3, 7], [2, 5]),
        ([], [3, 7], [3, 7]),
        ([4, 9], [3, 7], [3, 7]),  # counted anew
        ([4, 9], [], []),  # not counted any more
    ],
)
def test_what_lies_between_two_looks(
    old: Sequence[int], new: Sequence[int], apart: list[int]
) -> None:
    assert between({"read": old}, {"read": new}, ("read", "write")) == apart


def test_percentiles_of_nothing_and_of_what_is_beyond_all_borders() -> None:
    assert percentile_ns([], 0.5) is None
    assert percentile_ns(below(), 0.5) is None
    assert percentile_ns(below(FINE_NS[-1] + 1), 0.99) == FINE_NS[-1]


def test_the_noisiest_neighbour_is_the_vm_with_most_of_the_work() -> None:
    def use(vm: str, uuid: str = "") -> list[Use]:
        return [Use(vm, f"vm-{uuid or vm}", 0, frozenset({0}))]

    moved = {**IO, "num_read_ops": 20, "bytes_read": 4096 + 10 * (64 << 10)}
    quiet = {**IO, "num_read_ops": 15}
    looks = (taken(0.0, {"a": IO, "b": IO, "base": IO}), {"a": moved, "b": quiet, "base": moved})
    rates = difference(looks[0], taken(1.0, looks[1], uses={"a": use("loud"), "b": use("still")}))
    # Ten operations and ten times 64 KiB beside five operations; what no VM has does not count.
    noise = noisiest(rates)
    assert noise is not None
    assert (noise[0], round(noise[1], 3)) == ("loud", 0.8)
    assert rates["bdevs"]["base"]["share"] is None
    namesakes = {"a": use("web", "1"), "b": use("web", "2")}
    noise = noisiest(difference(looks[0], taken(1.0, looks[1], uses=namesakes)))
    assert noise is not None and round(noise[1], 3) == 0.8
    alone = difference(looks[0], taken(1.0, looks[1], uses={"a": use("loud")}))
    assert noisiest(alone) is None
    still = difference(
        looks[0], taken(1.0, {"a": IO, "b": IO}, uses={"a": use("x"), "b": use("y")})
    )
    assert noisiest(still) is None


class Histograms:
    """A target that has histograms of some bdevs, and refuses those of others."""

    def __init__(self, *refused: str, interrupted_at: str = "") -> None:
        self.counted: set[str] = set()
        self.asked: list[str] = []
        self._refused, self._interrupted_at = refused, interrupted_at

    def call(self, method: str, *, name: str, enable: bool) -> bool:
        assert method == "bdev_enable_histogram"
        self.asked.append(name)
        if name in self._refused:
            raise RpcError(NO_DEVICE, name)
        (self.counted.add if enable else self.counted.discard)(name)
        if enable and name == self._interrupted_at:
            raise KeyboardInterrupt
        return True


def test_what_began_is_ended_after_an_interruption_before_the_answer() -> None:
    target = Histograms(interrupted_at="b")
    counting = Counting(cast("Client", target))
    with pytest.raises(KeyboardInterrupt):
        counting.begin(["a", "b", "c"], {})
    assert target.counted == {"a", "b"}
    counting.end()
    assert target.counted == set()


def test_top_ends_what_began_where_it_is_ended_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Histograms(interrupted_at="b")
    look = taken(0.0, {"a": IO, "b": IO, "c": IO}, latencies={})
    monkeypatch.setattr(top, "sample", lambda _: look)
    with pytest.raises(KeyboardInterrupt):
        next(top._samples(cast("Client", target), 1.0, None))
    assert (target.counted, target.asked.count("c")) == (set(), 0)


def test_what_is_refused_is_asked_again_when_it_was_gone_meanwhile() -> None:
    target = Histograms("a")
    counting = Counting(cast("Client", target))
    for names in (["a", "b"], ["a", "b"], ["b"], ["a", "b"]):
        counting.begin(names, {"b": {}} if "b" in target.counted else {})
    assert target.asked == ["a", "b", "a"]
    counting.begin(["a", "other"], None)
    counting.end()
    assert (target.asked, target.counted) == (["a", "b", "a", "b"], set())


@pytest.mark.parametrize("where", ["9433", "host:", "::1:9433", "[::1]", "a:70000", "a:b"])
def test_an_address_that_is_none_is_refused(where: str) -> None:
    done = CliRunner().invoke(main, ["metrics", "--listen", where])
    assert done.exit_code == 2
    assert f"'{where}' is no address and port, such as 127.0.0.1:9433" in done.stderr


def test_an_address_that_is_taken_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken_by:
        port = taken_by.getsockname()[1]
        done = CliRunner().invoke(main, ["metrics", "--listen", f"127.0.0.1:{port}"])
    assert done.exit_code == 1
    assert done.stderr == (
        f"Error: cannot listen on 127.0.0.1 port {port}: Address already in use\n"
    )


def test_a_target_that_does_not_answer_is_told_as_such(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["--socket", str(tmp_path / "none"), "metrics"])
    assert done.exit_code == 0, done.stderr
    assert 'virtlun_target_up{target="default"} 0.0' in done.stdout
