"""`virtlun pool`: pools of Ceph as stores of volumes, beside the lvstores."""

from __future__ import annotations

from pathlib import Path

import click

from plugin.cli.output import busy, client, errors_as_sentences, json_option, show, size, text
from pydataplane.lvstores import Lvstore
from pydataplane.volumes import Volumes

COLUMNS = [
    ("NAME", "name", text),
    ("KIND", "kind", text),
    ("SIZE", "total", lambda value: size(value) if value else "-"),
    ("FREE", "free", lambda value: size(value) if value else "-"),
    ("ON", "on", text),
    ("UUID", "uuid", text),
]


@click.group()
def pool() -> None:
    """Pools of Ceph whose images are volumes, beside the lvstores."""


@pool.command("list")
@json_option
@click.pass_obj
@errors_as_sentences
def list_(socket: Path, as_json: bool) -> None:
    """List pools and lvstores, their size and what is free."""
    volumes = Volumes(client(socket))
    _show(volumes, volumes.lvstores(), as_json)


@pool.command(short_help="Have the images of a pool of Ceph as volumes.")
@click.argument("name")
@click.option("--rbd", "rbd", metavar="POOL", required=True, help="The pool of Ceph.")
@click.option(
    "--conf",
    type=click.Path(path_type=Path),
    help="Configuration of the cluster; by default /etc/ceph/ceph.conf.",
)
@click.option("--user", metavar="NAME", help="User of Ceph, without client.; by default admin.")
@click.option(
    "--keyring",
    type=click.Path(path_type=Path),
    help="File with the user's key; by default where Ceph looks for it.",
)
@click.option("--namespace", metavar="NAME", help="Only what is in this namespace of the pool.")
@click.option(
    "--block-size", type=click.Choice(["512", "4096"]), help="Bytes of a block; by default 512."
)
@json_option
@click.pass_obj
@errors_as_sentences
def add(
    socket: Path,
    name: str,
    rbd: str,
    conf: Path | None,
    user: str | None,
    keyring: Path | None,
    namespace: str | None,
    block_size: str | None,
    as_json: bool,
) -> None:
    """Have the images of a pool of Ceph as volumes NAME/IMAGE, those that are there and new ones.

    The target's user has to be able to read the files. Needs a target that was started with --rbd.
    """
    volumes = Volumes(client(socket))
    with busy(f"connecting to the cluster of pool {rbd}"):
        added = volumes.add_pool(
            name,
            f"{rbd}/{namespace}" if namespace else rbd,
            conf=conf.absolute() if conf else None,
            user=user,
            keyring=keyring.absolute() if keyring else None,
            block_size=int(block_size) if block_size else None,
        )
    _show(volumes, [added], as_json)


@pool.command()
@click.argument("name")
@click.pass_obj
@errors_as_sentences
def remove(socket: Path, name: str) -> None:
    """Have the images of the pool NAME as volumes no more: they stay.

    Refused while one is in use.
    """
    Volumes(client(socket)).remove_pool(name)
    click.echo(f"pool {name} is removed; its images stay")


def _show(volumes: Volumes, stores: list[Lvstore], as_json: bool) -> None:
    def on(store: Lvstore) -> str:
        return volumes.file_of(store) or store.base_bdev

    show(
        [{**store.as_dict(), "on": on(store)} for store in stores],
        COLUMNS,
        as_json=as_json,
        empty="no pools: add one of Ceph with `virtlun pool add NAME --rbd POOL`, or make an "
        "lvstore with `virtlun lvstore create NAME --file FILE --size SIZE`",
    )
