"""`virtlun domain errors` and `retry`: VMs that wait because an I/O of a disk failed."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from plugin.cli.domains import URI, connection, find, plan_of
from plugin.cli.output import client, errors_as_sentences, json_option, show, text
from pydataplane.client import Client
from pydataplane.domain import translate
from pydataplane.domain.names import domain_controller
from pydataplane.suspendedrequests import suspended

REASONS = {
    "no_space": "no space left",
    "read_medium": "a read failed",
    "write_medium": "a write failed",
    "resources": "the host is short of memory",
}
"""What a person is told, for the target's words."""


def is_blk(controller: str) -> bool:
    """Whether a controller's name is that of a virtio-blk disk of a domain's."""
    return domain_controller(controller) != controller


def _reason(error: str) -> str:
    return REASONS.get(error, error)


COLUMNS = [
    ("DOMAIN", "domain", text),
    ("DEV", "dev", text),
    ("VOLUME", "volume", text),
    ("LUN", "target", text),
    ("WHY", "error", _reason),
    ("SINCE", "since", lambda since: datetime.fromtimestamp(since).isoformat(" ", "seconds")),
    ("CONTROLLER", "controller", text),
]


def rows(target: Client) -> list[dict[str, Any]]:
    """Returns what waits, by controller; `domain` and `dev` are None: only libvirt knows them.

    Raises:
        TargetError: the target does not answer, or refuses.
    """
    waiting = suspended(target)
    if not waiting:
        return []
    aliases = {bdev["name"]: bdev["aliases"] for bdev in target.call("bdev_get_bdevs")}
    return [
        {
            "domain": None,
            "dev": None,
            "volume": next(iter(aliases.get(each["bdev_name"], [])), each["bdev_name"]),
            "target": None if is_blk(each["ctrlr"]) else each["scsi_target_num"],
            "error": each["error"],
            "since": each["since"],
            "controller": each["ctrlr"],
        }
        for each in waiting
    ]


def sentences(waiting: Iterable[dict[str, Any]]) -> list[str]:
    """Returns a few words on each of what `rows` returns."""
    return [
        f"I/O of {row['controller']} on {row['volume']} waits: {_reason(row['error'])}"
        for row in waiting
    ]


@click.command("errors", short_help="List disks whose I/O waits because it failed.")
@URI
@json_option
@click.pass_obj
@errors_as_sentences
def errors(socket: Path, uri: str, as_json: bool) -> None:
    """List disks whose I/O failed and waits, as their error_policy and rerror_policy have it.

    Make room, or mend what is under the volume; then `virtlun domain retry` has the VM go on. WHY
    is no_space, read_medium, write_medium or resources in JSON, and SINCE in seconds since the
    epoch.
    """
    waiting = rows(client(socket))
    if waiting:
        try:
            with connection(uri) as opened:
                _name(waiting, opened.listAllDomains())
        except click.ClickException as error:
            click.echo(f"Warning: the domains' names are not known: {error}", err=True)
    show(waiting, COLUMNS, as_json=as_json, empty="no I/O waits because of an error")


def _name(waiting: list[dict[str, Any]], handles: Iterable[Any]) -> None:
    """Fills in domains and their devs."""
    import libvirt  # noqa: PLC0415 (an optional extra: only these commands need it)

    for handle in handles:
        controller = translate.controller_name(handle.UUIDString())
        own = [row for row in waiting if domain_controller(row["controller"]) == controller]
        if not own:
            continue
        try:
            plan = plan_of(handle)
        except libvirt.libvirtError as error:
            if error.get_error_code() != libvirt.VIR_ERR_NO_DOMAIN:  # else it just went
                raise
            continue
        luns = plan.luns if plan else ()
        devs = {name: lun.dev for lun in luns for name in (lun.volume.alias, lun.bdev_name)}
        for row in own:
            row |= {"domain": handle.name(), "dev": devs.get(row["volume"])}


@click.command("retry", short_help="Have a VM try again what failed and waits.")
@click.argument("name")
@URI
@click.pass_obj
@errors_as_sentences
def retry(socket: Path, name: str, uri: str) -> None:
    """Have the domain NAME try again what failed and waits, as `virtlun domain errors` shows.

    A paused domain is resumed, as by `virsh resume`: its guest sends again what waited. What fails
    again waits again.
    """
    import libvirt  # noqa: PLC0415 (an optional extra: only these commands need it)

    target = client(socket)
    with connection(uri, read_only=False) as opened:
        handle = find(opened, name)
        own = translate.controller_name(handle.UUIDString())
        names = {each["ctrlr"] for each in suspended(target)}
        waits = sorted(name for name in names if domain_controller(name) == own)
        state, reason = handle.state()
        if state == libvirt.VIR_DOMAIN_PAUSED and (
            waits or reason == libvirt.VIR_DOMAIN_PAUSED_IOERROR
        ):
            handle.resume()
            click.echo(f"{name} is resumed and tries again")
        elif waits:
            disks = sum(target.call("virtlun_vhost_resume", ctrlr=name) for name in waits)
            click.echo(f"{name} tries again: {disks} disk{'' if disks == 1 else 's'}")
        else:
            click.echo(f"no I/O of {name} waits because of an error: nothing to try again")
