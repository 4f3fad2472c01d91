"""`systemctl reload`, as far as it is ours: what the units call is run as systemd runs it.

systemd itself does the same in `test_systemd`. What it does with what it is told stands in
sd_notify(3).
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from configparser import RawConfigParser
from pathlib import Path
from typing import Any

import pytest

from tests.support.initiator import connected
from tests.support.night import by_day
from tests.support.target import ROOT, Target, binary
from tests.target.conftest import MakeTarget

UNITS = sorted((ROOT / "examples/systemd").glob("virtlun-target*.service"))
INSTALLED = "/opt/virtlun/bin"
INSTANCE = "tenant-1"
"""What systemd puts for %i in a template."""
DEADLINE_S = 60.0


def service(unit: Path) -> dict[str, str]:
    """Returns the last value of each setting of the service."""
    parser = RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(unit)
    return dict(parser["Service"])


@pytest.fixture
def programs(scratch: Path) -> Path:
    """A folder with `virtlun` and the target that was built, as they are installed."""
    folder = scratch / "bin"
    folder.mkdir()
    (folder / "python3").symlink_to(sys.executable)
    (folder / "virtlun-target").symlink_to(binary())
    script = folder / "virtlun"
    script.write_text(
        f"#!{folder}/python3\nimport sys\n\nfrom plugin.cli import main\n\nsys.exit(main())\n"
    )
    script.chmod(0o755)
    return folder


@pytest.fixture
def manager(scratch: Path, monkeypatch: Any) -> Iterator[socket.socket]:
    """The service manager's socket, which programs find in their environment."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(scratch / "notify"))
        manager.settimeout(DEADLINE_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(scratch / "notify"))
        yield manager


def reload(unit: Path, target: Target, programs: Path) -> tuple[int, str]:
    """Runs what the unit calls for a reload, with our folders for the installed ones.

    A template's `%i` is `INSTANCE`. Its target is found by that name, the other unit's is the one
    without. Returns its status, and what it and the new target said: both have the service's
    journal.
    """
    command = service(unit)["ExecReload"].replace(INSTALLED, str(programs))
    words = shlex.split(command.replace("%i", INSTANCE))
    nameless, named = "target", f"targets.{INSTANCE}"
    sockets = dict.fromkeys((nameless, named), Path("/nonexistent/rpc.sock"))
    sockets[named if unit.stem.endswith("@") else nameless] = target.rpc_socket
    configuration = programs.parent / "virtlun.toml"
    configuration.write_text(
        "".join(
            f'[{table}]\nrpc_socket = "{socket}"\nvhost_dir = "{target.vhost_dir}"\n'
            for table, socket in sockets.items()
        )
    )
    paths = [str(ROOT), sysconfig.get_path("purelib")]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("VIRTLUN_")},
        "VIRTLUN_CONFIG": str(configuration),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    journal = programs.parent / "journal"
    with journal.open("wb") as log:
        done = subprocess.run(
            words, env=environment, stdout=log, stderr=log, timeout=DEADLINE_S, check=False
        )
    return done.returncode, journal.read_text()


@by_day("virtlun-target@.service")
@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_the_main_process_is_the_new_one_and_the_guest_goes_on(
    make_target: MakeTarget, unit: Path, programs: Path, manager: socket.socket
) -> None:
    settings = service(unit)
    # The new program is no child of the main process, and tells the manager all the same.
    assert (settings["Type"], settings["NotifyAccess"]) == ("notify", "all")
    target = make_target().start()
    assert manager.recv(100) == b"READY=1"
    target.make_lvstore()
    target.rpc("bdev_lvol_create", lvol_name="v0", size_in_mib=1, lvs_name="lvs0")
    target.attach("vm-1", "lvs0/v0")
    with connected(target, "vm-1") as guest:
        guest.write(0, b"x" * 512)
        old = target.process
        assert old is not None
        status, said = reload(unit, target, programs)
        assert status == 0, said
        pid = target.rpc("virtlun_get_status")["pid"]
        assert pid != old.pid
        assert manager.recv(100) == f"MAINPID={pid}\nREADY=1".encode()
        assert old.wait(DEADLINE_S) == 0
        assert guest.read(0, 1) == b"x" * 512
    target.process = None
    target.rpc("spdk_kill_instance", sig_name="SIGTERM")
    assert manager.recv(100) == b"STOPPING=1"


def test_a_program_that_does_not_come_up_fails_the_reload_and_changes_nothing(
    make_target: MakeTarget, programs: Path, manager: socket.socket
) -> None:
    target = make_target().start()
    assert manager.recv(100) == b"READY=1"
    (programs / "virtlun-target").unlink()
    (programs / "virtlun-target").symlink_to("/bin/false")
    status, said = reload(UNITS[0], target, programs)
    assert status != 0
    assert "the old one serves on" in said
    assert target.rpc("virtlun_get_status")["pid"] == target.pid
    manager.setblocking(False)
    with pytest.raises(BlockingIOError):
        manager.recv(100)
