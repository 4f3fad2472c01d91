"""Every call of the target in our Python is one that schemas/rpc has, with parameters it takes."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.rpc_schemas import check_params, methods
from tests.unit.test_structure import modules

DRIVERS = ("uring", "aio")
"""What an f-string among the methods' names may stand for: see Volumes.file_of."""

TYPES = {"boolean": bool, "integer": int, "string": str}


@dataclass(frozen=True)
class Site:
    """One call, where it stands."""

    where: str
    method: str
    params: frozenset[str]
    literals: tuple[tuple[str, Any], ...]
    field: str | None
    """What is taken from its result at once, as in call(...)["field"]."""


def constants(tree: ast.Module) -> dict[str, str]:
    """Returns the module's own names for texts."""
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.value, str)
    }


def names(given: ast.expr, known: dict[str, str]) -> list[str]:
    """Returns which methods an expression may name; none: it is no call of the target."""
    if isinstance(given, ast.Constant) and isinstance(given.value, str):
        return [given.value]
    if isinstance(given, ast.Name) and given.id in known:
        return [known[given.id]]
    if isinstance(given, ast.JoinedStr):
        parts = [
            [str(part.value)] if isinstance(part, ast.Constant) else DRIVERS
            for part in given.values
        ]
        return ["".join(each) for each in itertools.product(*parts)]
    return []


def sites() -> Iterator[Site]:
    """Yields the calls of the target in our modules."""
    for module, path in modules().items():
        tree = ast.parse(path.read_text())
        fields = {
            id(node.value): node.slice.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
        }
        for node in ast.walk(tree):
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if not called or node.func.attr != "call" or not node.args:  # type: ignore[attr-defined]
                continue
            assert isinstance(node, ast.Call)
            given = {word.arg: word.value for word in node.keywords}
            field = fields.get(id(node))
            for method in names(node.args[0], constants(tree)):
                yield Site(
                    f"{module}:{node.lineno}",
                    method,
                    frozenset(name for name in given if name is not None),
                    tuple(
                        (name, value.value)
                        for name, value in given.items()
                        if name is not None and isinstance(value, ast.Constant)
                    ),
                    field if isinstance(field, str) else None,
                )


SITES = list(sites())


def test_they_are_found() -> None:
    assert len(SITES) > 50
    assert {site.where.split(":")[0] for site in SITES} >= {
        "pydataplane.domain.reconcile",
        "pydataplane.domain.missing",
        "csi.vhostcontroller",
        "pydataplane.volumes",
    }


@pytest.mark.parametrize("site", SITES, ids=lambda site: f"{site.where}-{site.method}")
def test_a_call_is_one_of_the_schemas(site: Site) -> None:
    assert site.method in methods(), "no such method"
    schema = methods()[site.method]
    properties, required = schema["params"].get("properties", {}), schema["params"].get("required")
    assert site.params <= properties.keys(), "no such parameter"
    assert site.params >= set(required or ()), "a parameter is missing"
    for name, value in site.literals:
        kinds = properties[name]["type"]
        kinds = [kinds] if isinstance(kinds, str) else kinds
        allowed = tuple(TYPES[kind] for kind in kinds if kind in TYPES)
        assert value is None or isinstance(value, allowed), f"{name}={value!r}"
    if site.field is not None and schema["result"].get("type") == "object":
        assert site.field in schema["result"]["properties"], "no such field of the result"


def test_the_fakes_take_what_the_target_takes() -> None:
    check_params("bdev_get_bdevs", {"name": "x"})
    for method, params in (
        ("bdev_get_bdev", {}),
        ("bdev_get_bdevs", {"nam": "x"}),
        ("bdev_get_bdevs", {"name": 1}),
        ("bdev_lvol_create", {"lvol_name": "x"}),
    ):
        with pytest.raises(AssertionError):
            check_params(method, params)
