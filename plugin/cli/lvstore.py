"""`virtlun lvstore`: stores of volumes on a file or block device."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import click

from plugin.cli import completion
from plugin.cli.contents import UnknownContentsError, contents
from plugin.cli.output import (
    bar,
    busy,
    client,
    confirm,
    errors_as_sentences,
    json_option,
    show,
    size,
    text,
)
from pydataplane.errors import VolumeError
from pydataplane.lvstores import Lvstore
from pydataplane.volumenames import parse_size
from pydataplane.volumes import Volumes

COLUMNS = [
    ("NAME", "name", text),
    ("SIZE", "total", size),
    ("FREE", "free", size),
    ("CLUSTER", "cluster_size", size),
    ("CHECKSUMS", "checksums", text),
    ("ON", "file", text),
    ("UUID", "uuid", text),
]

UNREADABLE = [
    ("VOLUME", "volume", text),
    ("AT BYTE", "at", text),
    ("LENGTH", "length", text),
    ("ON THE DEVICE", "offset", text),
    ("WHY", "cause", text),
]
PROBLEMS = [("WHERE", "place", text), ("WHAT", "cause", text), ("REPAIRED", "repaired", text)]


@click.group()
def lvstore() -> None:
    """Stores that volumes are cut from."""


@lvstore.command("list")
@json_option
@click.pass_obj
@errors_as_sentences
def list_(socket: Path, as_json: bool) -> None:
    """List the lvstores with their size and what is free."""
    volumes = Volumes(client(socket))
    _show(volumes, [store for store in volumes.lvstores() if not store.is_pool], as_json)


@lvstore.command(short_help="Make an lvstore on a file or block device.")
@click.argument("name")
@click.option(
    "--file",
    "file",
    type=click.Path(path_type=Path),
    required=True,
    help="A block device, or a file (made with --size where it does not exist).",
)
@click.option("--size", "size_text", help="Size of a new file, such as 100G.")
@click.option(
    "--cluster-size",
    help="Allocation unit, such as 64K or 1M; by default chosen by the size: 64K up to 256 GiB.",
)
@click.option("--key", help="Encrypt all of it with the key of this name: see `virtlun key`.")
@click.option(
    "--checksums",
    is_flag=True,
    help="Keep a checksum of each 4 KiB, verified when read: what is damaged is an error.",
)
@click.option(
    "--share-clusters",
    is_flag=True,
    help="Copies that guests order between volumes (EXTENDED COPY, ODX) move no data.",
)
@click.option("--force", is_flag=True, help="Overwrite a file system or whatever is there.")
@json_option
@click.pass_obj
@errors_as_sentences
def create(
    socket: Path,
    name: str,
    file: Path,
    size_text: str | None,
    cluster_size: str | None,
    key: str | None,
    checksums: bool,
    share_clusters: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Make an lvstore called NAME.

    A file or device on which something is already is refused, unless --force is given: then that
    is lost. An lvstore is never overwritten: `lvstore import` loads it.
    """
    total = parse_size(size_text) if size_text else None
    cluster = parse_size(cluster_size) if cluster_size else None
    volumes = Volumes(client(socket))
    if not force and name not in (store.name for store in volumes.lvstores()):
        _refuse_what_is_not_empty(file)
    new = not file.exists()
    with busy(f"making lvstore {name}"):
        made = volumes.create_lvstore(
            name, file, total, cluster, key, checksums=checksums, share_clusters=share_clusters
        )
    if new and total is not None:
        _warn_of_too_little_room(file, total)
    _show(volumes, [made], as_json)


def _warn_of_too_little_room(file: Path, total: int) -> None:
    """Says if a new file, which is sparse, can become larger than its file system has room for."""
    room = shutil.disk_usage(file).free
    if total > room:
        click.echo(
            f"Warning: {file} of {size(total)} is on a file system with {size(room)} free: writes "
            "to volumes fail when that is full",
            err=True,
        )


def _refuse_what_is_not_empty(file: Path) -> None:
    if not file.exists():
        return
    try:
        found = contents(file)
    except UnknownContentsError as error:
        raise VolumeError(
            f"it cannot be told whether {file} is empty: {error}; add --force if all on it may be "
            "lost"
        ) from error
    if found:
        raise VolumeError(
            f"{file} is not empty, it holds {found}: name another one, or add --force if all on it "
            "may be lost"
        )


@lvstore.command("import", short_help="Load an lvstore that is on a file or block device already.")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--key", help="Name of the key that it is encrypted with: see `virtlun key`.")
@json_option
@click.pass_obj
@errors_as_sentences
def import_(socket: Path, file: Path, key: str | None, as_json: bool) -> None:
    """Load the lvstore on FILE, a file or block device, with all its volumes.

    For a disk that comes from another host, or after this target's state folder was lost. What was
    made or imported once comes back by itself when the target starts.
    """
    volumes = Volumes(client(socket))
    with busy(f"loading the lvstore on {file}"):
        found = volumes.import_lvstore(file, key)
    _show(volumes, [found], as_json)


@lvstore.command(short_help="Grow an lvstore, also while it is in use.")
@click.argument("lvstore", shell_complete=completion.lvstores)
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
    volumes = Volumes(client(socket))
    with busy(f"growing lvstore {lvstore}"):
        grown = volumes.resize_lvstore(lvstore, wanted)
    _show(volumes, [grown], as_json)


@lvstore.command(short_help="Give an lvstore the newest format, which has snapshots.")
@click.argument("lvstore", shell_complete=completion.lvstores)
@click.option(
    "--share-clusters",
    is_flag=True,
    help="Copies that guests order between volumes (EXTENDED COPY, ODX) move no data from then on.",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@click.pass_obj
@errors_as_sentences
def upgrade(socket: Path, lvstore: str, share_clusters: bool, yes: bool, as_json: bool) -> None:
    """Give LVSTORE, also while its volumes are in use, the newest version of its format.

    It has snapshots then. An older virtlun-target cannot load it any more: there is no way back.
    """
    volumes = Volumes(client(socket))
    present = volumes.lvstore(lvstore)
    if not yes:
        confirm(f"Upgrade {present.name}, so that older targets cannot load it?")
    upgraded = volumes.upgrade_lvstore(present.uuid, share_clusters=share_clusters)
    _show(volumes, [upgraded], as_json)


@lvstore.command(short_help="Look for metadata that has gone bad, and repair it.")
@click.argument("lvstore", required=False, shell_complete=completion.lvstores)
@click.option("--bdev", help="In place of LVSTORE: a bdev with one that is not loaded.")
@click.option("--repair", is_flag=True, help="Write anew what has gone bad.")
@json_option
@click.pass_obj
@errors_as_sentences
def check(socket: Path, lvstore: str | None, bdev: str | None, repair: bool, as_json: bool) -> None:
    """Compare the metadata of LVSTORE on its device with what the target knows, while it is in use.

    What has gone bad would show at the next start of the target, which would refuse the lvstore;
    until then --repair writes it anew, but for the maps of volumes in many pieces that nobody uses:
    the target has let go of these in memory. Of one that is refused --bdev tells all that is wrong;
    --repair writes a bad copy of its superblock anew, where that is all.
    The exit status is 1 where something is wrong and was not repaired.
    """
    if (lvstore is None) == (bdev is None):
        raise click.UsageError("give an LVSTORE, or --bdev")
    volumes = Volumes(client(socket))
    with busy(f"checking {lvstore or bdev}"):
        if lvstore is not None:
            found = volumes.check_lvstore(lvstore, repair=repair)
        else:
            found = volumes.check_bdev(str(bdev), repair=repair)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        empty = f"{found['pages']} pages of metadata are as they should be"
        show([{**each} for each in found["problems"]], PROBLEMS, as_json=False, empty=empty)
    if not all(each["repaired"] for each in found["problems"]):
        raise click.exceptions.Exit(1)


@lvstore.command(short_help="Show what is on the device, page by page.")
@click.argument("lvstore", required=False, shell_complete=completion.lvstores)
@click.option("--bdev", help="In place of LVSTORE: a bdev with one that is not loaded.")
@json_option
@click.pass_obj
@errors_as_sentences
def dump(socket: Path, lvstore: str | None, bdev: str | None, as_json: bool) -> None:
    """Show the superblock, the journal and the metadata of LVSTORE as they are on its device.

    For whoever looks for a fault: schemas/blobstore.md says what each field means. Nothing is
    written, and nothing is judged; `virtlun lvstore check` does that. What the journal has not
    brought to its place yet stands in its records alone. Where LVSTORE has checksums the first line
    says so, and places are on the bdev with checksums. --json prints one object a line.
    """
    if (lvstore is None) == (bdev is None):
        raise click.UsageError("give an LVSTORE, or --bdev")
    for entry in Volumes(client(socket)).dump(lvstore=lvstore, bdev=bdev):
        if as_json:
            click.echo(json.dumps(entry))
            continue
        facts = [f"{name}={text}" for name, text in entry["facts"].items()]
        problem = [f"({entry['problem']})"] if entry["problem"] else []
        click.echo(f"{entry['offset']:>14}  {entry['kind']:<10}  {' '.join(facts + problem)}")


@lvstore.command(short_help="Read all data, and tell what cannot be read.")
@click.argument("lvstore", shell_complete=completion.lvstores)
@click.option("--rate", type=click.IntRange(1), help="MiB that are read a second, at most.")
@json_option
@click.pass_obj
@errors_as_sentences
def scrub(socket: Path, lvstore: str, rate: int | None, as_json: bool) -> None:
    """Read what the volumes and snapshots of LVSTORE have, while they are used.

    A disk that cannot return some of it is found before a guest needs it. What is read is compared
    with its checksum where LVSTORE was made with --checksums, else with nothing. The exit status is
    1 where something cannot be read.
    """
    volumes = Volumes(client(socket))
    store = volumes.lvstore(lvstore)
    done, begun = 0, time.monotonic()
    rows: list[dict[str, object]] = []
    with bar(f"scrubbing {store.name}") as progress:
        for part in volumes.scrub(store.uuid):
            done += part["bytes"]
            progress(done, max(done, store.total - store.free))
            for each in part["unreadable"]:
                of = [{"volume": x["alias"], "at": x["offset"]} for x in each["lvols"]]
                row = {key: each[key] for key in ("offset", "length", "cause")}
                rows += [{**row, **x} for x in of or [{"volume": None, "at": None}]]
            if rate is not None:
                time.sleep(max(0.0, begun + done / (rate << 20) - time.monotonic()))
    checked = volumes.checksums(store) is not None
    empty = f"all {size(done)} of lvstore {store.name} can be read" + (
        ", and is what was written" if checked else ""
    )
    show(rows, UNREADABLE, as_json=as_json, empty=empty)
    if rows:
        raise click.exceptions.Exit(1)


@lvstore.command(short_help="Destroy an lvstore with all volumes in it.")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_obj
@errors_as_sentences
def delete(socket: Path, name: str, yes: bool) -> None:
    """Destroy the lvstore NAME with all volumes in it (a file stays, its content does not)."""
    volumes = Volumes(client(socket))
    count = len(volumes.volumes(volumes.lvstore(name).uuid))
    if not yes:
        confirm(f"Destroy lvstore {name} and its {count} volumes?")
    with busy(f"destroying lvstore {name}"):
        volumes.delete_lvstore(name)
    click.echo(f"lvstore {name} is destroyed")


def _show(volumes: Volumes, stores: list[Lvstore], as_json: bool) -> None:
    def other(store: Lvstore) -> str | None:
        return None if as_json else f"bdev {store.base_bdev}"

    def checksums(store: Lvstore) -> object:
        found = volumes.checksums(store)
        if as_json:
            return found
        if found is None:
            return "no"
        return f"{found['mismatches']} mismatches" if found["mismatches"] else "yes"

    def row(store: Lvstore) -> dict[str, object]:
        file = volumes.file_of(store) or other(store)
        return {**store.as_dict(), "file": file, "checksums": checksums(store)}

    show(
        [row(store) for store in stores],
        COLUMNS,
        as_json=as_json,
        empty="no lvstores: make one with `virtlun lvstore create NAME --file FILE --size SIZE`",
    )
