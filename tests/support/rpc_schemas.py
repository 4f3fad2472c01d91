"""schemas/rpc, for the fakes of a target: they take what a real target takes, and no more."""

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


@cache
def _validator(method: str) -> Any:
    return Draft202012Validator(methods()[method]["params"])


def check_params(method: str, params: dict[str, Any]) -> None:
    """Checks the parameters of a call as the target does.

    Raises:
        AssertionError: there is no such method, or it does not take them.
    """
    assert method in methods(), f"the target has no method {method}"
    for error in _validator(method).iter_errors(params):
        raise AssertionError(f"{method}: {error.json_path}: {error.message}")
