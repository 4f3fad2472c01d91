"""What the driver tells of a volume that is out of order, over doubles of target and host."""

from __future__ import annotations

import pytest

from csi.errors import Code
from csi.proto import csi_pb2 as pb
from pydataplane.errors import TargetUnavailable
from tests.unit.csi.conftest import World, refused


def told(world: World, handle: str) -> list[tuple[int, str]]:
    """Returns kind and reason of each entry."""
    request = pb.NodeGetVolumeHealthRequest(volume_id=handle)
    health = world.node.node_get_volume_health(request).volume_health
    assert health.volume_id == handle
    assert all(each.message for each in health.health_statuses)
    return [(each.status, each.reason) for each in health.health_statuses]


def test_a_volume_that_is_well(world: World) -> None:
    handle = world.create().volume_id
    assert told(world, handle) == []
    world.stage(handle)
    assert told(world, handle) == []


@pytest.mark.parametrize(
    ("survives", "reason"), [("restart", "NoCrashRecovery"), ("nothing", "NoHolder")]
)
def test_what_a_crash_of_its_target_would_end(world: World, survives: str, reason: str) -> None:
    handle = world.create().volume_id
    world.stage(handle)
    world.target.survives = survives
    assert told(world, handle) == [(pb.DEGRADED, reason)]


def test_a_failed_flush_of_the_disk_below(world: World) -> None:
    handle = world.create().volume_id
    world.stage(handle)
    world.target.flush_error = "a flush failed 3 s ago"
    assert told(world, handle) == [(pb.DATA_LOSS, "FlushFailed")]
    world.target.survives = "nothing"
    assert told(world, handle) == [(pb.DATA_LOSS, "FlushFailed"), (pb.DEGRADED, "NoHolder")]
    world.target.flush_error = None
    assert told(world, handle) == [(pb.DEGRADED, "NoHolder")]


def test_a_volume_of_the_vhost_face(world: World) -> None:
    handle = world.create(parameters={"face": "vhost"}).volume_id
    world.stage(handle)
    world.publish(handle)
    assert told(world, handle) == []
    world.target.flush_error = "a flush failed 3 s ago"
    assert told(world, handle) == [(pb.DATA_LOSS, "FlushFailed")]
    world.target.flush_error = None
    assert told(world, handle) == []
    world.target.vhost_delete_controller(f"csi-{handle}")
    assert told(world, handle) == [(pb.INACCESSIBLE, "NoController")]


def test_a_target_that_is_away_is_told_without_looking_at_the_device(world: World) -> None:
    handle = world.create().volume_id
    world.stage(handle)
    world.host.dead.add(handle)
    world.target.fail["virtlun_export_list"] = TargetUnavailable("no target answers")
    assert told(world, handle) == [(pb.INACCESSIBLE, "TargetAway")]
    assert told(world, handle) == [(pb.INACCESSIBLE, "DeviceDead")]
    world.target.exports.clear()
    assert told(world, handle) == [(pb.INACCESSIBLE, "NotExported")]


def test_a_volume_that_is_not_here(world: World) -> None:
    nowhere = "33333333-3333-4333-8333-333333333333"
    request = pb.NodeGetVolumeHealthRequest(volume_id=nowhere)
    refused(lambda: world.node.node_get_volume_health(request), Code.NOT_FOUND)
    empty = pb.NodeGetVolumeHealthRequest()
    refused(lambda: world.node.node_get_volume_health(empty), Code.INVALID_ARGUMENT)
