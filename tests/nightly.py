"""What takes longer than a change should wait: `make nightly`, or some steps of it by name.

Each step is a command. All run, one after the other, whatever became of those before; a table at
the end says what passed, what failed, and what could not run here and why, which is no success.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
MANIFEST = str(ROOT / "pydataplane/Cargo.toml")
LOGS = Path(os.environ.get("VIRTLUN_CACHE", ROOT / ".cache")) / "nightly"
#: Crates with unsafe code of their own that Miri can run: it knows no io_uring and no mmap.
MIRI_CRATES = ("guestmem", "virtqueue")
#: Examples of each property test in a random run.
RANDOM_CASES = 20_000
#: Seconds of each fuzz target.
FUZZ_S = 600


def _nightly() -> str | None:
    asked = subprocess.run(
        ["cargo", "+nightly", "--version"], capture_output=True, text=True, check=False
    )
    return (
        None if asked.returncode == 0 else "no nightly toolchain: rustup toolchain install nightly"
    )


def _miri() -> str | None:
    asked = subprocess.run(
        ["cargo", "+nightly", "miri", "--version"], capture_output=True, text=True, check=False
    )
    return None if asked.returncode == 0 else "no Miri: rustup +nightly component add miri rust-src"


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
        "CARGO_TARGET_DIR": str(LOGS / f"target-{kind}"),
        "PROPTEST_CASES": "200",
    }


@dataclass(frozen=True)
class Step:
    """One command of the night."""

    about: str
    command: list[str]
    #: Why it cannot run here; None: it can.
    missing: Callable[[], str | None] = _always
    environment: dict[str, str] = field(default_factory=dict)


SANITIZED = ("--workspace", "--lib", "--tests", "--target", "x86_64-unknown-linux-gnu")
STEPS = {
    "long": Step(
        "restarts, crashes and migrations by the hundred", _pytest("-m", "nightly", "tests")
    ),
    "random-python": Step(
        "property tests with new examples",
        _pytest("-m", "", "tests/unit"),
        environment={"HYPOTHESIS_PROFILE": "random"},
    ),
    "random-rust": Step(
        "property and power-cut tests with new examples",
        _cargo("test", "--locked", "--workspace"),
        environment={"PROPTEST_CASES": str(RANDOM_CASES)},
    ),
    "fuzz": Step(
        f"every fuzz target for {FUZZ_S} s, with AddressSanitizer",
        [sys.executable, "-m", "tests.fuzz", "--seconds", str(FUZZ_S), "--sanitize"],
        _nightly,
    ),
    "miri": Step(
        "unsafe code under Miri",
        _cargo("miri", "test", *(f"-p{crate}" for crate in MIRI_CRATES), toolchain="+nightly"),
        _miri,
        {"MIRIFLAGS": "-Zmiri-disable-isolation"},
    ),
    "asan": Step(
        "the data plane's tests under AddressSanitizer",
        _cargo("test", *SANITIZED, toolchain="+nightly"),
        _nightly,
        _sanitized("address"),
    ),
    "tsan": Step(
        "the data plane's tests under ThreadSanitizer",
        # Without a standard library that is instrumented, its channels and Arcs are reported.
        _cargo("test", "-Zbuild-std", *SANITIZED, toolchain="+nightly"),
        lambda: _nightly() or _sources(),
        _sanitized("thread"),
    ),
    "e2e": Step(
        "Kubernetes' own suite for storage drivers",
        [sys.executable, "-m", "tests.kubernetes.e2e"],
    ),
    "bench": Step("the whole benchmark", [sys.executable, "-m", "tests.bench"]),
    **{
        f"bench-{name}": Step(about, [sys.executable, "-m", f"tests.bench.{name}"])
        for name, about in {
            "noisy": "a verified reader beside each hostile neighbour",
            "attach": "attach by libvirt",
            "gateway": "the calls of thousands of domains, through the gateway and directly",
            "upgrade": "the pause of an upgrade",
            "pods": "a pod's volume beside a plain loop device",
        }.items()
    },
}


def _sources() -> str | None:
    asked = subprocess.run(
        ["rustc", "+nightly", "--print", "sysroot"], capture_output=True, text=True, check=False
    )
    library = Path(asked.stdout.strip()) / "lib/rustlib/src/rust/library/std"
    return None if library.is_dir() else "no sources of std: rustup +nightly component add rust-src"


def run(name: str, step: Step) -> tuple[str, str, float]:
    """Runs a step; returns its verdict (passed, failed, not run), a remark, and seconds."""
    why = step.missing()
    if why:
        return "not run", why, 0.0
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{name}.log"
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
    took = time.monotonic() - began
    return ("passed" if ended.returncode == 0 else "failed"), str(log), took


def main() -> int:
    """Runs the steps that the command line names, or all; 1 unless all passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.nightly", description=__doc__)
    about = "; ".join(f"{name}: {step.about}" for name, step in STEPS.items())
    parser.add_argument("step", nargs="*", help=about)
    names = parser.parse_args().step or list(STEPS)
    for name in names:
        if name not in STEPS:
            parser.error(f"there is no step {name}; there are {', '.join(STEPS)}")
    console = Console()
    rows = []
    for name in names:
        console.print(f"[bold]==> {name}[/]: {STEPS[name].about}")
        verdict, remark, took = run(name, STEPS[name])
        console.print(f"    {verdict} after {took:.0f} s: {remark}")
        rows.append((name, verdict, f"{took:.0f} s", remark))
    table = Table("step", "verdict", "took", "log, or why not", title="nightly")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    return int(any(row[1] != "passed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
