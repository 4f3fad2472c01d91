"""Disks over the network: which are ours, what they are opened by, and what stays QEMU's."""

from __future__ import annotations

import re
import socket
from dataclasses import fields, replace
from typing import Any

import pytest
from lxml import etree

from pydataplane.domain import portals
from pydataplane.domain.errors import ImageError, Refusal, TranslateError
from pydataplane.domain.images import check_allowed, nbd_uris, open_image
from pydataplane.domain.model import ANY, Allowed, Host, NetworkSource, SecretRef
from pydataplane.domain.translate import (
    LunPlan,
    attach,
    define,
    detach,
    find,
    plan,
    present,
    stays_qemus,
    update,
)
from pydataplane.errors import BUSY, RpcError
from tests.unit.translate.domains import (
    NEW_UUID,
    ROOT,
    SETTINGS,
    canonical,
    domain,
    lvol,
    plain,
    translated,
)

ALLOWED = Allowed(nbd_sockets=("/run/nbd",), iscsi_portals=("san.lan", "10.0.0.0/24", "fd00::/8"))
SERVED = replace(SETTINGS, network=frozenset({"rbd", "nbd", "iscsi"}), allowed=ALLOWED)
SECRET = "457eb676-33da-42ec-9a8c-9293d545c337"
RBD = f"""\
<disk type="network" device="disk">
  <driver name="qemu" type="raw" cache="none" discard="unmap"/>
  <source protocol="rbd" name="volumes/volume-1">
    <host name="10.0.0.1" port="6789"/>
    <host name="fd00::2" port="3300"/>
  </source>
  <auth username="cinder">
    <secret type="ceph" uuid="{SECRET}"/>
  </auth>
  <target dev="sdb" bus="scsi"/>
  <serial>volume-1</serial>
</disk>
"""
NBD = """\
<disk type='network' device='disk'>
  <source protocol='nbd' name='a b'><host name='fd00::1'/></source>
  <target dev='sdc' bus='scsi'/>
</disk>
"""
GUARD = translated(domain(plain("vda", "virtio")), SERVED).xml


def lun_of(xml: str) -> LunPlan:
    """Returns the plan of a disk of ours that a domain is defined with."""
    made = translated(domain(plain("vda", "virtio") + xml), SERVED)
    assert made.plan is not None
    (lun,) = made.plan.luns
    assert plan(made.xml) == made.plan
    return lun


def source_of(xml: str) -> NetworkSource:
    source = lun_of(xml).volume.source
    assert source is not None
    return source


def refusal(xml: str) -> str:
    with pytest.raises(TranslateError) as refused:
        lun_of(xml)
    return refused.value.message


def test_an_image_of_ceph_is_a_lun_and_shown_as_its_client_wrote_it() -> None:
    given = domain(plain("vda", "virtio") + RBD)
    made = translated(given, SERVED)
    assert made.plan is not None
    (lun,) = made.plan.luns
    assert (lun.dev, lun.serial, lun.volume.alias) == ("sdb", "volume-1", "rbd:volumes/volume-1")
    assert lun.volume.source == NetworkSource(
        protocol="rbd",
        pool="volumes",
        image="volume-1",
        hosts=(Host("10.0.0.1", 6789), Host("fd00::2", 3300)),
        config=None,
        user="cinder",
        secret=SecretRef(SECRET, None),
        read_only=False,
        shared=False,
    )
    assert [host.text for host in lun.volume.source.hosts] == ["10.0.0.1:6789", "[fd00::2]:3300"]
    devices = etree.fromstring(made.xml.encode()).find("devices")
    assert devices is not None
    assert devices.find("disk/source[@protocol='rbd']") is None
    assert canonical(present(made.xml, live=False)) == canonical(given)
    assert plan(made.xml) == made.plan
    for name in ("sdb", "volumes/volume-1", "rbd:volumes/volume-1"):
        assert find(made.xml, name, SERVED) == lun


def test_the_metadata_is_of_its_schema_and_says_nothing_twice() -> None:
    made = translated(domain(plain("vda", "virtio") + RBD), SERVED)
    (element,) = etree.fromstring(made.xml.encode()).iter("{*}disks")
    schema = etree.RelaxNG(etree.parse(ROOT / "schemas/domain-metadata.rng"))
    alone = etree.fromstring(etree.tostring(element))
    for disk in alone:
        disk.tag = etree.QName(disk).text
    schema.assertValid(alone)
    (disk,) = alone
    assert disk.get("network") == "rbd"
    assert disk.get("lvstore") is None


def test_without_the_setting_all_of_them_are_qemus() -> None:
    given = domain(plain("vda", "virtio") + RBD + NBD)
    assert translated(given, controller=False).xml == given
    only = replace(SETTINGS, network=frozenset({"nbd"}))
    made = translated(given, only)
    assert made.plan is not None
    assert [lun.dev for lun in made.plan.luns] == ["sdc"]


@pytest.mark.parametrize(
    "change",
    [
        ('device="disk"', 'device="cdrom"'),
        ('dev="sdb" bus="scsi"', 'dev="hdb" bus="ide"'),
        ('type="raw"', 'type="qcow2"'),
        ("<serial>", "<encryption format='luks'/><serial>"),
        ('protocol="rbd"', 'protocol="gluster"'),
        ("volumes/volume-1", "volume-1"),
        ("volumes/volume-1", "volumes/a@b"),
        ('protocol="rbd"', 'protocol="rbd" tls="yes"'),
        ('device="disk"', 'device="disk" snapshot="external"'),
        ("<serial>", "<transient/><serial>"),
    ],
)
def test_what_only_qemu_can_have_stays_its_own(change: tuple[str, str]) -> None:
    given = domain(plain("vda", "virtio") + RBD.replace(*change))
    assert translated(given, SERVED, controller=False).xml == given


def test_what_a_client_may_not_have_the_target_reach_stays_qemus() -> None:
    keyless = re.sub("<auth.*?</auth>", "", RBD, flags=re.DOTALL)
    for xml in (
        keyless,
        NBD.replace("name='fd00::1'", "transport='unix' socket='/run/virtlun/x.sock'"),
        NBD.replace("name='fd00::1'", "transport='unix' socket='/run/nbd/../virtlun/x.sock'"),
        NBD.replace("name='fd00::1'", "transport='unix' socket='/run/nbdx/x.sock'"),
    ):
        given = domain(plain("vda", "virtio") + xml)
        assert translated(given, SERVED, controller=False).xml == given
        ours = translated(given, replace(SERVED, allowed=ANY))
        assert ours.plan is not None
        # Whatever is written into the metadata.
        with pytest.raises(ImageError, match=r"virtlun\.toml"):
            check_allowed(ours.plan.luns[0], ALLOWED)
        again = define(ours.xml, SERVED, new_uuid=NEW_UUID, served_in=ours.xml)
        assert again.plan == ours.plan
    lacking = RBD.replace(f'<secret type="ceph" uuid="{SECRET}"/>', "")
    assert "its <auth> has no <secret>" in refusal(lacking)


def test_it_stays_qemus_where_the_domain_can_have_no_controller() -> None:
    private = "<memoryBacking><access mode='private'/></memoryBacking>"
    given = domain(plain("vda", "virtio") + RBD).replace("<os>", f"{private}<os>", 1)
    assert translated(given, SERVED).xml == given
    running = domain(plain("vda", "virtio"))
    assert stays_qemus(running, RBD, SERVED, live=True)
    assert not stays_qemus(running, RBD, SERVED, live=False)
    assert stays_qemus(given, RBD, SERVED, live=False)
    assert not stays_qemus(GUARD, RBD, SERVED, live=True)


def test_it_is_attached_updated_and_detached() -> None:
    change = attach(GUARD, RBD, SERVED, live=True)
    assert change is not None and change.plan is not None
    lun = lun_of(RBD)
    assert replace(change.lun, target=0) == replace(lun, target=0)
    config = attach(GUARD, RBD, SERVED, live=False)
    assert config is not None and config.domain_xml is not None
    with pytest.raises(TranslateError) as refused:
        update(config.domain_xml, RBD.replace("volume-1", "volume-2"), SERVED, live=True)
    assert refused.value.refusal is Refusal.CANNOT_CHANGE
    # Also where new ones are QEMU's again.
    assert update(config.domain_xml, RBD, SETTINGS, live=True) is not None
    assert detach(config.domain_xml, RBD, SETTINGS, live=True) is not None
    # It may be one of QEMU's.
    assert detach(GUARD, RBD, SERVED, live=True) is None


def test_where_no_client_defines_it_a_disk_stays_whose_it_is() -> None:
    before = translated(domain(plain("vda", "virtio") + lvol("sda") + RBD)).xml  # without it
    for served_in in (before, ""):
        again = define(before, SERVED, new_uuid=NEW_UUID, served_in=served_in)
        assert again.plan is not None
        assert [lun.dev for lun in again.plan.luns] == ["sda"]
        assert '<source protocol="rbd"' in again.xml
    ours = translated(domain(plain("vda", "virtio") + RBD), SERVED).xml
    for settings in (SERVED, SETTINGS):
        again = define(ours, settings, new_uuid=NEW_UUID, served_in=ours)
        assert again.plan == plan(ours)
    given = present(ours, live=False).replace("10.0.0.1", "10.0.0.9")
    given = given.replace("</devices>", f"{NBD}</devices>")
    sent = define(given, SERVED, new_uuid=NEW_UUID, current_xml=ours, served_in=ours)
    assert sent.plan is not None
    assert [lun.dev for lun in sent.plan.luns] == ["sdb"]


def test_a_change_of_another_disk_leaves_it_whose_it_is() -> None:
    private = translated(domain(plain("vda", "virtio") + RBD)).xml
    boot = lvol("sdd", more="<boot order='1'/>")
    change = attach(private, boot, SERVED, live=False)
    assert change is not None and change.domain_xml is not None and change.plan is not None
    assert [lun.dev for lun in change.plan.luns] == ["sdd"]
    assert '<source protocol="rbd"' in change.domain_xml
    without = detach(change.domain_xml, boot, SERVED, live=False)
    assert without is not None and without.domain_xml is not None
    assert without.plan is None
    assert '<source protocol="rbd"' in without.domain_xml
    ours = translated(domain(plain("vda", "virtio") + RBD), SERVED).xml
    change = attach(ours, boot, SETTINGS, live=False)
    assert change is not None and change.plan is not None
    assert {lun.dev for lun in change.plan.luns} == {"sdb", "sdd"}


def test_its_identity_is_of_what_it_is_opened_by() -> None:
    uuid = lun_of(RBD).uuid
    hosts = RBD.replace("10.0.0.1", "x").replace("fd00::2", "10.0.0.1").replace('"x"', '"fd00::2"')
    swapped = hosts.replace('"10.0.0.1" port="3300"', '"10.0.0.1" port="6789"').replace(
        '"fd00::2" port="6789"', '"fd00::2" port="3300"'
    )
    assert lun_of(swapped).uuid == uuid
    assert lun_of(RBD.replace('bus="scsi"', 'bus="virtio"')).uuid == uuid
    others = {
        lun_of(RBD.replace(*change)).uuid
        for change in (
            ("volume-1", "volume-2"),
            ("10.0.0.1", "10.0.0.9"),
            ("cinder", "nova"),
            (SECRET, SECRET.replace("4", "5")),
            ("<serial>", "<readonly/><serial>"),
            ("<serial>", "<shareable/><serial>"),
        )
    }
    assert len(others | {uuid}) == 7


def test_its_identity_stays_what_it_is_for_it_is_recorded_in_domains() -> None:
    assert lun_of(RBD).uuid == "1492d5b4-2ba7-5e13-b8c3-73d9c64cb478"
    assert lun_of(NBD).uuid == "8e492423-660d-51c5-bd05-8cc34f9e8bfb"
    # Another field of it is no part of what domains have recorded.
    assert [field.name for field in fields(NetworkSource)] == [
        "protocol",
        "pool",
        "image",
        "hosts",
        "config",
        "user",
        "secret",
        "read_only",
        "shared",
        "initiator",  # of iSCSI alone
    ]


def test_what_is_ours_stays_so_though_it_is_left_to_qemu_since() -> None:
    made = translated(domain(plain("vda", "virtio") + RBD), SERVED)
    before = made.xml.replace("<serial>", "<transient/><serial>")
    assert before != made.xml
    assert plan(before) == made.plan


def test_metadata_whose_uuid_is_that_of_another_source_is_damaged() -> None:
    made = translated(domain(plain("vda", "virtio") + RBD), SERVED)
    mine, other = lun_of(RBD).uuid, lun_of(RBD.replace("volume-1", "volume-2")).uuid
    assert mine is not None and other is not None
    for wrong in (made.xml.replace(mine, other), made.xml.replace(f'uuid="{mine}"', "", 1)):
        assert wrong != made.xml
        with pytest.raises(TranslateError, match="the uuid of disk sdb is not that of its source"):
            plan(wrong)
        assert find(wrong, "sdb", SERVED) is None


def test_the_ways_to_say_it() -> None:
    inside = RBD.replace("</source>", "").replace("</auth>", "</auth></source>")
    assert source_of(inside) == source_of(RBD)
    usage = RBD.replace(f'uuid="{SECRET}"', "usage='client.cinder secret'")
    assert source_of(usage).secret == SecretRef(None, "client.cinder secret")
    spaced = source_of(RBD.replace("volumes/volume-1", "volumes/ns/volume-1"))
    assert (spaced.pool, spaced.image) == ("volumes/ns", "volume-1")
    conf = RBD.replace("</source>", "<config file='/etc/ceph/b.conf'/></source>")
    assert source_of(conf).config == "/etc/ceph/b.conf"
    snapshot = RBD.replace("</source>", "<snapshot name='monday'/></source>")
    assert "cannot be written to: give the disk <readonly/>" in refusal(snapshot)
    found = source_of(snapshot.replace("<serial>", "<readonly/><serial>"))
    assert (found.image, found.read_only) == ("volume-1@monday", True)


def test_a_name_that_several_disks_have_means_the_one_that_a_client_shows_by_it() -> None:
    export = NBD.replace("a b", "sda")
    image = RBD.replace("volumes/volume-1", "lvs0/v")
    made = translated(domain(export + image + lvol("sda")), SERVED)
    shown = {
        name: found.dev
        for name in (
            "sda",
            "sdb",
            "sdc",
            "lvs0/v",
            "rbd:lvs0/v",
            "nbd:[fd00::1]:10809/sda",
            "/dev/virtlun/lvs0/v",
        )
        if (found := find(made.xml, name, SERVED)) is not None
    }
    assert shown == {
        "sda": "sda",
        "sdb": "sdb",
        "sdc": "sdc",
        "lvs0/v": "sda",
        "rbd:lvs0/v": "sdb",
        "nbd:[fd00::1]:10809/sda": "sdc",
        "/dev/virtlun/lvs0/v": "sda",
    }


def test_a_prefix_of_volumes_goes_before_the_protocol() -> None:
    lun = lun_of(RBD.replace("volumes/volume-1", "virtlun/lvs0/data"))
    assert (lun.volume.alias, lun.volume.source) == ("lvs0/data", None)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (('"10.0.0.1"', '"10.0.0.1,key=x"'), "no name or address"),
        (('"10.0.0.1"', '"10.0.0.1:6789"'), "no name or address"),
        (('"10.0.0.1"', '":::::"'), "no name or address"),
        (('"10.0.0.1"', '"[::1"'), "no name or address"),
        (('"6789"', '"70000"'), "'70000' is no port"),
        (('"cinder"', '"a b"'), "'a b' is no user"),
        (('type="ceph"', 'type="iscsi"'), "is to have type='ceph'"),
        (("</source>", "<config file='/tmp/ceph.conf'/></source>"), "is to be in /etc/ceph"),
        (("</source>", "<config file='/etc/ceph/../x'/></source>"), "is to be in /etc/ceph"),
        (('cache="none"', 'iommu="on"'), "which all virtlun disks of the domain share"),
    ],
)
def test_what_is_wrong_is_one_sentence(change: tuple[str, str], why: str) -> None:
    assert why in refusal(RBD.replace(*change))


def test_an_export_of_an_nbd_server() -> None:
    assert nbd_uris(source_of(NBD)) == ["nbd://[fd00::1]:10809/a%20b"]
    local = NBD.replace("name='fd00::1'", "transport='unix' socket='/run/nbd/a b.sock'")
    assert nbd_uris(source_of(local)) == ["nbd+unix:///a%20b?socket=%2Frun%2Fnbd%2Fa%20b.sock"]
    assert "one <host>, not 2" in refusal(NBD.replace("</source>", "<host name='b'/></source>"))
    unknown = NBD.replace("fd00::1", "no-such-host.invalid")
    with pytest.raises(ImageError, match=r"NBD server no-such-host\.invalid: "):
        nbd_uris(source_of(unknown))


ISCSI = f"""\
<disk type='network' device='disk'>
  <driver name='qemu' type='raw'/>
  <source protocol='iscsi' name='iqn.2001-05.com.array:vols/3'>
    <host name='san.lan'/>
    <initiator><iqn name='iqn.2026-11.org.example:vm'/></initiator>
    <auth username='me#1'><secret type='iscsi' uuid='{SECRET}'/></auth>
  </source>
  <target dev='sdd' bus='scsi'/>
</disk>
"""


def test_a_lun_of_an_iscsi_target() -> None:
    lun = lun_of(ISCSI)
    assert lun.volume.source == NetworkSource(
        protocol="iscsi",
        pool="iqn.2001-05.com.array:vols",
        image="3",
        hosts=(Host("san.lan", 3260),),
        config=None,
        user="me#1",
        secret=SecretRef(SECRET, None),
        read_only=False,
        shared=False,
        initiator="iqn.2026-11.org.example:vm",
    )
    assert lun.volume.alias == "iscsi:iqn.2001-05.com.array:vols/3"
    given = domain(plain("vda", "virtio") + ISCSI)
    made = translated(given, SERVED)
    assert canonical(present(made.xml, live=False)) == canonical(given)
    for name in ("sdd", "iqn.2001-05.com.array:vols/3", lun.volume.alias):
        assert find(made.xml, name, SERVED) == lun
    without = source_of(ISCSI.replace("vols/3", "vols"))
    assert (without.pool, without.image) == ("iqn.2001-05.com.array:vols", "0")
    others = {
        lun_of(ISCSI.replace(*change)).uuid
        for change in (
            ("vols/3", "vols/4"),
            ("san.lan", "10.0.0.7"),
            ("me#1", "me"),
            ("example:vm", "example:vm2"),
            ("<target", "<shareable/><target"),
        )
    }
    assert len(others | {lun.uuid}) == 6
    assert lun.uuid == "e019220d-5210-5e92-9abb-18e669609fc1"


@pytest.mark.parametrize(
    "change",
    [
        ("device='disk'", "device='lun'"),
        ("device='disk'", "device='cdrom'"),
        ("san.lan", "san.lan.evil"),
        ("san.lan", "10.0.1.1"),
        ("san.lan", "::ffff:10.0.0.1"),
        ("name='san.lan'", "name='san.lan' port='3261'"),
        ("name='san.lan'", "name='10.0.0.1' port='22'"),
    ],
)
def test_what_of_iscsi_stays_qemus(change: tuple[str, str]) -> None:
    given = domain(plain("vda", "virtio") + ISCSI.replace(*change))
    assert translated(given, SERVED, controller=False).xml == given
    for host in ("10.0.0.255", "fd00::1", "[fd00::1]", "san.lan"):
        assert lun_of(ISCSI.replace("san.lan", host)).volume.source is not None


@pytest.mark.parametrize(
    ("portal", "host", "port", "included"),
    [
        ("san.lan:3261", "san.lan", 3261, True),
        ("san.lan:3261", "san.lan", 3260, False),
        ("10.0.0.0/24:860", "10.0.0.7", 860, True),
        ("10.0.0.0/24:860", "10.0.0.7", 3260, False),
        ("[fd00::1]:860", "fd00::1", 860, True),
        ("[fd00::]/8:860", "fd00::1", 860, True),
        ("fd00::/8", "fd00::1", 3260, True),
        ("fd00::/8", "10.0.0.1", 3260, False),
        ("*", "anything", 1, True),
    ],
)
def test_a_portal_has_a_port(portal: str, host: str, port: int, included: bool) -> None:
    assert portals.includes([portals.check(portal)], host, port) is included


@pytest.mark.parametrize(
    "portal",
    [
        "",
        "10.0.0.0/33",
        "10.0.0.300",
        "a b",
        "san.lan:0",
        "san.lan:65536",
        "san/lan",
        "a:b",
        "[::1",
    ],
)
def test_what_no_portal_can_be_is_refused(portal: str) -> None:
    with pytest.raises(ValueError, match="is no name, address or network"):
        portals.check(portal)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("vols/3", "vols/16384"), "a target and a LUN of 0 to 16383"),
        (("vols/3", "vols/3/4"), "a target and a LUN of 0 to 16383"),
        (("vols/3", "vols/\u0663"), "a target and a LUN of 0 to 16383"),
        (("iqn.2001-05.com.array:vols", "a%20b"), "is to name a target"),
        (("<host name='san.lan'/>", ""), "is to have one <host>, not 0"),
        (("<initiator>", "<host name='b'/><initiator>"), "is to have one <host>, not 2"),
        (("name='san.lan'", "name='san.lan' transport='rdma'"), "by TCP"),
        (("san.lan", "fe80::1%eth0"), "a <host> with a zone, as fe80::1%eth0, is not known"),
        (("iqn.2026-11.org.example:vm", "a b"), "'a b' is no name of an initiator"),
        (("me#1", "a b"), "'a b' is no user of CHAP"),
        (("type='iscsi'", "type='ceph'"), "is to have type='iscsi'"),
    ],
)
def test_what_is_wrong_with_a_lun_is_one_sentence(change: tuple[str, str], why: str) -> None:
    assert why in refusal(ISCSI.replace(*change))


@pytest.mark.parametrize(
    "why",
    [
        "10.0.0.1:3260 cannot be logged in to: Authentication failure",
        "LUN 3 of iqn.a: the target has no such LUN",
    ],
)
def test_a_target_that_refuses_is_asked_at_one_address(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [(None, None, None, "", (address, 0)) for address in ("10.0.0.1", "fd00::1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    asked: list[object] = []

    class Array:
        """Refuses."""

        def call(self, method: str, **given: object) -> object:
            asked.append((method, given["url"]))
            raise RpcError(-5, why)

    array: Any = Array()
    with pytest.raises(ImageError, match=why):
        open_image(array, "vm-1", lun_of(ISCSI), "pass?word")
    assert len(asked) == 1


def test_a_lun_is_opened_at_each_address_as_its_initiator(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(None, None, None, "", (address, 0)) for address in ("10.0.0.1", "fd00::1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    asked: list[dict[str, object]] = []

    class Array:
        """Answers at the second."""

        def call(self, method: str, **given: object) -> object:
            assert method == "bdev_iscsi_create"
            asked.append({name: value for name, value in given.items() if value is not None})
            if "10.0.0.1" in str(given["url"]):
                raise RpcError(-5, "connection refused")
            return given["name"]

    array: Any = Array()
    lun = lun_of(ISCSI)
    assert open_image(array, "vm-1", lun, "pass?word")
    url = "iscsi://[fd00::1]:3260/iqn.2001-05.com.array:vols/3"
    assert asked[1] == {
        "name": lun.uuid,
        "uuid": lun.uuid,
        "url": url,
        "initiator_iqn": "iqn.2026-11.org.example:vm",
        "user": "me#1",
        "password": "pass?word",
        "guest_disk": True,
    }
    asked.clear()
    own = re.sub("<initiator>.*</initiator>", "", ISCSI)
    assert open_image(array, f"vm-{SECRET}", lun_of(own), "x")
    assert asked[0]["initiator_iqn"] == f"iqn.2008-11.org.linux-kvm:{SECRET}"


def test_each_address_of_a_server_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(None, None, None, "", (address, 0)) for address in ("10.0.0.1", "fd00::1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    lun = lun_of(NBD.replace("fd00::1", "storage"))
    asked: list[str] = []

    class Server:
        """Answers at one of them."""

        def __init__(self, at: str, code: int = -111) -> None:
            self.at, self.code = at, code

        def call(self, method: str, **given: object) -> object:
            assert method == "virtlun_nbd_create"
            asked.append(str(given["uri"]))
            if self.at not in asked[-1]:
                raise RpcError(self.code, "connection refused")
            return given["name"]

    for at, tries in (("10.0.0.1", 1), ("fd00::1", 2)):
        asked.clear()
        server: Any = Server(at)
        assert open_image(server, "vm-1", lun, None)
        assert len(asked) == tries
    asked.clear()
    nobody: Any = Server("none")
    with pytest.raises(ImageError, match="connection refused"):
        open_image(nobody, "vm-1", lun, None)
    assert asked == ["nbd://10.0.0.1:10809/a%20b", "nbd://[fd00::1]:10809/a%20b"]
    asked.clear()
    taken: Any = Server("none", BUSY)
    with pytest.raises(ImageError):
        open_image(taken, "vm-1", lun, None)
    assert asked == ["nbd://10.0.0.1:10809/a%20b"], "another guest writes to it"
