"""Results about a guest's file systems, with the client's disks in the place of the carrier."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugin.gateway import guestdisks
from plugin.gateway.guestdisks import Names, Said
from plugin.gateway.messages import STRING, UINT, TypedParam, pack_params, read_params
from plugin.gateway.xdr import Reader, Writer, XdrError
from pydataplane.domain.model import Characteristics, LunPlan, VolumeRef

CARRIER = "ubda"
TWO = {0: "sda", 3: "sdb"}


def at(target: object) -> dict[str, Any]:
    """A disk as the agent tells of it."""
    return {"bus-type": "scsi", "bus": 0, "target": target, "unit": 0}


def told(*filesystems: tuple[str, str, list[dict[str, Any]]]) -> str:
    """The agent's answer to guest-get-fsinfo."""
    items = [{"mountpoint": m, "name": n, "disk": disks} for m, n, disks in filesystems]
    return json.dumps({"return": items})


def fsinfo(*filesystems: tuple[str, str, list[str]]) -> bytes:
    """GET_FSINFO's result."""
    writer = Writer().u32(len(filesystems))
    for mountpoint, name, devs in filesystems:
        writer.string(mountpoint).string(name).string("ext4").array(devs, writer.string)
    return bytes(writer.u32(len(filesystems)))


def test_each_file_system_has_the_disk_of_its_scsi_target() -> None:
    answer = told(("/b", "sdb", [at(3)]), ("/a", "sda", [at(0)]), ("/", "vda1", [at(0)]))
    names = Names(CARRIER, TWO, guestdisks.disks_below(answer))
    given_ = fsinfo(("/a", "sda", [CARRIER]), ("/", "vda1", ["vda"]), ("/b", "sdb", [CARRIER]))
    expected = fsinfo(("/a", "sda", ["sda"]), ("/", "vda1", ["vda"]), ("/b", "sdb", ["sdb"]))
    assert guestdisks.filesystems(given_, names) == expected


def test_an_agent_that_tells_no_targets_is_not_taken_at_its_word() -> None:
    """QEMU's own says 0 of each disk of a virtio-scsi controller: by udev's serial it is known."""
    naas = {"3aaaaaaaaaaaaaaa": "sda", "3bbbbbbbbbbbbbbb": "sdb"}
    given_ = fsinfo(*((f"/{name}", name, [CARRIER]) for name in "abc"))
    serials = ("33bbbbbbbbbbbbbbb", "33AAAAAAAAAAAAAAA", "QEMU_HARDDISK")
    answer = told(
        *((f"/{n}", n, [at(0) | {"serial": s}]) for n, s in zip("abc", serials, strict=True))
    )
    names = Names(CARRIER, TWO, guestdisks.disks_below(answer), naas=naas)
    expected = fsinfo(("/a", "a", ["sdb"]), ("/b", "b", ["sda"]), ("/c", "c", []))
    assert guestdisks.filesystems(given_, names) == expected
    without = Names(CARRIER, TWO, guestdisks.disks_below(told(("/a", "a", [at(0)]))), naas=naas)
    shown = guestdisks.filesystems(fsinfo(("/a", "a", [CARRIER])), without)
    assert shown == fsinfo(("/a", "a", []))


def test_a_disks_naa_is_the_clients_or_made_of_the_volumes_uuid() -> None:
    lun = LunPlan(0, "sda", VolumeRef("lvs0", "v"), "12345678-9abc-4def-8123-456789abcdef")
    assert guestdisks.naa_of(lun) == "3317131f13178000"
    own = replace(lun, characteristics=Characteristics(wwn="5000c50015ea71ad"))
    assert guestdisks.naa_of(own) == "5000c50015ea71ad"
    assert guestdisks.naa_of(replace(lun, uuid=None)) is None


def test_the_only_disk_needs_no_agent() -> None:
    names = Names(CARRIER, {7: "sdq"})
    shown = guestdisks.filesystems(fsinfo(("/a", "sda", [CARRIER])), names)
    assert shown == fsinfo(("/a", "sda", ["sdq"]))


def test_a_disk_that_is_not_known_has_no_name() -> None:
    below = guestdisks.disks_below(told(("/a", "x", [at(0), at(9)]), ("/b", "y", [at(0)])))
    names = Names(CARRIER, TWO, below)
    given_ = fsinfo(("/a", "x", [CARRIER, CARRIER]), ("/b", "y", ["vda", CARRIER]), ("/c", "z", []))
    expected = fsinfo(("/a", "x", ["sda"]), ("/b", "y", ["vda"]), ("/c", "z", []))
    assert guestdisks.filesystems(given_, names) == expected


def test_guest_info_names_disks_and_file_systems() -> None:
    below = guestdisks.disks_below(told(("/b", "sdb", [at(3)])))
    disks = guestdisks.disks(
        json.dumps({"return": [{"name": "/dev/sdb", "address": at(3)}, {"name": "/dev/dm-0"}]})
    )
    params = [
        TypedParam("fs.count", UINT, 1),
        TypedParam("fs.0.mountpoint", STRING, "/b"),
        TypedParam("fs.0.name", STRING, "sdb"),
        TypedParam("fs.0.disk.0.alias", STRING, CARRIER),
        TypedParam("fs.0.disk.1.alias", STRING, CARRIER),
        TypedParam("disk.0.alias", STRING, CARRIER),
        TypedParam("disk.0.name", STRING, CARRIER),
        TypedParam("disk.1.alias", STRING, CARRIER),
    ]
    shown = read_params(guestdisks.info(pack_params(params), Names(CARRIER, TWO, below, disks)))
    assert shown == {
        "fs.count": 1,
        "fs.0.mountpoint": "/b",
        "fs.0.name": "sdb",
        "fs.0.disk.0.alias": "sdb",
        "disk.0.alias": "sdb",
        "disk.0.name": CARRIER,
    }


@pytest.mark.parametrize("payload", [b"", b"\0\0\0\1", b"\xff" * 64])
def test_what_is_no_such_result_is_refused(payload: bytes) -> None:
    for change in (guestdisks.filesystems, guestdisks.info):
        with pytest.raises(XdrError):
            change(payload, Names(CARRIER, TWO))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["return", "disk", "address", "target", "name", "mountpoint", "serial"]
            ),
            inner,
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_a_guest_may_say_anything(value: object) -> None:
    for text in (json.dumps(value), json.dumps({"return": value})):
        below, disks = guestdisks.disks_below(text), guestdisks.disks(text)
        names = Names(CARRIER, TWO, below, disks)
        shown = Reader(guestdisks.filesystems(fsinfo(("/a", "x", [CARRIER])), names))
        assert shown.u32() == 1
        for _ in range(3):
            shown.string()
        assert shown.array(shown.string, 1) in ([], ["sda"], ["sdb"])


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"return": 1}', "1"])
def test_what_is_no_answer_says_nothing(text: str) -> None:
    assert guestdisks.disks_below(text) == {}
    assert guestdisks.disks(text) == ()


def test_a_longer_answer_than_any_guest_has_is_not_read() -> None:
    """It would keep all clients waiting: one of libvirt's 4 MiB for seconds."""
    item = json.dumps({"mountpoint": {"a": 1}, "name": "x", "disk": [{"target": 1}]})
    fits = guestdisks.ANSWER_MAX - 20
    text = f'{{"return":[{",".join([item] * (fits // (len(item) + 1)))}]}}'
    assert len(text) <= guestdisks.ANSWER_MAX
    assert guestdisks.disks_below(text) == {("", "x"): (Said(1),)}
    longer = text[:-2] + " " * guestdisks.ANSWER_MAX + "]}"
    assert guestdisks.disks_below(longer) == {}
    assert guestdisks.disks(longer) == ()
