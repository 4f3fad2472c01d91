"""`virtlun volume import`, `export` and `diff`: volumes and images, and what changed."""

from __future__ import annotations

import re
from functools import partial
from itertools import chain
from pathlib import Path

import click

from plugin.cli import completion
from plugin.cli.output import bar, client, errors_as_sentences, json_option, show, size, text
from plugin.cli.volume import shown
from plugin.images import qemuimg, sums
from plugin.images.exporting import export_image
from plugin.images.importing import import_image
from pydataplane.volumenames import parse_size
from pydataplane.volumes import Volumes

IMAGE_COLUMNS = [
    ("FILE", "file", text),
    ("FORMAT", "format", text),
    ("SIZE", "size", size),
    ("ALLOCATED", "allocated", size),
    ("SHA-256", "sha256", text),
]
RANGE_COLUMNS = [("OFFSET", "offset", text), ("LENGTH", "length", size)]
FORMAT = click.Choice(qemuimg.FORMATS)


class _Sha256(click.ParamType[str]):
    """A SHA-256 as sha256sum(1) and those who publish images write it."""

    name = "HEX"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Reads one."""
        if not re.fullmatch("[0-9a-fA-F]{64}", value):
            self.fail(f"{value!r} has not the 64 hexadecimal digits of a SHA-256", param, ctx)
        return value.lower()


verify_option = click.option(
    "--verify", is_flag=True, help="Compare the two in the end, and print the SHA-256 of both."
)


@click.command("import", short_help="Make a volume of an image, raw or qcow2.")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("volume", shell_complete=completion.volumes)
@click.option("--format", "form", type=FORMAT, help="Of FILE.  [default: what it looks like]")
@click.option("--size", "size_text", metavar="SIZE", help="More than FILE has, such as 20G.")
@click.option("--thin", is_flag=True, help="Allocate clusters when they are first written.")
@click.option("--sha256", type=_Sha256(), help="Refuse FILE if it has another.")
@verify_option
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
    sha256: str | None,
    verify: bool,
    as_json: bool,
) -> None:
    """Make VOLUME (LVSTORE/NAME) with the contents of the image FILE.

    Run it again after an interruption: it goes on where it was. --sha256 is of the bytes of FILE,
    as sha256sum tells it; --verify is of the disk that FILE holds, with the zeros of its holes.
    """
    source = qemuimg.probe(file, form)
    wanted = parse_size(size_text) if size_text else None
    with bar(f"importing {file.name}") as progress:
        if sha256 is not None:
            sums.check(source.path, sha256, partial(progress, now=f"checking {file.name}"))
        made, found = import_image(
            Volumes(client(socket)),
            source,
            volume,
            wanted,
            thin=thin,
            verify=partial(progress, now=f"verifying {volume}") if verify else None,
            progress=progress,
        )
    shown([made], as_json, sha256=found)


@click.command(short_help="Write a volume or snapshot to an image, raw or qcow2.")
@click.argument("volume", shell_complete=completion.volumes)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--format", "form", type=FORMAT, default="qcow2", show_default=True)
@verify_option
@json_option
@click.pass_obj
@errors_as_sentences
def export(socket: Path, volume: str, file: Path, form: str, verify: bool, as_json: bool) -> None:
    """Write VOLUME, as it is now, to the image FILE, also while a VM uses it.

    Run it again after an interruption: it goes on where it was, with what VOLUME had then.
    """
    with bar(f"exporting {volume}") as progress:
        made, found = export_image(
            Volumes(client(socket)),
            volume,
            file,
            form,
            verify=partial(progress, now=f"verifying {file.name}") if verify else None,
            progress=progress,
        )
    row = {"file": str(made.path), "format": made.format, "size": made.size}
    row["allocated"] = made.path.stat().st_blocks * 512
    if found is not None:
        row["sha256"] = found
    columns = [column for column in IMAGE_COLUMNS if column[1] in row]
    show([row], columns, as_json=as_json, empty="")


@click.command(short_help="Show where a volume may differ from a snapshot.")
@click.argument("snapshot_name", metavar="SNAPSHOT")
@click.argument("volume", shell_complete=completion.volumes)
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
