"""What is read of a VirtualMachineInstance, and of one that is not what it should be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from csi.errors import Code, Failure
from csi.kubevirt import machine
from csi.kubevirt.machine import MachineVolume
from csi.objects import Vmi
from tests.support.kubevirt import machine as vmi_of


def vmi(*claims: str) -> dict[str, Any]:
    return vmi_of("node1", *claims, pods=("11111111-2222-4333-8444-555555555555",))


def parsed(found: object) -> Vmi:
    return machine.parse(json.dumps(found).encode())


def only(found: dict[str, Any]) -> MachineVolume:
    (volume,) = machine.volumes(parsed(found))
    return volume


def disk(found: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = found["spec"]["domain"]["devices"]["disks"][0]
    return made


def test_claims_and_data_volumes_are_volumes() -> None:
    found = vmi("boot", "data")
    found["spec"]["volumes"][1] = {"name": "data", "dataVolume": {"name": "imported"}}
    assert [(v.name, v.claim) for v in machine.volumes(parsed(found))] == [
        ("boot", "boot"),
        ("data", "imported"),
    ]


def test_what_virt_handler_made_of_a_claim_with_files_is_still_that_claim() -> None:
    found = vmi("files")
    found["spec"]["volumes"][0] = {"name": "files", "hostDisk": {"path": "/disk.img"}}
    assert machine.volumes(parsed(found)) == []
    told = {"name": "files", "persistentVolumeClaimInfo": {"claimName": "claim"}}
    found["status"]["volumeStatus"] = [told]
    assert only(found).claim == "claim"


@pytest.mark.parametrize(
    "volume",
    [
        {"name": "v", "containerDisk": {"image": "x"}},
        {"name": "v", "ephemeral": {"persistentVolumeClaim": {"claimName": "v"}}},
        {"name": "v", "persistentVolumeClaim": {"claimName": "v", "hotpluggable": True}},
        {"name": "v", "dataVolume": {"name": "v", "hotpluggable": True}},
        {"name": "no-disk", "persistentVolumeClaim": {"claimName": "v"}},
    ],
)
def test_other_volumes_are_left_alone(volume: dict[str, Any]) -> None:
    found = vmi("v")
    found["spec"]["volumes"] = [volume]
    assert machine.volumes(parsed(found)) == []


def test_a_volume_that_was_hot_plugged_is_left_alone() -> None:
    found = vmi("v")
    found["status"]["volumeStatus"] = [{"name": "v", "hotplugVolume": {"attachPodName": "hp"}}]
    assert machine.volumes(parsed(found)) == []


def test_serial_and_read_only_come_from_disk_and_volume() -> None:
    found = vmi("v")
    assert (only(found).serial, only(found).read_only) == (None, False)
    disk(found)["serial"] = "S1"
    found["spec"]["volumes"][0]["persistentVolumeClaim"]["readOnly"] = True
    assert (only(found).serial, only(found).read_only) == ("S1", True)
    found = vmi("v")
    disk(found)["disk"]["readonly"] = True
    assert only(found).read_only


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"disk": None, "cdrom": {"bus": "sata"}}, "is a CD-ROM"),
        ({"shareable": True}, "is shareable"),
        ({"serial": "ä"}, "serial number"),
        ({"serial": "x" * 256}, "serial number"),
        ({"disk": None, "lun": {"bus": "scsi"}}, None),
    ],
)
def test_disks_that_a_lun_cannot_be_are_told(changes: dict[str, Any], words: str | None) -> None:
    found = vmi("v")
    disk(found).update(changes)
    why = only(found).unsuited
    assert why is None if words is None else why is not None and words in why


@pytest.mark.parametrize(
    ("asked", "logical", "physical"),
    [
        (None, None, None),
        ({"custom": {"logical": 4096, "physical": 4096}}, 4096, 4096),
        ({"custom": {"logical": 512, "physical": 4096}}, 512, 4096),
        ({"custom": {"logical": 512, "physical": 2097152}}, 512, 2097152),
        ({"custom": {"logical": 1024, "physical": 1024}}, 1024, 1024),
        ({"matchVolume": {"enabled": True}}, None, None),
        ({"custom": None, "matchVolume": {}}, None, None),
    ],
)
def test_the_blocks_that_a_disk_asks_for(
    asked: dict[str, Any] | None, logical: int | None, physical: int | None
) -> None:
    found = vmi("v")
    disk(found)["blockSize"] = asked
    read = only(found)
    assert (read.block_size, read.physical_block_size) == (logical, physical)
    assert read.unsuited is None


@pytest.mark.parametrize("physical", [0, 256, 3000, 4194304, -512, 512.0, True, "512", [512], {}])
def test_a_physical_block_that_no_disk_has_is_told(physical: object) -> None:
    found = vmi("v")
    disk(found)["blockSize"] = {"custom": {"logical": 512, "physical": physical}}
    assert only(found).physical_block_size is None
    assert "a power of two from 512 to 2097152" in (only(found).unsuited or "")


def test_the_pods_of_a_node_are_its_own() -> None:
    found = vmi()
    found["status"]["activePods"] = {"a": "node1", "b": "node2"}
    assert parsed(found).pods_on("node1") == ("a",)


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"null", b'"x"', b'{"metadata": {}}', b"\xff", b"[" * 100_000, b"1" * 5000],
)
def test_what_is_no_machine_is_refused(text: bytes) -> None:
    with pytest.raises(Failure, match="not given a VirtualMachineInstance") as error:
        machine.parse(text)
    assert error.value.code is Code.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("spec", None),
        ("spec", []),
        ("spec", {"volumes": [{}]}),
        ("spec", {"volumes": 7}),
        ("spec", {"volumes": [{"name": "v"}] * 1025}),
        ("spec", {"domain": {"devices": {"disks": [{}]}}}),
        ("status", {"volumeStatus": [{}]}),
    ],
)
def test_a_machine_of_another_shape_is_refused(key: str, value: object) -> None:
    found = vmi("v")
    found[key] = value
    with pytest.raises(Failure) as error:
        machine.volumes(parsed(found))
    assert error.value.code is Code.INVALID_ARGUMENT


def test_the_disk_that_boots_is_the_one_of_the_least_order_else_the_first() -> None:
    found = vmi("a", "b", "c")
    text = json.dumps(found).encode()
    assert machine.boot_disk(text, {"b", "c"}) == "b"
    assert machine.boot_disk(text, set()) is None
    disks = found["spec"]["domain"]["devices"]["disks"]
    disks[0]["bootOrder"], disks[1]["bootOrder"], disks[2]["bootOrder"] = 1, 3, 2
    assert machine.boot_disk(json.dumps(found).encode(), {"b", "c"}) == "c"
