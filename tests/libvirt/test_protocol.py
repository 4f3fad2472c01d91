"""What else is in libvirt's protocol, with libvirt's own client: descriptors, keepalive, size."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import libvirt
import pytest

from tests.support.host import Host

pytestmark = [pytest.mark.root]

NAME = "proto"
DOMAIN = (
    f"<domain type='qemu'><name>{NAME}</name><memory unit='MiB'>64</memory>"
    "<os><type arch='x86_64' machine='q35'>hvm</type></os>"
    "<devices><graphics type='vnc' autoport='yes' listen='127.0.0.1'/></devices></domain>"
)


@pytest.fixture(scope="module")
def domain(host: Host) -> Iterator[Any]:
    """A running domain with a screen, by libvirt-python through the gateway."""
    libvirt.registerErrorHandler(lambda _context, _error: None, None)
    connection = libvirt.open(host.uri)
    made = connection.defineXML(DOMAIN)
    made.create()
    yield made
    made.destroy()
    made.undefine()
    connection.close()


def test_descriptors_from_the_client_reach_libvirtd(domain: Any) -> None:
    ends = os.pipe()
    try:
        domain.FDAssociate("pipe", list(ends), 0)
        with pytest.raises(libvirt.libvirtError):
            domain.FDAssociate("", list(ends), 99)
    finally:
        for end in ends:
            os.close(end)
    assert domain.isActive()


def test_descriptors_from_libvirtd_reach_the_client(domain: Any) -> None:
    descriptor = domain.openGraphicsFD(0, libvirt.VIR_DOMAIN_OPEN_GRAPHICS_SKIPAUTH)
    with socket.socket(fileno=descriptor) as screen:
        screen.settimeout(90)
        assert screen.recv(12).startswith(b"RFB ")


def test_keepalive_is_answered(host: Host) -> None:
    done = subprocess.run(
        # --loop: an event of the test before must not end it
        f"virsh -k 1 -K 2 -c {host.uri} event --all --loop --timeout 5".split(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "event loop timed out" in done.stdout + done.stderr


def test_a_megabyte_of_metadata_goes_both_ways(domain: Any) -> None:
    big = "<x>" + "0123456789abcdef" * 65536 + "</x>"
    kind, flags = libvirt.VIR_DOMAIN_METADATA_ELEMENT, libvirt.VIR_DOMAIN_AFFECT_CONFIG
    domain.setMetadata(kind, big, "big", "https://example.org/big", flags)
    xml = domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE)
    assert len(xml) > 1 << 20
    assert "vhostuser" not in xml
    assert domain.connect().defineXML(xml).UUIDString() == domain.UUIDString()
    assert domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE) == xml
    domain.setMetadata(kind, None, "big", "https://example.org/big", flags)


def test_ten_calls_at_a_time_on_one_connection(host: Host, domain: Any) -> None:
    """libvirt's client interleaves the calls of its threads on one socket."""
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415

    connection = libvirt.open(host.uri)
    mine = connection.lookupByName(NAME)
    with ThreadPoolExecutor(10) as pool:
        texts = set(pool.map(lambda _: mine.XMLDesc(), range(200)))
        names = set(pool.map(lambda _: connection.lookupByName(NAME).name(), range(200)))
    assert len(texts) == 1 and names == {NAME}
    connection.close()


@pytest.mark.usefixtures("domain")
def test_the_command_line_that_libvirt_would_use_has_the_controller(host: Host) -> None:
    text = host.virsh("domxml-to-native", "qemu-argv", "--domain", NAME)
    assert "vhost-user-scsi-pci" in text
