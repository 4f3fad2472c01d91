"""The VMs that run: which of them lose their disks when the target restarts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from plugin.cli import domains
from plugin.cli.doctor.finding import Finding
from plugin.config import Config
from pydataplane.domain.translate import PREFIX, Settings
from pydataplane.domain.xml import carrier as carriers
from pydataplane.domain.xml import view as views

WHAT = "running VMs"


def reconnecting(settings: Config) -> list[Finding]:
    """Says of each VM whose QEMU was not told to connect again, what has it do so; one line each.

    libvirtd itself is asked: the gateway shows nobody how QEMU was started.
    """
    try:
        texts = list(_running(settings.gateway.upstream))
    except click.ClickException as error:
        return [Finding(WHAT, "warning", f"not known: {error.message}", "run it as root")]
    return judged(texts, settings.settings())


def _running(socket: Path) -> Iterator[str]:
    """Yields libvirtd's XML of each domain that runs."""
    import libvirt  # noqa: PLC0415 (an optional extra: `connection` says so)

    with domains.connection(f"qemu+unix:///system?socket={socket}") as opened:
        for handle in opened.listAllDomains(libvirt.VIR_CONNECT_LIST_DOMAINS_ACTIVE):
            try:
                yield handle.XMLDesc(0)
            except libvirt.libvirtError as error:
                if error.get_error_code() != libvirt.VIR_ERR_NO_DOMAIN:  # it has just stopped
                    raise


def judged(texts: Iterable[str], settings: Settings) -> list[Finding]:
    """Returns what is to be said of running domains, of which libvirtd has this XML."""
    served = 0
    lost: list[Finding] = []
    for text in texts:
        view = views.parse(text) if PREFIX in text else None
        node = carriers.disk(view.domain) if view is not None else None
        source = node.child("source") if node is not None else None
        if view is None or source is None:
            continue
        served += 1
        if carriers.reconnect_s_of(source):
            continue
        why = f"{view.name} does not connect again: it loses its disks if the target restarts"
        lost.append(Finding(WHAT, "warning", why, _advice(view, settings)))
    safe = f"{served} with a virtlun controller, which connect again to a target that restarts"
    return lost or [Finding(WHAT, "ok", safe if served else "none with a virtlun controller")]


def _advice(view: views.View, settings: Settings) -> str:
    """Returns what has a VM connect again, once it was started without being told to."""
    again = "stop it and start it once through the gateway, or migrate it"
    if carriers.reconnect_s(view.domain, settings):
        return again
    if settings.reconnect_s == 0:
        return f"take reconnect_s = 0 out of virtlun.toml, restart the gateway, then {again}"
    return (
        f"its QEMU cannot: give it one of 8.2 or newer in <emulator>, then {again}; until then"
        " replace the target by `virtlun target upgrade` alone"
    )
