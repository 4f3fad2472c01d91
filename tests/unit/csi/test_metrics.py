"""What the driver's metrics say of lvstores and pools of Ceph."""

from __future__ import annotations

from csi.metrics import VolumeCollector
from csi.targets import Targets
from csi.volumes import OwnedVolumes
from tests.support.fake_target import LVSTORE, LVSTORE_UUID, MIB
from tests.unit.csi.conftest import NODE, World


def test_what_each_node_tells_of_the_same_pool_has_the_pools_uuid(world: World) -> None:
    collector = VolumeCollector(OwnedVolumes(Targets([world.target]), NODE))

    def told(name: str) -> list[tuple[dict[str, str], float]]:
        samples = [each for metric in collector.collect() for each in metric.samples]
        return [(each.labels, each.value) for each in samples if each.name == name]

    total = world.target.mib * MIB
    assert told("virtlun_csi_lvstore_bytes") == [({"lvstore": LVSTORE}, total)]
    world.target.pools.add(LVSTORE)
    labels = {"lvstore": LVSTORE, "pool": LVSTORE_UUID}
    assert told("virtlun_csi_lvstore_bytes") == [(labels, total)]
    assert told("virtlun_csi_volumes") == [(labels, 0)]
