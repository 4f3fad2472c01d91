"""Several images of Ceph in one call: snapshots of one instant, and ways back."""

from __future__ import annotations

import json
from typing import Any

from tests.support.ceph import POOL, Ceph

TAKE, GO_BACK = "virtlun_lvol_snapshot_together", "virtlun_lvol_roll_back_together"


def wanted(snapshot: str, *images: str) -> dict[str, Any]:
    """Returns the parameters of TAKE."""
    return {
        "snapshots": [
            {"lvol_name": f"ceph0/{image}", "snapshot_name": f"{image}@{snapshot}"}
            for image in images
        ]
    }


def back(snapshot: str, *images: str) -> dict[str, Any]:
    """Returns the parameters of GO_BACK."""
    return {
        "rollbacks": [
            {"lvol_name": f"ceph0/{image}", "snapshot_name": f"ceph0/{image}@{snapshot}"}
            for image in images
        ]
    }


def identity(ceph: Ceph, image: str) -> str:
    """Returns what Ceph knows an image by."""
    told: str = json.loads(ceph.rbd("info", "--format", "json", f"{POOL}/{image}"))["id"]
    return told


def begin_rollback(ceph: Ceph, snapshot: str, *images: str, decided: bool, token: str) -> None:
    """Leaves what a host leaves that ends before it has copied anything of the images."""
    ids = [identity(ceph, image) for image in images]
    for number, image in enumerate(images):
        others = ids[1:] if decided and number == 0 else None
        mark = {"token": token, "first": ids[0], "snapshot": snapshot, "others": others}
        key = f"virtlun.rollback.{ids[number]}"
        ceph.rbd("image-meta", "set", f"{POOL}/{image}", key, json.dumps(mark))


def cut_off_rollback(ceph: Ceph, image: str, snapshot: str) -> None:
    """Leaves the object map that librbd leaves when it ends before it has rolled back an object."""
    listed = json.loads(ceph.rbd("snap", "ls", "--format", "json", f"{POOL}/{image}"))
    (number,) = (each["id"] for each in listed if each["name"] == snapshot)
    own = f"rbd_object_map.{identity(ceph, image)}"
    file = ceph.directory / "object-map"
    maps = []
    for name in (own, f"{own}.{number:016x}"):
        ceph.run("rados", "-p", POOL, "get", name, str(file))
        maps.append(file.read_bytes())
    assert maps[0] != maps[1], f"{image} has the objects of {snapshot}"
    ceph.run("rados", "-p", POOL, "put", own, str(file))
