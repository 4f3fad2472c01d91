"""`virtlun volume move`: a volume goes to another lvstore or pool of its target."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import click

from plugin.cli import completion, hostmove
from plugin.cli.domains import gateway_domains
from plugin.cli.output import (
    bar,
    client,
    copying_client,
    errors_as_sentences,
    json_option,
    show,
    size,
    text,
)
from plugin.moves.moving import Mover
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


@click.command(short_help="Move a volume to another lvstore, pool or host.")
@click.argument("volume", shell_complete=completion.volumes)
@click.argument(
    "to", metavar="[LVSTORE[/NAME]]", required=False, shell_complete=completion.lvstores
)
@click.option(
    "--connect",
    "uri",
    help="libvirt URI of the gateway.  [default: at gateway.listen of the configuration]",
)
@hostmove.options
@json_option
@click.pass_obj
@errors_as_sentences
def move(
    socket: Path,
    /,
    volume: str,
    to: str | None,
    uri: str | None,
    as_json: bool,
    **asked: str | bool | None,
) -> None:
    """Move VOLUME to another LVSTORE, or pool of Ceph, of its target, or to another host.

    Between lvstores a VM may use it, and goes on with the new one; PAUSE is how long its requests
    waited at most. Domains that name it name the new one then, and know it as the same disk. Run it
    again after an interruption: it goes on where it was. ^C leaves VOLUME as it was.

    With --host it is sent to another host, while a VM uses it, too; for the last of it the VM has
    to be shut down. Until the other host has all of it, durably, VOLUME counts.
    """
    wanted = hostmove.HostOptions.of(asked, to)
    if wanted is not None:
        hostmove.move(socket, volume, wanted, uri, as_json=as_json)
        return
    if to is None:
        raise click.UsageError("Missing argument 'LVSTORE[/NAME]': where is it to go?")
    with ExitStack() as stack:
        domains = gateway_domains(stack, uri)
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
