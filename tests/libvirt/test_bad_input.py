"""What people get wrong with plain virsh: one sentence that says what to do, nothing changed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pydataplane.errors import RpcError
from tests.support.domain import domain_xml
from tests.support.host import Host
from tests.support.libvirtd import VirshError, virsh

pytestmark = [pytest.mark.root, pytest.mark.vm]

MIB = 1 << 20


@pytest.fixture(scope="module")
def running(host: Host) -> Iterator[Host]:
    """Two running domains, `one` and `two`, and the volumes a, b and c of 32 MiB."""
    for name in ("a", "b", "c"):
        host.volumes.create(f"lvs0/{name}", 32 * MIB)
    for name in ("one", "two"):
        host.define(name)
        host.virsh("start", name)
    host.virsh("attach-disk", "one", "/dev/virtlun/lvs0/a", "sdb", "--live", "--config")
    yield host
    for name in ("one", "two"):
        host.virsh("destroy", name, check=False)


def state(host: Host) -> dict[str, Any]:
    """Returns all that a failed call must leave as it was."""
    return {
        "controllers": [
            # Not when the guest has seen them: it may do so at any time.
            (item["ctrlr"], entry["scsi_dev_num"], [lun["bdev_name"] for lun in entry["luns"]])
            for item in host.client.call("vhost_get_controllers")
            for entry in item["backend_specific"]["scsi"]
        ],
        "volumes": host.volumes.volumes(),
        "xml": [
            host.virsh_direct("dumpxml", *flags, name)
            for name in ("one", "two")
            for flags in ((), ("--inactive",))
        ],
    }


def refused(host: Host, *words: str) -> str:
    """Runs virsh, which must fail and change nothing; returns its sentence."""
    before = state(host)
    with pytest.raises(VirshError) as caught:
        host.virsh(*words)
    assert state(host) == before
    # virsh says "Failed to ...", then libvirt's error; XML errors go on with the place in the text.
    first, *more = str(caught.value).split("error: ")[-1].splitlines()
    said, where = first.strip(), [line.strip() for line in more if line.strip()]
    assert "Traceback" not in str(caught.value)
    assert not where or (len(where) == 2 and set(where[1]) <= set("-^")), caught.value
    assert 10 < len(said) < 300, said
    return said


def attach(host: Host, volume: str, dev: str, *words: str, domain: str = "one") -> str:
    return refused(
        host, "attach-disk", domain, f"/dev/virtlun/{volume}", dev, *(words or ("--live",))
    )


def test_an_unknown_volume_is_named(running: Host) -> None:
    assert "lvs0/none" in attach(running, "lvs0/none", "sdc")


def test_an_unknown_lvstore_is_named(running: Host) -> None:
    assert "there is no lvstore nostore" in attach(running, "nostore/a", "sdc")


def test_a_path_that_is_no_volume_is_refused_as_such(running: Host) -> None:
    assert "'lvs0/a/b' is not LVSTORE/LVOL" in attach(running, "lvs0/a/b", "sdc")


def test_a_volume_in_use_by_another_domain_names_the_domain(running: Host) -> None:
    said = attach(running, "lvs0/a", "sdb", "--live", "--config", domain="two")
    assert "volume lvs0/a is in use by domain one: detach it there first" in said
    assert "<shareable/> in both domains" in said


def test_a_shareable_disk_may_be_in_two_domains(running: Host) -> None:
    for name in ("one", "two"):
        running.virsh(
            *("attach-disk", name, "/dev/virtlun/lvs0/b", "sdd"),
            *("--live", "--mode", "shareable"),
        )
    for name in ("one", "two"):
        running.virsh("detach-disk", name, "sdd", "--live")


def test_a_duplicate_target_dev_is_named(running: Host) -> None:
    assert "target sdb already exists" in attach(running, "lvs0/b", "sdb", "--live", "--config")


def test_the_same_volume_twice_in_one_domain_is_refused(running: Host) -> None:
    said = attach(running, "lvs0/a", "sdx")
    assert "volume lvs0/a is already attached to this domain as sdb" in said


def test_detaching_what_is_not_there_is_refused(running: Host) -> None:
    assert "sdq" in refused(running, "detach-disk", "one", "sdq", "--live")


def test_a_volume_too_big_for_the_store_says_what_is_free(running: Host) -> None:
    before = state(running)
    with pytest.raises(RpcError, match=r"lvs0.*free|free.*lvs0"):
        running.volumes.create("lvs0/big", 1 << 43)
    with pytest.raises(RpcError, match=r"free"):
        running.volumes.resize("lvs0/a", 1 << 43)
    assert state(running) == before


def test_blockresize_beyond_the_store_is_refused(running: Host) -> None:
    assert "bytes left" in refused(running, "blockresize", "one", "sdb", "8T")


def test_blockresize_that_would_cut_off_data_is_refused(running: Host) -> None:
    assert "shrink" in refused(running, "blockresize", "one", "sdb", "16M")


def test_blockresize_of_an_unknown_disk_is_refused(running: Host) -> None:
    assert "sdq" in refused(running, "blockresize", "one", "sdq", "64M")


@pytest.mark.parametrize(
    "xml",
    [
        "<disk type='file'><source file='/dev/virtlun/lvs0/b'/><target dev='sdc'",
        "not xml at all",
        "<disk/>",
        "<disk type='file'><source file='/dev/virtlun/lvs0/b'/></disk>",
    ],
)
def test_malformed_device_xml_is_refused(running: Host, tmp_path: Path, xml: str) -> None:
    path = tmp_path / "device.xml"
    path.write_text(xml)
    refused(running, "attach-device", "one", str(path), "--live")


def test_malformed_domain_xml_gets_libvirts_own_error(running: Host, tmp_path: Path) -> None:
    path = tmp_path / "domain.xml"
    path.write_text("<domain type='qemu'><name>x</name>")
    refused(running, "define", str(path))
    through, direct = (
        virsh(uri, "define", str(path), check=False)
        for uri in (running.uri, running.libvirtd.uri())
    )
    assert through == direct


def test_a_domain_with_an_unknown_lvstore_does_not_start(running: Host) -> None:
    """An unknown volume of a known one is made: test_missing_volumes.py."""
    disk = (
        "<disk type='file'><source file='/dev/virtlun/gone/x'/><target dev='sdb' bus='scsi'/>"
        "</disk>"
    )
    running.define("three", devices=disk)
    assert "lvstore gone with volume gone/x is not loaded" in refused(running, "start", "three")
    assert running.virsh("domstate", "three") == "shut off"
    running.virsh("undefine", "three")


def test_a_domain_started_without_our_controller_says_what_to_do(running: Host) -> None:
    path = running.scratch / "four.xml"
    path.write_text(domain_xml("four", running.image, running.scratch))
    running.virsh_direct("define", str(path))
    running.virsh_direct("start", "four")
    said = attach(running, "lvs0/c", "sdb", domain="four")
    assert "runs without a virtlun controller" in said
    assert "`virtlun domain prepare four` gives it one at its next start" in said
    assert running.virsh("domstate", "four") == "running"
    running.virsh("destroy", "four")
    running.virsh("undefine", "four")


def test_a_dead_target_fails_the_attach_and_the_domain_goes_on(running: Host) -> None:
    inactive = running.virsh_direct("dumpxml", "--inactive", "two")
    live = running.virsh_direct("dumpxml", "two")
    running.kill_target()
    try:
        with pytest.raises(VirshError) as caught:
            running.virsh("attach-disk", "two", "/dev/virtlun/lvs0/c", "sdc", "--live", "--config")
        assert f"no target answers on {running.paths.rpc_socket}" in str(caught.value)
        assert running.virsh("domstate", "two") == "running"
        assert running.virsh_direct("dumpxml", "--inactive", "two") == inactive
        assert running.virsh_direct("dumpxml", "two") == live
    finally:
        running.start_target()
    time.sleep(0.1)
    names = {volume.path for volume in running.volumes.volumes()}
    assert {"lvs0/a", "lvs0/b", "lvs0/c"} <= names
