"""What stands for ssh where both hosts of a test are this machine.

It takes ssh's words, `-- HOST COMMAND`, and has a shell run the command with the environment of the
other host, as sshd does.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

HOST = "root@there.example"

PROGRAM = """#!/bin/sh
if [ $# != 3 ] || [ "$1" != -- ] || [ "$2" != {host} ]; then echo "not as ssh: $*" >&2; exit 64; fi
{exports}
PATH={path}:$PATH exec {inside} sh -c "$3"
"""


def ssh_to(file: Path, environment: Mapping[str, Path], inside: Sequence[str] = ()) -> Path:
    """Makes the program `file`; `inside` are the words of one that runs others on that host."""
    exports = "\n".join(
        f"export {name}={shlex.quote(str(value))}" for name, value in environment.items()
    )
    program = PROGRAM.format(
        host=HOST,
        exports=exports,
        path=shlex.quote(str(Path(sys.executable).parent)),
        inside=shlex.join(inside),
    )
    file.write_text(program)
    file.chmod(0o755)
    return file
