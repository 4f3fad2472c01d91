"""Waiting for what happens elsewhere."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.wait import serves, until


def test_what_is_true_at_last_is_returned() -> None:
    answers: Iterator[str | None] = iter((None, "", "there"))
    assert until(lambda: next(answers), every_s=0.0) == "there"


def test_what_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    looks = iter(range(10))
    file = tmp_path / "late"

    def read() -> str:
        if next(looks) == 3:
            file.write_text("there")
        return file.read_text()

    assert until(read, every_s=0.0) == "there"


def test_what_was_waited_for_in_vain_is_said(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"^not within 0 s: the word$"):
        until(lambda: False, "the word", deadline_s=0)
    with pytest.raises(AssertionError, match=r"the file, but at last: .*No such file"):
        until((tmp_path / "none").read_text, lambda: "the file", deadline_s=0)
    with pytest.raises(ZeroDivisionError):
        until(lambda: 1 // 0, "what fails at once", deadline_s=60)


def test_nobody_waits_for_a_process_that_has_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("no such disk")
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as process:
        with pytest.raises(AssertionError, match=r"status 3 before: the disk"):
            until(lambda: False, "the disk", process=process)
        with pytest.raises(AssertionError, match=r"status 3 before: the end\nno such disk$"):
            serves(process, lambda: False, "the end", log)
        assert until(lambda: "there", process=process) == "there"
