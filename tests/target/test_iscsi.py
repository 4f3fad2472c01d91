"""LUNs of an iSCSI target, as guests meet them: a real tgtd, killed and frozen."""

from __future__ import annotations

import json
import random
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from plugin.cli.main import main
from pydataplane.errors import EXISTS, INVALID, RpcError
from tests.support.initiator import connected
from tests.support.night import at_night
from tests.support.ports import free_port
from tests.support.restarts import choose_seed
from tests.support.target import Target, TargetFailed
from tests.support.tgt import IQN, Tgt, lacks
from tests.support.wait import until
from tests.target.conftest import MakeTarget
from tests.target.test_fair import requests_of, wait_for_requests
from tests.target.test_inflight import EXTENTS, MIB, QUEUES, Load
from tests.target.test_nbd import outcome, write_one

pytestmark = pytest.mark.skipif(bool(lacks()), reason=f"not installed: {lacks()}")

#: What is driven here, and cannot be without a target.
VERBS = {"bdev_iscsi_create", "bdev_iscsi_delete", "bdev_iscsi_set_options"}
INITIATOR = "iqn.2026-11.org.virtlun:host"
BLOCK = 512
GOOD, CHECK, CONFLICT = 0, 2, 0x18
MEDIUM_ERROR, ILLEGAL, DATA_PROTECT, MISCOMPARE = 3, 5, 7, 0xE
PARAM_CHANGE = 3
IO, NOTSUP = -5, -95
FLUSH = bytes([0x35, *bytes(9)])
READ_ONE = bytes([0x28, *bytes(7), 1, 0])
IN_FLIGHT = 8


@pytest.fixture
def target(make_target: MakeTarget) -> Target:
    """A target that is an iSCSI initiator."""
    return make_target("--iscsi").start()


@pytest.fixture
def tgt(scratch: Path) -> Iterator[Tgt]:
    """An iSCSI target without LUNs."""
    with Tgt(scratch) as made:
        yield made


def create(target: Target, url: str, name: str = "i0", **options: Any) -> dict[str, Any]:
    """Makes a bdev on a LUN, and returns what is told of it."""
    asked = {"name": name, "url": url, "initiator_iqn": INITIATOR, **options}
    assert target.rpc("bdev_iscsi_create", **asked) == name
    return shown(target, name)


def shown(target: Target, name: str = "i0") -> dict[str, Any]:
    (bdev,) = target.rpc("bdev_get_bdevs", name=name)
    return {**bdev, **bdev["driver_specific"]["iscsi"]}


def refused(target: Target, words: str, code: int, **params: Any) -> str:
    error = target.fails("bdev_iscsi_create", **{"initiator_iqn": INITIATOR, **params})
    assert isinstance(error, RpcError)
    assert words in str(error), error
    assert error.code == code, error
    return str(error)


def doctor(target: Target) -> tuple[str, str]:
    """Returns what `virtlun doctor` says of it."""
    words = ["--socket", str(target.rpc_socket), "doctor", "--json"]
    found = json.loads(CliRunner().invoke(main, words).stdout)
    (row,) = [each for each in found if each["what"] == "LUNs of iSCSI targets"]
    return row["state"], row["found"]


@pytest.mark.parametrize("way", ["thick", "thin", "4096"])
def test_a_guest_uses_a_lun(target: Target, tgt: Tgt, way: str) -> None:
    options: dict[str, Any] = {
        "thick": {},
        "thin": {"thin_provisioning": "1"},
        "4096": {"blocksize": "4096"},
    }[way]
    path = tgt.disk(size=EXTENTS * MIB, **options)
    block = 4096 if way == "4096" else BLOCK
    made = create(target, tgt.url())
    assert (made["block_size"], made["num_blocks"]) == (block, EXTENTS * MIB // block)
    assert (made["connected"], made["sessions"], made["url"]) == (True, 1, tgt.url())
    assert made["product_name"] == "iSCSI LUN"
    assert made["supported_io_types"]["unmap"] is (way == "thin")
    target.attach("vm-0", "i0")
    with connected(target) as guest:
        assert guest.send("capacity")["blocks"] == EXTENTS * MIB // block
        data = random.Random(way).randbytes(MIB)
        guest.write(8, data, block_size=block)
        assert guest.cdb(FLUSH)["status"] == GOOD
        assert path.read_bytes()[8 * block :][:MIB] == data
        assert guest.read(8, MIB // block, block_size=block) == data
        # WRITE SAME(16) of zeros, and with UNMAP.
        for flags in (0, 8) if way == "thin" else (0,):
            cdb = bytes([0x93, flags, *(8).to_bytes(8, "big"), *(16).to_bytes(4, "big"), 0, 0])
            assert outcome(guest.cdb(cdb, data_out=bytes(block))) == (GOOD, 0)
            assert guest.read(8, 16, block_size=block) == bytes(16 * block)
        assert guest.read(24, 16, block_size=block) == data[16 * block : 32 * block]
        # COMPARE AND WRITE, twice the same.
        compared = bytes([0x89, 0, *(24).to_bytes(8, "big"), 0, 0, 0, 1, 0, 0])
        words = data[16 * block : 17 * block] + b"w" * block
        answer = guest.cdb(compared, data_out=words)
        assert outcome(answer) == (GOOD, 0), answer["sense"]
        assert outcome(guest.cdb(compared, data_out=words)) == (CHECK, MISCOMPARE)
        assert guest.read(24, 1, block_size=block) == b"w" * block
    assert tgt.sessions() == 1
    assert target.rpc("vhost_delete_controller", ctrlr="vm-0", force=True) is True
    assert target.rpc("bdev_iscsi_delete", name="i0") is True
    until(lambda: tgt.sessions() == 0, "it is logged out")
    assert target.rpc("bdev_get_bdevs") == []
    assert "bdev" not in str(target.configuration().get("bdev"))


def test_spdks_client_makes_bdevs_on_two_luns_of_one_target(target: Target, tgt: Tgt) -> None:
    for lun in (1, 2):
        tgt.disk(lun).write_bytes(bytes([lun]) * 8 * MIB)
        words = ("-b", f"i{lun}", "-i", INITIATOR, "--url", tgt.url(lun))
        made = target.spdk_rpc("bdev_iscsi_create", *words)
        assert (made.returncode, made.stdout.strip()) == (0, f"i{lun}"), made
    assert tgt.sessions() == 2
    assert shown(target, "i1")["uuid"] != shown(target, "i2")["uuid"]
    assert target.spdk_rpc("bdev_iscsi_set_options", "-t", "7").returncode == 0
    target.attach("vm-0", "i1", "i2")
    with connected(target) as guest:
        guest.ready(target=1)
        for number in (0, 1):
            assert guest.read(0, 8, target=number) == bytes([number + 1]) * 4096
    target.restart()
    target.restored()
    calls = {call["method"]: call for call in target.configuration()["bdev"]}
    assert calls["bdev_iscsi_set_options"]["params"] == {"timeout_sec": 7}
    assert shown(target, "i1")["connected"] and shown(target, "i2")["connected"]
    assert target.rpc("vhost_delete_controller", ctrlr="vm-0", force=True) is True
    deleted = target.spdk_rpc("bdev_iscsi_delete", "i1")
    assert deleted.returncode == 0, deleted
    until(lambda: tgt.sessions() == 1, "one is logged out")


def test_a_password_is_asked_for_kept_and_never_shown(target: Target, tgt: Tgt) -> None:
    secret = "opensesame12"
    tgt.disk()
    tgt.require("ali", secret)
    what = {"name": "i0", "initiator_iqn": INITIATOR}
    refused(target, "cannot be logged in to: ", IO, **what, url=tgt.url())
    refused(target, "Authentication failure", IO, **what, url=tgt.url(login="ali%wrong-one-12@"))
    refused(target, "a user without a password", INVALID, **what, url=tgt.url(login="ali@"))
    made = create(target, tgt.url(login=f"ali%{secret}@"))
    assert made["url"] == tgt.url(login="ali@")
    record = target.directory / "state" / "config.json"
    files = [path for path in target.directory.rglob("*") if path.is_file()]
    having = [path for path in files if secret.encode() in path.read_bytes()]
    assert having, "the password is recorded"
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in having), record
    saved = target.spdk_rpc("save_config").stdout
    assert tgt.url(login="ali@") in saved
    for text in (saved, str(target.rpc("bdev_get_bdevs")), target.words()):
        assert secret not in text
    target.crash()
    target.restored()
    assert shown(target)["uuid"] == made["uuid"]
    assert secret not in target.words()


def test_a_target_has_to_prove_who_it_is(target: Target, tgt: Tgt) -> None:
    tgt.disk()
    tgt.require("ali", "opensesame12")
    tgt.prove("cave", "itisme123456")
    url = tgt.url(login="ali%opensesame12@") + "?target_user=cave&target_password="
    refused(target, "cannot be logged in to: ", IO, name="i0", url=f"{url}somebodyelse")
    made = create(target, f"{url}itisme123456")
    assert made["url"] == tgt.url(login="ali@") + "?target_user=cave"
    assert "itisme123456" not in target.spdk_rpc("save_config").stdout


@pytest.mark.nightly
def test_an_lvstore_on_a_lun_survives_a_cut_of_both(target: Target, tgt: Tgt) -> None:
    rng = random.Random(choose_seed())
    tgt.disk(size=64 * MIB, thin_provisioning="1")
    create(target, tgt.url())
    target.rpc("bdev_lvol_create_lvstore", bdev_name="i0", lvs_name="lvs0", cluster_sz=MIB)
    target.make_thin("v", EXTENTS)
    target.attach("vm-0", "lvs0/v")
    with connected(target, queues=QUEUES, memory=256 * MIB, inflight=True) as guest:
        load = Load(guest, rng)
        for cut in ((target.kill9, tgt.kill9), (tgt.kill9, target.kill9)):
            load.submit(IN_FLIGHT)
            time.sleep(rng.random() * 0.01)
            for kill in cut:
                kill()
            load.submit(4)
            tgt.start()
            target.start()
            guest.until_connected(keep=True)
            load.wait_all()
        guest.ready()
        load.audit()
    assert target.rpc("virtlun_lvstore_check", lvs_name="lvs0")["problems"] == []
    # One that is unloaded at the stop does not wait for long for a target that is gone.
    tgt.kill9()
    assert target.stop() == 0
    tgt.start()
    target.start()


@pytest.mark.parametrize("rounds", [1, at_night(20)])
def test_verified_io_goes_on_over_kills_and_stops_of_the_target(
    target: Target, tgt: Tgt, rounds: int
) -> None:
    rng = random.Random(choose_seed())
    tgt.disk(size=EXTENTS * MIB, thin_provisioning="1")
    create(target, tgt.url())
    target.attach("vm-0", "i0")
    with connected(target, queues=QUEUES, memory=256 * MIB) as guest:
        load = Load(guest, rng)
        for _ in range(rounds):
            load.submit(IN_FLIGHT)
            time.sleep(rng.random() * 0.01)
            tgt.kill9()
            load.submit(4)
            tgt.start()
            load.wait_all()
            # It has heard of some, and answers none.
            with tgt.frozen():
                load.submit(IN_FLIGHT)
                time.sleep(rng.random() * 0.01)
            load.wait_all()
        load.audit()
    assert shown(target)["connected"] is True
    assert shown(target)["sessions"] == 1 + rounds


def test_io_fails_after_the_time_that_is_set_and_the_disk_comes_back(
    target: Target, tgt: Tgt
) -> None:
    tgt.disk()
    target.rpc("bdev_iscsi_set_options", timeout_sec=3)
    create(target, tgt.url())
    target.rpc("bdev_malloc_create", name="m0", num_blocks=2048, block_size=BLOCK)
    target.attach("vm-0", "i0", "m0")
    with connected(target) as guest:
        guest.ready(target=1)
        with tgt.frozen():
            # It may be written late: nothing is known of that block then.
            write = bytes([0x2A, 0, 0, 0, 0, 9, 0, 0, 1, 0])
            head = guest.send("submit", cdb=write, data_out=b"x" * BLOCK)["head"]
            assert guest.read(0, 8, target=1) == bytes(4096)
            assert outcome(guest.send("wait", head=head)) == (CHECK, MEDIUM_ERROR)
            # At once from now on.
            assert write_one(guest) == (CHECK, MEDIUM_ERROR)
            until(lambda: not shown(target)["connected"], "it is told")
        until(lambda: write_one(guest) == (GOOD, 0), "the target is used again")
        assert guest.read(0, 1) == bytes(BLOCK)


def test_a_size_that_changes_is_told_to_the_guest(target: Target, tgt: Tgt) -> None:
    path = tgt.disk()
    create(target, tgt.url())
    target.attach("vm-0", "i0")
    with connected(target) as guest:
        guest.send("events")
        # tgt has no other way.
        tgt.remove(1)
        tgt.disk(size=16 * MIB)
        events = guest.send("events", timeout_ms=60_000)["events"]
        assert [(e["event"], e["reason"]) for e in events] == [(PARAM_CHANGE, 0x2A | 9 << 8)]
        guest.ready()
        assert guest.send("capacity")["blocks"] == 16 * MIB // BLOCK
        guest.write(16 * MIB // BLOCK - 1, b"e" * BLOCK)
        assert path.read_bytes()[-BLOCK:] == b"e" * BLOCK
        # Also while nobody could tell.
        tgt.kill9()
        tgt.luns[1][0].open("r+b").truncate(24 * MIB)
        tgt.start()
        until(lambda: shown(target)["num_blocks"] == 24 * MIB // BLOCK, "it is taken over")


def test_a_lun_that_is_write_protected_is_read_only(target: Target, tgt: Tgt) -> None:
    tgt.disk(readonly="1")
    create(target, tgt.url())
    target.attach("vm-0", "i0")
    with connected(target) as guest:
        assert write_one(guest) == (CHECK, DATA_PROTECT)
        assert guest.read(0, 1) == bytes(BLOCK)


def test_a_reservation_of_another_host_is_a_conflict_to_the_guest(
    make_target: MakeTarget, target: Target, tgt: Tgt
) -> None:
    tgt.disk()
    create(target, tgt.url())
    target.attach("vm-0", "i0")
    with tgt.reserved(), connected(target) as guest:
        assert (
            guest.cdb(bytes([0x2A, *bytes(7), 1, 0]), data_out=bytes(BLOCK))["status"] == CONFLICT
        )
    with connected(target) as guest:
        assert write_one(guest) == (GOOD, 0)


def test_a_bdev_is_deleted_while_there_is_io(target: Target, tgt: Tgt) -> None:
    tgt.disk()
    create(target, tgt.url())
    target.attach("vm-0", "i0")
    with connected(target) as guest:
        with ThreadPoolExecutor() as pool:
            with tgt.frozen():
                taken = requests_of(target, "vm-0")
                heads = [
                    guest.send("submit", cdb=READ_ONE, data_in_len=BLOCK)["head"] for _ in range(8)
                ]
                wait_for_requests(target, "vm-0", taken + 7)
                deleted = pool.submit(target.rpc, "bdev_iscsi_delete", name="i0")
                with pytest.raises(TimeoutError):
                    deleted.result(timeout=0.5)
            assert deleted.result() is True
        answers = [guest.send("wait", head=head) for head in heads]
        assert {answer["status"] for answer in answers} == {GOOD}
    until(lambda: tgt.sessions() == 0, "it is logged out")


def test_a_target_that_is_killed_takes_its_session_over_from_itself(
    target: Target, tgt: Tgt
) -> None:
    rng = random.Random(choose_seed())
    tgt.disk(size=EXTENTS * MIB, thin_provisioning="1")
    made = create(target, tgt.url())
    target.attach("vm-0", "i0")
    with connected(target, queues=QUEUES, memory=256 * MIB, inflight=True) as guest:
        load = Load(guest, rng)
        for again in (target.start, target.upgrade):
            load.submit(IN_FLIGHT)
            if again == target.start:
                target.kill9()
            else:
                load.wait_all()
            again()
            guest.until_connected(keep=True)
            load.wait_all()
        guest.ready()
        load.audit()
    there = shown(target)
    assert (there["uuid"], there["isid"]) == (made["uuid"], made["isid"])
    until(lambda: tgt.sessions() == 1, "it is the only one")


def test_a_guests_disk_has_the_same_session_each_time_and_another_host_another(
    make_target: MakeTarget, tgt: Tgt
) -> None:
    tgt.disk()

    def isid(target: Target) -> str:
        create(target, tgt.url(), guest_disk=True)
        told: str = shown(target)["isid"]
        assert target.rpc("virtlun_guest_disk_close", name="i0") is True
        until(lambda: tgt.sessions() == 0, "it is logged out")
        return told

    first, second = (make_target("--iscsi").start() for _ in range(2))
    own = isid(first)
    assert isid(first) == own
    assert isid(second) != own
    # Also of a target that has lost what it recorded.
    first.kill9()
    first.start()
    assert isid(first) == own


def test_a_target_that_is_not_there_at_the_start_keeps_nobody_waiting(
    target: Target, tgt: Tgt
) -> None:
    tgt.disk()
    uuid = create(target, tgt.url())["uuid"]
    target.rpc("bdev_malloc_create", name="m0", num_blocks=2048, block_size=BLOCK)
    target.attach("vm-0", "m0", "i0")
    assert target.stop() == 0
    tgt.kill9()
    target.start()
    (problem,) = target.rpc("virtlun_get_status")["restore_problems"][:1]
    assert "i0" in str(problem) and tgt.url() in str(problem), problem
    with connected(target) as guest:
        assert guest.read(0, 8) == bytes(4096)
        tgt.start()
        target.restored()
        guest.ready(target=1)
        assert guest.read(0, 8, target=1) == bytes(4096)
        assert shown(target)["uuid"] == uuid


@pytest.mark.nightly
def test_an_upgrade_is_refused_while_a_target_hangs(target: Target, tgt: Tgt) -> None:
    tgt.disk()
    create(target, tgt.url())
    target.attach("vm-0", "i0")
    with connected(target) as guest:
        with tgt.frozen():
            with pytest.raises(TargetFailed):
                target.upgrade()
            assert "the disk of bdev i0 has not answered for" in target.words()
        assert guest.read(0, 1) == bytes(BLOCK)
        target.upgrade()
        guest.until_connected(keep=True)
        guest.ready()
        assert guest.read(0, 1) == bytes(BLOCK)
    assert tgt.sessions() == 1


@pytest.mark.nightly
def test_without_the_library_a_target_starts_and_says_what_to_do(
    make_target: MakeTarget, tgt: Tgt, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tgt.disk()
    what = {"name": "i0", "url": tgt.url()}
    target = make_target("--network").start()
    refused(target, "start it with --iscsi", NOTSUP, **what)
    assert doctor(target) == ("ok", "none are served: the target was started without --iscsi")
    # The linker finds this one first.
    (tmp_path / "libiscsi.so.7").write_text("no library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    target = make_target("--iscsi").start()
    said = refused(target, "install Debian's package libiscsi7", NOTSUP, **what)
    assert "libiscsi.so.7" in said
    target.rpc("bdev_malloc_create", name="m0", num_blocks=2048, block_size=BLOCK)
    state, found = doctor(target)
    assert (state, "package libiscsi7" in found) == ("failed", True)


def test_what_makes_no_sense_is_refused_in_a_sentence(target: Target, tgt: Tgt) -> None:
    tgt.disk()
    url, nobody = tgt.url(), f"iscsi://127.0.0.1:{free_port()}/{IQN}/1"
    refused(target, "its URL is not of the form", INVALID, name="i0", url="/dev/sda")
    refused(target, "iSER is not served", INVALID, name="i0", url=f"iser://127.0.0.1/{IQN}/1")
    refused(target, "an initiator's name", INVALID, name="i0", url=url, initiator_iqn="")
    refused(target, "isid is twelve", INVALID, name="i0", url=url, isid="1")
    refused(target, "cannot be logged in to: Connection refused", IO, name="i0", url=nobody)
    unknown = url.replace("127.0.0.1", "no.such.host.invalid")
    refused(target, "its name has no address", IO, name="i0", url=unknown)
    refused(target, "cannot be logged in to: ", IO, name="i0", url=url.replace(IQN, "iqn.none"))
    refused(target, "the target has no such LUN", IO, name="i0", url=tgt.url(7))
    refused(target, "it is no disk, but a device of type 0x0c", IO, name="i0", url=tgt.url(0))
    create(target, url)
    refused(target, "there is a bdev i0 already", EXISTS, name="i0", url=url)
    error = target.fails("bdev_iscsi_set_options", timeout_sec=86_401)
    assert "timeout_sec is 0 to 86400, not 86401" in str(error)
    assert "there is no bdev i1" in str(target.fails("bdev_iscsi_delete", name="i1"))
    assert doctor(target) == ("ok", "i0: connected")
