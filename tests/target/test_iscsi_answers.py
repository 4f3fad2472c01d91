"""What no real iSCSI target does when a test wants it to: answers that are lost, or odd."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from pydataplane.errors import INVALID
from tests.support.fake_iscsi import BLOCK, BUSY, GOOD, Answer, Command, FakeIscsi, Lose, sense
from tests.support.initiator import Initiator, connected
from tests.support.night import at_night
from tests.support.restarts import choose_seed
from tests.support.target import Target
from tests.support.wait import until
from tests.target.conftest import MakeTarget
from tests.target.test_iscsi import CHECK, FLUSH, IO, PARAM_CHANGE, create, refused, shown
from tests.target.test_nbd import outcome

WRITE, COMPARED, READ, SYNCHRONIZE = 0x8A, 0x89, 0x88, 0x91
FUA = 8
ABORTED_COMMAND, MISCOMPARE = 0xB, 0xE
Usual = Callable[[Command], Answer]


@pytest.fixture
def target(make_target: MakeTarget) -> Target:
    """A target that is an iSCSI initiator."""
    return make_target("--iscsi").start()


def write(lba: int, byte: bytes, blocks: int = 1) -> dict[str, Any]:
    """Returns a WRITE(10) of blocks that are full of a byte."""
    cdb = bytes([0x2A, 0, *lba.to_bytes(4, "big"), 0, *blocks.to_bytes(2, "big"), 0])
    return {"cdb": cdb, "data_out": byte * BLOCK * blocks}


def read(lba: int) -> dict[str, Any]:
    """Returns a READ(10) of a block."""
    return {"cdb": bytes([0x28, 0, *lba.to_bytes(4, "big"), 0, 0, 1, 0]), "data_in_len": BLOCK}


class Once:
    """Answers the first command with one of these operation codes in its own way."""

    def __init__(self, opcode: int, answer: Callable[[Command, Usual], Answer | bytes]) -> None:
        self.opcode, self.answer, self.left = opcode, answer, 1

    def __call__(self, command: Command, usual: Usual) -> Answer | bytes:
        if command.opcode == self.opcode and self.left:
            self.left -= 1
            return self.answer(command, usual)
        return usual(command)


def says(answer: Answer) -> Callable[[Command, Usual], Answer]:
    """Answers so, whatever the command is, which is not done."""
    return lambda _command, _usual: answer


def kept_to_itself(command: Command, usual: Usual) -> bytes:
    """Does what was asked, and says nothing about that."""
    usual(command)
    return b""


def lost(command: Command, usual: Usual) -> Answer:
    """Does what was asked, and goes."""
    usual(command)
    raise Lose


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"blocks": 0}, "which no disk has"),
        ({"block_size": 3}, "a block is 512 or 4096 bytes, not 3"),
        ({"block_size": 0}, "a block is 512 or 4096 bytes, not 0"),
        ({"blocks": 1 << 63}, "which no disk has"),
    ],
)
def test_a_capacity_that_no_disk_has_is_refused(
    target: Target, given: dict[str, Any], words: str
) -> None:
    with FakeIscsi(**given) as fake:
        refused(target, words, IO, name="i0", url=fake.url)
        assert target.rpc("bdev_get_bdevs") == []


def test_a_write_whose_answer_is_lost_is_repeated_before_another_to_its_blocks(
    target: Target,
) -> None:
    with FakeIscsi() as fake:
        create(target, fake.url)
        target.attach("vm-0", "i0")
        with connected(target) as guest:

            def good(head: int) -> bool:
                return bool(guest.send("wait", head=head, timeout_ms=60_000)["status"] == GOOD)

            fake.answering = Once(WRITE, kept_to_itself)
            requests = [write(8, b"a", 2), write(9, b"b"), read(9)]
            first, second, third = (guest.send("submit", **each)["head"] for each in requests)
            assert good(third)
            fake.answering = Once(READ, lost)
            last = guest.send("submit", **read(100))["head"]
            assert good(first) and good(second) and good(last)
            assert guest.read(8, 2) == b"a" * BLOCK + b"b" * BLOCK
            # And what was answered does not come again.
            assert good(guest.send("submit", **write(20, b"c"))["head"])
        # The second overlaps the first one, and goes when that is answered.
        order = [command.data[:1] for command in fake.opcodes(WRITE)]
        assert order == [b"a", b"a", b"b", b"c"]
        assert bytes(fake.content[9 * BLOCK : 10 * BLOCK]) == b"b" * BLOCK
        # The second session ends the first one: it has its identifier.
        assert len(fake.logins) == 2 and len(set(fake.logins)) == 1
        assert shown(target)["sessions"] == 2


def test_compare_and_write_is_one_command_and_never_repeated(target: Target) -> None:
    compared = bytes([0x89, 0, *(5).to_bytes(8, "big"), 0, 0, 0, 1, 0, 0])
    with FakeIscsi() as fake:
        assert create(target, fake.url)["compare_and_write_blocks"] == 8
        target.attach("vm-0", "i0")
        with connected(target) as guest:
            # Another host was quicker than the target's own look.
            def meanwhile(command: Command, usual: Usual) -> Answer:
                fake.content[5 * BLOCK] = 7
                return usual(command)

            words = bytes(BLOCK) + b"w" * BLOCK
            fake.answering = Once(COMPARED, meanwhile)
            assert outcome(guest.cdb(compared, data_out=words)) == (CHECK, MISCOMPARE)
            fake.content[5 * BLOCK] = 0
            assert outcome(guest.cdb(compared, data_out=words)) == (GOOD, 0)
            assert [command.data for command in fake.opcodes(COMPARED)] == [words, words]
            assert fake.opcodes(WRITE) == []
            fake.answering = Once(COMPARED, lost)
            words = b"w" * BLOCK + b"x" * BLOCK
            answer = guest.cdb(compared, data_out=words, timeout_ms=60_000)
            assert outcome(answer) == (CHECK, ABORTED_COMMAND)
            assert len(fake.opcodes(COMPARED)) == 3
            assert guest.read(5, 1) == b"x" * BLOCK


def test_what_a_lun_says_instead_of_an_answer_is_not_the_guests(target: Target) -> None:
    with FakeIscsi() as fake:
        create(target, fake.url)
        target.attach("vm-0", "i0")
        with connected(target) as guest:
            for said in (
                sense(6, 0x2900),
                sense(6, 0x2A03),
                sense(2, 0x0401),
                sense(0xB, 0x4700),
                sense(1, 0x1701),
                Answer(status=BUSY),
                Answer(status=0x28),
            ):
                fake.answering = Once(WRITE, says(said))
                assert outcome(guest.cdb(**write(3, b"y"))) == (GOOD, 0), said
            for said, status in (
                (sense(3, 0x0C00), (CHECK, 3)),
                (sense(7, 0x2700), (CHECK, 7)),
                (sense(5, 0x2100), (CHECK, 5)),
                (Answer(status=0x18), (0x18, 0)),
            ):
                fake.answering = Once(WRITE, says(said))
                assert outcome(guest.cdb(**write(3, b"z"))) == status, said
            # Fewer bytes than were asked for are no data.
            fake.answering = Once(READ, says(Answer(b"s" * 100)))
            assert outcome(guest.cdb(**read(3))) == (CHECK, 3)


@pytest.mark.parametrize("code", [0x3F03, 0x3F0E, 0x2900])
def test_nothing_is_written_to_another_lun_that_comes_in_a_session(
    target: Target, code: int
) -> None:
    with FakeIscsi() as fake:
        create(target, fake.url)
        target.attach("vm-0", "i0")

        def swapped(_command: Command, _usual: Usual) -> Answer:
            fake.identity = b"\x60another"
            return sense(6, code)

        with connected(target) as guest:
            fake.answering = Once(WRITE, swapped)
            head = guest.send("submit", **write(3, b"s"))["head"]
            problem = "it has another identification"
            until(lambda: problem in shown(target).get("problem", ""), "it is told")
            assert shown(target)["connected"] is False
            assert len(fake.opcodes(WRITE)) == 1
            fake.identity = FakeIscsi.identity
            assert outcome(guest.send("wait", head=head, timeout_ms=60_000)) == (GOOD, 0)
        assert bytes(fake.content[3 * BLOCK :][:BLOCK]) == b"s" * BLOCK


def said(target: Target) -> bool:
    """Whether it is told, as the only problem, that something else is there than was."""
    (problem,) = target.rpc("virtlun_get_status")["restore_problems"]
    return "another LUN" in str(problem) or "blocks are 4096" in str(problem)


def test_another_lun_is_not_used_after_a_restart(target: Target) -> None:
    """Also where its blocks have another size, as the bdev's identity is recorded."""
    with FakeIscsi() as fake:
        made = create(target, fake.url)
        for change, back in (
            ({"identity": b"\x60another"}, {"identity": FakeIscsi.identity}),
            ({"block_size": 4096}, {"block_size": BLOCK}),
        ):
            target.kill9()
            vars(fake).update(change)
            target.start()
            until(lambda: said(target), lambda: str(target.rpc("virtlun_get_status")))
            vars(fake).update(back)
            target.restored()
            assert shown(target)["uuid"] == made["uuid"]


def test_a_lun_that_cannot_be_told_from_another_is_refused(target: Target) -> None:
    with FakeIscsi(identity=b"") as fake:
        refused(target, "could not be told from another one", IO, name="i0", url=fake.url)
        what = {"name": "i0", "url": fake.url}
        fake.identity = FakeIscsi.identity
        refused(target, "are given together", INVALID, **what, lun_block_size=BLOCK)
        other = "00000000-0000-4000-8000-000000000000"
        refused(target, "another LUN", IO, **what, lun_uuid=other, lun_block_size=BLOCK)


def test_what_no_flush_has_made_durable_fails_the_flushes_after_a_loss(target: Target) -> None:
    with FakeIscsi(mode=bytes([23, 0, 0, 0, 8, 18, 4, *bytes(17)])) as fake:
        # As one on another host: only an address that begins with 127. and localhost are known.
        create(target, fake.url.replace("127.0.0.1", "127.1"))
        target.attach("vm-0", "i0")
        with connected(target) as guest:
            for flushed, status in ((True, GOOD), (False, CHECK)):
                assert outcome(guest.cdb(**write(3, b"f"))) == (GOOD, 0)
                if flushed:
                    assert guest.cdb(FLUSH)["status"] == GOOD
                fake.answering = Once(READ, lost)
                assert outcome(guest.cdb(**read(9), timeout_ms=60_000)) == (GOOD, 0)
                assert guest.cdb(FLUSH)["status"] == status


def test_a_lun_that_has_a_cache_of_late_is_not_used(target: Target) -> None:
    with FakeIscsi(mode=bytes([23, 0, 0x10, 0, 8, 18, 0, *bytes(17)])) as fake:
        create(target, fake.url)
        target.attach("vm-0", "i0")
        with connected(target) as guest:
            was, fake.mode = fake.mode, FakeIscsi.mode
            fake.answering = Once(WRITE, says(sense(6, 0x2A01)))
            head = guest.send("submit", **write(3, b"s"))["head"]
            until(lambda: "a volatile cache now" in shown(target).get("problem", ""), "it is told")
            assert len(fake.opcodes(WRITE)) == 1
            fake.mode = was
            assert outcome(guest.send("wait", head=head, timeout_ms=60_000)) == (GOOD, 0)


def test_one_command_without_an_answer_ends_the_session_and_alone_fails(target: Target) -> None:
    target.rpc("bdev_iscsi_set_options", timeout_sec=4)
    with FakeIscsi() as fake:
        create(target, fake.url)
        target.attach("vm-0", "i0")
        with connected(target) as guest:
            fake.answering = Once(WRITE, lambda _command, _usual: b"")
            head = guest.send("submit", **write(3, b"o"))["head"]
            # All the time others are answered.
            while shown(target)["sessions"] == 1:
                time.sleep(0.02)
                assert outcome(guest.cdb(**read(9), timeout_ms=60_000)) == (GOOD, 0)
            assert outcome(guest.send("wait", head=head, timeout_ms=60_000)) == (CHECK, 3)
            assert outcome(guest.cdb(**write(3, b"o"))) == (GOOD, 0)


def test_an_answer_waits_for_data_that_is_still_to_be_sent(target: Target) -> None:
    """The memory is the guest's again only when nothing reads it any more."""
    over = threading.Event()
    early: list[bool] = []
    with FakeIscsi(unsolicited=True) as fake:
        create(target, fake.url)
        target.attach("vm-0", "i0")
        with connected(target, memory=64 << 20) as guest:
            fake.answering = Once(WRITE, says(sense(3, 0x0C00)))
            fake.after = lambda: early.append(over.wait(2))
            # Twice as much as the kernel takes at once (tcp_wmem).
            submitted = [guest.send("submit", **write(at, b"e", 8190))["head"] for at in (3, 8193)]
            first, second = submitted
            assert outcome(guest.send("wait", head=first, timeout_ms=60_000)) == (CHECK, 3)
            over.set()
            assert early[:1] == [False]
            assert outcome(guest.send("wait", head=second, timeout_ms=60_000)) == (GOOD, 0)


def test_another_size_of_blocks_ends_the_session(target: Target) -> None:
    with FakeIscsi() as fake:
        create(target, fake.url)
        target.attach("vm-0", "i0")
        with connected(target) as guest:
            fake.block_size = 4096
            until(lambda: not shown(target)["connected"], "it is looked at")
            head = guest.send("submit", **write(3, b"s"))["head"]
            until(lambda: "blocks are 4096" in shown(target).get("problem", ""), "it is told")
            fake.block_size = BLOCK
            assert outcome(guest.send("wait", head=head, timeout_ms=60_000)) == (GOOD, 0)
        assert fake.content.find(b"s" * BLOCK) == 3 * BLOCK


@pytest.mark.parametrize("residual", [BLOCK, -BLOCK])
def test_a_write_of_other_bytes_than_were_asked_for_is_an_error(
    target: Target, residual: int
) -> None:
    with FakeIscsi() as fake:
        create(target, fake.url)
        target.attach("vm-0", "i0")
        with connected(target) as guest:
            fake.answering = Once(WRITE, says(Answer(residual=residual)))
            assert outcome(guest.cdb(**write(3, b"r", 2))) == (CHECK, 3)
            until(lambda: shown(target)["sessions"] == 2, "it is looked at anew")
            assert outcome(guest.cdb(**write(3, b"r", 2))) == (GOOD, 0)


def test_check_condition_without_sense_data_is_no_success(target: Target) -> None:
    with FakeIscsi() as fake:
        create(target, fake.url)
        target.attach("vm-0", "i0")
        with connected(target) as guest:
            for said in (Answer(status=CHECK), Answer(status=CHECK, sense=bytes(18))):
                fake.answering = Once(WRITE, says(said))
                assert outcome(guest.cdb(**write(3, b"y"))) == (CHECK, 3), said
            assert guest.cdb(FLUSH)["status"] == GOOD


@pytest.mark.parametrize("kind", [0x71, 0x73])
def test_an_error_of_what_was_answered_before_fails_the_flushes(target: Target, kind: int) -> None:
    told = bytes([kind, 3, 0x0C, 0, *bytes(4)])
    if kind == 0x71:
        told = bytes([kind, 0, 3, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x0C, 0, *bytes(4)])
    with FakeIscsi() as fake:
        create(target, fake.url)
        target.attach("vm-0", "i0")
        with connected(target) as guest:
            fake.answering = Once(WRITE, says(Answer(status=CHECK, sense=told)))
            # It was not carried out, and is sent again.
            assert outcome(guest.cdb(**write(3, b"y"))) == (GOOD, 0)
            assert len(fake.opcodes(WRITE)) == 2
            assert guest.read(3, 1) == b"y" * BLOCK
            assert guest.cdb(FLUSH)["status"] == CHECK
        assert fake.opcodes(SYNCHRONIZE) == []


def test_each_write_is_durable_where_that_is_asked_for(target: Target) -> None:
    with FakeIscsi() as fake:
        assert create(target, fake.url, write_through=True)["write_through"] is True
        target.attach("vm-0", "i0")
        with connected(target) as guest:
            assert outcome(guest.cdb(**write(3, b"d"))) == (GOOD, 0)
        assert [command.cdb[1] for command in fake.opcodes(WRITE)] == [FUA]
        target.rpc("vhost_delete_controller", ctrlr="vm-0", force=True)
        target.rpc("bdev_iscsi_delete", name="i0")
        # Not by itself on this host; and not where the LUN cannot.
        assert create(target, fake.url)["write_through"] is False
        fake.mode = bytes([23, 0, 0, 0, 8, 18, 4, *bytes(17)])
        what = {"name": "i1", "url": fake.url, "write_through": True}
        refused(target, "makes no write durable by itself (FUA)", INVALID, **what)


def test_a_flush_that_fails_is_remembered_until_it_is_cleared(target: Target) -> None:
    flush = bytes([0x35, *bytes(9)])
    with FakeIscsi() as fake:
        create(target, fake.url)
        target.attach("vm-0", "i0")
        with connected(target) as guest:
            assert outcome(guest.cdb(flush)) == (GOOD, 0)
            fake.answering = Once(SYNCHRONIZE, says(sense(3, 0x0C00)))
            assert outcome(guest.cdb(flush))[0] == CHECK
            # The target would succeed now, with what was lost.
            assert outcome(guest.cdb(flush))[0] == CHECK
        target.restart()
        (problem,) = target.rpc("virtlun_get_status")["flush_errors"]
        assert problem.startswith("bdev i0: a flush failed"), problem
        # It is known of the LUN, by whatever name.
        create(target, fake.url, name="i1", uuid="6e616d65-7370-6163-652d-757569642d31")
        problems = target.rpc("virtlun_get_status")["flush_errors"]
        assert any(each.startswith("bdev i1: a flush failed") for each in problems), problems
        target.rpc("bdev_iscsi_delete", name="i1")
        assert target.rpc("virtlun_bdev_clear_flush_error", name="i0") is True
        with connected(target) as guest:
            assert outcome(guest.cdb(flush)) == (GOOD, 0)


def test_a_capacity_that_has_changed_is_told_at_once_and_an_odd_one_is_not_taken(
    target: Target,
) -> None:
    with FakeIscsi() as fake:
        create(target, fake.url)
        target.attach("vm-0", "i0")
        with connected(target) as guest:
            guest.send("events")
            fake.blocks *= 2
            fake.answering = Once(WRITE, says(sense(6, 0x2A09)))
            assert outcome(guest.cdb(**write(0, b"a"))) == (GOOD, 0)
            events = guest.send("events", timeout_ms=60_000)["events"]
            assert [(e["event"], e["reason"]) for e in events] == [(PARAM_CHANGE, 0x2A | 9 << 8)]
            blocks = fake.blocks
            fake.blocks = 0
            until(lambda: "no disk has" in shown(target).get("problem", ""), "it is told")
            assert shown(target)["num_blocks"] == blocks
            fake.blocks = blocks
            until(lambda: "problem" not in shown(target), "it is over")


def test_a_target_that_asks_for_a_logout_is_logged_in_to_again(target: Target) -> None:
    # RFC 7143 11.9.1: an asynchronous message, within a second.
    asks = bytearray(48)
    asks[0], asks[1], asks[16:20], asks[36], asks[43] = 0x32, 0x80, b"\xff" * 4, 1, 1
    with FakeIscsi() as fake:
        create(target, fake.url)
        target.attach("vm-0", "i0")
        with connected(target) as guest:
            fake.answering = Once(WRITE, lambda _command, _usual: bytes(asks))
            assert outcome(guest.cdb(**write(3, b"l"), timeout_ms=60_000)) == (GOOD, 0)
            assert guest.read(3, 1) == b"l" * BLOCK
        assert len(fake.opcodes(WRITE)) == len(fake.logins) == 2


@pytest.mark.parametrize("rounds", [3, at_night(60)])
def test_a_target_that_says_nonsense_harms_nobody_else(target: Target, rounds: int) -> None:
    """Each nonsense ends the session, and the next one does what was asked for."""
    rng = random.Random(choose_seed())

    def nonsense(command: Command, usual: Usual) -> Answer | bytes:
        kind = rng.randrange(4)
        if kind == 0:
            return rng.randbytes(rng.choice([1, 48, 100, 5000]))
        header = bytearray(48)
        header[0] = rng.choice([0x21, 0x23, 0x25, 0x26, 0x31, 0x32, 0x3F])
        header[1] = rng.randrange(256)
        header[5:8] = rng.choice([0, 1, 100, 1000]).to_bytes(3, "big")
        header[16:20] = rng.randrange(8).to_bytes(4, "big")
        return bytes(header) + rng.randbytes(1000)

    with FakeIscsi() as fake:
        target.rpc("bdev_iscsi_set_options", timeout_sec=1)
        create(target, fake.url)
        target.rpc("bdev_malloc_create", name="m0", num_blocks=2048, block_size=BLOCK)
        target.attach("vm-0", "i0", "m0")
        with connected(target) as guest:
            guest.ready(target=1)
            for _ in range(rounds):
                asked = rng.choice([write(0, b"n"), read(0)])
                fake.answering = Once(READ if "data_in_len" in asked else WRITE, nonsense)
                head = guest.send("submit", **asked)["head"]
                assert guest.read(0, 8, target=1) == bytes(8 * BLOCK)
                guest.send("wait", head=head, timeout_ms=60_000)
                fake.answering = lambda command, usual: usual(command)
                until(lambda: is_written(guest), "it is used again")


def is_written(guest: Initiator) -> bool:
    return outcome(guest.cdb(**write(1, b"g"))) == (GOOD, 0)
