"""The main job with plain virsh, real libvirtd, real QEMU and a real guest, step by step.

The steps stand in tests/demo/steps.py with their assertions; each needs the one before it.
"""

from __future__ import annotations

import pytest

from tests.demo.steps import STEPS, Step, Story
from tests.support.host import Host


@pytest.fixture(scope="module")
def story(host: Host) -> Story:
    return Story(host)


@pytest.mark.root
@pytest.mark.vm
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_step(story: Story, step: Step) -> None:
    assert step(story)
