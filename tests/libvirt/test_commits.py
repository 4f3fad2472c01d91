"""blockcommit by plain virsh: snapshots are merged while the guest goes on, and nothing is lost."""

from __future__ import annotations

import itertools
import re
import signal
import subprocess
from collections.abc import Iterator
from subprocess import DEVNULL
from typing import Any

import libvirt
import pytest

from pydataplane import supervise
from pydataplane.errors import VolumeNotFoundError
from tests.support.agent import Agent
from tests.support.host import Host
from tests.support.libvirtd import NEWER_QEMU, VirshError
from tests.support.tracer import Tracer, thread_named
from tests.support.wait import until
from tests.support.watcher import Watcher

pytestmark = [pytest.mark.root, pytest.mark.vm]

NAME = "vm"
MIB = 1 << 20
VOLUME = "lvs0/disk"
PATH = f"/dev/virtlun/{VOLUME}"
DISK = f"<disk type='file'><source file='{PATH}'/><target dev='sda' bus='scsi'/></disk>"
TAKE = ("snapshot-create-as", NAME, "--disk-only", "--no-metadata", "--atomic", "--name")


@pytest.fixture(scope="module")
def domain(host: Host) -> Iterator[Host]:
    """A running guest with the thin volume sda."""
    host.scratch.chmod(0o777)
    host.volumes.create(VOLUME, 32 * MIB, thin=True)
    host.define(NAME, devices=DISK, emulator=NEWER_QEMU)  # the target is killed, too
    host.virsh("start", NAME)
    yield host
    host.virsh("destroy", NAME, check=False)


@pytest.fixture(scope="module")
def agent(domain: Host) -> Iterator[Agent]:
    """The guest's shell."""
    agent = domain.agent(NAME)
    agent.wait_for("[ -b /dev/sda ]")
    yield agent
    agent.close()


@pytest.fixture(autouse=True)
def _nothing_is_left(domain: Host, agent: Agent) -> Iterator[None]:
    """After each test there is no job, and the volume has no snapshot."""
    yield
    domain.virsh("blockjob", NAME, "sda", "--abort", check=False)
    for name in domain.virsh("checkpoint-list", NAME, "--name").split():
        domain.virsh("checkpoint-delete", NAME, name)
    for name in domain.virsh("snapshot-list", NAME, "--name").split():
        domain.virsh("snapshot-delete", NAME, name)
    if snapshots(domain):
        domain.virsh("blockcommit", NAME, "sda", "--active", "--pivot", check=False)
    assert not snapshots(domain)


def snapshots(host: Host) -> list[str]:
    """Returns the names of the snapshots below the volume, the nearest first."""
    found = []
    volume = host.volumes.volume(VOLUME)
    while volume.parent is not None:
        found.append(volume.parent.split("@")[1])
        volume = host.volumes.volume(f"lvs0/{volume.parent}")
    return found


def write(agent: Agent, at_mib: int) -> None:
    agent.run(
        f"dd if=/dev/urandom of=/dev/sda bs=1M seek={at_mib} count=2 oflag=direct conv=fsync", 60
    )


def content(agent: Agent) -> str:
    return agent.run("dd if=/dev/sda bs=1M iflag=direct 2>/dev/null | md5sum", 60)


def content_of(host: Host, snapshot: str) -> str:
    """Returns the same of a snapshot, as a backup reads it."""
    volume = host.volumes.volume(f"{VOLUME}@{snapshot}")
    file = host.volumes.export(volume.uuid, read_only=True)
    done = subprocess.run(
        host.libvirtd.command("sh", "-c", f"dd if={file} bs=1M 2>/dev/null | md5sum"),
        capture_output=True,
        text=True,
        check=True,
    )
    host.volumes.end_export(volume.uuid)
    return done.stdout.strip()


def refused(host: Host, *words: str) -> str:
    with pytest.raises(VirshError) as caught:
        host.virsh(*words)
    return str(caught.value)


def commit(host: Host, *words: str, check: bool = True) -> str:
    return host.virsh("blockcommit", NAME, "sda", *words, check=check)


@pytest.mark.nightly
def test_the_backup_that_many_scripts_make(domain: Host, agent: Agent) -> None:
    """A snapshot is taken and copied, then the disk is as before; again and again."""
    for round_ in range(3):
        write(agent, round_)
        before = content(agent)
        domain.virsh(*TAKE, "backup")
        write(agent, 8 + round_)
        after = content(agent)
        assert content_of(domain, "backup").split()[0] == before.split()[0] != after.split()[0]
        commit(domain, "--active", "--verbose", "--pivot")
        assert snapshots(domain) == []
        assert content(agent) == after
        assert domain.virsh("domblklist", NAME).split() == ["sda", PATH]


@pytest.mark.nightly
def test_a_guest_that_writes_all_the_time_notices_nothing(domain: Host, agent: Agent) -> None:
    agent.run("mkfs.ext4 -q /dev/sda && mount /dev/sda /mnt", 120)
    agent.run(
        "(i=0; while [ ! -e /tmp/enough ]; do i=$((i+1)); dd if=/dev/urandom of=/mnt/$((i%4))"
        " bs=64k count=4 conv=fsync 2>/dev/null; md5sum /mnt/$((i%4)) >/tmp/$((i%4)); echo $i"
        " >/tmp/n; done) >/dev/null 2>&1 &"
    )
    agent.wait_for("[ -s /tmp/n ] && [ $(cat /tmp/n) -gt 4 ]", 60)
    for name in ("a", "b", "c"):
        domain.virsh(*TAKE, name)
        seen = int(agent.run("cat /tmp/n"))
        agent.wait_for(f"[ $(cat /tmp/n) -gt {seen} ]", 60)
        if name != "b":
            commit(domain, "--active", "--pivot")
    agent.run("touch /tmp/enough")
    agent.wait_for("! pgrep -f random", 60)
    agent.run("sync; echo 3 >/proc/sys/vm/drop_caches; md5sum -c /tmp/0 /tmp/1 /tmp/2 /tmp/3", 60)
    agent.run("umount /mnt && mount /dev/sda /mnt && cat /mnt/? >/dev/null && umount /mnt", 60)
    assert "I/O error" not in agent.run("dmesg")


@pytest.mark.nightly
def test_a_commit_of_the_disk_waits_for_a_word(domain: Host, agent: Agent) -> None:
    write(agent, 0)
    domain.virsh(*TAKE, "s")
    commit(domain, "--active", "--wait", "--verbose")
    assert snapshots(domain) == ["s"]
    info = domain.virsh("blockjob", NAME, "sda", "--info")
    assert re.search(r"Active Block Commit: \[100( |\.00 )%\]", info)
    assert "already in active block job" in refused(
        domain, "blockcommit", NAME, "sda", "--active", "--pivot"
    )
    assert "already in active block job" in refused(domain, "blockpull", NAME, "sda")
    assert "already in active block job" in refused(domain, "detach-disk", NAME, "sda")
    domain.virsh("blockjob", NAME, "sda", "--abort")
    assert snapshots(domain) == ["s"], "given up, it has changed nothing"
    assert domain.virsh("blockjob", NAME, "sda", "--info") == ""
    for word in ("--abort", "--pivot"):
        said = refused(domain, "blockjob", NAME, "sda", word)
        assert "disk sda does not have an active block job" in said
    commit(domain, "--active")
    domain.virsh("blockjob", NAME, "sda", "--pivot")
    assert snapshots(domain) == []


def test_what_python_is_told(domain: Host, agent: Agent) -> None:
    libvirt.registerErrorHandler(lambda _context, _error: None, None)
    connection = libvirt.open(domain.uri)
    dom = connection.lookupByName(NAME)
    domain.virsh(*TAKE, "s")
    dom.blockCommit("sda", None, None, 0, libvirt.VIR_DOMAIN_BLOCK_COMMIT_ACTIVE)
    info = dom.blockJobInfo("sda")
    assert info["type"] == libvirt.VIR_DOMAIN_BLOCK_JOB_TYPE_ACTIVE_COMMIT
    assert info["cur"] == info["end"] == 32 * MIB
    dom.blockJobAbort("sda", libvirt.VIR_DOMAIN_BLOCK_JOB_ABORT_PIVOT)
    assert dom.blockJobInfo("sda") == {}
    with pytest.raises(libvirt.libvirtError) as caught:
        dom.blockCommit("sda", None, None, 0, 0)
    assert caught.value.get_error_code() == libvirt.VIR_ERR_INVALID_ARG
    assert "commit of 'sda' active layer requires active flag" in str(caught.value)
    with pytest.raises(libvirt.libvirtError, match="unsupported flags"):
        dom.blockCommit("sda", None, None, 0, libvirt.VIR_DOMAIN_BLOCK_COMMIT_ACTIVE | 64)
    connection.close()


def test_events_tell_what_becomes_of_it(domain: Host, agent: Agent, tmp_path: Any) -> None:
    watcher = Watcher(domain.uri, tmp_path / "log")
    try:
        uri = "http://example.org/begin"

        def listens() -> bool:
            domain.virsh("metadata", NAME, uri, "--key", "m", "--set", "<m/>", "--config")
            return "/begin" in watcher.text

        until(listens, "virsh listens")
        for name, words in (("a", "--abort"), ("b", "--pivot")):
            domain.virsh(*TAKE, name)
            commit(domain, "--active")
            domain.virsh("blockjob", NAME, "sda", words)
        until(lambda: watcher.text.count(" completed") == 2, "all is told")
    finally:
        watcher.close()
    lines = [line for line in watcher.text.splitlines() if "block-job" in line]
    by_path = [line.split("block-job")[1] for line in lines if "block-job-2" not in line]
    told = [re.search(r"Active Block Commit for (\S+) (\w+)", line) for line in by_path]
    assert [each.groups() for each in told if each] == [
        (PATH, "ready"),
        (PATH, "canceled"),
        (PATH, "ready"),
        (PATH, "completed"),
    ]
    assert len(lines) == 2 * len(by_path), "and by target dev, too"


@pytest.fixture
def three(domain: Host, agent: Agent) -> dict[str, str]:
    """The volume has three snapshots, c nearest; returns what each has."""
    contents = {}
    for number, name in enumerate("abc"):
        write(agent, number)
        contents[name] = content(agent).split()[0]
        domain.virsh(*TAKE, name)
    write(agent, 9)
    return contents


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (("--active", "--pivot"), ""),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                (("--wait", "--top", f"{PATH}@b", "--base", f"{PATH}@a"), "cb"),
                (("--active", "--pivot", "--shallow"), "ba"),
                (("--active", "--pivot", "--base", f"{PATH}@b"), "a"),
                (("--active", "--pivot", "--base", "disk@a", "--top", PATH), ""),
                (("--wait", "--top", f"{PATH}@c"), "c"),
                (("--wait", "--top", f"{VOLUME}@c", "--shallow", "--delete"), "ca"),
            )
        ),
    ],
)
def test_which_snapshots_are_merged(
    domain: Host, agent: Agent, three: dict[str, str], words: tuple[str, ...], left: str
) -> None:
    before = content(agent)
    commit(domain, *words)
    assert "".join(snapshots(domain)) == left
    assert content(agent) == before
    for name in left:
        assert content_of(domain, name).split()[0] == three[name]


@pytest.mark.nightly
@pytest.mark.usefixtures("three")
def test_what_cannot_be_is_one_sentence(domain: Host) -> None:
    for words, says in (
        (("--active", "--top", f"{PATH}@c"), "active commit requested but"),
        (("--top", f"{PATH}@z"), f"@z is not in the chain of {VOLUME}: that is {PATH}, {PATH}@c,"),
        (("--active", "--base", "/tmp/x"), f"/tmp/x is not in the chain of {VOLUME}"),
        (("--top", f"{PATH}@a", "--base", f"{PATH}@b"), "is not below"),
        (("--top", f"{PATH}@a"), f"{VOLUME}@a has no snapshot of its own below it"),
        (("--active", "--base", PATH), "is not below"),
    ):
        assert says in refused(domain, "blockcommit", NAME, "sda", *words)
        assert snapshots(domain) == ["c", "b", "a"]


def test_a_disk_without_a_snapshot_has_nothing_to_commit(domain: Host) -> None:
    said = refused(domain, "blockcommit", NAME, "sda", "--active", "--pivot")
    assert f"{VOLUME} has no snapshot of its own below it: take one first" in said


def test_what_another_volume_needs_stays(domain: Host, agent: Agent) -> None:
    write(agent, 0)
    domain.virsh(*TAKE, "golden")
    clone = domain.volumes.clone(f"{VOLUME}@golden", "clone")
    domain.virsh(*TAKE, "mine")
    said = refused(domain, "blockcommit", NAME, "sda", "--active", "--base", f"{PATH}@golden")
    assert "lvs0/clone and lvs0/disk@mine are clones of lvs0/disk@golden" in said
    commit(domain, "--active", "--pivot")
    assert snapshots(domain) == ["golden"], "the volume's own alone"
    domain.volumes.delete(clone.uuid)


def test_one_that_gets_a_clone_meanwhile_stays(domain: Host, agent: Agent) -> None:
    domain.virsh(*TAKE, "s")
    commit(domain, "--active")
    clone = domain.volumes.clone(f"{VOLUME}@s", "clone")
    said = refused(domain, "blockjob", NAME, "sda", "--pivot")
    assert "lvs0/clone and lvs0/disk are clones of lvs0/disk@s" in said
    domain.volumes.delete(clone.uuid)
    domain.virsh("blockjob", NAME, "sda", "--pivot")


def test_checkpoints_stay_and_go_on(domain: Host, agent: Agent) -> None:
    domain.virsh("checkpoint-create-as", NAME, "c1")
    write(agent, 3)
    domain.virsh(*TAKE, "s")
    write(agent, 5)
    commit(domain, "--active", "--pivot")
    assert snapshots(domain) == ["checkpoint-c1"]
    shown = domain.virsh("checkpoint-dumpxml", NAME, "c1", "--size")
    assert re.search(r"size='(\d+)'", shown), shown
    assert int(re.findall(r"size='(\d+)'", shown)[0]) == 4 * MIB


def test_a_snapshot_of_the_domain_whose_disk_was_committed(domain: Host, agent: Agent) -> None:
    """As with libvirt's own disks it is still listed, and is no way back any more."""
    domain.virsh("snapshot-create-as", NAME, "listed", "--disk-only")
    commit(domain, "--active", "--pivot")
    assert domain.virsh("snapshot-list", NAME, "--name").split() == ["listed"]
    said = refused(domain, "snapshot-revert", NAME, "listed")
    assert "listed" in said and "disk@listed" in said
    assert domain.virsh("domstate", NAME) == "running"
    domain.virsh("snapshot-delete", NAME, "listed", "--metadata")


def test_a_backup_is_in_its_way(domain: Host, agent: Agent) -> None:
    path = domain.scratch / "pull.xml"
    path.write_text(
        "<domainbackup mode='pull'><server transport='unix'"
        f" socket='{domain.scratch}/nbd'/><disks><disk name='sda'/></disks></domainbackup>"
    )
    domain.virsh(*TAKE, "s")
    domain.virsh("backup-begin", NAME, str(path))
    said = refused(domain, "blockcommit", NAME, "sda", "--active", "--pivot")
    assert (
        f"has a backup under way: wait for its end, or end it (`virsh domjobabort {NAME}`)" in said
    )
    domain.virsh("domjobabort", NAME)


def test_whoever_may_only_read_is_refused(domain: Host) -> None:
    domain.virsh(*TAKE, "s")
    for words in (("blockcommit", NAME, "sda", "--active"), ("blockjob", NAME, "sda", "--abort")):
        done = subprocess.run(
            ["virsh", "-q", "-r", "-c", domain.uri_ro, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=90,
        )
        assert done.returncode and "read only access prevents" in done.stderr
    assert snapshots(domain) == ["s"]


def test_of_a_gateway_that_was_killed_nothing_waits(domain: Host) -> None:
    domain.virsh(*TAKE, "s")
    commit(domain, "--active")
    domain.stop_gateway(signal.SIGKILL)
    domain.start_gateway()
    said = refused(domain, "blockjob", NAME, "sda", "--pivot")
    assert "disk sda does not have an active block job" in said
    assert snapshots(domain) == ["s"]
    commit(domain, "--active", "--pivot")
    assert snapshots(domain) == []


@pytest.mark.nightly
def test_a_target_that_is_away_is_told_and_it_goes_on_then(domain: Host, agent: Agent) -> None:
    write(agent, 1)
    for name in "abc":
        domain.virsh(*TAKE, name)
    before = content(agent)
    commit(domain, "--active")
    domain.kill_target()
    said = refused(domain, "blockjob", NAME, "sda", "--pivot")
    assert "target" in said
    domain.start_target()
    domain.virsh("blockjob", NAME, "sda", "--pivot")
    assert snapshots(domain) == []
    assert content(agent) == before


def dies_in_pivot(host: Host, nth: int) -> bool:
    """Pivots with a target that dies before the nth write for it; whether it came there."""
    pid = int(supervise.status(host.paths.rpc_socket)["pid"])
    with Tracer(pid, thread_named(pid, "lvstore")) as traced:
        words = ("blockjob", NAME, "sda", "--pivot")
        pivot = subprocess.Popen(
            ["virsh", "-q", "-c", host.uri, *words], stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL
        )
        reached = traced.kill_before_submission(nth, lambda: pivot.poll() is not None)
    host.start_target()
    pivot.wait(90)
    return reached


@pytest.mark.nightly
def test_a_target_killed_in_it_leaves_whole_snapshots(domain: Host, agent: Agent) -> None:
    """Before every second of its writes; what was not merged is merged by the same command."""
    for round_ in itertools.count():
        write(agent, round_ % 4)
        for name in "abc":
            domain.virsh(*TAKE, name)
            write(agent, 4 + round_ % 4)
        before = content(agent)
        commit(domain, "--active")
        reached = dies_in_pivot(domain, 2 * round_)
        assert content(agent) == before
        if snapshots(domain):
            commit(domain, "--active", "--pivot", check=False)
        # One that was not answered is still to be pivoted, whether or not all was merged.
        domain.virsh("blockjob", NAME, "sda", "--pivot", check=False)
        assert content(agent) == before
        assert snapshots(domain) == []
        if not reached:
            break
    assert round_ > 1


@pytest.mark.nightly
def test_of_a_domain_that_stopped_nothing_waits(domain: Host) -> None:
    domain.virsh(*TAKE, "s")
    commit(domain, "--active")
    domain.virsh("destroy", NAME)
    said = refused(domain, "blockcommit", NAME, "sda", "--active", "--pivot")
    assert "domain is not running" in said
    domain.virsh("start", NAME)
    assert domain.virsh("blockjob", NAME, "sda", "--info") == ""
    domain.virsh("blockcommit", NAME, "sda", "--active", "--pivot")
    with pytest.raises(VolumeNotFoundError):
        domain.volumes.volume(f"{VOLUME}@s")
