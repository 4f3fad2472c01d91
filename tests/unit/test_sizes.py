"""The table of sizes counts what is committed, and the documentation shows what it prints."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.sizes import ROOT, NoSuchCommitError, Size, sizes, table

PAGE = ROOT / "docs/pages/reference/figures.md"


def git(folder: Path, *words: str) -> str:
    """Runs git in a folder; returns what it printed."""
    who = ("-c", "user.name=t", "-c", "user.email=t@virtlun.dev", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", "-C", str(folder), *who, *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_files_and_lines_of_each_part_are_counted(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    for name, lines in (
        ("pydataplane/crates/scsi/src/lib.rs", 3),
        ("pydataplane/crates/scsi/src/deep/lun.rs", 5),
        ("pydataplane/crates/scsi/tests/lun.rs", 7),
        ("pydataplane/client.py", 2),
        ("csi/node.py", 4),
        ("csi/proto/csi_pb2.py", 1000),
        ("csi/empty.py", 0),
        ("setup.py", 9),
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("line\n" * lines)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "all")
    (tmp_path / "csi/node.py").write_text("not committed\n" * 50)
    assert sizes("HEAD", tmp_path) == {
        "crates": Size(2, 8, 5, "pydataplane/crates/scsi/src/deep/lun.rs"),
        "crates' tests": Size(1, 7, 7, "pydataplane/crates/scsi/tests/lun.rs"),
        "pydataplane": Size(1, 2, 2, "pydataplane/client.py"),
        "csi": Size(1, 4, 4, "csi/node.py"),
    }


def test_a_commit_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    with pytest.raises(NoSuchCommitError):
        sizes("0" * 40, tmp_path)


def test_the_page_has_what_the_command_prints() -> None:
    text = PAGE.read_text()
    commits = list(dict.fromkeys(re.findall(r"^\| ([0-9a-f]{7,}) \|", text, re.MULTILINE)))
    assert len(commits) == 3
    try:
        made = "\n".join(table(commits))
    except NoSuchCommitError as error:
        pytest.skip(f"this checkout has not the whole history: {error}")
    assert made in text
