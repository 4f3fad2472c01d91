"""`virtlun pool`: pools of Ceph, and of arrays, as stores of volumes, beside the lvstores."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path
from typing import TextIO

import click

from plugin.cli.output import busy, client, errors_as_sentences, json_option, show, size, text
from pydataplane import initiator
from pydataplane.domain import portals
from pydataplane.lvstores import NVME_PORT, Lvstore
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
    """Pools of Ceph or of arrays as stores of volumes."""


@pool.command("list")
@json_option
@click.pass_obj
@errors_as_sentences
def list_(socket: Path, as_json: bool) -> None:
    """List pools and lvstores, their size and what is free."""
    volumes = Volumes(client(socket))
    _show(volumes, volumes.lvstores(), as_json)


@pool.command(short_help="Have the images of a pool of Ceph, or an array's disks, as volumes.")
@click.argument("name")
@click.option("--rbd", "rbd", metavar="POOL", help="The pool of Ceph.")
@click.option("--iscsi", "iscsi", metavar="HOST[:PORT],TARGET", help="The iSCSI target.")
@click.option(
    "--nvme-tcp",
    "nvme_tcp",
    metavar="ADDRESS[:PORT]",
    multiple=True,
    help="A path to the NVMe subsystem, by IP address; several times for several paths.",
)
@click.option("--subnqn", metavar="NQN", help="Name of the NVMe subsystem.")
@click.option(
    "--hostnqn",
    metavar="NQN",
    help="Name of this host to the NVMe subsystem; by default one made of the machine's ID.",
)
@click.option(
    "--conf",
    type=click.Path(path_type=Path),
    help="Configuration of the cluster; by default /etc/ceph/ceph.conf.",
)
@click.option(
    "--user",
    metavar="NAME",
    help="User of Ceph, without client., by default admin; of iSCSI that of CHAP, by default none.",
)
@click.option(
    "--password-file",
    type=click.File(),
    help="File whose first line is the password of CHAP; - for standard input.",
)
@click.option(
    "--initiator",
    "initiator_iqn",
    metavar="IQN",
    help=f"Name of this host to the iSCSI target; by default that of {initiator.NAME_FILE}, or one "
    "made of the machine's ID.",
)
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
    rbd: str | None,
    iscsi: str | None,
    nvme_tcp: tuple[str, ...],
    subnqn: str | None,
    hostnqn: str | None,
    conf: Path | None,
    user: str | None,
    password_file: TextIO | None,
    initiator_iqn: str | None,
    keyring: Path | None,
    namespace: str | None,
    block_size: str | None,
    as_json: bool,
) -> None:
    """Have the images of a pool of Ceph as volumes NAME/IMAGE, those that are there and new ones.

    The target's user has to be able to read the files. Needs a target that was started with --rbd.

    With --iscsi, the LUNs of an iSCSI target as volumes NAME/lun-NUMBER: the array makes, grows and
    deletes them. Needs a target that was started with --iscsi, which keeps the password in a file
    that only its user and root can read.

    With --nvme-tcp, the namespaces of an NVMe subsystem as volumes NAME/uuid.UUID, or NAME/eui. and
    their NGUID or EUI-64: the array makes, grows and deletes them. I/O goes by the first path that
    is optimized (ANA), else not optimized. Needs a target that was started with --network.
    """
    if (rbd is not None) + (iscsi is not None) + bool(nvme_tcp) != 1:
        raise click.UsageError("give one of --rbd, --iscsi and --nvme-tcp")
    of_ceph, of_iscsi = (conf, keyring, namespace, block_size), (password_file, initiator_iqn)
    of_nvme = (subnqn, hostnqn)
    of_others = (
        *(of_ceph if rbd is None else ()),
        *(of_iscsi if iscsi is None else ()),
        *(of_nvme if not nvme_tcp else (user,)),
    )
    if any(each is not None for each in of_others):
        raise click.UsageError(
            "--conf, --keyring, --namespace and --block-size are of --rbd; --password-file and"
            " --initiator of --iscsi; --user of both; --subnqn and --hostnqn of --nvme-tcp"
        )
    volumes = Volumes(client(socket))
    if nvme_tcp:
        if subnqn is None:
            raise click.UsageError("give --subnqn with --nvme-tcp")
        paths = [_path(each) for each in nvme_tcp]
        with busy(f"connecting to {subnqn}"):
            namespaces = volumes.add_namespaces(name, paths, subnqn, hostnqn)
        _show(volumes, [namespaces], as_json)
        return
    if iscsi is not None:
        portal, _, target = iscsi.partition(",")
        if (user is None) != (password_file is None):
            raise click.UsageError("give --user and --password-file together")
        login = None
        if user is not None and password_file is not None:
            login = user, password_file.readline().rstrip("\r\n")
        with busy(f"logging in to {target} at {portal}"):
            luns = volumes.add_luns(
                name, portal, target, initiator_iqn or initiator.own_name(), login
            )
        _show(volumes, [luns], as_json)
        return
    assert rbd is not None
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
    """Let go of the pool NAME, whose images, LUNs or namespaces stay.

    Refused while one is in use.
    """
    Volumes(client(socket)).remove_pool(name)
    click.echo(f"pool {name} is removed; what it has stays")


def _path(text: str) -> tuple[str, int]:
    """Returns the IP address and port of a path; UsageError if they are none."""
    host, port = portals.split(text, NVME_PORT)
    try:
        address = ip_address(host)
    except ValueError:
        raise click.UsageError(
            f"--nvme-tcp is an IP address, as 10.0.0.1, 10.0.0.1:4421 or [fd00::1]:4420, not {text}"
        ) from None
    return str(address), port


def _show(volumes: Volumes, stores: list[Lvstore], as_json: bool) -> None:
    def on(store: Lvstore) -> str:
        return volumes.file_of(store) or store.base_bdev

    show(
        [{**store.as_dict(), "on": on(store)} for store in stores],
        COLUMNS,
        as_json=as_json,
        empty="no pools: add one with `virtlun pool add NAME --rbd POOL`, `--iscsi` or "
        "`--nvme-tcp`, or make an lvstore with "
        "`virtlun lvstore create NAME --file FILE --size SIZE`",
    )
