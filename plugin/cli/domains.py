"""libvirt's domains, for the commands that ask for them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import click

from plugin.cli.output import busy, config
from plugin.moves.naming import Domains
from pydataplane.domain import translate
from pydataplane.domain.errors import TranslateError
from pydataplane.domain.xml.network import PROTOCOLS

URI = click.option(
    "--connect",
    "uri",
    envvar="LIBVIRT_DEFAULT_URI",
    show_envvar=True,
    default="qemu:///system",
    show_default=True,
    help="libvirt URI: libvirtd's own or the gateway's.",
)


@contextmanager
def connection(uri: str, *, read_only: bool = True) -> Iterator[Any]:
    """Opens libvirt at a URI; what fails there is one sentence."""
    try:
        import libvirt  # noqa: PLC0415 (an optional extra: only these commands need it)
    except ImportError as error:
        raise click.ClickException(
            "libvirt-python is not installed: pip install 'virtlun[libvirt]'"
        ) from error
    libvirt.registerErrorHandler(lambda _context, _error: None, None)
    try:
        with busy(f"asking libvirt at {uri}"):
            opened = libvirt.openReadOnly(uri) if read_only else libvirt.open(uri)
    except libvirt.libvirtError as error:
        raise click.ClickException(f"libvirt at {uri}: {error}") from error
    try:
        yield opened
    except libvirt.libvirtError as error:
        raise click.ClickException(f"libvirt at {uri}: {error}") from error
    finally:
        opened.close()


def gateway_domains(stack: ExitStack, uri: str | None) -> Domains | None:
    """Returns the gateway's domains; None: it does not run, or there is no libvirt here.

    Raises:
        click.ClickException: the URI that was named does not answer.
    """
    listen = config().gateway.listen
    if uri is None and not listen.exists():
        return None
    named = uri or f"qemu+unix:///system?socket={listen}"
    return Domains(stack.enter_context(connection(named, read_only=False)), config().settings())


def find(opened: Any, name: str) -> Any:
    """Returns libvirt's handle of a domain by name or UUID."""
    for handle in opened.listAllDomains():
        if name in (handle.name(), handle.UUIDString()):
            return handle
    raise click.ClickException(f"there is no domain {name}: see `virsh list --all`")


def plan_of(handle: Any) -> translate.Plan | None:
    """Returns the domain's plan; through a gateway, the one that its XML would be given."""
    xml = handle.XMLDesc(0)
    own = uuid.UUID(handle.UUIDString())
    try:
        if (plan := translate.plan(xml)) is not None:
            return plan
        # What it asks for it may have from a host that allows more.
        settings = replace(config().settings(), on_request=PROTOCOLS)
        return translate.define(xml, settings, new_uuid=own).plan
    except TranslateError as error:
        raise click.ClickException(f"domain {handle.name()}: {error}") from error
