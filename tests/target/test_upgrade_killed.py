"""Upgrades under I/O in which the old program, the new one, or both are ended at any moment.

They are killed, or told to end. Whoever is left serves, or nobody is, and the next start submits
again what is in flight, as after a crash. `VIRTLUN_SEED` repeats what a run chose;
`VIRTLUN_RESTARTS` is how many upgrades a night makes.
"""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from pydataplane.errors import TargetError
from tests.support.initiator import connected
from tests.support.restarts import RESTARTS, choose_seed
from tests.support.target import Target
from tests.support.wait import until
from tests.target.test_inflight import DEADLINE_S, EXTENTS, MIB, QUEUES, Load, prepare

KILLS = 6
"""Of the short run: two of each kind."""
LATEST = 1.5
"""When a program is ended at the latest, in times that an upgrade takes here."""


def upgrade(target: Target) -> tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]:
    """Has a new program begin to take over; returns the old one and that."""
    old, target.process = target.process, None
    assert old is not None
    with target.log.open("ab") as log:
        new = subprocess.Popen([*target.command(), "--take-over"], stdout=log, stderr=log)
    return old, new


def serves(target: Target, pid: int) -> bool:
    """Whether the process with that number serves, and waits for the next upgrade."""
    if not Path(f"{target.rpc_socket}.upgrade").exists():
        return False
    try:
        return bool(target.rpc("virtlun_get_status")["pid"] == pid)
    except TargetError:
        return False


def left(target: Target, both: Sequence[subprocess.Popen[bytes]]) -> None:
    """Waits until one of both programs serves alone, and is the target then, or none is left."""

    def came_out() -> bool:
        alive = [process for process in both if process.poll() is None]
        if len(alive) == 1 and serves(target, alive[0].pid):
            target.process = alive[0]
        return not alive or target.process is not None

    until(came_out, target.words)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "kills",
    [
        KILLS,
        pytest.param(
            RESTARTS, marks=[pytest.mark.nightly, pytest.mark.timeout(2 * 3600)], id="nightly"
        ),
    ],
)
def test_an_upgrade_in_which_programs_are_ended_loses_nothing(target: Target, kills: int) -> None:
    rng = random.Random(choose_seed())
    prepare(target)
    with connected(target, "c0", queues=QUEUES, memory=256 * MIB) as guest:
        load = Load(guest, rng)
        load.submit(EXTENTS - 4)
        begun = time.monotonic()
        target.upgrade()
        latest_s = LATEST * (time.monotonic() - begun)
        load.wait_all()
        came = {"old": 0, "new": 0, "nobody": 0}
        for turn in range(kills):
            load.submit(EXTENTS - 4)
            both = old, new = upgrade(target)
            time.sleep(rng.uniform(0, latest_s))
            victims = [[old], [new], [old, new]][turn % 3]
            rng.shuffle(victims)
            for victim in victims:
                victim.send_signal(rng.choice([signal.SIGKILL, signal.SIGTERM]))
            for victim in victims:
                victim.wait(DEADLINE_S)
            left(target, both)
            if target.process is None:
                came["nobody"] += 1
                load.submit(4)
                target.start()
                guest.until_connected(keep=True)
            else:
                came["old" if target.process is old else "new"] += 1
            for process in both:
                if process is not target.process:
                    process.wait()
            load.wait_all()
            load.check_region()
        load.audit()
        print(f"{load.answered} requests answered; served then: {came}")
        assert all(came.values()) or kills < RESTARTS, came
        # It is as good as any other: the next upgrade succeeds.
        target.upgrade()
        load.submit(4)
        load.wait_all()
        guest.send("disconnect")
    words = target.words()
    assert "broke virtio's rules" not in words
    assert "not started" not in words
