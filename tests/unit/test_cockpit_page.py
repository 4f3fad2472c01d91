"""The files of the page for Cockpit fit together; what they do is tried in tests/guest at night."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.examples import EXAMPLES, used

FOLDER = EXAMPLES / "cockpit"
FILES = sorted(path for path in FOLDER.iterdir() if path.is_file())
MODULES = [path for path in FILES if path.suffix == ".js"]
#: What makes markup, or a program, of a text.
DANGEROUS = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\("
)
#: Cockpit's own, beside the page's folder.
FOREIGN = ("../base1/", "../../static/")


def text(name: str) -> str:
    return used(FOLDER / name).read_text()


def imports(module: Path) -> dict[str, set[str]]:
    """Returns the modules that one imports, each with the names that it takes of it."""
    found = re.findall(r"^import ([^;]+?) from \"\./(\w+\.js)\";", module.read_text(), re.M)
    return {name: {"*"} if "*" in what else set(re.findall(r"\w+", what)) for what, name in found}


def test_the_manifest_names_the_page() -> None:
    manifest = json.loads(text("manifest.json"))
    assert manifest["requires"]["cockpit"].isdigit()
    (entry,) = manifest["menu"]
    assert (FOLDER / f"{entry}.html").is_file()


def test_every_file_is_used_by_another() -> None:
    page = text("index.html")
    links = re.findall(r'(?:src|href)="([^"]+)"', page)
    sheet = re.findall(r'url\("([^"]+)"\)', text("virtlun.css"))
    named = [each for each in links + sheet if not each.startswith(FOREIGN)]
    there = {"manifest.json", "index.html", *named}
    for module in MODULES:
        there |= imports(module).keys()
    assert there == {path.name for path in FILES}
    # Cockpit's policy forbids what stands in the page itself.
    assert not re.search(r"<script>|\bon\w+=|style=", page)


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name)
def test_a_module(module: Path) -> None:
    source = text(module.name)
    assert not DANGEROUS.search(source)
    assert "https://" not in source
    for name, taken in imports(module).items():
        exported = re.findall(
            r"^export (?:async )?(?:function|class|const) (\w+)", (FOLDER / name).read_text(), re.M
        )
        assert taken - {"*"} <= set(exported), f"{module.name} of {name}"
    assert len(imports(module)) == len(re.findall(r"^import ", source, re.M))


def test_the_modules_can_be_parsed() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node here: the night's browser parses them")
    for module in MODULES:
        subprocess.run(
            [node, "--check", "--input-type=module"], input=module.read_bytes(), check=True
        )
