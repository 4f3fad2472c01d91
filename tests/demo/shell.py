"""`make demo SHELL_IN=1`: the guest goes on running, for a person to play with."""

from __future__ import annotations

import subprocess
from pathlib import Path

from rich.console import Console

from tests.demo.steps import GUEST

LEAVE = b"\x1d"
"""^], which ends virsh's console."""


def shell(uri: str, rpc_socket: Path, out: Console) -> None:
    """Says what can be tried in another terminal, and gives the guest's console until ^]."""
    out.print("The guest goes on running. In another terminal, as root, try for example:")
    for words in (
        f"virsh -c '{uri}' list",
        f".venv/bin/virtlun --socket {rpc_socket} volume create lvs0/more 100M",
        f"virsh -c '{uri}' attach-disk {GUEST} /dev/virtlun/lvs0/more sdc",
        f".venv/bin/virtlun --socket {rpc_socket} top",
    ):
        out.print(f"    {words}", markup=False)
    out.print("This is the guest's console: press Enter. ^] leaves it and ends the demo.\n")
    done = subprocess.run(["virsh", "-q", "-c", uri, "console", GUEST], check=False)
    if done.returncode != 0:
        out.print("virsh console ended with an error, so the demo ends", style="red")
