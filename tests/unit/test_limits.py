"""The 19 limits of a disk: which go together, and what virDomainSetBlockIoTune makes of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pydataplane.domain.limits import (
    MAX,
    NAMES,
    NONE,
    Limits,
    contradiction,
    limits_of,
    merged,
)


def test_there_are_nineteen() -> None:
    assert len(NAMES) == 19
    assert NONE.given == {} and set(NONE.all) == set(NAMES)
    assert list(Limits(size_iops_sec=1, read_iops_sec=2).given) == [
        "read_iops_sec",
        "size_iops_sec",
    ]


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        (
            {"total_bytes_sec": 1, "read_bytes_sec": 1},
            "total and read/write of bytes_sec cannot be set at the same time",
        ),
        (
            {"total_iops_sec": 1, "write_iops_sec": 1},
            "total and read/write of iops_sec cannot be set at the same time",
        ),
        (
            {
                **{"read_iops_sec": 1, "read_iops_sec_max": 2},
                **{"total_iops_sec_max": 2},
            },
            "total and read/write of iops_sec_max cannot be set at the same time",
        ),
        (
            {"read_bytes_sec_max": 1},
            "'read_bytes_sec_max' cannot be set if 'read_bytes_sec' is not",
        ),
        (
            {"total_iops_sec": 9, "total_iops_sec_max": 8},
            "value 'total_iops_sec_max' cannot be smaller than 'total_iops_sec'",
        ),
        (
            {"total_iops_sec": 9, "total_iops_sec_max_length": 2},
            "'total_iops_sec_max_length' cannot be set if 'total_iops_sec_max' is not set",
        ),
        (
            {
                **{"read_bytes_sec": 1, "read_bytes_sec_max": MAX},
                "read_bytes_sec_max_length": 2,
            },
            "'read_bytes_sec_max_length' is too long for that of 'read_bytes_sec_max'",
        ),
        ({"size_iops_sec": 4096, "total_bytes_sec": 1}, "'size_iops_sec' cannot be set if none of"),
        ({"write_bytes_sec": MAX + 1}, f"'write_bytes_sec' must be no more than {MAX}"),
    ],
)
def test_what_contradicts_itself_is_one_sentence(limits: dict[str, int], says: str) -> None:
    assert says in (contradiction(Limits(**limits)) or "")


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"read_bytes_sec": 1, "write_bytes_sec": 2, "total_iops_sec": 3, "size_iops_sec": 512},
        {"total_iops_sec": 9, "total_iops_sec_max": 9, "total_iops_sec_max_length": 60},
        {"total_bytes_sec": MAX},
    ],
)
def test_what_goes_together(limits: dict[str, int]) -> None:
    assert contradiction(Limits(**limits)) is None


def test_a_length_of_one_second_without_a_burst_is_none() -> None:
    """libvirt itself asks for it: it is what QEMU has where nothing is said."""
    assert limits_of({"read_iops_sec": 5, "read_iops_sec_max_length": 1}) == Limits(read_iops_sec=5)


OLD = Limits(
    total_bytes_sec=100,
    total_bytes_sec_max=200,
    total_bytes_sec_max_length=3,
    read_iops_sec=10,
    write_iops_sec=20,
    read_iops_sec_max=30,
    size_iops_sec=4096,
)


@pytest.mark.parametrize(
    ("new", "differs"),
    [
        ({}, {}),
        ({"total_bytes_sec": 150}, {"total_bytes_sec": 150}),
        # Of a kind of which something is named, all else is 0.
        ({"read_iops_sec": 11}, {"read_iops_sec": 11, "write_iops_sec": 0}),
        (
            {"read_bytes_sec": 7, "total_bytes_sec_max": 0},
            {
                **{"total_bytes_sec": 0, "read_bytes_sec": 7, "total_bytes_sec_max": 0},
                "total_bytes_sec_max_length": 3,
            },
        ),
        ({"size_iops_sec": 0}, {"size_iops_sec": 0}),
        ({"write_iops_sec_max": 40}, {"read_iops_sec_max": 0, "write_iops_sec_max": 40}),
        # As QEMU takes no 0 for the length of a burst that there is.
        ({"total_bytes_sec_max_length": 0}, {"total_bytes_sec_max_length": 1}),
        ({"read_bytes_sec_max_length": 0}, {"total_bytes_sec_max_length": 1}),
        (
            {"total_bytes_sec_max_length": 0, "total_bytes_sec_max": 0},
            {"total_bytes_sec_max_length": 0, "total_bytes_sec_max": 0},
        ),
    ],
)
def test_what_a_call_leaves_as_it_was(new: dict[str, int], differs: dict[str, int]) -> None:
    assert merged(OLD, new) == Limits(**{**OLD.all, **differs})


@given(st.dictionaries(st.sampled_from(NAMES), st.integers(0, MAX)))
def test_all_of_them_at_once_are_exactly_those(values: dict[str, int]) -> None:
    everything = dict.fromkeys(NAMES, 0) | values
    assert merged(NONE, everything) == limits_of(everything)
    assert merged(limits_of(values), {}) == limits_of(values)
