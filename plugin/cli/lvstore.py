"""`virtlun lvstore`: stores of volumes on a file or block device."""

from __future__ import annotations

from pathlib import Path

import click

from plugin.cli.output import busy, errors_as_sentences, json_option, show, size, text
from pydataplane.client import Client
from pydataplane.volumes import Lvstore, Volumes, parse_size

COLUMNS = [
    ("NAME", "name", text),
    ("SIZE", "total", size),
    ("FREE", "free", size),
    ("CLUSTER", "cluster_size", size),
    ("DEVICE", "base_bdev", text),
    ("UUID", "uuid", text),
]


@click.group()
def lvstore() -> None:
    """Stores that volumes are cut from."""


@lvstore.command("list")
@json_option
@click.pass_obj
@errors_as_sentences
def list_(socket: Path, as_json: bool) -> None:
    """List the lvstores with their size and what is free."""
    _show(Volumes(Client(socket)).lvstores(), as_json)


@lvstore.command()
@click.argument("name")
@click.option(
    "--file",
    "file",
    type=click.Path(path_type=Path),
    required=True,
    help="A block device, or a file (made with --size where it does not exist).",
)
@click.option("--size", "size_text", help="Size of a new file, such as 100G.")
@click.option("--cluster-size", help="Allocation unit, such as 1M (the default) or 4M.")
@json_option
@click.pass_obj
@errors_as_sentences
def create(
    socket: Path,
    name: str,
    file: Path,
    size_text: str | None,
    cluster_size: str | None,
    as_json: bool,
) -> None:
    """Make an lvstore called NAME. What is on the device is lost."""
    total = parse_size(size_text) if size_text else None
    cluster = parse_size(cluster_size) if cluster_size else None
    with busy(f"making lvstore {name}"):
        made = Volumes(Client(socket)).create_lvstore(name, file, total, cluster)
    _show([made], as_json)


@lvstore.command(short_help="Grow an lvstore, also while it is in use.")
@click.argument("lvstore")
@click.argument("size_text", metavar="[SIZE]", required=False)
@json_option
@click.pass_obj
@errors_as_sentences
def resize(socket: Path, lvstore: str, size_text: str | None, as_json: bool) -> None:
    """Grow LVSTORE to a file of SIZE, such as 200G, also while its volumes are in use.

    SIZE is that of the file, metadata included, as `create --size` takes it. Without SIZE the
    lvstore takes what its file or block device has now: grow a block device itself first.
    An lvstore never becomes smaller.
    """
    wanted = parse_size(size_text) if size_text else None
    with busy(f"growing lvstore {lvstore}"):
        grown = Volumes(Client(socket)).resize_lvstore(lvstore, wanted)
    _show([grown], as_json)


@lvstore.command(short_help="Destroy an lvstore with all volumes in it.")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_obj
@errors_as_sentences
def delete(socket: Path, name: str, yes: bool) -> None:
    """Destroy the lvstore NAME with all volumes in it (a file stays, its content does not)."""
    volumes = Volumes(Client(socket))
    count = len(volumes.volumes(volumes.lvstore(name).uuid))
    if not yes:
        click.confirm(f"Destroy lvstore {name} and its {count} volumes?", abort=True)
    with busy(f"destroying lvstore {name}"):
        volumes.delete_lvstore(name)


def _show(stores: list[Lvstore], as_json: bool) -> None:
    show(
        [store.as_dict() for store in stores],
        COLUMNS,
        as_json=as_json,
        empty="no lvstores: make one with `virtlun lvstore create NAME --file FILE --size SIZE`",
    )
