"""What takes longer than a change should wait: `make nightly`, or some steps of it by name.

Each step is a command. All run, one after the other, whatever became of those before; a table at
the end says what passed, what failed, and what could not run here and why, which is no success.

What each came to is kept in .cache/nightly, with its log. So a night that was ended goes on where
it was: a step that passed at this commit, in a checkout without changes, is not run again, unless
`--again` is given. `--table` prints the table of what is known of this commit, and runs nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.support.cache import CACHE, LOCAL, ROOT

MANIFEST = str(ROOT / "pydataplane/Cargo.toml")
#: Logs and results.
RESULTS = LOCAL / "nightly"
#: Crates with unsafe code of their own that Miri can run: it knows no io_uring and no mmap.
MIRI_CRATES = ("guestmem", "virtqueue")
#: Examples of each property test in a random run.
RANDOM_CASES = 20_000
#: Seconds of each fuzz target.
FUZZ_S = 600
MINUTE_S = 60


def _answers(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def _nightly() -> str | None:
    if _answers("cargo", "+nightly", "--version"):
        return None
    return "no nightly toolchain: rustup toolchain install nightly"


def _miri() -> str | None:
    if _answers("cargo", "+nightly", "miri", "--version"):
        return None
    return "no Miri: rustup +nightly component add miri rust-src"


def _sources() -> str | None:
    if why := _nightly():
        return why
    asked = subprocess.run(
        ["rustc", "+nightly", "--print", "sysroot"], capture_output=True, text=True, check=False
    )
    library = Path(asked.stdout.strip()) / "lib/rustlib/src/rust/library/std"
    return None if library.is_dir() else "no sources of std: rustup +nightly component add rust-src"


def _always() -> str | None:
    return None


def _cargo(*words: str, toolchain: str = "") -> list[str]:
    chosen = [toolchain] if toolchain else []
    return ["cargo", *chosen, *words, "--manifest-path", MANIFEST]


def _pytest(*words: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", *words]


def _sanitized(kind: str) -> dict[str, str]:
    return {
        "RUSTFLAGS": f"-Zsanitizer={kind}",
        "RUSTDOCFLAGS": f"-Zsanitizer={kind}",
        "CARGO_TARGET_DIR": str(RESULTS / f"target-{kind}"),
        # What cargo makes on the way is shared by checkouts; it knows by itself what is whose.
        "CARGO_BUILD_BUILD_DIR": str(CACHE / f"cargo-{kind}"),
        "CARGO_INCREMENTAL": "0",
        "PROPTEST_CASES": "200",
    }


@dataclass(frozen=True)
class Step:
    """One command of the night."""

    about: str
    #: About how long it takes on an idle machine with two processors, where nothing is built.
    minutes: int
    command: list[str]
    #: Why it cannot run here; None: it can.
    missing: Callable[[], str | None] = _always
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What became of a step."""

    step: str
    #: passed, failed or not run
    verdict: str
    took_s: float
    #: The log, or why it did not run.
    remark: str
    #: The commit that was tested; with `-dirty` where the checkout differed from it.
    commit: str
    #: When it ended, in seconds since 1970.
    at: float


SANITIZED = ("--locked", "--workspace", "--lib", "--tests", "--target", "x86_64-unknown-linux-gnu")
FUZZ_TARGETS = 11
STEPS = {
    "long": Step(
        "restarts, crashes and migrations by the hundred",
        240,
        _pytest("-m", "nightly", "tests"),
    ),
    "random-python": Step(
        "property tests with new examples",
        10,
        _pytest("-m", "", "tests/unit"),
        environment={"HYPOTHESIS_PROFILE": "random"},
    ),
    "random-rust": Step(
        "property and power-cut tests with new examples",
        60,
        _cargo("test", "--locked", "--workspace"),
        environment={"PROPTEST_CASES": str(RANDOM_CASES)},
    ),
    "fuzz": Step(
        f"every fuzz target for {FUZZ_S} s, as many at a time as there are processors, and one"
        " more, with AddressSanitizer",
        FUZZ_TARGETS * FUZZ_S // (2 + 1) // MINUTE_S + 10,
        [sys.executable, "-m", "tests.fuzz", "--seconds", str(FUZZ_S), "--sanitize"],
        _nightly,
    ),
    "miri": Step(
        "unsafe code under Miri",
        60,
        _cargo("miri", "test", *(f"-p{crate}" for crate in MIRI_CRATES), toolchain="+nightly"),
        _miri,
        {"MIRIFLAGS": "-Zmiri-disable-isolation"},
    ),
    "asan": Step(
        "the data plane's tests under AddressSanitizer",
        20,
        _cargo("test", *SANITIZED, toolchain="+nightly"),
        _nightly,
        _sanitized("address"),
    ),
    "tsan": Step(
        "the data plane's tests under ThreadSanitizer",
        40,
        # Without a standard library that is instrumented, its channels and Arcs are reported.
        _cargo("test", "-Zbuild-std", *SANITIZED, toolchain="+nightly"),
        _sources,
        _sanitized("thread"),
    ),
    "e2e": Step(
        "Kubernetes' own suite for storage drivers",
        45,
        [sys.executable, "-m", "tests.kubernetes.e2e"],
    ),
    "bench": Step("the whole benchmark", 60, [sys.executable, "-m", "tests.bench"]),
    **{
        f"bench-{name}": Step(about, minutes, [sys.executable, "-m", f"tests.bench.{name}"])
        for name, (about, minutes) in {
            "noisy": ("a verified reader beside each hostile neighbour", 15),
            "attach": ("attach by libvirt", 5),
            "gateway": ("the calls of thousands of domains, by the gateway and directly", 45),
            "upgrade": ("the pause of an upgrade", 10),
            "pods": ("a pod's volume beside a plain loop device", 10),
        }.items()
    },
}


def commit() -> str:
    """Returns the name of what is checked out, with `-dirty` where a file of it was changed."""
    words = [
        "git",
        "-C",
        str(ROOT),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=12",
        "--exclude=*",
    ]
    asked = subprocess.run(words, capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown-dirty"


def known(results: Path, at: str) -> dict[str, Outcome]:
    """Returns the last outcomes, by step, at a commit; none where its checkout was changed."""
    found = {}
    for path in sorted(results.glob("*.json")):
        try:
            outcome = Outcome(**json.loads(path.read_text()))
        except (ValueError, TypeError):  # of another version, or cut off
            continue
        if outcome.commit == at and outcome.step in STEPS and not at.endswith("-dirty"):
            found[outcome.step] = outcome
    return found


def keep(results: Path, outcome: Outcome) -> None:
    """Writes down what became of a step."""
    results.mkdir(parents=True, exist_ok=True)
    partial = results / f"{outcome.step}.partial"
    partial.write_text(json.dumps(asdict(outcome), indent=1))
    partial.rename(results / f"{outcome.step}.json")


def run(name: str, step: Step, at: str, results: Path = RESULTS) -> Outcome:
    """Runs a step and returns what became of it; its output is in `results`/NAME.log."""
    why = step.missing()
    if why:
        return Outcome(name, "not run", 0.0, why, at, time.time())
    results.mkdir(parents=True, exist_ok=True)
    log = results / f"{name}.log"
    began = time.monotonic()
    with log.open("wb") as output:
        ended = subprocess.run(
            step.command,
            cwd=ROOT,
            env=os.environ | step.environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    took_s = time.monotonic() - began
    # What was changed meanwhile was perhaps not what was tested.
    tested = at if commit() == at else f"{at}-dirty"
    verdict = "passed" if ended.returncode == 0 else "failed"
    return Outcome(name, verdict, took_s, str(log), tested, time.time())


def _table(rows: Iterable[tuple[Outcome, bool]]) -> Table:
    table = Table("step", "verdict", "took", "log, or why not", title="nightly")
    for one, earlier in rows:
        when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(one.at))
        verdict = f"{one.verdict} earlier at {one.commit}, {when}" if earlier else one.verdict
        table.add_row(one.step, verdict, f"{one.took_s:.0f} s", one.remark)
    return table


def main() -> int:
    """Runs the steps that the command line names, or all; 1 unless all passed."""
    about = "; ".join(f"{name}: {one.about} ({one.minutes} min)" for name, one in STEPS.items())
    parser = argparse.ArgumentParser(prog="python -m tests.nightly", description=__doc__)
    parser.add_argument("step", nargs="*", help=about)
    parser.add_argument("--again", action="store_true", help="also what passed at this commit")
    parser.add_argument("--table", action="store_true", help="run nothing")
    asked = parser.parse_args()
    names = asked.step or list(STEPS)
    for name in names:
        if name not in STEPS:
            parser.error(f"there is no step {name}; there are {', '.join(STEPS)}")
    console = Console()
    at = commit()
    earlier = known(RESULTS, at)
    rows: list[tuple[Outcome, bool]] = []
    for name in names:
        before = earlier.get(name)
        if before and (asked.table or (before.verdict == "passed" and not asked.again)):
            rows.append((before, True))
        elif asked.table:
            nothing = Outcome(name, "not run", 0.0, "not yet at this commit", at, time.time())
            rows.append((nothing, False))
        else:
            step = STEPS[name]
            console.print(f"[bold]==> {name}[/]: {step.about}; about {step.minutes} min")
            outcome = run(name, step, at)
            keep(RESULTS, outcome)
            console.print(f"    {outcome.verdict} after {outcome.took_s:.0f} s: {outcome.remark}")
            rows.append((outcome, False))
    console.print(_table(rows))
    RESULTS.mkdir(parents=True, exist_ok=True)
    with (RESULTS / "table.txt").open("w") as file:
        Console(file=file, width=140).print(_table(rows))
    return int(any(one.verdict != "passed" for one, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
