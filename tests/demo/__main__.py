"""`make demo`: the main job, really, in a VM, told as it goes."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from rich.console import Console

from tests.demo.steps import GUEST, STEPS, Story
from tests.guest.image import build
from tests.support.host import Host, is_root
from tests.support.qemu import accelerator

OUT = Console(highlight=False, soft_wrap=True)


def main() -> int:
    """Runs the steps on a private host; returns the exit status."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument(
        "--shell", action="store_true", help="leave the guest running, with a console in it"
    )
    arguments = parser.parse_args()
    if not is_root():
        OUT.print("the demo runs a private libvirtd: run it as root", style="red")
        return 1
    begun = time.monotonic()
    with OUT.status("building the guest image"):
        image = build()
    with OUT.status("starting a private libvirtd, the target and the gateway"):
        host = Host(keep=True)
    with host:
        with OUT.status("trying KVM"):
            accel = accelerator(image, host.scratch)
        kind = "KVM" if accel == "kvm" else "software (KVM does not work here)"
        OUT.print(f"[bold]virtlun demo[/] in {host.scratch}; the guest runs with {kind}\n")
        story = Story(host, accel=accel)
        for number, step in enumerate(STEPS, 1):
            OUT.print(f"[bold cyan]{number:2}. {step.__doc__}[/]")
            try:
                with OUT.status("..."):
                    shown = step(story)
            except Exception:
                OUT.print(f"[red]this step failed; the logs are in {host.scratch}[/]")
                raise
            for line in shown.splitlines():
                OUT.print(f"    {line}", markup=False)
            OUT.print()
        if arguments.shell:
            _shell(host)
    OUT.print(f"[bold green]done in {time.monotonic() - begun:.0f} s[/]; everything is removed")
    return 0


def _shell(host: Host) -> None:
    """Lets the person play: a console in the guest, virsh in another terminal."""
    OUT.print("The guest goes on running. In another terminal, try for example:")
    for words in (
        f"virsh -c '{host.uri}' list",
        f".venv/bin/virtlun --socket {host.paths.rpc_socket} volume create lvs0/more 100M",
        f"virsh -c '{host.uri}' attach-disk {GUEST} /dev/virtlun/lvs0/more sdc",
        f".venv/bin/virtlun --socket {host.paths.rpc_socket} top",
    ):
        OUT.print(f"    {words}", markup=False)
    OUT.print("This is the guest's console; leave it, and end the demo, with ^]\n")
    subprocess.run(["virsh", "-q", "-c", host.uri, "console", GUEST], check=False)


if __name__ == "__main__":
    sys.exit(main())
