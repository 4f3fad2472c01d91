"""The main job with SPDK's own target, but for what that has no method for."""

from __future__ import annotations

import re

import pytest

from tests.demo import steps
from tests.support import spdk_host
from tests.support.libvirtd import VirshError
from tests.support.spdk_host import SpdkHost

STEPS = (
    steps.create_volume,
    steps.define_domain,
    steps.start_domain,
    steps.attach_disk,
    steps.write_data,
    steps.resize,
    steps.block_info,
    steps.dump_xml,
    steps.detach_disk,
    steps.attach_again,
    steps.snapshot,
    steps.clone,
    steps.reboot,
)
TUNE = ("blkdeviotune", steps.GUEST, steps.DEV)


@pytest.mark.root
@pytest.mark.vm
@pytest.mark.nightly
def test_the_main_job_with_spdks_own_target() -> None:
    lacks = spdk_host.lacks()
    if lacks is not None:
        pytest.skip(lacks)
    with SpdkHost(keep=True) as host:
        story = steps.Story(host)
        for step in STEPS:
            assert step(story), step.__name__
        for limit in ("2000", "3000"):
            host.virsh(*TUNE, "--total-iops-sec", limit, "--live")
            assert f"total_iops_sec : {limit}" in host.virsh(*TUNE)
        with pytest.raises(VirshError, match="read_iops_sec: this target, which is SPDK's"):
            host.virsh(*TUNE, "--read-iops-sec", "1000", "--live")
        with pytest.raises(VirshError, match="have the method virtlun_lvol_snapshot_together"):
            host.virsh("snapshot-create-as", steps.GUEST, "s", "--disk-only")
        listed = steps.virtlun(story, "domain", "list", "--connect", host.uri)
        assert re.search(rf"{steps.GUEST} +running +{steps.DEV} +{steps.VOLUME} .*yes", listed), (
            listed
        )
        story.guest("umount /mnt")
        host.virsh("detach-disk", steps.GUEST, steps.DEV, "--live", "--config")
        assert steps.virtlun(story, "volume", "limits", steps.VOLUME) == ""
        host.virsh("destroy", steps.GUEST)
        assert host.client.call("vhost_get_controllers") == []
