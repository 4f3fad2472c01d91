"""`virtlun volume move --host`, and what answers it on the other host."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import click

from plugin.cli.domains import gateway_domains
from plugin.cli.output import bar, client, copying_client, ended_in_order, show, size, text
from plugin.hostmoves.destination import Destination, refuse
from plugin.hostmoves.remote import Remote
from plugin.hostmoves.sourcechecks import HostMove
from plugin.hostmoves.sourceside import HostMover
from plugin.hostmoves.wire import IDLE_S, Input
from pydataplane.errors import TargetError, VolumeError
from pydataplane.volumes import Volumes

P = ParamSpec("P")
R = TypeVar("R")

SSH = "ssh -o ServerAliveInterval=10 -o ServerAliveCountMax=3"
"""By which the other host is reached; one that answers no more is given up after half a minute."""

COLUMNS = [
    ("VOLUME", "path", text),
    ("HOST", "host", text),
    ("SIZE", "size", size),
    ("SENT", "sent", size),
    ("AT LAST", "last", size),
    ("PAUSE", "pause_us", lambda us: "-" if us is None else f"{us / 1e6:.1f} s"),
    ("DOMAIN", "domain", lambda name: name or "-"),
    ("UUID", "uuid", text),
]

_OPTIONS = (
    click.option("--host", metavar="[USER@]HOST", help="Send it to this host."),
    click.option(
        "--to",
        "place",
        metavar="LVSTORE[/NAME]",
        help="What it is to be there.  [default: what it is here]",
    ),
    click.option(
        "--shutdown",
        is_flag=True,
        help="Shut the VM that uses it down, by libvirt, when little is left to be sent.",
    ),
    click.option(
        "--with-vm",
        is_flag=True,
        help="The domain goes along: it is defined there, and started if --shutdown ended it.",
    ),
    click.option("--keep", is_flag=True, help="Keep VOLUME, and the domain; it is no disk then."),
    click.option("--key", metavar="NAME", help="The key there, of an encrypted one."),
    click.option("--abort", is_flag=True, help="Give an interrupted move to a host up."),
    click.option(
        "--ssh",
        envvar="VIRTLUN_SSH",
        show_envvar=True,
        metavar="COMMAND",
        help=f"The program that runs commands there, with its options.  [default: {SSH}]",
    ),
    click.option(
        "--remote",
        metavar="COMMAND",
        help="What `virtlun` is there, such as 'sudo virtlun --target b'.  [default: virtlun]",
    ),
)


def options(function: Callable[P, R]) -> Callable[P, R]:
    """Adds the options of a move to another host."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


@dataclass(frozen=True)
class HostOptions:
    """What the options say of a move to another host."""

    host: str
    ssh: list[str]
    remote: list[str]
    abort: bool
    move: HostMove

    @staticmethod
    def of(asked: dict[str, Any], to: str | None) -> HostOptions | None:
        """Returns what `asked` says, option by option; None: it goes to no other host.

        Raises:
            click.UsageError: they do not go together.
        """
        host = asked["host"]
        given = [name for name, value in asked.items() if value and name not in ("host", "ssh")]
        if host is None and given:
            names = {"place": "--to", "with_vm": "--with-vm"}
            name = names.get(given[0], f"--{given[0]}")
            raise click.UsageError(f"{name} is of a move to another host: add --host HOST")
        if host is None:
            return None
        if to is not None and asked["place"] is not None:
            raise click.UsageError("say once where it is to go: by --to, or after VOLUME")
        if asked["abort"] and (asked["with_vm"] or asked["shutdown"] or asked["keep"]):
            raise click.UsageError("--abort goes with no option that says how it is to move")
        return HostOptions(
            host=host,
            ssh=_words("--ssh", asked["ssh"] or SSH),
            remote=_words("--remote", asked["remote"] or "virtlun"),
            abort=asked["abort"],
            move=HostMove(
                to=asked["place"] or to,
                key=asked["key"],
                shutdown=asked["shutdown"],
                with_vm=asked["with_vm"],
                keep=asked["keep"],
            ),
        )


def _words(option: str, command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise click.UsageError(f"{option} {command!r}: {error}") from error
    if not words:
        raise click.UsageError(f"{option}: name a program")
    return words


def move(socket: Path, volume: str, wanted: HostOptions, uri: str | None, *, as_json: bool) -> None:
    """Moves a volume to another host, or gives that up, and prints what became of it."""
    remote = Remote(wanted.host, wanted.ssh, wanted.remote)
    with ExitStack() as stack:
        domains = gateway_domains(stack, uri)
        progress = stack.enter_context(bar(f"moving {volume}"))
        stack.enter_context(ended_in_order())
        mover = HostMover(
            Volumes(client(socket)), Volumes(copying_client(socket)), domains, remote, progress
        )
        try:
            if wanted.abort:
                mover.give_up(volume, wanted.move.to)
                return
            moved = mover.move(volume, wanted.move)
        except KeyboardInterrupt:
            what = mover.stands or f"volume {volume} is as it was"
            raise click.ClickException(f"interrupted: {what}") from None
        except Exception as error:
            if not mover.stands:
                raise
            raise VolumeError(f"{error}; {mover.stands}") from error
    done = moved.completed
    if done.naming:
        click.echo(
            f"Warning: {', '.join(done.naming)} of this host name {moved.volume.path} still, which"
            f" is {wanted.host}:{done.path} now",
            err=True,
        )
    row = {
        "path": done.path,
        "host": wanted.host,
        "size": moved.volume.size,
        "uuid": moved.volume.uuid,
        "sent": moved.sent,
        "last": moved.last,
        "pause_us": None if moved.pause_s is None else round(moved.pause_s * 1e6),
        "domain": done.domain,
        "naming": done.naming,
    }
    show([row], COLUMNS, as_json=as_json, empty="")


@click.command(hidden=True)
@click.pass_obj
def incoming(socket: Path) -> None:
    """Answer `virtlun volume move --host` of another host, on standard input and output."""
    answers = sys.stdout.buffer
    try:
        with ExitStack() as stack, ended_in_order():
            Destination(
                Volumes(client(socket)),
                Volumes(copying_client(socket)),
                lambda: gateway_domains(stack, None),
                Input(sys.stdin.fileno(), IDLE_S),
                answers,
            ).serve()
            return
    except (BrokenPipeError, KeyboardInterrupt):
        pass
    except click.ClickException as error:
        refuse(answers, error.message)
    except (TargetError, VolumeError) as error:
        refuse(answers, str(error))
    except OSError as error:
        refuse(answers, f"{error.filename or 'system'}: {error.strerror or error}")
    sys.exit(1)
