"""`make test-e2e`: runs Kubernetes' storage suite, whole or some runs of it, and counts."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time

from rich.console import Console
from rich.table import Table

from tests.kubernetes.cluster import Cluster
from tests.kubernetes.e2e.program import build
from tests.kubernetes.e2e.runs import RUNS, SuiteCluster
from tests.kubernetes.e2e.verdict import Verdict, VerdictError
from tests.kubernetes.tools import ToolsError
from tests.support.cache import LOCAL

REPORTS = LOCAL / "e2e"
OUT = Console(highlight=False, soft_wrap=True)
WORDS_MAX = 600


def main() -> int:
    """Runs what the command line names, or all; 1 unless all is well."""
    parser = argparse.ArgumentParser(prog="python -m tests.kubernetes.e2e", description=__doc__)
    about = "; ".join(f"{name}: {run.about}" for name, run in RUNS.items())
    parser.add_argument("run", nargs="*", help=about)
    asked = parser.parse_args().run
    for name in asked:
        if name not in RUNS:
            parser.error(f"there is no run {name}; there are {', '.join(RUNS)}")
    if os.geteuid() != 0:
        OUT.print("the suite runs on a private Kubernetes node: run it as root", style="red")
        return 1
    try:
        suite = build()
    except ToolsError as error:
        OUT.print(str(error), style="red", markup=False)
        return 1
    table = Table("run", "passed", "failed", "skipped", "without reason", "took")
    good = True
    with Cluster() as cluster, contextlib.ExitStack() as ending:
        started = SuiteCluster(cluster, suite, REPORTS)
        ending.callback(started.close)
        for name in [name for name in RUNS if not asked or name in asked]:
            OUT.print(f"[bold]==> {name}[/]: {RUNS[name].about}")
            begun = time.monotonic()
            try:
                verdict = started.run(name)
            except VerdictError as error:
                verdict = Verdict(failed=[str(error)])
            _tell(name, verdict)
            counts = (
                *(verdict.passed, len(verdict.failed)),
                *(verdict.skipped.total(), verdict.unlisted.total()),
            )
            took = f"{time.monotonic() - begun:.0f} s"
            table.add_row(name, *(str(count) for count in counts), took)
            good = good and verdict.good
        cluster.keep = not good
    OUT.print(table)
    return int(not good)


def _tell(name: str, verdict: Verdict) -> None:
    for why, count in verdict.skipped.most_common():
        OUT.print(f"    {count:4} skipped: {why}", markup=False)
    for said, count in verdict.unlisted.most_common():
        OUT.print(
            f"    {count:4} skipped, and not in skips.yaml: {said}", style="red", markup=False
        )
    for said in verdict.failed:
        OUT.print(f"    failed: {said[:WORDS_MAX]}", style="red", markup=False)
    if not verdict.good:
        OUT.print(f"    the suite's log and report are in {REPORTS / name}")


if __name__ == "__main__":
    sys.exit(main())
