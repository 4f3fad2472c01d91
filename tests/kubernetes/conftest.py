"""One cluster for this folder's tests, and our driver on it for those who ask.

A worker of several ends it with the last of them that it has, and not at the end of the run: an
idle cluster takes a gigabyte.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from functools import cache

import pytest

from tests.kubernetes.account import NAMESPACE
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.driver import LEASE, Deployment
from tests.kubernetes.kubevirt.installed import installed
from tests.kubernetes.kubevirt.simulator import KubeVirt
from tests.kubernetes.left import CONVERGE_S, wait_nothing
from tests.kubernetes.tools import Tools, ToolsError, build


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test of this folder, so that `-m` can choose them."""
    for item in items:
        if "tests/kubernetes/" in item.path.as_posix():
            item.add_marker(pytest.mark.kubernetes)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    """Builds the programs where they are not there, before the time of a test of them runs."""
    if "tools" in getattr(item, "fixturenames", ()):
        built()
    return (yield)


@cache
def built() -> Tools | ToolsError:
    """Returns the programs, or why they could not be built: that is tried once."""
    try:
        return build()
    except ToolsError as error:
        return error


@pytest.fixture(scope="session")
def tools() -> Tools:
    """The programs."""
    found = built()
    if isinstance(found, ToolsError):
        raise found
    return found


@pytest.fixture(scope="package")
def cluster(tools: Tools, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A running cluster of one node, without our driver until `deployment` is asked for."""
    with Cluster(tools=tools) as running:
        yield running
        running.keep = request.session.testsfailed > 0


@pytest.fixture(scope="package")
def deployment(cluster: Cluster) -> Iterator[Deployment]:
    """Our driver on it."""
    with Deployment(cluster) as running:
        yield running


@pytest.fixture(scope="module")
def second(cluster: Cluster, deployment: Deployment) -> Iterator[Deployment]:
    """Our driver on a second node, which is there for the tests of one module.

    With two of them, one is elected for growth: `Deployment.leads`.
    """
    assert deployment.cluster is cluster
    node = cluster.add_node()
    with Deployment(cluster, node=node) as running:
        yield running
        running.sweep()
        running.wait_clean()
        led = running.leads()
    ours = f"csi.storage.k8s.io/managed-by=external-provisioner-{node.name}"
    cluster.kubectl("delete", "csistoragecapacities", "-n", NAMESPACE, "-l", ours)
    if led:
        cluster.kubectl("delete", "lease", LEASE, "-n", NAMESPACE)
    cluster.remove_node(node)


@pytest.fixture
def nothing_left(deployment: Deployment) -> Iterator[None]:
    """Nothing is there before a test, and nothing after it."""
    wait_nothing(deployment)
    yield
    deployment.sweep()
    wait_nothing(deployment)


@pytest.fixture
def nothing_left_on_both(deployment: Deployment, second: Deployment) -> Iterator[None]:
    """Nothing is there before a test, and nothing after it, on both nodes."""
    for each in (deployment, second):
        each.wait_ready()
        wait_nothing(each)
    yield
    deployment.sweep()
    for each in (deployment, second):
        each.wait_ready()
        wait_nothing(each, CONVERGE_S)


@pytest.fixture(scope="module")
def kubevirt(cluster: Cluster, deployment: Deployment) -> Iterator[KubeVirt]:
    """KubeVirt with our plugin, for the tests of one module."""
    made = KubeVirt(cluster, deployment)
    with installed(deployment):
        yield made
