"""Bdevs for tests of faults, as guests meet them: errors and delays below a LUN and an lvstore."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from pydataplane.errors import BUSY, INVALID, NO_DEVICE, RpcError
from tests.support.initiator import Initiator, connected
from tests.support.target import Target
from tests.support.wait import until
from tests.target.test_fair import requests_of, wait_for_requests

MIB = 1 << 20
MEDIUM_ERROR = 3
LATENCIES = ("avg_read_latency", "p99_read_latency", "avg_write_latency", "p99_write_latency")


@pytest.fixture
def failing(target: Target) -> Target:
    """A target whose vm-0 has EE_m0, on a disk in memory, as its disk."""
    target.rpc("bdev_malloc_create", name="m0", num_blocks=16 * MIB // 512, block_size=512)
    target.rpc("bdev_error_create", base_name="m0")
    target.attach("vm-0", "EE_m0")
    return target


def inject(target: Target, io_type: str, error_type: str, **options: Any) -> None:
    assert target.rpc(
        "bdev_error_inject_error", name="EE_m0", io_type=io_type, error_type=error_type, **options
    )


def sense_of_write(guest: Initiator) -> tuple[int, int]:
    """Status of a WRITE(10) of a block, and the sense key."""
    answer = guest.cdb(bytes([0x2A, 0, 0, 0, 0, 0, 0, 0, 1, 0]), data_out=bytes(512))
    return answer["status"], (answer["sense"][2] & 15 if answer["sense"] else 0)


def test_a_guest_meets_the_errors_that_were_asked_for(failing: Target) -> None:
    with connected(failing) as guest:
        inject(failing, "write", "failure", num=2)
        assert guest.read(0, 1) == bytes(512)
        assert [sense_of_write(guest) for _ in range(3)] == [(2, MEDIUM_ERROR)] * 2 + [(0, 0)]
        inject(failing, "write", "failure", num=9)
        inject(failing, "clear", "failure")
        assert sense_of_write(guest) == (0, 0)
        # TASK SET FULL, which a guest sends again.
        inject(failing, "all", "nomem", num=3)
        statuses = {sense_of_write(guest)[0] for _ in range(4)}
        assert statuses <= {0, 0x28} and sense_of_write(guest) == (0, 0)
        guest.write(8, b"a" * 1024)
        inject(failing, "read", "corrupt_data", corrupt_offset=513, corrupt_value=1)
        assert guest.read(8, 2) == b"a" * 513 + b"`" + b"a" * 510
        assert guest.read(8, 2) == b"a" * 1024
        inject(failing, "write", "corrupt_data", corrupt_value=2)
        guest.write(8, b"a" * 1024)
        assert guest.read(8, 2) == b"c" + b"a" * 1023


def test_a_guest_waits_for_what_is_pending(failing: Target) -> None:
    with connected(failing) as guest:
        inject(failing, "write", "pending")
        answered: list[bool] = []

        def write() -> None:
            guest.write(3, b"p" * 512)
            answered.append(True)

        thread = threading.Thread(target=write)
        taken = requests_of(failing, "vm-0")
        thread.start()
        wait_for_requests(failing, "vm-0", taken)
        time.sleep(0.3)
        assert not answered
        assert failing.rpc("bdev_error_resume_pending", name="EE_m0") is True
        thread.join(60)
        assert answered
        assert guest.read(3, 1) == b"p" * 512


def test_a_stop_has_what_is_pending_go_on(failing: Target) -> None:
    with connected(failing) as guest:
        inject(failing, "write", "pending", num=9)
        answered: list[tuple[int, int]] = []
        thread = threading.Thread(target=lambda: answered.append(sense_of_write(guest)))
        taken = requests_of(failing, "vm-0")
        thread.start()
        wait_for_requests(failing, "vm-0", taken)
        time.sleep(0.3)
        assert not answered
        assert failing.stop() == 0
        thread.join(60)
        assert answered == [(0, 0)]


def test_what_makes_no_sense_is_refused(failing: Target) -> None:
    def refused(method: str, code: int, words: str, **params: Any) -> None:
        error = failing.fails(method, **params)
        assert isinstance(error, RpcError)
        assert (error.code, words in str(error)) == (code, True), error

    refused("bdev_error_create", NO_DEVICE, "there is no bdev none", base_name="none")
    refused("bdev_error_create", BUSY, "in use by error injection bdev EE_m0", base_name="m0")
    what: dict[str, Any] = {"name": "EE_m0", "io_type": "read", "error_type": "corrupt_data"}
    refused("bdev_error_inject_error", INVALID, "corrupt_value is 0", **what)
    what |= {"error_type": "failure", "nvme_sc": 1}
    refused("bdev_error_inject_error", INVALID, "nvme_sct and nvme_sc are not supported", **what)
    what |= {"name": "m0", "nvme_sc": 0}
    refused("bdev_error_inject_error", NO_DEVICE, "is a Malloc disk, not a Error", **what)
    late = dict.fromkeys(LATENCIES, 0) | {"p99_read_latency": 10**12}
    failing.rpc("bdev_malloc_create", name="m1", num_blocks=64, block_size=512)
    refused("bdev_delay_create", INVALID, "a day, at most", base_bdev_name="m1", name="d", **late)
    assert failing.rpc("bdev_malloc_delete", name="m1") is True


def test_a_slow_disk_below_an_lvstore_is_slow_and_comes_back_as_it_was(target: Target) -> None:
    file = target.make_file("disk.img", 64 * MIB)
    target.rpc("bdev_uring_create", filename=str(file), name="disk", block_size=512)
    made = dict(zip(LATENCIES, (1000, 2000, 3000, 4000), strict=True))
    target.rpc("bdev_delay_create", base_bdev_name="disk", name="slow", **made)
    target.rpc("bdev_lvol_create_lvstore", bdev_name="slow", lvs_name="lvs0")
    target.rpc("bdev_lvol_create", lvs_name="lvs0", lvol_name="v", size_in_mib=8)
    target.attach("vm-0", "lvs0/v")
    for kind in ("avg_read", "p99_read"):
        target.rpc(
            "bdev_delay_update_latency",
            delay_bdev_name="slow",
            latency_type=kind,
            latency_us=50_000,
        )
    for _ in range(2):
        with connected(target) as guest:
            guest.write(0, b"1" * 512)
            began = time.monotonic()
            assert guest.read(0, 1) == b"1" * 512
            assert time.monotonic() - began >= 0.049
        (slow,) = target.rpc("bdev_get_bdevs", name="slow")
        shown = slow["driver_specific"]["delay"]
        assert [shown[name] for name in LATENCIES] == [50_000, 50_000, 3000, 4000]
        uuid = slow["uuid"]
        target.restart()
        assert target.rpc("virtlun_get_status")["restore_problems"] == []
        assert target.rpc("bdev_get_bdevs", name="slow")[0]["uuid"] == uuid
    # With all that lies on it.
    target.rpc("vhost_delete_controller", ctrlr="vm-0")
    target.rpc("bdev_uring_delete", name="disk")
    until(lambda: target.rpc("bdev_get_bdevs") == [], "all are gone")


def test_a_rotten_byte_is_found_by_the_checksums_above(target: Target) -> None:
    target.rpc("bdev_malloc_create", name="m0", num_blocks=32 * MIB // 512, block_size=512)
    target.rpc("bdev_error_create", base_name="m0")
    target.rpc("virtlun_integrity_create", base_bdev_name="EE_m0", name="checked")
    target.attach("vm-0", "checked")
    with connected(target) as guest:
        guest.write(0, b"2" * 4096)
        flush = guest.cdb(bytes([0x35, *bytes(9)]))
        assert flush["status"] == 0
        inject(target, "read", "corrupt_data", corrupt_offset=17, corrupt_value=8, num=4)
        answer = guest.cdb(bytes([0x28, 0, 0, 0, 0, 0, 0, 0, 8, 0]), data_in_len=4096)
        assert (answer["status"], answer["sense"][2] & 15) == (2, MEDIUM_ERROR), answer
        inject(target, "clear", "failure")
        assert guest.read(0, 8) == b"2" * 4096
