"""`python -m tests.bench.cold`: first writes, by the size of an lvstore's clusters.

Writes of 4 KiB at QD32, each to another cluster of a thin volume, or of a clone of a snapshot that
has all of them: none of the volume's own is there before. In RAM that was written before, so that
nobody waits for the host's memory, and in a sparse file. The RAM is known to read as zeros; of a
thin volume also in RAM that somebody has filled, where each cluster is zeroed first, as in the
file. Nobody flushes meanwhile, as a guest does that has nothing to make durable yet; beside it the
writes that a program does a second which flushes after each, to which a store is bound that flushes
for each allocation, and first writes to the sparse file itself, without an lvstore: more there
cannot be. The share is of the same writes once more, which find their clusters. With `--spdk`,
SPDK's in RAM instead, and how many of them failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.bench.subjects import check_spdk, start_spdk
from tests.support.target import Target, binary

MIB = 1 << 20
RAM = 3 << 30
FILE = 64 << 30
CLUSTERS = (16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
#: Clusters that are written to at most, of the file few: its room is really taken.
MOST = {"RAM": 16_000, "file": 4_000}


def run(target: Target, bdev: str, *words: str, flags: Sequence[str] = ()) -> float:
    """Returns the I/Os a second of a guest with this LUN.

    They are writes of zeros, from the first to the last, unless `words` say otherwise.
    """
    target.rpc("vhost_create_scsi_controller", ctrlr="vm")
    target.add_lun("vm", bdev)
    command = [str(binary("virtlun-bench")), "run", str(target.vhost_dir / "vm"), "--json", *flags]
    options = {"--rw": "write", "--time": "60", "--warmup": "0"}
    options |= dict(zip(words[::2], words[1::2], strict=True))
    given = itertools.chain.from_iterable(options.items())
    done = subprocess.run([*command, *given], capture_output=True, check=True)
    # The target may not have noticed yet that the guest is gone.
    target.rpc("vhost_delete_controller", ctrlr="vm", force=True)
    rate: float = json.loads(done.stdout)["iops"]
    return rate


@contextmanager
def below(kind: str, *, filled: bool = False) -> Iterator[Target]:
    """A target with the bdev `base` in RAM, which may be `filled` with data, or in a file."""
    directory = Path(tempfile.mkdtemp(prefix="vs-", dir="/var/tmp"))
    target = Target(directory).start()
    try:
        if kind == "RAM":
            target.rpc("bdev_malloc_create", name="base", num_blocks=RAM // 512, block_size=512)
            if filled:
                words = ("--bs", "1m", "--rw", "read", "--time", "0.1")
                run(target, "base", *words, flags=["--verify"])
            else:
                run(target, "base", "--bs", "1m", "--stride", "1m")
        else:
            file = str(target.make_file("base.img", FILE))
            target.rpc("bdev_uring_create", filename=file, name="base", block_size=512)
        yield target
    finally:
        target.stop()
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def lvstore(
    kind: str, cluster: int, *, checksums: bool = False, filled: bool = False
) -> Iterator[Target]:
    """A target with the lvstore `lvs` on such a bdev, or on one with checksums on that."""
    with below(kind, filled=filled) as target:
        bdev = "base"
        if checksums:
            bdev = target.rpc("virtlun_integrity_create", base_bdev_name="base", name="sums")
        target.rpc(
            "bdev_lvol_create_lvstore",
            **{"bdev_name": bdev, "lvs_name": "lvs", "cluster_sz": cluster},
            clear_method="none",
        )
        yield target


def first_writes(
    kind: str, cluster: int, clone: bool, *, filled: bool = False
) -> tuple[float, float]:
    """Returns the first writes a second, and as many once more."""
    clusters = min(MOST[kind], (RAM if kind == "RAM" else FILE) * 45 // 100 // cluster)
    stride = ("--stride", str(cluster))
    with lvstore(kind, cluster, filled=filled) as target:
        target.make_thin("volume", clusters * cluster // MIB, "lvs")
        if clone:
            run(target, "lvs/volume", *stride)
            target.rpc("bdev_lvol_snapshot", lvol_name="lvs/volume", snapshot_name="image")
        return run(target, "lvs/volume", *stride), run(target, "lvs/volume", *stride)


def bare() -> float:
    """Returns the first writes a second to the sparse file itself, each to another 64 KiB."""
    stride = 64 << 10
    with below("file") as target:
        size = str(MOST["file"] * stride)
        return run(target, "base", "--stride", str(stride), "--size", size)


def flushes() -> float:
    """Returns the writes of 4 KiB to a file a second, with a flush after each."""
    with tempfile.NamedTemporaryFile(dir="/var/tmp") as file:
        begin = time.monotonic()
        for n in range(200):
            os.pwrite(file.fileno(), b"x" * 4096, n * MIB)
            os.fdatasync(file.fileno())
        return 200 / (time.monotonic() - begin)


def of_spdk(spdk: Path, cluster: int) -> Iterator[str]:
    """Yields the first writes a second of SPDK's thin volume and of its clone, and what failed."""
    mib = min(MOST["RAM"] * cluster, RAM // 4) // MIB
    directory = Path(tempfile.mkdtemp(prefix="vs-", dir="/var/tmp"))
    process, client = start_spdk(spdk, directory, RAM // MIB, max(os.sched_getaffinity(0)))
    command = [str(binary("virtlun-bench")), "run", str(directory / "vm"), "--json", "--hugepages"]
    command += ["--rw", "write", "--time", "60", "--warmup", "0", "--stride", str(cluster)]

    def writes(target: int, bdev: str) -> str:
        client.call(
            "vhost_scsi_controller_add_target", ctrlr="vm", scsi_target_num=target, bdev_name=bdev
        )
        done = subprocess.run([*command, "--target", str(target)], capture_output=True, check=False)
        told = json.loads(done.stdout)
        return f"{told['iops']:,.0f}" + (f", {told['errors']} failed" if told["errors"] else "")

    try:
        client.call("bdev_malloc_create", name="base", num_blocks=RAM // 512, block_size=512)
        client.call(
            "bdev_lvol_create_lvstore", bdev_name="base", lvs_name="lvs", cluster_sz=cluster
        )
        client.call("vhost_create_scsi_controller", ctrlr="vm")
        for name, thin in (("thin", True), ("image", False)):
            client.call(
                "bdev_lvol_create",
                lvs_name="lvs",
                lvol_name=name,
                thin_provision=thin,
                size_in_mib=mib,
            )
        writes(0, "lvs/image")
        client.call("bdev_lvol_snapshot", lvol_name="lvs/image", snapshot_name="snapshot")
        client.call("bdev_lvol_clone", snapshot_name="lvs/snapshot", clone_name="clone")
        yield writes(1, "lvs/thin")
        yield writes(2, "lvs/clone")
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(directory, ignore_errors=True)


def main() -> int:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.cold", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--spdk", type=Path, metavar="DIRECTORY", help="SPDK, built there, instead")
    arguments = parser.parse_args()
    if arguments.spdk:
        check_spdk(arguments.spdk)
        for cluster in CLUSTERS:
            thin, clone = of_spdk(arguments.spdk, cluster)
            print(f"{cluster >> 10} KiB: thin {thin}; clone {clone}")
        return 0
    base, file = flushes(), bare()
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("CLUSTER")
    for title in ("thin, RAM", "zeroed, RAM", "clone, RAM", "thin, file", "clone, file"):
        table.add_column(title, justify="right")
    for cluster in CLUSTERS:
        rates = [
            first_writes("RAM", cluster, clone=False),
            first_writes("RAM", cluster, clone=False, filled=True),
            first_writes("RAM", cluster, clone=True),
            first_writes("file", cluster, clone=False),
            first_writes("file", cluster, clone=True),
        ]
        told = (f"{first:,.0f} ({first / again:.2f})" for first, again in rates)
        table.add_row(f"{cluster >> 10} KiB", *told)
    console = Console()
    console.print(table)
    console.print("first writes a second (of what the same writes are when they are repeated)")
    console.print(f"first writes a second to the file itself: {file:,.0f}")
    console.print(f"writes to the file a second with a flush after each: {base:,.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
