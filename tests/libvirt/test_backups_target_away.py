"""The target dies, or hangs, while a backup is read from it by NBD.

Whoever reads waits, and goes on when the target is back; to end the job needs no target.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pydataplane import supervise
from tests.support.frozen import frozen
from tests.support.host import Host
from tests.support.night import at_night
from tests.support.wait import until

pytestmark = [pytest.mark.root, pytest.mark.vm]

NAME = "away"
MIB = 1 << 20
SIZE = 8 * MIB
END_S = 30.0
"""How long `domjobabort` may take here, on a busy machine: two deadlines of the gateway's own are
2 s each. With an orderly end of programs that wait for the target it takes 50 s."""


def nbd(host: Host) -> str:
    return f"nbd+unix:///sda?socket={host.scratch}/nbd"


class Reading(threading.Thread):
    """A program that reads all of the export."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self.copy = host.scratch / "copy"
        self.status: int | None = None
        self._words = (
            *("qemu-img", "convert", "-f", "raw", "-O", "raw"),
            *(nbd(host), str(self.copy)),
        )
        self.start()

    def run(self) -> None:
        self.status = subprocess.run(self._words, capture_output=True, check=False).returncode


@pytest.fixture(scope="module")
def data(host: Host) -> Path:
    """What is on the volume a; there is a domain that has it as sda, and is off."""
    host.scratch.chmod(0o777)  # QEMU's user makes the socket
    file = host.scratch / "data"
    file.write_bytes(os.urandom(SIZE))
    host.start_without_guest(NAME, "a")
    host.virsh("destroy", NAME)
    volume = host.volumes.volume("lvs0/a").uuid
    export = until(lambda: host.volumes.export(volume), "its QEMU has let go of it")
    words = ("dd", f"if={file}", f"of={export}", "bs=1M", "conv=notrunc,fsync")
    subprocess.run(host.libvirtd.command(*words), check=True, capture_output=True)
    host.volumes.end_export(volume)
    return file


@pytest.fixture
def pull(host: Host, data: Path) -> Iterator[Host]:
    """A backup of sda in pull mode; nothing is left of it afterwards."""
    path = host.scratch / "backup.xml"
    path.write_text(
        f"<domainbackup mode='pull'><server transport='unix' socket='{host.scratch}/nbd'/>"
        "<disks><disk name='sda'/></disks></domainbackup>"
    )
    # A QEMU before 9 ends where its target is killed while the firmware looks for disks.
    host.virsh("start", NAME, "--paused")
    host.virsh("backup-begin", NAME, str(path))
    until(lambda: survives(host) == ["crash"], "what reads waits for the target, without errors")
    yield host
    host.virsh("domjobabort", NAME, check=False)
    until(lambda: nothing_is_left(host), "the rest is ended")
    host.virsh("destroy", NAME)


def survives(host: Host) -> list[str]:
    """Returns what end of the target each export outlives."""
    return [export["survives"] for export in host.client.call("virtlun_export_list")]


def nothing_is_left(host: Host) -> bool:
    return (
        host.client.call("virtlun_export_list") == []
        and {volume.name for volume in host.volumes.volumes("lvs0")} == {"a"}
        and not list((host.scratch / "notes").iterdir())
        and not list(host.scratch.glob("backup-*"))
        and not (host.scratch / "nbd").exists()
        and not programs(host)
    )


def programs(host: Host) -> list[Path]:
    """Returns what the gateway started and has not ended yet."""
    children = Path(f"/proc/{host.gateway_pid}/task/{host.gateway_pid}/children")
    return [Path("/proc") / pid for pid in children.read_text().split()]


def abort(host: Host) -> None:
    begun = time.monotonic()
    host.virsh("domjobabort", NAME)
    assert time.monotonic() - begun < END_S
    assert "None" in host.virsh("domjobinfo", NAME)


@pytest.mark.nightly
def test_who_reads_goes_on_when_a_killed_target_is_back(pull: Host, data: Path) -> None:
    pull.kill_target()
    reading = Reading(pull)
    time.sleep(2)  # longer than what it takes to read all of it
    assert reading.is_alive(), "it waits, without an error"
    pull.start_target()
    reading.join(60)
    assert reading.status == 0
    assert reading.copy.read_bytes() == data.read_bytes()
    again = Reading(pull)
    again.join(60)
    assert again.status == 0
    abort(pull)
    assert nothing_is_left(pull)


@pytest.mark.nightly
@pytest.mark.parametrize("when", ["idle", at_night("asked later"), "asked before"])
def test_a_job_is_ended_while_the_target_is_dead(pull: Host, when: str) -> None:
    readers = []
    if when == "asked before":  # so many at a time that the target dies with some
        words = ("qemu-img", "bench", "-f", "raw", "-c", str(10**9), "-d", "64", nbd(pull))
        readers.append(subprocess.Popen(words, stdout=subprocess.DEVNULL))
        time.sleep(1)
    pull.kill_target()
    if when == "asked later":
        readers.append(subprocess.Popen(("qemu-img", "bench", "-f", "raw", nbd(pull))))
        time.sleep(1)
    assert [each.poll() for each in readers] == [None] * len(readers), "they wait"
    abort(pull)
    for each in readers:
        assert each.wait(60) != 0, "it is told"
    assert not (pull.scratch / "nbd").exists()
    assert list((pull.scratch / "notes").iterdir()), "exports and snapshot are still to be ended"
    pull.start_target()
    until(lambda: nothing_is_left(pull), "the target is back")


@pytest.mark.nightly
def test_a_job_is_ended_while_the_target_hangs(pull: Host) -> None:
    with frozen(supervise.status(pull.paths.rpc_socket)["pid"]):
        reading = Reading(pull)
        time.sleep(1)
        abort(pull)
        reading.join(60)
        assert reading.status not in (0, None)
    until(lambda: nothing_is_left(pull), "the target goes on")


@pytest.mark.nightly
def test_an_export_is_ended_that_a_checkpoint_has_the_snapshot_of(pull: Host) -> None:
    pull.virsh("domjobabort", NAME)
    path = pull.scratch / "checkpoint.xml"
    path.write_text("<domaincheckpoint><name>c</name></domaincheckpoint>")
    pull.virsh("backup-begin", NAME, str(pull.scratch / "backup.xml"), str(path))
    pull.kill_target()
    abort(pull)
    pull.start_target()
    until(lambda: not list((pull.scratch / "notes").iterdir()), "the target is back")
    assert pull.client.call("virtlun_export_list") == []
    assert pull.virsh("checkpoint-list", NAME, "--name").split() == ["c"]
    pull.virsh("checkpoint-delete", NAME, "c")


def test_a_gateway_that_ends_meanwhile_leaves_it_to_the_next(pull: Host) -> None:
    pull.kill_target()
    reading = Reading(pull)
    pull.stop_gateway()
    reading.join(60)
    assert reading.status not in (0, None)
    pull.start_target()
    pull.start_gateway()
    until(lambda: nothing_is_left(pull), "the next one has ended it")
