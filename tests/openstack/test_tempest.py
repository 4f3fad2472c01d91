"""OpenStack's own tests of volumes, against real Keystone, Glance and Cinder over a target.

They are Tempest's and those of cinder-tempest-plugin that no server is needed for.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml  # type: ignore[import-untyped]  # comes with lightkube

from tests.openstack.tempest.cloud import Cloud
from tests.openstack.tempest.program import Tempest
from tests.openstack.tempest.verdict import COUNTS, judge, not_begun, skips
from tests.support.scratch import short_directory

pytestmark = [pytest.mark.root, pytest.mark.nightly, pytest.mark.timeout(7200)]


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    with short_directory("vt-") as folder:
        cloud = Cloud(folder)
        yield cloud
        cloud.close()


def test_volumes(cloud: Cloud) -> None:
    tempest = Tempest(cloud)
    listed = skips()
    verdict = judge(tempest.tests(), tempest.run(not_begun(listed)), listed)
    print(yaml.safe_dump(verdict.counts(), sort_keys=False))
    assert not verdict.wrong, "\n".join(verdict.wrong)
    assert verdict.counts() == yaml.safe_load(COUNTS.read_text())
    assert cloud.volumes.volumes() == []
