"""Cockpit, the installed one, without a login: its web server with a bridge as this user.

Our page is one of its packages as it would be after an installation, by a link.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.support.examples import EXAMPLES
from tests.support.host import Host
from tests.support.polkit import BUS
from tests.support.ports import free_port
from tests.support.wait import serves

SERVER = "/usr/lib/cockpit/cockpit-ws"
PAGE = EXAMPLES / "cockpit"
ROOT = EXAMPLES.parent
#: Of services: their Python is Debian's, which has the modules of its packages.
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

#: What pip installs as `virtlun`, of this checkout.
VIRTLUN = """\
#!/bin/sh
PYTHONPATH={root} exec {python} -c 'from plugin.cli import main; main(prog_name="virtlun")' "$@"
"""
BRIDGE = """\
#!/bin/sh
exec {words} cockpit-bridge "$@"
"""


def _program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def cockpit(
    folder: Path,
    environment: Mapping[str, str],
    *,
    before: Sequence[str] = (),
    bridge: Sequence[str] = (),
) -> Iterator[str]:
    """Runs it for the duration of a block; gives its URL, whose pages are /cockpit/@localhost/NAME.

    Our page's commands have `environment`. `before` are the words of a program that runs all of it,
    `bridge` those of one that runs the bridge, such as another user's.
    """
    programs, packages = folder / "bin", folder / "share/cockpit"
    programs.mkdir(parents=True)
    packages.mkdir(parents=True)
    (packages / "virtlun").symlink_to(PAGE)
    _program(programs / "virtlun", VIRTLUN.format(root=ROOT, python=sys.executable))
    local = _program(programs / "bridge", BRIDGE.format(words=" ".join(bridge)))
    port = free_port()
    log = folder / "cockpit.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(*before, SERVER, "--no-tls", "--address=127.0.0.1", f"--port={port}"),
                f"--local-session={local}",
            ],
            env={
                **os.environ,
                "HOME": str(folder),
                "PATH": f"{programs}:{PATH}",
                "XDG_DATA_DIRS": f"{folder / 'share'}:/usr/share",
                "XDG_CONFIG_DIRS": str(folder),
                "XDG_RUNTIME_DIR": str(folder),
                **environment,
            },
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        serves(process, lambda: _listens(port), "Cockpit's web server", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def machines(host: Host, folder: Path) -> Iterator[str]:
    """Runs Cockpit with its page of VMs on a host's gateway, for the duration of a block.

    That page reaches libvirt by libvirt-dbus, which finds the gateway at libvirt's own place.
    """
    sockets = (host.gateway_socket, "libvirt-sock"), (host.gateway_socket_ro, "libvirt-sock-ro")
    for socket_, name in sockets:
        (host.libvirtd.scratch / "run-libvirt" / name).symlink_to(socket_)
    bus, config = folder / "bus", folder / "bus.conf"
    config.write_text(BUS.format(path=bus))
    environment = {"DBUS_SYSTEM_BUS_ADDRESS": f"unix:path={bus}"}
    commands = (
        ["dbus-daemon", "--nofork", "--nopidfile", f"--config-file={config}"],
        host.libvirtd.command("/usr/sbin/libvirt-dbus", "--system"),
    )
    log = folder / "bus.log"
    with contextlib.ExitStack() as ending:
        for command in commands:
            process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log.open("ab"),
                stderr=subprocess.STDOUT,
            )
            ending.callback(process.wait)
            ending.callback(process.terminate)
            serves(process, bus.exists, "the bus", log)
        environment |= {"VIRTLUN_CONFIG": str(host.config), "LIBVIRT_DEFAULT_URI": host.uri}
        yield ending.enter_context(cockpit(folder, environment, before=host.libvirtd.command()))
