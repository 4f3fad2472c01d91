"""`virtlun volume send` and `receive`: volumes as streams, to other hosts and to Ceph."""

from __future__ import annotations

import sys
from pathlib import Path
from uuid import UUID

import click

from plugin.cli import completion
from plugin.cli.output import (
    bar,
    client,
    copying_client,
    ended_in_order,
    errors_as_sentences,
    json_option,
)
from plugin.cli.volume import shown
from plugin.streams import sending
from plugin.streams.form import Reader
from plugin.streams.receiving import New, Receiver
from pydataplane.volumes import Volumes


@click.command(short_help="Write a snapshot, or what changed, to standard output.")
@click.argument("snapshot", shell_complete=completion.volumes)
@click.option(
    "--since", metavar="SNAPSHOT", help="Only what changed since this older one, such as @monday."
)
@click.pass_obj
@errors_as_sentences
def send(socket: Path, snapshot: str, since: str | None) -> None:
    """Write what SNAPSHOT has to standard output, for `receive` on another host.

    \b
      virtlun volume snapshot lvs0/db monday
      virtlun volume send lvs0/db@monday | ssh HOST virtlun volume receive lvs0/db

    The stream is one of `rbd export-diff`, so `rbd import-diff` takes it, too. What is encrypted at
    rest is not in the stream.
    """  # noqa: D301 (click's mark)
    if sys.stdout is None or sys.stdout.isatty():
        raise click.UsageError(
            "the stream is not for a terminal: write it to a file (> FILE), or to a command such as"
            " `| ssh HOST virtlun volume receive LVSTORE/NAME`"
        )
    with bar(f"sending {snapshot}") as progress, ended_in_order():
        sending.send(Volumes(client(socket)), snapshot, since, sys.stdout.buffer, progress)


@click.command(short_help="Make or change a volume by a stream of standard input.")
@click.argument("volume", shell_complete=completion.volumes)
@click.option("--thin", is_flag=True, help="Allocate clusters of a new one when they are written.")
@click.option("--key", metavar="NAME", help="Encrypt a new one with this key: see `virtlun key`.")
@click.option("--uuid", type=click.UUID, help="Of a new one: guests know a disk by it.")
@click.option(
    "--take-back", is_flag=True, help="Read nothing: end what an interrupted command left."
)
@json_option
@click.pass_obj
@errors_as_sentences
def receive(
    socket: Path,
    volume: str,
    thin: bool,
    key: str | None,
    uuid: UUID | None,
    take_back: bool,
    as_json: bool,
) -> None:
    """Make VOLUME of the stream on standard input, or change it as that says.

    The stream is one of `send`, or of `rbd export-diff`; VOLUME has its snapshot then. What changed
    since a snapshot is taken by the volume whose last snapshot that is, if nobody has written to it
    since then. If the stream ends early, VOLUME is as it was before.
    """
    receiver = Receiver(Volumes(client(socket)), Volumes(copying_client(socket)), volume)
    if take_back:
        receiver.take_back()
        return
    if sys.stdin is None or sys.stdin.isatty():
        raise click.UsageError("standard input is no stream: give it one (< FILE)")
    stream = Reader(sys.stdin.buffer)
    new = New(thin, key, str(uuid) if uuid else None)
    try:
        with bar(f"receiving {volume}") as progress, ended_in_order():
            made = receiver.receive(stream, new, progress)
    except KeyboardInterrupt:
        state = "has all of the stream" if receiver.is_done else "is as it was before"
        raise click.ClickException(f"interrupted: {volume} {state}") from None
    shown([made], as_json)
