"""How modules of our Rust crates use each other: in circles no larger than those of the table here.

A module is what stands beside a crate's root: `src/NAME.rs` and all below `src/NAME/`. It uses each
that it names, from the root or from where it stands, outside of tests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import takewhile, zip_longest
from pathlib import Path

import pytest

CRATES = Path(__file__).parents[2] / "pydataplane/crates"

# How many modules each circle of a crate has, the largest first; other crates have none. These
# numbers may only become smaller.
ALLOWED = {
    "bdev": (5,),
    "rbd": (9,),
    "scsi": (17,),
    "target": (18,),
}

ROOTS = {("lib",), ("main",)}
COMMENT = re.compile(r"//.*")
TESTS = re.compile(r"^#\[cfg\(test\)\]\n(?:pub(?:\(\w+\))? )?mod (\w+)(?:;| \{.*?^\})", re.M | re.S)
INLINE = re.compile(r"^( *)(?:pub(?:\([\w ]+\))? )?mod (\w+) \{\n(.*?)^\1\}", re.M | re.S)
USE = re.compile(r"^ *(?:pub(?:\([\w ]+\))? )?use ([\w:{}*,\s]+);", re.M)
REEXPORT = re.compile(r"^pub(?:\(\w+\))? use ([\w:{}*,\s]+);", re.M)
PATH = re.compile(r"\b(?:crate|super)(?:::\w+)+")


def paths(tree: str) -> Iterator[str]:
    """Yields the paths of a `use`, each in full: of `a::{b, c::{d as e}}` `a::b` and `a::c::d`."""
    starts = [""]
    path = ""
    for token in re.findall(r"[{},]|[\w:*]+", re.sub(r"\bas\s+\w+", "", tree)):
        if token == "{":
            starts.append(path)
        elif token in "},":
            if path != starts[-1]:
                yield path
            if token == "}":
                starts.pop()
            path = starts[-1]
        else:
            path = starts[-1] + token
    if path:
        yield path


def inside(name: tuple[str, ...], text: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields a module with its text, and those that stand in the same file."""
    yield name, INLINE.sub("", text)
    for module in INLINE.finditer(text):
        yield from inside((*name, module[2]), module[3])


def sources(crate: Path) -> dict[tuple[str, ...], str]:
    """Returns the text of each module of a crate, however deep, without comments and tests."""
    found: dict[tuple[str, ...], str] = {}
    tests = set()
    for file in (crate / "src").rglob("*.rs"):
        name = file.relative_to(crate / "src").with_suffix("").parts
        name = name[: -1 if name[-1] == "mod" else None]
        text = COMMENT.sub("", file.read_text())
        tests |= {(*(() if name in ROOTS else name), match[1]) for match in TESTS.finditer(text)}
        found |= inside(name, TESTS.sub("", text))
    return {
        name: text
        for name, text in found.items()
        if not any(name[:depth] in tests for depth in range(1, len(name) + 1))
    }


def used(name: tuple[str, ...], text: str) -> Iterator[str]:
    """Yields what the module `name` names of the crate's root: where each path from that begins."""
    imported = (path for tree in USE.findall(text) for path in paths(tree))
    for path in (*imported, *PATH.findall(text)):
        steps = path.split("::")
        ups = len(list(takewhile("super".__eq__, steps)))
        below = steps[1:] if steps[0] == "crate" else steps[ups:] if ups == len(name) else []
        assert below[:1] != ["*"], f"{'::'.join(name)}: {path} does not say what it uses"
        yield from below[:1]


def graph(crate: Path) -> dict[str, set[str]]:
    """Returns the modules of a crate, and those of them that each uses."""
    texts = sources(crate)
    modules = {name[0] for name in texts} - {"lib", "main"}
    root = texts.get(("lib",), "")
    given = [path.removeprefix("crate::").removeprefix("self::") for path in REEXPORT.findall(root)]
    home = {
        path.split("::")[-1]: path.split("::")[0]
        for tree in given
        for path in paths(tree)
        if path.split("::")[0] in modules
    } | {module: module for module in modules}
    uses: dict[str, set[str]] = {module: set() for module in modules}
    for name, text in texts.items():
        if name[0] in modules:
            uses[name[0]] |= {home[each] for each in used(name, text) if each in home} - {name[0]}
    return uses


def reached(uses: dict[str, set[str]], start: str) -> set[str]:
    """Returns the modules that one uses, and those that these use, and so on."""
    found: set[str] = set()
    ahead = set(uses[start])
    while ahead:
        found |= ahead
        ahead = set().union(*(uses[each] for each in ahead)) - found
    return found


def circles(uses: dict[str, set[str]]) -> list[set[str]]:
    """Returns the groups of modules that all need each other, the largest first."""
    below = {module: reached(uses, module) for module in uses}
    groups = {frozenset(m for m in below[of] if of in below[m]) for of in uses}
    return sorted(map(set, filter(None, groups)), key=lambda group: (-len(group), min(group)))


def told(uses: dict[str, set[str]], found: Iterable[set[str]]) -> str:
    """Returns who uses whom in circles, a module a line."""
    lines = (f"  {m} uses {', '.join(sorted(uses[m] & c))}" for c in found for m in sorted(c))
    return "\n".join(lines)


@pytest.mark.parametrize("crate", sorted(path.parent.name for path in CRATES.glob("*/Cargo.toml")))
def test_circles_of_modules_only_become_smaller(crate: str) -> None:
    uses = graph(CRATES / crate)
    found = circles(uses)
    sizes, allowed = tuple(map(len, found)), ALLOWED.get(crate, ())
    if any(size > most for size, most in zip_longest(sizes, allowed, fillvalue=0)):
        pytest.fail(
            f"{crate}: circles of {sizes} modules, of {allowed} at most: move what both sides need "
            f"to a module below them\n{told(uses, found)}"
        )
    assert sizes == allowed, (
        f"{crate}: its circles are smaller now: lower ALLOWED[{crate!r}] from {allowed} to {sizes}"
    )


def test_the_table_names_crates_that_are_there() -> None:
    assert ALLOWED.keys() <= {path.parent.name for path in CRATES.glob("*/Cargo.toml")}


@pytest.mark.parametrize(
    ("a", "b", "others", "expected"),
    [
        ("use crate::b::B;", "use crate::a::A;", {}, [{"a", "b"}]),
        ("use crate::b::B;", "", {}, []),
        ("use crate::{c, b::{B, C as D}};", "use super::a;", {"c.rs": ""}, [{"a", "b"}]),
        ("fn f() { crate::b::f() }", "", {"b/c.rs": "use super::super::a;"}, [{"a", "b"}]),
        ("mod c {\n    use super::super::b;\n}", "use crate::a;", {}, [{"a", "b"}]),
        ("use crate::B;", "use crate::a::A;", {"lib.rs": "pub use b::B;"}, [{"a", "b"}]),
        ("use crate::b;", "use crate::c;", {"c.rs": "use crate::a;"}, [{"a", "b", "c"}]),
        # What stands within one module.
        ("use b::B;", "use crate::a;", {"a/b.rs": "use super::A;"}, []),
        ("mod c {\n    use super::b;\n}\nfn b() {}", "use crate::a;", {}, []),
        # Comments and tests.
        ("use crate::b;", "// crate::a\n#[cfg(test)]\nmod tests {\n    use crate::a;\n}", {}, []),
        ("use crate::b;", "#[cfg(test)]\nmod tests;", {"b/tests.rs": "use crate::a;"}, []),
    ],
)
def test_what_is_a_circle(
    tmp_path: Path, a: str, b: str, others: dict[str, str], expected: list[set[str]]
) -> None:
    for name, text in {"a.rs": a, "b.rs": b, **others}.items():
        (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / name).write_text(text)
    assert circles(graph(tmp_path)) == expected
