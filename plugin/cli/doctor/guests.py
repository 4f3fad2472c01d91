"""The VMs that run: which of them lose their disks when the target restarts."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from pathlib import Path, PurePath

import click

from plugin.cli import domains
from plugin.cli.doctor.finding import Finding
from plugin.config import Config
from pydataplane.domain.translate import PREFIX, Settings
from pydataplane.domain.xml import carrier as carriers
from pydataplane.domain.xml import view as views
from pydataplane.domain.xml.document import Node

WHAT = "running VMs"


def reconnecting(settings: Config, kept: Container[str]) -> list[Finding]:
    """Says of each VM whose QEMU was not told to connect again, what has it do so; one line each.

    `kept` are controllers to which it need not, as their connections outlive the target. libvirtd
    itself is asked: the gateway shows nobody how QEMU was started.
    """
    try:
        texts = list(running(settings.gateway.upstream))
    except click.ClickException as error:
        return [Finding(WHAT, "warning", f"not known: {error.message}", "run it as root")]
    return judged(texts, settings.settings(), kept)


def running(socket: Path) -> Iterator[str]:
    """Yields libvirtd's XML of each domain that runs."""
    import libvirt  # noqa: PLC0415 (an optional extra: `connection` says so)

    with domains.connection(f"qemu+unix:///system?socket={socket}") as opened:
        for handle in opened.listAllDomains(libvirt.VIR_CONNECT_LIST_DOMAINS_ACTIVE):
            try:
                yield handle.XMLDesc(0)
            except libvirt.libvirtError as error:
                if error.get_error_code() != libvirt.VIR_ERR_NO_DOMAIN:  # it has just stopped
                    raise


def judged(texts: Iterable[str], settings: Settings, kept: Container[str] = ()) -> list[Finding]:
    """Returns what is to be said of running domains, of which libvirtd has this XML.

    `kept` as of `reconnecting`.
    """
    served = 0
    lost: list[Finding] = []
    for text in texts:
        view = views.parse(text) if PREFIX in text else None
        nodes = view.own_nodes() if view is not None and view.element is not None else []
        if view is None or not nodes:
            continue
        served += 1
        once = [node for node in nodes if not _goes_on(node, kept)]
        if not once:
            continue
        what = "disks" if len(once) == len(nodes) else "LUNs"
        why = f"{view.name} does not connect again: it loses its {what} if the target restarts"
        lost.append(Finding(WHAT, "warning", why, _advice(view, settings)))
    safe = f"{served} with a virtlun controller, to which the target may restart"
    return lost or [Finding(WHAT, "ok", safe if served else "none with a virtlun controller")]


def _goes_on(device: Node, kept: Container[str]) -> bool:
    """Whether QEMU was told to connect again to the controller of a device, or need not."""
    source = device.child("source")
    if source is None:
        return False
    # A socket has the name of its controller.
    controller = PurePath(source.attrs.get("path") or "").name
    return carriers.reconnect_s_of(source) > 0 or controller in kept


def _advice(view: views.View, settings: Settings) -> str:
    """Returns what has a VM connect again, once it was started without being told to."""
    again = "stop it and start it once through the gateway, or migrate it"
    if carriers.reconnect_s(view.domain, settings):
        return again
    if settings.reconnect_s == 0:
        return f"take reconnect_s = 0 out of virtlun.toml, restart the gateway, then {again}"
    return (
        "start the target with --hold-sessions (`virtlun target upgrade -- --hold-sessions`), as"
        " its QEMU cannot: that takes 8.2 or newer in <emulator>, or disks with bus='virtio'"
    )
