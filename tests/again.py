"""`python -m tests.again OPTIONS`: pytest with these options, and once more what failed, alone.

`make test` runs several files at a time on a machine that others may use as well. A test that
fails there and passes alone is told with the rest of the output and in a list at the end, so that
its cause is looked for; it does not fail the run. What fails alone does, and so does a run with
more failures than a machine in use explains, one that ended early, and one that fails for no test
of its own. The night runs each test once.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

#: More files than that with a failed test are not looked at again.
MOST_FILES = 3
#: More tests.
MOST_TESTS = 10
#: Where pytest keeps the names of what failed, below the folder it runs in.
FAILED = Path(".pytest_cache/v/cache/lastfailed")


def failed_tests(kept: Path) -> list[str]:
    """Returns the names of the tests that failed in the last run, from pytest's own file."""
    return sorted(json.loads(kept.read_text())) if kept.exists() else []


def is_worth_it(code: int, failed: list[str]) -> bool:
    """Whether a run that ended with this code and these failed tests has its failures run again."""
    files = {name.split("::", 1)[0] for name in failed}
    few = 0 < len(failed) <= MOST_TESTS and len(files) <= MOST_FILES
    return code == pytest.ExitCode.TESTS_FAILED and few


def main(options: list[str]) -> int:
    """Runs pytest, and what failed again; returns pytest's exit code of the last of both."""
    run = [sys.executable, "-m", "pytest", "-m", ""]
    # What a run before has left there may have no test any more.
    FAILED.unlink(missing_ok=True)
    code = subprocess.run([*run, *options], check=False).returncode
    failed = failed_tests(FAILED)
    if not is_worth_it(code, failed):
        return code
    print(f"\n==> once more, alone: {', '.join(failed)}", flush=True)
    code = subprocess.run([*run, *failed], check=False).returncode
    if code == pytest.ExitCode.OK:
        print("\nThese failed beside others, as told above, and passed alone:")
        for name in failed:
            print(f"  {name}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
