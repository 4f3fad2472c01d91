"""`virtlun bdev`: what lvstores and volumes are on, for the day on which it fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from plugin.cli.output import (
    busy,
    client,
    confirm,
    errors_as_sentences,
    json_option,
    show,
    size,
    text,
)
from pydataplane import methods

DRIVERS = ("aio", "uring")
"""Kinds of bdevs on files and block devices, as bdev_get_bdevs names them."""

COLUMNS = [
    ("NAME", "name", text),
    ("SIZE", "size", size),
    ("ON", "file", text),
    ("USED BY", "used_by", text),
    ("FLUSH ERROR", "flush_error", text),
]


@click.group()
def bdev() -> None:
    """Files and block devices that volumes are on."""


@bdev.command("list", short_help="List files and block devices, and whose flush failed.")
@json_option
@click.pass_obj
@errors_as_sentences
def list_(socket: Path, as_json: bool) -> None:
    """List the target's files and block devices, and whether a flush of one failed."""
    found = [_row(each) for each in client(socket).call("bdev_get_bdevs") if _file(each)]
    show(
        found,
        COLUMNS,
        as_json=as_json,
        empty="no files or block devices: `virtlun lvstore create` brings one",
    )


@bdev.command("clear-flush-error", short_help="Let a disk be flushed again after that failed.")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@click.pass_obj
@errors_as_sentences
def clear_flush_error(socket: Path, name: str, yes: bool, as_json: bool) -> None:
    """Let the file or block device that NAME is on be flushed again, after a flush of it failed.

    NAME is that of the bdev, or of a volume on it, such as lvs0/data.

    Data that was acknowledged before the failure may be lost, and nobody can tell which. So each
    FLUSH on that disk fails, also after restarts of the target, until a person has seen to it:
    mend the disk, clear the failure with this command, then check what is on its volumes (fsck, the
    database's own check), or restore it from a backup. From here on guests take the disk for
    sound.

    A stopped lvstore on it is loaded anew, in use. Where the disk still cannot be flushed nothing
    is cleared.
    """
    target = client(socket)
    (found,) = target.call("bdev_get_bdevs", name=name)
    error = found.get("flush_error")
    if error and not yes:
        confirm(f"{name}: {error}.\nIs the disk mended, and may guests take it for sound?")
    with busy(f"flushing what {name} is on"):
        cleared = target.call("virtlun_bdev_clear_flush_error", name=name)
    if as_json:
        click.echo(json.dumps({"name": name, "cleared": cleared, "flush_error": error}))
    elif cleared and not error:
        click.echo(f"the lvstore on {name} was loaded anew and takes changes again")
    elif cleared:
        click.echo(f"{name} can be flushed again: check what is on it, some of it may be lost")
    else:
        click.echo(f"{name} had no flush error: nothing is changed")


def _file(found: methods.Bdev) -> str | None:
    """Returns the file or block device of a bdev; None: it is of another kind."""
    for driver in DRIVERS:
        if specific := found["driver_specific"].get(driver):
            return str(specific["filename"])
    return None


def _row(found: methods.Bdev) -> dict[str, Any]:
    return {
        "name": found["name"],
        "size": found["num_blocks"] * found["block_size"],
        "file": _file(found),
        "used_by": ", ".join(found.get("claimed_by", [])),
        "flush_error": found.get("flush_error"),
    }
