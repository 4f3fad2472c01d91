"""An lvstore with checksums: what goes bad on its file is a medium error, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.encryption import KEY, KEY2
from tests.support.initiator import connected
from tests.support.night import at_night
from tests.support.target import Target
from tests.support.wait import until
from tests.target.test_cli import done, refused, run

MIB = 1 << 20
SECTOR = 512
CHECK, MEDIUM_ERROR = 2, 3
UNRECOVERED_READ_ERROR = (0x11, 0)
FLUSH = bytes([0x35, *bytes(9)])


def stamped(seed: int, blocks: int) -> bytes:
    """`blocks` blocks of 4 KiB, each unlike any other."""
    stamps = (f"<{seed}.{number}>".encode().ljust(16, b".") for number in range(blocks))
    return b"".join(stamp * 256 for stamp in stamps)


@pytest.fixture
def file(target: Target) -> Path:
    """The file of the lvstore lvs0 with checksums, with the volume v0 as a LUN of `vm`."""
    made = target.directory / "store.img"
    create = ("lvstore", "create", "lvs0", "--file", str(made), "--size", "64M", "--checksums")
    assert "yes" in done(target, *create)
    target.make_thin("v0", 32)
    target.attach("vm", "lvs0/v0")
    return made


def sums(target: Target) -> dict[str, Any]:
    (found,) = target.rpc("virtlun_integrity_get")
    return dict(found)


def examined(target: Target) -> dict[str, str]:
    """What `virtlun doctor` says of them."""
    findings = json.loads(run(target, "doctor", "--json").stdout)
    (found,) = (each for each in findings if each["what"] == "checksums")
    return dict(found)


def damage(file: Path, content: bytes) -> None:
    """Flips a bit of the one place on the file that has this content."""
    medium = file.read_bytes()
    at = medium.index(content)
    assert medium.find(content, at + 1) == -1
    with file.open("r+b") as opened:
        opened.seek(at + 5)
        opened.write(bytes([medium[at + 5] ^ 4]))


def read10(lba: int, sectors: int) -> bytes:
    return bytes([0x28, 0, *lba.to_bytes(4, "big"), 0, *sectors.to_bytes(2, "big"), 0])


def test_what_a_guest_wrote_is_right_after_a_crash_an_upgrade_and_a_restart(
    target: Target, file: Path
) -> None:
    written = {16: 3, 2049: 40, 8000 * 8 // 10: 300}
    with connected(target, "vm") as vm:
        for seed, (lba, blocks) in enumerate(written.items()):
            vm.write(lba, stamped(seed, blocks))
        # A sector of a block alone, and what is unmapped.
        vm.write(18, b"s" * SECTOR)
        assert vm.cdb(FLUSH)["status"] == 0
    again: list[Callable[[], object]] = [target.crash, target.upgrade, target.restart]
    for happens in again:
        happens()
        until(lambda: sums(target)["stale_regions"] == 0, lambda: str(sums(target)))
        with connected(target, "vm") as vm:
            for seed, (lba, blocks) in enumerate(written.items()):
                expected = bytearray(stamped(seed, blocks))
                if seed == 0:
                    expected[2 * SECTOR : 3 * SECTOR] = b"s" * SECTOR
                assert vm.read(lba, blocks * 8) == bytes(expected), lba
        assert (sums(target)["mismatches"], sums(target)["damaged_checksum_pages"]) == (0, 0)
    assert "and is what was written" in run(target, "lvstore", "scrub", "lvs0").output
    assert file.stat().st_size == 64 * MIB


@pytest.mark.parametrize("restarted", [at_night(False), True])
def test_a_flipped_bit_is_a_medium_error_of_its_guest_and_told_by_scrub(
    target: Target, file: Path, restarted: bool
) -> None:
    data = stamped(1, 64)
    with connected(target, "vm") as vm:
        vm.write(800, data)
        assert vm.cdb(FLUSH)["status"] == 0
    if restarted:
        target.stop()
    bad = 10
    damage(file, data[bad * 4096 : (bad + 1) * 4096])
    if restarted:
        target.start()
        assert "of lvs-lvs0-sums: no mismatch" in examined(target)["found"]
        # They are known since before, and not made of what is there now.
        assert sums(target)["stale_regions"] == 0
    with connected(target, "vm") as vm:
        answer = vm.cdb(read10(800 + bad * 8, 8), data_in_len=4096)
        assert (answer["status"], answer["sense"][2] & 15) == (CHECK, MEDIUM_ERROR), answer
        assert tuple(answer["sense"][12:14]) == UNRECOVERED_READ_ERROR
        for block in (bad - 1, bad + 1):
            found = vm.read(800 + block * 8, 8)
            assert found == data[block * 4096 : (block + 1) * 4096]
        assert sums(target)["mismatches"] == 1
        first = json.loads(done(target, "lvstore", "dump", "lvs0", "--json").split("\n")[0])
        assert (first["kind"], first["facts"]["mismatches"]) == ("checksums", "1")
        until(lambda: len(sums(target)["damaged_blocks"]) == 1, lambda: str(sums(target)))
        assert target.words().count("is damaged: it is not what was written to it") == 1
        scrubbed = run(target, "lvstore", "scrub", "lvs0", "--json")
        assert scrubbed.exit_code == 1
        rows = json.loads(scrubbed.stdout)
        assert {row["volume"] for row in rows} == {"lvs0/v0"}
        at = 800 * SECTOR + bad * 4096
        assert [(row["at"], row["length"]) for row in rows] == [(at, 4096)]
        doctor = examined(target)
        assert doctor["state"] == "failed" and "lvs-lvs0-sums (" in doctor["found"]
        listed = done(target, "lvstore", "list")
        assert "mismatches" in listed
        assert json.loads(done(target, "lvstore", "list", "--json"))[0]["checksums"]["mismatches"]
        vm.write(800 + bad * 8, data[bad * 4096 : (bad + 1) * 4096])
        assert vm.read(800, 64 * 8) == data
    assert "and is what was written" in run(target, "lvstore", "scrub", "lvs0").output


def test_it_grows_in_use_and_is_gone_with_its_lvstore(target: Target, file: Path) -> None:
    before = json.loads(done(target, "lvstore", "list", "--json"))[0]["total"]
    with connected(target, "vm") as vm:
        vm.write(0, stamped(1, 100))
        (grown,) = json.loads(done(target, "lvstore", "resize", "lvs0", "200M", "--json"))
        assert grown["total"] == before + 136 * MIB
        vm.write(8 * 100, stamped(2, 200))
        assert vm.read(0, 800) == stamped(1, 100)
        assert vm.read(8 * 100, 1600) == stamped(2, 200)
    target.restart()
    assert json.loads(done(target, "lvstore", "list", "--json"))[0]["total"] == grown["total"]
    refusal = target.fails("virtlun_integrity_delete", name="lvs-lvs0-sums").args[0]
    assert "in use by lvstore lvs0" in refusal
    target.rpc("vhost_delete_controller", ctrlr="vm", force=True)
    done(target, "lvstore", "delete", "lvs0", "--yes")
    assert target.rpc("virtlun_integrity_get") == []
    # A plain one can take the file, as nothing of this is left.
    done(target, "lvstore", "create", "plain", "--file", str(file), "--force")
    assert target.rpc("virtlun_integrity_get") == []


def test_it_is_imported_with_its_checksums_also_below_encryption(target: Target) -> None:
    key = {"name": "k0", "cipher": "AES_XTS", "key": KEY, "key2": KEY2}
    target.rpc("accel_crypto_key_create", **key)
    file = target.directory / "both.img"
    made = ("lvstore", "create", "both", "--file", str(file), "--size", "64M")
    done(target, *made, "--checksums", "--key", "k0")
    done(target, *made, "--checksums", "--key", "k0")
    target.make_thin("v0", 8, "both")
    (store,) = target.rpc("bdev_lvol_get_lvstores")
    assert store["base_bdev"] == "lvs-both-crypt"
    target.rpc("bdev_uring_delete", name="lvs-both")
    assert target.rpc("virtlun_integrity_get") == []
    (found,) = json.loads(done(target, "lvstore", "import", str(file), "--key", "k0", "--json"))
    assert (found["name"], found["checksums"]["mismatches"]) == ("both", 0)
    assert [v["name"] for v in json.loads(done(target, "volume", "list", "--json"))] == ["v0"]
    done(target, "lvstore", "delete", "both", "--yes")
    assert target.rpc("virtlun_integrity_get") == []


def test_what_cannot_have_checksums_is_told_in_a_sentence(target: Target, file: Path) -> None:
    again = target.directory / "store.img"
    assert "lvs0" in refused(target, "lvstore", "create", "other", "--file", str(again), "--force")
    for base, name, why in (
        ("lvs0/v0", "s1", "lvstore create --checksums"),
        ("lvs-lvs0", "s1", "in use by integrity bdev lvs-lvs0-sums"),
        ("nobody", "s1", "there is no bdev nobody"),
        ("lvs-lvs0", "lvs-lvs0-sums", "already"),
        ("lvs-lvs0", "x" * 64, "cannot be the name of a bdev with checksums"),
    ):
        failed = target.fails("virtlun_integrity_create", base_bdev_name=base, name=name)
        assert why in failed.args[0], failed
    assert again.exists()
