"""How tests run everywhere.

Property tests take the same examples each time, without a clock. `HYPOTHESIS_PROFILE=random`
searches with new examples at each run, and remembers what failed.

`pytest -n 4 --dist loadscope --no-loadscope-reorder`, as `make test` does, lets four files run at
a time. Those on Kubernetes share a cluster, so they stay together, in three parts as they take
most: virtual machines, crashes of theirs, and what needs none. They come first.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

KUBERNETES = "tests/kubernetes/"
#: Of one scope each; the first that fits.
PARTS = (
    f"{KUBERNETES}test_kubevirt_crashes",
    f"{KUBERNETES}test_kubevirt",
    KUBERNETES,
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


class Groups(LoadScopeScheduling):  # type: ignore[misc]
    """What stays together where several tests run at a time."""

    def _split_scope(self, nodeid: str) -> str:
        for part in PARTS:
            if nodeid.startswith(part):
                return part
        return nodeid.split("::", 1)[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Groups:
    """Distributes tests by file."""
    return Groups(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out those of the night, and puts those on Kubernetes first."""
    if "nightly" not in config.getoption("markexpr"):
        nightly = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=nightly)
        items[:] = [item for item in items if item not in nightly]
    items.sort(key=lambda item: not item.nodeid.startswith(KUBERNETES))
