"""`make nightly`: a night's steps, all or some by name.

All run, whatever became of the others; a table at the end says what passed, what failed, and what
could not run here and why, which is no success. What each came to is kept in .cache/nightly, with
its log. So a night that was ended goes on where it was: a step that passed is not run again until
what it tests has changed, unless `--again` is given. `--table` prints the table of what is known of
this checkout, and runs nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from tests.nightly.night import Night
from tests.nightly.results import Outcome, all_passed, commit, keep, key, known
from tests.nightly.steps import RESULTS, STEPS


def table_of(outcomes: Iterable[Outcome]) -> Table:
    """Returns a row for each outcome."""
    table = Table("step", "verdict", "took", "at", "log, or why not", title="nightly")
    for one in outcomes:
        when = time.strftime(f"{one.commit}, %Y-%m-%d %H:%M", time.gmtime(one.at)) if one.at else ""
        table.add_row(one.step, one.verdict, f"{one.took_s:.0f} s", when, one.remark)
    return table


def main() -> int:
    """Runs the steps that the command line names, or all; 1 unless all passed."""
    about = "; ".join(f"{name}: {one.about} ({one.minutes} min)" for name, one in STEPS.items())
    parser = argparse.ArgumentParser(prog="python -m tests.nightly", description=__doc__)
    parser.add_argument("step", nargs="*", help=about)
    parser.add_argument("--again", action="store_true", help="also what passed before")
    parser.add_argument("--table", action="store_true", help="run nothing")
    asked = parser.parse_args()
    for name in asked.step:
        if name not in STEPS:
            parser.error(f"there is no step {name}; there are {', '.join(STEPS)}")
    steps = {name: step for name, step in STEPS.items() if not asked.step or name in asked.step}
    console = Console()
    outcomes = known(RESULTS, {name: key(step) for name, step in steps.items()})
    wanted = {
        name: step
        for name, step in steps.items()
        if asked.again or name not in outcomes or outcomes[name].verdict != "passed"
    }

    def done(outcome: Outcome) -> None:
        keep(RESULTS, outcome)
        outcomes[outcome.step] = outcome
        took = f"{outcome.verdict} after {outcome.took_s:.0f} s"
        console.print(f"[bold]==> {outcome.step}[/]: {took}: {outcome.remark}")

    if not asked.table:
        for name, step in wanted.items():
            console.print(f"    {name}: {step.about}; about {step.minutes} min")
        Night().all(wanted, done)
    for name, step in steps.items():
        why = "not yet, or what it tests has changed"
        outcomes.setdefault(name, Outcome(name, "not run", 0.0, why, key(step), commit(), 0.0))
    rows = [outcomes[name] for name in steps]
    console.print(table_of(rows))
    RESULTS.mkdir(parents=True, exist_ok=True)
    with (RESULTS / "table.txt").open("w") as file:
        Console(file=file, width=140).print(table_of(rows))
    return int(not all_passed(rows))


if __name__ == "__main__":
    sys.exit(main())
