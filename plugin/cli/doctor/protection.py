"""Protection information that guests are to carry: whether QEMU lets them, and who runs without."""

from __future__ import annotations

from collections.abc import Iterable

import click

from plugin.cli.doctor import guests
from plugin.cli.doctor.finding import Finding
from plugin.config import Config
from pydataplane import emulator
from pydataplane.domain.names import PREFIX
from pydataplane.domain.translate import Settings
from pydataplane.domain.xml import carrier as carriers
from pydataplane.domain.xml import view as views

WHAT = "protection information"


def carried(settings: Config) -> list[Finding]:
    """Returns what is to be said where guests are to carry it; of another configuration nothing.

    A domain may name another QEMU; the one that libvirt takes by itself is looked at.
    """
    if not settings.disks.protection:
        return []
    if emulator.protects(None, None) is not True:
        return [
            Finding(
                WHAT,
                "warning",
                "VMs start without it: this QEMU is not known to have vhost-user-scsi's property"
                " t10_pi",
                "use QEMU 7.2 or newer, or take protection out of [disks] of virtlun.toml",
            )
        ]
    try:
        return judged(guests.running(settings.gateway.upstream), settings.settings())
    except click.ClickException:
        return []  # the line of the running VMs says so


def judged(texts: Iterable[str], settings: Settings) -> list[Finding]:
    """Returns what is to be said of running domains, of which libvirtd has this XML."""
    found = []
    for text in texts:
        view = views.parse(text) if PREFIX in text else None
        carrier = view.carrier if view is not None else None
        if view is None or carrier is None or carrier.protection:
            continue
        if not carriers.protection(view.domain, settings):
            why = "whose QEMU is not known to have the property t10_pi"
            advice = "name QEMU 7.2 or newer in its <emulator>"
        else:
            why = "as it was started before that was configured, or past the gateway"
            advice = "stop it and start it through the gateway"
        found.append(Finding(WHAT, "warning", f"{view.name} runs without it, {why}", advice))
    return found or [Finding(WHAT, "ok", "VMs carry it to LUNs that have it")]
