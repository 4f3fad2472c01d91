"""Cinder's volume driver for lvstores: `volume_driver = plugin.openstack.driver.VirtlunDriver`.

Cinder's interface of drivers (cinder.interface.volume_driver) says what each method is for. All of
them may be repeated, and raise exceptions of Cinder's with one sentence.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from cinder import exception, interface
from cinder.volume import configuration, driver, volume_utils
from oslo_config import cfg

from plugin.openstack import connection, manageable, volumetypes
from plugin.openstack.loops import Loops
from plugin.openstack.lvols import Lvols
from plugin.openstack.manageable import ManageableLvols
from plugin.openstack.options import OPTIONS
from plugin.openstack.refusals import told, told_deleting
from pydataplane.client import Client
from pydataplane.errors import TargetError, VolumeError
from pydataplane.volumes import Volumes

GIB = 1 << 30

cfg.CONF.register_opts(OPTIONS, group=configuration.SHARED_CONF_GROUP)


@interface.volumedriver
class VirtlunDriver(driver.VolumeDriver):  # type: ignore[misc]
    """Volumes of one lvstore, for the servers of the host that it is on."""

    VERSION = "0.1.0"
    CI_WIKI_NAME = "virtlun"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.configuration.append_config_values(OPTIONS)
        self._lvols: Lvols
        self._existing: ManageableLvols
        self._loops = Loops(self._execute)

    @staticmethod
    def get_driver_options() -> list[Any]:
        """Returns the driver's options."""
        return OPTIONS

    def do_setup(self, context: object) -> None:
        """Says which lvstore it is, and asks nothing of it yet."""
        lvstore = self.configuration.virtlun_lvstore
        if not lvstore:
            raise exception.InvalidConfigurationValue(option="virtlun_lvstore", value=lvstore)
        path = self.configuration.virtlun_rpc_socket
        asked, patient = (
            Volumes(Client(path, seconds))
            for seconds in (
                self.configuration.virtlun_timeout,
                self.configuration.virtlun_zeroing_timeout,
            )
        )
        self._lvols = Lvols(asked, lvstore, patient)
        self._existing = ManageableLvols(self._lvols)

    def check_for_setup_error(self) -> None:
        """Sees that the lvstore is there; ends copies that were cut off."""
        with told("this backend"):
            self._lvols.store()
            for name in self._lvols.hidden():
                self._detach(name)
            self._lvols.sweep()

    # What there is

    def _update_volume_stats(self) -> None:
        name = self.configuration.safe_get("volume_backend_name") or self.__class__.__name__
        self._stats = {
            "volume_backend_name": name,
            "vendor_name": "virtlun",
            "driver_version": self.VERSION,
            "storage_protocol": "vhost-user",
            "sparse_copy_volume": True,  # what copies of volumes are written to reads as zeros
            "pools": [self._pool()],
        }

    def _pool(self) -> dict[str, Any]:
        """Returns what the scheduler is told of the lvstore."""
        try:
            store, lvols = self._lvols.store(), self._lvols.all()
        except (TargetError, VolumeError):
            state, total, free, promised = "down", 0.0, 0.0, 0.0
        else:
            state, total, free = "up", store.total / GIB, store.free / GIB
            promised = sum(each.size for each, _ in lvols if not each.snapshot) / GIB
        ratio = volume_utils.get_max_over_subscription_ratio(
            self.configuration.max_over_subscription_ratio, supports_auto=True
        )
        return {
            "pool_name": self._lvols.lvstore,
            "total_capacity_gb": round(total, 2),
            "free_capacity_gb": round(free, 2),
            "provisioned_capacity_gb": round(promised, 2),
            "reserved_percentage": self.configuration.reserved_percentage,
            "max_over_subscription_ratio": ratio,
            "thin_provisioning_support": True,
            "thick_provisioning_support": True,
            "multiattach": True,
            "QoS_support": True,
            "online_extend_support": True,
            "backend_state": state,
            "filter_function": self.get_filter_function(),
            "goodness_function": self.get_goodness_function(),
        }

    def get_pool(self, volume: object) -> str:
        """Returns the pool of a volume: the lvstore."""
        return self._lvols.lvstore

    # Volumes

    def create_volume(self, volume: Any) -> None:
        """Makes an empty volume."""
        wanted = volumetypes.check(volume)
        with told(f"volume {volume.name}"):
            self._lvols.create(volume.name, volume.size * GIB, thin=wanted.thin, key=wanted.key)

    def create_volume_from_snapshot(self, volume: Any, snapshot: Any) -> None:
        """Makes a clone of a snapshot."""
        wanted = self._wanted_of(volume, snapshot.name)
        with told(f"volume {volume.name}"):
            self._lvols.clone_snapshot(
                snapshot.name, volume.name, volume.size * GIB, thin=wanted.thin
            )

    def create_cloned_volume(self, volume: Any, src_vref: Any) -> None:
        """Makes a clone of a volume, which may be in use."""
        wanted = self._wanted_of(volume, src_vref.name)
        with told(f"volume {volume.name}"):
            self._lvols.clone_volume(
                src_vref.name, volume.name, volume.size * GIB, thin=wanted.thin
            )

    def _wanted_of(self, volume: Any, of: str) -> volumetypes.TypeSpecs:
        """Returns what a clone is to be, if it can be made of a volume or snapshot."""
        wanted = volumetypes.check(volume)
        with told(f"volume {volume.name}"):
            key = self._lvols.get(of).key
        if wanted.key != key:
            has = f"key {key}" if key else "no key"
            raise exception.InvalidVolumeType(
                reason=f"volume {volume.name} is made of {of}, which has {has}: use a type with "
                f"the same {volumetypes.KEY}"
            )
        return wanted

    def delete_volume(self, volume: Any) -> None:
        """Deletes a volume, and what copies of it have left on this host."""
        what = f"volume {volume.name}"
        with told_deleting(what):
            self._detach(volume.name)
            self._lvols.delete(volume.name)

    def extend_volume(self, volume: Any, new_size: int) -> None:
        """Grows a volume to `new_size` GiB, in use or not; its guest is told."""
        with told(f"volume {volume.name}"):
            self._lvols.grow(volume.name, new_size * GIB)

    def retype(
        self, context: object, volume: Any, new_type: Any, diff: Mapping[str, Any], host: object
    ) -> bool:
        """Gives a volume another type in place; False: it has to be copied to a new one."""
        wanted = volumetypes.TypeSpecs.of(new_type.get("extra_specs") or {})
        volumetypes.check_qos(new_type.get("id"))
        with told(f"volume {volume.name}"):
            present = self._lvols.get(volume.name)
            if wanted.key != present.key or (wanted.thin and not present.thin):
                return False
            if any(old != new for old, new in (diff.get("encryption") or {}).values()):
                return False
            if not wanted.thin:
                self._lvols.make_thick(volume.name)
        return True

    def update_migrated_volume(
        self, ctxt: object, volume: Any, new_volume: Any, original_volume_status: str
    ) -> dict[str, Any]:
        """Gives the copy of a volume that was migrated that one's name.

        It keeps its own where it is in use, or the other one is in this lvstore, too.
        """
        wanted = cfg.CONF.volume_name_template % volume.id
        with told(f"volume {volume.name}"):
            keeps = original_volume_status == "in-use" or (
                self._lvols.find(wanted) is not None
                and self._lvols.find(new_volume.name) is not None
            )
            if not keeps:
                self._lvols.rename(new_volume.name, wanted)
        return {"_name_id": new_volume.name_id if keeps else None}

    # Snapshots

    def create_snapshot(self, snapshot: Any) -> None:
        """Takes a snapshot of a volume, which may be in use."""
        with told(f"snapshot {snapshot.name}"):
            self._lvols.snapshot(snapshot.volume_name, snapshot.name)

    def delete_snapshot(self, snapshot: Any) -> None:
        """Deletes a snapshot; what is made of it stays."""
        with told_deleting(f"snapshot {snapshot.name}", snapshot=True):
            self._detach(snapshot.name)
            self._lvols.delete_snapshot(snapshot.name)

    def revert_to_snapshot(self, context: object, volume: Any, snapshot: Any) -> None:
        """Has a volume that nobody uses read as its last snapshot."""
        with told(f"volume {volume.name}"):
            self._lvols.roll_back(volume.name, snapshot.name)

    def snapshot_revert_use_temp_snapshot(self) -> bool:
        """Whether a revert needs a copy to go back to: it is done at once or not at all."""
        return False

    # Attachments

    def ensure_export(self, context: object, volume: Any) -> None:
        """There is nothing to do: the target keeps what it exports."""

    def create_export(self, context: object, volume: Any, connector: object) -> None:
        """There is nothing to do: initialize_connection knows for whom it is."""

    def remove_export(self, context: object, volume: Any) -> None:
        """There is nothing to do: terminate_connection has done it."""

    create_export_snapshot = create_export
    remove_export_snapshot = remove_export

    def initialize_connection(
        self, volume: Any, connector: Mapping[str, Any], **kwargs: Any
    ) -> dict[str, Any]:
        """Returns how Nova, or a service of this host, attaches a volume."""
        self._check_host(f"volume {volume.name}", connector)
        if not connection.is_of_server(connector):
            return self._attach(f"volume {volume.name}", volume.name)
        with told(f"volume {volume.name}"):
            lvol = self._lvols.get(volume.name)
        return connection.to_server(self._lvols.lvstore, lvol)

    def terminate_connection(
        self, volume: Any, connector: Mapping[str, Any] | None, **kwargs: Any
    ) -> None:
        """Ends what this host has of a volume; of a server Nova detaches it."""
        if connector is None or not connection.is_of_server(connector):
            with told(f"volume {volume.name}"):
                self._detach(volume.name)

    def initialize_connection_snapshot(
        self, snapshot: Any, connector: Mapping[str, Any], **kwargs: Any
    ) -> dict[str, Any]:
        """Returns how a service of this host attaches a snapshot, to read it."""
        self._check_host(f"snapshot {snapshot.name}", connector)
        return self._attach(f"snapshot {snapshot.name}", snapshot.name)

    def terminate_connection_snapshot(
        self, snapshot: Any, connector: object, **kwargs: Any
    ) -> None:
        """Ends what this host has of a snapshot."""
        with told(f"snapshot {snapshot.name}"):
            self._detach(snapshot.name)

    def _attach(self, what: str, name: str) -> dict[str, Any]:
        with told(what):
            file = self._lvols.export(name)
            device = self._loops.attach(file, read_only=self._lvols.get(name).snapshot)
        return connection.to_host(device)

    def _detach(self, name: str) -> None:
        file = self._lvols.exported(name)
        if file is not None:
            self._loops.detach(file)
            self._lvols.end_export(name)

    def _check_host(self, what: str, connector: Mapping[str, Any]) -> None:
        """Refuses a host on which the lvstore is not.

        Nova says what it calls its host; Cinder's and Glance's services what that calls itself.
        """
        own, hint = socket.gethostname(), "have the service run there"
        if connection.is_of_server(connector):
            own = self.configuration.virtlun_compute_host or cfg.CONF.host
            hint = (
                "have the server run there, or set virtlun_compute_host to what nova-compute on "
                "that host is called"
            )
        if connector.get("host") != own:
            raise exception.InvalidInput(
                reason=f"{what} is on host {own}, as lvstore {self._lvols.lvstore} is, and cannot "
                f"be attached on {connector.get('host')}: {hint}"
            )

    # Images

    def copy_volume_to_image(
        self, context: object, volume: Any, image_service: object, image_meta: Mapping[str, Any]
    ) -> None:
        """Uploads a volume, in use or not, as it is now: what is read is a snapshot."""
        what = f"volume {volume.name}"
        with told(what), self._lvols.frozen(volume.name) as frozen:
            device = self._attach(what, frozen)["data"]["device_path"]
            try:
                volume_utils.upload_volume(context, image_service, image_meta, device, volume)
            finally:
                self._detach(frozen)

    # Volumes and snapshots that are there already

    def manage_existing_get_size(self, volume: object, existing_ref: Mapping[str, str]) -> int:
        """Returns the GiB of an lvol, rounded up."""
        return manageable.gibibytes(self._existing.lvol(existing_ref, snapshot=False))

    def manage_existing(self, volume: Any, existing_ref: Mapping[str, str]) -> None:
        """Gives an lvol that nobody uses the name of Cinder's volume."""
        found = self._existing.lvol(existing_ref, snapshot=False)
        wanted = volumetypes.check(volume)
        if wanted != volumetypes.TypeSpecs(found.thin, found.key):
            raise exception.ManageExistingVolumeTypeMismatch(
                reason=f"{found.path} is {'thin' if found.thin else 'thick'} and has "
                f"{f'key {found.key}' if found.key else 'no key'}, unlike what the type says"
            )
        with told(f"volume {found.path}"):
            self._lvols.rename(found.name, volume.name)

    def unmanage(self, volume: Any) -> None:
        """Leaves the lvol as it is, under Cinder's name."""

    def get_manageable_volumes(
        self,
        cinder_volumes: list[Any],
        marker: object,
        limit: object,
        offset: object,
        *sort: object,
    ) -> Any:
        """Lists the volumes of the lvstore."""
        found = self._existing.volumes(cinder_volumes)
        return volume_utils.paginate_entries_list(found, marker, limit, offset, *sort)

    def manage_existing_snapshot_get_size(
        self, snapshot: object, existing_ref: Mapping[str, str]
    ) -> int:
        """Returns the GiB of a snapshot, rounded up."""
        return manageable.gibibytes(self._existing.lvol(existing_ref, snapshot=True))

    def manage_existing_snapshot(self, snapshot: Any, existing_ref: Mapping[str, str]) -> None:
        """Gives a snapshot of a volume the name of Cinder's."""
        found = self._existing.snapshot_of(snapshot.volume_name, existing_ref)
        with told(f"snapshot {found.path}"):
            self._lvols.rename(found.name, snapshot.name)

    def unmanage_snapshot(self, snapshot: Any) -> None:
        """Leaves the snapshot as it is, under Cinder's name."""

    def get_manageable_snapshots(
        self,
        cinder_snapshots: list[Any],
        marker: object,
        limit: object,
        offset: object,
        *sort: object,
    ) -> Any:
        """Lists the snapshots of the lvstore that a volume is made of."""
        found = self._existing.snapshots(cinder_snapshots)
        return volume_utils.paginate_entries_list(found, marker, limit, offset, *sort)
