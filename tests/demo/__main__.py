"""`make demo`: the main job, really, in a VM, told as it goes."""

from __future__ import annotations

import argparse
import shutil
import signal as signals
import sys
import time
import traceback
from pathlib import Path

from rich.console import Console

from tests.demo.shell import shell
from tests.demo.steps import STEPS, Story
from tests.demo.telling import tell
from tests.guest.image import build
from tests.support.host import Host, is_root, scratch_directory
from tests.support.qemu import accelerator

OUT = Console(highlight=False, soft_wrap=True)
INTERRUPTED = 128 + signals.SIGINT


def main(words: list[str] | None = None) -> int:
    """Runs the steps on a private host; returns the exit status."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument(
        "--shell", action="store_true", help="leave the guest running, with a console in it"
    )
    arguments = parser.parse_args(words)
    if not is_root():
        OUT.print("the demo runs a private libvirtd: run it as root", style="red")
        return 1
    if arguments.shell and not sys.stdin.isatty():
        OUT.print("SHELL_IN=1 gives you the guest's console: run it on a terminal", style="red")
        return 1
    for number in (signals.SIGTERM, signals.SIGHUP):
        signals.signal(number, lambda which, _: sys.exit(128 + which))
    begun = time.monotonic()
    scratch = scratch_directory()
    try:
        _tell(scratch, with_shell=arguments.shell)
    except (KeyboardInterrupt, SystemExit) as end:  # ^C, or one of the signals above
        shutil.rmtree(scratch, ignore_errors=True)
        OUT.print("\n[yellow]interrupted[/]; everything is removed")
        return int(str(end.code)) if isinstance(end, SystemExit) else INTERRUPTED
    except Exception as error:
        _failed(scratch, error)
        return 1
    OUT.print(f"[bold green]done in {time.monotonic() - begun:.0f} s[/]; everything is removed")
    return 0


def _tell(scratch: Path, *, with_shell: bool) -> None:
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


def _failed(scratch: Path, error: Exception) -> None:
    """Says what went wrong and where the logs are, which stay."""
    (scratch / "traceback.txt").write_text("".join(traceback.format_exception(error)))
    OUT.print("the demo failed:", style="bold red")
    OUT.print(str(error) or type(error).__name__, markup=False)
    OUT.print("its processes are ended, its logs are kept:", style="red")
    for path in sorted([*scratch.rglob("*.log"), scratch / "traceback.txt"]):
        OUT.print(f"    {path}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
