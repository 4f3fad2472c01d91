"""Volumes that are not there when their domain starts. With a real libvirtd.

By default that fails the start. With `create_missing_mib` one that never existed is made, and one
that is lost fails the start. Each of it twice: started through the gateway, and behind its back,
where the hook alone acts.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from pydataplane.errors import VolumeNotFoundError
from pydataplane.lvols import Volume
from tests.support.host import Host
from tests.support.libvirtd import VirshError
from tests.support.night import by_day
from tests.support.wait import until

pytestmark = [pytest.mark.root, pytest.mark.vm]

MIB = 1 << 20
DEADLINE_S = 90.0
WAYS = ("virsh", "virsh_direct")
"""Methods of Host: through the gateway, and behind its back."""
GATEWAY_BY_DAY = ("virsh", pytest.param("virsh_direct", marks=pytest.mark.nightly))
HOOK_BY_DAY = (pytest.param("virsh", marks=pytest.mark.nightly), "virsh_direct")
"""The same for what boots a guest or two: one way by day, both at night."""


def define(host: Host, name: str) -> str:
    """Defines a domain with a disk of volume lvs0/NAME, through the gateway; returns its UUID."""
    host.define(
        name,
        devices=f"<disk type='file' device='disk'><source file='/dev/virtlun/lvs0/{name}'/>"
        "<target dev='sda' bus='scsi'/></disk>",
    )
    return host.virsh("domuuid", name)


def volume(host: Host, name: str) -> Volume | None:
    """Returns volume lvs0/NAME, None if there is none."""
    try:
        return host.volumes.volume(f"lvs0/{name}")
    except VolumeNotFoundError:
        return None


def known(host: Host, name: str, uuid: str) -> str | None:
    """Returns the UUID recorded for the domain's disk: in its metadata, else by the hook."""
    xml = host.virsh_direct("dumpxml", name, "--inactive")
    found = re.search(r"<virtlun:disk [^>]*\buuid=[\"']([^\"']+)", xml)
    if found:
        return found[1]
    record = host.scratch / f"hook/vm-{uuid}.json"
    if record.exists():
        return str(json.loads(record.read_text())["volumes"][f"lvs0/{name}"])
    return None


def assert_unused(host: Host) -> None:
    """Waits until all controllers are gone; the gateway too may look at a domain that ended."""
    left = partial(host.client.call, "vhost_get_controllers")
    until(lambda: not left(), lambda: f"the end of {left()}", DEADLINE_S)


def refused(host: Host, way: str, name: str, *words: str) -> str:
    """Starts a domain, which must fail, leave no controller and make no volume."""
    before = [(v.path, v.uuid) for v in host.volumes.volumes()]
    with pytest.raises(VirshError) as error:
        getattr(host, way)("start", name, *words)
    assert host.virsh("domstate", name) == "shut off"
    assert_unused(host)
    assert [(v.path, v.uuid) for v in host.volumes.volumes()] == before
    return str(error.value)


@pytest.mark.parametrize("way", GATEWAY_BY_DAY)
def test_a_lost_volume_does_not_come_back_as_an_empty_one(host: Host, way: str) -> None:
    """Also where the domain is undefined and defined again, as Nova does at each power on."""
    name = f"nova-{WAYS.index(way)}"
    host.define(name)
    host.virsh("start", name)
    kept = host.volumes.create(f"lvs0/{name}", 8 * MIB)
    host.virsh("attach-disk", name, f"/dev/virtlun/lvs0/{name}", "sdb", "--live", "--config")
    agent = host.agent(name)
    agent.wait_for("[ -b /dev/sda ] && echo of old | dd of=/dev/sda bs=512 conv=sync,fsync")
    agent.close()
    xml = host.scratch / f"{name}-nova.xml"
    xml.write_text(host.virsh("dumpxml", name, "--inactive", "--security-info"))
    host.virsh("destroy", name)
    host.volumes.rename(kept.uuid, f"{name}-gone")
    host.virsh("undefine", name)
    host.virsh("define", str(xml))
    said = refused(host, way, name)
    assert (
        f"disk sdb: there is no volume lvs0/{name}; if it was renamed or lost, bring it back; make"
        f" an empty one with `virtlun volume create lvs0/{name} SIZE`"
    ) in said
    assert volume(host, name) is None
    host.volumes.rename(kept.uuid, name)
    getattr(host, way)("start", name)
    agent = host.agent(name)
    assert agent.wait_for("[ -b /dev/sda ] && head -c 6 /dev/sda") == "of old"
    agent.close()
    getattr(host, way)("destroy", name)
    assert_unused(host)


@pytest.fixture
def making(host: Host) -> Iterator[None]:
    """What never existed is made."""
    configured(host, "create_missing_mib = 10240")
    yield
    configured(host, "")


def configured(host: Host, line: str) -> None:
    """Gives the configuration, the end of which is the hook's, one more line, or takes it away."""
    text = re.sub(r"create_missing_mib.*\n", "", host.config.read_text())
    host.stop_gateway()
    host.config.write_text(text + (f"{line}\n" if line else ""))
    host.start_gateway()


@pytest.mark.nightly
@pytest.mark.usefixtures("making")
@pytest.mark.parametrize("way", HOOK_BY_DAY)
def test_a_volume_that_never_was_is_made_and_its_loss_is_seen(host: Host, way: str) -> None:
    start: Callable[..., str] = getattr(host, way)
    name = f"new-{WAYS.index(way)}"
    uuid = define(host, name)
    assert volume(host, name) is None
    assert known(host, name, uuid) is None
    start("start", name)
    made = volume(host, name)
    assert made is not None
    assert (made.thin, made.size) == (True, 10240 * MIB)
    assert known(host, name, uuid) == made.uuid
    agent = host.agent(name)
    agent.wait_for(f"[ $(cat /sys/block/sda/size) = {10240 * MIB // 512} ]")
    agent.run("dd if=/dev/zero of=/dev/sda bs=1M count=2 conv=fsync")
    agent.close()
    start("destroy", name)
    start("start", name)
    assert volume(host, name) == host.volumes.volume(made.uuid), "the same one again"
    start("destroy", name)
    assert_unused(host)

    host.volumes.delete(made.uuid)
    for other in WAYS:
        said = refused(host, other, name)
        assert f"volume lvs0/{name} (UUID {made.uuid}) is lost" in said
        assert f"virtlun volume create lvs0/{name} SIZE --uuid {made.uuid}" in said
    # What the sentence says to do works.
    subprocess.run(
        [
            *(str(Path(sys.executable).parent / "virtlun"), "--socket", host.paths.rpc_socket),
            *("volume", "create", f"lvs0/{name}", "32M", "--uuid", made.uuid),
        ],
        check=True,
        capture_output=True,
    )
    start("start", name)
    start("destroy", name)


@by_day("virsh")
@pytest.mark.parametrize("way", WAYS)
def test_a_namesake_is_not_taken_for_the_lost_volume(host: Host, way: str) -> None:
    name = f"namesake-{WAYS.index(way)}"
    old = host.volumes.create(f"lvs0/{name}", 8 * MIB)
    uuid = define(host, name)
    assert known(host, name, uuid) == old.uuid, "the gateway records it at define"
    host.volumes.delete(old.uuid)
    new = host.volumes.create(f"lvs0/{name}", 8 * MIB)
    said = refused(host, way, name)
    assert f"(UUID {old.uuid}) is lost, and another one has its name (UUID {new.uuid})" in said
    xml = host.scratch / "same.xml"
    xml.write_text(host.virsh("dumpxml", name, "--inactive"))
    host.virsh("define", str(xml))
    assert known(host, name, uuid) == old.uuid, "to edit the domain is not to accept the other"
    refused(host, way, name)
    host.virsh("detach-disk", name, "sda", "--config")
    host.virsh("attach-disk", name, f"/dev/virtlun/lvs0/{name}", "sda", "--config")
    assert known(host, name, uuid) == new.uuid
    getattr(host, way)("start", name)
    getattr(host, way)("destroy", name)


@by_day("virsh_direct")
@pytest.mark.parametrize("way", WAYS)
def test_a_renamed_volume_is_still_the_disks(host: Host, way: str) -> None:
    name = f"renamed-{WAYS.index(way)}"
    old = host.volumes.create(f"lvs0/{name}", 8 * MIB)
    uuid = define(host, name)
    host.volumes.rename(old.uuid, f"other-{WAYS.index(way)}")
    getattr(host, way)("start", name)
    (controller,) = host.client.call("vhost_get_controllers")
    (target,) = controller["backend_specific"]["scsi"]
    assert target["luns"][0]["bdev_name"] == old.uuid
    assert volume(host, name) is None
    assert known(host, name, uuid) == old.uuid
    getattr(host, way)("destroy", name)


@pytest.mark.nightly
@pytest.mark.usefixtures("making")
def test_an_lvstore_that_is_not_loaded_fails_every_start(host: Host) -> None:
    """Neither a volume that is in it nor one that never existed is made elsewhere, or lost."""
    host.volumes.create("lvs0/inside", 8 * MIB)
    define(host, "inside")
    define(host, "never")
    file, away = host.scratch / "lvs0.img", host.scratch / "away.img"
    host.stop_target()
    file.rename(away)
    host.start_target()
    try:
        assert host.volumes.lvstores() == []
        for name in ("inside", "never"):
            for way in WAYS:
                said = refused(host, way, name)
                assert f"lvstore lvs0 with volume lvs0/{name}" in said
                assert "is not loaded" in said
    finally:
        host.stop_target()
        away.rename(file)
        host.start_target()
    for name in ("inside", "never"):
        host.virsh("start", name)
        host.virsh("destroy", name)


@pytest.mark.nightly
@pytest.mark.usefixtures("making")
def test_what_the_hook_recorded_goes_into_the_metadata_with_the_next_gateway(host: Host) -> None:
    uuid = define(host, "behind")
    record = host.scratch / f"hook/vm-{uuid}.json"
    host.stop_gateway()
    try:
        host.virsh_direct("start", "behind")
        made = volume(host, "behind")
        assert made is not None
        assert json.loads(record.read_text())["volumes"] == {"lvs0/behind": made.uuid}
        host.virsh_direct("destroy", "behind")
        assert_unused(host)
        host.volumes.delete(made.uuid)
    finally:
        host.start_gateway()
    until(lambda: not record.exists(), "the gateway takes what the hook recorded", DEADLINE_S)
    assert made.uuid in host.virsh_direct("dumpxml", "behind", "--inactive")
    for way in WAYS:
        assert "is lost" in refused(host, way, "behind")


@pytest.mark.nightly
@pytest.mark.usefixtures("making")
def test_a_new_domain_of_an_old_uuid_has_no_past(host: Host) -> None:
    uuid = define(host, "again")
    host.virsh_direct("start", "again")
    host.virsh_direct("destroy", "again")
    host.virsh("undefine", "again")
    assert_unused(host)
    made = volume(host, "again")
    assert made is not None
    host.volumes.delete(made.uuid)
    xml = host.scratch / "again.xml"
    if f"<uuid>{uuid}</uuid>" not in xml.read_text():
        xml.write_text(xml.read_text().replace("</name>", f"</name><uuid>{uuid}</uuid>", 1))
    host.virsh("define", str(xml))
    assert known(host, "again", uuid) is None
    host.virsh_direct("start", "again")
    host.virsh_direct("destroy", "again")
    assert volume(host, "again") is not None


@pytest.mark.nightly
@pytest.mark.usefixtures("making")
def test_a_transient_domain_gets_its_volume_too(host: Host) -> None:
    define(host, "transient")
    xml = host.scratch / "transient.xml"
    host.virsh("undefine", "transient")
    host.virsh("create", str(xml))
    made = volume(host, "transient")
    assert made is not None
    assert made.thin
    assert f'uuid="{made.uuid}"' in host.virsh_direct("dumpxml", "transient").replace("'", '"')
    host.virsh("destroy", "transient")


@pytest.mark.nightly
@pytest.mark.usefixtures("making")
@pytest.mark.parametrize("way", HOOK_BY_DAY)
def test_a_saved_guest_does_not_wake_up_with_an_empty_disk(host: Host, way: str) -> None:
    name = f"saved-{WAYS.index(way)}"
    define(host, name)
    host.virsh_direct("start", name)  # the metadata of the running side has no UUID
    host.agent(name).close()
    host.virsh_direct("managedsave", name)
    assert_unused(host)
    made = volume(host, name)
    assert made is not None
    host.volumes.delete(made.uuid)
    record = host.scratch / f"hook/vm-{host.virsh('domuuid', name)}.json"
    record.unlink(missing_ok=True)  # as if nobody knew; but the gateway may have taken it over
    said = refused(host, way, name)
    assert f"there is no volume lvs0/{name}" in said or f"lvs0/{name} (UUID {made.uuid})" in said
    assert name in host.virsh("list", "--all", "--with-managed-save", "--name").split()
    host.volumes.create(f"lvs0/{name}", 8 * MIB, uuid=made.uuid)
    host.virsh("managedsave-remove", name)
    getattr(host, way)("start", name)
    getattr(host, way)("destroy", name)
