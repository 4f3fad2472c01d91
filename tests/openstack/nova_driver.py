"""Nova's own libvirt driver, which does what a test says; run by a Python that has Nova.

    python nova_driver.py NOVA.CONF UUID IMAGE-PROPERTIES

Each line of its input is a call of the driver, `{"call": NAME, "words": [...]}`, and each line of
its output what became of it: `{"raised": CLASS or null, "said": TEXT, "cinder": STATUSES, "made":
RESULT}`.
Driver, configuration, volume drivers, libvirt-python and its events are the real ones. Cinder,
Glance and Neutron are mocks, and there is no database: the instance is an object made here.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["OS_NOVA_DISABLE_EVENTLET_PATCHING"] = "true"

import nova.conf
from nova import context as contexts
from nova import objects
from nova.compute import api as apis
from nova.virt import fake
from nova.virt.libvirt import driver as drivers


class Compute:
    """A driver and an instance; each public method is a call."""

    def __init__(self, uuid: str, properties: dict[str, str]) -> None:
        """Connects to libvirt as `nova.conf` says, for the domain that has `uuid`."""
        self._context = contexts.RequestContext("user", "project")
        self._driver = drivers.LibvirtDriver(fake.FakeVirtAPI())
        self._driver._set_host_enabled = mock.Mock()  # of the database
        self._driver._build_device_metadata = mock.Mock(return_value=None)  # of the database
        self._driver._host.initialize()
        self.cinder = self._driver._volume_api
        self.cinder.get_volume_encryption_metadata.return_value = {}
        self.cinder.get_snapshot.return_value = {"status": "available"}
        self._instance = objects.Instance(
            id=1, uuid=uuid, project_id="project", user_id="user", device_metadata=None
        )
        self._instance.system_metadata = {f"image_{k}": v for k, v in properties.items()}
        self._instance.obj_reset_changes()

    def attach(self, connection: dict[str, Any], dev: str, bus: str) -> None:
        """Attaches a volume."""
        self._driver.attach_volume(
            self._context, connection, self._instance, f"/dev/{dev}", disk_bus=bus
        )

    def detach(self, connection: dict[str, Any], dev: str) -> None:
        """Detaches it."""
        self._driver.detach_volume(self._context, connection, self._instance, f"/dev/{dev}")

    def extend(self, connection: dict[str, Any], size: int) -> None:
        """Has the guest see a volume's new size, in bytes."""
        self._driver.extend_volume(self._context, connection, self._instance, size)

    def swap(self, old: dict[str, Any], new: dict[str, Any], dev: str) -> None:
        """Replaces a volume by another one, as a retype of a volume in use does."""
        self._driver.swap_volume(self._context, old, new, self._instance, f"/dev/{dev}", 0)

    def quiesce(self) -> None:
        """Freezes the file systems, as before Cinder's snapshots of volumes."""
        self._driver.quiesce(self._context, self._instance, self._instance.image_meta)

    def unquiesce(self) -> None:
        """Thaws them."""
        self._driver.unquiesce(self._context, self._instance, self._instance.image_meta)

    def snapshot(self) -> None:
        """Makes an image of the first disk, as of an instance that boots from an image."""
        self._driver.snapshot(self._context, self._instance, "image", mock.Mock())

    def image_of_volumes(self, volume: str, snapshot: list[str]) -> dict[str, Any]:
        """Makes an image of an instance that boots from a volume, as Nova's API does.

        `snapshot` is the command that stands for Cinder's snapshot. Returns the image's properties.
        """
        api = object.__new__(apis.API)
        api.volume_api, api.image_api, api.compute_rpcapi = self.cinder, mock.Mock(), mock.Mock()
        api.compute_rpcapi.quiesce_instance = lambda *_: self.quiesce()
        api.compute_rpcapi.unquiesce_instance = lambda *_, **__: self.unquiesce()
        self.cinder.get_absolute_limits.return_value = {
            "totalSnapshotsUsed": 0,
            "maxTotalSnapshots": -1,
        }
        self.cinder.get.return_value = {"id": volume, "display_description": ""}

        def take(*_: Any) -> dict[str, str]:
            subprocess.run(snapshot, check=True, stdout=subprocess.DEVNULL)
            return {"id": f"snapshot-of-{volume}"}

        self.cinder.create_snapshot_force.side_effect = take
        root = objects.BlockDeviceMapping(
            self._context,
            source_type="volume",
            destination_type="volume",
            volume_id=volume,
            boot_index=0,
            disk_bus="scsi",
            device_type="disk",
            no_device=False,
            delete_on_termination=False,
        )
        for name, field in root.fields.items():  # what else the database has of it
            if field.nullable and not root.obj_attr_is_set(name):
                setattr(root, name, None)
        self._instance.vm_state, self._instance.task_state = "active", None
        self._instance.display_name, self._instance.launched_at = "instance", datetime.now(UTC)
        get = mock.Mock(return_value=[root])
        with (
            mock.patch.object(objects.BlockDeviceMappingList, "get_by_instance_uuid", get),
            mock.patch.object(objects, "InstanceAction"),
            mock.patch.object(objects, "InstanceActionEvent"),
        ):
            api.snapshot_volume_backed(self._context, self._instance, "image")
        made: dict[str, Any] = api.image_api.create.call_args.args[1]["properties"]
        return {name: made[name] for name in ("bdm_v2", "block_device_mapping")}

    def volume_snapshot_create(self, volume: str, file: str) -> None:
        """Takes a snapshot for Cinder, into `file` beside the volume."""
        info = {"type": "qcow2", "snapshot_id": "snapshot", "new_file": file}
        self._driver.volume_snapshot_create(self._context, self._instance, volume, info)

    def volume_snapshot_delete(self, volume: str, merge: str | None, into: str | None) -> None:
        """Merges a snapshot for Cinder: `merge` into the file `into`, None: into the disk."""
        info = {"type": "qcow2", "file_to_merge": merge, "merge_target_file": into}
        self._driver.volume_snapshot_delete(self._context, self._instance, volume, "snapshot", info)


def _no_database(instance: Any, name: str) -> None:
    """Stands for the database: what an instance has not been given, it has not."""
    setattr(instance, name, None)


def _answer(compute: Compute, call: Callable[..., Any], words: list[Any]) -> dict[str, Any]:
    """Returns what became of one call."""
    update = compute.cinder.update_snapshot_status
    update.reset_mock()
    raised, said, made = None, "", None
    try:
        made = call(*words)
    except Exception as error:
        raised, said = type(error).__name__, str(error)
    statuses = [each.args[-1] for each in update.call_args_list]
    return {"raised": raised, "said": said, "cinder": statuses, "made": made}


def main() -> None:
    """Does what is asked, until the end of input."""
    config, uuid, properties = sys.argv[1:]
    logging.basicConfig(filename=Path(config).with_suffix(".log"), level=logging.INFO)
    nova.conf.CONF([], project="nova", default_config_files=[config])
    objects.register_all()
    get_bdm = "nova.objects.BlockDeviceMapping.get_by_volume_and_instance"
    with (
        mock.patch("nova.volume.cinder.API"),
        mock.patch("nova.image.glance.API"),
        mock.patch("nova.network.neutron.API"),
        mock.patch("nova.objects.Instance.save"),
        mock.patch("nova.objects.Instance.obj_load_attr", _no_database),
        mock.patch(get_bdm),
        mock.patch("nova.virt.block_device.convert_volume", return_value=None),
    ):
        compute = Compute(uuid, json.loads(properties))
        print("{}", flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            answer = _answer(compute, getattr(compute, asked["call"]), asked["words"])
            print(json.dumps(answer), flush=True)
        os._exit(0)  # threads that wait for libvirt's events do not end


if __name__ == "__main__":
    main()
