"""The units of examples/systemd under Debian's systemd, installed as their README says.

One machine for all tests (`tests.support.systemd`); needs root. They are in an order in which each
finds the target running. `VIRTLUN_SEED` repeats what the I/O chose.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from tests.support.initiator import Initiator
from tests.support.load import Load as FileLoad
from tests.support.night import at_night
from tests.support.restarts import choose_seed
from tests.support.services import (
    README,
    RUN,
    TARGET,
    comes_back,
    installed,
    main_pid,
    rpc,
    script,
    shell,
)
from tests.support.systemd import INSTALLED, Machine
from tests.support.target import ROOT, SANDBOX_REFUSED
from tests.support.wait import until
from tests.target.test_inflight import EXTENTS, MIB, QUEUES, Load

pytestmark = pytest.mark.root
CAP_SYS_RESOURCE = 24
LISTENER = """\
import socket, struct, sys
with socket.socket(socket.AF_UNIX) as client:
    client.connect(sys.argv[1])
    print(struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])
"""
"""Prints which process listens on a socket."""


def drop_in(machine: Machine, unit: str, settings: str) -> None:
    """Adds settings to a service, as `systemctl edit` does."""
    folder = Path(f"/etc/systemd/system/{unit}.service.d")
    machine.path(folder).mkdir()
    (machine.path(folder) / "override.conf").write_text(f"[Service]\n{settings}\n")
    shell(machine, "systemctl daemon-reload")


def has_ended(machine: Machine, pid: int) -> bool:
    """Whether a process of the machine is gone."""
    return not machine.path(f"/proc/{pid}").exists()


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """A machine on which the README's installation was done."""
    with installed() as machine:
        yield machine


@pytest.fixture(autouse=True)
def nothing_is_refused(machine: Machine) -> Iterator[None]:
    """What the units' limits refuse is told, and fails the test."""
    yield
    said = machine.said()
    assert SANDBOX_REFUSED not in said and "panicked" not in said, said


@dataclass
class Disk:
    """A volume of `EXTENTS` MiB at the controller c0 of a target, and what it must hold."""

    machine: Machine
    store: str
    target: str = ""
    held: dict[int, bytes] = field(default_factory=dict)

    def make(self) -> Disk:
        """Makes volume and controller."""
        volume = f"{self.store}/v"
        named = f"--target {self.target} " if self.target else ""
        shell(self.machine, f"virtlun {named}volume create {volume} {EXTENTS}M --thin")
        rpc(self.machine, "vhost_create_scsi_controller", self.target, ctrlr="c0")
        rpc(
            self.machine,
            "vhost_scsi_controller_add_target",
            self.target,
            ctrlr="c0",
            scsi_target_num=0,
            bdev_name=volume,
        )
        return self

    @contextlib.contextmanager
    def load(self) -> Iterator[Load]:
        """Verified I/O of a driver that keeps an in-flight region; reads the whole disk in the end.

        The driver is in the machine, as QEMU is.
        """
        rng = random.Random(choose_seed())
        socket = RUN / self.target / "vhost/c0"
        program = self.machine.command(f"{INSTALLED}/bin/virtlun-bench")
        with Initiator(socket, program=program) as driver:
            driver.send("connect", queues=QUEUES, memory=256 * MIB)
            driver.ready()
            load = Load(driver, rng, self.held)
            yield load
            load.wait_all()
            load.check_region()
            driver.ready()  # a new target has unit attentions
            load.audit()
            driver.send("disconnect")


@pytest.fixture(scope="module")
def disk(machine: Machine) -> Disk:
    """A disk of the target without a name."""
    shell(machine, "virtlun lvstore create lvs0 --file /var/lib/virtlun/lvs0.img --size 1G")
    return Disk(machine, "lvs0").make()


def test_the_machine_is_apart_from_the_host(machine: Machine) -> None:
    """What this systemd cleans or writes is its own."""
    for place in ("/", "/etc", "/run", "/tmp", "/var", "/var/tmp", "/dev", "/dev/shm"):
        assert machine.path(place).stat().st_dev != Path(place).stat().st_dev, place
    assert machine.path("/var/lib").samefile(machine.scratch / "var-lib")
    read_only = ("/usr", "/sys", "/proc/sys", f"{INSTALLED}/source", f"{INSTALLED}/packages")
    for place in read_only:
        options = machine.run("findmnt", "-n", "-o", "OPTIONS", place).stdout
        assert options.startswith("ro,"), f"{place}: {options}"


def test_target_is_its_user_without_rights_and_doctor_says_so(machine: Machine) -> None:
    status = machine.status(main_pid(machine))
    uid = shell(machine, "id -u virtlun").strip()
    assert status["Uid"].split() == [uid] * 4
    for rights in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status[rights], 16) == 0, rights
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    said = shell(machine, "virtlun doctor")
    pid = main_pid(machine)
    assert re.search(rf"^ok +target: runs: pid {pid}, ", said, re.MULTILINE), said
    rights = "user virtlun; capabilities none; no_new_privs set; seccomp enforced"
    assert re.search(rf"^ok +the target's rights: {rights}$", said, re.MULTILINE), said
    assert not re.search(r"^failed", said, re.MULTILINE), said


def test_target_has_the_limits_of_its_unit(machine: Machine) -> None:
    if not int(machine.status(1)["CapEff"], 16) >> CAP_SYS_RESOURCE & 1:
        pytest.skip("only a machine with CAP_SYS_RESOURCE can raise limits")
    folder = machine.path(f"/proc/{main_pid(machine)}")
    limits = (folder / "limits").read_text()
    assert re.search(r"^Max locked memory +unlimited +unlimited", limits, re.MULTILINE), limits
    assert re.search(r"^Max open files +65536 +65536", limits, re.MULTILINE), limits
    assert (folder / "oom_score_adj").read_text() == "-900\n"


@pytest.mark.nightly
def test_gateway_serves_virsh(machine: Machine) -> None:
    main_pid(machine, "virtlun-gateway")
    uri = f"qemu+unix:///system?socket={RUN}/libvirt-sock"
    assert "Using API: QEMU" in shell(machine, f"virsh -c '{uri}' version")
    said = shell(machine, "virtlun doctor")
    assert re.search(r"^ok +gateway: ", said, re.MULTILINE), said
    old = main_pid(machine, "virtlun-gateway")
    shell(machine, "systemctl kill -s KILL virtlun-gateway")
    comes_back(machine, "virtlun-gateway", old)
    assert "Using API: QEMU" in shell(machine, f"virsh -c '{uri}' version")


@pytest.mark.nightly
def test_reload_makes_the_new_process_the_main_one_and_the_guest_goes_on(
    machine: Machine, disk: Disk
) -> None:
    with disk.load() as driver:
        for _ in range(2):
            old = main_pid(machine)
            driver.submit(EXTENTS - 4)
            shell(machine, f"systemctl reload {TARGET}")
            new = main_pid(machine)
            assert new != old
            assert rpc(machine, "virtlun_get_status")["pid"] == new
            assert rpc(machine, "virtlun_get_status")["upgrade"]["from_pid"] == old
            assert machine.show(TARGET, "NRestarts", "Result") == {
                "NRestarts": "0",
                "Result": "success",
            }
            gone = partial(has_ended, machine, old)
            until(gone, "the old one's end")
            driver.wait_all()
            assert int(machine.status(new)["CapBnd"], 16) == 0
        # systemd has not started this one itself, and sees its end all the same.
        driver.submit(EXTENTS - 4)
        shell(machine, f"systemctl kill -s KILL {TARGET}")
        comes_back(machine, TARGET, new)
        driver.guest.until_connected(keep=True)
        driver.wait_all()


def test_upgrade_from_outside_of_the_service_is_refused(machine: Machine) -> None:
    """systemd would take the service for ended, and not see the new target at all."""
    old = main_pid(machine)
    refused = machine.run("virtlun", "target", "upgrade", check=False)
    assert refused.returncode != 0
    assert f"`systemctl reload {TARGET}.service`" in refused.stderr
    assert main_pid(machine) == old == rpc(machine, "virtlun_get_status")["pid"]


@pytest.mark.nightly
def test_reload_with_a_program_that_does_not_come_up_fails_and_changes_nothing(
    machine: Machine, disk: Disk
) -> None:
    old = main_pid(machine)
    program = machine.path(INSTALLED / "bin/virtlun-target")
    with disk.load() as driver:
        driver.submit(EXTENTS - 4)
        program.rename(program.with_name("kept"))
        try:
            program.symlink_to("/bin/false")
            done = machine.run("systemctl", "reload", TARGET, check=False)
        finally:
            program.unlink()
            program.with_name("kept").rename(program)
        assert done.returncode != 0
        assert "journalctl" in done.stderr
        said = "the old one serves on"
        until(lambda: said in machine.journal(TARGET), lambda: machine.journal(TARGET))
        assert main_pid(machine) == old


@pytest.mark.parametrize("how", [at_night("restart"), "kill -s KILL", at_night("stop")])
def test_what_is_in_flight_survives_restarts_by_systemd(
    machine: Machine, disk: Disk, how: str
) -> None:
    with disk.load() as driver:
        old = main_pid(machine)
        # Frozen meanwhile, so that it has them all at once.
        shell(machine, f"systemctl kill -s STOP {TARGET}")
        driver.submit(EXTENTS - 4)
        shell(machine, f"systemctl {how} {TARGET}")
        if how == "stop":
            assert machine.show(TARGET, "ActiveState", "Result") == {
                "ActiveState": "inactive",
                "Result": "success",
            }
            driver.submit(4)
            shell(machine, f"systemctl start {TARGET}")
        new = comes_back(machine, TARGET, old)
        driver.guest.until_connected(keep=True)
        driver.wait_all()
        assert rpc(machine, "virtlun_get_status")["pid"] == new


@pytest.mark.nightly
def test_crashes_in_a_row_end_neither_target_nor_holder(machine: Machine, disk: Disk) -> None:
    """systemd gives up a unit that starts 5 times in 10 s, where it does not say otherwise."""
    units = (TARGET, "virtlun-holder")
    shell(machine, "systemctl start virtlun-holder")
    with disk.load() as driver:
        for _ in range(6):
            driver.submit(2)
            old = {unit: main_pid(machine, unit) for unit in units}
            shell(machine, f"systemctl kill -s KILL {' '.join(units)}")
            for unit, pid in old.items():
                comes_back(machine, unit, pid)
            driver.guest.until_connected(keep=True)
            driver.wait_all()


@pytest.mark.parametrize("unit", [TARGET, "virtlun-holder"])
def test_wrong_option_is_not_tried_again(machine: Machine, unit: str) -> None:
    program = f"{INSTALLED}/bin/{unit}"
    drop_in(machine, unit, f"ExecStart=\nExecStart={program} --nonsense")
    assert machine.run("systemctl", "restart", unit, check=False).returncode != 0
    shown = machine.show(unit, "ActiveState", "ExecMainStatus", "NRestarts")
    assert shown == {"ActiveState": "failed", "ExecMainStatus": "2", "NRestarts": "0"}
    # The journal reads what was said in its own time.
    said = "unexpected argument '--nonsense'"
    until(lambda: said in machine.journal(unit), lambda: machine.journal(unit))
    shell(machine, f"systemctl revert {unit} && systemctl start {unit}")


@pytest.mark.nightly
def test_drop_in_lets_the_target_have_lvstores_elsewhere(machine: Machine) -> None:
    create = "virtlun lvstore create lvs1 --file /srv/virtlun/lvs1.img --size 1G"
    shell(machine, "mkdir /srv/virtlun")
    refused = machine.run("bash", "-c", create, check=False)
    assert refused.returncode != 0
    assert "name its folder in ReadWritePaths=" in refused.stderr, refused.stderr
    (setting,) = re.findall(r"`\[Service\]`, `(ReadWritePaths=.+?)`", README.read_text())
    drop_in(machine, TARGET, setting)
    shell(machine, f"systemctl reload {TARGET}\n{create}\nvirtlun lvstore delete lvs1 --yes")
    shell(machine, f"systemctl revert {TARGET}")


@pytest.mark.nightly
def test_holder_and_target_are_killed_and_what_is_exported_only_sees_a_pause(
    machine: Machine, disk: Disk
) -> None:
    (command,) = re.findall(r"`(systemctl enable --now virtlun-holder)`", README.read_text())
    shell(machine, command)
    shell(machine, "virtlun volume create lvs0/files 8M")
    path = rpc(machine, "virtlun_export_create", bdev_name="lvs0/files")["path"]
    assert path.startswith(f"{RUN}/export/")
    (export,) = rpc(machine, "virtlun_export_list")
    if export["survives"] != "crash":
        pytest.skip(f"this kernel cannot: {export}")
    assert machine.show("virtlun-holder", "NFileDescriptorStore") == {"NFileDescriptorStore": "2"}
    said = shell(machine, "virtlun doctor")
    assert re.search(r"^ok +the holder's rights: ", said, re.MULTILINE), said
    file = FileLoad(machine.path(path), 8 * MIB, choose_seed())
    with file.running():
        for killed in ((TARGET,), ("virtlun-holder",), (TARGET, "virtlun-holder")):
            file.progress(15)
            old = {unit: main_pid(machine, unit) for unit in killed}
            shell(machine, f"systemctl kill -s KILL {' '.join(killed)}")
            for unit, pid in old.items():
                comes_back(machine, unit, pid)
            file.progress(15)
        file.progress(15)
        shell(machine, f"systemctl reload {TARGET}")
        file.progress(15)
        shell(machine, "systemctl restart virtlun-holder")
        file.progress(15)
    rpc(machine, "virtlun_export_delete", bdev_name="lvs0/files")
    assert machine.show("virtlun-holder", "NFileDescriptorStore") == {"NFileDescriptorStore": "0"}
    shell(machine, "systemctl disable --now virtlun-holder")


def tenant(machine: Machine, name: str) -> None:
    """Does what the README says of a further target, for another name."""
    commands = script("systemctl enable --now virtlun-target@gold").replace("gold", name)
    said = shell(machine, commands)
    assert re.search(rf"^{name} +\d+ +virtlun-{name} +{name}0 ", said, re.MULTILINE), said


@pytest.mark.nightly
def test_tenants_have_processes_users_and_sockets_of_their_own(machine: Machine) -> None:
    names = ("tenant-1", "tenant-2")
    for name in names:
        tenant(machine, name)
    pids = {name: main_pid(machine, f"virtlun-target@{name}") for name in names}
    users = {machine.status(pid)["Uid"] for pid in (*pids.values(), main_pid(machine))}
    assert len(users) == 3
    disks = {name: Disk(machine, f"{name}0", name).make() for name in names}
    for name in names:
        assert (
            machine.status(pids[name])["Seccomp"],
            int(machine.status(pids[name])["CapEff"], 16),
        ) == ("2", 0)
        said = shell(machine, f"virtlun --target {name} doctor")
        rights = f"user virtlun-{name}; capabilities none; no_new_privs set; seccomp enforced"
        assert re.search(rf"^ok +the target's rights: {rights}$", said, re.MULTILINE), said
    # Nothing of the one is in reach of the other's user.
    for path in (RUN / "tenant-2/target.sock", Path("/var/lib/virtlun/tenant-2/tenant-20.img")):
        for way in "-r", "-w":
            own, other = (
                machine.run(
                    "setpriv", f"--reuid={user}", "--clear-groups", "test", way, path, check=False
                )
                for user in ("virtlun-tenant-2", "virtlun-tenant-1")
            )
            assert (own.returncode, other.returncode) == (0, 1), path
    with disks["tenant-2"].load() as driver:
        driver.submit(8)
        shell(machine, "systemctl stop virtlun-target@tenant-1")
        driver.wait_all()
        driver.submit(8)
        shell(machine, "systemctl reload virtlun-target@tenant-2")
        assert main_pid(machine, "virtlun-target@tenant-2") != pids["tenant-2"]
        driver.wait_all()
    listed = shell(machine, "virtlun target list")
    assert "tenant-1" not in listed and "tenant-2" in listed, listed
    shell(machine, "systemctl start virtlun-target@tenant-1")
    assert rpc(machine, "vhost_get_controllers", "tenant-1")[0]["ctrlr"] == "c0"
    shell(machine, "systemctl disable --now virtlun-target@tenant-1 virtlun-target@tenant-2")


def test_socket_starts_the_gateway_at_its_first_client(machine: Machine) -> None:
    command = " ".join(
        re.findall(r"`(systemctl enable --now\s+virtlun-gateway.socket)`", README.read_text())[
            0
        ].split()
    )
    shell(machine, "systemctl disable --now virtlun-gateway")
    shell(machine, "install -m 644 -t /etc/systemd/system examples/systemd/virtlun-gateway.socket")
    shell(machine, f"systemctl daemon-reload\n{command}")
    assert machine.show("virtlun-gateway", "ActiveState") == {"ActiveState": "inactive"}
    uri = f"qemu+unix:///system?socket={RUN}/libvirt-sock"
    assert "Using API: QEMU" in shell(machine, f"virsh -c '{uri}' version")
    main_pid(machine, "virtlun-gateway")
    shell(machine, "systemctl stop virtlun-gateway")
    assert "Using API: QEMU" in shell(machine, f"virsh -c '{uri}' version")
    shell(machine, "systemctl disable --now virtlun-gateway.socket virtlun-gateway")


def test_gateway_takes_libvirtds_place(machine: Machine) -> None:
    """Also one that runs already, at its own sockets."""
    shell(machine, "systemctl start virtlun-gateway")
    readme = ROOT / "examples/libvirt/README.md"
    (install,) = re.findall(r"`(install -m 644 transparent/.+?)`", readme.read_text())
    steps = (
        script("cp -r transparent/", readme),
        install,
        script("systemctl restart libvirtd.socket", readme),
    )
    shell(machine, "\n".join(("cd examples/libvirt", *steps)))
    listener = machine.run(f"{INSTALLED}/bin/python3", "-c", LISTENER, "/run/libvirt/libvirt-sock")
    assert int(listener.stdout) == main_pid(machine, "virtlun-gateway")
    assert "Using API: QEMU" in shell(machine, "virsh -c qemu:///system version")
    assert machine.path("/run/libvirt-real").stat().st_mode & 0o777 == 0o700
    shell(
        machine,
        "systemctl disable --now virtlun-gateway\n"
        "rm -r /etc/systemd/system/libvirtd.socket.d /etc/systemd/system/libvirtd-ro.socket.d\n"
        "install -m 644 examples/virtlun.toml /etc/virtlun/virtlun.toml\n"
        "systemctl daemon-reload\n"
        "systemctl stop libvirtd && systemctl restart libvirtd.socket libvirtd-ro.socket",
    )
    assert "Using API: QEMU" in shell(machine, "virsh -c qemu:///system version")


def test_stop_leaves_nothing(machine: Machine) -> None:
    shell(machine, "systemctl stop 'virtlun-*'")
    for unit in (TARGET, "virtlun-gateway", "virtlun-holder"):
        assert machine.show(unit, "ActiveState", "Result", "MainPID") == {
            "ActiveState": "inactive",
            "Result": "success",
            "MainPID": "0",
        }
    assert f"{INSTALLED}/bin" not in machine.run("ps", "-e", "-o", "args").stdout
    # systemd stops the holder by a signal that ends it at once; the next one makes its socket anew.
    left = set(machine.run("find", "/run/virtlun", "-type", "s").stdout.split())
    assert {str(Path(path).relative_to(RUN)).split("/")[0] for path in left} <= {
        "holder.sock",
        "holder",
    }
    assert machine.run("systemctl", "--failed", "--plain", "--no-legend").stdout == ""
