"""`virtlun` against a real target: what a person types and sees."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from plugin.cli import main
from pydataplane import supervise
from pydataplane.errors import TargetUnavailable
from tests.support.encryption import waiting_guest
from tests.support.frozen import frozen
from tests.support.initiator import Initiator
from tests.support.slow_disk import SlowDisk
from tests.support.target import Target, binary
from tests.support.wait import until
from tests.target.conftest import MakeTarget

MIB = 1 << 20


def run(target: Target, *words: str) -> Result:
    return CliRunner().invoke(main, ["--socket", str(target.rpc_socket), *words])


def done(target: Target, *words: str) -> str:
    result = run(target, *words)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(target: Target, *words: str) -> str:
    result = run(target, *words)
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert len(result.stderr.strip().splitlines()) == 1
    return result.stderr


@pytest.fixture
def store(target: Target) -> Target:
    """A target with the lvstore lvs0 of 64 MiB in a file, with clusters of 1 MiB."""
    done(
        target,
        *("lvstore", "create", "lvs0", "--file", str(target.directory / "store.img")),
        *("--size", "64M", "--cluster-size", "1M"),
    )
    return target


def test_a_volume_has_a_history(store: Target) -> None:
    def of(*words: str) -> dict[str, object]:
        shown = json.loads(done(store, "volume", "list", "--json"))
        return {item["path"]: (item["parent"], item["snapshot"]) for item in shown}

    for name in ("data", "log"):
        done(store, "volume", "create", f"lvs0/{name}", "8M", "--thin")
    for _ in range(2):  # it is safe to repeat
        taken = done(store, "volume", "snapshot", "lvs0/data", "lvs0/log", "monday", "--json")
        assert [item["path"] for item in json.loads(taken)] == [
            "lvs0/data@monday",
            "lvs0/log@monday",
        ]
        done(store, "volume", "clone", "lvs0/data@monday", "copy")
    assert of() == {
        "lvs0/copy": ("data@monday", False),
        "lvs0/data": ("data@monday", False),
        "lvs0/data@monday": (None, True),
        "lvs0/log": ("log@monday", False),
        "lvs0/log@monday": (None, True),
    }
    row = next(line for line in done(store, "volume", "list").splitlines() if "copy" in line)
    assert "data@monday" in row.split()
    said = refused(store, "volume", "delete", "lvs0/data@monday", "--yes")
    assert "lvs0/copy, lvs0/data need it" in said
    said = refused(store, "volume", "clone", "lvs0/log@monday", "copy")
    assert "is not a clone of lvs0/log@monday" in said
    assert "is not a snapshot" in refused(store, "volume", "clone", "lvs0/data", "other")
    done(store, "volume", "snapshot", "lvs0/data", "tuesday")
    assert "not the last" in refused(store, "volume", "snapshot", "lvs0/data", "monday")
    said = refused(store, "volume", "rollback", "lvs0/copy", "lvs0/data@tuesday", "--yes")
    assert "is not a snapshot of" in said
    done(store, "volume", "rollback", "lvs0/data", "@monday", "--yes")
    assert of()["lvs0/data"] == ("data@monday", False)
    inflated = json.loads(done(store, "volume", "inflate", "lvs0/copy", "--json"))
    assert (inflated[0]["parent"], inflated[0]["allocated"], inflated[0]["thin"]) == (
        None,
        8 * MIB,
        False,
    )


@pytest.mark.root
def test_what_takes_longer_than_an_answer_is_waited_for(target: Target, scratch: Path) -> None:
    config = scratch / "virtlun.toml"
    config.write_text(f"[target]\nrpc_socket = '{target.rpc_socket}'\ntimeout_s = 2.0\n")

    def slow(disk: SlowDisk, *words: str) -> Result:
        with ThreadPoolExecutor(1) as pool:
            disk.hang()
            done = pool.submit(CliRunner().invoke, main, ["--config", str(config), *words])
            time.sleep(4)
            assert not done.done(), done.result().output
            disk.go_on()
            return done.result()

    with SlowDisk(scratch / "disk", 64 * MIB) as disk:
        target.rpc("bdev_aio_create", filename=str(disk.path), name="d", block_size=512)
        target.rpc("bdev_lvol_create_lvstore", bdev_name="d", lvs_name="lvs0", cluster_sz=MIB)
        done(target, "volume", "create", "lvs0/data", "8M", "--thin")
        for words in (
            ("volume", "inflate", "lvs0/data"),
            ("volume", "resize", "lvs0/data", "16M"),
            ("volume", "create", "lvs0/thick", "8M"),
            ("volume", "delete", "lvs0/thick", "--yes"),
        ):
            said = slow(disk, *words)
            assert said.exit_code == 0, said.output
        (volume,) = json.loads(done(target, "volume", "list", "--json"))
        assert (volume["path"], volume["allocated"]) == ("lvs0/data", 16 * MIB)
        with frozen(target.pid):
            said = run(target, "--config", str(config), "volume", "inflate", "lvs0/data")
        assert "within 2 s" in said.stderr
        target.stop()


def test_lvstores_and_volumes_are_made_listed_changed_and_deleted(store: Target) -> None:
    made = json.loads(done(store, "volume", "create", "lvs0/data", "8M", "--json"))
    assert [(item["path"], item["size"], item["thin"]) for item in made] == [
        ("lvs0/data", 8 * MIB, False)
    ]
    thin = json.loads(done(store, "volume", "create", "lvs0/thin", "512M", "--thin", "--json"))
    assert thin[0]["allocated"] == 0
    assert [item["path"] for item in json.loads(done(store, "volume", "list", "--json"))] == [
        "lvs0/data",
        "lvs0/thin",
    ]
    table = done(store, "volume", "list", "lvs0").splitlines()
    assert table[0].split() == ["VOLUME", "SIZE", "ALLOCATED", "THIN", "OF", "UUID"]
    assert "8 MiB" in table[1]
    done(store, "volume", "resize", "lvs0/data", "16M")
    renamed = json.loads(done(store, "volume", "rename", "lvs0/data", "renamed", "--json"))
    assert renamed[0]["path"] == "lvs0/renamed"
    shown = json.loads(done(store, "volume", "list", "--json"))
    assert (shown[0]["path"], shown[0]["size"]) == ("lvs0/renamed", 16 * MIB)
    done(store, "volume", "delete", "lvs0/renamed", "--yes")
    done(store, "volume", "delete", "lvs0/thin", "--yes")
    assert json.loads(done(store, "volume", "list", "--json")) == []
    done(store, "lvstore", "delete", "lvs0", "--yes")
    assert json.loads(done(store, "lvstore", "list", "--json")) == []
    assert (store.directory / "store.img").exists()


def test_an_lvstore_lies_encrypted(target: Target) -> None:
    image, secret = target.directory / "hidden.img", target.directory / "key"
    secret.write_bytes(bytes(range(64)))
    make = ("lvstore", "create", "hidden", "--file", str(image), "--size", "64M", "--key", "k0")
    assert "bdev lvs-hidden-crypt needs its key k0" in refused(target, *make)
    assert not image.exists()
    assert "no keys" in run(target, "key", "list").stderr
    for wrong in (b"", b"0123", b"x" * 63, b"ab" * 63 + b"x"):
        (target.directory / "wrong").write_bytes(wrong)
        said = refused(target, "key", "create", "k0", "--file", str(target.directory / "wrong"))
        assert "holds no key: a key has 64 bytes, or 128 hexadecimal digits" in said
    done(target, "key", "create", "k0", "--file", str(secret))
    for _ in range(2):  # it is safe to repeat
        done(target, *make)
    assert "k0" in refused(target, "key", "destroy", "k0")
    (shown,) = json.loads(done(target, "lvstore", "list", "--json"))
    assert (shown["name"], shown["file"]) == ("hidden", str(image))
    done(target, "volume", "create", "hidden/data", "8M")
    done(target, "lvstore", "resize", "hidden", "128M")
    (grown,) = json.loads(done(target, "lvstore", "list", "--json"))
    assert grown["total"] > shown["total"]
    assert b"hidden" not in image.read_bytes()
    uuid = target.rpc("bdev_get_bdevs", name="hidden/data")[0]["name"]
    target.attach("vm-1", uuid)
    target.restart()
    assert json.loads(done(target, "lvstore", "list", "--json")) == []
    # Its guests wait for the key, given in hexadecimal here.
    with waiting_guest(target) as (vm, connection):
        secret.write_text(bytes(range(64)).hex() + "\n")
        done(target, "key", "create", "k0", "--file", str(secret))
        connection.result()
        vm.ready()
        assert vm.read(0, 8) == bytes(4096)
    (row,) = json.loads(done(target, "key", "list", "--json"))
    assert (row["name"], row["used_by"]) == ("k0", ["lvs-hidden-crypt"])
    assert not {"key", "key2"} & row.keys()
    # To another target, as with another host.
    done(target, "volume", "list")
    target.rpc("vhost_scsi_controller_remove_target", ctrlr="vm-1", scsi_target_num=0)
    target.rpc("bdev_uring_delete", name="lvs-hidden")
    assert "or the key if it is encrypted" in refused(target, "lvstore", "import", str(image))
    assert target.rpc("bdev_get_bdevs") == []
    done(target, "lvstore", "import", str(image), "--key", "k0")
    done(target, "volume", "delete", "hidden/data", "--yes")
    done(target, "lvstore", "delete", "hidden", "--yes")
    done(target, "key", "destroy", "k0")


def test_a_key_need_not_be_in_a_file(target: Target) -> None:
    """It comes by standard input, or by a descriptor of whoever calls."""
    words = ("--socket", str(target.rpc_socket), "key", "create", "k0", "--file")
    for given in ("standard input", "descriptor"):
        reads, writes = os.pipe()
        os.write(writes, bytes(range(64)))
        os.close(writes)
        named = "-" if given == "standard input" else f"/dev/fd/{reads}"
        subprocess.run(
            [str(binary("virtlun")), *words, named],
            stdin=reads if named == "-" else subprocess.DEVNULL,
            pass_fds=(reads,),
            check=True,
            capture_output=True,
        )
        os.close(reads)
        (row,) = json.loads(done(target, "key", "list", "--json"))
        assert row["name"] == "k0"
        done(target, "key", "destroy", "k0")


def test_creating_the_same_again_changes_nothing(store: Target) -> None:
    first = done(store, "volume", "create", "lvs0/data", "8M", "--json")
    assert done(store, "volume", "create", "lvs0/data", "8M", "--json") == first
    assert "resize it" in refused(store, "volume", "create", "lvs0/data", "9M")
    file = str(store.directory / "store.img")
    done(store, "lvstore", "create", "lvs0", "--file", file)
    other = str(store.directory / "other.img")
    assert "exists already" in refused(
        store, "lvstore", "create", "lvs0", "--file", other, "--size", "64M"
    )
    assert not Path(other).exists()


def test_an_lvstore_shows_the_file_that_it_is_on(store: Target) -> None:
    file = str(store.directory / "store.img")
    (shown,) = json.loads(done(store, "lvstore", "list", "--json"))
    assert shown["file"] == file
    assert done(store, "lvstore", "list").splitlines()[1].split()[-2] == file
    store.rpc("bdev_malloc_create", name="m0", num_blocks=65536, block_size=512)
    store.rpc("bdev_lvol_create_lvstore", bdev_name="m0", lvs_name="ram")
    assert [s["file"] for s in json.loads(done(store, "lvstore", "list", "--json"))] == [file, None]
    assert "bdev m0" in done(store, "lvstore", "list")


def test_nobodys_data_is_overwritten_unasked(target: Target) -> None:
    disk = target.make_file("disk.img", 64 * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(disk)], check=True)
    before = disk.read_bytes()
    said = refused(target, "lvstore", "create", "lvs0", "--file", str(disk))
    assert "it holds ext4" in said and "--force" in said
    assert disk.read_bytes() == before
    done(target, "lvstore", "create", "lvs0", "--file", str(disk), "--force")
    done(target, "lvstore", "create", "lvs0", "--file", str(disk))
    said = refused(target, "lvstore", "create", "lvs1", "--file", str(disk), "--force")
    assert "holds the lvstore lvs0 already" in said
    done(target, "lvstore", "delete", "lvs0", "--yes")
    done(target, "lvstore", "create", "lvs1", "--file", str(disk))


def test_what_was_cut_off_is_finished_and_another_files_is_not_used(target: Target) -> None:
    begun, other = target.make_file("begun.img", 64 * MIB), target.directory / "other.img"
    target.rpc("bdev_uring_create", filename=str(begun), name="lvs-lvs0")
    refused(target, "lvstore", "create", "lvs0", "--file", str(other), "--size", "64M")
    assert not other.exists()
    done(target, "lvstore", "create", "lvs0", "--file", str(begun), "--size", "64M")


def test_a_size_that_a_file_does_not_have_is_not_passed_over(target: Target) -> None:
    disk = target.make_file("disk.img", 64 * MIB)
    said = refused(target, "lvstore", "create", "lvs0", "--file", str(disk), "--size", "128M")
    assert f"with {64 * MIB} bytes, not {128 * MIB}" in said
    done(target, "lvstore", "create", "lvs0", "--file", str(disk), "--size", "64M")
    begun = target.make_file("begun.img", 0)
    done(target, "lvstore", "create", "lvs1", "--file", str(begun), "--size", "64M")


def test_a_disk_with_an_lvstore_moves_to_another_target(
    store: Target, make_target: MakeTarget
) -> None:
    done(store, "volume", "create", "lvs0/data", "8M")
    volumes = json.loads(done(store, "volume", "list", "--json"))
    file = str(store.directory / "store.img")
    other = make_target().start()
    said = refused(other, "lvstore", "import", file)
    assert "in use by process" in said
    assert store.stop() == 0
    for words in (("create", "lvs0", "--file", file), ("create", "new", "--file", file, "--force")):
        said = refused(other, "lvstore", *words)
        assert f"virtlun lvstore import {file}" in said
    imported = json.loads(done(other, "lvstore", "import", file, "--json"))
    assert [(item["name"], item["file"]) for item in imported] == [("lvs0", file)]
    assert json.loads(done(other, "lvstore", "import", file, "--json")) == imported
    assert json.loads(done(other, "volume", "list", "--json")) == volumes
    other.restart()
    assert json.loads(done(other, "volume", "list", "--json")) == volumes


def test_what_holds_no_lvstore_is_not_imported(target: Target) -> None:
    empty = target.make_file("empty.img", 64 * MIB)
    assert "there is no lvstore on" in refused(target, "lvstore", "import", str(empty))
    none = str(target.directory / "none")
    assert "does not exist" in refused(target, "lvstore", "import", none)
    assert "is a directory" in refused(target, "lvstore", "import", str(target.directory))
    assert target.rpc("bdev_get_bdevs") == []


def test_a_namesake_is_not_taken_for_what_was_asked_for(store: Target) -> None:
    done(store, "volume", "create", "lvs0/data", "8M")
    (present,) = json.loads(done(store, "volume", "list", "--json"))
    lost = "11111111-2222-4333-8444-555555555555"
    said = refused(store, "volume", "create", "lvs0/data", "8M", "--uuid", lost)
    assert present["uuid"] in said and "rename that one first" in said
    assert "is thick" in refused(store, "volume", "create", "lvs0/data", "8M", "--thin")
    done(store, "volume", "create", "lvs0/data", "8M", "--uuid", present["uuid"])
    done(store, "volume", "rename", "lvs0/data", "other")
    (made,) = json.loads(
        done(store, "volume", "create", "lvs0/data", "8M", "--uuid", lost, "--json")
    )
    assert made["uuid"] == lost


def test_a_shrink_has_to_be_asked_for(store: Target) -> None:
    done(store, "volume", "create", "lvs0/data", "8M")
    assert "--shrink" in refused(store, "volume", "resize", "lvs0/data", "4M")
    done(store, "volume", "resize", "lvs0/data", "4M", "--shrink")
    assert json.loads(done(store, "volume", "list", "--json"))[0]["size"] == 4 * MIB


def sizes(target: Target) -> tuple[int, int]:
    """Total and free bytes of the one lvstore, as a program reads them."""
    (shown,) = json.loads(done(target, "lvstore", "list", "--json"))
    return shown["total"], shown["free"]


def test_an_lvstore_in_a_file_grows_while_a_volume_of_it_is_used(store: Target) -> None:
    file = store.directory / "store.img"
    done(store, "volume", "create", "lvs0/data", "8M")
    store.rpc("virtlun_export_create", bdev_name="lvs0/data")
    (export,) = store.rpc("virtlun_export_list")
    with Path(export["path"]).open("r+b", buffering=0) as volume:
        volume.write(b"before" + bytes(4090))
        os.fsync(volume.fileno())
        total, free = sizes(store)
        (grown,) = json.loads(done(store, "lvstore", "resize", "lvs0", "192M", "--json"))
        assert (grown["name"], grown["total"]) == ("lvs0", total + 128 * MIB)
        assert sizes(store) == (total + 128 * MIB, free + 128 * MIB)
        assert file.stat().st_size == 192 * MIB
        done(store, "volume", "resize", "lvs0/data", "150M")
        volume.seek(149 * MIB)
        volume.write(b"after" + bytes(4091))
        os.fsync(volume.fileno())
        volume.seek(0)
        assert volume.read(4096) == b"before" + bytes(4090)
    store.rpc("virtlun_export_delete", bdev_name="lvs0/data")
    table = done(store, "lvstore", "resize", "lvs0", "192M").splitlines()
    assert table[0].split() == ["NAME", "SIZE", "FREE", "CLUSTER", "CHECKSUMS", "ON", "UUID"]
    assert sizes(store) == (total + 128 * MIB, free - 14 * MIB)
    assert store.restart() and sizes(store) == (total + 128 * MIB, free - 14 * MIB)


@pytest.mark.parametrize("rescanned", [False, True])
def test_a_growth_that_a_crash_cut_short_is_finished_by_the_same_command(
    store: Target, rescanned: bool
) -> None:
    total, _ = sizes(store)
    os.truncate(store.directory / "store.img", 192 * MIB)
    if rescanned:
        store.rpc("bdev_uring_rescan", name="lvs-lvs0")
    store.crash()
    assert sizes(store)[0] == total, "not unless it is told"
    done(store, "lvstore", "resize", "lvs0", "192M")
    assert sizes(store)[0] == total + 128 * MIB
    os.truncate(store.directory / "store.img", 256 * MIB)
    done(store, "lvstore", "resize", "lvs0")
    assert sizes(store)[0] == total + 192 * MIB


def test_an_lvstore_on_a_block_device_grows_with_it(target: Target) -> None:
    file = target.make_file("disk.img", 64 * MIB)
    loop = subprocess.check_output(["losetup", "--find", "--show", file], text=True).strip()
    try:
        done(target, "lvstore", "create", "lvs0", "--file", loop)
        total, _ = sizes(target)
        assert "leave the size out" in refused(target, "lvstore", "resize", "lvs0", "128M")
        os.truncate(file, 128 * MIB)
        subprocess.run(["losetup", "-c", loop], check=True)
        assert "cannot be made smaller" in refused(target, "lvstore", "resize", "lvs0", "64M")
        assert sizes(target)[0] == total
        done(target, "lvstore", "resize", "lvs0")
        assert sizes(target)[0] == total + 64 * MIB
        done(target, "lvstore", "resize", "lvs0", "128M")
        assert sizes(target)[0] == total + 64 * MIB
        done(target, "lvstore", "delete", "lvs0", "--yes")
    finally:
        target.stop()
        subprocess.run(["losetup", "-d", loop], check=True)


def test_an_lvstore_that_cannot_be_resized_says_why_and_stays(store: Target) -> None:
    file = store.directory / "store.img"
    before = done(store, "lvstore", "list", "--json"), file.stat().st_size
    said = refused(store, "lvstore", "resize", "lvs0", "32M")
    assert f"{file} has {64 * MIB} bytes, {32 * MIB} are fewer" in said
    assert "is good for" in refused(store, "lvstore", "resize", "lvs0", "1T")
    assert "there is no lvstore none" in refused(store, "lvstore", "resize", "none", "1G")
    assert "is not a size" in refused(store, "lvstore", "resize", "lvs0", "large")
    away = file.rename(file.with_name("away.img"))
    assert "store.img" in refused(store, "lvstore", "resize", "lvs0", "128M")
    with file.open("xb") as other:
        other.truncate(100 * MIB)
    assert "not the file that the target has" in refused(store, "lvstore", "resize", "lvs0")
    away.rename(file)
    assert (done(store, "lvstore", "list", "--json"), file.stat().st_size) == before
    store.rpc("bdev_malloc_create", name="m0", num_blocks=65536, block_size=512)
    store.rpc("bdev_lvol_create_lvstore", bdev_name="m0", lvs_name="ram")
    assert "neither a file nor a block device" in refused(store, "lvstore", "resize", "ram", "1G")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("volume", "create", "lvs0/big", "1T"), "lvs0"),
        (("volume", "create", "none/data", "1M"), "there is no lvstore none"),
        (("volume", "create", "lvs0/data", "much"), "is not a size"),
        (("volume", "create", "data", "1M"), "write LVSTORE/VOLUME"),
        (("volume", "resize", "lvs0/none", "1M"), "there is no volume lvs0/none"),
        (("volume", "delete", "lvs0/none", "--yes"), "there is no volume lvs0/none"),
        (("volume", "delete", "none/none", "--yes"), "there is no lvstore none"),
        (("volume", "list", "none"), "there is no lvstore none"),
        (("lvstore", "create", "x", "--file", "/nonexistent/store"), "give --size"),
        (("lvstore", "create", "a b", "--file", "/dev/null"), "is not a name"),
        (("lvstore", "delete", "none", "--yes"), "there is no lvstore none"),
    ],
)
def test_bad_input_is_one_sentence_and_changes_nothing(
    store: Target, words: tuple[str, ...], said: str
) -> None:
    before = [done(store, noun, "list", "--json") for noun in ("lvstore", "volume")]
    assert said in refused(store, *words)
    assert [done(store, noun, "list", "--json") for noun in ("lvstore", "volume")] == before


def test_a_file_of_no_good_size_is_not_left_behind(target: Target) -> None:
    path = target.directory / "small.img"
    for size in ("4K", "8000000T"):
        refused(target, "lvstore", "create", "small", "--file", str(path), "--size", size)
    assert not path.exists()
    assert json.loads(done(target, "lvstore", "list", "--json")) == []


def test_status_top_and_doctor_show_the_target(store: Target) -> None:
    status = json.loads(done(store, "target", "status", "--json"))
    assert store.process is not None
    assert status["pid"] == store.process.pid
    assert "reactor  0" in done(store, "target", "status")
    rates = json.loads(done(store, "top", "--count", "1", "--interval", "0.05", "--json"))
    (reactor,) = rates["reactors"]
    assert 0 <= reactor["busy"] <= 1 and reactor["queues"] == 0
    shown = done(store, "top", "--count", "2", "--interval", "0.05")
    assert shown.count("REACTOR") == 2 and shown.endswith("\n"), "off a terminal, one by one"
    found = {item["what"]: item for item in json.loads(run(store, "doctor", "--json").stdout)}
    assert found["target"]["state"] == "ok"
    assert str(store.process.pid) in found["target"]["found"]


def test_io_that_waits_for_room_is_shown_with_its_volume(store: Target) -> None:
    done(store, "volume", "create", "lvs0/thin", "8M", "--thin")
    (lvstore,) = store.rpc("bdev_lvol_get_lvstores")
    filler = lvstore["free_clusters"] * lvstore["cluster_size"]
    done(store, "volume", "create", "lvs0/filler", f"{filler // MIB}M")
    name = "vm-44444444-4444-4444-8444-444444444444"
    store.rpc("vhost_create_scsi_controller", ctrlr=name)
    store.add_lun(name, "lvs0/thin", 3, write_error_policy="enospc")
    # libvirt's own test driver: its domain has another controller
    words = ("domain", "errors", "--connect", "test:///default")
    assert run(store, *words).stderr == "no I/O waits because of an error\n"
    with Initiator(store.vhost_dir / name) as guest, ThreadPoolExecutor(1) as thread:
        guest.send("connect")
        guest.ready(3)
        written = thread.submit(guest.write, 0, b"x" * 4096, target=3)
        until(lambda: json.loads(done(store, *words, "--json")) != [], "it waits")
        (row,) = json.loads(done(store, *words, "--json"))
        assert time.time() - 3600 < row.pop("since") <= time.time()
        assert row == {
            "domain": None,
            "dev": None,
            "volume": "lvs0/thin",
            "target": 3,
            "error": "no_space",
            "controller": name,
        }
        table = done(store, *words).splitlines()
        assert table[0].split() == ["DOMAIN", "DEV", "VOLUME", "LUN", "WHY", "SINCE", "CONTROLLER"]
        assert re.search(r"lvs0/thin +3 +no space left +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", table[1])
        nameless = run(store, *words[:3], "test:///none")
        assert nameless.stderr.startswith("Warning: the domains' names are not known: libvirt at ")
        assert "lvs0/thin" in nameless.stdout
        says = f"I/O of {name} on lvs0/thin waits: no space left"
        assert f"problem  {says}" in done(store, "target", "status")
        (held,) = json.loads(done(store, "target", "status", "--json"))["suspended"]
        assert held["volume"] == "lvs0/thin"
        found = {item["what"]: item for item in json.loads(run(store, "doctor", "--json").stdout)}
        assert (found["target"]["state"], says in found["target"]["found"]) == ("warning", True)
        assert "virtlun domain retry" in found["target"]["advice"]
        done(store, "volume", "delete", "lvs0/filler", "--yes")
        store.rpc("virtlun_vhost_resume", ctrlr=name)
        written.result(90)
    assert json.loads(done(store, *words, "--json")) == []


def test_a_target_is_started_asked_and_stopped(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("t")
    words = [str(Path(sys.executable).parent / "virtlun"), "--socket", str(folder / "s"), "target"]
    begin = subprocess.run(
        [
            *(*words, "start", "--vhost-dir", str(folder / "v")),
            *("--state-dir", str(folder / "state"), "--log", str(folder / "log")),
            *("--", "--spin-us", "60"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert begin.returncode == 0, begin.stderr
    try:
        pid = supervise.status(folder / "s")["pid"]
        assert f"pid {pid}" in begin.stdout
        again = subprocess.run([*words, "start"], capture_output=True, text=True, check=True)
        assert f"pid {pid}" in again.stdout
        assert again.stderr == ""
        options = ("--spin-us=60", "--cpumask", "[0,1]")
        again = subprocess.run(
            [*words, "start", "--", *options], capture_output=True, text=True, check=True
        )
        assert f"pid {pid}" in again.stdout
        assert again.stderr == (
            "the target ran already, without --cpumask '[0,1]': `virtlun target upgrade -- "
            "--cpumask '[0,1]'` adds it\n"
        )
    finally:
        subprocess.run([*words, "stop"], capture_output=True, check=True)
    with pytest.raises(TargetUnavailable, match="virtlun target start"):
        supervise.status(folder / "s")


def test_without_a_target_every_command_says_how_to_start_one(tmp_path: Path) -> None:
    for words in (("volume", "list"), ("lvstore", "list"), ("target", "status"), ("top",)):
        result = CliRunner().invoke(main, ["--socket", str(tmp_path / "none"), *words])
        assert result.exit_code == 1
        assert "virtlun target start" in result.stderr


def test_a_report_has_what_is_needed_and_no_key(store: Target, tmp_path: Path) -> None:
    key = "00112233445566778899aabbccddeeff"
    store.rpc("accel_crypto_key_create", cipher="AES_XTS", key=key, key2=key[::-1], name="k0")
    done(store, "volume", "create", "lvs0/data", "8M")
    file = tmp_path / "report.txt"
    said = done(store, "report", "--output", str(file), "--lines", "50")
    assert said.startswith(f"{file}: read it before you send it")
    assert file.stat().st_mode & 0o777 == 0o600
    text = file.read_text()
    for part in ("host", "doctor", "configuration", "target", "logs"):
        assert f"== {part}\n" in text
    assert '"what": "target"' in text and '"lvs0/data"' in text
    assert key not in text and key[::-1] not in text
    assert "File exists" in refused(store, "report", "--output", str(file))
    assert file.read_text() == text


def test_a_report_tells_of_a_target_that_is_not_there(store: Target) -> None:
    store.stop()
    text = done(store, "report", "--output", "-", "--lines", "0")
    assert "-- virtlun_get_status\n" in text
    assert f"{store.rpc_socket}" in text.split("-- virtlun_get_status\n")[1].splitlines()[0]
