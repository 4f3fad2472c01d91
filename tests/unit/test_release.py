"""What `make release` packs is what was committed, and the same each time."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests import release


@pytest.mark.nightly
@pytest.mark.parametrize("build", [release.source, release.sdist], ids=["source", "sdist"])
def test_an_archive_is_the_same_wherever_it_is_made(build: object, tmp_path: Path) -> None:
    assert callable(build)
    made = []
    for name in ("here", "there"):
        (dist := tmp_path / name / "dist").mkdir(parents=True)
        tree = release.checkout(tmp_path / name, "0.0")
        made.append(build(tree, dist))
    assert made[0].name == made[1].name
    assert made[0].read_bytes() == made[1].read_bytes()
    with tarfile.open(made[0]) as tar:
        names = {member.name.partition("/")[2] for member in tar.getmembers()}
        assert {(member.uid, member.mtime) for member in tar} == {(0, release.commit_time())}
    assert {
        "setup.py",
        "LICENSE",
        "pydataplane/Cargo.lock",
        "pydataplane/crates/target/src/main.rs",
        "schemas/blobstore.md",
        "plugin/cli/main.py",
    } <= names
    assert not [name for name in names if "/target/release/" in name or ".venv" in name]


def test_a_wheel_has_no_sources_of_its_programs(tmp_path: Path) -> None:
    tree = release.checkout(tmp_path, "0.0")
    words = (sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path / "lib"))
    subprocess.run(words, cwd=tree, check=True)
    files = {path for path in (tmp_path / "lib").rglob("*") if path.is_file()}
    assert {path.suffix for path in files} == {".py", ".pyi"}
    assert tmp_path / "lib/csi/proto/csi_pb2.pyi" in files
    assert tmp_path / "lib/pydataplane/methods.pyi" in files
    assert tmp_path / "lib/plugin/gateway/__main__.py" in files


def test_sums_are_those_that_sha256sum_checks(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    release.sums(tmp_path)
    assert hashlib.sha256(b"a").hexdigest() in (tmp_path / "SHA256SUMS").read_text()
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=tmp_path, check=True)


def test_two_builds_are_compared_file_by_file(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        for name in ("same", "other"):
            (folder / name).write_text("a")
    assert release.differences(here, there) == []
    (there / "other").write_text("b")
    (here / "more").write_text("a")
    assert release.differences(here, there) == ["more", "other"]


@pytest.mark.parametrize(
    ("changelog", "tags", "here", "says"),
    [
        ("## [Unreleased]\n\n## [1.2.0] - 2026-01-31\n", ["v1.1.0", "v1.2.0"], ["v1.2.0"], []),
        ("## [Unreleased]\n\n## [1.2.0] - 2026-01-31\n", ["v1.1.0"], [], ["is no tag v1.2.0"]),
        ("## [1.2.0] - 2026-01-31\n", ["v1.2.0"], [], ["v1.2.0 is another commit"]),
        ("## [1.2.0] - not released\n", ["v1.2.0"], ["v1.2.0"], ["section [1.2.0] with a date"]),
        (
            "## [Unreleased]\n\n- more\n\n## [1.1.0] - 2026-01-01\n",
            [],
            [],
            ["section [1.2.0] with a date", "has more under Unreleased", "is no tag v1.2.0"],
        ),
    ],
)
def test_what_a_release_lacks_is_said(
    changelog: str, tags: list[str], here: list[str], says: list[str]
) -> None:
    lacks = release.missing("1.2.0", changelog, tags, here)
    assert len(lacks) == len(says)
    assert all(part in said for part, said in zip(says, lacks, strict=True)), lacks
