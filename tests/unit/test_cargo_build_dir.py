"""Where cargo builds with LEAN=1: a checkout's own, kept while it is used unless it has grown."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.cache import ROOT

DAY_S = 24 * 3600
LOCKS = ("rust-toolchain.toml", "pydataplane/Cargo.lock")
GROWN_MIB = 2
#: What cargo keeps of a crate of ours, and of others, of which one is named after it.
OURS = "lvol-0123456789abcdef"
OF_OTHERS = {"serde-0123456789abcdef", "lvol-common-0123456789abcdef"}


class Checkout:
    """A checkout with a cache of its own."""

    def __init__(self, folder: Path, name: str = "checkout") -> None:
        self.folder = folder / name
        self.cache = folder / "cache"
        for file in (*LOCKS, "pydataplane/cargo-build-dir", "pydataplane/cargo-sources"):
            (self.folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, self.folder / file)
        for crate in ("pydataplane/crates/lvol", "tests/fuzz"):
            (self.folder / crate).mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / crate / "Cargo.toml", self.folder / crate)

    def asks(self, folder: Path | None = None) -> Path:
        """Returns the directory that the script names, also for another checkout."""
        given = {"VIRTLUN_CACHE": str(self.cache), "VIRTLUN_GROWN_MIB": str(GROWN_MIB)}
        said = subprocess.run(
            [(folder or self.folder) / "pydataplane/cargo-build-dir"],
            env=os.environ | given,
            capture_output=True,
            text=True,
            check=True,
        )
        return Path(said.stdout.removesuffix("\n"))


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def aged(directory: Path, days: float) -> None:
    """Has a directory asked for last so many days ago."""
    then = directory.stat().st_mtime - days * DAY_S
    os.utime(directory, (then, then))


def grown(directory: Path) -> None:
    """Fills a directory with as much as is too much."""
    (directory / "built").write_bytes(b"\1" * (GROWN_MIB << 20))


def test_it_is_of_the_compiler_and_the_locked_crates(checkout: Checkout) -> None:
    seen = [checkout.asks()]
    assert seen[0].is_dir()
    assert checkout.asks() == seen[0]
    for name in LOCKS:
        with (checkout.folder / name).open("a") as file:
            file.write("# changed\n")
        seen.append(checkout.asks())
    assert len(set(seen)) == len(seen)
    assert {path.parent for path in seen} == {checkout.cache / "cargo"}


def test_what_nobody_asks_for_goes_and_what_is_asked_for_stays(checkout: Checkout) -> None:
    mine = checkout.asks()
    old, used = mine.parent / "old", mine.parent / "used"
    for directory, days in ((old, 16), (used, 13), (mine, 16)):
        directory.mkdir(exist_ok=True)
        (directory / "built").write_text("something")
        aged(directory, days)
    assert checkout.asks() == mine
    assert (mine / "built").exists()
    assert used.exists()
    assert not old.exists()


def test_one_that_has_grown_is_left_for_a_new_one(checkout: Checkout) -> None:
    first = checkout.asks()
    grown(first)
    second = checkout.asks()
    assert second == first.with_name(f"{first.name}.2")
    assert (first / "built").exists()  # a build may go on in it
    grown(second)
    aged(first, 2)
    assert checkout.asks() == first.with_name(f"{first.name}.3")
    assert not first.exists()
    assert checkout.asks() == first  # its number is free again


@pytest.fixture
def another(checkout: Checkout, tmp_path: Path) -> Checkout:
    """One more, with the same cache, when the first has built."""
    (checkout.asks() / "release/.fingerprint").mkdir(parents=True)
    (checkout.asks() / "release/.cargo-lock").touch()
    for crate in (OURS, *OF_OTHERS):
        (checkout.asks() / "release/.fingerprint" / crate).mkdir()
    return Checkout(tmp_path, "another")


def test_another_checkout_begins_with_a_copy_without_our_own_crates(
    checkout: Checkout, another: Checkout
) -> None:
    copy = another.asks() / "release/.fingerprint"
    assert another.asks() != checkout.asks()
    assert {path.name for path in copy.iterdir()} == OF_OTHERS
    assert (checkout.asks() / "release/.fingerprint" / OURS).exists()


def test_a_checkout_whose_crates_have_changed_begins_with_a_copy_of_what_it_had(
    checkout: Checkout, another: Checkout
) -> None:
    with (checkout.folder / LOCKS[1]).open("a") as file:
        file.write("# changed\n")
    copy = checkout.asks() / "release/.fingerprint"
    assert {path.name for path in copy.iterdir()} == OF_OTHERS
    shutil.rmtree(checkout.asks())
    # One that another checkout has of the same crates comes before a later one of others.
    shutil.copy(checkout.folder / LOCKS[1], another.folder / LOCKS[1])
    (another.asks() / "release/.fingerprint/uuid-3").mkdir(parents=True)
    aged(another.asks(), 1)
    assert (checkout.asks() / "release/.fingerprint/uuid-3").exists()


def test_a_directory_in_which_cargo_builds_is_not_copied(
    checkout: Checkout, another: Checkout
) -> None:
    with (checkout.asks() / "release/.cargo-lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert not (another.asks() / "release").exists()


def test_what_a_checkout_had_goes_with_it(checkout: Checkout, another: Checkout) -> None:
    had = checkout.asks()
    shutil.rmtree(checkout.folder)
    assert another.asks().exists()
    assert not had.exists()


def test_what_a_checkout_had_of_other_crates_goes_after_a_day(
    checkout: Checkout, another: Checkout
) -> None:
    had, others = checkout.asks(), another.asks()
    (checkout.folder / LOCKS[1]).write_text("# changed\n")
    aged(had, 0.9)
    aged(others, 2)
    new = checkout.asks()
    assert had.exists()
    aged(had, 0.2)
    assert checkout.asks() == new
    assert not had.exists()
    assert others.exists()


def crate(folder: Path, says: str) -> None:
    """Makes a checkout whose only crate is a program, as a new clone has it."""
    source = folder / "pydataplane/src/main.rs"
    source.parent.mkdir(parents=True)
    source.write_text(f'fn main() {{ println!("{says}") }}\n')
    (source.parent.parent / "Cargo.toml").write_text(
        '[package]\nname = "small"\nversion = "0.0.0"\nedition = "2024"\n'
    )
    shutil.copy(ROOT / "pydataplane/cargo-sources", folder / "pydataplane")
    subprocess.run(["git", "init", "-q", folder], check=True)
    subprocess.run(["git", "add", "."], cwd=folder, check=True)


def built(folder: Path, *steps: str) -> tuple[bool, str]:
    """Builds a crate with the steps before; returns whether it was compiled, and what it says."""
    directory = folder.with_name("built")
    for step in steps:
        subprocess.run([folder / "pydataplane/cargo-sources", step, directory], check=True)
    manifest = str(folder / "pydataplane/Cargo.toml")
    ran = subprocess.run(
        ["cargo", "run", "--offline", "--manifest-path", manifest],
        env=os.environ | {"CARGO_BUILD_BUILD_DIR": str(directory)},
        capture_output=True,
        text=True,
        check=True,
    )
    return "Compiling small" in ran.stderr, ran.stdout.removesuffix("\n")


def test_a_new_checkout_compiles_what_has_changed_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "checkout"
    for says, compiles in (("one", True), ("one", False), ("two", True), ("two", False)):
        shutil.rmtree(folder, ignore_errors=True)
        crate(folder, says)
        assert built(folder, "restore") == (compiles, says)
        built(folder, "note")


def test_what_was_compiled_since_the_note_is_not_taken_for_what_it_tells_of(tmp_path: Path) -> None:
    folder = tmp_path / "checkout"
    crate(folder, "one")
    built(folder)
    built(folder, "note")
    (folder / "pydataplane/src/main.rs").write_text('fn main() { println!("two") }\n')
    assert built(folder) == (True, "two")
    shutil.rmtree(folder)
    crate(folder, "one")
    assert built(folder, "restore") == (True, "one")


def test_only_a_new_checkout_has_its_times_changed(tmp_path: Path) -> None:
    folder = tmp_path / "checkout"
    crate(folder, "one")
    built(folder, "restore")
    built(folder, "note")
    source = folder / "pydataplane/src/main.rs"
    os.utime(source)
    assert built(folder, "restore") == (True, "one")


def test_make_builds_there_when_it_is_lean_and_only_then(checkout: Checkout) -> None:
    words = [
        "make",
        "--no-print-directory",
        "--eval=said: ; @printenv CARGO_BUILD_BUILD_DIR || true",
    ]
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("CARGO", "MAKE", "LEAN"))
    }
    environment["VIRTLUN_CACHE"] = str(checkout.cache)
    said = [
        subprocess.run(
            [*words, "said", *lean],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for lean in ([], ["LEAN=1"])
    ]
    assert said == ["", str(checkout.asks(ROOT))]
