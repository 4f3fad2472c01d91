"""The pages of docs/ are what programs and schemas say, and all links lead somewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs import backends, commands, links, manpages, virsh
from tests.docs.reference import PAGES, REFERENCE


@pytest.mark.parametrize("name", PAGES)
def test_a_reference_page_is_what_it_is_made_from(name: str) -> None:
    # In a process of its own: click remembers how a command was asked for help first.
    code = f"from tests.docs.reference import PAGES; print(PAGES[{name!r}](), end='')"
    made = subprocess.run(
        [sys.executable, "-c", code], cwd=links.ROOT, capture_output=True, text=True, check=True
    )
    assert (REFERENCE / name).read_text() == made.stdout, "write it anew: python -m tests.docs"


def test_the_man_pages_are_what_they_are_made_from() -> None:
    code = "import json; from tests.docs import manpages; print(json.dumps(manpages.pages()))"
    made = subprocess.run(
        [sys.executable, "-c", code], cwd=links.ROOT, capture_output=True, text=True, check=True
    )
    kept = {path.name: path.read_text() for path in manpages.FOLDER.iterdir()}
    assert kept == json.loads(made.stdout), "write them anew: python -m tests.docs"


@pytest.mark.parametrize("path", sorted(manpages.FOLDER.iterdir()), ids=lambda path: path.name)
def test_a_man_page_is_shown_without_a_warning(path: Path) -> None:
    shown = subprocess.run(
        ["groff", "-man", "-ww", "-Tutf8", "-P-cbou", path],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stderr == ""
    assert "SYNOPSIS" in shown.stdout and "--help" in shown.stdout


@pytest.mark.parametrize(
    "text", links.texts(), ids=lambda path: path.relative_to(links.ROOT).as_posix()
)
def test_links_lead_somewhere(text: Path) -> None:
    assert list(links.wrong(text)) == []


def test_a_link_that_leads_nowhere_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "ROOT", tmp_path)
    (tmp_path / "other.md").write_text("# A part\n\n```sh\n# no title\n```\n")
    text = tmp_path / "text.md"
    text.write_text(
        "[a](other.md) [b](other.md#a-part) [c](https://virtlun.dev/none) `[d](none)`\n"
        "[e](gone.md) [f](other.md#no-title) [g](#here)\n"
    )
    assert list(links.wrong(text)) == [
        "text.md: there is no gone.md",
        "text.md: other.md has no part #no-title",
        "text.md: it has no part #here",
    ]


@pytest.mark.parametrize(
    "text", links.texts(), ids=lambda path: path.relative_to(links.ROOT).as_posix()
)
def test_the_commands_in_a_text_are_there(text: Path) -> None:
    found = [commands.wrong(command) for command in commands.written(text.read_text())]
    assert [said for said in found if said is not None] == []


def test_a_command_that_is_not_there_is_found() -> None:
    block = "```sh\nsudo virtlun volume make a/b; virtlun top | cat\n```\n"
    text = f"{block}and `virtlun top --all 1`\n"
    made, top, every = (commands.wrong(command) for command in commands.written(text))
    assert made == "virtlun volume make a/b: volume has no make"
    assert top is None
    assert every == "virtlun top --all 1: No such option '--all'."


def test_the_page_on_virsh_has_the_commands_that_were_run() -> None:
    """What came out is compared where it is run: tests/libvirt/test_virsh_commands.py."""
    lines = virsh.PAGE.read_text().splitlines()
    shown = [line.split("`")[1] for line in lines if line.startswith("| `")]
    run = [row.words.replace("{FOLDER}/", "") for row in virsh.ROWS]
    assert shown == [*run, *sorted(virsh.ELSEWHERE)]


def test_the_tests_that_the_page_on_backends_names_are_there() -> None:
    """What came of the other rows is compared where it is tried: tests/target/test_backends.py."""
    assert list(backends.missing()) == []
    assert backends.PAGE.read_text().endswith("\n".join([*backends.shown(), ""]))
    assert backends.TRIAL_TEST in (links.ROOT / backends.TRIAL).read_text()


def test_a_test_that_is_not_there_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = {"rbd": backends.Cell("yes", "tests/target/test_rbd.py::test_none")}
    gone = {"nbd": backends.Cell("no", "tests/target/test_gone.py::test_none")}
    monkeypatch.setattr(backends, "SHOWN", (backends.Row("a", cells), backends.Row("b", gone)))
    assert list(backends.missing()) == [
        "a, rbd: tests/target/test_rbd.py has no test_none",
        "b, nbd: tests/target/test_gone.py has no test_none",
    ]
