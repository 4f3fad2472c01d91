"""GET_ALL_DOMAIN_STATS's result changed in its bytes, against the same done on decoded values."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugin.gateway.blocklimits import BlockLimits
from plugin.gateway.latencies import Latencies
from plugin.gateway.messages import (
    DOUBLE,
    INT,
    STRING,
    UINT,
    ULLONG,
    Domain,
    TypedParam,
)
from plugin.gateway.statistics import Block, Blocks, merged, records
from plugin.gateway.usage import Usage
from plugin.gateway.xdr import XdrError
from pydataplane.lvols import Sizes
from tests.unit.gateway.decoded import StatsRecord

USAGE = Usage(1, 2, 3, 4, 5, 6, 7, 2**63)
SIZES = Sizes(1 << 40, 4096)
LATENCIES = (
    Latencies("read", (0, 10, 2**63 - 1), (1, 2**64 - 1, 3)),
    Latencies("read", (0, 10), (4, 5)),
    Latencies("flush", (0,), (0,)),
)

LIMITS = (None, BlockLimits(512), BlockLimits(4096, 2**63, 1 << 22), BlockLimits(512, None, 1))

BLOCKS = st.lists(st.sampled_from(["sda", "vda", "ubda", "größe", "block.count"]), max_size=4)
OTHERS = st.lists(
    st.sampled_from(
        [
            TypedParam("state.state", INT, -1),
            TypedParam("block", STRING, "block.count"),
            TypedParam("cpu.time", ULLONG, 2**64 - 1),
            TypedParam("cpu.share", DOUBLE, 0.5),
            TypedParam("net.0.name", STRING, "vnet0"),
        ]
    ),
    max_size=3,
)


def plainly(params: list[TypedParam], carrier: str | None, ours: list[Block]) -> list[TypedParam]:
    """What `merged` is to do, on decoded parameters."""
    if not any(param.field == "block.count" for param in params):
        return params
    blocks: dict[int, list[tuple[str, TypedParam]]] = {}
    before: list[TypedParam] = []
    after: list[TypedParam] = []
    for param in params:
        if found := re.fullmatch(r"block\.(\d+)\.(.+)", param.field):
            blocks.setdefault(int(found[1]), []).append((found[2], param))
        elif param.field != "block.count":
            (after if blocks else before).append(param)
    named = [
        n
        for n, block in blocks.items()
        if any(name == "name" and p.value == carrier for name, p in block)
    ]
    kept = [blocks[n] for n in sorted(blocks) if n not in named]
    result = [*before, TypedParam("block.count", UINT, len(kept) + len(ours))]
    for nth, block in enumerate(kept):
        result += [TypedParam(f"block.{nth}.{name}", p.kind, p.value) for name, p in block]
    for nth, item in enumerate(ours, len(kept)):
        result.append(TypedParam(f"block.{nth}.name", STRING, item.dev))
        result.append(TypedParam(f"block.{nth}.path", STRING, item.path))
        if item.usage is not None:
            names = [
                "rd.reqs",
                "rd.bytes",
                "rd.times",
                "wr.reqs",
                "wr.bytes",
                "wr.times",
                "fl.reqs",
                "fl.times",
            ]
            for name, value in zip(names, (1, 2, 3, 4, 5, 6, 7, 2**63), strict=True):
                result.append(TypedParam(f"block.{nth}.{name}", ULLONG, value))
        if item.sizes is not None:
            for name, value in (("allocation", 4096), ("capacity", 1 << 40), ("physical", 4096)):
                result.append(TypedParam(f"block.{nth}.{name}", ULLONG, value))
        if item.threshold is not None:
            result.append(TypedParam(f"block.{nth}.threshold", ULLONG, item.threshold))
        result += limited(nth, item.limits) + in_bins(nth, item.latencies)
    return result + after


def limited(disk: int, limits: BlockLimits | None) -> list[TypedParam]:
    told = {} if limits is None else dataclasses.asdict(limits)
    return [
        TypedParam(f"block.{disk}.limits.{name}", ULLONG, told[name])
        for name in ("request_alignment", "discard_alignment", "transfer_optimal")
        if told.get(name) is not None
    ]


def in_bins(disk: int, latencies: tuple[Latencies, ...]) -> list[TypedParam]:
    result = []
    for each in latencies:
        bins = f"block.{disk}.latency_histogram.{each.operation}.bin"
        result.append(TypedParam(f"{bins}.count", ULLONG, len(each.starts)))
        for number, (start, count) in enumerate(zip(each.starts, each.counts, strict=True)):
            result.append(TypedParam(f"{bins}.{number}.start", ULLONG, start))
            result.append(TypedParam(f"{bins}.{number}.value", ULLONG, count))
    return result


def record_of(names: list[str], before: list[TypedParam], after: list[TypedParam]) -> StatsRecord:
    params = [*before, TypedParam("block.count", UINT, len(names))]
    for nth, name in enumerate(names):
        params.append(TypedParam(f"block.{nth}.name", STRING, name))
        params.append(TypedParam(f"block.{nth}.rd.reqs", ULLONG, nth))
    return StatsRecord(Domain("größe", bytes(range(16)), 7), params + after)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(BLOCKS, OTHERS, OTHERS), min_size=1, max_size=4),
    st.lists(
        st.tuples(
            st.booleans(),
            st.booleans(),
            st.booleans(),
            st.sets(st.sampled_from(LATENCIES)),
            st.sampled_from(LIMITS),
        ),
        max_size=3,
    ),
    st.booleans(),
)
def test_the_bytes_say_what_decoded_values_would(
    given_: list[tuple[list[str], list[TypedParam], list[TypedParam]]],
    disks: list[tuple[bool, bool, bool, set[Latencies], BlockLimits | None]],
    hidden: bool,
) -> None:
    every = [record_of(names, before, after) for names, before, after in given_]
    ours = [
        Block(
            f"sd{n}",
            f"/dev/ä{n}",
            USAGE if used else None,
            SIZES if sized else None,
            2**64 - 1 if watched else None,
            tuple(sorted(timed, key=LATENCIES.index)),
            limits,
        )
        for n, (used, sized, watched, timed, limits) in enumerate(disks)
    ]
    carrier = "ubda" if hidden else None
    payload = StatsRecord.pack_all(every)
    found = records(payload)
    left_out = {carrier} if carrier is not None else set()
    parts = [merged(payload, item, left_out, Blocks(ours)) for item in found]
    assert [item.domain(payload) for item in found] == [item.dom for item in every]
    expected = [StatsRecord(item.dom, plainly(item.params, carrier, ours)) for item in every]
    assert StatsRecord.read_all(payload[:4] + b"".join(parts)) == expected


def test_a_record_without_block_statistics_stays() -> None:
    payload = StatsRecord.pack_all(
        [StatsRecord(Domain("a", bytes(16), 1), [TypedParam("x", INT, 1)])]
    )
    (item,) = records(payload)
    assert merged(payload, item, "ubda", Blocks([Block("sda", "p", None, None)])) == payload[4:]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_what_is_no_such_result_is_refused(data: st.DataObject) -> None:
    payload = bytearray(StatsRecord.pack_all([record_of(["sda", "ubda"], [], [])]))
    for _ in range(data.draw(st.integers(0, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(payload[: data.draw(st.integers(0, len(payload)))])
    try:
        for item in records(cut):
            merged(cut, item, "ubda", Blocks([]))
    except XdrError:
        return


@pytest.mark.parametrize("text", ["", "00000001", "00000000ff", "ffffffff"])
def test_short_and_long_results_are_refused(text: str) -> None:
    with pytest.raises(XdrError):
        records(bytes.fromhex(text))
