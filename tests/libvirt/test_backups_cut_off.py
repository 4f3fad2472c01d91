"""Gateway killed while a checkpoint is taken or deleted, or a backup runs: nothing stays half done.

Killed at each step that the target sees. Afterwards there is no export, no program and no file of
it, a checkpoint is there whole or not at all, and the same call again does it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import pytest

from tests.support.host import Host
from tests.support.night import by_day
from tests.support.relay import Relay, Step
from tests.support.wait import until

pytestmark = [pytest.mark.root, pytest.mark.vm]

NAME = "cut"
WHEN: tuple[Literal["before", "unanswered", "answered"], ...] = ("before", "unanswered", "answered")
BACKUP = "backup-begin"
CALLS = (
    ("checkpoint-create-as", "virtlun_lvol_snapshot_together"),
    ("checkpoint-delete", "bdev_lvol_delete"),
    (BACKUP, "virtlun_lvol_snapshot_together"),
    (BACKUP, "virtlun_export_create"),
    (BACKUP, "virtlun_lvol_get_allocated_ranges"),
    (BACKUP, "virtlun_export_delete"),
    (BACKUP, "bdev_lvol_delete"),
)
DAY = {
    ("checkpoint-create-as", "virtlun_lvol_snapshot_together", "unanswered"),
    ("checkpoint-delete", "bdev_lvol_delete", "answered"),
    (BACKUP, "virtlun_export_create", "answered"),
    (BACKUP, "bdev_lvol_delete", "before"),
}
STEPS = [
    pytest.param(
        command,
        Step(when, call),
        marks=[] if (command, call, when) in DAY else pytest.mark.nightly,
        id=f"{command}-{call}-{when}",
    )
    for command, call in CALLS
    for when in WHEN
]


@pytest.fixture(scope="module")
def relay(host: Host) -> Iterator[Relay]:
    """Where the gateway's calls of the target are seen; a running domain with two volumes."""
    host.scratch.chmod(0o777)  # QEMU's user makes the files of backups
    host.start_without_guest(NAME, "a", "b")
    # Of sda the checkpoint is the source; sdb has a snapshot of the backup's own.
    (host.scratch / "checkpoint.xml").write_text(
        "<domaincheckpoint><name>c</name><disks><disk name='sda'/></disks></domaincheckpoint>"
    )
    (host.scratch / "backup.xml").write_text(
        "<domainbackup><disks>"
        + "".join(
            f"<disk name='sd{name}' type='file'><driver type='{form}'/>"
            f"<target file='{host.scratch}/sd{name}.copy'/></disk>"
            for name, form in (("a", "qcow2"), ("b", "raw"))
        )
        + "</disks></domainbackup>"
    )
    with host.relayed() as relay:
        yield relay
    host.virsh("destroy", NAME)


def copies(host: Host) -> list[Path]:
    return sorted(host.scratch.glob("*.copy"))


def programs(host: Host) -> list[Path]:
    """Returns the processes of backups on this host, which has a mount namespace of its own."""
    namespace = Path(f"/proc/{host.gateway_pid}/ns/mnt").readlink()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            of_ours = (process / "ns/mnt").readlink() == namespace
            if of_ours and (process / "comm").read_text().startswith("qemu-storage-"):
                found.append(process)
    return found


def has_checkpoint_at_rest(host: Host) -> bool:
    """Whether the checkpoint is there, once nothing is under way; nothing else is."""
    until(lambda: not list((host.scratch / "notes").glob("*")), "the journal is empty")
    names = host.virsh("checkpoint-list", NAME, "--name").split()
    assert names in ([], ["c"])
    found = {v.name for v in host.volumes.volumes("lvs0") if v.snapshot}
    shown = host.virsh("checkpoint-dumpxml", NAME, "c") if names else ""
    disks = [each for each in "ab" if f"'sd{each}'" in shown]
    assert found == {f"{each}@checkpoint-c" for each in disks}
    assert host.client.call("virtlun_export_list") == []
    assert not list(host.scratch.glob("backup-*"))
    assert not programs(host)
    return bool(names)


@by_day(
    "checkpoint-create-as-virtlun_lvol_snapshot_together-unanswered",
    "backup-begin-virtlun_export_create-answered",
)
@pytest.mark.parametrize(("command", "step"), STEPS)
def test_killed_in_mid_change(host: Host, relay: Relay, command: str, step: Step) -> None:
    folder = host.scratch
    words = {
        "checkpoint-create-as": ("checkpoint-create-as", NAME, "c"),
        "checkpoint-delete": ("checkpoint-delete", NAME, "c"),
        BACKUP: (BACKUP, NAME, f"{folder}/backup.xml", f"{folder}/checkpoint.xml"),
    }[command]
    if command == "checkpoint-delete":
        host.virsh("checkpoint-create-as", NAME, "c")
    relay.end_at(step, lambda: host.stop_gateway(signal.SIGKILL))
    host.virsh(*words, check=False)
    until(lambda: not host.has_gateway, "the step")
    assert relay.hit()
    host.start_gateway()
    there = has_checkpoint_at_rest(host)
    assert copies(host) == [], "a backup whose end nobody was told of is none"
    if command == "checkpoint-delete":
        if there:
            host.virsh(*words)  # of which what is left is done
    elif there:
        host.virsh("checkpoint-delete", NAME, "c")
    assert not has_checkpoint_at_rest(host)
    if command != "checkpoint-delete":
        host.virsh(*words)
        until(lambda: has_checkpoint_at_rest(host), "it is done")
        host.virsh("checkpoint-delete", NAME, "c")
    assert len(copies(host)) == (2 if command == BACKUP else 0)
    for file in copies(host):
        file.unlink()
    assert host.virsh("domstate", NAME) == "running"


@pytest.mark.nightly
def test_files_stay_whose_backup_ended_while_the_target_did(host: Host, relay: Relay) -> None:
    step = Step("before", "bdev_lvol_delete")
    relay.end_at(step)
    host.virsh(BACKUP, NAME, f"{host.scratch}/backup.xml")
    shown = ("domjobinfo", NAME, "--completed", "--keep-completed")
    until(lambda: "Completed" in host.virsh(*shown, check=False), "the end")
    assert relay.hit()
    host.stop_gateway(signal.SIGKILL)
    host.start_target()
    host.start_gateway()
    assert not has_checkpoint_at_rest(host)
    assert len(copies(host)) == 2
    for file in copies(host):
        file.unlink()
