"""Runs the fuzz targets: libFuzzer on each for a while, from the checked-in corpora.

    python -m tests.fuzz                     # each for 20 s
    python -m tests.fuzz --seconds 600       # each for 10 min, as `make nightly` does
    python -m tests.fuzz ring --seconds 60   # some of them

They are built with the stable toolchain: coverage is a pass of LLVM that any rustc has. With
`--sanitize` and a nightly toolchain AddressSanitizer watches them, too. A finding is kept as a
file, and the command that repeats it is printed. Inputs that reached something new are kept in
the cache, where the next run goes on from them; programs and logs are this checkout's.

By day nothing is fuzzed: `cargo test -p virtlun-fuzz` runs each input once, those that are checked
in, those in the cache, and the findings (`corpora.rs`).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
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
#: Seconds that one input may take.
INPUT_TIMEOUT_S = 10
#: Megabytes that a target may take.
MEMORY_MIB = 2048
COVERAGE = (
    "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4"
    " -Cllvm-args=-sanitizer-coverage-inline-8bit-counters"
    " -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares"
)


@dataclass(frozen=True)
class Outcome:
    """What came of one target."""

    name: str
    runs: int
    covered: int
    failure: str | None


def targets() -> list[str]:
    """Returns the names of all targets."""
    manifest = tomllib.loads((HERE / "Cargo.toml").read_text())
    return [entry["name"] for entry in manifest["bin"]]


def build(names: list[str], *, sanitize: bool) -> Path:
    """Builds targets, and returns their folder.

    Raises:
        subprocess.CalledProcessError: cargo failed; its output was shown.
    """
    # With an explicit triple, build scripts and macros are not instrumented.
    triple = f"{os.uname().machine}-unknown-linux-gnu"
    command = ["cargo", *(["+nightly"] if sanitize else []), "build", "--locked"]
    command += ["--manifest-path", str(WORKSPACE / "Cargo.toml"), "-p", "virtlun-fuzz"]
    command += ["--features", "libfuzzer", "--profile", "fuzz", "--target", triple]
    command += [part for name in names for part in ("--bin", name)]
    target = MADE / ("target-asan" if sanitize else "target")
    flags = COVERAGE + (" -Zsanitizer=address" if sanitize else "")
    environment = {"RUSTFLAGS": flags, "CARGO_TARGET_DIR": str(target)}
    subprocess.run(command, env=os.environ | environment, check=True)
    return target / triple / "fuzz"


def run(program: Path, seconds: int, seed: int) -> Outcome:
    """Runs one target for `seconds`, and returns what came of it."""
    name = program.name
    found, kept = KEPT / "findings" / name, KEPT / "corpus" / name
    for folder in (found, kept, MADE):
        folder.mkdir(parents=True, exist_ok=True)
    given = HERE / "corpus" / name
    command = [
        str(program),
        f"-max_total_time={seconds}",
        f"-timeout={INPUT_TIMEOUT_S}",
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
        try:
            failed = process.wait(seconds + GRACE_S) != 0
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            failed = True
    text = log.read_text(errors="replace")
    runs = re.search(r"stat::number_of_executed_units:\s+(\d+)", text)
    covered = re.findall(r"\bcov: (\d+)", text)
    # One that never ran has found nothing, and shows nothing.
    failed = failed or not runs or int(runs[1]) == 0
    failure = _failure(program, text) if failed else None
    return Outcome(name, int(runs[1]) if runs else 0, int(covered[-1]) if covered else 0, failure)


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
    programs = build(names, sanitize=arguments.sanitize)
    # Those that talk to a thread of their process wait for it half of the time.
    parallel = (os.cpu_count() or 1) + 1
    outcomes: list[Outcome] = []
    with (
        Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress,
        ThreadPoolExecutor(parallel) as pool,
    ):
        task = progress.add_task("fuzzing", total=len(names))
        runs = [pool.submit(run, programs / name, arguments.seconds, seed) for name in names]
        for ended in runs:
            outcomes.append(ended.result())
            progress.advance(task)
    table = Table(
        *("target", "inputs", "branches", ""),
        title=f"{arguments.seconds} s each, seed {seed}",
    )
    for outcome in outcomes:
        verdict = "[red]FOUND" if outcome.failure else "ok"
        table.add_row(outcome.name, f"{outcome.runs:,}", f"{outcome.covered:,}", verdict)
    console.print(table)
    for outcome in outcomes:
        if outcome.failure:
            console.rule(outcome.name)
            console.print(outcome.failure, markup=False, highlight=False)
    return int(any(outcome.failure for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
