"""VMs' connections that virtlun-holder keeps while the target is away: when they are, and when not.

What is in flight then is the subject of test_killed_at_steps and test_inflight.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import encryption
from tests.support.frozen import freeze, frozen
from tests.support.initiator import Initiator, Refused, connected
from tests.support.target import Target
from tests.support.wait import until
from tests.target.conftest import MakeTarget
from tests.target.test_device import misses_are_told

pytestmark = pytest.mark.root

BLOCK, MIB = 512, 1 << 20
IN_FLIGHT = 4
PATTERN = b"\x5a" * BLOCK
QUEUE = 2
"""The first request queue, over all queues."""
NOT_LATE_S = 0.8
"""A target waits for a second for the holder's answer."""
LATE = dict.fromkeys(
    ("avg_read_latency", "p99_read_latency", "avg_write_latency", "p99_write_latency"), 1_000_000
)
"""Of a disk that takes a second, in microseconds."""


@pytest.fixture
def target(make_target: MakeTarget) -> Target:
    """A running target with a disk on a file."""
    target = make_target("--hold-sessions").start()
    serve(target)
    return target


def serve(target: Target) -> None:
    """Makes a controller with a disk on a file."""
    disk = target.make_file("disk.img", 4 * MIB)
    target.rpc("bdev_uring_create", filename=str(disk), name="disk", block_size=BLOCK)
    target.attach("c0", "disk")


@pytest.fixture
def guest(target: Target) -> Iterator[Initiator]:
    """A driver that the target serves, whose session is kept."""
    with connected(target, "c0") as guest:
        kept(target)
        yield guest


def slow(target: Target, guest: Initiator) -> None:
    """Puts a slow disk in the place of the driver's, and requests to that in flight."""
    target.rpc("vhost_scsi_controller_remove_target", ctrlr="c0", scsi_target_num=0)
    target.rpc("bdev_delay_create", base_bdev_name="disk", name="slow", **LATE)
    target.add_lun("c0", "slow")
    guest.ready()
    # The next target answers the first with a unit attention.
    for _ in range(IN_FLIGHT):
        guest.send("submit", cdb=bytes([0x28, *bytes(7), 1, 0]), data_in_len=BLOCK)
    until(lambda: in_flight(guest) == IN_FLIGHT, "they are taken")


def in_flight(guest: Initiator) -> int:
    """Returns how many requests the target has taken and not answered."""
    return len(guest.send("inflight")["queues"][QUEUE]["in_flight"])


def refused(guest: Initiator, refusals: list[Refused]) -> None:
    """Stops the queue, which waits for the request, and is not answered."""
    try:
        guest.send("stop", queue=QUEUE)
    except Refused as refusal:
        refusals.append(refusal)


@contextlib.contextmanager
def separate(
    make_target: MakeTarget, *options: str
) -> Iterator[tuple[Target, Initiator, subprocess.Popen[bytes]]]:
    """A target, a driver whose session is kept, and a holder with `options` that runs by itself."""
    target = make_target("--hold-sessions")
    target.options = (*target.options, "--holder-socket", str(target.holder_socket))
    with target.holder(*options) as holder:
        target.start()
        serve(target)
        with connected(target, "c0") as guest:
            kept(target)
            yield target, guest, holder


def kept(target: Target) -> None:
    """Waits until the session of the controller is kept."""
    until(lambda: target.is_kept("c0"), "it is kept")


def goes_on(target: Target, guest: Initiator) -> None:
    """Kills the target, and sees the driver go on with the next as if nothing had been."""
    guest.write(8, PATTERN)
    target.crash()
    guest.ready()
    assert guest.read(8, 1) == PATTERN
    assert started(target) == [True]


def started(target: Target) -> list[bool]:
    """Returns of each session of the controller whether it uses its queues."""
    (controller,) = target.rpc("vhost_get_controllers", name="c0")
    return [session["started"] for session in controller["sessions"]]


def ends(guest: Initiator) -> None:
    """Waits until the driver's connection has ended."""
    until(lambda: not guest.send("alive")["alive"], "it is disconnected")


def held_memory(pid: int) -> bool:
    """Whether a process has a file of the driver's memory open."""
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if "virtlun-bench" in str(fd.readlink()):
                return True
    return False


def test_again_and_again(target: Target, guest: Initiator) -> None:
    for _ in range(3):
        goes_on(target, guest)
        kept(target)


def test_what_the_driver_said_meanwhile_counts(target: Target, guest: Initiator) -> None:
    """Queues that it stopped stay so, and memory that it added is there."""
    base = guest.send("stop", queue=QUEUE)["base"]
    guest.send("add_region", gpa=1 << 32, bytes=MIB)
    kept(target)
    target.crash()
    # It goes on a moment after the target is ready.
    until(lambda: started(target) == [False], "it goes on, with its queue stopped")
    guest.send("remove_region", gpa=1 << 32)
    guest.send("start", queue=QUEUE, base=base)
    guest.ready()
    kept(target)
    goes_on(target, guest)


def test_a_log_of_dirty_pages_goes_on(target: Target, guest: Initiator) -> None:
    """As of a guest that is migrating."""
    guest.send("log", on=True)
    kept(target)
    goes_on(target, guest)
    guest.send("dirty")
    guest.read(8, 1)
    assert guest.send("dirty")["pages"]


def test_an_event_that_was_lost_is_told(target: Target, guest: Initiator) -> None:
    """EVENTS_MISSED (virtio 1.2, 5.6.6.3), and the size of each disk."""
    target.crash()
    guest.ready()
    until(lambda: misses_are_told(guest), "it is told")


def test_a_disk_that_came_and_one_that_grew(target: Target, guest: Initiator) -> None:
    target.rpc("bdev_malloc_create", name="m", num_blocks=2048, block_size=BLOCK)
    target.add_lun("c0", "m", 1)
    target.crash()
    guest.ready(target=1)
    assert guest.send("capacity", target=1)["blocks"] == 2048
    kept(target)


def test_an_upgrade_in_between(target: Target, guest: Initiator) -> None:
    target.upgrade()
    kept(target)
    goes_on(target, guest)
    kept(target)
    target.upgrade()
    kept(target)
    goes_on(target, guest)


def test_a_holder_that_is_started_anew_is_given_all(make_target: MakeTarget) -> None:
    with separate(make_target) as (target, guest, holder):
        holder.kill()
        until(lambda: not target.is_kept("c0"), "it is seen")
        with target.holder():
            kept(target)
            goes_on(target, guest)


def test_an_orderly_stop_leaves_it(target: Target, guest: Initiator) -> None:
    """With nothing in flight, and the driver told of all that ended."""
    for _ in range(3):
        guest.write(8, PATTERN)
        head = guest.send("submit", cdb=bytes([0x28, *bytes(7), 1, 0]), data_in_len=BLOCK)["head"]
        assert target.stop() == 0
        assert "its VM waits for the next target" in target.words()
        target.start()
        guest.send("wait", head=head)
        guest.ready()
        assert guest.read(8, 1) == PATTERN
        kept(target)


def test_a_controller_that_is_deleted_ends_it(target: Target, guest: Initiator) -> None:
    target.rpc("vhost_delete_controller", ctrlr="c0", force=True)
    ends(guest)


@pytest.mark.nightly
def test_a_message_that_was_half_done_ends_it(target: Target, guest: Initiator) -> None:
    """Nobody knows what became of it, and its sender waits for the answer."""
    slow(target, guest)
    refusals: list[Refused] = []
    asks = threading.Thread(target=lambda: refused(guest, refusals))
    asks.start()
    time.sleep(0.3)
    target.crash()
    asks.join()
    assert refusals
    assert "was killed while it handled a message" in target.words()
    guest.send("reconnect")
    guest.ready()


def test_what_is_asked_while_no_target_is_there_is_answered(
    target: Target, guest: Initiator
) -> None:
    """As QEMU does when its VM is paused or reset: it waits."""
    guest.write(0, PATTERN)
    ring = guest.send("ring", queue=QUEUE)
    target.kill9()
    answers: list[int] = []
    asks = threading.Thread(target=lambda: answers.append(guest.send("stop", queue=QUEUE)["base"]))
    asks.start()
    time.sleep(0.2)
    assert not answers
    target.start()
    asks.join()
    assert answers == [ring["next_avail"]]
    guest.send("start", queue=QUEUE, base=answers[0])
    guest.ready()
    assert guest.read(0, 1) == PATTERN


def test_a_driver_that_left_meanwhile_is_forgotten(target: Target, guest: Initiator) -> None:
    """Its memory, too, before the next target comes."""
    pid = target.holder_pid()
    assert held_memory(pid)
    target.kill9()
    guest.kill()
    until(lambda: not held_memory(pid), "the holder lets go of its memory")
    target.start()
    (controller,) = target.rpc("vhost_get_controllers", name="c0")
    assert controller["sessions"] == []
    connected(target, "c0").kill()


def test_a_session_that_ended_is_let_go_of(target: Target, guest: Initiator) -> None:
    pid = target.holder_pid()
    assert held_memory(pid)
    guest.send("disconnect")
    until(lambda: not held_memory(pid), "the holder lets go of its memory")


def test_a_holder_that_answers_late(make_target: MakeTarget) -> None:
    """Nobody waits for it for long, and what it has is gone on with when it answers."""
    with separate(make_target) as (target, guest, holder):
        target.kill9()
        freeze(holder.pid)
        target.start()
        holder.send_signal(signal.SIGCONT)
        guest.ready()
        kept(target)
        freeze(holder.pid)
        base = guest.send("stop", queue=QUEUE)["base"]
        guest.send("start", queue=QUEUE, base=base)
        guest.ready()
        holder.send_signal(signal.SIGCONT)
        kept(target)
        goes_on(target, guest)


def test_a_holder_that_is_stopped_when_its_target_dies_goes_on(
    target: Target, guest: Initiator
) -> None:
    """Its process group is orphaned then, so that the kernel sends it SIGHUP, and SIGCONT."""
    guest.write(8, PATTERN)
    with frozen(target.holder_pid()):
        target.kill9()
    target.start()
    guest.ready()
    assert guest.read(8, 1) == PATTERN
    kept(target)


def test_one_that_nobody_serves_is_given_up(make_target: MakeTarget) -> None:
    with separate(make_target, "--wait", "1") as (target, guest, _):
        target.kill9()
        ends(guest)
        until(lambda: "nobody serves its VM for 1 s: given up" in target.words(), "it is said")


def test_a_controller_that_is_not_there_any_more(target: Target, guest: Initiator) -> None:
    """As of a target with another configuration."""
    target.kill9()
    (target.state_dir / "config.json").unlink()
    target.start()
    ends(guest)


def test_a_target_without_the_option_ends_what_was_kept(target: Target, guest: Initiator) -> None:
    target.kill9()
    target.options = ()
    target.start()
    ends(guest)
    guest.send("reconnect")
    guest.ready()


def test_one_that_takes_over_without_the_option_keeps_it_connected_and_no_longer(
    target: Target, guest: Initiator
) -> None:
    """What was kept is of an earlier time: nobody may go on with it."""
    target.options = ()
    target.upgrade()
    guest.ready()
    assert not target.is_kept("c0")
    target.kill9()
    ends(guest)


def test_a_client_is_answered_when_what_was_kept_before_an_upgrade_is_let_go_of(
    make_target: MakeTarget,
) -> None:
    with separate(make_target) as (target, guest, holder):
        target.options = tuple(word for word in target.options if word != "--hold-sessions")
        stood_still = -time.monotonic()
        freeze(holder.pid)
        going_on = threading.Timer(0.3, holder.send_signal, [signal.SIGCONT])
        going_on.start()
        target.upgrade()
        assert not target.is_kept("c0")
        target.kill9()
        going_on.join()
        stood_still += time.monotonic()
        if stood_still > NOT_LATE_S:
            target.start()  # which tells a holder that the other one has not waited for
        ends(guest)


def test_what_was_kept_before_an_upgrade_is_not_gone_on_with(make_target: MakeTarget) -> None:
    """Another program took over, and the holder did not hear of it before that was killed, too."""
    with separate(make_target) as (target, guest, holder):
        freeze(holder.pid)
        options = target.options
        target.options = tuple(word for word in options if word != "--hold-sessions")
        target.upgrade()
        target.kill9()
        holder.send_signal(signal.SIGCONT)
        target.options = options
        target.start()
        ends(guest)
        assert "was killed while it handled a message" in target.words()


def test_without_the_option_nothing_is_kept(make_target: MakeTarget) -> None:
    target = make_target().start()
    target.rpc("bdev_malloc_create", name="m", num_blocks=2048, block_size=BLOCK)
    target.attach("c0", "m")
    with connected(target, "c0") as guest:
        assert not target.is_kept("c0")
        target.kill9()
        ends(guest)


@pytest.mark.nightly
def test_a_message_that_waited_and_a_second_kill(target: Target, guest: Initiator) -> None:
    """The next target began to handle it: what was kept before is of no use any more."""
    slow(target, guest)
    target.kill9()
    refusals: list[Refused] = []
    asks = threading.Thread(target=lambda: refused(guest, refusals))
    asks.start()
    target.start()
    # The request is done again, and the stop waits for it.
    until(lambda: "are submitted again: " in target.words(), "it goes on")
    time.sleep(0.3)
    target.crash()
    asks.join()
    assert refusals
    assert "was killed while it handled a message" in target.words()
    guest.send("reconnect")
    guest.ready()


def test_messages_that_come_when_the_target_stops_wait_for_the_next(
    target: Target, guest: Initiator
) -> None:
    stopping = threading.Event()
    sent = 0

    def send() -> None:
        nonlocal sent
        while not stopping.is_set():
            guest.send("set_mem_table")
            sent += 1

    for _ in range(5):
        stopping.clear()
        sends = threading.Thread(target=send)
        sends.start()
        before = sent
        until(lambda: sent > before + 20, "it sends")  # noqa: B023
        assert target.stop() == 0
        target.start()
        after = sent
        until(lambda: sent > after + 20, "it goes on")  # noqa: B023
        stopping.set()
        sends.join()
        guest.ready()
        kept(target)
    assert "does not go on" not in target.words()


@pytest.mark.parametrize("kind", ["scsi", "blk"])
def test_a_disk_that_waits_for_its_key(make_target: MakeTarget, kind: str) -> None:
    target = make_target("--hold-sessions").start()
    encryption.make_encrypted(target)
    if kind == "scsi":
        target.attach("c0", "c0")
    else:
        target.rpc("vhost_create_blk_controller", ctrlr="c0", dev_name="c0")
    with Initiator(target.vhost_dir / "c0") as guest:
        guest.send("connect", kind=kind)
        if kind == "scsi":
            guest.ready()
        kept(target)
        for end in (target.kill9, target.stop):
            end()
            target.start()
            encryption.give_key(target)
            if kind == "scsi":
                guest.ready()
            else:
                assert guest.send("blk", kind=0, sector=0, data_in_len=BLOCK)["status"] == 0
            kept(target)
        # One that is deleted while it waits ends.
        target.crash()
        if kind == "scsi":
            target.rpc("vhost_delete_controller", ctrlr="c0")
            ends(guest)
