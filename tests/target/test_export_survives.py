"""What is mounted on an export only sees a pause while its target is killed, restarted or upgraded.

Needs root, /dev/fuse and loop devices; Linux 6.9 for a killed target. `VIRTLUN_SEED` repeats what a
test chose. A test of the night needs fio, which `make nightly` installs, and restarts the target
`VIRTLUN_RESTARTS` times each way.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from pydataplane.errors import RpcError
from tests.support import threads
from tests.support.load import Load
from tests.support.night import at_night, by_day
from tests.support.restarts import RESTARTS, choose_seed
from tests.support.target import Target
from tests.support.wait import until
from tests.target.conftest import MakeTarget
from tests.target.test_upgrade import upgrade_ends

pytestmark = pytest.mark.root
MIB = 1 << 20
COMMAND_TIMEOUT_S = 60.0
KILLS = 10
PROGRAM_MIB = 32
"""What a program writes and reads each time."""


def run(*command: str | Path) -> str:
    """Runs a command that must succeed, and returns its output."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def volume(target: Target, size_in_mib: int = 64, *, thin: bool = False) -> tuple[str, Path]:
    """Makes an exported volume; returns its UUID and the file."""
    if not target.rpc("bdev_lvol_get_lvstores"):
        target.make_lvstore(size=512 * MIB)
    uuid = target.rpc(
        "bdev_lvol_create",
        lvol_name=f"v{len(target.rpc('virtlun_export_list'))}",
        size_in_mib=size_in_mib,
        lvs_name="lvs0",
        thin_provision=thin,
    )
    export = target.rpc("virtlun_export_create", bdev_name=uuid)
    until(lambda: shown(target, "survives")[-1] == "crash", "the holder has it")
    return uuid, Path(export["path"])


@pytest.fixture
def loops(target: Target) -> Iterator[Callable[[Path], str]]:
    """Makes loop devices, which are gone at the end while the target still runs."""
    made: list[str] = []

    def make(path: Path) -> str:
        made.append(run("losetup", "--find", "--show", "--direct-io=on", path).strip())
        return made[-1]

    yield make
    if target.process is None:
        target.start()
    for loop in made:
        subprocess.run(["umount", "-l", loop], check=False, capture_output=True)
        run("losetup", "-d", loop)


def interrupted(target: Target, load: Load, how: Callable[[], object], times: int) -> None:
    """Interrupts the target under load; prints how long the longest I/O of each time took."""
    chance = random.Random(load.seed)
    pauses = []
    for _ in range(times):
        load.progress(chance.randrange(5, 60))
        load.longest_s = 0.0
        how()
        load.progress(20)
        pauses.append(load.longest_s * 1000)
        assert not load.problems, load.problems
    print(f"pause: p50 {statistics.median(pauses):.0f} ms, max {max(pauses):.0f} ms")


def upgrade_fails(target: Target) -> None:
    """Has a new program come up that ends when everything was taken apart for it."""
    upgrade_ends(target, "held: end")


INTERRUPTIONS: dict[str, Callable[[Target], object]] = {
    "kill": Target.crash,
    "restart": Target.restart,
    "upgrade": Target.upgrade,
    "upgrade that fails": upgrade_fails,
}


@by_day("kill-True")
@pytest.mark.parametrize(
    ("how", "thin"),
    [
        ("kill", True),
        at_night("restart", False),
        ("upgrade", True),
        at_night("upgrade that fails", False),
        at_night("kill", False),
        at_night("restart", True),
        at_night("upgrade", False),
        at_night("upgrade that fails", True),
    ],
)
def test_verified_io_on_a_loop_device_sees_a_pause(
    target: Target, loops: Callable[[Path], str], how: str, thin: bool
) -> None:
    uuid, path = volume(target, thin=thin)
    loop = loops(path)
    seed = choose_seed()
    load = Load(Path(loop), 64 * MIB, seed)
    with load.running():
        interrupted(target, load, lambda: INTERRUPTIONS[how](target), KILLS)
    (export,) = target.rpc("virtlun_export_list")
    assert export["opens"] == 1
    assert target.rpc("virtlun_get_status")["restore_problems"] == []
    assert target.fails("virtlun_export_delete", bdev_name=uuid)


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["kill", at_night("upgrade")])
def test_an_ext4_under_load_sees_a_pause(
    target: Target, loops: Callable[[Path], str], how: str
) -> None:
    _, path = volume(target, 256)
    loop = loops(path)
    run("mkfs.ext4", "-q", "-F", loop)
    point = target.directory / "mnt"
    point.mkdir()
    run("mount", loop, point)
    direct = point / "direct"
    with direct.open("xb") as file:
        file.truncate(32 * MIB)
    seed = choose_seed()
    load = Load(direct, 32 * MIB, seed)
    stop = threading.Event()
    files: list[int] = []

    def small_files() -> None:
        """Makes, syncs, renames and deletes files through the page cache."""
        while not stop.is_set():
            number = len(files)
            new = point / f"new{number}"
            with new.open("xb") as file:
                file.write(number.to_bytes(8, "little") * 1000)
                os.fsync(file.fileno())
            new.rename(point / f"file{number}")
            if number % 3 == 2:
                (point / f"file{number - 1}").unlink()
            files.append(number)

    writer = threading.Thread(target=small_files)
    writer.start()
    try:
        with load.running():
            interrupted(target, load, lambda: INTERRUPTIONS[how](target), KILLS)
    finally:
        stop.set()
        writer.join()
    assert f"{loop} {point} ext4 rw" in Path("/proc/mounts").read_text()
    run("umount", point)
    run("e2fsck", "-f", "-n", loop)
    run("mount", loop, point)
    load.check()
    for number in files:
        if number % 3 == 1 and number + 1 in files:
            continue  # deleted
        content = (point / f"file{number}").read_bytes()
        assert content == number.to_bytes(8, "little") * 1000, number
    run("umount", point)


def dd(loop: str, target: Target, chance: random.Random) -> None:
    """Writes the device through the page cache, syncs it, and compares what is stored."""
    written, read = target.directory / "written", target.directory / "read"
    written.write_bytes(chance.randbytes(PROGRAM_MIB * MIB))
    for words in (
        (f"if={written}", f"of={loop}", "conv=fsync,notrunc"),
        (f"if={loop}", f"of={read}", "iflag=direct"),
    ):
        run("dd", *words, "bs=64k", f"count={PROGRAM_MIB * MIB // 65536}", "status=none")
    run("cmp", written, read)


def fio(loop: str, _: Target, chance: random.Random) -> None:
    """Writes the device in random order, many at a time, and verifies every block's checksum."""
    run(
        *("fio", "--thread", "--name=verified", f"--filename={loop}", f"--size={PROGRAM_MIB}m"),
        *("--direct=1", "--ioengine=libaio", "--iodepth=16", "--rw=randwrite", "--bsrange=4k-256k"),
        *("--verify=crc32c", "--verify_fatal=1", "--verify_backlog=64", "--fdatasync=32"),
        "--verify_state_save=0",
        f"--randseed={chance.getrandbits(32)}",
    )


def waits(loop: str, runs: threading.Thread) -> bool:
    """Whether a read or write of the device is in flight, or a flush, which is not counted there.

    Who waits for a flush is in an uninterruptible sleep: a program that `runs` has started.
    """
    if (Path("/sys/block") / Path(loop).name / "inflight").read_text().split() != ["0", "0"]:
        return True
    children = Path(f"/proc/self/task/{runs.native_id}/children").read_text().split()
    states = [path for pid in children for path in Path(f"/proc/{pid}/task").glob("*/status")]
    return any("State:\tD" in path.read_text() for path in states)


Program = Callable[[str, Target, random.Random], None]


class Passes:
    """A program that runs on a volume's loop device again and again; a context manager."""

    def __init__(self, program: Program, target: Target, loops: Callable[[Path], str]) -> None:
        """`chance` has the moments of what is done meanwhile."""
        _, path = volume(target)
        self.loop, self.chance = loops(path), random.Random(choose_seed())
        data = random.Random(self.chance.random())
        self._program, self._ended = partial(program, self.loop, target, data), threading.Event()
        self.name = program.__name__
        self.problem: Exception | None = None
        self.count = 0
        self.thread = threading.Thread(target=self._again)

    def _again(self) -> None:
        try:
            while not self._ended.is_set():
                self._program()
                self.count += 1
        except (AssertionError, subprocess.TimeoutExpired) as error:
            self.problem = error

    def are_well(self) -> None:
        """Raises what was wrong with a pass."""
        if self.problem is not None:
            raise self.problem

    def __enter__(self) -> Passes:
        """Begins."""
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits for the end of the last pass; all were well, and there were some."""
        self._ended.set()
        self.thread.join()
        if kind is None:
            self.are_well()
            print(f"{self.count} passes of {self.name}")
            assert self.count


PROGRAMS = pytest.mark.parametrize(
    ("program", "times"),
    [
        pytest.param(dd, KILLS, id="dd"),
        pytest.param(
            fio, RESTARTS, id="fio", marks=[pytest.mark.nightly, pytest.mark.timeout(3600)]
        ),
    ],
)


@pytest.mark.parametrize("stop", [Target.kill9, at_night(Target.stop)])
@PROGRAMS
def test_a_program_sees_a_pause(
    target: Target,
    loops: Callable[[Path], str],
    program: Program,
    times: int,
    stop: Callable[[Target], object],
) -> None:
    """Each time that the target is away it waits for an I/O."""
    with Passes(program, target, loops) as passes:
        try:
            for _ in range(times):
                time.sleep(passes.chance.uniform(0.0, 0.3))
                stop(target)
                until(
                    lambda: passes.problem or waits(passes.loop, passes.thread),
                    threads.of_all_that_block,
                )
                target.start()
                passes.are_well()
        finally:
            if target.process is None:
                target.start()


@PROGRAMS
def test_a_program_goes_on_beside_upgrades(
    target: Target, loops: Callable[[Path], str], program: Program, times: int
) -> None:
    """Its target is upgraded again and again while it reads and writes."""
    with Passes(program, target, loops) as passes:
        for _ in range(times):
            time.sleep(passes.chance.uniform(0.0, 0.3))
            target.upgrade()
            passes.are_well()


@pytest.mark.nightly
def test_open_files_are_counted_across_crashes(target: Target) -> None:
    uuid, path = volume(target)
    first = os.open(path, os.O_RDWR)
    second = os.open(path, os.O_RDONLY)
    target.crash()
    third = os.open(path, os.O_RDONLY)
    opened: list[int] = []
    target.kill9()
    # Asked while nobody is there, and taken by the next one.
    waits = threading.Thread(target=lambda: opened.append(os.open(path, os.O_RDONLY)))
    waits.start()
    os.close(second)
    target.start()
    waits.join(COMMAND_TIMEOUT_S)
    assert os.pwrite(first, b"x" * 512, 0) == 512
    assert os.pread(opened[0], 3, 0) == b"xxx"
    until(lambda: shown(target, "opens") == [3], lambda: f"3 opens: {shown(target, 'opens')}")
    for each in (first, third, opened[0]):
        refused = target.fails("virtlun_export_delete", bdev_name=uuid)
        assert isinstance(refused, RpcError)
        os.close(each)
    target.rpc("virtlun_export_delete", bdev_name=uuid)
    assert list(target.export_dir.iterdir()) == []


def shown(target: Target, what: str) -> list[object]:
    """Returns a field of every export."""
    return [export[what] for export in target.rpc("virtlun_export_list")]


def holder_pid(target: Target) -> int:
    """Returns the process that holds the target's exports."""
    found = run("pgrep", "-f", f"virtlun-holder .*--socket {target.directory}/holder.sock").split()
    (pid,) = found
    return int(pid)


def test_the_holder_is_restarted_while_the_target_runs(make_target: MakeTarget) -> None:
    """One that runs by itself, as a service: whichever of the two is there has the descriptors."""
    target = make_target()
    target.start()
    uuid, path = volume(target)
    node = os.open(path, os.O_RDWR)
    try:
        os.pwrite(node, b"a" * 4096, 0)
        os.kill(holder_pid(target), signal.SIGKILL)
        until(lambda: shown(target, "survives") == ["nothing"], "the holder's end is seen")
        assert os.pread(node, 1, 0) == b"a"
        with target.holder():
            until(lambda: shown(target, "survives") == ["crash"], "the new holder is seen")
            assert os.pread(node, 1, 0) == b"a"
            target.rpc("virtlun_export_list")
            target.crash()
            assert os.pread(node, 1, 0) == b"a"
            os.close(node)
            target.rpc("virtlun_export_delete", bdev_name=uuid)
            assert target.stop() == 0
    finally:
        if target.process is not None:
            target.stop()


def test_what_is_not_open_ends_with_an_orderly_stop(target: Target) -> None:
    _, path = volume(target)
    assert target.stop() == 0
    assert list(target.export_dir.iterdir()) == []
    target.start()
    assert path.exists()


def test_an_export_that_cannot_be_restored_is_given_up(target: Target) -> None:
    uuid, path = volume(target)
    node = os.open(path, os.O_RDONLY)
    found: list[OSError] = []

    def read() -> None:
        try:
            os.pread(node, 512, 0)
        except OSError as error:
            found.append(error)

    target.kill9()
    reader = threading.Thread(target=read)
    reader.start()
    disk = target.directory / "lvs0.img"
    disk.rename(target.directory / "elsewhere")
    target.start()
    reader.join(0.2)
    assert reader.is_alive()  # the disk may come back
    target.rpc("virtlun_export_delete", bdev_name=uuid)
    reader.join(COMMAND_TIMEOUT_S)
    assert found
    os.close(node)
    assert list(target.export_dir.iterdir()) == []
    (target.directory / "elsewhere").rename(disk)


def test_folders_that_are_named_from_where_the_target_is_started(
    make_target: MakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target()
    monkeypatch.chdir(target.directory)
    paths = {name: getattr(target, name) for name in ("export_dir", "state_dir", "vhost_dir")}
    for name, path in paths.items():
        setattr(target, name, Path(path.name))
    target.start()
    try:
        target.rpc("bdev_malloc_create", name="m", num_blocks=2048, block_size=512)
        path = target.rpc("virtlun_export_create", bdev_name="m")["path"]
        until(lambda: shown(target, "survives") == ["crash"], "the holder has it")
        assert Path(path).stat().st_size == 2048 * 512
        target.rpc("virtlun_export_delete", bdev_name="m")
    finally:
        target.stop()
        target.export_dir = paths["export_dir"]
        target.end_holder()
