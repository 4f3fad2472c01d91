"""`python -m tests.bench.ublk`: ways to a block device, in a guest whose kernel has ublk.

Needs fio. What is measured, each on direct I/O, over files of one ext4 on one disk:

- *loop*: a plain loop device over a file: what any driver with loop devices gives a pod;
- *FUSE + loop*: a loop device over an export of the target, whose bdev is a file;
- *ublk*: a device of the target's (`ublk_start_disk`), whose bdev is a file.

Each row is run on all of them in turn, `--rounds` times; the table has the medians, and their
ratio to the plain loop's. Where the machine has no KVM the guest's processors are emulated (TCG):
each instruction costs ten times or more what it does, and the disk none of that. The ratios then
say how much work each way is, and not how fast it would be on a machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.guest.emulator import newer
from tests.guest.image import Kernel, build
from tests.support import program_disk
from tests.support.qemu import Guest, accelerator
from tests.support.target import binary
from tests.support.target_inside import TargetInside

MIB = 1 << 20
FILE_MIB = 64
SUBJECTS = ("loop", "FUSE + loop", "ublk")


@dataclass(frozen=True)
class Row:
    """One pattern of fio's, in blocks of 4 KiB."""

    name: str
    words: tuple[str, ...]


def _rows() -> list[Row]:
    rows = [
        Row(f"{what} 4 KiB, QD {depth}", (f"--rw={rw}", f"--iodepth={depth}", "--ioengine=libaio"))
        for what, rw in (("read", "randread"), ("write", "randwrite"))
        for depth in (1, 32)
    ]
    synced = ("--rw=randwrite", "--fdatasync=1", "--ioengine=psync")
    return rows + [
        Row(f"write 4 KiB + fdatasync, {jobs} at a time", (*synced, f"--numjobs={jobs}"))
        for jobs in (1, 32)
    ]


def prepare(guest: Guest) -> dict[str, str]:
    """Makes the devices; returns them by subject."""
    guest.run(program_disk.MOUNT)
    guest.run(program_disk.LOOP)
    guest.run(
        "for disk in /sys/block/vd*; do "
        '[ "$(cat $disk/serial)" = data ] && mount -t ext4 /dev/${disk##*/} /mnt; '
        "done; grep -q /mnt /proc/mounts"
    )
    names = ("loop", "fuse", "ublk")
    for name in names:
        guest.run(f"dd if=/dev/zero of=/mnt/{name} bs=1M count={FILE_MIB} conv=fsync", 300.0)
    guest.run("mkdir -p /ram; mount -t tmpfs -o size=128m tmpfs /ram")
    target = TargetInside(guest)
    for name in names[1:]:
        target.rpc("bdev_uring_create", filename=f"/mnt/{name}", name=name, block_size=512)
    target.rpc("ublk_create_target")
    number = target.rpc("ublk_start_disk", bdev_name="ublk", ublk_id=0)
    export = target.rpc("virtlun_export_create", bdev_name="fuse")["path"]
    attach = program_disk.run("losetup") + " --find --show --direct-io=on "
    files = {"loop": "/mnt/loop", "FUSE + loop": export}
    devices = {name: guest.run(attach + path).strip() for name, path in files.items()}
    return devices | {"ublk": f"/dev/ublkb{number}"}


def measure(guest: Guest, device: str, row: Row, seconds: float) -> float:
    """Returns I/Os a second."""
    words = (
        *("--name=row", "--output-format=json", "--group_reporting", "--thread", "--bs=4k"),
        *("--direct=1", "--time_based", f"--runtime={round(seconds * 1000)}ms"),
        *(f"--filename={device}", f"--size={FILE_MIB}m", *row.words),
    )
    said = guest.run(f"{program_disk.run('fio')} {' '.join(words)} 2>/dev/null", 60 + 20 * seconds)
    found: dict[str, Any] = json.loads(said[said.index("{") :])["jobs"][0]
    return float(found["read" if "--rw=randread" in row.words else "write"]["iops"])


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="tests.bench.ublk", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of 0.5 s a row")
    parser.add_argument("--rounds", type=int, help="turns of each (5)")
    parser.add_argument("--seconds", type=float, help="of a row (2)")
    given = parser.parse_args()
    rounds = given.rounds or (1 if given.quick else 5)
    seconds = given.seconds or (0.5 if given.quick else 2.0)
    programs = {name: binary(name) for name in ("virtlun-target", "virtlun-holder")}
    for name in ("fio", "losetup"):
        path = shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin")
        if path is None:
            print(f"{name} is not installed: run `make setup`, then try again", file=sys.stderr)
            return 1
        programs[name] = Path(path)
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="vbench-") as scratch:
        folder, image = Path(scratch), build(Kernel.BACKPORTS)
        disk = folder / "data.img"
        with disk.open("wb") as file:
            file.truncate(4 * FILE_MIB * MIB)
        subprocess.run(["mkfs.ext4", "-q", "-F", disk], check=True)
        options = (
            *("-drive", f"file={disk},if=none,id=data,format=raw,cache=none,aio=io_uring"),
            *("-device", "virtio-blk-pci,drive=data,serial=data"),
            *program_disk.options(program_disk.make(folder, programs)),
        )
        accel = accelerator(image, folder)
        with Guest(
            image,
            folder,
            emulator=newer(),
            accel=accel,
            memory_mib=768,
            vcpus=2,
            extra=options,
            deadline_s=300.0,
        ) as guest:
            devices = prepare(guest)
            for turn in range(rounds):
                order = SUBJECTS[turn % 3 :] + SUBJECTS[: turn % 3]
                for row in _rows():
                    for name in order:
                        figure = measure(guest, devices[name], row, seconds)
                        found[row.name, name].append(figure)
    where = "in a guest with KVM" if accel == "kvm" else "in a guest without KVM (TCG: emulated)"
    table = Table("pattern", *SUBJECTS, title=f"median of {rounds} rounds, {where}")
    for row in _rows():
        figures = [statistics.median(found[row.name, name]) for name in SUBJECTS]
        cells = [f"{each:,.0f} IOPS ({each / figures[0]:.2f})" for each in figures]
        table.add_row(row.name, *cells)
    Console(width=160).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
