"""How tests run everywhere.

Property tests take the same examples each time, without a clock. `HYPOTHESIS_PROFILE=random`
searches with new examples at each run, and remembers what failed.

`pytest -n 5 --dist loadscope --no-loadscope-reorder`, as `make test` does, lets five files run at
a time: they wait for guests and servers much of their time. A few that take longest come first, and
may be less or more than a file: see `PARTS`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from tests.support import clients, mounts
from tests.support.ceph_time import CephTime
from tests.support.ends import Ends
from tests.support.examples import Judge
from tests.support.night import Variants

KUBERNETES = "tests/kubernetes/"
EMPTY_CONTROLLERS = "tests/libvirt/test_empty_controllers.py"
MISSING_VOLUMES = "tests/libvirt/test_missing_volumes"
MIGRATIONS = "tests/guest/test_migration_many.py"
#: Folders whose tests keep the processors busy, with guests and what is built: the others' wait
#: much of their time, so both go on side by side.
BUSY = ("tests/guest/", "tests/kubernetes/", "tests/libvirt/", "tests/unit/")
#: Tests that stay together, by the beginnings of their names, those first that take longest; a test
#: is of the first that fits. Those on Kubernetes share their worker's cluster, which takes ten
#: seconds to start, a gigabyte, and a tenth of the inotify instances that a user may have: so one
#: worker has them all. The DaemonSet's has a cluster of its own, and comes before the other one.
PARTS = (
    (f"{KUBERNETES}test_kubevirt_crashes",),
    (f"{KUBERNETES}test_daemonset", KUBERNETES),
    (f"{EMPTY_CONTROLLERS}::test_a_saved_guest",),
    (f"{MISSING_VOLUMES}_killed",),
    (MISSING_VOLUMES,),
    (EMPTY_CONTROLLERS,),
    # By its name it would come last, alone, and compute for longer than any other there.
    ("tests/unit/vmvolume/test_decide",),
    # Of the night, half an hour each.
    (f"{MIGRATIONS}::test_without_any_device",),
    (MIGRATIONS,),
)

settings.register_profile(
    "same",
    derandomize=True,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


def pytest_configure(config: pytest.Config) -> None:
    """Tests have mounts of their own; a run of all fails where an example was left out."""
    # What a shell starts in the background ignores it, and tests interrupt themselves.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    mounts.have_own()
    config.pluginmanager.register(Judge(config), "examples")
    config.pluginmanager.register(Variants(), "variants")
    config.pluginmanager.register(CephTime(config), "ceph-time")
    config.pluginmanager.register(Ends(), "ends")


def pytest_report_header() -> str:
    """Says which programs of others are tried."""
    return clients.line()


@pytest.fixture(autouse=True)
def signals_as_found() -> Iterator[None]:
    """Fails a test that leaves handlers of signals behind: the next ones are not interrupted."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    after = [signal.getsignal(number) for number in numbers]
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    assert after == before, "this test left a handler of a signal behind"


def _part(nodeid: str) -> int:
    """Returns the number of a test's part of `PARTS`; its length for a test of none."""
    parts = enumerate(PARTS)
    return next((number for number, part in parts if nodeid.startswith(part)), len(PARTS))


def _place(nodeid: str) -> tuple[int, int]:
    """Returns a test's part, and which of the beginnings there is its own."""
    part = _part(nodeid)
    beginnings = enumerate(PARTS[part] if part < len(PARTS) else ())
    return part, next((number for number, one in beginnings if nodeid.startswith(one)), 0)


def _side_by_side(files: list[str]) -> dict[str, float]:
    """Returns where each file comes: those of `BUSY` folders and the others evenly mixed."""
    busy = [file for file in files if file.startswith(BUSY)]
    others = [file for file in files if not file.startswith(BUSY)]
    return {
        file: (nth + 0.5) / len(kind) for kind in (busy, others) for nth, file in enumerate(kind)
    }


class Groups(LoadScopeScheduling):  # type: ignore[misc]
    """What stays together where several tests run at a time."""

    def _split_scope(self, nodeid: str) -> str:
        part = _part(nodeid)
        return " ".join(PARTS[part]) if part < len(PARTS) else nodeid.split("::", 1)[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Groups:
    """Distributes tests by file."""
    return Groups(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out those of the night, and puts those first that take longest."""
    if "nightly" not in config.getoption("markexpr"):
        nightly = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=nightly)
        items[:] = [item for item in items if item not in nightly]
    files = list(dict.fromkeys(item.nodeid.split("::", 1)[0] for item in items))
    mixed = _side_by_side(files)
    items.sort(key=lambda item: (*_place(item.nodeid), mixed[item.nodeid.split("::", 1)[0]]))
