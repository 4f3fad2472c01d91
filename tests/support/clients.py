"""The clients, servers and suites of others that tests run, each in the version that is tried.

A run of tests prints those that are there; docs/pages/reference/clients.md has the table.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from dataclasses import dataclass

from tests.support import prometheus
from tests.support.cache import ROOT


@dataclass(frozen=True)
class Client:
    """One program or library."""

    name: str
    package: str
    """Of Debian; or, where `file` says so, of Python."""
    version: str
    """Upstream's."""
    tests: tuple[str, ...]
    """Files and folders below tests/."""
    pinned: str = ""
    """The file below tests/ that pins it, where it has an environment of its own."""
    python: bool = False
    """It is one of the environment that tests run in."""
    updated: bool = False
    """Debian's updates bring newer ones: `version` is the first number of the oldest of them."""


CLIENTS = (
    Client("virsh, libvirtd", "libvirt-daemon-system", "9.0.0", ("libvirt",)),
    Client("QEMU", "qemu-system-x86", "7.2", ("guest", "libvirt")),
    Client(
        "libvirt-python",
        "libvirt-python",
        "12.8.0",
        ("libvirt/test_pool_programs.py",),
        python=True,
    ),
    Client(
        "virt-install, virt-clone, virt-xml",
        "virtinst",
        "4.1.0",
        ("libvirt/test_pool_programs.py", "libvirt/test_cockpit_create.py"),
    ),
    Client(
        "go-libvirt, as of Terraform's provider",
        "github.com/digitalocean/go-libvirt",
        "0.0.0-20261013170128",
        ("libvirt/test_go_client.py",),
        "libvirt/go_client/go.mod",
    ),
    Client(
        "libvirtxml (Go)",
        "libvirt.org/go/libvirtxml",
        "1.12008.0",
        ("libvirt/test_go_client.py",),
        "libvirt/go_client/go.mod",
    ),
    Client("virt-manager", "virt-manager", "4.1.0", ("libvirt/test_virt_manager.py",)),
    Client("Cockpit", "cockpit-ws", "287.1", ("libvirt/test_cockpit.py", "guest/test_cockpit.py")),
    Client(
        "cockpit-machines",
        "cockpit-machines",
        "288",
        ("libvirt/test_cockpit.py", "libvirt/test_cockpit_create.py"),
    ),
    Client("libvirt-dbus", "libvirt-dbus", "1.4.1", ("libvirt/test_cockpit.py",)),
    Client(
        "Chromium",
        "chromium",
        "156",
        ("libvirt/test_cockpit.py", "guest/test_cockpit.py"),
        updated=True,
    ),
    Client("SPDK's Python client", "spdk", "26.9", ("target/test_spdk_rpc.py",), python=True),
    Client(
        "Nova",
        "nova",
        "34.0.0",
        ("openstack/test_nova.py", "openstack/test_nova_compute.py"),
        "openstack/requirements.in",
    ),
    Client("Cinder", "cinder", "29.0.0", ("openstack/test_cinder.py",), "openstack/cinder.in"),
    Client("os-brick", "os-brick", "7.1.1", ("openstack/test_cinder.py",), "openstack/cinder.lock"),
    Client("RabbitMQ", "rabbitmq-server", "3.10.8", ("openstack/test_nova_compute.py",)),
    Client("PostgreSQL", "postgresql", "15", ("openstack/test_nova_compute.py",)),
    Client(
        "Keystone", "keystone", "30.0.0", ("openstack/test_tempest.py",), "openstack/services.in"
    ),
    Client("Glance", "glance", "33.0.0", ("openstack/test_tempest.py",), "openstack/services.in"),
    Client("Tempest", "tempest", "47.0.0", ("openstack/test_tempest.py",), "openstack/tempest.in"),
    Client(
        "cinder-tempest-plugin",
        "cinder-tempest-plugin",
        "1.23.0",
        ("openstack/test_tempest.py",),
        "openstack/tempest.in",
    ),
    Client("Ceph", "ceph-common", "16.2.15", ("target/test_rbd.py", "libvirt/test_ceph.py")),
    Client("tgt (iSCSI)", "tgt", "1.0.85", ("target/test_iscsi.py",)),
    Client("nbdkit", "nbdkit", "1.32.5", ("target/test_nbd.py",)),
    Client("libiscsi's suite", "libiscsi-bin", "1.19.0", ("guest/test_conformance.py",)),
    Client("sg3_utils", "sg3-utils", "1.46", ("guest/test_programs.py",)),
    Client("Prometheus", "prometheus", "2.42.0", ("target/test_prometheus.py",)),
    Client(
        "Grafana's SDK (Go)",
        "github.com/grafana/grafana-foundation-sdk/go",
        "0.0.22",
        ("target/test_grafana.py",),
        "target/grafana/go.mod",
    ),
    Client(
        "Prometheus' client library",
        "prometheus_client",
        "0.26.0",
        ("target/test_prometheus.py",),
        python=True,
    ),
)


def there() -> dict[str, str]:
    """Returns the upstream versions that this machine has, by the name of the package."""
    debian = [each.package for each in CLIENTS if not each.python and not each.pinned]
    asked = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Package} ${Version} ${db:Status-Status}\\n", *debian],
        capture_output=True,
        text=True,
        check=False,
    )
    found = {
        words[0]: re.sub(r"^\d+:|[+-].*$", "", words[1])
        for line in asked.stdout.splitlines()
        if (words := line.split())[-1] == "installed"
    }
    if unpacked := prometheus.version():
        found["prometheus"] = unpacked
    for each in CLIENTS:
        if each.pinned:
            text = (ROOT / "tests" / each.pinned).read_text()
            pin = re.search(
                rf"^\t?{re.escape(each.package)}(?:==| v)([^\s-]+(?:-[\d.]+)?)", text, re.M
            )
            assert pin is not None, f"{each.pinned} does not pin {each.package}"
            found[each.package] = pin[1]
        elif each.python:
            try:
                found[each.package] = importlib.metadata.version(each.package)
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def line() -> str:
    """Returns what a run of tests prints."""
    found = there()
    said = [f"{each.name} {found.get(each.package, '(not installed)')}" for each in CLIENTS]
    return f"of others: {'; '.join(said)}"
