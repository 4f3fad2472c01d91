"""Runs the fuzz targets: libFuzzer on each for a while, from the checked-in corpora.

    python -m tests.fuzz                     # each for 20 s
    python -m tests.fuzz --beside            # each for 20 s, beside other work; `make test`: 10 s
    python -m tests.fuzz --seconds 600       # each for 10 min, as `make nightly` does
    python -m tests.fuzz ring --seconds 60   # some of them

They are built with the stable toolchain: coverage is a pass of LLVM that any rustc has. With
`--sanitize` and a nightly toolchain AddressSanitizer watches them, too. A finding is kept as a
file, and the command that repeats it is printed. Inputs that reached something new are kept in
the cache, where the next run goes on from them; programs and logs are this checkout's.

`make test` has them `--beside` pytest, which waits for guests and servers much of its time. They
have a low priority then, so one goes on after its time until it has had a processor for
BESIDE_LEAST_S, too. On a busy machine that takes as long as pytest does; no clock can tell such a
target from one that hangs, so one that waits is ended only BESIDE_GRACE_S later. They are built as
Rust's tests are, from the same libraries of others: to build them is most of the work then.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table

from tests.support.cache import CACHE, LOCAL, ROOT

HERE = Path(__file__).parent
WORKSPACE = ROOT / "pydataplane"
#: Inputs that reached something new, and those that were findings, of every checkout.
KEPT = CACHE / "fuzz"
#: Programs and logs.
MADE = LOCAL / "fuzz"
#: Seconds beyond its time after which a target that does not end is killed.
GRACE_S = 60
#: The same of one beside other work, for which it waits.
BESIDE_GRACE_S = 3600
#: Its priority: a tenth of what others have. With the lowest it had none for 20 minutes.
BESIDE_NICE = 10
#: Seconds of a processor that one beside other work has in any case.
BESIDE_LEAST_S = 5
#: Seconds between two looks at what one has had of a processor.
LOOK_S = 0.5
#: What libFuzzer's line says when the corpus was run.
CORPUS_RUN = b"\tINITED"
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
#: Seconds that one input may take.
INPUT_TIMEOUT_S = 10
#: Of a low priority it may have no processor for long.
BESIDE_TIMEOUT_S = 600
#: Megabytes that a target may take.
MEMORY_MIB = 2048
COVERAGE = (
    "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4"
    " -Cllvm-args=-sanitizer-coverage-inline-8bit-counters"
    " -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares"
)
#: Has cargo compile only crates of ours so.
WRAPPER = HERE / "rustc-with-coverage"


@dataclass(frozen=True)
class Outcome:
    """What came of one target."""

    name: str
    runs: int
    covered: int
    processor_s: float
    """What it had of processors, s."""
    failure: str | None


def targets() -> list[str]:
    """Returns the names of all targets."""
    manifest = tomllib.loads((HERE / "Cargo.toml").read_text())
    return [entry["name"] for entry in manifest["bin"]]


def build(names: list[str], *, sanitize: bool, beside: bool = False) -> Path:
    """Builds targets, for `beside` other work as tests are built, and returns their folder.

    Raises:
        subprocess.CalledProcessError: cargo failed; its output was shown.
    """
    command = ["cargo", *(["+nightly"] if sanitize else []), "build", "--locked"]
    command += ["--manifest-path", str(WORKSPACE / "Cargo.toml"), "-p", "virtlun-fuzz"]
    command += [part for name in names for part in ("--bin", name)]
    if beside:
        output = WORKSPACE / "target/debug"
        environment = {"RUSTC_WORKSPACE_WRAPPER": str(WRAPPER), "VIRTLUN_COVERAGE": COVERAGE}
    else:
        # With an explicit triple, build scripts and macros are not instrumented.
        triple = f"{os.uname().machine}-unknown-linux-gnu"
        target = MADE / ("target-asan" if sanitize else "target")
        output = target / triple / "fuzz"
        command += ["--profile", "fuzz", "--target", triple]
        flags = COVERAGE + (" -Zsanitizer=address" if sanitize else "")
        environment = {"RUSTFLAGS": flags, "CARGO_TARGET_DIR": str(target)}
    subprocess.run(command, env=os.environ | environment, check=True)
    return output


def run(program: Path, seconds: int, seed: int, *, beside: bool = False) -> Outcome:
    """Runs one target for `seconds`, and returns what came of it.

    `beside` other work it has a low priority, and BESIDE_LEAST_S of a processor in any case.
    """
    name = program.name
    found, kept = KEPT / "findings" / name, KEPT / "corpus" / name
    for folder in (found, kept, MADE):
        folder.mkdir(parents=True, exist_ok=True)
    given = HERE / "corpus" / name
    command = [
        # it must not outlive who counts its seconds
        *(["setpriv", "--pdeathsig", "KILL", "nice", "-n", str(BESIDE_NICE)] if beside else []),
        str(program),
        *([] if beside else [f"-max_total_time={seconds}"]),
        f"-timeout={BESIDE_TIMEOUT_S if beside else INPUT_TIMEOUT_S}",
        f"-rss_limit_mb={MEMORY_MIB}",
        f"-artifact_prefix={found}/",
        "-print_final_stats=1",
        f"-seed={seed}",
        str(kept),
        *([str(given)] if given.is_dir() else []),
    ]
    log = MADE / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        failed, processor_s = _watch(process, log, seconds, beside=beside)
    text = log.read_text(errors="replace")
    runs = re.search(r"stat::number_of_executed_units:\s+(\d+)", text)
    covered = re.findall(r"\bcov: (\d+)", text)
    # One that never ran has found nothing, and shows nothing.
    failed = failed or not runs or int(runs[1]) == 0
    failure = _failure(program, text) if failed else None
    return Outcome(
        name,
        int(runs[1]) if runs else 0,
        int(covered[-1]) if covered else 0,
        processor_s,
        failure,
    )


def _watch(
    process: subprocess.Popen[bytes], log: Path, seconds: int, *, beside: bool
) -> tuple[bool, float]:
    """Waits for the end of a target; returns whether it failed, and its processor time.

    One `beside` other work is told to end, by the signal for that, when it had its seconds, and
    enough of a processor. Both count from where `log` says that the corpus was run: before, it
    finds nothing new, and does not end either.
    """
    deadline = time.monotonic() + seconds + (BESIDE_GRACE_S if beside else GRACE_S)
    told, late, had = False, False, 0.0
    begun: tuple[float, float] | None = None
    while process.poll() is None:
        had, now = processor_s(process.pid) or had, time.monotonic()
        if beside and begun is None and CORPUS_RUN in log.read_bytes():
            begun = now, had
        if begun is not None and not told:
            since, before = begun
            if now - since >= seconds and had - before >= min(seconds, BESIDE_LEAST_S):
                process.send_signal(signal.SIGUSR1)
                told, deadline = True, now + GRACE_S + (BESIDE_TIMEOUT_S if beside else 0)
        if time.monotonic() > deadline:
            process.kill()
            late = True
        time.sleep(LOOK_S)
    return late or process.returncode != 0, had


def processor_s(pid: int) -> float:
    """Returns what a process has had of processors, s; 0 where there is none of this number."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS_A_SECOND


def _failure(program: Path, log: str) -> str:
    artifact = re.search(r"Test unit written to (\S+)", log)
    last = "\n".join(log.splitlines()[-40:])
    repeat = f"repeat it with: {program} {artifact[1]}\n" if artifact else ""
    return f"{repeat}{last}"


def main() -> int:
    """Runs what the command line names, prints a table; 1 if anything was found."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=(__doc__ or "").split("\n")[0]
    )
    known = targets()
    parser.add_argument("target", nargs="*", help=f"one of {', '.join(known)} (default: all)")
    parser.add_argument("--seconds", type=int, default=20, help="of each target (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="of libFuzzer (default: a random one)")
    parser.add_argument(
        "--beside",
        action="store_true",
        help="at a low priority, and longer where there is little of a processor left",
    )
    parser.add_argument("--build", action="store_true", help="only build them")
    parser.add_argument(
        "--sanitize", action="store_true", help="with AddressSanitizer (nightly Rust)"
    )
    arguments = parser.parse_args()
    names = arguments.target or known
    unknown = sorted(set(names) - set(known))
    if unknown:
        parser.error(f"there is no target {unknown[0]}; there are {', '.join(known)}")
    if not shutil.which("cargo"):
        parser.error("cargo is not installed: see https://rustup.rs")
    seed = arguments.seed or int.from_bytes(os.urandom(4), "little")
    console = Console()
    programs = build(names, sanitize=arguments.sanitize, beside=arguments.beside)
    if arguments.build:
        return 0
    # Those that talk to a thread of their process wait for it half of the time.
    parallel = (os.cpu_count() or 1) + 1
    outcomes: list[Outcome] = []
    with (
        Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress,
        ThreadPoolExecutor(parallel) as pool,
    ):
        task = progress.add_task("fuzzing", total=len(names))
        runs = [
            pool.submit(run, programs / name, arguments.seconds, seed, beside=arguments.beside)
            for name in names
        ]
        for ended in runs:
            outcomes.append(ended.result())
            progress.advance(task)
    table = Table(
        *("target", "inputs", "branches", "processor", ""),
        title=f"{arguments.seconds} s each, seed {seed}",
    )
    for outcome in outcomes:
        verdict = "[red]FOUND" if outcome.failure else "ok"
        numbers = (f"{outcome.runs:,}", f"{outcome.covered:,}", f"{outcome.processor_s:.0f} s")
        table.add_row(outcome.name, *numbers, verdict)
    console.print(table)
    for outcome in outcomes:
        if outcome.failure:
            console.rule(outcome.name)
            console.print(outcome.failure, markup=False, highlight=False)
    return int(any(outcome.failure for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
