"""`virtlun report`: one file with what a bug report needs to be understood."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

import click

from plugin.cli.doctor import examinations
from plugin.cli.doctor.finding import Finding
from plugin.cli.output import address, busy, client, config, errors_as_sentences
from plugin.config import DEFAULT_PATH
from pydataplane.errors import TargetError
from pydataplane.supervise import TargetPaths

#: What a target is asked: its versions, what it serves, and its counters.
Asked = Literal[
    "spdk_get_version",
    "virtlun_get_status",
    "framework_get_reactors",
    "thread_get_stats",
    "bdev_get_bdevs",
    "bdev_get_iostat",
    "bdev_lvol_get_lvstores",
    "bdev_lvol_get_lvols",
    "vhost_get_controllers",
    "virtlun_vhost_get_stats",
    "virtlun_vhost_get_suspended",
    "virtlun_export_list",
    "bdev_rbd_get_clusters_info",
    "bdev_nvme_get_controllers",
]
LINES = 400
JOURNAL_S = 20.0
"""How long systemd's journal is waited for, seconds."""
HIDDEN = "***"
SECRET = re.compile(r"(?i)(pass(word|phrase)?|secret|token|psk|dhchap_.*|(private_?)?key2?)")
"""Names whose value is not told."""
IN_URL = re.compile(r"(?<=://)[^/@\s\"']+(?=@)|(?<=password=)[^&\s\"']+")
"""A user with a password, as URLs of iSCSI have them."""
ASSIGNED = re.compile(
    r"""(?i)(\b(?:pass(?:word|phrase)?|secret|token|psk|key2?)\\?["']?\s*[=:]\s*(\\?["'])).*?\2"""
)
"""The same as a line of text has them: a name, and what is in quotation marks after it."""


@click.command(short_help="Write one file for a bug report.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    help="The file, or - for the screen.  [default: virtlun-report-HOST-TIME.txt, here]",
)
@click.option(
    "--lines",
    type=click.IntRange(0, 100_000),
    default=LINES,
    show_default=True,
    help="How many of the last lines of each log.",
)
@click.pass_obj
@errors_as_sentences
def report(socket: Path, output: Path | None, lines: int) -> None:
    """Write one file for a bug report.

    It has what `virtlun doctor` finds, versions, the configuration, what the target serves and
    counts, and the last lines of the logs: text, to be read before it is sent. Passwords and keys
    are left out. Names of VMs, volumes, hosts and paths are in it.
    """
    parts: dict[str, Callable[[], Iterator[str]]] = {
        "host": _host,
        "doctor": lambda: _doctor(socket),
        "configuration": _written,
        "target": lambda: _target(socket),
        "logs": lambda: _logs(lines),
    }
    made: list[str] = []
    for title, part in parts.items():
        with busy(f"looking at {title}"):
            made += [f"== {title}", *part(), ""]
    content = "\n".join(made)
    if output == Path("-"):
        click.echo(content)
        return
    name = f"virtlun-report-{platform.node()}-{time.strftime('%Y%m%d-%H%M%S')}.txt"
    path = output or Path(name)
    write_new(path, content)
    click.echo(f"{path}: read it before you send it; it has names of VMs, volumes and hosts")


def write_new(path: Path, content: str) -> None:
    """Writes a file of the caller's alone, which has its name when it is whole.

    Raises:
        OSError: one of that name is there, or it cannot be written, and nothing is left of it.
    """
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
    new = path.with_name(f"{path.name}.new")
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(file, "w") as opened:
            opened.write(content)
        new.rename(path)
    except BaseException as error:
        new.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, path) from error
        raise


def _host() -> Iterator[str]:
    """Yields what the machine and the programs are."""
    yield time.strftime("%Y-%m-%d %H:%M:%S %z")
    yield f"virtlun {version('virtlun')}, Python {platform.python_version()}"
    with suppress(OSError):
        yield platform.freedesktop_os_release()["PRETTY_NAME"]
    yield " ".join(platform.uname())
    yield f"{os.cpu_count()} CPUs"
    with suppress(OSError):
        yield from Path("/proc/meminfo").read_text().splitlines()[:3]


def _doctor(socket: Path) -> Iterator[str]:
    """Yields each finding, and that of a check that ended otherwise."""
    for what, check in examinations(socket, config(), address().vhost_dir):
        try:
            found = check()
        except Exception as error:
            yield f"{what}: the check failed: {type(error).__name__}: {error}"
            continue
        for finding in [found] if isinstance(found, Finding) else found:
            yield without_secrets(json.dumps(asdict(finding), ensure_ascii=False))


def _written() -> Iterator[str]:
    """Yields the configuration file as it is written, and what was given in its place."""
    context = click.get_current_context().find_root()
    path: Path = context.params["config_path"] or DEFAULT_PATH
    yield f"the target's socket: {context.obj}"
    try:
        yield from (without_secrets(line) for line in path.read_text().splitlines())
    except OSError as error:
        yield f"{path}: {error.strerror}"


def _target(socket: Path) -> Iterator[str]:
    """Yields what the target answers, each as JSON."""
    asked = client(socket)
    methods: tuple[Asked, ...] = get_args(Asked)
    for method in methods:
        try:
            answer = json.dumps(hidden(asked.call(method)), indent=1, ensure_ascii=False)
        except TargetError as error:
            answer = str(error)
        yield f"-- {method}"
        yield answer


def _logs(lines: int) -> Iterator[str]:
    """Yields the end of the target's log, and of what systemd has of our services."""
    log = TargetPaths.of(address().name).log
    yield f"-- {log}"
    yield from _shown(lambda: _last(log, lines))
    if shutil.which("journalctl") is None:
        return
    yield "-- journal of virtlun-*"
    yield from _shown(lambda: _journal(lines))


def _last(log: Path, lines: int) -> list[str]:
    """Returns the last lines of a file."""
    with log.open(errors="replace") as file:
        return [line.removesuffix("\n") for line in deque(file, lines)]


def _journal(lines: int) -> list[str]:
    """Returns the last lines that systemd has of our services."""
    words = ["journalctl", "--unit", "virtlun-*", "--lines", str(lines), "--no-pager"]
    ran = subprocess.run(
        [*words, "--output", "short-iso"],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=JOURNAL_S,
        check=True,
    )
    return ran.stdout.splitlines()


def _shown(read: Callable[[], list[str]]) -> Iterator[str]:
    """Yields lines without secrets, or why there are none."""
    try:
        yield from map(without_secrets, read())
    except OSError as error:
        yield error.strerror or str(error)
    except subprocess.SubprocessError as error:
        yield str(error)


def without_secrets(line: str) -> str:
    """Returns a line of text without the passwords and keys that it assigns or has in URLs."""
    return ASSIGNED.sub(rf"\1{HIDDEN}\2", IN_URL.sub(HIDDEN, line))


def hidden(value: Any) -> Any:
    """Returns a JSON value without the passwords and keys in it."""
    if isinstance(value, dict):
        return {
            name: HIDDEN if SECRET.fullmatch(name) and isinstance(each, str) else hidden(each)
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [hidden(each) for each in value]
    return IN_URL.sub(HIDDEN, value) if isinstance(value, str) else value
