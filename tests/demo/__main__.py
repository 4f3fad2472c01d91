"""`make demo`: the main job, really, in a VM, told as it goes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.demo.running import OUT, run
from tests.demo.shell import shell
from tests.demo.steps import STEPS, Story
from tests.demo.telling import tell
from tests.guest.image import build
from tests.support.host import Host, scratch_directory
from tests.support.qemu import accelerator


def main(words: list[str] | None = None) -> int:
    """Runs the steps on a private host; returns the exit status."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument(
        "--shell", action="store_true", help="leave the guest running, with a console in it"
    )
    arguments = parser.parse_args(words)
    if arguments.shell and not sys.stdin.isatty():
        OUT.print("SHELL_IN=1 gives you the guest's console: run it on a terminal", style="red")
        return 1
    return run(lambda folders: _tell(folders, with_shell=arguments.shell))


def _tell(folders: list[Path], *, with_shell: bool) -> None:
    scratch = scratch_directory()
    folders.append(scratch)
    with OUT.status("building the guest image"):
        image = build()
    with OUT.status("starting a private libvirtd, the target and the gateway"):
        host = Host(scratch, keep=True)
    with host:
        with OUT.status("trying KVM"):
            accel = accelerator(image, host.scratch)
        kind = "KVM" if accel == "kvm" else "software (KVM does not work here)"
        OUT.print(f"[bold]virtlun demo[/] in {host.scratch}; the guest runs with {kind}\n")
        story = Story(host, accel=accel)
        tell(OUT, story, STEPS)
        if with_shell:
            shell(host.uri, host.paths.rpc_socket, OUT)


if __name__ == "__main__":
    sys.exit(main())
