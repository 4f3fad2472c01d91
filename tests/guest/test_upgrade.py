"""The target is upgraded under verified I/O of a guest, whose QEMU keeps its connection.

Any QEMU will do: nothing is connected again, not even by one that could. `VIRTLUN_SEED` repeats the
guest's choices.
"""

from __future__ import annotations

import statistics

import pytest

from tests.guest.conftest import BootGuest, add, disk, remove
from tests.guest.emulator import Emulator
from tests.support.restarts import choose_seed
from tests.support.target import Target
from tests.support.verified_io import VerifiedIo, audit

pytestmark = pytest.mark.vm

VOLUME_MIB = 48
THREADS = 4
DEPTH = 8
UPGRADES = 10
VOLUME = "lvs0/v0"
RECONNECT_MS = 100
CONNECTED = " connected"
"""What the target says of a peer that comes."""


@pytest.mark.nightly
@pytest.mark.parametrize("emulator", ["stock", "newer"], indirect=True)
def test_a_guest_notices_a_pause(target: Target, boot: BootGuest, emulator: Emulator) -> None:
    seed = choose_seed()
    target.make_lvstore(size=2 * VOLUME_MIB << 20)
    target.make_thin("v0", VOLUME_MIB)
    add(target, 0, VOLUME)
    reconnect_ms = RECONNECT_MS if emulator.reconnects else None
    guest = boot(emulator=emulator, reconnect_ms=reconnect_ms, vcpus=THREADS, num_queues=THREADS)
    io = VerifiedIo(guest, disk(guest, 0), seed=seed, threads=THREADS, depth=DEPTH)
    connected = target.words().count(CONNECTED)
    assert connected
    pauses_ms, longest_s = [], 0.0
    for _ in range(UPGRADES):
        longest_s = max(longest_s, io.goes_on_after(target.upgrade).longest_s)
        pauses_ms.append(target.rpc("virtlun_get_status")["upgrade"]["pause_ms"])
    assert target.words().count(CONNECTED) == connected, target.words()
    ledger = io.finish()
    log = guest.run("dmesg")
    # No error, and no unit attention either: nothing happened to the disk.
    assert "I/O error" not in log, log
    assert "Power-on" not in log.split("Attached SCSI disk")[-1], log
    guest.stop()
    remove(target, 0)
    target.attach("audit", VOLUME)
    audit(target, "audit", ledger, seed)
    print(
        f"{UPGRADES} upgrades; guests were not served for {statistics.median(pauses_ms):.0f} ms "
        f"(median), {max(pauses_ms):.0f} ms (longest); a request took {longest_s:.3f} s at most"
    )
