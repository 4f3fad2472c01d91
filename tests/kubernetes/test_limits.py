"""Limits of I/O by VolumeAttributesClasses, with the real csi-provisioner and csi-resizer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pydataplane.domain.limiting import found
from pydataplane.domain.limits import NONE, Limits
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.driver import Deployment
from tests.kubernetes.events import wait_event
from tests.kubernetes.test_volumes import example, volume_of
from tests.support.wait import until

pytestmark = pytest.mark.usefixtures("nothing_left")
MIB = 1 << 20
SILVER = Limits(
    total_iops_sec=500,
    total_iops_sec_max=2000,
    total_iops_sec_max_length=30,
    total_bytes_sec=100 * MIB,
)
GOLD = Limits(total_iops_sec=20_000, total_bytes_sec=500 * MIB)
CLASS = """\
apiVersion: storage.k8s.io/v1
kind: VolumeAttributesClass
metadata: {{name: {name}}}
driverName: csi.virtlun.dev
parameters: {parameters}
"""
FORGED = """\
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: forged}}
spec:
  accessModes: [ReadWriteOnce]
  storageClassName: forged
  volumeName: forged
  volumeAttributesClassName: virtlun-unlimited
  resources: {{requests: {{storage: 1Mi}}}}
---
apiVersion: v1
kind: PersistentVolume
metadata: {{name: forged}}
spec:
  accessModes: [ReadWriteOnce]
  storageClassName: forged
  volumeAttributesClassName: virtlun-unlimited
  capacity: {{storage: 1Mi}}
  claimRef: {{namespace: default, name: forged}}
  csi: {{driver: csi.virtlun.dev, volumeHandle: {handle}}}
  nodeAffinity:
    required:
      nodeSelectorTerms:
        - matchExpressions:
            - {{key: csi.virtlun.dev/pool-{pool}, operator: In, values: ["true"]}}
"""
"""What a node's credentials can make of any volume, and the claim that it is bound to."""


@pytest.fixture(scope="module", autouse=True)
def classes(cluster: Cluster, deployment: Deployment) -> Iterator[None]:
    """The classes of the example."""
    with cluster.applied(example("volumeattributesclasses")):
        yield


def limits(deployment: Deployment, claim: str) -> Limits:
    """Returns what the target limits a claim's volume to."""
    volume = volume_of(deployment.cluster, claim)
    return found(deployment.client, volume["spec"]["csi"]["volumeHandle"])


def ask(cluster: Cluster, claim: str, name: str) -> None:
    """Has a claim ask for a class."""
    cluster.patch("pvc", claim, {"spec": {"volumeAttributesClassName": name}})


def has(cluster: Cluster, claim: str, name: str) -> None:
    """Waits until a claim tells that it has a class."""
    cluster.wait(f"pvc/{claim}", f"jsonpath={{.status.currentVolumeAttributesClassName}}={name}")


def test_a_claim_goes_from_class_to_class(cluster: Cluster, deployment: Deployment) -> None:
    with cluster.applied(example("claim-limited")):
        cluster.wait_phase("pvc/limited", "Bound")
        assert limits(deployment, "limited") == SILVER
        ask(cluster, "limited", "virtlun-gold")
        has(cluster, "limited", "virtlun-gold")
        assert limits(deployment, "limited") == GOLD
        assert volume_of(cluster, "limited")["spec"]["volumeAttributesClassName"] == "virtlun-gold"
        with cluster.applied(CLASS.format(name="wrong", parameters='{rate: "7"}')):
            ask(cluster, "limited", "wrong")
            wait_event(cluster, "limited", "VolumeAttributesClass parameter rate is not known")
            assert limits(deployment, "limited") == GOLD
            handle = volume_of(cluster, "limited")["spec"]["csi"]["volumeHandle"]
            pool = f"{handle[:13]}-4000-8000-000000000000"
            with cluster.applied(FORGED.format(handle=handle, pool=pool)):
                cluster.wait_phase("pvc/forged", "Bound")
                ask(cluster, "forged", "virtlun-silver")
                wait_event(cluster, "forged", "PersistentVolume forged has no say in volume")
                assert limits(deployment, "limited") == GOLD
            ask(cluster, "limited", "virtlun-unlimited")
            has(cluster, "limited", "virtlun-unlimited")
        assert limits(deployment, "limited") == NONE
    until(lambda: deployment.census().lvols == (), "the volume to be deleted")
