"""How a demo is run as root: what ends it leaves nothing behind, what fails leaves its logs."""

from __future__ import annotations

import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from tests.support.host import is_root

OUT = Console(highlight=False, soft_wrap=True)


def run(told: Callable[[list[Path]], None]) -> int:
    """Runs `told`, which adds each folder that it makes to the list; returns the exit status."""
    if not is_root():
        OUT.print("the demo runs private libvirtds: run it as root", style="red")
        return 1
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda which, _: sys.exit(128 + which))
    begun = time.monotonic()
    folders: list[Path] = []
    try:
        told(folders)
    except (KeyboardInterrupt, SystemExit) as end:  # ^C, or one of the signals above
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        OUT.print("\n[yellow]interrupted[/]; everything is removed")
        return int(str(end.code)) if isinstance(end, SystemExit) else 128 + signal.SIGINT
    except Exception as error:
        _failed(folders, error)
        return 1
    OUT.print(f"[bold green]done in {time.monotonic() - begun:.0f} s[/]; everything is removed")
    return 0


def _failed(folders: list[Path], error: Exception) -> None:
    """Says what went wrong and where the logs are, which stay."""
    for folder in folders[:1]:
        (folder / "traceback.txt").write_text("".join(traceback.format_exception(error)))
    OUT.print("the demo failed:", style="bold red")
    OUT.print(str(error) or type(error).__name__, markup=False)
    OUT.print("its processes are ended, its logs are kept:", style="red")
    for path in sorted(path for folder in folders for path in folder.rglob("*")):
        if path.suffix in (".log", ".err") or path.name == "traceback.txt":
            OUT.print(f"    {path}", markup=False)
