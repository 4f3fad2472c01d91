"""How our Python modules use each other: no circle, no import upward, no hidden import."""

from __future__ import annotations

import ast
import itertools
import re
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("plugin", "csi", "pydataplane")
DOMAIN = "pydataplane.domain"
METAPHORS = {
    *("care", "desk", "happening", "parcel", "seat"),
    *("settle", "settled", "settles", "unsettled", "whereabouts"),
}
"""Words that no module, class or function has in its name: each hides a word of the field."""
VAGUE_NAMES = {
    *("alone", "begun", "coming", "continued", "empty", "existing", "gathered", "going"),
    *("joined", "kept", "known", "leftout", "missing", "noted", "openings", "overtaken", "owned"),
    *("place", "places", "planned", "redefined", "requested", "shown", "silence", "taken"),
    *("underway", "unnamed", "waiting", "wanted"),
}
"""Whole names of modules and classes that do not say of what."""


def modules(*packages: str) -> dict[str, Path]:
    """Returns the files of our modules, or of those of these packages, by dotted name."""
    found = {}
    for package in packages or PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if not {"target", "crates"} & set(parts[:2]) or parts[0] != "pydataplane":
                found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(name: str, tree: ast.AST, known: set[str]) -> Iterator[str]:
    """Yields the modules of ours that a piece of the module `name` imports, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            given = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}: a relative import"
            module = node.module or ""
            inner = [f"{module}.{alias.name}" for alias in node.names]
            given = [full if full in known else module for full in inner]
        else:
            continue
        yield from (each for each in given if each in known)


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    """What is in each of our modules, and of those of the tests."""
    found = modules(*PACKAGES, "tests")
    trees = {name: ast.parse(path.read_text()) for name, path in found.items()}
    assert {"plugin.gateway.session", "csi.node", "pydataplane.volumes"} <= trees.keys()
    return trees


@pytest.fixture(scope="module")
def graph(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Our modules and those of ours that each imports."""
    known = set(trees)
    return {name: set(imports(name, tree, known)) for name, tree in trees.items()}


def test_no_import_circle(graph: dict[str, set[str]]) -> None:
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail("an import circle: " + " <- ".join(error.args[1]))


def test_no_import_for_type_checkers_alone(trees: dict[str, ast.Module]) -> None:
    """One that exists for them alone hides a circle."""
    known = set(trees)
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                inside = itertools.chain.from_iterable(imports(name, n, known) for n in node.body)
                assert not list(inside), f"{name} imports a module of ours for type checkers alone"


@pytest.mark.parametrize(
    ("package", "strangers"),
    [
        ("plugin", {"csi"}),
        ("csi", {"plugin"}),
        ("pydataplane", {"plugin", "csi"}),
    ],
)
def test_a_package_does_not_know_those_beside_or_above_it(
    graph: dict[str, set[str]], package: str, strangers: set[str]
) -> None:
    for name, used in graph.items():
        if name.split(".")[0] == package:
            wrong = sorted(each for each in used if each.split(".")[0] in strangers)
            assert not wrong, f"{name} imports {', '.join(wrong)}"


def test_domains_are_above_the_client_and_need_its_interface_alone(
    graph: dict[str, set[str]],
) -> None:
    """The hook is made of them, and starts before each VM."""
    for name, used in graph.items():
        if (name + ".").startswith(f"{DOMAIN}."):
            wrong = [each for each in used if not each.startswith(DOMAIN)]
            assert set(wrong) <= {"pydataplane.errors", "pydataplane.methods"}, (
                f"{name} imports {', '.join(wrong)}"
            )
        elif name.startswith("pydataplane"):
            wrong = [each for each in used if each.startswith(DOMAIN)]
            assert not wrong, f"{name} imports {', '.join(wrong)}"


def test_the_gateways_modules_stand_in_the_order_that_its_header_tells(
    graph: dict[str, set[str]],
) -> None:
    header = ast.get_docstring(ast.parse((ROOT / "plugin/gateway/__init__.py").read_text())) or ""
    lines = re.findall(r"^    ((?:\w+, )*\w+) +\w", header, re.MULTILINE)
    rank = {name: number for number, line in enumerate(lines) for name in line.split(", ")}
    package = "plugin.gateway."
    files = {name.removeprefix(package).split(".")[0] for name in graph if package in name}
    assert rank.keys() == files - {"__main__"}
    for name, used in graph.items():
        own = rank.get(name.removeprefix(package).split(".")[0])
        for each in used if package in name and own is not None else ():
            theirs = rank.get(each.removeprefix(package).split(".")[0], -1)
            assert package not in each or theirs <= (own or 0), (
                f"{name} uses {each}, which is above it"
            )


def test_names_say_what_a_thing_is(trees: dict[str, ast.Module]) -> None:
    """A storage or libvirt engineer need not ask what a name of ours means."""
    for module, tree in trees.items():
        named = [module.rpartition(".")[2]]
        functions = []
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                named.append(node.name)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append(node.name)
        vague = VAGUE_NAMES.intersection(name.lower().removeprefix("_") for name in named)
        assert not vague, f"{module}: {', '.join(sorted(vague))}: say of what"
        for name in named + functions:
            metaphors = METAPHORS.intersection(words_of(name))
            assert not metaphors, f"{module}: {name}: take the word of the field"


def words_of(name: str) -> set[str]:
    """Returns the words of a name with capitals or underscores, in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def test_the_map_of_crates_is_that_of_their_manifests() -> None:
    """Every crate is in it, and what an arrow says is a dependency."""
    crates = {path.parent.name: path for path in (ROOT / "pydataplane/crates").glob("*/Cargo.toml")}
    made_of = {
        name: {"vhost" if of == "vhost-scsi" else of for of in manifest["dependencies"]}
        for name, path in crates.items()
        if (manifest := tomllib.loads(path.read_text()))
    }
    text = (ROOT / "CONTRIBUTING.md").read_text()
    drawn = re.search(r"b is made of a\):\n\n(.*?; all of these) and", text, re.DOTALL)
    assert drawn
    for row in drawn[1].split(";"):
        steps = [set(re.findall(r"`([\w-]+)`", step)) for step in row.split("→")]
        for below, above in itertools.pairwise(steps):
            for name in above:
                assert below <= made_of[name], f"{name} is made of {made_of[name]}, not {below}"
    assert set(re.findall(r"`([\w-]+)`", text[drawn.start() : drawn.end() + 200])) >= crates.keys()


def test_rust_tests_that_one_program_has_are_all_modules_of_it() -> None:
    """With `autotests = false` cargo says nothing of a file that no program has."""
    crates = [path.parent for path in (ROOT / "pydataplane/crates").glob("*/Cargo.toml")]
    ours = [
        (crate, manifest["test"])
        for crate in crates
        if not (manifest := tomllib.loads((crate / "Cargo.toml").read_text()))["package"].get(
            "autotests", True
        )
    ]
    assert ours
    for crate, programs in ours:
        roots = {Path(program["path"]).stem for program in programs}
        inside = set(re.findall(r"^mod (\w+);", (crate / "tests/main.rs").read_text(), re.M))
        files = {path.stem for path in (crate / "tests").glob("*.rs")}
        assert files == roots | (inside & files), crate.name


def test_one_function_stops_processes_of_tests(trees: dict[str, ast.Module]) -> None:
    """After the signal alone threads go on for a moment, and may answer what is sent then."""
    sends = {
        name
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "SIGSTOP"
    }
    assert sends == {"tests.support.frozen"}
