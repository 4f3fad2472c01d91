"""`python -m tests.again OPTIONS`: pytest with these options, and once more what failed, alone.

`make test` runs several files at a time on a machine that others may use as well. A few tests that
fail there run once more, alone, and the output tells whether they fail again: that helps to find
their cause. The run fails all the same, but where each failure's own message shows a cause of
`CAUSES`, outside of our code, and the tests pass alone. That chance is for the files of
`NOT_OF_DATA`: data that was lost once was lost. The night runs each test once.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.examples import LEFT
from tests.support.reasons import REASONS


class Cause(NamedTuple):
    """Why a test may fail whatever virtlun does."""

    message: re.Pattern[str]
    """What the exception's message, with its class in front, begins with."""
    reason: str


#: tests/support/starved.py is where that is measured, of emulated guests alone: with KVM no failure
#: has a cause in this table.
STARVED = r"\(the emulated guest ran for \S+ s and waited \d+ s for a processor\)"
CAUSES = (
    Cause(
        re.compile(rf"tests\.support\.agent\.GuestError: the guest did not .* s {STARVED}"),
        "other programs had the processors while an emulated guest was to boot",
    ),
    Cause(
        re.compile(rf"tests\.support\.agent\.GuestError: no answer within \d+ s {STARVED}"),
        "other programs had the processors while an emulated guest was to answer",
    ),
)
#: More files than that with a failed test are not looked at again.
MOST_FILES = 3
#: More tests.
MOST_TESTS = 10
#: Tests with guests that compare nothing of what was written before a target, a host or the power
#: went, and nothing of whose disk it is: only these have that chance.
NOT_OF_DATA = (
    *("tests/guest/test_boot_order.py", "tests/guest/test_conformance.py"),
    *("tests/guest/test_hotplug.py", "tests/guest/test_identity.py", "tests/guest/test_kernels.py"),
    *("tests/guest/test_removable.py", "tests/libvirt/test_allocation.py"),
    *("tests/libvirt/test_block_calls.py", "tests/libvirt/test_guest_info.py"),
    *("tests/libvirt/test_iotune.py", "tests/libvirt/test_modular.py"),
    *("tests/libvirt/test_other_devices.py", "tests/libvirt/test_polkit.py"),
    *("tests/libvirt/test_readme.py", "tests/libvirt/test_sasl.py"),
    *("tests/libvirt/test_statistics.py", "tests/libvirt/test_virsh_commands.py"),
)
#: What pytest's cache has of a run, below the folder it runs in: why tests failed, by their names,
#: and the examples that none used.
CACHE = Path(".pytest_cache/v")
FAILED = CACHE / REASONS
UNUSED = CACHE / LEFT


def is_worth_it(code: int, failed: list[str], unused: list[str]) -> bool:
    """Whether a run with this code, failed tests and unused examples has its failures run again."""
    files = {name.split("::", 1)[0] for name in failed}
    few = 0 < len(failed) <= MOST_TESTS and len(files) <= MOST_FILES
    return code == pytest.ExitCode.TESTS_FAILED and few and not unused


def cause(name: str, messages: list[str]) -> Cause | None:
    """Returns the cause in `CAUSES` of all that a test failed with; None of any other failure."""
    if name.split("::", 1)[0] not in NOT_OF_DATA:
        return None
    known = [next((one for one in CAUSES if one.message.match(text)), None) for text in messages]
    return known[0] if known and None not in known else None


def main(options: list[str]) -> int:
    """Runs pytest, and what failed again; returns pytest's exit code.

    That is the first run's, but the second's where each failure had a known cause.
    """
    run = [sys.executable, "-m", "pytest", "-m", ""]
    # Of a run before: that test, or example, may not be there any more.
    for kept in (FAILED, UNUSED):
        kept.unlink(missing_ok=True)
    code = subprocess.run([*run, "-p", "tests.support.reasons", *options], check=False).returncode
    failed = json.loads(FAILED.read_text()) if FAILED.exists() else {}
    unused = json.loads(UNUSED.read_text()) if UNUSED.exists() else []
    if not is_worth_it(code, list(failed), unused):
        return code
    print(f"\n==> once more, alone: {', '.join(failed)}", flush=True)
    alone = subprocess.run([*run, *failed], check=False).returncode
    causes = {name: cause(name, messages) for name, messages in failed.items()}
    how = "fail alone, too" if alone else "passed alone"
    print(f"\nThese failed beside others, as told above, and {how}:")
    for name, why in causes.items():
        print(f"  {name}: {why.reason if why else 'its cause is not known'}")
    if None not in causes.values():
        return alone
    print("The run fails.")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
