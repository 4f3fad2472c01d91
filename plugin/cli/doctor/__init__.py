"""`virtlun doctor`: what on this host works, what does not, and what to do about it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from plugin.cli import remote
from plugin.cli.doctor import (
    arrays,
    guests,
    libvirt,
    machine,
    protection,
    reservations,
    rights,
    target,
)
from plugin.cli.doctor.finding import Finding
from plugin.cli.output import address, busy, config, console, json_option
from plugin.config import Config

STYLES = {"ok": "green", "warning": "yellow", "failed": "red"}
INDENT = " " * 9


@click.command(short_help="Check what on this host works, and say what to do.")
@json_option
@click.pass_obj
def doctor(socket: Path, as_json: bool) -> None:
    """Check this host: KVM, QEMU, libvirt, memory, permissions, target and gateway.

    `failed` is what a VM's disk needs, `warning` what some uses need. The exit status is 1 if
    something failed.
    """
    out = console()
    findings: list[Finding] = []
    for what, check in examinations(socket, config(), address().vhost_dir):
        with busy(f"looking at {what}"):
            found = check()
        several = [found] if isinstance(found, Finding) else found
        findings += several
        if not as_json:
            for finding in several:
                _print(finding, out)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    if any(finding.state == "failed" for finding in findings):
        raise SystemExit(1)


def _print(finding: Finding, out: Console) -> None:
    mark = Text(finding.state.ljust(len(INDENT)), style=STYLES[finding.state])
    out.print(mark + Text(f"{finding.what}: {finding.found}", style="none"), soft_wrap=True)
    if finding.advice:
        out.print(Text(INDENT + finding.advice, style="dim"), soft_wrap=True)


def examinations(
    socket: Path, settings: Config, vhost_dir: Path
) -> list[tuple[str, Callable[[], Finding | Sequence[Finding]]]]:
    """Returns a check for each thing that the way from virsh to a guest's disk stands on."""
    return [
        ("the user", machine.user),
        ("KVM", machine.kvm),
        (
            "QEMU",
            lambda: libvirt.qemu(settings.disks.reconnect_s, held=target.holds_sessions(socket)),
        ),
        ("disks' front end", lambda: libvirt.front_ends(settings.disks.front_end)),
        ("libvirt", libvirt.libvirt),
        ("libvirtd", lambda: libvirt.libvirtd(settings.gateway.upstream)),
        (
            "remote clients",
            lambda: libvirt.remote_clients(
                settings.gateway.listen,
                remote.listening(remote.ports(settings.gateway.libvirtd_conf, libvirt.UNITS)),
            ),
        ),
        ("authentication", lambda: libvirt.authentication(settings)),
        ("libvirt's users", lambda: libvirt.admission(settings)),
        ("io_uring", machine.io_uring),
        ("shared memory", machine.shared_memory),
        ("huge pages", machine.huge_pages),
        ("permissions", lambda: libvirt.permissions(vhost_dir)),
        ("AppArmor", lambda: libvirt.apparmor(vhost_dir)),
        ("pods' block devices", machine.pods_block_devices),
        ("target", lambda: target.target(socket)),
        ("pods' new devices", lambda: target.host_devices(socket)),
        ("the target's rights", lambda: rights.target(socket)),
        ("the holder's rights", lambda: rights.holder(socket)),
        ("the helper's rights", rights.helper),
        ("lvstores", lambda: target.lvstores(socket)),
        ("checksums", lambda: target.checksums(socket)),
        ("reservations", lambda: reservations.records(socket)),
        ("images of Ceph", lambda: target.images(socket, settings)),
        ("LUNs of iSCSI targets", lambda: arrays.luns(socket, settings)),
        ("NVMe namespaces", lambda: arrays.namespaces(socket)),
        ("NBD servers", lambda: target.nbd_servers(socket, settings)),
        ("autostart", libvirt.autostart),
        ("gateway", lambda: libvirt.gateway(settings.gateway.listen)),
        ("hook", libvirt.hook),
        (
            "running VMs",
            lambda: guests.reconnecting(settings, target.kept_controllers(socket)),
        ),
        ("protection information", lambda: protection.carried(settings)),
    ]
