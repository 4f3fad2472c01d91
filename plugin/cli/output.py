"""What the commands share: their configuration, tables for people, JSON, errors as sentences."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from threading import Thread
from typing import Any, ParamSpec, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.status import Status
from rich.table import Table
from rich.text import Text

from plugin.config import Config
from plugin.targets import TargetAddress
from pydataplane.client import Client
from pydataplane.errors import TargetError, TargetTimeout, VolumeError

P = ParamSpec("P")
R = TypeVar("R")

CONFIG_KEY = "plugin.config"
"""Where the root command leaves the configuration for the others, in click's context."""

ADDRESS_KEY = "plugin.address"
"""Where it leaves which target the command line names."""

COPY_DEADLINE_S = 86_400.0
"""How long an answer may take to a call that writes or copies a whole volume, seconds."""

LOOK_S = 0.2
"""How often it is looked how far that has come, seconds."""

WIDE = 10_000
"""Columns of a page on which no table's row is cut: a name that lost its end is none."""


def config() -> Config:
    """Returns the configuration that the command line names."""
    found: Config = click.get_current_context().meta[CONFIG_KEY]
    return found


def address() -> TargetAddress:
    """Returns where the target is that the command line names."""
    found: TargetAddress = click.get_current_context().meta[ADDRESS_KEY]
    return found


def client(socket: Path) -> Client:
    """Returns a client of the target on `socket`, that waits as long as the configuration says."""
    return Client(socket, config().target.timeout_s)


def copying_client(socket: Path) -> Client:
    """Returns a client for calls that may take as long as it takes to write a volume."""
    return Client(socket, COPY_DEADLINE_S)


def json_option(function: Callable[P, R]) -> Callable[P, R]:
    """Adds `--json`, passed on as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")(
        function
    )


@atexit.register
def _leave_unread() -> None:
    """Lets go of what nobody reads, such as head that has seen enough.

    Click says nothing of it; Python would, when it flushes what is left at the end.
    """
    stdout = sys.__stdout__
    try:
        if stdout is not None and not stdout.closed:
            stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Has SIGTERM raise KeyboardInterrupt within a block, as ^C does: what was begun is ended.

    So does SIGHUP, of a terminal or connection that goes, unless nohup(1) has it ignored.
    """
    before = {
        number: signal.signal(number, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def errors_as_sentences(function: Callable[P, R]) -> Callable[P, R]:
    """Turns the errors that a user can meet into one sentence on stderr and exit status 1."""

    @wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (TargetError, VolumeError) as error:
            raise click.ClickException(str(error)) from error
        except BrokenPipeError:
            raise  # click's: who reads, such as head, has seen enough
        except OSError as error:
            raise click.ClickException(
                f"{error.filename or 'system'}: {error.strerror or error}"
            ) from error

    return guarded


def show(
    rows: Sequence[dict[str, Any]],
    columns: Iterable[tuple[str, str, Callable[[Any], str]]],
    *,
    as_json: bool,
    empty: str,
) -> None:
    """Prints `rows` as JSON or as a table of (title, key, format); `empty` where there are none."""
    if as_json:
        click.echo(json.dumps(list(rows), indent=2))
        return
    if not rows:
        click.echo(empty, err=True)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    chosen = list(columns)
    for title, key, _ in chosen:
        right = isinstance(rows[0].get(key), int) and not isinstance(rows[0].get(key), bool)
        table.add_column(title, justify="right" if right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(form(row.get(key))) for _, key, form in chosen))
    Console(highlight=False, width=WIDE).print(table)


def console() -> Console:
    """Returns the terminal, or a wide page where the output is not one (so nothing is cut)."""
    terminal = Console(highlight=False)
    return terminal if terminal.is_terminal else Console(highlight=False, width=200)


def confirm(question: str) -> None:
    """Goes on if the person says yes; without one, says how to go on."""
    try:
        click.confirm(question, abort=True)
    except click.Abort as error:
        if sys.stdin.isatty():
            raise
        click.echo(err=True)
        raise click.ClickException("nothing is changed: nobody said yes; add --yes") from error


def busy(what: str) -> Status:
    """Returns a context manager that shows what takes its time, on a terminal's stderr only."""
    return Status(what, console=Console(stderr=True, highlight=False))


def size(value: Any) -> str:
    """Formats bytes for people: 512 MiB, 1.5 GiB."""
    amount = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if amount == int(amount) else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def text(value: Any) -> str:
    """Formats anything plainly; nothing for None, yes and no for a truth value."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


@contextmanager
def bar(what: str) -> Iterator[Callable[..., None]]:
    """Shows how far something has come, in bytes done and of all, on a terminal's stderr only.

    What it yields is told both, and `now=` where something else is done by now.
    """
    name = TextColumn("{task.description}", markup=False)
    columns = (name, BarColumn(), DownloadColumn(binary_units=True))
    console = Console(stderr=True, highlight=False)
    quiet = not console.is_terminal
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=quiet
    ) as shown:
        task = shown.add_task(what, total=None)
        yield lambda done, total, now=what: shown.update(
            task, completed=done, total=total, description=now
        )


def followed(what: str, work: Callable[[], R], look: Callable[[], tuple[int, int] | None]) -> R:
    """Does `work`, showing meanwhile how far it has come: what `look` says, in bytes done and all.

    `look` asks the target, so that one that answers nothing any more is not waited for. None: how
    far is not known. What `work` raises is the caller's; an interruption leaves it to the target.

    Raises:
        TargetTimeout: the target does not answer `look`.
    """
    result: Future[R] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    Thread(target=run, daemon=True).start()
    with bar(what) as progress:
        while True:
            with suppress(TimeoutError):
                result.exception(LOOK_S)
                break
            try:
                come = look()
            except TargetTimeout:
                raise
            except (TargetError, VolumeError):
                continue
            if come is not None:
                progress(*come)
    return result.result()
