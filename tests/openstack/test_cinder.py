"""Volumes of lvstores under real Cinder, by its REST API.

API, scheduler, volume and backup services are the release of PyPI with a database of SQLite; the
target is real. Only Keystone, Glance and Nova are not there; see tests/openstack/cinder_service.py.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from pydataplane.client import Client
from pydataplane.lvols import Volume
from pydataplane.volumes import Volumes
from tests.openstack.cinder_process import Cinder, connector, python
from tests.openstack.rest import Refused
from tests.support.cache import ROOT
from tests.support.scratch import short_directory
from tests.support.target import Target
from tests.support.wait import until

pytestmark = [pytest.mark.root, pytest.mark.nightly, pytest.mark.timeout(900)]

GIB, MIB = 1 << 30, 1 << 20
SERVER = "9a1c5c0e-62ab-4a8e-8f4c-0d4b4c8e9b55"
OTHER_SERVER = "1b1c5c0e-62ab-4a8e-8f4c-0d4b4c8e9b56"
FUNCTIONS = """
[DEFAULT]
enabled_backends = virtlun,second
scheduler_default_filters = AvailabilityZoneFilter,CapacityFilter,CapabilitiesFilter,DriverFilter
scheduler_default_weighers = GoodnessWeigher

[virtlun]
filter_function = "volume.size < 4"
goodness_function = "volume.size < 2 ? 0 : 100"

[second]
volume_driver = plugin.openstack.driver.VirtlunDriver
volume_backend_name = second
virtlun_lvstore = lvs1
virtlun_rpc_socket = {socket}
filter_function = "volume.size < 6"
goodness_function = "50"
"""


class Backend:
    """A target with lvstores, and Cinder over it."""

    def __init__(self, folder: Path, lvstores: tuple[str, ...] = ("lvs0",), more: str = "") -> None:
        self.folder = folder
        self.target = Target(folder).start()
        self.client = Client(self.target.rpc_socket)
        self.volumes = Volumes(self.client)
        for name in lvstores:
            self.volumes.create_lvstore(name, folder / f"{name}.img", 16 * GIB)
        more = more.format(socket=self.target.rpc_socket)
        self.cinder = Cinder(folder, self.target.rpc_socket, more=more)

    def lvol(self, volume: str) -> Volume:
        """Returns the lvol of a volume."""
        return self.volumes.volume(f"lvs0/volume-{volume}")

    def write(self, volume: str, text: bytes, at: int = 0) -> None:
        """Writes to a volume that nobody uses."""
        with (
            self.target.exported(f"lvs0/volume-{volume}") as path,
            path.open("r+b") as file,
        ):
            file.seek(at)
            file.write(text.ljust(4096, b"\0"))

    def read(self, volume: str, at: int = 0) -> bytes:
        """Returns the text that is in a volume that nobody uses."""
        with self.target.exported(f"lvs0/volume-{volume}") as path, path.open("rb") as file:
            file.seek(at)
            return file.read(4096).rstrip(b"\0")

    def restart_cinder(self) -> None:
        """Has Cinder end as in a crash, and begin again."""
        self.cinder.close()
        self.cinder = Cinder(self.folder, self.target.rpc_socket)

    def close(self) -> None:
        """Ends all."""
        self.cinder.close()
        self.target.stop()
        self.target.end_holder()


@pytest.fixture(scope="module")
def shared() -> Iterator[Backend]:
    with short_directory("vt-") as folder:
        backend = Backend(folder)
        yield backend
        backend.close()


@pytest.fixture
def backend(shared: Backend) -> Iterator[Backend]:
    """One whose lvstore is empty; a test is to leave it so."""
    free = shared.volumes.lvstore("lvs0").free
    yield shared
    for kind in ("snapshots", "volumes"):
        for each in shared.cinder.get(kind)[kind]:
            shared.cinder.delete(f"{kind}/{each['id']}")
    assert shared.volumes.volumes() == []
    assert shared.client.call("virtlun_export_list") == []
    assert shared.volumes.lvstore("lvs0").free == free


@pytest.fixture
def several() -> Iterator[Backend]:
    """Two backends whose functions differ."""
    with short_directory("vt-") as folder:
        backend = Backend(folder, ("lvs0", "lvs1"), FUNCTIONS)
        yield backend
        backend.close()


@pytest.fixture
def cinder(backend: Backend) -> Cinder:
    return backend.cinder


def attach(cinder: Cinder, volume: str, server: str = SERVER, **more: str) -> dict[str, Any]:
    """Attaches a volume as Nova does, and returns the attachment."""
    body = {"attachment": {"volume_uuid": volume, "instance_uuid": server}}
    made = cinder.post("attachments", body)["attachment"]["id"]
    told = connector(**({"mountpoint": "/dev/sdb"} | more))
    cinder.call("PUT", f"attachments/{made}", {"attachment": {"connector": told}})
    cinder.post(f"attachments/{made}/action", {"os-complete": {}})
    found: dict[str, Any] = cinder.get(f"attachments/{made}")["attachment"]
    return found


def volume_type(cinder: Cinder, specs: dict[str, str] | None = None) -> str:
    """Makes a volume type and returns its ID."""
    name = f"type-{len(cinder.get('types')['volume_types'])}"
    body = {"volume_type": {"name": name, "extra_specs": specs or {}}}
    return str(cinder.post("types", body)["volume_type"]["id"])


def test_a_volumes_life(backend: Backend, cinder: Cinder) -> None:
    volume = cinder.volume()
    assert (backend.lvol(volume).size, backend.lvol(volume).thin) == (GIB, True)
    backend.write(volume, b"first")
    attachment = attach(cinder, volume)
    data = dict(attachment["connection_info"])
    assert data.pop("driver_volume_type") == "rbd"
    assert data["name"] == f"virtlun/lvs0/volume-{volume}"
    assert (data["hosts"], data["ports"], data["auth_enabled"]) == ([], [], False)
    assert data["discard"] is True and data["encrypted"] is False and data["access_mode"] == "rw"
    assert cinder.wait(f"volumes/{volume}", "in-use")

    cinder.post(f"volumes/{volume}/action", {"os-extend": {"new_size": 2}})
    assert cinder.wait(f"volumes/{volume}", "in-use")["size"] == 2
    assert backend.lvol(volume).size == 2 * GIB
    snapshot = cinder.snapshot(volume)
    cinder.call("DELETE", f"attachments/{attachment['id']}")
    cinder.wait(f"volumes/{volume}")

    backend.write(volume, b"second")
    of_snapshot = cinder.volume(snapshot_id=snapshot, size=3)
    of_volume = cinder.volume(source_volid=volume, size=2)
    assert backend.read(of_snapshot) == b"first"
    assert backend.read(of_volume) == b"second"
    assert backend.lvol(of_snapshot).size == 3 * GIB
    cinder.post(f"volumes/{volume}/action", {"revert": {"snapshot_id": snapshot}})
    cinder.wait(f"volumes/{volume}")
    assert backend.read(volume) == b"first"

    cinder.delete(f"snapshots/{snapshot}")
    cinder.delete(f"volumes/{volume}")
    assert backend.read(of_snapshot) == b"first"


def test_what_the_scheduler_is_told(backend: Backend, cinder: Cinder) -> None:
    cinder.volume()
    (pool,) = cinder.get("scheduler-stats/get_pools?detail=true")["pools"]
    assert pool["name"] == "compute1@virtlun#lvs0"
    told = pool["capabilities"]
    store = backend.volumes.lvstore("lvs0")
    assert told["total_capacity_gb"] == pytest.approx(store.total / GIB, abs=0.01)
    assert (told["storage_protocol"], told["backend_state"]) == ("vhost-user", "up")
    for each in ("thin_provisioning_support", "thick_provisioning_support", "multiattach"):
        assert told[each] is True


def test_a_server_elsewhere_is_refused(backend: Backend, cinder: Cinder) -> None:
    volume = cinder.volume()
    with pytest.raises(Refused):
        attach(cinder, volume, host="compute2")
    why = "is on host compute1"
    until(lambda: why in cinder.log.read_text(), why)
    (left,) = cinder.get("attachments")["attachments"]
    cinder.call("DELETE", f"attachments/{left['id']}")
    cinder.wait(f"volumes/{volume}")


def test_a_volume_for_several_servers(backend: Backend, cinder: Cinder) -> None:
    volume = cinder.volume(volume_type=volume_type(cinder, {"multiattach": "<is> True"}))
    found = [attach(cinder, volume, server) for server in (SERVER, OTHER_SERVER)]
    assert len({each["connection_info"]["name"] for each in found}) == 1
    for each in found:
        cinder.call("DELETE", f"attachments/{each['id']}")
    cinder.wait(f"volumes/{volume}")


def test_images_both_ways(backend: Backend, cinder: Cinder) -> None:
    image_id = str(uuid4())
    file = cinder.images / image_id
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", file, "512M"], check=True)
    subprocess.run(["qemu-io", "-c", "write -P 0x61 4M 1M", file], check=True, capture_output=True)
    known = {"id": image_id, "disk_format": "qcow2", "container_format": "bare", "size": 1 << 20}
    known |= {"status": "active", "min_disk": 0, "min_ram": 0, "properties": {}, "name": "some"}
    (cinder.images / f"{image_id}.json").write_text(json.dumps(known | {"checksum": "none"}))
    volume = cinder.volume(imageRef=image_id)
    assert backend.read(volume, 4 * MIB) == b"a" * 4096
    assert backend.read(volume, 6 * MIB) == b""
    assert backend.lvol(volume).allocated < 64 * MIB

    attachment = attach(cinder, volume)
    for form in ("raw", "qcow2"):
        body = {"image_name": form, "disk_format": form, "container_format": "bare", "force": True}
        made = cinder.post(f"volumes/{volume}/action", {"os-volume_upload_image": body})
        cinder.wait(f"volumes/{volume}", "in-use")
        image = cinder.images / made["os-volume_upload_image"]["image_id"]
        # What is longer has to be zeros.
        words = ("qemu-img", "compare", "-f", form, "-F", "qcow2", image, file)
        subprocess.run(words, check=True, capture_output=True)
    cinder.call("DELETE", f"attachments/{attachment['id']}")
    cinder.wait(f"volumes/{volume}")


def test_volumes_that_are_there_already(backend: Backend, cinder: Cinder) -> None:
    backend.volumes.create("lvs0/old", GIB, thin=True)
    backend.volumes.create("lvs0/used", GIB, thin=True)
    (snapshot,) = backend.volumes.snapshot(["lvs0/old"], "kept")
    with backend.target.exported("lvs0/used"):
        listed = cinder.get("manageable_volumes/detail?host=compute1@virtlun%23lvs0")
        safe = {
            each["reference"]["source-name"]: (each["safe_to_manage"], each["reason_not_safe"])
            for each in listed["manageable-volumes"]
        }
        assert safe == {"old": (True, None), "used": (False, "in use")}
    body = {"host": "compute1@virtlun#lvs0", "ref": {"source-name": "old"}}
    volume = cinder.post("manageable_volumes", {"volume": body})["volume"]["id"]
    assert cinder.wait(f"volumes/{volume}")["size"] == 1
    assert backend.lvol(volume).parent == snapshot.name
    body = {"volume_id": volume, "ref": {"source-name": snapshot.name}}
    of = cinder.post("manageable_snapshots", {"snapshot": body})["snapshot"]["id"]
    cinder.wait(f"snapshots/{of}")
    assert backend.lvol(volume).parent == f"snapshot-{of}"

    cinder.post(f"snapshots/{of}/action", {"os-unmanage": {}})
    until(lambda: not cinder.get("snapshots")["snapshots"], "no snapshots of Cinder's")
    cinder.post(f"volumes/{volume}/action", {"os-unmanage": {}})
    until(lambda: not cinder.get("volumes")["volumes"], "no volumes of Cinder's")
    for name in (f"volume-{volume}", f"snapshot-{of}", "used"):
        backend.volumes.delete(f"lvs0/{name}")


def test_types(backend: Backend, cinder: Cinder) -> None:
    volume = cinder.volume()
    thick = volume_type(cinder, {"provisioning:type": "thick"})
    body = {"new_type": thick, "migration_policy": "never"}
    cinder.post(f"volumes/{volume}/action", {"os-retype": body})
    assert cinder.wait(f"volumes/{volume}")["volume_type"].startswith("type-")
    assert not backend.lvol(volume).thin
    assert not backend.lvol(cinder.volume(volume_type=thick)).thin


def test_a_type_that_needs_a_copy(backend: Backend, cinder: Cinder) -> None:
    """Cinder copies to a new volume, which has a name of its own as long as both are there."""
    volume = cinder.volume(volume_type=volume_type(cinder, {"provisioning:type": "thick"}))
    backend.write(volume, b"copied", 8 * MIB)
    body = {"new_type": volume_type(cinder, {"provisioning:type": "thin"})}
    body |= {"migration_policy": "on-demand"}
    cinder.post(f"volumes/{volume}/action", {"os-retype": body})

    def copied() -> str | None:
        (one,) = [each for each in cinder.get("volumes/detail")["volumes"] if each["id"] == volume]
        assert one["os-vol-mig-status-attr:migstat"] != "error", cinder.errors()
        found: str | None = one["os-vol-mig-status-attr:name_id"]
        return found if one["status"] == "available" else None

    name = until(copied, "the copy", 180)
    until(lambda: len(backend.volumes.volumes()) == 1, "the old one to be gone")
    assert backend.lvol(name).thin
    assert backend.lvol(name).allocated < 64 * MIB
    assert backend.read(name, 8 * MIB) == b"copied"


def test_keys_of_types(backend: Backend, cinder: Cinder) -> None:
    backend.client.call(
        "accel_crypto_key_create", cipher="AES_XTS", name="gold", key="11" * 32, key2="22" * 32
    )
    gold = volume_type(cinder, {"virtlun:key": "gold"})
    volume = cinder.volume(volume_type=gold)
    assert backend.lvol(volume).key == "gold"
    assert backend.lvol(cinder.volume(volume_type=gold, source_volid=volume)).key == "gold"
    body = {"new_type": volume_type(cinder), "migration_policy": "never"}
    cinder.post(f"volumes/{volume}/action", {"os-retype": body})
    cinder.wait(f"volumes/{volume}")
    assert backend.lvol(volume).key == "gold"

    of = volume_type(cinder)
    luks = {"provider": "luks", "control_location": "front-end", "cipher": "aes-xts-plain64"}
    cinder.post(f"types/{of}/encryption", {"encryption": luks | {"key_size": 256}})
    made = cinder.post("volumes", {"volume": {"size": 1, "volume_type": of}})["volume"]["id"]
    cinder.wait(f"volumes/{made}", "error")
    why = "encryption by Nova (LUKS) is not possible"
    until(lambda: why in cinder.log.read_text(), why)


def test_limits_of_a_type_are_for_nova_to_set(backend: Backend, cinder: Cinder) -> None:
    of = volume_type(cinder)
    specs = {"name": "slow", "consumer": "front-end", "total_iops_sec": "500"}
    qos = cinder.post("qos-specs", {"qos_specs": specs})["qos_specs"]["id"]
    cinder.get(f"qos-specs/{qos}/associate?vol_type_id={of}")
    volume = cinder.volume(volume_type=of)
    attachment = attach(cinder, volume)
    assert attachment["connection_info"]["qos_specs"] == {"total_iops_sec": "500"}
    cinder.call("DELETE", f"attachments/{attachment['id']}")
    cinder.wait(f"volumes/{volume}")

    cinder.call("PUT", f"qos-specs/{qos}", {"qos_specs": {"consumer": "back-end"}})
    made = cinder.post("volumes", {"volume": {"size": 1, "volume_type": of}})["volume"]["id"]
    cinder.wait(f"volumes/{made}", "error")
    why = "have the consumer back-end: set it to front-end"
    until(lambda: why in cinder.log.read_text(), why)


def test_a_backup_and_back(backend: Backend, cinder: Cinder) -> None:
    volume = cinder.volume()
    backend.write(volume, b"kept")
    attachment = attach(cinder, volume)
    body = {"volume_id": volume, "force": True}
    made = cinder.post("backups", {"backup": body})["backup"]["id"]
    cinder.wait(f"backups/{made}")
    cinder.wait(f"volumes/{volume}", "in-use")
    cinder.call("DELETE", f"attachments/{attachment['id']}")
    cinder.wait(f"volumes/{volume}")
    backend.write(volume, b"lost")
    cinder.post(f"backups/{made}/restore", {"restore": {"volume_id": volume}})
    cinder.wait(f"volumes/{volume}")
    assert backend.read(volume) == b"kept"
    cinder.delete(f"backups/{made}")


def test_cinder_is_killed(backend: Backend) -> None:
    """What it was making is in the error state then, and can be deleted."""
    cinder = backend.cinder
    of = volume_type(cinder, {"provisioning:type": "thick"})
    body = {"size": 8, "volume_type": of}
    made = cinder.post("volumes", {"volume": body})["volume"]["id"]
    until(lambda: backend.volumes.zeroed(f"lvs0/volume-{made}"), "the volume to be zeroed")
    backend.restart_cinder()
    backend.cinder.wait(f"volumes/{made}", "error")
    backend.cinder.delete(f"volumes/{made}")


def test_a_target_that_is_away(backend: Backend, cinder: Cinder) -> None:
    volume = cinder.volume()
    backend.target.kill9()
    made = cinder.post("snapshots", {"snapshot": {"volume_id": volume}})["snapshot"]["id"]
    cinder.wait(f"snapshots/{made}", "error")
    why = f"snapshot snapshot-{made}: no target answers on"
    until(lambda: why in cinder.log.read_text(), why)
    backend.target.start()
    backend.client.call("bdev_wait_for_examine")
    cinder.snapshot(volume)


def test_functions_choose_a_backend(several: Backend) -> None:
    cinder = several.cinder
    for size, pool in (
        (1, "compute1@second#lvs1"),  # it is better
        (3, "compute1@virtlun#lvs0"),  # it is better
        (4, "compute1@second#lvs1"),  # the other one were better, but is not possible
    ):
        made = cinder.volume(size=size)
        assert cinder.get(f"volumes/{made}")["volume"]["os-vol-host-attr:host"] == pool
    made = cinder.post("volumes", {"volume": {"size": 6}})["volume"]["id"]
    assert cinder.wait(f"volumes/{made}", "error")["os-vol-host-attr:host"] is None
    (message,) = cinder.get(f"messages?resource_uuid={made}")["messages"]
    assert "Could not find any available weighted backend" in message["user_message"]


def test_cinders_own_compliance_test(shared: Backend) -> None:
    """cinder.tests.compliance looks at each driver that has been loaded."""
    code = (
        "import sys, unittest, plugin.openstack.driver\n"
        "from cinder.tests.compliance import test_volume_drivers as tests\n"
        "found = unittest.defaultTestLoader.loadTestsFromModule(tests)\n"
        "assert [each.class_fqn for each in tests.VOLUME_DRIVERS] ==\\\n"
        "    ['plugin.openstack.driver.VirtlunDriver']\n"
        "done = unittest.TextTestRunner().run(found)\n"
        "sys.exit(not done.wasSuccessful())\n"
    )
    done = subprocess.run(
        [python(), "-P", "-c", code],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Ran 2 tests" in done.stderr
