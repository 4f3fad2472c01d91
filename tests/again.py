"""`python -m tests.again OPTIONS`: pytest with these options, and once more what failed, alone.

`make test` runs several files at a time on a machine that others may use as well. A test that
fails there and passes alone is told with the rest of the output and in a list at the end, so that
its cause is looked for; it does not fail the run. What fails alone does, and so does a run with
more failures than a machine in use explains, one that ended early, and one that fails for more than
its tests (an example that none of them used). A test of what was written is never run again: data
that was lost once was lost. The night runs each test once.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.examples import LEFT

#: More files than that with a failed test are not looked at again.
MOST_FILES = 3
#: More tests.
MOST_TESTS = 10
#: Beginnings of the names of tests that compare what was written with what is there after a target,
#: a driver or the power went, with other moments in each run.
OF_DATA = (
    *("tests/crash/", "tests/guest/test_restart_under_io", "tests/guest/test_upgrade"),
    *("tests/guest/test_blk", "tests/guest/test_export", "tests/guest/test_migration"),
    *("tests/guest/test_owner", "tests/guest/test_reconnect", "tests/guest/test_ublk"),
    *("tests/target/test_blk", "tests/target/test_csi_kills", "tests/target/test_export_survives"),
    *("tests/target/test_flush_error", "tests/target/test_history_kills"),
    *("tests/target/test_inflight", "tests/target/test_integrity"),
    *("tests/target/test_kept_sessions", "tests/target/test_killed_at_steps"),
    *("tests/target/test_lun_copy", "tests/target/test_protection", "tests/target/test_systemd"),
    *("tests/target/test_unknown", "tests/target/test_upgrade"),
)
#: What pytest's cache has of a run, below the folder it runs in: the names of the tests that
#: failed, and of the examples that none used.
CACHE = Path(".pytest_cache/v")
FAILED = CACHE / "cache/lastfailed"
UNUSED = CACHE / LEFT


def names_in(kept: Path) -> list[str]:
    """Returns the names in a file of pytest's cache; none where there is no such file."""
    return sorted(json.loads(kept.read_text())) if kept.exists() else []


def is_worth_it(code: int, failed: list[str], unused: list[str]) -> bool:
    """Whether a run with this code, failed tests and unused examples has its failures run again."""
    files = {name.split("::", 1)[0] for name in failed}
    few = 0 < len(failed) <= MOST_TESTS and len(files) <= MOST_FILES
    of_data = any(name.startswith(OF_DATA) for name in failed)
    return code == pytest.ExitCode.TESTS_FAILED and few and not of_data and not unused


def main(options: list[str]) -> int:
    """Runs pytest, and what failed again; returns pytest's exit code of the last of both."""
    run = [sys.executable, "-m", "pytest", "-m", ""]
    # Of a run before: that test, or example, may not be there any more.
    for kept in (FAILED, UNUSED):
        kept.unlink(missing_ok=True)
    code = subprocess.run([*run, *options], check=False).returncode
    failed = names_in(FAILED)
    if not is_worth_it(code, failed, names_in(UNUSED)):
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
