"""Which examples a run of tests has used as they stand; one that nobody used fails the run.

A manifest is used when the API server has taken each of its objects, unchanged and not as a dry
run; one that names a node or an authority, and any other file, when a test says so that runs it, by
`used`. A run of some tests is not judged:
see `PARTS`. Workers of pytest-xdist hand on what they saw.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
MANIFESTS = sorted((EXAMPLES / "kubernetes").rglob("*.yaml"))
COMMANDS = sorted((EXAMPLES / "kubernetes").rglob("README.md"))
PARTS: tuple[tuple[tuple[str, ...], Callable[[Path], bool]], ...] = (
    (("tests/kubernetes",), lambda path: path in MANIFESTS + COMMANDS),
    (("tests/unit", "tests/libvirt"), lambda path: path not in MANIFESTS + COMMANDS),
)
"""Folders of tests, and the examples that these use: judged where all tests there have run."""
OF_THE_NIGHT = frozenset(
    EXAMPLES / "kubernetes" / name
    for name in (
        "README.md",
        "ceph/README.md",
        "ceph/pod.yaml",
        "ceph/pods-shared-block.yaml",
        "ceph/storageclass.yaml",
        "ceph/target.patch.yaml",
        "daemonset.yaml",  # by day its containers run, without a kubelet that starts them
        "groupsnapshots.yaml",
        "kubevirt/README.md",
        "kubevirt/claim.yaml",
        "kubevirt/vm.yaml",
        "kubevirt/vm-legacy.yaml",
        "kubevirt/vmvolume.yaml",
        "pods-shared-block.yaml",
        "snapshotmetadata.yaml",
        "snapshotmetadata-sidecar.yaml",
    )
)
"""Those that only tests of the night use: not judged where these are left out."""

LEFT = "examples/left"
"""What a run left out, in pytest's cache: for who runs its failed tests again (tests/again.py)."""

_used: set[str] = set()
_applied: set[str] = set()


def used(path: Path) -> Path:
    """Notes that a test uses an example as it stands; returns its path."""
    _used.add(_name(path))
    return path


def applied(given: dict[str, Any]) -> None:
    """Notes that the API server has taken an object, in full."""
    _applied.add(_digest(given))


def _name(path: Path) -> str:
    return str(path.relative_to(EXAMPLES))


def _digest(given: object) -> str:
    return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()


def _is_used(path: Path) -> bool:
    if path not in MANIFESTS or _name(path) in _used:
        return _name(path) in _used
    parts = [given for given in yaml.safe_load_all(path.read_text()) if given]
    # A patch is a list, and nothing to apply.
    return all(isinstance(given, dict) and _digest(given) in _applied for given in parts)


def unused(folders: frozenset[str], *, by_night: bool) -> list[str]:
    """Returns the examples that nobody used, of those that the tests in these folders are for."""
    there = sorted(path for path in EXAMPLES.rglob("*") if path.is_file())
    left_out = frozenset() if by_night else OF_THE_NIGHT
    return [
        _name(path)
        for path in there
        if path not in left_out
        and any(folders.issuperset(part) and theirs(path) for part, theirs in PARTS)
        and not _is_used(path)
    ]


class Judge:
    """A plugin of pytest: fails a run that left an example out, and names it in the end."""

    def __init__(self, config: pytest.Config) -> None:
        """Judges nothing of a run that names single tests."""
        self._config = config
        self._partly = any("::" in word for word in config.args)
        self._by_night = True
        self._files: set[str] = set()
        self._left: list[str] = []

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Takes the file of each test, also where it is left out afterwards."""
        self._files.add(str(item.path))

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """A run without some of the tests is one of some tests, but for those of the night."""
        for item in items:
            if item.get_closest_marker("nightly"):
                self._by_night = False
            else:
                self._partly = True

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Takes what a worker saw; one that crashed has failed its test."""
        told = getattr(node, "workeroutput", {}).get("examples")
        if told is None:
            self._partly = True
            return
        self._partly = self._partly or told["partly"]
        self._by_night = self._by_night and told["by_night"]
        self._files.update(told["files"])
        _used.update(told["used"])
        _applied.update(told["applied"])

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Judges; a worker tells instead."""
        told = getattr(self._config, "workeroutput", None)
        if told is not None:
            told["examples"] = {
                "partly": self._partly,
                "by_night": self._by_night,
                "files": sorted(self._files),
                "used": sorted(_used),
                "applied": sorted(_applied),
            }
        elif exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not self._partly:
            # Said beside failed tests, too: they may have kept an example from its use, or not.
            self._left = unused(self._whole(), by_night=self._by_night)
            if self._left:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
                if (cache := getattr(session.config, "cache", None)) is not None:
                    cache.set(LEFT, self._left)

    def _whole(self) -> frozenset[str]:
        """Returns the folders of `PARTS` all of whose tests have run."""
        folders = {folder for part, _ in PARTS for folder in part}
        return frozenset(
            folder
            for folder in folders
            if self._files.issuperset(str(path) for path in (ROOT / folder).rglob("test_*.py"))
        )

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Names them."""
        if self._left:
            terminalreporter.section("examples that no test used as they stand", red=True)
            for name in self._left:
                terminalreporter.line(f"examples/{name}")
