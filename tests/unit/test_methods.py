"""The types of the target's JSON-RPC are those of schemas/rpc, and hold at each call of ours."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pydataplane import methods
from tests import methods as making
from tests.unit.test_structure import ROOT, modules

TYPED = """
from pydataplane.domain import reconcile
from pydataplane.methods import BatchRpc, Rpc

def calls(rpc: Rpc, many: BatchRpc, name: str | None) -> None:
    (bdev,) = rpc.call("bdev_get_bdevs", name=name)
    bdev["num_blocks"] + 1
    bdev["driver_specific"]["lvol"]
    rpc.call("bdev_get_iostat")["bdevs"][0]["name"]
    rpc.call("bdev_get_iostat", name="d0", per_channel=True)["channels"][0]["thread"]
    many.call_for_each("bdev_get_bdevs", ["a"], lambda each: {"name": each})["a"][0]["uuid"]

    rpc.call("bdev_get_bdev")  # wrong: method
    rpc.call("bdev_get_bdevs", nam="d0")  # wrong: parameter
    rpc.call("bdev_get_bdevs", name=1)  # wrong: its type
    rpc.call("bdev_uring_create", name="d0")  # wrong: one is missing
    rpc.call("spdk_kill_instance", sig_name="SIGKIL")  # wrong: not one of its values
    rpc.call("framework_wait_init", name="d0")  # wrong: it takes none
    bdev["size"]  # wrong: field
    bdev["num_blocks"] + "1"  # wrong: a field's type
    rpc.call("virtlun_get_status")["upgrade"]["from_pid"]  # wrong: it may be null
    rpc.call("bdev_get_iostat")["channels"]  # wrong: of the other form
    many.call_for_each("bdev_get_bdevs", ["a"], lambda each: {"nam": each})  # wrong: parameter
    reconcile.look_up(rpc, 1)  # wrong: that what calls is looked at, too
"""


def test_they_are_what_they_are_made_from() -> None:
    assert making.MADE.read_text() == making.made(), "write them anew: python -m tests.methods"


def test_wrong_calls_are_errors_of_the_type_check(tmp_path: Path) -> None:
    file = tmp_path / "calls.py"
    file.write_text(TYPED)
    command = [sys.executable, "-m", "mypy", "--strict", "--hide-error-context", "--no-pretty"]
    options = ["--config-file=", "--follow-imports=silent", f"--cache-dir={tmp_path / 'cache'}"]
    done = subprocess.run(
        [*command, *options, str(file)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    found = {int(line) for line in re.findall(r"calls\.py:(\d+): error:", done.stdout)}
    lines = TYPED.splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if "# wrong" in line}
    assert found == wrong, done.stdout + done.stderr


def test_the_types_are_those_of_the_classes_that_run() -> None:
    """A stub that has what the module has not would let a call pass that then fails."""
    stub = ast.parse(making.MADE.read_text())
    for node in stub.body:
        if isinstance(node, ast.ClassDef) and hasattr(methods, node.name):
            defined = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
            real = vars(getattr(methods, node.name))
            assert defined == {name for name in real if not name.startswith("_")}, node.name
    for name in ("Rpc", "BatchRpc"):
        assert any(isinstance(node, ast.ClassDef) and node.name == name for node in stub.body)


def test_every_call_of_ours_is_typed() -> None:
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("call_raw", "call_for_each_raw"):
                assert name == "pydataplane.methods", f"{name}:{node.lineno} calls past the types"


def test_an_object_without_a_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    named = making.NAMES
    names = dict(named)
    del names["bdev_get_bdevs[].assigned_rate_limits"]
    monkeypatch.setattr(making, "NAMES", names)
    with pytest.raises(ValueError, match="give it one"):
        making.made()
    monkeypatch.setattr(making, "NAMES", named | {"gone[]": "Gone"})
    with pytest.raises(ValueError, match="no schema has"):
        making.made()
