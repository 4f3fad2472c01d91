"""Programs of backups where systemd runs the host: units of their own, as QEMU's user.

What starts them is as confined as the gateway's unit says, and could neither write where a client
wants its backup nor listen on TCP.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.support.examples import used
from tests.support.scratch import short_directory
from tests.support.systemd import INSTALLED, Machine
from tests.support.target import ROOT
from tests.support.wait import until

pytestmark = pytest.mark.root

UNIT = ROOT / "examples/systemd/virtlun-gateway.service"
CONFINED = ("Protect", "Private", "Restrict", "NoNew", "SystemCall", "ReadWrite")
SCRIPT = """\
import asyncio, json, os
from pathlib import Path
from plugin.gateway.backup.daemon import PROGRAM, QMP, StorageDaemon
from plugin.gateway.backup import launch

MADE = "/srv/backup/$${HOME}made"  # $$: systemd-run makes it one $

async def main():
    how = launch.Launch.of(launch.unit_of("test"))
    try:
        Path("/srv/own").write_text("")
    except OSError as error:
        confined = error.strerror
    daemon = await StorageDaemon.start(how.command([PROGRAM, *QMP], "writer"))
    daemon.expect("make")
    await daemon.call(
        "blockdev-create", job_id="make",
        options={"driver": "file", "filename": MADE, "size": 1 << 20})
    made = await daemon.conclusion("make")
    await daemon.call(
        "nbd-server-start", addr={"type": "inet", "data": {"host": "127.0.0.1", "port": "10809"}})
    shown = os.popen("systemctl show -p User,MainPID virtlun-backup-test-writer").read()
    LEAVE
    await launch.remove(how, [MADE])
    await daemon.close()
    print(json.dumps([confined, made.error, shown.split()]))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """A machine with a folder for backups, which only QEMU's user may write to."""
    with short_directory("vs-", "/var/tmp") as scratch, Machine(scratch) as machine:
        # Masked as all of the distribution's: systemd-run asks systemd by it.
        machine.run(
            "rm", "-f", "/etc/systemd/system/dbus.socket", "/etc/systemd/system/dbus.service"
        )
        machine.run("systemctl", "daemon-reload")
        machine.run("systemctl", "start", "dbus.service")
        machine.run("install", "-d", "-o", "libvirt-qemu", "-m", "700", "/srv/backup")
        yield machine


def confined(machine: Machine, script: str, how: str = "--pipe") -> str:
    """Runs a Python script under the gateway's confinement; returns what it printed to a pipe."""
    lines = used(UNIT).read_text().splitlines()
    settings = [f"--property={line}" for line in lines if line.startswith(CONFINED)]
    assert len(settings) > 5
    words = ("systemd-run", "--quiet", "--collect", how, *settings, "--")
    said = machine.run(*words, INSTALLED / "bin/python3", "-c", script, check=False)
    assert said.returncode == 0, said.stdout + said.stderr + machine.said()
    return said.stdout


def active(machine: Machine) -> bool:
    shown = machine.show("virtlun-backup-test-writer", "ActiveState")
    return shown == {"ActiveState": "active"}


def test_a_backup_is_written_by_a_unit_of_its_own(machine: Machine) -> None:
    why, error, shown = json.loads(confined(machine, SCRIPT.replace("LEAVE", "")))
    assert why == "Read-only file system"
    assert error is None
    user = machine.run("id", "-u", "libvirt-qemu").stdout.strip()
    assert f"User={user}" in shown
    assert machine.run("ls", "/srv/backup").stdout == ""
    until(lambda: not active(machine), machine.said)


def test_what_a_gateway_left_is_ended_by_the_next(machine: Machine) -> None:
    # What is left would keep a pipe open.
    confined(machine, SCRIPT.replace("LEAVE", "os._exit(0)"), "--wait")
    assert active(machine)
    assert machine.run("ls", "/srv/backup").stdout == "${HOME}made\n"
    end = SCRIPT.split("async def main", maxsplit=1)[0] + (
        "how = launch.Launch.of(launch.unit_of('test'))\n"
        "asyncio.run(launch.stop(how, 'writer'))\n"
        "asyncio.run(launch.remove(how, [MADE]))\n"
    )
    confined(machine, end)
    assert not active(machine)
    assert machine.run("ls", "/srv/backup").stdout == ""
