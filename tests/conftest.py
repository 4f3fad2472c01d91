"""How tests run everywhere.

Property tests take the same examples each time, without a clock. `HYPOTHESIS_PROFILE=random`
searches with new examples at each run, and remembers what failed.

`pytest -n 2 --dist loadscope --no-loadscope-reorder`, as `make test` does, lets two files run at a
time; those on Kubernetes share a cluster, so they stay together, and come first as they take most.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

KUBERNETES = "tests/kubernetes/"

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
        return KUBERNETES if nodeid.startswith(KUBERNETES) else nodeid.split("::", 1)[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Groups:
    """Distributes tests by file."""
    return Groups(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts those on Kubernetes first."""
    items.sort(key=lambda item: not item.nodeid.startswith(KUBERNETES))
