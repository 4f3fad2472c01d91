"""On which target of a node a machine's controller is made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from csi.errors import Code
from csi.kubevirt.controllers import VmControllers
from csi.kubevirt.inline import InlineVolumes
from csi.kubevirt.placement import Placement
from csi.kubevirt.podhook import PodHooks
from csi.objects import Vmi
from csi.proto import csi_pb2 as pb
from csi.targets import Targets
from pydataplane.client import Client
from pydataplane.errors import TargetUnavailable, VolumeNotFoundError
from tests.support.fake_target import LVSTORE, FakeTarget
from tests.support.kubevirt import Api, claim, machine
from tests.unit.csi.conftest import NODE, World, mount, refused
from tests.unit.csi.test_targets import ASKED, STORE_B, Pair


class Shop:
    """Claims of a node with two targets: `old` on the first, `new` on the second."""

    def __init__(self) -> None:
        self.pair = Pair()
        self.api = Api()
        self.placement = Placement(self.pair.targets, self.api)
        self.add("old", self.pair.create(LVSTORE))
        self.add("new", self.pair.create(STORE_B))

    def add(self, name: str, handle: str, **changes: str) -> None:
        self.api.claims[name] = claim(name, handle, **changes)

    def place(self, found: dict[str, Any], lvstore: str = "") -> Client:
        return self.placement.target_of(Vmi.of(found), lvstore)


@pytest.fixture
def shop() -> Shop:
    return Shop()


def vmi(*claims: str, **first: int) -> dict[str, Any]:
    """Returns a machine with claims as disks; `first` are their boot orders."""
    found = machine(NODE, *claims)
    for disk in found["spec"]["domain"]["devices"]["disks"]:
        if disk["name"] in first:
            disk["bootOrder"] = first[disk["name"]]
    return found


def test_it_is_where_the_claim_is_that_is_booted_first(shop: Shop) -> None:
    assert shop.place(vmi("old")) is shop.pair.a
    assert shop.place(vmi("new")) is shop.pair.b
    assert shop.place(vmi("new", "old")) is shop.pair.b
    assert shop.place(vmi("old", "new")) is shop.pair.a
    assert shop.place(vmi("old", "new", old=2, new=1)) is shop.pair.b
    assert shop.place(vmi("old", "new", new=7)) is shop.pair.b


def test_what_cannot_be_a_lun_has_no_say(shop: Shop) -> None:
    handle = shop.api.claims["old"].handle or ""
    shop.add("files", handle, mode="Filesystem")
    shop.add("strange", handle, driver="csi.example.com")
    assert shop.place(vmi("files", "strange", "new")) is shop.pair.b
    found = vmi("old", "new")
    found["spec"]["domain"]["devices"]["disks"][0] = {"name": "old", "cdrom": {"bus": "sata"}}
    assert shop.place(found) is shop.pair.b
    found = vmi("old", "new")
    found["spec"]["volumes"][0]["persistentVolumeClaim"]["hotpluggable"] = True
    assert shop.place(found) is shop.pair.b


def test_a_claim_to_migrate_with_is_no_lun(shop: Shop) -> None:
    old = shop.api.claims["old"]
    assert old.volume is not None
    volume = replace(old.volume, in_pool=True)
    shop.api.claims["old"] = replace(old, volume=volume)
    assert shop.place(vmi("old", "new")) is shop.pair.a
    shop.api.claims["old"] = replace(old, volume=volume, shared=True)
    assert shop.place(vmi("old", "new")) is shop.pair.b
    shop.api.claims["old"] = replace(old, shared=True)
    assert shop.place(vmi("old", "new")) is shop.pair.a


def test_a_machine_without_claims_of_ours_has_it_on_the_first(shop: Shop) -> None:
    shop.add("files", shop.api.claims["new"].handle or "", mode="Filesystem")
    assert shop.place(vmi("files")) is shop.pair.a
    assert shop.place(vmi()) is shop.pair.a


def test_the_lvstore_of_the_inline_volume_decides_where_it_is_given(shop: Shop) -> None:
    assert shop.place(vmi("old"), STORE_B) is shop.pair.b
    assert shop.place(vmi("new"), shop.pair.a.lvstores[LVSTORE]) is shop.pair.a
    with pytest.raises(VolumeNotFoundError, match="there is no lvstore lvs9 on any target"):
        shop.place(vmi("old"), "lvs9")
    shop.pair.b.lvstores[LVSTORE] = "5a1f0000-0002-4000-8000-000000000000"
    refused(lambda: shop.place(vmi("new"), LVSTORE), Code.FAILED_PRECONDITION)


def test_it_is_not_made_elsewhere_while_its_own_target_is_away(shop: Shop) -> None:
    shop.pair.away(shop.pair.b)
    with pytest.raises(TargetUnavailable, match=r"/run/b\.sock"):
        shop.place(vmi("new"))
    assert shop.place(vmi("old")) is shop.pair.a


def test_a_claim_that_the_api_server_does_not_tell_of_is_waited_for(shop: Shop) -> None:
    del shop.api.claims["new"]
    said = refused(lambda: shop.place(vmi("new")), Code.UNAVAILABLE)
    assert said.startswith("volume new of virtual machine ")


def test_with_one_target_nothing_is_asked() -> None:
    target, api = FakeTarget(), Api()
    assert Placement(Targets([target]), api).target_of(Vmi.of(vmi("unknown"))) is target
    assert target.calls == []


def test_the_inline_volume_names_an_lvstore(world: World, shop: Shop) -> None:
    def publish(**attributes: str) -> None:
        context = {
            "csi.storage.k8s.io/ephemeral": "true",
            "csi.storage.k8s.io/pod.uid": "11111111-2222-4333-8444-555555555555",
            "csi.storage.k8s.io/pod.name": "virt-launcher-vm",
            "csi.storage.k8s.io/pod.namespace": "shop",
            **attributes,
        }
        controllers = VmControllers(shop.pair.targets, world.host, world.locks)
        world.node._inline = InlineVolumes(
            controllers,
            cast("PodHooks", object()),
            lambda _, lvstore: shop.place(vmi("old"), lvstore),
        )
        world.node.node_publish_volume(
            pb.NodePublishVolumeRequest(
                volume_id=f"csi-{'0' * 64}",
                target_path=str(world.directory / "pod"),
                volume_capability=mount(),
                volume_context=context,
            )
        )

    said = refused(lambda: publish(lvstore="lvs9"), Code.NOT_FOUND)
    assert "lvs9" in said
    said = refused(lambda: publish(store="lvs9"), Code.INVALID_ARGUMENT)
    assert said == "volume attribute store is not known: there are lvstore and nodeHook"
    assert ASKED in shop.pair.a.calls
    assert not shop.pair.a.controllers
    assert not shop.pair.b.controllers
