"""CONNECT_GET_ALL_DOMAIN_STATS's result, changed in its bytes.

There are thousands of parameters in it and most stay as they are, so nothing is decoded: records
are found by stepping over the values, and where a domain has disks of ours its record is put
together from the bytes that stay and the parameters that come.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from plugin.gateway.blocklimits import BlockLimits
from plugin.gateway.latencies import Latencies
from plugin.gateway.messages import (
    BOOLEAN,
    DOMAIN_LIST_MAX,
    DOUBLE,
    INT,
    LLONG,
    STATS_PARAMS_MAX,
    STRING,
    UINT,
    ULLONG,
    Domain,
)
from plugin.gateway.upstream import PAUSED, PAUSED_BY_IO_ERROR, PAUSED_BY_USER
from plugin.gateway.usage import Usage
from plugin.gateway.xdr import Reader, Writer, XdrError
from pydataplane.lvols import Sizes

COUNT = b"block.count"
REASON = b"state.reason"
_STATE = b"state.state"
_BLOCK = b"block."
_U32 = struct.Struct(">I").unpack_from
_I32 = struct.Struct(">i").unpack_from
_INT = INT.to_bytes(4, "big")
_SIZES = {INT: 4, UINT: 4, LLONG: 8, ULLONG: 8, DOUBLE: 8, BOOLEAN: 4}
"""Bytes of a parameter's value by its kind, strings left out."""

_USED = (
    "rd.reqs",
    "rd.bytes",
    "rd.times",
    "wr.reqs",
    "wr.bytes",
    "wr.times",
    "fl.reqs",
    "fl.times",
)
_SIZED = ("allocation", "capacity", "physical")
_WATCHED = ("threshold",)
"""libvirt's names and order."""


@dataclass(frozen=True, slots=True)
class Record:
    """Where one domain's record is in the payload."""

    uuid: bytes
    start: int
    params: int
    """Where the number of its parameters stands."""
    end: int

    def domain(self, payload: bytes) -> Domain:
        """Reads the domain."""
        return Domain.read(Reader(payload, self.start))


def records(payload: bytes) -> list[Record]:
    """Finds the records.

    Raises:
        XdrError: it is no such result.
    """
    return list(each_record(payload))


def each_record(payload: bytes) -> Iterator[Record]:
    """Finds one record after the other: of thousands of domains that takes a while.

    Raises:
        XdrError: it is no such result, as far as it was read.
    """
    u32, sizes = _U32, _SIZES
    try:
        (count,) = u32(payload, 0)
        if count > DOMAIN_LIST_MAX:
            raise XdrError(f"{count} domains where at most {DOMAIN_LIST_MAX} are allowed")
        at = 4
        for _ in range(count):
            start = at
            at = _after_string(payload, at)
            uuid = payload[at : at + 16]
            params = at + 20
            (inside,) = u32(payload, params)
            if inside > STATS_PARAMS_MAX:
                raise XdrError(f"{inside} parameters of one domain")
            at = params + 4
            for _ in range(inside):  # as _after_value and _after_string, but without their calls
                (length,) = u32(payload, at)
                at += 4 + length + (-length & 3)
                (kind,) = u32(payload, at)
                at = at + 4 + sizes[kind] if kind in sizes else _after_value(payload, at)
            yield Record(uuid, start, params, at)
    except struct.error as error:
        raise XdrError(f"{len(payload)} bytes end inside a record") from error
    if at != len(payload):
        raise XdrError(f"{len(payload)} bytes where the records have {at}")


def uuids(payload: bytes) -> list[bytes]:
    """Returns the domains' UUIDs; of one domain without stepping over its values.

    Raises:
        XdrError: it is no such result.
    """
    if payload[:4] != b"\0\0\0\1":
        return [record.uuid for record in records(payload)]
    return [Domain.read(Reader(payload, 4)).uuid]


def with_reasons(payload: bytes, paused: Container[bytes]) -> bytes:
    """Returns the result with I/O errors as the reason of domains (UUIDs) paused because of them.

    Raises:
        XdrError: it is no such result.
    """
    changed = bytearray(payload)
    for record in records(payload):
        if record.uuid not in paused:
            continue
        numbers: dict[bytes, int] = {}  # where the value of each is
        at = record.params + 4
        while at < record.end:
            (length,) = _U32(payload, at)
            value_at = _after_string(payload, at)
            if payload[value_at : value_at + 4] == _INT:
                numbers[payload[at + 4 : at + 4 + length]] = value_at + 4
            at = _after_value(payload, value_at)
        state, reason = numbers.get(_STATE), numbers.get(REASON)
        if state is not None and reason is not None:
            told = (*_I32(payload, state), *_I32(payload, reason))
            if told == (PAUSED, PAUSED_BY_USER):
                changed[reason : reason + 4] = bytes(Writer().i32(PAUSED_BY_IO_ERROR))
    return bytes(changed)


def _after_string(payload: bytes, at: int) -> int:
    (length,) = _U32(payload, at)
    return int(at + 4 + length + (-length & 3))


def _after_value(payload: bytes, at: int) -> int:
    (kind,) = _U32(payload, at)
    size = _SIZES.get(kind)
    if size is not None:
        return at + 4 + size
    if kind != STRING:
        raise XdrError(f"a typed parameter of type {kind}")
    return _after_string(payload, at + 4)


@dataclass(frozen=True, slots=True)
class Block:
    """One disk of ours, with what could be learnt of it."""

    dev: str
    path: str
    usage: Usage | None
    sizes: Sizes | None
    threshold: int | None = None
    """Bytes allocated of which clients want to hear."""
    latencies: tuple[Latencies, ...] = ()
    limits: BlockLimits | None = None
    """None: they are not known, or it does not run."""

    def pack(self, number: int) -> tuple[bytes, int]:
        """Returns the parameters block.`number`.*, in libvirt's order, and how many they are."""
        limits = () if self.limits is None else self.limits.fields()
        form = _form(
            number,
            used=self.usage is not None,
            sized=self.sizes is not None,
            watched=self.threshold is not None,
            limited=tuple(name for name, _ in limits),
        )
        values: list[int] = []
        if self.usage is not None:
            use = self.usage
            values += (use.reads, use.read_bytes, use.read_ns)
            values += (use.writes, use.written_bytes, use.write_ns, use.flushes, use.flush_ns)
        if self.sizes is not None:
            values += (self.sizes.allocated, self.sizes.size, self.sizes.allocated)
        if self.threshold is not None:
            values.append(self.threshold)
        values += (value for _, value in limits)
        words = [word for pair in zip(form.heads, values, strict=True) for word in pair]
        packed = b"".join(
            (
                form.name,
                _string(self.dev),
                form.path,
                _string(self.path),
                form.numbers.pack(*words),
                *(_packed_bins(number, each) for each in self.latencies),
            )
        )
        bins = sum(1 + 2 * len(each.starts) for each in self.latencies)
        return packed, 2 + len(values) + bins


class Blocks:
    """The disks of ours of one domain, in their order."""

    __slots__ = ("_blocks", "_packed")

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = tuple(blocks)
        self._packed: tuple[int, bytes, int] | None = None

    def __len__(self) -> int:
        """Returns how many."""
        return len(self._blocks)

    def pack(self, first: int) -> tuple[bytes, int]:
        """Returns the parameters of all, from block.`first` on, and how many; makes them once."""
        if self._packed is None or self._packed[0] != first:
            packed = [block.pack(number) for number, block in enumerate(self._blocks, first)]
            self._packed = first, b"".join(p for p, _ in packed), sum(n for _, n in packed)
        return self._packed[1:]


@dataclass(frozen=True, slots=True)
class _Form:
    """What of a disk's parameters is the same for every disk of this number."""

    name: bytes
    path: bytes
    heads: tuple[bytes, ...]
    numbers: struct.Struct


@lru_cache(maxsize=1024)
def _form(
    number: int, *, used: bool, sized: bool, watched: bool, limited: tuple[str, ...]
) -> _Form:
    def head(field: str, kind: int) -> bytes:
        return _string(f"block.{number}.{field}") + kind.to_bytes(4, "big")

    fields = (
        *(_USED if used else ()),
        *(_SIZED if sized else ()),
        *(_WATCHED if watched else ()),
        *limited,
    )
    heads = tuple(head(field, ULLONG) for field in fields)
    numbers = struct.Struct(">" + "".join(f"{len(each)}sQ" for each in heads))
    return _Form(head("name", STRING), head("path", STRING), heads, numbers)


def _packed_bins(number: int, latencies: Latencies) -> bytes:
    """Returns how long operations of disk `number` took, as parameters."""
    starts, counts = latencies.starts, latencies.counts
    heads, numbers = _bins_form(number, latencies.operation, len(starts))
    values = [len(starts), *(n for pair in zip(starts, counts, strict=True) for n in pair)]
    return numbers.pack(*(word for pair in zip(heads, values, strict=True) for word in pair))


@lru_cache(maxsize=1024)
def _bins_form(number: int, operation: str, count: int) -> tuple[tuple[bytes, ...], struct.Struct]:
    fields = [f"{nth}.{of}" for nth in range(count) for of in ("start", "value")]
    names = (f"block.{number}.latency_histogram.{operation}.bin.{f}" for f in ("count", *fields))
    heads = tuple(_string(name) + ULLONG.to_bytes(4, "big") for name in names)
    return heads, struct.Struct(">" + "".join(f"{len(each)}sQ" for each in heads))


def _string(text: str) -> bytes:
    return _opaque(text.encode())


def _opaque(raw: bytes) -> bytes:
    return len(raw).to_bytes(4, "big") + raw + bytes(-len(raw) & 3)


def merged(payload: bytes, record: Record, hidden: Collection[str], ours: Blocks) -> bytes:
    """Returns a record without the blocks of `hidden` devices and with ours behind all others.

    One without `block.count` comes back as it is: block statistics were not asked for.
    """
    before: list[bytes] = []
    after: list[bytes] = []
    blocks: dict[int, list[tuple[bytes, bytes]]] = {}  # of each what follows its number, and value
    whole: dict[int, list[bytes]] = {}  # the same, as it was written
    counted = False
    names = {STRING.to_bytes(4, "big") + _string(dev) for dev in hidden}
    left_out: set[int] = set()
    at = record.params + 4
    while at < record.end:
        start = at
        (length,) = _U32(payload, at)
        field = payload[at + 4 : at + 4 + length]
        value_at = at + 4 + length + (-length & 3)
        at = _after_value(payload, value_at)
        if field == COUNT:
            counted = True
        elif field.startswith(_BLOCK):
            digits, _, rest = field[len(_BLOCK) :].partition(b".")
            if not digits.isdigit():
                raise XdrError(f"a parameter {field!r}")
            number, value = int(digits), payload[value_at:at]
            blocks.setdefault(number, []).append((rest, value))
            whole.setdefault(number, []).append(payload[start:at])
            if rest == b"name" and value in names:
                left_out.add(number)
        else:
            (after if blocks else before).append(payload[start:at])
    if not counted:
        return payload[record.start : record.end]
    kept = [number for number in sorted(blocks) if number not in left_out]
    parts: list[bytes] = []
    for nth, number in enumerate(kept):
        if nth == number:
            parts += whole[number]
        else:
            parts += [_opaque(b"block.%d.%s" % (nth, rest)) + v for rest, v in blocks[number]]
    packed, inside = ours.pack(len(kept))
    count = len(before) + 1 + len(parts) + inside + len(after)
    disks = len(kept) + len(ours)
    head = bytes(Writer().string(COUNT.decode()).i32(UINT).u32(disks))
    return b"".join(
        (
            payload[record.start : record.params],
            count.to_bytes(4, "big"),
            *before,
            head,
            *parts,
            packed,
            *after,
        )
    )
