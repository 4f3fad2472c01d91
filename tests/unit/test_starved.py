"""When an emulated guest counts as starved."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.starved import NS, Times, ran, starved, times

QEMU = 4711


def process(proc: Path, accel: str, *threads: tuple[float, float]) -> None:
    """Makes a /proc whose QEMU has threads that ran and waited for so many seconds."""
    folder = proc / str(QEMU)
    folder.mkdir()
    (folder / "cmdline").write_bytes(f"qemu\0-accel\0{accel}\0-smp\0001\0".encode())
    for number, (ran_s, waited_s) in enumerate(threads):
        (folder / f"task/{number}").mkdir(parents=True)
        (folder / f"task/{number}/schedstat").write_text(
            f"{int(ran_s * NS)} {int(waited_s * NS)} 12\n"
        )


@pytest.mark.parametrize(
    ("accel", "threads", "is_starved"),
    [
        ("tcg,thread=multi", [(1.0, 2.0), (3.0, 70.0)], True),
        ("tcg", [(3.0, 70.0)], True),
        ("kvm", [(3.0, 70.0)], False),
        ("tcg", [(0.5, 1.0)], False),  # it waits for an answer of ours
        ("tcg", [(30.0, 70.0)], False),  # it turns in circles
        ("tcg", [(3.0, 30.0), (3.0, 30.0), (3.0, 30.0)], False),
    ],
)
def test_who_ran_little_and_waited_for_a_processor_is(
    tmp_path: Path, accel: str, threads: list[tuple[float, float]], *, is_starved: bool
) -> None:
    process(tmp_path, accel, *threads)
    said = starved(QEMU, 120.0, proc=tmp_path)
    assert ("waited 70 s for a processor" in said) == is_starved
    assert is_starved or not said


def test_what_was_before_does_not_count(tmp_path: Path) -> None:
    process(tmp_path, "tcg", (12.0, 80.0))
    assert not starved(QEMU, 60.0, Times(11.0, {"0": 70.0}), tmp_path)
    assert "ran for 1.0 s and waited 40 s" in starved(
        QEMU, 60.0, Times(11.0, {"0": 40.0}), tmp_path
    )


def test_who_is_gone_or_not_known_is_not(tmp_path: Path) -> None:
    assert times(QEMU, tmp_path) is None
    assert not starved(QEMU, 60.0, proc=tmp_path)
    assert not starved(None, 60.0)


def test_how_long_a_guest_ran_tells_a_circle_from_a_wait(tmp_path: Path) -> None:
    process(tmp_path, "tcg", (12.0, 0.0), (3.0, 0.0))
    assert ran(QEMU, Times(10.0, {}), tmp_path) == "the guest ran for 5.0 s of a processor"
    assert "not known" in ran(None, Times(10.0, {}), tmp_path)
    assert "not known" in ran(QEMU, None, tmp_path)
