"""How tests run everywhere.

Property tests take the same examples each time, without a clock. `HYPOTHESIS_PROFILE=random`
searches with new examples at each run, and remembers what failed.

`pytest -n 2 --dist loadgroup --no-loadscope-reorder`, as `make test` does, lets two files run at a
time; those on Kubernetes share a cluster, so they stay together, and come first as they take most.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "same",
    derandomize=True,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Says which tests stay together where several run at a time."""
    for item in items:
        group = "kubernetes" if _on_kubernetes(item) else item.path.as_posix()
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: not _on_kubernetes(item))


def _on_kubernetes(item: pytest.Item) -> bool:
    return "tests/kubernetes/" in item.path.as_posix()
