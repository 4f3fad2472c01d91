"""The table of the calls that the gateway looks into: complete, and each right set on purpose."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

from plugin.gateway import handlers
from plugin.gateway.handlers import attach, block, unsupported
from plugin.gateway.procedures import _ROWS, PROCEDURES, SMALL, Access, By
from plugin.gateway.procs import Proc

CHANGING = ("SET_", "DEFINE", "CREATE", "ATTACH", "DETACH", "UPDATE", "RESIZE", "RESTORE", "SAVE_")
ASKING = ("GET_", "REGISTER_ANY", "DEREGISTER_ANY")


def test_each_call_has_one_row() -> None:
    assert len(PROCEDURES) == len(_ROWS)


def test_each_handler_has_a_call() -> None:
    """A public coroutine function of a handler module that takes a call alone."""
    used = {row.handler for row in _ROWS}
    for info in pkgutil.iter_modules(handlers.__path__):
        module = importlib.import_module(f"{handlers.__name__}.{info.name}")
        for name, function in inspect.getmembers(module, inspect.iscoroutinefunction):
            parameters = list(inspect.signature(function).parameters)
            ours = function.__module__ == module.__name__ and not name.startswith("_")
            if ours and parameters == ["call"]:
                assert function in used, f"{module.__name__}.{name}"


def test_what_changes_something_needs_a_read_write_connection() -> None:
    for row in _ROWS:
        name = row.proc.name.replace("DEFINED", "")
        if row.proc is Proc.SET_IDENTITY or name.endswith("GET_XML_DESC"):
            assert row.access is Access.READ, name
        elif any(part in name for part in CHANGING):
            assert row.access is Access.WRITE, name
        elif any(part in name for part in ASKING):
            assert row.access is Access.READ, name


def test_a_call_with_xml_may_be_as_long_as_xml() -> None:
    for row in _ROWS:
        if row.handler in (attach.attach, attach.detach, attach.update):
            assert row.max_bytes > SMALL, row.proc.name


def test_what_is_not_possible_is_answered_by_nobody() -> None:
    for row in _ROWS:
        if row.handler.__module__ == unsupported.__name__:
            assert row.by is By.NOBODY, row.proc.name
        elif row.handler.__module__ == block.__name__:
            assert row.by is By.GATEWAY, row.proc.name
