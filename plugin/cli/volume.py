"""`virtlun volume`: logical volumes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from uuid import UUID

import click

from plugin.cli import completion
from plugin.cli.output import (
    busy,
    client,
    confirm,
    copying_client,
    errors_as_sentences,
    followed,
    json_option,
    show,
    size,
    text,
)
from pydataplane.errors import VolumeError
from pydataplane.lvols import Space, Volume
from pydataplane.volumenames import parse_size
from pydataplane.volumes import Volumes

COLUMNS = [
    ("VOLUME", "path", text),
    ("SIZE", "size", size),
    ("ALLOCATED", "allocated", size),
    ("THIN", "thin", text),
    ("SHARED", "shared", lambda value: "-" if value is None else size(value)),
    ("EXCLUSIVE", "exclusive", lambda value: "-" if value is None else size(value)),
    ("OF", "of", text),
    ("KEY", "key", text),
    ("DIF", "dif_type", text),
    ("STATE", "problem", lambda value: value or "ok"),
    ("UUID", "uuid", text),
    ("SHA-256", "sha256", text),
]


@click.group()
def volume() -> None:
    """Volumes, written LVSTORE/NAME, or POOL/NAME of a pool.

    Attach one with `virsh attach-disk VM /dev/virtlun/LVSTORE/NAME sdb`.
    """


@volume.command("list")
@click.argument("lvstore", required=False, shell_complete=completion.lvstores)
@json_option
@click.pass_obj
@errors_as_sentences
def list_(socket: Path, lvstore: str | None, as_json: bool) -> None:
    """List all volumes, or those of one LVSTORE."""
    volumes = Volumes(client(socket))
    if lvstore is not None:
        volumes.lvstore(lvstore)
    found = volumes.volumes(lvstore)
    space = volumes.spaces(found) if any(item.snapshot for item in found) else {}
    every = sorted((*found, *volumes.degraded(lvstore)), key=lambda item: item.path)
    images = volumes.bdev_names(item.external for item in every if item.external is not None)
    shown(every, as_json, space, images)


@volume.command(short_help="Make a volume, such as lvs0/data of 10G.")
@click.argument("volume", shell_complete=completion.lvstores)
@click.argument("size_text", metavar="SIZE")
@click.option("--thin", is_flag=True, help="Allocate clusters when they are first written.")
@click.option("--uuid", type=click.UUID, help="In place of a lost volume of this UUID.")
@click.option("--key", metavar="NAME", help="Encrypt it with this key: see `virtlun key`.")
@click.option(
    "--dif-type",
    type=click.Choice(["1", "3"]),
    help="Keep T10 protection information of this type beside its blocks.",
)
@json_option
@click.pass_obj
@errors_as_sentences
def create(
    socket: Path,
    volume: str,
    size_text: str,
    thin: bool,
    uuid: UUID | None,
    key: str | None,
    dif_type: str | None,
    as_json: bool,
) -> None:
    """Make VOLUME (LVSTORE/NAME) of SIZE, such as 10G; it reads as zeros.

    With --key its data lies encrypted, and that of its snapshots and clones. With --dif-type they
    have eight bytes beside each block, in clusters beside those of SIZE. A volume of a pool of Ceph
    is thin in any case.
    """
    wanted = parse_size(size_text)
    volumes = Volumes(client(socket))
    made = followed(
        f"making {volume}",
        lambda: Volumes(copying_client(socket)).create(
            volume,
            wanted,
            thin=thin,
            uuid=str(uuid) if uuid else None,
            key=key,
            dif_type=int(dif_type) if dif_type else None,
        ),
        lambda: volumes.zeroed(volume),
    )
    # One that was there already and is not what was asked for.
    if uuid is not None and made.uuid != str(uuid):
        raise VolumeError(
            f"volume {made.path} exists already, with the UUID {made.uuid}: rename that one first "
            f"to make the one of UUID {uuid}"
        )
    if made.thin != thin and not volumes.lvstore(made.lvstore).is_pool:
        raise VolumeError(
            f"volume {made.path} exists already, and is {'thin' if made.thin else 'thick'}: "
            "use it as it is, or choose another name"
        )
    shown([made], as_json)


@volume.command(short_help="Give a volume another size, also while it is in use.")
@click.argument("volume", shell_complete=completion.volumes)
@click.argument("size_text", metavar="SIZE")
@click.option("--shrink", is_flag=True, help="Allow a smaller size: data beyond it is lost.")
@json_option
@click.pass_obj
@errors_as_sentences
def resize(socket: Path, volume: str, size_text: str, shrink: bool, as_json: bool) -> None:
    """Give VOLUME another SIZE, also while a VM uses it: the guest is told at once."""
    volumes = Volumes(client(socket))
    present, wanted = volumes.volume(volume), parse_size(size_text)
    if wanted < present.size and not shrink:
        raise VolumeError(
            f"volume {volume} has {present.size} bytes, {wanted} are fewer: "
            "add --shrink if the data beyond may be lost"
        )
    resized = followed(
        f"resizing {volume}",
        lambda: Volumes(copying_client(socket)).resize(volume, wanted),
        lambda: volumes.zeroed(present.path),
    )
    shown([resized], as_json)


@volume.command(short_help="Take a snapshot of a volume, or of several at one instant.")
@click.argument(
    "volumes",
    metavar="VOLUME...",
    nargs=-1,
    required=True,
    shell_complete=completion.volumes,
)
@click.argument("name")
@click.option("--unused", is_flag=True, help="Only if nobody uses any VOLUME: it is the last word.")
@json_option
@click.pass_obj
@errors_as_sentences
def snapshot(
    socket: Path, volumes: tuple[str, ...], name: str, unused: bool, as_json: bool
) -> None:
    """Take a snapshot of VOLUME, VOLUME@NAME, also while a VM uses it.

    It holds what was written until then, durably. Of several VOLUMEs of one lvstore all are taken
    at one instant, or none.
    """
    on_target = Volumes(client(socket))
    if unused:
        _check_unused(on_target, volumes)
        _check_new(on_target, volumes, name)
    with busy("taking snapshots"):
        taken = on_target.snapshot(volumes, name)
    if unused:
        _check_unused(on_target, volumes, f"; {name} may lack what it has written: delete it")
    shown(taken, as_json)


def _check_unused(volumes: Volumes, references: tuple[str, ...], then: str = "") -> None:
    for each in references:
        if users := volumes.users(each):
            raise VolumeError(f"volume {each} is in use ({', '.join(users)}){then}")


def _check_new(volumes: Volumes, references: tuple[str, ...], name: str) -> None:
    """Refuses a snapshot that is there, as it is of before."""
    of = [volumes.volume(each).path for each in references]
    there = volumes.some(f"{each}@{name}" for each in of)
    for each in there.values():
        raise VolumeError(f"{each.path} is there already: choose another name, or delete it")


@volume.command(short_help="Make a volume that begins as a snapshot, or a bdev, is.")
@click.argument("source", metavar="SNAPSHOT|BDEV", shell_complete=completion.volumes)
@click.argument("name")
@json_option
@click.pass_obj
@errors_as_sentences
def clone(socket: Path, source: str, name: str, as_json: bool) -> None:
    """Make the volume NAME beside SNAPSHOT: it reads as that, and takes room as it is written.

    With LVSTORE/NAME it begins as any BDEV of the target, such as a read-only image file, or a
    snapshot of another lvstore. Nobody may write to that as long as the volume needs it.
    """
    volumes = Volumes(client(socket))
    elsewhere = "/" in name
    shown([volumes.clone_bdev(source, name) if elsewhere else volumes.clone(source, name)], as_json)


@volume.command(short_help="Give a volume the contents of one of its snapshots again.")
@click.argument("volume", shell_complete=completion.volumes)
@click.argument("snapshot_name", metavar="SNAPSHOT")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@click.pass_obj
@errors_as_sentences
def rollback(socket: Path, volume: str, snapshot_name: str, yes: bool, as_json: bool) -> None:
    """Have VOLUME read as its SNAPSHOT again (LVSTORE/NAME, or what follows the @).

    What was written since is lost. One that a VM uses is refused: stop that first.
    """
    volumes = Volumes(client(socket))
    present = volumes.volume(volume)
    if not yes:
        confirm(f"Roll {present.path} back to {snapshot_name}?")
    back = followed(
        f"rolling {present.path} back",
        lambda: Volumes(copying_client(socket)).roll_back(present.uuid, snapshot_name),
        lambda: volumes.zeroed(present.path),
    )
    shown([back], as_json)


@volume.command(short_help="Give a volume all its clusters, so that it needs no snapshot.")
@click.argument("volume", shell_complete=completion.volumes)
@json_option
@click.pass_obj
@errors_as_sentences
def inflate(socket: Path, volume: str, as_json: bool) -> None:
    """Give VOLUME clusters of its own for all of its size, also while a VM uses it."""
    volumes = Volumes(client(socket))

    def has() -> tuple[int, int]:
        present = volumes.volume(volume)
        return present.allocated, present.size

    inflated = followed(
        f"copying to {volume} what it lacks",
        lambda: Volumes(copying_client(socket)).inflate(volume),
        has,
    )
    shown([inflated], as_json)


@volume.command()
@click.argument("volume", shell_complete=completion.volumes)
@click.argument("name")
@json_option
@click.pass_obj
@errors_as_sentences
def rename(socket: Path, volume: str, name: str, as_json: bool) -> None:
    """Rename VOLUME to NAME within its lvstore."""
    shown([Volumes(client(socket)).rename(volume, name)], as_json)


@volume.command(short_help="Delete a volume and its data.")
@click.argument("volume", shell_complete=completion.volumes)
@click.option("--snapshots", is_flag=True, help="With all its snapshots, VOLUME@NAME.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_obj
@errors_as_sentences
def delete(socket: Path, volume: str, snapshots: bool, yes: bool) -> None:
    """Delete VOLUME and its data; one that a VM uses is refused, and so is a snapshot with clones.

    The one clone of a snapshot takes over what it needs of it.
    """
    volumes = Volumes(client(socket))
    present = volumes.deletable(volume)
    all_of_it = [present, *(volumes.snapshots(present) if snapshots else ())]
    if not yes:
        with_it = f" and {len(all_of_it) - 1} snapshots" if snapshots else ""
        confirm(f"Delete {present.path} ({size(present.size)}){with_it}?")
    for each in all_of_it:
        _delete(socket, volumes, each)


def _delete(socket: Path, volumes: Volumes, present: Volume) -> None:
    followed(
        f"deleting {present.path}",
        lambda: Volumes(copying_client(socket)).delete(present.uuid),
        lambda: volumes.zeroed(present.path),
    )
    click.echo(f"volume {present.path} is deleted")


def shown(
    found: list[Volume],
    as_json: bool,
    space: Mapping[str, Space] | None = None,
    images: Mapping[str, str] | None = None,
    sha256: str | None = None,
) -> None:
    """Prints volumes, with what they share where that is known.

    `images` has the names of bdevs outside of an lvstore, by UUID; `sha256` is of what one holds.
    """
    rows = [{"path": item.path, **item.as_dict()} for item in found]
    encrypted = any(item.key for item in found)
    protected = any(item.dif_type for item in found)
    of_luns = any(item.problem for item in found)
    for row in rows:
        external = row["external"]
        if external is not None and not as_json:
            name = (images or {}).get(external, external)
            row["of"] = f"bdev {name}" + (", which is missing" if row["degraded"] else "")
        elif not as_json:
            missing = row["degraded"] and not row["key"]
            row["of"] = row["parent"] or ("what is missing" if missing else "-")
        if not as_json:
            waits = row["degraded"] and row["key"]
            row["key"] = f"{row['key'] or '-'}" + (", which is missing" if waits else "")
        known = space.get(row["uuid"]) if space else None
        row.update(known._asdict() if known else {})
        if sha256 is not None:
            row["sha256"] = sha256
    show(
        rows,
        [
            column
            for column in COLUMNS
            if (space or column[1] not in Space._fields)
            and (encrypted or column[1] != "key")
            and (protected or column[1] != "dif_type")
            and (of_luns or column[1] != "problem")
            and (sha256 or column[1] != "sha256")
        ],
        as_json=as_json,
        empty="no volumes: make one with `virtlun volume create LVSTORE/NAME SIZE`",
    )
