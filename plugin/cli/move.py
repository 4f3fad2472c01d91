"""`virtlun volume move`: a volume goes to another lvstore or pool of its target."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import click

from plugin.cli import completion
from plugin.cli.domains import connection
from plugin.cli.output import (
    bar,
    client,
    config,
    copying_client,
    errors_as_sentences,
    json_option,
    show,
    size,
    text,
)
from plugin.moves.moving import Mover
from plugin.moves.naming import Domains
from pydataplane.volumes import Volumes

COLUMNS = [
    ("VOLUME", "path", text),
    ("SIZE", "size", size),
    ("ALLOCATED", "allocated", size),
    ("THIN", "thin", text),
    ("PAUSE", "pause_us", lambda us: "-" if us is None else f"{us / 1000:.1f} ms"),
    ("DOMAINS", "domains", lambda names: ", ".join(names) or "-"),
    ("UUID", "uuid", text),
]


@click.command(short_help="Move a volume to another lvstore or pool.")
@click.argument("volume", shell_complete=completion.volumes)
@click.argument("to", metavar="LVSTORE[/NAME]", shell_complete=completion.lvstores)
@click.option(
    "--connect",
    "uri",
    help="libvirt URI of the gateway.  [default: at gateway.listen of the configuration]",
)
@json_option
@click.pass_obj
@errors_as_sentences
def move(socket: Path, volume: str, to: str, uri: str | None, as_json: bool) -> None:
    """Move VOLUME to another LVSTORE, or pool of Ceph, of its target.

    Between lvstores a VM may use it, and goes on with the new one; PAUSE is how long its requests
    waited at most. Domains that name it name the new one then, and know it as the same disk. Run it
    again after an interruption: it goes on where it was. ^C leaves VOLUME as it was.
    """
    with ExitStack() as stack:
        domains = _domains(stack, uri)
        mover = Mover(Volumes(client(socket)), Volumes(copying_client(socket)), domains)
        try:
            with bar(f"moving {volume}") as progress:
                moved = mover.move(volume, to, progress)
        except KeyboardInterrupt:
            raise click.ClickException(f"cancelled: volume {volume} is as it was") from None
    if domains is None:
        click.echo(
            f"Warning: no gateway answers: domains that name {volume} have to be redefined, so that"
            f" they name {moved.volume.path}",
            err=True,
        )
    row = {
        "path": moved.volume.path,
        **moved.volume.as_dict(),
        "pause_us": moved.pause_us,
        "domains": moved.domains,
    }
    show([row], COLUMNS, as_json=as_json, empty="")


def _domains(stack: ExitStack, uri: str | None) -> Domains | None:
    """Returns the gateway's domains; None: it does not run, or there is no libvirt here.

    Raises:
        click.ClickException: the URI that was named does not answer.
    """
    listen = config().gateway.listen
    if uri is None and not listen.exists():
        return None
    named = uri or f"qemu+unix:///system?socket={listen}"
    return Domains(stack.enter_context(connection(named, read_only=False)), config().settings())
