"""blockcopy by plain virsh: a volume moves to another lvstore while its guest writes to it."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

import libvirt
import pytest

from tests.support.agent import Agent
from tests.support.host import Host
from tests.support.libvirtd import NEWER_QEMU, VirshError
from tests.support.night import at_night
from tests.support.verified_io import VerifiedIo
from tests.support.wait import until
from tests.support.watcher import Watcher

pytestmark = [pytest.mark.root, pytest.mark.vm]

NAME = "mover"
MIB = 1 << 20
SIZE = 32 * MIB
SOURCE = "lvs0/disk"
DISK = (
    "<disk type='file'><source file='{}'/><target dev='sda' bus='scsi'/>"
    "<address type='drive' unit='0'/></disk>"
)
VCPUS, DEPTH = 2, 4
SLOW_MIB = 1
DEADLINE_S = 120.0


def path(volume: str) -> str:
    return f"/dev/virtlun/{volume}"


@pytest.fixture(scope="module")
def domain(host: Host) -> Iterator[Host]:
    """A running guest with the thin volume sda, and a second lvstore."""
    host.volumes.create_lvstore("lvs1", host.scratch / "lvs1.img", 256 * MIB)
    host.volumes.create(SOURCE, SIZE, thin=True)
    devices = DISK.format(path(SOURCE))
    host.define(NAME, devices=devices, vcpus=VCPUS, emulator=NEWER_QEMU)
    host.virsh("start", NAME)
    yield host
    host.virsh("destroy", NAME, check=False)


@pytest.fixture(scope="module")
def agent(domain: Host) -> Iterator[Agent]:
    """The guest's shell."""
    agent = domain.agent(NAME)
    agent.wait_for("[ -b /dev/sda ]", DEADLINE_S)
    yield agent
    agent.close()


@pytest.fixture(scope="module")
def load(agent: Agent) -> Iterator[VerifiedIo]:
    """The guest's I/O of all kinds, which it checks all the time."""
    io = VerifiedIo(agent, "sda", seed=7, threads=VCPUS, depth=DEPTH)
    yield io
    io.finish()
    assert "I/O error" not in agent.run("dmesg")


@pytest.fixture(autouse=True)
def _nothing_is_left(domain: Host, load: VerifiedIo) -> Iterator[None]:
    """After each test the guest's I/O goes on, there is no job, and one volume."""
    yield
    load.goes_on(load.status().requests, DEADLINE_S)
    domain.virsh("blockjob", NAME, "sda", "--abort", check=False)
    until(lambda: not list((domain.scratch / "notes").glob("*")), "the journal is empty")
    here = source(domain)
    for volume in [*domain.volumes.volumes("lvs0"), *domain.volumes.volumes("lvs1")]:
        if path(volume.path) != here:
            domain.volumes.delete(volume.uuid)


def source(host: Host) -> str:
    """Returns the disk's source, which both sides and the target agree about."""
    live, inactive = (
        host.virsh("domblklist", NAME, *words).split()[-1] for words in ((), ("--inactive",))
    )
    assert live == inactive
    uuid = host.volumes.volume(live.removeprefix("/dev/virtlun/")).uuid
    assert lun(host)["bdev_name"] == uuid
    return live


def lun(host: Host) -> dict[str, Any]:
    (controller,) = host.client.call_raw("vhost_get_controllers")
    found: dict[str, Any] = controller["backend_specific"]["scsi"][0]["luns"][0]
    return found


def elsewhere(host: Host) -> str:
    """Returns a new volume's name, in the lvstore that the disk is not in."""
    here = source(host)
    other = "lvs1" if "/lvs0/" in here else "lvs0"
    return f"{other}/to-{time.monotonic_ns()}"


def copy(host: Host, to: str, *words: str) -> str:
    return host.virsh("blockcopy", NAME, "sda", "--dest", path(to), "--transient-job", *words)


def mirror(host: Host, *words: str) -> tuple[str | None, str | None] | None:
    """Returns the path that the disk is being copied to, and whether that is ready."""
    disk = ElementTree.fromstring(host.virsh("dumpxml", NAME, *words)).find("devices/disk")
    assert disk is not None
    found = disk.find("mirror")
    if found is None:
        return None
    to = found.find("source")
    assert to is not None and found.get("job") == "copy"
    assert list(disk).index(found) < list(disk).index(disk.find("target"))  # type: ignore[arg-type]
    return to.get("file"), found.get("ready")


def refused(host: Host, *words: str) -> str:
    with pytest.raises(VirshError) as caught:
        host.virsh(*words)
    return str(caught.value)


def until_ready(host: Host) -> None:
    done = re.compile(r"\[ *100(\.00)? %\]")
    until(lambda: done.search(host.virsh("blockjob", NAME, "sda", "--info")), "it is ready")


@pytest.mark.nightly
def test_the_live_move_as_a_man_page_has_it(domain: Host, load: VerifiedIo, tmp_path: Any) -> None:
    before, shown = source(domain), lun(domain)["serial"]
    done = load.status().requests
    to = elsewhere(domain)
    xml = tmp_path / "dest.xml"
    xml.write_text(f"<disk type='block'><source dev='{path(to)}'/></disk>")
    words = ("--xml", str(xml), "--wait", "--verbose", "--pivot", "--transient-job")
    said = domain.virsh("blockcopy", NAME, "sda", *words)
    assert said.endswith("[100 %]")
    assert source(domain) == path(to) != before
    load.goes_on(done, DEADLINE_S)
    assert lun(domain)["serial"] == shown, "the same disk to its guest"
    assert domain.volumes.volume(to).thin
    disk = ElementTree.fromstring(domain.virsh("dumpxml", NAME)).find("devices/disk")
    assert disk is not None
    assert (disk.get("type"), disk.find("target").get("dev")) == ("block", "sda")  # type: ignore[union-attr]


def test_progress_limit_abort_and_pivot(domain: Host, load: VerifiedIo) -> None:
    here, to = source(domain), elsewhere(domain)
    copy(domain, to, "--bandwidth", str(SLOW_MIB))
    info = domain.virsh("blockjob", NAME, "sda", "--info")
    assert "Bandwidth limit: 1048576 bytes/s" in info and "Block Copy: [" in info, info
    assert "not ready for pivot yet" in refused(domain, "blockjob", NAME, "sda", "--pivot")
    assert mirror(domain) == (path(to), None)
    assert mirror(domain, "--inactive") is None
    domain.virsh("blockjob", NAME, "sda", "--abort")
    assert source(domain) == here and mirror(domain) is None
    assert not domain.virsh("blockjob", NAME, "sda", "--info")
    copy(domain, to, "--reuse-external", "--bandwidth", str(SLOW_MIB))
    assert "already in active block job" in refused(
        domain, "blockcopy", NAME, "sda", "--dest", path(to), "--transient-job"
    )
    domain.virsh("blockjob", NAME, "sda", "--bandwidth", "0")
    until_ready(domain)
    until(lambda: mirror(domain) == (path(to), "yes"), "it is shown as ready")
    load.goes_on(load.status().requests, DEADLINE_S)
    # As Nova does: what runs is defined, and the copy under way is no part of that.
    shown = domain.scratch / "copied.xml"
    shown.write_text(domain.virsh("dumpxml", NAME))
    domain.virsh("define", str(shown))
    assert "mirror" not in domain.virsh_direct("dumpxml", NAME, "--inactive")
    domain.virsh("blockjob", NAME, "sda", "--pivot")
    assert source(domain) == path(to) and mirror(domain) is None


@pytest.mark.nightly
def test_finished_without_a_pivot(domain: Host) -> None:
    here, to = source(domain), elsewhere(domain)
    assert copy(domain, to, "--wait", "--verbose", "--finish").endswith("[100 %]")
    assert source(domain) == here
    assert domain.volumes.volume(to).allocated > 0


def until_told(watcher: Watcher, times: int) -> None:
    until(lambda: watcher.text.count(" ready") == times, "ready is told")


@pytest.mark.nightly
def test_events_tell_what_becomes_of_it(domain: Host, tmp_path: Any) -> None:
    here, to = source(domain), elsewhere(domain)
    watcher = Watcher(domain.uri, tmp_path / "log")
    try:
        until(lambda: watcher.hears(domain, NAME), "virsh listens")
        for told, word in ((2, "--abort"), (4, "--pivot")):
            words = ("--reuse-external",) if word == "--pivot" else ()
            copy(domain, to, *words)
            until_ready(domain)
            until_told(watcher, told)
            domain.virsh("blockjob", NAME, "sda", word)
        until(lambda: watcher.text.count(" completed") == 2, "all is told")
    finally:
        watcher.close()
    lines = [line for line in watcher.text.splitlines() if "block-job" in line]
    by_dev = [line for line in lines if "block-job-2" in line]
    found = [re.search(r"Block Copy for (\S+) (\w+)", line) for line in by_dev]
    assert [each.groups() for each in found if each] == [
        ("sda", "ready"),
        ("sda", "canceled"),
        ("sda", "ready"),
        ("sda", "completed"),
    ]
    paths = [
        re.search(r"Block Copy for (\S+) ", line) for line in lines if "block-job-2" not in line
    ]
    assert [each[1] for each in paths if each] == [here, here, here, path(to)]


@pytest.mark.nightly
def test_the_older_call_copies_as_well(domain: Host) -> None:
    libvirt.registerErrorHandler(lambda _context, _error: None, None)
    connection = libvirt.open(domain.uri)
    try:
        found = connection.lookupByName(NAME)
        flags = libvirt.VIR_DOMAIN_BLOCK_REBASE_COPY
        with pytest.raises(libvirt.libvirtError, match="domain is not transient") as caught:
            found.blockRebase("sda", path(elsewhere(domain)), 0, flags)
        assert caught.value.get_error_code() == libvirt.VIR_ERR_OPERATION_INVALID
        to = elsewhere(domain)
        xml = f"<disk type='file'><source file='{path(to)}'/></disk>"
        found.blockCopy(
            "sda", xml, {"bandwidth": 3 * MIB}, libvirt.VIR_DOMAIN_BLOCK_COPY_TRANSIENT_JOB
        )
        info = found.blockJobInfo("sda", 0)
        assert (info["type"], info["bandwidth"], info["end"]) == (2, 3, SIZE)
        assert found.blockJobInfo("sda", 1)["bandwidth"] == 3 * MIB
        found.blockJobSetSpeed("sda", 5)
        assert found.blockJobInfo("sda", 0)["bandwidth"] == 5
        found.blockJobAbort("sda", 0)
        assert found.blockJobInfo("sda", 0) == {}
    finally:
        connection.close()


@pytest.mark.nightly
@pytest.mark.parametrize("when", [at_night("copying"), "ready"])
def test_a_killed_target_loses_the_copy_and_not_the_disk(
    domain: Host, load: VerifiedIo, when: str, tmp_path: Any
) -> None:
    here, to = source(domain), elsewhere(domain)
    watcher = Watcher(domain.uri, tmp_path / "log")
    try:
        until(lambda: watcher.hears(domain, NAME), "virsh listens")
        copy(domain, to, *(("--bandwidth", str(SLOW_MIB)) if when == "copying" else ()))
        if when == "ready":
            until_ready(domain)
        done = load.status().requests
        domain.kill_target()
        domain.start_target()
        watcher.line("Block Copy for sda failed")
    finally:
        watcher.close()
    assert source(domain) == here
    load.goes_on(done, DEADLINE_S)
    assert not domain.virsh("blockjob", NAME, "sda", "--info")


@pytest.mark.nightly
def test_a_killed_target_keeps_what_was_pivoted(domain: Host, load: VerifiedIo) -> None:
    to = elsewhere(domain)
    copy(domain, to, "--wait", "--pivot")
    done = load.status().requests
    domain.kill_target()
    domain.start_target()
    load.goes_on(done, DEADLINE_S)
    assert source(domain) == path(to)


@pytest.mark.nightly
def test_a_killed_gateway_goes_on_with_a_copy(domain: Host, load: VerifiedIo) -> None:
    to = elsewhere(domain)
    copy(domain, to, "--bandwidth", str(SLOW_MIB))
    domain.stop_gateway(signal.SIGKILL)
    domain.start_gateway()
    until(
        lambda: "Block Copy" in domain.virsh("blockjob", NAME, "sda", "--info"),
        "the job is there again",
    )
    domain.virsh("blockjob", NAME, "sda", "--bandwidth", "0")
    until_ready(domain)
    domain.virsh("blockjob", NAME, "sda", "--pivot")
    assert source(domain) == path(to)


@pytest.mark.nightly
def test_a_gateway_that_is_killed_in_a_pivot_is_repaired_by_the_next(domain: Host) -> None:
    """The target has the disk on the copy, and nobody has told libvirtd."""
    to = elsewhere(domain)
    copy(domain, to)
    until_ready(domain)
    domain.stop_gateway(signal.SIGKILL)
    (controller,) = domain.client.call_raw("vhost_get_controllers")
    domain.client.call_raw("virtlun_lun_copy_pivot", ctrlr=controller["ctrlr"], scsi_target_num=0)
    domain.start_gateway()
    until(
        lambda: path(to) in domain.virsh("domblklist", NAME, check=False),
        "the domain's XML follows",
    )
    assert source(domain) == path(to)


def test_what_cannot_be_is_refused_in_a_sentence(domain: Host) -> None:
    here, to = source(domain), elsewhere(domain)
    store = to.split("/")[0]
    words = ("blockcopy", NAME, "sda", "--transient-job", "--dest")
    domain.volumes.create(f"{store}/small", SIZE - MIB, thin=True)
    for more, says in (
        ((path(to), "--reuse-external"), f"there is no volume {to}"),
        ((path(f"{store}/small"),), f"volume {store}/small exists already"),
        ((path(f"{store}/small"), "--reuse-external"), f"{SIZE} are needed: resize it"),
        ((here, "--reuse-external"), "cannot be copied to itself"),
        ((path("none/x"),), "there is no lvstore none"),
        ((str(domain.scratch / "file"),), "to another volume of its target alone"),
        ((path(to), "--format", "qcow2"), "what is on a virtlun volume is raw"),
    ):
        said = refused(domain, *words, *more)
        assert says in said, said
    assert "domain is not transient" in refused(
        domain, "blockcopy", NAME, "sda", "--dest", path(to)
    )
    domain.virsh("snapshot-create-as", NAME, "s", "--disk-only")
    said = refused(domain, *words, path(to))
    assert "has 1 snapshots" in said and "virsh snapshot-delete" in said
    domain.virsh("snapshot-delete", NAME, "s")


@pytest.mark.nightly
def test_what_a_copy_is_in_the_way_of(domain: Host) -> None:
    to = elsewhere(domain)
    copy(domain, to, "--bandwidth", str(SLOW_MIB))
    for command, says in (
        (("blockresize", NAME, "sda", f"{SIZE + MIB}B"), "already in active block job"),
        (("detach-disk", NAME, "sda", "--live"), "already in active block job"),
        (("blockpull", NAME, "sda"), "already in active block job"),
        (("snapshot-create-as", NAME, "s", "--disk-only"), "domain has active block job"),
        (("checkpoint-create-as", NAME, "c"), "domain has active block job"),
        (("backup-begin", NAME), "domain has active block job"),
        (("save", NAME, str(domain.scratch / "image")), "domain has active block job"),
        (("managedsave", NAME), "domain has active block job"),
        (("migrate", "--live", NAME, domain.uri), "domain has active block job"),
    ):
        said = refused(domain, *command)
        assert says in said, said
