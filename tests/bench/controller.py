"""`python -m tests.bench.controller`: what a controller costs the memory of a VM without our disks.

A guest of 1 GiB that is booted and does nothing: resident memory of its QEMU, before something
reads all of its memory (`virsh dump --live --memory-only`) and after, with an empty controller and
without one, as `controllers` in virtlun.toml has it. Memory that is shared, as vhost-user wants it,
gets a page also for a read.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.support.host import Host, is_root

MEMORY_MIB = 1024
WAYS = {"with a controller": "all", "without": "needed"}
"""And what `controllers` says then."""


def main() -> int:
    """Measures and prints a table in MiB; returns the exit status."""
    out = Console(highlight=False)
    if not is_root():
        out.print("this runs a private libvirtd: run it as root")
        return 1
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in (f"QEMU OF {MEMORY_MIB} MiB", "booted, MiB", "after a dump, MiB"):
        table.add_column(title, justify="left" if title.startswith("QEMU") else "right")
    with Host() as host:
        text = host.config.read_text()
        for what, controllers in WAYS.items():
            host.stop_gateway()
            setting = f'[gateway]\ncontrollers = "{controllers}"\n'
            host.config.write_text(text.replace("[gateway]\n", setting))
            host.start_gateway()
            before, after = resident_mib(host, f"bench-{controllers}")
            table.add_row(what, f"{before:.0f}", f"{after:.0f}")
    out.print(table)
    return 0


def resident_mib(host: Host, name: str) -> tuple[float, float]:
    """Returns the resident memory of a guest's QEMU, MiB: booted, and after a dump of it."""
    host.define(name, memory_mib=MEMORY_MIB)
    host.virsh("start", name)
    host.agent(name).close()
    pid = host.libvirtd.qemu_pid(name)
    assert pid is not None
    found = _resident_mib(pid)
    dump = host.scratch / "dump"
    host.virsh("dump", name, str(dump), "--live", "--memory-only", deadline_s=600.0)
    dump.unlink()
    result = found, _resident_mib(pid)
    host.virsh("destroy", name)
    host.virsh("undefine", name)
    return result


def _resident_mib(pid: int) -> float:
    (line,) = (
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmRSS:")
    )
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    sys.exit(main())
