"""SPDK's methods of ublk devices, as far as they go without the kernel's driver.

tests/guest/test_ublk_rpc.py has the rest, with a kernel that has it.
"""

from __future__ import annotations

import re

from tests.support.target import Target


def code(target: Target, *words: str) -> int:
    """Returns the error's code of a verb of `spdk-rpc` that has to fail."""
    done = target.spdk_rpc(*words)
    found = re.search(r'"code": (-\d+)', done.stdout + done.stderr)
    assert done.returncode == 1 and found, f"{words}: {done.stdout}{done.stderr}"
    return int(found[1])


def test_without_a_ublk_target_nothing_is_started(target: Target) -> None:
    target.rpc("bdev_null_create", name="n0", num_blocks=2048, block_size=512)
    assert code(target, "ublk_start_disk", "n0", "1") == -19
    assert code(target, "ublk_recover_disk", "n0", "1") == -19
    assert code(target, "ublk_stop_disk", "1") == -19
    assert code(target, "ublk_get_disks", "-n", "0") == -19
    assert code(target, "ublk_destroy_target") == -2
    assert code(target, "ublk_create_target", "-m", "0x0") == -22
    assert code(target, "ublk_create_target", "-m", "[1023]") == -22
    assert target.spdk_rpc("ublk_get_disks").stdout.strip() == "[]"
    assert target.configuration()["ublk"] == []
