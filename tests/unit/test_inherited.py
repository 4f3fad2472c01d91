"""What a new target gets of the options of the one that it replaces."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pydataplane import inherited

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a record is root's")


@pytest.mark.parametrize(
    ("old", "given", "merged"),
    [
        ("--name a --poll", "", "--name a --poll"),
        ("-n a --cpumask [1,2] --poll", "--cpumask=[3] --name b", "--poll --cpumask=[3] --name b"),
        ("--sandbox log -S /x", "--no-sandbox", "-S /x --no-sandbox"),
        ("--groups 1,2 --groups 3", "--groups 4", "--groups 4"),
        ("--poll", "--spin-us 3", "--spin-us 3"),
    ],
)
def test_given_options_replace_those_of_the_same_name(old: str, given: str, merged: str) -> None:
    assert inherited.merged(old.split(), given.split()) == merged.split()


@pytest.mark.parametrize(
    ("running", "given", "left"),
    [
        ("--name a --poll", "--poll", ""),
        ("--cpumask [1]", "-m [1]", ""),
        ("--cpumask [1]", "--cpumask=[1] --poll", "--poll"),
        ("--cpumask [1]", "-m [1,2]", "-m [1,2]"),
        ("--sandbox log", "--no-sandbox", "--no-sandbox"),
        ("", "--groups 1,2", "--groups 1,2"),
    ],
)
def test_what_a_running_target_lacks_of_given_options(running: str, given: str, left: str) -> None:
    assert inherited.unused(running.split(), given.split()) == left.split()


def test_what_is_for_one_start_is_left_out() -> None:
    old = ["--take-over", "--poll", "-c", "a", "--config", "b", "--config=c", "--wait-for-rpc"]
    assert inherited.without_once([*old, "--name", "x"]) == ["--poll", "--name", "x"]


@needs_root
def test_a_record_counts_where_nobody_else_can_write_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    inner = tmp_path / "gold"
    inner.mkdir(mode=0o755)
    os.chown(inner, 51001, 51001)
    socket = inner / "target.sock"
    (inner / ".target.sock.options").write_text('["--user", "root"]')
    assert inherited.recorded(socket) is None
    record = tmp_path / ".gold-target.sock.options"
    words = ["--user", "51001"]
    record.write_text(json.dumps(words))
    record.chmod(0o600)
    assert inherited.recorded(socket) == words
    tmp_path.chmod(0o1777)
    assert inherited.recorded(socket) == words
    record.chmod(0o620)
    assert inherited.recorded(socket) is None
    record.chmod(0o600)
    os.chown(record, 51001, 0)
    assert inherited.recorded(socket) is None
    record.unlink()
    record.symlink_to(inner / ".target.sock.options")
    assert inherited.recorded(socket) is None
    record.unlink()
    record.write_text("[")
    assert inherited.recorded(socket) is None
