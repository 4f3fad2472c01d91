"""`python -m tests.bench.pods`: a pod's block device beside a plain loop device on the same disk.

Needs root, /dev/fuse, loop devices and fio. What is measured, each on direct I/O:

- *file*: an ext4 of this host itself, in files that are written already;
- *loop*: a loop device with direct I/O over a file of that file system: what any driver with loop
  devices gives a pod;
- *pod*: the same over an export of the target, whose lvstore is a file of that file system; one
  for each program given with `--target`, to compare builds.

Each row is run on all of them in turn, `--rounds` times; the table has the medians, and their ratio
to the plain loop's. Expect a factor of two of noise on a shared machine; many short turns, of which
those count that were least disturbed, have less: `--rounds 20 --seconds 0.3 --quantile 0.9`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from csi.hostdevice import loopctl
from tests.support.target import Target, binary

MIB = 1 << 20
DEVICE_BYTES = 512 * MIB
FILE_BYTES = 32 * MIB
COMMAND_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Row:
    """One pattern of fio's."""

    name: str
    words: tuple[str, ...]
    mounted: bool = False
    """On files of an ext4 on the device, rather than on the device."""

    @property
    def unit(self) -> str:
        """What its figure is."""
        return "MiB/s" if "1 MiB" in self.name else "IOPS"


def _row(name: str, rw: str, size: str, depth: int) -> Row:
    return Row(name, (f"--rw={rw}", f"--bs={size}", f"--iodepth={depth}"))


def _synced(jobs: int) -> Row:
    words = ("--rw=randwrite", "--bs=4k", "--fdatasync=1", f"--numjobs={jobs}", "--direct=0")
    return Row(f"ext4: write 4 KiB + fdatasync, {jobs} jobs", (*words, "--ioengine=psync"), True)


ROWS = (
    _row("read 1 MiB, QD 4", "read", "1M", 4),
    _row("write 1 MiB, QD 4", "write", "1M", 4),
    _row("random read 4 KiB, QD 1", "randread", "4k", 1),
    _row("random read 4 KiB, QD 16", "randread", "4k", 16),
    _row("random write 4 KiB, QD 1", "randwrite", "4k", 1),
    _row("random write 4 KiB, QD 16", "randwrite", "4k", 16),
    Row(
        "random write 4 KiB + fdatasync",
        ("--rw=randwrite", "--bs=4k", "--fdatasync=1", "--ioengine=psync"),
    ),
    _synced(1),
    _synced(8),
)


@dataclass(frozen=True)
class Subject:
    """Something that is written to."""

    name: str
    device: Path | None
    """A block device that is written already; without one, files are used for all rows."""
    folder: Path
    """In an ext4, on a device of the same kind."""


def run(*words: str | Path) -> str:
    """Runs a program that must succeed, and returns its output."""
    command = [str(word) for word in words]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
    return done.stdout


def measure(subject: Subject, row: Row, seconds: float) -> float:
    """Returns MiB or I/Os a second."""
    if row.mounted or subject.device is None:
        size = FILE_BYTES if row.mounted else DEVICE_BYTES
        where = [f"--directory={subject.folder}", f"--size={size}"]
        where.append(f"--filename_format={'m' if row.mounted else 'd'}.$jobnum")
    else:
        where = [f"--filename={subject.device}", f"--size={DEVICE_BYTES}"]
    words = (
        "--ioengine=libaio",
        "--direct=1",
        "--time_based",
        f"--runtime={round(seconds * 1000)}ms",
    )
    common = ("--name=row", "--output-format=json", "--group_reporting", "--thread", *words)
    found = json.loads(run("fio", *common, *where, *row.words))["jobs"][0]
    total = found["read" if "read" in row.words[0] else "write"]
    return float(total["bw_bytes"] / MIB if row.unit == "MiB/s" else total["iops"])


def quantile(figures: list[float], which: float) -> float:
    """Returns a quantile, 0 to 1, of at least one figure; 0.5 is the median."""
    if len(figures) == 1:
        return figures[0]
    cuts = statistics.quantiles(figures, n=100, method="inclusive")
    return ([min(figures), *cuts, max(figures)])[round(min(max(which, 0.0), 1.0) * 100)]


@contextlib.contextmanager
def loop_device(file: Path, name: str) -> Iterator[Path]:
    """A loop device over a file, written once from end to end."""
    device = loopctl.attach(file, name, read_only=False, block_size=512)
    try:
        count = DEVICE_BYTES // MIB
        run("dd", "if=/dev/zero", f"of={device}", "bs=1M", "oflag=direct", f"count={count}")
        yield device
    finally:
        found = loopctl.status(device)
        if found is not None:
            loopctl.detach(found)


@contextlib.contextmanager
def mounted(device: Path, folder: Path) -> Iterator[Path]:
    """An ext4 on a device."""
    run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", device)
    folder.mkdir()
    run("mount", device, folder)
    try:
        yield folder
    finally:
        run("umount", folder)


@contextlib.contextmanager
def looped(name: str, files: list[Path], folder: Path) -> Iterator[Subject]:
    """A subject of two loop devices over two files."""
    with contextlib.ExitStack() as stack:
        pid = os.getpid()
        raw, other = (
            stack.enter_context(loop_device(file, f"bench:{pid}:{name}:{number}"[:63]))
            for number, file in enumerate(files)
        )
        yield Subject(name, raw, stack.enter_context(mounted(other, folder / f"mnt-{name}")))


@contextlib.contextmanager
def plain(folder: Path) -> Iterator[Subject]:
    """Loop devices over files."""
    files = [folder / "raw.img", folder / "ext4.img"]
    for file in files:
        with file.open("xb") as made:
            os.posix_fallocate(made.fileno(), 0, DEVICE_BYTES)
    with looped("loop", files, folder) as subject:
        yield subject


@contextlib.contextmanager
def pod(program: Path, folder: Path, *, thin: bool) -> Iterator[Subject]:
    """Loop devices over two volumes of a target of its own."""
    os.environ["VIRTLUN_TARGET"] = str(program)
    directory = Path(tempfile.mkdtemp(dir=folder, prefix="t"))
    target = Target(directory).start()
    try:
        target.make_lvstore(size=4 * DEVICE_BYTES)
        mib = DEVICE_BYTES // MIB
        make = {"lvs_name": "lvs0", "size_in_mib": mib, "thin_provision": thin}
        volumes = [target.rpc("bdev_lvol_create", lvol_name=n, **make) for n in ("raw", "ext4")]
        exports = [target.rpc("virtlun_export_create", bdev_name=volume) for volume in volumes]
        name = f"{program.name}{' thin' if thin else ''}"
        with looped(name, [Path(export["path"]) for export in exports], folder) as subject:
            yield subject
        for volume in volumes:
            target.rpc("virtlun_export_delete", bdev_name=volume)
    finally:
        target.stop()


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="tests.bench.pods", description=__doc__)
    parser.add_argument("--target", type=Path, action="append", help="a program to measure")
    parser.add_argument("--thin", action="store_true", help="thin volumes instead of thick ones")
    parser.add_argument("--quick", action="store_true", help="one round of 0.3 s a row")
    parser.add_argument("--rounds", type=int, help="turns of each (3)")
    parser.add_argument("--seconds", type=float, help="of a row (2)")
    parser.add_argument("--quantile", type=float, default=0.5, help="of the rounds' figures")
    parser.add_argument("--row", default="", help="only rows that have this text in their name")
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="on the disk to use")
    given = parser.parse_args()
    rounds = given.rounds or (1 if given.quick else 3)
    seconds = given.seconds or (0.3 if given.quick else 2.0)
    rows = [row for row in ROWS if given.row in row.name]
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=given.folder)))
        subjects = [Subject("file", None, folder), stack.enter_context(plain(folder))]
        programs = given.target or [binary()]
        subjects += [stack.enter_context(pod(each, folder, thin=given.thin)) for each in programs]
        for turn in range(rounds):
            for row in rows:
                for subject in subjects[turn % 2 :] + subjects[: turn % 2]:
                    figure = measure(subject, row, seconds)
                    found[row.name, subject.name].append(figure)
        title = f"quantile {given.quantile} of {rounds} rounds"
        table = Table("pattern", *(subject.name for subject in subjects), title=title)
        for row in rows:
            figures = [quantile(found[row.name, each.name], given.quantile) for each in subjects]
            cells = [f"{each:,.0f} {row.unit} ({each / figures[1]:.2f})" for each in figures]
            table.add_row(row.name, *cells)
        Console(width=200).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
