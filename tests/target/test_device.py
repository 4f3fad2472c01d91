"""The virtio-scsi device of a real daemon, driven through shared memory as a guest does."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.initiator import Initiator, Refused
from tests.support.night import by_day
from tests.support.target import Target, binary
from tests.support.wait import until

EVENTS_MISSED = 1 << 31
MAX_PENDING = 64
"""Events that wait for a buffer: as in pydataplane/crates/vhost/src/events.rs."""
MIB = 1024 * 1024
BLOCKS = 64 * MIB // 512
BAD_TARGET = 3
"""VIRTIO_SCSI_S_BAD_TARGET (virtio 1.2, 5.6.6.1.1)."""
TRANSPORT_RESET, PARAM_CHANGE = 1, 3
"""VIRTIO_SCSI_T_TRANSPORT_RESET, VIRTIO_SCSI_T_PARAM_CHANGE (5.6.6.3)."""
RESCAN, REMOVED = 1, 2
"""VIRTIO_SCSI_EVT_RESET_RESCAN, _REMOVED."""

Drive = Callable[..., Initiator]


@pytest.fixture
def disk(target: Target) -> Target:
    """A target with controllers c0 and c1, a malloc disk at target 0 of each."""
    for name in ("c0", "c1"):
        target.rpc("bdev_malloc_create", name=f"m-{name}", num_blocks=BLOCKS, block_size=512)
        target.rpc("vhost_create_scsi_controller", ctrlr=name)
        attach(target, name, 0, f"m-{name}")
    return target


@pytest.fixture
def drive(disk: Target) -> Iterator[Drive]:
    """Starts initiators, connected unless told not to."""
    started: list[Initiator] = []

    def start(controller: str = "c0", *, connect: bool = True, **options: Any) -> Initiator:
        initiator = Initiator(disk.vhost_dir / controller)
        started.append(initiator)
        if connect:
            initiator.send("connect", **options)
            initiator.ready()
        return initiator

    yield start
    for initiator in started:
        initiator.kill()


def attach(target: Target, controller: str, number: int, bdev: str, **options: Any) -> None:
    target.rpc(
        "vhost_scsi_controller_add_target",
        ctrlr=controller,
        scsi_target_num=number,
        bdev_name=bdev,
        **options,
    )


def pattern(seed: int, blocks: int) -> bytes:
    return b"".join((seed * 65536 + i).to_bytes(8, "little") * 64 for i in range(blocks))


def test_a_guest_finds_the_disk_and_nothing_else(drive: Drive) -> None:
    guest = drive()
    inquiry = guest.cdb(bytes([0x12, 0, 0, 0, 96, 0]), data_in_len=96)
    assert inquiry["status"] == 0
    assert inquiry["data_in"][0] == 0
    assert guest.send("capacity")["blocks"] == BLOCKS
    luns = guest.cdb(bytes([0xA0, 0, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0]), data_in_len=16)
    assert luns["data_in"][:4] == (8).to_bytes(4, "big")
    for missing in (1, 127, 254):
        answer = guest.cdb(bytes(6), target=missing)
        assert answer["response"] == BAD_TARGET, missing


def test_both_formats_of_the_lun_field_are_taken(drive: Drive) -> None:
    guest = drive()
    for flat in (True, False):
        assert guest.cdb(bytes(6), flat=flat)["status"] == 0


@pytest.mark.parametrize("indirect", [True, False])
@pytest.mark.parametrize("event_idx", [True, False])
def test_what_was_written_is_read_in_any_framing(
    drive: Drive, indirect: bool, event_idx: bool
) -> None:
    guest = drive(indirect=indirect, event_idx=event_idx)
    data = pattern(1, 8)
    guest.write(100, data, cut_out=[1, 17, 32, 2, 500, 512, 3000])
    assert guest.read(100, 8) == data
    assert guest.read(100, 8, cut_in=[1, 50, 56, 2, 1000, 3000]) == data
    assert guest.read(102, 2, cut_in=[107, 3]) == data[2 * 512 : 4 * 512]


def test_every_request_is_answered_with_a_call_when_the_target_sleeps(drive: Drive) -> None:
    guest = drive()
    for _ in range(50):
        # Long enough for the reactor to go to sleep, so that kick and call are both needed.
        time.sleep(0.002)
        guest.read(0, 1)


@by_day("randrw-lvol with larger blocks", "write-file", "randrw-malloc")
@pytest.mark.parametrize("kind", ["malloc", "file", "lvol", "lvol with larger blocks"])
@pytest.mark.parametrize("rw", ["randrw", "write"])
def test_a_disk_under_load_returns_what_was_written(
    disk: Target, tmp_path: Path, kind: str, rw: str
) -> None:
    bdev = "m-c0"
    if kind == "file":
        path = tmp_path / "disk"
        path.touch()
        path.open("r+b").truncate(64 * MIB)
        disk.rpc("bdev_uring_create", name="f", filename=str(path), block_size=512)
        bdev = "f"
    elif kind.startswith("lvol"):
        disk.rpc("bdev_malloc_create", name="base", num_blocks=2 * BLOCKS, block_size=512)
        disk.rpc("bdev_lvol_create_lvstore", bdev_name="base", lvs_name="lvs")
        disk.rpc(
            "bdev_lvol_create", lvs_name="lvs", lvol_name="v", size_in_mib=64, thin_provision=True
        )
        bdev = "lvs/v"
    if bdev != "m-c0":
        attach(disk, "c0", 1, bdev, block_size=4096 if kind.endswith("larger blocks") else None)
    number = "0" if bdev == "m-c0" else "1"
    done = subprocess.run(
        [
            *(str(binary("virtlun-bench")), "run", str(disk.vhost_dir / "c0"), "--json"),
            *("--verify", "--rw", rw, "--size", "16m", "--iodepth", "16", "--queues", "2"),
            *("--time", "0.5", "--target", number),
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(done.stdout)
    assert report["ios"] > 0
    assert (report["errors"], report["miscompares"]) == (0, 0)


NEXT, WRITE, INDIRECT = 1, 2, 4

MALFORMED: dict[str, dict[str, Any]] = {
    "a head beyond the queue": {"heads": [0xFFFF]},
    "an address outside guest memory": {
        "descs": [{"index": 60, "addr": 1 << 40, "len": 51}],
        "heads": [60],
    },
    "an address that wraps": {
        "descs": [{"index": 60, "addr": (1 << 64) - 8, "len": 51}],
        "heads": [60],
    },
    "a loop": {
        "descs": [{"index": 60, "addr": 4096, "len": 8, "flags": NEXT, "next": 60}],
        "heads": [60],
    },
    "a next beyond the table": {
        "descs": [{"index": 60, "addr": 4096, "len": 8, "flags": NEXT, "next": 9999}],
        "heads": [60],
    },
    "readable behind writable": {
        "descs": [
            {"index": 60, "addr": 4096, "len": 51, "flags": NEXT | WRITE, "next": 61},
            {"index": 61, "addr": 4096, "len": 108},
        ],
        "heads": [60],
    },
    "an indirect table of 17 bytes": {
        "descs": [{"index": 60, "addr": 4096, "len": 17, "flags": INDIRECT}],
        "heads": [60],
    },
    "an indirect table within one": {
        "descs": [{"index": 60, "addr": 0x800000, "len": 16, "flags": INDIRECT}],
        "table": [{"index": 0, "addr": 0x800000, "len": 16, "flags": INDIRECT}],
        "table_at": 0x800000,
        "heads": [60],
    },
    "a buffer of no bytes": {"descs": [{"index": 60, "addr": 4096, "len": 0}], "heads": [60]},
    "a header that is too short": {
        "descs": [
            {"index": 60, "addr": 0x800000, "len": 50, "flags": NEXT, "next": 61},
            {"index": 61, "addr": 0x801000, "len": 108, "flags": WRITE},
        ],
        "heads": [60],
    },
    "no room for the response": {
        "descs": [
            {"index": 60, "addr": 0x800000, "len": 51, "flags": NEXT, "next": 61},
            {"index": 61, "addr": 0x801000, "len": 107, "flags": WRITE},
        ],
        "heads": [60],
    },
    "nothing to read at all": {
        "descs": [{"index": 60, "addr": 0x801000, "len": 108, "flags": WRITE}],
        "heads": [60],
    },
    "an available index far ahead": {"avail_idx": 0x7FFF},
    "an available index that goes back": {"avail_idx": 0xFFF0},
}


@pytest.mark.parametrize("queue", [0, 2], ids=["control", "request"])
@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_chain_harms_no_other_queue_or_controller(
    drive: Drive, disk: Target, what: str, queue: int
) -> None:
    guest, other = drive(queues=2), drive("c1")
    other.write(7, pattern(7, 1))
    guest.send("raw", queue=queue, wait_ms=50, **MALFORMED[what])
    assert other.read(7, 1) == pattern(7, 1)
    # The second request queue (3 over all) of the same controller goes on too.
    guest.write(9, pattern(9, 1), queue=1)
    assert guest.read(9, 1, queue=1) == pattern(9, 1)
    # And the guest can start afresh.
    guest.send("reconnect")
    guest.ready()
    assert guest.read(9, 1) == pattern(9, 1)
    assert disk.process is not None
    assert disk.process.poll() is None


def test_a_guest_that_truncates_its_memory_harms_only_itself(drive: Drive, disk: Target) -> None:
    guest, other = drive(), drive("c1")
    guest.send("truncate", gpa=0, bytes=0)
    # Whatever the rings say now, they are gone.
    guest.send("kick", queue=2)
    guest.send("kick", queue=0)
    other.write(3, pattern(3, 4))
    assert other.read(3, 4) == pattern(3, 4)
    guest.kill()
    with drive(connect=False) as again:
        again.send("connect")
        again.ready()
        again.read(0, 1)
    assert disk.process is not None
    assert disk.process.poll() is None


def test_memory_may_change_while_requests_are_in_flight(drive: Drive) -> None:
    for slots in (False, True):
        guest = drive(mem_slots=slots)
        heads = []
        for i in range(20):
            cdb = bytes([0x28, 0, 0, 0, 0, i, 0, 0, 8, 0])
            heads.append(guest.send("submit", cdb=cdb, data_in_len=4096)["head"])
            if i % 5 == 0:
                guest.send("add_region", gpa=(1 << 32) + i * MIB, bytes=MIB)
            if i % 5 == 3:
                guest.send("remove_region", gpa=(1 << 32) + (i - 3) * MIB)
        for head in heads:
            answer = guest.send("wait", head=head)
            assert (answer["response"], answer["status"]) == (0, 0)
        guest.kill()


def test_memory_added_at_run_time_is_used(drive: Drive) -> None:
    guest = drive()
    guest.write(50, pattern(50, 1))
    guest.send("add_region", gpa=1 << 32, bytes=MIB)
    header = bytes([1, 0, 0x40, 0, 0, 0, 0, 0]) + bytes(11) + bytes.fromhex("28000000003200000100")
    guest.send("write_mem", gpa=1 << 32, data=header.ljust(51, b"\0"))
    at = (1 << 32) + 4096
    used = guest.send(
        "raw",
        queue=2,
        descs=[
            {"index": 60, "addr": 1 << 32, "len": 51, "flags": NEXT, "next": 61},
            {"index": 61, "addr": at, "len": 108, "flags": NEXT | WRITE, "next": 62},
            {"index": 62, "addr": at + 4096, "len": 512, "flags": WRITE},
        ],
        heads=[60],
        wait_ms=60_000,
    )["used"]
    assert used == [{"head": 60, "len": 620}]
    assert guest.send("read_mem", gpa=at + 4096, len=512)["data"] == pattern(50, 1)
    guest.send("remove_region", gpa=1 << 32)
    guest.read(50, 1)


def test_a_stopped_queue_tells_where_it_got_to_and_goes_on_there(drive: Drive) -> None:
    guest = drive()
    before = guest.send("ring", queue=2)["next_avail"]
    for i in range(5):
        guest.read(i, 1)
    base = guest.send("stop", queue=2)["base"]
    assert base == before + 5
    head = guest.send("submit", cdb=bytes(6))["head"]
    with pytest.raises(Refused, match="no answer"):
        guest.send("wait", head=head, timeout_ms=100)
    guest.send("start", queue=2, base=base)
    assert guest.send("wait", head=head)["status"] == 0


def test_firmware_then_kernel_on_the_same_socket(drive: Drive) -> None:
    guest = drive()
    # SeaBIOS asks every target, reads block 0, and is gone; Linux starts afresh.
    for number in range(255):
        assert guest.cdb(bytes(6), target=number)["response"] in (0, BAD_TARGET)
    guest.read(0, 1)
    for queue in range(3):
        guest.send("stop", queue=queue)
    guest.send("reconnect")
    guest.ready()
    guest.write(1, pattern(1, 1))
    for _ in range(20):
        guest.send("disconnect")
        guest.send("reconnect")
        guest.ready()
    assert guest.read(1, 1) == pattern(1, 1)


def test_hot_plug_and_unplug_are_events(drive: Drive, disk: Target) -> None:
    guest = drive()
    guest.send("events")
    disk.rpc("bdev_malloc_create", name="hot", num_blocks=2048, block_size=512)
    attach(disk, "c0", 5, "hot")
    events = guest.send("events", timeout_ms=60_000)["events"]
    assert [(e["event"], e["target"], e["reason"]) for e in events] == [
        (TRANSPORT_RESET, 5, RESCAN)
    ]
    guest.ready(target=5)
    assert guest.send("capacity", target=5)["blocks"] == 2048
    disk.rpc("vhost_scsi_controller_remove_target", ctrlr="c0", scsi_target_num=5)
    events = guest.send("events", timeout_ms=60_000)["events"]
    assert [(e["event"], e["target"], e["reason"]) for e in events] == [
        (TRANSPORT_RESET, 5, REMOVED)
    ]
    assert guest.cdb(bytes(6), target=5)["response"] == BAD_TARGET


def test_a_resize_is_an_event_and_a_unit_attention(drive: Drive, disk: Target) -> None:
    disk.rpc("bdev_malloc_create", name="base", num_blocks=2 * BLOCKS, block_size=512)
    disk.rpc("bdev_lvol_create_lvstore", bdev_name="base", lvs_name="lvs")
    disk.rpc("bdev_lvol_create", lvs_name="lvs", lvol_name="v", size_in_mib=8)
    attach(disk, "c0", 1, "lvs/v")
    guest = drive()
    guest.ready(target=1)
    guest.send("events")
    disk.rpc("bdev_lvol_resize", name="lvs/v", size_in_mib=16)
    events = guest.send("events", timeout_ms=60_000)["events"]
    # CAPACITY DATA HAS CHANGED: ASC 0x2a in the low byte, ASCQ 9 in the next (5.6.6.3).
    assert [(e["event"], e["target"], e["reason"]) for e in events] == [
        (PARAM_CHANGE, 1, 0x2A | 9 << 8)
    ]
    attention = guest.cdb(bytes(6), target=1)
    assert attention["status"] == 2
    assert (attention["sense"][2] & 15, *attention["sense"][12:14]) == (6, 0x2A, 9)
    assert guest.send("capacity", target=1)["blocks"] == 16 * MIB // 512


def test_events_wait_for_a_buffer(drive: Drive, disk: Target) -> None:
    guest = drive(event_buffers=1)
    guest.send("events")
    for number in (2, 3):
        disk.rpc("bdev_malloc_create", name=f"x{number}", num_blocks=2048, block_size=512)
        attach(disk, "c0", number, f"x{number}")
    first = guest.send("events", timeout_ms=60_000)["events"]
    more = guest.send("events", timeout_ms=60_000)["events"]
    assert [(e["event"], e["target"]) for e in first + more] == [
        (TRANSPORT_RESET, 2),
        (TRANSPORT_RESET, 3),
    ]


def test_missed_events_are_told(drive: Drive, disk: Target) -> None:
    guest = drive(event_buffers=1)
    guest.send("events")
    disk.rpc("bdev_malloc_create", name="x", num_blocks=2048, block_size=512)
    for _ in range(MAX_PENDING):
        attach(disk, "c0", 2, "x")
        disk.rpc("vhost_scsi_controller_remove_target", ctrlr="c0", scsi_target_num=2)
    (stats,) = disk.rpc("virtlun_vhost_get_stats", name="c0")
    assert stats["events_missed"] > 0
    until(lambda: misses_are_told(guest), "it is told")


def misses_are_told(guest: Initiator) -> bool:
    """Takes what waits for a buffer, and returns whether it says that more was missed."""
    events = guest.send("events", timeout_ms=60_000)["events"]
    return any(event["event"] & EVENTS_MISSED for event in events)


def test_migration_sees_every_page_that_the_target_writes(drive: Drive) -> None:
    guest = drive()
    guest.send("log", on=True)
    rings = set(guest.send("dirty")["pages"])
    guest.read(0, 64)
    pages = set(guest.send("dirty")["pages"])
    # 32 KiB of data and the response; and the used ring, which a sleeping target wrote before.
    assert len(pages - rings) >= 9
    used = guest.send("ring", queue=2)["used"] // 4096 * 4096
    # The guest may see in the ring itself, first, that it was written.
    until(lambda: used in pages or used in guest.send("dirty")["pages"], "the used ring")
    guest.send("log", on=False)
    guest.read(0, 1)


def test_task_management_is_answered(drive: Drive) -> None:
    guest = drive()
    logical_unit_reset, i_t_nexus_reset = 5, 3
    for subtype in (logical_unit_reset, i_t_nexus_reset):
        assert guest.send("tmf", subtype=subtype)["response"] == 0
        guest.ready()
    bad_target = guest.send("tmf", subtype=logical_unit_reset, target=9)
    assert bad_target["response"] == BAD_TARGET


def test_features_that_qemu_sends_unasked_are_taken(drive: Drive) -> None:
    # QEMU 7.2 sets HOTPLUG and CHANGE in SET_FEATURES whether or not they were offered.
    guest = drive(connect=False)
    answer = guest.send("connect", force_features=0b110)
    assert answer["features"] & 0b110 == 0b110
    assert answer["offered"] & 1 << 26, "LOG_ALL: else QEMU refuses to save or migrate"
    guest.ready()
