"""`virtlun volume import`, `export` and `diff`: volumes and images, and what changed."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import click

from plugin.cli.output import bar, client, errors_as_sentences, json_option, show, size, text
from plugin.cli.volume import shown
from plugin.images import qemuimg
from plugin.images.coming import import_image
from plugin.images.going import export_image
from pydataplane.volumenames import parse_size
from pydataplane.volumes import Volumes

IMAGE_COLUMNS = [
    ("FILE", "file", text),
    ("FORMAT", "format", text),
    ("SIZE", "size", size),
    ("ALLOCATED", "allocated", size),
]
RANGE_COLUMNS = [("OFFSET", "offset", text), ("LENGTH", "length", size)]
FORMAT = click.Choice(qemuimg.FORMATS)


@click.command("import", short_help="Make a volume of an image, raw or qcow2.")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("volume")
@click.option("--format", "form", type=FORMAT, help="Of FILE.  [default: what it looks like]")
@click.option("--size", "size_text", metavar="SIZE", help="More than FILE has, such as 20G.")
@click.option("--thin", is_flag=True, help="Allocate clusters when they are first written.")
@click.option("--verify", is_flag=True, help="Compare the two in the end.")
@json_option
@click.pass_obj
@errors_as_sentences
def import_(
    socket: Path,
    file: Path,
    volume: str,
    form: str | None,
    size_text: str | None,
    thin: bool,
    verify: bool,
    as_json: bool,
) -> None:
    """Make VOLUME (LVSTORE/NAME) with the contents of the image FILE.

    Run it again after an interruption: it goes on where it was.
    """
    source = qemuimg.probe(file, form)
    wanted = parse_size(size_text) if size_text else None
    with bar(f"importing {file.name}") as progress:
        made = import_image(
            Volumes(client(socket)),
            source,
            volume,
            wanted,
            thin=thin,
            verify=verify,
            progress=progress,
        )
    shown([made], as_json)


@click.command(short_help="Write a volume or snapshot to an image, raw or qcow2.")
@click.argument("volume")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--format", "form", type=FORMAT, default="qcow2", show_default=True)
@click.option("--verify", is_flag=True, help="Compare the two in the end.")
@json_option
@click.pass_obj
@errors_as_sentences
def export(socket: Path, volume: str, file: Path, form: str, verify: bool, as_json: bool) -> None:
    """Write VOLUME, as it is now, to the image FILE, also while a VM uses it.

    Run it again after an interruption: it goes on where it was, with what VOLUME had then.
    """
    with bar(f"exporting {volume}") as progress:
        made = export_image(
            Volumes(client(socket)), volume, file, form, verify=verify, progress=progress
        )
    row = {"file": str(made.path), "format": made.format, "size": made.size}
    row["allocated"] = made.path.stat().st_blocks * 512
    show([row], IMAGE_COLUMNS, as_json=as_json, empty="")


@click.command(short_help="Show where a volume may differ from a snapshot.")
@click.argument("snapshot_name", metavar="SNAPSHOT")
@click.argument("volume")
@json_option
@click.pass_obj
@errors_as_sentences
def diff(socket: Path, snapshot_name: str, volume: str, as_json: bool) -> None:
    """Show which parts of VOLUME, as it is now, or of a later snapshot may differ from SNAPSHOT.

    They are of whole clusters of their lvstore. No data is read.
    """
    volumes = Volumes(client(socket))
    since, of = volumes.volume(snapshot_name), volumes.volume(volume)
    ranges = chain.from_iterable(volumes.ranges(of.uuid, since.uuid))
    rows = [{"offset": offset, "length": length} for offset, length in ranges]
    empty = f"{of.path} reads as {since.path} does"
    show(rows, RANGE_COLUMNS, as_json=as_json, empty=empty)
