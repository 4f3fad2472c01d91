"""What was configured comes back, after an orderly stop and after a crash."""

from __future__ import annotations

import json
import signal
import socket
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from pydataplane.errors import TargetError
from tests.support.initiator import Initiator
from tests.support.target import Target
from tests.target.conftest import MakeTarget

MIB = 1 << 20


def configure(target: Target) -> dict[str, Any]:
    """Makes one of everything, and returns what is shown of it."""
    target.make_lvstore()
    volume = target.rpc("bdev_lvol_create", lvol_name="v0", size_in_mib=4, lvs_name="lvs0")
    target.rpc("virtlun_lvol_set_xattr", name=volume, xattr_name="owner", xattr_value="näme")
    target.rpc("bdev_malloc_create", name="m0", num_blocks=2048, block_size=4096)
    target.rpc("bdev_null_create", name="n0", num_blocks=2048, block_size=512)
    target.rpc("bdev_null_resize", name="n0", new_size=3)
    target.rpc("vhost_create_scsi_controller", ctrlr="vm-1", cpumask="0x1")
    for bdev, options in (
        ("lvs0/v0", {"serial": "s-1", "shareable": True, "block_size": 4096}),
        ("m0", {"read_only": True}),
    ):
        target.rpc(
            "vhost_scsi_controller_add_target",
            ctrlr="vm-1",
            scsi_target_num=-1,
            bdev_name=bdev,
            **options,
        )
    # A renamed volume is still the same one.
    target.rpc("bdev_lvol_rename", old_name="lvs0/v0", new_name="renamed")
    return shown(target)


def controllers(target: Target) -> list[dict[str, Any]]:
    """Returns the controllers, without the times at which they got their targets."""
    found: list[dict[str, Any]] = target.rpc("vhost_get_controllers")
    for controller in found:
        for each in controller["backend_specific"]["scsi"]:
            for lun in each["luns"]:
                assert lun.pop("attached_at") > 0
    return found


def shown(target: Target) -> dict[str, Any]:
    """Returns all that a client can see of the configuration."""
    return {
        "bdevs": target.rpc("bdev_get_bdevs"),
        "lvstores": target.rpc("bdev_lvol_get_lvstores"),
        "lvols": target.rpc("bdev_lvol_get_lvols"),
        "xattrs": target.rpc("virtlun_lvol_get_xattrs", name="lvs0/renamed"),
        "controllers": controllers(target),
        "problems": target.rpc("virtlun_get_status")["restore_problems"],
        "vhost": target.rpc("framework_get_config", name="vhost_scsi"),
    }


def by_name(items: dict[str, Any]) -> dict[str, Any]:
    """The same with bdevs by name: lvols appear as their store does."""
    return {**items, "bdevs": sorted(items["bdevs"], key=lambda item: str(item["name"]))}


def test_a_restart_restores_everything(target: Target) -> None:
    before = configure(target)
    assert before["xattrs"] == {"owner": "näme"}
    assert before["problems"] == []
    target.restart()
    assert by_name(shown(target)) == by_name(before)
    assert (target.vhost_dir / "vm-1").is_socket()


def test_a_crash_loses_nothing_that_was_answered(target: Target) -> None:
    before = configure(target)
    for _ in range(3):
        target.crash()
        assert by_name(shown(target)) == by_name(before)


def test_a_crash_in_the_middle_of_calls(target: Target) -> None:
    """Each call either happened or did not, and those that were answered did."""
    target.make_lvstore()
    for turn in range(5):
        answered: list[str] = []
        first = threading.Event()

        def work(turn: int, answered: list[str], first: threading.Event) -> None:
            try:
                for number in range(1000):
                    name = f"t{turn}-{number}"
                    target.rpc("bdev_null_create", name=name, num_blocks=8, block_size=512)
                    target.rpc("bdev_lvol_create", lvol_name=name, size_in_mib=1, lvs_name="lvs0")
                    answered.append(name)
                    first.set()
                    target.rpc("bdev_lvol_delete", name=f"lvs0/{name}")
                    target.rpc("bdev_null_delete", name=name)
                    answered.pop()
            except TargetError:
                first.set()

        worker = threading.Thread(target=work, args=(turn, answered, first))
        worker.start()
        assert first.wait(90)
        target.kill9()
        worker.join()
        target.start()
        assert target.rpc("virtlun_get_status")["restore_problems"] == []
        nulls = {
            b["name"] for b in target.rpc("bdev_get_bdevs") if b["product_name"] == "Null disk"
        }
        lvols = {v["name"] for v in target.rpc("bdev_lvol_get_lvols")}
        # At most the one at work is there, its lvol within the life of its bdev.
        assert len(nulls) <= 1
        assert lvols <= nulls
        for name in lvols:
            target.rpc("bdev_lvol_delete", name=f"lvs0/{name}")
        for name in nulls:
            target.rpc("bdev_null_delete", name=name)


def test_deleted_things_stay_deleted(target: Target) -> None:
    configure(target)
    target.rpc("vhost_delete_controller", ctrlr="vm-1")
    target.rpc("bdev_malloc_delete", name="m0")
    target.rpc("bdev_uring_delete", name="lvs0-base")
    target.rpc("bdev_null_delete", name="n0")
    names = ("bdev", "ublk", "scsi", "vhost_blk", "vhost_scsi")
    assert target.configuration() == {name: [] for name in names}
    target.restart()
    assert target.rpc("bdev_get_bdevs") == []
    assert target.rpc("vhost_get_controllers") == []


def test_a_bdev_that_goes_takes_its_targets_with_it(target: Target) -> None:
    configure(target)
    target.rpc("bdev_uring_delete", name="lvs0-base")
    assert target.rpc("bdev_lvol_get_lvstores") == []
    (controller,) = target.rpc("vhost_get_controllers")
    assert [t["luns"][0]["bdev_name"] for t in controller["backend_specific"]["scsi"]] == ["m0"]
    target.restart()
    assert target.rpc("virtlun_get_status")["restore_problems"] == []


def test_a_missing_file_is_a_problem_and_the_rest_goes_on(target: Target) -> None:
    before = configure(target)
    image = target.directory / "lvs0.img"
    assert target.stop() == 0
    image.rename(target.directory / "elsewhere")
    target.start()
    problems = target.rpc("virtlun_get_status")["restore_problems"]
    assert len(problems) == 2
    assert "bdev lvs0-base is not restored" in problems[0]
    assert "No such file or directory" in problems[0]
    assert "target 0 of controller vm-1 is not restored" in problems[1]
    assert "bdev lvs0-base could not be restored" in target.words()
    (controller,) = target.rpc("vhost_get_controllers")
    assert [t["scsi_dev_num"] for t in controller["backend_specific"]["scsi"]] == [1]
    # It is kept: with the file back, everything is.
    (target.directory / "elsewhere").rename(image)
    target.restart()
    assert by_name(shown(target)) == by_name(before)


def test_what_could_not_be_restored_can_be_made_anew_or_forgotten(target: Target) -> None:
    before = configure(target)
    image = target.directory / "lvs0.img"
    assert target.stop() == 0
    image.rename(target.directory / "elsewhere")
    target.start()
    (target.directory / "elsewhere").rename(image)
    (item,) = [c for c in target.configuration()["bdev"] if c["method"] == "bdev_uring_create"]
    # And with it what was on it.
    target.rpc(item["method"], **item["params"])
    assert by_name(shown(target)) == by_name(before)
    assert target.stop() == 0
    image.unlink()
    target.start()
    assert len(target.rpc("virtlun_get_status")["restore_problems"]) == 2
    target.rpc("vhost_scsi_controller_remove_target", ctrlr="vm-1", scsi_target_num=0)
    target.rpc("bdev_uring_delete", name="lvs0-base")
    assert target.rpc("virtlun_get_status")["restore_problems"] == []
    assert target.fails("bdev_uring_delete", name="lvs0-base").code == -19  # type: ignore[attr-defined]


def test_what_waits_for_a_bdev_comes_back_with_it(target: Target) -> None:
    """Exports and LUNs of a disk that was plugged in late; a guest that waits is told."""
    path = target.make_lvstore()
    lun = {"ctrlr": "vm-1", "scsi_target_num": 3}
    volume, exported = (
        target.rpc("bdev_lvol_create", lvol_name=name, size_in_mib=4, lvs_name="lvs0")
        for name in ("v0", "v1")
    )
    target.rpc("vhost_create_scsi_controller", ctrlr="vm-1")
    target.rpc("vhost_scsi_controller_add_target", **lun, bdev_name=volume, serial="s-3")
    target.rpc("virtlun_export_create", bdev_name=exported)
    target.rpc("virtlun_export_park", bdev_name=exported)
    before = controllers(target)
    assert target.stop() == 0
    path.rename(path.with_suffix(".away"))
    target.start()
    assert len(target.rpc("virtlun_get_status")["restore_problems"]) == 3
    with Initiator(target.vhost_dir / "vm-1") as guest:
        guest.send("connect")
        path.with_suffix(".away").rename(path)
        # One that has nothing to do with it brings nothing back.
        target.rpc("bdev_null_create", name="n0", num_blocks=8, block_size=512)
        assert len(target.rpc("virtlun_get_status")["restore_problems"]) == 3
        target.rpc("bdev_uring_create", name="lvs0-base", filename=str(path), block_size=512)
        assert target.rpc("virtlun_get_status")["restore_problems"] == []
        guest.ready(3)
    (export,) = target.rpc("virtlun_export_list")
    assert (export["bdev_name"], export["parked"]) == (exported, True)
    target.restart()
    assert controllers(target) == before
    assert target.rpc("virtlun_get_status")["restore_problems"] == []


def test_a_damaged_record_stops_the_start_and_is_left_alone(target: Target) -> None:
    configure(target)
    assert target.stop() == 0
    record = target.state_dir / "config.json"
    record.write_text(record.read_text()[:100])
    done = target.run()
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("virtlun-target:")]
    assert f"{record} cannot be read as a configuration" in line
    assert len(record.read_text()) == 100
    assert not target.rpc_socket.exists()


def test_signals_stop_it_in_order(make_target: MakeTarget) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        target = make_target().start()
        target.rpc("vhost_create_scsi_controller", ctrlr="vm-1")
        assert target.signal(number) == 0
        assert not target.rpc_socket.exists()
        assert not (target.vhost_dir / "vm-1").exists()


def test_kill_instance_answers_before_it_stops(target: Target) -> None:
    process = target.process
    assert process is not None
    done = target.spdk_rpc("spdk_kill_instance", "SIGTERM")
    assert done.returncode == 0, done.stdout
    assert process.wait(90) == 0
    target.process = None


def test_sockets_have_their_mode_and_group(make_target: MakeTarget) -> None:
    target = make_target("--socket-mode", "0666", "--socket-group", "1", "--rpc-group", "2")
    target.start()
    target.rpc("vhost_create_scsi_controller", ctrlr="vm-1")
    found = {
        path.name: (stat.S_IMODE(path.stat().st_mode), path.stat().st_gid)
        for path in (target.rpc_socket, target.vhost_dir / "vm-1")
    }
    assert found == {"rpc.sock": (0o660, 2), "vm-1": (0o666, 1)}


def test_the_service_manager_is_told(
    make_target: MakeTarget, scratch: Path, monkeypatch: Any
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(scratch / "notify"))
        manager.settimeout(90)
        monkeypatch.setenv("NOTIFY_SOCKET", str(scratch / "notify"))
        target = make_target().start()
        assert manager.recv(100) == b"READY=1"
        assert target.stop() == 0
        assert manager.recv(100) == b"STOPPING=1"


def test_log_lines_can_be_json(make_target: MakeTarget) -> None:
    target = make_target("--log-format", "json").start()
    target.rpc("bdev_null_create", name="n0", num_blocks=8, block_size=512)
    assert target.stop() == 0
    lines = [json.loads(line) for line in target.words().splitlines()]
    (line,) = [line for line in lines if line.get("method") == "bdev_null_create"]
    assert line["level"] == "INFO"
    assert json.loads(line["params"])["name"] == "n0"


def test_reactors_run_where_the_mask_says(make_target: MakeTarget) -> None:
    for mask, cpus in (("0x3", [0, 1]), ("[0]", [0])):
        target = make_target("--cpumask", mask, "--poll").start()
        status = target.rpc("virtlun_get_status")
        assert [reactor["cpu"] for reactor in status["reactors"]] == cpus
        tids = [r["tid"] for r in target.rpc("framework_get_reactors")["reactors"]]
        for cpu, tid in zip(cpus, tids, strict=True):
            allowed = Path(f"/proc/{tid}/status").read_text()
            assert f"Cpus_allowed_list:\t{cpu}\n" in allowed
        assert target.stop() == 0


def test_when_a_guest_is_called_is_kept(target: Target) -> None:
    target.rpc("bdev_malloc_create", name="m0", num_blocks=2048, block_size=512)
    target.rpc("vhost_create_scsi_controller", ctrlr="vm")
    target.rpc("vhost_create_blk_controller", ctrlr="disk", dev_name="m0")
    set_to = {"delay_base_us": 50, "iops_threshold": 20000}
    for ctrlr in ("vm", "disk"):
        target.rpc("vhost_controller_set_coalescing", ctrlr=ctrlr, **set_to)

    def kept() -> bool:
        shown = target.rpc("vhost_get_controllers")
        return [{key: one[key] for key in set_to} for one in shown] == [set_to, set_to]

    assert kept()
    target.crash()
    assert kept()
    target.upgrade()
    assert kept()
    target.rpc("vhost_delete_controller", ctrlr="vm")
    target.rpc("vhost_create_scsi_controller", ctrlr="vm")
    assert not kept()
    target.stop()
    target.start()
    assert not kept()


def test_controllers_whose_reactors_are_gone_are_served_by_those_that_are_there(
    make_target: MakeTarget,
) -> None:
    target = make_target().start("--cpumask", "[0]")
    target.rpc("bdev_malloc_create", name="m0", num_blocks=2048, block_size=512)
    target.rpc("vhost_create_scsi_controller", ctrlr="lun", cpumask="[0]")
    target.rpc("vhost_create_blk_controller", ctrlr="blk", dev_name="m0", cpumask="[0]")
    for options in (("--cpumask", "[1]"), ("--cpumask", "[0,1]")):
        target.stop()
        target.start(*options)
        masks = [each["cpumask"] for each in target.rpc("vhost_get_controllers")]
        assert masks == (["0x2"] * 2 if options[1] == "[1]" else ["0x1"] * 2)
    said = target.words().count("no reactor is on a CPU of controller")
    assert said == 2, target.words()
    # Of a new one it is still a mistake.
    with pytest.raises(TargetError, match="no reactor"):
        target.rpc("vhost_create_scsi_controller", ctrlr="new", cpumask="[7]")
