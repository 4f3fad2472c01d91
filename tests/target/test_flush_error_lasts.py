"""What a failed flush leaves behind stays known: restart, crash and upgrade of the target."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from jsonschema import validate

from plugin.cli import main
from tests.support.initiator import Initiator, connected
from tests.support.lossy_disk import (
    DISK_MIB,
    HARDWARE_ERROR,
    MIB,
    LossyDisk,
    fails_to_flush,
    lossy_disk,
    run,
    small_file_system,
)
from tests.support.night import at_night, by_day
from tests.support.older_target import WAITS
from tests.support.target import ROOT, Target
from tests.support.wait import until
from tests.target.conftest import MakeTarget
from tests.target.test_upgrade import upgrade_ends

pytestmark = pytest.mark.root

RECORD_DEADLINE_S = 90.0
MEDIUM_ERROR = 3
CLEAR = "virtlun_bdev_clear_flush_error"


@pytest.fixture
def disk(scratch: Path) -> Iterator[LossyDisk]:
    """A disk that loses what is written; needs root."""
    with small_file_system(scratch / "small") as directory, lossy_disk(directory) as made:
        yield made


def record(target: Target) -> dict[str, Any]:
    """What the state directory has of failed flushes, by bdev."""
    text = json.loads((target.state_dir / "config.json").read_text())
    validate(text, json.loads((ROOT / "schemas/config/record.json").read_text()))
    found: dict[str, Any] = text.get("flush_errors", {})
    return found


def writes_durably(guest: Initiator, at: int, fill: int) -> bool:
    """Writes 1 MiB of LUN 0 at byte `at` with FUA; whether the guest may take it for durable."""
    lba, blocks = at // 512, MIB // 512
    cdb = bytes([0x8A, 0x08, *lba.to_bytes(8, "big"), *blocks.to_bytes(4, "big"), 0, 0])
    answer = guest.cdb(cdb, data_out=bytes([fill]) * MIB)
    assert answer["response"] == 0
    if answer["status"] == 0:
        return True
    # The write itself, or what makes it durable.
    assert answer["sense"][2] & 15 in (MEDIUM_ERROR, HARDWARE_ERROR), answer
    return False


def forget(target: Target) -> None:
    """Takes failed flushes out of the record, as if the target was one that keeps none."""
    file = target.state_dir / "config.json"
    found = json.loads(file.read_text())
    found.pop("flush_errors", None)
    file.write_text(json.dumps(found))


def until_recorded(target: Target) -> None:
    """Waits until the target has recorded that a flush failed."""
    until(lambda: record(target), "the failure is recorded", RECORD_DEADLINE_S, 0.001)


def crash(target: Target) -> None:
    """Ends the target by SIGKILL, as soon as it has recorded that a flush failed."""
    until_recorded(target)
    target.crash()


def restart_twice(target: Target) -> None:
    """Has two targets after one another know it."""
    crash(target)
    target.upgrade()
    target.restart()


AGAIN = [at_night(Target.restart), crash, Target.upgrade, at_night(restart_twice)]


def lose(disk: LossyDisk, guest: Initiator, lba: int) -> None:
    """Has the disk lose what the guest writes from `lba` on, and the guest be told of it."""
    assert not fails_to_flush(guest)
    disk.lose()
    for at in range(lba, lba + 8 * MIB // 512, 2048):
        guest.write(at, bytes([7]) * MIB)
    assert fails_to_flush(guest)


def told(target: Target, bdev: str) -> str | None:
    """What is said of the failure: the same in each place that tells of it."""
    (shown,) = target.rpc("bdev_get_bdevs", name=bdev)
    problems = target.rpc("virtlun_get_status")["flush_errors"]
    if "flush_error" not in shown:
        assert problems == []
        return None
    assert [p.partition(":")[0] for p in problems] == ["bdev d0"]
    assert re.search(r"a (flush|write that was to be durable \(FUA\)) failed", problems[0])
    said: str = shown["flush_error"]
    return said


@by_day("crash")
@pytest.mark.parametrize("again", AGAIN)
def test_it_is_told_until_it_is_cleared(
    disk: LossyDisk, target: Target, again: Callable[[Target], None]
) -> None:
    target.rpc("bdev_aio_create", name="d0", filename=disk.device, block_size=512)
    target.attach("vm", "d0")
    with connected(target, "vm") as guest:
        lose(disk, guest, 0)
    again(target)
    assert "a flush failed" in (told(target, "d0") or "")
    assert "d0" in record(target)
    assert "flush" not in str(target.configuration()), "it is no configuration"
    disk.mend()
    with connected(target, "vm") as guest:
        assert fails_to_flush(guest), "room alone does not bring back what is lost"
        guest.write(0, bytes([8]) * 4096)
        assert guest.read(0, 8) == bytes([8]) * 4096, "all else is served"
    saved = target.spdk_rpc("save_config")
    assert saved.returncode == 0, saved.stderr
    assert "flush" not in saved.stdout
    assert target.rpc(CLEAR, name="d0") is True
    # Whoever was answered needs no more than that.
    target.crash()
    assert (told(target, "d0"), record(target)) == (None, {})
    with connected(target, "vm") as guest:
        assert not fails_to_flush(guest)


@by_day("upgrade")
@pytest.mark.parametrize("again", AGAIN)
def test_an_lvstore_is_served_but_takes_no_changes(
    disk: LossyDisk, target: Target, again: Callable[[Target], None]
) -> None:
    target.rpc("bdev_aio_create", name="d0", filename=disk.device, block_size=512)
    target.rpc("bdev_lvol_create_lvstore", bdev_name="d0", lvs_name="lvs0", clear_method="none")
    thick, thin = ({"lvs_name": "lvs0", "thin_provision": thin} for thin in (False, True))
    target.rpc("bdev_lvol_create", lvol_name="v0", size_in_mib=8, **thick)
    target.rpc("bdev_lvol_create", lvol_name="v1", size_in_mib=32, **thin)
    target.attach("vm", "lvs0/v0")
    target.add_lun("vm", "lvs0/v1", 1)
    with connected(target, "vm") as guest:
        guest.write(0, bytes([5]) * MIB)
        guest.write(2048, bytes([4]) * MIB)
        assert not fails_to_flush(guest)
        # A hole below, whose room somebody else takes.
        at = disk.file.read_bytes().index(bytes([4]) * MIB)
        run("fallocate", "--punch-hole", "--offset", str(at), "--length", str(MIB), disk.file)
        disk.lose()
        guest.write(2048, bytes([4]) * MIB)
        # The metadata's flush is the first to be told.
        target.fails("bdev_lvol_create", lvol_name="x", size_in_mib=1, **thin)
        assert fails_to_flush(guest)
    again(target)
    assert target.rpc("virtlun_get_status")["restore_problems"] == []
    (store,) = target.rpc("bdev_lvol_get_lvstores")
    assert "failed" in store["stopped"], store
    names = {each["name"] for each in target.rpc("bdev_lvol_get_lvols")}
    assert names >= {"v0", "v1"}
    assert told(target, "lvs0/v0") is not None
    assert "virtlun bdev clear-flush-error" in str(told(target, "lvs0/v0"))
    assert "failed" in str(target.fails("bdev_lvol_create", lvol_name="n", size_in_mib=1, **thin))
    with connected(target, "vm") as guest:
        assert guest.read(0, 8) == bytes([5]) * 4096
        guest.write(0, bytes([6]) * 4096)
        assert guest.read(0, 8) == bytes([6]) * 4096
        assert fails_to_flush(guest)
        durable = bytes([0x2A, 0x08, *(0).to_bytes(4, "big"), 0, 0, 8, 0])  # WRITE (10) with FUA
        assert guest.cdb(durable, data_out=bytes(4096))["status"] != 0
    disk.mend()
    assert target.rpc(CLEAR, name="lvs0/v0") is True
    (store,) = target.rpc("bdev_lvol_get_lvstores")
    assert "stopped" not in store
    target.rpc("bdev_lvol_create", lvol_name="n", size_in_mib=1, **thin)
    target.crash()
    assert told(target, "lvs0/v0") is None
    (store,) = target.rpc("bdev_lvol_get_lvstores")
    assert "stopped" not in store
    assert "n" in {each["name"] for each in target.rpc("bdev_lvol_get_lvols")}
    with connected(target, "vm") as guest:
        assert not fails_to_flush(guest)
        assert guest.read(0, 8) == bytes([6]) * 4096


@by_day("crash")
@pytest.mark.parametrize("again", [at_night(Target.restart), crash, Target.upgrade])
def test_a_pod_s_fsync_fails_too(
    disk: LossyDisk, target: Target, again: Callable[[Target], None]
) -> None:
    target.rpc("bdev_aio_create", name="d0", filename=disk.device, block_size=512)
    path = target.rpc("virtlun_export_create", bdev_name="d0")["path"]

    def flush(fill: int = 0) -> int:
        """Writes, and returns the errno of fdatasync(2), or 0."""
        file = os.open(path, os.O_RDWR)
        try:
            os.pwrite(file, bytes([fill]) * MIB, 0)
            os.fdatasync(file)
        except OSError as error:
            return error.errno or -1
        finally:
            os.close(file)
        return 0

    disk.lose()
    assert flush(7) == errno.EIO
    again(target)
    disk.mend()
    (export,) = target.rpc("virtlun_export_list")
    assert "a flush failed" in export["flush_error"]
    assert flush() == errno.EIO
    assert target.rpc(CLEAR, name="d0") is True
    (export,) = target.rpc("virtlun_export_list")
    assert "flush_error" not in export
    assert flush() == 0


def test_a_person_finds_it_and_clears_it(disk: LossyDisk, target: Target) -> None:
    def virtlun(*words: str) -> Result:
        return CliRunner().invoke(main, ["--socket", str(target.rpc_socket), *words])

    target.rpc("bdev_aio_create", name="d0", filename=disk.device, block_size=512)
    target.attach("vm", "d0")
    with connected(target, "vm") as guest:
        lose(disk, guest, 0)
    disk.mend()
    crash(target)
    for words in (("target", "status"), ("doctor",), ("bdev", "list")):
        shown = virtlun(*words).stdout
        assert "a flush failed" in shown
        assert "virtlun bdev clear-flush-error" in shown, words
    (row,) = json.loads(virtlun("bdev", "list", "--json").stdout)
    assert (row["name"], row["file"], row["size"]) == ("d0", disk.device, DISK_MIB * MIB)
    asked = virtlun("bdev", "clear-flush-error", "d0")
    assert asked.exit_code == 1, "nobody said yes"
    assert "may be lost" in asked.output
    assert told(target, "d0") is not None
    done = virtlun("bdev", "clear-flush-error", "d0", "--yes", "--json")
    cleared = json.loads(done.stdout)
    assert (cleared["name"], cleared["cleared"]) == ("d0", True)
    assert "a flush failed" in cleared["flush_error"]
    assert told(target, "d0") is None
    again = virtlun("bdev", "clear-flush-error", "d0")
    assert (again.exit_code, again.stdout) == (0, "d0 had no flush error: nothing is changed\n")
    assert virtlun("bdev", "clear-flush-error", "d9").exit_code == 1


@pytest.mark.parametrize("again", [crash, at_night(Target.upgrade)])
def test_a_durable_write_past_the_page_cache_is_told_too(
    disk: LossyDisk, target: Target, make_target: MakeTarget, again: Callable[[Target], None]
) -> None:
    """The disk is one that takes direct I/O: a file that another target exports."""
    below = make_target().start()
    below.rpc("bdev_aio_create", name="b0", filename=disk.device, block_size=512)
    file = below.rpc("virtlun_export_create", bdev_name="b0")["path"]
    target.rpc("bdev_aio_create", name="d0", filename=file, block_size=512)
    (shown,) = target.rpc("bdev_get_bdevs", name="d0")
    assert shown["driver_specific"]["aio"]["virtlun_direct"] is True
    target.attach("vm", "d0")
    with connected(target, "vm") as guest:
        assert writes_durably(guest, 0, 1)
        disk.lose()
        # Whichever of them is the first to learn it is told, and so are all that follow.
        lost = [writes_durably(guest, at, 2) for at in range(0, 8 * MIB, MIB)]
        assert not all(lost)
        assert not lost[-1]
        assert not writes_durably(guest, 16 * MIB, 3)
    disk.mend()
    assert below.rpc(CLEAR, name="b0") is True
    again(target)
    assert "a write that was to be durable (FUA) failed" in (told(target, "d0") or "")
    with connected(target, "vm") as guest:
        guest.write(0, bytes([4]) * 4096)
        assert not writes_durably(guest, 0, 5), "the disk would take it now"
        assert guest.read(0, 8) == bytes([4]) * 4096, "what is refused is not written"
        assert target.rpc(CLEAR, name="d0") is True
        assert writes_durably(guest, 0, 6)
        assert guest.read(0, 8) == bytes([6]) * 4096
        assert not fails_to_flush(guest)


def upgrade_of_an_older_release(target: Target) -> None:
    """Has another program take over that is not told of failed flushes."""
    command = [sys.executable, "-m", "tests.support.older_target", f"{target.rpc_socket}.upgrade"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as between:
        assert between.stdout is not None
        assert between.stdout.readline().strip() == WAITS
        target.upgrade()
        assert between.wait(RECORD_DEADLINE_S) == 0


@pytest.mark.nightly
def test_an_older_release_is_asked_before_it_ends(disk: LossyDisk, target: Target) -> None:
    """One that neither records a failed flush nor hands it over; it tells its clients."""
    target.rpc("bdev_aio_create", name="d0", filename=disk.device, block_size=512)
    target.attach("vm", "d0")
    with connected(target, "vm") as guest:
        lose(disk, guest, 0)
        disk.mend()
        until_recorded(target)
        forget(target)
        upgrade_of_an_older_release(target)
        assert fails_to_flush(guest)
        assert told(target, "d0") is not None
    # And from here on it is as if it had been this release.
    until_recorded(target)
    target.crash()
    assert told(target, "d0") is not None
    assert target.rpc(CLEAR, name="d0") is True
    forget(target)
    upgrade_of_an_older_release(target)
    assert (told(target, "d0"), record(target)) == (None, {})


@pytest.mark.nightly
@pytest.mark.parametrize("step", ["outlook: end", "held: target", "held: end"])
def test_an_upgrade_that_fails_keeps_it(disk: LossyDisk, target: Target, step: str) -> None:
    target.rpc("bdev_aio_create", name="d0", filename=disk.device, block_size=512)
    target.attach("vm", "d0")
    with connected(target, "vm") as guest:
        lose(disk, guest, 0)
        upgrade_ends(target, step)
        disk.mend()
        assert fails_to_flush(guest)
        assert told(target, "d0") is not None
        target.upgrade()
        assert fails_to_flush(guest)
    assert told(target, "d0") is not None


def test_a_bdev_that_is_deleted_is_forgotten_with_it(disk: LossyDisk, target: Target) -> None:
    create = {"name": "d0", "filename": disk.device, "block_size": 512}
    target.rpc("bdev_aio_create", **create)
    target.attach("vm", "d0")
    with connected(target, "vm") as guest:
        lose(disk, guest, 0)
    disk.mend()
    target.rpc("vhost_scsi_controller_remove_target", ctrlr="vm", scsi_target_num=0)
    target.rpc("bdev_aio_delete", name="d0")
    assert record(target) == {}
    target.rpc("bdev_aio_create", **create)
    assert told(target, "d0") is None
