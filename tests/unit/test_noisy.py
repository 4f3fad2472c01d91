"""Whether a victim has what is fair beside its neighbour: IOPS above 0.5 of it, p99 under 2."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.bench.noisy import BEHAVED, NOBODY, Row, missed

FAIR_IOPS, FAIR_P99_US = 1000.0, 80.0


def in_ram(neighbour: str, iops: float, p99_us: float) -> Row:
    return Row("ram", neighbour, iops, p99_us / 2, p99_us, 0)


def on_disk(neighbour: str, iops: float, p99_us: float) -> Row:
    return Row("disk", neighbour, iops, p99_us / 2, p99_us, 0, FAIR_IOPS, FAIR_P99_US)


REFERENCE = in_ram(BEHAVED, FAIR_IOPS, FAIR_P99_US)


@pytest.mark.parametrize("row", [in_ram, on_disk])
@pytest.mark.parametrize(
    ("iops", "p99_us", "words"),
    [
        (501, 159, None),
        (5000, 8, None),
        (500, 80, "0.50 of the IOPS"),
        (1000, 160, "2.00 times the p99"),
        (410, 248, "0.41 of the IOPS (the goal: more than 0.5) and 3.10 times the p99"),
        (0, 0, "0.00 of the IOPS"),
    ],
)
def test_a_row_meets_the_goal_or_has_a_sentence(
    row: Callable[[str, float, float], Row], iops: float, p99_us: float, words: str | None
) -> None:
    said = missed([REFERENCE, row("UNMAP", iops, p99_us)])
    assert len(said) == (words is not None)
    assert not said or said[0].startswith(f"{row('', 0, 0).victim} beside “UNMAP”: ")
    assert words is None or words in said[0]


def test_each_row_is_judged_by_itself() -> None:
    rows = [REFERENCE, in_ram("a", 1, 1), in_ram("b", 999, 1), on_disk("a", 1, 1)]
    assert [sentence.split(":")[0] for sentence in missed(rows)] == [
        "ram beside “a”",
        "disk beside “a”",
    ]


def test_a_well_behaved_neighbour_on_the_disk_is_judged_in_ram_it_is_the_reference() -> None:
    rows = [REFERENCE, on_disk(BEHAVED, 1, 1)]
    assert [sentence.split()[0] for sentence in missed(rows)] == ["disk"]


def test_beside_nobody_there_is_no_goal() -> None:
    assert missed([REFERENCE, in_ram(NOBODY, 1, 1), on_disk(NOBODY, 1, 1)]) == []


def test_what_cannot_be_compared_is_not_met() -> None:
    assert missed([in_ram("UNMAP", 5000, 1)]) == [
        "ram beside “UNMAP”: nothing was measured to compare it with"
    ]
