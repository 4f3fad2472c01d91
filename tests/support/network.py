"""A network namespace for one host, in which libvirt may make networks of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

from tests.support.host import Host

COMMAND_DEADLINE_S = 60
DEFAULT = "<network><name>default</name><bridge name='virbr0'/></network>"
"""The network that clients choose where their user names none: a bridge, without libvirt's server
of addresses."""
ADDRESS = "10.95.1.1/24"
"""The host's own. Programs that look names up as AI_ADDRCONFIG has it, SPICE among them, listen
nowhere while a host has none but the loopback's."""


@contextlib.contextmanager
def network(name: str = "") -> Iterator[str]:
    """Makes a network namespace for the duration of a block; gives its name. Needs root.

    Nothing is reached from there by a network; files and sockets in them are.
    """
    name = name or f"vln{os.getpid()}"
    ip("netns", "add", name)
    try:
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "link", "add", "own", "type", "bridge")
        ip("-n", name, "addr", "add", ADDRESS, "dev", "own")
        yield name
    finally:
        ip("netns", "delete", name)


def start_default(host: Host) -> None:
    """Starts libvirt's network `default` on a host that is in a `network`."""
    path = host.scratch / "default.xml"
    path.write_text(DEFAULT)
    host.virsh("net-define", str(path))
    host.virsh("net-start", "default")


def ip(*words: str) -> None:
    """Runs iproute2's `ip`; raises subprocess.CalledProcessError where it refuses."""
    subprocess.run(["ip", *words], check=True, timeout=COMMAND_DEADLINE_S)
