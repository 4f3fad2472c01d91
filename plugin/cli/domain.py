"""`virtlun domain`: which VMs use which volumes, and what becomes of a domain's XML."""

from __future__ import annotations

import json
import sys
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import click

from plugin.cli.domains import URI, connection, find, plan_of
from plugin.cli.output import client, config, errors_as_sentences, json_option, show, text
from pydataplane import emulator
from pydataplane.domain import translate
from pydataplane.domain.errors import TranslateError
from pydataplane.domain.model import FrontEnd, Plan
from pydataplane.domain.observed import disks_of
from pydataplane.domain.xml import view as views
from pydataplane.domain.xml.carrier import qemu_of
from pydataplane.errors import TargetError

COLUMNS = [
    ("DOMAIN", "domain", text),
    ("STATE", "state", text),
    ("DEV", "dev", text),
    ("VOLUME", "volume", text),
    ("TARGET", "target", text),
    ("AS", "as", text),
    ("SERVED", "served", lambda served: "unknown" if served is None else text(served)),
]

KINDS: dict[FrontEnd, str] = {"scsi": "LUN", "blk": "virtio-blk"}
"""What a disk is to its guest, for people."""

Served = dict[str, dict[int, list[str]]]
"""For each controller of the target, its target numbers with the names of their bdev."""


@click.group()
def domain() -> None:
    """VMs and their volumes."""


@domain.command("list", short_help="List the virtlun disks of all domains.")
@URI
@json_option
@click.pass_obj
@errors_as_sentences
def list_(socket: Path, uri: str, as_json: bool) -> None:
    """List the virtlun disks of all domains; SERVED says whether the target has the disk now.

    One without DEV is a disk that the domain's XML does not have, and that stays until that stops,
    or its guest lets it go.
    """
    served = _served(socket)
    with connection(uri) as opened:
        handles = opened.listAllDomains()
        rows = [row for handle in handles for row in _rows_if_there(handle, served)]
    show(rows, COLUMNS, as_json=as_json, empty="no domain has a virtlun disk")


@domain.command("show")
@click.argument("name")
@URI
@json_option
@click.pass_obj
@errors_as_sentences
def show_(socket: Path, name: str, uri: str, as_json: bool) -> None:
    """Show one domain's controller and disks."""
    with connection(uri) as opened:
        handle = find(opened, name)
        plan = plan_of(handle)
        rows = _rows(handle, _served(socket))
        shows_controller = translate.has_controller(handle.XMLDesc(0))  # a gateway does not
    if as_json:
        click.echo(json.dumps({"plan": _as_json(plan), "disks": rows}, indent=2))
        return
    if plan is None:
        click.echo(
            f"{name} has no virtlun disk; `virtlun domain prepare {name}` readies it for one"
        )
        return
    if plan.has_scsi:
        click.echo(f"controller  {plan.controller}\nsocket      {plan.socket}")
    else:
        click.echo(f"controllers {plan.controller}.TARGET\nsockets     {plan.socket}.TARGET")
    click.echo(f"queues      {plan.num_queues}")
    if plan.protection and shows_controller:
        click.echo("protection  carried by the guest, where a LUN has it")
    click.echo()
    show(rows, COLUMNS[2:], as_json=False, empty="no virtlun disks")


def _as_json(plan: Plan | None) -> dict[str, Any] | None:
    """Returns a plan as programs get it."""
    if plan is None:
        return None
    found = asdict(plan)
    for lun in found["luns"]:
        if lun["volume"]["source"] is None:
            del lun["volume"]["source"]
    return {**found, "cpus": sorted(sorted(each) for each in plan.cpus)}


@domain.command("prepare", short_help="Let a VM have disks attached while it runs.")
@click.argument("name")
@URI
@click.pass_obj
@errors_as_sentences
def prepare(socket: Path, name: str, uri: str) -> None:
    """Mark the domain NAME as one that is to have a controller, and say when it has one.

    It gets it at its next start through the gateway, and at each further one, if a target answers
    then, and its machine has PCI and room on it; without one it starts all the same, and the
    gateway's log says why. A domain with a virtlun disk has one anyway.
    """
    import libvirt  # noqa: PLC0415 (an optional extra: only these commands need it)

    with connection(uri, read_only=False) as opened:
        handle = find(opened, name)
        try:
            if not handle.isPersistent():
                raise click.ClickException(
                    f"domain {name} is transient and has no next start: create it again, through a"
                    ' gateway with controllers = "all"'
                )
            if not _is_marked(handle):
                _check_memory(handle)
                handle.setMetadata(
                    libvirt.VIR_DOMAIN_METADATA_ELEMENT,
                    translate.mark(handle.UUIDString()),
                    translate.PREFIX,
                    translate.NAMESPACE,
                    libvirt.VIR_DOMAIN_AFFECT_CONFIG,
                )
            running, uuid_text = bool(handle.isActive()), handle.UUIDString()
            plan, lacks_scsi = plan_of(handle), _lacks_scsi(handle)
        except libvirt.libvirtError as error:
            raise click.ClickException(f"domain {name}: {error}") from error
    if plan is not None and not plan.has_scsi:
        click.echo(
            f"{name} has virtio-blk disks alone: more of them (bus='virtio') can be attached while"
            " it runs; it gets a controller with its first LUN (bus='scsi'), attached with --config"
        )
    elif lacks_scsi:
        click.echo(
            f"{name}'s QEMU has no vhost-user-scsi: from its next start through the gateway its"
            " memory is shared, and virtio-blk disks can be attached while it runs"
        )
    elif not running:
        click.echo(f"{name} gets a controller at its next start through the gateway")
    elif _is_connected(socket, translate.controller_name(uuid_text)):
        click.echo(f"{name} runs with a controller: disks can be attached now")
    else:
        click.echo(
            f"{name} runs without a controller: restart needed; shut it down and start it through"
            " the gateway"
        )


def _lacks_scsi(handle: Any) -> bool:
    """Whether a domain's QEMU is known to have no vhost-user-scsi."""
    view = views.parse(handle.XMLDesc(0))
    return view is not None and emulator.lacks_scsi(*qemu_of(view.domain))


def _check_memory(handle: Any) -> None:
    """Refuses a domain whose definition says that its memory is not to be shared."""
    import libvirt  # noqa: PLC0415 (as above)

    try:
        translate.check_memory(handle.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE))
    except TranslateError as error:
        raise click.ClickException(f"domain {handle.name()}: {error}") from error


def _is_marked(handle: Any) -> bool:
    """Whether libvirtd itself says that the definition has metadata of ours; a gateway never does.

    What is there is not to be replaced: it may have disks.
    """
    import libvirt  # noqa: PLC0415 (as above)

    kind, side = libvirt.VIR_DOMAIN_METADATA_ELEMENT, libvirt.VIR_DOMAIN_AFFECT_CONFIG
    try:
        handle.metadata(kind, translate.NAMESPACE, side)
    except libvirt.libvirtError as error:
        if error.get_error_code() != libvirt.VIR_ERR_NO_DOMAIN_METADATA:
            raise
        return False
    return True


def _is_connected(socket: Path, controller: str) -> bool:
    """Whether the target has this controller with a QEMU connected; False if it does not tell."""
    try:
        found = client(socket).call("vhost_get_controllers")
    except TargetError:
        return False
    return any(item["ctrlr"] == controller and item["sessions"] for item in found)


@domain.command("translate", short_help="Print what libvirtd would get of a domain's XML.")
@click.argument("file", type=click.File("r"))
@click.option("--plan", "only_plan", is_flag=True, help="Print the plan as JSON instead of XML.")
@errors_as_sentences
def translate_(file: IO[str], only_plan: bool) -> None:
    """Print what libvirtd would get of the domain XML in FILE (- for stdin). Changes nothing."""
    xml = file.read()
    try:
        definition = translate.define(xml, config().settings(), new_uuid=uuid.uuid4())
    except TranslateError as error:
        raise click.ClickException(str(error)) from error
    if only_plan:
        plan = definition.plan
        click.echo(json.dumps(_as_json(plan), indent=2))
    else:
        sys.stdout.write(definition.xml)


def _rows_if_there(handle: Any, served: Served | None) -> list[dict[str, Any]]:
    """Returns a domain's rows; none for one that is gone since it was listed."""
    import libvirt  # noqa: PLC0415 (as above)

    try:
        return _rows(handle, served)
    except libvirt.libvirtError as error:
        if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
            return []
        raise click.ClickException(f"domain {handle.name()}: {error}") from error


def _served(socket: Path) -> Served | None:
    """Returns what the target serves; None, with a word about it, if the target does not tell."""
    target = client(socket)
    try:
        names = {
            item["name"]: [*item["aliases"], item["name"]] for item in target.call("bdev_get_bdevs")
        }
        return {
            controller["ctrlr"]: {
                number: names.get(disk.bdev, [disk.bdev])
                for number, disk in disks_of(controller).items()
            }
            for controller in target.call("vhost_get_controllers")
        }
    except TargetError as error:
        click.echo(f"Warning: what the target serves is not known: {error}", err=True)
        return None


def _rows(handle: Any, served: Served | None) -> list[dict[str, Any]]:
    plan = plan_of(handle)
    if plan is None:
        return []
    here = _here(plan, served or {})
    found = {name: (number, front) for number, front, names in here for name in names}
    of_domain = {
        "domain": handle.name(),
        "uuid": handle.UUIDString(),
        "state": "running" if handle.isActive() else "shut off",
    }
    rows = [
        {
            **of_domain,
            "dev": lun.dev,
            "volume": lun.volume.alias,
            "target": found.get(name, (lun.target, lun.front))[0],
            "as": KINDS[found.get(name, (lun.target, lun.front))[1]],
            "served": None if served is None else name in found,
        }
        for lun in plan.luns
        for name in (lun.volume.alias if lun.volume.source is None else lun.bdev_name,)
    ]
    own = {(row["target"], row["as"]) for row in rows if row["served"]}
    more = [
        {
            **of_domain,
            "dev": None,
            "volume": names[0],
            "target": number,
            "as": KINDS[front],
            "served": True,
        }
        for number, front, names in here
        if (number, KINDS[front]) not in own
    ]
    return [*rows, *more]


def _here(plan: translate.Plan, served: Served) -> list[tuple[int, FrontEnd, list[str]]]:
    """Returns number, front end and bdev's names of each disk that the target shows to a domain."""
    found: list[tuple[int, FrontEnd, list[str]]] = []
    for controller, disks in sorted(served.items()):
        own, _, number = controller.partition(".")
        if own != plan.controller:
            continue
        for target, names in sorted(disks.items()):
            if number:
                found.append((int(number), "blk", names))
            else:
                found.append((target, "scsi", names))
    return found
