"""Runs a command again and again with new seeds.

    python -m tests.nightly.repeat --rounds 20 -- cargo test -p lvol

Each round has its own seed in the environment, which is printed, for the tests that take one;
proptest and Hypothesis choose new examples at each run anyway, and print what failed.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys

#: The variables of tests with a seed.
SEEDS = ("VIRTLUN_SEED", "VIRTLUN_CRASH_SEED")
#: Tests multiply a seed by numbers of 32 bits.
SEED_BITS = 31


def main() -> int:
    """Returns the status of the first round that failed, or 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.nightly.repeat", description=__doc__)
    parser.add_argument("--rounds", type=int, required=True, help="how many times")
    parser.add_argument("command", nargs="+", help="what is run")
    given = parser.parse_args()
    for number in range(1, given.rounds + 1):
        seed = str(secrets.randbits(SEED_BITS))
        said = " ".join(f"{name}={seed}" for name in SEEDS)
        print(f"==> round {number} of {given.rounds}: {said}", flush=True)
        environment = os.environ | dict.fromkeys(SEEDS, seed)
        status = subprocess.run(given.command, env=environment, check=False).returncode
        if status:
            print(f"round {number} failed; repeat it with {said}", flush=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
