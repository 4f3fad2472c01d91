"""virtlun as services of a machine (`tests.support.systemd`): installed as a README says."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydataplane.client import Client
from tests.support.examples import used
from tests.support.scratch import short_directory
from tests.support.systemd import INSTALLED, Machine
from tests.support.target import ROOT
from tests.support.wait import until

README = ROOT / "examples/systemd/README.md"
TARGET = "virtlun-target"
RUN = Path("/run/virtlun")
FETCHED = ("apt install ", "    python3-dev ", "python3 -m venv ", f"{INSTALLED}/bin/pip install ")
"""Lines of the installation that need the network: the machine has what they bring."""


@contextlib.contextmanager
def installed() -> Iterator[Machine]:
    """A machine on which the README's installation was done, for the duration of a block."""
    with short_directory("vs-", "/var/tmp") as scratch, Machine(scratch) as machine:
        lines = script("systemctl enable --now virtlun-target virtlun-gateway").splitlines()
        kept = [line for line in lines if not line.startswith(FETCHED)]
        assert len(lines) - len(kept) == len(FETCHED)
        shell(machine, "\n".join(kept))
        yield machine


def script(having: str, readme: Path = README) -> str:
    """Returns the block of commands in a README that has these words, as it is written."""
    text = used(readme).read_text()
    blocks = re.findall(r"^(?:\d\.)? *```sh\n(.+?)^ *```", text, re.DOTALL | re.MULTILINE)
    (found,) = [str(block) for block in blocks if having in block]
    return found


def shell(machine: Machine, commands: str) -> str:
    """Runs commands as a person would in a checkout; returns what they printed."""
    words = f"cd {INSTALLED}/source\n{commands}"
    done = machine.run("bash", "-euo", "pipefail", "-c", words, check=False)
    assert done.returncode == 0, f"{commands}\n{done.stdout}{done.stderr}{machine.said()}"
    return done.stdout


def main_pid(machine: Machine, unit: str = TARGET) -> int:
    """Returns the main process that systemd knows of a unit, which must be active."""
    shown = machine.show(unit, "ActiveState", "SubState", "MainPID")
    state = (shown["ActiveState"], shown["SubState"])
    assert state == ("active", "running"), machine.journal(unit)
    return int(shown["MainPID"])


def comes_back(machine: Machine, unit: str, old: int) -> int:
    """Waits until a unit runs with a main process that is not `old`, and returns that."""

    def runs() -> bool:
        shown = machine.show(unit, "SubState", "MainPID")
        return shown["SubState"] == "running" and shown["MainPID"] != str(old)

    until(runs, lambda: machine.journal(unit))
    return main_pid(machine, unit)


def rpc(machine: Machine, method: str, target: str = "", /, **params: Any) -> Any:
    """Calls the target without a name, or the one of the name `target`."""
    socket = machine.path(RUN / target / "target.sock")
    return Client(socket).call_raw(method, **params)
