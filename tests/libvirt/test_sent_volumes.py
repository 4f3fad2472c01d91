"""A guest goes to another host with its volume, which is sent while it runs, as the page says.

By one command, with a program in ssh's place (tests.support.other_host), and step by step.
"""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from plugin.moves import notes
from tests.support.agent import Agent
from tests.support.host import Host
from tests.support.other_host import HOST, ssh_to
from tests.support.wait import until
from tests.target.test_moves import KILLED

pytestmark = [pytest.mark.root, pytest.mark.vm]

ROOT = Path(__file__).parents[2]
NAME = "goes"
IDENTITY = "cat /sys/block/sda/device/vpd_pg80 /sys/block/sda/device/vpd_pg83 | od -c"
"""What the names in /dev/disk/by-id are made of."""
MIB = 1 << 20
DISK = (
    "<disk type='file' device='disk'><source file='/dev/virtlun/lvs0/db'/>"
    "<target dev='sda' bus='scsi'/></disk>"
)

EMPTY = (
    f"<domain type='qemu'><name>{NAME}</name><memory unit='MiB'>64</memory><os>"
    f"<type arch='x86_64' machine='q35'>hvm</type></os><devices>{DISK}</devices></domain>"
)
"""A domain that boots nothing."""


def volume(host: Host, *words: str) -> str:
    """Returns a `virtlun volume` command for a shell, where the host's mounts are seen."""
    command = (host.program("virtlun"), "--socket", str(host.paths.rpc_socket), "volume", *words)
    return shlex.join(host.libvirtd.command(*command))


def run(command: str) -> None:
    subprocess.run(["bash", "-o", "pipefail", "-c", command], check=True)


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts; the first has the thin volume lvs0/db."""
    ids = [f"c0ffee00-0000-4000-8000-00000000001{n}" for n in (1, 2)]
    with Host(keep=True, host_uuid=ids[0]) as here, Host(keep=True, host_uuid=ids[1]) as there:
        here.volumes.create("lvs0/db", 64 * MIB, thin=True)
        yield here, there


WITH_VM = ("--shutdown", "--with-vm", "--json")


def moving(
    here: Host,
    there: Host,
    *words: str,
    program: tuple[str, ...] = (),
    how: tuple[str, ...] = WITH_VM,
) -> subprocess.Popen[str]:
    """Begins to move the volume with its domain, by `program` if given, or as `how` says."""
    inside = there.libvirtd.command("env")
    ssh = ssh_to(here.scratch / "ssh", {"VIRTLUN_CONFIG": there.config}, inside)
    own = program or (here.program("virtlun"),)
    options = ("--host", HOST, "--ssh", str(ssh), *how, *words)
    command = (*own, "--config", str(here.config), "volume", "move", "lvs0/db", *options)
    return subprocess.Popen(
        here.libvirtd.command(*command),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def is_asked_to_shut_down(here: Host) -> bool:
    note = here.volumes.xattrs("lvs0/db").get(notes.HOST, "{}")
    return bool(json.loads(note).get("was_running"))


def check_gone(here: Host, there: Host) -> None:
    """Checks that volume and domain are on the other host alone, and that it runs there."""
    assert here.volumes.volumes() == []
    assert [each.path for each in there.volumes.volumes()] == ["lvs0/db"]
    assert here.virsh("list", "--all", "--name").strip() == ""
    assert there.virsh("domstate", NAME).strip() == "running"
    assert notes.XATTR not in there.volumes.xattrs("lvs0/db")


@pytest.mark.parametrize(
    ("side", "where"),
    [
        ("neither", ""),
        ("source", "after virtlun_lvol_set_xattr virtlun.moved"),
        ("destination", "after virtlun_lvol_remove_xattr virtlun.move"),
    ],
)
def test_a_domain_goes_along(hosts: tuple[Host, Host], side: str, where: str) -> None:
    """Also by two commands, of which one side of the first was killed. The domain boots nothing.

    What its guest would do when it is asked to shut down, `virsh destroy` does.
    """
    here, there = hosts
    (here.scratch / "empty.xml").write_text(EMPTY)
    here.virsh("define", str(here.scratch / "empty.xml"))
    here.virsh("start", NAME)
    fuse = here.scratch / "fuse"
    # Its folder is another one where the host's mounts are seen.
    killed = ("env", f"PYTHONPATH={ROOT}", sys.executable, "-c", KILLED, str(fuse))
    program: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    if side != "neither":
        fuse.write_text(where)
    if side == "source":
        program = killed
    elif side == "destination":
        words = ("--remote", shlex.join(killed))
    process = moving(here, there, *words, program=program)
    until(lambda: is_asked_to_shut_down(here), "the domain to be asked", process=process)
    here.virsh("destroy", NAME)
    out, err = process.communicate(timeout=180)
    if side != "neither":
        assert not fuse.exists()
        assert process.returncode == (-signal.SIGKILL if side == "source" else 1), err
        assert there.virsh("list", "--name").strip() == "", "it runs before all is done"
        here.virsh("start", NAME, check=False)
        assert not running(here), "its volume is no disk any more"
        process = moving(here, there)
        out, err = process.communicate(timeout=180)
        assert process.returncode == 0, err
    print(out)
    (row,) = json.loads(out)
    assert (row["path"], row["domain"]) == ("lvs0/db", NAME), err
    check_gone(here, there)


@pytest.mark.parametrize("how", ["abort", "refused"])
def test_what_a_killed_command_has_shut_down_runs_again(hosts: tuple[Host, Host], how: str) -> None:
    """When the move is given up, and when the next command is refused."""
    here, there = hosts
    here.define(NAME, devices=DISK)
    here.virsh("start", NAME)
    fuse = here.scratch / "fuse"
    fuse.write_text("after virtlun_lvol_set_xattr virtlun.moved")
    killed = ("env", f"PYTHONPATH={ROOT}", sys.executable, "-c", KILLED, str(fuse))
    process = moving(here, there, program=killed)
    until(lambda: is_asked_to_shut_down(here), "the domain to be asked", process=process)
    here.virsh("destroy", NAME)
    process.communicate(timeout=180)
    assert process.returncode == -signal.SIGKILL
    assert not running(here)
    if how == "abort":
        out, err = moving(here, there, how=("--abort",)).communicate(timeout=180)
        assert (out, err) == ("", "")
        assert here.volumes.xattrs("lvs0/db") == {}
        assert there.volumes.volumes() == []
    else:
        there.define(NAME)
        _, err = moving(here, there).communicate(timeout=180)
        assert f"domain {NAME} is another one here" in err
        assert not is_asked_to_shut_down(here)
    assert running(here)


def test_one_that_is_saved_meanwhile_or_plugged_for_now_stays(hosts: tuple[Host, Host]) -> None:
    here, there = hosts
    here.define(NAME)
    (here.scratch / "disk.xml").write_text(DISK)
    here.virsh("start", NAME)
    here.virsh("attach-device", NAME, str(here.scratch / "disk.xml"), "--live")
    _, err = moving(here, there).communicate(timeout=180)
    assert f"domain {NAME} has volume lvs0/db until it ends only" in err
    here.virsh("attach-device", NAME, str(here.scratch / "disk.xml"), "--config")
    process = moving(here, there)
    until(lambda: is_asked_to_shut_down(here), "the domain to be asked", process=process)
    here.virsh("managedsave", NAME)
    _, err = process.communicate(timeout=180)
    assert f"domain {NAME}, which is saved, goes on with volume lvs0/db" in err
    assert running(here)
    assert notes.XATTR in there.volumes.xattrs("lvs0/db")


def running(host: Host) -> bool:
    return NAME in host.virsh("list", "--name").split()


def test_a_domain_that_cannot_come_is_refused_before_it_is_shut_down(
    hosts: tuple[Host, Host],
) -> None:
    here, there = hosts
    here.define(NAME, devices=DISK + DISK.replace("db", "more").replace("sda", "sdb"))
    here.volumes.create("lvs0/more", 8 * MIB, thin=True)
    here.virsh("start", NAME)
    _, err = moving(here, there).communicate(timeout=180)
    assert f"{HOST}: domain {NAME} needs lvs0/more, which is not there" in err
    another = there.volumes.create("lvs0/more", 8 * MIB, thin=True)
    _, err = moving(here, there).communicate(timeout=180)
    assert f"what is called so there is another volume (UUID {another.uuid}, not" in err
    there.volumes.delete(another.uuid)
    there.volumes.create("lvs0/more", 8 * MIB, thin=True, uuid=here.volumes.lvol("lvs0/more").uuid)
    there.define(NAME)
    _, err = moving(here, there).communicate(timeout=180)
    assert f"domain {NAME} is another one here" in err
    there.virsh("undefine", NAME)
    assert running(here)
    assert there.volumes.volumes("lvs0") == [there.volumes.volume("lvs0/more")]
    # ^C while its guest is waited for: it goes on.
    process = moving(here, there)
    until(lambda: is_asked_to_shut_down(here), "the domain to be asked", process=process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=180)
    assert "Error: interrupted: volume lvs0/db counts, as before" in err
    assert running(here)


@pytest.mark.nightly
def test_a_guest_goes_to_another_host_by_one_command(hosts: tuple[Host, Host]) -> None:
    """It writes until it is asked to shut down, which it does by itself then: it has no ACPI."""
    here, there = hosts
    here.define(NAME, devices=DISK)
    here.virsh("start", NAME)
    agent = here.agent(NAME)
    agent.wait_for("[ -b /dev/sda ]")
    names = agent.run(IDENTITY)
    agent.run("head -c 40000000 /dev/urandom | dd of=/dev/sda bs=1M conv=fsync")
    process = moving(here, there)
    until(lambda: notes.HOST in here.volumes.xattrs("lvs0/db"), "a beginning", process=process)
    agent.run("head -c 3000000 /dev/urandom | dd of=/dev/sda bs=1M seek=50 conv=fsync")
    until(lambda: is_asked_to_shut_down(here), "the domain to be asked", process=process)
    agent.run("echo last | dd of=/dev/sda bs=512 seek=40000 conv=fsync,sync")
    held = agent.run("sha256sum /dev/sda")
    agent.run("(sleep 0.2; echo o >/proc/sysrq-trigger) >/dev/null 2>&1 &")
    agent.close()
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    (row,) = json.loads(out)
    pause = row["pause_us"] / 1e6
    print(f"sent {row['sent']} bytes, {row['last']} at last; pause {pause:.2f} s, in which the")
    print("guest has written, read all of its disk and shut down, too")
    check_gone(here, there)
    # Its definition has the other host's paths.
    agent = Agent(Path(here.scratch / f"{NAME}-agent"), qemu=there.libvirtd.qemu_pid(NAME))
    agent.wait_ready()
    agent.wait_for("[ -b /dev/sda ]")
    assert agent.run(IDENTITY) == names
    assert agent.run("sha256sum /dev/sda") == held
    agent.close()


@pytest.mark.nightly
def test_a_guest_goes_to_another_host_with_its_volume() -> None:
    ids = [f"c0ffee00-0000-4000-8000-00000000001{n}" for n in (1, 2)]
    with Host(keep=True, host_uuid=ids[0]) as here, Host(keep=True, host_uuid=ids[1]) as there:
        made = here.volumes.create("lvs0/db", 64 * MIB, thin=True)
        here.define(NAME, devices=DISK)
        here.virsh("start", NAME)
        agent = here.agent(NAME)
        agent.wait_for("[ -b /dev/sda ]")
        names = agent.run(IDENTITY)
        for step, options in (("one", []), ("two", ["--since", "@one"])):
            agent.run(
                f"(echo {step}; head -c 3000000 /dev/urandom) > /tmp/{step};"
                f" dd if=/tmp/{step} of=/dev/sda bs=1M seek={len(step) * len(options)} conv=fsync"
            )
            run(volume(here, "snapshot", "lvs0/db", step))
            new = [] if options else ["--thin", "--uuid", made.uuid]
            sent = volume(here, "send", f"lvs0/db@{step}", *options)
            run(f"{sent} | {volume(there, 'receive', 'lvs0/db', *new)}")
        agent.run("echo last | dd of=/dev/sda bs=512 seek=40000 conv=fsync,sync")
        agent.close()
        begun = time.monotonic()
        here.virsh("destroy", NAME)
        stopped = time.monotonic()
        run(volume(here, "snapshot", "lvs0/db", "three"))
        sent = volume(here, "send", "lvs0/db@three", "--since", "@two")
        run(f"{sent} | {volume(there, 'receive', 'lvs0/db')}")
        pause = time.monotonic() - begun
        print(f"stopped in {stopped - begun:.2f} s, the rest sent in {pause + begun - stopped:.2f}")
        sums = []
        for host in (here, there):
            path = host.volumes.export(made.uuid, read_only=True)
            command = host.libvirtd.command("sha256sum", str(path))
            sums.append(subprocess.check_output(command, text=True).split()[0])
            host.volumes.end_export(made.uuid)
        assert sums[0] == sums[1]
        xml = here.virsh("dumpxml", "--inactive", NAME).replace(
            str(here.scratch), str(there.scratch)
        )
        path = there.scratch / "sent.xml"
        path.write_text(xml)
        begun = time.monotonic()
        there.virsh("define", str(path))
        there.virsh("start", NAME)
        pause += time.monotonic() - begun
        print(f"defined and started in {time.monotonic() - begun:.2f} s; pause {pause:.2f} s")
        agent = there.agent(NAME)
        agent.wait_for("[ -b /dev/sda ]")
        assert agent.run(IDENTITY) == names
        said = agent.run("dd if=/dev/sda bs=512 skip=40000 count=1 2>/dev/null | head -n 1")
        assert said == "last\n"
        agent.close()
