"""Runs steps: those that measure nothing side by side, those that measure alone, after the others.

Each is a session of its own, which the kernel's automatic groups (sched(7)) give the same share of
the processors. Guests and servers are sessions, too; so the step that computes does not starve
them, nor they it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from tests.nightly.results import Outcome, commit, key
from tests.nightly.steps import MINUTE_S, RESULTS, Lane, Step
from tests.support.cache import ROOT

#: What a shell starts in the background ignores SIGINT, and so does all that it starts.
INTERRUPTIBLE = ("env", "--default-signal=INT")
#: Steps of a lane at a time.
AT_A_TIME = {Lane.GUESTS: 2, Lane.COMPUTING: 1}
#: A step that takes so many times as long as it says is ended: it hangs.
LATE = 3
#: Seconds that a step has to end in order.
ENDING_S = 120


class Night:
    """Steps that run now."""

    def __init__(self, results: Path = RESULTS) -> None:
        """`results` is the folder for logs, one for each step."""
        self._results = results
        self._running: set[subprocess.Popen[bytes]] = set()
        self._mutex = threading.Lock()
        self._stopped = False

    def run(self, name: str, step: Step) -> Outcome:
        """Runs a step and returns what became of it; its output is in NAME.log."""
        tested, at = key(step), commit()
        if why := step.missing():
            return Outcome(name, "not run", 0.0, why, tested, at, time.time())
        self._results.mkdir(parents=True, exist_ok=True)
        log = self._results / f"{name}.log"
        began = time.monotonic()
        remark, passed = str(log), False
        with log.open("wb") as output, self._started(step, output) as process:
            try:
                passed = process.wait(LATE * step.minutes * MINUTE_S) == 0
            except subprocess.TimeoutExpired:
                remark = f"no end within {LATE * step.minutes} min; {log}"
        # What was changed meanwhile was perhaps not what was tested.
        tested = tested if key(step) == tested else ""
        verdict = "passed" if passed else "failed"
        return Outcome(name, verdict, time.monotonic() - began, remark, tested, at, time.time())

    @contextlib.contextmanager
    def _started(self, step: Step, output: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
        """Starts a step's command; none of its processes is left afterwards."""
        with self._mutex:
            if self._stopped:
                raise KeyboardInterrupt
            process = subprocess.Popen(
                [*INTERRUPTIBLE, *step.command],
                cwd=ROOT,
                env=os.environ | step.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._running.add(process)
        try:
            yield process
        finally:
            with self._mutex:
                self._running.remove(process)
            _end(process)

    def stop(self) -> None:
        """Ends what runs, as Ctrl-C does, and lets nothing more begin."""
        with self._mutex:
            self._stopped = True
            running = [*self._running]
            for process in running:
                _signal(process, signal.SIGINT)
        for process in running:
            _await(process)

    def all(self, steps: dict[str, Step], done: Callable[[Outcome], None]) -> None:
        """Runs steps, those of a lane in their order, and says of each what became of it.

        `done` is called in threads of this, one at a time, and not for a step that was stopped.
        """
        telling = threading.Lock()

        def one(name: str) -> None:
            outcome = self.run(name, steps[name])
            with telling:
                if not self._stopped:
                    done(outcome)

        def of(lane: Lane) -> list[str]:
            return [name for name, step in steps.items() if step.lane is lane]

        with contextlib.ExitStack() as lanes:
            begun = []
            for lane, count in AT_A_TIME.items():
                pool = lanes.enter_context(ThreadPoolExecutor(count))
                begun += [pool.submit(one, name) for name in of(lane)]
            try:
                for each in begun:
                    each.result()
            except BaseException:
                self.stop()
                raise
        for name in of(Lane.MEASURING):
            one(name)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a step's processes, in order if they do so soon."""
    if process.poll() is None:
        _signal(process, signal.SIGINT)
    _await(process)


def _await(process: subprocess.Popen[bytes]) -> None:
    """Waits for the end of a step that was told to end, and kills what is left of it then."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(ENDING_S)
    _signal(process, signal.SIGKILL)
    process.wait()
