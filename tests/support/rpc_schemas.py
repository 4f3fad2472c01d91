"""schemas/rpc, for the fake of the target: it takes and answers what a real one does."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

ROOT = Path(__file__).parents[2]


@cache
def methods() -> dict[str, dict[str, Any]]:
    """Returns the schema of each method of the target."""
    files = (ROOT / "schemas/rpc").glob("*.json")
    return {file.stem: json.loads(file.read_text()) for file in files}


def strict(schema: Any) -> Any:
    """Returns a result's schema that allows no field which it does not name."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(value) for key, value in schema.items()}
    if schema.get("type") == "object" and "properties" in schema:
        closed.setdefault("additionalProperties", False)
    return closed


@cache
def _validator(method: str, part: str) -> Any:
    schema = methods()[method][part]
    return Draft202012Validator(strict(schema) if part == "result" else schema)


def check_params(method: str, params: dict[str, Any]) -> None:
    """Checks the parameters of a call as the target does.

    Raises:
        AssertionError: there is no such method, or it does not take them.
    """
    assert method in methods(), f"the target has no method {method}"
    _check(method, "params", params)


def check_result(method: str, result: Any) -> None:
    """Checks that a target answers this to a call, with no field that the schema does not name.

    Raises:
        AssertionError: it does not.
    """
    _check(method, "result", result)


def _check(method: str, part: str, value: Any) -> None:
    for error in _validator(method, part).iter_errors(value):
        raise AssertionError(f"{method}: {part}: {error.json_path}: {error.message}")
