"""Builds a release into dist/: `make release`. `--check` builds it twice elsewhere, and tries it.

A source tarball, an sdist, a wheel with the programs, and their SHA256SUMS. All are made from the
last commit, not from what else lies in the checkout, and are the same, byte by byte, wherever and
whenever that is done with the same tools: times are the commit's, owners root, paths of the build
machine are in no program.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
#: Of the wheel, those that are compiled.
PROGRAMS = ("virtlun-target", "virtlun-holder", "virtlun-bench")


def main(options: Sequence[str] = ()) -> None:
    """Builds it, of what is committed; says what a release of that version lacks."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    lacks = missing(
        version, (ROOT / "CHANGELOG.md").read_text(), _tags(), _tags("--points-at=HEAD")
    )
    if lacks:
        print(f"This is no release of {version} yet: {'; '.join(lacks)}.", file=sys.stderr)
    if "--check" in options:
        check(version)
        return
    shutil.rmtree(DIST, ignore_errors=True)
    build(version, DIST)
    print((DIST / "SHA256SUMS").read_text(), end="")


def build(version: str, dist: Path) -> None:
    """Builds all of it into `dist`, which is not there yet."""
    dist.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        tree = checkout(Path(scratch), version)
        source(tree, dist)
        sdist(tree, dist)
        wheel(tree, dist)
    sums(dist)


def check(version: str) -> None:
    """Builds it in two places, and installs its wheel.

    Raises:
        SystemExit: both differ, a sum is wrong, or an installed program is not of `version`.
    """
    with tempfile.TemporaryDirectory() as scratch:
        here, there = Path(scratch, "here"), Path(scratch, "there")
        for dist in (here, there):
            build(version, dist)
        if different := differences(here, there):
            raise SystemExit(f"built twice from one commit, and not the same: {different}")
        subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=here, check=True)
        (made,) = here.glob("*.whl")
        installed = Path(scratch, "installed")
        words = ("pip", "install", "--quiet", "--no-deps", "--no-index", "--target", installed)
        subprocess.run([sys.executable, "-m", *words, made], check=True)
        for name in PROGRAMS:
            said = subprocess.run(
                [installed / "bin" / name, "--version"], check=True, capture_output=True, text=True
            ).stdout
            if version not in said:
                raise SystemExit(f"{name} --version of the wheel: {said.strip()}, not {version}")
        print((here / "SHA256SUMS").read_text(), end="")


def differences(here: Path, there: Path) -> list[str]:
    """Returns the names of files that two folders have not alike, in order."""
    names = {path.name for folder in (here, there) for path in folder.iterdir()}
    return sorted(
        name
        for name in names
        if not all((folder / name).is_file() for folder in (here, there))
        or (here / name).read_bytes() != (there / name).read_bytes()
    )


def missing(
    version: str, changelog: str, tags: Collection[str], here: Collection[str]
) -> list[str]:
    """Returns what is to be done before the last commit is a release of `version`.

    `tags` are those of the repository, `here` those of the commit.
    """
    section = re.search(rf"^## \[{re.escape(version)}\] - (\S+)$", changelog, re.MULTILINE)
    unreleased = re.search(r"^## \[Unreleased\]\n(.*?)^## ", changelog, re.MULTILINE | re.DOTALL)
    tag = f"v{version}"
    lacks = []
    if tag in tags and tag not in here:
        lacks.append(f"{tag} is another commit: give `version` in pyproject.toml the next number")
    if section is None or not re.fullmatch(r"\d{4}-\d\d-\d\d", section[1]):
        lacks.append(f"CHANGELOG.md has no section [{version}] with a date")
    if unreleased is not None and unreleased[1].strip():
        lacks.append(f"CHANGELOG.md has more under Unreleased: move it to [{version}]")
    if tag not in tags:
        lacks.append(f"there is no tag {tag}: `git tag -s {tag}`")
    return lacks


def _tags(*which: str) -> list[str]:
    return _git("tag", "--list", *which).decode().split()


def commit_time() -> int:
    """Returns the time of the last commit, seconds since 1970."""
    return int(_git("log", "-1", "--format=%ct"))


def checkout(scratch: Path, version: str) -> Path:
    """Returns a new folder below `scratch` with the files of the last commit."""
    archive = _git("archive", "--format=tar", f"--prefix=virtlun-{version}/", "HEAD")
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(scratch, filter="data")
    return scratch / f"virtlun-{version}"


def source(tree: Path, dist: Path) -> Path:
    """Packs all of a tree as NAME-source.tar.gz and returns that."""
    made = dist / f"{tree.name}-source.tar.gz"
    with tempfile.TemporaryDirectory() as scratch:
        plain = Path(scratch) / "plain.tar"
        with tarfile.open(plain, "w") as tar:
            tar.add(tree, tree.name)
        repack(plain, made)
    return made


def sdist(tree: Path, dist: Path) -> Path:
    """Builds what `pip install` builds from and returns that."""
    with tempfile.TemporaryDirectory() as scratch:
        _run(tree, sys.executable, "setup.py", "-q", "sdist", "--dist-dir", scratch)
        (plain,) = Path(scratch).iterdir()
        made = dist / plain.name
        repack(plain, made)
    return made


def wheel(tree: Path, dist: Path) -> Path:
    """Builds the wheel, with the programs compiled in release profile, and returns it."""
    words = ("pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(dist), ".")
    _run(tree, sys.executable, "-m", *words)
    (made,) = dist.glob("*.whl")
    return made


def repack(given: Path, made: Path) -> None:
    """Packs an archive anew: names in order, the commit's time, nobody's names or rights."""
    when = commit_time()
    with tarfile.open(given) as old, made.open("wb") as file:  # noqa: SIM117
        with (
            gzip.GzipFile("", "wb", fileobj=file, mtime=when) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new,
        ):
            for member in sorted(old.getmembers(), key=lambda member: member.name):
                member.mtime, member.uid, member.gid = when, 0, 0
                member.uname = member.gname = ""
                member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                member.pax_headers = {}
                new.addfile(member, old.extractfile(member) if member.isfile() else None)


def sums(dist: Path) -> None:
    """Writes SHA256SUMS, for `sha256sum --check`."""
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(dist.iterdir())
    ]
    (dist / "SHA256SUMS").write_text("".join(lines))


def _git(*words: str) -> bytes:
    return subprocess.run(["git", "-C", ROOT, *words], check=True, capture_output=True).stdout


def _run(tree: Path, *words: str) -> None:
    home = os.environ.get("CARGO_HOME", str(Path.home() / ".cargo"))
    paths = {str(tree): "/virtlun", home: "/cargo"}
    flags = " ".join(f"--remap-path-prefix={path}={name}" for path, name in paths.items())
    settings = {"SOURCE_DATE_EPOCH": str(commit_time()), "RUSTFLAGS": flags}
    subprocess.run(words, cwd=tree, check=True, env={**os.environ, **settings})


if __name__ == "__main__":
    main()
