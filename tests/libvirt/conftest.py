"""A host for the tests of one module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.host import Host, is_root


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """A private libvirtd, target and gateway; the module's tests share it."""
    if not is_root():
        pytest.fail("tests/libvirt need root: they run a libvirtd in a mount namespace")
    with Host(keep=True) as running:
        yield running
