"""Disks on NBD servers, as guests meet them: a real nbdkit with its filters, killed and frozen."""

from __future__ import annotations

import errno
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pydataplane.errors import EXISTS, INVALID, RpcError
from tests.support.initiator import Initiator, connected
from tests.support.nbdkit import Nbdkit
from tests.support.night import at_night, by_day
from tests.support.ports import free_port
from tests.support.restarts import choose_seed
from tests.support.target import Target, TargetFailed
from tests.support.wait import until
from tests.target.conftest import MakeTarget
from tests.target.test_inflight import EXTENTS, MIB, QUEUES, Load

CHECK, MEDIUM_ERROR, DATA_PROTECT = 2, 3, 7
PARAM_CHANGE = 3
FLUSH = bytes([0x35, *bytes(9)])
IN_FLIGHT = 8


@pytest.fixture
def target(make_target: MakeTarget) -> Target:
    """A target that may make network connections, too."""
    return make_target("--network").start()


def create(target: Target, server: Nbdkit, name: str = "n0", **options: Any) -> dict[str, Any]:
    """Makes a bdev on a server, and returns what is told of it."""
    assert target.rpc("virtlun_nbd_create", name=name, uri=server.uri, **options) == name
    return shown(target, name)


def shown(target: Target, name: str = "n0") -> dict[str, Any]:
    (bdev,) = target.rpc("bdev_get_bdevs", name=name)
    return {**bdev, **bdev["driver_specific"]["nbd"]}


def outcome(answer: dict[str, Any]) -> tuple[int, int]:
    """Status of a command, and the sense key."""
    return answer["status"], (answer["sense"][2] & 15 if answer["sense"] else 0)


def write_one(guest: Initiator) -> tuple[int, int]:
    """Writes a block, and returns how that ended."""
    return outcome(guest.cdb(bytes([0x2A, 0, 0, 0, 0, 0, 0, 0, 1, 0]), data_out=bytes(512)))


def disk_of(folder: Path, size: int = EXTENTS * MIB) -> Path:
    path = folder / "disk.img"
    with path.open("xb") as file:
        file.truncate(size)
    return path


@pytest.mark.parametrize("way", ["many connections", "one connection", "tcp", "4096"])
def test_a_guest_uses_an_export(target: Target, scratch: Path, way: str) -> None:
    path = disk_of(scratch)
    policy = ("--filter=blocksize-policy", "blocksize-error-policy=error")
    command = {
        "many connections": ["file", str(path)],
        "one connection": ["--filter=multi-conn", "file", str(path), "multi-conn-mode=disable"],
        "tcp": [policy[0], "file", str(path), policy[1], "blocksize-maximum=65536"],
        "4096": [policy[0], "file", str(path), policy[1], "blocksize-minimum=4096"],
    }[way]
    with Nbdkit(scratch, *command, port=free_port() if way == "tcp" else None) as server:
        made = create(target, server)
        block = 4096 if way == "4096" else 512
        assert (made["block_size"], made["num_blocks"]) == (block, EXTENTS * MIB // block)
        assert made["multi_conn"] is (way != "one connection")
        assert made["uri"] == server.uri and made["connected"] is True
        assert made["max_request_bytes"] == (65536 if way == "tcp" else 32 * MIB)
        target.attach("vm-0", "n0")
        with connected(target) as guest:
            data = random.Random(way).randbytes(MIB)
            guest.write(8, data, block_size=block)
            assert guest.cdb(FLUSH)["status"] == 0
            assert path.read_bytes()[8 * block :][:MIB] == data
            assert guest.read(8, MIB // block, block_size=block) == data
            # WRITE SAME(16) of zeros, and with UNMAP.
            for flags in (0, 8):
                cdb = bytes([0x93, flags, *(8).to_bytes(8, "big"), *(16).to_bytes(4, "big"), 0, 0])
                answer = guest.cdb(cdb, data_out=bytes(block))
                assert (answer["response"], answer["status"]) == (0, 0), answer
                assert guest.read(8, 16, block_size=block) == bytes(16 * block)
            assert guest.read(24, 16, block_size=block) == data[16 * block : 32 * block]
        assert target.rpc("vhost_delete_controller", ctrlr="vm-0", force=True) is True
        assert target.rpc("virtlun_nbd_delete", name="n0") is True
        assert target.rpc("bdev_get_bdevs") == []
        assert "bdev" not in str(target.configuration().get("bdev"))


def test_errors_and_delays_of_the_server_reach_the_guest_and_no_other_disk(
    target: Target, scratch: Path
) -> None:
    fails = scratch / "fails"
    with (
        Nbdkit(
            scratch,
            *("--filter=error", "memory", f"{EXTENTS}M", "error-pwrite=EIO"),
            *("error-pwrite-rate=100%", f"error-pwrite-file={fails}"),
        ) as server,
        Nbdkit(scratch, "memory", "4M", name="fast") as fast,
    ):
        create(target, server)
        create(target, fast, "n1")
        target.attach("vm-0", "n0", "n1")
        with connected(target) as guest:
            guest.ready(target=1)
            assert write_one(guest) == (0, 0)
            fails.touch()
            assert write_one(guest) == (CHECK, MEDIUM_ERROR)
            fails.unlink()
            assert write_one(guest) == (0, 0)
            with server.frozen():
                slow = guest.send("submit", cdb=bytes([0x28, *bytes(7), 1, 0]), data_in_len=512)
                for _ in range(20):
                    assert guest.read(0, 8, target=1) == bytes(4096)
                used = guest.send("raw", queue=2)["used"]
                assert used == [], "the slow disk was faster than twenty reads of another"
            assert guest.send("wait", head=slow["head"])["status"] == 0


def test_a_flush_that_fails_is_remembered_until_it_is_cleared(
    target: Target, scratch: Path
) -> None:
    fails = scratch / "fails"
    with Nbdkit(
        scratch,
        *("eval", "get_size=echo 1M", "can_write=exit 0", "can_flush=exit 0"),
        *("pread=head -c $3 /dev/zero", "pwrite=cat > /dev/null"),
        f"flush=if [ -e {fails} ]; then echo EIO no >&2; exit 1; fi",
    ) as server:
        create(target, server)
        target.attach("vm-0", "n0")
        with connected(target) as guest:
            assert outcome(guest.cdb(FLUSH)) == (0, 0)
            fails.touch()
            assert outcome(guest.cdb(FLUSH))[0] == CHECK
            assert target.fails("virtlun_bdev_clear_flush_error", name="n0")
            fails.unlink()
            assert outcome(guest.cdb(FLUSH))[0] == CHECK
        target.restart()
        (problem,) = target.rpc("virtlun_get_status")["flush_errors"]
        assert problem.startswith("bdev n0: a flush failed"), problem
        assert target.rpc("virtlun_bdev_clear_flush_error", name="n0") is True
        with connected(target) as guest:
            assert outcome(guest.cdb(FLUSH)) == (0, 0)


@by_day("auto-1")
@pytest.mark.parametrize("rounds", [1, at_night(20)])
@pytest.mark.parametrize("mode", ["auto", "disable"])
def test_verified_io_goes_on_over_kills_and_stops_of_the_server(
    target: Target, scratch: Path, mode: str, rounds: int
) -> None:
    path, seed = disk_of(scratch), choose_seed()
    rng = random.Random(seed)
    command = ("--filter=multi-conn", "file", str(path), f"multi-conn-mode={mode}")
    with Nbdkit(scratch, *command) as server:
        create(target, server)
        target.attach("vm-0", "n0")
        with connected(target, queues=QUEUES, memory=256 * MIB) as guest:
            load = Load(guest, rng)
            for _ in range(rounds):
                load.submit(IN_FLIGHT)
                time.sleep(rng.random() * 0.01)
                server.kill9()
                load.submit(4)
                server.start()
                load.wait_all()
                # It has heard of some, and answers none.
                server.freeze()
                load.submit(IN_FLIGHT)
                server.kill9()
                server.start()
                load.wait_all()
                with server.frozen():
                    load.submit(IN_FLIGHT)
                load.wait_all()
            load.audit()
        assert shown(target)["connected"] is True


def test_io_fails_after_the_time_that_was_asked_for_and_the_disk_comes_back(
    target: Target, scratch: Path
) -> None:
    path = disk_of(scratch)
    with Nbdkit(scratch, "file", str(path)) as server:
        create(target, server, give_up_s=3)
        target.rpc("bdev_malloc_create", name="m0", num_blocks=2048, block_size=512)
        target.attach("vm-0", "n0", "m0")
        with connected(target) as guest:
            guest.ready(target=1)
            with server.frozen():
                # The server may write it late: nothing is known of that block then.
                late = bytes([0x2A, 0, 0, 0, 0, 9, 0, 0, 1, 0])
                head = guest.send("submit", cdb=late, data_out=b"x" * 512)["head"]
                assert guest.read(0, 8, target=1) == bytes(4096)
                answer = guest.send("wait", head=head)
                assert outcome(answer) == (CHECK, MEDIUM_ERROR), answer
                # At once from now on.
                assert write_one(guest) == (CHECK, MEDIUM_ERROR)
                until(lambda: not shown(target)["connected"], "it is told")
            until(lambda: write_one(guest) == (0, 0), "the server is used again")
            assert guest.read(0, 1) == bytes(512)


@pytest.mark.parametrize(
    ("options", "status"),
    [({"give_up_s": 2}, 0), pytest.param({}, 1, marks=pytest.mark.nightly)],
    ids=["given-up", "not-given-up"],
)
def test_a_server_that_hangs_delays_neither_the_stop_nor_an_upgrade_beyond_their_limits(
    target: Target, scratch: Path, options: dict[str, Any], status: int
) -> None:
    path = disk_of(scratch)
    with Nbdkit(scratch, "file", str(path)) as server:
        create(target, server, **options)
        target.attach("vm-0", "n0")
        with connected(target) as guest:
            target.upgrade()
            until(lambda: shown(target)["connected"], "it is connected")
            guest.until_connected(keep=True)
            guest.ready()
            with server.frozen():
                with pytest.raises(TargetFailed):
                    target.upgrade()
                assert "bdev n0 could not be made again" in target.words()
                assert "try again when its server answers" in target.words()
            until(lambda: shown(target)["connected"], "it is connected")
            assert guest.read(0, 1) == bytes(512)
            with server.frozen():
                guest.send("submit", cdb=bytes([0x28, *bytes(7), 1, 0]), data_in_len=512)
                assert target.stop() == status
                said = "not stopped in order: I/O of a VM has not ended" in target.words()
                assert said is (status == 1)
        target.start()
        target.restored()


def test_a_server_that_is_not_there_at_the_start_keeps_nobody_waiting(
    target: Target, scratch: Path
) -> None:
    path = disk_of(scratch)
    server = Nbdkit(scratch, "file", str(path))
    with server:
        uuid = create(target, server, readonly=True)["uuid"]
        target.rpc("bdev_malloc_create", name="m0", num_blocks=2048, block_size=512)
        target.attach("vm-0", "m0", "n0")
        assert target.stop() == 0
    target.start()
    (problem,) = target.rpc("virtlun_get_status")["restore_problems"][:1]
    assert "n0" in str(problem) and "cannot be connected to" in str(problem), problem
    with connected(target) as guest:
        assert guest.read(0, 8) == bytes(4096)
        with server:
            target.restored()
            guest.ready(target=1)
            assert guest.read(0, 8, target=1) == bytes(4096)
            assert shown(target)["uuid"] == uuid
            write = guest.cdb(bytes([0x2A, *bytes(7), 1, 0]), data_out=bytes(512), target=1)
            assert outcome(write) == (CHECK, DATA_PROTECT)


def test_growth_is_told_to_the_guest_and_a_smaller_export_is_not_used(
    target: Target, scratch: Path
) -> None:
    path = disk_of(scratch, 8 * MIB)
    with Nbdkit(scratch, "file", str(path)) as server:
        create(target, server, give_up_s=3)
        target.attach("vm-0", "n0")
        with connected(target) as guest:
            guest.send("events")
            server.kill9()
            with path.open("r+b") as file:
                file.truncate(16 * MIB)
            server.start()
            events = guest.send("events", timeout_ms=60_000)["events"]
            assert [(e["event"], e["reason"]) for e in events] == [(PARAM_CHANGE, 0x2A | 9 << 8)]
            guest.ready()
            assert guest.send("capacity")["blocks"] == 16 * MIB // 512
            guest.write(16 * MIB // 512 - 1, b"e" * 512)
            server.kill9()
            with path.open("r+b") as file:
                file.truncate(8 * MIB)
            server.start()
            shrank = f"the export shrank from {16 * MIB} to {8 * MIB} bytes"
            until(lambda: shown(target).get("problem") == shrank, "it is told")
            assert write_one(guest) == (CHECK, MEDIUM_ERROR)


def test_an_lvstore_on_a_server_survives_a_cut_of_both(target: Target, scratch: Path) -> None:
    path, seed = disk_of(scratch, 64 * MIB), choose_seed()
    rng = random.Random(seed)
    with Nbdkit(scratch, "file", str(path)) as server:
        create(target, server)
        target.rpc("bdev_lvol_create_lvstore", bdev_name="n0", lvs_name="lvs0", cluster_sz=MIB)
        target.make_thin("v", EXTENTS)
        target.attach("vm-0", "lvs0/v")
        with connected(target, queues=QUEUES, memory=256 * MIB, inflight=True) as guest:
            load = Load(guest, rng)
            for first in ("target", "server"):
                load.submit(IN_FLIGHT)
                time.sleep(rng.random() * 0.01)
                if first == "server":
                    server.kill9()
                    target.kill9()
                else:
                    target.kill9()
                    server.kill9()
                load.submit(4)
                server.start()
                target.start()
                guest.until_connected(keep=True)
                load.wait_all()
            load.audit()
        assert target.rpc("virtlun_lvstore_check", lvs_name="lvs0")["problems"] == []
        # One that is unloaded at the stop does not wait for long for a server that is gone.
        server.kill9()
        assert target.stop() == 0
        server.start()
        target.start()


def test_without_a_network_only_servers_of_the_host_are_connected_to(
    make_target: MakeTarget, scratch: Path
) -> None:
    target = make_target().start()
    error = target.fails("virtlun_nbd_create", name="n0", uri=f"nbd://127.0.0.1:{free_port()}/")
    assert isinstance(error, RpcError) and error.code == -errno.EOPNOTSUPP
    assert "start it with --network" in error.message
    with Nbdkit(scratch, "memory", "4M") as server:
        create(target, server)


def test_what_makes_no_sense_is_refused_in_a_sentence(target: Target, scratch: Path) -> None:
    def refused(words: str, code: int | None = INVALID, **params: Any) -> None:
        error = target.fails("virtlun_nbd_create", **params)
        assert isinstance(error, RpcError)
        assert words in str(error), error
        assert code is None or error.code == code, error

    with Nbdkit(
        scratch, "--filter=blocksize-policy", "memory", "4M", "blocksize-minimum=4096"
    ) as server:
        what: dict[str, Any] = {"name": "n0", "uri": server.uri}
        refused("is no NBD URI", name="n0", uri="/run/nbd.sock")
        refused("names are not looked up", name="n0", uri="nbd://example.org/")
        refused("TLS is not supported", name="n0", uri="nbds://127.0.0.1/")
        refused("give_up_s is 1 to 86400, not 0", **what, give_up_s=0)
        refused("blocks of 512 are too small", **what, block_size=512)
        missing = "nbd+unix:///?socket=/nowhere/n.sock"
        refused("cannot be connected to: No such file", -2, name="n0", uri=missing)
        tcp = f"nbd://127.0.0.1:{free_port()}/"
        refused("cannot be connected to: Connection refused", None, name="n0", uri=tcp)
        create(target, server)
        refused("there is a bdev n0 already", EXISTS, **what)
        error = target.fails("virtlun_nbd_delete", name="n1")
        assert "there is no bdev n1" in str(error)


def test_many_disks_of_a_server_that_went_away_do_not_stall_another(
    make_target: MakeTarget, scratch: Path
) -> None:
    target = make_target().start()
    with Nbdkit(scratch, "memory", "4M") as server, Nbdkit(scratch, "memory", "4M", name="b") as b:
        for number in range(8):
            create(target, server, f"n{number}", give_up_s=600)
        create(target, b, "other")
        target.attach("vm-0", "other", *(f"n{number}" for number in range(8)))
        with connected(target) as guest:
            for number in range(1, 9):
                guest.ready(target=number)
            server.kill9()
            read = bytes([0x28, *bytes(7), 1, 0])
            heads = [
                guest.send("submit", cdb=read, data_in_len=512, target=number)["head"]
                for number in range(1, 9)
            ]
            answered = threading.Event()

            def reads() -> None:
                for _ in range(50):
                    assert guest.read(0, 8) == bytes(4096)
                answered.set()

            reads()
            assert answered.is_set()
            server.start()
            for head in heads:
                assert guest.send("wait", head=head, timeout_ms=60_000)["status"] == 0
