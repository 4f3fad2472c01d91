"""Which subjects of commits are too long."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.subjects import MOST, too_long


def commit(root: Path, subject: str, when: str) -> None:
    words = ("-c", "user.name=T", "-c", "user.email=t@example.org", "commit", "-q")
    subprocess.run(
        ["git", "-C", root, *words, "--allow-empty", "-m", f"{subject}\n\n{'body ' * 40}"],
        check=True,
        env={"PATH": "/usr/bin:/bin", "GIT_COMMITTER_DATE": when, "HOME": str(root)},
    )


def test_a_subject_has_up_to_72_characters_from_a_day_on(tmp_path: Path) -> None:
    assert too_long(tmp_path) == []
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    commit(tmp_path, "old: " + "x" * 90, "2026-11-27T12:00:00Z")
    commit(tmp_path, "ö" * MOST, "2026-11-28T12:00:00Z")
    assert too_long(tmp_path) == []
    commit(tmp_path, "y" * (MOST + 1), "2026-11-28T13:00:00Z")
    commit(tmp_path, "short", "2026-11-28T14:00:00Z")
    assert [line.partition(" ")[2] for line in too_long(tmp_path)] == ["y" * (MOST + 1)]
