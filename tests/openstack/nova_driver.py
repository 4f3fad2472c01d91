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
import threading
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
from nova.network import model
from nova.virt import driver as virt
from nova.virt import fake
from nova.virt.libvirt import driver as drivers


class Migration:
    """A live migration that is under way: what its thread came to."""

    def __init__(self, begin: Callable[[Migration], None]) -> None:
        """Begins it; `begin` returns when it is over."""
        self.called: list[str] = []
        self.raised: str | None = None
        self._begin = begin
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._begin(self)
        except Exception as error:
            self.raised = f"{type(error).__name__}: {error}"

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return not self._thread.is_alive()

    def end(self) -> dict[str, Any]:
        """Waits for its end; returns which of both methods Nova called, and what was raised."""
        self._thread.join()
        return {"called": self.called, "raised": self.raised}


class Compute:
    """A driver and an instance; each public method is a call."""

    def __init__(self, uuid: str, properties: dict[str, str]) -> None:
        """Connects to libvirt as `nova.conf` says, for the domain that has `uuid`."""
        self._context = contexts.RequestContext("user", "project")
        self._driver = drivers.LibvirtDriver(fake.FakeVirtAPI())
        self._driver._set_host_enabled = mock.Mock()  # of the database
        self._driver._build_device_metadata = mock.Mock(return_value=None)  # of the database
        self._driver._host.initialize()
        self._driver._parse_migration_flags()  # as init_host does
        self.cinder = self._driver._volume_api
        self.cinder.get_volume_encryption_metadata.return_value = {}
        self.cinder.get_snapshot.return_value = {"status": "available"}
        self._instance = objects.Instance(
            id=1, uuid=uuid, project_id="project", user_id="user", device_metadata=None
        )
        self._instance.system_metadata = {f"image_{k}": v for k, v in properties.items()}
        self._instance.flavor = objects.Flavor(memory_mb=256, vcpus=1, swap=0, extra_specs={})
        self._instance.obj_reset_changes()
        self._migration: Migration | None = None

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
        _fill(root)
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

    # What the compute managers of two hosts call for a live migration, in this order. `data` is
    # what they send each other, and `volumes` what the database has of the instance's volumes.

    def can_migrate_here(self) -> Any:
        """Checks the destination; returns `data`."""
        here = {"free_disk_gb": 100, "disk_available_least": 100}
        found = self._driver.check_can_live_migrate_destination(
            self._context, self._instance, {"cpu_info": "{}"}, here, None, None
        )
        return found.obj_to_primitive()

    def can_migrate_from_here(self, data: Any, volumes: list[dict[str, Any]]) -> Any:
        """Checks the source; returns `data`."""
        checked = _data(data)
        checked.is_volume_backed = True
        return self._driver.check_can_live_migrate_source(
            self._context, self._instance, checked, self._devices(volumes)
        ).obj_to_primitive()

    def end_check(self, data: Any) -> None:
        """Removes what the check has left on the destination."""
        self._driver.cleanup_live_migration_destination_check(self._context, _data(data))

    def pre_live_migration(self, data: Any, volumes: list[dict[str, Any]]) -> Any:
        """Prepares the destination; returns `data`."""
        return self._driver.pre_live_migration(
            *(self._context, self._instance, self._devices(volumes), model.NetworkInfo()),
            *(None, _data(data)),
        ).obj_to_primitive()

    def live_migration(self, dest: str, data: Any) -> None:
        """Begins to migrate from here to `dest`."""
        migrating = _data(data)
        migrating.migration = objects.Migration(self._context, id=1, status="running")

        def begin(migration: Migration) -> None:
            self._driver.live_migration(
                *(self._context, self._instance, dest),
                lambda *_, **__: migration.called.append("post"),
                lambda *_, **__: migration.called.append("recover"),
                migrating.block_migration,
                migrating,
            )

        self._migration = Migration(begin)

    def live_migration_abort(self) -> None:
        """Aborts it."""
        self._driver.live_migration_abort(self._instance)

    def live_migration_is_over(self) -> bool:
        """Whether it has ended."""
        assert self._migration is not None
        return self._migration.is_over

    def live_migration_end(self) -> dict[str, Any]:
        """Waits for its end."""
        assert self._migration is not None
        return self._migration.end()

    def post_live_migration(self, data: Any, volumes: list[dict[str, Any]]) -> None:
        """Ends on the source what was migrated."""
        migrated, devices, network = _data(data), self._devices(volumes), model.NetworkInfo()
        self._driver.post_live_migration(self._context, self._instance, devices, migrated)
        self._driver.post_live_migration_at_source(self._context, self._instance, network)
        self._driver.cleanup(
            *(self._context, self._instance, network),
            destroy_disks=not migrated.is_shared_block_storage,
            migrate_data=migrated,
            destroy_vifs=False,
        )

    def post_live_migration_at_destination(self, data: Any, volumes: list[dict[str, Any]]) -> None:
        """Ends it on the destination."""
        self._driver.post_live_migration_at_destination(
            *(self._context, self._instance, model.NetworkInfo()),
            _data(data).block_migration,
            self._devices(volumes),
        )

    def rollback_at_source(self, data: Any) -> None:
        """Takes back on the source what could not be migrated."""
        self._driver.rollback_live_migration_at_source(self._context, self._instance, _data(data))

    def rollback_at_destination(self, data: Any, volumes: list[dict[str, Any]]) -> None:
        """Takes it back on the destination."""
        rolled = _data(data)
        self._driver.rollback_live_migration_at_destination(
            *(self._context, self._instance, model.NetworkInfo(), self._devices(volumes)),
            destroy_disks=not rolled.is_shared_block_storage,
            migrate_data=rolled,
        )

    def _devices(self, volumes: list[dict[str, Any]]) -> Any:
        """Returns what the managers make of the database's rows."""
        rows = []
        for index, volume in enumerate(volumes):
            row = objects.BlockDeviceMapping(
                self._context,
                source_type="volume",
                destination_type="volume",
                volume_id=volume["connection"]["serial"],
                connection_info=json.dumps(volume["connection"]),
                device_name=f"/dev/{volume['dev']}",
                boot_index=index,
                disk_bus=volume["bus"],
                device_type="disk",
                no_device=False,
                delete_on_termination=False,
            )
            _fill(row)
            rows.append(row)
        listed = objects.BlockDeviceMappingList(objects=rows)
        return virt.get_block_device_info(self._instance, listed)


def _data(primitive: Any) -> Any:
    """Returns what `data` was on the other host."""
    return objects.LibvirtLiveMigrateData.obj_from_primitive(primitive)


def _fill(row: Any) -> None:
    """Gives a row of the database what else it has: nothing."""
    for name, field in row.fields.items():
        if field.nullable and not row.obj_attr_is_set(name):
            setattr(row, name, None)


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
        mock.patch("nova.objects.Migration.save"),
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
