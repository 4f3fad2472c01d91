"""What there is of virtual machines' storage, everywhere that something could be left behind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.kubernetes.driver import Deployment
from tests.support.wait import until

FINALIZER = "virtlun.dev/"
VM_VOLUMES = "vmvolumes.virtlun.dev"
INSTANCES = "virtualmachineinstances.kubevirt.io"


@dataclass(frozen=True)
class MachineCensus:
    """By name; `Deployment.census` has volumes, exports, loops and mounts."""

    controllers: tuple[str, ...]
    luns: tuple[str, ...]
    folders: tuple[str, ...]
    parked: tuple[str, ...]
    vm_volumes: tuple[str, ...]
    instances: tuple[str, ...]
    finalizers: tuple[str, ...]
    """Objects that hold one of ours."""


NOTHING = MachineCensus((), (), (), (), (), (), ())


def census(deployment: Deployment) -> MachineCensus:
    """Counts it."""
    cluster = deployment.cluster
    controllers = deployment.client.call("vhost_get_controllers")
    installed = cluster.kinds()
    kinds = ("persistentvolumeclaims", "pods", VM_VOLUMES, INSTANCES)
    assert installed.issuperset(kinds[:2]), installed
    objects = {
        kind: cluster.items(kind, "--all-namespaces") if kind in installed else [] for kind in kinds
    }
    held = [
        f"{kind}/{one['metadata']['name']}"
        for kind, found in objects.items()
        for one in found
        if any(FINALIZER in name for name in one["metadata"].get("finalizers", []))
    ]
    folder = deployment.run_dir / "vhost"
    return MachineCensus(
        controllers=tuple(sorted(str(one["ctrlr"]) for one in controllers)),
        luns=luns(deployment),
        folders=tuple(sorted(path.name for path in folder.iterdir())),
        parked=parked(deployment),
        vm_volumes=_names(objects[VM_VOLUMES]),
        instances=_names(objects[INSTANCES]),
        finalizers=tuple(sorted(held)),
    )


def luns(deployment: Deployment) -> tuple[str, ...]:
    """Returns the volumes that are LUNs, as the target says at this moment."""
    return tuple(
        sorted(
            str(lun["bdev_name"])
            for one in deployment.client.call("vhost_get_controllers")
            for target in one["backend_specific"].get("scsi", ())
            for lun in target["luns"]
        )
    )


def parked(deployment: Deployment) -> tuple[str, ...]:
    """Returns the volumes whose exports are parked, as the target says at this moment."""
    found = deployment.client.call("virtlun_export_list")
    return tuple(sorted(str(one["bdev_name"]) for one in found if one["parked"]))


def wait_nothing(deployment: Deployment, deadline_s: float = 60.0) -> None:
    """Waits until nothing of any machine is left; AssertionError with what is."""
    until(
        lambda: census(deployment) == NOTHING,
        lambda: f"nothing left; left: {census(deployment)}",
        deadline_s,
        0.2,
    )


def _names(items: list[dict[str, Any]]) -> tuple[str, ...]:
    return tuple(sorted(str(item["metadata"]["name"]) for item in items))
