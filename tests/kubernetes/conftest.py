"""One cluster for the whole run, and our driver on it for those who ask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kubernetes.cluster import Cluster
from tests.kubernetes.driver import Deployment
from tests.kubernetes.tools import Tools, build


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test of this folder, so that `-m` can choose them."""
    for item in items:
        if "tests/kubernetes/" in item.path.as_posix():
            item.add_marker(pytest.mark.kubernetes)


@pytest.fixture(scope="session")
def tools() -> Tools:
    """The programs; built now where they are not there."""
    return build()


@pytest.fixture(scope="session")
def cluster(tools: Tools, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A running cluster of one node, without our driver until `deployment` is asked for."""
    with Cluster(tools=tools) as running:
        yield running
        running.keep = request.session.testsfailed > 0


@pytest.fixture(scope="session")
def deployment(cluster: Cluster) -> Iterator[Deployment]:
    """Our driver on it."""
    with Deployment(cluster) as running:
        yield running
