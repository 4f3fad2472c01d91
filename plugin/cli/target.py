"""`virtlun target`: the polling process of this host."""

from __future__ import annotations

import grp
import json
import os
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from plugin import qemu_user
from plugin.cli import io_errors
from plugin.cli.output import (
    address,
    busy,
    client,
    config,
    confirm,
    errors_as_sentences,
    json_option,
    show,
    text,
)
from plugin.targets import TargetAddress, addresses
from pydataplane import inherited, supervise
from pydataplane.domain.names import domain_controller
from pydataplane.domain.observed import observe
from pydataplane.errors import TargetError, TargetForbidden, TargetUnavailable
from pydataplane.sockets import name_of
from pydataplane.volumes import Volumes

SOCKET_GROUP = "--socket-group"
HOLD_SESSIONS = "--hold-sessions"
RBD = "--rbd"
ISCSI = "--iscsi"
NETWORK = "--network"


@click.group()
def target() -> None:
    """The polling process that serves the volumes."""


@target.command(short_help="Start the target in the background, unless it runs.")
@click.option(
    SOCKET_GROUP,
    help="Group that may open controller sockets.  [default: that of libvirt's QEMU]",
)
@click.option("--vhost-dir", type=click.Path(path_type=Path), help="Where controller sockets go.")
@click.option(
    "--state-dir", type=click.Path(path_type=Path), help="Where its configuration is kept."
)
@click.option("--log", type=click.Path(path_type=Path), help="Log file.")
@click.option(RBD, is_flag=True, help="Serve images of Ceph, as rbd = true of [target] has it.")
@click.option(
    ISCSI, is_flag=True, help="Serve LUNs of iSCSI targets, as iscsi = true of [target] has it."
)
@click.option(
    NETWORK,
    is_flag=True,
    help="Let it make network connections, as network = true of [target] has it.",
)
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[-- TARGET-OPTION...]")
@json_option
@click.pass_obj
@errors_as_sentences
def start(
    socket: Path,
    socket_group: str | None,
    vhost_dir: Path | None,
    state_dir: Path | None,
    log: Path | None,
    rbd: bool,
    iscsi: bool,
    network: bool,
    options: tuple[str, ...],
    as_json: bool,
) -> None:
    """Start the target in the background, unless it runs.

    What stands after `--` goes to virtlun-target (see its --help), and --hold-sessions does in any
    case: started by root, VMs wait while it is away, whatever their QEMU. It comes back as it was:
    what was configured is kept in the state folder. On a host with systemd use examples/systemd
    instead. One that runs already is left as it is, and what it lacks of the options is told.
    """
    section = config().target
    asked = {
        RBD: rbd or section.rbd,
        ISCSI: iscsi or section.iscsi,
        NETWORK: network or section.network,
    }
    options = (*(name for name, on in asked.items() if on and name not in options), *options)
    given = (*((SOCKET_GROUP, socket_group) if socket_group else ()), *options)
    group = socket_group or _group_of_qemu()
    if group and not any(option.startswith(SOCKET_GROUP) for option in options):
        options = (SOCKET_GROUP, group, *options)
    if HOLD_SESSIONS not in options:
        options = (HOLD_SESSIONS, *options)
    packaged = supervise.TargetPaths.of(address().name)
    paths = supervise.TargetPaths(
        rpc_socket=socket,
        vhost_dir=vhost_dir or address().vhost_dir,
        state_dir=state_dir or packaged.state_dir,
        log=log or packaged.log,
        name=address().name,
    )
    ran = _pid(socket)
    with busy("starting the target"):
        pid = supervise.start(paths, options)
    if pid == ran and (left := _left_out(socket, pid, given)):
        shown = shlex.join(left)
        upgrade_command = f"virtlun{_named(socket)} target upgrade -- {shown}"
        click.echo(
            f"the target ran already, without {shown}: `{upgrade_command}` adds it", err=True
        )
    if as_json:
        click.echo(json.dumps({"pid": pid, "rpc_socket": str(socket)}))
    else:
        click.echo(f"the target runs: pid {pid}, RPC socket {socket}")


def _pid(socket: Path) -> int | None:
    with suppress(TargetError):
        return int(supervise.status(socket)["pid"])
    return None


def _named(socket: Path) -> str:
    name = name_of(socket)
    return f" --target {name}" if name else ""


def _left_out(socket: Path, pid: int, given: tuple[str, ...]) -> list[str]:
    """Returns those of the `given` options that the target lacks; all where nobody knows."""
    try:
        running = inherited.options(socket, pid)
    except (TargetError, OSError):
        running = []
    return inherited.unused(running, given)


@target.command(short_help="Show whether the target runs, and how busy it is.")
@json_option
@click.pass_obj
@errors_as_sentences
def status(socket: Path, as_json: bool) -> None:
    """Show whether the target runs, its reactors, and what it could not restore."""
    found = supervise.status(socket)
    held = io_errors.rows(client(socket))
    if as_json:
        click.echo(json.dumps({**found, "suspended": held}, indent=2))
        return
    click.echo(f"version  {found['version']}\npid      {found['pid']}")
    click.echo(f"uptime   {float(found['uptime_s']):.0f} s")
    if taken := found.get("upgrade"):
        click.echo(f"upgrade  from pid {taken['from_pid']}; VMs waited {taken['pause_ms']:.0f} ms")
    if "user" in found:
        click.echo(f"user     {found['user']['name']}")
        click.echo(f"sandbox  {found['sandbox']}")
    for reactor in found["reactors"]:
        total = reactor["busy_ns"] + reactor["idle_ns"] + reactor["sleep_ns"]
        busy = 100 * reactor["busy_ns"] / max(total, 1)
        cpu = "any CPU" if reactor["cpu"] is None else f"CPU {reactor['cpu']}"
        click.echo(f"reactor  {reactor['index']} on {cpu}, {busy:.1f} % busy")
    for problem in (*found["restore_problems"], *found.get("flush_errors", [])):
        click.echo(f"problem  {problem}")
    for sentence in io_errors.sentences(held):
        click.echo(f"problem  {sentence}: see `virtlun domain errors`")
    for wait in found.get("waiting", []):
        since = float(wait["since_s"])
        click.echo(f"waiting  {wait['name']} for {wait['waits_for']}, since {since:.0f} s")


@target.command(short_help="Replace the target's program; VMs only notice a pause.")
@click.option("--log", type=click.Path(path_type=Path), help="Log file.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[-- TARGET-OPTION...]")
@json_option
@click.pass_obj
@errors_as_sentences
def upgrade(socket: Path, log: Path | None, options: tuple[str, ...], as_json: bool) -> None:
    """Start the program that is installed now in place of the one that runs.

    VMs keep their connections and notice a pause, which is told. The new program gets the options
    of the old one, of which those after `--` replace the ones of the same name. If it does not come
    up, the old one serves on. A systemd service is upgraded by `systemctl reload`, which does the
    same within it.
    """
    # Within a service, the journal is where this command writes, too.
    in_service = "INVOCATION_ID" in os.environ
    packaged = supervise.TargetPaths.of(address().name).log
    log = log or (None if in_service or not packaged.exists() else packaged)
    with busy("upgrading the target"):
        found = supervise.upgrade(socket, options, log)
    taken = found["upgrade"]
    assert taken is not None, "one that was started to take over says so"
    if as_json:
        click.echo(json.dumps({"pid": found["pid"], **taken}))
    else:
        click.echo(
            f"version {found['version']} runs: pid {found['pid']} took over from pid "
            f"{taken['from_pid']}; VMs waited {taken['pause_ms']:.0f} ms"
        )


@target.command(short_help="Stop the target in order.")
@click.option("--yes", is_flag=True, help="Do not ask, even if VMs use it.")
@click.pass_obj
@errors_as_sentences
def stop(socket: Path, yes: bool) -> None:
    """Stop the target in order: volumes are flushed.

    VMs that use it wait for its return. If it runs without --hold-sessions, those with QEMU before
    8.2 wait in vain, and have to be stopped and started. One that does not run is no error.
    """
    try:
        supervise.status(socket)
    except TargetForbidden:
        raise
    except TargetUnavailable:
        click.echo(f"no target runs on {socket}: nothing to stop")
        return
    users = len({domain_controller(name) for name in observe(client(socket)).connected})
    if users and not yes:
        confirm(f"VMs that use the target: {users}; they do no I/O until it is back. Stop it?")
    with busy("stopping the target"):
        supervise.stop(socket)
    click.echo("the target has stopped")


@target.command("list", short_help="List the targets of this host.")
@json_option
@errors_as_sentences
def list_(as_json: bool) -> None:
    """List the targets of this host with their lvstores: configured ones, and those that run."""
    show([_row(at) for at in addresses(config())], COLUMNS, as_json=as_json, empty="no targets")


def _row(at: TargetAddress) -> dict[str, Any]:
    """Returns what is known of one target."""
    row: dict[str, Any] = {"name": at.label, "pid": None, "user": None, "lvstores": []}
    row |= {"rpc_socket": str(at.rpc_socket), "vhost_dir": str(at.vhost_dir), "problem": None}
    try:
        found = supervise.status(at.rpc_socket)
        row |= {"pid": found["pid"], "user": found.get("user", {}).get("name")}
        row["lvstores"] = [store.name for store in Volumes(client(at.rpc_socket)).lvstores()]
    except TargetError as error:
        row["problem"] = str(error)
    return row


COLUMNS = [
    ("NAME", "name", text),
    ("PID", "pid", text),
    ("USER", "user", text),
    ("LVSTORES", "lvstores", " ".join),
    ("SOCKET", "rpc_socket", text),
    ("PROBLEM", "problem", text),
]


def _group_of_qemu() -> str | None:
    """Returns the group to which sockets are given; None if only root can give it, or none is."""
    if os.geteuid() == 0:
        for user in qemu_user.NAMES:
            with suppress(KeyError):
                return grp.getgrgid(qemu_user.entry(user).pw_gid).gr_name
    return None
